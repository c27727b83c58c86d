"""Throw damaged input at every parser, and see that each ends in a result or in a refusal that says what to do.

    python scripts/fuzz.py --minutes 10                      all parsers in turn
    python scripts/fuzz.py --minutes 60 --parser pickle      one of them; --list names them
    python scripts/fuzz.py --replay fuzz-findings/pickle-0a1b2c3d

Inputs are made from small sound checkpoints by mutating bytes, or values inside a JSON or pickle tree. One that leads
to something new (another error, raised in another line, with another text) is kept and mutated further. What ends
otherwise than it should (another exception, a refusal without a mend, more than SECONDS, more memory than MEMORY) is
saved under --out, named after its content.

tests/fuzz runs the same for a few seconds with a fixed seed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llmtailor
from llmtailor.cli.options import read_map
from llmtailor.compose import Options, plan_merge
from llmtailor.core.recipe import Recipe
from llmtailor.errors import TailorError
from llmtailor.formats.base import index_checkpoint
from llmtailor.formats.manifest import read_part_steps
from llmtailor.formats.pickle_nodes import Call, Ordered, Storage
from llmtailor.formats.pickle_reader import read_pickle
from llmtailor.formats.pickle_writer import write_pickle
from llmtailor.formats.plain import model
from llmtailor.formats.safetensors_files import INDEX, SINGLE, read_weights
from llmtailor.formats.torchzip import read_torch_file
from llmtailor.inspection import describe
from llmtailor.recipe.flags import read_flags
from llmtailor.recipe.parse import parse_recipe
from scripts.synthetic import SHAPES, lay_out, make_checkpoint

SECONDS = 20
"""An input that takes longer is a finding. None should take more than a few seconds."""
MEMORY = 3 << 30
KEPT = 400
"""Inputs that are kept for further mutation, beside the first ones."""

# --- mutations -------------------------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    2,
    7,
    63,
    64,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63,
    2**64 - 1,
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**5000, 0.5, -1.0, 1e400, math.nan),
    *("", "x", "..", "../x", "/", "a\0b", "\n", "\x1b[31m", "layer 3", "layer x", "é", "x" * 5000, "9" * 5000, "²"),
    *([], {}, [[]], {"": 1}, [None], [-1], [2**62, 2**62], ["x"], {"x": {}}, [0] * 100),
)
TOKENS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"'",
        b"\n",
        b" ",
        b"-",
        b"&a ",
        b"*a",
        b"!",
        b"<<",
        b"null",
        b"NaN",
        b"1e999",
    ),
    *(
        b"9" * 400,
        b"-1",
        b"\\u0000",
        b"\\ud800",
        b"\xff",
        b"..",
        b"/",
        b"|",
        b">",
        b"?",
        b"%",
        b"@",
        b"\t",
        b"#",
        b"{" * 50,
    ),
)


def mutate_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change some bytes: a few times one of a dozen ways."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        until = min(len(out), at + rng.choice((1, 2, 4, 8, 16, 64, 256)))
        way = rng.randrange(10)
        if way == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1 and out:
            out[min(at, len(out) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif way == 2:
            del out[at:until]
        elif way == 3:
            out[at:at] = out[at:until] * rng.choice((1, 1, 2, 20))
        elif way == 4:
            start = rng.randrange(len(other) + 1)
            out[at:until] = other[start : start + rng.choice((1, 4, 16, 64, 256))]
        elif way == 5:
            packed = rng.choice(NUMBERS).to_bytes(8, rng.choice(("little", "little", "big")))[
                : rng.choice((1, 2, 4, 8))
            ]
            out[at : at + len(packed)] = packed
        elif way == 6:
            out[at:at] = rng.choice(TOKENS)
        elif way == 7:
            del out[at:]
        elif way == 8:
            out += out[at:until]
        else:
            numbers = [match.span() for match in re.finditer(rb"[0-9]+", bytes(out))]
            if numbers:
                begin, end = rng.choice(numbers)
                out[begin:end] = str(rng.choice((*NUMBERS, -1, 10**20))).encode()
    return bytes(out)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Return a JSON or pickle tree with one value changed; nothing that was passed is."""
    path: list[Any] = []
    node = tree
    while isinstance(node, (dict, list, tuple, Call)) and (not path or rng.random() < 0.85):
        steps = _steps(node)
        if not steps:
            break
        path.append(rng.choice(steps))
        node = _child(node, path[-1])
    return _replaced(tree, path, rng)


def _steps(node: Any) -> list[Any]:
    if isinstance(node, Call):
        return ["args", "state"] if node.has_state else ["args"]
    return list(node) if isinstance(node, dict) else list(range(len(node)))


