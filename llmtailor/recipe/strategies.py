"""Strategies: choose a checkpoint of a run for each part. Pure.

A strategy only names the step that it *wants* for a part. The part then comes from a checkpoint that holds it, which
not every partial one does: at the wanted step, else at the newest step before it, else at the newest step. ``explicit``
is strict, because a user who names a checkpoint means that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llmtailor.checkpoint.lineage import RunCheckpoint, best_holder, newest_resumable
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import EMBED, HEAD, ModelStructure, condense, nearest
from llmtailor.recipe.recipe import Assignment
from llmtailor.recipe.selectors import quote, select


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
    over: int = 2
    """spread: at least 1"""
    mapping: Mapping[str, int | str] | None = None
    """explicit: selector -> step, or name of the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """The step that a strategy wants for a part."""

    step: int
    why: str
    only: RunCheckpoint | None = None
    """The only acceptable checkpoint, if any"""


_Wishes = dict[str, _Wish]


@dataclass(frozen=True, slots=True)
class _Task:
    """The input of a strategy, and the problems it finds."""

    checkpoints: Sequence[RunCheckpoint]
    steps: Sequence[int]
    """Steps with a usable checkpoint, ascending, which ``every`` and ``over`` count. Full and partial checkpoints count
    equally, and two at the same step as one."""
    structure: ModelStructure
    options: StrategyOptions
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, where: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where, what, fix))

    def for_layers(self, wish: Callable[[int], _Wish]) -> _Wishes:
        """Return a wish for each layer, and the newest step for every other part."""
        newest = _Wish(self.steps[-1], "newest")
        numbers = self.structure.layers
        return {part: wish(numbers[part]) if part in numbers else newest for part in self.structure.parts}


def assign(checkpoints: Sequence[RunCheckpoint], structure: ModelStructure, options: StrategyOptions) -> Assignment:
    """Return a checkpoint for every part; the newest resumable one is the base.

    `checkpoints` are the usable ones at or before the failure, at least one. Raises RecipeError with every problem.
    """
    task = _Task(checkpoints, sorted({checkpoint.step for checkpoint in checkpoints}), structure, options)
    base = newest_resumable(checkpoints)
    if base is None:
        what = "none of them is complete enough to resume from, so none can be the base"
        fix = "a full checkpoint must supply the learning rate schedule and trainer state; give a later failure step"
        task.refuse("checkpoints", f"{_steps(task.steps)}: {what}", fix)
    source_of: dict[str, RunCheckpoint] = {}
    reason: dict[str, str] = {}
    missing: list[str] = []
    for part, wish in STRATEGIES[options.strategy](task).items():
        until = [checkpoint for checkpoint in checkpoints if checkpoint.step <= wish.step]
        found = wish.only or best_holder(until, part) or best_holder(checkpoints, part)
        if found is None:
            missing.append(part)
            continue
        source_of[part] = found
        reason[part] = wish.why if found.step == wish.step else f"{wish.why}, but step {wish.step} lacks it"
    if missing:
        fix = "give a later failure step, or another run, to include a full checkpoint"
        task.refuse("checkpoints", f"no usable checkpoint holds {condense(missing)}", fix)
    if task.problems or base is None:
        raise RecipeError(dict.fromkeys(task.problems))
    return Assignment(base, source_of, reason, f"strategy {options.strategy} at step {task.steps[-1]}")


def _latest(task: _Task) -> _Wishes:
    return task.for_layers(lambda number: _Wish(task.steps[-1], "newest"))


def _parity(task: _Task) -> _Wishes:
    if len(task.steps) < 2:
        what = f"parity needs two checkpoints, but there is only step {task.steps[-1]}"
        task.refuse("--strategy", what, "use the strategy latest, or give a later failure step")
        return {}
    before, newest = task.steps[-2:]

    def wish(number: int) -> _Wish:
        word = "odd" if number % 2 else "even"
        is_before = (number % 2 == 1) != task.options.flip
        return _Wish(before, f"{word}: one before") if is_before else _Wish(newest, f"{word}: newest")

    return task.for_layers(wish)


def _filter(task: _Task) -> _Wishes:
    options, structure = task.options, task.structure
    layers = structure.layers
    others = [part for part in structure.parts if part not in layers]
    # The tied head is another name for the embeddings, as everywhere in a recipe.
    named = [EMBED if structure.tied and part == HEAD else part for part in options.aux]
    for part in dict.fromkeys(named):
        if part not in others:
            task.refuse("--aux", f"{quote(part)} is not a part other than a layer", nearest(part, others))
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

    return task.for_layers(wish) | {part: rest for part in others if named and part not in named}


def _spread(task: _Task) -> _Wishes:
    over, newest_first = task.options.over, task.steps[::-1]
    if over > len(task.steps):
        what = f"there are only {len(task.steps)} usable checkpoints ({_steps(task.steps)}), not {over}"
        task.refuse("--over", what, f"lower --over to {len(task.steps)} or less")
        return {}

    def wish(number: int) -> _Wish:
        back = number % over
        return _Wish(newest_first[back], f"in turn: {back} usable before the newest" if back else "in turn: newest")

    return task.for_layers(wish)


def _explicit(task: _Task) -> _Wishes:
    """Return the wishes of a mapping. Later keys win, so a checkpoint may lack parts that are not wanted from it."""
    mapping = task.options.mapping or {}
    if not mapping:
        what = "the strategy explicit needs a mapping of selectors to steps or folders"
        task.refuse("--map", what, 'write e.g. {"odd": 300, "norm": "checkpoint-400"}')
    wanted: dict[str, tuple[str, list[RunCheckpoint]]] = {}
    for key, value in mapping.items():
        candidates = [one for one in task.checkpoints if value in (one.step, one.name, str(one.step))]
        if not candidates and isinstance(value, int):
            what = f"there is no usable checkpoint of step {value}"
            task.refuse(f"--map {quote(key)}", what, f"available: {_steps(task.steps)}")
        elif not candidates:
            names = list(dict.fromkeys(one.name for one in task.checkpoints))
            what = f"there is no usable checkpoint {quote(value)}"
            task.refuse(f"--map {quote(key)}", what, nearest(str(value), names))
        wanted |= dict.fromkeys(_whole_parts(task, key), (key, candidates))

    wishes = _latest(task)
    lacking: dict[str, list[str]] = {}
    for part, (key, candidates) in wanted.items():
        found = best_holder(candidates, part)
        if found is not None:
            wishes[part] = _Wish(found.step, f"{key}: {mapping[key]}", only=found)
        elif candidates:
            lacking.setdefault(key, []).append(part)
    for key, parts in lacking.items():
        having = sorted({one.step for one in task.checkpoints if all(map(one.holds, parts))})
        fix = f"steps that hold it: {_steps(having)}" if having else "use another checkpoint for some of them"
        task.refuse(f"--map {quote(key)}", f"{mapping[key]} does not hold {condense(parts)}", fix)
    return wishes


def _whole_parts(task: _Task, key: str) -> list[str]:
    names, problems = select([key], task.structure, f"--map {quote(key)}")
    task.problems.extend(problems)
    whole, split = task.structure.divide(names)
    if split:
        what = f"it selects only some of the tensors of {condense(split)}"
        fix = "select whole parts; to split them, use globs under parts: in a recipe"
        task.refuse(f"--map {quote(key)}", what, fix)
    return whole


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


STRATEGIES: Mapping[str, Callable[[_Task], _Wishes]] = {
    "latest": _latest,
    "parity": _parity,
    "filter": _filter,
    "spread": _spread,
    "explicit": _explicit,
}
"""Name -> function that returns its wishes; a part without a wish has a problem."""
