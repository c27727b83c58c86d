"""Saves in the background: nothing is torn, memory is bounded, and a bad disk costs saves, never the training."""

from __future__ import annotations

import copy
import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch._dynamo.utils import counters
from torch.optim.optimizer import _global_optimizer_pre_hooks

from helpers.cases import diagonal, mostly_long
from helpers.commands import call
from helpers.states import in_8_bits, in_24_bits
from llmtailor.background import arena, process_exit, writing
from llmtailor.background import snapshot as snapshots
from llmtailor.background.arena import Arena
from llmtailor.background.packing import ANY_STEP, LiveTensor, LiveTensors
from llmtailor.background.snapshot import Snapshot, StepBarrier
from llmtailor.background.writing import Share, write_share
from llmtailor.checkpoint.layout import BLOCK_BYTES
from llmtailor.copying import streams
from llmtailor.errors import StorageError, UsageError
from llmtailor.formats.partial.json_trees import lay_out_tensors
from llmtailor.live.tensors import storage_of
from llmtailor.live.torch_training import TorchTraining
from llmtailor.saving import SaveFailed, SavingOptions, planner
from saving.loop import Disk, Loop, log_of
from trainings.harness import start_ranks

SMALLEST = 1 << 20


@pytest.fixture
def disk(monkeypatch):
    made = Disk(monkeypatch)
    yield made
    made.recover()


@pytest.fixture
def loop(tmp_path):
    made = []

    def make(**options):
        made.append(Loop(tmp_path / "run", **options).start())
        return made[-1]

    yield make
    for one in made:
        one.saver.close()


def test_training_goes_on_while_a_save_is_written(tmp_path, disk, loop):
    run = loop(policy="full")
    run.train()
    disk.hang()
    save = run.save()
    run.train(5)
    assert not save.is_done and not run.saves
    disk.recover()
    report = save.wait(60)
    assert run.saves == [1] and report.copy_s <= report.write_s <= report.publish_s
    assert 0 < report.buffer_bytes <= report.num_bytes
    run.check(1, tmp_path / "out")


def test_a_process_does_not_grow_with_its_states(tmp_path):
    start_ranks("saving.processes", ["resident", tmp_path], 1, tmp_path)
    num_bytes, grown = json.loads((tmp_path / "found.json").read_text())
    assert num_bytes > 200 << 20
    assert grown < 64 << 20


def test_a_busy_saver_waits_or_skips(tmp_path, disk, loop, caplog):
    run = loop(policy="full", when_busy="skip")
    run.train()
    disk.hang()
    first = run.save()
    run.train()
    assert run.save() is None
    assert "step 2: save skipped: the previous save is still being written" in caplog.text
    threading.Timer(0.2, disk.recover).start()
    run.train()
    last = run.save(is_last=True)
    assert first.is_done
    last.wait(60)
    assert run.saves == [1, 3]
    run.check(3, tmp_path / "out")


def test_several_saves_may_be_in_flight(tmp_path, disk, loop, caplog):
    """They are published in their order, and each holds what the training was when it began."""
    run = loop(policy="parity", in_flight=3, when_busy="skip")
    run.make_saves()
    disk.hang()
    saves = []
    for _ in range(3):
        run.train()
        saves.append(run.save())
    run.train()
    assert run.save() is None
    assert not any(save.is_done for save in saves)
    assert run.saves == [1]
    threading.Timer(0.2, disk.recover).start()
    assert [save.wait(60).step for save in saves] == [2, 3, 4]
    run.make_saves()
    assert [line["step"] for line in log_of(run.run)] == run.saves == [1, 2, 3, 4, 6]
    for step in run.saves:
        run.check(step, tmp_path / f"out-{step}")


def test_a_buffer_of_automatic_size_holds_a_whole_save(disk, loop, monkeypatch):
    """So that no step waits for the disk, with step counts, and what alignment leaves free."""
    monkeypatch.setattr(arena, "LEAST_BUFFER", 0)
    monkeypatch.setattr(streams, "BUFFER_BYTES", BLOCK_BYTES)  # else the writer takes all of it out
    run = loop(policy="full")
    run.make_saves()
    disk.hang()
    run.train()
    save, until = run.save(), time.monotonic() + 20
    while not save._snapshot.is_copied:
        assert time.monotonic() < until, "the last copy waits for the disk"
        time.sleep(0.01)
    disk.recover()
    save.wait(60)


