"""The service behind ``llmtailor verify``: lenient index -> structure -> (read everything) -> verdict."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import DCP, TRAINER, CheckpointIndex, Survey
from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.checkpoint.optimizer import count_ranks
from llmtailor.checkpoint.placement import Runs
from llmtailor.codes import Code
from llmtailor.containers.json import MAX_BYTES
from llmtailor.containers.torch_file import list_records
from llmtailor.documents import document
from llmtailor.errors import PathIn, Problem, Problems, SourceError, UnsupportedCheckpoint, counted
from llmtailor.findings import ERROR, NOTE, SEVERITIES, WARNING, Finding, folded
from llmtailor.formats.partial import manifest as partial
from llmtailor.formats.partial.manifest import step_in_name
from llmtailor.formats.provenance import read_manifest
from llmtailor.formats.registry import (
    absent_parts,
    check_headers,
    display_name,
    find_structure,
    resumes_from_weights,
    split_parts,
    survey_checkpoint,
)
from llmtailor.frameworks.files import (
    CONFIG,
    FOLDER,
    MANIFEST,
    OPTIMIZER,
    PARTIAL_MANIFEST,
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    is_rng_file,
    is_weight_file,
)
from llmtailor.frameworks.framework import framework_of, is_or_may_be_partial
from llmtailor.model.parts import Part, condense, with_layers
from llmtailor.model.roles import MASTER, State
from llmtailor.storage.local import as_path, read_source
from llmtailor.timing import Stopwatch, unreported
from llmtailor.verify.structure import check_index, check_manifest, check_step, join, lost_elements

RESUMABLE = "resumable"
WITH_WARNINGS = "resumable with warnings"
NOT_RESUMABLE = "not resumable"
UNJUDGED = "can't be judged"
INTACT = "partial, intact"
INTACT_WITH_WARNINGS = "partial, intact with warnings"
DAMAGED = "partial, damaged"
_READ = {SCALER, TRAINER_STATE, CONFIG, MANIFEST}
"""Files that the index has already decoded"""
_FIX = "a resume does not read it; copy it again if you need it"
_NOT_LOOKED_INTO = (Code.COMPRESSED, Code.LEGACY, Code.STATE_LAYOUT)
"""Read by torch; its content is unknown here."""
_MISSING = (Code.FILE_MISSING, Code.SCHEDULER_MISSING, Code.RNG_MISSING)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """The unusable files and elements; everything else that was checked is usable."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that are missing, incomplete or wrong: relative path -> what is wrong"""
    states: Mapping[State, Runs] = field(default_factory=dict)
    """Elements of a state that are lost or wrong. If two states contradict each other, both are listed."""


@dataclass(frozen=True, slots=True)
class Holding:
    held: tuple[str, ...]
    absent: tuple[str, ...]
    masters: tuple[Part, ...] = ()
    """Those of the absent parts of which it holds the masters, without the moments"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying a checkpoint."""

    name: str
    """The checkpoint's name in messages"""
    is_deep: bool
    """Whether the tensors were also read"""
    findings: tuple[Finding, ...]
    """Sorted by severity, the most severe first"""
    damage: Damage
    index: CheckpointIndex | None
    """What is known of the checkpoint despite the damage; see `checkpoint.index.Survey`."""
    is_partial: bool = False
    """Whether it is partial: no stock resume reads it, so it is judged as a source of composites"""
    holding: Holding | None = None
    """Set for a partial checkpoint that could be indexed"""
    is_judged: bool = True
    """False for a kind of checkpoint that can't be read here: it may well be resumable"""

    @property
    def level(self) -> str:
        if not self.is_judged:
            return UNJUDGED
        levels = (
            (DAMAGED, INTACT_WITH_WARNINGS, INTACT) if self.is_partial else (NOT_RESUMABLE, WITH_WARNINGS, RESUMABLE)
        )
        return levels[0 if self.of_severity(ERROR) else 1 if self.of_severity(WARNING) else 2]

    @property
    def is_intact(self) -> bool:
        """Whether a stock resume works or, for a partial checkpoint, everything it holds is usable"""
        return self.is_judged and not self.of_severity(ERROR)

    @property
    def is_resumable(self) -> bool:
        """Whether a stock resume works, possibly with warnings; a partial checkpoint never does"""
        return self.is_intact and not self.is_partial

    def of_severity(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def refused(path: Path, deep: bool, error: SourceError) -> Verdict:
    """Return the verdict on a folder that is not a usable checkpoint, or of a kind that can't be judged."""
    is_judged = not isinstance(error, UnsupportedCheckpoint)
    findings = tuple(Finding.of(problem, ERROR if is_judged else WARNING) for problem in error.problems)
    return Verdict(display_name(path), deep, findings, Damage(), None, is_judged=is_judged)


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings without duplicates, the most severe first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))