def _child(node: Any, step: Any) -> Any:
    return getattr(node, step) if isinstance(node, Call) else node[step]


_DROP = object()


def _replaced(node: Any, path: list[Any], rng: random.Random) -> Any:
    if not path:
        return _other(node, rng)
    step, rest = path[0], path[1:]
    child = _replaced(_child(node, step), rest, rng)
    if isinstance(node, Call):
        changed = Call(node.func, node.args, node.new, node.state, node.has_state, list(node.items), list(node.appends))
        setattr(changed, step, child if step != "args" or isinstance(child, tuple) else ())
        return changed
    if isinstance(node, dict):
        items = [(key, child if key == step else value) for key, value in node.items()]
        if child is _DROP:
            items = [(key, value) for key, value in items if key != step]
        elif not rest and rng.random() < 0.2:
            items = [(_key(rng, node) if key == step else key, value) for key, value in items]
        return Ordered(items, node.attributes) if isinstance(node, Ordered) else dict(items)
    listed = [child if at == step else value for at, value in enumerate(node)]
    if child is _DROP:
        listed = [value for value in listed if value is not _DROP]
    return tuple(listed) if isinstance(node, tuple) else listed


def _key(rng: random.Random, node: dict[Any, Any]) -> Any:
    return rng.choice((*node, "x", "", "layer x.weight", "step", "master", 0, 1, 7, "a\nb"))


def _other(node: Any, rng: random.Random) -> Any:
    way = rng.randrange(6)
    if way == 0:
        return _DROP
    if way == 1 and type(node) in (int, float):
        return rng.choice((node + 1, node - 1, -node, node * 2**40, float(node), str(node)))
    if way == 2 and isinstance(node, (list, tuple)):
        return type(node)(rng.sample(list(node), len(node))) if rng.random() < 0.5 else type(node)([*node, *node])
    if way == 3 and isinstance(node, dict) and len(node) > 1:
        keys, values = list(node), list(node.values())
        rng.shuffle(values)
        return dict(zip(keys, values, strict=True))
    return rng.choice(VALUES)


# --- parsers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parser:
    """Something that takes bytes: where inputs come from, how they are mutated, and what is done with them."""

    seeds: Callable[[dict[str, Path]], list[bytes]]
    """From the folders of sound checkpoints, by form."""
    parse: Callable[[bytes, Path, dict[str, Path]], Any]
    """In a scratch folder of its own. Raises TailorError for a refusal."""
    mutate: Callable[[bytes, bytes, random.Random], bytes] = mutate_bytes


