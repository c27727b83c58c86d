"""Whose loader resumes from a checkpoint, and which files it opens beside weights and shards. Pure.

::

    trainer      Trainer.train(resume_from_checkpoint)    trainer_state.json, scheduler.pt, rng_state[_N].pth
    accelerate   Accelerator.load_state                   scheduler.bin, random_states_N.pkl, custom_checkpoint_N.pkl
    lightning    Trainer.fit(ckpt_path=...) of Lightning  nothing; without DeepSpeed one file holds the weights as well
    deepspeed    engine.load_checkpoint                   nothing

Under DeepSpeed, the Trainer looks for a tag folder ``global_step*``, accelerate for ``pytorch_model`` and Lightning for
``checkpoint``; an engine takes any that ``latest`` names. Checked against transformers 5.23, accelerate 1.15, lightning
2.6.6 and deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from llmtailor.checkpoint.index import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    LIGHTNING,
    TRAINER,
    UNIVERSAL,
    CheckpointIndex,
)
from llmtailor.errors import MismatchError

TRAINER_STATE = "trainer_state.json"
CKPT = "checkpoint.ckpt"
"""Lightning's one file, in the folder of a composite; Lightning's own have any name and no folder"""
LIGHTNINGS = "pytorch-lightning_version"
"""A key of everything that Lightning saves"""
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
    call: str
    """What resumes with it, with braces in place of the path"""
    state: str = ""
    """The file with the run's counters, without which it does not resume; empty if there is none"""
    scheduler: str = "scheduler.pt"
    """Empty if it has no file of its own"""
    needs_scheduler: bool = False
    optimizer: str = "optimizer.pt"
    """The file of the optimizer's states in a training without DeepSpeed"""
    holds_all: bool = False
    """Whether that file also holds the weights and everything else"""
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

    def takes(self, checkpoint: str, stage: int) -> str:
        """Return the path that it resumes from: a checkpoint's, or that of the one file in it. Stage 0 is without
        DeepSpeed."""
        is_inside = self.holds_all and not stage and not checkpoint.endswith(".ckpt")
        return f"{checkpoint}/{CKPT}" if is_inside else checkpoint


CLIENTS = {
    one.name: one
    for one in (
        Client(
            TRAINER,
            "the Trainer",
            'trainer.train(resume_from_checkpoint="{}")',
            state=TRAINER_STATE,
            needs_scheduler=True,
            tag="global_step*",
            saves_model=True,
        ),
        Client(
            ACCELERATE,
            "accelerate",
            'accelerator.load_state("{}")',
            scheduler="scheduler.bin",
            optimizer="optimizer.bin",
            tag="pytorch_model",
            default_tag="pytorch_model",
            counts_steps=False,
        ),
        Client(
            LIGHTNING,
            "Lightning",
            'trainer.fit(module, ckpt_path="{}")',
            scheduler="",
            optimizer=CKPT,
            holds_all=True,
            tag="checkpoint",
            default_tag="checkpoint",
            saves_rng=False,
            counts_steps=False,
        ),
        Client(DEEPSPEED, "DeepSpeed", 'engine.load_checkpoint("{}")', saves_rng=False),
        Client(
            DCP,
            "torch.distributed.checkpoint",
            'torch.distributed.checkpoint.load(state_dict, checkpoint_id="{}")',
            saves_rng=False,
        ),
    )
}


def client_of(index: CheckpointIndex) -> Client:
    """Return the client of a checkpoint."""
    return CLIENTS[index.client]


def detect_client(names: Iterable[str], is_trainers: bool | None, is_engines: bool) -> Client:
    """Return whose loader a checkpoint is for.

    ``names`` are those of the entries of its root, folders with a ``/`` at the end. ``is_trainers`` says whether its
    trainer_state.json is the Trainer's; llmtailor's own in a loop without a Trainer is not. None without such a file.
    ``is_engines`` says whether DeepSpeed has saved the states; the names don't tell whether Lightning told it to.
    """
    names = [*names]
    if CKPT in names:
        return CLIENTS[LIGHTNING]
    if is_trainers or (is_trainers is None and any(map(_TRAINER_FILES.fullmatch, names))):
        return CLIENTS[TRAINER]
    if any(map(_ACCELERATE_FILES.fullmatch, names)):
        return CLIENTS[ACCELERATE]
    return CLIENTS[DEEPSPEED if is_engines else TRAINER]


def choose_client(base: CheckpointIndex, family: str, to: str | None, layout: str | None = None) -> str:
    """Return the client of an output of a family of formats, which ``--to`` and ``--layout`` named or not.

    Raises MismatchError for a format that another client reads, or a client that can't have the states of the base: no
    other model has the names of a LightningModule.
    """
    if layout is not None and not base.client == layout == LIGHTNING:
        _check_layout(base, family, layout)
        return layout
    if base.client == LIGHTNING:
        own = (DEEPSPEED, UNIVERSAL) if base.stage else (TRAINER,)
        if family not in own or to == TRAINER:
            what = "only Lightning resumes from it: its params have the names of a LightningModule"
            fix = "leave out --to and --stage" if not base.stage else "stay with DeepSpeed: --stage 1, 2 or 3"
            raise MismatchError.at("--stage" if to is None else "--to", f"{base.name}: {what}", fix)
        return LIGHTNING
    if family == DCP:
        return DCP
    if base.client == ACCELERATE and to != TRAINER:
        return ACCELERATE
    return DEEPSPEED if base.client == DEEPSPEED and family in (DEEPSPEED, UNIVERSAL) else TRAINER


def _check_layout(base: CheckpointIndex, family: str, layout: str) -> None:
    """Raise MismatchError for a client's layout that the states of a base, or a family of formats, don't fit."""
    able = [TRAINER, ACCELERATE, *([DEEPSPEED] if family in (DEEPSPEED, UNIVERSAL) else [])]
    fix = f"use --layout {', '.join(able[:-1])} or {able[-1]}, or leave it out"
    if base.client == LIGHTNING:
        what, fix = "only Lightning resumes from the names of a LightningModule's params", "leave out --layout"
    elif family == DCP:
        what = "a folder of torch.distributed.checkpoint has no files of a client"
        fix = "leave out --layout, or name another format with --to: deepspeed, universal, trainer or fsdp"
    elif layout == LIGHTNING:
        what = "it lacks the progress of Lightning's loops, and the names of a LightningModule"
    elif layout not in able:
        what, fix = "an engine resumes from DeepSpeed's shards only", f"{fix}; or use --stage 1, 2 or 3"
    else:
        return
    raise MismatchError.at("--layout", f"{base.name}: {what}", fix)


def is_trainers_file(path: str) -> bool:
    """Return whether a file is one that the Trainer saves beside states, and other clients don't."""
    return path in (TRAINER_STATE, CLIENTS[TRAINER].scheduler) or bool(_TRAINER_FILES.fullmatch(path))


def is_accelerates(path: str) -> bool:
    """Return whether accelerate saves a file of this name; of these the Trainer has optimizer.bin, with FSDP."""
    return bool(_ACCELERATE_FILES.fullmatch(path))


def is_copied_unread(path: str) -> bool:
    """Return whether a file is the state of an object of accelerate's or the loop's own, pickled in any form."""
    return bool(_UNREAD.fullmatch(path))


def is_second_models(name: str) -> bool:
    """Return whether an entry of the root is of another model or optimizer than the first that accelerate prepared."""
    return bool(_SECOND.fullmatch(name))
