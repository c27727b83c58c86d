"""Do optimizer, weights and model of a plain checkpoint fit together, and what is each param?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmtailor.codes import Code
from llmtailor.core.index import Held, Param
from llmtailor.core.words import some
from llmtailor.errors import PathIn, Problem, SourceError
from llmtailor.formats.plain.model import ModelFacts
from llmtailor.formats.plain.optimizer import FLOATING, OPTIMIZER, SavedOptimizer
from llmtailor.formats.plain.order import compare_shapes

_FIX = "copy the checkpoint again, whole, or leave it out of the recipe"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the model is made of, as far as it is known."""

    params: Mapping[str, Param]
    tied: Mapping[str, str]
    weight_of: Mapping[str, str]
    """The name of each param's weight in the file. A fused param has none (transformers 5 fuses a MoE's experts in
    memory, and splits them on disk)."""


def fit(
    groups: tuple[tuple[str, ...], ...],
    optimizer: SavedOptimizer,
    weights_held: Mapping[str, Held],
    model: ModelFacts | None,
    listed: Collection[str],
    name: str,
) -> Fitted:
    """Return the params with their roles; ``listed`` are buffers that the weights' files name as such.

    Raises SourceError where optimizer, weights and model do not fit together.
    """
    trainable = {param: None for group in groups for param in group}
    ids = [number for group in optimizer.groups for number in group.ids]
    shapes = [optimizer.shape(number) for number in ids]
    weights = {weight: held.shape for weight, held in weights_held.items()}
    others = [weight for weight in weights if weight not in trainable and not (model and weight in model.tied)]
    if model and all(param in model.params for param in trainable):
        buffers = {buffer for buffer in others if buffer in model.buffers or buffer in listed}
        wanted = {**model.params, **{buffer: weights[buffer] for buffer in others if buffer in buffers}}
        tied = model.tied
    else:  # a model of one's own, known by the names in the param groups
        wanted = {**dict(zip(trainable, shapes, strict=True)), **{other: weights[other] for other in others}}
        buffers = {other for other in others if weights_held[other].dtype not in FLOATING} | set(listed)
        tied = {name: stored for name, stored in model.tied.items() if stored in wanted} if model else {}
    problems = compare_shapes(ids, shapes, list(trainable), wanted, PathIn(name, OPTIMIZER))
    problems += [
        Problem(name, f"the weight {param} has shape {list(weights[param])} where {list(shape)} belongs", _FIX)
        for param, shape in wanted.items()
        if weights.get(param, shape) != shape
    ]
    problems += [
        Problem(name, f"the weight {param} is {held.dtype}, which holds no fractions", _FIX, Code.WEIGHTS_DTYPE)
        for param, held in weights_held.items()
        if param in trainable and held.dtype not in FLOATING
    ]
    lacking = {param: shape for param, shape in wanted.items() if param not in weights}
    extra = {other: weights[other] for other in others if other not in wanted or (lacking and other not in buffers)}
    extra = {other: shape for other, shape in extra.items() if not (model and other in model.params)}
    if lacking and _numel(lacking) != _numel(extra):
        what = f"the weights of {some(lacking)} are missing; a resume would keep their initial values"
        problems.append(Problem(name, what, _FIX))
    if problems:
        raise SourceError(problems)
    renamed = zip(lacking, extra, strict=True) if len(lacking) == 1 and [*lacking.values()] == [*extra.values()] else ()
    roles = {
        param: "trainable" if param in trainable else "buffer" if param in buffers else "frozen" for param in wanted
    }
    return Fitted(
        {param: Param(param, shape, roles[param]) for param, shape in wanted.items()},
        tied,
        {**{param: param for param in wanted if param in weights}, **dict(renamed)},
    )


def _numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
