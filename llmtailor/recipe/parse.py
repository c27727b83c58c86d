"""Parses the YAML of a recipe: mergekit's ``passthrough``, ``linear`` and ``ema``, LLMTailor's lists, and ``parts:``.

Parsing continues after a problem, with `_UNREAD` for an unreadable source, so that all problems are reported together.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmtailor.checkpoint.sources import MOMENTS, NEWEST
from llmtailor.errors import RecipeError
from llmtailor.model.dtypes import SPELLINGS
from llmtailor.model.parts import layer_part, nearest
from llmtailor.recipe import (
    ONLY_MOMENTS,
    Average,
    GroupId,
    LayerRange,
    NamedWeight,
    Recipe,
    Rule,
    Select,
    WholeModel,
)
from llmtailor.recipe.selectors import SelectorError, quote, read_selector
from llmtailor.recipe.yaml_tree import MAX_BYTES, Document, Value, read_yaml

PASSTHROUGH, LINEAR, EMA = METHODS = ("passthrough", "linear", "ema")
LAYERS_FROM = ("slices", "models", "modules")
"""mergekit's ways to define where layers come from; a recipe has one of them."""
MODEL_KEYS = ("model", "parameters")
TOP_KEYS = (
    "merge_method", "base_model", "slices", "models", "modules", "pre_weights", "post_weights", "parts", "dtype",
    "out_dtype", "tokenizer_source", "tokenizer", "chat_template", "parameters", "moments", "output",
)  # fmt: skip
_MAY_BE_NULL = {*TOP_KEYS} - {"slices", "pre_weights", "post_weights", "parts", "output"}
"""Keys that mergekit writes without a value if it does not use them"""
SLICE_KEYS = ("sources", "parameters")
NO_EFFECT_IN_SLICE = {
    "base_model": "each layer comes from the source of its slice",
    "residual_weight": "mergekit reads it but does not use it",
}
SOURCE_KEYS = ("model", "layer_range", "parameters")
MODULE_KEYS = ("slices", "models", "parameters")
TOKENIZER_KEYS = ("source", "tokens", "pad_to_multiple_of")
CHAT_TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")
"""The templates that mergekit includes"""
_NO_STATES = "no training run has optimizer states for them"
_SAME_VOCABULARY = "embedding rows and their optimizer states belong to token ids, so the vocabulary must stay the same"
_OWN_PLACE = (
    "optimizer state and learning rate schedule belong to a place in the model, "
    "so a resumable checkpoint keeps every layer in its own place"
)
_JINJA = re.compile(r"\{[{%#]")
_PARAMETERS = {LINEAR: ("weight", "normalize"), EMA: ("decay",)}
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_SMALLEST, _LARGEST = 1e-150, 1e150
"""Of weights that are not 0: shares stay above 0, also those of many models in the normal form of ema"""
_CLOSE = 1e-6
"""How far weights that are not normalized may be from a sum of 1, as decimals of thirds are"""
_UNREAD = Path("unread")
"""Placeholder for a source with a problem of its own; readable sources are absolute."""


def load_recipe(path: Path) -> Recipe:
    """Return the recipe in a file. Relative paths in it start at its folder. Raises RecipeError."""
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        named = shlex.quote(where)
        fix = f"for a checkpoint alone, use llmtailor convert {named}; for a run, llmtailor merge --run {named}"
        raise RecipeError.at(where, "it is a folder, not a recipe", fix) from error
    except OSError as error:
        fix = "give the path of a readable recipe file"
        raise RecipeError.at(where, f"the recipe can't be read: {error.strerror}", fix) from error
    try:
        # A file that is too large is cut, maybe within a character; parse_recipe reports its size.
        text = data.decode("utf-8-sig", "strict" if len(data) <= MAX_BYTES else "replace")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError.at(f"{where}:{line}", f"byte {error.start} is not UTF-8", "save it as UTF-8") from error
    folder = Path(os.path.abspath(path)).parent  # resolve() would follow symlinks
    return parse_recipe(text, name=where, folder=folder, environ=os.environ)


