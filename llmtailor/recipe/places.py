"""Which tensors a rule of mergekit's or LLMTailor's form names. Pure."""

from __future__ import annotations

from llmtailor.core.anatomy import EMBED, HEAD, NORM, Anatomy
from llmtailor.core.recipe import GroupId, LayerRange, NamedWeight, Whole
from llmtailor.recipe.selectors import count_layers, named
from llmtailor.recipe.submodels import is_text, layers_of, parts_of
from llmtailor.recipe.words import Misspelt, layer_number

PlaceRule = Whole | LayerRange | GroupId | NamedWeight
"""Rules of mergekit's and LLMTailor's form; they may not contradict each other. Select rules override."""


def named_by(rule: PlaceRule, anatomy: Anatomy) -> set[str]:
    """Return the tensors that a rule names. Raises Misspelt."""
    if isinstance(rule, NamedWeight):
        return named(rule.name, anatomy)
    if isinstance(rule, GroupId):
        return set(anatomy.names(_auxiliary(rule.number, anatomy)))
    if isinstance(rule, Whole):
        if rule.module is None:
            return set(anatomy.part_of)
        parts = parts_of(rule.module, anatomy)
        return {name for name, part in anatomy.part_of.items() if part in parts}
    if rule.module is None or is_text(rule.module, anatomy):
        numbers = {name: layer_number(part) for name, part in anatomy.part_of.items()}
        return _in_range(rule, numbers, anatomy.num_layers, "the model")
    numbers = layers_of(rule.module, anatomy)
    return _in_range(rule, numbers, 1 + max(n for n in numbers.values() if n is not None), rule.module)


def _in_range(rule: LayerRange, numbers: dict[str, int | None], num_layers: int, owner: str) -> set[str]:
    stop = num_layers if rule.stop is None else rule.stop
    if stop > num_layers or rule.start >= stop:
        what = f"layer_range [{rule.start}, {stop}] is out of range"
        raise Misspelt(what, f"{count_layers(num_layers, owner)}; the second number is one behind the last layer")
    wanted = range(rule.start, stop)
    return {name for name, number in numbers.items() if number in wanted}


def _auxiliary(number: int, anatomy: Anatomy) -> str:
    """Return the part that a degenerate range ``[n, n]`` means. Raises Misspelt."""
    top = anatomy.num_layers
    numbering = {0: NORM, top + 1: EMBED} if anatomy.tied else {0: NORM, top + 1: HEAD, top + 2: EMBED}
    part = numbering.get(number)
    if part is not None and part in anatomy.parts:
        return part
    told = ", ".join(f"[{n}, {n}] is {name}" for n, name in numbering.items() if name in anatomy.parts)
    if 1 <= number <= top:
        what = f"[{number}, {number}] is an empty layer range, and not the number of an auxiliary part"
        raise Misspelt(what, f"for layer {number - 1} write [{number - 1}, {number}]; {told}")
    what = f"[{number}, {number}] is not the number of an auxiliary part"
    if part is not None:
        what = f"[{number}, {number}] means {part}, which the model does not have"
    raise Misspelt(what, f"{count_layers(top)}, so {told}" if told else count_layers(top))
