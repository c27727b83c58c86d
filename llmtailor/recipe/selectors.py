"""Finds what a selector or a rule names in a model. Pure.

::

    even  odd             layers by parity            3  layers 0, 4-7  layer 3; layers 0 and 4 to 7
    first:2  last:2       layers from either end      8-15              layers 8 to 15, both included
    layers                all layers                  all  *            everything
    norm  layer 3  wpe    a part by its name          *.mlp.*           tensors whose full name matches (case counts)
    experts  expert 5     all experts, or one number of them, of all layers; layer 3 expert 5, layers 2-5 experts 0-3, 7
    non-expert            everything else of the layers with experts; layers 2-5 non-expert
    !x                    removes x from what this list has selected so far; first in the list, from everything

Submodels of ``modules:`` are those of mergekit's architecture data if it has the model (`ModelStructure.modules`).
Otherwise a name like ``text_decoder`` means the text model, and any other name the parts whose path contains it.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from llmtailor.errors import Problem, ranges
from llmtailor.model.parts import EMBED, HEAD, NORM, ModelStructure, Part, layer_part, nearest
from llmtailor.model.roles import is_aside, place_of
from llmtailor.recipe import GroupId, LayerRange, NamedWeight, PlaceRule, WholeModel

WORDS = ("even", "odd", "layers", "all")
"""The selectors without a number"""
FORMS = "even, odd, first:n, last:n, 3, 8-15, layers, experts, non-expert, all, a part name, or a glob for tensor names"

_SPAN = re.compile(r"(?:layers? )?([0-9]+)(?:\s*-\s*([0-9]+))?")
_NUMBERS = r"[0-9]+(?:\s*[-,]\s*[0-9]+)*"
_LAYERS = re.compile(rf"layers? ({_NUMBERS})")
_SHARES = re.compile(rf"(?:layers? ({_NUMBERS}) )?(?:(non-expert)|experts?(?: ({_NUMBERS}))?)")
_END = re.compile(r"(first|last)\s*:\s*([0-9]+)")
_SHOWN = 60
"""Maximum number of characters of a user's text in a message"""
_TOO_MANY = 10**6
"""More layers than any model has; a larger number is read as this one, which is out of range too."""
_TEXT_MODEL = frozenset(
    {"default", "text_decoder", "text_model", "text", "language_model", "language", "llm", "lm", "decoder", "model"}
)
"""Names of the text model; ``default`` is mergekit's name for a model without submodels."""
_GLOBS = 'parts: can name any tensors with globs, e.g. select: "*visual.blocks.[0-7].*"'


