"""Plans how to thin out a run from the facts of its checkpoints, and lays out what to write. No tensor is read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from llmtailor.checkpoint.index import LIGHTNING, MEGATRON, CheckpointIndex
from llmtailor.checkpoint.lineage import THINNED, Ledger, RunCheckpoint, composable_steps
from llmtailor.compose.manifest import make_manifest
from llmtailor.compose.plan import MergePlan, OpenedSources, Options, plan_merge
from llmtailor.containers.json import read_json
from llmtailor.copying.copy import FileResult
from llmtailor.copying.moving import Clone
from llmtailor.errors import MismatchError, PathIn, UnsupportedCheckpoint, UsageError, some
from llmtailor.findings import ERROR
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.partial.write import check_can_be_partial, trained_states
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import find_structure, own_writer
from llmtailor.frameworks.files import ADAPTER, DCP_RECORD, MANIFEST, TRAINER_STATE
from llmtailor.frameworks.framework import framework_of, is_partial, survey_contents
from llmtailor.frameworks.read import adapters_of
from llmtailor.model.parts import ModelStructure
from llmtailor.model.precision import EXACT, Precision
from llmtailor.model.roles import WEIGHT
from llmtailor.policies import precision_of
from llmtailor.recipe import Assignment, Recipe
from llmtailor.runs.conversion import Conversion, compared, kept_files, part_bytes, plan_weights
from llmtailor.runs.folder import FolderKind, RunFolder, files_in, freed_bytes, log_entries, staged
from llmtailor.runs.prune import LINKED, PARTIAL, WEIGHTS, Chooser, FullFacts, PruneAction, Pruner, ThinOptions
from llmtailor.runs.retention import StepAge, compare_ages
from llmtailor.runs.scan import Scan, check_newest, scan_run
from llmtailor.verify.verify import verify_checkpoint

LEDGER = "ledger"
"""The key of the ledger in the manifest of a checkpoint with links"""


def read_losses(root: Path) -> dict[int, float]:
    """Return the losses logged in ``trainer_state.json``; malformed entries are left out."""
    return {
        entry["step"]: entry["loss"]
        for entry in (log_entries(root, root.name) if (root / TRAINER_STATE).is_file() else ())
        if type(entry.get("step")) is int and isinstance(entry.get("loss"), (int, float))
    }


def ledger_of_links(index: CheckpointIndex) -> Ledger | None:
    """Return the ledger of a checkpoint with links that ``thin`` has made; None for another one."""
    where = PathIn(index.name, MANIFEST)
    content = read_json(index.root / MANIFEST, where).get(LEDGER) if MANIFEST in index.files else None
    return None if content is None else Ledger.from_json(content, where)


def plan_links(
    action: PruneAction, structure: ModelStructure, full: CheckpointIndex, linked: CheckpointIndex, clone: Clone
) -> MergePlan:
    """Plan the checkpoint with links that replaces a full one.

    ``linked`` is what it links to, now or when that one has links, too. Only the places in its files differ.
    """
    own, linked_to, ledger = action.checkpoint, action.links_to, action.ledger
    assert linked_to is not None and ledger is not None
    old = ledger.held_by.keys() - {*action.parts, *action.masters}
    source_of = {part.whole: linked_to if part.whole in old else own for part in structure.parts}
    title = f"step {own.step}, thinned out"
    reasons = {part: "newest" if source_of[part] is own else f"as in {linked_to.name}" for part in source_of}
    recipe = Recipe.of(Assignment(own, source_of, reasons, title, dict.fromkeys(action.masters, linked_to)), title)
    return plan_merge(
        recipe,
        staged(full.root, FolderKind.THINNING),
        Options(reference=True, reuse=True, clone=clone, allow_errors=True),  # as resumable as the full one
        OpenedSources(indexes={full.root: full, linked.root: linked}, copied=[full.root]),
    )


def manifest_of_links(
    composition: MergePlan, ledger: Ledger, results: Sequence[FileResult], card: bytes, created: str
) -> bytes:
    content = make_manifest(composition, results, {}, card, "", created)
    return json.dumps({**content, LEDGER: ledger.to_json()}, indent=2).encode() + b"\n"


def read_facts(
    index: CheckpointIndex, structure: ModelStructure, target: Path, usable: Collection[Path], options: ThinOptions
) -> FullFacts:
    """Read the facts of a full checkpoint without its tensors; ``target`` is its path as a partial one."""
    obstacle = _why_untouchable(index)
    has_adapter = any(f"{folder}{ADAPTER}" in index.files for folder in adapters_of(index).values())
    if not obstacle and options.reference:
        obstacle = _why_no_links(index)
    elif not obstacle and not options.weights_only:
        obstacle = _why_not_partial(index, target, usable)
    elif not obstacle and not has_adapter and not any(state.kind == WEIGHT for state in index.held):
        obstacle = "it has no safetensors weights, so nothing would remain"
    has_links = ledger_of_links(index) is not None
    num_bytes = part_bytes(index, structure)
    return FullFacts(obstacle, read_losses(index.root), num_bytes, has_links, stated_attempt(index.root))


def _best_model(newest: CheckpointIndex) -> str | None:
    """Return the name of the checkpoint that the Trainer loads when it ends, with ``load_best_model_at_end``; its own
    rotation keeps it, too."""
    where = PathIn(newest.name, TRAINER_STATE)
    best = (
        read_json(newest.root / TRAINER_STATE, where).get("best_model_checkpoint")
        if TRAINER_STATE in newest.files
        else None
    )
    return Path(best).name if isinstance(best, str) else None


def _why_untouchable(index: CheckpointIndex) -> str:
    if index.root.is_symlink():
        return "it is a symbolic link"
    if index.framework == LIGHTNING and not index.form.stage:
        return "Lightning's one file has no partial form"
    if index.form.format == MEGATRON:
        return "Megatron-core's checkpoints have no partial form"
    contents = survey_contents(index.root)
    lost = [path for path in contents.known if not path.endswith("/") and path not in index.files]
    if contents.unknown:
        return f"it holds files of unknown origin: {some(contents.unknown)}"
    return f"it holds files that would be lost: {some(lost)}" if lost else ""


def _why_no_links(index: CheckpointIndex) -> str:
    if not own_writer(index).has_linkable_files(index):
        return "it is not a folder of torch.distributed.checkpoint"
    if DCP_RECORD in index.files:
        return "its saver has made links already"
    try:
        own_writer(index).check_linkable(index)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    errors = verify_checkpoint(index.root).of_severity(ERROR)  # as the one with links must be without
    return f"it is not resumable: {errors[0].what}" if errors else ""


def _why_not_partial(index: CheckpointIndex, target: Path, usable: Collection[Path]) -> str:
    state = framework_of(index).state
    if state and state not in index.files:
        return f"{state} is missing, so it is not resumable"
    if target.exists() and target not in usable:
        what = "is of another model or damaged" if is_partial(target) else "is unfinished; llmtailor gc removes it"
        return f"{target.parent.name}/{target.name} exists and {what}"
    if MANIFEST in index.files:
        rows = read_json(index.root / MANIFEST, PathIn(index.name, MANIFEST)).get("parts") or []
        if any(isinstance(row, dict) and row.get("is_whole") is False for row in rows):
            return "parts of this composite are split across sources, so its weights may not be its rounded masters"
    try:
        check_can_be_partial(index)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    return ""


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What thinning will do. Nothing has been touched yet."""

    options: ThinOptions
    scan: Scan
    """Covers every attempt"""
    actions: tuple[PruneAction, ...]
    """One for each full checkpoint, oldest first"""
    before: tuple[int, ...]
    """Composable steps now"""
    left_behind: tuple[Path, ...]
    """What a killed ``thin`` left; also removed"""
    freed: int
    """Bytes"""
    ages: tuple[StepAge, ...]
    """For each step that stays composable"""


