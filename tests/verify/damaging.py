"""What can be done to a checkpoint, for the tables of `damages`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import edit

STEP, OTHER_STEP = 4, 6
Tree = Any
Change = Callable[[Path, Path], object]
"""Given the checkpoint, and another one: of the same run at `OTHER_STEP`, or of another save with torch"""
Table = dict[str, tuple[Any, ...]]

RANK_0, RANK_1 = "*/*rank_0_*optim_states.pt", "*/*rank_1_*optim_states.pt"
OPTIM, MODEL, RNG = "*/*optim_states.pt", "*/*model_states.pt", "rng_state_1.pth"
WEIGHTS, STATE, SCHEDULER = "model.safetensors", "trainer_state.json", "scheduler.pt"
LAST = slice(1, 2)
"""Of two ranks' files"""


class Optimizer:
    """Finds its way in what holds an optimizer: a shard of any stage of ZeRO, or an optimizer.pt."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.outer = tree.get("optimizer_state_dict", tree)
        self.inner = self.outer.get("base_optimizer_state") or self.outer.get("optimizer_state_dict", self.outer)
        self.state, self.groups = self.inner.get("state"), self.inner["param_groups"]
        zero12 = "single_partition_of_fp32_groups"
        self.masters = self.outer[zero12] if zero12 in self.outer else self.outer.get("fp32_flat_groups")

    def set_masters(self, change: Callable[[Any], Any], count: int | None = None) -> None:
        self.masters[:count] = [change(master.detach()).clone() for master in self.masters[:count]]

    def set(self, kind: str, change: Callable[[Any], Any], count: int | None = None) -> None:
        for state in list(self.state.values())[:count]:
            state[kind] = change(state.get(kind))

    def drop(self, kind: str, count: int | None = None) -> None:
        for state in list(self.state.values())[:count]:
            del state[kind]

    def set_groups(self, **options: object) -> None:
        for group in self.groups:
            group.update(options)


# --- what is done ----------------------------------------------------------------------------------------------------


def shard(checkpoint: Path, rank: int) -> Path:
    (path,) = checkpoint.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def models(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob(MODEL))


def on(pattern: str, change: Callable[[Tree], object], at: slice = slice(None)) -> Change:
    """Edit torch files, all of that name or some."""
    return lambda root, _: [edit(path, change) for path in sorted(root.glob(pattern))[at]]  # type: ignore[arg-type]


def optim(change: Callable[[Optimizer], object], rank: int | None = None) -> Change:
    """Edit the optimizer's states of a rank, or of all."""
    at = slice(None) if rank is None else slice(rank, rank + 1)
    return both(*(on(name, lambda tree: change(Optimizer(tree)), at) for name in (OPTIM, "optimizer.pt")))


def master(change: Callable[[Any], Any], count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.set_masters(change, count), rank)


def state(kind: str, change: Callable[[Any], Any], count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.set(kind, change, count), rank)


def drop(kind: str, count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.drop(kind, count), rank)


def options(**options: object) -> Change:
    return optim(lambda it: it.set_groups(**options))


def model(change: Callable[[Tree], object]) -> Change:
    return on(MODEL, change)


def put(pattern: str, *path: str, at: slice = slice(None), **fields: object) -> Change:
    return on(pattern, lambda tree: within(tree, path).update(fields), at)


def pop(pattern: str, *path: str) -> Change:
    return on(pattern, lambda tree: within(tree, path[:-1]).pop(path[-1]))


def within(tree: Tree, path: tuple[str, ...]) -> Tree:
    return within(tree[path[0]], path[1:]) if path else tree


def unlink(*names: str) -> Change:
    return lambda root, _: [path.unlink() for name in names for path in root.glob(name)]


def mkdir(name: str) -> Change:
    return lambda root, _: (root / name).mkdir()


def rmtree(pattern: str) -> Change:
    return lambda root, _: [shutil.rmtree(path) for path in root.glob(pattern)]


def take(*patterns: str) -> Change:
    """Replace files by those of the other checkpoint."""

    def apply(root: Path, other: Path) -> None:
        for pattern in patterns:
            for mine, theirs in zip(sorted(root.glob(pattern)), sorted(other.glob(pattern)), strict=True):
                shutil.copy(theirs, mine)

    return apply


def copy(source: str, target: str) -> Change:
    def apply(root: Path, _: Path) -> None:
        (path,) = root.glob(source)
        shutil.copy(path, next(root.glob(target), root / target))

    return apply


def cut(pattern: str, num_bytes: int = -100) -> Change:
    def apply(root: Path, _: Path) -> None:
        path = sorted(root.glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[:num_bytes])

    return apply


def write(name: str, data: str | bytes) -> Change:
    return lambda root, _: (root / name).write_bytes(data.encode() if isinstance(data, str) else data)


def prepend(name: str, data: bytes) -> Change:
    return lambda root, _: (root / name).write_bytes(data + (root / name).read_bytes())


def on_json(name: str, **changes: object) -> Change:
    return lambda root, _: (root / name).write_text(json.dumps({**json.loads((root / name).read_text()), **changes}))


def on_weights(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(root: Path, _: Path) -> None:
        tensors = load_file(root / WEIGHTS)
        change(tensors)
        save_file(tensors, root / WEIGHTS, {"format": "pt"})

    return apply


def weights(**tensors: Any) -> Change:
    return on_weights(lambda found: found.update(tensors))


def both(*changes: Change) -> Change:
    return lambda root, other: [change(root, other) for change in changes]


def save(name: str, content: object) -> Change:
    return lambda root, _: torch.save(content, root / name)


def flip(root: Path, path: str, at: int) -> None:
    data = bytearray((root / path).read_bytes())
    data[at] ^= 1
    (root / path).write_bytes(data)


def shorter(tensor: Any) -> Any:
    return tensor[:-1].clone()


def as_row(tensor: Any) -> Any:
    return tensor.reshape(1, -1).clone()


def third(value: float) -> Callable[[Any], Any]:
    """Set the third element."""

    def change(tensor: Any) -> Any:
        tensor[2] = value
        return tensor

    return change