def to_json(verdict: Verdict) -> dict[str, Any]:
    index, holding = verdict.index, verdict.holding
    known = ("format", "world_size", "global_step")
    content = {
        "name": verdict.name,
        "verdict": verdict.level,
        "resumable": verdict.is_resumable,
        "intact": verdict.is_intact,
        "parts": {"held": holding.held, "absent": holding.absent} if holding else None,
        "deep": verdict.is_deep,
        **{name: getattr(index, name, None) for name in known},
        "findings": verdict.findings,
        "damaged_files": [{"path": path, "what": what} for path, what in sorted(verdict.damage.files.items())],
        "damaged_states": [
            {"param": state.param, "kind": state.kind, "elements": runs}
            for state, runs in sorted(verdict.damage.states.items())
        ],
    }
    return document("verify/1", content)


def to_text(verdict: Verdict) -> str:
    """Return the verdict in one line, followed by the findings, the most severe first."""
    counts = ", ".join(
        counted(len(of_severity), severity) for severity in SEVERITIES if (of_severity := verdict.of_severity(severity))
    )
    lines = [f"{verdict.name}: {verdict.level}" + (f" ({counts})" if counts else "")]
    if (index := verdict.index) is not None:
        read = "every byte was read" if verdict.is_deep else "structure only, no tensor was read"
        by = "" if index.framework in (TRAINER, DCP) else f", resumed by {framework_of(index).title}"
        ranks = count_ranks(index.layout.mesh)
        lines.append(f"{index.format}, step {index.global_step}, for {ranks}{by}; {read}")
        if verdict.holding is not None:
            lines.append(_what_it_holds(verdict.holding, index, verdict.is_intact))
    lines += [f"{finding.severity}: {finding}" for finding in folded(verdict.findings)]
    return "\n".join(lines)


def _what_it_holds(holding: Holding, index: CheckpointIndex, is_intact: bool) -> str:
    """Return what a partial checkpoint holds, and the command that makes a resumable checkpoint of it."""
    total = len(holding.held) + len(holding.absent)
    parts = (
        f"{len(holding.held)} of {total} parts: {condense(holding.held)}" if holding.absent else f"all {total} parts"
    )
    if holding.masters:
        parts += f"; the masters alone of {len(holding.masters)}: {condense(holding.masters)}"
    if not is_intact:
        return f"holds {parts}"
    merge = "llmtailor merge RECIPE"
    if index.root.absolute().parent.name == FOLDER:
        run = shlex.quote(display_name(index.root.absolute().parent.parent))
        merge = f"llmtailor merge --run {run} --at {index.global_step}"
    return f"holds {parts}; for a resumable checkpoint: {merge}"


def check_file(root: Path, path: str, where: str) -> None:
    """Check that a JSON or torch file can be read. Raises SourceError, OSError, ValueError or RecursionError."""
    if path.endswith(".json"):
        json.loads(read_source(root / path, where, MAX_BYTES).decode())
    elif path.endswith((".bin", ".pt", ".pth")):
        list_records(root, path, where)


