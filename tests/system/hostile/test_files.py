"""What stands where a file belongs: pipes, devices, folders, links, files that change, names that lead elsewhere."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.cases import diagonal
from helpers.checkpoints import model_states, optim_states
from helpers.commands import call
from helpers.composing import convert
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.codes import Code
from llmtailor.compose.plan import plan_merge
from llmtailor.compose.write import write
from llmtailor.containers.safetensors import INDEX, read_weights
from llmtailor.errors import SourceError, TailorError
from llmtailor.findings import ERROR, WARNING
from llmtailor.formats.registry import index_checkpoint
from llmtailor.recipe import Recipe
from llmtailor.storage.local import open_source, read_source
from llmtailor.verify.verify import verify_checkpoint

pytestmark = pytest.mark.timeout(60)  # a pipe that is opened carelessly blocks for ever


# --- no regular files ------------------------------------------------------------------------------------------------


def listen(path: Path) -> None:
    where = os.open(path.parent, os.O_RDONLY)
    try:
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{where}/{path.name}")  # a path of 108 bytes at most
    finally:
        os.close(where)


KINDS = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
    "a socket": listen,
}
TAG = "global_step100"
READ = {
    "zero3": {
        **dict.fromkeys(("latest", "trainer_state.json", "scheduler.pt"), ERROR),
        **dict.fromkeys(("rng_state_1.pth", "config.json", "model.safetensors"), WARNING),
        f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt": ERROR,
        f"{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": ERROR,
    },
    "zero2": {f"{TAG}/mp_rank_00_model_states.pt": ERROR},
    "plain": dict.fromkeys(("optimizer.pt", "scheduler.pt", "model.safetensors"), ERROR),
    "universal": {"latest_universal": ERROR},
}
EVERY = [(form, name, severity) for form, names in READ.items() for name, severity in names.items()]


@pytest.mark.parametrize(("kind", "case"), diagonal(KINDS, EVERY))
def test_what_is_no_file_is_called_what_it_is(copy_of, kind, case):
    form, name, severity = case
    checkpoint = copy_of(form)
    (checkpoint / name).unlink()
    KINDS[kind](checkpoint / name)
    verdict = verify_checkpoint(checkpoint, name="x")
    found = [finding for finding in verdict.findings if finding.path == name]
    assert [(one.code, one.severity) for one in found] == [(Code.NOT_A_FILE, severity)], verdict.findings
    assert kind in found[0].what and found[0].fix
    assert verdict.is_resumable == (severity == WARNING)


def is_refused(checkpoint: Path) -> bool:
    try:
        return not index_checkpoint(checkpoint)
    except SourceError as error:
        assert all(problem.where and problem.fix for problem in error.problems)
        return True


@pytest.mark.parametrize(("form", "name", "severity"), EVERY)
def test_a_link_to_nowhere_is_a_missing_file_and_one_to_itself_is_refused(copy_of, form, name, severity):
    checkpoint = copy_of(form)
    (checkpoint / name).unlink()
    missing = is_refused(checkpoint)
    (checkpoint / name).symlink_to("gone")
    assert is_refused(checkpoint) == missing
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to((checkpoint / name).name)
    with pytest.raises(SourceError, match="symbolic links"):
        index_checkpoint(checkpoint)


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_is_no_file_is_none(copy_of, kind):
    checkpoint = copy_of("zero2")
    (checkpoint / "llmtailor.json").unlink()
    KINDS[kind](checkpoint / "llmtailor.json")
    assert not verify_checkpoint(checkpoint).findings


@pytest.mark.parametrize("name", ["x\0y", "x" * 300])
def test_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(SourceError) as caught, open_source(tmp_path / name, "x"):
        pass
    assert caught.value.problems[0].fix


# --- links -----------------------------------------------------------------------------------------------------------


def test_links_are_followed_and_told_of(copy_of, tmp_path):
    """As in a cache of the Hugging Face Hub, where every file is a link to a blob elsewhere."""
    plain = copy_of("zero3")
    linked = tmp_path / "snapshots" / "checkpoint-100"
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        target = linked / path.relative_to(plain)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, tmp_path / "blobs" / str(number))
        target.symlink_to(os.path.relpath(tmp_path / "blobs" / str(number), target.parent))
    index = index_checkpoint(linked)
    (finding,) = index.findings
    assert f"{len(index.files)} of its files are symbolic links to outside the folder" in finding.what
    first, second = convert(plain, tmp_path / "one"), convert(linked, tmp_path / "two")
    for path in first.rglob("*"):
        other = second / path.relative_to(first)
        assert not other.is_symlink()
        if path.is_file() and path.name not in ("llmtailor.json", "README.md"):
            assert path.read_bytes() == other.read_bytes()


def test_a_linked_root_and_links_inside_are_nothing_to_tell(copy_of, tmp_path):
    checkpoint = copy_of("zero3")
    (checkpoint / "scheduler.pt").rename(checkpoint / "other.pt")
    (checkpoint / "scheduler.pt").symlink_to("other.pt")
    (tmp_path / "link").symlink_to(checkpoint)
    assert index_checkpoint(tmp_path / "link").findings == ()


def test_a_linked_tag_folder_is_told_of(copy_of, tmp_path):
    checkpoint = copy_of("zero3")
    (checkpoint / "global_step100").rename(tmp_path / "elsewhere")
    (checkpoint / "global_step100").symlink_to(tmp_path / "elsewhere")
    (finding,) = index_checkpoint(checkpoint).findings
    assert "1 of its files are symbolic links to outside the folder: global_step100" in finding.what


# --- names that lead elsewhere ---------------------------------------------------------------------------------------

AWAY = ["..", ".", "", "../checkpoint-100", "/etc", "a/b", "global_step100/", "global_step100\nglobal_step100", "a\0b"]
AWAY += ["global_step100/../global_step100", "\x1b[2J", "é" * 200]


@pytest.mark.parametrize("tag", [*AWAY, b"\xff\xfe"])
def test_latest_may_only_name_a_folder_of_the_checkpoint(copy_of, tag):
    checkpoint = copy_of("zero3")
    (checkpoint / "latest").write_bytes(tag if isinstance(tag, bytes) else tag.encode())
    with pytest.raises(SourceError) as caught:
        index_checkpoint(checkpoint)
    (problem,) = caught.value.problems
    assert problem.where.endswith("checkpoint-100/latest")
    assert "global_step100" in problem.fix
    assert "\x1b" not in str(caught.value.problems[0])


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "a//x", ".", ""])
def test_no_file_can_be_laid_out_outside_of_the_output(path):
    with pytest.raises(ValueError, match="not a path below the output"):
        FileLayout(path, ())


OUTSIDE = ["../x.safetensors", "/x.safetensors", "..", "a/x.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, "x\n.safetensors", "x\0.safetensors", "x.bin"])
def test_an_index_may_only_name_files_beside_it(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SourceError, match="the index points to"):
        read_weights(tmp_path, "x")


@pytest.mark.parametrize("name", [3, None])
def test_an_index_must_name_files(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SourceError, match="no weight_map of names to files"):
        read_weights(tmp_path, "x")


def test_the_command_that_is_proposed_for_latest_is_quoted(copy_of):
    checkpoint = copy_of("zero3")
    (checkpoint / "latest").unlink()
    shutil.rmtree(checkpoint / "global_step100")
    (checkpoint / "global_step1; touch hacked").mkdir()
    with pytest.raises(SourceError) as caught:
        index_checkpoint(checkpoint)
    assert "'global_step1; touch hacked'" in caught.value.problems[0].fix


@pytest.mark.parametrize("rank", ["00", "٣", "+1", "1 "])
def test_no_two_names_mean_the_same_rank(copy_of, rank):
    checkpoint, name = copy_of("zero3"), f"zero_pp_rank_{rank}_mp_rank_00"
    shutil.copy(model_states(checkpoint), checkpoint / "global_step100" / f"{name}_model_states.pt")
    shutil.copy(optim_states(checkpoint), checkpoint / "global_step100" / f"bf16_{name}_optim_states.pt")
    assert index_checkpoint(checkpoint).world_size == 2


def test_names_for_a_terminal(copy_of, tmp_path):
    """A carried file may have any name; on the screen it is shown without what a terminal would act on."""
    checkpoint = copy_of("zero3")
    odd = os.fsdecode(b"\xff\x1b[2J\n.txt")
    (checkpoint / odd).write_bytes(b"x")
    for command in (["inspect", "checkpoint-100"], ["convert", "checkpoint-100", "out", "--dry-run"],
                    ["convert", "checkpoint-100", "out"]):  # fmt: skip
        result = call(*command, cwd=tmp_path)
        assert "\x1b" not in result.stdout + result.stderr
    assert (tmp_path / "out" / odd).is_file()
    assert (tmp_path / "out" / "llmtailor.json").is_file()


# --- files that change -----------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_under_us(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    with open_source(tmp_path / "x", "ckpt/x") as file:
        os.truncate(tmp_path / "x", 50)
        assert file.read(0, 50) == bytes(50)
        with pytest.raises(SourceError, match="became shorter while it was read"):
            file.read(40, 100)


def test_a_file_that_grows_under_us(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    assert len(read_source(tmp_path / "x", "x", 100)) == 100
    with pytest.raises(SourceError, match="should never need more than"):
        read_source(tmp_path / "x", "x", 99)


def test_files_that_change_between_plan_and_copy(copy_of, tmp_path):
    checkpoint = copy_of("zero3")
    composition = plan_merge(Recipe(name="x", base=checkpoint), tmp_path / "out")
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SourceError, match="changed while it was read"):
        write(composition)
    assert not (tmp_path / "out").exists()


# --- permissions -----------------------------------------------------------------------------------------------------


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def powerless():
    """Be an owner of files to whom their modes apply; to root they don't, by two of its capabilities."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, now = _Header(0x20080522, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), now) == 0
    before = now[0].effective
    now[0].effective &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), now) == 0
    try:
        yield
    finally:
        now[0].effective = before
        assert libc.capset(ctypes.byref(header), now) == 0


@pytest.mark.parametrize("name", [".", "global_step100", "scheduler.pt", "latest", "model.safetensors", "config.json"])
def test_what_may_not_be_read(copy_of, name):
    checkpoint = copy_of("zero3")
    with powerless():
        index_checkpoint(checkpoint)
    (checkpoint / name).chmod(0)
    try:
        with powerless(), pytest.raises(TailorError) as caught:
            index_checkpoint(checkpoint)
    finally:
        (checkpoint / name).chmod(0o755)
    assert isinstance(caught.value, SourceError)
    assert "ermission denied" in caught.value.problems[0].what
    assert "run as a user who may read" in caught.value.problems[0].fix
