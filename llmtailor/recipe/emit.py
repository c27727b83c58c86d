"""Writes a recipe as readable YAML: the short form, with comments on sources and reasons. Pure.

The text has the same meaning as its input; the tests check it with `parse_recipe` and `resolve`.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from llmtailor.checkpoint.step_names import step_of
from llmtailor.errors import Problem, RecipeError, escaped, printable
from llmtailor.model.dtypes import SPELLINGS
from llmtailor.model.parts import ModelStructure, Part, condense, layer_part, with_layers
from llmtailor.recipe import ONLY_MOMENTS, Assignment, Origin, Recipe
from llmtailor.recipe.selectors import SelectorError, numbering, read_selector, select
from llmtailor.storage.remote import RemotePath

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
"""Text that needs no quotes, even in [a, b]"""
_NO_PART = "schedule, random number states and trainer state"


@dataclass(slots=True)
class _Document:
    """The content to write. Paths near `folder` are relative to it."""

    folder: Path | None
    header: list[str]
    sources: list[tuple[Origin, list[str], list[str], str | None]] = field(default_factory=list)
    """The checkpoints and averages, the base first: path, the tensors that come from it, comments, and `Select.only`"""
    slices: list[tuple[Path, int, int]] = field(default_factory=list)
    """Sources of optimizer states whose weights have another source: layer ranges and LLMTailor's numbers"""
    weights: list[tuple[str, Path]] = field(default_factory=list)
    """The sources of those weights, by part or tensor name"""
    settings: dict[str, str | Path | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def model(self, path: Path) -> str:
        """Return a checkpoint as YAML: as a mapping if plain text would be read as path+lora."""
        text = self.path(path)
        return f"{{path: {text}}}" if "+" in text else text

    def head(self, source: Origin) -> list[str]:
        """Return the lines of an entry of ``parts`` above its selectors."""
        if isinstance(source, Path):
            return [f"  - from: {self.model(source)}"]
        members = [f"      - {{from: {self.model(path)}, weight: {weight!r}}}" for path, weight in source.members]
        return ["  - average:", *members, f"    moments: {source.moments}"]

    def path(self, path: Path) -> str:
        """Return a path as YAML: relative to the folder if it is in or next to it, else absolute."""
        if isinstance(path, RemotePath):
            return _quote(f"{path}".replace("$", "$$"))
        text = os.path.normpath(path)
        if self.folder is not None:
            close = os.path.relpath(path, self.folder)
            text = text if close.split("/").count("..") > 1 else close
            # tokenizer_source: base means the base, not a folder of that name
            if text.startswith("~") or not text.strip() or text in ("base", "union"):
                text = f"./{text}"
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            fix = "rename the folder, or use a symlink with a plain name"
            self.problems.append(Problem(printable(str(path)), "a recipe can't name this path: it is not UTF-8", fix))
        return _quote(text.replace("$", "$$"))


def write_recipe(
    assignment: Assignment,
    structure: ModelStructure,
    folder: Path | None = None,
    header: Sequence[str] = (),
    output: Path | None = None,
) -> str:
    """Return the YAML of the recipe that composes an assignment.

    `header` replaces the assignment's title in the comment at the top. The assignment's paths are absolute; those in or
    next to `folder`, where the recipe will be, are written relative to it. Raises RecipeError with everything that
    can't be written.
    """
    document = _Document(folder, list(header) or [assignment.title])
    structure = structure.joined(assignment.source_of)
    for source, parts, only in assignment.rules():
        why: dict[str, list[str]] = {}
        for part in parts:
            why.setdefault("newest moments" if only else assignment.reason[part], []).append(part)
        comments = [_age(source.step, assignment.base.step if document.sources else None)]
        comments += [f"{condense(same)} ({reason})" for reason, same in why.items()]
        names = [name for name, part in structure.part_of.items() if part in parts]
        document.sources.append((source.path, names, comments, only))
    document.settings = {"output": output}
    return _lay_out(document, structure)


def write_normal_form(
    recipe: Recipe,
    source_of: Mapping[str, Origin],
    base: Path,
    structure: ModelStructure,
    folder: Path | None,
    weights_of: Mapping[str, Path] = MappingProxyType({}),
    moments_of: Mapping[str, Path] = MappingProxyType({}),
) -> str:
    """Return the YAML of a recipe of any form in the short form.

    `source_of`, `weights_of` and `moments_of` are the result of resolving it (see `Choice`). Split parts become globs
    or names of tensors. Output, dtype and tokenizer are kept. Paths are written as by `write_recipe`.
    """
    names_of: dict[Origin, list[str]] = {source: [] for source in (base, *recipe.sources())}
    split = dict.fromkeys(structure.part_of[name] for name in weights_of)
    for name, part in structure.part_of.items():
        if part not in split:
            names_of.setdefault(source_of[name], []).append(name)
    document = _Document(folder, [f"the normal form of {recipe.name}"])
    base_step = step_of(base)
    entries: list[tuple[Origin, list[str], str | None]] = [(source, names, None) for source, names in names_of.items()]
    for moved in dict.fromkeys(moments_of.values()):
        names = [name for name in structure.part_of if moments_of.get(name) == moved]
        entries.append((moved, names, ONLY_MOMENTS))
    for source, names, only in entries:
        step = step_of(source) if isinstance(source, Path) else None
        age = [_age(step, base_step)] if source != base and step is not None and base_step is not None else []
        document.sources.append((source, names, age + _shares(names, structure), only))
    for part in split:
        _write_split(part, source_of, weights_of, structure, document)
    if split:
        document.header.append("weights and optimizer states of some parts differ in source: needs --allow-split")
    document.settings = {
        "dtype": next((word for word, dtype in SPELLINGS.items() if dtype == recipe.dtype), None),
        "tokenizer_source": recipe.tokenizer,
        "chat_template": recipe.chat_template,
        "output": recipe.output,
    }
    return _lay_out(document, structure)


def _write_split(
    part: Part,
    source_of: Mapping[str, Origin],
    weights_of: Mapping[str, Path],
    structure: ModelStructure,
    document: _Document,
) -> None:
    """Write a part whose weights have another source, which only slices with post_weights can express."""
    names = structure.names(part)
    source, *others = dict.fromkeys(source_of[name] for name in names)
    number = next((number for number, owner in numbering(structure).items() if owner == part), None)
    if number is None or others or not isinstance(source, Path):
        what = "the normal form can't express different sources of its weights and optimizer states"
        document.problems.append(Problem(part, what, "keep the recipe as it is"))
        return
    layer = part.layer
    document.slices.append((source, number, number) if layer is None else (source, layer, layer + 1))
    weights = {name: weights_of.get(name, source) for name in names}
    if len(set(weights.values())) == 1:
        document.weights.append((part, weights[names[0]]))
    else:
        document.weights += [(name, weights[name]) for name in names if name in weights_of]


def _lay_out(document: _Document, structure: ModelStructure) -> str:
    (base, names, comments, _), *others = document.sources
    also = f"supplies the rest, and {_NO_PART}" if names else f"supplies no part, only {_NO_PART}"
    lines = [*_comment(document.header), "merge_method: passthrough", "", *_comment([*comments, also])]
    assert isinstance(base, Path), "an average can't be the base"
    lines.append(f"base_model: {document.model(base)}")
    others = [source for source in others if source[1]]
    lines += ["", "parts:"] if others else []
    for path, names, comments, only in others:
        lines += _comment(comments, "  ")
        lines += document.head(path)
        try:
            lines += _entry("select", selectors_for(names, structure), "    ")
            lines += [f"    only: {only}"] if only else []
        except RecipeError as error:
            document.problems += error.problems
    lines += ["", "slices:", "  # optimizer states"] if document.slices else []
    for path, start, stop in document.slices:
        lines.append(f"  - sources: [{{model: {document.model(path)}, layer_range: [{start}, {stop}]}}]")
    lines += ["", "post_weights:"] if document.weights else []
    for name, path in document.weights:
        lines.append(f"  - {{name: {_quote(name)}, model: {document.model(path)}}}")
    settings = {key: value for key, value in document.settings.items() if value is not None}
    lines += [""] if settings else []
    for key, value in settings.items():
        lines.append(f"{key}: {document.path(value) if isinstance(value, Path) else _quote(value)}")
    if document.problems:
        raise RecipeError(dict.fromkeys(document.problems))
    return "\n".join(lines) + "\n"


def _comment(texts: Sequence[str], indent: str = "") -> list[str]:
    head = f"{indent}# "
    return [
        head + row
        for text in texts
        for line in text.splitlines()
        for row in textwrap.wrap(escaped(line), _WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    ]


def _entry(key: str, words: Sequence[str], indent: str) -> list[str]:
    """Return ``key: a``, ``key: [a, b]``, or a block list if that is too long."""
    texts = [_quote(word) for word in words]
    line = f"{indent}{key}: {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}"
    if len(texts) == 1 or len(line) <= _WIDTH:
        return [line]
    return [f"{indent}{key}:", *(f"{indent}  - {text}" for text in texts)]


def _quote(text: str) -> str:
    """Return a text as YAML, in double quotes if it would be read as something else."""
    if _PLAIN.fullmatch(text) and text.lower() != "null":
        return text
    return '"' + escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _age(step: int, base_step: int | None) -> str:
    if base_step is None or step == base_step:
        return f"step {step}" if base_step is None else f"step {step}, the same as the base"
    distance = abs(base_step - step)
    return f"step {step}, {distance} step{'s' * (distance > 1)} {'behind' if step < base_step else 'ahead of'} the base"


def _shares(names: Collection[str], structure: ModelStructure) -> list[str]:
    """Return the parts taken whole and those taken in part, as comments."""
    whole, split = structure.divide(names)
    return [condense(whole)] * bool(whole) + [f"some tensors of {condense(split)}"] * bool(split)


def selectors_for(names: Collection[str], structure: ModelStructure) -> tuple[str, ...]:
    """Return selectors for exactly these tensors, at least one; tied names stay together.

    Whole parts are written as numbers or names (``odd``, ``8-15``, ``norm``), other tensors as globs over layers and
    experts or by name. `select` checks the list. Raises RecipeError if selectors can't distinguish some name from
    others.
    """
    wanted = frozenset(names)
    if len(wanted) == len(structure.part_of):
        return ("all",)
    whole, split = structure.divide(wanted)
    layers = {part for part in with_layers(whole, structure.parts) if part.layer is not None and not part.is_share}
    every = sorted({part.layer for part in structure.parts if part.layer is not None})
    taken = [number for number in every if layer_part(number) in layers]
    words = (("layers", every), ("even", [n for n in every if n % 2 == 0]), ("odd", [n for n in every if n % 2]))
    fitting = [word for word, numbers in words if taken == numbers and (len(taken) > 1 or taken == every)]
    texts = fitting[:1] if taken and fitting else _runs(taken, every)
    texts += _expert_selectors([part for part in whole if part.whole not in layers], structure)
    pieces = [name for part in split for name in structure.names(part) if name in wanted]
    for part in whole:
        if not part.is_share and part not in layers:
            own = structure.names(part)
            if select([part], structure) == (frozenset(own), ()):
                texts.append(part)
            else:
                pieces += own
    for rest in (_globs(pieces, wanted, structure), [_exactly(name) for name in pieces]):
        if select(texts + rest, structure) == (wanted, ()):
            return (*texts, *rest)
    parts = condense(dict.fromkeys(structure.part_of[name] for name in names))
    what = f"selectors can't distinguish these tensors from others: {sorted(wanted)[0]!r}, ..."
    raise RecipeError(Problem(parts, what, "take these parts from the base"))


def _expert_selectors(parts: Collection[Part], structure: ModelStructure) -> list[str]:
    """Return selectors for experts, and the rest, of layers that are not taken whole."""
    experts: dict[int, list[int]] = {}
    every: dict[int, list[int]] = {}
    for of, among in ((experts, parts), (every, structure.parts)):
        for part in among:
            if part.layer is not None and part.expert is not None:
                of.setdefault(part.layer, []).append(part.expert)
    texts = []
    for layer, numbers in experts.items():
        listed = "" if len(numbers) == len(every[layer]) else f" {', '.join(_runs(numbers, every[layer]))}"
        texts.append(f"layer {layer} expert{'s' * (len(numbers) > 1)}{listed}")
    taken, rests = (
        [part.layer for part in among if part.is_share and part.layer is not None and part.expert is None]
        for among in (parts, structure.parts)
    )
    if taken:
        texts.append(f"layer{'s' * (len(taken) > 1)} {', '.join(_runs(taken, sorted(rests)))} non-expert")
    return texts


def _runs(taken: Collection[int], every: Sequence[int]) -> list[str]:
    """Return layers as single numbers and as ``a-b``; a run may include numbers that no layer has."""
    runs: list[list[int]] = []
    is_open = False
    for number in every:
        if number in taken:
            runs[-1:] = [[runs[-1][0], number]] if is_open else [*runs[-1:], [number]]
        is_open = number in taken
    return ["-".join(map(str, run)) for run in runs]


def _exactly(name: str) -> str:
    """Return a selector for one tensor: its name, or a glob if the name would be read as something else."""
    with suppress(SelectorError):
        if read_selector(name).name == name:
            return name
    escaped = glob.escape(name)
    return escaped if escaped != name else f"[{name[:1]}]{name[1:]}"


def _globs(names: Iterable[str], wanted: Collection[str], structure: ModelStructure) -> list[str]:
    """Return selectors for tensors of split parts: globs over layers, experts or both that match only wanted ones, and
    single names."""
    unwanted = [name for name in structure.part_of if name not in wanted]

    @cache
    def is_fine(selector: str) -> bool:
        return not any(map(re.compile(fnmatch.translate(selector)).match, unwanted))

    found: dict[str, None] = {}
    for name in names:
        words = [glob.escape(word) for word in name.split(".")]
        numbers = [at for at, word in enumerate(words) if word.isdecimal()]
        for starred in (numbers, numbers[:1], numbers[-1:]):
            selector = ".".join("*" if at in starred else word for at, word in enumerate(words))
            if starred and is_fine(selector):
                break
        else:
            selector = _exactly(name)
        found[selector] = None
    return [*found]
