"""What thin decides, says and refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.checkpoints import SMALL, edit, make, optim_states
from helpers.commands import run_here
from helpers.files import flip
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.cli.main import cli
from llmtailor.errors import SourceError, TailorError, TargetError, UsageError, VerificationError
from llmtailor.runs import thin as service
from llmtailor.runs.prune import ThinOptions
from llmtailor.runs.scan import scan_run
from llmtailor.runs.thin_plan import plan_thinning
from thin.scene import call, compose, folders, make_run, save_partial, sources, taken

ODD = {"layer 1", "layer 3", "lm_head"}
EVEN = {"layer 0", "layer 2", "norm", "embed_tokens"}


def becomes(told: dict) -> dict[int, str]:
    return {row["step"]: row["becomes"] for row in told["checkpoints"]}


def parts(told: dict) -> list[set[str]]:
    return [set(row["parts"]) for row in told["checkpoints"]]


def refusal(*words: object, kind: type[TailorError]) -> str:
    with pytest.raises(kind) as caught:
        CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert all(problem.where and problem.what for problem in caught.value.problems)
    return str(caught.value)


def test_a_dry_run_tells_and_touches_nothing(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 300))
    before = {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}
    result = CliRunner().invoke(cli, ["thin", str(run), "--strategy", "parity"], catch_exceptions=False)
    assert {str(path): path.stat().st_mtime_ns for path in run.rglob("*")} == before
    lines = result.stdout.splitlines()
    assert lines[2].startswith("checkpoint-100  deepspeed-zero3 on 2 ranks  partial/step-00000100  all")
    assert lines[3].startswith(
        "checkpoint-200  deepspeed-zero3 on 2 ranks  partial/step-00000200  layers 1, 3, lm_head"
    )
    assert lines[4].startswith("checkpoint-300  deepspeed-zero3 on 2 ranks  stays                  all")
    assert "steps that can be composed now:        100, 200, 300" in lines
    assert "steps that can be composed afterwards: 100, 200, 300" in lines
    assert f"({call('thin', run, '--strategy', 'parity')['freed_bytes']:,} bytes)" in lines[-1]
    assert "dry run: nothing was changed" in result.stderr and " would be freed (" in lines[-1]


def test_it_says_how_old_the_parts_of_each_step_become(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 300, 400))
    words = ("thin", run, "--strategy", "parity", "--keep-full-last", 1)
    ages = {age["step"]: age for age in call(*words)["ages"]}
    fresh = {"steps_back": 0, "parts": [], "only": None}
    assert all(age["now"] == fresh for age in ages.values())
    assert ages[100]["afterwards"] == ages[400]["afterwards"] == fresh
    for step, parts in ((200, EVEN), (300, ODD)):
        assert ages[step]["afterwards"]["steps_back"] == 100
        assert set(ages[step]["afterwards"]["parts"]) == parts
    text = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False).stdout
    assert " 200  all of that step  100 steps back: embed_tokens, layers 0, 2, norm" in text
    again = call(*words, "--yes") and call(*words)
    assert [age["now"] for age in again["ages"]] == [ages[step]["afterwards"] for step in sorted(ages)]
    older = call("thin", run, "--keep-optimizer-last", 1)
    assert [age["step"] for age in older["ages"]] == [100, 200, 300, 400]


def test_policies_choose_as_they_do_while_training(tmp_path):
    run = make_run(tmp_path / "run", range(100, 700, 100))
    everything = ODD | EVEN
    assert parts(call("thin", run, "--strategy", "parity")) == [everything, ODD, EVEN, ODD, EVEN, set()]
    assert parts(call("thin", run, "--strategy", "full"))[:5] == [everything] * 5
    assert parts(call("thin", run, "--select", "odd", "--select", "norm"))[:3] == [
        everything,
        *[{"layer 1", "layer 3", "norm"}] * 2,
    ]
    told = call("thin", run, "--strategy", "filter:first=1,last=0,every=2,groups=2,aux_every=1")
    aux = {"embed_tokens", "norm", "lm_head"}
    assert parts(told)[1:5] == [
        {"layer 0", *aux},
        {"layer 0", "layer 1", "layer 3", *aux},
        {"layer 0", *aux},
        {"layer 0", "layer 2", *aux},
    ]
    assert becomes(call("thin", run, "--strategy", "parity", "--keep-full-last", 5)) == {
        100: "partial",
        **dict.fromkeys(range(200, 700, 100), "stays"),
    }


def test_it_goes_on_where_it_was(tmp_path):
    """Thinned out again later, a run's partial checkpoints are one row."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    first = call("thin", run, "--strategy", "parity", "--yes")
    make(run, 400)
    second = call("thin", run, "--strategy", "parity", "--yes")
    assert [*parts(first)[:2], *parts(second)[:1]] == [ODD | EVEN, ODD, EVEN]
    ledgers = [json.loads(path.read_text())["ledger"] for path in sorted(run.glob("partial/*/manifest.json"))]
    assert len({ledger["lineage"] for ledger in ledgers}) == 1
    assert [ledger["saves"] for ledger in ledgers] == [1, 2, 3]
    assert ledgers[2]["held_by"]["layer 1"] == [1, 200]
    assert ledgers[2]["held_by"]["norm"] == [2, 300]
    assert sources(compose(run, 300, tmp_path / "out")) == dict.fromkeys(ODD, 200) | dict.fromkeys(EVEN, 300)


