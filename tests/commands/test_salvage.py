"""The command: what it prints, its exit codes, and --replace."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import edit, make, make_run, model_states, optim_states
from helpers.commands import call
from helpers.files import contents, cut
from llmtailor.checkpoint.placement import Runs, count, union, without
from llmtailor.errors import StorageError, TargetError
from llmtailor.model.roles import EXP_AVG, State
from llmtailor.runs.scan import find_latest
from llmtailor.salvage import replace as replacing
from llmtailor.salvage.plan import plan_salvage
from llmtailor.salvage.replace import plan_replacement, put_salvaged_in_place
from llmtailor.storage import local as rename
from llmtailor.verify.verify import verify_checkpoint
from salvage.damage import flip_state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def test_it_says_what_went_back_before_it_writes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", groups="layer")
    flip_state(run / "checkpoint-300", State("model.layers.1.mlp.up_proj.weight", EXP_AVG), 3)
    before = contents(run)
    done = call("salvage", run, "--deep", "--dry-run")
    assert contents(run) == before
    assert "resumes at step 300" in done.stdout and "layer 2-3" in done.stdout
    assert "exp_avg lost in bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in done.stdout
    told = json.loads(call("salvage", run, "--deep", "--dry-run", "--json").stdout)
    assert told["outcome"] == "composite" and told["resume_from"] == str(run / "salvaged-checkpoint-300")
    assert {row["part"]: row["steps_back"] for row in told["parts"] if row["steps_back"]} == {"layer 1": 100}
    assert f"then resume with --resume_from_checkpoint {run / 'salvaged-checkpoint-300'}" in done.stdout


def damaged(run: Path) -> Path:
    """A file of the newest checkpoint is cut short; all that it holds can be made from the others."""
    cut(model_states(run / "checkpoint-300", 1))
    return run


def test_the_card_says_what_was_lost(run: Path) -> None:
    done = call("salvage", damaged(run))
    assert "--resume_from_checkpoint" in done.stdout and "without --replace, auto-resume would take" in done.stdout
    out = run / "salvaged-checkpoint-300"
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt" in (out / "README.md").read_text()
    assert "--force" in call("salvage", run, code=6).stderr
    call("salvage", run, "--force", "-q")


def test_an_older_one_is_better_than_nothing(run: Path) -> None:
    optim_states(run / "checkpoint-300", 1).unlink()
    shutil.rmtree(run / "checkpoint-200" / "global_step200")
    done = call("salvage", run)
    assert "checkpoint-100 is complete as far as its headers show" in done.stdout
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "checkpoint-300"]


def test_refusals(run: Path, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        optim_states(run / f"checkpoint-{step}", 1).unlink()
    assert "embed_tokens: no checkpoint holds all of it undamaged" in call("salvage", run, code=4).stderr
    call("salvage", tmp_path / "nowhere", code=4)
    call("salvage", run, "--replace", "-o", "x", code=2)


def test_another_save_is_not_taken_for_this_one(run: Path) -> None:
    """Of a mixed tag folder it can't be told what is of which step: it gives nothing."""
    other = optim_states(run / "checkpoint-200", 0).read_bytes()
    for rank in (0, 1):
        optim_states(run / "checkpoint-300", rank).write_bytes(other)
    found = plan_salvage(run)
    assert found.composition is None and found.base.index.root == run / "checkpoint-200"
    assert any("optimizer states from step" in problem.what for problem in found.refused)


def test_the_rank_of_another_save_is_lost(run: Path) -> None:
    shutil.copy(optim_states(run / "checkpoint-200", 1), optim_states(run / "checkpoint-300", 1))
    found = plan_salvage(run)
    assert [source.step for source in found.sources] == [300, 200] and found.base.step == 200
    assert {state.param for state in found.sources[0].lost} == {state.param for state in found.base.index.held}


def test_another_model_is_not_mixed_in(run: Path) -> None:
    def rename(tree: dict) -> None:
        for shapes in tree["param_shapes"]:
            for name in list(shapes):
                shapes[name.replace("up_proj", "gate_up_proj")] = shapes.pop(name)

    optim_states(run / "checkpoint-300", 1).unlink()
    for rank in (0, 1):
        edit(model_states(run / "checkpoint-200", rank), rename)
    found = plan_salvage(run)
    assert [source.step for source in found.sources] == [300, 100] and found.base.step == 100


def test_replace(run: Path) -> None:
    before = contents(damaged(run) / "checkpoint-300")
    assert "auto-resume" in call("salvage", run, "--replace").stdout
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "checkpoint-300", "damaged-checkpoint-300"]
    assert contents(run / "damaged-checkpoint-300") == before
    assert verify_checkpoint(run / "checkpoint-300", deep=True).is_resumable
    assert "is complete as far as its headers show" in call("salvage", run, "--replace").stdout
    assert "is intact" in call("salvage", run, "--replace", "--deep").stdout


def test_replace_puts_useless_ones_aside(run: Path) -> None:
    optim_states(run / "checkpoint-300", 1).unlink()
    call("salvage", run, "--replace")
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "damaged-checkpoint-300"]


