"""The engine writes exactly the planned bytes and reports their checksums, whichever way they are moved: through a
buffer, past the page cache, or by sharing blocks; and it stops cleanly."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import re
import resource
import threading
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from xxhash import xxh3_128

from helpers.checkpoints import load, make, make_run
from helpers.commands import call
from helpers.render import render
from helpers.same import differences
from llmtailor.checkpoint import layout
from llmtailor.checkpoint.layout import BLOCK_BYTES, Bytes, Cast, Copy, Crc, FileLayout, Plan, Strided, Zeros
from llmtailor.checkpoint.placement import Band, Extent, Grid
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.containers.torch_file import lay_out_torch_file, read_torch_file
from llmtailor.copying import copy as runner
from llmtailor.copying import moving, pool, streams
from llmtailor.copying.copy import Context, CopyStats, execute
from llmtailor.copying.pool import Stop
from llmtailor.copying.recheck import read_again
from llmtailor.errors import Interrupted, SourceError, StorageError
from llmtailor.model.roles import MASTER, WEIGHT, State
from llmtailor.recipe import Recipe
from llmtailor.storage.casts import cast
from llmtailor.storage.checksums import combine
from llmtailor.storage.remote import STORE_WORKERS
from synthetic import SHAPES

SOURCE_BYTES = 1_000_000


def make_source(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "data").write_bytes(np.random.default_rng(0).bytes(SOURCE_BYTES))
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def a_plan(source: Path, shift: int = 0) -> Plan:
    """A header, 900,000 bytes in three pieces that can be shared unless they are shifted, and a part that can't be."""
    state = State("w", MASTER)
    pieces = (
        Bytes(b"head" * 25, "header"),
        Zeros(shift, "padding"),
        *(Copy(Extent("data", 100 + at, 300_100 + at), 0, state, at) for at in (0, 300_000, 600_000)),
        Copy(Extent("data", 5, 200_000), 0),
        Crc(100 + shift, 900_100 + shift),
        Bytes(b"tail", "end"),
    )
    return Plan((str(source),), (FileLayout("sub/out", pieces),))


def many(source: Path, count: int) -> Plan:
    """The same file as often as that."""
    pieces = a_plan(source).files[0].pieces
    return Plan((str(source),), tuple(FileLayout(f"f{number}", pieces) for number in range(count)))


def check(plan: Plan, out: Path, moved: dict[str, int] | None = None, **context: Any) -> Any:
    """Carry out a plan of one file; check bytes, checksums and progress; return what is known of the file."""
    seen: list[int] = []
    (result,) = execute(plan, out, Context(on_progress=seen.append, digest=True, **context))
    written = (out / plan.files[0].path).read_bytes()
    assert written == render(plan.files[0], Path(plan.sources[0]))
    assert result.crc == zlib.crc32(written) and result.num_bytes == len(written) == sum(seen)
    assert result.digest == xxh3_128(written).hexdigest()
    pieces = [piece for piece in plan.files[0].pieces if isinstance(piece, Copy) and piece.state]
    data = (Path(plan.sources[0]) / "data").read_bytes()
    runs = [(one.begin, zlib.crc32(data[one.extent.start : one.extent.stop])) for one in pieces]
    assert [(run.begin, run.crc) for run in result.runs()] == runs
    if moved is not None:
        assert result.moved == CopyStats(**{"copied_bytes": len(written) - sum(moved.values()), **moved})
    return result