def parse_recipe(text: str, *, name: str, folder: Path, environ: Mapping[str, str]) -> Recipe:
    """Return the recipe in a text. Pure.

    `name` is its name in messages, relative paths start at `folder`, and `environ` has the variables that paths may
    use. Rules are in the order in which they apply: slices (or models, or modules), pre_weights, post_weights, parts.
    Raises RecipeError with every problem, in the order of the lines.
    """
    document = Document(name, folder, environ)
    recipe = _read_recipe(read_yaml(text, document), text)
    document.raise_problems()
    return recipe


def _read_recipe(top: Value, text: str) -> Recipe:
    document = top.document
    if "experts" in top.entries:
        what = "experts: is for mergekit-moe, which makes a mixture of experts from dense models: no run has its states"
        fix = "use mergekit-moe on the weight files; to take experts from a checkpoint, select them in parts:"
        document.fail(top.entries["experts"].line, what, fix)
    top.mapping(TOP_KEYS)
    top.drop_nulls(_MAY_BE_NULL)
    named = top.entries.get("merge_method")
    method = PASSTHROUGH if named is None else _read_method(named)
    if method == PASSTHROUGH:
        _check_parameters(top)
    moments = top.read("moments", _one_of(MOMENTS)) or NEWEST
    base = top.read("base_model", _read_model)

    rules: list[Rule] = []
    if method in (LINEAR, EMA):
        rules += _read_averaged(top, method, moments)
    elif method == PASSTHROUGH:  # what several models or sources mean depends on the method
        if top.entries.keys() & {"models", "modules"}:
            top.drop_nulls(("slices",))
        _check_one_of(LAYERS_FROM, top)
        for key, reader in (("slices", _read_slices), ("models", _read_models), ("modules", _read_modules)):
            rules += top.read(key, reader) or []
    for key in ("pre_weights", "post_weights"):
        rules += top.read(key, _read_weights) or []
    rules += top.read("parts", lambda value: _read_parts(value, moments)) or []
    if "moments" in top.entries and not any(isinstance(rule.source, Average) for rule in rules):
        top.entries["moments"].notice("moments has no effect: nothing is averaged", "leave moments out")
    if not top.entries.keys() & {"base_model", *LAYERS_FROM, "pre_weights", "post_weights", "parts"}:
        top.refuse("the recipe names no checkpoint", "write base_model: PATH, and parts: for other checkpoints")
    if base is None and "models" in top.entries:  # its only model is the base
        wholes = (rule.source for rule in rules if isinstance(rule, WholeModel))
        base = next((source for source in wholes if isinstance(source, Path)), None)

    dtype, out_dtype = top.read("dtype", _read_dtype), top.read("out_dtype", _read_dtype)
    if dtype and out_dtype and dtype != out_dtype:
        what = "dtype has no effect: out_dtype sets the dtype of the stored weights"
        top.entries["dtype"].notice(what, "keep one of them")
    output = top.read("output", Value.folder)
    tokenizer = _read_tokenizer(top, base)
    template = top.read("chat_template", _read_chat_template)
    notices, dtype = tuple(document.notices), out_dtype or dtype
    return Recipe(
        name=document.name,
        text=text,
        base=base,
        rules=tuple(rules),
        dtype=dtype,
        output=output,
        notices=notices,
        tokenizer=tokenizer,
        chat_template=template,
    )


def _read_model(value: Value) -> Path:
    """Return the checkpoint that a model reference names: a path, ``{path: ...}`` or ``{model: {path: ...}}``."""
    if value.kind != "mapping":
        if "+" in value.text:
            what = f"{quote(value.text)} adds a LoRA, which has no optimizer state of its own"
            fix = "merge the LoRA into a checkpoint first; if + is part of the folder's name, write {path: ...}"
            value.refuse(what, fix)
            return _UNREAD
        return value.folder() or _UNREAD
    key = "model" if "model" in value.entries else "path"
    no_effect = {"override_architecture": "the architecture is the checkpoint's own"}
    refused = {
        "lora": ("has no optimizer state of its own", "merge the LoRA into a checkpoint first"),
        "revision": ("belongs to the Hugging Face Hub, but training checkpoints are folders", "leave it out"),
    }
    value.mapping([key], [key], no_effect, refused)
    return value.read(key, _read_model if key == "model" else Value.folder) or _UNREAD


