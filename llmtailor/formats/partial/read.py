"""From a partial checkpoint to a `CheckpointIndex`.

Its rank shards contain the object trees of the stock files, so everything except the places of the trained params'
states is read as from stock files. States left out by the save are listed as absent, with known shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmtailor.checkpoint.index import (
    DCP,
    FOLDERS,
    FSDP,
    FULL,
    PARTIAL,
    SHARDS,
    UNIVERSAL,
    DcpEntry,
    DcpKeyLayout,
    DeltaEncoding,
    PartialFacts,
    TensorEntry,
    buffer_on_ranks,
)
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.placement import (
    Absent,
    Box,
    Boxes,
    Bundled,
    Contiguous,
    Extent,
    Runs,
    corners,
    find_grid,
    union,
)
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.json import as_dict, get, is_count, is_path_below, read_strict_json, read_tensor
from llmtailor.containers.safetensors import WeightFile, read_header
from llmtailor.containers.torch_file import TorchFile, Undecoded
from llmtailor.containers.unpickle import as_ints, check_tree
from llmtailor.errors import PathIn, Problem, Problems, SourceError, attempt, damaged
from llmtailor.findings import Finding
from llmtailor.formats.deepspeed.files import ShardFiles
from llmtailor.formats.deepspeed.read import read_shards
from llmtailor.formats.format import Draft
from llmtailor.formats.lightning_tree import read_names, read_optimizer_tree, without_states
from llmtailor.formats.partial.differences import DifferencesFile, read_differences
from llmtailor.formats.partial.json_trees import PADDING, decode
from llmtailor.formats.partial.manifest import (
    KEY_LAYOUT,
    SCHEMA_BUNDLE,
    TREE,
    BundleFact,
    Manifest,
    bundle_name,
    differences_name,
    frozen_name,
    read_manifest,
)
from llmtailor.formats.torch_optimizer import parse_optimizer, read_optimizer
from llmtailor.formats.torch_states import make_index
from llmtailor.frameworks.files import TRAINER_STATE
from llmtailor.frameworks.framework import is_or_may_be_partial
from llmtailor.frameworks.read import files_among, read_trainer_files
from llmtailor.model.dtypes import D16, D24, DIFFERENCES, DTYPES, F24, ITEMSIZE, PACKED, Q8, numel_of, size_of
from llmtailor.model.parts import Param
from llmtailor.model.precision import ROUNDED_AS
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, State

_FIX = "leave this checkpoint out; its save is damaged"
_ABSENT = Absent()
_KEPT = (FROZEN, BUFFER)
_NOT_FRAGMENTS = ("tree", BUFFER, PADDING)


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

    def read(self, path: str, where: str) -> TorchFile:
        """Decode the object tree of a stock file; see `containers.json.Trees`."""
        if path not in self.tree_of:
            raise SourceError.at(where, "no rank shard contains this file's object tree", _FIX)
        bundle = self.tree_of[path]
        try:
            tree = decode(read_strict_json(self.files[bundle].metadata[TREE + path].encode()), self._find)
            check_tree(tree)
            return TorchFile(tree)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise SourceError.at(PathIn(self.name, bundle), f"its tree of {path} is damaged ({error})", _FIX) from error

    def open(self, path: str, where: str) -> Undecoded:
        return Undecoded(lambda: self.read(path, where))

    def _find(self, file: str, key: str) -> tuple[str, tuple[int, ...], Extent]:
        held = self.files[file].tensors[key]
        return held.dtype, held.shape, _extent(held)


def _extent(held: TensorEntry) -> Extent:
    """Return where a tensor of a safetensors file is, also an empty one."""
    assert isinstance(held.place, Contiguous)
    return held.place.extent


detects = is_or_may_be_partial


def open_partial(root: Path, name: str) -> Partial:
    """Read the manifest and the headers of all rank shards; no tensor byte is read.

    Raises SourceError with every file that is missing, of another size or of another save.
    """
    manifest = read_manifest(root, name)
    problems = Problems()
    files: dict[str, WeightFile] = {}
    differences: list[DifferencesFile] = []
    ranks = {of(rank, manifest.world_size): rank for rank in range(manifest.world_size) for of in _OF_RANK}
    for fact in manifest.bundles:
        file = attempt(lambda: _read_bundle(root, fact, manifest, ranks, name), problems)  # noqa: B023
        if isinstance(file, DifferencesFile):
            differences.append(file)
        elif file:
            files[fact.path] = file
    if TRAINER_STATE in manifest.carried and not (root / TRAINER_STATE).exists():
        problems.add(damaged(PathIn(name, TRAINER_STATE), "it is missing, but its save wrote it", Code.FILE_MISSING))
    problems.raise_if_any()
    tree_of = {
        key.removeprefix(TREE): path for path, file in files.items() for key in file.metadata if key.startswith(TREE)
    }
    if unexpected := [path for path in tree_of if not is_path_below(path)]:
        what = f"it contains an unknown file {unexpected[0]!r:.80}"
        raise SourceError.at(PathIn(name, tree_of[unexpected[0]]), what, _FIX)
    return Partial(root, name, manifest, files, tree_of, _collect(manifest, files, differences, name))


_OF_RANK = (bundle_name, differences_name)


def _read_bundle(
    root: Path, fact: BundleFact, manifest: Manifest, ranks: Mapping[str, int], name: str
) -> WeightFile | DifferencesFile:
    """Return a file's header, checked against the manifest; ``ranks`` are those of the ranks' own files by name."""
    where = PathIn(name, fact.path)
    read = read_differences if fact.path.endswith(".delta") else read_header
    file = read(root, fact.path, where)
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
        right = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise SourceError.at(where, f"it states {', '.join(wrong)}, but manifest.json states {right}", _FIX)
    return file


def _collect(
    manifest: Manifest, files: Mapping[str, WeightFile], differences: Sequence[DifferencesFile], name: str
) -> dict[State, TensorEntry]:
    """Join the ranks' fragments of each state. Raises SourceError for those that do not tile what the save holds."""
    pieces = _Pieces(manifest)
    for path, file in files.items():
        try:
            pieces.add_file(path, file)
        except (ValueError, RecursionError) as error:
            raise SourceError.at(PathIn(name, path), f"its metadata is damaged ({error})", _FIX) from error
    for file_of_rank in differences:
        pieces.add_differences(file_of_rank)
    problems: list[Problem] = []
    joined = {**pieces.whole, **pieces.join_runs(name, problems), **pieces.join_boxes(name, problems)}
    if problems:
        raise SourceError(problems)
    return joined


