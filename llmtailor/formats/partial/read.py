"""Opening a partial checkpoint: the tensors and object trees in its rank shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Bundled, Extent
from llmtailor.containers.json import is_count, is_path_below, read_strict_json
from llmtailor.containers.safetensors import WeightFile, read_header
from llmtailor.containers.unpickle import check_tree
from llmtailor.errors import PathIn, Problem, Problems, SourceError
from llmtailor.formats.format import Decoded
from llmtailor.formats.partial.manifest import (
    FOLDER,
    MANIFEST,
    SCHEMA_BUNDLE,
    TREE,
    BundleFact,
    Manifest,
    bundle_name,
    read_manifest,
)
from llmtailor.formats.partial.trees import decode
from llmtailor.model.states import BUFFER, ITEMSIZE, State

_FIX = "leave this checkpoint out; its save is damaged"
_NOT_FRAGMENTS = ("tree", BUFFER)


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial checkpoint whose files all exist and are of one save."""

    root: Path
    name: str
    manifest: Manifest
    files: Mapping[str, WeightFile]
    """The safetensors files by name."""
    tree_of: Mapping[str, str]
    """Stock file -> the rank shard with its object tree"""
    fragments: Mapping[State, TensorEntry]
    """States of the chosen parts, with the shape of the param"""

    @property
    def inside(self) -> Collection[str]:
        return self.tree_of.keys()

    def read(self, path: str, where: str) -> Decoded:
        """Decode the object tree of a stock file; see `formats.format.Trees`."""
        if path not in self.tree_of:
            raise SourceError.at(where, "no rank shard contains this file's object tree", _FIX)
        bundle = self.tree_of[path]
        try:
            tree = decode(read_strict_json(self.files[bundle].metadata[TREE + path].encode()), self._find)
            check_tree(tree)
            return Decoded(tree)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise SourceError.at(PathIn(self.name, bundle), f"its tree of {path} is damaged ({error})", _FIX) from error

    def _find(self, file: str, key: str) -> tuple[str, tuple[int, ...], Extent]:
        held = self.files[file].tensors[key]
        place: Any = held.place
        return held.dtype, held.shape, place.extent


def is_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint whose save has finished."""
    return (root / MANIFEST).is_file()


def looks_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint, or the place of an unfinished one."""
    return is_partial(root) or root.absolute().parent.name == FOLDER


def open_partial(root: Path, name: str) -> Partial:
    """Read the manifest and the headers of all rank shards; no tensor byte is read.

    Raises SourceError with every file that is missing, of another size or of another save.
    """
    manifest = read_manifest(root, name)
    problems = Problems()
    files: dict[str, WeightFile] = {}
    ranks = {bundle_name(rank, manifest.world_size): rank for rank in range(manifest.world_size)}
    for fact in manifest.bundles:
        try:
            files[fact.path] = _read_bundle(root, fact, manifest, ranks, name)
        except SourceError as error:
            problems.add(error)
    problems.raise_if_any()
    tree_of = {
        key.removeprefix(TREE): path for path, file in files.items() for key in file.metadata if key.startswith(TREE)
    }
    if unexpected := [path for path in tree_of if not is_path_below(path)]:
        raise SourceError.at(
            PathIn(name, tree_of[unexpected[0]]), f"it contains an unknown file {unexpected[0]!r:.80}", _FIX
        )
    return Partial(root, name, manifest, files, tree_of, _collect(manifest, files, name))


def _read_bundle(root: Path, fact: BundleFact, manifest: Manifest, ranks: Mapping[str, int], name: str) -> WeightFile:
    """Return a file's header, checked against the manifest; ``ranks`` are those of the rank shards by name."""
    where = PathIn(name, fact.path)
    file = read_header(root, fact.path, where)
    size = (root / fact.path).stat().st_size
    if size != fact.num_bytes:
        raise SourceError.at(where, f"it has {size} bytes, but its save wrote {fact.num_bytes}", _FIX)
    if file.metadata.get("schema") != SCHEMA_BUNDLE:
        raise SourceError.at(where, "it is not a rank shard of a partial checkpoint", _FIX)
    if fact.path not in ranks:
        return file  # frozen params, which saves share
    stated = {key: file.metadata.get(key) for key in ("save_id", "step", "world_size", "rank")}
    if stated["save_id"] != manifest.save_id:
        raise SourceError.at(where, "it is of another save than manifest.json", _FIX)
    wanted = {"step": manifest.step, "world_size": manifest.world_size, "rank": ranks[fact.path]}
    if wrong := [f"{key} {stated[key]!r:.20}" for key, value in wanted.items() if stated[key] != str(value)]:
        what = (
            f"it states {', '.join(wrong)}, but manifest.json states {', '.join(f'{k} {v}' for k, v in wanted.items())}"
        )
        raise SourceError.at(where, what, _FIX)
    return file


def _collect(manifest: Manifest, files: Mapping[str, WeightFile], name: str) -> dict[State, TensorEntry]:
    """Join the ranks' fragments of each state. Raises SourceError for those that do not tile it exactly."""
    found: dict[State, list[tuple[int, str, TensorEntry]]] = {}
    for path, file in files.items():
        try:
            begins = read_strict_json(file.metadata.get("begin", "{}").encode())
            if not isinstance(begins, dict) or not all(map(is_count, begins.values())):
                raise ValueError("begin is not a mapping of params to counts")
            for key, held in file.tensors.items():
                kind, _, param = key.partition("/")
                if kind not in _NOT_FRAGMENTS and param in begins:
                    found.setdefault(State(param, kind), []).append((begins[param], path, held))
        except (ValueError, RecursionError) as error:
            raise SourceError.at(PathIn(name, path), f"its metadata is damaged ({error})", _FIX) from error
    joined: dict[State, TensorEntry] = {}
    problems = []
    for state, fragments in found.items():
        fragments.sort(key=lambda one: one[0])
        shape = manifest.params[state.param].shape if state.param in manifest.params else (-1,)
        cuts, at = [], 0
        for begin, _, held in fragments:
            if begin != at or held.dtype != fragments[0][2].dtype:
                break
            cuts.append(at)
            at += held.numel
        else:
            dtype = fragments[0][2].dtype
            starts = tuple(_start(held) for _, _, held in fragments)
            place = Bundled(tuple(path for _, path, _ in fragments), starts, (*cuts, at), ITEMSIZE[dtype])
            joined[state] = TensorEntry(dtype, shape, place)
        if state not in joined or joined[state].numel != at:
            what = f"the ranks' fragments of {state.kind} of {state.param} do not make up the param"
            problems.append(Problem(name, what, _FIX))
    if problems:
        raise SourceError(problems)
    return joined


def _start(held: TensorEntry) -> int:
    place: Any = held.place
    start: int = place.extent.start
    return start
