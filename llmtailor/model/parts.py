"""What can be addressed in a model: its parts, its params and buffers, and the tensors they are saved as.

The module also formats names of parts for messages.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from llmtailor.errors import ranges

_LONG = 24
"""Maximum number of rows of experts by layer"""
_LISTED = 12
"""Maximum number of names in a message; a model has thousands of tensors."""
_COMPARED = 300
"""Maximum number of characters to compare with valid names; the time grows with their square."""


class Part(str):
    """A part of a model: a layer, an expert or the rest of a layer, or another module by its name.

    It is the text that names it in recipes, messages and documents (``layer 3``, ``layer 3 expert 5``,
    ``layer 3 non-expert``, ``lm_head``), parsed once, where it is read.
    """

    __slots__ = ("expert", "layer", "whole")
    layer: int | None
    """Number of the layer that it is, or that it is a share of; None for other modules"""
    expert: int | None
    """Number of the expert in its layer; None for other parts"""
    whole: Part
    """The layer that it is a share of; any other part is itself"""

    def __new__(cls, text: str) -> Part:
        if isinstance(text, Part):
            return text
        part = super().__new__(cls, text)
        match = _PART.fullmatch(text)
        part.layer = int(match[2]) if match else None
        part.expert = int(match[3]) if match and match[3] else None
        part.whole = part if not match or match[1] == text else Part(match[1])
        return part

    def __reduce__(self) -> tuple[type[Part], tuple[str]]:
        return Part, (str(self),)

    @property
    def is_share(self) -> bool:
        """Whether it is an expert, or the rest of a layer with experts."""
        return self.whole is not self


_PART = re.compile(r"(layer ([0-9]{1,9}))(?: (?:expert ([0-9]{1,9})|non-expert))?")
EMBED, NORM, HEAD = Part("embed_tokens"), Part("norm"), Part("lm_head")


def layer_part(number: int) -> Part:
    return Part(f"layer {number}")


def expert_part(layer: int, number: int) -> Part:
    return Part(f"layer {layer} expert {number}")


def non_expert_part(layer: int) -> Part:
    """Return the part with everything of a layer but its routed experts: attention, norms, router, shared experts."""
    return Part(f"layer {layer} non-expert")


def step_of(steps: Mapping[Part, int], part: Part, otherwise: int) -> int:
    """Return the step of a part if steps are known of some parts only; of a layer of several steps the oldest."""
    if part in steps or part.whole in steps:
        return steps.get(part, steps.get(part.whole, otherwise))
    return min((step for one, step in steps.items() if one.whole == part), default=otherwise)


def with_layers(parts: Collection[Part], all_parts: Iterable[Part]) -> frozenset[Part]:
    """Return the parts, and each layer whose shares among ``all_parts`` are all among them."""
    lacking = {part.whole for part in all_parts if part not in parts}
    return frozenset(parts) | {part.whole for part in parts} - lacking


@dataclass(frozen=True, slots=True)
class ExpertSlice:
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
    `find_parts.split_experts` divides layers into ``layer 3 non-expert``, ``layer 3 expert 0``, ...
    """

    part_of: Mapping[str, Part]
    """Param, buffer or weight name -> part. A param in `pieces` is replaced by its pieces."""
    parts: tuple[Part, ...]
    """In the order of the model."""
    num_layers: int
    tied: bool
    """Whether input and output embeddings are one tensor"""
    modules: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    """Submodels by mergekit's names (``text_decoder``, ``vision_tower``), and the parts of each. Empty if mergekit's
    data was not consulted or lacks the model."""
    pieces: Mapping[str, ExpertSlice] = field(default_factory=dict)
    """Name of an expert's piece of a fused param -> what it is of the param"""

    @cached_property
    def _names_of(self) -> dict[Part, list[str]]:
        found: dict[Part, list[str]] = {}
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

    def joined(self, layers: Collection[Part]) -> ModelStructure:
        """Return the parts with these layers as one part each, and without pieces of their params."""

        def join(part: Part) -> Part:
            return part.whole if part.whole in layers else part

        whole = {name: piece.param for name, piece in self.pieces.items() if self.part_of[name].whole in layers}
        return replace(
            self,
            part_of={whole.get(name, name): join(part) for name, part in self.part_of.items()},
            parts=tuple(dict.fromkeys(map(join, self.parts))),
            modules={module: tuple(dict.fromkeys(map(join, parts))) for module, parts in self.modules.items()},
            pieces={name: piece for name, piece in self.pieces.items() if name not in whole},
        )

    def divide(self, names: Iterable[str]) -> tuple[list[Part], list[Part]]:
        """Return the parts whose tensors are all among the names, and those that have only some of theirs there."""
        taken = set(names)
        touched = {self.part_of[name] for name in taken}
        rest = {part for name, part in self.part_of.items() if name not in taken}
        in_order = [part for part in self.parts if part in touched]
        return [part for part in in_order if part not in rest], [part for part in in_order if part in rest]

    def names(self, part: Part) -> list[str]:
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


def condense(names: Iterable[str]) -> str:
    """Return names joined for a message: ``embed_tokens, layers 0, 3-7, norm``. A long list is cut.

    Layers come in ascending order, in the place of the first one; experts likewise.
    """
    groups: dict[str, list[Part]] = {}
    for part in map(Part, dict.fromkeys(names)):
        kind = "layers" if part.layer is not None else part
        if part.is_share:
            kind = "non-expert" if part.expert is None else "experts"
        groups.setdefault(kind, []).append(part)
    shown = [_joined(kind, members) for kind, members in groups.items()]
    return ", ".join([*shown[:_LISTED], f"and {len(shown) - _LISTED} more"] if len(shown) > _LISTED else shown)


def group_shares(parts: Sequence[str], facts: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows of a table of parts in groups, as positions: experts of a layer with the same facts are a group.

    If there are many, experts of all layers with the same facts are. `condense` names a group.
    """
    keys: list[tuple[str, bool, Hashable]] = []
    for part, fact in zip(map(Part, parts), facts, strict=True):
        keys.append((part.whole if part.is_share else "", part.expert is not None, fact))
    is_long = len({key for key in keys if key[0]}) > _LONG
    groups: dict[Hashable, list[int]] = {}
    for at, key in enumerate(keys):
        groups.setdefault((key[1:] if is_long else key) if key[0] else at, []).append(at)
    return list(groups.values())


def _joined(kind: str, parts: Sequence[Part]) -> str:
    """Return one name for several layers, experts, or rests of layers."""
    if len(parts) == 1:
        return parts[0]
    layers = sorted({part.layer for part in parts if part.layer is not None})
    if kind == "experts":
        numbers = sorted(part.expert for part in parts if part.expert is not None)
        if len(layers) == 1:
            return f"{layer_part(layers[0])} experts {ranges(numbers)}"
        return f"{len(numbers)} experts of layers {ranges(layers)}"
    return f"layers {ranges(layers)}{' non-expert' * (kind == 'non-expert')}"
