"""Attests a training on all ranks: who reads what, and what happens if it is not the training that was saved."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.attestation.compare import (
    STOP,
    LearningRates,
    Mismatch,
    RankResult,
    Subject,
    compare_counters,
    compare_groups,
    compare_numbers,
    compare_schedule,
    compare_steps,
    compare_strays,
    compare_ties,
    entry_of,
    expected_states,
    rates_in,
)
from llmtailor.attestation.hooks import PROCESS_HOOKS
from llmtailor.attestation.read import Live, compare_copies, compare_states, digest_copies, lost_states
from llmtailor.attestation.report import Attestation, headline, lacking, lines_of, other_params, summarize
from llmtailor.checkpoint.index import DEEPSPEED, CheckpointIndex
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.containers.torch_file import read_attributes
from llmtailor.containers.unpickle import Call
from llmtailor.errors import Problem, SourceError, UnsupportedCheckpoint, VerificationError, counted
from llmtailor.formats.lightning_tree import SCHEDULERS
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import survey_checkpoint
from llmtailor.frameworks.files import CKPT, LATEST, SCALER, SCHEDULER, TRAINER_STATE, TRAINING_ARGS, tag_in
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.model.roles import BUFFER, FROZEN, KIND_OF_ROLE, MASTER, State
from llmtailor.ranks.team import Ranks

logger = logging.getLogger("llmtailor.attest")
_FIX = (
    "read the cause; then load the checkpoint completely, or use another one (llmtailor verify lists its problems). To "
    'train on all the same, leave out on_mismatch="stop"'
)


class NotTheSame(VerificationError):
    """The training does not hold the checkpoint that it was resumed from."""

    code = Code.RESUME_DIFFERS
    meaning = "a resumed training does not hold the states of its checkpoint"


def open_index(checkpoint: Path) -> CheckpointIndex:
    """Return the index of a checkpoint, which may lack its scheduler: a resume does not, and is attested all the same.

    Where ``latest`` names a tag inside another checkpoint's folder, as ``salvage`` leaves it, that checkpoint is meant.
    Raises SourceError.
    """
    inside = Path(tag_in(checkpoint / LATEST)).parent
    if inside.name and (checkpoint / inside).is_dir():
        checkpoint = checkpoint / inside
    survey = survey_checkpoint(checkpoint)
    problems = [problem for error in survey.problems.errors for problem in error.problems]
    if survey.index is not None and all(
        problem.path == SCHEDULER and problem.code is Code.FILE_MISSING for problem in problems
    ):
        return survey.index
    return survey.sound_index()


def judged(error: SourceError, name: str, how: str) -> Attestation | None:
    """Return the attestation of a checkpoint that can't be read for a reason which shows that a resume of it is another
    training: files are missing, or the optimizer has other params. None for any other reason."""
    codes = {problem.code for problem in error.problems}
    if codes == {Code.FILE_MISSING}:
        return lacking(name, [problem.path or problem.where for problem in error.problems], how)
    if codes == {Code.RESUME_DIFFERS}:
        return other_params(name, error.problems[0].what, how)
    return None


def attest_live(index: CheckpointIndex, find_live: Callable[[], Live], ranks: Ranks, how: str) -> Attestation:
    """Compare what all ranks hold with a checkpoint. Every rank calls it; all get the same result.

    ``find_live`` returns what this rank holds. Each rank reads only its own elements. An error on one rank, such as a
    file that can't be read, is raised on all. Raises UnsupportedCheckpoint if no state can be compared.
    """
    began = time.monotonic()

    lives: list[Live] = []

    def begin() -> dict[str, bytes]:
        lives.append(find_live())
        return digest_copies(lives[0], how)

    first, *digests_of_others = ranks.run_on_all(begin)
    unlike = {name for name in first if any(digests.get(name) != first[name] for digests in digests_of_others)}

    def compare() -> tuple[RankResult, dict[str, int], bool]:
        live = lives[0]
        needs = FRAMEWORKS[index.framework].needs_scheduler and live.schedule is not None
        findings = _compare_all(index, live, how)
        differences = (*findings.differences, *compare_copies(index, live, how, unlike))
        return replace(findings, differences=differences), _totals(index, live), needs and saved_schedule(index) is None

    results = ranks.run_on_all(compare)
    _, totals, lacks_scheduler = results[0]
    findings = [of_rank for of_rank, _, _ in results]
    seconds = time.monotonic() - began
    result = summarize(index, findings, how, totals, lacks_scheduler=lacks_scheduler, seconds=seconds)
    if result.is_same and not result.num_states:
        fix = "see the notes; states of this kind of training can't be compared"
        raise UnsupportedCheckpoint.at(index.name, "not one of its states can be compared", fix)
    return result


def _compare_all(index: CheckpointIndex, live: Live, how: str) -> RankResult:
    states = compare_states(index, live, how)
    mismatches: list[Mismatch] = list(compare_steps(index, live.steps, live.aliases))
    mismatches += compare_numbers(index, live.numbers, live.aliases)
    in_groups, notes = compare_groups(index, live.groups)
    saved = saved_schedule(index)
    if saved is not None and live.schedule is not None:
        saved = replace(saved, arguments=_saved_arguments(index, live.schedule.arguments))
    schedule, more = compare_schedule(live.schedule, saved)
    mismatches += [*compare_strays(live.strays), *compare_ties(index, live.roles, live.aliases)]
    mismatches += [*in_groups, *schedule, *compare_counters(Subject.COUNTER, live.counters, saved_counters(index))]
    if (past := stated_attempt(index.root)) is not None and past.missed:
        notes.append(f"second moments lack up to {counted(max(past.missed.values()), 'update')} that Adam counts")
    scale = saved_scale(index)
    if not live.scale and scale.get(_IS_DYNAMIC, bool(scale)):
        notes.append("loss scale: the checkpoint has one, but the training gives none to compare")
    if live.scale and live.scale.get(_IS_DYNAMIC) == scale.get(_IS_DYNAMIC):
        scale = {f"loss scale: {key}": value for key, value in scale.items()}
        mine = {f"loss scale: {key}": live.scale[key] for key in _OF_SCALE if key in live.scale}
        mismatches += compare_counters(Subject.SCALE, mine, scale)
    return replace(states, mismatches=tuple(mismatches), notes=(*states.notes, *notes, *more))


def _totals(index: CheckpointIndex, live: Live) -> dict[str, int]:
    """Return the states in the checkpoint that a resume of this training loads, by kind."""
    totals: dict[str, int] = {}
    expected = expected_states(index)
    for param, role in live.roles.items():
        own = KIND_OF_ROLE[role]
        if entry_of(index, State(param, own), live.aliases) is not None:
            totals[own] = totals.get(own, 0) + 1
        if role == "buffer":
            continue
        names = [name for name in (param, *live.aliases.get(param, ())) if name in expected]
        for kind in expected[names[0]] if names else ():
            if kind not in (MASTER, FROZEN, BUFFER):
                totals[kind] = totals.get(kind, 0) + 1
    for kinds in lost_states(index, live).values():
        for kind in kinds:
            totals[kind] = totals.get(kind, 0) + 1
    return totals


def saved_schedule(index: CheckpointIndex) -> LearningRates | None:
    """Return the scheduler: that of the loader's file, of DeepSpeed's model states, Lightning's one, or the one that a
    loop has saved in a DCP folder, whatever key it gave it."""
    tree = index.train.trees.get(FRAMEWORKS[index.framework].scheduler) or index.train.trees.get(SCHEDULER)
    models: list[Mapping[str, Any]] = [model for model in index.zero.engine.model[:1] if model]
    listed = [state.get(SCHEDULERS) for state in (index.train.trees.get(CKPT), *models) if isinstance(state, Mapping)]
    of_lightning = [schedulers[0] for schedulers in listed if isinstance(schedulers, list) and len(schedulers) == 1]
    for state in (tree, *(model.get("lr_scheduler") for model in models), *of_lightning, _scheduler_in_dcp(index)):
        if isinstance(state, Mapping):
            options = next((options_of(model.get("ds_config")) for model in models), {})
            in_groups = [group.hyper.get("lr") for group in index.groups]  # DeepSpeed's has no rates
            rates = state.get("_last_lr") or in_groups
            return LearningRates(state, options, rates_in(rates))
    return None


def _saved_arguments(index: CheckpointIndex, wanted: Collection[str]) -> Mapping[str, Any]:
    """Return the Trainer's arguments that decide the schedule. No resume needs their file, so it may be missing."""
    values: dict[str, Any] = {}
    if not wanted:
        return values
    with suppress(SourceError):
        arguments = read_attributes(index.root, TRAINING_ARGS, index.name)
        values = {key: arguments[key] or 0 for key in wanted if key in arguments and key != MAX_STEPS}
    with suppress(SourceError):  # the arguments may state epochs
        if MAX_STEPS in wanted and (steps := read_json(index.root / TRAINER_STATE, index.name).get(MAX_STEPS)):
            values[MAX_STEPS] = steps
    return {key: value.args[0] if isinstance(value, Call) and value.args else value for key, value in values.items()}