def check_files_beside(index: CheckpointIndex) -> Iterator[Finding]:
    """Report damaged tokenizer files, configs and other JSON and torch files in the checkpoint's root."""
    own = {*_READ, SCHEDULER, OPTIMIZER, framework_of(index).scheduler, framework_of(index).optimizer}
    for path in index.files:
        where = PathIn(index.name, path)
        if "/" in path or path in own or is_rng_file(path):
            continue
        try:
            check_file(index.root, path, where)
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(where, f"the file is not JSON ({error})", _FIX, Code.FILE_DAMAGED, WARNING)
        except UnsupportedCheckpoint:  # torch reads it
            continue
        except SourceError as error:
            for problem in error.problems:
                yield Finding(problem.where, problem.what, _FIX, problem.code, WARNING)


def check_partial(index: CheckpointIndex) -> Iterator[Finding]:
    """Report a save record that is damaged or of another save, and a folder with a wrong name."""
    manifest = partial.read_manifest(index.root, index.name)
    where = PathIn(index.name, PARTIAL_MANIFEST)
    try:
        record = RunCheckpoint.from_json(index.root, manifest.ledger, where)
    except SourceError as error:
        yield from (Finding.of(problem, ERROR) for problem in error.problems)
    else:
        if (record.step, record.parts) != (manifest.step, with_layers(manifest.parts, record.needed_parts)):
            what = "its record of earlier saves does not end with this save"
            yield Finding(where, what, "do not use this checkpoint; its save is damaged", Code.MANIFEST, ERROR)
    fix = "rename the folder: merge --run, salvage and thin rely on its name"
    yield from check_step(index, step_in_name(index.root.name), fix)


def verify_checkpoint(
    path: str | Path,
    deep: bool = False,
    on_progress: Callable[[int], None] | None = None,
    name: str | None = None,
    framework: str | None = None,
) -> Verdict:
    """Check whether unmodified software resumes from a checkpoint correctly; find damage.

    A partial checkpoint is checked for whether composites can be made from it.

    Args:
        path: the checkpoint's folder.
        deep: read every tensor, in parallel. Otherwise only headers and pickles are read, in seconds for any size.
        on_progress: with ``deep``, called with a number of bytes read, from several threads.
        name: the checkpoint's name in messages; None for its path.
        framework: what will resume from it: ``trainer``, ``accelerate``, ``lightning`` or ``deepspeed`` (an engine in a
            loop); None for the one whose files it has.

    Raises:
        UnsupportedCheckpoint: an unsupported kind of checkpoint.
        SourceError: the folder is not a checkpoint.
        Interrupted: Ctrl-C or SIGTERM.
    """
    path = as_path(path)
    name = name or display_name(path)
    return verify_surveyed(survey_checkpoint(path, name, framework), path, deep, on_progress or unreported, name)


