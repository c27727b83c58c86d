"""The files of a save: each rank's share, and what rank 0 adds to complete the partial checkpoint.

Laying out reads only small states, so it takes little time; the tensors are read when the files are written.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtailor._version import __version__
from llmtailor.background.bases import BaseRecordingStore, DeltaBases
from llmtailor.background.frozen import FrozenParams
from llmtailor.background.packing import ANY_STEP, SOURCE, LiveTensors
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout, Plan
from llmtailor.checkpoint.lineage import Past
from llmtailor.checkpoint.placement import Box
from llmtailor.containers.safetensors import read_header
from llmtailor.copying.copy import MIN_DIRECT_BYTES, Context, execute
from llmtailor.copying.streams import Output, Store, cannot_write, direct_bytes
from llmtailor.errors import SourceError, StorageError, UnsupportedCheckpoint
from llmtailor.formats.partial.differences import Elements, head_of, index_of
from llmtailor.formats.partial.json_trees import encode, lay_out_tensors, placeholder, stored, to_text
from llmtailor.formats.partial.manifest import (
    SCHEMA_BUNDLE,
    BundleFact,
    Manifest,
    bundle_name,
    differences_name,
    manifest_json,
    ranges_of,
    read_manifest,
)
from llmtailor.formats.partial.write import Bundle
from llmtailor.frameworks.files import PARTIAL_MANIFEST, TRAINER_STATE
from llmtailor.frameworks.trainer_state import is_marked, with_mark
from llmtailor.live.model import is_adapted, saved_adapter
from llmtailor.live.tensors import DTYPES, bytes_of, storage_of
from llmtailor.live.training import Constant, FrozenFile, LiveShard, StoredElsewhere, TensorPlaceholder, Training
from llmtailor.model.dtypes import D24, DIFFERENCES, F24, ITEMSIZE
from llmtailor.model.parts import ExpertSlice
from llmtailor.model.precision import EXACT, WITHOUT_BASE, Precision
from llmtailor.model.roles import BUFFER, MASTER, is_moment
from llmtailor.ranks.team import Ranks
from llmtailor.runs.folder import files_in, link_or_copy
from llmtailor.storage import frames
from llmtailor.storage.checksums import crc32
from llmtailor.storage.local import fsync_folder, read_source, replace_durably


@dataclass(frozen=True, slots=True)
class CompressedMasters:
    """The masters of one rank that are copied as they are, and compressed when they are written."""

    layout: FileLayout
    """The file, with the bytes of the masters in place of the frames: more than is written"""
    tensors: tuple[tuple[Copy, memoryview], ...]
    """Each of them, and what it differs from"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank writes in a save."""

    files: tuple[FileLayout, ...]
    """In the order in which they are written: frozen params first, so that they are copied soon"""
    linked: tuple[BundleFact, ...] = ()
    """Files that are the same as in the previous save"""
    live: LiveTensors
    check: Callable[[], None] = lambda: None
    """Called once the frozen params are copied, or before their file is linked to; raises StorageError if they have
    changed without being seen."""
    moving: tuple[str, ...] = ()
    """Frozen params in ``files`` that training changes at unknown times"""
    before: Path | None = None
    """The previous save"""
    compressed: CompressedMasters | None = None

    @property
    def copied(self) -> tuple[FileLayout, ...]:
        """What is read of the tensors, in this order"""
        return self.files if self.compressed is None else (*self.files, self.compressed.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    """What a rank is to write in a save.

    The names of params may be those of ``pieces`` that the training has fragments of (`model.find_trained_parts`).
    """

    save_id: str
    step: int
    training: Training
    params: Collection[str]
    """Those that are saved with all states"""
    masters: Collection[str]
    """Those of which only the masters are"""
    trees: Mapping[str, Any]
    """The object trees of stock files by path"""
    ranks: Ranks
    before: Path | None
    """The previous save"""
    frozen_params: FrozenParams
    """Decides whether these have changed"""
    precision: Precision = EXACT
    bases: DeltaBases | None = None
    """Gets what is saved of ``params``"""
    based: Collection[str] = ()
    """Params of ``masters`` that are stored as differences from what ``bases`` has"""
    pieces: Mapping[str, ExpertSlice] = field(default_factory=dict)


def lay_out_share(request: ShareRequest) -> Share:
    """Lay out this rank's files: its states, buffers and object trees, and its frozen params unless the save before has
    the same.

    Small tensors are copied at once, because training may change them at any time. Raises UnsupportedCheckpoint for an
    object that a checkpoint must not hold.
    """
    training, ranks, before = request.training, request.ranks, request.before
    layout = _ShareLayout(request)
    layout.add_states()
    live, bundle = layout.live, layout.bundle
    for name, tensor in training.buffers().items():
        bundle.entries.append(live.entry(f"{BUFFER}/{name}", tensor.detach().clone()))
    for stock, tree in request.trees.items():
        bundle.trees[stock] = to_text(_encode(tree, _Special(bundle, live), stock))
    facts = {
        "save_id": request.save_id,
        "step": str(request.step),
        "rank": str(ranks.rank),
        "world_size": str(ranks.world_size),
    }
    files, linked, frozen = [bundle.lay_out(facts)], [], training.frozen()
    digests, moving = request.frozen_params.look(frozen)
    if frozen:
        fingerprint = f"{crc32(to_text(digests).encode()):08x}"
        if before is not None and (fact := _known(before, frozen.name, fingerprint)) is not None:
            linked.append(fact)
        else:
            files.insert(0, _lay_out_frozen(frozen, fingerprint, live))

    def check() -> None:
        if frozen is not None:
            request.frozen_params.check(frozen, digests, is_copied=not linked)

    path = differences_name(ranks.rank, ranks.world_size)
    more = lay_out_compressed(path, facts, layout.compressed) if layout.compressed else None
    return Share(
        files=tuple(files),
        linked=tuple(linked),
        live=live,
        check=check,
        moving=moving,
        before=before,
        compressed=more,
    )


def _lay_out_frozen(frozen: FrozenFile, fingerprint: str, live: LiveTensors) -> FileLayout:
    entries = [live.entry(key, tensor, None, ANY_STEP) for key, tensor in frozen.tensors.items()]
    about = {"schema": SCHEMA_BUNDLE, "fingerprint": fingerprint}
    places = {key: asdict(at) if isinstance(at, Box) else at for key, at in frozen.begin.items()}
    about |= {"begin": to_text(places)} if places else {}
    return lay_out_tensors(frozen.name, entries, about)


class _ShareLayout:
    """The states of a share, as they are laid out."""

    def __init__(self, request: ShareRequest) -> None:
        ranks = request.ranks
        self.live, self.bundle = LiveTensors(), Bundle(bundle_name(ranks.rank, ranks.world_size))
        self.compressed: list[tuple[str, Elements, Copy, memoryview]] = []
        self._request, self._without_moments = request, {*request.masters}
        self._written_with: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._kinds: dict[str, int] = {}

    def add_states(self) -> None:
        request = self._request
        fragments = [*request.training.fragments([*request.params, *request.masters])]
        kinds_of = _kinds_of(fragments)
        for fragment in fragments:
            if not is_moment(fragment.kind) or fragment.param not in self._without_moments:
                self._add(fragment, kinds_of[fragment.param])

    def _add(self, fragment: LiveShard, kinds: Collection[str]) -> None:
        request = self._request
        piece = request.pieces.get(fragment.param)
        name, begin = (piece.param, piece.begin + fragment.begin) if piece else (fragment.param, fragment.begin)
        if fragment.kind == MASTER:
            self._written_with[name] = storage_of(fragment.tensor)
        dtype, base = self._dtype(fragment, kinds, name, begin)
        if dtype == D24 and base is not None:
            self._compress(fragment, name, begin, base)
            return
        # the states of a sub-group after each other, as the optimizer writes them
        written_with = self._written_with[name]
        group = self._groups.setdefault(written_with, len(self._groups))
        storage = f"{group:08}.{self._kinds.setdefault(fragment.kind, len(self._kinds)):02}"
        entry = self.live.entry(f"{fragment.kind}/{name}", fragment.tensor, dtype, written_with, storage, base)
        if fragment.box is not None:
            self.bundle.add_box(entry, fragment.box)
        elif fragment.shape is None:
            self.bundle.add_fragment(entry, begin)
        else:
            self.bundle.add_whole(replace(entry, shape=fragment.shape))

    def _dtype(
        self, fragment: LiveShard, kinds: Collection[str], name: str, begin: int
    ) -> tuple[str | None, torch.Tensor | None]:
        """Return the dtype in the file, None for that of the tensor, and the base: what the elements are differences
        from, or where they are kept for later differences."""
        request = self._request
        if not _is_roundable(fragment):
            return None, None
        # an expert's master is a piece of a tensor, which has one dtype
        with_moments = fragment.param not in self._without_moments or fragment.param in request.pieces
        dtype = request.precision.dtypes(kinds, with_moments=with_moments).get(fragment.kind)
        bases, numel = request.bases, fragment.tensor.numel()
        if dtype not in DIFFERENCES:
            is_kept = dtype == F24 and fragment.param not in request.pieces
            return dtype, bases.coming(name, begin, numel) if bases is not None and is_kept else None
        base = bases.of(name, begin, numel) if bases is not None and fragment.param in request.based else None
        dtype = WITHOUT_BASE[dtype] if base is None else dtype
        if dtype == D24 and not math.prod(request.training.params[name].shape):
            dtype = F24  # there is nothing to compress
        return dtype, base

    def _compress(self, fragment: LiveShard, name: str, begin: int, base: torch.Tensor) -> None:
        for content in self.live.entry(name, fragment.tensor, None, self._written_with[name]).content:
            assert isinstance(content, Copy), "of a tensor"
            elements = fragment.box or (begin, begin + fragment.tensor.numel())
            self.compressed.append((name, elements, content, bytes_of(base)))


def _kinds_of(fragments: Iterable[LiveShard]) -> dict[str, set[str]]:
    """Return the kinds of state of each param."""
    kinds: dict[str, set[str]] = {}
    for fragment in fragments:
        kinds.setdefault(fragment.param, set()).add(fragment.kind)
    return kinds


def _is_roundable(fragment: LiveShard) -> bool:
    return fragment.tensor.dtype == torch.float32 and fragment.shape is None


MOST_OFF = (254, 510)
"""The reciprocals of half a step of `dtypes.Q8` and `dtypes.Q8_ROOT`, relative to the largest element of a block"""


def describe_rounding(precision: Precision, fragments: Iterable[LiveShard]) -> str:
    """Return what saves of a training round, and by how much; empty if its precision is exact."""
    all_fragments = [*fragments]
    kinds_of = _kinds_of(all_fragments)
    moments = {
        one.kind
        for one in all_fragments
        if _is_roundable(one) and one.kind in precision.dtypes(kinds_of[one.param]) and one.kind != MASTER
    }
    told = [] if precision.masters == EXACT.masters else [f"masters in {precision.masters}"]
    if precision.moments == EXACT.moments:
        return " and ".join(told)
    if not moments:
        return " and ".join([*told, "the optimizer's states exactly, of which none can be rounded"])
    off = ""
    if precision.moments == "8bit":
        off = f" (off by at most 1/{MOST_OFF[0]} and 1/{MOST_OFF[1]} of the largest of 128 neighbors, or roots)"
    told.append(f"{' and '.join(sorted(moments))} in {precision.moments}{off}")
    return f'{" and ".join(told)}; policy="full" keeps everything exact'


def lay_out_compressed(
    path: str, facts: Mapping[str, str], found: Sequence[tuple[str, Elements, Copy, memoryview]]
) -> CompressedMasters:
    """Lay out a file of masters: params, which of their elements, the bytes of these, and what they differ from."""
    head = head_of({"schema": SCHEMA_BUNDLE, **facts}, [(name, elements) for name, elements, *_ in found])
    tensors = tuple((piece, base) for *_, piece, base in found)
    return CompressedMasters(
        FileLayout(path, (Bytes(head, "what it holds"), *(piece for piece, _ in tensors))), tensors
    )


def check_trees(trees: Mapping[str, Any]) -> None:
    """Raise UnsupportedCheckpoint for object trees that `lay_out_share` would refuse."""
    for stock, tree in trees.items():
        _encode(tree, _Special(Bundle(""), LiveTensors()), stock)


def write_share(
    folder: Path, share: Share, store: Store | None = None, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> list[BundleFact]:
    """Write one rank's files, fsynced, in the calling thread. The bytes come from ``store``, else from live tensors.

    Raises OSError, or StorageError.
    """
    if share.linked:
        share.check()
    source = BaseRecordingStore(share.live, store or share.live)
    context = Context(
        stores={SOURCE: source},
        on_progress=on_progress,
        inline=True,
        direct=store is not None,  # a copy in memory that lies as the disk needs it
    )
    results = execute(Plan((SOURCE,), share.files), folder, context)
    for fact in share.linked:
        assert share.before is not None, "the previous save, which has the file"
        link_or_copy(share.before / fact.path, folder / fact.path)
    facts = [BundleFact(one.path, one.num_bytes, one.crc, ranges_of(one.checked)) for one in results]
    facts = [*facts[-1:], *facts[:-1], *share.linked]
    if share.compressed is not None:
        facts.append(_write_compressed(folder, share, source, on_progress, direct=store is not None))
    return facts


def _write_compressed(
    folder: Path, share: Share, store: Store, on_progress: Callable[[int], None], *, direct: bool
) -> BundleFact:
    """Write the differences of masters, fsynced. Raises StorageError."""
    assert share.compressed is not None, "what is written"
    layout = share.compressed.layout
    path, (head, *_) = folder / layout.path, layout.pieces
    assert isinstance(head, Bytes), "what it holds comes first"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            is_large = direct and layout.num_bytes >= MIN_DIRECT_BYTES
            output = Output(fd, on_progress, None, direct_bytes(1) if is_large else 0)
            crc, lengths = output.put(head.data), []
            for piece, older in share.compressed.tensors:
                for frame in _frames(store, piece, older):
                    crc = output.put(frame, crc)
                    lengths.append(len(frame))
            crc = output.put(index_of(lengths), crc)
            output.end()
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_write(path, error) from error
    return BundleFact(layout.path, output.at, crc)


def _frames(store: Store, piece: Copy, older: memoryview) -> Iterator[bytes]:
    """Yield the frames of a tensor, given the bytes of the masters that its fp32 elements differ from."""
    path, at, stop = piece.extent
    values, base_bytes = memoryview(bytearray(min(frames.ELEMENTS * ITEMSIZE["F32"], stop))), ITEMSIZE[F24]
    begin = filled = 0
    while at < stop:
        some = store.read(path, at, stop)
        at += len(some)
        while some:
            part = some[: len(values) - filled]
            values[filled : filled + len(part)] = part
            some, filled = some[len(part) :], filled + len(part)
            if filled == len(values) or (at == stop and not some):
                end = begin + filled // ITEMSIZE["F32"]
                yield frames.encode(np.frombuffer(values[:filled], "<f4"), older[base_bytes * begin : base_bytes * end])
                begin, filled = end, 0


def publish(
    folder: Path,
    manifest: Manifest,
    bundles: Sequence[BundleFact],
    *,
    policy: Mapping[str, Any],
    num_bytes: Mapping[str, int],
    attempt: Past,
    files: Mapping[str, bytes],
    carried: Mapping[str, bytes],
    before: Path | None,
    elsewhere: Collection[str],
) -> None:
    """Write rank 0's small files, then complete the checkpoint by its manifest. The ranks' files are durable already.

    Raises OSError, or StorageError for a rank's file that is missing or differs from what the rank wrote.

    Args:
        manifest: without ``bundles``, the files of all ranks.
        num_bytes: part -> bytes of its states.
        attempt: what ``trainer_state.json`` states.
        files: small files of this step: name -> content.
        carried: small files that are the same at every step.
        before: the previous save, which may have some of the same files.
        elsewhere: files on disks of other nodes.
    """
    check_written(folder, [fact for fact in bundles if fact.path not in elsewhere])
    new = {**files, TRAINER_STATE: _with_attempt(files.get(TRAINER_STATE), attempt)}
    for name, content in carried.items():
        old = before / name if before is not None else None
        if old is not None and old.is_file() and old.stat().st_size == len(content):
            (folder / name).parent.mkdir(exist_ok=True)
            link_or_copy(old, folder / name)
        else:
            new[name] = content
    layouts = tuple(FileLayout(name, (Bytes(content, name),) if content else ()) for name, content in new.items())
    execute(Plan((), layouts), folder, Context(inline=True))
    small = {name: (len(content), crc32(content)) for name, content in sorted({**carried, **new}.items())}
    content = manifest_json(
        replace(manifest, bundles=tuple(bundles), carried=small),
        policy=policy,
        num_bytes=num_bytes,
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    complete(folder, content)


def check_written(folder: Path, facts: Iterable[BundleFact]) -> None:
    """Raise StorageError for a file that is not there as its rank wrote it."""
    for path, num_bytes in ((folder / fact.path, fact.num_bytes) for fact in facts):
        if not path.is_file() or path.stat().st_size != num_bytes:
            fix = "check the disk; on several nodes, save to a file system that all of them share"
            raise StorageError.at(path, "the file differs from what its rank wrote", fix)


def complete(folder: Path, manifest: bytes) -> None:
    """Make a partial checkpoint durable, and then its manifest. Raises OSError."""
    for inner in {folder, *(path.parent for path in files_in(folder))}:
        fsync_folder(inner)
    replace_durably(folder / PARTIAL_MANIFEST, manifest)
    fsync_folder(folder)
    fsync_folder(folder.parent)


def _with_attempt(content: bytes | None, attempt: Past) -> bytes:
    """Return the content of ``trainer_state.json`` with the attempt, unchanged if it is there."""
    state = json.loads(content) if content is not None else {"global_step": attempt.step}
    if content is not None and is_marked(state, attempt):
        return content
    return (json.dumps(with_mark(state, attempt), indent=2, sort_keys=True) + "\n").encode()


def files_of(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that a call writes into the folder it gets. Training waits for a temporary folder only."""
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as folder:
        write(Path(folder))
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(files_in(Path(folder)))}
        return {name: read_source(path, name, path.stat().st_size) for name, path in paths.items()}


class _Special:
    """Encodes the tensors of a tree as entries of the bundle, or as references to where they are stored."""

    def __init__(self, bundle: Bundle, live: LiveTensors) -> None:
        self.bundle = bundle
        self.live = live

    def __call__(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, torch.Tensor):
            key = f"tree/{len(self.bundle.entries)}"
            self.bundle.entries.append(self.live.entry(key, value.detach().clone()))
            return stored(self.bundle.path, key)
        if isinstance(value, StoredElsewhere):
            return stored(value.file, value.key)
        if isinstance(value, TensorPlaceholder):
            return placeholder(DTYPES[value.dtype], value.shape)
        if isinstance(value, Constant):
            value.json = value.json or encode(value.value, self)
            return dict(value.json)
        if isinstance(value, torch.Size):
            size = {"$": "global", "module": "torch", "name": "Size"}
            args = [{"$": "tuple", "items": list(value)}]
            return {"$": "call", "func": size, "args": args, "new": False, "appends": [], "items": []}
        return None


def _encode(tree: Any, special: _Special, stock: str) -> Any:
    try:
        return encode(tree, special)
    except TypeError as error:
        path, what = error.args if len(error.args) == 2 else ("", error)
        fix = "use only numbers, strings, lists, mappings and tensors; a resume loads nothing else"
        raise UnsupportedCheckpoint.at("the state to save", f"{stock}{path}: {what}", fix) from error


def _known(before: Path, name: str, fingerprint: str) -> BundleFact | None:
    """Return the fact of the file in the previous save, if its content is the same."""
    try:
        header = read_header(before, name, name)
        listed = {one.path: one for one in read_manifest(before, name).bundles}
    except SourceError:
        return None
    return listed.get(name) if header.metadata.get("fingerprint") == fingerprint else None


def carried_files(owners: Collection[Any]) -> Callable[[], Mapping[str, bytes]]:
    """Return a call that returns the small files that do not change during a run, by name: what ``save_pretrained`` of
    config, tokenizer and others writes.

    It raises OSError, or StorageError, and what the user's objects raise.
    """

    def write(folder: Path) -> None:
        for owner in owners:
            try:
                if hasattr(owner, "save_pretrained"):
                    owner.save_pretrained(folder)
            except Exception as error:
                if isinstance(error, OSError) or "os error" not in str(error):
                    raise
                fix = "free some space, or check the disk"  # tokenizers raises a bare Exception
                raise StorageError.at(folder, str(error), fix) from error

    return cache(lambda: files_of(write))


def owners_of(model: Any, processing_class: Any = None) -> list[Any]:
    """Return the objects whose ``save_pretrained`` the Trainer would call, besides the model itself."""
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    can_generate = generation is not None and getattr(model, "can_generate", lambda: False)()
    if is_adapted(model):
        return [_adapter_as_saved(model), processing_class]
    return [_as_saved(config, model), generation if can_generate else None, processing_class]


def _adapter_as_saved(model: Any) -> Any:
    """Return the config of the adapter that is saved, with the additions of PEFT's own ``save_pretrained``."""
    name, base = saved_adapter(model), model.get_base_model()
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    if config.task_type is None:
        config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return config if name == "default" else _InFolder(config, name)


@dataclass(frozen=True, slots=True)
class _InFolder:
    """What ``save_pretrained`` writes into a folder in that of the checkpoint"""

    owner: Any
    folder: str

    def save_pretrained(self, folder: Path) -> None:
        self.owner.save_pretrained(folder / self.folder)


def _as_saved(config: Any, model: Any) -> Any:
    """Return a copy of a config with the additions of ``model.save_pretrained``."""
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        return config
    config = copy.deepcopy(config)
    kinds = [kind.__name__ for kind in type(model).__mro__]
    config.architectures = [kinds[2] if kinds[1] == "FSDPModule" else kinds[0]]  # FSDP2 derives a class from both
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    return config
