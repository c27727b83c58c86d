"""Reads the files of all ranks. Of files that are alike, one is decoded, and the others share what was read from it.

Whether they are alike is decided by their bytes: under ZeRO-3 the files of most ranks differ in the names of their
archives and in tensors, whose places are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Storage, children
from llmtailor.containers.trees import Decoded, Trees
from llmtailor.errors import COPY_CHECKPOINT, AnotherOptimizer, PathIn, Problems, SourceError
from llmtailor.findings import Finding
from llmtailor.formats.other_optimizers import naming_others
from llmtailor.formats.zero.files import ShardFiles, check_archive
from llmtailor.formats.zero.shards import Shard

AnyShard = TypeVar("AnyShard", bound=Shard)
_Read = Callable[[Decoded, Path, str, str, bool], AnyShard]


def read_all(
    read: _Read[AnyShard],
    trees: Trees,
    files: ShardFiles,
    paths: Sequence[str],
    name: str,
    problems: Problems,
    found: list[Finding],
) -> list[AnyShard | None]:
    """Read every rank's file; continue after a bad one so that all are reported. Missing ones have been reported.

    Adds findings on each file by itself, then reports every fact that differs from most ranks', and puts None for such
    a file. Stock DeepSpeed compares none of this: each rank loads its own file and continues.
    """
    known: dict[bytes, AnyShard] = {}

    def read_one(path: str) -> AnyShard:
        where = PathIn(name, path)
        file = trees.open(path, where)
        shard = known.get(file.key) if file.key else None
        if shard is None:
            with naming_others(where) if path in files.optim else nullcontext():
                decoded = file.decode()
            shard = read(decoded, trees.root, path, where, files.is_zero3)
            if file.key and not _has_bytes(shard.rest):
                known[file.key] = shard
        elif files.is_zero3:
            check_archive(file.archive, path, where)
        found.extend(replace(finding, where=where) if shard.path != path else finding for finding in shard.findings)
        return shard

    is_another = False

    def read_or_report(path: str) -> AnyShard | None:
        nonlocal is_another
        try:
            return read_one(path)
        except AnotherOptimizer as error:
            if not is_another:  # it is the same on all ranks, and refused once
                problems.add(error)
            is_another = True
        except SourceError as error:
            problems.add(error)
        return None

    shards = [None if path in files.missing else read_or_report(path) for path in paths]
    return _drop_unlike(shards, paths, name, problems)


def _drop_unlike(
    shards: Sequence[AnyShard | None], paths: Sequence[str], name: str, problems: Problems
) -> list[AnyShard | None]:
    """Report every fact that differs from most ranks'; put None for such a file."""
    kinds: list[list[int]] = []
    there = {rank: shard for rank, shard in enumerate(shards) if shard is not None}
    for rank, shard in there.items():
        same = next((kind for kind in kinds if there[kind[0]] is shard or there[kind[0]].facts == shard.facts), None)
        if same is None:
            kinds.append(same := [])
        same.append(rank)
    usual = max(kinds, key=len, default=[])
    kept = set(usual)
    for rank, shard in there.items():
        if rank in kept:
            continue
        reference = there[usual[0]].facts
        for what in {**reference, **shard.facts}:
            value, usual_value = shard.facts.get(what), reference.get(what)
            if value != usual_value:
                detail = f" ({value} and {usual_value})" if len(f"{value}{usual_value}") < 80 else ""
                text = f"{what} differs from that of rank {usual[0]}{detail}"
                problems.add(SourceError.at(PathIn(name, paths[rank]), text, COPY_CHECKPOINT, Code.RANKS_DIFFER))
    return [shard if rank in kept else None for rank, shard in enumerate(shards)]


def _has_bytes(node: Any) -> bool:
    """Whether a tensor in a tree has elements, which may differ between ranks."""
    if isinstance(node, Storage):
        return node.numel > 0
    return any(_has_bytes(child) for child in children(node))
