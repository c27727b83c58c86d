"""mergekit's ``models:`` and ``modules:``: whole models, and recipes by submodel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtailor.core.recipe import Rule, Whole
from llmtailor.recipe import grammar
from llmtailor.recipe.parameters import check_parameters
from llmtailor.recipe.reader import Reader
from llmtailor.recipe.slices import read_slices
from llmtailor.recipe.yamltext import Table, Value, is_null


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
