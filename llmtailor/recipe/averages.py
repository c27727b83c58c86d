"""Averages of checkpoints: mergekit's ``linear``, ``ema``, and ``average`` in ``parts``. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.sources import MOMENTS
from llmtailor.errors import RecipeError
from llmtailor.model.parts import nearest
from llmtailor.recipe.recipe import ONLY_MOMENTS, Average, Origin, Recipe, Select, Whole
from llmtailor.recipe.selectors import quote
from llmtailor.recipe.yaml_tree import Value

PASSTHROUGH, LINEAR, EMA = METHODS = ("passthrough", "linear", "ema")
LAYERS_FROM = ("slices", "models", "modules")
"""mergekit's ways to define where layers come from; a recipe has one of them."""
MODEL_KEYS = ("model", "parameters")
_PARAMETERS = {LINEAR: ("weight", "normalize"), EMA: ("decay",)}
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_SMALLEST, _LARGEST = 1e-150, 1e150
"""Of weights that are not 0: shares stay above 0, also those of many models in the normal form of ema"""
_CLOSE = 1e-6
"""How far weights that are not normalized may be from a sum of 1, as decimals of thirds are"""
ReadModel = Callable[[Value], Path]


def read_method(value: Value) -> str | None:
    """Return the merge method; refuse those that only mergekit has."""
    method = value.word(f"{PASSTHROUGH}, {LINEAR} or {EMA}")
    if method in (None, *METHODS):
        return method
    what = (
        f"merge_method {quote(method or '')} is not passthrough, linear or ema; other methods compute weights that are "
        "no average of checkpoints of one run, and no training run has optimizer states for them"
    )
    value.refuse(
        what,
        "write merge_method: passthrough, linear or ema (average: in parts: averages single layers); to merge only "
        "weights, run mergekit-yaml with this method on the weight files of the checkpoints",
    )
    return None


def read_moments(value: Value) -> str | None:
    word = value.word(" or ".join(MOMENTS))
    if word is not None and word not in MOMENTS:
        value.refuse(f"moments {quote(word)} is unknown", nearest(word, MOMENTS))
        return None
    return word


def read_only(value: Value) -> str | None:
    """Return what of its tensors an entry of ``parts`` is for; None means everything."""
    word = value.word(ONLY_MOMENTS)
    if word is not None and word != ONLY_MOMENTS:
        value.refuse(f"only: {quote(word)} is unknown", f"write only: {ONLY_MOMENTS}, or leave it out")
        return None
    return word


def read_models(top: Value, method: str, moments: str, read_model: ReadModel) -> list[Whole]:
    """Return the rule of a recipe whose method is ``linear`` or ``ema``: everything is the average of its models."""
    others = [top.entries[key] for key in LAYERS_FROM if key != "models" and key in top.entries]
    for other in others:
        what = f"{method} averages whole models here; {other.path} would average parts of them"
        fix = "use models:, or for each slice an entry {average: [{from: ..., weight: ...}], select: 0-3} in parts:"
        other.refuse(what, fix)
    if others and "models" not in top.entries:
        return []
    settings = top.entries.get("parameters")
    has_settings = settings is not None and settings.mapping(_PARAMETERS[method])
    given = settings.entries if settings and has_settings else {}
    fallback = _weight(given["weight"]) if "weight" in given else None
    decay = _decay(given["decay"]) if "decay" in given else None
    if method == EMA and "decay" not in given:
        top.refuse("ema needs parameters: {decay: ...}", "add e.g. parameters: {decay: 0.9}")
    if "models" not in top.entries:
        top.refuse(f"{method} averages models, and models is missing", "add models: with {model: PATH} for each")
        return []
    members: list[tuple[Path, float | None]] = []
    models = top.entries["models"]
    for item in models.list_of("entries {model: PATH}"):
        if not item.mapping(MODEL_KEYS, ["model"]):
            continue
        own = item.entries.get("parameters")
        weight: float | None = 1.0
        if method == LINEAR:
            is_given = own is not None and own.mapping(("weight",)) and "weight" in own.entries
            weight = _weight(own.entries["weight"]) if own and is_given else fallback
            if not is_given and "weight" not in given:
                item.refuse("the model has no weight", "add parameters: {weight: 1}, here or for all models at the top")
        elif own is not None and not own.is_null:
            own.refuse("ema computes the weights from decay and the steps", "leave parameters of the models out")
        members.append((item.read("model", read_model) or Path("unread"), weight))
    if "normalize" in given and not _is_true(given["normalize"]):
        _check_convex(members, given["normalize"])
    average = _average(members, models, moments, decay)
    return [Whole(average, None, models.where)] if average else []


