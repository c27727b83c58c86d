"""Partial saves through torch.distributed.checkpoint (DCP), whose folders are complete to a stock ``dcp.load``.

`DcpSaver.writer` wraps a DCP storage writer. Only the coordinator decides, in the step in which DCP plans a save; the
other ranks get its plan, as always::

    plans of all ranks -> which parts are due -> hard links to the data files of the save before, for all other parts
    -> [each rank] the wrapped writer writes what is due -> the wrapped writer publishes .metadata, extended by the rows
    of the linked data

A folder refers to nothing outside of it, so older folders may be deleted or moved at any time. Masters and optimizer
states go to separate files: a link keeps a whole file alive, and moments would otherwise keep old masters on the disk.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from llmtailor.checkpoint.lineage import Ledger
from llmtailor.containers.dcp import DATA_FILE, METADATA, checksum_of_save
from llmtailor.containers.json import as_dict, read_json
from llmtailor.errors import SourceError, UsageError, size
from llmtailor.loaders.files import DCP_RECORD
from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure, Part, condense
from llmtailor.model.precision import EXACT
from llmtailor.policies import (
    DEFAULT_POLICY,
    Policy,
    Situation,
    check_policy,
    choose,
    make_policy,
    precision_of,
    restore_state,
    state_of,
)
from llmtailor.storage.local import fsync_folder, open_source, replace_durably, try_link

logger = logging.getLogger("llmtailor.saving")

_WHERE = "DcpSaver"
_SAVE_ALL = "give dcp.save that writer itself, so that every save holds everything"
_STATE_FILES = "9"
"""Begins the counters of files with optimizer states"""
_FIRST_LINK = 1000
"""The least counter of linked files"""
_KNOWN_SAVES = 16
_READERS = 16
"""How many files are read at once"""


class DcpSaver:
    """Partial saves of one training with ``dcp.save`` and ``dcp.async_save``.

    Every rank makes one when training begins. The first save, and any that finds no earlier one, holds everything.

    Args:
        policy: which parts each save holds; see `make_policy`. It can't depend on how parts have changed, or round.
        max_staleness: how old a part may become, in saves; None means the policy's guarantee.

    Raises UsageError.
    """

    def __init__(
        self, policy: str | Mapping[str, object] | Policy = DEFAULT_POLICY, *, max_staleness: int | None = None
    ) -> None:
        self.policy = make_policy(policy)
        self.max_staleness = max_staleness
        self._lineage = uuid.uuid4().hex
        self._resumed: Path | None = None
        self._saves: list[Path] = []
        if self.policy.needs_drift:
            what = "it chooses by how parts have changed, which is not measured in saves through DCP"
            raise UsageError.at(f"policy {self.policy.name}", what, f"use another one, such as {DEFAULT_POLICY}")
        if precision_of(self.policy, EXACT) != EXACT:
            what = "it rounds what it saves, but a stock dcp.load needs exact dtypes"
            raise UsageError.at(f"policy {self.policy.name}", what, f"use another one, such as {DEFAULT_POLICY}")

    def resumed_from(self, folder: str | Path | None) -> None:
        """Say which DCP folder the training has loaded, before its first save; None if it has loaded none.

        Later saves link to the data of this folder, and the schedule of the policy goes on.
        """
        self._lineage = uuid.uuid4().hex
        self._resumed = None if folder is None else Path(folder).absolute()
        self._saves = []

    def writer(self, inner: StorageWriter, step: int) -> PartialWriter:
        """Return the writer for one save; ``inner`` writes the files. Raises UsageError if files can't be linked there.

        The caller's folder should be new, as with `dcp.save`. Data of an earlier save in it is removed.
        """
        writer = PartialWriter(self, inner, step)
        self._saves = [*self._saves[-_KNOWN_SAVES:], writer.folder]
        return writer

    def _find_base(self, folder: Path, step: int) -> _Base | None:
        """Return the newest complete save before this one, of this training or the one that it resumed from."""
        known = [(one, self._lineage) for one in reversed(self._saves)]
        for path, lineage in [*known, *([(self._resumed, "")] if self._resumed else [])]:
            if path == folder:
                continue
            base = _read_base(path)
            if base is not None and lineage in ("", base.ledger.lineage) and (base.ledger.step or 0) < step:
                return base
        return None


@dataclass(slots=True)
class _Base:
    """An earlier save, which another one builds on."""

    folder: Path
    ledger: Ledger
    metadata: Metadata
    checksums: Mapping[str, str]

    def has(self, key: str, kind: object) -> bool:
        entries = self.metadata.state_dict_metadata
        return key in entries and _kind_of(entries[key]) == kind

    def rows(self, keys: Iterable[str]) -> list[tuple[MetadataIndex, Any]]:
        """Return where the data of some keys is."""
        wanted = set(keys)
        return [(index, info) for index, info in self.metadata.storage_data.items() if index.fqn in wanted]


@dataclass(slots=True)
class _Model:
    """What the keys of a save mean."""

    structure: ModelStructure
    masters: dict[Part, list[str]] = field(default_factory=dict)
    """Part -> keys of the weights of trained params"""
    states: dict[Part, list[str]] = field(default_factory=dict)
    """Part -> keys of the optimizer's states, with the ``step`` that belongs to the moments"""
    num_bytes: dict[str, int] = field(default_factory=dict)

    def keys(self, part: Part) -> list[str]:
        return self.masters[part] + self.states[part]