def _check_parameters(owner: Value) -> None:
    """Refuse a ``scale`` other than 1 in mergekit's ``parameters``; passthrough has no other parameter."""
    value = owner.entries.get("parameters")
    if value is None or value.is_null:
        return
    scale = value.entries.get("scale")
    if value.kind != "mapping":
        value.refuse("parameters is not a mapping of names to values", "leave parameters out")
    elif scale is not None and not _is_one(scale):
        fix = "leave scale out; to scale only the weights, use mergekit on the finished composite"
        scale.refuse(f"scale would change weights, and {_NO_STATES}", fix)
    elif value.entries:
        what = f"parameters has no effect ({', '.join(value.entries)}): states are copied unchanged"
        value.notice(what, "leave parameters out")


def _is_one(value: Value) -> bool:
    """Return whether a setting is 1 everywhere: a number, a gradient, or values with filters."""
    if value.kind == "list":
        return all(map(_is_one, value.items))
    if value.kind == "mapping":
        return value.read("value", _is_one) or False
    try:
        return value.is_null or float(value.text) == 1
    except ValueError:
        return False


def _read_dtype(value: Value) -> str | None:
    text = value.word("bfloat16, float16 or float32")
    if text is None:
        return None
    dtype = SPELLINGS.get(text.lower().removeprefix("torch."))
    if dtype is None:
        value.refuse(f"unknown dtype {quote(text)}", nearest(text, SPELLINGS))
    return dtype


def _check_one_of(keys: tuple[str, ...], table: Value) -> None:
    entries = sorted((table.entries[key].line, key) for key in keys if key in table.entries)
    if len(entries) > 1:
        (line, first), (_, second) = entries[:2]
        what = f"{second} and {first} (line {line}) both define where layers come from"
        table.entries[second].refuse(what, "keep one of them; parts: may override it")


def _read_slices(value: Value, module: str | None = None) -> list[Rule]:
    """Return the rules of all slices of a submodel or the top level. Refuse layers that would move or be repeated."""
    rules: list[Rule] = []
    for item in value.list_of("entries {sources: [{model: ..., layer_range: [0, 8]}]}"):
        if item.mapping(SLICE_KEYS, ["sources"], NO_EFFECT_IN_SLICE) and (rule := _read_slice(item, module)):
            if isinstance(rule, LayerRange):
                _check_order(rule, [other for other in rules if isinstance(other, LayerRange)], item)
            rules.append(rule)
    return rules


def _read_slice(value: Value, module: str | None) -> LayerRange | GroupId | None:
    _check_parameters(value)
    if "sources" not in value.entries:
        return None
    sources = value.entries["sources"].list_of("one entry {model: ..., layer_range: ...}")
    if len(sources) > 1:
        what = f"the slice has {len(sources)} sources; passthrough takes each layer from exactly one"
        value.entries["sources"].refuse(what, "keep one of them; to average layers, write average: in parts:")
    read = [_read_source(source, module) for source in sources]
    return read[0] if len(read) == 1 else None


