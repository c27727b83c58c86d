"""What an attempt leaves behind that was given up: never part of what is composed after it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from attempts.campaign import EVERYTHING, SAVING, play
from attempts.world import MOMENTS, PARTS, World, read_full, step_of
from helpers.cases import diagonal, mostly_long
from helpers.commands import call, run_here
from llmtailor.formats.provenance import stated_attempt
from llmtailor.runs import composing as newest
from llmtailor.saving import SaveFailed


@pytest.fixture
def world(tmp_path):
    """Parity saves at 3, 6 and 9, composed."""
    world = World(tmp_path / "run", 0)
    world.start(None, 0, None)
    for _ in range(3):
        world.train_and_save(3)
    world.compose()
    yield world
    world.stop()


def roll_back(world, at):
    source = world.compose(at)
    world.resume_from(source, at)


def lines(world, name="saves.jsonl"):
    return [json.loads(line) for line in (world.run / "partial" / name).read_text().splitlines()]


@pytest.mark.parametrize(("at", "steps"), diagonal([3, 6], [(9,), (8, 10)]))
def test_a_composite_of_the_attempt_that_was_given_up_is_not_used(world, at, steps, caplog):
    with caplog.at_level(logging.WARNING, "llmtailor.saving"):
        roll_back(world, at)
    [told] = [record.getMessage() for record in caplog.records if "moved abandoned checkpoints" in record.getMessage()]
    assert "checkpoint-9" in told and "step-00000009" in told
    for step in steps:
        world.train_and_save(step - world.present.step)
    out = world.compose()
    assert step_of(out) == steps[-1]
    assert set(read_full(out).values()) <= {(world.present.number, step) for step in steps} | {(1, 3), (1, 6)}


def test_a_save_of_the_very_next_step_is_given_up_too(world):
    world.train_and_save(1)
    world.resume_from(world.run / "checkpoint-9", 9)
    saves = [path.name for path in (world.run / "partial").glob("step-*")]
    assert "step-00000010.abandoned" in saves and "step-00000010" not in saves


def test_put_back_it_is_known_by_what_it_states(world):
    """Also without the record of attempts, and under the name of a step that the new attempt has not reached."""
    old = world.run / "checkpoint-9"
    shutil.copytree(old, world.run.parent / "backup")
    roll_back(world, 3)
    world.train_and_save(4)
    shutil.copytree(world.run.parent / "backup", old)
    assert step_of(world.compose()) == 7
    (world.run / "partial" / "attempts.json").unlink()
    assert step_of(world.compose()) == 7
    result = call("latest", world.run)
    assert result.stdout.strip().endswith("checkpoint-7") and "abandoned attempt" in result.stderr


def test_a_full_checkpoint_of_the_trainers_does_not_win_by_its_number(world):
    """A stock "best" checkpoint stays where it is, and is passed over."""
    world.train(2)
    world.save_full()
    assert step_of(world.compose()) == 11
    roll_back(world, 6)
    world.train_and_save(1)
    assert (world.run / "checkpoint-11").is_dir()
    assert step_of(world.compose()) == 7
    call("salvage", world.run, "--dry-run")
    recipe = run_here("recipe", world.run).stdout
    assert "skipped" in recipe and "checkpoint-11" in recipe
    for command in ("thin", "gc"):
        told = json.loads(
            run_here(command, world.run, *(["--strategy", "parity"] * (command == "thin")), "--json").stdout
        )
        assert 11 not in told["composable_before"] and 9 not in told["composable_before"]


def test_an_attempt_that_dies_before_its_first_save_has_given_up_what_came_later(world):
    roll_back(world, 6)
    world.train(2)
    assert step_of(world.compose()) == 6
    assert run_here("latest", world.run).stdout.strip().endswith("checkpoint-6")


def test_where_the_given_up_one_is_in_the_way_the_composite_is_beside_it(world):
    """And the same command finds it there again."""
    roll_back(world, 6)
    shutil.copytree(world.run / "abandoned-checkpoint-9", world.run / "checkpoint-9")
    world.train_and_save(3)
    out = world.compose()
    assert out.name == "checkpoint-9-merged"
    again = run_here("merge", "--run", world.run, "--json")
    assert json.loads(again.stdout)["is_there_already"] and json.loads(again.stdout)["out"].endswith(out.name)
    (out / "llmtailor.json").unlink()  # it might be anything now
    again = run_here("merge", "--run", world.run, "--json")
    assert json.loads(again.stdout)["out"].endswith("checkpoint-9-merged-2")
    assert read_full(world.run / "checkpoint-9-merged-2") == read_full(out)


@pytest.mark.parametrize("at", mostly_long([None, 6], 6))
def test_a_composite_in_another_format_is_known_again(world, at):
    """It states its attempt, but is no source: its format has no place for what the saves also hold."""
    words = ["merge", "--run", world.run, *([] if at is None else ["--at", at]), "--json"]
    for form in ("dcp", "fsdp", "universal"):
        told = [json.loads(call(*words, "--to", form).stdout) for _ in range(2)]
        assert [one["is_there_already"] for one in told] == [False, True] and told[0]["out"] == told[1]["out"]
        assert not any("does not record its attempt" in one["what"] for one in told[1]["notices"])
        assert stated_attempt(Path(told[0]["out"])) == stated_attempt(world.run / "partial" / f"step-{at or 9:08}")
    made = [json.loads(call(*words).stdout) for _ in range(2)]
    assert made[1]["is_there_already"] and stated_attempt(Path(made[1]["out"]))
    assert (Path(made[1]["out"]) / "trainer_state.json").is_file()


def test_a_recipe_may_mix_attempts_and_says_so(world, tmp_path):
    """Nothing of either attempt is used beside what came out, and a resume from it begins with a complete save."""
    roll_back(world, 6)
    world.train_and_save(3)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "checkpoint-9"
    recipe.write_text(
        f"merge_method: passthrough\nbase_model: {world.run}/partial/step-00000009\n"
        f"parts:\n  - from: {world.run}/abandoned-checkpoint-9\n    select: [even, odd, embed_tokens, lm_head]\n"
    )
    told = call("merge", recipe, out)
    assert "different attempts" in told.stderr
    number = world.present.number
    world.start(None, 9, out)
    assert world.present.saver.ledger.held_by == {}
    assert (world.run / "partial" / "step-00000009.abandoned-2").is_dir()
    world.train_and_save(1)
    assert set(read_full(world.compose()).values()) == {(number + 1, 10)}


def test_a_training_without_the_saver_is_used_if_nothing_else_went_on(world):
    world.resume_from(world.run / "checkpoint-9", 9, with_saver=False)
    world.train(5)
    world.save_full()
    assert step_of(world.compose()) == 14


def test_and_not_used_if_the_run_itself_went_on(world):
    shutil.copytree(world.compose(3), world.run.parent / "elsewhere")
    saver_attempt = world.present
    world.resume_from(world.run.parent / "elsewhere", 3, with_saver=False)
    world.train(8)
    world.save_full()
    result = run_here("merge", "--run", world.run, "--json")
    told = json.loads(result.stdout)
    assert told["out"].endswith("checkpoint-9")
    assert any("--trust-unrecorded" in notice["fix"] for notice in told["notices"])
    asked = json.loads(run_here("merge", "--run", world.run, "--trust-unrecorded", "--dry-run", "--json").stdout)
    assert asked["global_step"] == 11
    assert saver_attempt.saver is not None
    for words in (["gc", world.run], ["thin", world.run, "--strategy", "parity"]):
        assert "use --trust-unrecorded" in call(*words, code=4).stderr
        told = json.loads(run_here(*words, "--trust-unrecorded", "--json").stdout)
        assert told["composable_before"] == told["composable_after"] == [3, 6, 9, 11]


def test_the_log_of_saves_has_the_run_as_it_stands(world):
    assert [line["step"] for line in lines(world)] == [3, 6, 9]
    log = world.run / "partial" / "saves.jsonl"
    with log.open("a") as file:
        file.write('{"step": 10, "torn')
    world.train_and_save(2)
    assert log.read_text().splitlines()[-1].startswith('{"step": 11')
    roll_back(world, 6)
    world.train_and_save(1)
    assert [line["step"] for line in lines(world)] == [3, 6, 7]
    assert [line["step"] for line in lines(world, "saves.abandoned.jsonl")] == [9, 11]


def test_whatever_goes_wrong_in_a_save_is_save_failed(world, monkeypatch):
    """Nothing is left of it, and the next save holds what it should have held."""
    world.train(3)
    monkeypatch.setattr(world.present.saver.training, "fragments", lambda params: 1 / 0)
    with pytest.raises(SaveFailed, match="ZeroDivisionError"):
        world.save()
    assert not (world.run / "partial" / "step-00000012").exists()
    monkeypatch.undo()
    world.save()
    assert lines(world)[-1]["step"] == 12 and "failed" in lines(world)[-2]
    assert read_full(world.compose()).keys() == {*PARTS, *MOMENTS.values()}


def test_a_damaged_record_of_attempts_is_refused(world):
    (world.run / "partial" / "attempts.json").write_text('{"schema": "llmtailor.attempts/1", "attempts": [1]}')
    for command in (["merge", "--run", world.run], ["latest", world.run], ["salvage", world.run], ["gc", world.run]):
        assert "the attempt record is damaged" in call(*command, code=4).stderr


def test_the_saver_deletes_nothing_that_it_did_not_make(tmp_path):
    """Neither what a user put into a partial checkpoint that is no longer needed, nor into an unfinished one."""
    world = World(tmp_path / "run", 0)
    world.start(None, 0, None)
    world.present.saver.record.keep_composable = 1
    partial = world.run / "partial"
    for step in range(1, 6):
        world.train_and_save(1)
        if step == 2:
            (partial / "step-00000002" / "notes.md").write_text("the loss spiked here")
    assert sorted(path.name for path in partial.glob("step-*")) == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    torn = partial / "step-00000006"
    torn.mkdir()
    (torn / "notes.md").write_text("mine")
    world.resume_from(world.compose(), 5)
    world.train_and_save(1)
    assert (partial / "step-00000006.abandoned" / "notes.md").read_text() == "mine"
    world.stop()


def test_a_composite_with_older_parts_does_not_win_over_the_saves_of_its_step(world):
    """One that was composed by another strategy, under the name that the newest state would have."""
    shutil.rmtree(world.run / "checkpoint-9")
    call("merge", "--run", world.run, "--strategy", "parity", world.run / "checkpoint-9")
    assert read_full(world.run / "checkpoint-9")["layer 1"] == (1, 6)
    world.train_and_save(3)
    made = read_full(world.compose(9))
    assert made["layer 1"] == (1, 6) and made["layer 0"] == (1, 9)
    world.train_and_save(3)
    stale = world.run / "checkpoint-15"
    call("merge", "--run", world.run, "--strategy", "parity", "--flip", stale)
    held = read_full(stale)
    newer = [part for part, made in read_full(world.compose()).items() if made[1] > held[part][1]]
    assert newer


def test_a_process_that_waits_sees_what_another_publishes_after_its_scan(world, monkeypatch):
    """Its own output would then get another name, which nobody writes."""
    plan, published = newest.plan_merge, []

    def late(*arguments):
        if not published:
            monkeypatch.setattr(newest, "plan_merge", plan)
            published.append(newest.compose_newest(world.run))
        return plan(*arguments)

    world.train_and_save(3)
    monkeypatch.setattr(newest, "plan_merge", late)
    found = newest.compose_newest(world.run, waits=True)
    assert published[0].is_new and (found.path, found.is_new) == (published[0].path, False)


# seed 143 composes nothing
CASES = [*((seed, EVERYTHING) for seed in range(100, 201) if seed != 143), *((seed, SAVING) for seed in range(8))]


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[0]), ids=lambda case: str(case[0]))
def test_no_history_mixes_attempts_or_loses_what_is_promised(tmp_path, case):
    seed, actions = case
    world = World(tmp_path / "run", seed)
    play(world, 24, actions)
    assert world.outputs
    shutil.rmtree(tmp_path)
