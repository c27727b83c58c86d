"""What background saves do on a GPU. Skipped where there is none."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch

from llmtailor.background.arena import Arena
from llmtailor.background.packing import GPU_ELEMENTS, LiveTensors
from llmtailor.background.snapshot import Snapshot, StepBarrier
from llmtailor.errors import StorageError
from llmtailor.formats.partial.json_trees import lay_out_tensors
from llmtailor.live.tensors import storage_of
from llmtailor.storage import casts, rounding, rounding_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
A_TENTH = 200_000_000
"""Cycles of a GPU: about a tenth of a second"""


def drawn(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-30, 30, (numel,), generator=generator)


def started(tensors, arena, dtype=None):
    """Return a snapshot that is being taken, and its file."""
    live = LiveTensors()
    entries = [live.entry(str(number), one, dtype, storage_of(one)) for number, one in enumerate(tensors)]
    file = lay_out_tensors("file", entries, {})
    snapshot = Snapshot(live, [file], arena, 60, time.monotonic())
    snapshot.start()
    return snapshot, file


def read(snapshot, file):
    """Return the bytes of each tensor, and close the snapshot."""
    found = []
    try:
        for piece in file.pieces[1:]:
            data = bytearray()
            while len(data) < piece.num_bytes:
                data += snapshot.read(piece.extent.path, len(data), piece.num_bytes)
            found.append(bytes(data))
        snapshot.conclude()
    finally:
        snapshot.close()
    return found


@pytest.mark.parametrize("dtype", ["F24", "Q8", "Q8_ROOT", "D16"])
def test_it_rounds_to_the_bytes_of_the_cpu(dtype):
    values = drawn(300_037)
    values[1000:1300] = 0
    values[2000:2005] = torch.tensor([1e-45, -0.0, 1e-45, -1e-40, 3.4e38])
    values = values.abs() if dtype == "Q8_ROOT" else values
    base = rounding.pack((values * (1 + drawn(len(values)) * 1e-4)).numpy(), "F24")
    on_gpu = rounding_torch.pack(values.cuda(), dtype, torch.from_numpy(base)).cpu().numpy()
    assert np.array_equal(on_gpu, rounding.pack(values.numpy(), dtype, base=base))


@pytest.mark.parametrize("dtype", [None, "BF16", "F24", "Q8"])
@pytest.mark.parametrize("arena_bytes", [1 << 20, 96 << 20])
def test_it_copies_what_was_there_between_two_steps(dtype, arena_bytes):
    """Whatever the GPU has yet to do when the save is made."""
    wanted = [drawn(numel, numel) for numel in (5, GPU_ELEMENTS + 128, 700_001)]
    tensors = [torch.zeros_like(one, device="cuda") for one in wanted]
    arena, barrier = Arena(arena_bytes, pinned=True), StepBarrier()
    sources = [one.pin_memory() for one in wanted]
    torch.cuda._sleep(A_TENTH)
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source, non_blocking=True)
    snapshot, file = started(tensors, arena, dtype)
    optimizer = torch.optim.SGD([torch.nn.Parameter(one) for one in tensors], lr=1.0)
    barrier.arm(snapshot, [optimizer], frozenset(map(storage_of, tensors)))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    if arena_bytes > 1 << 20:  # else the step waits until all is read
        optimizer.step()
    found = read(snapshot, file)
    barrier.remove()
    for data, one in zip(found, wanted, strict=True):
        expected = casts.cast(one.numpy().tobytes(), "F32", dtype) if dtype else one.numpy().tobytes()
        assert data == expected


def test_a_change_before_the_copy_is_made_fails_the_save():
    """The copy has been started, but waits for the GPU."""
    tensors, arena = [torch.ones(1 << 20, device="cuda").mul_(1)], Arena(16 << 20, pinned=True)
    torch.cuda.synchronize()  # loading a kernel may wait for the GPU: not while it sleeps
    torch.cuda._sleep(5 * A_TENTH)
    snapshot, file = started(tensors, arena)
    while not snapshot.is_copied:
        time.sleep(0.001)
    tensors[0].mul_(2)
    snapshot.wait()
    with pytest.raises(StorageError, match="outside optimizer"):
        read(snapshot, file)
    snapshot.wait()  # of the next step; it is closed


def test_a_change_after_the_copy_is_none_of_its_business():
    tensors = [torch.ones(1 << 20, device="cuda")]
    snapshot, file = started(tensors, Arena(16 << 20, pinned=True))
    snapshot._thread.join()
    tensors[0].mul_(2)
    snapshot.wait()
    assert read(snapshot, file) == [torch.ones(1 << 20).numpy().tobytes()]


def test_saves_need_no_more_gpu_memory_than_the_first():
    tensors = [torch.rand(5_000_000, device="cuda") for _ in range(3)]
    arena, reserved = Arena(16 << 20, pinned=True), []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(6):
        read(*started(tensors, arena, "Q8_ROOT"))
        reserved.append(torch.cuda.memory_reserved() - before)
    assert reserved[-1] == reserved[1] < 500 << 20


def test_the_host_buffer_is_pinned_as_long_as_it_is_used():
    arena = Arena(3 << 20, pinned=True)
    memory = arena.memory
    assert memory.is_pinned() and arena.num_bytes <= 3 << 20
    del arena
    gc.collect()
    assert not memory.is_pinned()