def _read_source(value: Value, module: str | None) -> LayerRange | GroupId | None:
    if not value.mapping(SOURCE_KEYS, ["model"]):
        return None
    _check_parameters(value)
    source = value.read("model", _read_model) or _UNREAD
    bounds = value.entries.get("layer_range")
    if bounds is None:
        return LayerRange(source, 0, None, value.where, module)
    if bounds.kind != "list" or len(bounds.items) != 2:
        bounds.refuse("layer_range takes two numbers", "write e.g. [0, 8] for layers 0 to 7")
        return None
    start, stop = (item.integer() for item in bounds.items)
    if start is None or stop is None:
        return None
    if start < 0 or stop < 0:
        bounds.refuse(f"[{start}, {stop}] is negative", "layers count from 0; write e.g. [0, 8]")
    elif start > stop:
        bounds.refuse(f"[{start}, {stop}] runs backwards", f"write [{stop}, {start}]")
    elif start < stop:
        return LayerRange(source, start, stop, bounds.where, module)
    elif module is None:
        return GroupId(source, start, bounds.where)
    else:
        what = f"[{start}, {stop}] contains no layer; it means another part only in slices: at the top level"
        bounds.refuse(what, 'name the part in parts:, e.g. select: "norm"')
    return None


def _check_order(rule: LayerRange, earlier: list[LayerRange], value: Value) -> None:
    """Refuse a slice that repeats layers of an earlier one, or that comes after later layers."""
    (source,) = value.entries["sources"].items
    place = source.entries.get("layer_range", source)
    for before in earlier:
        start = max(rule.start, before.start)
        stop = min((stop for stop in (rule.stop, before.stop) if stop is not None), default=None)
        if stop is not None and start >= stop:
            continue
        what = f"{_layers(start, stop)} named twice, here and at {before.where}"
        if rule.source != before.source and _UNREAD not in (rule.source, before.source):
            what += f", with different sources: {rule.source} and {before.source}"
        else:
            what += f", which would repeat layers in the model: {_OWN_PLACE}"
        place.refuse(what, "name every layer in one slice only")
        return
    last = max(earlier, key=lambda before: before.start, default=rule)
    if last.start > rule.start:
        after = f"{_layers(rule.start, rule.stop)} listed after {_layers(last.start, last.stop)}"
        what = f"{after}, which would move layers in the model: {_OWN_PLACE}"
        place.refuse(what, "put the slices in ascending order")


def _layers(start: int, stop: int | None) -> str:
    if stop is None:
        return f"layers {start} and up"
    return layer_part(start) if stop - start == 1 else f"layers {start}-{stop - 1}"


def _read_models(value: Value, module: str | None = None) -> list[Rule]:
    rules: list[Rule] = []
    for item in value.list_of("one entry {model: PATH}"):
        if item.mapping(MODEL_KEYS, ["model"]):
            _check_parameters(item)
            rules.append(WholeModel(item.read("model", _read_model) or _UNREAD, module, item.where))
    if len(value.items) > 1:
        what = f"models lists {len(value.items)}; passthrough does not blend; it takes each layer from exactly one"
        fix = "keep one of them, and name the layers from the others in parts: or slices:"
        value.refuse(what, f"{fix}; or write merge_method: linear to average them")
    return rules


def _read_modules(value: Value) -> list[Rule]:
    if not value.entries:
        fix = "write e.g. text_decoder: {slices: [...]} below it; for a model without submodels, use slices: instead"
        value.refuse("modules is not a mapping of submodels to slices or models", fix)
    rules: list[Rule] = []
    for module, content in value.entries.items():
        if not content.mapping(MODULE_KEYS):
            continue
        _check_parameters(content)
        content.drop_nulls(("slices", "models"))
        if not content.entries.keys() - {"parameters"}:
            fix = "add models: [{model: PATH}] for all of it, or slices: for layers; or leave the module out"
            content.refuse("the module has neither slices nor models", fix)
        _check_one_of(("slices", "models"), content)
        if "slices" in content.entries:
            rules += _read_slices(content.entries["slices"], module)
        if "models" in content.entries:
            rules += _read_models(content.entries["models"], module)
    return rules


def _read_weights(value: Value) -> list[Rule]:
    rules: list[Rule] = []
    for item in value.list_of("entries {name: ..., model: ...}"):
        if item.mapping(("name", "model", "parameters"), ["name", "model"]):
            _check_parameters(item)
            name = item.read("name", lambda given: given.word("a tensor name, e.g. model.embed_tokens.weight")) or ""
            rules.append(NamedWeight(item.read("model", _read_model) or _UNREAD, name.strip(), item.where))
    return rules


