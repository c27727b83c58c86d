"""The selectors of ``parts:``: short texts that name tensors.

::

    even  odd             layers by parity            3                 layer 3
    first:2  last:2       layers from either end      8-15              layers 8 to 15, both included
    layers                all layers                  all  *            everything
    norm  layer 3  wpe    a part by its name          *.mlp.*           tensors whose FQN matches (case counts)
    !x                    take x out of what this list has selected so far; first in the list, out of everything

Which tensors a rule of mergekit's or LLMTailor's form names. Pure.

The submodels that ``modules:`` names: text model, vision tower, projector. Pure.

mergekit's architecture data says what belongs to each, if it knows the model (`Anatomy.modules`). Otherwise a name like
``text_decoder`` means the text model, and any other the parts whose path contains it.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtailor.errors import Problem
from llmtailor.model.module_paths import is_aside, place_of
from llmtailor.model.parts import EMBED, HEAD, NORM, Anatomy
from llmtailor.recipe.recipe import GroupId, LayerRange, NamedWeight, Whole
from llmtailor.recipe.text import Misspelt, layer_number, nearest, quote

FORMS = "even, odd, first:n, last:n, 3, 8-15, layers, all, a part name, or a glob over tensor names"

_NUMBER = re.compile(r"(?:layer )?([0-9]+)")
_SPAN = re.compile(r"([0-9]+)\s*-\s*([0-9]+)")
_END = re.compile(r"(first|last)\s*:\s*([0-9]+)")
_MANY = 10**6
"""More layers than a model has; a larger number is read as this one, and is out of range like it."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector, read but not yet held against a model."""

    text: str
    """As it was written."""
    negated: bool
    form: str
    """``all``, ``layers``, ``even``, ``odd``, ``first``, ``last``, ``span``, ``glob`` or ``name``"""
    word: str
    first: int = 0
    """A count (``first``, ``last``) or the first layer (``span``)."""
    last: int = 0


def read_selector(text: str) -> Selector:
    """Read the syntax of a selector. Raises Misspelt."""
    stripped = text.strip()
    negated = stripped.startswith("!")
    word = stripped[1:].strip() if negated else stripped
    if not word or word.startswith("!"):
        raise Misspelt(f"{quote(text)} is not a selector", f"valid are {FORMS}; ! in front takes one out again")
    if word in ("*", "all"):
        return Selector(text, negated, "all", word)
    if word in ("even", "odd", "layers"):
        return Selector(text, negated, word, word)
    if match := _NUMBER.fullmatch(word):
        number = _count(match[1])
        return Selector(text, negated, "span", word, number, number)
    if match := _SPAN.fullmatch(word):
        first, last = _count(match[1]), _count(match[2])
        if first > last:
            raise Misspelt(f"{quote(text)} runs backwards", f"write {last}-{first}")
        return Selector(text, negated, "span", word, first, last)
    if match := _END.fullmatch(word):
        count = _count(match[2])
        if count == 0:
            raise Misspelt(f"{quote(text)} selects nothing", f"give a number from 1 on, e.g. {match[1]}:2")
        return Selector(text, negated, match[1], word, first=count)
    if any(sign in word for sign in "*?["):
        return Selector(text, negated, "glob", word)
    if word in ("first", "last") or re.fullmatch(r"(first|last)\s*:.*", word):
        raise Misspelt(f"{quote(text)} lacks a number", "write how many layers, e.g. first:2")
    if re.fullmatch(r"[\d\s.,:-]+", word) or ":" in word:
        raise Misspelt(f"{quote(text)} is not a selector", f"valid are {FORMS}; layers count from 0")
    return Selector(text, negated, "name", word)


def _count(digits: str) -> int:
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) < len(str(_MANY)) else _MANY


def select(selectors: Sequence[str], anatomy: Anatomy, where: str = "") -> tuple[frozenset[str], tuple[Problem, ...]]:
    """Return the tensor names that a list of selectors names, and what is wrong with the list.

    Selectors add up from left to right; ``!x`` takes x out of what is there so far. With problems the set holds what
    the good selectors name. In a tied model the embeddings are one thing under several names: all or none.
    """
    problems: list[Problem] = []
    chosen: set[str] = set()
    for at, text in enumerate(selectors):
        try:
            selector = read_selector(text)
            matched = _match(selector, anatomy)
            if selector.negated and at == 0:
                chosen = set(anatomy.part_of)
            if selector.negated and chosen.isdisjoint(matched):
                raise Misspelt(f"{quote(text)} takes out nothing", "name it behind a selector that selects it")
        except Misspelt as error:
            problems.append(Problem(where, error.what, error.fix))
            continue
        if selector.negated:
            chosen -= matched
        else:
            chosen |= matched
    if not chosen and not problems:
        what = "the selectors take out all that they select" if selectors else "there is no selector"
        problems.append(Problem(where, what, f"select something: {FORMS}"))
    return frozenset(chosen), tuple(problems)


def whole_embedding(names: Iterable[str], anatomy: Anatomy) -> set[str]:
    """Return `names`, and all of the tied embeddings if one of their names is among them."""
    chosen = set(names)
    if anatomy.tied and any(anatomy.part_of[name] == EMBED for name in chosen):
        chosen.update(anatomy.names(EMBED))
    return chosen