class SelectorError(Exception):
    """A selector or name that is malformed, or that nothing in the model matches. The caller knows its location."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def quote(value: object) -> str:
    """Return the user's text in Python's quotes, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector, not yet applied to a model."""

    text: str
    """As written"""
    negated: bool
    find: Callable[[ModelStructure], Collection[str]]
    """Returns the tensors that it names, negated or not. Raises SelectorError."""
    name: str | None = None
    """The part or tensor that it names literally"""


def read_selector(text: str) -> Selector:
    """Return the selector in a text. Raises SelectorError."""
    negated = text.strip().startswith("!")
    word = text.strip()[negated:].strip()

    def layers(numbers: Callable[[int], Collection[int]], highest: int = -1) -> Selector:
        def find(structure: ModelStructure) -> set[str]:
            if highest >= structure.num_layers:
                raise SelectorError(f"{quote(text)} is out of range", count_layers(structure.num_layers))
            wanted = numbers(structure.num_layers)
            return {name for name, part in structure.part_of.items() if part.layer in wanted}

        return Selector(text, negated, find)

    if not word or word.startswith("!"):
        raise SelectorError(f"{quote(text)} is not a selector", f"valid are {FORMS}; a leading ! excludes")
    if word in ("*", "all"):
        return Selector(text, negated, lambda structure: structure.part_of)
    if word in ("even", "odd", "layers"):
        return layers(lambda count: range(word == "odd", count, 1 if word == "layers" else 2))
    if match := _SPAN.fullmatch(word):
        span = _span(match[1], match[2], text)
        return layers(lambda count: span, span[-1])
    if match := _LAYERS.fullmatch(word):
        listed = _listed(match[1], text)
        return layers(lambda count: listed, max(listed))
    if match := _END.fullmatch(word):
        num, is_first = _number(match[2]), match[1] == "first"
        if num == 0:
            raise SelectorError(f"{quote(text)} selects nothing", f"give at least 1, e.g. {match[1]}:2")
        return layers(lambda count: range(num) if is_first else range(count - num, count), num - 1)
    if match := _SHARES.fullmatch(word):
        of_layers, of_experts = (None if given is None else _listed(given, text) for given in (match[1], match[3]))
        is_rest = match[2] is not None
        return Selector(text, negated, lambda structure: _shares(of_layers, of_experts, is_rest, text, structure))
    if any(sign in word for sign in "*?["):
        return Selector(text, negated, lambda structure: _matching(word, text, structure))
    if word in ("first", "last") or re.fullmatch(r"(first|last)\s*:.*", word):
        raise SelectorError(f"{quote(text)} lacks a number", "add the number of layers, e.g. first:2")
    if re.fullmatch(r"[\d\s.,:-]+", word) or ":" in word:
        raise SelectorError(f"{quote(text)} is not a selector", f"valid are {FORMS}; layers count from 0")
    return Selector(text, negated, lambda structure: _named(word, structure), word)


def _span(first: str, last: str | None, text: str) -> range:
    """Return the numbers from ``first`` to ``last``, or only ``first``. Raises SelectorError."""
    low = _number(first)
    high = low if last is None else _number(last)
    if low > high:
        raise SelectorError(f"{quote(text)} runs backwards", f"write {high}-{low}")
    return range(low, high + 1)


def _listed(numbers: str, text: str) -> set[int]:
    listed: set[int] = set()
    for item in numbers.split(","):
        match = _SPAN.fullmatch(item.strip())
        if match is None:
            raise SelectorError(f"{quote(text)} is not a selector", "write numbers and ranges, e.g. 0-3, 7")
        span = _span(match[1], match[2], text)
        if len(span) > _TOO_MANY // 10:
            raise SelectorError(f"{quote(text)} is out of range", "name fewer numbers")
        listed.update(span)
    return listed


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < len(str(_TOO_MANY)) else _TOO_MANY


def select(
    selectors: Sequence[str], structure: ModelStructure, where: str = ""
) -> tuple[frozenset[str], tuple[Problem, ...]]:
    """Return the tensors that a list of selectors names, and its problems.

    Selectors add up from left to right; ``!x`` removes x from what is selected so far. If there are problems, the set
    holds what the valid selectors name. In a tied model the names of the embeddings stay together.
    """
    problems: list[Problem] = []
    chosen: set[str] = set()
    for at, text in enumerate(selectors):
        try:
            selector = read_selector(text)
            matched = set(selector.find(structure))
            if not matched:
                raise SelectorError(f"{quote(text)} selects nothing", count_layers(structure.num_layers))
            if selector.negated and at == 0:
                chosen = set(structure.part_of)
            if selector.negated and chosen.isdisjoint(matched):
                raise SelectorError(f"{quote(text)} excludes nothing", "put it after a selector that selects it")
            chosen = chosen - matched if selector.negated else chosen | matched
        except SelectorError as error:
            problems.append(Problem(where, error.what, error.fix))
    if not chosen and not problems:
        what = "the selectors exclude everything that they select" if selectors else "there is no selector"
        problems.append(Problem(where, what, f"select something: {FORMS}"))
    return frozenset(chosen), tuple(problems)


def _matching(glob: str, text: str, structure: ModelStructure) -> set[str]:
    is_meant = re.compile(fnmatch.translate(glob)).match
    names = [name for name in structure.part_of if is_meant(name) or is_meant(structure.stored_in(name))]
    matching = whole_embedding(names, structure)
    if not matching:
        example = next(iter(structure.part_of), "")
        raise SelectorError(f"{quote(text)} matches no tensor name", f"names look like {example!r}")
    return matching


def _shares(
    layers: Collection[int] | None, numbers: Collection[int] | None, is_rest: bool, text: str, structure: ModelStructure
) -> set[str]:
    """Return the tensors of experts by the numbers of layers and experts, or of everything else of these layers.

    None means all numbers. Raises SelectorError.
    """
    experts = [part for part in structure.parts if part.expert is not None]
    if not experts:
        raise SelectorError(f"{quote(text)} selects nothing", "no experts are parts here; select layers")
    having = {part.layer for part in experts if part.layer is not None}
    most = max(part.expert for part in experts if part.expert is not None)
    layers, numbers = having if layers is None else layers, range(most + 1) if numbers is None else numbers
    if having.isdisjoint(layers) or max(layers) > max(having) or max(numbers) > most:
        fix = f"layers with experts are {ranges(sorted(having))}, and experts are numbered 0-{most}"
        raise SelectorError(f"{quote(text)} is out of range", fix)
    wanted = {None} if is_rest else numbers
    parts = {part for part in structure.parts if part.is_share and part.layer in layers and part.expert in wanted}
    return {name for name, part in structure.part_of.items() if part in parts}


def whole_embedding(names: Iterable[str], structure: ModelStructure) -> set[str]:
    """Return `names`, with all names of tied embeddings if one of them is included."""
    chosen = set(names)
    if structure.tied and any(structure.part_of[name] == EMBED for name in chosen):
        chosen.update(structure.names(EMBED))
    return chosen


def _named(word: str, structure: ModelStructure) -> set[str]:
    """Return the tensors of a part, or the one tensor of that name. Raises SelectorError."""
    if word in structure.part_of:
        return whole_embedding([word], structure)
    if pieces := structure.pieces_of.get(word):
        return set(pieces)
    # The tied name may be missing: neither the optimizer nor the safetensors file must have it.
    if structure.tied and word.removesuffix(".weight") == HEAD:
        word = EMBED
    if names := {name for name, part in structure.part_of.items() if word in (part, part.whole)}:
        return names
    is_tensor = word.count(".") > 1 or word.endswith((".weight", ".bias"))
    valid = structure.part_of if is_tensor else [*structure.parts, *WORDS]
    raise SelectorError(f"the model has no part or tensor {quote(word)}", nearest(word, valid))


def count_layers(num_layers: int, owner: str = "the model") -> str:
    """Return a sentence on the number of layers and their numbering."""
    if num_layers < 2:
        return f"{owner} has 1 layer, number 0" if num_layers else f"{owner} has no layers"
    return f"{owner} has {num_layers} layers, 0-{num_layers - 1}"


def numbering(structure: ModelStructure) -> dict[int, Part]:
    """Return LLMTailor's number of each part; parts that it does not support have none.

    0 is the final norm, 1..L are layers 0..L-1. Untied, L+1 is ``lm_head`` and L+2 ``embed_tokens``; tied, L+1 is
    ``embed_tokens``.
    """
    names = [NORM, *map(layer_part, range(structure.num_layers)), *([] if structure.tied else [HEAD]), EMBED]
    there = {part.whole for part in structure.parts}
    return {number: part for number, part in enumerate(names) if part in there}


def named_by(rule: PlaceRule, structure: ModelStructure) -> set[str]:
    """Return the tensors that a rule names. Raises SelectorError."""
    if isinstance(rule, NamedWeight):
        return _named(rule.name, structure)
    if isinstance(rule, GroupId):
        return set(structure.names(_auxiliary(rule.number, structure)))
    if isinstance(rule, WholeModel):
        parts = {*structure.parts} if rule.module is None else parts_of(rule.module, structure)
        return {name for name, part in structure.part_of.items() if part in parts}
    if rule.module is None or is_text(rule.module, structure):
        numbers = {name: part.layer for name, part in structure.part_of.items()}
        return _in_range(rule, numbers, structure.num_layers, "the model")
    numbers = layers_of(rule.module, structure)
    return _in_range(rule, numbers, 1 + max(n for n in numbers.values() if n is not None), rule.module)


def _in_range(rule: LayerRange, numbers: dict[str, int | None], num_layers: int, owner: str) -> set[str]:
    stop = num_layers if rule.stop is None else rule.stop
    if stop > num_layers or rule.start >= stop:
        fix = f"{count_layers(num_layers, owner)}; the second number is one more than the last layer"
        raise SelectorError(f"layer_range [{rule.start}, {stop}] is out of range", fix)
    return {name for name, number in numbers.items() if number in range(rule.start, stop)}


def _auxiliary(number: int, structure: ModelStructure) -> Part:
    """Return the part that an empty range ``[n, n]`` means. Raises SelectorError."""
    top = structure.num_layers
    numbered = {n: part for n, part in numbering(structure).items() if not 1 <= n <= top}
    if number in numbered:
        return numbered[number]
    valid = ", ".join(f"[{n}, {n}] is {part}" for n, part in numbered.items())
    if 1 <= number <= top:
        what = f"[{number}, {number}] is an empty layer range and not the number of another part"
        raise SelectorError(what, f"for layer {number - 1}, write [{number - 1}, {number}]; {valid}")
    what = f"[{number}, {number}] is not the number of a part of this model"
    raise SelectorError(what, ", so ".join(filter(None, [count_layers(top), valid])))


def is_text(module: str, structure: ModelStructure) -> bool:
    """Return whether this is the submodel whose layers are the model's layers."""
    if module in structure.modules:
        return any(part.layer is not None for part in structure.modules[module])
    return module in _TEXT_MODEL