class _Run(NamedTuple):
    """Elements of a state in a file."""

    begin: int
    end: int
    path: str
    start: int
    dtype: str
    """Or the encoding"""
    frames: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of states in the files of all ranks."""

    manifest: Manifest
    runs: dict[State, list[_Run]] = field(default_factory=dict)
    boxes: dict[State, list[tuple[Box, TensorEntry]]] = field(default_factory=dict)
    whole: dict[State, TensorEntry] = field(default_factory=dict)

    def add_file(self, path: str, file: WeightFile) -> None:
        """Add what a bundle holds. Raises ValueError for damaged metadata."""
        begins = read_strict_json(file.metadata.get("begin", "{}").encode())
        listed = read_strict_json(file.metadata.get("whole", "[]").encode())
        if not isinstance(begins, dict) or not isinstance(listed, list):
            raise ValueError("begin is not a mapping, or whole not a list")
        if not all(isinstance(key, str) and key in file.tensors for key in listed):
            raise ValueError("whole lists what is no tensor of the file")
        packed = read_strict_json(file.metadata.get("packed", "{}").encode())
        if not isinstance(packed, dict) or not all(dtype in PACKED for dtype in packed.values()):
            raise ValueError("packed is not a mapping of kinds to known dtypes")
        keys = {*listed}
        for key, held in file.tensors.items():
            kind, _, param = key.partition("/")
            if kind in _NOT_FRAGMENTS or param not in begins:
                continue
            state, dtype = State(param, kind), held.dtype
            if dtype == "U8":
                dtype = packed.get(key) or packed.get(kind, dtype)
            if key in keys:
                if self.whole.setdefault(state, held) is not held:
                    raise ValueError(f"another rank also has all of {key}")
            elif isinstance(begins[param], dict):
                self._add_box(path, state, held, begins[param], dtype)
            else:
                start = _extent(held).start
                for begin, end in _runs(begins.get(key, begins[param]), held.num_bytes, dtype):
                    self.runs.setdefault(state, []).append(_Run(begin, end, path, start, dtype))
                    start += size_of(dtype, end - begin)

    def _add_box(self, path: str, state: State, held: TensorEntry, node: Any, dtype: str) -> None:
        box = _box(node, held.num_bytes, dtype)
        encoded, ends = "" if dtype in ITEMSIZE else dtype, (0, math.prod(box.sizes))
        place = Bundled((path,), (_extent(held).start,), ends, ITEMSIZE.get(dtype, 4), (), encoded)
        entry = TensorEntry("F32" if encoded else dtype, box.sizes, place)
        self.boxes.setdefault(state, []).append((box, entry))

    def add_differences(self, file: DifferencesFile) -> None:
        for param, elements, place in file.masters:
            state = State(param, MASTER)
            if isinstance(elements, Box):
                self.boxes.setdefault(state, []).append((elements, TensorEntry("F32", elements.sizes, place)))
            else:
                run = _Run(*elements, file.path, place.starts[0], D24, place.frames[0])
                self.runs.setdefault(state, []).append(run)

    def _shape(self, state: State) -> tuple[int, ...]:
        param = self.manifest.params.get(state.param)
        return (-1,) if param is None else param.shape

    def join_runs(self, name: str, problems: list[Problem]) -> dict[State, TensorEntry]:
        """Return the states whose pieces are runs of elements, and report those that are not what the save holds."""
        joined: dict[State, TensorEntry] = {}
        kept = {kind: self.manifest.runs_of(kind) for kind in dict.fromkeys(state.kind for state in self.runs)}
        for state, fragments in self.runs.items():
            fragments.sort(key=lambda run: run[:2])
            begins, ends, paths, starts, dtypes, frames = zip(*fragments, strict=True)
            shape = self._shape(state)
            is_whole = (0, *ends) == (*begins, math.prod(shape))
            dtype, encoded = (dtypes[0], "") if dtypes[0] in ITEMSIZE else ("F32", dtypes[0])
            framed = frames if encoded == D24 and all(frames) else ()
            cuts = (*begins, ends[-1])
            place = Bundled(paths, starts, cuts, ITEMSIZE[dtype], () if is_whole else ends, encoded, framed)
            joined[state] = TensorEntry(dtype, shape, place)
            runs = kept[state.kind].get(state.param, ((0, math.prod(shape)),))
            overlap = any(begin < end for begin, end in zip(begins[1:], ends, strict=False))
            if overlap or place.runs != union(runs) or len({*dtypes}) > 1:
                what = f"the ranks' fragments of {state.kind} of {state.param} do not make up the param"
                problems.append(Problem(name, what, _FIX))
        return joined

    def join_boxes(self, name: str, problems: list[Problem]) -> dict[State, TensorEntry]:
        """Return the states whose pieces are boxes, and report those that do not tile them."""
        joined: dict[State, TensorEntry] = {}
        for state, parts in self.boxes.items():
            try:
                joined[state] = _join(self._shape(state), parts)
            except ValueError as error:
                what = f"the ranks' boxes of {state.kind} of {state.param} do not make up the param: {error}"
                problems.append(Problem(name, what, _FIX))
        return joined


def _join(shape: tuple[int, ...], parts: Sequence[tuple[Box, TensorEntry]]) -> TensorEntry:
    """Return a state whose boxes are in several files. Raises ValueError unless they tile it, in one dtype."""
    if len({one.stored_as for _, one in parts}) > 1 or any(len(box.sizes) != len(shape) for box, _ in parts):
        raise ValueError("they are of several kinds")
    cuts, order = find_grid(shape, *corners(box for box, _ in parts))
    return TensorEntry(parts[0][1].dtype, shape, Boxes(shape, cuts, tuple(parts[at][1].place for at in order)))


def _box(node: Any, num_bytes: int, dtype: str) -> Box:
    """Return the box that a tensor holds, by the metadata ``begin``. Raises ValueError."""
    offsets, sizes = (node.get(key) if isinstance(node, dict) else None for key in ("offsets", "sizes"))
    if not (isinstance(offsets, list) and isinstance(sizes, list) and all(map(is_count, [*offsets, *sizes]))):
        raise ValueError("begin has no box")
    box = Box(tuple(offsets), tuple(sizes))
    if len(box.offsets) != len(box.sizes) or size_of(dtype, math.prod(box.sizes)) != num_bytes:
        raise ValueError("begin has another box than a tensor")
    return box


def _runs(begin: Any, num_bytes: int, dtype: str) -> Runs:
    """Return the elements of a param that a tensor holds, by the metadata ``begin``. Raises ValueError."""
    if is_count(begin):
        numel = numel_of(dtype, num_bytes)
        if size_of(dtype, numel) != num_bytes:
            raise ValueError("a tensor has a part of an element")
        return ((begin, begin + numel),)
    runs: list[Any] = begin if isinstance(begin, list) else [None]
    if not all(isinstance(run, list) and len(run) == 2 and all(map(is_count, run)) and run[0] < run[1] for run in runs):
        raise ValueError("begin is neither a count nor a list of runs")
    if sum(size_of(dtype, last - first) for first, last in runs) != num_bytes:
        raise ValueError("begin lists other elements than a tensor has")
    return tuple((first, last) for first, last in runs)


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a partial checkpoint; no tensor byte is read except the 4 bytes of each ``step``."""
    problems = Problems()
    return attempt(lambda: _draft(root, name, framework), problems) or Draft(problems)