def peak() -> int:
    """Return the most bytes that this process has had in memory since the last `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10  # type: ignore[index]


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


# --- through a buffer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [501, 4096, 8 << 20])
def test_the_bytes_are_those_of_the_slow_executor(source, tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    check(a_plan(source), tmp_path / "out")


@pytest.mark.parametrize("buffer_bytes", [1, 7])
def test_buffers_smaller_than_an_element(source, tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    pieces = (Bytes(b"head", "header"), Copy(Extent("data", 100, 1100), 0, State("w", MASTER), 0), Crc(4, 1004))
    check(Plan((str(source),), (FileLayout("out", pieces),)), tmp_path / "out")


@pytest.mark.parametrize("buffer_bytes", [16, 64, 8 << 20])
def test_conversions_are_torchs(source, tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    masters = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    (source / "masters").write_bytes(masters.numpy().tobytes())
    piece = Cast(Extent("masters", 0, 20000), "F32", "BF16", 0, State("w", WEIGHT), 0)
    execute(Plan((str(source),), (FileLayout("w", (piece,)),)), tmp_path / "out")
    written = torch.frombuffer(bytearray((tmp_path / "out/w").read_bytes()), dtype=torch.bfloat16)
    assert torch.equal(written, masters.bfloat16())


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8"])
@pytest.mark.parametrize("buffer_bytes", [16, 3000, 8 << 20])
def test_rows_are_put_together(source, tmp_path, monkeypatch, buffer_bytes, dtype):
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    masters = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
    for name, columns in {"left": masters[:, :7], "right": masters[:, 7:]}.items():
        (source / name).write_bytes(b"head" + columns.contiguous().numpy().tobytes())
    grid = Grid(0, 100, 20, (Band("left", 4, 28, 28), Band("right", 4, 52, 52)))
    plan = Plan((str(source),), (FileLayout("w", (Strided(grid, "F32", dtype, 0, State("w", WEIGHT)),)),))
    assert plan.summary.read == ((0, "left"), (0, "right"))
    (result,) = execute(plan, tmp_path / "out")
    written = (tmp_path / "out/w").read_bytes()
    assert written == cast(masters.numpy().tobytes(), "F32", dtype)
    assert [(run.begin, run.num_bytes, run.crc) for run in result.runs()] == [(0, len(written), zlib.crc32(written))]


@pytest.mark.parametrize("width", [2, 9], ids=["each by itself", "with what is between"])
@pytest.mark.parametrize("buffer_bytes", [100, 8 << 20])
def test_a_part_of_each_row(source, tmp_path, monkeypatch, buffer_bytes, width):
    """Checksums are of the rows at their places in the state, also of rows that an earlier run wrote."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(runner, "MARK_BYTES", 1000)
    masters = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
    (source / "whole").write_bytes(b"head" + masters.numpy().tobytes())
    grids = (Grid(20 * row + 3, 50, width, (Band("whole", 80 * row + 16, 4 * width, 80),)) for row in (0, 50))
    pieces = tuple(Strided(grid, "F32", "F32", 0, State("w", MASTER), stride=20) for grid in grids)
    plan = Plan((str(source),), (FileLayout("w", (Bytes(b"head", "header"), *pieces, Crc(0, 4 + 400 * width))),))
    marks = []
    (result,) = execute(plan, tmp_path / "out", Context(record=lambda _, mark: marks.append(mark)))
    rows = masters[:, 3 : 3 + width].contiguous()
    wanted = b"head" + rows.numpy().tobytes()
    assert (tmp_path / "out/w").read_bytes() == wanted + zlib.crc32(wanted).to_bytes(4, "little")
    assert [(run.begin, run.num_bytes, run.skipped) for run in result.runs()] == [
        (first, 200 * width, 49 * (80 - 4 * width)) for first in (3, 1003)
    ]
    whole = 0  # of all elements, as the parts of the rows that are not there were zero
    for run in result.runs():
        whole ^= combine(run.crc, 0, 8000 - run.begin * run.itemsize - run.num_bytes - run.skipped)
    for end, part in ((12, masters[:, :3]), (80, masters[:, 3 + width :])):
        for number, row in enumerate(part):
            whole ^= combine(zlib.crc32(row.numpy().tobytes()), 0, 8000 - 80 * number - end)
    assert whole == zlib.crc32(masters.numpy().tobytes())
    for mark in marks:
        again = execute(plan, tmp_path / "out", Context(kept={"w": (mark,)}))
        assert [(one.crcs, one.spread) for one in again] == [(result.crcs, result.spread)] and again[
            0
        ].moved.kept_bytes == mark.num_bytes
    read_again(plan, [result], plan.summary.read, lambda num_bytes: None, Stop())


@pytest.mark.parametrize("clone", ["never", "auto"])
@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda path: os.truncate(path, 500_000), "ends before byte"), (Path.unlink, "No such file")],
    ids=["shrinks", "vanishes"],
)
def test_a_source_that_changes_is_an_error_and_not_zeros(source, tmp_path, copied, change, told, clone):
    plan = a_plan(source)
    change(source / "data")
    with pytest.raises(SourceError, match=told) as caught:
        execute(plan, tmp_path / "out", Context(clone=clone))
    assert str(source / "data") in caught.value.problems[0].where


