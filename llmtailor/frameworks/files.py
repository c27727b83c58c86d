"""The names of the files in a checkpoint: who saves each, what it holds, and whether it may be deleted.

`TABLE` has a row per name or pattern of names. It decides which framework is detected, and which files are left out of
other formats, replaced or deleted. Checked against transformers 5.23, accelerate 1.15, lightning 2.6.6, DeepSpeed 0.19,
torch 2.13 and peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

from llmtailor.checkpoint.index import ACCELERATE, DCP, DEEPSPEED, FSDP, LIGHTNING, MEGATRON, TRAINER, VERL
from llmtailor.containers.dcp import DATA_FILE, METADATA
from llmtailor.containers.json import MAX_NAME
from llmtailor.containers.safetensors import INDEX, SINGLE
from llmtailor.errors import SourceError
from llmtailor.storage.local import read_source

TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.bin"
SCHEDULER, SCALER = "scheduler.pt", "scaler.pt"
OPTIMIZER = "optimizer.pt"
"""Of a training without DeepSpeed"""
CKPT = "checkpoint.ckpt"
"""Lightning's one file, in the folder of a composite; Lightning itself gives it any name, and no folder"""
LIGHTNING_VERSION_KEY = "pytorch-lightning_version"
"""A key of everything that Lightning saves"""
CONFIG = "config.json"
COMMON, BACKEND = "common.pt", "metadata.json"
"""Of Megatron-core: everything that is not sharded, and the name of the format"""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What a PEFT run saves instead of the model's weights and config"""
MANIFEST = "llmtailor.json"
DCP_RECORD = "llmtailor-dcp.json"
"""What `dcp_saving.saver` records of a partial save in a DCP folder"""
CARD = "README.md"
PARTIAL_MANIFEST = "manifest.json"
FOLDER = "partial"
"""Beside the Trainer's ``checkpoint-N``, under a name that its rotation and its auto-resume ignore."""
_TENSORS = re.compile(r"((rank|frozen)-[0-9]{5,}-of-[0-9]{5,}\.safetensors|differences-[0-9]{5,}-of-[0-9]{5,}\.delta)")

VERL_RANK = re.compile(r"(model|optim|extra_state)_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt")
VERL_CONFIG = "fsdp_config.json"
FSDP_RANK = re.compile(r"(pytorch_model_fsdp_0|optimizer_0)_rank(0|[1-9][0-9]{0,5})\.bin")
"""Of accelerate's functions with ``use_dcp=False``"""
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_RANK = r"(0|[1-9][0-9]{0,5})"  # as DeepSpeed writes it, so that no two names mean the same rank
OPTIM_STATES = re.compile(rf"(bf16_)?zero_pp_rank_{_RANK}_mp_rank_([0-9]{{2,5}})_optim_states\.pt")
MODEL_STATES = re.compile(rf"zero_pp_rank_{_RANK}_mp_rank_([0-9]{{2,5}})_model_states\.pt")
UNSHARDED_MODEL = re.compile(r"mp_rank_([0-9]{2,5})_model_states\.pt")
WHOLE_MODEL = "mp_rank_00_model_states.pt"
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
ENGINE_FILES = frozenset((LATEST, *_SCRIPTS))
"""What DeepSpeed leaves in the root for its loader and its tools"""

MODEL, TOKENIZER, SEVERAL = "model", "tokenizer", "several loaders"
"""Other owners of files than the frameworks of `checkpoint.index`"""


def tag_in(latest: Path) -> str:
    """Return the tag that `LATEST` names, empty if there is none. `read_tag` checks it."""
    with suppress(SourceError):
        return read_source(latest, latest.name, MAX_NAME).decode(errors="replace").strip()
    return ""


class Holds(Enum):
    """What a file holds."""

    STATES = "the optimizer's states"
    WEIGHTS = "weights, or their index"
    RNG = "the random number states of a rank"
    PROGRESS = "counters, schedules, loss scale, arguments"
    OBJECTS = "the state of an object of accelerate's or the loop's own, pickled in any form"
    POINTER = "the name of the folder with the states"
    SCRIPT = "a program that DeepSpeed adds"
    SETTINGS = "what the model or tokenizer is"
    NOTHING = "nothing that is known"


