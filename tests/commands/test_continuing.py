"""An interrupted merge goes on where it was, and only if it is the same; sources that change are noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_128

import llmtailor
from faults.scene import RECIPE, Scene, contents
from helpers.checkpoints import make, make_run
from helpers.composing import convert, merge
from helpers.files import flip
from llmtailor.checkpoint.layout import Cast, Copy
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import bytes_to_move, write
from llmtailor.copying import pool, streams
from llmtailor.copying import staging as space
from llmtailor.copying.staging import peek
from llmtailor.errors import Interrupted, SourceError, StorageError
from llmtailor.model.parts import Part
from llmtailor.model.roles import EXP_AVG, MASTER, State
from salvage.damage import flip_state
from thin.scene import save_partial


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("run"), "merge")


@pytest.fixture
def scene(made):
    yield made
    made.reset()
    (made.root / "recipe.yaml").write_text(RECIPE)


def interrupt(scene: Scene, at: int) -> None:
    """Leave what a merge leaves that is interrupted at an operation; only the first time one is."""
    kept = scene.root / f"left-at-{at}"
    if not kept.exists():
        assert scene.run(fault="SIGTERM", at=at) == 130
        scene.staging.rename(kept)
    shutil.copytree(kept, scene.staging)


@pytest.fixture
def left(scene):
    """A merge was interrupted when about half of it was written."""
    interrupt(scene, 100)
    assert 0 < peek(scene.out).num_bytes < sum(path.stat().st_size for path in scene.staging.rglob("*"))
    return scene


def said(scene: Scene) -> str:
    return scene.said.read_text().split("a step per layer)\n")[-1]


def writes(scene: Scene) -> list[tuple[str, int]]:
    """Run the command; return which files of the output it writes to, and where."""
    assert scene.run(fault="trace") == 0, said(scene)
    paths, found = {}, []
    for kind, *details in scene.recorded():
        if kind in ("create", "open"):
            paths[details[1]] = Path(details[0])
        elif kind == "write" and paths[details[0]].is_relative_to(scene.staging / "out"):
            found.append((str(paths[details[0]].relative_to(scene.staging / "out")), details[1]))
    return found


def test_what_is_there_is_checked_and_not_written_again(left):
    reached = {path: marks[-1].num_bytes for path, marks in peek(left.out).marks.items()}
    plan = plan_merge(left.root / "recipe.yaml", left.out).plan
    finished = {file.path for file in plan.files if reached.get(file.path) == file.num_bytes}
    again = {path for path, _ in writes(left)}
    assert len(finished) > 2
    assert not again & finished
    assert again == set(left.wanted) - finished
    assert "resuming the merge begun at" in said(left)
    assert left.state() == "complete"


def test_a_long_file_is_kept_up_to_the_last_mark(left):
    left.reset()
    interrupt(left, 150)  # late enough for a file with several marks, however two writers take turns
    path, marks = max(peek(left.out).marks.items(), key=lambda one: len(one[1]))
    assert len(marks) > 1
    os.truncate(left.staging / "out" / path, marks[-2].num_bytes + 3)
    assert min(at for written, at in writes(left) if written == path) == marks[-2].num_bytes
    assert left.state() == "complete"


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: flip(file, file.stat().st_size // 2),
        Path.unlink,
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: os.truncate(file, 0),
        lambda file: file.open("ab").write(b"more"),
        lambda file: (file.unlink(), file.symlink_to(file.parents[3] / "recipe.yaml")),
        lambda file: (file.unlink(), os.link(file.parents[3] / "recipe.yaml", file)),
    ],
    ids=["flip", "gone", "cut", "empty", "longer", "link", "hard link"],
)
def test_what_is_damaged_is_written_again(left, damage):
    path = next(path for path, marks in peek(left.out).marks.items() if "optim" in path or "model_states" in path)
    damage(left.staging / "out" / path)
    (left.staging / "out" / "foreign").write_text("x")
    assert left.run() == 0
    assert left.state() == "complete"
    assert (left.root / "recipe.yaml").read_text() == RECIPE  # a link to it was not written to


def test_another_recipe_is_refused_unless_told_otherwise(left):
    recipe = RECIPE.replace("odd", "even")
    (left.root / "recipe.yaml").write_text(recipe)
    before = contents(left.staging)
    for options in [(), ("--dry-run",)]:
        assert left.run(*options) == 6
        assert "the output holds an unfinished merge (recipe.yaml, begun at" in said(left)
        assert "recipe or options differ" in said(left)
        assert "--restart" in said(left)
        assert contents(left.staging) == before
    assert left.run("--restart", "--dry-run") == 0
    assert "discarded, because --restart was given" in said(left)
    assert contents(left.staging) == before
    assert left.run("--restart") == 0
    assert json.loads((left.out / "llmtailor.json").read_text())["recipe"]["text"] == recipe
    assert not left.staging.exists()


@pytest.mark.parametrize(
    ("options", "recipe", "code", "told"),
    [
        (("--num-gpu", "3"), RECIPE, 6, "--restart"),
        # who replaces a complete output may replace an incomplete one
        (("--num-gpu", "3", "--force"), RECIPE, 0, "discarded, because its recipe or options differ"),
        (("--restart",), RECIPE, 0, "discarded, because --restart was given"),
        # what changes no byte
        (("--force", "--checksum"), f"# a comment\n{RECIPE}", 0, "resuming the merge"),
    ],
)
def test_other_options(left, options, recipe, code, told):
    (left.root / "recipe.yaml").write_text(recipe)
    assert left.run(*options) == code
    assert told in said(left)
    assert ("resuming" in told) == ("resuming the merge" in said(left))


def test_another_version_begins_anew(left):
    journal = left.staging / "journal"
    text, version = journal.read_text(), f'"tool_version": "{llmtailor.__version__}"'
    assert version in text
    journal.write_text(text.replace(version, '"tool_version": "0.0"'))
    assert left.run() == 0
    assert "discarded, because it was started by llmtailor 0.0" in said(left)
    assert left.state() == "complete"


def test_a_source_that_has_changed_since_begins_anew(left):
    state = left.root / "checkpoint-200" / "trainer_state.json"
    before = state.stat()
    try:
        os.utime(state, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert left.run("--dry-run") == 0
        assert left.run() == 0
        assert f"discarded, because its sources have changed since: {state}" in said(left)
        assert left.state() == "complete"
    finally:
        os.utime(state, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def taken(left):
    """A source file, and where in it something begins that is already in a file that is kept."""
    left.reset()
    interrupt(left, 150)
    plan = plan_merge(left.root / "recipe.yaml", left.out).plan
    marks = peek(left.out).marks
    source, extent = next(
        (piece.source, piece.extent)
        for file in plan.files
        for start, piece in file.placed()
        if isinstance(piece, Copy) and "optim" in piece.extent.path and file.path in marks
        if piece.state and start + piece.num_bytes <= marks[file.path][-1].num_bytes
    )
    return Path(plan.sources[source]) / extent.path, extent.start


@contextmanager
def behind_our_back(file: Path, offset: int, difference: int):
    """Change a byte, and put the time of change back."""
    data, stat = file.read_bytes(), file.stat()

    def put(content):
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    put(data[:offset] + bytes([data[offset] ^ difference]) + data[offset + 1 :])
    try:
        yield
    finally:
        put(data)


@pytest.mark.parametrize("options", [(), ("--checksum",)])
def test_a_source_that_has_changed_behind_our_back_is_refused(left, taken, options):
    with behind_our_back(*taken, 1):
        assert left.run(*options) == 4
    assert f"{taken[0]}: the file changed while it was read" in said(left)
    assert not left.staging.exists()
    assert left.state() == "absent"


def test_a_source_that_only_looks_changed_is_none(left, taken):
    """A backup has made a hard link, or a file system numbers its files anew: the content decides."""
    with behind_our_back(*taken, 0):
        assert left.run() == 0
    assert "resuming the merge" in said(left)
    assert left.state() == "complete"


def test_nothing_is_kept_before_there_is_something(scene):
    assert scene.run(fault="SIGTERM", at=3) == 130
    assert "kept" not in said(scene)
    assert not scene.staging.exists()


# --- in one process, where a test can do something in the middle -----------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BUFFER_BYTES", 2048)
    monkeypatch.setattr(pool, "MAX_WRITERS", 1)
    make_run(tmp_path, (100, 200))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def once(action):
    """Return an observer that does something when the first bytes have been moved."""
    actions = [action]
    return lambda num_bytes: actions.pop()() if actions else None


@pytest.mark.parametrize("name", ["trainer_state.json", "global_step200/zero_pp_rank_0_mp_rank_00_model_states.pt"])
@pytest.mark.parametrize("how", ["touch", "append", "remove", "replace"])
def test_a_source_that_changes_meanwhile_is_refused(run, name, how):
    file = run / "checkpoint-200" / name

    def change():
        if how == "touch":
            os.utime(file)
        elif how == "append":
            file.open("ab").write(b" ")
        elif how == "remove":
            file.unlink()
        else:
            (run / "new").write_bytes(file.read_bytes())
            (run / "new").replace(file)

    with pytest.raises(SourceError, match=r"changed while it was read|No such file") as caught:
        write(plan_merge(run / "recipe.yaml", run / "out"), once(change))
    assert file.name in caught.value.problems[0].where
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-100", "checkpoint-200", "recipe.yaml"]


def test_a_hard_link_meanwhile_is_no_change(run):
    file = run / "checkpoint-200" / "trainer_state.json"
    write(plan_merge(run / "recipe.yaml", run / "out"), once(lambda: os.link(file, run / "backup")))
    assert (run / "out" / "trainer_state.json").read_bytes() == file.read_bytes()


def interrupted(run, options, observe):
    with pytest.raises(Interrupted):
        write(plan_merge(run / "recipe.yaml", run / "out", options), observe)


@pytest.mark.parametrize("before", [False, True])
def test_checksums(run, before):
    """The digests are those of the whole files, also of what an earlier run wrote with or without them."""
    moved = []

    def observe(num_bytes):
        moved.append(num_bytes)
        if sum(moved) > 60_000:
            signal.raise_signal(signal.SIGINT)

    interrupted(run, Options(checksum=before), observe)
    assert peek(run / "out").num_bytes > 30_000
    composition = plan_merge(run / "recipe.yaml", run / "out", Options(checksum=True))
    seen, told = [], []
    write(composition, seen.append, told.append)
    assert len(told) == 1
    assert sum(seen) == bytes_to_move(composition) > composition.plan.num_bytes

    manifest = json.loads((run / "out" / "llmtailor.json").read_text())
    digests = {row["path"]: row["xxh3_128"] for row in manifest["files"]}
    assert digests == {path: xxh3_128((run / "out" / path).read_bytes()).hexdigest() for path in digests}
    assert {*digests, "llmtailor.json", "README.md"} == set(contents(run / "out"))
    num_digested = 0
    for source in manifest["sources"]:
        for row in source["files"]:
            if "xxh3_128" in row:
                num_digested += 1
                assert row["xxh3_128"] == xxh3_128((Path(source["path"]) / row["path"]).read_bytes()).hexdigest()
    assert num_digested == len({(piece.source, piece.extent.path) for piece in copies(composition.plan)})


def copies(plan):
    return [piece for file in plan.files for piece in file.pieces if isinstance(piece, (Copy, Cast))]


def test_the_space_that_an_earlier_run_takes_counts_as_free(run, monkeypatch):
    def observe(num_bytes):
        if peek(run / "out") and peek(run / "out").num_bytes > 50_000:
            signal.raise_signal(signal.SIGINT)

    interrupted(run, Options(), observe)
    composition = plan_merge(run / "recipe.yaml", run / "out")
    monkeypatch.setattr(space, "free_bytes", lambda out: composition.report.needed_bytes - 50_000)
    write(composition)
    shutil.rmtree(run / "out")
    with pytest.raises(StorageError, match="bytes are needed"):
        write(composition)
    assert not (run / "out").exists()


# ``--checksum`` compares what it reads with what the sources state: a bit that a disk has flipped is not copied on

PARAM = State("model.layers.1.mlp.up_proj.weight", EXP_AVG)
PARTS = tuple(map(Part, ("embed_tokens", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "lm_head")))


def stock(root: Path) -> Path:
    return make(root, 100)


def without_deepspeed(root: Path) -> Path:
    """A composite; weights and masters are one file that only its llmtailor.json has a checksum of."""
    return convert(stock(root), root / "checkpoint-plain", stage=0)


def partial(root: Path) -> Path:
    save_partial(root / "run", stock(root), PARTS, Ledger("saver"))
    return root / "run" / "partial" / "step-00000100"


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        (stock, PARAM, r"optim_states\.pt: .*data/\d+ does not match its checksum"),
        (without_deepspeed, PARAM, r"optimizer\.pt: it is not as it was written"),
        (without_deepspeed, State(PARAM.param, MASTER), r"model\.safetensors: it is not as it was written"),
        (partial, PARAM, r"rank-0000\d-of-00002\.safetensors: it is not as it was written"),
    ],
)
def test_a_flipped_bit_is_refused(tmp_path, kind, state, told):
    source = kind(tmp_path)
    merge(source, tmp_path / "sound", checksum=True)
    flip_state(source, state, 5)
    with pytest.raises(SourceError, match=told) as caught:
        merge(source, tmp_path / "out", checksum=True)
    assert "verify --deep" in caught.value.problems[0].fix
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.llmtailor-staging").exists()


def test_a_composites_small_files_may_be_changed_on_purpose(tmp_path):
    source = without_deepspeed(tmp_path)
    path = source / "trainer_state.json"
    path.write_text(path.read_text().replace('"epoch"', '"epoch" '))
    merge(source, tmp_path / "out", checksum=True)
    assert (tmp_path / "out" / "trainer_state.json").read_text() == path.read_text()
