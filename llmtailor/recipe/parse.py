"""The YAML of a recipe to a `Recipe`: mergekit's passthrough grammar, LLMTailor's lists, and ``parts:``.

``tokenizer_source``, ``tokenizer`` and ``chat_template``: which tokenizer files the output gets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llmtailor.errors import Problem, RecipeError
from llmtailor.recipe import grammar
from llmtailor.recipe.grammar import check_parameters
from llmtailor.recipe.recipe import NamedWeight, Recipe, Rule, Select, Whole
from llmtailor.recipe.selectors import read_selector
from llmtailor.recipe.slices import read_layers
from llmtailor.recipe.text import Misspelt, nearest, quote
from llmtailor.recipe.yaml_tree import MAX_BYTES, Items, Reader, Scalar, Table, Value, is_null, read_yaml

_JINJA = re.compile(r"\{[{%#]")


def read_tokenizer(given: Mapping[str, Value], reader: Reader, base: Path | None) -> Path | None:
    """Return the folder that the tokenizer comes from; None means the base."""
    if "tokenizer" not in given:
        alone = given.get("tokenizer_source")
        return None if alone is None else _read_source(alone, "tokenizer_source", reader, base)
    value = given["tokenizer"]
    if "tokenizer_source" in given:
        what = "tokenizer and tokenizer_source both say where the tokenizer comes from"
        reader.flaw(value.line, "tokenizer", what, "keep one of them")
    # mergekit takes the union of all tokenizers where source is missing, so it has to be said.
    table = reader.table(value, "tokenizer", grammar.TOKENIZER_KEYS, ["source"])
    if table is None:
        return None
    tokens, pad = table.entries.get("tokens"), table.entries.get("pad_to_multiple_of")
    if tokens is not None and not (is_null(tokens) or (isinstance(tokens, Table | Items) and not _content(tokens))):
        what = f"tokens would change embeddings: {grammar.SAME_VOCABULARY}"
        reader.flaw(table.lines["tokens"], "tokenizer.tokens", what, "leave tokens out")
    if pad is not None and not (is_null(pad) or (isinstance(pad, Scalar) and pad.text == "1")):
        what = f"padding would add rows to the embeddings: {grammar.SAME_VOCABULARY}"
        reader.flaw(table.lines["pad_to_multiple_of"], "tokenizer.pad_to_multiple_of", what, "leave it out")
    return (
        _read_source(table.entries["source"], "tokenizer.source", reader, base) if "source" in table.entries else None
    )


def _content(value: Table | Items) -> bool:
    return bool(value.entries if isinstance(value, Table) else value.items)


def _read_source(value: Value, path: str, reader: Reader, base: Path | None) -> Path | None:
    if isinstance(value, Scalar) and value.text in ("base", "union"):
        if value.text == "union":
            what = f"a union of tokenizers would change the vocabulary: {grammar.SAME_VOCABULARY}"
            reader.flaw(value.line, path, what, "write base, or the path of a checkpoint with the same vocabulary")
        return None
    source = reader.model(value, path)
    return None if source == base else source


def read_chat_template(value: Value, reader: Reader) -> str | None:
    """Return a Jinja text, or the name of one of mergekit's templates; None leaves the tokenizer's own.

    mergekit's ``auto`` takes the template that most sources have, which for checkpoints of one run is the tokenizer's.
    """
    text = reader.text(value, "chat_template", "auto, the name of a template, or a Jinja template")
    if text is None or text.strip() == "auto":
        return None
    if _JINJA.search(text):
        return text
    name = text.strip()
    if name in grammar.CHAT_TEMPLATES:
        return name
    what = f"{quote(name)} is neither a Jinja template nor the name of one"
    reader.flaw(value.line, "chat_template", what, nearest(name, ["auto", *grammar.CHAT_TEMPLATES]))
    return None


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file; its folder and the environment complete its paths. Raises RecipeError."""
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise RecipeError(Problem(where, "this is a directory", "give the path of a recipe file")) from error
    except FileNotFoundError as error:
        raise RecipeError(Problem(where, "there is no such file", "check the path of the recipe")) from error
    except OSError as error:
        fix = "check the permissions of the file"
        raise RecipeError(Problem(where, f"the recipe can't be read: {error.strerror}", fix)) from error
    try:
        # Cut in the middle of a character if it is too large, which is then what parse_recipe says.
        text = data.decode("utf-8-sig", "strict" if len(data) <= MAX_BYTES else "replace")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"byte {error.start} is not UTF-8"
        raise RecipeError(Problem(f"{where}:{line}", what, "save the recipe as UTF-8")) from error
    folder = Path(os.path.abspath(path)).parent  # resolve() would follow symlinks
    return parse_recipe(text, name=where, folder=folder, environ=os.environ)


def parse_recipe(text: str, *, name: str, folder: Path, environ: Mapping[str, str]) -> Recipe:
    """Read the text of a recipe. Pure.

    `name` is what messages call the recipe, relative paths start at `folder`, and `environ` holds the variables that
    paths may use. Rules come in the order in which they apply: slices (or models, or modules), pre_weights,
    post_weights, parts.
    Raises RecipeError with every problem, in the order of the lines.
    """
    top, flaws = read_yaml(text, name)
    reader = Reader(name, folder, environ, flaws)
    recipe = _read(top, text, reader) if top is not None else None
    if recipe is None or reader.flaws:
        in_order = sorted(reader.flaws, key=lambda flaw: flaw.line)
        raise RecipeError(dict.fromkeys(flaw.problem for flaw in in_order))
    return recipe


