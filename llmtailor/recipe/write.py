"""A recipe as YAML for humans: the short form, with comments that say what comes from where and why. Pure.

The text reads back as what it was written from: the tests hold it against `parse_recipe` and `resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from llmtailor.core.anatomy import Anatomy
from llmtailor.core.recipe import Recipe
from llmtailor.core.run import Assignment, RunCheckpoint
from llmtailor.errors import Problem, RecipeError
from llmtailor.recipe.flags import numbering as number_parts
from llmtailor.recipe.grammar import DTYPES
from llmtailor.recipe.spelling import spell
from llmtailor.recipe.words import condense, layer_number
from llmtailor.recipe.yamlwrite import comment, entry, normal, path_text, quote, reference

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
