"""The scripts for cluster jobs: variables in, exit codes out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import make_run
from helpers.commands import call
from helpers.places import ROOT
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.formats.registry import display_name
from thin.scene import save_partial

SCRIPTS = ROOT / "scripts"
OURS = {
    *("CONFIG_YML", "OUTPUT_PATH", "NUM_GPU", "COPY_TOKENIZER", "FAILURE_STEP", "TOTAL_LAYERS", "STRATEGY"),
    *("LAYER_WISE_CHECKPOINT_JSON", "CHECKPOINT_PATH", "BASE_CHECKPOINT", "LLMTAILOR"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = make_run(tmp_path_factory.mktemp("run"), (10, 20, 30))
    for step in (10, 20, 30):
        (root / f"checkpoint-{step}" / "tokenizer.json").write_text("{}")
    log = [{"step": 20, "flag": [1, 2, 3, 4]}, {"step": 30, "flag": [0, 1, 2]}]
    (root / "flags.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return root


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Callable[[], list[list[str]]]:
    """Stands for llmtailor, and ends by the codes in ``CODES``, in turn; returns the words of its calls."""
    program, calls = tmp_path / "llmtailor-stub", tmp_path / "stub-calls"
    program.write_text(
        "#!/usr/bin/env bash\n"
        f'printf "%q " "$@" >>"{calls}"; echo >>"{calls}"\n'
        f'read -r -a codes <<<"${{CODES:-0}}"; number=$(wc -l <"{calls}")\n'
        'exit "${codes[number - 1]:-${codes[-1]}}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("LLMTAILOR", str(program))
    return lambda: [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def start(script: str, *arguments: str, code: int = 0, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in OURS - {"LLMTAILOR"}}
    environment |= {key: str(value) for key, value in variables.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run([str(SCRIPTS / script), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def steps(out: Path) -> list[int]:
    return [row["step"] for row in json.loads((out / "llmtailor.json").read_text())["parts"]]


def test_a_benchmark_makes_its_checkpoints_and_runs(tmp_path):
    words = ["--shape", "tiny", "--rounds", 1, "--no-others", "--cases", "3@2:fsdp@1", "--work", tmp_path]
    command = [sys.executable, SCRIPTS.parent / "benchmarks" / "bench_convert.py", *words]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"3@2 -> fsdp@1 +convert +[0-9]", done.stdout)


def test_a_recipe(run, tmp_path):
    config = SCRIPTS.parent / "configs" / "parity.yaml"
    out = tmp_path / "out"
    start("start_merge.sh", "--quiet", CONFIG_YML=config, OUTPUT_PATH=out, NUM_GPU=2, RUN=run)
    assert steps(out) == [20, 20, 10, 20, 10, 20, 20]
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize("config", [None, "made recipe.yaml"])
def test_the_update_log(run, tmp_path, stub, config):
    out = tmp_path / "out"
    variables = {"CONFIG_YML": tmp_path / config} if config else {}
    start(
        "start_merge.sh", OUTPUT_PATH=out, CHECKPOINT_PATH=run, LAYER_WISE_CHECKPOINT_JSON=run / "flags.jsonl",
        FAILURE_STEP=30, TOTAL_LAYERS=4, BASE_CHECKPOINT=run / "checkpoint-10", COPY_TOKENIZER=0, **variables,
    )  # fmt: skip
    assert [words[0] for words in stub()] == ["recipe", "merge"][not config :]
    for words in stub():
        call(*words)
    assert steps(out) == [10, 30, 30, 20, 20, 30, 10]
    assert not (out / "tokenizer.json").exists()


def test_a_runs_folder(run, tmp_path, stub):
    out = tmp_path / "out"
    start("start_merge.sh", OUTPUT_PATH=out, CHECKPOINT_PATH=run, FAILURE_STEP=25, STRATEGY="parity")
    [words] = stub()
    call(*words)
    assert steps(out) == [20, 20, 10, 20, 10, 20, 20]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"OUTPUT_PATH": None, "CONFIG_YML": "x"}, "OUTPUT_PATH"),
        ({}, "CHECKPOINT_PATH"),
        ({"LAYER_WISE_CHECKPOINT_JSON": "x", "CONFIG_YML": "x"}, "CHECKPOINT_PATH"),
        ({"LAYER_WISE_CHECKPOINT_JSON": "x", "CHECKPOINT_PATH": "x"}, "FAILURE_STEP"),
        ({"CONFIG_YML": "x", "COPY_TOKENIZER": "maybe"}, "COPY_TOKENIZER"),
        ({"CONFIG_YML": "x", "LLMTAILOR": "/nowhere/llmtailor"}, "not installed"),
    ],
)
def test_variables_that_are_missing_or_off(tmp_path, stub, variables, told):
    given = {"OUTPUT_PATH": tmp_path / "out", **variables}
    result = start("start_merge.sh", code=2, **{key: value for key, value in given.items() if value is not None})
    assert told in result.stderr and not stub()


def test_further_arguments_and_the_exit_code_are_llmtailors(stub):
    start("start_merge.sh", "--force", "-q", CONFIG_YML="r.yaml", OUTPUT_PATH="a b", NUM_GPU=3, CODES=6, code=6)
    assert stub() == [["merge", "r.yaml", "a b", "--num-gpu", "3", "--force", "-q"]]


TRAINING = """#!/usr/bin/env bash
# fails at first, and succeeds when it is resumed
echo "$@" >>"$CALLS"
[[ $* == *--resume_from_checkpoint* ]] || exit 17
"""


def job(tmp_path, output_dir, code=0, **variables):
    program = tmp_path / "training"
    program.write_text(TRAINING)
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"  # LAUNCH is words, and the folder's name may have several
    variables = {
        "LAUNCH": "training",
        "PATH": path,
        "CALLS": tmp_path / "calls",
        "OUTPUT_DIR": output_dir,
        "NUM_GPU": 2,
        **variables,
    }
    result = start("slurm_resume.sh", "train.py", code=code, **variables)
    return result, (tmp_path / "calls").read_text().splitlines()


def test_a_job_resumes_from_the_composite(run, tmp_path):
    _, calls = job(tmp_path, run, STRATEGY="parity")
    assert calls == [
        f"train.py --output_dir {run}",
        f"train.py --output_dir {run} --resume_from_checkpoint {display_name(run / 'checkpoint-30-merged')}",
    ]
    assert steps(run / "checkpoint-30-merged") == [30, 30, 20, 30, 20, 30, 30]


def test_a_requeued_job_goes_on_from_its_partial_checkpoints(run, tmp_path):
    odd, ledger = ["layer 1", "layer 3", "lm_head"], Ledger("saver")
    even = ["embed_tokens", "layer 0", "layer 2", "norm"]
    for step, parts in {10: odd + even, 20: odd, 30: even}.items():
        ledger = save_partial(tmp_path / "run", run / f"checkpoint-{step}", parts, ledger)
    _, calls = job(tmp_path, tmp_path / "run")
    composite = tmp_path / "run" / "checkpoint-30"
    assert calls == [f"train.py --output_dir {tmp_path}/run --resume_from_checkpoint {display_name(composite)}"]
    assert steps(composite) == [30, 30, 20, 30, 20, 30, 20]


def test_a_job_resumes_from_a_complete_checkpoint_as_it_is(run, tmp_path):
    before = sorted(path.name for path in run.iterdir())
    _, calls = job(tmp_path, run)
    newest = display_name(run / "checkpoint-30")
    assert calls[1:] == [f"train.py --output_dir {run} --resume_from_checkpoint {newest}"]
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_job_does_not_resume_when_there_is_nothing_to_resume_from(tmp_path):
    (tmp_path / "empty").mkdir()
    result, calls = job(tmp_path, tmp_path / "empty", code=4)
    assert "not resuming" in result.stderr
    assert calls == [f"train.py --output_dir {tmp_path}/empty"]


def test_a_job_shares_a_merge(stub):
    start(
        "slurm_merge.sh", "convert", "a", "b", LAUNCH=os.environ["LLMTAILOR"], LLMTAILOR="llmtailor", CODES="3", code=3
    )
    assert stub() == [["-m", "llmtailor", "convert", "a", "b", "--distributed"]]


def test_a_job_without_output(tmp_path):
    start("slurm_merge.sh", "merge", code=2)
