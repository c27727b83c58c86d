"""Partial saves through torch.distributed.checkpoint (DCP), whose folders are complete to a stock ``dcp.load``.

`DcpSaver.writer` wraps a DCP storage writer. Only the coordinator decides, in the step in which DCP plans a save; the
other ranks get its plan, as always::

    plans of all ranks -> which parts are due -> hard links to the data files of the save before, for all other parts
    -> [each rank] the wrapped writer writes what is due -> the wrapped writer publishes .metadata, extended by the rows
    of the linked data

A folder refers to nothing outside of it, so older folders may be deleted or moved at any time. Masters and optimizer
states go to separate files: a link keeps a whole file alive, and moments would otherwise keep old masters on the disk.

An object store has no links. There, each rank asks the store to copy its share of the older files, whose bytes don't
pass through it. A copy takes space, so masters and states of each part are a file of their own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from llmtailor.balance import deal
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.containers.json import as_dict
from llmtailor.dcp_saving.folders import WHERE, LocalFolder, SaveDestination, ShardsFolder, folder_of, save_id
from llmtailor.errors import TailorError, UsageError, size, some
from llmtailor.frameworks.files import DCP_RECORD
from llmtailor.live.training import find_overlaps
from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure, Part, condense
from llmtailor.model.precision import AS_POLICY, EXACT
from llmtailor.model.roles import is_moment
from llmtailor.policies import (
    EXACT_POLICY,
    MomentsInTurn,
    Policy,
    Situation,
    check_policy,
    choose,
    make_policy,
    precision_of,
    restore_state,
    state_of,
)
from llmtailor.storage.remote import is_url

logger = logging.getLogger("llmtailor.saving")

_STATE_FILES = "9"
"""Begins the counters of files with optimizer states"""
_KNOWN_SAVES = 16


class DcpSaver:
    """Partial saves of one training with ``dcp.save`` and ``dcp.async_save``.

    1) Every rank makes one when training begins. 2) `resumed_from`, if it has loaded a checkpoint. 3) `writer` for each
    save. The first save, and any that finds no earlier one, holds everything.

    Args:
        policy: which parts each save holds; see `make_policy`. It can't depend on how parts have changed, or round.
            None: everything, as it is.
        max_staleness: how old a part may become, in saves; None means the policy's guarantee.

    Raises UsageError.
    """

    def __init__(
        self, policy: str | Mapping[str, object] | Policy | None = None, *, max_staleness: int | None = None
    ) -> None:
        self.policy = make_policy(EXACT_POLICY if policy is None else policy)
        if policy is None:
            what = "dcp.load needs exact dtypes, so nothing is rounded and each save holds everything; a policy that "
            logger.warning(what + "saves less, such as %s, has to be named", MomentsInTurn.name)
        self.max_staleness = max_staleness
        self._lineage = uuid.uuid4().hex
        self._resumed = ""
        self._saves: list[SaveDestination] = []
        self._warned = ""
        self._newest: SaveDestination | None = None
        """Of the last save that this process published"""
        self._memory: _Memory | None = None
        """Which tensors of the last save of this process share memory"""
        if self.policy.needs_drift:
            what = "it chooses by how parts have changed, which is not measured in saves through DCP"
            raise UsageError.at(f"policy {self.policy.name}", what, f"use another one, such as {MomentsInTurn.name}")
        if precision_of(self.policy, AS_POLICY) != EXACT:
            what = "it rounds what it saves, but a stock dcp.load needs exact dtypes"
            raise UsageError.at(f"policy {self.policy.name}", what, f"use another one, such as {MomentsInTurn.name}")

    def resumed_from(self, folder: str | Path | None) -> None:
        """Say which DCP folder or URL the training has loaded, before its first save; None if it has loaded none.

        Later saves link to the data of this folder, and the policy continues its schedule.
        """
        self._lineage = uuid.uuid4().hex
        self._resumed = "" if folder is None else str(folder if is_url(folder) else Path(folder).absolute())
        self._saves = []

    def writer(self, inner: StorageWriter, step: int, state_dict: Mapping[str, Any] | None = None) -> PartialWriter:
        """Return the writer for one save; ``inner`` writes the files.

        ``state_dict`` is what dcp.save gets. It shows which tensors share memory. Without it, that is known of the last
        save of this process only. So a policy that leaves weights out then saves everything in the first save, and
        later each time what a tensor without optimizer states may be tied to: what has as many elements.

        The caller's folder should be new, as with `dcp.save`. Data of an earlier save in it is removed. Raises
        UsageError if later saves could neither link to the files nor copy them.
        """
        writer = PartialWriter(self, inner, step, _Memory.of(state_dict) if state_dict is not None else None)
        self._saves = [*self._saves[-_KNOWN_SAVES:], writer.folder]
        return writer

    def _warn(self, what: str) -> None:
        """Log a warning, once if each save has the same."""
        if what != self._warned:
            logger.warning("%s", what)
        self._warned = what

    def _find_base(self, folder: SaveDestination, step: int) -> _Base | None:
        """Return the newest complete save before this one, of this training or the one that it resumed from."""
        known = [(one, self._lineage) for one in reversed(self._saves)]
        resumed = folder.beside(self._resumed) if self._resumed else None
        for other, lineage in [*known, *([(resumed, "")] if resumed is not None else [])]:
            if other == folder or type(other) is not type(folder):
                continue
            base = _read_base(other)
            if base is None and other == self._newest:  # deleted, and what is older may be too old
                return None
            if base is not None and lineage in ("", base.ledger.lineage) and (base.ledger.step or 0) < step:
                return base
        return None


@dataclass(slots=True, kw_only=True)
class _Base:
    """An earlier save, which another one builds on."""

    folder: SaveDestination
    ledger: Ledger
    metadata: Metadata
    checksums: Mapping[str, str | None]
    keys: Mapping[str, str]
    """Part -> digest of its keys"""

    def has(self, key: str, kind: object) -> bool:
        entries = self.metadata.state_dict_metadata
        return key in entries and _kind_of(entries[key]) == kind

    def rows(self, keys: Iterable[str]) -> list[tuple[MetadataIndex, Any]]:
        """Return where the data of some keys is."""
        wanted = set(keys)
        return [(index, info) for index, info in self.metadata.storage_data.items() if index.fqn in wanted]


@dataclass(slots=True, kw_only=True)
class _Model:
    """What the keys of a save mean."""

    structure: ModelStructure
    masters: dict[Part, list[str]] = field(default_factory=dict)
    """Part -> keys of the weights of trained params, of other tensors under the params' names, such as averages, and
    of all else that must be of the weights' step"""
    states: dict[Part, list[str]] = field(default_factory=dict)
    """Part -> keys of the optimizer's moments, with the ``step`` that belongs to them"""
    num_bytes: dict[str, int] = field(default_factory=dict)
    unclear: dict[Part, str] = field(default_factory=dict)
    """Part -> why all of it must be saved each time, unless all weights are"""

    def keys(self, part: Part) -> list[str]:
        return self.masters[part] + self.states[part]

    def digests(self) -> dict[str, str]:
        """Return a digest of the keys of each part."""
        joined = {part: "\n".join(sorted(self.keys(part))) for part in self.masters}
        return {part: hashlib.sha256(keys.encode()).hexdigest()[:16] for part, keys in joined.items()}

    def number(self, keys: Iterable[str]) -> dict[str, int]:
        """Return which file each key is in, if those have one of their own that are always saved together."""
        files = (own for part in self.masters for own in (self.masters[part], self.states[part]))
        return dict.fromkeys(keys, 1) | {key: number for number, own in enumerate(files, 2) for key in own}