def plan_thinning(run: str | Path, options: ThinOptions, *, trust_unrecorded: bool = False) -> ThinPlan:
    """Decide how to thin out a run's checkpoints, and compute the bytes freed; no tensor is read.

    ``trust_unrecorded`` also thins out full checkpoints that do not state their attempt.

    Raises SourceError if the newest checkpoint can't be used or no complete state would be left, UsageError for an
    invalid strategy or selectors, and MismatchError for links in a format without such files.
    """
    run = Path(run).absolute()  # on this machine: it is changed in place
    folder, scan = RunFolder(run), scan_run(run, every_chain=True, trust_unrecorded=trust_unrecorded)
    newest = scan.indexes[check_newest(scan)]
    best = _best_model(newest)
    structure, indexes = find_structure(newest), scan.indexes  # what is made here holds whole layers
    trained = {structure.part_of[param] for param in trained_states(newest)}
    parts = [part for part in structure.parts if part in trained]
    has_masters = newest.form.has_masters and newest.precision in ("BF16", "F16")
    chooser = None
    if not options.weights_only:
        chooser = Chooser.of(options, structure, parts, weights_are_masters=not has_masters)
    if options.reference:
        _check_reference(scan)

    @cache
    def facts_of(checkpoint: RunCheckpoint) -> FullFacts:
        facts = read_facts(indexes[checkpoint.path], structure, folder.at(checkpoint.step), indexes, options)
        is_best = checkpoint.name == best
        return replace(facts, obstacle=f"{newest.name} names it as the best model") if is_best else facts

    pruner = Pruner(
        checkpoints=scan.usable,
        parts=scan.structure.parts,
        keep_full=options.keep_full,
        facts=facts_of,
        chooser=chooser,
        reference=options.reference,
        thinned=[
            (replace(checkpoint, ledger=ledger), read_losses(checkpoint.path))
            for checkpoint in scan.usable
            if (checkpoint.is_thinned if not options.reference else not checkpoint.is_partial)
            and (ledger := checkpoint.ledger or ledger_of_links(indexes[checkpoint.path]))
        ],
        new_lineage=lambda: THINNED + uuid.uuid4().hex[:12],
        path_of=folder.at,
    )
    weights = newest.precision if has_masters else "F32"
    precision = precision_of(chooser.policy, options.precision, weights) if chooser else EXACT
    if options.reference and precision != EXACT:
        what = "they round states, but a stock dcp.load needs exact ones"
        raise UsageError.at("--reference", what, "omit it, or --masters, --moments and policies that round")
    actions = _measure(pruner.decide(), scan, chooser, precision)
    left = folder.left_by_thin()
    freed = sum(action.freed for action in actions) + freed_bytes(path for folder in left for path in files_in(folder))
    remaining = list(scan.usable)
    for action in actions:
        remaining = action.applied_to(remaining)
    every = scan.structure.parts
    before, after = (tuple(composable_steps(there, every)) for there in (scan.usable, remaining))
    ages = compare_ages(scan.usable, remaining, after, every)
    return ThinPlan(options, scan, actions, before, tuple(left), freed, ages)


