"""From tensors back to selectors: the shortest list that selects exactly these. Pure.

Whole parts are spelled by number or name (``odd``, ``8-15``, ``norm``), the rest by globs. Of several spellings, the
one with the fewest selectors wins. None is trusted: each is held against `select`.
"""

from __future__ import annotations

import glob
import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import Anatomy
from llmtailor.recipe.selectors import read_selector, select
from llmtailor.recipe.text import Misspelt, condense, layer_number

Spelling = list[str]


def spell(names: Collection[str], anatomy: Anatomy) -> tuple[str, ...]:
    """Return selectors for exactly these tensors, of which there is at least one; tied names come together.

    Raises RecipeError if some name can't be told from others by a selector.
    """
    wanted = frozenset(names)
    rest = frozenset(anatomy.part_of) - wanted
    candidates = [_sum_of(wanted, anatomy), _all_but(rest, anatomy)]
    good = [spelling for spelling in candidates if select(spelling, anatomy) == (wanted, ())]
    if not good:
        parts = condense(dict.fromkeys(anatomy.part_of[name] for name in names))
        what = f"the names of its tensors are too strange for selectors: {sorted(wanted)[0]!r}, ..."
        raise RecipeError(Problem(parts, what, "take these parts from the base"))
    fewest = min(map(len, good))
    # Of two with as many selectors, the one that says what it takes.
    return tuple(next(spelling for spelling in good if len(spelling) == fewest))


def _length(spelling: Spelling) -> tuple[int, int]:
    return len(spelling), sum(map(len, spelling))


def _all_but(rest: frozenset[str], anatomy: Anatomy) -> Spelling:
    """Everything, and then what is not meant taken out."""
    if not rest:
        return ["all"]
    return ["all", *(f"!{selector}" for selector in _sum_of(rest, anatomy, is_plain=True))]


def _sum_of(wanted: frozenset[str], anatomy: Anatomy, *, is_plain: bool = False) -> Spelling:
    """Layers, other parts, and tensors out of the middle of parts; if `is_plain` without any negation."""
    left: dict[str, int] = defaultdict(int)
    for name, part in anatomy.part_of.items():
        left[part] += name not in wanted
    whole = [part for part in anatomy.parts if part in left and not left[part]]
    layers = [number for part in whole if (number := layer_number(part)) is not None]
    every = [number for part in anatomy.parts if (number := layer_number(part)) is not None]
    spelling = _spell_layers(layers, every, is_plain) if layers else []
    for part in whole:
        if layer_number(part) is None:
            spelling += _spell_part(part, anatomy)
    pieces = {name for name in wanted if left[anatomy.part_of[name]]}
    return spelling + (_spell_pieces(pieces, wanted, anatomy, is_plain) if pieces else [])


def _spell_layers(taken: Sequence[int], every: Sequence[int], is_plain: bool) -> Spelling:
    if set(taken) == set(every):
        return ["layers"]
    candidates = [_runs(taken, every)]
    for word, parities in (("even", (0,)), ("odd", (1,)), ("layers", (0, 1))):
        meant = {number for number in every if number % 2 in parities}
        excess = meant.difference(taken)
        if len(excess) < len(meant) and not (excess and is_plain):
            extra = set(taken) - meant
            candidates.append([word, *_runs(extra, every), *(f"!{run}" for run in _runs(excess, every))])
    return min(candidates, key=_length)


def _runs(taken: Collection[int], every: Collection[int]) -> Spelling:
    """Spell layers one by one and as ``a-b``; a run may pass over numbers that no layer has."""
    runs: list[list[int]] = []
    chosen = set(taken)
    is_open = False
    for number in sorted(every):
        if number in chosen and is_open:
            runs[-1][1] = number
        elif number in chosen:
            runs.append([number, number])
        is_open = number in chosen
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def _spell_part(part: str, anatomy: Anatomy) -> Spelling:
    names = anatomy.names(part)
    if select([part], anatomy) == (frozenset(names), ()):
        return [part]
    return [_exactly(name, anatomy) for name in names]


def _exactly(name: str, anatomy: Anatomy) -> str:
    """Spell one tensor: its name, or a glob if the name would be read as something else."""
    try:
        selector = read_selector(name)
    except Misspelt:
        selector = None
    if selector is not None and selector.form == "name" and selector.word == name:
        return name
    escaped = glob.escape(name)
    return escaped if escaped != name else f"[{name[:1]}]{name[1:]}"


def _spell_pieces(pieces: set[str], wanted: frozenset[str], anatomy: Anatomy, is_plain: bool) -> Spelling:
    """Spell tensors of parts that are split; globs may match whole parts too, as long as these are wanted."""
    groups = _groups(anatomy)
    spelling = _cover(pieces, wanted, groups)
    if is_plain:
        return spelling
    # Or one glob that matches too much, and take the excess out again: *.mlp.*, but not that of layer 0.
    around = [(len(group), len(text), text) for text, group in groups.items() if group >= pieces]
    if around:
        text = min(around)[2]
        excess = groups[text] - wanted
        out = _cover(excess, frozenset(anatomy.part_of) - wanted, groups) if excess else []
        if len(out) + 1 < len(spelling):
            return [text, *(f"!{selector}" for selector in out)]
    return spelling


def _groups(anatomy: Anatomy) -> Mapping[str, set[str]]:
    """Return selectors that may be of use, and what each of them matches: components of names, and single names."""
    groups: dict[str, set[str]] = defaultdict(set)
    for name in anatomy.part_of:
        words = name.split(".")
        for begin in range(len(words)):
            for end in range(begin + 1, len(words) + 1):
                middle = glob.escape(".".join(words[begin:end]))
                head, tail = "*." if begin else "", ".*" if end < len(words) else ""
                groups[f"{head}{middle}{tail}" if head or tail else _exactly(name, anatomy)].add(name)
    return groups


def _cover(pieces: Collection[str], allowed: frozenset[str], groups: Mapping[str, set[str]]) -> Spelling:
    """Cover the pieces greedily: always the selector that covers most of what is left, and nothing forbidden."""
    left = set(pieces)
    # One tensor is clearest by its name, however short a glob may be.
    of_use = {text: group for text, group in groups.items() if group & left and group <= allowed}
    heap = [(-len(group & left), len(text) if "*" in text else 0, text) for text, group in of_use.items()]
    heapq.heapify(heap)
    spelling: Spelling = []
    while left and heap:
        gain, length, text = heapq.heappop(heap)
        now = len(left & groups[text])
        if now == -gain:
            spelling.append(text)
            left -= groups[text]
        elif now:
            heapq.heappush(heap, (-now, length, text))
    return spelling