def test_another_attempt_is_told_by_its_losses(tmp_path):
    """The run resumed at 100 and came by 200 and 250 anew; nothing of the first attempt gets into its composites."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    log(run, {100: 3.0, 200: 2.0, 300: 1.0})
    call("thin", run, "--strategy", "parity", "--yes")
    make_run(run, (250, 350))
    log(run, {100: 3.0, 200: 2.5, 250: 2.2, 300: 1.5, 350: 1.2})
    call("thin", run, "--strategy", "parity", "--yes", "--keep-full-last", 2)
    assert folders(run)[:2] == ["checkpoint-300", "checkpoint-350"]
    ledgers = {path.parent.name: json.loads(path.read_text())["ledger"] for path in run.glob("partial/*/manifest.json")}
    old = ledgers["step-00000200"]["lineage"]
    assert ledgers["step-00000250"]["lineage"] != old
    assert ledgers["step-00000250"]["history"] == {old: 100}
    assert set(sources(compose(run, 250, tmp_path / "out")).values()) == {100, 250}


def log(run: Path, losses: dict[int, float]) -> None:
    """Have all full checkpoints tell of losses, as far as they had come."""
    for path in run.glob("checkpoint-*/trainer_state.json"):
        state = json.loads(path.read_text())
        told = [{"step": step, "loss": loss} for step, loss in losses.items() if step <= state["global_step"]]
        path.write_text(json.dumps({**state, "log_history": told}))


def test_beside_the_savers_partial_checkpoints(tmp_path):
    """One of the same step stands in if it holds the same; if it lacks something, the full one stays."""
    run = make_run(tmp_path / "run", (100, 150, 200, 300))
    ledger = save_partial(run, run / "checkpoint-100", ODD | EVEN, Ledger("saver"))
    shutil.rmtree(run / "checkpoint-100")
    ledger = save_partial(run, run / "checkpoint-200", EVEN, ledger)
    save_partial(run, run / "checkpoint-300", ODD | EVEN, ledger)
    make(run, 400)
    told = call("thin", run, "--strategy", "parity", "--yes")
    assert becomes(told) == {150: "partial", 200: "stays", 300: "partial", 400: "stays"}
    assert [row["is_written"] for row in told["checkpoints"]] == [True, False, False, False]
    assert told["checkpoints"][1]["why"] == "the composite of step 200 would have older states without it"
    assert told["composable_after"] == [100, 150, 200, 300, 400]
    for step in (150, 200, 300):
        assert set(sources(compose(run, step, tmp_path / f"{step}")).values()) == {step}


def test_a_partial_checkpoint_of_another_attempt_does_not_stand_in(tmp_path):
    run = make_run(tmp_path / "run", (100, 200))
    other = make(tmp_path / "other", 100)
    edit(optim_states(other), lambda tree: tree["optimizer_state_dict"]["fp32_flat_groups"][0].data.add_(1))
    save_partial(run, other, ODD | EVEN, Ledger("saver"))
    message = refusal("thin", run, "--strategy", "parity", "--yes", kind=VerificationError)
    assert "its values differ from those of" in message
    assert "checkpoint-100: master of model.embed_tokens.weight" in message
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "partial/step-00000100"]


def test_work_that_was_done_in_part_is_not_called_nothing(tmp_path):
    """Two checkpoints can't be thinned out, and the one between them has been."""
    run = make_run(tmp_path / "run", (100, 150, 200, 300))
    ledger = Ledger("saver")
    for step in (100, 200):
        other = make(tmp_path / "other", step)
        edit(optim_states(other), lambda tree: tree["optimizer_state_dict"]["fp32_flat_groups"][0].data.add_(1))
        ledger = save_partial(run, other, ODD | EVEN, ledger)
    done = run_here("thin", run, "--strategy", "parity", "--yes")
    assert done.returncode == 7, done.stderr
    assert "checkpoint-150: done" in done.stderr
    assert done.stderr.endswith("\n2 problems\n")


