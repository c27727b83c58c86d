"""What is known about an architecture beyond its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtailor.arch.names import place_of
from llmtailor.core.anatomy import EMBED, HEAD, NORM, Anatomy, layer_part

LAYER = "${layer_index}"
LAST = "${num_layers}"
"""Stand in a hint's names for a layer's number, and for the highest number of the stack."""


@dataclass(frozen=True, slots=True)
class ArchHints:
    """Names of the tensors that have a role in the text model, and the tensors of every submodel.

    The names need not occur in a model: optional tensors and other spellings are listed too.
    """

    stack: str | None
    """What stands in front of a layer's number, e.g. ``model.layers``; None if the model has no layers."""
    embed: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Submodel -> its tensors; empty for a model without submodels."""


def undecided(anatomy: Anatomy) -> bool:
    """Tell whether names alone may have misled `dissect`, or have not told all.

    That is so when embeddings, final norm, output embeddings or layers were not found, and when there are layers
    beside those of the text model: which stack is which, and what belongs to each, is then a guess by words.
    """
    wanted = {EMBED, NORM, layer_part(0)} | (set() if anatomy.tied else {HEAD})
    return not wanted <= set(anatomy.parts) or has_other_stacks(anatomy)


def has_other_stacks(anatomy: Anatomy) -> bool:
    """Tell whether the model has layers beside those of the text model."""
    numbered = {part for part in anatomy.parts if part.rpartition(".")[2].isdecimal()}
    # An nn.Sequential has numbers too, but its items are plain modules.
    return any(part in numbered and place_of(name).depth > 1 for name, part in anatomy.part_of.items())
