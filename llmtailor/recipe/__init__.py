"""A recipe as data: which parts come from which checkpoint.

Every form of the YAML, and every `Assignment` for a run, becomes the same kind of rules. Later rules override earlier
ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem
from llmtailor.model.parts import EMBED, HEAD, NORM, Part


@dataclass(frozen=True, slots=True)
class Average:
    """A weighted average of checkpoints."""

    members: tuple[tuple[Path, float], ...]
    """Checkpoints and their weights as written, all above 0; `shares` sum to 1."""
    moments: str
    """One of `checkpoint.sources.MOMENTS`"""
    where: str = field(default="", compare=False)
    decay: float | None = None
    """Of an exponential moving average, whose weights follow from the steps of the checkpoints, see
    `resolve.weigh`; None if the weights are final."""

    def shares(self) -> tuple[tuple[Path, float], ...]:
        """Return the checkpoints with weights that sum to 1."""
        total = math.fsum(weight for _, weight in self.members)
        return tuple((source, weight / total) for source, weight in self.members)

    def __str__(self) -> str:
        return "average of " + ", ".join(f"{source} ({share:g})" for source, share in self.shares())


Origin = Path | Average
"""Where a tensor comes from"""
ONLY_MOMENTS = "moments"
"""What a rule names if it does not name the whole state"""


def checkpoints_of(origins: Iterable[Origin]) -> tuple[Path, ...]:
    """Return every checkpoint among the origins, each once, in order."""
    paths: dict[Path, None] = {}
    for origin in origins:
        paths |= dict.fromkeys([source for source, _ in origin.members] if isinstance(origin, Average) else [origin])
    return tuple(paths)


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
class WholeModel:
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
    """An entry of ``parts``: a source, and selectors of tensors."""

    source: Origin
    selectors: tuple[str, ...]
    where: str
    only: str | None = None
    """``ONLY_MOMENTS``: the moments, without masters and weights. Such a rule names one checkpoint."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Whole parts by name. Not in YAML: only an `Assignment` has them."""

    source: Path
    parts: tuple[Part, ...]
    only: str | None = None
    """As in `Select`"""


PlaceRule = WholeModel | LayerRange | GroupId | NamedWeight
"""Rules of mergekit's and LLMTailor's forms. They must not conflict; `Select` overrides them."""
Rule = PlaceRule | Select | Parts


@dataclass(frozen=True, slots=True)
class Assignment:
    """The checkpoint that each part comes from, and the reason."""

    base: RunCheckpoint
    """Supplies what belongs to no part"""
    source_of: Mapping[Part, RunCheckpoint]
    """Every part of the model"""
    reason: Mapping[Part, str]
    """Part -> reason in a few words, e.g. ``newest`` or ``flagged at 150``"""
    title: str
    """Its origin, e.g. ``strategy parity at step 400``"""
    moments_of: Mapping[Part, RunCheckpoint] = field(default_factory=dict)
    """Part -> the checkpoint that its moments come from, if that is not the one in ``source_of``"""

    def joined(self) -> Assignment:
        """Return the same with each layer as one part if all of it comes from one checkpoint for one reason."""
        sources: dict[Part, set[tuple[RunCheckpoint, RunCheckpoint | None, str]]] = {}
        for part, source in self.source_of.items():
            sources.setdefault(part.whole, set()).add((source, self.moments_of.get(part), self.reason[part]))
        name = {part: part.whole if len(sources[part.whole]) == 1 else part for part in self.source_of}
        return replace(
            self,
            source_of={name[part]: source for part, source in self.source_of.items()},
            reason={name[part]: self.reason[part] for part in self.source_of},
            moments_of={name[part]: source for part, source in self.moments_of.items()},
        )

    def rules(self) -> list[tuple[RunCheckpoint, tuple[Part, ...], str | None]]:
        """Return each checkpoint, the base first, then newest first, with the parts that come from it; then those that
        only moments come from, marked by `ONLY_MOMENTS`."""

        def by_source(
            of: Mapping[Part, RunCheckpoint], first: Sequence[RunCheckpoint], only: str | None
        ) -> Iterator[tuple[RunCheckpoint, tuple[Part, ...], str | None]]:
            for source in dict.fromkeys([*first, *sorted(of.values(), key=lambda source: -source.step)]):
                yield source, tuple(part for part, owner in of.items() if owner == source), only

        return [*by_source(self.source_of, [self.base], None), *by_source(self.moments_of, [], ONLY_MOMENTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe with its paths expanded, so that different spellings of a folder are the same source."""

    name: str
    """Its name in messages: the path of its file"""
    text: str = ""
    """The YAML as written; empty if there is none"""
    base: Path | None = None
    rules: tuple[Rule, ...] = ()
    dtype: str | None = None
    """Dtype of the weights in the output, as a safetensors dtype name; None keeps the base's."""
    output: Path | None = None
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
        rules = tuple(Parts(source.path, parts, only) for source, parts, only in assignment.rules() if parts)
        return cls(name=name, text=text, base=assignment.base.path, rules=rules, output=output, notices=notices)

    def is_unlike_mergekit(self, parts: Collection[str]) -> bool:
        """Return whether mergekit would take some of these parts, which no rule names, from elsewhere than the base.

        Given slices, it takes the embeddings from the first, and norm and head from the last (``mergekit/plan.py``).
        """
        slices = [rule.source for rule in self.rules if isinstance(rule, LayerRange) and rule.module is None]
        own: dict[str, list[Path]] = {EMBED: slices[:1], NORM: slices[-1:], HEAD: slices[-1:]}
        return any(part in own and own[part] not in ([], [self.base]) for part in parts)

    def sources(self) -> tuple[Path, ...]:
        """Return every checkpoint that states come from, the base first, then in order of appearance."""
        return checkpoints_of([*([self.base] if self.base else []), *(rule.source for rule in self.rules)])
