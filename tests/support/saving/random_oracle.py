"""What must hold of the composites of `random_trainings`, read by torch, safetensors and json alone.

A composite states in ``llmtailor.json`` the step of each part. Each tensor must be what the training held at that step,
bit for bit. Frozen params and buffers must be those of the newest step, and what shares memory must be of one step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from helpers.commands import run_here

MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "m", "v"}
"""States that may be older than the weights, as docs/optimizers.md says; counters go with either"""
MISSING = "missing"
NAMES = {"params", "lt_params", "param_names", "differentiable"}
"""Names of params, and what torch adds to the options of groups that come after a load"""


def is_equal(mine: Any, other: Any) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(*(one.reshape(-1).contiguous().view(torch.uint8) for one in (mine, other)))
    return bool(mine == other)


def rounds_to(found: Any, wanted: Any, how: str) -> bool:
    """Return whether a tensor is what docs/saving.md says of a rounded one."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if how == "bf16":
        return torch.equal(found, wanted.bfloat16().float())
    if how == "24bit":
        is_near = bool(((found - wanted).abs() <= 4e-5 * wanted.abs()).all())
        return is_near and not (found.view(torch.int32) & 0xFF).any()
    roots = how == "8bit roots"
    mine, other = (found.sqrt(), wanted.sqrt()) if roots else (found, wanted)
    blocks = [(a - b).abs().max() <= 0.0041 * b.abs().max()
              for a, b in zip(mine.flatten().split(128), other.flatten().split(128), strict=True)]  # fmt: skip
    return all(map(bool, blocks))


