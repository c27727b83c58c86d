"""The work of drill.sh: kill a training again and again, get it back with one command each time, count what it cost.

The training is demo_train.py. Its ranks are forked from this process, so that what takes long to import is imported
once. The ranks of a job are one process group, and a kill is SIGKILL to all of them at once: as when the power fails,
or a cluster takes the nodes away.

For a kill in the middle of a save this process watches for a folder without manifest, stops the ranks, and looks once
more: if the save has finished meanwhile, they go on until the next.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}

import demo_train
from transformers import Trainer  # noqa: F401  (transformers imports it late, and then in every rank)

from llmtailor.policies import DEFAULT_POLICY

MARK = ".made-by-the-drill"
TIMEOUT_S = 600
"""For anything that is waited for; only a hang takes so long."""
POLL_S, POLL_SAVES_S = 0.02, 0.001
LONGEST_STEP_S = 0.1
"""Kills at any moment come at random up to so long after a step's log entry."""
PR_SET_PDEATHSIG = 1


class Broken(Exception):
    """Something did not go as it must."""


# --- a job -----------------------------------------------------------------------------------------------------------


class Job:
    """Ranks that train together."""

    def __init__(self, words: Sequence[str], ranks: int, begins_at: int, log: Path) -> None:
        self.begins_at = begins_at
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        self.ranks = [
            fork.Process(target=train, args=(rank, ranks, port, list(words), log), daemon=True) for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start()
            os.setpgid(process.pid, self.ranks[0].pid)

    def losses(self) -> dict[int, float]:
        """Return step -> loss of the steps that this job has made."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        told = [ast.literal_eval(line) for line in lines if line.startswith("{'loss'") and line.endswith("}")]
        return {self.begins_at + number: float(one["loss"]) for number, one in enumerate(told, start=1)}

    def step(self) -> int:
        return self.begins_at + len(self.losses())

    def wait_for(self, event: Callable[[], bool], what: str, poll_s: float = POLL_S) -> None:
        give_up = time.monotonic() + TIMEOUT_S
        while not event():
            if any(process.exitcode is not None for process in self.ranks):
                raise Broken(f"the training ended before {what}; see {self.log}")
            if time.monotonic() > give_up:
                raise Broken(f"no {what} after {TIMEOUT_S} s; see {self.log}")
            time.sleep(poll_s)

    def finish(self) -> None:
        for process in self.ranks:
            process.join(TIMEOUT_S)
        if any(process.exitcode != 0 for process in self.ranks):
            raise Broken(f"the training did not come to its end; see {self.log}")

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.ranks[0].pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        stats = [Path(f"/proc/{process.pid}/stat") for process in self.ranks]
        self.wait_for(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats), "stop")

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.ranks:
            process.join()


def train(rank: int, world_size: int, port: int, words: list[str], log: Path) -> None:
    """Be one rank."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed drill leaves nothing behind
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout.reconfigure(line_buffering=True)
    demo_train.main(words)


# --- what lies in the run's folder -----------------------------------------------------------------------------------


def partial_steps(run: Path) -> dict[int, bool]:
    """Return the steps of all partial checkpoints, and whether each is complete."""
    return {int(path.name[5:]): (path / "manifest.json").exists() for path in (run / "partial").glob("step-????????")}


def unfinished(run: Path) -> list[int]:
    return [step for step, complete in partial_steps(run).items() if not complete]


def newest_full(run: Path) -> int | None:
    steps = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.glob("checkpoint-*"))
    return max((int(step[1]) for step in steps if step), default=None)


def newest_state(run: Path) -> int | None:
    """Return the newest step that must be possible to go on from."""
    full = newest_full(run)
    steps = [step for step, complete in partial_steps(run).items() if complete]
    return max(steps if full is None else [*steps, full], default=None)


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files; of several links to one file only those of one."""
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def read_stalls(run: Path) -> list[float]:
    """Return what saves.jsonl says of finished saves, in seconds; a line that a kill cut off does not count."""
    log, stalls = run / "partial" / "saves.jsonl", []
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if "stall_s" in told:
            stalls.append(float(told["stall_s"]))
    return stalls


# --- the drill -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill, and how the run came back."""

    hit: int | None
    """The step whose save it interrupted"""
    at: int
    back: int
    """The step that training went on from"""
    ranks: int
    """How many it went on with"""