@dataclass(frozen=True, slots=True)
class FileName:
    """The name of a file, or a pattern of such names."""

    pattern: str
    """A regex of the path below the root; a folder ends in ``/``."""
    owner: str
    """The only saver that gives a file this name"""
    holds: Holds
    is_known: bool = True
    """Whether it may be deleted whatever else is in the folder; else `frameworks.framework` looks at the other files"""
    is_sign: bool = True
    """Whether the file alone means that its owner resumes from the checkpoint"""


_N = r"(_[0-9]{1,5})?"


def _named(owner: str, holds: Holds, *names: str, is_sign: bool = True) -> tuple[FileName, ...]:
    return tuple(FileName(re.escape(name), owner, holds, is_sign=is_sign) for name in names)


TABLE = (
    *_named(TRAINER, Holds.PROGRESS, TRAINER_STATE, SCHEDULER, is_sign=False),
    *_named(TRAINER, Holds.PROGRESS, TRAINING_ARGS),
    FileName(rf"rng_state{_N}\.pth", TRAINER, Holds.RNG),
    *_named(SEVERAL, Holds.PROGRESS, SCALER),
    *_named(SEVERAL, Holds.STATES, OPTIMIZER),
    FileName(rf"optimizer{_N}\.bin", ACCELERATE, Holds.STATES),  # with FSDP also the Trainer's
    FileName(rf"scheduler{_N}\.bin", ACCELERATE, Holds.PROGRESS),
    FileName(rf"random_states{_N}\.pkl", ACCELERATE, Holds.RNG),
    FileName(rf"(sampler|dl_state_dict){_N}\.bin|custom_checkpoint{_N}\.pkl", ACCELERATE, Holds.OBJECTS),
    FileName(rf"pytorch_model{_N}/", ACCELERATE, Holds.STATES, is_known=False),
    *_named(LIGHTNING, Holds.STATES, CKPT),
    *_named(DEEPSPEED, Holds.POINTER, LATEST, LATEST_UNIVERSAL),
    *_named(DEEPSPEED, Holds.SCRIPT, *_SCRIPTS),
    FileName(
        "|".join(one.pattern for one in (OPTIM_STATES, MODEL_STATES, UNSHARDED_MODEL)),
        DEEPSPEED,
        Holds.STATES,
        is_known=False,
    ),
    *_named(FSDP, Holds.WEIGHTS, "pytorch_model_fsdp.bin"),  # with FULL_STATE_DICT
    FileName(FSDP_RANK.pattern, FSDP, Holds.STATES),
    FileName(VERL_RANK.pattern, VERL, Holds.STATES),
    *_named(VERL, Holds.PROGRESS, VERL_CONFIG, is_sign=False),
    FileName(rf"{re.escape(METADATA)}|{DATA_FILE.pattern}", DCP, Holds.STATES, is_known=False),
    *_named(MEGATRON, Holds.STATES, COMMON, BACKEND),
    FileName(rf".*\.safetensors|{re.escape(INDEX)}", MODEL, Holds.WEIGHTS, is_known=False),
    FileName(r"pytorch_model.*\.(bin|json)|adapter_model\.bin", MODEL, Holds.WEIGHTS, is_known=False),
    *_named(MODEL, Holds.SETTINGS, CONFIG, ADAPTER_CONFIG, "generation_config.json", "preprocessor_config.json"),
    *_named(MODEL, Holds.SETTINGS, "processor_config.json", "video_preprocessor_config.json"),
    *_named(MODEL, Holds.SETTINGS, "audio_tokenizer_config.json"),
    FileName(
        r"tokenizer\.(json|model)|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|merges\.txt"
        r"|chat_template\.(jinja|json)|vocab\.(json|txt|bpe)|bpe\.codes|(spiece|spm|spm_char|tiktoken)\.model"
        r"|sentencepiece(\.bpe)?\.model|(source|target)\.spm|tekken\.json|byte_maps\.json|dict\.txt|emoji\.json"
        r"|entity_vocab\.json|normalizer\.json|prophetnet\.tokenizer|target_vocab\.json|vocab-(src|tgt)\.json"
        r"|word_(pronunciation|shape)\.json",
        TOKENIZER,
        Holds.SETTINGS,
    ),
    FileName(
        r"tokenizer.*\.(json|model|jinja)|tokenizer\.model.*|sentencepiece.*\.model|.*\.tiktoken",
        TOKENIZER,
        Holds.SETTINGS,
        is_known=False,
    ),
    *_named("llmtailor", Holds.PROGRESS, MANIFEST, DCP_RECORD),
)
"""The first row that matches counts."""
_UNKNOWN = FileName("", "", Holds.NOTHING, is_known=False, is_sign=False)
_ROWS = tuple((re.compile(row.pattern), row) for row in TABLE)
_SECOND = re.compile(r"(model|optimizer|pytorch_model|pytorch_model_fsdp)_[1-9][0-9]*(/|\.bin|\.safetensors)")
_RNG_RANK = re.compile(r"(?:rng_state|random_states)(?:_([0-9]+))?\.(?:pth|pkl)")


