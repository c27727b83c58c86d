"""LLMTailor's update log: which parts were saved at which step, and which to use after a failure. Pure.

A log is text, a JSON object per line::

    {"step": 110, "flag": [0, 1, 2, 30]}

The numbers are LLMTailor's (see `selectors.numbering`). Other keys are ignored. A step may have several lines, e.g.
if a resumed run reaches it again; then all their flags count. If only the last line counted, a part named by an earlier
line would silently come from an older checkpoint.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.lineage import RunCheckpoint, best_holder, newest_resumable
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure, condense
from llmtailor.recipe.recipe import Assignment
from llmtailor.recipe.selectors import count_layers, numbering, quote


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
    failure_step: int,
    base: RunCheckpoint | None,
    checkpoints: Sequence[RunCheckpoint],
    structure: ModelStructure,
    total_layers: int | None,
    name: str,
) -> Assignment:
    """Return each part's checkpoint: at the newest step after the base, up to the failure, that flags it, or the base.

    The newest checkpoint used, or `base` if none is newer, supplies what belongs to no part. `total_layers` is the
    number of layers that the user expects. Raises RecipeError with every problem.
    """
    number_of = {part: number for number, part in numbering(structure).items()}
    problems = _check_ids(lines, structure, name)
    if total_layers is not None and total_layers != structure.num_layers:
        fix = f"give --total-layers {structure.num_layers}, or the log of this run"
        what = f"{total_layers} layers are expected, but {count_layers(structure.num_layers)}"
        problems.append(Problem("--total-layers", what, fix))
    if base is not None and base.step > failure_step:
        what = f"{base.name} is at step {base.step}, which is later than the failure at step {failure_step}"
        problems.append(Problem("--base", what, "name a checkpoint from before the failure"))

    since = base.step if base is not None else None
    newest: dict[int, int] = {}
    for line in lines:
        if line.step <= failure_step and (since is None or line.step > since):
            for number in line.ids:
                newest[number] = max(line.step, newest.get(number, line.step))
    flagged = {part: newest[number] for part, number in number_of.items() if number in newest}

    source_of = _of_steps(flagged, lines, checkpoints, name, problems)
    reason = {part: f"flagged at {step}" for part, step in flagged.items()}
    unflagged = [part for part in structure.parts if part not in flagged]
    if base is None and unflagged:
        what = f"never flagged at or before step {failure_step}: {condense(unflagged)}"
        problems.append(Problem(name, what, "name a checkpoint that holds them with --base"))
    elif base is not None:
        source_of |= dict.fromkeys(unflagged, base)
        for part in unflagged:
            reason[part] = f"not flagged after {base.step}" if part in number_of else "has no number in the log"
        if missing := [part for part in unflagged if not base.holds(part)]:
            what = f"{base.name} does not hold {condense(missing)}, which no line after step {base.step} flags"
            problems.append(Problem("--base", what, "name a checkpoint that holds every part"))

    used = [*source_of.values(), *([base] if base is not None else [])]
    newest_used = newest_resumable(used)
    if newest_used is None and not problems:
        what = "none of the checkpoints used is resumable, so none can be the base"
        problems.append(Problem(name, what, "name a full checkpoint with --base"))
    if problems or newest_used is None:
        raise RecipeError(dict.fromkeys(problems))
    in_order = {part: source_of[part] for part in structure.parts}
    return Assignment(newest_used, in_order, reason, f"update log {name}, failure at step {failure_step}")


def _check_ids(lines: Iterable[FlagLine], structure: ModelStructure, name: str) -> list[Problem]:
    """Return the problems of numbers without a part, even after the failure: the log may be of another model."""
    valid, parts = numbering(structure), structure.layers
    layers = [number for number, part in valid.items() if part in parts]
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
    flagged: dict[str, int],
    lines: Sequence[FlagLine],
    checkpoints: Sequence[RunCheckpoint],
    name: str,
    problems: list[Problem],
) -> dict[str, RunCheckpoint]:
    """Return the checkpoint at the step that each part must come from."""
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    source_of: dict[str, RunCheckpoint] = {}
    missing: dict[int, list[str]] = defaultdict(list)
    for part, step in flagged.items():
        found = best_holder([checkpoint for checkpoint in checkpoints if checkpoint.step == step], part)
        if found is None:
            missing[step].append(part)
        else:
            source_of[part] = found
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
