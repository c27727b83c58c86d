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

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

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
from llmtailor.loaders.files import (
    CKPT,
    FOLDER,
    OPTIM_STATES,
    PARTIAL_MANIFEST,
    TRAINER_STATE,
    is_sign_of,
)


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
    if is_trainers or (is_trainers is None and any(is_sign_of(TRAINER, name) for name in names)):
        return CLIENTS[TRAINER]
    if any(is_sign_of(ACCELERATE, name) for name in names):
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
        own = (DEEPSPEED, UNIVERSAL) if base.form.stage else (TRAINER,)
        if family not in own or to == TRAINER:
            what = "its parameters are named after a LightningModule, so only Lightning can resume from it"
            fix = "leave out --to and --stage" if not base.form.stage else "stay with DeepSpeed: --stage 1, 2 or 3"
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


def is_tag_alone(folder: Path) -> bool:
    """Return whether a folder is the tag folder of an engine in a loop.

    It is a checkpoint of its own, of which nothing is beside it; other clients have files there.
    """
    if not folder.is_dir() or not any(OPTIM_STATES.fullmatch(entry.name) for entry in folder.iterdir()):
        return False
    above = folder.absolute().parent
    beside = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in above.iterdir()]
    client = detect_client(beside, True if TRAINER_STATE in beside else None, is_engines=True)
    return client.name == DEEPSPEED and above.suffix != ".ckpt"


def is_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint whose save has finished."""
    return (root / PARTIAL_MANIFEST).is_file()


def looks_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint, or the place of an unfinished one."""
    return is_partial(root) or root.absolute().parent.name == FOLDER
