"""Pipes, devices and huge sparse files with the names of llmtailor's own files: nothing hangs or fills memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from helpers.checkpoints import make
from helpers.commands import call
from llmtailor.attestation.check import open_index
from llmtailor.background.report import abandon_after
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import SourceError
from llmtailor.frameworks.files import tag_in
from llmtailor.runs.save_log import LOG, read_log
from llmtailor.storage.local import Lock, LockHeld, OpenFile
from thin.scene import SHORT, make_run, save_partial

pytestmark = pytest.mark.timeout(60)  # a pipe that is opened carelessly blocks for ever
GROWTH = 256 << 20
"""Bytes that the memory of this process may grow by"""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.fixture(params=[pipe, zeros, sparse], ids=lambda make: make.__name__)
def special(request):
    """Puts something else than an ordinary file at a path."""

    def put(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        request.param(path)
        return path

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    yield put
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - peak < GROWTH


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("special") / "run", (100,), shape=SHORT)
    save_partial(
        run, run / "checkpoint-100", ["layer 0", "layer 1", "norm", "embed_tokens", "lm_head"], Ledger("saver")
    )
    shutil.rmtree(run / "checkpoint-100")
    return run


@pytest.fixture
def run(tmp_path, original):
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.mark.parametrize("name", ["saves.jsonl", "saves.abandoned.jsonl"])
def test_a_report_says_why_it_lacks_the_log(run, special, name):
    special(run / "partial" / name)
    call("report", run, "-o", run / "page.html")
    page = (run / "page.html").read_text()
    assert f"partial/{name}" in page and ("expected a file" in page or "should never need more" in page)


@pytest.mark.parametrize("name", ["journal", "journal-1"])
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_journal_that_no_merge_has_written_is_refused(run, special, name, words):
    path = special(run / ".checkpoint-100.llmtailor-staging" / name)
    told = call("merge", "--run", run, *words, code=6).stderr
    assert str(path) in told and "move it elsewhere" in told
    assert os.path.lexists(path) and not (run / "checkpoint-100").exists()


def test_a_log_that_is_no_file_stays_as_it_is(tmp_path, special):
    path = special(tmp_path / LOG)
    before = path.lstat()
    abandon_after(tmp_path, 5)
    assert path.lstat() == before
    with pytest.raises(SourceError):
        read_log(path)


def test_a_deeply_nested_line_is_dropped(tmp_path):
    (tmp_path / LOG).write_text('{"step": 1}\n' + "[" * 100_000)
    abandon_after(tmp_path, 5)
    assert (tmp_path / LOG).read_text() == '{"step": 1}\n'


def test_the_tag_of_a_checkpoint_is_read_with_a_limit(tmp_path, special):
    checkpoint = make(tmp_path, 100, shape=SHORT)
    special(checkpoint / "latest")
    assert tag_in(checkpoint / "latest") == ""
    with pytest.raises(SourceError, match="latest"):
        open_index(checkpoint)


def test_owners_are_read_with_a_limit(tmp_path, special, monkeypatch):
    owner = special(tmp_path / "owner")
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(38, "no locks here")))
    with pytest.raises(LockHeld):
        Lock(tmp_path / "lock", owner).acquire()


def test_only_regular_files_are_open_to_the_engine(tmp_path):
    pipe(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a"):
            OpenFile(path)
