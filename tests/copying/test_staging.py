"""The output is absent, or complete: staging, locking, replacing."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from llmtailor.copying import staging as module
from llmtailor.copying.journal import Identity, Mark
from llmtailor.copying.staging import Staging, check_space, check_target, free_bytes, occupied_bytes, peek
from llmtailor.errors import Interrupted, SourceError, StorageError, TargetError, VerificationError
from llmtailor.storage import local
from llmtailor.storage.local import FileFact, Lock, LockHeld, list_entries

IDENTITY = Identity("1", "plan", {"/source": FileFact(1, 2, 3, 4)}, "request", "recipe.yaml", "today", 10)


def begun(staging: Staging, name: str = "file") -> Staging:
    """Begin a merge and write a file."""
    staging.reset(IDENTITY)
    (staging.path / name).write_text("x")
    return staging


def refuse_with(code: int):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    return refuse


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


RESUMABLE = [Interrupted([]), StorageError([]), TargetError([]), MemoryError()]
REFUSALS = [SourceError([]), VerificationError([])]


@pytest.mark.parametrize("error", [*RESUMABLE, *REFUSALS])
@pytest.mark.parametrize("is_durable", [False, True])
def test_what_can_be_resumed_is_kept_unless_it_is_refused(tmp_path, error, is_durable):
    with pytest.raises(type(error)), Staging(tmp_path / "out") as staging:
        begun(staging)
        if is_durable:
            staging.journal.add("file", Mark(1, 2))
        raise error
    is_kept = is_durable and error in RESUMABLE
    assert names(tmp_path) == [".out.llmtailor-staging"] * is_kept
    assert (peek(tmp_path / "out") is not None) == is_kept


def test_the_next_one_finds_what_was_kept(tmp_path):
    with pytest.raises(Interrupted), Staging(tmp_path / "out") as staging:
        begun(staging).journal.add("file", Mark(1, 2))
        (staging.path / "sub").mkdir()
        (staging.path / "sub" / "unknown").write_text("x")
        raise Interrupted([])
    assert occupied_bytes(tmp_path / "out") > 0
    with Staging(tmp_path / "out") as staging:
        assert staging.unfinished.identity == IDENTITY
        assert staging.unfinished.marks == {"file": (Mark(1, 2),)}
        assert staging.kept_bytes == 1
        staging.resume()
        assert names(staging.path) == ["file"]
        staging.publish()
        assert staging.kept_bytes == 0
    assert names(tmp_path) == ["out"]
    assert occupied_bytes(tmp_path / "out") == 0


def test_beginning_anew_forgets_what_was_kept(tmp_path):
    with pytest.raises(Interrupted), Staging(tmp_path / "out") as staging:
        begun(staging, "old").journal.add("old", Mark(1, 2))
        raise Interrupted([])
    with Staging(tmp_path / "out") as staging:
        staging.reset(IDENTITY)
        assert names(staging.path) == []
        assert staging.kept_bytes == 0
        assert peek(tmp_path / "out").marks == {}


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks(tmp_path, monkeypatch, code):
    """A file takes the place of the lock. One that is left is respected, since its holder may live on another node."""
    monkeypatch.setattr("fcntl.flock", refuse_with(code))
    owner = tmp_path / ".out.llmtailor-staging" / "owner"
    with Staging(tmp_path / "out") as staging:
        begun(staging)
        assert f"process {os.getpid()} on" in owner.read_text()
        with pytest.raises(TargetError, match=f"process {os.getpid()} on .*no locks") as caught, Staging(staging.out):
            pass
        assert str(owner) in caught.value.problems[0].fix
        assert owner.exists()
        staging.publish()
    assert names(tmp_path) == ["out"]

    owner.parent.mkdir()
    owner.touch()  # its holder was killed before it could even write its name
    with pytest.raises(TargetError, match="unknown process"), Staging(tmp_path / "out", {}):
        pass
    owner.unlink()
    with Staging(tmp_path / "out", list_entries(tmp_path / "out")) as staging:
        begun(staging)
        staging.publish()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_merge_that_ends_while_another_one_begins(tmp_path, monkeypatch, has_locks):
    """The second one opens the journal, the first one removes it, and the second one locks a file that nobody sees."""
    real, first = fcntl.flock, Staging(tmp_path / "first")

    def flock(*arguments):
        if first is not None:
            end_first()
        if not has_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(*arguments)

    def end_first():
        nonlocal first
        ended, first = first, None
        assert (ended.folder / "journal").exists()
        ended.__exit__(None, None, None)

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    first.__enter__()
    monkeypatch.setattr("fcntl.flock", flock)
    with Staging(tmp_path / "first") as staging:
        begun(staging)
        staging.publish()
    assert names(tmp_path) == ["first"]


def test_a_lock_that_fails_otherwise_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuse_with(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"), Staging(tmp_path / "out"):
        pass


NEWS = {
    "a file": lambda out: (out / "notes.md").write_text("mine"),
    "a folder": lambda out: (out / "eval").mkdir(),
    "a link": lambda out: (out / "link").symlink_to("/"),
    "a file in a folder": lambda out: (out / "old" / "notes.md").write_text("mine"),
    "a file changed": lambda out: (out / "old" / "old").write_text("edited"),
}


@pytest.mark.parametrize("news", NEWS)
@pytest.mark.parametrize("moment", ["before it begins", "before the exchange", "after the last look"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_comes_into_the_old_output_meanwhile_is_not_lost(tmp_path, monkeypatch, news, moment, can_exchange):
    out = tmp_path / "out"
    (out / "old").mkdir(parents=True)
    (out / "old" / "old").write_text("old")
    replaces = {"old/": None, "old/old": FileFact.of((out / "old" / "old").stat())}
    if not can_exchange:
        monkeypatch.setattr(local, "_renameat2", lambda *_: False)
    really = module.replace_folder

    def replace_folder(*folders):
        if not calls:
            NEWS[news](out)
        calls.append(folders)
        really(*folders)

    calls = []
    if moment == "before it begins":
        NEWS[news](out)
    with pytest.raises(TargetError, match="in the meantime") as told, Staging(out, replaces) as staging:
        begun(staging, "new").journal.add("new", Mark(1, 1))
        if moment == "before the exchange":
            NEWS[news](out)
        else:
            monkeypatch.setattr(module, "replace_folder", replace_folder)
        staging.publish()
    assert str(out) in str(told.value)
    expected = tmp_path / "expected"
    (expected / "old").mkdir(parents=True)
    (expected / "old" / "old").write_text("old")
    NEWS[news](expected)
    assert list_names(out) == list_names(expected)
    assert (out / "old" / "old").read_text() == (expected / "old" / "old").read_text()
    assert (peek(out) is not None) == (moment != "before it begins"), "hours of work need not be lost"


def list_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(TargetError, match="meantime"), Staging(out) as staging:
        begun(staging).journal.add("file", Mark(1, 2))
        out.mkdir()  # even an empty one, which a plain rename would replace
        staging.publish()
    assert names(out) == []
    assert peek(out) is not None, "hours of work need not be lost"


@pytest.mark.parametrize("replace", [False, True])
def test_file_systems_without_renameat2(tmp_path, monkeypatch, replace):
    class NoLibc:
        def __init__(self, *_, **__):
            raise OSError

    monkeypatch.setattr(local.ctypes, "CDLL", NoLibc)
    out = tmp_path / "out"
    if replace:
        out.mkdir()
        (out / "old").write_text("old")
    with Staging(out, list_entries(out) if replace else None) as staging:
        begun(staging, "new")
        staging.publish()
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]
    if not replace:
        with pytest.raises(TargetError, match="meantime"), Staging(tmp_path / "other") as staging:
            begun(staging)
            (tmp_path / "other").mkdir()
            staging.publish()


def test_an_output_that_was_put_aside_comes_back(tmp_path):
    """Killed between the two renames that replace a folder where the file system can't exchange two."""
    out = tmp_path / "out"
    aside = tmp_path / ".out.llmtailor-staging" / "old"
    aside.mkdir(parents=True)
    (aside / "mine").write_text("old")
    with pytest.raises(TargetError, match="already exists"), Staging(out):
        pass
    assert names(out) == ["mine"]
    assert names(tmp_path) == ["out"]


