"""What can be addressed in a model: its parts, its params and buffers, and the tensors they are saved as."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

EMBED = "embed_tokens"
NORM = "norm"
HEAD = "lm_head"


def layer_part(number: int) -> str:
    """Return the name of a layer's part, e.g. ``layer 3``."""
    return f"layer {number}"


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
