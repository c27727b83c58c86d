"""Strategies and update logs: choose a checkpoint of a run for each part. Pure.

A strategy only names the step that it *wants* for a part. The part then comes from a checkpoint that holds it, which
not every partial one does: at the wanted step, else at the newest step before it, else at the newest step.

LLMTailor's update log says which parts were saved at which step. It is text, a JSON object per line::

    {"step": 110, "flag": [0, 1, 2, 30]}

The numbers are LLMTailor's (see `selectors.numbering`). Other keys are ignored. A step may have several lines, e.g.
if a resumed run reaches it again; then all their flags count. If only the last line counted, a part named by an earlier
line would silently come from an older checkpoint.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmtailor.checkpoint.lineage import RunCheckpoint, best_holder, newer_masters, newest_resumable
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import EMBED, HEAD, ModelStructure, Part, condense, nearest
from llmtailor.recipe import Assignment
from llmtailor.recipe.selectors import count_layers, numbering, quote


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """A strategy by name, and the options of all strategies; each reads its own."""

    strategy: str
    flip: bool = False
    """parity: whether the even layers come from the checkpoint before the newest."""
    first: int = 2
    last: int = 2
    aux: tuple[str, ...] = ()
    """filter: the parts other than layers that come from the newest; empty means all of them."""
    every: int = 5
    """filter: at least 1"""


@dataclass(frozen=True, slots=True)
class _Wish:
    step: int
    why: str


_Wishes = dict[Part, _Wish]


@dataclass(frozen=True, slots=True)
class _Task:
    checkpoints: Sequence[RunCheckpoint]
    steps: Sequence[int]
    """Steps with a usable checkpoint, ascending, which ``every`` counts. Full and partial checkpoints count
    equally, and two at the same step as one."""
    structure: ModelStructure
    options: StrategyOptions
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, where: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where, what, fix))

    def for_layers(self, wish: Callable[[int], _Wish]) -> _Wishes:
        """Return a wish for each layer, and the newest step for every other part."""
        newest = _Wish(self.steps[-1], "newest")
        return {part: newest if part.layer is None else wish(part.layer) for part in self.structure.parts}


def assign(checkpoints: Sequence[RunCheckpoint], structure: ModelStructure, options: StrategyOptions) -> Assignment:
    """Return a checkpoint for every part; the newest resumable one is the base.

    `checkpoints` are the usable ones at or before the failure, at least one. Raises RecipeError with every problem.
    """
    task = _Task(checkpoints, sorted({checkpoint.step for checkpoint in checkpoints}), structure, options)
    base = newest_resumable(checkpoints)
    if base is None:
        what = "none of them is complete enough to resume from, so none can be the base"
        fix = "a full checkpoint must supply the learning rate schedule and trainer state; use a later step (--at)"
        task.refuse("checkpoints", f"{_steps(task.steps)}: {what}", fix)
    source_of: dict[Part, RunCheckpoint] = {}
    moments_of: dict[Part, RunCheckpoint] = {}
    reason: dict[Part, str] = {}
    missing: list[str] = []
    for part, wish in STRATEGIES[options.strategy](task).items():
        until = [checkpoint for checkpoint in checkpoints if checkpoint.step <= wish.step]
        source = best_holder(until, part) or best_holder(checkpoints, part)
        if source is None:
            missing.append(part)
            continue
        newer = newer_masters(until, {part: source}).get(part)
        if newer is not None:
            moments_of[part] = source
        source_of[part] = source = newer or source
        reason[part] = wish.why if source.step == wish.step else f"{wish.why}, but step {wish.step} lacks it"
    if missing:
        fix = "use a later step (--at), or another run, to include a full checkpoint"
        task.refuse("checkpoints", f"no usable checkpoint holds {condense(missing)}", fix)
    if task.problems or base is None:
        raise RecipeError(dict.fromkeys(task.problems))
    title = f"strategy {options.strategy} at step {task.steps[-1]}"
    return Assignment(base, source_of, reason, title, moments_of).joined()


def _parity(task: _Task) -> _Wishes:
    if len(task.steps) < 2:
        what = f"parity needs two checkpoints, but there is only step {task.steps[-1]}"
        task.refuse("--strategy", what, "use the strategy latest, or a later step (--at)")
        return {}
    before, newest = task.steps[-2:]

    def wish(number: int) -> _Wish:
        word = "odd" if number % 2 else "even"
        is_before = (number % 2 == 1) != task.options.flip
        return _Wish(before, f"{word}: one before") if is_before else _Wish(newest, f"{word}: newest")

    return task.for_layers(wish)


def _filter(task: _Task) -> _Wishes:
    options, structure = task.options, task.structure
    non_layers = [part for part in structure.parts if part.layer is None]
    # The tied head is another name for the embeddings, as everywhere in a recipe.
    named = [EMBED if structure.tied and part == HEAD else part for part in options.aux]
    for part in dict.fromkeys(named):
        if part not in non_layers:
            task.refuse("--aux", f"{quote(part)} is not a part other than a layer", nearest(part, non_layers))
    kth = task.steps[options.every - 1 :: options.every]
    if not kth:
        what = f"of {len(task.steps)} usable checkpoints ({_steps(task.steps)}) none is number {options.every}"
        task.refuse("--every", what, f"lower --every to {len(task.steps)} or less")
        return {}
    number = options.every * len(kth)
    rest = _Wish(kth[-1], f"rest: number {number} of {len(task.steps)} usable, by every {options.every}")
    newest = task.steps[-1]

    def wish(number: int) -> _Wish:
        if number < options.first:
            return _Wish(newest, f"first {options.first}: newest")
        is_last = number >= structure.num_layers - options.last
        return _Wish(newest, f"last {options.last}: newest") if is_last else rest

    return task.for_layers(wish) | {part: rest for part in non_layers if named and part not in named}


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


STRATEGIES: Mapping[str, Callable[[_Task], _Wishes]] = {
    "latest": lambda task: task.for_layers(lambda number: _Wish(task.steps[-1], "newest")),
    "parity": _parity,
    "filter": _filter,
}
"""Name -> function that returns its wishes; a part without a wish has a problem."""


@dataclass(frozen=True, slots=True)
class FlagLine:
    """A line of the log: the parts saved at a step."""

    step: int
    ids: tuple[int, ...]
    line: int


def read_flags(text: str, name: str) -> tuple[FlagLine, ...]:
    """Return the lines of a log; `name` is its name in messages. Raises RecipeError with every unreadable line.

    A log may be empty: then nothing was flagged before the failure.
    """
    lines: list[FlagLine] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append(_read_line(line, number))
        except (ValueError, RecursionError) as error:
            what = error.args[0] if isinstance(error, _BadLine) else "the line is not valid JSON"
            problems.append(Problem(f"{name}:{number}", what, 'write e.g. {"step": 150, "flag": [0, 1, 2]}'))
    if problems:
        raise RecipeError(problems)
    return tuple(lines)


class _BadLine(ValueError):
    pass


def _read_line(line: str, number: int) -> FlagLine:
    pairs = json.loads(line, object_pairs_hook=tuple)
    if not isinstance(pairs, tuple):
        raise _BadLine("the line is not a JSON object")
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _BadLine("a key is repeated")
    if missing := [key for key in ("step", "flag") if key not in value]:
        raise _BadLine(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    step, flag = value["step"], value["flag"]
    if not _is_count(step):
        raise _BadLine(f"step is {quote(step)}, not a step number")
    if not isinstance(flag, list):
        raise _BadLine(f"flag is {quote(flag)}, not a list of numbers")
    if bad := [item for item in flag if not _is_count(item)]:
        raise _BadLine(f"flag has {quote(bad[0])}, which is not the number of a part")
    return FlagLine(step, tuple(flag), number)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # bool is an int to isinstance


def assign_flags(
    lines: Sequence[FlagLine],
    checkpoints: Sequence[RunCheckpoint],
    structure: ModelStructure,
    *,
    failure_step: int,
    base: RunCheckpoint | None,
    total_layers: int | None,
    name: str,
) -> Assignment:
    """Return each part's checkpoint: at the newest step after the base, up to the failure, that flags it, or the base.

    The newest checkpoint used, or `base` if none is newer, supplies everything outside the parts. `total_layers` is the
    number of layers that the user expects. Raises RecipeError with every problem.
    """
    problems = _check_ids(lines, structure, name)
    if total_layers is not None and total_layers != structure.num_layers:
        fix = f"give --total-layers {structure.num_layers}, or the log of this run"
        what = f"{total_layers} layers are expected, but {count_layers(structure.num_layers)}"
        problems.append(Problem("--total-layers", what, fix))
    if base is not None and base.step > failure_step:
        what = f"{base.name} is at step {base.step}, which is later than the failure at step {failure_step}"
        problems.append(Problem("--base", what, "name a checkpoint from before the failure"))

    since = base.step if base is not None else -1
    newest: dict[int, int] = {}
    for line in sorted(lines, key=lambda line: line.step):
        if since < line.step <= failure_step:
            newest |= dict.fromkeys(line.ids, line.step)
    number_of = {part: number for number, part in numbering(structure).items()}
    flagged = {part: newest[number] for part, number in number_of.items() if number in newest}
    source_of = _of_steps(flagged, lines, checkpoints, name, problems)
    reason = {part: f"flagged at {step}" for part, step in flagged.items()}
    unflagged = [part for part in structure.parts if part.whole not in flagged]
    if base is not None:
        source_of |= dict.fromkeys(unflagged, base)
        for part in unflagged:
            is_numbered = part.whole in number_of
            reason[part] = f"not flagged after {base.step}" if is_numbered else "has no number in the log"
    problems += _check_unflagged(unflagged, base, failure_step, name)

    used = newest_resumable([*source_of.values(), *([base] if base is not None else [])])
    if used is None and not problems:
        what = "none of the checkpoints used is resumable, so none can be the base"
        problems.append(Problem(name, what, "name a full checkpoint with --base"))
    if problems or used is None:
        raise RecipeError(dict.fromkeys(problems))
    given = {part: part.whole if part.whole in flagged else part for part in structure.parts}
    in_order = {part: source_of[given[part]] for part in structure.parts}
    why = {part: reason[given[part]] for part in structure.parts}
    return Assignment(used, in_order, why, f"update log {name}, failure at step {failure_step}").joined()


def _check_unflagged(
    unflagged: Sequence[Part], base: RunCheckpoint | None, failure_step: int, name: str
) -> Iterator[Problem]:
    """Yield the problems of parts that no line flags: there is no base, or it does not hold them."""
    if base is None and unflagged:
        what = f"never flagged at or before step {failure_step}: {condense(unflagged)}"
        yield Problem(name, what, "name a checkpoint that holds them with --base")
    elif base is not None and (missing := [part for part in unflagged if not base.holds(part)]):
        what = f"{base.name} does not hold {condense(missing)}, which no line after step {base.step} flags"
        yield Problem("--base", what, "name a checkpoint that holds every part")


def _check_ids(lines: Iterable[FlagLine], structure: ModelStructure, name: str) -> list[Problem]:
    """Return the problems of numbers without a part, even after the failure: the log may be of another model."""
    valid = numbering(structure)
    layers = [number for number, part in valid.items() if part.layer is not None]
    meanings = [f"{layers[0]}-{layers[-1]} are its layers"] if layers else []
    meanings += [f"{number} is {part}" for number, part in valid.items() if number not in layers]
    fix = f"{count_layers(structure.num_layers)}; {', '.join(meanings) or 'none of its parts has a number'}"
    problems = []
    for line in lines:
        if wrong := sorted(set(line.ids) - valid.keys()):
            numbers = ", ".join(map(str, wrong))
            what = f"{numbers} {'is not the number of a part' if len(wrong) == 1 else 'are not numbers of parts'}"
            problems.append(Problem(f"{name}:{line.line}", what, fix))
    return problems


def _of_steps(
    flagged: dict[Part, int],
    lines: Sequence[FlagLine],
    checkpoints: Sequence[RunCheckpoint],
    name: str,
    problems: list[Problem],
) -> dict[Part, RunCheckpoint]:
    """Return the checkpoint at the step that each part must come from."""
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    source_of: dict[Part, RunCheckpoint] = {}
    missing: dict[int, list[str]] = defaultdict(list)
    for part, step in flagged.items():
        source = best_holder([checkpoint for checkpoint in checkpoints if checkpoint.step == step], part)
        if source is None:
            missing[step].append(part)
        else:
            source_of[part] = source
    for step, parts in sorted(missing.items()):
        what = f"step {step} is flagged for {condense(parts)}, but "
        if step in steps:
            what, fix = f"{what}no checkpoint of that step holds it", "remove it from this line of the log"
        else:
            fix = f"available: {', '.join(map(str, steps)) or 'none'}; restore the checkpoint, or remove the line"
            what = f"{what}there is no usable checkpoint of that step"
        where = f"{name}:{next(line.line for line in lines if line.step == step)}"
        problems.append(Problem(where, what, fix))
    return source_of
