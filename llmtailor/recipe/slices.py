"""mergekit's ``slices:``: layer ranges in the order in which they come out.

mergekit's ``models:`` and ``modules:``: whole models, and recipes by submodel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtailor.errors import Problem
from llmtailor.model.parts import layer_part
from llmtailor.recipe import grammar
from llmtailor.recipe.grammar import check_parameters
from llmtailor.recipe.recipe import GroupId, LayerRange, Rule, Whole
from llmtailor.recipe.yaml_tree import Items, Reader, Table, Value, is_null, place


@dataclass(frozen=True, slots=True)
class _Range:
    """A ``layer_range`` that reads well, though its source may not."""

    source: Path | None
    start: int
    stop: int | None
    line: int
    path: str


def read_slices(
    value: Value, path: str, reader: Reader, base: Path | None = None, module: str | None = None
) -> list[Rule]:
    """Read all slices: a rule for each that is sound. Layers that would move or come twice are flaws.

    `base` is the recipe's; `module` the submodel that the slices are of, None for those at the top level.
    """
    ranges: list[_Range] = []
    rules: list[Rule] = []
    for item, inside in reader.items(value, path, "entries {sources: [{model: ..., layer_range: [0, 8]}]}"):
        found = _read_slice(item, inside, reader, base)
        if found is None:
            continue
        if found.start == found.stop:
            if module is not None:
                what = f"[{found.start}, {found.stop}] holds no layer; it names an auxiliary part only in slices:"
                reader.flaw(found.line, found.path, what, 'name the part in parts:, e.g. select: "norm"')
            elif found.source is not None:
                rules.append(GroupId(found.source, found.start, _where(found, reader)))
            continue
        _check_order(found, ranges, reader)
        ranges.append(found)
        if found.source is not None:
            rules.append(LayerRange(found.source, found.start, found.stop, _where(found, reader), module))
    return rules


def _read_slice(value: Value, path: str, reader: Reader, base: Path | None) -> _Range | None:
    table = reader.table(value, path, grammar.SLICE_KEYS, ["sources"], grammar.NO_EFFECT_IN_SLICE)
    if table is None:
        return None
    check_parameters(table, path, reader)
    own_base = table.entries.get("base_model")
    named = reader.model(own_base, f"{path}.base_model") if own_base and not is_null(own_base) else None
    if "sources" not in table.entries:
        return None
    sources = reader.items(table.entries["sources"], f"{path}.sources", "one entry {model: ..., layer_range: ...}")
    if len(sources) > 1:
        what = f"the slice has {len(sources)} sources; passthrough takes each layer from exactly one"
        reader.flaw(table.entries["sources"].line, f"{path}.sources", what, "keep one of them")
    read = [_read_source(source, inside, reader) for source, inside in sources]
    found = read[0] if len(sources) == 1 else None
    if named is not None and found is not None and named not in (found.source, base):
        what = "base_model has no effect here: each layer comes from the one source of its slice"
        where = place(reader.name, table.lines["base_model"], f"{path}.base_model")
        reader.notices.append(Problem(where, what, "leave it out"))
    return found


def _where(found: _Range, reader: Reader) -> str:
    return f"{reader.name}:{found.line} {found.path}"


def _read_source(value: Value, path: str, reader: Reader) -> _Range | None:
    table = reader.table(value, path, grammar.SOURCE_KEYS, ["model"])
    if table is None:
        return None
    check_parameters(table, path, reader)
    source = reader.model(table.entries["model"], f"{path}.model") if "model" in table.entries else None
    if "layer_range" not in table.entries:
        return _Range(source, 0, None, table.line, path)

    bounds, inside = table.entries["layer_range"], f"{path}.layer_range"
    line = bounds.line
    if not isinstance(bounds, Items) or len(bounds.items) != 2:
        reader.flaw(line, inside, "layer_range takes two numbers", "write e.g. [0, 8] for layers 0 to 7")
        return None
    start, stop = (reader.integer(item, f"{inside}[{at}]") for at, item in enumerate(bounds.items))
    if start is None or stop is None:
        return None
    if start < 0 or stop < 0:
        reader.flaw(line, inside, f"[{start}, {stop}] is negative", "layers count from 0; write e.g. [0, 8]")
        return None
    if start > stop:
        reader.flaw(line, inside, f"[{start}, {stop}] runs backwards", f"write [{stop}, {start}]")
        return None
    return _Range(source, start, stop, line, inside)


def _check_order(found: _Range, earlier: list[_Range], reader: Reader) -> None:
    """Tell of layers that an earlier slice has too, or else of a slice that comes too late."""
    for other in earlier:
        start, stop = max(found.start, other.start), _least(found.stop, other.stop)
        if stop is not None and start >= stop:
            continue
        layers = _layers(start, stop)
        at = f"slices in lines {other.line} and {found.line}" if other.line != found.line else f"line {found.line}"
        if found.source != other.source and found.source is not None and other.source is not None:
            what = f"{layers} named twice, with different sources: {other.source} and {found.source} ({at})"
            reader.flaw(found.line, found.path, what, "keep one of them")
        else:
            what = f"{layers} named twice ({at}), which would repeat layers in the model: {grammar.OWN_PLACE}"
            reader.flaw(found.line, found.path, what, "let every layer stand in one slice only")
        return
    behind = [other for other in earlier if other.start > found.start]
    if behind:
        last = max(behind, key=lambda other: other.start)
        what = (
            f"{_layers(found.start, found.stop)} listed behind {_layers(last.start, last.stop)}, "
            f"which would move layers in the model: {grammar.OWN_PLACE}"
        )
        reader.flaw(found.line, found.path, what, "put the slices in ascending order")


def _least(one: int | None, other: int | None) -> int | None:
    return min((stop for stop in (one, other) if stop is not None), default=None)


def _layers(start: int, stop: int | None) -> str:
    """Return ``layer 3``, ``layers 3-7`` or ``layers 3 and up``."""
    if stop is None:
        return f"layers {start} and up"
    return layer_part(start) if stop - start == 1 else f"layers {start}-{stop - 1}"


def read_layers(given: Mapping[str, Value], top: Table, reader: Reader, base: Path | None) -> list[Rule]:
    """Read ``slices``, ``models`` or ``modules``, of which a recipe has one at most."""
    keys = [key for key in grammar.LAYERS_FROM if key in given]
    if len(keys) > 1:  # next to what is meant, mergekit may write a key with nothing behind it
        keys = [key for key in keys if not is_null(given[key])] or keys
    _one_of(keys, top, "", reader)
    rules: list[Rule] = []
    if "slices" in keys:
        rules += read_slices(given["slices"], "slices", reader, base)
    if "models" in given:
        rules += _read_models(given["models"], "models", reader)
    if "modules" in given:
        rules += _read_modules(given["modules"], reader, base)
    return rules


def _one_of(keys: Sequence[str], table: Table, path: str, reader: Reader) -> None:
    if len(keys) > 1:
        first, second = sorted(keys, key=lambda key: table.lines[key])[:2]
        inside = f"{path}.{second}" if path else second
        what = f"{second} and {first} (line {table.lines[first]}) both say where layers come from"
        reader.flaw(table.lines[second], inside, what, "keep one of them; parts: may override it")


def _read_models(value: Value, path: str, reader: Reader, module: str | None = None) -> list[Rule]:
    entries = reader.items(value, path, "one entry {model: PATH}")
    rules: list[Rule] = []
    for item, inside in entries:
        table = reader.table(item, inside, grammar.MODEL_KEYS, ["model"])
        if table is None:
            continue
        check_parameters(table, inside, reader)
        source = reader.model(table.entries["model"], f"{inside}.model") if "model" in table.entries else None
        if source is not None:
            rules.append(Whole(source, module, reader.where(item, inside)))
    if len(entries) > 1:
        what = f"models lists {len(entries)}; passthrough does not blend, it takes each layer from exactly one"
        reader.flaw(value.line, path, what, "keep one of them, and name the layers of the others in parts: or slices:")
        return []
    return rules


def _read_modules(value: Value, reader: Reader, base: Path | None) -> list[Rule]:
    if not isinstance(value, Table) or not value.entries:
        fix = "write e.g. text_decoder: {slices: [...]} below it; for a model without submodels use slices: instead"
        reader.flaw(value.line, "modules", "modules is no mapping of submodels to slices or models", fix)
        return []
    rules: list[Rule] = []
    for module, content in value.entries.items():
        path = f"modules.{module}"
        table = reader.table(content, path, grammar.MODULE_KEYS)
        if table is None:
            continue
        check_parameters(table, path, reader)
        keys = [key for key in ("slices", "models") if key in table.entries and not is_null(table.entries[key])]
        _one_of(keys, table, path, reader)
        if not keys and not set(table.entries) - set(grammar.MODULE_KEYS):
            fix = "add models: [{model: PATH}] for all of it, or slices: for layers; or leave the module out"
            reader.flaw(value.lines[module], path, "the module says neither slices nor models", fix)
        if "slices" in keys:
            rules += read_slices(table.entries["slices"], f"{path}.slices", reader, base, module)
        if "models" in keys:
            rules += _read_models(table.entries["models"], f"{path}.models", reader, module)
    return rules
