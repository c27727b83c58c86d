"""Outputs share blocks with their sources where the file system can, and hold the same bytes where it can't."""

from __future__ import annotations

import errno
import os
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from xxhash import xxh3_128

from helpers.checkpoints import load, make
from helpers.commands import run_here
from helpers.render import render
from llmtailor.checkpoint import layout
from llmtailor.checkpoint.layout import Bytes, Copy, Crc, FileLayout, Plan, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.engine import copy as runner
from llmtailor.engine import moving
from llmtailor.engine.copy import Context, CopyStats, execute
from llmtailor.errors import Interrupted, SourceError, StorageError
from llmtailor.model.roles import MASTER, State
from llmtailor.recipe import Recipe
from synthetic import SHAPES

SOURCE_BYTES = 1_000_000


def make_source(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "data").write_bytes(np.random.default_rng(0).bytes(SOURCE_BYTES))
    return root


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
    return Plan((str(source),), (FileLayout("out", pieces),))


def check_written(plan: Plan, source: Path, out: Path, context: Context, **moved: int) -> None:
    """Carry out the plan; check bytes, checksums, progress, and how many bytes were cloned."""
    seen: list[int] = []
    context = Context(context.facts, context.kept, seen.append, context.record, digest=True, clone=context.clone)
    (result,) = execute(plan, out, context)
    written = (out / "out").read_bytes()
    assert written == render(plan.files[0], source)
    assert result.crc == zlib.crc32(written) and sum(seen) == len(written)
    assert result.digest == xxh3_128(written).hexdigest()
    data = (source / "data").read_bytes()
    runs = [(at, zlib.crc32(data[100 + at : 300_100 + at])) for at in (0, 300_000, 600_000)]
    assert [(run.begin, run.crc) for run in result.runs()] == runs
    assert result.moved == CopyStats(**{"copied_bytes": len(written) - sum(moved.values()), **moved})


WHOLE_BLOCKS = 900_100 // 4096 * 4096 - 4096


def test_whole_blocks_are_cloned_and_the_rest_is_copied(folder):
    source = make_source(folder / "source")
    plan = a_plan(source)
    check_written(plan, source, folder / "out", Context(clone="auto"), cloned_bytes=WHOLE_BLOCKS)
    check_written(plan, source, folder / "never", Context())
    (source / "data").write_bytes(bytes(SOURCE_BYTES))  # a clone has blocks of its own from now on
    assert (folder / "out/out").read_bytes() == (folder / "never/out").read_bytes()


def test_what_starts_elsewhere_in_its_block_is_copied(folder):
    source = make_source(folder / "source")
    check_written(a_plan(source, shift=64), source, folder / "out", Context(clone="require"))


def test_another_file_system(folder, tmp_path):
    source = make_source(tmp_path / "source")
    check_written(a_plan(source), source, folder / "out", Context(clone="auto"))
    with pytest.raises(StorageError, match=r"(?i)can't be shared.*cross-device") as caught:
        execute(a_plan(source), folder / "required", Context(clone="require"))
    assert caught.value.problems[0].where == str(source / "data")


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
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.moved == CopyStats(cloned_bytes=num_bytes)
    assert peak < 4 << 20
    with pytest.raises(StorageError, match="No space left"):
        execute(plan, folder / "copied", Context(clone="never"))


def test_the_ext4_of_most_machines_is_copied(tmp_path):
    source = make_source(tmp_path / "source")
    try:
        check_written(a_plan(source), source, tmp_path / "required", Context(clone="require"))
    except StorageError:
        check_written(a_plan(source), source, tmp_path / "out", Context(clone="auto"))
    else:
        pytest.skip("the file system here has reflinks")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_clone_that_fails_half_way_is_continued_by_a_copy(tmp_path, monkeypatch, copied, code):
    monkeypatch.setattr(moving, "MAX_CLONE_BYTES", 204_800)
    original = moving.clone_range

    def clone(*arguments):
        if len(copied) == 2:
            raise OSError(code, os.strerror(code))
        original(*arguments)

    monkeypatch.setattr(moving, "clone_range", clone)
    source = make_source(tmp_path / "source")
    check_written(a_plan(source), source, tmp_path / "out", Context(clone="auto"), cloned_bytes=2 * 204_800)
    copied.clear()
    with pytest.raises(StorageError, match=os.strerror(code)):
        execute(a_plan(source), tmp_path / "required", Context(clone="require"))


