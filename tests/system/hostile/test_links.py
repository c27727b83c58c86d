"""Links with the names that llmtailor gives to its own folders and files: nothing behind them is changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from helpers.commands import call
from llmtailor.background.report import abandon_after
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import TargetError
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.save_log import LOG
from llmtailor.storage.local import append_line
from thin.scene import SHORT, make_run, save_partial

ALL = ["layer 0", "layer 1", "norm", "embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two full checkpoints, and partial ones of all parts at their steps."""
    run, ledger = make_run(tmp_path_factory.mktemp("links") / "run", (100, 200), shape=SHORT), Ledger("saver")
    for step in (100, 200):
        ledger = save_partial(run, run / f"checkpoint-{step}", ALL, ledger)
    return run


@pytest.fixture
def run(tmp_path, original):
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def elsewhere(tmp_path):
    """A folder of the user's, with the names that a staging folder has."""
    for name in ("out", "old"):
        (tmp_path / "elsewhere" / name / "deep").mkdir(parents=True)
        (tmp_path / "elsewhere" / name / "thesis.txt").write_text("precious")
        (tmp_path / "elsewhere" / name / "deep" / "x").write_text("precious")
    return tmp_path / "elsewhere"


def below(folder: Path) -> dict[str, bytes | None]:
    return {str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None for one in folder.rglob("*")}


@pytest.mark.parametrize("name", ["", "out", "old", "journal", "owner", "journal-1"])
@pytest.mark.parametrize("command", ["merge", "convert", "dry run"])
def test_no_link_in_a_staging_folder_is_followed(run, elsewhere, name, command):
    words = {
        "merge": ("merge", "--run", run, "--at", 200),
        "dry run": ("merge", "--run", run, "--at", 200, "--dry-run"),
        "convert": ("convert", run / "checkpoint-200", "--num-gpu", 3, run / "checkpoint-200-new"),
    }[command]
    if command != "convert":
        shutil.rmtree(run / "checkpoint-200")
    out = run / ("checkpoint-200-new" if command == "convert" else "checkpoint-200")
    staging = run / f".{out.name}.llmtailor-staging"
    before = below(elsewhere)
    target = elsewhere / (name if name in ("out", "old") else "out/thesis.txt") if name else elsewhere
    link = staging / name if name else staging
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    told = call(*words, code=6).stderr
    assert f"{link}: llmtailor needs this name for a " in told
    assert "it is a symbolic link" in told
    assert below(elsewhere) == before and link.is_symlink() and not out.exists()


@pytest.mark.parametrize("name", [".checkpoint-100.llmtailor-thinning", ".checkpoint-100.llmtailor-thinned"])
def test_thin_removes_no_link_and_writes_through_none(run, elsewhere, name):
    before = below(elsewhere)
    shutil.rmtree(run / "partial")
    (run / name).symlink_to(elsewhere)
    words = ("--keep-optimizer-last", 1) if "thinning" in name else ("--strategy", "full")
    call("thin", run, *words, "--yes", code=6)
    assert below(elsewhere) == before and (run / name).is_symlink()
    assert (run / "checkpoint-100").is_dir()


@pytest.mark.parametrize("is_complete", [True, False])
def test_gc_and_the_saver_leave_a_linked_save_alone(run, tmp_path, is_complete):
    link, there = run / "partial" / "step-00000100", tmp_path / "disk"
    link.rename(there)
    if not is_complete:
        (there / "manifest.json").unlink()
    link.symlink_to(there)
    before = below(there)
    told = call("gc", run, "--keep", 1, "--yes")
    assert "it is a symbolic link, so it stays" in told.stderr and "removed" not in told.stdout + told.stderr
    assert "0 B freed" in told.stdout
    folder = RunFolder(run)
    assert folder.sweep() == []
    if is_complete:
        call("verify", link)
    folder.begin(100)
    assert below(there) == before and (run / "partial" / "step-00000100.abandoned").is_symlink()
    folder.remove_abandoned()
    assert below(there) == before


def test_a_removal_that_fails_is_not_reported_as_done(run, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted", "rank-00000-of-00002.safetensors")

    monkeypatch.setattr(os, "rmdir", refuse)
    told = call("gc", run, "--keep", 1, "--yes", code=8)
    assert "can't remove it: Operation not permitted" in told.stderr and "removed step" not in told.stderr
    assert RunFolder(run).sweep() == []


@pytest.mark.parametrize("name", ["saves.jsonl", "saves.abandoned.jsonl"])
def test_the_log_of_saves_is_not_written_behind_a_link(tmp_path, name):
    text = b'{"step": 5}\n{"step": 9}\n'
    (tmp_path / LOG).write_bytes(text)
    (tmp_path / "precious").write_bytes(text)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("precious")
    with pytest.raises(TargetError, match="symbolic link"):
        append_line(tmp_path / name, b"{}")
    abandon_after(tmp_path, 7)
    assert (tmp_path / "precious").read_bytes() == text and (tmp_path / name).is_symlink()