def test_replace_keeps_a_whole_base_under_another_name(run: Path) -> None:
    """Its counters go on with newer states, so the composite takes its name."""
    (run / "checkpoint-300" / "scheduler.pt").unlink()
    call("salvage", run, "--replace")
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "damaged-checkpoint-300", "replaced-checkpoint-200"]
    assert find_latest(run).path == run / "checkpoint-200"


def test_replace_leaves_alone_what_another_salvage_has_written(run: Path) -> None:
    call("salvage", damaged(run))
    there = (run / "salvaged-checkpoint-300" / "llmtailor.json").stat().st_ino
    shutil.rmtree(run / "checkpoint-300")
    make(run, 300)
    assert "already exists" in call("salvage", damaged(run), "--replace", code=6).stderr
    assert (run / "salvaged-checkpoint-300" / "llmtailor.json").stat().st_ino == there


def test_replace_does_not_write_twice(run: Path) -> None:
    call("salvage", damaged(run))
    there = (run / "salvaged-checkpoint-300" / "llmtailor.json").stat().st_ino
    call("salvage", run, "--replace")
    assert (run / "checkpoint-300" / "llmtailor.json").stat().st_ino == there


def test_an_interrupted_replace_leaves_alone_what_has_changed_since(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone trained on, and saved another checkpoint-300 over the old one in the meantime."""
    for step in (200, 300):
        (run / f"checkpoint-{step}" / "scheduler.pt").unlink()
        cut(optim_states(run / f"checkpoint-{step}", 1))
    replacement = plan_replacement(plan_salvage(run))
    assert {path.name for path in replacement.aside} == {"checkpoint-200", "checkpoint-300"}
    monkeypatch.setattr(replacing, "put_in_place", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        put_salvaged_in_place(replacement)
    monkeypatch.undo()
    (run / "checkpoint-300" / "scheduler.pt").write_bytes(b"new")
    left = replacing.unfinished_replacement(run)
    assert left is not None and {path.name for path in left.aside} == {"checkpoint-200"}
    put_salvaged_in_place(left)
    assert folders(run) == ["checkpoint-100", "checkpoint-300", "damaged-checkpoint-200"]


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        '{"new": 1, "target": "checkpoint-300", "aside": []}',
        '{"new": {"from": "checkpoint-300", "files": "x"}, "target": "../checkpoint-300", "aside": []}',
        '{"new": {"from": "checkpoint-300", "files": "x"}, "target": "checkpoint-300", "aside": [{"to": "/tmp"}]}',
    ],
)
def test_a_damaged_record_of_renames_is_refused(run: Path, record: str) -> None:
    (damaged(run) / replacing.RECORD).write_text(record)
    assert "move this file" in call("salvage", run, "--replace", code=8).stderr
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "checkpoint-300"]


def test_replace_refuses_a_name_that_is_taken(run: Path) -> None:
    (damaged(run) / "damaged-checkpoint-300").mkdir()
    with pytest.raises(TargetError, match="taken"):
        plan_replacement(plan_salvage(run))


def test_a_rename_that_fails_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path, flag: int) -> bool:
        raise OSError(30, "Read-only file system", str(target))

    found = plan_salvage(damaged(run))
    monkeypatch.setattr(rename, "_renameat2", refuse)
    with pytest.raises(StorageError, match="Read-only"):
        put_salvaged_in_place(plan_replacement(found))


# --- sets of elements against Python's own ---------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    cuts = sorted(draw(st.sets(st.integers(0, 30), max_size=10)))
    return tuple(zip(cuts[0::2], cuts[1::2], strict=False))


def elements(of: Runs) -> set[int]:
    return {element for begin, end in of for element in range(begin, end)}


def is_tidy(of: Runs) -> bool:
    flat = [bound for run in of for bound in run]
    return flat == sorted(set(flat))


@given(runs(), runs(), runs())
def test_union(a: Runs, b: Runs, c: Runs) -> None:
    assert elements(union(a, b, c)) == elements(a) | elements(b) | elements(c)
    assert is_tidy(union(a, b, c)) and count(union(a, b, c)) == len(elements(union(a, b, c)))


@given(runs(), runs())
def test_without(a: Runs, b: Runs) -> None:
    assert elements(without(a, b)) == elements(a) - elements(b)
    assert is_tidy(without(a, b))


@pytest.mark.parametrize("pause", [0.01, 0.1])
def test_a_checkpoint_that_a_training_is_writing_is_not_moved(run: Path, monkeypatch, pause: float) -> None:
    """Whether it is still being written after the salvage, or was complete before that moved it."""
    monkeypatch.setattr(replacing, "SETTLED_S", 0.5)
    source = Path(shutil.copytree(run / "checkpoint-300", run / "source"))
    optim_states(run / "checkpoint-300").unlink()
    target, is_begun = run / "checkpoint-400", threading.Event()

    def save() -> None:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))
            is_begun.set()
            time.sleep(pause)

    training = threading.Thread(target=save)
    training.start()
    is_begun.wait()
    told = call("salvage", run, "--replace", code=6).stderr
    training.join()
    assert "checkpoint-400: it is being written, so it is not moved aside" in told
    assert contents(target) == contents(source)
    assert [name for name in folders(run) if "checkpoint-400" in name] == ["checkpoint-400"]
