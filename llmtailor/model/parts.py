"""What can be addressed in a model: its parts, its params and buffers, and the tensors they are saved as.

The module also formats names of parts for messages.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from llmtailor.errors import ranges

EMBED = "embed_tokens"
NORM = "norm"
HEAD = "lm_head"
_LAYER = re.compile(r"layer (\d+)")
_SHARE = re.compile(r"(layer (\d+)) (?:expert (\d+)|non-expert)")
_LONG = 24
"""Maximum number of rows of experts by layer"""
_LISTED = 12
"""Maximum number of names in a message; a model has thousands of tensors."""
_COMPARED = 300
"""Maximum number of characters to compare with valid names; the time grows with their square."""


def layer_part(number: int) -> str:
    """Return the name of a layer's part, e.g. ``layer 3``."""
    return f"layer {number}"


def layer_number(part: str) -> int | None:
    """Return the number of a layer's part, None for any other part."""
    match = _LAYER.fullmatch(part)
    return int(match[1]) if match else None


def expert_part(layer: int, number: int) -> str:
    """Return the name of an expert's part, e.g. ``layer 3 expert 5``."""
    return f"layer {layer} expert {number}"


def non_expert_part(layer: int) -> str:
    """Return the name of the part with everything else of a layer: attention, norms, router, shared experts."""
    return f"layer {layer} non-expert"


@lru_cache(maxsize=1 << 16)
def expert_number(part: str) -> tuple[int, int] | None:
    """Return the layer and the number of an expert's part, None for any other part."""
    match = _SHARE.fullmatch(part)
    return (int(match[2]), int(match[3])) if match and match[3] else None


@lru_cache(maxsize=1 << 16)
def layer_of(part: str) -> str:
    """Return the layer that a part is a share of: ``layer 3`` for ``layer 3 expert 5``. Any other part is itself."""
    match = _SHARE.fullmatch(part)
    return match[1] if match else part


def step_of(steps: Mapping[str, int], part: str, otherwise: int) -> int:
    """Return the step of a part if steps are known of some parts only; of a layer of several steps the oldest."""
    if part in steps or layer_of(part) in steps:
        return steps.get(part, steps.get(layer_of(part), otherwise))
    return min((step for one, step in steps.items() if layer_of(one) == part), default=otherwise)


def with_layers(parts: Collection[str], all_parts: Iterable[str]) -> frozenset[str]:
    """Return the parts, and each layer that has shares among ``all_parts``, all of which are here."""
    lacking = {layer_of(part) for part in all_parts if part not in parts}
    return frozenset(parts) | {layer_of(part) for part in parts} - lacking