def test_an_interrupted_clone_is_resumed_at_a_mark(tmp_path, monkeypatch, copied):
    monkeypatch.setattr(runner, "MARK_BYTES", 250_000)
    monkeypatch.setattr(moving, "MAX_CLONE_BYTES", 409_600)
    source, marks = make_source(tmp_path / "source"), []
    plan = a_plan(source)
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
    context = Context(kept={"out": tuple(marks)}, clone="auto")
    rest = (900_100 // 4096 - -(-300_100 // 4096)) * 4096
    check_written(plan, source, tmp_path / "out", context, kept_bytes=300_100, cloned_bytes=rest)


def test_a_source_that_is_too_short(tmp_path, copied):
    source = make_source(tmp_path / "source")
    os.truncate(source / "data", 500_000)
    with pytest.raises(SourceError, match="ends before byte"):
        execute(a_plan(source), tmp_path / "out", Context(clone="auto"))


def a_run(root: Path) -> Path:
    for step in (100, 200):
        make(root, step, shape=SHAPES["tiny"])
    recipe = "merge_method: passthrough\nbase_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: odd}\n"
    (root / "recipe.yaml").write_text(recipe)
    return root


def test_a_merge_on_a_file_system_with_reflinks(folder, small_limits):
    run = a_run(folder)
    done = run_here("merge", "recipe.yaml", "out", cwd=run)
    assert done.returncode == 0 and "cloned " in done.stderr, done
    assert run_here("merge", "recipe.yaml", "copied", "--clone", "never", cwd=run).returncode == 0
    for path in sorted((run / "out").rglob("*.*")):
        if path.is_file() and path.name not in ("llmtailor.json", "README.md"):
            assert path.read_bytes() == (run / "copied" / path.relative_to(run / "out")).read_bytes()
    assert run_here("verify", "out", "--deep", cwd=run).returncode == 0


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
        composition = plan_merge(Recipe(name, "", root, (), None, None), tmp_path / name, Options(world_size=4))
        shareable = composition.plan.shareable_bytes  # pieces are made when they are asked for
        outs[name] = (tmp_path / name, composition.plan, write(composition), shareable)
    (padded, plan, moved, shareable), (plain, plain_plan, _, less) = outs.values()
    assert moved.cloned_bytes == shareable > less
    assert plan.num_bytes > plain_plan.num_bytes
    files = [file.path for file in plan.files if file.path.endswith(".pt")]
    assert files
    for path in files:
        assert zipfile.ZipFile(padded / path).testzip() is None
        mine, theirs = load(padded / path), load(plain / path)
        assert flat(mine).keys() == flat(theirs).keys()
        assert all(same(value, flat(theirs)[key]) for key, value in flat(mine).items())
    from safetensors.torch import load_file

    weights, others = load_file(padded / "model.safetensors"), load_file(plain / "model.safetensors")
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def flat(tree: object, at: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        return {path: leaf for key, value in tree.items() for path, leaf in flat(value, f"{at}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {path: leaf for key, value in enumerate(tree) for path, leaf in flat(value, f"{at}/{key}").items()}
    return {at: tree}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (vars(one) if hasattr(one, "__dict__") else one) == (
        vars(other) if hasattr(other, "__dict__") else other
    )


@pytest.mark.parametrize("sizes", [(3000,), (5000, 11, 70_001), (1, 2048, 4096, 9)])
def test_torch_finds_the_storages_of_a_padded_file(tmp_path, small_limits, sizes):
    """Also where it does not read the places but would compute them: under a fake mode, and for the meta device."""
    from llmtailor.containers.torch_file import lay_out_torch_file, read_torch_file

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
