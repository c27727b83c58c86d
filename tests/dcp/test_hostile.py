"""Crafted ``.metadata`` and ``.distcp`` files: torch would run them, or read what it should not."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from llmtailor.errors import SourceError, UnsafePickle, UnsupportedCheckpoint
from llmtailor.formats.registry import index_checkpoint

KEY = "model.lm_head.weight"


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def load(root: Path) -> Metadata:
    return pickle.loads((root / ".metadata").read_bytes())


def change(edit: Callable[[Metadata], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        metadata = load(root)
        edit(metadata)
        (root / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def at(key: str, **changes: object) -> Callable[[Path], None]:
    """Change where a key is stored."""

    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                for name, value in changes.items():
                    setattr(info, name, value)

    return change(edit)


def shape(*size: int) -> Callable[[Path], None]:
    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata[KEY].size = torch.Size(size)

    return change(edit)


def put_object(root: Path) -> None:
    """Put a pickle that runs code where an option of a param group is: torch loads those without protection."""
    metadata = load(root)
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "optim.param_groups.0.lr")
    buffer = io.BytesIO()
    torch.save(Runs(), buffer)
    path = root / info.relative_path
    info.offset, info.length = path.stat().st_size, buffer.tell()
    with path.open("ab") as file:
        file.write(buffer.getvalue())
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def bomb(root: Path) -> None:
    """A small file, and more opcodes than a memory holds objects"""
    (root / ".metadata").write_bytes(b"\x80\x02" + b"}" * 100 + b"(" * 2_000_000)


def alias(metadata: Metadata) -> None:
    """Let every tensor of one size be the same bytes."""
    first = next(info for index, info in metadata.storage_data.items() if index.fqn == KEY)
    for index in [index for index in metadata.storage_data if index.fqn == "model.model.embed_tokens.weight"]:
        metadata.storage_data[index] = first


def twice(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata[KEY].chunks
    chunks[1] = chunks[0]


def unknown(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("nobody")] = _StorageInfo("__0_0.distcp", 0, 10)


CASES: list[tuple[str, Callable[[Path], object], type[SourceError], str]] = [
    ("code in the metadata", change(lambda m: setattr(m, "planner_data", Runs())), UnsafePickle, "posix.system"),
    ("code in an object", put_object, UnsafePickle, "posix.system"),
    ("a path outside", at(KEY, relative_path="../../x"), SourceError, "not a data file in the same folder"),
    ("an absolute path", at(KEY, relative_path="/etc/passwd"), SourceError, "not a data file in the same folder"),
    ("a device", at(KEY, relative_path="/dev/zero"), SourceError, "not a data file in the same folder"),
    ("bytes beyond the file", at(KEY, offset=10**9), SourceError, "refers to byte"),
    ("a negative offset", at(KEY, offset=-5), SourceError, "no valid place"),
    ("an enormous length", at(KEY, length=10**30), SourceError, "no valid place"),
    ("transformed blobs", at(KEY, transform_descriptors=["zstd"]), UnsupportedCheckpoint, "transformed"),
    ("two tensors in the same bytes", change(alias), SourceError, "the same bytes"),
    ("a chunk twice", change(twice), SourceError, "overlap"),
    ("a place of nobody", change(unknown), SourceError, "belong to no tensor"),
    ("a tensor larger than any memory", shape(2**62, 2**62), SourceError, "a size is not a shape"),
    ("a tensor larger than its chunks", shape(10**9, 25), SourceError, "overlap"),
    ("another number of dimensions", shape(61, 25, 1), SourceError, "number of dimensions"),
    ("a pickle bomb", bomb, SourceError, "damaged"),
    ("nothing", lambda root: (root / ".metadata").write_bytes(b""), SourceError, "damaged"),
    ("another object", lambda root: (root / ".metadata").write_bytes(pickle.dumps({"a": 1})), SourceError,
     "not the metadata"),
    ("a pipe", lambda root: ((root / "__0_0.distcp").unlink(), os.mkfifo(root / "__0_0.distcp")), SourceError, "pipe"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "told"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_it_is_refused(runs, tmp_path, monkeypatch, make, error, told):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "checkpoint-2"
    shutil.copytree(runs.checkpoint("loop"), root)
    make(root)
    with pytest.raises(error, match=told) as caught:
        index_checkpoint(root, "x")
    assert all(problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "ran").exists()