@dataclass(frozen=True, slots=True)
class Piece:
    """An expert's elements ``begin``..``end`` of a param in which the experts of a layer are fused."""

    param: str
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)  # without slots, for cached_property
class ModelStructure:
    """The part that each tensor name belongs to.

    The parts are, in order: ``embed_tokens``, ``layer 0``.. ``layer L-1``, ``norm``, ``lm_head``, and then
    any other modules of the model, by name (``wpe``, ``visual.patch_embed``).
    With tied embeddings there is no part ``lm_head``: the tied name belongs to ``embed_tokens``.
    `experts.split_experts` divides layers into ``layer 3 non-expert``, ``layer 3 expert 0``, ...
    """

    part_of: Mapping[str, str]
    """Param, buffer or weight name -> part. A param in `pieces` is replaced by its pieces."""
    parts: tuple[str, ...]
    """In the order of the model."""
    num_layers: int
    tied: bool
    """Whether input and output embeddings are one tensor"""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Submodels by mergekit's names (``text_decoder``, ``vision_tower``), and the parts of each. Empty if mergekit's
    data was not consulted or lacks the model."""
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    """Name of an expert's piece of a fused param -> what it is of the param"""

    @cached_property
    def layers(self) -> dict[str, int]:
        """The parts of layers, and the layers' numbers"""
        return {part: number for part in self.parts if (number := layer_number(layer_of(part))) is not None}

    @cached_property
    def _names_of(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, part in self.part_of.items():
            found.setdefault(part, []).append(name)
        return found

    @cached_property
    def pieces_of(self) -> dict[str, list[str]]:
        """The params that have pieces, and the names of these in the order of the elements"""
        found: dict[str, list[str]] = {}
        for name, piece in self.pieces.items():
            found.setdefault(piece.param, []).append(name)
        return found

    def stored_in(self, name: str) -> str:
        """Return the tensor that has the elements of a name: the param of a piece, or else the tensor itself."""
        piece = self.pieces.get(name)
        return piece.param if piece else name

    def joined(self, layers: Collection[str]) -> ModelStructure:
        """Return the parts with these layers as one part each, and without pieces of their params."""

        def join(part: str) -> str:
            return layer_of(part) if layer_of(part) in layers else part

        whole = {name: piece.param for name, piece in self.pieces.items() if layer_of(self.part_of[name]) in layers}
        return replace(
            self,
            part_of={whole.get(name, name): join(part) for name, part in self.part_of.items()},
            parts=tuple(dict.fromkeys(map(join, self.parts))),
            modules={module: tuple(dict.fromkeys(map(join, parts))) for module, parts in self.modules.items()},
            pieces={name: piece for name, piece in self.pieces.items() if name not in whole},
        )

    def divide(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the parts that are among the names as a whole, and those of which only some tensors are."""
        taken = set(names)
        touched = {self.part_of[name] for name in taken}
        rest = {part for name, part in self.part_of.items() if name not in taken}
        in_order = [part for part in self.parts if part in touched]
        return [part for part in in_order if part not in rest], [part for part in in_order if part in rest]

    def names(self, part: str) -> list[str]:
        """Return the tensor names that belong to a part."""
        return [*self._names_of.get(part, ())]


@dataclass(frozen=True, slots=True)
class Param:
    """A param or persistent buffer of the model, as in the training run."""

    name: str
    shape: tuple[int, ...]
    role: str
    """``trainable``, ``frozen`` or ``buffer``"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedAs:
    """A tensor of a weight file: elements of a param, from ``begin`` on, possibly under another name."""

    name: str
    shape: tuple[int, ...]
    begin: int = 0


def nearest(name: object, valid: Collection[str]) -> str:
    """Return a fix: the closest valid name, if one is close, and the valid names."""
    close = difflib.get_close_matches(str(name)[:_COMPARED], list(valid), n=1)
    listed = condense(valid) or "none"
    return f"did you mean {close[0]!r}? Valid here: {listed}" if close else f"valid here: {listed}"


def condense(parts: Iterable[str]) -> str:
    """Return names joined for a message: ``embed_tokens, layers 0, 3-7, norm``. A long list is cut.

    Layers come in ascending order, in the place of the first one; experts likewise.
    """
    groups: dict[str, list[str]] = {}
    for part in dict.fromkeys(parts):
        if layer_of(part) != part:
            kind = "experts" if expert_number(part) else "non-expert"
        else:
            kind = part if layer_number(part) is None else "layers"
        groups.setdefault(kind, []).append(part)
    shown = [_joined(kind, members) for kind, members in groups.items()]
    return ", ".join([*shown[:_LISTED], f"and {len(shown) - _LISTED} more"] if len(shown) > _LISTED else shown)


def group_shares(parts: Sequence[str], facts: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows of a table of parts in groups, as positions: experts of a layer with the same facts are a group.

    If there are many, experts of all layers with the same facts are. `condense` names a group.
    """
    keys: list[tuple[str, bool, Hashable]] = []
    for part, fact in zip(parts, facts, strict=True):
        layer = layer_of(part)
        keys.append((layer if layer != part else "", expert_number(part) is not None, fact))
    is_long = len({key for key in keys if key[0]}) > _LONG
    groups: dict[Hashable, list[int]] = {}
    for at, key in enumerate(keys):
        groups.setdefault((key[1:] if is_long else key) if key[0] else at, []).append(at)
    return list(groups.values())


def _joined(kind: str, parts: list[str]) -> str:
    """Return layers, experts, or what is left of layers without these, as one name."""
    if len(parts) == 1:
        return parts[0]
    layers = sorted({number for part in parts if (number := layer_number(layer_of(part))) is not None})
    if kind == "experts":
        numbers = sorted(found[1] for part in parts if (found := expert_number(part)))
        if len(layers) == 1:
            return f"{layer_part(layers[0])} experts {ranges(numbers)}"
        return f"{len(numbers)} experts of layers {ranges(layers)}"
    return f"layers {ranges(layers)}{' non-expert' * (kind == 'non-expert')}"