def test_what_others_need_stays(tmp_path):
    """The saver's base is lost: its later partial checkpoints can be composed thanks to a full one only."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    lost = save_partial(tmp_path / "elsewhere", run / "checkpoint-100", ODD | EVEN, Ledger("saver"))
    save_partial(run, run / "checkpoint-200", ODD, lost)
    shutil.rmtree(run / "checkpoint-200")
    told = call("thin", run, "--strategy", "parity")
    assert becomes(told) == {100: "stays", 300: "stays"}
    assert told["checkpoints"][0]["why"] == "step 200 could not be composed without it"
    assert becomes(call("thin", run, "--keep-optimizer-last", 1)) == {100: "stays", 300: "stays"}


def test_what_is_not_ours_stays(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 300, 400, 500, 600))
    (run / "checkpoint-100" / "notes").mkdir()
    (run / "checkpoint-100" / "notes" / "mine.txt").write_text("dear diary")
    (run / "checkpoint-200" / "trainer_state.json").unlink()
    (run / "checkpoint-300").rename(tmp_path / "moved")
    (run / "checkpoint-300").symlink_to(tmp_path / "moved")
    (run / "partial" / "step-00000400").mkdir(parents=True)
    optim_states(run / "checkpoint-500").unlink()
    told = call("thin", run, "--strategy", "full", "--yes")
    whys = {row["step"]: row["why"] for row in told["checkpoints"]}
    assert whys == {
        100: "it holds files of unknown origin: notes/",
        200: "trainer_state.json is missing, so it is not resumable",
        300: "it is a symbolic link",
        400: "partial/step-00000400 exists and is unfinished; llmtailor gc removes it",
        600: "",
    }
    assert "checkpoint-500/global_step500" in told["skipped"][0]["where"]
    assert (told["freed_bytes"], told["composable_after"]) == (0, [100, 300, 400, 600])
    whys = {row["step"]: row["why"] for row in call("thin", run, "--keep-optimizer-last", 1)["checkpoints"]}
    assert [step for step, why in whys.items() if not why] == [200, 400, 600]


OTHERS = ("README.md", "pytorch_model.bin", "model-ema.safetensors", "adapter_model.bin", "notes.md", "tokens.json")


@pytest.mark.parametrize("words", [("--strategy", "full"), ("--select", "norm"), ("--keep-optimizer-last", 1)])
def test_nobodys_files_go(tmp_path, words):
    """What a checkpoint holds besides its own keeps it as it is, whatever it is called."""
    run = make_run(tmp_path / "run", range(100, 900, 100))
    for step, name in zip(range(100, 700, 100), OTHERS, strict=True):
        (run / f"checkpoint-{step}" / name).write_text(f"mine: {name}")
    told = call("thin", run, *words, "--yes")
    whys = {row["step"]: row["why"] for row in told["checkpoints"]}
    for step, name in zip(range(100, 700, 100), OTHERS, strict=True):
        assert whys[step] == f"it holds files of unknown origin: {name}"
        assert (run / f"checkpoint-{step}" / name).read_text() == f"mine: {name}"
    assert becomes(told)[700] != "stays", "which has nothing but its own"
    assert ("checkpoint-700" in folders(run)) == ("--keep-optimizer-last" in words)


def test_a_folder_of_an_adapter_stays(tmp_path):
    """It is known, and no partial checkpoint would have it."""
    run = make_run(tmp_path / "run", (100, 200))
    root = run / "checkpoint-100"
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "tools.jinja").write_text("{}")
    [first, _] = call("thin", run, "--strategy", "full", "--yes")["checkpoints"]
    assert first["why"] == "it holds files that would be lost: additional_chat_templates/tools.jinja"


@pytest.mark.parametrize("words", [("--strategy", "full"), ("--keep-optimizer-last", 1)])
def test_the_best_model_stays(tmp_path, words):
    """A Trainer with load_best_model_at_end loads it when it ends, and warns and keeps the last if it is not there."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    state = json.loads((run / "checkpoint-300" / "trainer_state.json").read_text())
    state["best_model_checkpoint"] = "elsewhere/before/it/moved/checkpoint-200"
    (run / "checkpoint-300" / "trainer_state.json").write_text(json.dumps(state))
    whys = {row["step"]: row["why"] for row in call("thin", run, *words, "--yes")["checkpoints"]}
    assert whys == {100: "", 200: f"{run / 'checkpoint-300'} names it as the best model", 300: ""}
    assert (run / "checkpoint-200" / "model.safetensors").exists()