@dataclass(slots=True)
class _Prefixes:
    """Takes the place of the inner writer's data in a plan on its way to a rank."""

    inner: Any
    states: _StoragePrefix | None


class PartialWriter(StorageWriter):
    """Writes one partial save; `DcpSaver.writer` makes it."""

    def __init__(self, saver: DcpSaver, inner: StorageWriter, step: int) -> None:
        self.saver, self.inner, self.step = saver, inner, step
        self.folder = _folder_of(inner)
        self._left_out: dict[str, Any] = {}
        """Key that is not saved -> its entry in the metadata of the earlier save"""
        self._linked: list[WriteResult] = []
        self._ledger: Ledger | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id and Path(checkpoint_id).absolute() != self.folder:
            what = f"the writer saves to {self.folder}, but dcp.save is given the checkpoint_id {checkpoint_id}"
            raise UsageError.at(_WHERE, what, "omit checkpoint_id")
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            what = "with use_collectives=False, no rank knows the whole save"
            raise UsageError.at(_WHERE, what, "omit use_collectives")
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose what is due, and link to the rest. Called on the coordinator."""
        plans = self.inner.prepare_global_plan(plans)
        kinds = {item.index.fqn: _kind_of(item.tensor_data) for plan in plans for item in plan.items}
        model = _find_model(kinds)
        base = self.saver._find_base(self.folder, self.step) if model.masters else None
        _clear(self.folder)
        if base is None or not self._link(base, self._choose(base, model, kinds), plans):
            self._left_out, self._linked = {}, []
            self._choose(None, model, kinds)
        return [
            replace(
                plan,
                items=[item for item in plan.items if item.index.fqn not in self._left_out],
                storage_data=_Prefixes(plan.storage_data, self._states_prefix(plan.storage_data)),
            )
            for plan in plans
        ]

    def _choose(self, base: _Base | None, model: _Model, kinds: Mapping[str, object]) -> list[str]:
        """Set the ledger of this save. Return the keys that it leaves out, because ``base`` has them."""
        if not model.masters:
            return []
        parts, policy, lineage = list(model.masters), self.saver.policy, self.saver._lineage
        most = check_policy(policy, model.structure, parts, model.num_bytes, self.saver.max_staleness)
        if base is None:
            self._ledger = Ledger(lineage).after(self.step, parts, parts, state_of(policy))
            logger.info("step %d: a save of everything", self.step)
            return []
        ledger = base.ledger
        ledger = ledger if ledger.lineage == lineage else ledger.resumed(lineage, ledger.step or 0)
        ledger = ledger.without(
            [part for part in parts if not all(base.has(key, kinds[key]) for key in model.keys(part))]
        )
        restore_state(policy, ledger.policy_state)
        now = Situation(self.step, ledger.saves, model.structure, tuple(parts), model.num_bytes, ledger.last)
        chosen = choose(policy, now, most)
        for problem in chosen.problems:
            logger.warning("%s", problem)
        self._ledger = ledger.after(self.step, chosen.parts, parts, state_of(policy))
        logger.info("step %d: a save of %s", self.step, condense(chosen.parts))
        old = [part for part in parts if part not in chosen.parts]
        return [key for part in old for key in (model.states[part] if part in chosen.masters else model.keys(part))]

    def _link(self, base: _Base, keys: Sequence[str], plans: Sequence[SavePlan]) -> bool:
        """Make links to the files that have the data of some keys. Return whether that was possible."""
        rows = base.rows(keys)
        paths = [*dict.fromkeys(info.relative_path for _, info in rows)]
        names: dict[str, str] = {}
        first, why = max(_FIRST_LINK, *(len(plan.items) for plan in plans)), ""
        for number, path in enumerate(paths, first):
            match = DATA_FILE.fullmatch(Path(path).name)
            rank = int(match[1]) % len(plans) if match else 0  # readers take the highest for the number of ranks
            names[path] = f"__{rank}_{number}.distcp"
        try:
            found = _checksums(base.folder, paths, base.metadata.storage_data.values())
            if any(base.checksums.get(path) != one for path, one in found.items()):
                why = "it was overwritten"
            elif not all(try_link(base.folder / path, self.folder / names[path]) for path in paths):
                why = "the file system has no links"
        except (FileNotFoundError, SourceError):
            why = "it was deleted"
        if why:
            logger.warning("step %d: can't link to %s (%s), so everything is saved", self.step, base.folder, why)
            _clear(self.folder)
            return False
        self._left_out = {key: base.metadata.state_dict_metadata[key] for key in keys}
        self._linked = [
            WriteResult(index, info.length, replace(info, relative_path=names[info.relative_path]))
            for index, info in rows
        ]
        return True

    def _states_prefix(self, data: Any) -> _StoragePrefix | None:
        """Return what the names of files with optimizer states begin with; None if all files of a rank are alike."""
        # with a file per tensor, or this many threads, other files have counters that begin like this
        is_one_file = getattr(self.inner, "single_file_per_rank", False)
        if isinstance(data, _StoragePrefix) and is_one_file and getattr(self.inner, "thread_count", 1) < 90:
            return _StoragePrefix(f"{data.prefix}{_STATE_FILES}")
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if getattr(planner, "_enable_plan_caching", False):
            what = "enable_plan_caching would repeat the choice of an earlier save"
            raise UsageError.at(_WHERE, what, "omit enable_plan_caching from the planner")
        prefixes = cast(_Prefixes, plan.storage_data)
        states = [item for item in plan.items if prefixes.states is not None and _STATE.fullmatch(item.index.fqn)]
        others = [item for item in plan.items if prefixes.states is None or not _STATE.fullmatch(item.index.fqn)]
        results = []
        for items, data in ((others, prefixes.inner), (states, prefixes.states)):
            if items or data is prefixes.inner:
                written = self.inner.write_data(replace(plan, items=items, storage_data=data), planner)
                written.wait()
                results += written.value()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the save. Called on the coordinator."""
        metadata.state_dict_metadata.update(self._left_out)
        if self._ledger is not None:
            places = [row.storage_data for rows in (*results, self._linked) for row in rows]
            paths = sorted({one.relative_path for one in places})
            record = {
                "ledger": self._ledger.to_json(),
                "files": _checksums(self.folder, paths, places),
                "save_id": _save_id(self.inner.storage_meta()),
            }
            replace_durably(self.folder / DCP_RECORD, json.dumps(record).encode())
        fsync_folder(self.folder)
        if self._linked:
            written = sum(row.size_in_bytes for rows in results for row in rows)
            kept = sum(row.size_in_bytes for row in self._linked)
            logger.info("step %d: wrote %s, linked to %s", self.step, size(written), size(kept))
        self.inner.finish(metadata, [*results, self._linked])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self.inner.storage_meta()

    @property
    def checkpoint_id(self) -> Any:
        return getattr(self.inner, "checkpoint_id", self.folder)


