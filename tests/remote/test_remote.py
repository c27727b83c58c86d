"""Checkpoints in object stores: what every command does with a URL, and with a store that fails."""

from __future__ import annotations

import filecmp
import itertools
from pathlib import Path

import fsspec
import pytest

from helpers.checkpoints import make
from helpers.commands import run_here
from helpers.faulty import FaultyFileSystem, failing
from llmtailor.storage import remote, stand_in

RECIPE = """\
merge_method: passthrough
base_model: {base}/checkpoint-100
parts:
  - from: {odd}/checkpoint-90
    select: [odd]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote") / "run"
    for step in (90, 100):
        make(root, step)
    return root


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Every test opens URLs anew, as every process does, and waits for nobody."""
    again()
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.requests.clear()


@pytest.fixture
def url(run):
    fsspec.filesystem("faulty").put(str(run), "/bucket/run", recursive=True)
    return "faulty://bucket/run"


def again() -> None:
    """Forget what was opened, as a new process has."""
    stand_in.stand_ins.clear()
    remote._made = None


def call(*words: object, code: int = 0) -> str:
    again()
    done = run_here(*words)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert done.returncode == code, said
    assert "llmtailor-remote-" not in said, "the stand-in's path is nobody's business"
    return said


def assert_same(one: Path, two: Path) -> None:
    names = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(two)) for path in two.rglob("*") if path.is_file()}
    told = {"README.md", "llmtailor.json"}  # they name the sources
    _, wrong, errors = filecmp.cmpfiles(one, two, sorted(names - told), shallow=False)
    assert not wrong and not errors


def write_recipe(tmp_path: Path, base: object, odd: object) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(base=base, odd=odd))
    return path


def test_commands_read_urls(url, run):
    assert "deepspeed-zero3" in call("inspect", f"{url}/checkpoint-100")
    assert "every byte was read" in call("verify", f"{url}/checkpoint-100", "--deep")
    assert call("latest", url) == f"{url}/checkpoint-100\n"
    assert call("diff", f"{url}/checkpoint-90", run / "checkpoint-90").count("equal") == 1
    assert f'base_model: "{url}/checkpoint-100"' in call("recipe", url, "--strategy", "parity")


@pytest.mark.parametrize(("remote_base", "remote_odd"), [(True, True), (True, False), (False, True)])
def test_a_composite_of_remote_sources_is_that_of_local_ones(url, run, tmp_path, remote_base, remote_odd):
    call("merge", write_recipe(tmp_path, run, run), tmp_path / "local")
    recipe = write_recipe(tmp_path, url if remote_base else run, url if remote_odd else run)
    call("merge", recipe, tmp_path / "mixed", "--checksum")
    assert_same(tmp_path / "local", tmp_path / "mixed")


def test_only_what_is_needed_is_fetched(url, tmp_path):
    checkpoint = "/bucket/run/checkpoint-100"
    total = sum(info["size"] for info in fsspec.filesystem("faulty").find(checkpoint, detail=True).values())
    call("inspect", f"{url}/checkpoint-100")
    first = sum(size for kind, _, size in FaultyFileSystem.requests if kind == "get")
    call("verify", f"{url}/checkpoint-100")
    assert 0 < first <= total
    assert not [path for kind, path, _ in FaultyFileSystem.requests if "checkpoint-90" in path and kind == "get"]


def test_tensors_are_fetched_by_range_and_never_kept(url, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "HEADER_BYTES", 512)
    monkeypatch.setattr(remote, "REQUEST_BYTES", 700)
    call("convert", f"{url}/checkpoint-100", tmp_path / "out", "--num-gpu", "3")
    sizes = [size for kind, _, size in FaultyFileSystem.requests if kind == "get"]
    assert len(sizes) > 50
    total = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert sum(sizes) < 1.5 * total, "nothing is fetched twice"
    (folder,) = stand_in.stand_ins.values()
    kept = sum(path.stat().st_blocks * 512 for path in folder.root.rglob("*.pt"))
    assert kept <= sum(path.stat().st_size for path in folder.root.rglob("*.pt")) + 100_000
    call("verify", tmp_path / "out", "--deep")


def test_an_output_is_uploaded_and_read_back(url, run, tmp_path):
    call("merge", write_recipe(tmp_path, run, run), tmp_path / "local")
    call("merge", write_recipe(tmp_path, url, run), "faulty://bucket/out/checkpoint-100")
    fs = fsspec.filesystem("faulty")
    fs.get("/bucket/out/checkpoint-100", str(tmp_path / "got"), recursive=True)
    assert_same(tmp_path / "local", tmp_path / "got")
    assert "resumable" in call("verify", "faulty://bucket/out/checkpoint-100", "--deep")


