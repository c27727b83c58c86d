"""What a composition is made of, as data for tables, JSON, the manifest and the model card."""

from __future__ import annotations

from dataclasses import dataclass

from llmtailor.errors import Problem

SCHEMA_PLAN = "llmtailor.plan/1"
SCHEMA_MANIFEST = "llmtailor.manifest/1"
SCHEMA_INSPECT = "llmtailor.inspect/1"


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part, or the share of a part, that comes from one source."""

    part: str
    source: str
    step: int
    """The training step at which these values were saved."""
    staleness: int
    """Steps between the base and ``step``; negative if the part is newer than the base."""
    num_bytes: int
    """In the output: weights, masters and moments, without padding."""
    num_tensors: int
    is_whole: bool
    """Whether the whole part comes from this source."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source checkpoint: what it is, and how much of the output comes from it."""

    name: str
    global_step: int
    is_base: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """The optimizer's step that a flat id gets."""

    flat_id: int
    step: float
    other_steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FileRow:
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a user may want to know before or after the bytes are moved."""

    recipe: str
    out: str
    base: str
    global_step: int
    world_size: int
    parts: tuple[PartRow, ...]
    sources: tuple[SourceRow, ...]
    steps: tuple[StepRow, ...]
    files: tuple[FileRow, ...]
    num_bytes: int
    needed_bytes: int
    """Free space that the merge asks for before it begins."""
    free_bytes: int
    notices: tuple[Problem, ...]