def _mutate_json(data: bytes, other: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return mutate_bytes(data, other, rng)
    try:
        tree = mutate_tree(json.loads(data), rng)
        return json.dumps(None if tree is _DROP else tree).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(data, other, rng)


def _mutate_header(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON inside a safetensors file, and keep the length in front of it right."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3 or not 0 < length <= len(data) - 8:
        return mutate_bytes(data, other, rng)
    header = _mutate_json(data[8 : 8 + length], other, rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def storage_of(dtype: str, key: str, numel: int, location: str) -> Storage:
    return Storage(dtype, abs(numel) % 1000, (), location)


def pickles_of(checkpoint: Path) -> list[bytes]:
    found = []
    for path in sorted(checkpoint.rglob("*.pt")) + sorted(checkpoint.glob("*.pth")):
        with zipfile.ZipFile(path) as archive:
            found += [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return found


def _mutate_zip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the end of a torch file, where the directory is, or its pickle, without a CRC to tell."""
    way = rng.random()
    if way < 0.2:
        return mutate_bytes(data, other, rng)
    if way < 0.6:
        cut = max(0, len(data) - rng.choice((22, 100, 400, 4000)))
        return data[:cut] + mutate_bytes(data[cut:], other[-200:], rng)
    try:
        return with_pickle(data, lambda raw: mutate_bytes(raw, other[:400], rng))
    except Exception:  # as below
        return mutate_bytes(data, other, rng)


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a torch file with another ``data.pkl``; its CRC is right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for info in source.infolist():
            raw = source.read(info)
            target.writestr(info.filename, change(raw) if info.filename.endswith("/data.pkl") else raw)
    return out.getvalue()


def write_file(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder


def _parse_text(parse: Callable[[str], Any]) -> Callable[[bytes, Path, dict[str, Path]], Any]:
    return lambda data, folder, sound: parse(data.decode("utf-8", "replace"))


def _recipes(sound: dict[str, Path]) -> list[bytes]:
    configs = Path(__file__).parents[1] / "configs"
    return [path.read_bytes() for path in sorted(configs.glob("*.y*ml"))]


def _flags(sound: dict[str, Path]) -> list[bytes]:
    return [b'{"step": 100, "flag": [0, 1, 2]}\n{"step": 150, "flag": [3], "time": 1.5}\n', b""]


def _read_latest(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["zero3"].iterdir():
        if path.name != "latest":
            (folder / path.name).symlink_to(path)
    return index_checkpoint(write_file(folder, "latest", data))


def _index_json(sound: dict[str, Path]) -> list[bytes]:
    return [(sound["sharded"] / INDEX).read_bytes()]


def _read_index_json(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["sharded"].glob("*.safetensors"):
        (folder / path.name).symlink_to(path)
    return read_weights(write_file(folder, INDEX, data), "x")


def _read_trainer_state(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["zero3"].iterdir():
        if path.name != "trainer_state.json":
            (folder / path.name).symlink_to(path)
    return describe(index_checkpoint(write_file(folder, "trainer_state.json", data)))


SEPARATOR = b"\n--- the file ---\n"


def _shards(sound: dict[str, Path]) -> list[bytes]:
    """Inputs that name a file of a checkpoint, and hold what stands there instead."""
    found = []
    for form in ("zero3", "zero2", "plain"):
        for path in sorted(sound[form].rglob("*")):
            if path.is_file() and path.suffix in (".pt", ".pth", ".json"):
                name = f"{form}/{path.relative_to(sound[form])}"
                found.append(name.encode() + SEPARATOR + path.read_bytes())
    return found


def _mutate_shard(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the tree inside; now and then bytes, and now and then put another file in its place."""
    name, _, content = data.partition(SEPARATOR)
    content = mutate_content(content, other.partition(SEPARATOR)[2], rng)
    return name + SEPARATOR + content


def mutate_content(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate a file of a checkpoint in a way that fits what it is."""
    way = rng.random()
    if way < 0.05:
        return other
    if content[:2] != b"PK":
        return _mutate_json(content, other, rng)
    if way < 0.2:
        return _mutate_zip(content, other, rng)
    try:
        return _with_other_tree(content, rng)
    except Exception:  # it has been mutated before, so anything may be wrong with it
        return _mutate_zip(content, other, rng)


def _with_other_tree(data: bytes, rng: random.Random) -> bytes:
    """Change a value of the tree in a torch file, and write it so that all else is as it was."""
    storages: dict[int, tuple[Storage, str]] = {}

    def find(dtype: str, key: str, numel: int, location: str) -> Storage:
        storage = Storage(dtype, numel, (), location)
        storages[id(storage)] = (storage, key)
        return storage

    with zipfile.ZipFile(io.BytesIO(data)) as source:
        records = {info.filename: source.read(info) for info in source.infolist()}
    prefix = next(iter(records)).partition("/")[0]
    tree = read_pickle(records[f"{prefix}/data.pkl"], "x", find)
    for _ in range(rng.choice((1, 1, 2, 3))):
        changed = mutate_tree(tree, rng)
        tree = tree if changed is _DROP else changed
    raw, found = write_pickle(tree)
    named = {f"{prefix}/data/{at}": records[f"{prefix}/data/{storages[id(one)][1]}"] for at, one in enumerate(found)}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        others = {name: content for name, content in records.items() if not name.startswith(f"{prefix}/data/")}
        for name, content in (others | {f"{prefix}/data.pkl": raw} | named).items():
            target.writestr(name, content)
    return out.getvalue()


def _read_checkpoint(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    """Inspect a checkpoint with one file exchanged, and plan what can be made of it."""
    name, _, content = data.partition(SEPARATOR)
    form, _, path = name.decode().partition("/")
    root = folder / "checkpoint-100"
    shutil.copytree(sound[form], root, copy_function=os.link)
    (root / path).unlink()
    (root / path).write_bytes(content)
    with patch.object(model, "_describe", lambda config: "building models takes seconds"):
        index = index_checkpoint(root)
        describe(index)
        recipe = Recipe("x", "", root, (), None, None)
        for options in (Options(), Options(world_size=3, stage=2 if index.stage == 3 else 3, groups="default")):
            plan_merge(recipe, folder / "out", options)


PARSERS = {
    "torch zip": Parser(
        lambda sound: [
            path.read_bytes() for path in (*sound["zero3"].glob("*.pt*"), *sound["zero3"].glob("global*/*"))
        ],
        lambda data, folder, sound: read_torch_file(write_file(folder, "x.pt", data), "x.pt", "x.pt"),
        _mutate_zip,
    ),
    "pickle": Parser(
        lambda sound: [each for form in ("zero3", "zero2", "plain") for each in pickles_of(sound[form])],
        lambda data, folder, sound: write_pickle(read_pickle(data, "x", storage_of)),
    ),
    "safetensors": Parser(
        lambda sound: [(sound["zero3"] / SINGLE).read_bytes()],
        lambda data, folder, sound: read_weights(write_file(folder, SINGLE, data), "x"),
        _mutate_header,
    ),
    "index.json": Parser(_index_json, _read_index_json, _mutate_json),
    "trainer_state.json": Parser(
        lambda sound: [(sound["zero3"] / "trainer_state.json").read_bytes()], _read_trainer_state, _mutate_json
    ),
    "llmtailor.json": Parser(
        lambda sound: [(sound["zero2"] / "llmtailor.json").read_bytes()],
        lambda data, folder, sound: read_part_steps(write_file(folder, "llmtailor.json", data), "x"),
        _mutate_json,
    ),
    "latest": Parser(lambda sound: [b"global_step100", b"global_step100\n"], _read_latest),
    "recipe": Parser(
        _recipes,
        _parse_text(
            lambda text: parse_recipe(text, name="x.yaml", folder=Path("/runs"), environ={"HOME": "/h", "RUN": "/run"})
        ),
    ),
    "flags": Parser(_flags, _parse_text(lambda text: read_flags(text, "flags.jsonl"))),
    "map": Parser(
        lambda sound: [b'{"odd": 300, "norm": "checkpoint-400"}'],
        lambda data, folder, sound: read_map(write_file(folder, "map.json", data) / "map.json"),
        _mutate_json,
    ),
    "checkpoint": Parser(_shards, _read_checkpoint, _mutate_shard),
}

# --- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the inputs."""

    accepted: int = 0
    refused: int = 0
    outcomes: int = 0
    """Different refusals."""
    findings: list[tuple[bytes, str]] | None = None

    def __str__(self) -> str:
        return f"{self.accepted + self.refused} inputs, {self.accepted} accepted, {self.outcomes} different refusals"


def make_sound(folder: Path) -> dict[str, Path]:
    """Make small checkpoints of every form; return them by form."""
    shape = replace(SHAPES["tiny"], vocab_size=5, hidden_size=4, intermediate_size=6, num_layers=2, head_dim=2)
    shape = replace(shape, num_heads=2, num_kv_heads=1)
    sound = {form: folder / form / "checkpoint-100" for form in ("zero3", "sharded", "zero2", "plain")}
    make_checkpoint(sound["zero3"], shape, lay_out(shape, 2), 100)
    make_checkpoint(sound["sharded"], shape, lay_out(shape, 2), 100, shard_bytes=200)
    for form, stage in (("zero2", 2), ("plain", 0)):
        llmtailor.merge(Recipe("x", "", sound["zero3"], (), None, None), sound[form], Options(stage=stage))
    return sound


def fuzz(name: str, sound: dict[str, Path], rng: random.Random, more: Callable[[int], bool]) -> Tally:
    """Mutate and parse as long as ``more``, asked with the number of inputs so far, says so."""
    parser, tally = PARSERS[name], Tally(findings=[])
    seeds = parser.seeds(sound)
    kept: list[bytes] = []
    known: set[tuple[Any, ...]] = set()
    count = 0
    while more(count):
        data = seeds[count] if count < len(seeds) else _next(parser, seeds, kept, rng)
        outcome, finding = try_input(parser, data, sound)
        count += 1
        assert tally.findings is not None
        if finding:
            tally.findings.append((data, finding))
        elif outcome is None:
            tally.accepted += 1
        else:
            tally.refused += 1
        if outcome not in known:
            known.add(outcome)
            kept = [*kept[-KEPT:], data]
    tally.outcomes = len(known - {None})
    return tally


def _next(parser: Parser, seeds: list[bytes], kept: list[bytes], rng: random.Random) -> bytes:
    pool = kept if kept and rng.random() < 0.5 else seeds
    return parser.mutate(rng.choice(pool), rng.choice(seeds), rng)


def try_input(parser: Parser, data: bytes, sound: dict[str, Path]) -> tuple[tuple[Any, ...] | None, str]:
    """Parse one input. Return which refusal it ended in (None: it was accepted), and what is wrong with that, or ""."""
    with tempfile.TemporaryDirectory(prefix="llmtailor-fuzz-") as folder:
        try:
            with _limit(SECONDS):
                parser.parse(data, Path(folder), sound)
            return None, ""
        except TailorError as error:
            bare = [problem for problem in error.problems if not (problem.where and problem.what and problem.fix)]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)[-2:]]
            texts = [re.sub(r"[0-9]+|'.*?'|\".*?\"|/\S+", "*", problem.what[:200]) for problem in error.problems[:3]]
            return (type(error).__name__, *lines, *texts), f"no mend: {bare[0]}" if bare else ""
        except Exception:  # whatever it is, it is what is looked for
            return ("crash",), traceback.format_exc()


class TooSlow(Exception):
    pass


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