def _folder_of(inner: StorageWriter) -> Path:
    """Return the local folder of a writer. Raises UsageError if there is none, or it has no files to link to."""
    fs, path = getattr(inner, "fs", None), getattr(inner, "path", None)
    local = getattr(fs, "fs", None)  # of torch's FsspecWriter
    form = getattr(inner, "serialization_format", SerializationFormat.TORCH_SAVE)
    if isinstance(inner, HuggingFaceStorageWriter) or form != SerializationFormat.TORCH_SAVE:
        what = "writes safetensors files, which can't hold data of several saves"
    elif isinstance(fs, FileSystem) and path:
        return Path(path).absolute()
    elif "file" in getattr(local, "protocol", ()) and path:
        return Path(cast(Any, local)._strip_protocol(str(path)))
    else:
        what = "does not write to a local file system, so a save can't link to the data of earlier ones"
    raise UsageError.at(_WHERE, f"{type(inner).__name__} {what}", _SAVE_ALL)


def _read_base(folder: Path) -> _Base | None:
    """Return a save that is complete, None for anything else."""
    try:
        record = read_json(folder / DCP_RECORD, f"{folder / DCP_RECORD}")
        ledger = Ledger.from_json(record.get("ledger"), f"{folder / DCP_RECORD}")
        checksums = as_dict(record.get("files"), "files", f"{folder / DCP_RECORD}")
        metadata = FileSystemReader(folder).read_metadata()
    except (SourceError, OSError, EOFError, pickle.UnpicklingError):
        return None
    is_of_this = record.get("save_id") == _save_id(metadata.storage_meta)
    return _Base(folder, ledger, metadata, checksums) if is_of_this else None