def read_average(entry: Value, moments: str, read_model: ReadModel) -> Average | None:
    """Return the ``average`` of an entry of ``parts``: a list of ``{from, weight}``."""
    value = entry.entries["average"]
    members: list[tuple[Path, float | None]] = []
    for item in value.list_of("entries {from: ..., weight: ...}"):
        if item.mapping(("from", "weight"), ("from", "weight")):
            weight = _weight(item.entries["weight"]) if "weight" in item.entries else None
            members.append((item.read("from", read_model) or Path("unread"), weight))
    own = read_moments(entry.entries["moments"]) if "moments" in entry.entries else None
    return _average(members, value, own or moments, None)


def _average(
    members: Sequence[tuple[Path, float | None]], value: Value, moments: str, decay: float | None
) -> Average | None:
    """Return the average of the members with a weight above 0; None if a problem is recorded."""
    known = [(source, weight) for source, weight in members if weight is not None]
    used = tuple((source, weight) for source, weight in known if weight > 0)
    if not members or len(known) < len(members):
        return None
    if not used:
        value.refuse("no weight is above 0", "give at least one checkpoint a weight above 0")
        return None
    for source in dict.fromkeys(source for source, weight in known if not weight):
        value.notice(f"{source} has the weight 0, so nothing comes from it", "leave it out")
    return Average(used, moments, value.where, decay)


def _check_convex(members: Sequence[tuple[Path, float | None]], value: Value) -> None:
    total = math.fsum(weight or 0.0 for _, weight in members)
    if abs(total - 1) > _CLOSE and all(weight is not None for _, weight in members):
        what = f"without normalize, the weights sum to {total:g}, which would scale the model"
        value.refuse(what, "write weights that sum to 1, or leave normalize out")


def _weight(value: Value) -> float | None:
    number = _number(value, "a number that is not negative")
    if number is not None and number < 0:
        value.refuse(f"the weight {value.text} is negative, so the result would be no average", "write 0 or more")
        return None
    if number is not None and number and not _SMALLEST <= number <= _LARGEST:
        value.refuse(f"the weight {value.text} is out of range", f"write 0, or {_SMALLEST:g} to {_LARGEST:g}")
        return None
    return number


def _decay(value: Value) -> float | None:
    number = _number(value, "a number between 0 and 1")
    if number is not None and not 0 < number < 1:
        value.refuse(f"the decay {value.text} is not between 0 and 1", "write e.g. 0.9")
        return None
    return number


def _number(value: Value, expected: str) -> float | None:
    """Return a number in decimals. mergekit's gradients and filters (lists, mappings) are refused."""
    if value.kind in ("list", "mapping"):
        what = f"{value.path.rpartition('.')[2]} takes one number here, not a {value.kind}"
        value.refuse(what, "write one number; average: in parts: takes other weights for other layers")
        return None
    text = value.word(expected)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        value.refuse(f"{quote(text)} is not {expected}", "write a decimal number, e.g. 0.5")
        return None
    return float(text)


def _is_true(value: Value) -> bool:
    word = value.word("true or false")
    if word is not None and word.lower() not in ("true", "false"):
        value.refuse(f"{quote(word)} is neither true nor false", "write true or false")
    return word is None or word.lower() != "false"


def weigh(recipe: Recipe, step_of: Mapping[Path, int]) -> Recipe:
    """Return the recipe with the weights of exponential moving averages, which depend on the steps of their members.

    The weight of the k-th newest checkpoint, counted from 0, is ``(1 - decay) * decay**k``. Checkpoints that are not in
    ``step_of`` have other problems and are left out. Raises RecipeError for two checkpoints of one step, and for
    a weight that is too small for a number.
    """
    return replace(
        recipe,
        rules=tuple(
            replace(rule, source=_weighed(rule.source, step_of)) if isinstance(rule, Whole | Select) else rule
            for rule in recipe.rules
        ),
    )


def _weighed(origin: Origin, step_of: Mapping[Path, int]) -> Origin:
    if not isinstance(origin, Average) or origin.decay is None:
        return origin
    known = [source for source, _ in origin.members if source in step_of]
    newest_first = sorted(known, key=lambda source: -step_of[source])
    steps = [step_of[source] for source in newest_first]
    if len(set(steps)) < len(steps):
        twice = next(step for step in steps if steps.count(step) > 1)
        what = f"two checkpoints of the moving average are of step {twice}, so their order is unknown"
        raise RecipeError.at(origin.where, what, "keep one of them, or use merge_method: linear with weights")
    weights = [(1 - origin.decay) * origin.decay**age for age in range(len(newest_first))]
    if 0.0 in weights:
        what = f"{len(weights)} checkpoints with decay {origin.decay:g} give weights too small for a number"
        raise RecipeError.at(origin.where, what, "leave the oldest out, or use a decay closer to 1")
    members = tuple(zip(reversed(newest_first), reversed(weights), strict=True))
    return Average(members, origin.moments, origin.where) if members else origin
