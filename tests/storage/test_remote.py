"""Checkpoints in object stores: what every command does with a URL, and with a store that fails."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

import llmtailor
from helpers.checkpoints import SMALL, make, make_run
from helpers.commands import forget_urls, run_here
from helpers.faulty import FaultyFileSystem, failing
from helpers.files import TOLD, contents, names
from llmtailor.compose import write as writing
from llmtailor.errors import StorageError, TailorError, TargetError, VerificationError
from llmtailor.runs.gc import plan_gc
from llmtailor.storage import remote
from llmtailor.storage.checksums import crc32
from llmtailor.storage.remote import UPLOADING


class NoCredentialsError(Exception):
    """botocore's has this name"""


RECIPE = """\
merge_method: passthrough
base_model: {base}/checkpoint-100
parts:
  - from: {odd}/checkpoint-90
    select: [odd]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("remote") / "run", (90, 100))


def full_of(where):
    """The disk of the store is full, for uploads whose path contains this."""

    def fail(kind, path, data):
        if kind == "put" and where in path:
            raise OSError("the disk of the store is full")
        return data

    return failing(fail)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Every test opens URLs anew, as every process does, and waits for nobody."""
    forget_urls()
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.requests.clear()


@pytest.fixture
def url(run):
    fsspec.filesystem("faulty").put(str(run), "/bucket/run", recursive=True)
    return "faulty://bucket/run"


def call(*words: object, code: int = 0) -> str:
    forget_urls()
    done = run_here(*words)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert done.returncode == code, said
    assert "llmtailor-remote-" not in said, "the stand-in's path is nobody's business"
    return said


def assert_same(one: Path, two: Path) -> None:
    assert names(one) == names(two)
    assert contents(one, *TOLD) == contents(two, *TOLD)


def write_recipe(tmp_path: Path, base: object, odd: object) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(base=base, odd=odd))
    return path


def test_commands_read_urls(url, run):
    assert "deepspeed-zero3" in call("inspect", f"{url}/checkpoint-100")
    assert "every byte was read" in call("verify", f"{url}/checkpoint-100", "--deep")
    assert call("latest", url) == f"{url}/checkpoint-100\n"
    assert call("diff", f"{url}/checkpoint-90", run / "checkpoint-90").count("equal") == 1
    assert f"base_model: {url}/checkpoint-100" in call("recipe", url, "--strategy", "parity")


@pytest.mark.parametrize(("remote_base", "remote_odd"), [(True, True), (True, False), (False, True)])
def test_a_composite_of_remote_sources_is_that_of_local_ones(url, run, tmp_path, remote_base, remote_odd):
    call("merge", write_recipe(tmp_path, run, run), tmp_path / "local")
    recipe = write_recipe(tmp_path, url if remote_base else run, url if remote_odd else run)
    call("merge", recipe, tmp_path / "mixed", "--checksum")
    assert_same(tmp_path / "local", tmp_path / "mixed")


@pytest.fixture
def large(tmp_path_factory):
    """A URL of a checkpoint that consists of tensors mostly, and its bytes."""
    root = tmp_path_factory.mktemp("large")
    make(root, 100, shape=replace(SMALL, vocab_size=4000, hidden_size=60))
    fsspec.filesystem("faulty").put(str(root), "/bucket/large", recursive=True)
    return "faulty://bucket/large/checkpoint-100", sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file()
    )


def fetched() -> list[int]:
    return [size for kind, _, size in FaultyFileSystem.requests if kind == "get"]


def test_only_what_is_needed_is_fetched(large, url, monkeypatch):
    monkeypatch.setattr(remote, "HEADER_BYTES", 4096)
    checkpoint, total = large
    call("inspect", checkpoint)
    assert 0 < sum(fetched()) < total / 4
    assert not [path for kind, path, _ in FaultyFileSystem.requests if "/run/" in path and kind == "get"]