def test_composites_are_thinned_out_unless_their_card_was_edited(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 300))
    for step in (100, 200):
        composite = compose(run, step, tmp_path / f"composite-{step}")
        shutil.rmtree(run / f"checkpoint-{step}")
        composite.rename(run / f"checkpoint-{step}")
    with (run / "checkpoint-200" / "README.md").open("a") as card:
        card.write("evaluated: 0.81\n")
    told = call("thin", run, "--strategy", "full", "--yes")
    assert becomes(told) == {100: "partial", 200: "stays", 300: "stays"}
    assert told["checkpoints"][1]["why"] == "it holds files of unknown origin: README.md"


@pytest.mark.parametrize("words", [("--strategy", "parity"), ("--keep-optimizer-last", "1")])
def test_nothing_to_do(tmp_path, words):
    run = make_run(tmp_path / "run", (100,))
    for _ in range(2):
        result = CliRunner().invoke(cli, ["thin", str(run), *words, "--yes"], catch_exceptions=False)
        assert "nothing to thin beyond the newest 1" in result.stdout
        assert folders(run) == ["checkpoint-100"]


def test_a_damaged_newest_checkpoint(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 300))
    optim_states(run / "checkpoint-300").unlink()
    for words in (("--strategy", "full"), ("--strategy", "full", "--yes"), ("--keep-optimizer-last", 1, "--yes")):
        message = refusal("thin", run, *words, kind=SourceError)
        assert not (run / "partial").exists()
        assert "the newest checkpoint can't be used, so older ones are not touched" in message
        assert "optim_states shard 0 of 2 is missing" in message
    assert folders(run) == ["checkpoint-100", "checkpoint-200", "checkpoint-300"]


@pytest.mark.parametrize("command", [("thin", "--keep-optimizer-last", 1), ("gc",)])
def test_a_newest_checkpoint_that_only_a_merge_can_read(tmp_path, command):
    """Its states are all there, but a stock resume would not find them."""
    run = make_run(tmp_path / "run", (100, 200))
    (run / "checkpoint-200" / "trainer_state.json").unlink()
    message = refusal(command[0], run, *command[1:], "--yes", kind=SourceError)
    assert "the newest checkpoint is not resumable, so older ones are not touched" in message
    assert "checkpoint-200/trainer_state.json: the file is missing" in message
    assert folders(run) == ["checkpoint-100", "checkpoint-200"]
    assert len(scan_run(run).usable) == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "it needs the parts that older checkpoints keep"),
        (
            ("--strategy", "parity", "--keep-optimizer-last", 2),
            "--strategy and --keep-optimizer-last can't be combined",
        ),
        (("--keep-optimizer-last", 2, "--keep-full-last", 2), "it needs --strategy or --select"),
        (("--strategy", "parrot"), "there is no policy 'parrot'"),
        (("--strategy", "adaptive:0.25"), "only the training can measure"),
        (("--strategy", "adaptive:no"), "only the training can measure"),
        (("--select", "layer 9"), "out of range"),
        (("--select", "*.mlp.*"), "the selectors match only some of the tensors of layers 0-3"),
    ],
)
def test_words_that_make_no_sense(tmp_path, words, what):
    run = make_run(tmp_path / "run", (100, 200))
    assert what in refusal("thin", run, *words, kind=UsageError)


