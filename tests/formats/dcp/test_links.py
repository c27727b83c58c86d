"""Composites that copy no states: by ``--reference`` with hard links, and by the paths of others in ``.metadata``."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from helpers.cases import mostly_long
from helpers.commands import call
from helpers.composing import convert, merge, recipe
from helpers.dcp import RUNS, assert_loads_alike, loaded
from helpers.states import assert_holds
from llmtailor.checkpoint.layout import Plan
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.containers.dcp import METADATA, lay_out_metadata, read_metadata
from llmtailor.copying.copy import execute
from llmtailor.errors import Interrupted, MismatchError, SourceError, StorageError, TargetError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint

SMALL = 700_000
"""More than the steps and options of these models take, and less than their states"""


@pytest.fixture
def sources(runs, tmp_path):
    """Copies of a run's checkpoints of steps 4 and 2, on the file system of the output"""

    def copy(name: str) -> tuple[Path, Path]:
        of = [runs.checkpoint(name, step) for step in (4, 2)]
        return tuple(shutil.copytree(one, tmp_path / "run" / one.name) for one in of)

    return copy


def is_linked(path: Path) -> bool:
    return path.suffix == ".distcp" and not path.name.endswith("_0.distcp")


@pytest.mark.parametrize("name", mostly_long(RUNS, "trainer", "titan"))
def test_it_equals_a_copy_and_needs_no_source(sources, tmp_path, name):
    newer, older = sources(name)
    taken = {"odd": older, "embed_tokens": older}
    copied, linked = tmp_path / "copied", tmp_path / "linked"
    merge(newer, copied, taken)
    plan = plan_merge(recipe(newer, taken), linked, Options(reference=True))
    moved = write(plan)
    files = [path for path in linked.rglob("*") if path.is_file()]
    assert moved.linked_bytes == sum(path.stat().st_size for path in files if is_linked(path))
    assert sum(path.stat().st_size for path in files if path.suffix == ".distcp" and not is_linked(path)) < SMALL
    assert all((path.stat().st_nlink > 1) == is_linked(path) for path in files)
    assert_loads_alike(linked, copied)
    for path in copied.rglob(METADATA):
        entries, values = read_metadata(path.parent, METADATA, "x"), loaded(path.parent)
        steps = [key for key in entries if key.endswith(".step")]
        distinct = {float(values[key]) for key in steps}
        stored = {entries[key].chunks[0].blob for key in steps}
        assert len(distinct) <= len(stored) < max(len(steps), 1), "numbers that are alike are stored once"
    shutil.rmtree(newer.parent)
    assert_loads_alike(linked, copied)
    verdict = verify_checkpoint(linked, deep=True)
    assert verdict.level == RESUMABLE
    assert not [one for one in verdict.findings if "does not mention" in one.what]


def test_a_composite_is_a_source_like_any_other(sources, tmp_path, runs):
    """Also of another one, after all that it was made from is gone."""
    newer, older = sources("trainer")
    first, second, whole = tmp_path / "first", tmp_path / "second", tmp_path / "whole"
    merge(newer, first, {"odd": older}, reference=True)
    merge(first, second, {"embed_tokens": older}, reference=True, checksum=True)
    shutil.rmtree(newer.parent)
    shutil.rmtree(first)
    convert(second, whole, world_size=3)
    live = runs["trainer"].held
    wanted = {
        kind: {
            param: live[2 if ".layers.1." in param or "embed_tokens" in param else 4][kind][param]
            for param in live[4][kind]
        }
        for kind in ("weights", "states")
    }
    for out in (second, whole):
        assert_holds(index_checkpoint(out), {**wanted, "groups": live[4]["groups"]})
    assert all(path.stat().st_nlink == 1 for path in whole.rglob("*") if path.is_file())


def test_it_can_be_replaced(sources, tmp_path):
    newer, older = sources("trainer")
    for source in (older, newer):
        convert(source, tmp_path / "out", reference=True, replace=True)
    assert index_checkpoint(tmp_path / "out").global_step == 4


@pytest.mark.parametrize("to", ["fsdp", "dcp"])
def test_between_the_formats_that_have_such_files(sources, tmp_path, to):
    source, _ = sources("trainer" if to == "dcp" else "loop")
    convert(source, tmp_path / "copied", to=to, world_size=3)
    convert(source, tmp_path / "linked", to=to, world_size=3, reference=True)
    assert_loads_alike(tmp_path / "linked", tmp_path / "copied")
    assert index_checkpoint(tmp_path / "linked").world_size == 3


def test_what_a_source_does_not_hold_as_needed_is_written(sources, tmp_path, runs):
    """From ZeRO's files, and moments that are scaled."""
    newer, older = sources("trainer")
    taken = {"odd": runs.checkpoint("llama", 4), "embed_tokens": older}
    options = {"step": "rebase", "groups": "layer", "to": "fsdp"}
    merge(newer, tmp_path / "copied", taken, **options)
    merge(newer, tmp_path / "linked", taken, reference=True, **options)
    assert_loads_alike(tmp_path / "linked", tmp_path / "copied")
    assert any(map(is_linked, tmp_path.rglob("linked/optimizer_0/*")))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("trainer", {"to": "deepspeed", "stage": 3}, "--clone shares blocks"),
        ("trainer", {"to": "trainer"}, "can't be composed of files of the sources"),
        ("full", {}, "no source has a state in a DCP folder"),
    ],
)
def test_without_such_files_it_is_refused(sources, tmp_path, name, options, told):
    newer, _ = sources(name)
    with pytest.raises(MismatchError, match=told):
        convert(newer, tmp_path / "out", reference=True, **options)


