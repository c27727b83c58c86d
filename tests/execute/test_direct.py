"""Writes that bypass the page cache put down the same bytes, and give way where the file system does not take them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from helpers.render import render
from llmtailor.checkpoint.layout import BLOCK_BYTES, Bytes, Copy, Crc, FileLayout, Plan
from llmtailor.checkpoint.placement import Extent
from llmtailor.engine import copy as runner
from llmtailor.engine import pool, streams
from llmtailor.engine.copy import Context, execute
from llmtailor.storage.remote import STORE_WORKERS

BUFFER = 8 * BLOCK_BYTES
SOURCE_BYTES = 20 * BLOCK_BYTES
real_write = streams.write_all


@pytest.fixture
def a_plan(on_disk, monkeypatch):
    """Returns plans for one file of a given length, whose pieces begin and end anywhere."""
    monkeypatch.setattr(runner, "direct_bytes", lambda num_files: BUFFER)
    monkeypatch.setattr(runner, "MIN_DIRECT_BYTES", 100)
    source = on_disk / "source"
    source.mkdir()
    (source / "data").write_bytes(np.random.default_rng(0).bytes(SOURCE_BYTES))

    def make(num_bytes):
        rest = num_bytes - 4 - 31
        pieces = (
            Bytes(b"h" * 31, "header"),
            Copy(Extent("data", 5, 5 + rest // 3), 0),
            Bytes(os.urandom(rest // 3), "a long one, which would not pass through a smaller buffer"),
            Copy(Extent("data", 77, 77 + rest - 2 * (rest // 3)), 0),
            Crc(0, num_bytes - 4),
        )
        return Plan((str(source),), (FileLayout("out", pieces),))

    return make


@pytest.fixture
def writes(monkeypatch):
    """(bytes, whether they bypass the page cache) of every write."""
    seen = []

    def write_all(fd, data):
        if len(data):
            seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        real_write(fd, data)

    monkeypatch.setattr(streams, "write_all", write_all)
    return seen


def check(plan, on_disk, direct=True):
    (result,) = execute(plan, on_disk / "out", Context(inline=True, direct=direct))
    written = (on_disk / "out/out").read_bytes()
    assert written == render(plan.files[0], on_disk / "source")
    assert result.crc == zlib.crc32(written) and result.num_bytes == len(written)


@pytest.mark.parametrize("num_bytes", [101, BLOCK_BYTES, 3 * BLOCK_BYTES + 1, BUFFER, BUFFER + 1, 3 * BUFFER - 1])
def test_the_bytes_are_those_of_the_slow_executor(a_plan, on_disk, writes, num_bytes):
    check(a_plan(num_bytes), on_disk)
    if not any(direct for _, direct in writes):
        assert num_bytes < BLOCK_BYTES or not os.major(on_disk.stat().st_dev), "a disk takes such writes"
        pytest.skip("only disks of this machine are written to without the page cache")
    whole = num_bytes // BLOCK_BYTES * BLOCK_BYTES
    assert sum(length for length, direct in writes if direct) == whole, "all but the last, incomplete block"
    assert all(length % BLOCK_BYTES == 0 for length, direct in writes if direct)


def test_only_what_asks_for_it_and_is_large_bypasses_the_cache(a_plan, on_disk, writes, monkeypatch):
    check(a_plan(2 * BUFFER), on_disk, direct=False)
    (on_disk / "out/out").unlink()
    monkeypatch.setattr(runner, "MIN_DIRECT_BYTES", 2 * BUFFER + 1)
    check(a_plan(2 * BUFFER), on_disk)
    assert not any(direct for _, direct in writes)


@pytest.mark.parametrize("refused", [0, 1], ids=["at the first write", "later"])
def test_a_file_system_that_refuses_gets_ordinary_writes(a_plan, on_disk, monkeypatch, refused):
    direct = []

    def write_all(fd, data):
        if len(data) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(len(data))
            if len(direct) == refused + 1:
                real_write(fd, data[: len(data) // 2 // BLOCK_BYTES * BLOCK_BYTES])
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real_write(fd, data)

    monkeypatch.setattr(streams, "write_all", write_all)
    check(a_plan(3 * BUFFER), on_disk)
    if not direct:
        pytest.skip("only disks of this machine are written to without the page cache")
    assert len(direct) == refused + 1, "once refused, never again"


def test_where_the_flag_is_refused_nothing_changes(a_plan, on_disk, writes, monkeypatch):
    real = fcntl.fcntl

    def refuse(fd, command, argument=0):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check(a_plan(2 * BUFFER), on_disk)
    assert not any(direct for _, direct in writes)


@pytest.mark.parametrize("num_files", range(1, max(pool.MAX_WRITERS, STORE_WORKERS) + 1))
def test_buffers_are_whole_blocks_and_bounded_together(num_files):
    each = streams.direct_bytes(num_files)
    assert each and each % BLOCK_BYTES == 0 and each <= streams.MAX_DIRECT_BYTES
    assert each * num_files <= streams.DIRECT_BYTES


def flags_of(memory):
    """Return the kernel's flags of the mapping that these bytes are in, as in `man 5 proc_pid_smaps`."""
    address, here = ctypes.addressof(ctypes.c_char.from_buffer(memory)), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


def test_a_buffer_asks_for_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no huge pages")
    memory = streams.huge_pages(streams.MAX_DIRECT_BYTES)
    assert len(memory) == streams.MAX_DIRECT_BYTES
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20) == 0
    assert "hg" in flags_of(memory), "asked for"
    assert "sh" not in flags_of(memory), "shared memory has a switch of its own, which is off by default"


def large_files(on_disk, num_files, num_bytes):
    """A plan of as many files, whose sources are holes."""
    source = on_disk / "holes"
    source.mkdir()
    with (source / "data").open("wb") as file:
        file.truncate(num_bytes)
    pieces = (Copy(Extent("data", 0, num_bytes), 0),)
    return Plan((str(source),), tuple(FileLayout(f"f{number}", pieces) for number in range(num_files)))


def test_the_disk_has_more_to_do_than_one_write_of_each_core(on_disk, monkeypatch):
    """On one core, the first writes of two files are under way at the same time."""
    meeting, first = threading.Barrier(2), threading.local()

    def write_all(fd, data):
        if not hasattr(first, "done"):
            first.done = True
            meeting.wait(timeout=30)
        real_write(fd, data)

    monkeypatch.setattr(pool.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(streams, "write_all", write_all)
    execute(large_files(on_disk, 2, runner.MIN_DIRECT_BYTES), on_disk / "out")
    assert not meeting.broken


def test_files_that_wait_to_become_durable_have_no_buffers(on_disk, monkeypatch):
    """All files wait at once; if each still had its buffer, they would take twice as much."""

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10

    num_files = 8
    meeting, original = threading.Barrier(num_files), os.fsync

    def fsync(fd):
        meeting.wait(timeout=60)
        original(fd)

    monkeypatch.setattr(pool.os, "cpu_count", lambda: num_files // 4)
    monkeypatch.setattr(runner.os, "fsync", fsync)
    plan = large_files(on_disk, num_files, streams.MAX_DIRECT_BYTES)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the tests before this one
    before = peak()
    execute(plan, on_disk / "out")
    assert peak() - before < streams.DIRECT_BYTES * 3 // 2