def test_a_run_in_a_store_is_composed_there(url, run, tmp_path):
    fs = fsspec.filesystem("faulty")
    fs.rm("/bucket/run/checkpoint-100/latest")
    said = call("merge", "--run", url, "--at", "100")
    assert "nothing to merge" in said and "checkpoint-90" in said


def test_outputs_in_a_store_are_never_replaced(url, run, tmp_path):
    recipe = write_recipe(tmp_path, run, run)
    before = dict(FaultyFileSystem.store)
    assert "already exists" in call("merge", recipe, f"{url}/checkpoint-90", code=6)
    assert "can't be replaced" in call("merge", recipe, f"{url}/checkpoint-90", "--force", code=6)
    assert "no output is named" in call("merge", write_recipe(tmp_path, url, url), code=6)
    assert dict(FaultyFileSystem.store) == before


@pytest.mark.parametrize("command", ["thin", "gc", "salvage"])
def test_what_changes_a_run_needs_a_folder(url, command):
    assert "is a URL" in call(command, url, code=2)


def test_no_trial_resume_from_a_store(url):
    assert "copy it here first" in call("verify", f"{url}/checkpoint-100", "--resume-smoke", code=2)


def test_what_is_not_there(url):
    assert "there is no such checkpoint folder" in call("inspect", "faulty://bucket/nothing", code=4)
    assert "Protocol not known" in call("inspect", "nonsense://bucket/nothing", code=2)


def test_a_store_that_is_busy_is_asked_again(url, tmp_path):
    turns = itertools.count()

    def throttle(kind, path, data):
        if next(turns) % 3:
            raise OSError(16, "Please reduce your request rate.")
        return data

    with failing(throttle):
        call("convert", f"{url}/checkpoint-100", tmp_path / "out", "--num-gpu", "3")
    call("verify", tmp_path / "out", "--deep")


def test_a_connection_that_is_cut_is_made_again(url, tmp_path):
    turns = itertools.count()

    def cut(kind, path, data):
        if next(turns) % 4 == 1:
            raise ConnectionResetError("the other side closed the connection")
        return data

    with failing(cut):
        call("convert", f"{url}/checkpoint-100", tmp_path / "out")
    call("verify", tmp_path / "out", "--deep")


@pytest.mark.parametrize(
    ("error", "fix"),
    [(PermissionError("The provided token has expired."), "renew the credentials"), (OSError("gone"), "connection")],
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


def test_short_answers_are_no_data(url, tmp_path):
    with failing(lambda kind, path, data: data[:-1] if data and "optim_states" in path else data):
        call("convert", f"{url}/checkpoint-100", tmp_path / "out", code=4)
    assert not (tmp_path / "out").exists()


def test_an_object_that_changes_is_refused(url, tmp_path):
    fs = fsspec.filesystem("faulty")
    path = "/bucket/run/checkpoint-100/config.json"
    done = []

    def change(kind, name, data):
        if "optim_states" in name and not done:
            done.append(fs.pipe_file(path, FaultyFileSystem.store[path].getvalue() + b" "))
        return data

    with failing(change):
        assert "changed while it was read" in call("convert", f"{url}/checkpoint-100", tmp_path / "out", code=4)
    assert not (tmp_path / "out").exists()


def test_an_upload_that_was_cut_off_is_no_checkpoint_and_is_made_again(url, run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"

    def fail(kind, path, data):
        if kind == "put" and "model.safetensors" in path:
            raise OSError("the disk of the store is full")
        return data

    with failing(fail):
        assert "disk of the store" in call("merge", recipe, out, code=8)
    assert "cut off" in call("inspect", out, code=4)
    call("merge", recipe, out)
    assert "resumable" in call("verify", out, "--deep")
    assert not [path for path in FaultyFileSystem.store if stand_in.UPLOADING in path]


def test_others_files_beside_a_cut_off_upload_are_not_removed(url, run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"
    fs = fsspec.filesystem("faulty")
    fs.pipe_file(f"/bucket/out/checkpoint-100/{stand_in.UPLOADING}", b'{"files": ["latest"]}')
    fs.pipe_file("/bucket/out/checkpoint-100/thesis.tex", b"x")
    assert "thesis.tex" in call("merge", recipe, out, code=6)
    assert fs.exists("/bucket/out/checkpoint-100/thesis.tex")


def test_a_store_that_returns_other_bytes_is_found_out(run, tmp_path):
    recipe, out = write_recipe(tmp_path, run, run), "faulty://bucket/out/checkpoint-100"

    def flip(kind, path, data):
        return bytes([data[0] ^ 1]) + data[1:] if kind == "get" and path.endswith("model.safetensors") else data

    with failing(flip):
        assert "differs from what was uploaded" in call("merge", recipe, out, code=8)
    assert "cut off" in call("inspect", out, code=4)
