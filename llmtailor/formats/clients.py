"""Whose loader resumes from a checkpoint, and which files it opens beside weights and shards. Pure.

::

    trainer      Trainer.train(resume_from_checkpoint)    trainer_state.json, scheduler.pt, rng_state[_N].pth
    accelerate   Accelerator.load_state                   scheduler.bin, random_states_N.pkl, custom_checkpoint_N.pkl
    deepspeed    engine.load_checkpoint                   nothing

Under DeepSpeed, the Trainer looks for a tag folder ``global_step*`` and accelerate for ``pytorch_model``; an engine
takes any that ``latest`` names. Checked against transformers 5.23, accelerate 1.15 and deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from llmtailor.checkpoint.index import ACCELERATE, DCP, DEEPSPEED, TRAINER, UNIVERSAL, CheckpointIndex

TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = re.compile(r"training_args\.bin|rng_state(_[0-9]+)?\.pth")
_NUMBER = r"(_[0-9]{1,5})?"
_ACCELERATE_FILES = re.compile(
    rf"(optimizer|scheduler|sampler|dl_state_dict){_NUMBER}\.bin|(random_states|custom_checkpoint){_NUMBER}\.pkl"
    rf"|pytorch_model{_NUMBER}/"
)
_UNREAD = re.compile(rf"(sampler|dl_state_dict){_NUMBER}\.bin|custom_checkpoint{_NUMBER}\.pkl")
_SECOND = re.compile(r"(model|optimizer|pytorch_model|pytorch_model_fsdp)_[1-9][0-9]*(/|\.bin|\.safetensors)")


@dataclass(frozen=True, slots=True)
class Client:
    """The files that a loader opens beside weights and shards, and those that its saver writes."""

    name: str
    loader: str
    """What messages call it"""
    state: str = ""
    """The file with the run's counters, without which it does not resume; empty if there is none"""
    scheduler: str = "scheduler.pt"
    needs_scheduler: bool = False
    optimizer: str = "optimizer.pt"
    """Of a training without DeepSpeed"""
    tag: str = ""
    """Pattern of the names of the tag folders that it finds; empty if it follows ``latest``"""
    default_tag: str = "global_step{}"
    """The tag of an output whose base has none, with the step in place of the braces"""
    saves_model: bool = False
    """Whether it saves config.json, and the weights beside DeepSpeed's shards"""
    saves_rng: bool = True
    counts_steps: bool = True
    """Whether a schedule counts optimizer steps; accelerate steps it once per process, however many there are now"""

    def finds(self, tag: str) -> bool:
        """Return whether it finds a tag folder of this name."""
        return not self.tag or fnmatch(tag, self.tag)


CLIENTS = {
    one.name: one
    for one in (
        Client(
            TRAINER,
            "the Trainer",
            state=TRAINER_STATE,
            needs_scheduler=True,
            tag="global_step*",
            saves_model=True,
        ),
        Client(
            ACCELERATE,
            "accelerate",
            scheduler="scheduler.bin",
            optimizer="optimizer.bin",
            tag="pytorch_model",
            default_tag="pytorch_model",
            counts_steps=False,
        ),
        Client(DEEPSPEED, "DeepSpeed", saves_rng=False),
        Client(DCP, "torch.distributed.checkpoint", saves_rng=False),
    )
}


def client_of(index: CheckpointIndex) -> Client:
    """Return the client of a checkpoint."""
    return CLIENTS[index.client]


def detect_client(names: Iterable[str], is_trainers: bool | None, is_engines: bool) -> Client:
    """Return whose loader a checkpoint is for.

    ``names`` are those of the entries of its root, folders with a ``/`` at the end. ``is_trainers`` says whether its
    trainer_state.json is the Trainer's; llmtailor's own in a loop without a Trainer is not. None without such a file.
    ``is_engines`` says whether DeepSpeed has saved the states.
    """
    names = [*names]
    if is_trainers is not None:
        return CLIENTS[TRAINER if is_trainers or not is_engines else DEEPSPEED]
    if any(map(_TRAINER_FILES.fullmatch, names)):
        return CLIENTS[TRAINER]
    if any(map(_ACCELERATE_FILES.fullmatch, names)):
        return CLIENTS[ACCELERATE]
    return CLIENTS[DEEPSPEED if is_engines else TRAINER]


def choose_client(base: CheckpointIndex, family: str, to: str | None) -> str:
    """Return the client of an output of a family of formats, which ``--to`` named or not."""
    if family == DCP:
        return DCP
    if base.client == ACCELERATE and to != TRAINER:
        return ACCELERATE
    return DEEPSPEED if base.client == DEEPSPEED and family in (DEEPSPEED, UNIVERSAL) else TRAINER


def is_accelerates(path: str) -> bool:
    """Return whether accelerate saves a file of this name; of these the Trainer has optimizer.bin, with FSDP."""
    return bool(_ACCELERATE_FILES.fullmatch(path))


def is_copied_unread(path: str) -> bool:
    """Return whether a file is the state of an object of accelerate's or the loop's own, pickled in any form."""
    return bool(_UNREAD.fullmatch(path))


def is_second_models(name: str) -> bool:
    """Return whether an entry of the root is of another model or optimizer than the first that accelerate prepared."""
    return bool(_SECOND.fullmatch(name))
