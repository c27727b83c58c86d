"""What can be addressed in a model: its parts, its params and buffers, and the tensors they are saved as.

The module also formats names of parts for messages.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from llmtailor.errors import ranges

EMBED = "embed_tokens"
NORM = "norm"
HEAD = "lm_head"
_LAYER = re.compile(r"layer (\d+)")
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


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """The part that each tensor name belongs to.

    The parts are, in order: ``embed_tokens``, ``layer 0``.. ``layer L-1``, ``norm``, ``lm_head``, and then
    any other modules of the model, by name (``wpe``, ``visual.patch_embed``).
    With tied embeddings there is no part ``lm_head``: the tied name belongs to ``embed_tokens``.
    """

    part_of: Mapping[str, str]
    """Param, buffer or weight name -> part."""
    parts: tuple[str, ...]
    """In the order of the model."""
    num_layers: int
    tied: bool
    """Whether input and output embeddings are one tensor"""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Submodels by mergekit's names (``text_decoder``, ``vision_tower``), and the parts of each. Empty if mergekit's
    data was not consulted or lacks the model."""

    @property
    def layers(self) -> dict[str, int]:
        """The layers' parts, and their numbers"""
        return {part: number for part in self.parts if (number := layer_number(part)) is not None}

    def divide(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the parts that are among the names as a whole, and those of which only some tensors are."""
        taken = set(names)
        touched = {self.part_of[name] for name in taken}
        rest = {part for name, part in self.part_of.items() if name not in taken}
        in_order = [part for part in self.parts if part in touched]
        return [part for part in in_order if part not in rest], [part for part in in_order if part in rest]

    def names(self, part: str) -> list[str]:
        """Return the tensor names that belong to a part."""
        return [name for name, owner in self.part_of.items() if owner == part]


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

    Layers come in ascending order, in the place of the first one.
    """
    listed = list(dict.fromkeys(parts))
    numbers = sorted(number for part in listed if (number := layer_number(part)) is not None)
    names = list(dict.fromkeys(part if layer_number(part) is None else "" for part in listed))
    layers = layer_part(numbers[0]) if len(numbers) == 1 else f"layers {ranges(numbers)}"
    shown = [name or layers for name in names]
    return ", ".join([*shown[:_LISTED], f"and {len(shown) - _LISTED} more"] if len(shown) > _LISTED else shown)
