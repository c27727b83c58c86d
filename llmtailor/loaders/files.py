"""The names of the files in a checkpoint: whose each is, what it means, and whether it may be deleted. Pure."""

from __future__ import annotations

import re

from llmtailor.checkpoint.index import (
    ACCELERATE,
    TRAINER,
)
from llmtailor.containers.safetensors import (
    INDEX,
)

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


def is_trainers_file(path: str) -> bool:
    """Return whether a file is one that the Trainer saves beside states, and other clients don't."""
    return path in (TRAINER_STATE, "scheduler.pt") or bool(_TRAINER_FILES.fullmatch(path))


def is_accelerates(path: str) -> bool:
    """Return whether accelerate saves a file of this name; of these the Trainer has optimizer.bin, with FSDP."""
    return bool(_ACCELERATE_FILES.fullmatch(path))


def is_copied_unread(path: str) -> bool:
    """Return whether a file is the state of an object of accelerate's or the loop's own, pickled in any form."""
    return bool(_UNREAD.fullmatch(path))


def is_second_models(name: str) -> bool:
    """Return whether an entry of the root is of another model or optimizer than the first that accelerate prepared."""
    return bool(_SECOND.fullmatch(name))


MANIFEST = "llmtailor.json"
CARD = "README.md"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
OPTIMIZER = "optimizer.pt"
"""Of a training without DeepSpeed"""
CONFIG = "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What a PEFT run saves instead of the model's weights and config"""
_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model|jinja)|tokenizer\.model.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt|bpe)"
    r"|merges\.txt|spiece\.model|sentencepiece.*\.model|(source|target)\.spm|.*\.tiktoken|chat_template\.(jinja|json)"
)
"""The names under which transformers' tokenizers save"""
_OTHER_WEIGHTS = re.compile(r"pytorch_model.*\.(bin|json)|adapter_model\.bin")


def is_weight_file(path: str) -> bool:
    """Return whether a file in the root holds weights or their index: written again, or left out."""
    return path.endswith(".safetensors") or path == INDEX or bool(_OTHER_WEIGHTS.fullmatch(path))


def is_pickled_weights(path: str) -> bool:
    """Return whether a file in the root holds weights in the form of ``torch.save``, which is not read."""
    return bool(_OTHER_WEIGHTS.fullmatch(path)) and path.endswith(".bin")


def is_tokenizer_file(path: str) -> bool:
    """Return whether a file in the root of a checkpoint belongs to the tokenizer."""
    return bool(_TOKENIZER.fullmatch(path))


TRAINING_ARGS = "training_args.bin"
RNG_FILE = re.compile(r"(?:rng_state(?:_([0-9]{1,5}))?\.pth|random_states_([0-9]{1,5})\.pkl)")
"""The regex groups are the rank"""


def rng_file(rank: int, world_size: int, client: str = TRAINER) -> str:
    """Return the name of a rank's random number states. The Trainer's one process has ``rng_state.pth``.

    As ``Trainer._save_rng_state`` of transformers, and ``save_accelerator_state`` of accelerate.
    """
    if client == ACCELERATE:
        return f"random_states_{rank}.pkl"
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def is_rng_file(path: str) -> bool:
    """Return whether a file in the root holds the random number states of a rank."""
    return bool(RNG_FILE.fullmatch(path))


def rank_of(path: str) -> int | None:
    """Return the rank whose random number states a file holds; None for another file."""
    match = RNG_FILE.fullmatch(path)
    return int(match[1] or match[2] or 0) if match else None


LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_RANK = r"(0|[1-9][0-9]{0,5})"  # as DeepSpeed writes it, so that no two names mean the same rank
OPTIM_STATES = re.compile(rf"(bf16_)?zero_pp_rank_{_RANK}_mp_rank_([0-9]{{2,5}})_optim_states\.pt")
MODEL_STATES = re.compile(rf"zero_pp_rank_{_RANK}_mp_rank_([0-9]{{2,5}})_model_states\.pt")
UNSHARDED_MODEL = re.compile(r"mp_rank_([0-9]{2,5})_model_states\.pt")
WHOLE_MODEL = "mp_rank_00_model_states.pt"


def is_shard_name(name: str) -> bool:
    """Return whether a file in a tag folder is one that DeepSpeed saves for ZeRO."""
    return any(pattern.fullmatch(name) for pattern in (OPTIM_STATES, MODEL_STATES, UNSHARDED_MODEL))


PARTIAL_MANIFEST = "manifest.json"
FOLDER = "partial"
"""Beside the Trainer's ``checkpoint-N``, under a name that its rotation and its auto-resume ignore."""
_TENSORS = re.compile(r"(rank|frozen)-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def is_tensor_file(name: str) -> bool:
    """Return whether a file's name is that of a rank shard, or of a file of frozen params."""
    return bool(_TENSORS.fullmatch(name))