@lru_cache(maxsize=4096)
def row_of(path: str) -> FileName:
    """Return the row of a path below a checkpoint's root; for an unknown name, one that holds nothing."""
    return next((row for pattern, row in _ROWS if pattern.fullmatch(path)), _UNKNOWN)


def owner_of(path: str) -> str:
    return row_of(path).owner


def holds(path: str, *kinds: Holds) -> bool:
    """Return whether files of this name hold one of these kinds."""
    return row_of(path).holds in kinds


def is_known_name(path: str) -> bool:
    """Return whether a file of this name may be deleted whatever else is in the folder."""
    return row_of(path).is_known


def is_sign_of(framework: str, path: str) -> bool:
    """Return whether a file of this name alone means that a framework resumes from the checkpoint."""
    return row_of(path).is_sign and owner_of(path) == framework


def is_second_models(name: str) -> bool:
    """Return whether accelerate gives this name to a second model or optimizer."""
    return bool(_SECOND.fullmatch(name))


def is_weight_file(path: str) -> bool:
    """Return whether a file in the root holds weights or their index: written again, or left out."""
    return holds(path, Holds.WEIGHTS)


def adapters_among(paths: Iterable[str]) -> dict[str, str]:
    """Return the adapters that PEFT has saved among a checkpoint's files, each with its folder.

    ``default`` is in the root, others are in folders of their own, with a ``/`` at the end. Only a run that trains
    adapters has any.
    """
    folders = (path.removesuffix(ADAPTER_CONFIG) for path in paths if path.rpartition("/")[2] == ADAPTER_CONFIG)
    return {folder[:-1] or "default": folder for folder in sorted(folders)}


def may_have_adapters(top: Collection[str]) -> bool:
    """Return whether folders beside these entries of a checkpoint's root may be adapters': not beside a whole model."""
    return ADAPTER_CONFIG in top or not {CONFIG, SINGLE, INDEX}.intersection(top)


def is_pickled_weights(path: str) -> bool:
    """Return whether a file in the root holds weights in the form of ``torch.save``, which is not read."""
    return is_weight_file(path) and path.endswith(".bin")


def is_tokenizer_file(path: str) -> bool:
    """Return whether a file in the root of a checkpoint belongs to the tokenizer."""
    return owner_of(path) == TOKENIZER


def is_of_states(path: str) -> bool:
    """Return whether a file in the root, or in a tag folder that is the root, holds states in some format."""
    return path == LATEST_UNIVERSAL or holds(path, Holds.STATES)


def is_shard_name(name: str) -> bool:
    """Return whether a file in a tag folder is one that DeepSpeed saves for ZeRO."""
    return owner_of(name) == DEEPSPEED and holds(name, Holds.STATES)


def rng_file(rank: int, world_size: int, framework: str = TRAINER) -> str:
    """Return the name of a rank's random number states. The Trainer's one process has ``rng_state.pth``.

    As ``Trainer._save_rng_state`` of transformers, and ``save_accelerator_state`` of accelerate.
    """
    if framework == ACCELERATE:
        return f"random_states_{rank}.pkl"
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def is_rng_file(path: str) -> bool:
    """Return whether a file in the root holds the random number states of a rank."""
    return holds(path, Holds.RNG)


def rank_of(path: str) -> int | None:
    """Return the rank whose random number states a file holds; None for another file."""
    match = _RNG_RANK.fullmatch(path) if is_rng_file(path) else None
    return int(match[1] or 0) if match else None


def is_tensor_file(name: str) -> bool:
    """Return whether a file's name is that of a file of tensors in a partial checkpoint."""
    return bool(_TENSORS.fullmatch(name))