def _draft(root: Path, name: str, framework: str | None) -> Draft:
    partial = open_partial(root, name)
    manifest = partial.manifest
    if manifest.stage:
        shards = manifest.shards
        optim, model = tuple(shards["optim"]), tuple(shards["model"])
        files = ShardFiles(manifest.tag, shards["is_bf16"], optim, model, manifest.stage == 3)
        draft = read_shards(partial, files, name, Problems(), framework)
    else:
        draft = _read_plain(partial, framework)
    draft.problems.raise_if_any()
    index = draft.index
    assert index is not None, "a checkpoint without an index has problems"
    stated = (index.form.stage, index.global_step, index.world_size, index.precision)
    if stated != (manifest.stage, manifest.step, manifest.world_size, manifest.precision):
        what = "the step, stage, world size or precision of its object trees differs from manifest.json"
        raise SourceError.at(name, what, _FIX)
    params = {param: Param(param, fact.shape, fact.role) for param, fact in manifest.params.items()}
    if (dict(index.params), dict(index.tied)) != (params, dict(manifest.tied)):
        raise SourceError.at(name, "the params of its object trees are not those that manifest.json lists", _FIX)
    held = _place(index.held, partial)
    saved = Ledger.from_json(manifest.ledger, name).steps if manifest.setback else {}
    setback = {part: (saved[part], steps) for part, steps in manifest.setback.items() if part in saved}
    found = {(state.kind == MASTER, one.stored_as) for state, one in held.items() if one.rounded_from}
    differences = _differences(partial)
    found |= {(True, "BF16") for one in differences.values() if one.entry.stored_as == D16}
    rounded = tuple(
        Finding(name, what, fix, Code.ROUNDED)
        for what, fix in (_ROUNDED[one] for one in sorted(found) if one in _ROUNDED)
    )
    index = replace(
        index,
        form=replace(index.form, format=_framework(manifest) or index.form.file_format, container=PARTIAL),
        held=held,
        findings=(*index.findings, *rounded),
        files=files_among(sorted(root.iterdir())),
        partial=PartialFacts(
            inside=frozenset(partial.tree_of),
            saved_as=manifest.saved_as,
            setback=setback,
            save_id=manifest.save_id,
            differences=differences,
            is_thinned=manifest.is_thinned,
        ),
        zero=replace(index.zero, module={}),
        train=replace(index.train, unclear=frozenset(manifest.unclear)),
    )
    return replace(draft, index=index)