def test_a_write_that_fails_is_an_error(source, tmp_path):
    """The kernel refuses to let a file grow beyond the limit, as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            execute(a_plan(source), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failure_keeps_no_source_open(source, tmp_path):
    """Not even until garbage is collected: the file system of the sources could not be unmounted."""
    plan = Plan((str(source),), (FileLayout("out", (Copy(Extent("data", 0, SOURCE_BYTES + 1), 0),)),))
    gc.disable()
    try:
        with pytest.raises(SourceError, match="it ends before byte"):
            execute(plan, tmp_path / "out")
        assert str(source / "data") not in {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    finally:
        gc.enable()


def test_a_worker_goes_on_while_the_disk_is_busy_with_its_last_file(source, tmp_path, monkeypatch):
    """With one worker, the fsyncs of two files meet: the second file was written during the fsync of the first."""
    monkeypatch.setattr(pool, "MAX_WRITERS", 1)
    meeting, original = threading.Barrier(2), os.fsync

    def fsync(fd):
        meeting.wait(timeout=30)
        original(fd)

    monkeypatch.setattr(runner.os, "fsync", fsync)
    execute(many(source, 2), tmp_path / "out")
    assert not meeting.broken


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
    execute(many(source, 6), tmp_path / "out")
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
    before = forget_peak()
    execute(of_holes(tmp_path, 1, 256 << 20), tmp_path / "out")
    assert peak() - before < 32 << 20
    (tmp_path / "out/f0").unlink()


def of_holes(root: Path, num_files: int, num_bytes: int) -> Plan:
    """A plan of as many files, whose source is a hole."""
    source = root / "holes"
    source.mkdir()
    with (source / "data").open("wb") as file:
        file.truncate(num_bytes)
    pieces = (Copy(Extent("data", 0, num_bytes), 0),)
    return Plan((str(source),), tuple(FileLayout(f"f{number}", pieces) for number in range(num_files)))


# --- past the page cache ---------------------------------------------------------------------------------------------

BUFFER = 8 * BLOCK_BYTES
real_write = streams.write_all


@pytest.fixture
def direct_plan(on_disk, monkeypatch):
    """Returns plans for one file of a given length, whose pieces begin and end anywhere."""
    monkeypatch.setattr(runner, "direct_bytes", lambda num_files: BUFFER)
    monkeypatch.setattr(runner, "MIN_DIRECT_BYTES", 100)
    source = make_source(on_disk / "source")

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


def check_direct(plan, on_disk, direct=True):
    check(plan, on_disk / "out", inline=True, direct=direct)


@pytest.mark.parametrize("num_bytes", [101, BLOCK_BYTES, 3 * BLOCK_BYTES + 1, BUFFER, BUFFER + 1, 3 * BUFFER - 1])
def test_blocks_bypass_the_cache_and_the_rest_does_not(direct_plan, on_disk, writes, num_bytes):
    check_direct(direct_plan(num_bytes), on_disk)
    if not any(direct for _, direct in writes):
        assert num_bytes < BLOCK_BYTES or not os.major(on_disk.stat().st_dev), "a disk takes such writes"
        pytest.skip("only disks of this machine are written to without the page cache")
    whole = num_bytes // BLOCK_BYTES * BLOCK_BYTES
    assert sum(length for length, direct in writes if direct) == whole, "all but the last, incomplete block"
    assert all(length % BLOCK_BYTES == 0 for length, direct in writes if direct)


def test_only_what_asks_for_it_and_is_large_bypasses_the_cache(direct_plan, on_disk, writes, monkeypatch):
    check_direct(direct_plan(2 * BUFFER), on_disk, direct=False)
    (on_disk / "out/out").unlink()
    monkeypatch.setattr(runner, "MIN_DIRECT_BYTES", 2 * BUFFER + 1)
    check_direct(direct_plan(2 * BUFFER), on_disk)
    assert not any(direct for _, direct in writes)


@pytest.mark.parametrize("refused", [0, 1], ids=["at the first write", "later"])
def test_a_file_system_that_refuses_gets_ordinary_writes(direct_plan, on_disk, monkeypatch, refused):
    direct = []

    def write_all(fd, data):
        if len(data) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(len(data))
            if len(direct) == refused + 1:
                real_write(fd, data[: len(data) // 2 // BLOCK_BYTES * BLOCK_BYTES])
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real_write(fd, data)

    monkeypatch.setattr(streams, "write_all", write_all)
    check_direct(direct_plan(3 * BUFFER), on_disk)
    if not direct:
        pytest.skip("only disks of this machine are written to without the page cache")
    assert len(direct) == refused + 1, "once refused, never again"


def test_where_the_flag_is_refused_nothing_changes(direct_plan, on_disk, writes, monkeypatch):
    real = fcntl.fcntl

    def refuse(fd, command, argument=0):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check_direct(direct_plan(2 * BUFFER), on_disk)
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
    execute(of_holes(on_disk, 2, runner.MIN_DIRECT_BYTES), on_disk / "out")
    assert not meeting.broken


def test_files_that_wait_to_become_durable_have_no_buffers(on_disk, monkeypatch):
    """All files wait at once; if each still had its buffer, they would take twice as much."""
    num_files = 8
    meeting, original = threading.Barrier(num_files), os.fsync

    def fsync(fd):
        meeting.wait(timeout=60)
        original(fd)

    monkeypatch.setattr(pool.os, "cpu_count", lambda: num_files // 4)
    monkeypatch.setattr(runner.os, "fsync", fsync)
    plan = of_holes(on_disk, num_files, streams.MAX_DIRECT_BYTES)
    before = forget_peak()
    execute(plan, on_disk / "out")
    assert peak() - before < streams.DIRECT_BYTES * 3 // 2


# --- by sharing blocks -----------------------------------------------------------------------------------------------

WHOLE_BLOCKS = 900_100 // 4096 * 4096 - 4096


def test_whole_blocks_are_cloned_and_the_rest_is_copied(folder):
    source = make_source(folder / "source")
    plan = a_plan(source)
    check(plan, folder / "out", {"cloned_bytes": WHOLE_BLOCKS}, clone="auto")
    check(plan, folder / "never", {})
    (source / "data").write_bytes(bytes(SOURCE_BYTES))  # a clone has blocks of its own from now on
    assert (folder / "out/sub/out").read_bytes() == (folder / "never/sub/out").read_bytes()


def test_what_starts_elsewhere_in_its_block_is_copied(folder):
    source = make_source(folder / "source")
    check(a_plan(source, shift=64), folder / "out", {}, clone="require")


def test_clones_take_no_space(folder):
    """With 320 MB, only one copy of 200 MB fits; the merge knows before it starts."""
    source = folder / "source"
    source.mkdir()
    some = os.urandom(2 << 20)
    with (source / "data").open("wb") as file:
        for _ in range(100):
            file.write(some)
        os.fsync(file.fileno())
    num_bytes = 200 << 20
    plan = Plan((str(source),), (FileLayout("out", (Copy(Extent("data", 0, num_bytes), 0),)),))
    assert plan.shareable_bytes == num_bytes
    tracemalloc.start()
    (result,) = execute(plan, folder / "out", Context(clone="require"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.moved == CopyStats(cloned_bytes=num_bytes)
    assert most < 4 << 20
    with pytest.raises(StorageError, match="No space left"):
        execute(plan, folder / "copied", Context(clone="never"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV])
def test_a_clone_that_fails_half_way_is_continued_by_a_copy(source, tmp_path, monkeypatch, copied, code):
    monkeypatch.setattr(moving, "MAX_CLONE_BYTES", 204_800)
    original = moving.clone_range

    def clone(*arguments):
        if len(copied) == 2:
            raise OSError(code, os.strerror(code))
        original(*arguments)

    monkeypatch.setattr(moving, "clone_range", clone)
    check(a_plan(source), tmp_path / "out", {"cloned_bytes": 2 * 204_800}, clone="auto")
    copied.clear()
    with pytest.raises(StorageError, match=f"can't be shared.*{os.strerror(code)}") as caught:
        execute(a_plan(source), tmp_path / "required", Context(clone="require"))
    assert caught.value.problems[0].where == str(source / "data")


def test_an_interrupted_clone_is_resumed_at_a_mark(source, tmp_path, monkeypatch, copied):
    monkeypatch.setattr(runner, "MARK_BYTES", 250_000)
    monkeypatch.setattr(moving, "MAX_CLONE_BYTES", 409_600)
    plan, marks = a_plan(source), []
    original = moving.clone_range

    def clone(*arguments):
        if copied:
            raise Interrupted.at("", "killed", "run it again")
        original(*arguments)

    monkeypatch.setattr(moving, "clone_range", clone)
    with pytest.raises(Interrupted):
        execute(plan, tmp_path / "out", Context(clone="auto", record=lambda _, mark: marks.append(mark)))
    assert [mark.num_bytes for mark in marks] == [300_100]
    copied.clear()
    monkeypatch.setattr(moving, "clone_range", original)
    rest = (900_100 // 4096 - -(-300_100 // 4096)) * 4096
    moved = {"kept_bytes": 300_100, "cloned_bytes": rest}
    check(plan, tmp_path / "out", moved, clone="auto", kept={"sub/out": tuple(marks)})


def a_run(root: Path) -> Path:
    make_run(root, (100, 200), shape=SHAPES["tiny"])
    recipe = "merge_method: passthrough\nbase_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: odd}\n"
    (root / "recipe.yaml").write_text(recipe)
    return root


def test_a_merge_on_a_file_system_with_reflinks(folder, small_limits):
    run = a_run(folder)
    done = call("merge", "recipe.yaml", "out", cwd=run)
    assert "cloned " in done.stderr, done
    call("merge", "recipe.yaml", "copied", "--clone", "never", cwd=run)
    for path in sorted((run / "out").rglob("*.*")):
        if path.is_file() and path.name not in ("llmtailor.json", "README.md"):
            assert path.read_bytes() == (run / "copied" / path.relative_to(run / "out")).read_bytes()
    call("verify", "out", "--deep", cwd=run)


def test_a_source_that_changes_after_it_was_cloned_is_refused(tmp_path, monkeypatch, copied, small_limits):
    run = a_run(tmp_path)
    original = moving.clone_range

    def clone(*arguments):
        original(*arguments)
        for path in run.glob("checkpoint-100/global_step*/*optim_states.pt"):
            os.utime(path, ns=(1, 1))

    composition = plan_merge(run / "recipe.yaml", run / "out", Options(clone="auto"))
    monkeypatch.setattr(moving, "clone_range", clone)
    with pytest.raises(SourceError, match="changed"):
        write(composition)
    assert copied and not (run / "out").exists()


def test_padded_files_hold_the_same_for_every_reader(tmp_path, monkeypatch, copied, small_limits):
    """The same conversion with and without padding: readers of torch files and of safetensors see equal tensors."""
    root = make(tmp_path, 100, shape=SHAPES["tiny"])
    outs = {}
    for name in ("padded", "plain"):
        if name == "plain":
            monkeypatch.setattr(layout, "MIN_PADDED_BYTES", 1 << 60)
        composition = plan_merge(Recipe(name=name, base=root), tmp_path / name, Options(world_size=4))
        shareable = composition.plan.shareable_bytes  # pieces are made when they are asked for
        outs[name] = (tmp_path / name, composition.plan, write(composition), shareable)
    (padded, plan, moved, shareable), (plain, plain_plan, _, less) = outs.values()
    assert moved.cloned_bytes == shareable > less
    assert plan.num_bytes > plain_plan.num_bytes
    files = [file.path for file in plan.files if file.path.endswith(".pt")]
    assert files
    for path in files:
        assert zipfile.ZipFile(padded / path).testzip() is None
        assert not list(differences(load(padded / path), load(plain / path)))
    weights, others = load_file(padded / "model.safetensors"), load_file(plain / "model.safetensors")
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("sizes", [(3000,), (5000, 11, 70_001), (1, 2048, 4096, 9)])
def test_torch_finds_the_storages_of_a_padded_file(tmp_path, small_limits, sizes):
    """Also where it does not read the places but would compute them: under a fake mode, and for the meta device."""
    tree = {f"t{at}": torch.arange(size, dtype=torch.float32) + at for at, size in enumerate(sizes)}
    torch.save({"longer pickle": "x" * 300, **tree}, tmp_path / "source.pt")
    read = read_torch_file(tmp_path, "source.pt", "source").tree
    made = lay_out_torch_file("made.pt", {name: read[name] for name in tree}).filled(lambda piece: [piece])
    (tmp_path / "made.pt").write_bytes(render(made, tmp_path))
    starts = [(at - piece.extent.start) % 4096 for at, piece in made.placed() if isinstance(piece, Copy)]
    assert [start for start, size in zip(starts, sizes, strict=True) if 4 * size >= 4096] == [0] * sum(
        4 * size >= 4096 for size in sizes
    )
    data = (tmp_path / "made.pt").read_bytes()
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "made.pt", mmap=mmap)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tree.items())
    with FakeTensorMode():
        places = [torch.load(tmp_path / "made.pt")]
    places.append(torch.load(tmp_path / "made.pt", map_location="meta"))
    for place in places:
        for name, tensor in tree.items():
            at = place[name].untyped_storage()._checkpoint_offset
            assert data[at : at + tensor.nbytes] == tensor.numpy().tobytes()
