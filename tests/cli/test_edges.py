"""What surrounds a command: closed streams, no threads, passwords in URLs, numbers that no float holds."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.checkpoints import make
from helpers.commands import call, run_here
from helpers.composing import convert
from llmtailor.errors import RecipeError, StorageError, masked
from llmtailor.recipe.parse import parse_recipe
from llmtailor.storage.remote import RemoteFolder
from thin.scene import SHORT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("edges") / "run", 100, shape=SHORT)


@pytest.mark.parametrize("closed", ["2>&-", pytest.param(">&-", marks=pytest.mark.long), "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(checkpoint, tmp_path, closed):
    """A file that is opened must not get the number of a stream, or it would be written to as one."""
    words = f"{sys.executable} -m llmtailor convert {checkpoint} {tmp_path}/out --num-gpu 1 {closed}"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 0
    call("verify", tmp_path / "out", "--deep")
    words = f"{sys.executable} -m llmtailor verify {tmp_path}/nowhere {closed}"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 4


def test_a_full_stderr_changes_no_exit_code(tmp_path):
    words = f"{sys.executable} -m llmtailor verify {tmp_path}/nowhere 2>/dev/full"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 4


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_system_without_threads_is_no_bug(checkpoint, tmp_path, monkeypatch, started):
    start, count = threading._start_new_thread, iter(range(100))

    def refuse(*arguments):
        if next(count) >= started:
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    told = call("convert", checkpoint, tmp_path / "out", "--num-gpu", 1, code=8).stderr
    assert "the system gives it no further thread" in told and "ulimit" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sftp://user:word@host/run@tag", "sftp://***@host/run@tag"),
        ("sftp://user@host/run", "sftp://***@host/run"),
        ("sftp://user:p@ss@host/run", "sftp://***@host/run"),
        ("s3://KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("s3://KEY:SEC/RET+X@bucket/run", "s3://***@bucket/run"),
        ("S3://KEY:SECRET@bucket", "S3://***@bucket"),
        ("https://host/run?sig=abc&key=def", "https://host/run?***"),
        ('{from: "ftp://a:b@c/d", to: "ftp://e:f@g/h"}', '{from: "ftp://***@c/d", to: "ftp://***@g/h"}'),
        ("abfs://key:secret@account/run", "abfs://***@account/run"),
        *((text, text) for text in ("http://host:8080/run@tag", "s3://bucket/run@tag", "hf://datasets/a/b@main/c")),
        *((text, text) for text in ("abfs://container@account.dfs.core.windows.net/run", "a@b.c", "runs/x?y")),
    ],
)
def test_what_is_masked(text, expected):
    assert masked(text) == expected


def test_no_password_gets_into_text(checkpoint, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    url = "memory://KEYID:SECRET@host/checkpoint-100"
    fsspec.filesystem("memory").put(str(checkpoint), url.removeprefix("memory:/"), recursive=True)
    monkeypatch.setenv("FROM", url)
    written = f'base_model: {url}\nparts:\n  - {{from: "${{FROM}}", select: [odd]}}\n'
    (tmp_path / "recipe.yaml").write_text(written)
    for words in (
        ("-v", "convert", url, tmp_path / "one", "--num-gpu", 1),
        ("merge", tmp_path / "recipe.yaml", tmp_path / "two"),
        ("inspect", url, "--json"),
        ("verify", url),
        ("verify", url, "surplus"),
        ("verify", f"{url}-missing"),
        ("merge", tmp_path / "recipe.yaml", tmp_path / "two"),
    ):
        done = run_here(*words)
        assert "SECRET" not in done.stdout + done.stderr and "KEYID" not in done.stdout + done.stderr
    for path in (path for name in ("one", "two") for path in (tmp_path / name).rglob("*") if path.is_file()):
        assert b"SECRET" not in path.read_bytes() and b"KEYID" not in path.read_bytes(), path
    assert "memory://***@host/checkpoint-100" in (tmp_path / "two" / "llmtailor.json").read_text()


def test_a_store_that_shows_a_part_of_the_url(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    folder = RemoteFolder("memory://KEYIDENT:SECRETKEY@host/run", tmp_path)

    def fail():
        raise PermissionError("bucket KEYIDENT:SECRETKEY@host is not yours, SECRETKEY")

    with pytest.raises(StorageError) as caught:
        folder._try("list it", fail)
    assert "SECRETKEY" not in str(caught.value) and "KEYIDENT" not in str(caught.value)


HUGE = int("9" * 400)


def put(path: Path, keys: str, value: object) -> None:
    tree = at = json.loads(path.read_text())
    *before, last = keys.split("/")
    for key in before:
        at = at[int(key) if key.isdigit() else key]
    at[last] = value
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "keys",
    ["train_batch_size", "log_history/0/loss", "global_step", "max_steps", "epoch", "best_metric", "save_steps"],
)
def test_no_number_is_too_large(tmp_path, keys):
    one = make(tmp_path / "run", 100, shape=SHORT)
    put(one / "trainer_state.json", keys, HUGE)
    for words in (("verify", one, "--deep"), ("report", one.parent, "-o", tmp_path / "page.html"), ("inspect", one)):
        assert run_here(*words).returncode in (0, 4, 7)
    assert run_here("convert", one, tmp_path / "out", "--num-gpu", 1).returncode in (0, 4, 7)


def test_no_number_of_a_manifest_is_too_large(checkpoint, tmp_path):
    out = convert(checkpoint, tmp_path / "out", to="trainer")
    put(out / "llmtailor.json", "optimizer_steps/0/step", HUGE)
    assert run_here("verify", out).returncode in (4, 7)


@pytest.mark.parametrize(
    "rows",
    [
        ["a0: &a0 [x, x, x, x]", *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 9))],
        ["a0: &a0 {k: x}", *(f"a{at}: &a{at} {{<<: [*a{at - 1}, *a{at - 1}]}}" for at in range(1, 40))],
        ["? " + "a" * 200_000, ": [" + "x, " * 100_000 + "x]"],
    ],
    ids=["lists", "merge keys", "a long key"],
)
@pytest.mark.timeout(60)
def test_aliases_stand_for_a_bounded_number_of_values(tmp_path, rows):
    with pytest.raises(RecipeError, match="too many values"):
        parse_recipe("\n".join(rows), name="recipe.yaml", folder=tmp_path, environ={})
