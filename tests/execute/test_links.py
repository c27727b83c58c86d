"""With --link, whole files of tensors that a source has unchanged are hard links to it; nothing is written through."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128

from helpers.checkpoints import make
from helpers.commands import run_here
from helpers.render import render
from llmtailor.checkpoint.layout import Bytes, Copy, Crc, FileLayout, Plan, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.compose import write as writing
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.engine.copy import Context, Moved, execute
from llmtailor.engine.journal import Mark
from llmtailor.engine.space import occupied_bytes
from llmtailor.errors import Interrupted, SourceError, StorageError
from llmtailor.model.states import MASTER, State
from llmtailor.recipe import Recipe
from llmtailor.storage.listing import FileFact

TENSOR = np.random.default_rng(0).bytes(700_000)
DATA = b"head" + bytes(12) + TENSOR + zlib.crc32(TENSOR).to_bytes(4, "little") + b"end"
PIECES = (
    Bytes(b"head", "header"),
    Zeros(12, "padding"),
    Copy(Extent("data", 16, 300_016), 0, State("v", MASTER)),
    Copy(Extent("data", 300_016, 700_016), 0, State("w", MASTER)),
    Crc(16, 700_016),
    Bytes(b"end", "end"),
)


def a_plan(root: Path, pieces=PIECES, data: bytes = DATA) -> Plan:
    """A plan of one file, and its source."""
    (root / "source").mkdir(parents=True)
    (root / "source" / "data").write_bytes(data)
    return Plan((str(root / "source"),), (FileLayout("out", tuple(pieces)),))


def carry_out(plan: Plan, root: Path, **settings) -> Moved:
    """Carry out the plan; check bytes, checksums, progress and the mark. Return what was moved."""
    source, seen, marks = root / "source", [], {}
    before = (source / "data").read_bytes()
    wanted = render(plan.files[0], source)
    context = Context(on_progress=seen.append, record=marks.__setitem__, digest=True, **{"link": True, **settings})
    (result,) = execute(plan, root / "new", context)
    assert (root / "new/out").read_bytes() == wanted
    assert (source / "data").read_bytes() == before
    assert (result.crc, result.digest) == (zlib.crc32(wanted), xxh3_128(wanted).hexdigest())
    copies = [piece for piece in plan.files[0].pieces if isinstance(piece, Copy) and piece.state]
    crcs = [zlib.crc32(before[piece.extent.start : piece.extent.stop]) for piece in copies]
    assert [run.crc for run in result.runs()] == crcs
    assert sum(seen) == len(wanted) and marks == {"out": Mark(len(wanted), result.crc)}
    return result.moved


def is_link(root: Path) -> bool:
    return (root / "new/out").samefile(root / "source/data")


def test_an_unchanged_file_is_linked(tmp_path):
    moved = carry_out(a_plan(tmp_path), tmp_path)
    assert is_link(tmp_path)
    assert moved == Moved(linked_bytes=len(DATA), linked_files=1)


@pytest.mark.parametrize(
    ("pieces", "data"),
    [
        pytest.param((Bytes(b"HEAD", "header"), *PIECES[1:]), DATA, id="another header"),
        pytest.param(PIECES, DATA[:5] + b"x" + DATA[6:], id="no zeros"),
        pytest.param(PIECES, DATA[:-7] + b"oops" + DATA[-3:], id="a wrong checksum"),
        pytest.param(PIECES, DATA + b"more", id="longer"),
        pytest.param(PIECES[:-1], DATA, id="a beginning"),
        pytest.param((*PIECES[:2], PIECES[3], PIECES[2], *PIECES[4:]), DATA, id="another order"),
        pytest.param((*PIECES[:2], Copy(Extent("data", 16, 700_016), 0), *PIECES[4:]), DATA, id="no tensors"),
    ],
)
def test_what_differs_in_anything_is_copied(tmp_path, pieces, data):
    plan = a_plan(tmp_path, pieces, data)
    moved = carry_out(plan, tmp_path)
    assert not is_link(tmp_path)
    assert moved == Moved(copied_bytes=plan.num_bytes)


def test_nothing_is_linked_unless_asked_for(tmp_path):
    carry_out(a_plan(tmp_path), tmp_path, link=False)
    assert not is_link(tmp_path)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert carry_out(a_plan(tmp_path), tmp_path) == Moved(copied_bytes=len(DATA), unlinkable_files=1)


def test_another_error_ends_the_merge(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StorageError, match="can't write"):
        carry_out(a_plan(tmp_path), tmp_path)


def test_a_symbolic_link_is_followed(tmp_path):
    """As in the cache of the Hugging Face hub."""
    plan = a_plan(tmp_path)
    (tmp_path / "source/data").rename(tmp_path / "blob")
    (tmp_path / "source/data").symlink_to("../blob")
    carry_out(plan, tmp_path)
    assert (tmp_path / "new/out").samefile(tmp_path / "blob") and not (tmp_path / "new/out").is_symlink()


def test_another_file_in_its_place_is_noticed(tmp_path, monkeypatch):
    plan, link = a_plan(tmp_path), os.link

    def replaced(source, target):
        (tmp_path / "other").write_bytes(DATA)
        (tmp_path / "other").rename(tmp_path / "source/data")
        link(source, target)

    monkeypatch.setattr(os, "link", replaced)
    with pytest.raises(SourceError, match="changed while it was read"):
        carry_out(plan, tmp_path)
    assert not (tmp_path / "new/out").exists()


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("crc", [zlib.crc32(DATA), 1])
def test_a_link_of_an_earlier_run_is_never_written_to(tmp_path, link, crc):
    """Whether its mark is true, or what it links to is damaged: a new attempt begins with a new file."""
    plan = a_plan(tmp_path)
    (tmp_path / "new").mkdir()
    os.link(tmp_path / "source/data", tmp_path / "new/out")
    carry_out(plan, tmp_path, link=link, kept={"out": (Mark(len(DATA), crc),)})
    assert is_link(tmp_path) == link


# --- commands --------------------------------------------------------------------------------------------------------


def test_a_conversion_links_the_weights_alone(tmp_path):
    source = make(tmp_path, 200)
    plain = run_here("convert", source, tmp_path / "plain", "--num-gpu", 3, "--json")
    linked = run_here("convert", source, tmp_path / "linked", "--num-gpu", 3, "--json", "--link", "--checksum")
    assert plain.returncode == linked.returncode == 0
    weights = tmp_path / "linked/model.safetensors"
    files = [path for path in (tmp_path / "linked").rglob("*") if path.is_file()]
    assert [path for path in files if path.stat().st_nlink > 1] == [weights]
    for path in files:
        if path.name not in ("llmtailor.json", "README.md"):
            assert path.read_bytes() == (tmp_path / "plain" / path.relative_to(tmp_path / "linked")).read_bytes()
    told = json.loads(linked.stdout)
    assert told["moved"]["linked_bytes"] == weights.stat().st_size and told["moved"]["linked_files"] == 1
    assert "files linked: 1 (" in linked.stderr and "linked" not in plain.stderr
    assert run_here("verify", tmp_path / "linked", "--deep").returncode == 0
    weights.write_bytes(b"".join((weights.read_bytes()[:-1], b"\x7f")))  # through the link
    assert (source / "model.safetensors").read_bytes()[-1:] == b"\x7f"
    assert run_here("verify", tmp_path / "linked", "--deep").returncode != 0


def test_a_merge_links_the_files_that_are_one_sources(tmp_path):
    for step in (100, 200):
        make(tmp_path, step, shard_bytes=2000)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [0]}\n")
    found = run_here("merge", recipe, tmp_path / "out", "--link")
    assert found.returncode == 0, found.stderr
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    linked = [path for path in shards if path.stat().st_nlink > 1]
    assert 0 < len(linked) < len(shards)
    assert all(path.samefile(tmp_path / "checkpoint-200" / path.name) for path in linked)
    assert run_here("verify", tmp_path / "out", "--deep").returncode == 0


def the_merge(root: Path, **options):
    return plan_merge(Recipe("", "", make(root, 200), (), None, None), root / "out", Options(world_size=3, **options))


def test_a_link_alone_is_no_reason_to_read_the_source_again(tmp_path, monkeypatch):
    """Its ctime changes, but by the link; another change next to it is noticed."""
    doubted = []
    monkeypatch.setattr(writing, "read_again", lambda plan, results, files, *rest: doubted.append(set(files)) or {})
    write(the_merge(tmp_path / "a", link=True))
    merge = the_merge(tmp_path / "b", link=True)
    source = tmp_path / "b/checkpoint-200/model.safetensors"
    execute_really = writing.execute

    def and_a_backup(*arguments):
        results = execute_really(*arguments)
        os.link(source, tmp_path / "backup")
        return results

    monkeypatch.setattr(writing, "execute", and_a_backup)
    write(merge)
    assert doubted == [set(), {(0, "model.safetensors")}]


def test_a_merge_goes_on_with_or_without_links(tmp_path, monkeypatch):
    """An interrupted merge is continued whatever is asked for now; links count for no space."""
    wanted = {}
    for first, then in ((True, False), (False, True), (True, True)):
        root = tmp_path / f"{first}-{then}"
        merge = the_merge(root, link=first)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_check_sources", lambda *_: (_ for _ in ()).throw(Interrupted.at("", "now", "")))
            with pytest.raises(Interrupted):
                write(merge)
        there = [path for path in (root / ".out.llmtailor-staging").rglob("*") if path.is_file()]
        weights = (root / "checkpoint-200/model.safetensors").stat().st_blocks * 512
        assert occupied_bytes(root / "out") == sum(path.stat().st_blocks * 512 for path in there) - weights * first
        said = []
        merge = plan_merge(merge.recipe, merge.out, Options(world_size=3, link=then))
        moved = write(merge, notify=said.append)
        assert said[0].startswith("resuming the merge")
        # a file that was copied stays one
        assert moved.linked_files == (then and first) and moved.kept_bytes > 0
        found = {path.name: path.read_bytes() for path in merge.out.glob("**/*.*t*") if path.suffix != ".json"}
        assert found == (wanted := wanted or found) and len(found) > 5


def test_an_object_store_has_no_links(tmp_path):
    found = run_here("convert", make(tmp_path, 200), f"memory://{tmp_path}/out", "--link")
    assert found.returncode == 2 and "--link: an object store has no hard links" in found.stderr


def test_facts_of_a_source_are_compared_before_it_is_linked(tmp_path):
    plan = a_plan(tmp_path)
    facts = ({"data": FileFact(len(DATA), 1, 1, 1)},)
    with pytest.raises(SourceError, match="changed"):
        carry_out(plan, tmp_path, facts=facts)
