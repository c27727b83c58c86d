"""Fixtures: file systems that share blocks between files, real ones and a stand-in, and clones of small files."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from llmtailor.checkpoint import layout
from llmtailor.copying import moving

MAKE = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}


@pytest.fixture(scope="module", params=MAKE)
def reflinks(request, tmp_path_factory):
    """A folder in a small file system that shares blocks."""
    place = tmp_path_factory.mktemp(request.param)
    if shutil.which(MAKE[request.param][0]) is None:
        pytest.skip(f"{MAKE[request.param][0]} is not installed")
    image, root = place / "image", place / "mounted"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run([*MAKE[request.param], str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(root)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"can't mount {request.param} here: {mounted.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)  # a failed test's traceback may hold a file open


@pytest.fixture
def folder(reflinks):
    made = reflinks / "test"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def copied(monkeypatch):
    """Clones that any file system can do: they copy. The ranges that were cloned."""
    done = []

    def clone(source, start, num_bytes, target, at):
        assert start % 4096 == num_bytes % 4096 == at % 4096 == 0
        data = os.pread(source, num_bytes, start)
        if len(data) < num_bytes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        os.pwrite(target, data, at)
        done.append((start, num_bytes, at))

    monkeypatch.setattr(moving, "clone_range", clone)
    return done


@pytest.fixture
def small_limits(monkeypatch):
    """Padding and clones for the files of a small model"""
    for name in ("MIN_PADDED_BYTES", "MIN_SHARED_BYTES"):
        monkeypatch.setattr(layout, name, 4096)
