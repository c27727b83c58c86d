"""Lays out every file of a composite but those of the tokenizer, whatever the formats of base and target."""

from __future__ import annotations

from collections.abc import Sequence

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import Target
from llmtailor.errors import PathIn, Problem, some
from llmtailor.formats.plain.ask_transformers import describe_model
from llmtailor.formats.plain.write import lay_out_plain, left_out
from llmtailor.formats.scheduler import lay_out_scheduler
from llmtailor.formats.tokenizer import is_tokenizer_file
from llmtailor.formats.trainer import SCHEDULER, is_weight_file, lay_out_trainer_files, params_on_disk
from llmtailor.formats.weights import lay_out_missing_weights
from llmtailor.formats.zero.from_plain import lay_out_shards_from_plain
from llmtailor.formats.zero.write import lay_out_shards, read_model_order
from llmtailor.model.states import WEIGHT


def lay_out_composite(
    base: CheckpointIndex,
    target: Target,
    steps: Sequence[float],
    dtype: str | None,
    from_group: Sequence[int] | None,
    is_alone: bool,
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts, and notices.

    ``steps`` is the optimizer's step of each flat id; ``dtype`` that of weights, None to keep it; ``from_group``, if
    the groups are not the base's, the old one whose place in the scheduler's lists each takes; ``is_alone`` says
    that no other source gives anything.
    """
    made: list[FileLayout] = []
    notices: list[Problem] = []
    weights_dtype, leave_out = dtype, left_out(base, target.stage)
    if target.stage == 0:
        made += lay_out_plain(base, target, steps)
        weights_dtype = "F32" if base.stage else None  # config.json follows the weights, which are the masters
    else:
        if base.stage == 0:
            weights_dtype = dtype or base.precision
            made += lay_out_shards_from_plain(base, target, steps, weights_dtype)
        else:
            made += lay_out_shards(base, target, steps, from_group)
        weights, notices = lay_out_missing_weights(base, target, weights_dtype, is_alone)
        notices += _rounded_twice(base, dtype)
        made += weights
    if from_group is not None and base.offers(SCHEDULER):
        where = PathIn(base.name, SCHEDULER)
        made.append(lay_out_scheduler(base.root, SCHEDULER, where, len(base.groups), from_group))
    paths = {layout.path for layout in made}
    retie = (base.tied, target.stage < 3) if (base.stage == 3) != (target.stage == 3) else None
    others = lay_out_trainer_files(
        base,
        weights_dtype,
        (base.world_size, target.world_size),
        retie,
        lambda path: path in paths or is_tokenizer_file(path) or leave_out(path),
    )
    if target.stage == 0:  # `lay_out_plain` has made the weights
        others = [layout for layout in others if not is_weight_file(layout.path)]
    return [*others, *made], notices


def _rounded_twice(base: CheckpointIndex, dtype: str | None) -> list[Problem]:
    """Tell of weights that can't be rounded to a dtype from their masters, as it is not known which these are."""
    if not dtype or not base.stage:
        return []
    weights = {state.param: held for state, held in base.held.items() if state.kind == WEIGHT and held.dtype != dtype}
    known = params_on_disk(base)
    unknown = [name for name in weights if name not in known]
    if not unknown:
        return []
    what = f"{some(unknown)} are rounded a second time, from the weights: which masters are theirs is not known"
    fix = "nothing, to resume; to export the model, call trainer.save_model() after the resume"
    return [Problem("dtype", what, fix)]


def model_order(base: CheckpointIndex) -> list[str]:
    """Return the names of the model's params, in its order. Raises SourceError where nothing tells it."""
    if base.stage:
        return read_model_order(base)
    return list(base.params if base.is_partial else describe_model(base.root, base.name).params)