def named(word: str, anatomy: Anatomy) -> set[str]:
    """Return the tensors of a part, or the one tensor of that name. Raises Misspelt with the nearest valid name."""
    if word in anatomy.part_of:
        return whole_embedding([word], anatomy)
    # The tied name may be nowhere: neither the optimizer nor the safetensors file need know it.
    if anatomy.tied and word.removesuffix(".weight") == HEAD:
        word = EMBED
    if word in anatomy.parts:
        return set(anatomy.names(word))
    valid = anatomy.part_of if word.count(".") > 1 or word.endswith((".weight", ".bias")) else anatomy.parts
    raise Misspelt(f"the model has no part or tensor {quote(word)}", nearest(word, valid))


def _match(selector: Selector, anatomy: Anatomy) -> set[str]:
    """Return the tensors that a selector names, negated or not. Raises Misspelt when there are none."""
    if selector.form == "all":
        found = set(anatomy.part_of)
    elif selector.form == "glob":
        matches = re.compile(fnmatch.translate(selector.word)).match
        found = whole_embedding(filter(matches, anatomy.part_of), anatomy)
        if not found:
            example = next(iter(anatomy.part_of), "")
            raise Misspelt(f"{quote(selector.text)} matches no tensor name", f"names look like {example!r}")
    elif selector.form == "name":
        found = named(selector.word, anatomy)
    else:
        wanted = _numbers(selector, anatomy.num_layers)
        found = {name for name, part in anatomy.part_of.items() if layer_number(part) in wanted}
    if not found:
        raise Misspelt(f"{quote(selector.text)} selects nothing", count_layers(anatomy.num_layers))
    return found


def _numbers(selector: Selector, num_layers: int) -> range:
    if selector.form in ("even", "odd", "layers"):
        return range(selector.form == "odd", num_layers, 1 if selector.form == "layers" else 2)
    top = selector.last if selector.form == "span" else selector.first - 1
    if top >= num_layers:
        raise Misspelt(f"{quote(selector.text)} is out of range", count_layers(num_layers))
    if selector.form == "span":
        return range(selector.first, selector.last + 1)
    return range(selector.first) if selector.form == "first" else range(num_layers - selector.first, num_layers)


def count_layers(num_layers: int, owner: str = "the model") -> str:
    """Say how many layers there are, and how they are numbered."""
    if num_layers == 0:
        return f"{owner} has no layers"
    if num_layers == 1:
        return f"{owner} has 1 layer, number 0"
    return f"{owner} has {num_layers} layers, 0-{num_layers - 1}"


TEXT_WORDS = frozenset(
    {"default", "text_decoder", "text_model", "text", "language_model", "language", "llm", "lm", "decoder", "model"}
)
"""What the text model is called; ``default`` is mergekit's name for a model without submodels."""


def is_text(module: str, anatomy: Anatomy) -> bool:
    """Tell whether this is the submodel whose layers are the model's layers."""
    if module in anatomy.modules:
        return any(layer_number(part) is not None for part in anatomy.modules[module])
    return module in TEXT_WORDS


def parts_of(module: str, anatomy: Anatomy) -> set[str]:
    """Return the parts of a submodel. Raises Misspelt."""
    if module in anatomy.modules:
        found = set(anatomy.modules[module])
    elif is_text(module, anatomy):
        found = {part for part in anatomy.parts if _is_of_text(part)}
    else:
        path = module.split(".")
        found = {part for part in anatomy.parts if layer_number(part) is None and _contains(part.split("."), path)}
    if not found:
        beside = dict.fromkeys(part.split(".")[0] for part in anatomy.parts if not _is_of_text(part))
        mend = nearest(module, list(dict.fromkeys([*(anatomy.modules or ["text_decoder"]), *beside])))
        raise Misspelt(f"it can't be told which tensors belong to the module {quote(module)}", f"{mend}; {_GLOBS}")
    return found


def layers_of(module: str, anatomy: Anatomy) -> dict[str, int | None]:
    """Return the tensors in the layers of a submodel beside the text model, with their numbers. Raises Misspelt."""
    parts = parts_of(module, anatomy)
    stacks: dict[str, dict[str, int | None]] = defaultdict(dict)
    for name, part in anatomy.part_of.items():
        place = place_of(name)
        # An nn.Sequential has numbers too, but its items are plain modules, not layers.
        if part in parts and place.number is not None and place.depth > 1:
            stacks[part.rpartition(".")[0]][name] = place.number
    if not stacks:
        fix = f"to take the whole of it write models: [{{model: PATH}}]; {_GLOBS}"
        raise Misspelt(f"the module {quote(module)} has no layers that slices could name", fix)
    if len(stacks) > 1:
        what = f"the module {quote(module)} has several stacks of layers, and slices can't say which is meant"
        raise Misspelt(what, f"they are {', '.join(stacks)}; {_GLOBS}")
    return next(iter(stacks.values()))


_GLOBS = 'parts: can name any tensors with globs, e.g. select: "*visual.blocks.[0-7].*"'


def _is_of_text(part: str) -> bool:
    if part in (EMBED, NORM, HEAD) or layer_number(part) is not None:
        return True
    return not is_aside(tuple(part.split(".")))


def _contains(path: list[str], wanted: list[str]) -> bool:
    return any(path[at : at + len(wanted)] == wanted for at in range(len(path)))


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