MAX_STEPS = "max_steps"


def _scheduler_in_dcp(index: CheckpointIndex) -> Mapping[str, Any] | None:
    entries: dict[tuple[str | int, ...], dict[str, Any]] = {}
    for entry in index.others.values():
        if not entry.is_tensor:
            entries.setdefault(entry.path[:-1], {})[str(entry.path[-1])] = entry.content
    states = {path: state for path, state in entries.items() if path and "last_epoch" in state}
    outer = [state for path, state in states.items() if not any(path[:at] in states for at in range(1, len(path)))]
    return outer[0] if len(outer) == 1 else None


def options_of(config: object) -> Mapping[str, Any]:
    """Return the options of the scheduler in a config of DeepSpeed."""
    scheduler = config.get("scheduler") if isinstance(config, Mapping) else None
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    return {} if scheduler is None else {"type": scheduler.get("type"), **(params or {})}


_OF_SCALE = ("scale", "_growth_tracker", "cur_scale", "cur_iter")
"""Of torch's GradScaler and of DeepSpeed's loss scalers"""
_IS_DYNAMIC = "dynamic"
"""Of DeepSpeed's loss scalers: that of fp16 training is, and is of no use to a training in another precision"""


def saved_scale(index: CheckpointIndex) -> Mapping[str, Any]:
    """Return the state of the GradScaler, or of DeepSpeed's own loss scaler, which each rank has saved; empty if there
    is none."""
    if isinstance(tree := index.train.trees.get(SCALER), Mapping):
        return tree
    outer = (index.zero.engine.optim[0] or {}).get("optimizer_state_dict") if index.zero.engine.optim else None
    scaler = outer.get("loss_scaler") if isinstance(outer, Mapping) else None
    state = scaler.state if isinstance(scaler, Call) else None
    return state if isinstance(state, Mapping) and index.form.format == DEEPSPEED else {}