class Judge:
    """Composes the saves of a case, and collects what is wrong."""

    def __init__(self, case: Any, folder: Path) -> None:
        self.case, self.folder, self.run = case, folder, folder / "run"
        self.parts_of: dict[str, list[str]] = {}
        """Part -> the params that the newest save of it lists"""
        self.faults: list[str] = []
        self.refusals: list[str] = []
        self.told: list[str] = []
        """Why composites were refused"""
        self.counts = {"merges": 0, "tensors": 0, "old": 0, "refused merges": 0, "continued": 0}

    def wrong(self, what: str) -> None:
        self.faults.append(what)

    def refused(self, error: Exception) -> None:
        self.refusals.append(str(error))

    def write(self, path: Path) -> None:
        found = {"faults": self.faults, "refusals": self.refusals, "told": self.told, **self.counts}
        path.write_text(json.dumps(found, indent=1))

    def truth(self, step: int) -> dict[str, Any]:
        return dict(torch.load(self.folder / "truth" / f"{step}.pt", weights_only=False))

    def attempt(self, number: int) -> dict[int, str]:
        """Compose each published save. Return the composites in which nothing is old, by step."""
        whole: dict[int, str] = {}
        paths = sorted(self.run.glob("partial/step-????????/manifest.json"))
        for path in paths:
            if path not in paths[-self.case.options.get("keep_composable", len(paths)) :]:
                continue  # what it needs may be deleted
            step = int(path.parent.name[5:])
            manifest = json.loads(path.read_text())
            self.parts_of = {**self.parts_of, **{one["part"]: one["params"] for one in manifest["parts"]}}
            out = self.folder / f"composite-{number}-{step}"
            to = ("--to", "dcp") if self.case.form == "fsdp" else ()
            done = run_here("merge", "--run", self.run, "--at", step, out, "--json", *to)
            self.counts["merges"] += 1
            if done.returncode:
                self._check_refusal(step, done.stderr)
                continue
            if self._check(step, out):
                whole[step] = str(out)
        return whole

    def _check_refusal(self, step: int, said: str) -> None:
        self.counts["refused merges"] += 1
        log = (self.run / "partial" / "saves.jsonl").read_text().splitlines()
        told = [line["step"] for line in map(json.loads, log) if "not_composable" in line]
        if step not in told or "bug" in said:
            self.wrong(f"step {step} can't be composed, and no save said so: {said}")
        self.told.append(said)

    def roll_back(self, step: int) -> Path:
        """Return a composite in the run's folder, from which an attempt resumes; forget what came later."""
        for path in (self.folder / "truth").glob("*.pt"):
            if int(path.stem) > step:
                path.unlink()
        out = self.run / f"checkpoint-{step}"
        if out.exists():
            shutil.rmtree(out)
        to = ("--to", "dcp") if self.case.form == "fsdp" else ()
        done = run_here("merge", "--run", self.run, "--at", step, *to)
        if done.returncode or not out.exists():
            self.wrong(f"merge --run --at {step} made no {out.name}: {done.stderr}")
        return out

    def _check(self, step: int, out: Path) -> bool:
        """Compare a composite with what was recorded. Return whether nothing in it is old or rounded."""
        stated = json.loads((out / "llmtailor.json").read_text())
        if stated["global_step"] != step or not (self.folder / "truth" / f"{step}.pt").exists():
            self.wrong(f"merge --at {step} claims step {stated['global_step']}")
            return False
        now = self.truth(step)
        trained = {name for group in now["groups"] for name in group}
        weights, states = self._steps(stated["parts"], step, trained)
        truth = {at: self.truth(at) for at in {step, *weights.values(), *states.values()}}
        found, self._tied = self._read(out, now), now["tied"]
        if lacking := trained - weights.keys():
            self.wrong(f"step {step}: no part is stated of {sorted(lacking)}")
            return False
        for name in now["model"]:
            stored = now["tied"][name]
            at, kind = (weights[stored], "master") if stored in trained else (step, "")
            self._compare(found["model"], truth[at]["model"], name, f"{out.name}: {name} of step {at}", kind)
        for name in found["model"].keys() - now["model"].keys():
            self.wrong(f"{out.name}: {name} is not in the model")
        for place in now["shared"]:
            ages = {weights[one] if one in trained else step for name in place if (one := now["tied"][name])}
            if len(ages) > 1:
                self.wrong(f"{out.name}: {sorted(place)} share memory, but are of steps {sorted(ages)}")
        for name in trained:
            self._compare_states(out, name, found["states"].get(name, {}), truth, (weights[name], states[name]))
        for number, (mine, other) in enumerate(zip(found["options"], now["options"], strict=True)):
            for key in (mine.keys() | other.keys()) - NAMES:
                if not is_equal(mine.get(key), other.get(key)):
                    self.wrong(f"{out.name}: {key} of group {number} is {mine.get(key)}, not {other.get(key)}")
        if found["scheduler"] != now["scheduler"]:
            self.wrong(f"{out.name}: the scheduler is at {found['scheduler']}")
        ages = {*weights.values(), *states.values()} - {step}
        self.counts["old"] += bool(ages)
        return not ages and not {"masters", "moments"} & self.case.options.keys()

    def _steps(
        self, rows: list[Mapping[str, Any]], step: int, trained: set[str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the stated step of the weight and of the moments of each trained param."""
        weights: dict[str, int] = {}
        states: dict[str, int] = {}
        listed = {name for names in self.parts_of.values() for name in names}
        for name in trained - listed:  # of a part whose saves are deleted
            words = name.split(".")
            part = f"layer {words[1]}" if words[0] == "layers" else words[0]
            if "experts" in self.case.options and part != words[0]:
                part += f" expert {words[3]}" if words[2] == "experts" else " non-expert"
            self.parts_of.setdefault(part, []).append(name)
        for row in sorted(rows, key=lambda row: (row["only"] is not None, len(row["part"]))):
            shares = [names for part, names in self.parts_of.items() if f"{part} ".startswith(f"{row['part']} ")]
            for name in (name for names in shares for name in names):
                states[name] = row["step"]
                if row["only"] is None:
                    weights[name] = row["masters_step"] or row["step"]
        return weights, states

    def _read(self, out: Path, now: Mapping[str, Any]) -> dict[str, Any]:
        if self.case.form == "fsdp":
            return read_dcp(out, now)
        if self.case.form.startswith("zero"):
            from saving.random_trainings import read_zero

            return read_zero(out)
        ending = "bin" if (out / "optimizer.bin").exists() else "pt"
        tree = torch.load(out / f"optimizer.{ending}", weights_only=True)
        names = dict(zip((at for group in tree["param_groups"] for at in group["params"]),
                         (name for group in now["groups"] for name in group), strict=True))  # fmt: skip
        scheduler = torch.load(out / f"scheduler.{ending}", weights_only=True)
        return {
            "model": load_file(out / "model.safetensors"),
            "states": {names[at]: state for at, state in tree["state"].items()},
            "options": [options_of(group) for group in tree["param_groups"]],
            "scheduler": scheduler["last_epoch"],
        }

    def _compare(self, found: Mapping[str, Any], wanted: Mapping[str, Any], name: str, where: str, kind: str) -> None:
        self.counts["tensors"] += 1
        if name not in found:
            if not any(other in found for other in self._tied if self._tied[other] == self._tied.get(name)):
                self.wrong(f"{where} is missing")
            return
        mine, other = found[name], wanted.get(name, MISSING)
        if is_equal(mine, other):
            return
        options = self.case.options
        usual = "8bit" if options["policy"] == "rounded" else None
        masters, moments = options.get("masters"), options.get("moments", usual)
        is_fp32 = isinstance(other, torch.Tensor) and other.dtype == torch.float32
        if kind == "master" and masters and is_fp32 and rounds_to(mine, other, masters):
            return
        if kind in ("exp_avg", "exp_avg_sq") and moments and is_fp32:
            how = "8bit roots" if (moments, kind) == ("8bit", "exp_avg_sq") else moments
            if rounds_to(mine, other, how):
                return
        self.wrong(f"{where} is not what it was")

    def _compare_states(
        self, out: Path, name: str, found: Mapping[str, Any], truth: Mapping[int, Any], steps: tuple[int, int]
    ) -> None:
        of_weight, of_moments = (truth[at]["states"].get(name, {}) for at in steps)
        if not of_moments:  # it had no gradient yet: then no states, or zeros
            if any(torch.as_tensor(one).any() for one in found.values()):
                self.wrong(f"{out.name}: {name} has states, but had none at step {steps[1]}")
            return
        for kind in {*found, *of_moments}:
            where = f"{out.name}: {kind} of {name} of step {steps[1]}"
            is_copy = kind == self.case.copied
            if kind in MOMENTS and not is_copy:
                self._compare(found, of_moments, kind, where, kind)
            elif isinstance(found.get(kind), torch.Tensor) and found[kind].dim():
                self._compare(
                    found,
                    of_weight,
                    kind,
                    f"{out.name}: {kind} of {name} of step {steps[0]}",
                    "master" if is_copy else "",
                )
            elif found.get(kind, MISSING) not in self._numbers(truth, name, kind, (of_weight, of_moments)):
                self.wrong(f"{where} is {found.get(kind, MISSING)}")

    def _numbers(self, truth: Mapping[int, Any], name: str, kind: str, own: tuple[Any, Any]) -> list[Any]:
        """Return what a number may be: that of the weight or the moments; in an engine, any part's of its group."""
        is_engine = self.case.form.startswith("zero")
        states = [one["states"].get(name, {}) for one in truth.values()] if is_engine else own
        return [one.get(kind) for one in states]

    def same(self, found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
        """Compare a training that went on from a composite with the one that was not interrupted."""
        self.counts["continued"] += 1
        for kind in ("model", "states"):
            mine, other = flat(found[kind]), flat(wanted[kind])
            for key in mine.keys() | other.keys():
                if is_equal(mine.get(key, MISSING), other.get(key, MISSING)):
                    continue
                if key in other or torch.as_tensor(mine[key]).any():
                    self.wrong(f"{what}: {key} is not the same")
        if [options_of(one) for one in found["options"]] != [options_of(one) for one in wanted["options"]]:
            self.wrong(f"{what}: the options of the groups are not the same")


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of states, or of weights, by name."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= (
            {f"{kind} of {name}": one for kind, one in value.items()} if isinstance(value, dict) else {name: value}
        )
    return leaves


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NAMES}


def read_dcp(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    _load_state_dict(tree, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    groups = [options_of(group) for group in tree["optim"]["param_groups"]]
    return {"model": tree["model"], "states": tree["optim"]["state"], "options": groups, "scheduler": now["scheduler"]}