@pytest.mark.parametrize("keep", mostly_long([1, 2], 2))
def test_what_saves_in_flight_take_files_of_is_not_deleted(tmp_path, loop, keep):
    run = loop(policy="round_robin:2", in_flight=4, keep_composable=keep)
    for _ in range(12):
        run.train()
        last = run.save()
    last.wait(60)
    assert not [line for line in log_of(run.run) if "failed" in line]
    run.check(12, tmp_path / "out")


def test_what_a_failed_save_takes_with_it_is_still_due(tmp_path, disk, loop, caplog):
    run = loop(policy="round_robin:4", in_flight=3)
    run.make_saves()
    ledger = run.saver.ledger
    disk.hang()
    saves = []
    for _ in range(3):
        run.train()
        saves.append(run.save())
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    disk.is_free.set()
    for save in saves:
        with pytest.raises(SaveFailed):
            save.wait(60)
    disk.recover()
    assert [one.step for one in run.saver.reports()] == [1]
    assert run.saver.ledger == ledger
    run.train()
    again = run.save()
    assert again.parts == saves[0].parts
    again.wait(60)
    run.make_saves(4)
    assert run.saves == [1, 5, 6, 7, 8, 9]
    run.check(9, tmp_path / "out")


def test_a_save_is_not_published_without_the_one_before(tmp_path, disk, loop, monkeypatch):
    """Its files are complete, but the record in it names a save that is not there."""
    run = loop(policy="round_robin:4", in_flight=2)
    run.make_saves()
    publish, waiting = planner.publish, threading.Event()

    def fail_once(folder, *args, **kwargs):
        if folder.name.endswith("2"):
            assert waiting.wait(60)
            raise OSError(errno.EIO, "Input/output error")
        return publish(folder, *args, **kwargs)

    monkeypatch.setattr(planner, "publish", fail_once)
    run.train()
    first = run.save()
    run.train()
    second = run.save()
    while not list((run.run / "partial").glob("step-00000003/rank-*")):
        time.sleep(0.01)
    time.sleep(0.2)
    assert not second.is_done
    waiting.set()
    with pytest.raises(SaveFailed, match="the save at step 2, on which it builds, failed"):
        second.wait(60)
    assert first.failure is not None
    assert run.saves == [1]
    run.make_saves()
    run.check(4, tmp_path / "out")


def test_what_a_failed_save_held_is_still_due(tmp_path, disk, loop, caplog):
    run = loop(policy="parity")
    run.make_saves()
    run.train()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    save = run.save()
    with pytest.raises(SaveFailed, match="No space left"):
        save.wait(60)
    assert "the save at step 2 failed; training continues without it" in caplog.text
    assert not list((run.run / "partial").glob("step-00000002*"))
    disk.recover()
    run.train()
    again = run.save()
    assert again.parts == save.parts
    again.wait(60)
    assert run.saves == [1, 3]
    lines = log_of(run.run)
    assert [(line["step"], "failed" in line) for line in lines] == [(1, False), (2, True), (3, False)]


def test_a_hung_disk_costs_saves_and_not_the_training(tmp_path, disk, loop, caplog):
    """The buffer is too small, so the optimizer waits for the disk, but not for long."""
    run = loop(policy="full", host_buffer=SMALLEST, hidden=256, write_timeout=2.0)
    run.train()
    disk.hang()
    hung = run.save()
    run.train(3)
    assert run.save() is None
    assert "save skipped: the previous save is stuck" in caplog.text
    disk.recover()
    with pytest.raises(SaveFailed, match="no write progress"):
        hung.wait(60)
    run.make_saves()
    assert run.saves == [5]
    run.check(5, tmp_path / "out")


def test_a_save_that_hangs_at_the_end_is_given_up(disk, loop, caplog):
    run = loop(policy="full", write_timeout=1.0)
    run.train()
    disk.hang()
    save = run.save()
    run.saver.close()
    assert "the save at step 1 was aborted: its disk is stuck" in caplog.text
    disk.recover()
    with pytest.raises(SaveFailed):
        save.wait(60)
    assert not run.saves and not list((run.run / "partial").glob("step-*"))


def test_a_save_that_the_end_of_the_process_cuts_off_says_so(disk, loop, caplog, monkeypatch):
    """Nothing is wrong with the disk."""
    monkeypatch.setattr("llmtailor.background.pending._LAST_S", 0.1)
    run = loop(policy="full", host_buffer=SMALLEST, hidden=256)
    run.train()
    disk.hang()
    save = run.save()
    save.finish_until(time.monotonic())
    disk.recover()
    with pytest.raises(SaveFailed, match="the process ended before it was complete"):
        save.wait(60)
    assert "the save at step 1 failed: saving: save aborted: the process ended" in caplog.text
    assert "no write progress" not in caplog.text