ENGINE_COUNTERS = {f"DeepSpeed's {key}": key for key in ("global_steps", "skipped_steps")}


def saved_counters(index: CheckpointIndex) -> dict[str, Any]:
    """Return the counters that the checkpoint states. A step that is only known from the optimizer's is none: it does
    not count steps that a GradScaler has skipped."""
    is_stated = any(index.zero.engine.model) or {TRAINER_STATE, CKPT} & index.files.keys()
    counters: dict[str, Any] = {"global_step": index.global_step} if is_stated else {}
    for model in index.zero.engine.model[:1]:
        if model:
            counters |= {name: model.get(key) for name, key in ENGINE_COUNTERS.items()}
    return counters


def announce(result: Attestation, ranks: Ranks, on_mismatch: str) -> None:
    """Say on rank 0 what was found; raise NotTheSame on every rank if it differs and ``on_mismatch`` is ``stop``."""
    if PROCESS_HOOKS.take is not None:
        PROCESS_HOOKS.take(result, ranks, on_mismatch)
    lines = lines_of(result)
    if ranks.is_first:
        if result.is_same:
            for line in lines:
                logger.warning("%s", line)
        else:
            warn_prominently(lines)
    if not result.is_same and on_mismatch == STOP:
        raise not_the_same(result)


def not_the_same(result: Attestation) -> NotTheSame:
    what = headline(result)
    if result.cause is not None:
        what += f"; {result.cause.what}"
    return NotTheSame(Problem(result.checkpoint, what, _FIX, Code.RESUME_DIFFERS))


def warn_prominently(lines: list[str]) -> None:
    """Write a warning to the log, and to stderr between two bars, so that nobody overlooks it."""
    logger.error("%s", "\n".join(lines))
    bar = "!" * 100
    print("\n".join(["", bar, *lines, bar, ""]), file=sys.stderr, flush=True)


def attest_or_warn(attest: Callable[[], None], checkpoint: object, is_first: bool, *, is_strict: bool = False) -> None:
    """Attest; if that fails, only warn: what can't be attested is not another training.

    ``is_strict`` raises every error.
    """
    try:
        attest()
    except NotTheSame:
        raise
    except Exception as error:
        if is_strict:
            raise
        if is_first:
            logger.warning("resumed from %s: not attested: %s", checkpoint, error)
            logger.debug("", exc_info=True)
