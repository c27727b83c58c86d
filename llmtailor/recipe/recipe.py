"""A recipe as data: which parts come from which checkpoint.

Every form of the YAML, and every `Assignment` for a run, becomes the same kind of rules. Later rules override earlier
ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem

DTYPES = {
    "bfloat16": "BF16", "bf16": "BF16", "float16": "F16", "fp16": "F16", "half": "F16", "float32": "F32", "fp32": "F32",
    "float": "F32",
}  # fmt: skip
"""Name of a dtype in recipes -> its name in safetensors files"""


@dataclass(frozen=True, slots=True)
class Average:
    """A weighted average of checkpoints."""

    members: tuple[tuple[Path, float], ...]
    """Checkpoints and their weights as written, all above 0; `shares` sum to 1."""
    moments: str
    """One of `checkpoint.layout.MOMENTS`"""
    where: str = field(default="", compare=False)
    decay: float | None = None
    """Of an exponential moving average, whose weights follow from the steps of the checkpoints, see
    `averages.weigh`; None if the weights are final."""

    def shares(self) -> tuple[tuple[Path, float], ...]:
        """Return the checkpoints with weights that sum to 1."""
        total = math.fsum(weight for _, weight in self.members)
        return tuple((source, weight / total) for source, weight in self.members)

    def __str__(self) -> str:
        return "average of " + ", ".join(f"{source} ({share:g})" for source, share in self.shares())


Origin = Path | Average
"""Where a tensor comes from"""


def checkpoints_of(origins: Iterable[Origin]) -> tuple[Path, ...]:
    """Return every checkpoint among the origins, each once, in order."""
    found: dict[Path, None] = {}
    for origin in origins:
        found |= dict.fromkeys([source for source, _ in origin.members] if isinstance(origin, Average) else [origin])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``start``..``stop`` (half-open) from ``source``: mergekit's ``layer_range``."""

    source: Path
    start: int
    stop: int | None
    """None means up to the last layer (a slice without ``layer_range``)."""
    where: str
    module: str | None = None
    """The submodel (``modules:``) by mergekit's name; None means the text model."""


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a submodel or, with ``module`` None, of the model: mergekit's ``models`` with a single entry, or with
    those that are averaged."""

    source: Origin
    module: str | None
    where: str


@dataclass(frozen=True, slots=True)
class GroupId:
    """LLMTailor's empty range ``[n, n]``: the part other than a layer with number n; see `selectors.numbering`."""

    source: Path
    number: int
    where: str


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """An entry of ``pre_weights`` or ``post_weights``: one tensor by its full name, or a part."""

    source: Path
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class Select:
    """An entry of ``parts``: what the selectors name."""

    source: Origin
    selectors: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Parts:
    """Whole parts by name. Not in YAML: only an `Assignment` has them."""

    source: Path
    parts: tuple[str, ...]


PlaceRule = Whole | LayerRange | GroupId | NamedWeight
"""Rules of mergekit's and LLMTailor's forms. They must not conflict; `Select` overrides them."""
Rule = PlaceRule | Select | Parts


@dataclass(frozen=True, slots=True)
class Assignment:
    """The checkpoint that each part comes from, and the reason."""

    base: RunCheckpoint
    """Supplies what belongs to no part"""
    source_of: Mapping[str, RunCheckpoint]
    """Every part of the model"""
    reason: Mapping[str, str]
    """Part -> reason in a few words, e.g. ``newest`` or ``flagged at 150``"""
    title: str
    """Its origin, e.g. ``strategy parity at step 400``"""

    def parts_of(self) -> dict[RunCheckpoint, tuple[str, ...]]:
        """Return the checkpoints, the base first, then newest first, and the parts that come from each."""
        others = sorted(self.source_of.values(), key=lambda source: -source.step)
        return {
            source: tuple(part for part, owner in self.source_of.items() if owner == source)
            for source in dict.fromkeys([self.base, *others])
        }


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with its paths expanded, so that different spellings of a folder are the same source."""

    name: str
    """Its name in messages: the path of its file"""
    text: str
    """The YAML as written; empty if there is none"""
    base: Path | None
    rules: tuple[Rule, ...]
    dtype: str | None
    """Dtype of the weights in the output, as a safetensors dtype name; None keeps the base's."""
    output: Path | None
    notices: tuple[Problem, ...] = ()
    """Entries that have no effect or were ignored"""
    tokenizer: Path | None = None
    """Folder, not necessarily a checkpoint, whose tokenizer files the output gets; None means the base."""
    chat_template: str | None = None
    """A Jinja template, or the name of one of mergekit's; None keeps the tokenizer's own."""

    @classmethod
    def of(
        cls,
        assignment: Assignment,
        name: str,
        text: str = "",
        notices: tuple[Problem, ...] = (),
        output: Path | None = None,
    ) -> Recipe:
        """Return the recipe that composes an assignment. `text` is for people and is never parsed."""
        parts_of = assignment.parts_of()
        rules = tuple(Parts(source.path, parts) for source, parts in parts_of.items() if parts)
        return cls(name, text, assignment.base.path, rules, None, output, notices)

    def sources(self) -> tuple[Path, ...]:
        """Return every checkpoint that states come from, the base first, then in order of appearance."""
        return checkpoints_of([*([self.base] if self.base else []), *(rule.source for rule in self.rules)])
