"""Which framework resumes from a checkpoint, its files beside weights and shards, and which files may be removed.

::

    trainer      Trainer.train(resume_from_checkpoint)    trainer_state.json, scheduler.pt, rng_state[_N].pth
    accelerate   Accelerator.load_state                   scheduler.bin, random_states_N.pkl, custom_checkpoint_N.pkl
    lightning    Trainer.fit(ckpt_path=...) of Lightning  nothing; without DeepSpeed one file holds the weights as well
    deepspeed    engine.load_checkpoint                   nothing

Under DeepSpeed, the Trainer looks for a tag folder ``global_step*``, accelerate for ``pytorch_model`` and Lightning for
``checkpoint``; an engine takes any that ``latest`` names. Checked against transformers 5.23, accelerate 1.15, lightning
2.6.6 and deepspeed 0.19.8.

Only files that a training or llmtailor is known to have made may be removed. A name is known if the Trainer, DeepSpeed,
transformers or PEFT saves something under it, given the other files there: ``pytorch_model.bin`` is the Trainer's if
there are no safetensors, and a user's own if there are. Files that people write or edit, above all README.md, are
identified by their content. Everything else is unknown, including links. Checked against peft 0.21.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    LIGHTNING,
    MEGATRON,
    TRAINER,
    UNIVERSAL,
    VERL,
    CheckpointIndex,
)
from llmtailor.containers.dcp import DATA_FILE, METADATA
from llmtailor.containers.json import read_json
from llmtailor.containers.safetensors import INDEX, SINGLE
from llmtailor.errors import MismatchError, SourceError, StorageError, TargetError, some
from llmtailor.frameworks.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    CKPT,
    CONFIG,
    FOLDER,
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    OPTIM_STATES,
    PARTIAL_MANIFEST,
    TRAINER_STATE,
    VERL_RANK,
    Holds,
    adapters_among,
    holds,
    is_known_name,
    is_shard_name,
    is_sign_of,
    is_tensor_file,
    is_weight_file,
    may_have_adapters,
)
from llmtailor.storage.local import Entries, FileFact, OpenFiles, list_entries, read_source


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that resumes from checkpoints: the files that it opens beside weights and shards, and those that it
    saves."""

    name: str
    title: str
    """What messages call it"""
    call: str
    """The call that resumes with it, with braces in place of the path"""
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
    """Pattern (`fnmatch`) of the tag folders that it finds; empty if it follows ``latest``"""
    default_tag: str = "global_step{}"
    """The tag of an output whose base has none, with the step in place of the braces"""
    saves_model: bool = False
    """Whether it saves config.json, and the weights beside DeepSpeed's shards"""
    saves_rng: bool = True
    settings: str = ""
    """The folder of config.json and the tokenizer; empty if they are in the root"""
    counts_steps: bool = True
    """Whether a schedule counts optimizer steps; accelerate steps it once per process, however many there are now"""

    def finds(self, tag: str) -> bool:
        """Return whether it finds a tag folder of this name."""
        return not self.tag or fnmatch(tag, self.tag)

    def takes(self, checkpoint: str, stage: int) -> str:
        """Return the path that it resumes from: a checkpoint's, or its one file's. Stage 0: without DeepSpeed."""
        is_inside = self.holds_all and not stage and not checkpoint.endswith(".ckpt")
        return f"{checkpoint}/{CKPT}" if is_inside else checkpoint