_ROUNDED = {
    (False, "BF16"): (
        "its moments were saved rounded to bf16; composites widen them again, without the lost digits",
        "for exact ones, use a save that was made without moments=bf16",
    ),
    (False, Q8): (
        "its moments were saved in 8 bits; composites widen them again, without the lost digits",
        "for exact ones, use a save that was made without moments=8bit",
    ),
    (True, F24): (
        "its master weights were saved in 24 bits; composites widen them again, without the lost digits",
        "for exact ones, use a save that was made without masters=24bit, 24bit-delta or bf16",
    ),
    (True, "BF16"): (
        "some master weights were saved in 16 bits; composites add digits of masters that were saved with the moments",
        "for exact ones, use a save that was made without masters=bf16",
    ),
}
"""Whether it is the master, and its dtype -> what to say"""


def _differences(partial: Partial) -> dict[str, DeltaEncoding]:
    """Return the masters that are differences from those of other saves. Raises SourceError if a save is not named."""
    found: dict[str, DeltaEncoding] = {}
    base_of: dict[str, str] = {}
    for part, save_id in partial.manifest.bases.items():
        base_of |= dict.fromkeys(partial.manifest.params_of.get(part, ()), save_id)
    for state, entry in partial.fragments.items():
        if entry.stored_as in DIFFERENCES:
            if state.param not in base_of or state.kind != MASTER:
                what = f"its manifest does not say from which save {state.kind} of {state.param} differs"
                raise SourceError.at(partial.name, what, _FIX)
            found[state.param] = DeltaEncoding(replace(entry, rounded_from=entry.dtype), base_of[state.param])
    return found


