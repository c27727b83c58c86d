#!/usr/bin/env python3
"""Trains a tiny model with real training programs and the saver, kills them, and starts them again.

try_programs.sh makes a virtual environment for each program and runs this. Every program trains three times:
straight, with the saver until it is killed (SIGKILL) after a save, and again with the same command, which goes on from
the newest state. The policy is ``full``, so the losses must be those of the straight run, to the last digit.

The environments need not have a GPU. Prints a table and exits with 1 if a program did not do what docs/integrations.md
says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
STEPS, EVERY, KILL_AFTER = 40, 5, 10
TIMEOUT_S = 600


@dataclass(frozen=True)
class Program:
    """A training program."""

    package: str
    """Its name on PyPI, and that of its virtual environment"""
    way: str
    """How it gets the saver"""
    command: Callable[[Path, Path, bool], list[str]]
    """The work folder, the output folder, and whether to attach the saver -> the command"""
    environment: Mapping[str, str] = field(default_factory=dict)
    has_trainer: bool = True
    """Whether it trains with the Trainer of transformers, which logs the losses in its checkpoints"""


SAVER = {"policy": "full", "save_steps": EVERY, "on_restart": "compose"}
RUN = ["llmtailor", "run", "--policy", "full", "--save-steps", str(EVERY), "--on-restart", "compose", "--"]


def llamafactory(work: Path, out: Path, attached: bool) -> list[str]:
    config = {
        "model_name_or_path": str(work / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(work),
        "dataset": "tiny",
        "template": "empty",
        "cutoff_len": 64,
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no" if attached else "steps",
        "save_steps": STEPS,
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
    }
    path = work / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return [*(RUN if attached else ()), "llamafactory-cli", "train", str(path)]


def axolotl(work: Path, out: Path, attached: bool) -> list[str]:
    config = {
        "base_model": str(work / "model"),
        "datasets": [{"path": str(work / "alpaca.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(work / f"{out.name}-prepared"),
        "output_dir": str(out),
        "sequence_len": 64,
        "max_steps": STEPS,
        "num_epochs": STEPS,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "logging_steps": 1,
        "save_strategy": "no" if attached else "steps",
        "save_steps": None if attached else STEPS,
        "val_set_size": 0,
        "special_tokens": {"pad_token": "w2"},
        **dict.fromkeys(("bf16", "fp16", "tf32", "flash_attention"), False),
        "seed": 0,
    }
    if attached:
        config |= {"plugins": ["llmtailor.integrations.axolotl.TailorPlugin"], "llmtailor": SAVER}
    path = work / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return ["python", "-m", "axolotl.cli.train", str(path)]


def ms_swift(work: Path, out: Path, attached: bool) -> list[str]:
    words = ["swift", "sft", "--model", work / "model", "--model_type", "llama", "--template", "dummy"]
    words += ["--dataset", work / "chat.jsonl", "--tuner_type", "full", "--torch_dtype", "float32"]
    words += ["--output_dir", out, "--add_version", "false", "--max_steps", STEPS, "--seed", 0]
    words += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1, "--logging_steps", 1]
    words += ["--report_to", "none", "--use_cpu", "true", "--split_dataset_ratio", 0]
    if attached:
        (work / "plugin.py").write_text("import llmtailor.integrations.ms_swift\n")
        words += ["--save_strategy", "no", "--external_plugins", work / "plugin.py", "--callbacks", "llmtailor"]
    else:
        words += ["--save_strategy", "steps", "--save_steps", STEPS]
    return list(map(str, words))


def trl(work: Path, out: Path, attached: bool) -> list[str]:
    words = ["trl", "sft", "--model_name_or_path", work / "model", "--dataset_name", work / "text"]
    words += ["--output_dir", out, "--max_steps", STEPS, "--per_device_train_batch_size", 2, "--logging_steps", 1]
    words += ["--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--seed", 0, "--eos_token", "w1"]
    words += ["--save_strategy", "no"] if attached else ["--save_strategy", "steps", "--save_steps", STEPS]
    return [*(RUN if attached else ()), *map(str, words)]


def lightning(work: Path, out: Path, attached: bool) -> list[str]:
    script = ["python", str(Path(__file__).with_name("try_lightning.py")), str(out), "--steps", str(STEPS)]
    return [*script, "--save-steps", str(EVERY), *(["--attached"] if attached else [])]


VARIABLES = {f"LLMTAILOR_{name.upper()}": str(value) for name, value in SAVER.items()}
PROGRAMS = (
    Program("trl", "llmtailor run", trl),
    Program("llamafactory", "llmtailor run", llamafactory),
    Program("axolotl", "plugin in its YAML", axolotl, {"AXOLOTL_DO_NOT_TRACK": "1"}),
    Program("ms-swift", "--external_plugins", ms_swift, VARIABLES),
    Program("lightning", "a callback", lightning, has_trainer=False),
)


def make_inputs(work: Path) -> None:
    """Write a tiny Llama with a tokenizer, and the same rows in each program's format."""
    from trainings.models import build, tokenizer

    build("llama", 3, tied=False).save_pretrained(work / "model")
    words = tokenizer()
    words.eos_token = "w1"
    words.save_pretrained(work / "model")
    asked = [" ".join(f"w{(i + j * (1 + i % 3)) % 60}" for j in range(8)) for i in range(32)]
    told = [" ".join(f"w{(i + j) % 60}" for j in range(6)) for i in range(32)]
    alpaca = [{"instruction": ask, "input": "", "output": tell} for ask, tell in zip(asked, told, strict=True)]
    chat = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": tell}]}
        for ask, tell in zip(asked, told, strict=True)
    ]
    (work / "data.json").write_text(json.dumps(alpaca))
    (work / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "data.json"}}))
    (work / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alpaca))
    (work / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    (work / "text").mkdir()
    texts = [{"text": f"{ask} {tell}"} for ask, tell in zip(asked, told, strict=True)]
    (work / "text" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))