def verify_surveyed(
    survey: Survey,
    root: Path,
    deep: bool = False,
    on_progress: Callable[[int], None] = unreported,
    name: str | None = None,
) -> Verdict:
    """Do what `verify_checkpoint` does, with what `survey_checkpoint` has found in the folder."""
    name, watch = name or display_name(root), Stopwatch()
    if not is_or_may_be_partial(root):  # partial ones are of a supported kind or damaged
        _refuse_unsupported(survey)
    findings = [
        Finding.of(problem, _severity(problem, root)) for error in survey.problems.errors for problem in error.problems
    ]
    index, states, holding, manifest, unreadable = survey.index, {}, None, None, {*survey.unreadable}
    values: tuple[Finding, ...] = ()
    if index is not None:
        with _noting(findings, WARNING):
            manifest = read_manifest(index.root, index.name)
        findings += [*index.findings, *check_files_beside(index)]
        if index.form.is_partial:
            findings += check_partial(index)
            with _noting(findings, ERROR):  # its config.json may not define parts
                structure = split_parts(find_structure(index), index)
                absent = absent_parts(index, structure)
                held_parts = tuple(part for part in structure.parts if part not in absent)
                lacking = tuple(part for part in structure.parts if part in absent)
                no_masters = absent_parts(index, structure, MASTER)
                holding = Holding(held_parts, lacking, tuple(part for part in lacking if part not in no_masters))
        else:
            findings += [*check_index(index), *(check_manifest(index, manifest) if manifest else ())]
            problems = Problems()
            unreadable |= check_headers(index, problems)
            reported = {(finding.path, finding.what) for finding in findings}
            more = [Finding.of(problem, ERROR) for error in problems.errors for problem in error.problems]
            findings += [finding for finding in more if (finding.path, finding.what) not in reported]
        if deep:
            from llmtailor.verify.values import read_everything  # numpy takes a while

            deep_result = read_everything(index, frozenset(unreadable), manifest, on_progress)
            findings, values, states = [*findings, *deep_result.findings], deep_result.values, deep_result.states
        else:
            states = join(lost_elements(index, frozenset(unreadable)))
    in_the_way = {finding.path for finding in findings if finding.code is Code.NOT_A_FILE}
    # a file is not missing where a folder, pipe or the like has its name
    findings = [finding for finding in findings if finding.code not in _MISSING or finding.path not in in_the_way]
    damage = Damage(_damaged_files(findings, root), states)
    verdict = Verdict(name, deep, by_severity([*findings, *values]), damage, index, is_or_may_be_partial(root), holding)
    logger.info("verified %s in %s%s: %s", name, watch.lap(), ", every byte" if deep else "", verdict.level)
    _log_damage(damage)
    return verdict


def _log_damage(damage: Damage) -> None:
    if damage.states:
        logger.info("%d states are damaged; -vv lists them", len(damage.states))
    for path in sorted(damage.files):
        logger.info("damaged file: %s", path)
    for state, runs in sorted(damage.states.items()):
        elements = ", ".join(f"{begin}-{end - 1}" for begin, end in runs)
        logger.debug("damaged state: %s of %s, elements %s", state.kind, state.param, elements)


def _refuse_unsupported(survey: Survey) -> None:
    """Raise if the only problem is an unsupported kind of checkpoint: it may well be resumable."""
    errors = survey.problems.errors
    if not errors or not all(isinstance(error, UnsupportedCheckpoint) for error in errors):
        return
    paths = {problem.path for error in errors for problem in error.problems if problem.code in _NOT_LOOKED_INTO}
    if survey.index is None or paths & survey.unreadable:
        survey.problems.raise_if_any()


def _severity(problem: Problem, root: Path) -> str:
    """Return a warning for a file that a resume does not read; without DeepSpeed it reads weights and config.json."""
    path = problem.path
    if is_or_may_be_partial(root):
        return ERROR
    if problem.code in (*_NOT_LOOKED_INTO, Code.FILE_UNKNOWN) or (
        problem.code is Code.NOT_A_FILE and path and is_rng_file(path)
    ):
        return WARNING
    if path == MANIFEST:
        return WARNING
    if path is not None and (is_weight_file(path) or path == CONFIG) and not resumes_from_weights(root, path):
        return WARNING
    return ERROR


@contextmanager
def _noting(findings: list[Finding], severity: str) -> Iterator[None]:
    """Add the problems of a SourceError to the findings."""
    try:
        yield
    except SourceError as error:
        findings += [Finding.of(problem, severity) for problem in error.problems]


def _damaged_files(findings: Iterable[Finding], root: Path) -> dict[str, tuple[str, ...]]:
    damaged: dict[str, list[str]] = {}
    for finding in findings:
        if finding.severity != NOTE and finding.path is not None and not (root / finding.path).is_dir():
            damaged.setdefault(finding.path, []).append(finding.what)
    return {path: tuple(dict.fromkeys(texts)) for path, texts in damaged.items()}
