"""Inputs for the readers of torch.distributed.checkpoint folders: one file of a sound folder, mutated."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from campaigns.fuzz.mutations import DROP, mutate_bytes, mutate_tree
from campaigns.fuzz.partial import SEPARATOR
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.containers.dcp import ALLOWED, METADATA
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.unpickle import read_pickle
from llmtailor.formats.registry import index_checkpoint
from llmtailor.recipe import Recipe
from llmtailor.verify.inspect import describe


def seeds(sound: dict[str, Path]) -> list[bytes]:
    """Return inputs that name a file of a folder, and hold what stands there instead."""
    found = []
    for form in ("dcp", "fsdp"):
        for path in sorted(sound[form].rglob("*")):
            if path.name == METADATA or path.suffix == ".distcp":
                found.append(f"{form}/{path.relative_to(sound[form])}".encode() + SEPARATOR + path.read_bytes())
    return found


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the tree of a ``.metadata``, or bytes; now and then put another file in its place."""
    name, _, content = data.partition(SEPARATOR)
    alien = other.partition(SEPARATOR)[2]
    if rng.random() < 0.05:
        return name + SEPARATOR + alien
    if name.endswith(METADATA.encode()) and rng.random() < 0.7:
        try:
            tree = read_pickle(content, "x", allowed=ALLOWED, object_keys=True)
            for _ in range(rng.choice((1, 1, 2, 3))):
                changed = mutate_tree(tree, rng)
                tree = tree if changed is DROP else changed
            return name + SEPARATOR + write_pickle(tree)[0]
        except Exception:  # it has been mutated before, so anything may be wrong with it
            pass
    return name + SEPARATOR + mutate_bytes(content, alien[:400], rng)


def read(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    """Inspect a checkpoint with one file exchanged, and plan what can be made of it."""
    name, _, content = data.partition(SEPARATOR)
    form, _, path = name.decode().partition("/")
    root = folder / "checkpoint-100"
    shutil.copytree(sound[form], root)
    (root / path).write_bytes(content)
    index = index_checkpoint(root)
    describe(index)
    recipe = Recipe("x", "", root, (), None, None)
    for options in (Options(), Options(world_size=3, to="deepspeed")):
        plan_merge(recipe, folder / "out", options)