def _framework(manifest: Manifest) -> str | None:
    named = manifest.shards.get("framework")
    return named if named in (UNIVERSAL, FSDP, DCP) else None


def _place(held: Mapping[State, TensorEntry], partial: Partial) -> dict[State, TensorEntry]:
    """Return the trained params' states with their actual places. Raises SourceError if the trees don't match them."""
    placed: dict[State, TensorEntry] = {}
    problems = []
    chosen = {kind: partial.manifest.runs_of(kind).keys() for kind in dict.fromkeys(state.kind for state in held)}
    for state, described in held.items():
        if state.kind in _KEPT:
            placed[state] = described
            continue
        fragment = partial.fragments.get(state)
        # without the other save, differences have no values
        is_here = fragment is not None and fragment.stored_as not in DIFFERENCES
        placed[state] = fragment if fragment and is_here else replace(described, place=_ABSENT)
        if fragment and described.dtype == "F32" and fragment.stored_as in ROUNDED_AS.get(state.kind, ()):
            fragment = replace(fragment, rounded_from=described.dtype)
            placed[state] = fragment if is_here else placed[state]
        if fragment and (fragment.live_dtype, fragment.shape) != (described.dtype, described.shape):
            what = f"{state.kind} of {state.param} does not match its object tree"
            problems.append(Problem(partial.name, what, _FIX))
        elif described.numel and (fragment is not None) != (state.param in chosen[state.kind]):
            lacks = "lack" if state.param in chosen[state.kind] else "hold"
            what = f"its rank shards {lacks} {state.kind} of {state.param}, which contradicts manifest.json"
            problems.append(Problem(partial.name, what, _FIX))
    if not partial.fragments.keys() <= held.keys():
        problems.append(Problem(partial.name, "its rank shards hold states that its object trees don't mention", _FIX))
    if problems:
        raise SourceError(problems)
    return placed


def _read_plain(partial: Partial, framework: str | None) -> Draft:
    manifest, name, problems = partial.manifest, partial.name, Problems()
    if framework is None and _framework(manifest) == DCP:  # none of its files would say so
        framework = DCP
    trainer = read_trainer_files(partial, name, problems, framework)
    style = attempt(lambda: _read_key_layout(partial), problems)
    where = PathIn(name, trainer.framework.optimizer)
    if trainer.framework.holds_all and (tree := trainer.trees.get(where.path)) is not None:
        optimizer = parse_optimizer(partial.root, read_optimizer_tree(tree, where), where)
        read_names(tree, where)  # `without_states` assumes that they are valid
        trainer = replace(trainer, trees={**trainer.trees, where.path: without_states(tree)})
    else:
        optimizer = read_optimizer(partial, where)
    problems.raise_if_any()
    groups = tuple(group.names or () for group in optimizer.groups)
    params = {param: Param(param, fact.shape, fact.role) for param, fact in manifest.params.items()}
    trained = {param for param, one in params.items() if one.role == "trainable"}
    if {param for group in groups for param in group} != trained:
        raise SourceError.at(name, "its optimizer's params differ from its manifest's", _FIX)
    dtypes = {param: fact.dtype for param, fact in manifest.params.items()}
    index = make_index(partial.root, name, optimizer, groups, params=params, tied=manifest.tied, dtypes=dtypes)
    index = replace(
        index,
        world_size=manifest.world_size,
        global_step=manifest.step,
        precision=manifest.precision,
        held=dict(_hold(partial, index.held)),
        findings=optimizer.findings,
        train=replace(index.train, model_order=tuple(params)),
        dcp=style,
    )
    return Draft(problems, index, trainer)