def saved(out: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in out.glob("partial/step-????????/manifest.json"))


def losses(program: Program, out: Path) -> dict[int, float]:
    """Return the loss of each step of a finished training, and of the one that it goes on from."""
    if not program.has_trainer:
        log = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    else:
        folders = (out / "partial" / f"step-{STEPS:08}", out / f"checkpoint-{STEPS}")
        folder = next(one for one in folders if one.is_dir())
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {line["step"]: line["loss"] for line in log if "loss" in line}


def train(program: Program, venv: Path, work: Path, out: Path, *, attached: bool, kill: bool = False) -> int:
    """Return the exit code of a training; with ``kill``, kill it once a save after `KILL_AFTER` is published."""
    environment = {**os.environ, **program.environment, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = program.command(work, out, attached)
    with (work / f"{out.name}.log").open("a") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > until or (kill and max(saved(out), default=0) >= KILL_AFTER):
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        return process.returncode


def try_program(program: Program, venv: Path, work: Path) -> dict[str, str]:
    """Return what was seen, by column."""
    straight, out = work / f"{program.package}-straight", work / program.package
    found = {"saves": "-", "restarts": "-", "same losses": "-"}
    if train(program, venv, work, straight, attached=False):
        return {**found, "saves": f"does not train here: see {straight}.log"}
    if train(program, venv, work, out, attached=True, kill=True) != -signal.SIGKILL:
        return {**found, "saves": f"no: see {out}.log"}
    killed_at = max(saved(out))
    found["saves"] = "yes"
    if train(program, venv, work, out, attached=True):
        return {**found, "restarts": f"no: see {out}.log"}
    attempts = json.loads((out / "partial" / "attempts.json").read_text())["attempts"]
    begun = [one["resumed_at"] for one in attempts]
    found["restarts"] = f"at step {killed_at}" if begun == [0, killed_at] else f"no: began at {begun}"
    wanted, seen = losses(program, straight), losses(program, out)
    differ = [step for step in wanted if wanted[step] != seen.get(step)]
    found["same losses"] = "yes" if len(wanted) == STEPS and not differ else f"no: {len(differ)} of {STEPS} differ"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venvs", type=Path, required=True, help="folder of virtual environments, by package")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder to train in")
    parser.add_argument("programs", nargs="*", help="default: all that have an environment")
    options = parser.parse_args()
    work, venvs = options.work.absolute(), options.venvs.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    make_inputs(work)
    is_good = True
    print(f"llmtailor {version('llmtailor')}; {STEPS} steps, saved every {EVERY}, killed after step {KILL_AFTER}\n")
    print(
        "| program | version | transformers | saver by | saves | restarts after SIGKILL "
        "| same losses as an uninterrupted run |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for program in PROGRAMS:
        if options.programs and program.package not in options.programs:
            continue
        venv = venvs / program.package
        versions = ["-", "-"]
        found = dict.fromkeys(("saves", "restarts", "same losses"), "not installed")
        if (venv / "bin" / "python").exists():
            names = (program.package, "transformers") if program.has_trainer else (program.package,)
            ask = f"from importlib.metadata import version; print(*map(version, {names}), '-')"
            done = subprocess.run([str(venv / "bin" / "python"), "-c", ask], capture_output=True, text=True)
            if done.returncode == 0:
                versions = done.stdout.split()[:2]
                found = try_program(program, venv, work)
        is_good &= found["same losses"] == "yes"
        print("|", " | ".join([program.package, *versions, program.way, *found.values()]), "|", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