def _check_reference(scan: Scan) -> None:
    full = [checkpoint for checkpoint in scan.usable if not checkpoint.is_partial]
    if full and not own_writer(newest := scan.indexes[full[-1].path]).has_linkable_files(newest):
        what = f"{newest.name} is {newest.format}: only FSDP's and DCP's sharded checkpoints have files to link to"
        fix = "leave it out; merge --run then composes a step when it is needed"
        raise MismatchError.at("--reference", what, fix)


def _measure(
    actions: Iterable[PruneAction], scan: Scan, chooser: Chooser | None, precision: Precision
) -> tuple[PruneAction, ...]:
    """Lay out each partial checkpoint to write, so that its size is known to the byte."""
    frozen: dict[str, tuple[Path, int]] = {}
    for save in scan.partial:  # oldest first
        for fact in read_manifest(save.path, save.name).bundles:
            frozen[fact.path] = (save.path, fact.num_bytes)
    measured = []
    for action in actions:
        index = scan.indexes[action.checkpoint.path]
        conversion, freed = None, 0
        if action.becomes == WEIGHTS:
            stays = {*kept_files(index)}
            lost = (index.root / path for path in index.files if path not in stays)
            freed = freed_bytes(lost) - plan_weights(index).num_bytes
        elif action.becomes in (PARTIAL, LINKED):
            freed = freed_bytes(files_in(index.root))
        if action.links_to is not None and action.ledger is not None:
            planned = plan_links(action, scan.structure, index, scan.indexes[action.links_to.path], "never")
            linked = sum(file.num_bytes for file in planned.plan.links)
            written = planned.plan.num_bytes - linked
            freed -= written + len(manifest_of_links(planned, action.ledger, (), b"", ""))
            action = replace(action, written_bytes=written, linked_bytes=linked)
        successor = action.successor if action.becomes == PARTIAL and action.is_written else None
        if successor is not None and successor.ledger is not None and chooser is not None:
            conversion = Conversion(
                source=index,
                structure=chooser.structure,
                target=successor.path,
                parts=action.parts,
                ledger=successor.ledger,
                policy=chooser.settings(),
                older=dict(frozen),
                masters=action.masters,
                precision=precision,
            )
            freed -= conversion.num_bytes
            frozen |= {file.path: (successor.path, file.num_bytes) for file in conversion.layout.frozen}
        measured.append(replace(action, freed=freed, conversion=conversion))
    return tuple(measured)


def bytes_to_move(plan: ThinPlan) -> int:
    """Return the total bytes that `thin` reports to its ``on_progress``."""
    total = 0
    for action in plan.actions:
        if action.conversion is not None:
            total += action.conversion.plan.num_bytes
        elif action.becomes == LINKED:
            total += action.written_bytes + action.linked_bytes // 2  # which are not read back
        elif action.becomes == WEIGHTS:
            total += plan_weights(plan.scan.indexes[action.checkpoint.path]).num_bytes
        elif action.successor is not None:
            index = plan.scan.indexes[action.successor.path]
            total += sum(index.held[state].held_bytes for state in compared(index))
    return 2 * total  # written and read back, or both read
