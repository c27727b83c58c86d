"""Checks whether the sources fit together: pure comparisons of indexes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout, Slot, Sources
from llmtailor.compose.adam_step import StepChoice
from llmtailor.errors import MismatchError, Problem, Problems, some
from llmtailor.model.states import BUFFER, WEIGHT

_PARTIAL = (
    "it is a partial checkpoint: name a source for these parts, or let llmtailor merge --run RUN_DIR choose them all"
)
_OTHER_MODEL = "use checkpoints of the same model and training setup"
_IN_UPDATE = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


def check_fit(indexes: Sequence[CheckpointIndex], base: int, any_groups: bool = False) -> None:
    """Raise MismatchError with every difference between the sources and the base.

    With ``any_groups`` their param groups may differ: states are matched by name, and the target gets new groups.
    """
    problems = Problems()
    reference = indexes[base]
    for index in indexes:
        if index is not reference:
            for problem in differences(index, reference, any_groups):
                problems.add(MismatchError(problem))
    problems.raise_if_any()


def differences(index: CheckpointIndex, base: CheckpointIndex, any_groups: bool = False) -> list[Problem]:
    found: list[Problem] = []

    def differ(what: str, fix: str = _OTHER_MODEL) -> None:
        found.append(Problem(index.name, what, fix))

    if index.precision != base.precision:
        differ(f"it was trained in {index.precision}, the base in {base.precision}")
    _compare_params(index, base, differ)
    if dict(index.tied) != dict(base.tied):
        differ(f"its tied weights are {_tied(index.tied)}, the base's are {_tied(base.tied)}")
    if not found and not any_groups and index.group_params != base.group_params:
        differ(
            f"its param groups do not match: {_groups(index)}, but the base has {_groups(base)}",
            "use --groups layer or --groups default to rebuild them, or use checkpoints with the same groups",
        )
    if not found:
        found += _compare_states(index, base)
    return found


def _compare_params(index: CheckpointIndex, base: CheckpointIndex, differ: Callable[..., None]) -> None:
    lacking = [name for name in base.params if name not in index.params]
    extra = [name for name in index.params if name not in base.params]
    if lacking:
        differ(f"it lacks {some(lacking)} of the base {base.name}")
    if extra:
        differ(f"it has {some(extra)}, which the base {base.name} lacks")
    both = [(param, index.params[name]) for name, param in base.params.items() if name in index.params]
    shapes = [
        f"{own.name} {list(own.shape)} instead of {list(param.shape)}"
        for param, own in both
        if own.shape != param.shape
    ]
    roles = [f"{own.name} is {own.role} instead of {param.role}" for param, own in both if own.role != param.role]
    if shapes:
        differ(f"shapes differ from the base's: {some(shapes)}")
    if roles:
        differ(f"params differ in what is trained: {some(roles)}", "use checkpoints with the same frozen params")


def _compare_states(index: CheckpointIndex, base: CheckpointIndex) -> list[Problem]:
    """Compare kinds and dtypes of the states, except weights, which can be made from masters."""
    mine = {state: held for state, held in index.held.items() if state.kind != WEIGHT}
    theirs = {state: held for state, held in base.held.items() if state.kind != WEIGHT}
    kinds = ({state.kind for state in mine}, {state.kind for state in theirs})
    if kinds[0] != kinds[1]:
        what = f"it holds {', '.join(sorted(kinds[0]))}, the base {', '.join(sorted(kinds[1]))}"
        return [Problem(index.name, f"the kinds of state differ: {what}", "use checkpoints of the same optimizer")]
    dtypes = [
        f"{state.kind} of {state.param} is {mine[state].dtype} instead of {held.dtype}"
        for state, held in theirs.items()
        if state in mine and mine[state].dtype != held.dtype
    ]
    return [Problem(index.name, f"dtypes differ from the base's: {some(dtypes)}", _OTHER_MODEL)] if dtypes else []


def check_held(layouts: Sequence[FileLayout], indexes: Sequence[CheckpointIndex], sources: Sources) -> None:
    """Raise MismatchError if a chosen source lacks a state that the target needs, or has it in another shape."""
    lacking: dict[int, dict[str, None]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            if not isinstance(piece, Slot):
                continue
            for span in sources.spans(piece.state, piece.begin, piece.end):
                if not _can_fill(piece, indexes[span.source]):
                    name = f"{piece.state.kind} of {piece.state.param}"
                    lacking.setdefault(span.source, {})[name] = None
    if lacking:
        raise MismatchError(
            Problem(
                indexes[source].name,
                f"it does not hold the {some(list(names))}",
                _OTHER_MODEL if all(held.is_here for held in indexes[source].held.values()) else _PARTIAL,
            )
            for source, names in lacking.items()
        )


def _can_fill(slot: Slot, index: CheckpointIndex) -> bool:
    try:
        numel = index.holding(slot.state, slot.dtype).numel
        return numel >= (slot.end - slot.begin if slot.state.kind == BUFFER else slot.end)
    except KeyError:
        return False


def check_one_step(choices: Sequence[StepChoice]) -> None:
    """Raise MismatchError if params of one sub-group have different steps, which ``--step source`` can't resolve."""
    mixed = [choice for choice in choices if choice.others]
    if mixed:
        steps = sorted({step for choice in mixed for step in (choice.step, *choice.others)})
        raise MismatchError.at(
            "--step source",
            f"{len(mixed)} of {len(choices)} sub-groups, which have one step each, mix params from steps "
            f"{', '.join(f'{step:g}' for step in steps)}",
            "use --groups layer, so that each layer has its own, or --step base or --step rebase",
        )


def differing_hyperparameters(index: CheckpointIndex, base: CheckpointIndex) -> list[str]:
    """Return the hyperparameters that affect the update and differ from the base's, whose values are kept."""
    return [
        key
        for key in _IN_UPDATE
        if [group.hyper.get(key) for group in index.groups] != [group.hyper.get(key) for group in base.groups]
    ]


def _groups(index: CheckpointIndex) -> str:
    sizes = [len(params) for params in index.group_params]
    return f"{len(sizes)} param groups of {', '.join(map(str, sizes[:6]))}{' ...' if len(sizes) > 6 else ''} params"


def _tied(tied: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {stored}" for name, stored in tied.items()) or "none"