@pytest.mark.parametrize("options", [[], ["--dtype", "float32"], ["--stage", "none"]])
def test_tensors_are_fetched_by_range_and_never_kept(large, tmp_path, monkeypatch, options):
    monkeypatch.setattr(remote, "HEADER_BYTES", 4096)
    monkeypatch.setattr(remote, "REQUEST_BYTES", 70_001)
    checkpoint, total = large
    call("convert", checkpoint, tmp_path / "out", "--num-gpu", "3", *options)
    sizes = fetched()
    assert len(sizes) > total // 70_001 // 2
    assert max(sizes) <= 70_001
    (folder,) = remote._opened.values()
    kept = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    assert kept < total / 2
    made = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert sum(sizes) < 1.5 * max(made, total), "nothing is fetched twice"
    call("verify", tmp_path / "out", "--deep")


def test_a_run_in_a_store_is_composed_there(url, run, tmp_path):
    call("merge", "--run", run, "--strategy", "parity", tmp_path / "local")
    said = call("merge", "--run", url, "--strategy", "parity")
    assert f"wrote {url}/checkpoint-100-merged" in said
    assert "every byte was read" in call("verify", f"{url}/checkpoint-100-merged", "--deep")
    fsspec.filesystem("faulty").get("/bucket/run/checkpoint-100-merged", str(tmp_path / "got"), recursive=True)
    assert_same(tmp_path / "local", tmp_path / "got")
    assert "nothing to merge" in call("merge", "--run", url, "--strategy", "parity")


def test_outputs_in_a_store_are_never_replaced(url, run, tmp_path):
    recipe = write_recipe(tmp_path, run, run)
    before = dict(FaultyFileSystem.store)
    assert "already exists" in call("merge", recipe, f"{url}/checkpoint-90", code=6)
    assert "can't be replaced" in call("merge", recipe, f"{url}/checkpoint-90", "--force", code=6)
    assert "no output is named" in call("merge", write_recipe(tmp_path, url, url), code=6)
    assert "no output is named" in call("convert", f"{url}/checkpoint-90", code=6)
    assert dict(FaultyFileSystem.store) == before


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        *(([command, "faulty://bucket/run"], 2, "is a URL") for command in ("thin", "gc", "salvage")),
        (["inspect", "faulty://bucket/nothing"], 4, "there is no such checkpoint folder"),
        (["inspect", "nonsense://bucket/nothing"], 2, "Protocol not known"),
        (["inspect", "https://localhost/run"], 2, "names a web server"),
    ],
)
def test_what_is_refused(url, words, code, told):
    assert told in call(*words, code=code)


class Fast:
    """As obstore reads: it sees the same objects, or others."""

    def __init__(self, fs, is_same):
        self.fs, self.is_same, self.reads = fs, is_same, 0

    def info(self, path):
        found = self.fs.info(path)
        return found if self.is_same else {**found, "size": 1}

    def cat_file(self, path, start, end):
        self.reads += 1
        return self.fs.cat_file(path, start=start, end=end)


@pytest.mark.parametrize("is_same", [True, False])
def test_obstore_reads_what_fsspec_sees_as_well(tmp_path, is_same):
    """Also an object that was uploaded and not listed since."""
    (tmp_path / "file").write_bytes(b"content")
    folder = remote.RemoteFolder("memory://obstore", tmp_path / "stand-in")
    folder._fast = fast = Fast(folder._fs, is_same)
    folder.put("a.bin", tmp_path / "file", crc32(b"content"))
    assert b"".join(folder.stream("a.bin", 0, 7)) == b"content"
    assert fast.reads == 2 * is_same


BUSY, CUT = (
    OSError(16, "Please reduce your request rate."),
    ConnectionResetError("the other side closed the connection"),
)


@pytest.mark.parametrize(("error", "turns"), [(BUSY, (1, 2)), (CUT, (1,))])
def test_a_store_that_fails_now_and_then_is_asked_again(url, tmp_path, error, turns):
    requests = itertools.count()

    def fail(kind, path, data):
        if next(requests) % 3 in turns:
            raise error
        return data

    with failing(fail):
        call("convert", f"{url}/checkpoint-100", tmp_path / "out", "--num-gpu", "3")
    call("verify", tmp_path / "out", "--deep")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionError("The provided token has expired."), "renew the credentials"),
        (NoCredentialsError("Unable to locate credentials"), "set or renew the credentials"),
        (OSError("gone"), "connection"),
    ],
)
def test_a_store_that_does_not_answer_leaves_nothing_behind(url, tmp_path, error, fix):
    turns = itertools.count()

    def refuse(kind, path, data):
        if "optim_states" in path and next(turns) > 4:
            raise error
        return data

    with failing(refuse):
        assert fix in call("convert", f"{url}/checkpoint-100", tmp_path / "out", "--num-gpu", "3", code=8)
    assert not (tmp_path / "out").exists()
    call("convert", f"{url}/checkpoint-100", tmp_path / "out", "--num-gpu", "3")
    call("verify", tmp_path / "out", "--deep")


