"""Damaged real checkpoints: a merge of one ends in a refusal, or in what torch reads out of it, bit for bit.

Damage that the output does not show is right as well: padding is never copied, and what follows from the layout is
written anew. Then the output must equal that of the sound checkpoint.

``LLMTAILOR_FUZZ_ROUNDS=1000`` damages each checkpoint that many times.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from campaigns import fuzz
from helpers.cases import every, examples
from helpers.composing import convert
from llmtailor.errors import TailorError
from llmtailor.model.roles import BUFFER, WEIGHT, State
from oracle import any as oracle
from oracle import zero3, zero12
from oracle.zero3 import Snapshot, assert_same

ROUNDS = int(os.environ.get("LLMTAILOR_FUZZ_ROUNDS", examples(15, 25)))
STEP = 4
REAL = {"zero3": "llama", "zero3-frozen": "llama-extras-layer", "zero2": "zero2-extras", "zero1": "zero1"}


def load_plain(checkpoint: Path) -> Snapshot:
    """Read a plain checkpoint with torch: states by id, whatever their names."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=False)
    states = {State(name, "weight"): tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    steps = {}
    for number, state in saved["state"].items():
        for kind, tensor in state.items():
            if kind == "step":
                steps[str(number)] = float(tensor)
            else:
                states[State(str(number), kind)] = tensor
    names = ("lt_params", "param_names")
    groups = [{key: value for key, value in group.items() if key not in names} for group in saved["param_groups"]]
    return Snapshot(
        states, steps, [], {"groups": groups, "names": [group.get("lt_params") for group in saved["param_groups"]]}
    )


def load(checkpoint: Path, rest: bool) -> Snapshot:
    """Read a checkpoint the slow way; without ``rest`` only what belongs to a param."""
    if not (checkpoint / "latest").exists():
        return load_plain(checkpoint)
    if rest:
        return oracle.load(checkpoint)
    with patch.object(zero3, "_rest", lambda *_: {}), patch.object(zero12, "_rest", lambda *_: {}):
        return oracle.load(checkpoint)


def read(checkpoint: Path, rest: bool) -> Snapshot | None:
    """Read it, or return None for what torch or the oracle can't make sense of."""
    try:
        return load(checkpoint, rest)
    except Exception:  # it is damaged, and torch has many words for that
        return None


def check(damaged: Path, sound: Path, out: Path, **options: Any) -> bool:
    """Merge a damaged checkpoint; return whether it was accepted, and then is right."""
    try:
        convert(damaged, out, **options)
    except TailorError as error:
        assert all(problem.where and problem.what and problem.fix for problem in error.problems)
        assert not out.exists()
        return False
    wanted = read(damaged, rest=True)
    if options:
        wanted = wanted or read(damaged, rest=False) or load(sound, rest=False)
        assert_same(trained(load(out, rest=False)), trained(wanted), rest=False)
        return True
    made = load(out, rest=wanted is not None)
    if wanted is not None:
        assert_same(without_new_weights(made, wanted), wanted)
        return True
    wanted = read(damaged, rest=False) or load(sound, rest=False)
    assert_same(without_new_weights(made, wanted), wanted, rest=False)
    return True


def without_new_weights(made: Snapshot, wanted: Snapshot) -> Snapshot:
    """Where the source has no weights, the output has the rounded masters; tests of their own see to these."""
    if any(state.kind == WEIGHT for state in wanted.states):
        return made
    states = {state: tensor for state, tensor in made.states.items() if state.kind != WEIGHT}
    return replace(made, states=states)


def trained(snapshot: Snapshot) -> Snapshot:
    """Leave out what depends on the layout: buffers of every rank, names of tied weights, flat ids."""
    states = {state: tensor for state, tensor in snapshot.states.items() if state.kind not in (BUFFER, WEIGHT)}
    return Snapshot(states, snapshot.steps, [])


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {}, {"world_size": 3}, {"stage": 2}, {"stage": 3, "groups": "layer"})


@pytest.fixture(scope="module")
def sound(runs, tmp_path_factory) -> dict[str, Path]:
    found = {form: runs[name].checkpoint(STEP) for form, name in REAL.items()}
    found["plain"] = tmp_path_factory.mktemp("plain") / f"checkpoint-{STEP}"
    convert(found["zero3"], found["plain"], stage=0)
    return found


@pytest.fixture
def copy_of(sound, tmp_path):
    def copy(form: str) -> Path:
        shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
        return Path(shutil.copytree(sound[form], tmp_path / "checkpoint-4"))

    return copy


@pytest.mark.parametrize("form", [*REAL, "plain"])
def test_sound_checkpoints_are_accepted(sound, tmp_path, form):
    assert check(sound[form], sound[form], tmp_path / "out")


FILES = (".pt", ".pth", ".json", ".safetensors", "latest")


@pytest.mark.parametrize("form", every(2, [*REAL, "plain"]))
def test_random_damage(sound, copy_of, tmp_path, form):
    rng = random.Random(form)
    accepted = 0
    for round_ in range(ROUNDS):
        damaged = copy_of(form)
        files = sorted(path for path in damaged.rglob("*") if path.is_file() and path.name.endswith(FILES))
        for _ in range(rng.choice((1, 1, 1, 2))):
            _damage(rng.choice(files), rng.choice(files), rng)
        options = rng.choice(LAYOUTS) if form != "plain" else {}
        accepted += check(damaged, sound[form], tmp_path / f"out-{round_}", **options)
        shutil.rmtree(tmp_path / f"out-{round_}", ignore_errors=True)
    assert 0 < accepted < ROUNDS


def _damage(path: Path, other: Path, rng: random.Random) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    way = rng.randrange(8)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif way == 2 and other.exists() and other != path:
        shutil.copy(other, path)
    elif way == 3:
        path.write_bytes(data + data[rng.randrange(len(data) + 1) :])
    elif way < 6:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    elif path.suffix == ".safetensors":
        path.write_bytes(fuzz.PARSERS["safetensors"].mutate(data, data, rng))
    else:
        path.write_bytes(fuzz.mutate_content(data, other.read_bytes() if other.exists() else b"", rng))


def test_the_oracle_notices(sound, copy_of, tmp_path):
    """Were a wrong output accepted, `check` would say so: here the output is damaged after the merge."""
    out = convert(sound["zero3"], tmp_path / "out")
    (path,) = out.glob("global_step*/*rank_0_*optim_states.pt")
    tree = torch.load(path, weights_only=False)
    tree["optimizer_state_dict"]["fp32_flat_groups"][0][3] += 1
    torch.save(tree, path)
    with pytest.raises(AssertionError, match="1 differences"):
        assert_same(load(out, rest=True), load(sound["zero3"], rest=True))