@dataclass(slots=True, eq=False)
class _Share:
    """Takes the place of the inner writer's data in a plan on its way to a rank: what else the rank has to know."""

    inner: Any
    prefixes: Mapping[str, str]
    """Key -> what the name of its file begins with, if it is not in the inner writer's files"""
    copies: Sequence[tuple[str, str]] = ()
    """In an object store: what to copy, and to what"""


class PartialWriter(StorageWriter):
    """Writes one partial save; `DcpSaver.writer` makes it."""

    def __init__(self, saver: DcpSaver, inner: StorageWriter, step: int, memory: _Memory | None = None) -> None:
        self.saver, self.inner, self.step = saver, inner, step
        self._memory = memory
        self._keys: Mapping[str, str] = {}
        """Part -> digest of its keys, for `_Base`"""
        self.folder = folder_of(inner)
        self._left_out: dict[str, Any] = {}
        """Key that is not saved -> its entry in the metadata of the earlier save"""
        self._taken: list[WriteResult] = []
        """Where the data of these keys is in the new folder"""
        self._ledger: Ledger | None = None
        self._file_of: dict[str, int] = {}
        """Key -> number of its file in `ShardsFolder`"""

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id and self.folder.beside(str(checkpoint_id)) != self.folder:
            what = f"the writer saves to {self.folder}, but dcp.save is given the checkpoint_id {checkpoint_id}"
            raise UsageError.at(WHERE, what, "omit checkpoint_id")
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            what = "with use_collectives=False, no rank knows the whole save"
            raise UsageError.at(WHERE, what, "omit use_collectives")
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose what is due, and link to the rest, or tell the ranks to copy it. Called on the coordinator."""
        plans = self.inner.prepare_global_plan(plans)
        kinds = {item.index.fqn: _kind_of(item.tensor_data) for plan in plans for item in plan.items}
        if isinstance(self.folder, ShardsFolder):
            _check_shards(plans, kinds)
        memory, is_current = self._memory or self.saver._memory, self._memory is not None
        model = _find_model(kinds, memory, is_current=is_current)
        self._keys = model.digests()
        if not model.masters and (unknown := [key for key in kinds if _STATE.fullmatch(key)]):
            what = f"each save holds everything: {some(unknown)} have no names of the model's params; "
            self.saver._warn(
                what + "get the optimizer's states from torch.distributed.checkpoint.state_dict.get_state_dict"
            )
        base = self.saver._find_base(self.folder, self.step) if model.masters else None
        _clear(self.folder)
        self._file_of = model.number(kinds)
        copies = None if base is None else self._link_or_plan_copies(base, self._choose(base, model, kinds), len(plans))
        if copies is None:
            self._left_out, self._taken, copies = {}, [], [[] for _ in plans]
            self._choose(None, model, kinds)
        return [
            replace(
                plan,
                items=[item for item in plan.items if item.index.fqn not in self._left_out],
                storage_data=_Share(self._inner_data(plan), self._prefixes(plan, model), own),
            )
            for plan, own in zip(plans, copies, strict=True)
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
            [
                part
                for part in parts
                if base.keys.get(part) != self._keys[part]
                or not all(base.has(key, kinds[key]) for key in model.keys(part))
            ]
        )
        restore_state(policy, ledger.policy_state)
        now = Situation(self.step, ledger.saves, model.structure, tuple(parts), model.num_bytes, ledger.last)
        chosen = choose(policy, now, most)
        for problem in chosen.problems:
            logger.warning("%s", problem)
        if added := [part for part in model.unclear if part not in chosen.parts and part not in chosen.masters]:
            self.saver._warn(f"this save also holds {condense(added)}: {model.unclear[added[0]]}")
            reasons = {**model.unclear, **chosen.parts}
            due = {*chosen.parts, *added}
            chosen = replace(chosen, parts={part: reasons[part] for part in parts if part in due})
        self._ledger = ledger.after(self.step, chosen.parts, parts, state_of(policy))
        logger.info("step %d: a save of %s", self.step, condense(chosen.parts))
        old = [part for part in parts if part not in chosen.parts]
        return [key for part in old for key in (model.states[part] if part in chosen.masters else model.keys(part))]

    def _link_or_plan_copies(self, base: _Base, keys: Sequence[str], ranks: int) -> list[list[tuple[str, str]]] | None:
        """Link to the files that have the data of some keys, or return what each rank has to copy; None if neither is
        possible."""
        rows = base.rows(keys)
        paths = [*dict.fromkeys(info.relative_path for _, info in rows)]
        names = self.folder.rename(paths, ranks)
        try:
            if not base.folder.has_files(self._file_of, base.metadata):
                raise OSError(errno.ESTALE, "its files hold other tensors together")
            found = base.folder.checksums(paths, base.metadata.storage_data.values())
            if any(base.checksums.get(path) != one for path, one in found.items()):
                raise OSError(errno.ESTALE, "it was overwritten")
            copies = self.folder.take(base.folder, names)
        except OSError as error:
            why = "it was deleted" if isinstance(error, FileNotFoundError) else error.strerror or error
            logger.warning("step %d: can't use %s (%s), so everything is saved", self.step, base.folder, why)
            _clear(self.folder)
            return None
        self._left_out = {key: base.metadata.state_dict_metadata[key] for key in keys}
        self._taken = [
            WriteResult(index, info.length, replace(info, relative_path=names[info.relative_path]))
            for index, info in rows
        ]
        return deal(copies, ranks)

    def _inner_data(self, plan: SavePlan) -> Any:
        """Return the inner writer's data of a plan, with the files of `ShardsFolder`."""
        data = plan.storage_data
        return data | {"fqn_to_index_mapping": self._file_of} if isinstance(data, dict) else data

    def _prefixes(self, plan: SavePlan, model: _Model) -> dict[str, str]:
        """Return what the names of files of their own begin with, by key; none if all files of a rank are alike."""
        data, is_one_file = plan.storage_data, getattr(self.inner, "single_file_per_rank", False)
        # with a file per tensor, or this many threads, other files have counters that begin like these
        if not isinstance(data, _StoragePrefix) or not is_one_file or getattr(self.inner, "thread_count", 1) >= 90:
            return {}
        keys = [item.index.fqn for item in plan.items]
        if isinstance(self.folder, LocalFolder):
            return {key: f"{data.prefix}{_STATE_FILES}" for key in keys if _STATE.fullmatch(key)}
        numbers = {key: number - 2 for key, number in self._file_of.items() if number > 1}
        return {key: f"{data.prefix}{1000 + numbers[key] % 9000}" for key in keys if key in numbers}

    def _files(self, plan: SavePlan, planner: SavePlanner) -> list[SavePlan]:
        """Return a plan for each call of the inner writer, which makes other files."""
        if getattr(planner, "_enable_plan_caching", False):
            what = "enable_plan_caching would repeat the choice of an earlier save"
            raise UsageError.at(WHERE, what, "omit enable_plan_caching from the planner")
        share = cast(_Share, plan.storage_data)
        found: dict[str, list[WriteItem]] = {"": []}
        for item in plan.items:
            found.setdefault(share.prefixes.get(item.index.fqn, ""), []).append(item)
        return [
            replace(plan, items=items, storage_data=_StoragePrefix(prefix) if prefix else share.inner)
            for prefix, items in found.items()
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._remember_memory(planner)
        calls: list[Callable[[], Any]] = [
            partial(self.inner.write_data, own, planner) for own in self._files(plan, planner)
        ]
        calls += [partial(self.folder.copy, *names) for names in cast(_Share, plan.storage_data).copies]
        written = _call_all(calls, self.folder.at_once)
        done: Future[list[WriteResult]] = Future()
        done.set_result([row for one in written if one is not None for row in one.wait()])
        return done

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Do what NVRx (nvidia-resiliency-ext) calls instead of `write_data`: another process writes the buckets."""
        self._remember_memory(planner)
        inner: Any = self.inner
        buckets, results = [], None
        for own in self._files(plan, planner):
            inner.prepare_write_data(own, planner)
            buckets += inner.write_buckets
            results = results or inner.results_queue
        inner.write_buckets, inner.results_queue = buckets, results

    def _remember_memory(self, planner: SavePlanner) -> None:
        """Look which tensors share memory, for the next save."""
        state = getattr(planner, "state_dict", None)
        self.saver._memory = _Memory.of(state) if isinstance(state, Mapping) else None

    def get_save_function_and_args(self) -> Any:
        return cast(Any, self.inner).get_save_function_and_args()

    def retrieve_write_results(self) -> Any:
        return cast(Any, self.inner).retrieve_write_results()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the save. Called on the coordinator."""
        metadata.state_dict_metadata.update(self._left_out)
        places = [row.storage_data for rows in (*results, self._taken) for row in rows]
        calls = [partial(self.inner.finish, metadata, [*results, self._taken])]
        if self._ledger is not None:
            calls.insert(self.folder.record_is_last, partial(self._record, self._ledger, places))
        if self._taken:
            written = sum(row.size_in_bytes for rows in results for row in rows)
            kept = sum(row.size_in_bytes for row in self._taken)
            logger.info("step %d: wrote %s, %s %s", self.step, size(written), self.folder.took, size(kept))
        for call in calls:
            call()
        self.saver._newest = self.folder

    def _record(self, ledger: Ledger, places: Sequence[Any]) -> None:
        record = {
            "ledger": ledger.to_json(),
            "keys": dict(self._keys),
            "files": self.folder.checksums(sorted({one.relative_path for one in places}), places),
            "save_id": save_id(self.inner.storage_meta()),
        }
        self.folder.write(DCP_RECORD, json.dumps(record).encode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self.inner.storage_meta()

    @property
    def checkpoint_id(self) -> Any:
        return getattr(self.inner, "checkpoint_id", self.folder)


def _call_all(calls: Sequence[Callable[[], Any]], at_once: int) -> list[Any]:
    if at_once == 1:
        return [call() for call in calls]
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0

    def start() -> None:
        if torch.cuda.is_available():  # else this thread would use the first GPU
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(at_once, initializer=start) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def _read_base(folder: SaveDestination) -> _Base | None:
    """Return a save that is complete, None for anything else."""
    try:
        record = json.loads(folder.read(DCP_RECORD))
        ledger = Ledger.from_json(record.get("ledger"), f"{folder}/{DCP_RECORD}")
        checksums = as_dict(record.get("files"), "files", f"{folder}/{DCP_RECORD}")
        keys = as_dict(record.get("keys", {}), "keys", f"{folder}/{DCP_RECORD}")
        metadata = folder.read_save(record)
    except (TailorError, OSError, ValueError, KeyError, AttributeError, RecursionError):
        return None
    return (
        _Base(folder=folder, ledger=ledger, metadata=metadata, checksums=checksums, keys=keys)
        if metadata is not None
        else None
    )


def _clear(folder: SaveDestination) -> None:
    """Remove an earlier save, so that its data files, which others may link to, are not overwritten in place."""
    there = folder.names()
    first = [name for name in (folder.index, DCP_RECORD) if name in there]
    for name in (*first, *filter(folder.data_file.fullmatch, there)):
        folder.remove(name)


def _check_shards(plans: Sequence[SavePlan], kinds: Mapping[str, object]) -> None:
    """Raise UsageError for what `HuggingFaceStorageWriter` would make unreadable without saying so."""
    if objects := [key for key, kind in kinds.items() if kind is None]:
        what = f"{some(objects)} are not tensors, and a safetensors file can hold only tensors"
        raise UsageError.at(WHERE, what, "save them as tensors, or by a dcp.save of their own to another folder")
    if sum(bool(plan.items) for plan in plans) > 1 and "shard_index" not in plans[0].storage_data:
        what = "several ranks have tensors, and torch would give their files the same names"
        raise UsageError.at(WHERE, what, "pass save_distributed=True to HuggingFaceStorageWriter")


def _kind_of(entry: Any) -> object:
    """Return what two saves of a key must have in common: shape and dtype of a tensor, None for other objects."""
    return (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "properties") else None


_STATE = re.compile(r"((?:.*?\.)??state\.)(.+)\.([^.]+)")
"""Keys of the optimizer: its prefix, the param, and the kind"""


_TO_KNOW = "pass the state dict to DcpSaver.writer, too"
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What DistributedDataParallel, torch.compile, FSDP and activation checkpointing add to names"""


def _find_model(kinds: Mapping[str, object], memory: _Memory | None, *, is_current: bool) -> _Model:
    """Return what keys mean; ``kinds`` has the shape and dtype of each tensor. No parts if there is no optimizer.

    ``memory`` is that of this save if it ``is_current``, else that of the last one of this process.

    A tensor belongs to the param whose name it has, whatever it is: the weight, or an average of weights. All tensors
    of a param are of one step, except its moments. A param may also be saved in pieces under other names, as the fused
    ones of torchtitan; these pieces are saved each time.
    """
    matches = {key: match for key in kinds if (match := _STATE.fullmatch(key))}
    param_of = {_WRAPPERS.sub("", match[2]): match[2] for match in matches.values()}
    tensors: dict[str, list[str]] = {}
    """Param -> the keys of tensors under its name"""
    others = [key for key, kind in kinds.items() if kind is not None and key not in matches]
    is_known = is_current and memory is not None and memory.keys.issuperset(others)
    shared = memory.shared if memory is not None else ()
    param_of |= _aliases(shared, param_of)
    for key in others:
        if (name := _name_in(key, param_of)) is not None:
            tensors.setdefault(param_of[name], []).append(key)
    optimizers = {match[1] for match in matches.values() if match[2] in tensors}
    states: dict[str, list[str]] = {}
    for key, match in matches.items():
        if match[1] in optimizers:
            states.setdefault(match[2], []).append(key)
    numels = {param: max(_numel(kinds[key]) for key in keys) for param, keys in states.items()}
    owner = {key: param for param, keys in tensors.items() if param in states for key in keys}
    unclear: dict[str, str] = {}
    for keys in (keys & kinds.keys() for keys in shared):
        owners = sorted({owner[key] for key in keys if key in owner})
        if not owners:  # frozen params, buffers or averages, which are saved each time
            continue
        tensors.setdefault(owners[0], []).extend(keys & {*others} - owner.keys())
        unclear |= dict.fromkeys(owners[:-1], f"it shares memory with {owners[-1]}")
        unclear |= dict.fromkeys(owners[1:], f"it shares memory with {owners[0]}")
    like = {} if is_known else {_numel(kinds[key]): key for key in others if key not in owner}
    model = _Model(structure=find_parts_by_name([*states], {}, numels))
    for part in model.structure.parts:
        params = model.structure.names(part)
        of_optimizer = [key for param in params for key in states[param]]
        model.states[part] = [key for key in of_optimizer if _is_moment(matches[key][3], kinds[key])]
        model.masters[part] = [key for param in params for key in tensors.get(param, ())]
        model.masters[part] += [key for key in of_optimizer if key not in {*model.states[part]}]
        model.num_bytes[part] = sum(_num_bytes(kinds[key]) for key in model.keys(part))
        for param in params:
            if param not in tensors:
                model.unclear[part] = f"no tensor has the name of {param}"
            elif numels[param] in like:
                model.unclear[part] = f"{like[numels[param]]} may be tied to {param}; {_TO_KNOW}"
            elif param in unclear:
                model.unclear[part] = f"{param}: {unclear[param]}"
            elif memory is None:
                model.unclear[part] = f"{param} may share memory with another tensor; {_TO_KNOW}"
    return model


def _name_in(key: str, param_of: Mapping[str, str]) -> str | None:
    """Return the param's name that a key is, or ends with."""
    words = _WRAPPERS.sub("", key).split(".")
    return next((name for at in range(len(words)) if (name := ".".join(words[at:])) in param_of), None)


def _aliases(shared: Iterable[Collection[str]], param_of: Mapping[str, str]) -> dict[str, str]:
    """Return the other names of tied params: averages may have tensors of their own under these."""
    aliases: dict[str, str] = {}
    for keys in shared:
        for key in keys:
            if (name := _name_in(key, param_of)) is not None:
                prefix = _WRAPPERS.sub("", key).removesuffix(name)
                others = (_WRAPPERS.sub("", other) for other in keys)
                aliases |= {other[len(prefix) :]: param_of[name] for other in others if other.startswith(prefix)}
    return {alias: param for alias, param in aliases.items() if alias not in param_of}


def _is_moment(kind: str, stored: Any) -> bool:
    """Return whether a state may be of another step than the weights; what is a single number goes with the moments."""
    return is_moment(kind) or _numel(stored) <= 1


@dataclass(frozen=True, slots=True)
class _Memory:
    """Which tensors of a state dict share memory, by the keys of a save."""

    keys: frozenset[str]
    shared: Sequence[frozenset[str]]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> _Memory:
        plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
        flat, _ = flatten_state_dict(plain)
        tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
        first: dict[int, str] = {}
        pairs = [(key, first.setdefault(id(tensor), key)) for key, tensor in tensors.items()]
        group_of = {key: {key} for key in tensors}
        for key, other in (*pairs, *find_overlaps(tensors).items()):
            joined = group_of[key] | group_of[other]
            group_of |= dict.fromkeys(joined, joined)
        groups = {id(group): frozenset(group) for group in group_of.values() if len(group) > 1}
        return cls(frozenset(tensors), [*groups.values()])


def _numel(kind: Any) -> int:
    return 0 if kind is None else torch.Size(kind[0]).numel()


def _num_bytes(kind: Any) -> int:
    return 0 if kind is None else _numel(kind) * kind[1].itemsize