def shorter(kind, name, data):
    return data[:-1] if data and "optim_states" in name else data


def changed_once(done):
    """Change a source while another file of it is read."""

    def change(kind, name, data):
        path = "/bucket/run/checkpoint-100/config.json"
        if "optim_states" in name and not done:
            content = FaultyFileSystem.store[path].getvalue() + b" "
            done.append(fsspec.filesystem("faulty").pipe_file(path, content))
        return data

    return change


@pytest.mark.parametrize(("fault", "told"), [(shorter, ""), (changed_once([]), "changed while it was read")])
def test_what_is_no_data_is_refused(url, tmp_path, fault, told):
    with failing(fault):
        assert told in call("convert", f"{url}/checkpoint-100", tmp_path / "out", code=4)
    assert not (tmp_path / "out").exists()


def test_an_upload_that_was_cut_off_is_no_checkpoint_and_is_made_again(url, run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"
    with full_of("model.safetensors"):
        assert "disk of the store" in call("merge", recipe, out, code=8)
    assert "cut off" in call("inspect", out, code=4)
    call("merge", recipe, out)
    assert "resumable" in call("verify", out, "--deep")
    assert not [path for path in FaultyFileSystem.store if UPLOADING in path]


def test_the_same_call_uploads_again_after_a_failure(run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), remote.open_location("faulty://bucket/out/checkpoint-100")
    with full_of(""), pytest.raises(StorageError):
        llmtailor.merge(recipe, out)
    llmtailor.merge(recipe, out)
    assert "resumable" in call("verify", "faulty://bucket/out/checkpoint-100")
    with pytest.raises(
        TargetError, match=r"^faulty://bucket/out/checkpoint-100: .* exists\n  fix: choose another one$"
    ):
        llmtailor.merge(recipe, remote.open_location("faulty://bucket/out/checkpoint-100"))


def test_others_files_beside_a_cut_off_upload_are_not_removed(url, run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"
    fs = fsspec.filesystem("faulty")
    fs.pipe_file(f"/bucket/out/checkpoint-100/{UPLOADING}", b'{"files": ["latest"]}')
    fs.pipe_file("/bucket/out/checkpoint-100/thesis.tex", b"x")
    assert "thesis.tex" in call("merge", recipe, out, code=6)
    assert fs.exists("/bucket/out/checkpoint-100/thesis.tex")


def test_a_store_that_returns_other_bytes_is_found_out(run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"

    def flip(kind, path, data):
        return bytes([data[0] ^ 1]) + data[1:] if kind == "get" and path.endswith("model.safetensors") else data

    with failing(flip):
        assert "does not read back correctly" in call("merge", recipe, out, code=8)
    assert "cut off" in call("inspect", out, code=4)


def test_local_space_is_needed_for_two_files_only(run, tmp_path):
    """The two largest ones; whatever is made meanwhile waits."""
    make(tmp_path, 100, shape=replace(SMALL, vocab_size=2000, hidden_size=60), world_size=8)
    found = []

    def look(kind, path, data):
        staged, here = remote._made.rglob(".*.llmtailor-staging/out/**/*"), 0
        for file in staged:
            with suppress(FileNotFoundError):  # another thread has just removed it
                here += file.lstat().st_blocks * 512 if file.is_file() else 0
        found.append(here)
        return data

    with failing(look):
        said = call("convert", tmp_path / "checkpoint-100", "faulty://bucket/out/checkpoint-100", "--json")
    sizes = sorted(one["num_bytes"] for one in json.loads(said[said.index("{") : said.rindex("}") + 1])["files"])
    assert 0 < max(found) <= sum(sizes[-2:]) + 2 * 4096 * len(sizes) < sum(sizes) / 3
    assert "equal" in call("diff", tmp_path / "checkpoint-100", "faulty://bucket/out/checkpoint-100")


def test_an_upload_is_verified_before_its_marker_goes(run, tmp_path, monkeypatch):
    """What the store returns is verified, and a refused output leaves nothing there."""
    store, out = FaultyFileSystem.store, "faulty://bucket/out/checkpoint-100"
    really, seen = writing.check_written, []

    def check(composition, there):
        seen.append({path.removeprefix("/bucket/out/checkpoint-100/") for path in store})
        really(composition, there)
        raise VerificationError.at(out, "not as planned", "report it")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "check_written", check)
        assert "not as planned" in call("convert", run / "checkpoint-100", out, code=7)
    assert seen[0] >= {"llmtailor.json", "latest", "model.safetensors", UPLOADING}
    assert not store
    call("convert", run / "checkpoint-100", out)


def test_a_source_that_changes_meanwhile_takes_the_upload_away(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config, done = tmp_path / "run/checkpoint-100/config.json", []

    def change(kind, path, data):
        if "optim_states" in path and not done:
            done.append(config.write_bytes(config.read_bytes() + b" "))
        return data

    with failing(change):
        said = call("convert", config.parent, "faulty://bucket/out/checkpoint-100", code=4)
    assert "changed while it was read" in said
    assert done and not FaultyFileSystem.store


def test_a_path_in_the_cache_reads_the_store_whatever_its_type(run, url):
    """``Path(path)`` makes a plain path of it, whose file in the cache has no content."""
    from llmtailor.storage.local import OpenFiles, read_source

    folder = remote.open_location(f"{url}/checkpoint-100")
    plain, name = Path(folder), "config.json"
    assert type(plain) is not type(folder)
    wanted = (run / "checkpoint-100" / name).read_bytes()
    assert read_source(plain / name, name, 1 << 20) == wanted
    room = bytearray(len(wanted))
    with OpenFiles(plain) as files:
        files.read_into(name, 0, memoryview(room))
    assert room == wanted


def test_functions_of_the_public_api_take_text(run, url):
    for root in (str(run), url):
        assert llmtailor.verify_checkpoint(f"{root}/checkpoint-100").is_resumable
        assert llmtailor.inspect_checkpoint(f"{root}/checkpoint-100")["global_step"] == 100
        assert llmtailor.diff(f"{root}/checkpoint-90", f"{root}/checkpoint-100").steps == (90, 100)
        found = llmtailor.find_latest(root).path
        assert found is not None and found.name == "checkpoint-100"


def test_a_url_whose_listing_failed_is_opened_again(url, monkeypatch):
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(FaultyFileSystem, "find", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("busy")))
        for _ in range(2):
            with pytest.raises(StorageError, match="can't list it"):
                remote.open_location(url)
    assert remote.open_location(url).is_dir()


def test_files_of_unknown_size_are_not_taken_for_empty_ones(url, monkeypatch):
    found = {"/bucket/run/latest": {"name": "/bucket/run/latest", "type": "file", "size": None}}
    monkeypatch.setattr(FaultyFileSystem, "find", lambda *_, **__: found)
    assert "does not state the size of latest" in call("inspect", url, code=8)


def test_a_url_that_is_given_as_text_is_listed_again(run, url):
    """A program may look for new checkpoints again and again."""
    shown = llmtailor.find_latest(url).path
    fsspec.filesystem("faulty").rm(f"/bucket/run/{shown.name}", recursive=True)
    assert llmtailor.find_latest(url).path.name == "checkpoint-90"


def test_a_path_of_a_store_is_pickled_as_its_url(url):
    path = remote.open_location(url) / "checkpoint-100"
    again = pickle.loads(pickle.dumps(path))
    assert f"{again}" == f"{path}" and again == path and again.remote is path.remote


def test_a_run_in_a_store_is_not_changed(url):
    """What would be removed are files of its local cache."""
    with pytest.raises(TailorError, match="does not exist"):
        plan_gc(url, 1)
    assert fsspec.filesystem("faulty").exists("/bucket/run/checkpoint-100")