def _read_key_layout(partial: Partial) -> DcpKeyLayout | None:
    """Return how the run's DCP folders are arranged; None if the base had no DCP folder."""
    if KEY_LAYOUT not in partial.inside:
        return None
    where = PathIn(partial.name, partial.tree_of[KEY_LAYOUT])
    tree = as_dict(partial.read(KEY_LAYOUT, where).tree, "the file", where)
    form = get(tree, "form", str, where)
    if form not in (FOLDERS, SHARDS, FULL):
        raise damaged(where, f"form {form!r:.40} is unknown", Code.FIELD_RANGE)
    model, optimizer = (_read_prefix(tree.get(key), where) for key in ("model", "optimizer"))
    entries = [_read_entry(node, where) for node in get(tree, "others", list, where)]
    others = {".".join(map(str, entry.path)): entry for entry in entries}
    return DcpKeyLayout(
        model=model, optimizer=optimizer, is_flat=get(tree, "is_flat", bool, where), form=form, others=others
    )


def _read_prefix(node: Any, where: str) -> KeyPath:
    """Return what the paths of the model, or of the optimizer, begin with."""
    return () if node == () else _read_path(node, where)


def _read_path(node: Any, where: str) -> KeyPath:
    if not isinstance(node, tuple) or not node or not all(type(word) in (str, int) for word in node):
        raise damaged(where, "the path of a value is not one", Code.FIELD_TYPE)
    return node


def _read_entry(node: Any, where: str) -> DcpEntry:
    node = as_dict(node, "a value", where)
    path = _read_path(node.get("path"), where)
    if "object" in node:
        return DcpEntry(path, node["object"])
    dtype, shape = get(node, "dtype", str, where), as_ints(node.get("shape"))
    if dtype not in DTYPES or shape is None:
        raise damaged(where, "a tensor has no dtype or shape", Code.FIELD_TYPE)
    return DcpEntry(path, (dtype, shape, tuple(_read_boxes(node, dtype, shape, where))), is_tensor=True)


def _read_boxes(node: dict[str, Any], dtype: str, shape: tuple[int, ...], where: str) -> Iterator[tuple[Any, ...]]:
    for box in get(node, "boxes", list, where):
        offsets, sizes = map(as_ints, box[:2]) if isinstance(box, tuple) and len(box) == 3 else (None, None)
        tensor = None if offsets is None or sizes is None else read_tensor(box[2], "a box", where)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, sizes) or not len(shape) == len(offsets or ()):
            raise damaged(where, "a box does not fit its tensor", Code.FIELD_TYPE)
        yield offsets, sizes, tensor.extent


def _hold(partial: Partial, of_optimizer: Mapping[State, TensorEntry]) -> Iterator[tuple[State, TensorEntry]]:
    """Yield the states of all params; `_place` knows the places of the trained ones."""
    world_size, params = partial.manifest.world_size, partial.manifest.params
    for state, held in of_optimizer.items():
        fact = params[state.param]
        yield State(state.param, MASTER), TensorEntry(fact.dtype, fact.shape, _ABSENT)
        yield state, held
    for param, fact in params.items():  # also those of which the optimizer keeps nothing
        if fact.role == "trainable":
            yield State(param, MASTER), TensorEntry(fact.dtype, fact.shape, _ABSENT)
    bundle, whole = partial.files[bundle_name(0, world_size)], partial.files.get(frozen_name(0, 1))
    is_kept = whole or partial.files.keys() & {frozen_name(0, world_size)}
    for param, fact in params.items():
        if fact.role == "frozen" and is_kept:
            rows = partial.fragments.get(State(param, FROZEN))
            kept = rows or (whole.tensors.get(param) if whole else None)
            if kept is None:
                raise SourceError.at(partial.name, f"its files of frozen params lack {param}", _FIX)
            yield State(param, FROZEN), kept
        elif fact.role == "buffer":
            held = bundle.tensors[f"{BUFFER}/{param}"]
            if held.numel:  # rank 0's, for all ranks, as in the Trainer
                yield State(param, BUFFER), buffer_on_ranks(held.dtype, fact.shape, (_extent(held),) * world_size)