def test_an_output_that_was_put_aside_stays_if_it_cannot_come_back(tmp_path, monkeypatch):
    aside = tmp_path / ".out.llmtailor-staging" / "old"
    aside.mkdir(parents=True)
    (aside / "mine").write_text("old")
    monkeypatch.setattr(module.Path, "rename", refuse_with(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"), Staging(tmp_path / "out"):
        pass
    assert (aside / "mine").read_text() == "old"


def test_replacing_takes_back_the_first_of_two_renames_if_the_second_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_renameat2", lambda *_: False)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("old")
    with pytest.raises(FileNotFoundError):
        local.replace_folder(tmp_path / "missing", tmp_path / "target", tmp_path / "aside")
    assert names(tmp_path / "target") == ["mine"]


def test_the_target_may_not_be_or_hold_or_lie_in_a_source(tmp_path):
    source = tmp_path / "run" / "checkpoint-1"
    source.mkdir(parents=True)
    for out, told in [(source, "the output is .*source"), (source.parent, "contains"), (source / "x", "lies in")]:
        with pytest.raises(TargetError, match=told):
            check_target(out, [source], replace=True)
    check_target(source.parent / "checkpoint-2", [source], replace=False)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(TargetError, match="which is a source"):
        check_target(link, [source], replace=True)


def test_an_existing_target_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "out").mkdir()
    with pytest.raises(TargetError, match="--force"):
        check_target(tmp_path / "out", [], replace=False)
    check_target(tmp_path / "out", [], replace=True)
    for replace in (False, True):
        with pytest.raises(TargetError, match="not a folder"):
            check_target(tmp_path / "file", [], replace=replace)


def test_space_is_checked_where_the_output_will_be(tmp_path, monkeypatch):
    out = tmp_path / "not" / "there"
    assert 0 < free_bytes(out) <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    monkeypatch.setattr(module, "free_bytes", lambda _: 1000)
    check_space(out, 1000)
    with pytest.raises(StorageError, match="1,001 bytes are needed, but 1,000 are free") as caught:
        check_space(out, 1001)
    assert caught.value.exit_code == 8


def test_a_lock_belongs_to_the_process_and_not_to_children_that_outlive_it(tmp_path):
    """As the workers of a data loader do when a training is killed."""
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire()
    (is_up, tell_up), (is_over, tell_over) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(tell_over)
        first.release()  # what it does not have it can't give back
        os.write(tell_up, b"x")
        os.read(is_over, 1)
        os._exit(first.fd != -1)
    os.read(is_up, 1)
    with pytest.raises(LockHeld):
        second.acquire()
    first.release()
    second.acquire()
    with pytest.raises(LockHeld):
        first.acquire()
    os.close(tell_over)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_was_taken_twice_is_held_until_it_was_given_back_twice(tmp_path):
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire()
    first.acquire()
    first.release()
    with pytest.raises(LockHeld):
        second.acquire()
    first.release()
    first.release()
    second.acquire()


def test_without_locks_and_without_a_name_for_the_owner_nobody_is_kept_out(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuse_with(errno.ENOLCK))
    for _ in range(2):
        Lock(tmp_path / "lock").acquire()
    assert names(tmp_path) == ["lock"]