def test_another_file_system_is_refused(sources, tmp_path, monkeypatch):
    newer, _ = sources("trainer")
    monkeypatch.setattr("llmtailor.copying.staging.device_of", lambda path: path.suffix)
    with pytest.raises(TargetError, match="is on another file system"):
        convert(newer, tmp_path / "out", reference=True)


def test_a_refused_link_leaves_nothing(sources, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    newer, _ = sources("trainer")
    monkeypatch.setattr("llmtailor.copying.copy.os.link", refuse)
    with pytest.raises(StorageError, match="can't make a hard link"):
        convert(newer, tmp_path / "out", reference=True)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_merge_is_resumed(sources, tmp_path, monkeypatch):
    newer, older = sources("trainer")
    plan = plan_merge(recipe(newer, {"odd": older}), tmp_path / "out", Options(reference=True))

    def cut_off(plan, staging, context):
        execute(replace(plan, files=plan.files[:-2]), staging, context)
        raise Interrupted.at("merge", "cut off", "rerun")

    monkeypatch.setattr("llmtailor.compose.write.execute", cut_off)
    with pytest.raises(Interrupted):
        write(plan)
    monkeypatch.undo()
    write(plan)
    merge(newer, tmp_path / "copied", {"odd": older})
    assert_loads_alike(tmp_path / "out", tmp_path / "copied")


@pytest.mark.parametrize("saved", ["another model", "a later step"])
def test_a_save_to_a_sources_folder_is_seen(sources, tmp_path, saved):
    """torch opens a data file that is there, and writes into it. No copy hides that, and no composite of the composite;
    a copy made before is independent."""
    newer, older = sources("loop")
    out, copied = tmp_path / "out", tmp_path / "copied"
    merge(newer, out, {"odd": older}, reference=True)
    shutil.copytree(out, copied)
    for path in out.rglob("__*"):
        os.utime(path, (1, 1))  # does not matter
    assert verify_checkpoint(out).level == RESUMABLE
    if saved == "another model":
        dcp.save({"x": torch.ones(5)}, checkpoint_id=newer, no_dist=True)
    else:
        for path in newer.glob("__*"):
            (newer / path.name).write_bytes((older / path.name).read_bytes())  # as large as before
    shutil.copytree(out, tmp_path / "again")
    for damaged in (out, tmp_path / "again"):
        assert not verify_checkpoint(damaged).is_intact
        with pytest.raises(SourceError, match=r"another save has overwritten it|the file has"):
            convert(damaged, tmp_path / "composite", reference=True)
    assert verify_checkpoint(copied, deep=True).level == RESUMABLE


def test_it_is_replaced_by_force(sources, tmp_path):
    """Its files are known, its README.md too."""
    newer, older = sources("loop")
    out = convert(newer, tmp_path / "out", reference=True)
    call("convert", older, out, "--reference", "--force")
    assert_loads_alike(out, older)


def test_the_command_says_what_it_did(sources, tmp_path):
    newer, _ = sources("trainer")
    out = tmp_path / "out"
    done = call("merge", "--run", str(newer.parent), "--strategy", "parity", str(out), "--reference", "--json")
    moved = json.loads(done.stdout)["moved"]
    assert 0 < moved["copied_bytes"] < SMALL < moved["linked_bytes"]
    assert "are hard links to files of" in done.stderr
    kinds = {row["path"]: "linked" in row for row in json.loads((out / "llmtailor.json").read_text())["files"]}
    assert all(linked == is_linked(Path(path)) for path, linked in kinds.items())


@pytest.fixture
def referring(sources):
    """A folder of a ``.metadata`` alone, as stock torch loads it; its even and odd tensors are in two others"""
    newer, older = sources("loop")
    entries = {root: read_metadata(root, METADATA, "x") for root in (newer, older)}
    chosen = {}
    for at, key in enumerate(entries[newer]):
        root = older if at % 2 and entries[newer][key].is_tensor else newer
        entry = entries[root][key]
        chunks = [replace(one, blob=replace(one.blob, path=f"../{root.name}/{one.blob.path}")) for one in entry.chunks]
        chosen[key] = replace(entry, chunks=tuple(chunks))
    out = newer.with_name("referring")
    execute(Plan((), (lay_out_metadata(METADATA, chosen),)), out)
    return out, newer, older


def test_a_folder_that_refers_to_others_is_read(referring, tmp_path):
    out, newer, older = referring
    assert loaded(out)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_intact
    [said] = [one.what for one in verdict.findings if one.code.name == "LINKS_OUTSIDE"]
    assert f"../{newer.name}" in said
    assert f"../{older.name}" in said
    convert(out, tmp_path / "whole")
    convert(out, tmp_path / "linked", reference=True)
    assert_loads_alike(tmp_path / "whole", out)
    shutil.rmtree(older)
    assert_loads_alike(tmp_path / "linked", tmp_path / "whole")
    with pytest.raises(SourceError, match=rf"\.\./{older.name}/"):
        index_checkpoint(out)


@pytest.mark.parametrize(
    "path", ["/etc/__0_0.distcp", "../../../x/__0_0.distcp", "../x/../__0_0.distcp", "a/__0_0.distcp"]
)
def test_a_path_that_torch_never_writes_is_refused(referring, path):
    out, newer, _ = referring
    entries = read_metadata(newer, METADATA, "x")
    key, entry = next(iter(entries.items()))
    blob = replace(entry.chunks[0].blob, path=path)
    entries[key] = replace(entry, chunks=(replace(entry.chunks[0], blob=blob), *entry.chunks[1:]))
    (out / METADATA).unlink()
    execute(Plan((), (lay_out_metadata(METADATA, entries),)), out)
    with pytest.raises(SourceError, match="not a data file"):
        index_checkpoint(out)
