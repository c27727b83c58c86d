"""A recipe as YAML for humans: the short form, with comments that say what comes from where and why. Pure.

The text reads back as what it was written from: the tests hold it against `parse_recipe` and `resolve`.

Small pieces of YAML that read back as what they were written from: texts, paths, comments. Pure.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import Anatomy
from llmtailor.recipe.candidates import Assignment
from llmtailor.recipe.grammar import DTYPES
from llmtailor.recipe.recipe import Recipe
from llmtailor.recipe.spelling import spell
from llmtailor.recipe.text import Misspelt, condense, layer_number
from llmtailor.recipe.update_log import numbering as number_parts
from llmtailor.recipe.yaml_tree import expand

WIDTH = 100

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
"""What needs no quotes, in a flow list either: no sign of YAML's, except `-` inside."""
_NULLS = ("null", "Null", "NULL")


def quote(text: str) -> str:
    """Return the YAML of a text: as it is, or in double quotes where YAML would read it as something else."""
    if _PLAIN.fullmatch(text) and text not in _NULLS:
        return text
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """Write what can't be printed as YAML's (and Python's) escapes."""
    return "".join(sign if sign.isprintable() else _escape(ord(sign)) for sign in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def comment(text: str, indent: str = "") -> list[str]:
    """Return the lines of a comment, wrapped."""
    head = f"{indent}# "
    return [
        head + row
        for line in text.splitlines()
        for row in textwrap.wrap(printable(line), WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    ]


def entry(key: str, words: Sequence[str], indent: str) -> list[str]:
    """Return ``key: [a, b]``, a block list if that gets too long, or just ``key: a``."""
    texts = [quote(word) for word in words]
    if len(texts) == 1:
        return [f"{indent}{key}: {texts[0]}"]
    line = f"{indent}{key}: [{', '.join(texts)}]"
    return [line] if len(line) <= WIDTH else [f"{indent}{key}:", *(f"{indent}  - {text}" for text in texts)]


def normal(path: Path) -> Path:
    """Return the path as the parser would: normalised by its letters alone. ValueError if it is relative."""
    if not path.is_absolute():
        raise ValueError(f"not an absolute path: {path}")
    return Path(os.path.normpath(path))


def reference(path: Path, folder: Path | None, problems: list[Problem]) -> str:
    """Return the YAML of a checkpoint; as `path_text`."""
    text = path_text(path, folder, problems)
    return f"{{path: {text}}}" if "+" in text else text  # a plain text with + would be path+lora


def path_text(path: Path, folder: Path | None, problems: list[Problem]) -> str:
    """Return the YAML of a path: relative to `folder` if it lies inside or next to it, else absolute.

    What can't be written is added to `problems`: nothing in the language escapes ``$``.
    """
    text = str(path)
    if folder is not None:
        close = os.path.relpath(path, normal(folder))
        text = text if close.split("/").count("..") > 1 else close
        # tokenizer_source: base means the base, not a folder of that name.
        if text.startswith("~") or not text.strip() or text in ("base", "union"):
            text = f"./{text}"
    shown, fix = printable(str(path)), "rename the folder, or go by a symlink with a plain name"
    try:
        if expand(text, folder or Path("/"), {}) != path:
            problems.append(Problem(shown, "a recipe would read this path as another one", fix))
        text.encode()
    except Misspelt:
        what = "a recipe can't name this path: it would read what follows $ as an environment variable"
        problems.append(Problem(shown, what, fix))
    except UnicodeEncodeError:
        problems.append(Problem(shown, "a recipe can't name this path: it is not UTF-8", fix))
    return quote(text)


_STEP_OF_FOLDER = re.compile(r"(?:checkpoint|step)-(\d{1,18})")
_ALSO = "schedule, random number states and trainer state"


@dataclass(slots=True)
class _Entry:
    """A checkpoint and what comes from it."""

    source: Path
    names: list[str]
    comments: list[str]


@dataclass(slots=True)
class _Document:
    """What a recipe says, ready to be laid out."""

    base: _Entry
    others: list[_Entry]
    header: list[str]
    slices: list[tuple[Path, int, int]] = field(default_factory=list)
    """Sources of optimizer states where the weights have another one: layer ranges and LLMTailor's numbers."""
    weights: list[tuple[str, Path]] = field(default_factory=list)
    """Those weights: the name of a part or tensor, and its source."""
    settings: dict[str, str | Path] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def write_recipe(
    assignment: Assignment,
    anatomy: Anatomy,
    folder: Path | None,
    header: Sequence[str] = (),
    numbering: Mapping[int, str] | None = None,
) -> str:
    """Write the recipe that composes an assignment.

    The lines of `header` go into the comment on top, instead of the assignment's title. Paths are absolute; in the text
    they are relative to `folder`, where the recipe will lie, if they are inside of it or next to it. With `numbering`
    the comments tell LLMTailor's numbers of the parts. Raises RecipeError with every path that can't be written.
    """
    base = assignment.base
    checkpoints: dict[Path, RunCheckpoint] = {normal(base.path): base}
    for checkpoint in sorted(assignment.source_of.values(), key=lambda one: -one.step):
        checkpoints.setdefault(normal(checkpoint.path), checkpoint)
    parts_of: dict[Path, list[str]] = {source: [] for source in checkpoints}
    for part in anatomy.parts:
        parts_of[normal(assignment.source_of[part].path)].append(part)

    entries: list[_Entry] = []
    for source, parts in parts_of.items():
        step = checkpoints[source].step
        comments = [_age(step, base.step) if entries else f"step {step}", *_reasons(parts, assignment.reason)]
        numbers = [number for number, part in (numbering or {}).items() if part in parts]
        if numbers:
            comments.append(f"LLMTailor's numbers: {_ranges(numbers)}")
        names = [name for name, part in anatomy.part_of.items() if part in parts]
        entries.append(_Entry(source, names, comments))
    told = list(header) or [assignment.title]
    if numbering:
        told.append(f"LLMTailor's numbers: {_legend(numbering)}")
    return _lay_out(_Document(entries[0], entries[1:], told), anatomy, folder)


def write_normal_form(
    recipe: Recipe,
    source_of: Mapping[str, Path],
    base: Path,
    anatomy: Anatomy,
    folder: Path | None,
    weights_of: Mapping[str, Path] = MappingProxyType({}),
) -> str:
    """Write another recipe, of whatever form, in the short form.

    `source_of` and `weights_of` are what it was resolved to (see `Choice`): a source for every tensor name of the
    anatomy, and another one for weights that don't come with their optimizer states. Parts that are split are written
    as globs or names of tensors. Output, dtype and tokenizer are kept. Paths are written as by `write_recipe`.
    """
    base = normal(base)
    names_of: dict[Path, list[str]] = {source: [] for source in (base, *map(normal, recipe.sources()))}
    apart = dict.fromkeys(anatomy.part_of[name] for name in weights_of)
    base_step = _step(base)
    for name, part in anatomy.part_of.items():
        names_of.setdefault(normal(source_of[name]), []).extend([] if part in apart else [name])
    entries = []
    for source, names in names_of.items():
        step = _step(source)
        comments = []
        if source != base and step is not None and base_step is not None:
            comments.append(_age(step, base_step))
        entries.append(_Entry(source, names, comments + _shares(names, anatomy)))
    document = _Document(entries[0], entries[1:], [f"the normal form of {recipe.name}"])
    for part in anatomy.parts:
        if part in apart:
            _write_apart(part, source_of, weights_of, anatomy, document)
    if apart:
        document.header.append("weights and optimizer states of some parts differ in source: needs --allow-split")
    if recipe.dtype:
        document.settings["dtype"] = next(word for word, dtype in DTYPES.items() if dtype == recipe.dtype)
    if recipe.tokenizer:
        document.settings["tokenizer_source"] = recipe.tokenizer
    if recipe.chat_template is not None:
        document.settings["chat_template"] = recipe.chat_template
    if recipe.output:
        document.settings["output"] = recipe.output
    return _lay_out(document, anatomy, folder)


def _write_apart(
    part: str,
    source_of: Mapping[str, Path],
    weights_of: Mapping[str, Path],
    anatomy: Anatomy,
    document: _Document,
) -> None:
    """Add a part whose weights come from elsewhere: only slices with post_weights can say that, as in the original."""
    names = anatomy.names(part)
    states = dict.fromkeys(normal(source_of[name]) for name in names)
    number = next((number for number, owner in number_parts(anatomy).items() if owner == part), None)
    if number is None or len(states) > 1:
        what = "the normal form can't say that its weights and optimizer states differ in source"
        document.problems.append(Problem(part, what, "keep the recipe as it is"))
        return
    layer = layer_number(part)
    source = next(iter(states))
    document.slices.append((source, number, number) if layer is None else (source, layer, layer + 1))
    weights = {name: normal(weights_of.get(name, source)) for name in names}
    if len(set(weights.values())) == 1:
        document.weights.append((part, weights[names[0]]))
    else:
        document.weights += [(name, weights[name]) for name in names if name in weights_of]


def _lay_out(document: _Document, anatomy: Anatomy, folder: Path | None) -> str:
    base, problems = document.base, document.problems
    lines = [each for line in document.header for each in comment(line)]
    lines += ["merge_method: passthrough", ""]
    also = f"supplies the rest, and {_ALSO}" if base.names else f"supplies no part, only {_ALSO}"
    lines += [each for line in [*base.comments, also] for each in comment(line)]
    lines.append(f"base_model: {reference(base.source, folder, problems)}")
    used = [other for other in document.others if other.names]
    lines += ["", "parts:"] if used else []
    for other in used:
        lines += [each for line in other.comments for each in comment(line, "  ")]
        lines.append(f"  - from: {reference(other.source, folder, problems)}")
        try:
            lines += entry("select", spell(other.names, anatomy), "    ")
        except RecipeError as error:
            problems += error.problems
    lines += ["", "slices:", "  # optimizer states"] if document.slices else []
    for source, start, stop in document.slices:
        model = reference(source, folder, problems)
        lines.append(f"  - sources: [{{model: {model}, layer_range: [{start}, {stop}]}}]")
    lines += ["", "post_weights:"] if document.weights else []
    for name, source in document.weights:
        lines.append(f"  - {{name: {quote(name)}, model: {reference(source, folder, problems)}}}")
    lines += [""] if document.settings else []
    for key, value in document.settings.items():
        text = quote(value) if isinstance(value, str) else path_text(normal(value), folder, problems)
        lines.append(f"{key}: {text}")
    if problems:
        raise RecipeError(dict.fromkeys(problems))
    return "\n".join(lines) + "\n"


def _age(step: int, base_step: int) -> str:
    if step == base_step:
        return f"step {step}, that of the base"
    distance = abs(base_step - step)
    return f"step {step}, {distance} step{'s' * (distance > 1)} {'behind' if step < base_step else 'ahead of'} the base"


def _reasons(parts: Sequence[str], reason: Mapping[str, str]) -> list[str]:
    parts_by: dict[str, list[str]] = {}
    for part in parts:
        parts_by.setdefault(reason[part], []).append(part)
    return [f"{condense(same)} ({why})" for why, same in parts_by.items()]


def _shares(names: Collection[str], anatomy: Anatomy) -> list[str]:
    """Name the parts that are taken whole, and those of which only some tensors are."""
    taken = set(names)
    rest = {part for name, part in anatomy.part_of.items() if name not in taken}
    touched = {anatomy.part_of[name] for name in taken}
    whole = [part for part in anatomy.parts if part in touched and part not in rest]
    split = [part for part in anatomy.parts if part in touched and part in rest]
    return [condense(whole)] * bool(whole) + [f"some tensors of {condense(split)}"] * bool(split)


def _legend(numbering: Mapping[int, str]) -> str:
    layers = sorted(number for number, part in numbering.items() if layer_number(part) is not None)
    told = {number: f"{number} {part}" for number, part in numbering.items() if number not in layers}
    if layers:
        told[layers[0]] = f"{_ranges(layers)} {condense(numbering[number] for number in layers)}"
    return ", ".join(text for _, text in sorted(told.items()))


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _step(path: Path) -> int | None:
    match = _STEP_OF_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None
