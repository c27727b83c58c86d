"""What a recipe says, as data: which parts come from which checkpoint.

Every form of the YAML is read into the same rules; later rules win over earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.errors import Problem


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``start``..``stop`` (half-open) from ``source``: mergekit's ``layer_range``."""

    source: Path
    start: int
    stop: int | None
    """None: up to the last layer (a slice without ``layer_range``)."""
    where: str
    module: str | None = None
    """Of a submodel (``modules:``), by mergekit's name for it; None means the text model."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Everything of a submodel, or of the whole model: mergekit's ``models`` with a single entry."""

    source: Path
    module: str | None
    """None: the whole model."""
    where: str


@dataclass(frozen=True, slots=True)
class GroupId:
    """LLMTailor's degenerate range ``[n, n]``: the auxiliary part with number n.

    0 is the final norm; with L layers, L+1 is ``lm_head`` and L+2 ``embed_tokens`` when untied,
    L+1 is ``embed_tokens`` when tied.
    """

    source: Path
    number: int
    where: str


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """An entry of ``pre_weights`` or ``post_weights``: one tensor by its FQN, or a part by its name."""

    source: Path
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class Select:
    """An entry of ``parts``: whatever the selectors name."""

    source: Path
    selectors: tuple[str, ...]
    where: str


Rule = Whole | LayerRange | GroupId | NamedWeight | Select


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with its paths resolved. Two spellings of the same folder are the same source."""

    name: str
    """The file it was read from, as messages call it."""
    text: str
    """The YAML as it was written."""
    base: Path | None
    rules: tuple[Rule, ...]
    dtype: str | None
    """Of the weights in the output, as a safetensors dtype name; None keeps the base's."""
    output: Path | None
    notices: tuple[Problem, ...] = field(default=())
    """What was read but has no meaning here."""
    tokenizer: Path | None = None
    """Folder whose tokenizer files the output gets; None takes the base's. It need not be a checkpoint."""
    chat_template: str | None = None
    """A Jinja text, or the name of a template that mergekit brings along; None leaves the tokenizer's own."""

    is_ours: bool = False
    """Whether llmtailor itself has just written it, so that what no rule names is meant to come from the base."""

    def sources(self) -> tuple[Path, ...]:
        """Return every checkpoint that states come from, the base first, then in order of appearance."""
        named = [self.base] if self.base else []
        return tuple(dict.fromkeys(named + [rule.source for rule in self.rules]))