def test_a_state_that_is_changed_too_early_is_not_saved(loop, disk, monkeypatch):
    """Nothing but the optimizer's step waits, but torch counts writes."""
    run = loop(policy="full")
    run.train()
    copy, may_copy = Snapshot._copy, threading.Event()
    monkeypatch.setattr(Snapshot, "_copy", lambda *args: (may_copy.wait(60), copy(*args)))
    save = run.save()
    with torch.no_grad():
        run.model.lm_head.weight.mul_(2)
    may_copy.set()
    with pytest.raises(SaveFailed, match="a tensor changed outside optimizer"):
        save.wait(60)
    run.make_saves()
    assert run.saves == [2]


@pytest.fixture
def slow_frozen(monkeypatch):
    """Frozen params are copied as late as the optimizer's step permits, and slowly."""
    copy, wait, is_asked = Snapshot._copy, Snapshot.wait, threading.Event()

    def slowly(snapshot, number):
        if snapshot._live.tensors[number].written_with == ANY_STEP:
            is_asked.wait(60)
            time.sleep(0.01)
        copy(snapshot, number)

    def asking(snapshot, *storages):
        is_asked.set()
        wait(snapshot, *storages)

    monkeypatch.setattr(Snapshot, "_copy", slowly)
    monkeypatch.setattr(Snapshot, "wait", asking)
    return is_asked


def frozen_of(run, step):
    [path] = (run.run / "partial" / f"step-{step:08}").glob("frozen-*")
    return safetensors.torch.load_file(path)


@pytest.mark.parametrize(("host_buffer", "when"), diagonal(["auto", SMALLEST], ["before the step", "after the step"]))
def test_a_teacher_is_saved_as_it_was(loop, slow_frozen, caplog, when, host_buffer):
    """BYOL, DINO, MoCo: a user's code changes frozen params at each step; a small buffer holds a part of them only."""
    run = loop(policy="full", teacher=True, hidden=32 if host_buffer == "auto" else 160, host_buffer=host_buffer)
    wanted = {}
    run.train()
    run.update_teacher()
    for _ in range(3):
        slow_frozen.clear()
        save = run.save()
        wanted[run.step] = run.teacher()
        if when == "before the step":
            run.update_teacher()
        run.train()
        if when == "after the step":
            run.update_teacher()
        save.wait(60)
    assert run.saves == [1, 2, 3]
    for step, teacher in wanted.items():
        found = frozen_of(run, step)
        assert found.keys() == teacher.keys()
        assert all(torch.equal(found[name], teacher[name]) for name in teacher), step
    assert caplog.text.count("each save stops training to copy the frozen params") == 1


def test_a_teacher_that_was_still_until_the_first_save_is_saved_too(loop, slow_frozen):
    """Nothing has shown yet that it will move, so the step waits for it."""
    run = loop(policy="full", teacher=True)
    run.train()
    save, before = run.save(), run.teacher()
    run.train()
    run.update_teacher()
    save.wait(60)
    found = frozen_of(run, 1)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_a_frozen_param_that_moves_first_while_it_is_copied_costs_one_save(loop, slow_frozen):
    run = loop(policy="full", teacher=True)
    run.train()
    save = run.save()
    run.update_teacher()
    run.train()
    with pytest.raises(SaveFailed, match="frozen params changed outside optimizer"):
        save.wait(60)
    run.save().wait(60)
    assert run.saves == [2]


def test_a_check_that_takes_long_is_awaited(loop, monkeypatch):
    """Also if everything is read and written before it refuses."""
    lay_out = planner.lay_out_share

    def refuse():
        time.sleep(0.2)
        raise StorageError.at("saving", "the check refuses", "see the test")

    monkeypatch.setattr(planner, "lay_out_share", lambda request: replace(lay_out(request), check=refuse))
    run = loop(policy="full")
    run.train()
    with pytest.raises(SaveFailed, match="the check refuses"):
        run.save().wait(60)
    assert not run.saves