FRAMEWORKS = {
    one.name: one
    for one in (
        Framework(
            TRAINER,
            "the Trainer",
            'trainer.train(resume_from_checkpoint="{}")',
            state=TRAINER_STATE,
            needs_scheduler=True,
            tag="global_step*",
            saves_model=True,
        ),
        Framework(
            ACCELERATE,
            "accelerate",
            'accelerator.load_state("{}")',
            scheduler="scheduler.bin",
            optimizer="optimizer.bin",
            tag="pytorch_model",
            default_tag="pytorch_model",
            counts_steps=False,
        ),
        Framework(
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
        Framework(DEEPSPEED, "DeepSpeed", 'engine.load_checkpoint("{}")', saves_rng=False),
        Framework(
            DCP,
            "torch.distributed.checkpoint",
            'torch.distributed.checkpoint.load(state_dict, checkpoint_id="{}")',
            saves_rng=False,
        ),
        Framework(
            VERL,
            "verl",
            'checkpoint_manager.load_checkpoint("{}")',
            scheduler="",
            settings="huggingface/",
            saves_rng=False,
        ),
        Framework(
            MEGATRON,
            "Megatron-core",
            'megatron.core.dist_checkpointing.load(sharded_state_dict, "{}")',
            saves_rng=False,
        ),
    )
}


def framework_of(index: CheckpointIndex) -> Framework:
    """Return the framework of a checkpoint."""
    return FRAMEWORKS[index.framework]


def detect_framework(names: Iterable[str], is_trainers: bool | None, is_engines: bool) -> Framework:
    """Return the framework that a checkpoint is for.

    ``names`` are the entries of its root, folders with a ``/`` at the end. ``is_trainers`` says whether its
    trainer_state.json is the Trainer's (llmtailor writes one in a loop without a Trainer); None without the file.
    ``is_engines`` says whether DeepSpeed saved the states; the names don't show whether Lightning used it.
    """
    names = [*names]
    if CKPT in names:
        return FRAMEWORKS[LIGHTNING]
    if is_trainers or (is_trainers is None and any(is_sign_of(TRAINER, name) for name in names)):
        return FRAMEWORKS[TRAINER]
    if any(is_sign_of(ACCELERATE, name) for name in names):
        return FRAMEWORKS[ACCELERATE]
    return FRAMEWORKS[DEEPSPEED if is_engines else TRAINER]


def choose_framework(base: CheckpointIndex, to_format: str, to: str | None, layout: str | None = None) -> str:
    """Return the framework of an output: ``layout`` if it is given, else the base's where it can read the format.

    ``to_format`` is the output's format, ``to`` and ``layout`` the options ``--to`` and ``--layout``. Raises
    MismatchError for a format that another framework reads, or for a framework that can't resume from the base's
    states: only Lightning takes the names of a LightningModule.
    """
    if layout is not None and not base.framework == layout == LIGHTNING:
        _check_layout(base, to_format, layout)
        return layout
    if base.framework == LIGHTNING:
        own = (DEEPSPEED, UNIVERSAL) if base.form.stage else (TRAINER,)
        if to_format not in own or to == TRAINER:
            what = "its parameters are named after a LightningModule, so only Lightning can resume from it"
            fix = "leave out --to and --stage" if not base.form.stage else "stay with DeepSpeed: --stage 1, 2 or 3"
            raise MismatchError.at("--stage" if to is None else "--to", f"{base.name}: {what}", fix)
        return LIGHTNING
    if to_format in (DCP, VERL, MEGATRON):
        return to_format
    if base.framework == ACCELERATE and to != TRAINER:
        return ACCELERATE
    return DEEPSPEED if base.framework == DEEPSPEED and to_format in (DEEPSPEED, UNIVERSAL) else TRAINER


def _check_layout(base: CheckpointIndex, to_format: str, layout: str) -> None:
    able = [TRAINER, ACCELERATE, *([DEEPSPEED] if to_format in (DEEPSPEED, UNIVERSAL) else [])]
    fix = f"use --layout {', '.join(able[:-1])} or {able[-1]}, or leave it out"
    if base.framework == LIGHTNING:
        what, fix = "only Lightning resumes from the names of a LightningModule's params", "leave out --layout"
    elif to_format in (DCP, VERL, MEGATRON):
        title = "verl's checkpoint" if to_format == VERL else "a folder of torch.distributed.checkpoint"
        what = f"{title} has no files of another loader"
        fix = "leave out --layout, or name another format with --to: deepspeed, universal, trainer or fsdp"
    elif layout == LIGHTNING:
        what = "it lacks the progress of Lightning's loops, and the names of a LightningModule"
    elif layout not in able:
        what, fix = "an engine resumes from DeepSpeed's shards only", f"{fix}; or use --stage 1, 2 or 3"
    else:
        return
    raise MismatchError.at("--layout", f"{base.name}: {what}", fix)


def is_tag_alone(folder: Path) -> bool:
    """Return whether a folder is an engine's tag folder in a loop: a checkpoint with no framework's files beside it."""
    if not folder.is_dir() or not any(OPTIM_STATES.fullmatch(entry.name) for entry in folder.iterdir()):
        return False
    above = folder.absolute().parent
    beside = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in above.iterdir()]
    framework = detect_framework(beside, True if TRAINER_STATE in beside else None, is_engines=True)
    return framework.name == DEEPSPEED and above.suffix != ".ckpt"


def is_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint whose save has finished."""
    return (root / PARTIAL_MANIFEST).is_file()


def is_or_may_be_partial(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint, or the place of an unfinished one."""
    return is_partial(root) or root.absolute().parent.name == FOLDER