def _read_parts(value: Value, moments: str) -> list[Rule]:
    rules: list[Rule] = []
    for item in value.list_of("entries {from: ..., select: ...}"):
        averaged = "average" in item.entries
        keys = ("average", "select", "moments") if averaged else ("from", "select", "only")
        if item.mapping(keys, keys[:2]):
            chosen = item.entries.get("select")
            listed = chosen.list_of("selectors") if chosen and chosen.kind in ("list", "mapping") else [chosen]
            selectors = tuple(_read_selector(value) for value in listed if value)
            average = _read_average(item, moments) if averaged else None
            only = item.read("only", _one_of((ONLY_MOMENTS,)))
            rules.append(Select(average or item.read("from", _read_model) or _UNREAD, selectors, item.where, only))
    return rules


def _read_selector(value: Value) -> str:
    if value.kind == "mapping" and value.entries.keys() in ({"first"}, {"last"}):
        value.refuse("with a space after the colon, this is a mapping, not a selector", "write first:2")
    elif value.kind in ("mapping", "list"):
        value.refuse("a selector must be plain text", 'write e.g. [odd, norm, "*.mlp.*"]')
    elif text := value.word("a selector"):
        try:
            read_selector(text)
        except SelectorError as error:
            value.refuse(error.what, error.fix)
        return text.strip()
    return ""


def _read_method(value: Value) -> str | None:
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


def _one_of(choices: Sequence[str]) -> Callable[[Value], str | None]:
    def read(value: Value) -> str | None:
        word = value.word(" or ".join(choices))
        if word is None or word in choices:
            return word
        what = f"{value.path.rpartition('.')[2]} {quote(word)} is unknown"
        value.refuse(what, f"{nearest(word, choices)}; or leave it out")
        return None

    return read


def _read_averaged(top: Value, method: str, moments: str) -> list[WholeModel]:
    """Return the rule of a recipe whose method is ``linear`` or ``ema``: everything is the average of its models."""
    partial_entries = [top.entries[key] for key in LAYERS_FROM if key != "models" and key in top.entries]
    for entry in partial_entries:
        what = f"{method} averages whole models here; {entry.path} would average parts of them"
        fix = "use models:, or for each slice an entry {average: [{from: ..., weight: ...}], select: 0-3} in parts:"
        entry.refuse(what, fix)
    models, settings = top.entries.get("models"), top.entries.get("parameters")
    if partial_entries and models is None:
        return []
    given = settings.entries if settings is not None and settings.mapping(_PARAMETERS[method]) else {}
    fallback = _weight(given["weight"]) if "weight" in given else None
    decay = _decay(given["decay"]) if "decay" in given else None
    if method == EMA and "decay" not in given:
        top.refuse("ema needs parameters: {decay: ...}", "add e.g. parameters: {decay: 0.9}")
    if models is None:
        top.refuse(f"{method} averages models, and models is missing", "add models: with {model: PATH} for each")
        return []
    members: list[tuple[Path, float | None]] = []
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
        members.append((item.read("model", _read_model) or _UNREAD, weight))
    if "normalize" in given and not _is_true(given["normalize"]):
        total = math.fsum(weight or 0.0 for _, weight in members)
        if abs(total - 1) > _CLOSE and all(weight is not None for _, weight in members):
            what = f"without normalize, the weights sum to {total:g}, which would scale the model"
            given["normalize"].refuse(what, "write weights that sum to 1, or leave normalize out")
    average = _average(members, models, moments, decay)
    return [WholeModel(average, None, models.where)] if average else []