def _read(top: Table, text: str, reader: Reader) -> Recipe:
    reader.table(top, "", grammar.TOP_KEYS)
    given = {key: value for key, value in top.entries.items() if not (key in grammar.NULLABLE and is_null(value))}
    if "merge_method" in given:
        _check_method(given["merge_method"], reader)
    check_parameters(top, "", reader)
    base = reader.model(given["base_model"], "base_model") if "base_model" in given else None

    rules = read_layers(given, top, reader, base)
    for key in ("pre_weights", "post_weights"):
        if key in given:
            rules += _read_weights(given[key], key, reader)
    if "parts" in given:
        rules += _read_parts(given["parts"], reader)
    if not given.keys() & {"base_model", *grammar.LAYERS_FROM, "pre_weights", "post_weights", "parts"}:
        fix = "write base_model: PATH, and parts: with what shall come from other checkpoints"
        reader.flaw(top.line, "", "the recipe names no checkpoint", fix)
    if base is None and "models" in given:  # the one model it names is what the rest is compared to
        base = next((rule.source for rule in rules if isinstance(rule, Whole)), None)

    dtype = _read_dtype("dtype", given, reader)
    out_dtype = _read_dtype("out_dtype", given, reader)
    if dtype and out_dtype and dtype != out_dtype:
        what = "dtype has no effect: out_dtype says what the weights are stored as"
        reader.notices.append(Problem(reader.where(given["dtype"], "dtype"), what, "keep one of them"))
    return Recipe(
        name=reader.name,
        text=text,
        base=base,
        rules=tuple(rules),
        dtype=out_dtype or dtype,
        output=reader.folder_of(given["output"], "output") if "output" in given else None,
        tokenizer=read_tokenizer(given, reader, base),
        chat_template=read_chat_template(given["chat_template"], reader) if "chat_template" in given else None,
        notices=tuple(reader.notices),
    )


def _check_method(value: Value, reader: Reader) -> None:
    method = reader.text(value, "merge_method", "passthrough")
    if method is None or method == "passthrough":
        return
    if method in grammar.OTHER_METHODS:
        what = f"merge_method {method} computes new weights; no training run has had the optimizer state for them"
        fix = "write merge_method: passthrough, which takes every layer over whole; use mergekit for weights alone"
    else:
        what, fix = f"unknown merge_method {quote(method)}", nearest(method, ["passthrough"])
    reader.flaw(value.line, "merge_method", what, fix)


def _read_dtype(key: str, given: Mapping[str, Value], reader: Reader) -> str | None:
    if key not in given or (text := reader.text(given[key], key, "bfloat16, float16 or float32")) is None:
        return None
    dtype = grammar.DTYPES.get(text.lower().removeprefix("torch."))
    if dtype is None:
        reader.flaw(given[key].line, key, f"unknown dtype {quote(text)}", nearest(text, grammar.DTYPES))
    return dtype


def _read_weights(value: Value, key: str, reader: Reader) -> list[Rule]:
    rules: list[Rule] = []
    for item, path in reader.items(value, key, "entries {name: ..., model: ...}"):
        table = reader.table(item, path, grammar.WEIGHT_KEYS, ["name", "model"])
        if table is None:
            continue
        check_parameters(table, path, reader)
        wanted = "a tensor name, e.g. model.embed_tokens.weight"
        name = reader.text(table.entries["name"], f"{path}.name", wanted) if "name" in table.entries else None
        source = reader.model(table.entries["model"], f"{path}.model") if "model" in table.entries else None
        if name is not None and source is not None:
            rules.append(NamedWeight(source, name.strip(), reader.where(item, path)))
    return rules


def _read_parts(value: Value, reader: Reader) -> list[Rule]:
    rules: list[Rule] = []
    for item, path in reader.items(value, "parts", "entries {from: ..., select: ...}"):
        table = reader.table(item, path, grammar.PART_KEYS, grammar.PART_KEYS)
        if table is None:
            continue
        source = reader.model(table.entries["from"], f"{path}.from") if "from" in table.entries else None
        selectors: list[str] = []
        if "select" in table.entries:
            selectors = _read_selectors(table.entries["select"], f"{path}.select", reader)
        if source is not None and selectors:
            rules.append(Select(source, tuple(selectors), reader.where(item, path)))
    return rules


def _read_selectors(value: Value, path: str, reader: Reader) -> list[str]:
    listed = reader.items(value, path, "selectors") if not isinstance(value, Scalar) else [(value, path)]
    selectors = []
    for item, inside in listed:
        if not isinstance(item, Scalar):
            spaced = isinstance(item, Table) and item.entries.keys() in ({"first"}, {"last"})
            what = "a selector must be a plain text; with a space behind the colon it is a mapping"
            fix = 'write e.g. [odd, norm, "*.mlp.*"]'
            reader.flaw(item.line, inside, what if spaced else what.split(";")[0], "write first:2" if spaced else fix)
            continue
        text = reader.text(item, inside, "a selector")
        if text is None:
            continue
        try:
            read_selector(text)
        except Misspelt as error:
            reader.flaw(item.line, inside, error.what, error.fix)
        else:
            selectors.append(text.strip())
    return selectors
