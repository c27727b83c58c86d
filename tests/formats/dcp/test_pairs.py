"""From any format to any other: the target's own loader, unpatched, holds what the source's training held, bit for bit.

Training goes on, too. On the same ranks and by the same program, the losses are those of the straight run; on other
ranks they are those of the framework's own resharded resume. Between frameworks the arithmetic differs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.cases import mostly_long
from helpers.composing import convert_to_resume
from helpers.states import assert_same_held, held_by, loaded_by
from trainings.catalogue import DEEPSPEED, FSDP
from trainings.spec import Fsdp, Training

STEP = 2
RELATIVE = 2e-5
"""Of the loss, in fp32, between two frameworks that sum in another order"""


@dataclass(frozen=True)
class Pair:
    """A conversion to resume from."""

    source: str
    """A run of trainings/catalogue.py"""
    to: str
    """``fsdp``, ``dcp``, ``verl``, ``trainer``, or ``zero1`` .. ``zero3``"""
    ranks: int = 2
    dtype: str | None = None
    """Of the weights, with DeepSpeed"""
    reference: bool = False
    """Whether its states are the source's files"""

    def __str__(self) -> str:
        how = ("-bf16" if self.dtype == "BF16" else "") + ("-linked" if self.reference else "")
        return f"{self.source}-to-{self.to}-{self.ranks}{how}"

    @property
    def kind(self) -> str:
        """Of the training that resumes from it"""
        own = FSDP[self.source].kind if self.source in FSDP else ""
        if self.to == "fsdp":
            return own if own in ("hf", "fsdp1", "full", "ranks") else "trainer"
        if self.to == "verl":
            return "verl"
        if self.to == "dcp":
            return own if own == "titan" else "loop"
        return "ddp" if self.to == "trainer" else "deepspeed"

    def spec(self, out: Path) -> Training:
        source = (DEEPSPEED | FSDP)[self.source]
        changes: dict[str, Any] = {"ranks": self.ranks, "per_device_batch": 6 // self.ranks, "save_steps": 4}
        if isinstance(source, Fsdp):
            changes["per_device_batch"] = source.per_device_batch * source.ranks // self.ranks
        if isinstance(source, Fsdp) and self.to == "verl" and source.replicas > 1:  # as verl's fsdp_size stays the same
            changes["replicas"] = self.ranks * source.replicas // source.ranks
        if self.kind == "deepspeed":
            llama = replace(DEEPSPEED["llama"], dtype="fp32" if self.dtype == "F32" else "bf16")
            return llama.resumed(out, str(self), stage=int(self.to[-1]), steps=4, **changes)
        if self.source in DEEPSPEED:
            changes |= {"steps": 6, "save_steps": 6, "per_device_batch": source.per_device_batch}
            return Fsdp(str(self), self.kind, resume_from=str(out), **changes)
        return source.resumed(out, str(self), kind=self.kind, **changes)


SHORT = [
    Pair("titan", "dcp", reference=True),
    Pair("hf", "fsdp"),
    Pair("trainer", "fsdp", 3, reference=True),
    Pair("trainer", "trainer"),
    Pair("llama", "dcp"),
    Pair("trainer", "zero3", 2, "BF16"),
    Pair("ranks", "fsdp"),
    Pair("verl", "verl", 3),
    Pair("verl-tied", "verl"),
    Pair("hsdp", "verl"),
    Pair("trainer", "verl"),
]
LONG = [
    *(Pair(source, "fsdp", reference=True) for source in ("hf", "fsdp1", "loop")),
    *(Pair(source, "dcp", 3, reference=True) for source in ("trainer", "titan", "columns")),
    *(Pair("ranks", to, 3) for to in ("fsdp", "dcp")),
    *(Pair("verl", to) for to in ("verl", "fsdp", "dcp", "trainer")),
    Pair("verl", "zero3", 3, "BF16"),
    Pair("hsdp", "verl", 3),
    Pair("trainer-tied", "verl", 3),
    Pair("llama", "verl"),
    Pair("no-fsdp", "verl", 3),
    *(Pair("hsdp-w4", to, 2) for to in ("verl", "dcp")),
    Pair("full", "fsdp"),
    Pair("loop-tied", "fsdp"),
    Pair("no-fsdp", "fsdp"),
    Pair("llama", "fsdp"),
    *(Pair("llama-ds-scheduler", to) for to in ("fsdp", "trainer")),  # whose schedule DeepSpeed keeps
    Pair("fsdp1", "fsdp"),  # on 3 ranks, accelerate 1.15 can't load an FSDP1 optimizer of 2 either
    Pair("fsdp1", "dcp"),
    *(Pair("full", to, 3, "BF16" if to == "zero2" else None) for to in ("fsdp", "dcp", "trainer", "zero2")),
    Pair("fsdp1", "zero2", 3, "BF16"),
    Pair("columns", "dcp"),
    Pair("zero2", "dcp", 3),
    Pair("titan", "zero2", 2, "BF16"),
]
LONG += [
    pair
    for source in ("trainer", "loop", "titan", "hf", "no-fsdp", "loop-w3", "llama-fp32", "zero1-fp32")
    for to in ("fsdp", "dcp", "trainer", "zero1", "zero2", "zero3")
    for ranks in (2, 3)
    if (pair := Pair(source, to, ranks, "F32" if to.startswith("zero") else None)) not in (*SHORT, *LONG)
    and not (source in DEEPSPEED and to.startswith("zero"))
]
PAIRS = mostly_long([*SHORT, *LONG], *SHORT)
NATIVE = ("loop", "trainer", "hf")
"""Resumed on three ranks by the framework itself"""


def convert(runs: Any, pair: Pair, out: Path) -> Path:
    stage = int(pair.to[-1]) if pair.to.startswith("zero") else None
    options = {"world_size": pair.ranks, "to": "deepspeed" if stage else pair.to, "stage": stage}
    source = runs.checkpoint(pair.source, STEP)
    is_verls = pair.source in FSDP and FSDP[pair.source].kind == "verl"
    if is_verls != (pair.to == "verl"):  # whose optimizer has one group, and those of the other trainings two
        options["groups"] = "default" if is_verls else "one"
    if pair.reference:  # on one file system, and not with links into a cache
        source = shutil.copytree(source, out.parent / "source" / source.name)
        options["reference"] = True
    return convert_to_resume(source, out, dtype=pair.dtype, **options)


@pytest.fixture(scope="module")
def resumed(selected, runs, train, tmp_path_factory) -> dict[str, Any]:
    """Convert what the tests of this session ask for, and resume from all of it in few sets of ranks."""
    pairs = [pair for pair in (*SHORT, *LONG) if pair in selected]
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for pair in pairs:
        specs.append(pair.spec(convert(runs, pair, folder / str(pair) / f"checkpoint-{STEP}")))
    for name in NATIVE:
        if any((pair.source, pair.ranks) == (name, 3) for pair in pairs):
            changes = {"ranks": 3, "per_device_batch": 2, "save_steps": 4}
            specs.append(FSDP[name].resumed(runs.checkpoint(name), f"{name}-native", **changes))
    return train(specs)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_target_framework_holds_what_the_source_held(runs, resumed, pair):
    assert_same_held(loaded_by(resumed[str(pair)], STEP), held_by(runs[pair.source], STEP))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_training_goes_on(runs, resumed, pair):
    run, straight = resumed[str(pair)], runs[pair.source]
    losses = {step: loss for step, loss in straight.after(STEP).items() if step <= 4 or pair.kind != "deepspeed"}
    assert run.losses.keys() == losses.keys()
    native = resumed.get(f"{pair.source}-native") if pair.ranks == 3 else None
    own = straight.spec.kind if pair.source in FSDP else None
    if own == pair.kind and (native or pair.ranks == straight.spec.ranks):
        assert run.losses == (native.losses if native else losses)
    elif (
        {own, pair.kind} <= {"fsdp1", "loop", "columns", "titan", "hf", "ranks"}
        or own == pair.kind == "verl"
        or (
            None not in (own, pair.dtype)
            and pair.dtype != "BF16"
            and {own, pair.kind} <= {"trainer", "ddp", "deepspeed"}
        )
    ):
        assert run.losses == pytest.approx(losses, rel=RELATIVE)