@pytest.mark.parametrize("has_scheduler", mostly_long([True, False], True))
def test_a_compiled_step_does_not_compile_the_saver(tmp_path, loop, has_scheduler):
    """Steps with and without a save before them run what was compiled at the first."""
    torch._dynamo.reset()
    run = loop(policy="parity")
    step = run.optimizer.step if has_scheduler else partial(type(run.optimizer).step, run.optimizer)
    run.optimizer.step = torch.compile(step, backend="eager")
    run.train(2)
    counted = copy.deepcopy(counters["frames"])
    assert counted
    for _ in range(3):
        run.save()
        run.train(2)
    assert counters["frames"] == counted
    run.saver.finish()
    assert run.saves == [2, 4, 6]
    run.check(6, tmp_path / "out")


@pytest.mark.parametrize("why", ["unseen", "memory"])
def test_without_background_saves_training_stops(tmp_path, monkeypatch, caplog, why):
    """A warning says why, and the save is complete when the call returns."""
    if why == "unseen":
        monkeypatch.setattr(TorchTraining, "writes_unseen", lambda self: "another process writes the states")
    run = Loop(tmp_path / "run", policy="full", host_buffer=1 << 50 if why == "memory" else "auto").start()
    reason = "another process writes the states" if why == "unseen" else "there is no host memory of"
    assert "saves stop training until they are complete" in caplog.text and reason in caplog.text
    run.train()
    save = run.save()
    assert save.is_done and save.report.buffer_bytes == 0 and run.saves == [1]
    run.saver.close()
    run.check(1, tmp_path / "out")


def test_everything_is_durable_before_the_manifest_names_it(tmp_path, monkeypatch, loop):
    done = []

    def recorded(real):
        def record(path, *content):
            real(path, *content)
            done.append(path)

        return record

    for name in ("fsync_folder", "replace_durably"):
        monkeypatch.setattr(writing, name, recorded(getattr(writing, name)))
    run = loop()
    run.make_saves()
    (manifest,) = (tmp_path / "run").glob("partial/step-*/manifest.json")
    at = done.index(manifest)
    assert done[at - 1 : at + 3] == [manifest.parent, manifest, manifest.parent, manifest.parent.parent]


def test_a_policy_that_is_not_deterministic_is_found_out():
    from llmtailor.background.pending import check_chosen

    check_chosen([["norm"], ["norm"]])
    with pytest.raises(UsageError, match="rank 1: not the same choice of parts by the policy as on rank 0"):
        check_chosen([["norm"], ["lm_head"]])


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended")
    start_ranks("saving.processes", ["endings", folder], 1, folder)
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("wait", -signal.SIGTERM)])
def test_a_save_in_progress_is_finished_when_the_process_ends(ended, how, code):
    """Also by an exception, or by SIGTERM."""
    folder, codes = ended
    assert codes[how] == code
    assert [path.parent.name for path in (folder / how).glob("partial/*/manifest.json")] == ["step-00000001"]


def test_a_save_of_which_a_rank_has_died_is_removed(ended):
    folder, codes = ended
    assert codes["die"] == 0
    assert sorted(path.name for path in (folder / "die").glob("partial/step-*")) == ["step-00000001"]
    said = (folder / "die" / "stderr").read_text()
    assert "the save at step 2 failed" in said and "another rank's share was not complete" in said
    assert "the process ended before it was complete" in said


def four_masters(arena_bytes):
    """Return four tensors of half a megabyte, and a snapshot of them."""
    live, masters = LiveTensors(), [torch.full((1 << 17,), float(number)) for number in range(4)]
    entries = [live.entry(f"master/{number}", one, None, storage_of(one)) for number, one in enumerate(masters)]
    file = lay_out_tensors("file", entries, {})
    return masters, file, Snapshot(live, [file], Arena(arena_bytes, pinned=False), 60, time.monotonic())