_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OF_RANK = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_BIN = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5}\.bin|\.bin(\.index\.json)?)")
_TAG = re.compile(r"global_step[0-9]+(_universal)?|pytorch_model")
_OF_UNIVERSAL = re.compile(r"zero/(optimizer_state\.pt|[^/]+/(\w+\.pt)?)?")
_DCP_FOLDERS = ("pytorch_model_fsdp_0/", "optimizer_0/")
_TEMPLATES = "additional_chat_templates"
_WITH_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json")
_MAX_CARD_BYTES = 1 << 20
_PEFT_CARDS = {
    "b352b01e1abe4fa60cdd3d711655a52a604c6dc548f0fbbfb6c6bfae447c797f",  # huggingface_hub 0.17 and later
    "549883e85dc3c2115ad098e60382df8c1b9008e4f8062ddc5f6015064a3d33bd",  # before
}
"""Digests of the lines of PEFT's model card, without its version"""
_OF_PEFT = re.compile(r"### Framework versions|- PEFT \S+")
_OF_FRONT = re.compile(r"(base_model|library_name|pipeline_tag|tags):|\s*- |\s*$")


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries of a folder."""

    known: Entries
    """Files and folders of known origin"""
    unknown: tuple[str, ...]
    """All others, without the contents of unknown folders, which end in ``/``"""
    is_training: bool
    """Whether it has any training state: weights and settings alone may be any model"""
    is_partial: bool
    """Whether it is a partial checkpoint, finished or not"""


def survey_contents(root: Path) -> Contents:
    """Return the classified entries of a folder; unknown folders are not searched. Raises OSError."""
    top = list_entries(root)
    recognizer = _Recognizer(root, top)
    known: dict[str, FileFact | None] = {}
    unknown: list[str] = []
    for path, fact in top.items():
        if fact is None and path.endswith("/") and (is_known := recognizer.folder(path)):
            known[path] = fact
            _sort(root, path, "", is_known, known, unknown)
        elif fact is not None and recognizer.file(path):
            known[path] = fact
        else:
            unknown.append(path)
    is_training = any(
        path == TRAINER_STATE or holds(path, Holds.STATES) or is_shard_name(path.rpartition("/")[2]) for path in known
    )
    return Contents(known, tuple(sorted(unknown)), is_training, recognizer.is_partial)


def _sort(
    root: Path,
    top: str,
    inside: str,
    is_known: Callable[[str], bool],
    known: dict[str, FileFact | None],
    unknown: list[str],
) -> None:
    """Add the entries of folder ``inside`` of a known folder ``top``, and of known folders in it, to either."""
    for entry, fact in list_entries(root / top / inside).items():
        name = inside + entry
        if (fact is None) != name.endswith("/") or not is_known(name):
            unknown.append(top + name)
            continue
        known[top + name] = fact
        if fact is None:
            _sort(root, top, name, is_known, known, unknown)


def check_replaceable(root: Path, where: str) -> Entries:
    """Return the entries of a folder that an output may replace; none if it is missing or empty.

    Raises TargetError unless it is one checkpoint, with files of known origin only.
    """
    if not root.exists():
        return {}
    here = Path.cwd().resolve()
    if here.is_relative_to(root.resolve()) or root.is_mount():
        what = "it is a mount point" if root.is_mount() else "the current folder lies in it"
        raise TargetError.at(where, f"the output can't be replaced: {what}", "choose another output")
    try:
        contents = survey_contents(root)
    except OSError as error:
        what = f"the output can't be read ({error.strerror}), so it is not replaced"
        raise TargetError.at(where, what, "choose another output") from error
    fix = "choose another output"
    if contents.unknown:
        reason = f"it holds files that are not a checkpoint's, or that no training made: {some(contents.unknown, 8)}"
        fix = "move these away, or choose another output"
    elif contents.is_partial:
        reason = "it is a partial checkpoint, on which other steps of its run may depend"
    elif contents.known and not contents.is_training:
        reason = "it is not a checkpoint: it has weights or settings only, no training state"
    else:
        return contents.known
    what = f"the output is not replaced: {reason}; --force replaces one checkpoint, and nothing else"
    raise TargetError.at(where, what, fix)


class _Recognizer:
    def __init__(self, root: Path, top: Entries):
        self.root, self.top = root, top
        self.is_partial = is_or_may_be_partial(root)
        self.is_tag = is_tag_alone(root)
        self.weights = frozenset() if self.is_partial else frozenset(self._weights())
        self.names = {*self.weights, *self._code()}
        self.tags = self._find_tags()
        self.written = self._written()

    def file(self, path: str) -> bool:
        if path in self.names or is_known_name(path) or (self.is_tag and is_shard_name(path)):
            return True
        if path == METADATA or DATA_FILE.fullmatch(path):
            return METADATA in self.top
        if self.is_partial and (path == PARTIAL_MANIFEST or is_tensor_file(path)):
            return True
        return self._is_as_written(path) or (path == CARD and _is_of_peft(self.root / path))

    def folder(self, path: str) -> Callable[[str], bool] | None:
        """Return the function that recognizes a folder's files; None for an unknown folder."""
        if path[:-1] in self.tags:
            return lambda name: is_shard_name(name) or bool(_OF_UNIVERSAL.fullmatch(name))
        if path in _DCP_FOLDERS:
            return lambda name: name == METADATA or bool(DATA_FILE.fullmatch(name))
        if path == FRAMEWORKS[VERL].settings and any(VERL_RANK.fullmatch(name) for name in self.top):
            return lambda name: holds(name, Holds.SETTINGS)
        if path == f"{_TEMPLATES}/":
            return lambda name: name.endswith(".jinja")
        if (
            may_have_adapters(self.top) and (self.root / path / ADAPTER_CONFIG).is_file()
        ):  # an adapter other than `default`
            inner = _Recognizer(self.root / path, list_entries(self.root / path))
            return lambda name: name == ADAPTER_CONFIG or name in inner.weights or (name == CARD and inner.file(name))
        return None

    def _weights(self) -> Iterator[str]:
        if ADAPTER_CONFIG in self.top:
            yield ADAPTER if ADAPTER in self.top else "adapter_model.bin"
        elif SINGLE in self.top:  # transformers then reads no other weights
            yield SINGLE
        elif INDEX in self.top:
            yield INDEX
            listed = self._json(INDEX).get("weight_map")
            shards = set(listed.values()) if isinstance(listed, dict) else None
            yield from (path for path in self.top if _SHARD.fullmatch(path) and (shards is None or path in shards))
        else:
            found = ([path for path in self.top if pattern.fullmatch(path)] for pattern in (_OF_RANK, _SHARD, _BIN))
            yield from next(filter(None, found), ())

    def _code(self) -> Iterator[str]:
        """Yield modules of the checkpoint's own model, config or tokenizer, as ``auto_map`` names them."""
        for path in _WITH_CODE:
            mapped = self._json(path).get("auto_map") if path in self.top else None
            for name in _texts(mapped):
                yield f"{name.rpartition('--')[2].partition('.')[0]}.py"

    def _find_tags(self) -> list[str]:
        tags = [path[:-1] for path in self.top if _TAG.fullmatch(path[:-1]) and path.endswith("/")]
        stated = []
        for name in (LATEST, LATEST_UNIVERSAL):
            if name in self.top:
                with suppress(SourceError):
                    stated.append(read_source(self.root / name, name, 4096).decode("utf-8", "replace").strip())
        return [tag for tag in stated if f"{tag}/" in self.top] or (tags if len(tags) == 1 else [])

    def _written(self) -> Mapping[str, tuple[int, int]]:
        """Return the files that llmtailor wrote, by the manifest of a composite: path -> size and CRC-32."""
        content = self._json(MANIFEST) if MANIFEST in self.top else {}
        rows = content.get("files")
        rows = [*(rows if isinstance(rows, list) else []), content.get("card")]
        try:
            rows = [row for row in rows if row and "linked" not in row]
            return {str(row["path"]): (int(row["num_bytes"]), int(row["crc32"], 16)) for row in rows}
        except (KeyError, TypeError, ValueError):
            return {}

    def _is_as_written(self, path: str) -> bool:
        fact = self.top[path]
        if path in self.written and fact is not None and fact.num_bytes == self.written[path][0]:
            with suppress(OSError, StorageError), OpenFiles(self.root) as files:
                return files.crc_of(path, 0, fact.num_bytes) == self.written[path][1]
        return False

    def _json(self, path: str) -> Mapping[str, Any]:
        with suppress(SourceError):
            return read_json(self.root / path, path)
        return {}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _is_of_peft(path: Path) -> bool:
    """Return whether a model card is the unedited template that PEFT saves with every adapter."""
    try:
        text = read_source(path, path.name, _MAX_CARD_BYTES).decode()
    except (SourceError, UnicodeDecodeError):
        return False
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    if not all(_OF_FRONT.match(line) for line in front.splitlines()):
        return False
    lines = [line.strip() for line in body.splitlines() if line.strip() and not _OF_PEFT.fullmatch(line.strip())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() in _PEFT_CARDS


def is_resumed_from(path: str, index: CheckpointIndex) -> bool:
    """Return whether a resume, or a composite of a partial checkpoint, reads states from a file."""
    if index.form.is_partial:
        return path.endswith((".safetensors", ".delta"))
    folder, _, name = path.rpartition("/")
    if name and f"{folder}/" in adapters_among(index.files).values():
        return is_weight_file(name) and not index.form.has_masters
    is_of_states = holds(path, Holds.STATES) or path in (".", framework_of(index).optimizer)
    return "/" in path or is_of_states or (is_weight_file(path) and not index.form.has_masters)
