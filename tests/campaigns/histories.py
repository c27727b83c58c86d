"""Do to runs' folders whatever people do, in random order, and print counts.

    python tests/campaigns/histories.py --runs 100
    python tests/campaigns/histories.py --first 4711 --runs 1 --moves 40

Saves, crashes, rollbacks, merges, thinning, collecting, salvage, rotation, copies: after each of them no composite may
mix attempts of the run, and what was promised must still be there. The truth is in the bytes: every element says which
attempt made it, and at which step (tests/attempts/world.py). The first history that goes wrong ends the campaign.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TQDM_DISABLE", "1")

from attempts.campaign import EVERYTHING, play  # noqa: E402
from attempts.world import World  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="how many histories")
    parser.add_argument("--moves", type=int, default=24, help="of each")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first one")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.runs):
        root = Path(tempfile.mkdtemp(prefix="llmtailor-histories-"))
        world = World(root / "run", seed)
        try:
            play(world, options.moves, EVERYTHING)
        except AssertionError as error:
            print(f"history {seed} went wrong, in {root}:\n{error}")
            return 1
        counts.update(world.counts)
        shutil.rmtree(root)
    print(f"{options.runs} histories: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