@pytest.mark.parametrize("num_known", [4, 3], ids=["ours", "another that writes the same"])
def test_a_step_waits_only_for_what_it_writes(num_known):
    """As under ZeRO-3, where each sub-group has a storage of its own, and a step."""
    masters, file, snapshot = four_masters(1 << 20)
    snapshot.start()
    barrier = StepBarrier()
    optimizers = [torch.optim.SGD([torch.nn.Parameter(one)], lr=1.0) for one in masters]
    try:
        barrier.arm(snapshot, optimizers[:num_known], frozenset(map(storage_of, masters)))
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1 << 17)
        optimizers[0].step()  # two of four fit into the buffer
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        other.step()  # not ours
        waiting = threading.Thread(target=optimizers[3].step, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and not snapshot.is_copied
        found, at = b"", 0
        for piece in file.pieces[1:]:
            stop = piece.extent.stop
            at = 0
            while at < stop:
                data = snapshot.read(piece.extent.path, at, stop)
                found, at = found + bytes(data), at + len(data)
        waiting.join(60)
        assert snapshot.is_copied
        held = torch.frombuffer(bytearray(found), dtype=torch.float32).view(4, -1)
        assert [set(row.tolist()) for row in held] == [{0.0}, {1.0}, {2.0}, {3.0}]
        assert masters[3][0] == 2.0
    finally:
        barrier.remove()
        snapshot.close()


@pytest.mark.parametrize("is_changed", [True, False])
def test_what_changes_before_a_copy_is_made_fails_the_save(monkeypatch, is_changed):
    """On a GPU, a copy that has been started is made later; here, every one counts as such until all are made."""
    monkeypatch.setattr(snapshots, "copies_asynchronously", lambda tensor: True)
    masters, file, snapshot = four_masters(3 << 19)
    snapshot.start()
    while snapshot._copied < 2:  # of four, which the buffer has no room for
        time.sleep(0.001)
    snapshot.wait([storage_of(masters[0])])
    masters[0].mul_(2)  # by the step that waited
    if is_changed:
        masters[1].mul_(2)
    with pytest.raises(StorageError, match="outside optimizer") if is_changed else nullcontext():
        drain(snapshot, file)
        snapshot.conclude()
    snapshot.close()


def test_a_step_goes_on_after_a_save_that_was_given_up(monkeypatch):
    monkeypatch.setattr(snapshots, "copies_asynchronously", lambda tensor: True)
    _, _, snapshot = four_masters(1 << 20)
    snapshot.start()
    while not snapshot._copied:
        time.sleep(0.001)
    snapshot.close()
    snapshot.wait()


def drain(snapshot, file):
    for piece in file.pieces[1:]:
        at = 0
        while at < piece.num_bytes:
            at += len(snapshot.read(piece.extent.path, at, piece.num_bytes))


def test_only_this_process_has_the_memory_of_the_copies():
    """A shared mapping has no huge pages. Of a private one, a worker of a data loader would cause a second copy."""
    arena = Arena(1 << 23, pinned=False)

    def mapped():
        """Return the permissions of the arena's memory; an empty text if there is none."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, *_ = line.split()
            begin, end = (int(one, 16) for one in span.split("-"))
            if begin <= arena.memory.data_ptr() < end:
                return permissions
        return ""

    assert mapped() == "rw-p"
    if not (child := os.fork()):
        os._exit(len(mapped()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_saver_holds_no_host_buffer(tmp_path):
    """The next saver of the process allocates its own."""
    loop = Loop(tmp_path).start()
    loop.make_saves()
    buffer = weakref.ref(loop.saver._arenas[0])
    assert buffer() is not None
    loop.saver.close()
    gc.collect()
    assert buffer() is None


@pytest.mark.parametrize("arena_bytes", [1 << 20, 1 << 23], ids=["small buffer", "large buffer"])
def test_the_disk_takes_blocks_from_where_the_copies_lie(on_disk, monkeypatch, arena_bytes):
    """Whatever the sizes of the tensors; only blocks that hold parts of two of them are put together elsewhere."""
    monkeypatch.setattr("llmtailor.copying.copy.MIN_DIRECT_BYTES", 0)
    live, generator = LiveTensors(), torch.Generator().manual_seed(0)
    sizes = [3, 100_001, 1, 0, 300_000, 4096, 77, 50_000, 250_003]
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    half = torch.randn(60_001, generator=generator).bfloat16()
    entries = [live.entry(str(number), one) for number, one in enumerate([*tensors, half])]
    file = lay_out_tensors("file", entries, {})
    arena = Arena(arena_bytes, pinned=False)
    first, last = arena.memory.data_ptr(), arena.memory.data_ptr() + arena.num_bytes
    straight, real = [], streams.write_all

    def write_all(fd, data):
        if data and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            straight.append(len(data) if first <= address(data) < last else 0)
        real(fd, data)

    monkeypatch.setattr(streams, "write_all", write_all)
    for name in ("one", "two"):  # the second begins where the first left the buffer
        snapshot = Snapshot(live, [file], arena, 60, time.monotonic())
        snapshot.start()
        try:
            write_share(on_disk / name, Share(files=(file,), live=live), snapshot)
        finally:
            snapshot.close()
        found = safetensors.torch.load_file(on_disk / name / "file")
        assert all(torch.equal(found[str(number)], one) for number, one in enumerate([*tensors, half]))
    if not straight:
        pytest.skip("only disks of this machine are written to without the page cache")
    assert sum(straight) > 2 * (file.num_bytes - 2 * BLOCK_BYTES * len(entries))


@pytest.mark.parametrize("is_later", [True, False], ids=["host memory", "GPU"])
@pytest.mark.parametrize("begin", [0, 4, 400])
@pytest.mark.parametrize(("dtype", "size"), [("F24", 3), ("Q8", 132), ("Q8_ROOT", 132)])
def test_a_tensor_is_copied_in_pieces_of_whole_blocks(monkeypatch, dtype, size, begin, is_later):
    """Of the elements that are rounded together, and of the disk unless they are rounded when they are written."""
    if not is_later:
        monkeypatch.setattr(LiveTensor, "is_rounded_later", False)
    live = LiveTensors()
    entries = [live.entry("first", torch.zeros(begin // 4)), live.entry("second", torch.ones(3 << 20), dtype)]
    file = lay_out_tensors("file", entries, {})
    snapshot = Snapshot(live, [file], Arena(4 << 20, pinned=False), 60, time.monotonic())
    snapshot.start()
    at, ends = 0, []
    try:
        for piece in file.pieces[1:]:
            position, at = sum(one.num_bytes for one in file.pieces[: file.pieces.index(piece)]), 0
            while at < piece.num_bytes:
                at += len(snapshot.read(piece.extent.path, at, piece.num_bytes))
                ends.append((at % size, (position + at) % BLOCK_BYTES))
    finally:
        snapshot.close()
    whole = sum(end == 0 and (is_later or of_disk == 0) for end, of_disk in ends)
    assert whole >= 3 and len(ends) - whole <= 4, "but what ends the tensors, or the room of the ring"


def address(data):
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("moments", "share"), [("bf16", 0.65), ("8bit", 0.5)])
def test_states_may_be_rounded(tmp_path, loop, background, moments, share):
    """Steps are exact, weights round to the bf16 that they would round to, and the composite is as wide as ever."""
    run = loop(policy="full", moments=moments, masters="24bit", background=background)
    other = Loop(tmp_path / "exact", policy="full").start()
    assert run.make_saves(1, 3).num_bytes < share * other.make_saves(1, 3).num_bytes
    other.saver.close()
    for states in run.truth[3].values():
        for kind in ("exp_avg", "exp_avg_sq"):
            exact = states[kind]
            states[kind] = exact.bfloat16().float() if moments == "bf16" else in_8_bits(exact, kind)
        states["master"] = in_24_bits(exact := states["master"])
        assert torch.equal(states["master"].bfloat16(), exact.bfloat16()) and not torch.equal(states["master"], exact)
    run.check(3, tmp_path / "out")
    about = call("inspect", run.run / "partial" / "step-00000003").stdout
    how = {"bf16": "rounded to bf16", "8bit": "in 8 bits"}[moments]
    for text in (about, (tmp_path / "out" / "README.md").read_text()):
        assert f"its moments were saved {how}" in text and "weights were saved in 24 bits" in text
    call("verify", tmp_path / "out")


@pytest.mark.parametrize(
    "wrong",
    [
        {"host_buffer": 100},
        {"host_buffer": "4 GB"},
        {"when_busy": "sometimes"},
        {"in_flight": 0},
        {"in_flight": 2.0},
        {"write_timeout": 0},
        {"moments": "fp8"},
        {"masters": "fp16"},
        {"keep_composable": 0},
        {"experts": "each"},
        {"staging_dir": "a", "mirror": "b"},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError) as caught:
        SavingOptions(**wrong)
    [problem] = caught.value.problems
    assert problem.where in wrong and problem.fix


@pytest.mark.parametrize("own", [signal.SIG_DFL, lambda number, frame: None], ids=["none", "a handler of the user's"])
def test_signals_and_hooks_are_given_back(loop, monkeypatch, own):
    """A user's own handler is left alone."""
    monkeypatch.setattr(process_exit, "_open", {})  # an earlier test may have left a saver open
    earlier = signal.signal(signal.SIGTERM, own)
    try:
        hooks = len(_global_optimizer_pre_hooks)
        run = loop(policy="full")
        assert (signal.getsignal(signal.SIGTERM) is own) == (own is not signal.SIG_DFL)
        assert len(_global_optimizer_pre_hooks) == hooks + 1
        run.saver.close()
        assert signal.getsignal(signal.SIGTERM) is own
        assert len(_global_optimizer_pre_hooks) == hooks
    finally:
        signal.signal(signal.SIGTERM, earlier)