def parts_of(module: str, structure: ModelStructure) -> set[Part]:
    """Return the parts of a submodel. Raises SelectorError."""
    if module in structure.modules:
        parts = set(structure.modules[module])
    elif is_text(module, structure):
        parts = {part for part in structure.parts if _is_of_text(part)}
    else:
        inside = f".{module}."
        parts = {part for part in structure.parts if part.layer is None and inside in f".{part}."}
    if not parts:
        roots = [part.split(".")[0] for part in structure.parts if not _is_of_text(part)]
        fix = nearest(module, list(dict.fromkeys([*(structure.modules or ["text_decoder"]), *roots])))
        raise SelectorError(f"no tensors are known to belong to the module {quote(module)}", f"{fix}; {_GLOBS}")
    return parts


def layers_of(module: str, structure: ModelStructure) -> dict[str, int | None]:
    """Return the tensors in the layers of a submodel other than the text model, with numbers. Raises SelectorError."""
    parts = parts_of(module, structure)
    stacks: dict[str, dict[str, int | None]] = defaultdict(dict)
    for name, part in structure.part_of.items():
        place = place_of(name)
        # An nn.Sequential has numbers too, but its items are plain modules, not layers.
        if part in parts and place.number is not None and place.depth > 1:
            stacks[part.rpartition(".")[0]][name] = place.number
    if not stacks:
        fix = f"to take all of it, write models: [{{model: PATH}}]; {_GLOBS}"
        raise SelectorError(f"the module {quote(module)} has no layers for slices to name", fix)
    if len(stacks) > 1:
        what = f"the module {quote(module)} has several stacks of layers, and slices can't choose one"
        raise SelectorError(what, f"they are {', '.join(stacks)}; {_GLOBS}")
    return next(iter(stacks.values()))


def _is_of_text(part: Part) -> bool:
    return part.layer is not None or part in (EMBED, NORM, HEAD) or not is_aside(tuple(part.split(".")))