class Drill:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.work: Path = options.work.absolute()
        self.run = self.work / "run"
        self.job: Job | None = None
        self.kills: list[Kill] = []
        self.losses: dict[int, float] = {}

    def words(self, output: Path, *more: str) -> list[str]:
        options = self.options
        sizes = ["--hidden-size", str(options.hidden_size), "--num-layers", str(options.num_layers)]
        words = ["--output-dir", str(output), "--max-steps", str(options.steps), "--stage", str(options.stage)]
        return [*words, *sizes, *more]

    def start(self, ranks: int, begins_at: int, resume: Sequence[str]) -> Job:
        options = self.options
        words = self.words(self.run, "--save", options.policy, "--save-steps", str(options.save_steps), *resume)
        self.job = Job(words, ranks, begins_at, self.work / f"job-{len(self.kills) + 1}.log")
        return self.job

    def go(self) -> None:
        options = self.options
        try:
            say(f"== Uninterrupted: {options.steps} steps of ZeRO-{options.stage} on {options.ranks} ranks")
            self.job = straight = Job(
                self.words(self.work / "straight", "--save-steps", str(options.steps)),
                options.ranks, 0, self.work / "straight.log",
            )  # fmt: skip
            straight.finish()
            say(f"   final loss {straight.losses()[options.steps]}")

            kinds = [number % 2 == 0 for number in range(options.kills)]
            self.random.shuffle(kinds)
            ranks, begins_at, resume = options.ranks, 0, []
            for number, in_save in enumerate(kinds, start=1):
                say(f"== Kill {number} of {options.kills}, {'in the middle of a save' if in_save else 'at any moment'}")
                job = self.start(ranks, begins_at, resume)
                reached, hit = self.strike(job, number, in_save)
                ranks = options.other_ranks if number == (options.kills + 1) // 2 else options.ranks
                begins_at, resume = self.come_back(ranks)
                self.losses |= {step: loss for step, loss in job.losses().items() if step <= begins_at}
                self.kills.append(Kill(hit, reached, begins_at, ranks))

            say("== No more kills: to the end")
            job = self.start(ranks, begins_at, resume)
            job.finish()
            self.losses |= job.losses()
            if sorted(self.losses) != list(range(1, options.steps + 1)):
                raise Broken("some steps are missing")
            self.report(straight.losses())
        finally:
            if self.job is not None and any(process.is_alive() for process in self.job.ranks):
                self.job.kill()

    def strike(self, job: Job, number: int, in_save: bool) -> tuple[int, int | None]:
        """Kill the job; return the step that it has reached, and the one whose save was interrupted."""
        share = self.options.steps / (self.options.kills + 1)
        target = max(job.begins_at + 1, round(self.random.uniform(number - 1, number) * share))
        old = set(unfinished(self.run))  # the job sweeps these when it begins
        job.wait_for(lambda: job.step() >= target, f"step {target}")
        if in_save:
            # somewhere in the save, as long as those so far; if it was shorter, at the beginning of the next
            delay = self.random.uniform(0, statistics.median(read_stalls(self.run) or [0]))
            while True:
                job.wait_for(lambda: bool(set(unfinished(self.run)) - old), "save", POLL_SAVES_S)
                time.sleep(delay)
                job.stop()
                if set(unfinished(self.run)) - old:
                    break
                job.signal(signal.SIGCONT)
                delay = 0
        else:
            time.sleep(self.random.uniform(0, LONGEST_STEP_S))
        job.kill()
        hit = max(unfinished(self.run), default=None)
        reached = job.step() if hit is None else max(hit, job.step())
        say(f"   kill -9 of all ranks at step {reached}" + (f", in the middle of its save {hit}" if hit else ""))
        return reached, hit

    def come_back(self, ranks: int) -> tuple[int, list[str]]:
        """Run the one command; return the step to go on from, and the words that the training needs for it."""
        step = newest_state(self.run)
        command = ["llmtailor", "merge", "--run", os.path.relpath(self.run), "--num-gpu", str(ranks), "--quiet"]
        say(f"   $ {' '.join(command)}")
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        if step is None:
            if done.returncode != 4:
                raise Broken(f"nothing was saved yet, and merge ended with {done.returncode}:\n{done.stderr}")
            say("   nothing was saved completely yet, so it starts over")
            return 0, []
        if done.returncode != 0:
            raise Broken(f"merge ended with {done.returncode}:\n{done.stderr}")
        told = done.stdout.splitlines()[-1]
        say(f"   {told}")
        if told.endswith("-merged"):  # the same state as before, for another number of ranks
            return step, ["--resume", told.removeprefix("wrote ")]
        if newest_full(self.run) != step:
            raise Broken(f"step {step} was saved, and is not the newest checkpoint after the merge")
        return step, ["--resume"]

    def report(self, straight: dict[int, float]) -> None:
        options, stalls = self.options, read_stalls(self.run)
        say("\nkill   at step   in save   back at   steps lost   goes on with")
        for number, kill in enumerate(self.kills, start=1):
            lost, in_save = kill.at - kill.back, "-" if kill.hit is None else kill.hit
            say(f"{number:4}{kill.at:10}{in_save:>10}{kill.back:10}{lost:13}   {kill.ranks} ranks")
        whole = tree_bytes(self.work / "straight" / f"checkpoint-{options.steps}")
        folders = [path.parent for path in (self.run / "partial").glob("step-*/manifest.json")]
        written, instead = sum(map(tree_bytes, folders)), whole * len(folders)
        last = min(5, options.steps)
        tail = range(options.steps - last + 1, options.steps + 1)
        lost = [kill.at - kill.back for kill in self.kills]
        hits = sum(kill.hit is not None for kill in self.kills)
        rows = {
            "kills": f"{len(self.kills)}, of which {hits} hit a save",
            "steps lost": f"{statistics.mean(lost):.1f} per kill, {max(lost)} at most",
            "bytes saved": f"{written / 1e6:.1f} MB in {len(folders)} partial checkpoints, the first of them complete",
            "full saving": f"{instead / 1e6:.1f} MB in as many full checkpoints: {instead / written:.2f} times as much",
            "stall per save": f"{statistics.median(stalls):.3f} s in the median, {max(stalls):.3f} s at most",
            f"last {last} losses": f"{statistics.mean(self.losses[step] for step in tail):.4f} in the mean",
            "uninterrupted": f"{statistics.mean(straight[step] for step in tail):.4f}",
        }
        say("\n" + "\n".join(f"{name:16}{told}" for name, told in rows.items()))
        if options.json_path:
            told = {
                "kills": [asdict(kill) for kill in self.kills],
                "partial_bytes": [tree_bytes(folder) for folder in folders],
                "full_bytes": whole,
                "stalls_s": stalls,
                "losses": self.losses,
                "uninterrupted": straight,
            }
            options.json_path.write_text(json.dumps(told, indent=1) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def prepare(work: Path) -> None:
    """Make the folder empty, if it is the drill's."""
    if work.exists() and any(work.iterdir()) and not (work / MARK).exists():
        sys.exit(
            f"error: there is a {work} that the drill did not make; move it away first, or name another with --work"
        )
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / MARK).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="default: 5, of which at least half hit a save")
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill at (default: 0)")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="what a save holds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of the whole training (default: 100)")
    parser.add_argument("--save-steps", type=int, default=5, help="steps between saves (default: 5)")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--other-ranks", type=int, default=3, help="of the resume after half of the kills (default: 3)")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the model (default: 128)")
    parser.add_argument("--num-layers", type=int, default=6, help="default: 6")
    parser.add_argument("--work", type=Path, default=Path("drill-run"), help="default: ./drill-run")
    parser.add_argument("--json", type=Path, dest="json_path", help="write what it found to this file, too")
    options = parser.parse_args()
    for ranks in (options.ranks, options.other_ranks):
        if demo_train.GLOBAL_BATCH % ranks:
            parser.error(f"{demo_train.GLOBAL_BATCH} samples per step can't be shared evenly by {ranks} ranks")
    prepare(options.work)
    try:
        Drill(options).go()
    except Broken as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
