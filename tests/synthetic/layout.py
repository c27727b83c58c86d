"""How ZeRO-3 lays out a model: param groups, flat ids, slices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from synthetic.shapes import Shape

DEFAULT_SUB_GROUP_SIZE = 10**9


@dataclass(frozen=True)
class FlatId:
    """One flat tensor per rank: the slices of these params, one after the other."""

    group: int
    params: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How ZeRO-3 lays out a model over the ranks."""

    shapes: dict[str, tuple[int, ...]]
    world_size: int
    weight_decay: tuple[float, ...]
    """Of each param group."""
    flat_ids: tuple[FlatId, ...]
    sub_group_size: int

    def numel(self, param: str) -> int:
        return math.prod(self.shapes[param])

    def part(self, param: str) -> int:
        """Return the elements of the slice that each rank holds, padding included."""
        return -(-self.numel(param) // self.world_size)

    def flat_numel(self, flat: FlatId) -> int:
        return sum(self.part(param) for param in flat.params)


def lay_out(
    shape: Shape, world_size: int, groups: str = "default", sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
) -> Layout:
    """Group the params as the Trainer does (``default``) or layer by layer (``layer``), and cut into sub-groups."""
    shapes = shape.params()
    grouped: dict[tuple[Any, ...], list[str]] = {}
    for name in shapes:
        decays = "norm" not in name
        if groups == "layer":
            words = name.split(".")
            number = int(words[2]) if words[1] == "layers" else -1
            # No-decay groups first; in each half the modules outside of layers by name, then the layers.
            key: tuple[Any, ...] = (decays, number, "" if number >= 0 else name)
        else:
            key = (not decays,)
        grouped.setdefault(key, []).append(name)
    ordered = [grouped[key] for key in sorted(grouped)]
    layout = Layout(
        shapes, world_size, tuple(0.0 if "norm" in names[0] else 0.1 for names in ordered), (), sub_group_size
    )
    flat_ids = []
    for group, names in enumerate(ordered):
        collected: list[str] = []
        whole = sum(map(layout.part, names)) <= sub_group_size
        for name in names:
            collected.append(name)
            if not whole and sum(map(layout.part, collected)) >= sub_group_size:
                flat_ids.append(FlatId(group, tuple(collected)))
                collected = []
        if collected:
            flat_ids.append(FlatId(group, tuple(collected)))
    return replace(layout, flat_ids=tuple(flat_ids))
