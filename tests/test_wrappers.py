"""The scripts for cluster jobs: variables in, exit codes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cases import mostly_long
from helpers.checkpoints import SMALL, make
from llmtailor.formats.registry import display_name

SCRIPTS = Path(__file__).parents[1] / "scripts"
OURS = {
    *("CONFIG_YML", "OUTPUT_PATH", "NUM_GPU", "COPY_TOKENIZER", "FAILURE_STEP", "TOTAL_LAYERS", "STRATEGY"),
    *("LAYER_WISE_CHECKPOINT_JSON", "CHECKPOINT_PATH", "BASE_CHECKPOINT", "LLMTAILOR"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    for step in (10, 20, 30):
        make(root, step, shape=SMALL)
        (root / f"checkpoint-{step}" / "tokenizer.json").write_text("{}")
    log = [{"step": 20, "flag": [1, 2, 3, 4]}, {"step": 30, "flag": [0, 1, 2]}]
    (root / "flags.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return root


@pytest.fixture(scope="module")
def partial_run(tmp_path_factory):
    """A run that saved parts of its model at steps 2, 4 and 6, and nothing else."""
    from saving.loop import Loop

    root = tmp_path_factory.mktemp("partial-run")
    Loop(root, hidden=8, layers=4, policy="parity").trained(3, 2)
    return root


def start(script: str, *arguments: str, code: int = 0, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in OURS}
    environment |= {key: str(value) for key, value in variables.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run([str(SCRIPTS / script), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def steps(out: Path) -> list[int]:
    return [row["step"] for row in json.loads((out / "llmtailor.json").read_text())["parts"]]


def test_a_recipe(run, tmp_path):
    config = SCRIPTS.parent / "configs" / "parity.yaml"
    out = tmp_path / "out"
    start("start_merge.sh", "--quiet", CONFIG_YML=config, OUTPUT_PATH=out, NUM_GPU=2, RUN=run)
    assert steps(out) == [20, 20, 10, 20, 10, 20, 20]
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize("config", mostly_long([None, "made recipe.yaml"], "made recipe.yaml"))
def test_the_update_log(run, tmp_path, config):
    out = tmp_path / "out"
    variables = {"CONFIG_YML": tmp_path / config} if config else {}
    start(
        "start_merge.sh", OUTPUT_PATH=out, CHECKPOINT_PATH=run, LAYER_WISE_CHECKPOINT_JSON=run / "flags.jsonl",
        FAILURE_STEP=30, TOTAL_LAYERS=4, BASE_CHECKPOINT=run / "checkpoint-10", COPY_TOKENIZER=0, **variables,
    )  # fmt: skip
    assert steps(out) == [10, 30, 30, 20, 20, 30, 10]
    assert not (out / "tokenizer.json").exists()
    if config:
        assert "base_model" in (tmp_path / config).read_text()


def test_a_runs_folder(run, tmp_path):
    out = tmp_path / "out"
    start("start_merge.sh", OUTPUT_PATH=out, CHECKPOINT_PATH=run, FAILURE_STEP=25, STRATEGY="parity")
    assert steps(out) == [20, 20, 10, 20, 10, 20, 20]


@pytest.mark.parametrize(
    ("variables", "code", "told"),
    [
        ({"OUTPUT_PATH": None, "CONFIG_YML": "x"}, 2, "OUTPUT_PATH"),
        ({}, 2, "CHECKPOINT_PATH"),
        ({"LAYER_WISE_CHECKPOINT_JSON": "x", "CONFIG_YML": "x"}, 2, "CHECKPOINT_PATH"),
        ({"LAYER_WISE_CHECKPOINT_JSON": "x", "CHECKPOINT_PATH": "x"}, 2, "FAILURE_STEP"),
        ({"CONFIG_YML": "x", "COPY_TOKENIZER": "maybe"}, 2, "COPY_TOKENIZER"),
        ({"CONFIG_YML": "x", "LLMTAILOR": "/nowhere/llmtailor"}, 2, "not installed"),
        ({"CONFIG_YML": "/nowhere.yaml"}, 3, "nowhere.yaml"),
        pytest.param({"CHECKPOINT_PATH": "/nowhere"}, 4, "the folder does not exist", marks=pytest.mark.long),
    ],
)
def test_exit_codes(tmp_path, variables, code, told):
    given = {"OUTPUT_PATH": tmp_path / "out", **variables}
    result = start("start_merge.sh", code=code, **{key: value for key, value in given.items() if value is not None})
    assert told in result.stderr
    assert not (tmp_path / "out").exists()


def test_exit_codes_of_the_merge(run, tmp_path):
    config = SCRIPTS.parent / "configs" / "parity.yaml"
    variables = {"CONFIG_YML": config, "OUTPUT_PATH": tmp_path / "out"}
    start("start_merge.sh", RUN=tmp_path, code=4, **variables)
    (tmp_path / "out").mkdir()
    start("start_merge.sh", RUN=run, code=6, **variables)
    start("start_merge.sh", "--force", RUN=run, **variables)


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


def test_a_requeued_job_goes_on_from_its_partial_checkpoints(partial_run, tmp_path):
    _, calls = job(tmp_path, partial_run, NUM_GPU=1)
    composite = display_name(partial_run / "checkpoint-6")
    assert calls == [f"train.py --output_dir {partial_run} --resume_from_checkpoint {composite}"]
    assert steps(partial_run / "checkpoint-6") == [6, 6, 4, 6, 4, 6, 4]


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


SRUN = """
import os, subprocess, sys
from pathlib import Path

first = Path("attempted")
limit = "60" if first.exists() else "0.5"

def start(rank):
    variables = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "LLMTAILOR_TIMEOUT": limit}
    return subprocess.Popen(sys.argv[1:], env={**os.environ, **variables})

ranks = [start(0), start(1)]
if not first.exists():
    first.touch()
    ranks[1].kill()
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def test_a_job_merges_on_two_nodes_of_which_one_dies(run, tmp_path, monkeypatch):
    """What stands for srun starts two ranks, kills one of them the first time, and ends like srun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "srun.py").write_text(SRUN)
    words = ["convert", run / "checkpoint-30", tmp_path / "out", "--num-gpu", "3"]
    variables = {"LAUNCH": f"{sys.executable} srun.py", "ATTEMPTS": "2"}
    result = start("slurm_merge.sh", *map(str, words), **variables)
    assert "rank 1: no sign of it" in result.stderr
    assert "attempt 1 ended with 137" in result.stderr
    assert result.stdout.count("wrote ") == 1
    assert json.loads((tmp_path / "out" / "llmtailor.json").read_text())["world_size"] == 3


def test_a_job_without_output(tmp_path):
    start("slurm_merge.sh", "merge", "recipe.yaml", code=2)
