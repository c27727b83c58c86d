"""Turns a full checkpoint into a partial one: lay out, write, read back, publish. The full one is not touched."""

from __future__ import annotations

import filecmp
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llmtailor import __version__
from llmtailor.core.anatomy import Anatomy
from llmtailor.core.index import CheckpointIndex
from llmtailor.core.plan import Plan, Sources
from llmtailor.core.stopwatch import Stopwatch
from llmtailor.execute.commit import check_space
from llmtailor.execute.runner import Context, execute
from llmtailor.execute.stopping import Stop
from llmtailor.formats.base import display_name, index_checkpoint
from llmtailor.formats.partial.layout import PartialLayout, describe_partial, lay_out_partial
from llmtailor.formats.partial.manifest import MANIFEST, BundleFact, manifest_json
from llmtailor.history.ledger import Ledger
from llmtailor.io.files import write_durably
from llmtailor.plan.planner import plan_composite
from llmtailor.retain.facts import part_bytes
from llmtailor.retain.places import making
from llmtailor.retain.readback import check_crcs, check_places, check_unchanged
from llmtailor.store import link_or_copy, sync

logger = logging.getLogger(__name__)
SPARE_BYTES = 16 << 20
"""Room for folders and file system overhead, beyond the bytes of the plan."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a partial checkpoint shall hold."""

    parts: Mapping[str, str]
    """And why each"""
    ledger: Ledger
    """After it"""
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A partial checkpoint that is laid out, and not written yet."""

    source: CheckpointIndex
    target: Path
    anatomy: Anatomy
    contents: Contents
    save_id: str
    layout: PartialLayout
    plan: Plan
    links: Mapping[str, Path]
    """Files of frozen params that an older partial checkpoint has in the same size, and probably the same"""

    @property
    def params_of(self) -> dict[str, list[str]]:
        """The trained params of each part that it holds"""
        return _params_of(self.source, self.anatomy, self.contents)

    @property
    def num_bytes_to_move(self) -> int:
        """What is written and then read back"""
        return 2 * self.plan.num_bytes

    @property
    def num_bytes(self) -> int:
        """What it will take on the disk"""
        files = sum(file.num_bytes for file in self.plan.files if file.path not in self.links)
        return files + len(_manifest(self, {}))


def plan_conversion(
    source: CheckpointIndex,
    anatomy: Anatomy,
    target: Path,
    contents: Contents,
    older: Mapping[str, tuple[Path, int]],
) -> Conversion:
    """Lay out the partial form of a full checkpoint; no tensor is read.

    ``older`` are the files of frozen params that partial checkpoints have: name -> folder and size of the newest.
    Raises SourceError or UnsupportedCheckpoint.
    """
    save_id = uuid.uuid4().hex
    params = {name for names in _params_of(source, anatomy, contents).values() for name in names}
    layout = lay_out_partial(source, params, save_id)
    names = {*source.params, *source.tied, *(state.param for state in source.held)}
    plan = plan_composite(layout.files, [source], Sources(dict.fromkeys(names, 0)), 0)
    links = {
        file.path: older[file.path][0]
        for file in layout.frozen
        if file.path in older and older[file.path][1] == file.num_bytes
    }
    return Conversion(source, target, anatomy, contents, save_id, layout, plan, links)


def write_conversion(
    conversion: Conversion, stop: Stop, observe: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Write a partial checkpoint, read it back, and let it appear at once, whole and durable.

    ``observe`` is told of bytes written and read back, `Conversion.num_bytes_to_move` in all, from several threads.

    Raises StorageError if there is no space for it, SourceError, also if the full checkpoint changes meanwhile,
    VerificationError if it does not read back as planned, Interrupted, or OSError. It is absent then.
    """
    target, source, watch = conversion.target, conversion.source, Stopwatch()
    check_space(target, sum(file.num_bytes for file in conversion.plan.files) + SPARE_BYTES)
    staging = making(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        results = execute(conversion.plan, staging, Context([source.files], observe=observe, stop=stop))
        crcs = {result.path: result.crc for result in results}
        logger.info("wrote %s, %s bytes, in %s", display_name(target), f"{conversion.plan.num_bytes:,}", watch.lap())
        for name, folder in conversion.links.items():
            if filecmp.cmp(folder / name, staging / name, shallow=False):
                (staging / name).unlink()
                link_or_copy(folder / name, staging / name)
        write_durably(staging / MANIFEST, _manifest(conversion, crcs))
        sync(staging)
        check_crcs(staging, crcs, stop, observe)
        params = {name for names in conversion.params_of.values() for name in names}
        check_places(conversion.plan, index_checkpoint(staging, display_name(target)), source, params)
        check_unchanged(source)
        logger.info("read it back in %s", watch.lap())
        stop.check()
        staging.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _params_of(source: CheckpointIndex, anatomy: Anatomy, contents: Contents) -> dict[str, list[str]]:
    trained = {name for group in source.group_params for name in group}
    return {part: [name for name in anatomy.names(part) if name in trained] for part in contents.parts}


def _manifest(conversion: Conversion, crcs: Mapping[str, int]) -> bytes:
    """Return the manifest; without checksums it has its size already."""
    source, contents = conversion.source, conversion.contents
    facts = tuple(
        BundleFact(file.path, file.num_bytes, crcs.get(file.path, 0))
        for file in (*conversion.layout.bundles, *conversion.layout.frozen)
    )
    return manifest_json(
        describe_partial(
            source, conversion.save_id, contents.parts, conversion.params_of, facts, contents.ledger.to_json()
        ),
        policy=contents.policy,
        num_bytes=part_bytes(source, conversion.anatomy),
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