def _checksums(folder: Path, paths: Sequence[str], places: Iterable[Any]) -> dict[str, str]:
    """Return what is recorded of some data files, given where all data of their save is. Raises SourceError."""
    blobs: dict[str, list[tuple[int, int]]] = {}
    for one in places:
        blobs.setdefault(one.relative_path, []).append((one.offset, one.offset + one.length))

    def checksum(path: str) -> str:
        with open_source(folder / path, f"{folder / path}") as file:
            return f"{checksum_of_save(file, blobs[path]):08x}"

    with ThreadPoolExecutor(_READERS) as pool:  # on a network's file system, each read takes a while
        return dict(zip(paths, pool.map(checksum, paths), strict=True))


def _save_id(meta: StorageMeta | None) -> str | None:
    """Return what tells a save from a later one to the same folder that has no record."""
    return meta.save_id if meta is not None else None


def _clear(folder: Path) -> None:
    """Remove an earlier save, so that its data files, which others may link to, are not overwritten in place."""
    for name in (METADATA, DCP_RECORD):
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if DATA_FILE.fullmatch(path.name):
            path.unlink()


def _kind_of(entry: Any) -> object:
    """Return what two saves of a key must have in common: shape and dtype of a tensor, None for other objects."""
    return (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "properties") else None


_STATE = re.compile(r"((?:.*?\.)??state\.)(.+)\.([^.]+)")
"""Keys of the optimizer: its prefix, the param, and the kind"""


def _find_model(kinds: Mapping[str, object]) -> _Model:
    """Return what keys mean; ``kinds`` has the shape and dtype of each tensor. No parts if there is no optimizer.

    The names of params in the optimizer's keys are those of the model's, which may have a prefix there. A param may
    also be saved in pieces under other names, as the fused ones of torchtitan; these pieces are saved each time.
    """
    found = {key: match for key in kinds if (match := _STATE.fullmatch(key))}
    weights: dict[str, str] = {}
    """End of a key of the model -> the key"""
    others = [key for key, kind in kinds.items() if kind is not None and key not in found]
    for key in sorted(others, key=lambda one: one.count(".")):
        words = key.split(".")
        for at in range(len(words)):
            weights.setdefault(".".join(words[at:]), key)
    optimizers = {match[1] for match in found.values() if match[2] in weights}
    states: dict[str, list[str]] = {}
    for key, match in found.items():
        if match[1] in optimizers:
            states.setdefault(match[2], []).append(key)
    numels = {param: max(_numel(kinds[key]) for key in keys) for param, keys in states.items()}
    model = _Model(find_parts_by_name([*states], {}, numels))
    for part in model.structure.parts:
        params = model.structure.names(part)
        model.masters[part] = [weights[param] for param in params if param in weights]
        model.states[part] = [key for param in params for key in states[param]]
        model.num_bytes[part] = sum(_num_bytes(kinds[key]) for key in model.keys(part))
    return model


def _numel(kind: Any) -> int:
    return 0 if kind is None else torch.Size(kind[0]).numel()


def _num_bytes(kind: Any) -> int:
    return 0 if kind is None else _numel(kind) * kind[1].itemsize
