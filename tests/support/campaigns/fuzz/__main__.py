"""Throw damaged input at every parser, and see that each ends in a result or in a refusal that says what to do.

    python tests/support/campaigns/fuzz --minutes 10                      all parsers in turn
    python tests/support/campaigns/fuzz --minutes 60 --parser pickle      one of them; --list names them
    python tests/support/campaigns/fuzz --replay fuzz-findings/pickle-0a1b2c3d

Inputs are made from small sound checkpoints by mutating bytes, or values inside a JSON or pickle tree. One that leads
to something new (another error, raised in another line, with another text) is kept and mutated further. What ends
otherwise than it should (another exception, a refusal without a mend, more than SECONDS, more memory than MEMORY) is
saved under --out, named after its content.

tests/system/fuzz runs the same for a few seconds with a fixed seed.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # tests/

from campaigns.fuzz.loop import fuzz, make_sound, try_input  # noqa: E402
from campaigns.fuzz.parsers import PARSERS  # noqa: E402

MEMORY = 3 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description="Throw damaged input at the parsers.")
    parser.add_argument("--minutes", type=float, default=1, help="for all parsers together (default: 1)")
    parser.add_argument("--parser", choices=PARSERS, action="append", help="only this one; may be given again")
    parser.add_argument("--seed", type=int, help="of the random numbers; default: another one each time")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="folder for findings")
    parser.add_argument("--replay", type=Path, help="parse a saved finding, and show what comes of it")
    parser.add_argument("--list", action="store_true", help="name the parsers")
    options = parser.parse_args()
    if options.list:
        print("\n".join(PARSERS))
        return
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory(prefix="llmtailor-fuzz-") as folder:
        sound = make_sound(Path(folder))
        if options.replay:
            name = options.replay.name.rpartition("-")[0].replace("_", " ")
            print(*try_input(PARSERS[name], options.replay.read_bytes(), sound), sep="\n")
            return
        failed = False
        names = options.parser or list(PARSERS)
        seed = options.seed if options.seed is not None else random.randrange(2**32)
        for name in names:
            until = time.monotonic() + 60 * options.minutes / len(names)
            tally = fuzz(name, sound, random.Random(seed), lambda _, until=until: time.monotonic() < until)  # type: ignore[misc]
            print(f"{name}: {tally}, {len(tally.findings or ())} findings (seed {seed})", flush=True)
            for data, what in {what: (data, what) for data, what in tally.findings or ()}.values():
                options.out.mkdir(exist_ok=True)
                path = options.out / f"{name.replace(' ', '_')}-{hashlib.sha256(data).hexdigest()[:8]}"
                path.write_bytes(data)
                print(f"--- {path}\n{what}")
                failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
