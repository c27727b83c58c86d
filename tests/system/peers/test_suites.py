"""Tests of DeepSpeed, accelerate and the Trainer that save and load, with `llmtailor convert` in between.

Nothing of them is kept here. accelerate's source distribution on PyPI holds its tests. DeepSpeed's holds none and that
of transformers none of the Trainer, so these come from the release's archive on GitHub. All are of the version that is
installed, and kept in the user's cache folder. What can't be had is skipped: offline, put a checkout of the tag there,
as ``peers/NAME-VERSION``.

Left out: tests that need a GPU, more than two ranks or the network, that save no state of Adam, that save weights with
pickle, and DeepSpeed without ZeRO or in fp16, which many CPUs don't have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.places import ROOT, SUPPORT
from peers.seam import LOG
from trainings.harness import caches, environment


@dataclass(frozen=True)
class Peer:
    """``tests`` all passed, with ``conversions`` in between, when this was written."""

    name: str
    source: str
    tests: list[str]
    conversions: int
    folder: str = "."
    env: Mapping[str, str] = field(default_factory=dict)


def of(case: str, names: str) -> list[str]:
    return [f"{case}::{name}" for name in names.split()]


ADAM = ["[1-False-Adam]", "[2-False-Adam]", "[2-True-deepspeed_adam]", "[3-False-Adam]", "[3-True-deepspeed_adam]"]
FP32 = [f"[{optim}-{own}-{stage}-dtype2]" for optim in (True, False) for own in (True, False) for stage in (1, 3)]
ARCHIVE = "https://github.com/{}/archive/refs/tags/v{{}}.tar.gz"
ACCELERATE = of(
    "tests/test_state_checkpointing.py::CheckpointTest_use_safetensors",
    "test_with_save_limit test_can_resume_training test_can_resume_training_with_folder test_with_scheduler "
    "test_can_resume_training_checkpoints_relative_path test_automatic_loading",
)
TRAINER = of(
    "tests/trainer/test_trainer_checkpointing.py::TrainerResumeTrainingTest",
    "test_can_resume_training test_resume_training_with_different_batch_size test_resume_training_with_checkpoint "
    "test_resume_training_with_shard_checkpoint test_resume_training_with_gradient_accumulation "
    "test_resume_training_with_frozen_params",
)
ZERO = of(
    "unit/checkpoint/test_zero_optimizer.py::TestZeROCheckpoint",
    " ".join(
        [f"test_load_optimizer_state{case} test_not_load_optimizer_state{case}" for case in ADAM]
        + [f"test_load_module_only[{stage}]" for stage in (1, 2, 3)]
    ),
)
UNIVERSAL = of(
    "unit/checkpoint/test_universal_checkpoint.py::TestZeROUniversalCheckpointDP",
    " ".join(f"test_dp_world_size_2to2{case}" for case in FP32),
)
# The ranks that a CPU has room for, by DeepSpeed's own rule; and the installed package, not that of the checkout.
RANKS = {"LOCAL_SIZE": "2", "DS_TEST_USE_INSTALLED_DEEPSPEED": "1"}
PEERS = [
    Peer("accelerate", "accelerate=={}", ACCELERATE, 11),
    Peer("transformers", ARCHIVE.format("huggingface/transformers"), TRAINER, 9),
    Peer("deepspeed", ARCHIVE.format("deepspeedai/DeepSpeed"), ZERO + UNIVERSAL, 29, "tests", RANKS),
]


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_what_a_peer_saves_it_loads_after_a_conversion(peer, tmp_path):
    source, needs = obtain(peer), installed("parameterized")
    log, report = tmp_path / "log", tmp_path / "report.xml"
    env = {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT, needs))), LOG: str(log), **peer.env}
    command = [sys.executable, "-m", "pytest", "-p", f"peers.{peer.name}_plugin", "-p", "no:cacheprovider", "-q"]
    command += [f"--junitxml={report}", f"--basetemp={tmp_path / 'made'}", *peer.tests]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) == len(peer.tests)
    assert not [case.get("name") for case in cases if case.find("skipped") is not None]
    assert len(log.read_text().splitlines()) >= peer.conversions


def obtain(peer: Peer) -> Path:
    """Return the folder in which the peer's tests run; skip if it can't be had."""
    release = version(peer.name)
    kept = caches() / "peers" / f"{peer.name}-{release}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as made:
            wanted = peer.source.format(release)
            pip("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", f"--dest={made}", wanted)
            (archive,) = Path(made).iterdir()
            with tarfile.open(archive) as tar:
                tar.extractall(f"{made}/all", filter="data")
            (top,) = Path(made, "all").iterdir()
            top.rename(kept)
    return kept / peer.folder


def installed(package: str) -> Path:
    """Return a folder with a package that peers' tests import, and nothing else does."""
    folder = caches() / "peers" / "needs"
    if not (folder / package).exists():
        pip("install", "--no-deps", f"--target={folder}", package)
    return folder


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--retries=1", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't be had: pip {' '.join(words)}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
