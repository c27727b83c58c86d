"""The runner writes exactly the planned bytes, reports their checksums, and stops cleanly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.render import render
from llmtailor.checkpoint.layout import Bytes, Cast, Copy, Crc, FileLayout, Plan, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.engine import copy as runner
from llmtailor.engine import pool, streams
from llmtailor.engine.copy import Context, execute
from llmtailor.errors import SourceError
from llmtailor.model.roles import MASTER, WEIGHT, State


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "data").write_bytes(np.random.default_rng(0).bytes(30_000))
    return root


def a_plan(source, name="sub/out"):
    state = State("w", MASTER)
    pieces = (
        Bytes(b"head", "header"),
        Copy(Extent("data", 100, 12100), 0, state, 0),
        Zeros(1996, "padding"),
        Copy(Extent("data", 20000, 26000), 0, state, 3000),
        Crc(4, 14000),
        Bytes(b"tail", "end"),
        Crc(14000, 20000),
    )
    return Plan((str(source),), (FileLayout(name, pieces),))


@pytest.mark.parametrize("buffer_bytes", [1, 7, 4096, 8 << 20])
def test_the_bytes_are_those_of_the_slow_executor(source, tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    plan = a_plan(source)
    seen = []
    (result,) = execute(plan, tmp_path / "out", Context(on_progress=seen.append))
    written = (tmp_path / "out/sub/out").read_bytes()
    assert written == render(plan.files[0], source)
    assert result.crc == zlib.crc32(written) and result.num_bytes == len(written) == sum(seen)
    data = (source / "data").read_bytes()
    assert [(run.begin, run.num_bytes, run.crc) for run in result.runs()] == [
        (0, 12_000, zlib.crc32(data[100:12_100])),
        (3000, 6000, zlib.crc32(data[20_000:26_000])),
    ]


@pytest.mark.parametrize("buffer_bytes", [16, 64, 8 << 20])
def test_conversions_are_torchs(source, tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    masters = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    (source / "masters").write_bytes(masters.numpy().tobytes())
    piece = Cast(Extent("masters", 0, 20000), "F32", "BF16", 0, State("w", WEIGHT), 0)
    execute(Plan((str(source),), (FileLayout("w", (piece,)),)), tmp_path / "out")
    written = torch.frombuffer(bytearray((tmp_path / "out/w").read_bytes()), dtype=torch.bfloat16)
    assert torch.equal(written, masters.bfloat16())


def test_many_files_at_once(source, tmp_path):
    one = a_plan(source).files[0]
    plan = Plan((str(source),), tuple(FileLayout(f"f{number}", one.pieces) for number in range(20)))
    results = execute(plan, tmp_path / "out")
    assert [result.path for result in results] == [file.path for file in plan.files]
    wanted = render(one, source)
    assert all((tmp_path / "out" / file.path).read_bytes() == wanted for file in plan.files)


def test_a_source_that_shrinks_is_an_error_and_not_zeros(source, tmp_path):
    plan = a_plan(source)
    (source / "data").write_bytes(bytes(15_000))
    with pytest.raises(SourceError, match="ends before byte") as caught:
        execute(plan, tmp_path / "out")
    assert str(source / "data") in caught.value.problems[0].where


def test_a_source_that_vanishes_is_an_error(source, tmp_path):
    (source / "data").unlink()
    with pytest.raises(SourceError, match="No such file"):
        execute(a_plan(source), tmp_path / "out")


def test_a_write_that_fails_is_an_error(source, tmp_path):
    """The kernel refuses to let a file grow beyond the limit, as it would on a full disk."""
    program = textwrap.dedent(f"""
        import resource, signal, sys
        from pathlib import Path
        from llmtailor.checkpoint.layout import Copy, FileLayout, Plan
        from llmtailor.checkpoint.placement import Extent
        from llmtailor.errors import StorageError
        from llmtailor.engine.copy import execute
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        plan = Plan(({str(source)!r},), (FileLayout("f", (Copy(Extent("data", 0, 20_000), 0),)),))
        try:
            execute(plan, Path({str(tmp_path / "out")!r}))
        except StorageError as error:
            sys.exit("File too large" not in str(error))
        sys.exit("no error")
    """)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_worker_goes_on_while_the_disk_is_busy_with_its_last_file(source, tmp_path, monkeypatch):
    """With one worker, the fsyncs of two files meet: the second file was written during the fsync of the first."""
    monkeypatch.setattr(pool, "MAX_WRITERS", 1)
    meeting, original = threading.Barrier(2), os.fsync

    def fsync(fd):
        meeting.wait(timeout=30)
        original(fd)

    monkeypatch.setattr(runner.os, "fsync", fsync)
    one = a_plan(source).files[0]
    plan = Plan((str(source),), tuple(FileLayout(f"f{number}", one.pieces) for number in range(2)))
    results = execute(plan, tmp_path / "out")
    assert [result.path for result in results] == ["f0", "f1"]


def test_no_more_files_are_written_at_once_than_there_are_workers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "MAX_WRITERS", 1)
    at_work, alone = threading.Lock(), []
    original = runner._fill

    def fill(*arguments):
        alone.append(at_work.acquire(blocking=False))
        time.sleep(0.02)  # for another one to come
        original(*arguments)
        if alone[-1]:
            at_work.release()

    monkeypatch.setattr(runner, "_fill", fill)
    one = a_plan(source).files[0]
    plan = Plan((str(source),), tuple(FileLayout(f"f{number}", one.pieces) for number in range(6)))
    execute(plan, tmp_path / "out")
    assert alone == [True] * 6


def test_one_failure_stops_the_others(source, tmp_path, monkeypatch):
    """A failing file must not leave the user waiting for the other hundred gigabytes."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", 4096)
    with (source / "large").open("wb") as file:
        file.truncate(256 << 20)  # 65,536 chunks: far more than are written while the news spreads
    begun, failed = threading.Event(), threading.Event()
    released = []

    def observe(num_bytes):
        begun.set()
        released.append(failed.wait(timeout=30))

    long = FileLayout("long", (Copy(Extent("large", 0, 268435456), 0),))
    bad = FileLayout("bad", (Copy(Extent("missing", 0, 10), 0),))
    monkeypatch.setattr(pool, "MAX_WRITERS", 2)
    original = SourceError.at
    monkeypatch.setattr(SourceError, "at", lambda *args: (begun.wait(timeout=30), failed.set(), original(*args))[2])
    with pytest.raises(SourceError):
        execute(Plan((str(source),), (long, bad)), tmp_path / "out", Context(on_progress=observe))
    assert released and all(released)
    assert len(released) < 65_536 // 2


def test_memory_stays_flat(tmp_path):
    """A file eight times as large as what the process may add to its memory."""

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])

    source = tmp_path / "source"
    source.mkdir()
    with (source / "data").open("wb") as file:
        file.truncate(256 << 20)
    piece = Copy(Extent("data", 0, 268435456), 0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the tests before this one
    before = peak()
    execute(Plan((str(source),), (FileLayout("f", (piece,)),)), tmp_path / "out")
    assert peak() - before < 32 << 10  # in KiB
    (tmp_path / "out/f").unlink()
