"""Writes a recipe in the short form: a comment on sources and reasons, and a plain dump. Pure.

The text has the same meaning as its input; the tests check it with `parse_recipe` and `resolve`.
"""

from __future__ import annotations

import glob
import os
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from llmtailor.errors import Problem, RecipeError, escaped, printable
from llmtailor.model.dtypes import SPELLINGS
from llmtailor.model.parts import ModelStructure, Part, condense, layer_part, with_layers
from llmtailor.recipe import ONLY_MOMENTS, Assignment, Origin, Recipe
from llmtailor.recipe.selectors import SelectorError, numbering, read_selector, select
from llmtailor.storage.remote import RemotePath

_WIDTH = 100


class _Document:
    """The recipe to write. Paths in or next to `folder` are relative to it."""

    def __init__(self, base: Path, structure: ModelStructure, folder: Path | None) -> None:
        self.structure, self.folder = structure, folder
        self.problems: list[Problem] = []
        self.content: dict[str, Any] = {"merge_method": "passthrough", "base_model": self.model(base)}

    def path(self, path: Path) -> str:
        """Return a path as text: relative to the folder if it is in or next to it, else absolute."""
        if isinstance(path, RemotePath):
            return f"{path}".replace("$", "$$")
        text = os.path.normpath(path)
        if self.folder is not None:
            relative = os.path.relpath(path, self.folder)
            text = text if relative.split("/").count("..") > 1 else relative
            # tokenizer_source: base means the base, not a folder of that name
            if text.startswith("~") or not text.strip() or text in ("base", "union"):
                text = f"./{text}"
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            fix = "rename the folder, or use a symlink with a plain name"
            self.problems.append(Problem(printable(str(path)), "a recipe can't name this path: it is not UTF-8", fix))
        return text.replace("$", "$$")

    def model(self, path: Path) -> str | dict[str, str]:
        """Return a checkpoint: as a mapping if plain text would be read as path+lora."""
        text = self.path(path)
        return {"path": text} if "+" in text else text

    def add(self, source: Origin, names: Collection[str], only: str | None = None) -> None:
        """Add an entry of ``parts``, unless it would be empty."""
        if not names:
            return
        if isinstance(source, Path):
            entry: dict[str, Any] = {"from": self.model(source)}
        else:
            members = [{"from": self.model(path), "weight": weight} for path, weight in source.members]
            entry = {"average": members, "moments": source.moments}
        try:
            selectors = [str(text) for text in selectors_for(names, self.structure)]
            entry["select"] = selectors[0] if len(selectors) == 1 else selectors
        except RecipeError as error:
            self.problems += error.problems
        self.append("parts", entry | ({"only": only} if only else {}))

    def append(self, key: str, entry: dict[str, Any]) -> None:
        self.content.setdefault(key, []).append(entry)

    def text(self, comments: Iterable[str]) -> str:
        """Return the YAML. Raises RecipeError with everything that can't be written."""
        if self.problems:
            raise RecipeError(dict.fromkeys(self.problems))
        lines = [
            f"# {row}"
            for comment in comments
            for line in comment.splitlines()
            for row in textwrap.wrap(escaped(line), _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        ]
        style = None if {"parts", "slices"} & self.content.keys() else False  # None: lists of words in brackets
        dumped = yaml.safe_dump(
            self.content, default_flow_style=style, sort_keys=False, allow_unicode=True, width=_WIDTH
        )
        return "\n".join([*lines, dumped])


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
    structure = structure.joined(assignment.source_of)
    base, comments = assignment.base.path, [*(header or [assignment.title])]
    document = _Document(base, structure, folder)
    for number, (source, parts, only) in enumerate(assignment.rules()):
        reasons: dict[str, list[str]] = {}
        for part in parts:
            reasons.setdefault("newest moments" if only else assignment.reason[part], []).append(part)
        taken = [f"{condense(names)} ({reason})" for reason, names in reasons.items()]
        if number == 0:
            taken.append("schedule, random number states and trainer state")
        comments.append(f"step {source.step}: {'; '.join(taken)}")
        if number:
            document.add(source.path, [name for name, part in structure.part_of.items() if part in parts], only)
    if output is not None:
        document.content["output"] = document.path(output)
    return document.text(comments)


def write_normal_form(
    recipe: Recipe,
    source_of: Mapping[str, Origin],
    base: Path,
    structure: ModelStructure,
    folder: Path | None,
    *,
    weights_of: Mapping[str, Path] = MappingProxyType({}),
    moments_of: Mapping[str, Path] = MappingProxyType({}),
) -> str:
    """Return the YAML of a recipe of any form in the short form.

    `source_of`, `weights_of` and `moments_of` are the result of resolving it (see `Choice`). Split parts become names
    of tensors. Output, dtype and tokenizer are kept. Paths are written as by `write_recipe`.
    """
    document, comments = _Document(base, structure, folder), [f"the short form of {recipe.name}"]
    split = dict.fromkeys(structure.part_of[name] for name in weights_of)
    names_of: dict[Origin, list[str]] = {source: [] for source in recipe.sources()}
    for name, part in structure.part_of.items():
        if part not in split and source_of[name] != base:
            names_of.setdefault(source_of[name], []).append(name)
    for source, names in names_of.items():
        document.add(source, names)
    for moved in dict.fromkeys(moments_of.values()):
        document.add(moved, [name for name in structure.part_of if moments_of.get(name) == moved], ONLY_MOMENTS)
    for part in split:
        _write_split(part, source_of, weights_of, document)
    if split:
        comments.append("weights and optimizer states of some parts differ in source: needs --allow-split")
    settings = {
        "dtype": next((word for word, dtype in SPELLINGS.items() if dtype == recipe.dtype), None),
        "tokenizer_source": document.path(recipe.tokenizer) if recipe.tokenizer else None,
        "chat_template": recipe.chat_template,
        "output": document.path(recipe.output) if recipe.output else None,
    }
    document.content |= {key: value for key, value in settings.items() if value is not None}
    return document.text(comments)


def _write_split(
    part: Part, source_of: Mapping[str, Origin], weights_of: Mapping[str, Path], document: _Document
) -> None:
    """Write a part whose weights have another source, which only slices with post_weights can express."""
    names = document.structure.names(part)
    source, *others = dict.fromkeys(source_of[name] for name in names)
    number = next((number for number, owner in numbering(document.structure).items() if owner == part), None)
    if number is None or others or not isinstance(source, Path):
        what = "the short form can't express different sources of its weights and optimizer states"
        document.problems.append(Problem(part, what, "keep the recipe as it is"))
        return
    bounds = [number, number] if part.layer is None else [part.layer, part.layer + 1]
    document.append("slices", {"sources": [{"model": document.model(source), "layer_range": bounds}]})
    weights = {name: weights_of.get(name, source) for name in names}
    if len(set(weights.values())) == 1:
        weights = {str(part): weights[names[0]]}
    for name, path in weights.items():
        if path != source:
            document.append("post_weights", {"name": name, "model": document.model(path)})


def selectors_for(names: Collection[str], structure: ModelStructure) -> tuple[str, ...]:
    """Return selectors for exactly these tensors, at least one; tied names stay together.

    Whole parts are written as numbers or names (``odd``, ``8-15``, ``norm``), other tensors by name. `select` checks
    the list. Raises RecipeError if selectors can't distinguish some name from others.
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
    tensors = [name for part in split for name in structure.names(part) if name in wanted]
    for part in whole:
        if not part.is_share and part not in layers:
            own = structure.names(part)
            if select([part], structure) == (frozenset(own), ()):
                texts.append(part)
            else:
                tensors += own
    texts += map(_exactly, tensors)
    if select(texts, structure) == (wanted, ()):
        return tuple(texts)
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