def _read_average(entry: Value, moments: str) -> Average | None:
    """Return the ``average`` of an entry of ``parts``: a list of ``{from, weight}``."""
    value = entry.entries["average"]
    members: list[tuple[Path, float | None]] = []
    for item in value.list_of("entries {from: ..., weight: ...}"):
        if item.mapping(("from", "weight"), ("from", "weight")):
            members.append((item.read("from", _read_model) or _UNREAD, item.read("weight", _weight)))
    own = entry.read("moments", _one_of(MOMENTS))
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


def _weight(value: Value) -> float | None:
    number = _number(value, "a number that is not negative")
    if number is None or number == 0 or _SMALLEST <= number <= _LARGEST:
        return number
    if number < 0:
        value.refuse(f"the weight {value.text} is negative, so the result would be no average", "write 0 or more")
    else:
        value.refuse(f"the weight {value.text} is out of range", f"write 0, or {_SMALLEST:g} to {_LARGEST:g}")
    return None


def _decay(value: Value) -> float | None:
    number = _number(value, "a number between 0 and 1")
    if number is None or 0 < number < 1:
        return number
    value.refuse(f"the decay {value.text} is not between 0 and 1", "write e.g. 0.9")
    return None


def _number(value: Value, expected: str) -> float | None:
    """Return a number in decimals. mergekit's gradients and filters (lists, mappings) are refused."""
    if value.kind in ("list", "mapping"):
        what = f"{value.path.rpartition('.')[2]} takes one number here, not a {value.kind}"
        value.refuse(what, "write one number; average: in parts: takes other weights for other layers")
        return None
    text = value.word(expected)
    if text is None or (_NUMBER.fullmatch(text) and math.isfinite(float(text))):
        return None if text is None else float(text)
    value.refuse(f"{quote(text)} is not {expected}", "write a decimal number, e.g. 0.5")
    return None


def _is_true(value: Value) -> bool:
    word = value.word("true or false")
    if word is not None and word.lower() not in ("true", "false"):
        value.refuse(f"{quote(word)} is neither true nor false", "write true or false")
    return word is None or word.lower() != "false"


def _read_tokenizer(top: Value, base: Path | None) -> Path | None:
    """Return the folder that the tokenizer comes from; None means the base."""

    def read_source(value: Value) -> Path | None:
        if value.text == "union":
            fix = "write base, or the path of a checkpoint with the same vocabulary"
            value.refuse(f"a union of tokenizers would change the vocabulary: {_SAME_VOCABULARY}", fix)
        source = None if value.text in ("base", "union") else _read_model(value)
        return None if source == base else source

    value = top.entries.get("tokenizer")
    if value is None:
        return top.read("tokenizer_source", read_source)
    if "tokenizer_source" in top.entries:
        value.refuse("tokenizer and tokenizer_source both define where the tokenizer comes from", "keep one of them")
    # Required, because mergekit takes the union of all tokenizers if source is missing.
    value.mapping(TOKENIZER_KEYS, ["source"])
    tokens, pad = value.entries.get("tokens"), value.entries.get("pad_to_multiple_of")
    if tokens and not tokens.is_null and (tokens.entries or tokens.items or tokens.text):
        tokens.refuse(f"tokens would change embeddings: {_SAME_VOCABULARY}", "leave tokens out")
    if pad and not pad.is_null and pad.text != "1":
        pad.refuse(f"padding would add rows to the embeddings: {_SAME_VOCABULARY}", "leave it out")
    return value.read("source", read_source)


def _read_chat_template(value: Value) -> str | None:
    """Return a Jinja template, or the name of one of mergekit's; None keeps the tokenizer's own.

    mergekit's ``auto`` takes the most frequent template of the sources: for checkpoints of one run, the tokenizer's.
    """
    text = value.word("auto, the name of a template, or a Jinja template")
    if text is None or text.strip() == "auto":
        return None
    if _JINJA.search(text):
        return text
    name = text.strip()
    if name not in CHAT_TEMPLATES:
        what = f"{quote(name)} is neither a Jinja template nor the name of one"
        value.refuse(what, nearest(name, ["auto", *CHAT_TEMPLATES]))
    return name