def test_while_a_training_saves(tmp_path):
    run = make_run(tmp_path / "run", (100, 200))
    program = (
        "import sys; from pathlib import Path; from llmtailor.runs.folder import RunFolder; "
        "RunFolder(Path(sys.argv[1])).lock(); print('in'); input()"
    )
    command = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout.readline() == "in\n"
        for command in (("thin", run, "--strategy", "parity"), ("thin", run, "--keep-optimizer-last", 1), ("gc", run)):
            message = refusal(*command, "--yes", kind=TargetError)
            assert "a training is saving partial checkpoints here" in message
        assert becomes(call("thin", run, "--strategy", "parity")) == {100: "partial", 200: "stays"}
        training.communicate("\n")
    assert folders(run) == ["checkpoint-100", "checkpoint-200"]
    assert call("thin", run, "--strategy", "parity", "--yes")["composable_after"] == [100, 200]


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    """The training writes into the checkpoint that is thinned out: it stays, and nothing else appears."""
    run = make_run(tmp_path / "run", (100, 200))
    plan = plan_thinning(run, ThinOptions(1, "full"))
    os.utime(run / "checkpoint-100" / "config.json")
    (run / "partial").mkdir()
    with pytest.raises(SourceError, match=r"config\.json: the file changed"):
        service.thin(plan)
    assert folders(run) == ["checkpoint-100", "checkpoint-200"]


@pytest.mark.parametrize("words", [("--strategy", "full"), ("--keep-optimizer-last", 1)])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_appears_meanwhile(tmp_path, monkeypatch, words, is_there):
    """Someone writes notes while gigabytes are written: they are not lost, even if the partial one was there before."""
    run = make_run(tmp_path / "run", (100, 200))
    if is_there and words[0] == "--strategy":
        call("thin", run, *words)
        shutil.copytree(run / "checkpoint-100", tmp_path / "kept")
        call("thin", run, *words, "--yes")
        (tmp_path / "kept").rename(run / "checkpoint-100")

    def check(*arguments):
        (run / "checkpoint-100" / "global_step100" / "notes.md").write_text("mine")
        return really(*arguments)

    name = "check_composable" if words[0] == "--strategy" else "check_crcs"
    really = getattr(service, name)
    monkeypatch.setattr(service, name, check)
    message = refusal("thin", run, *words, "--yes", kind=SourceError)
    assert "global_step100/notes.md: it appeared in the meantime" in message
    assert (run / "checkpoint-100" / "global_step100" / "notes.md").read_text() == "mine"
    assert scan_run(run).usable[0].step == 100


@pytest.mark.parametrize("which", ["rank-00001", "trainer_state"])
def test_what_does_not_read_back_is_not_relied_on(tmp_path, monkeypatch, which):
    """A disk that loses a bit after the write: the full checkpoint stays."""

    def lose(path: Path, data: bytes) -> None:
        [victim] = path.parent.glob(f"{which}*")
        flip(victim, -5)
        written(path, data)

    written = service.write_durably
    monkeypatch.setattr(service, "write_durably", lose)
    run = make_run(tmp_path / "run", (100, 200))
    assert "does not read back" in refusal("thin", run, "--strategy", "full", "--yes", kind=VerificationError)
    assert folders(run) == ["checkpoint-100", "checkpoint-200"]


def test_files_linked_elsewhere_free_nothing(tmp_path):
    run = make_run(tmp_path / "run", (100, 200), shape=SMALL)
    os.link(run / "checkpoint-100" / "model.safetensors", tmp_path / "exported.safetensors")
    size = (tmp_path / "exported.safetensors").stat().st_size
    alone = call("thin", make_run(tmp_path / "alone", (100, 200), shape=SMALL), "--strategy", "full")["freed_bytes"]
    before = taken(tmp_path)
    told = call("thin", run, "--strategy", "full", "--yes")
    assert told["freed_bytes"] == alone - size == before - taken(tmp_path)
