"""Checkpoints of FSDP trainings of the Trainer and of accelerate.

As seen with torch 2.13, accelerate 1.15 and transformers 5.23, beside the Trainer's scheduler.pt, rng_state_R.pth and
trainer_state.json::

    pytorch_model_fsdp_0/, optimizer_0/                   DCP folders: SHARDED_STATE_DICT, FSDP1 and FSDP2
    shard-R-model-1-of-1.safetensors, optimizer_0/        transformers.distributed
    pytorch_model_fsdp.bin, optimizer.bin                 FULL_STATE_DICT, the Trainer's default: two torch.save files,
                                                          {param: tensor} and {state: {param: {step, exp_avg, ..}},
                                                          param_groups: [{.., params: [names]}]}
    pytorch_model_fsdp_0_rankR.bin, optimizer_0_rankR.bin use_dcp=False: files of each rank, see `dcp.rank_files`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import FOLDERS, FSDP, FULL, RANKS, SHARDS
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.json import FileTrees, as_dict, check_name, read_tensor
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import COPY_BACK, PathIn, Problems, SourceError, attempt
from llmtailor.formats.composite import read_composite
from llmtailor.formats.dcp.folder import (
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    DcpCheckpoint,
    Stored,
    is_shard,
    list_shards,
    read_folder,
    read_shards,
)
from llmtailor.formats.dcp.index import Folders, draft_of
from llmtailor.formats.dcp.rank_files import RankFileReader, walk_optimizer
from llmtailor.formats.format import Draft
from llmtailor.formats.optimizer_objects import naming_others
from llmtailor.frameworks.files import FSDP_RANK, OPTIMIZER, SCHEDULER, is_rng_file
from llmtailor.frameworks.read import read_trainer_files

MODEL_FILE = "pytorch_model_fsdp.bin"
"""All weights, with FULL_STATE_DICT"""


OPTIMIZER_FILE = "optimizer.bin"


MODEL_OF_RANK, OPTIMIZER_OF_RANK = "pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"


def _is_full(root: Path) -> bool:
    """Return whether model and optimizer are in one file each; accelerate without FSDP also has an optimizer.bin."""
    return (root / MODEL_FILE).exists() and not (root / OPTIMIZER_FOLDER).is_dir()


def detects(root: Path) -> bool:
    """Return whether a folder is, or was, an FSDP checkpoint of the Trainer or of accelerate."""
    if not root.is_dir():
        return False
    # beside an optimizer.pt, the first folder is a stray one, which the Trainer's format reports
    has_model = (root / MODEL_FOLDER).is_dir() and not (root / OPTIMIZER).exists()
    return has_model or (root / OPTIMIZER_FOLDER).is_dir() or _is_full(root) or _has_rank_files(root)


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint; of its tensors only the 4 bytes of each ``step`` are read, and samples of tensors that may be
    tied."""
    problems = Problems()
    manifest = attempt(lambda: read_composite(root, name), problems)
    folders = _read_folders(root, name, problems, manifest.links if manifest is not None else {})
    if folders is None or not folders.have_all_objects:
        return Draft(problems)
    trainer = read_trainer_files(FileTrees(root), name, problems, framework)
    # the weights are in no safetensors file
    findings = tuple(finding for finding in trainer.findings if finding.code is not Code.WEIGHTS_MISSING)
    return draft_of(root, name, folders, manifest, problems, replace(trainer, weights={}, findings=findings))


def _read_folders(root: Path, name: str, problems: Problems, linked: Mapping[str, int | None]) -> Folders | None:
    is_full = _is_full(root)
    has_shards = not (root / MODEL_FOLDER).is_dir() and bool(list_shards(root))
    there = {path.name for path in root.iterdir()}
    for_resume = {SCHEDULER, OPTIMIZER_FILE if is_full else OPTIMIZER_FOLDER}
    if _has_rank_files(root):
        return _read_rank_files(root, name, problems)
    if not (for_resume & there or any(map(is_rng_file, there))):
        what = "this folder holds weights only, no optimizer state: nothing to resume from"
        fix = "name a full checkpoint (save_only_model must be off)"
        problems.add(SourceError.at(name, what, fix, Code.NO_CHECKPOINT))
        return None
    if is_full:
        optimizer = attempt(lambda: _read_optimizer(root, name), problems)
        model = attempt(lambda: _read_model(root, name), problems)
        return Folders(FSDP, optimizer, model, FULL) if optimizer and model else None
    for folder in (OPTIMIZER_FOLDER, *(() if has_shards else (MODEL_FOLDER,))):
        if not (root / folder).is_dir():
            problems.add(SourceError.at(PathIn(name, folder), "the folder is missing", COPY_BACK, Code.FILE_MISSING))
    if problems.errors:
        return None
    optimizer = read_folder(root, OPTIMIZER_FOLDER, name, problems, linked)
    if has_shards:
        model = read_shards(root, name, problems)
    else:
        model = read_folder(root, MODEL_FOLDER, name, problems, linked)
    return Folders(FSDP, optimizer, model, SHARDS if has_shards else FOLDERS) if optimizer and model else None


def _has_rank_files(root: Path) -> bool:
    """Return whether a folder has files that accelerate saves with ``use_dcp=False``."""
    return any(FSDP_RANK.fullmatch(path.name) for path in root.iterdir())


def _read_rank_files(root: Path, name: str, problems: Problems) -> Folders | None:
    """Read accelerate's files; None if they can't be used. Damage is added to ``problems``."""
    numbers = [int(match[2]) for path in root.iterdir() if (match := FSDP_RANK.fullmatch(path.name))]
    ranks = max(numbers) + 1
    reader = RankFileReader(root, name, problems)
    model = reader.read_model([MODEL_OF_RANK.format(rank) for rank in range(ranks)])
    optimizer = reader.read([OPTIMIZER_OF_RANK.format(rank) for rank in range(ranks)], walk_optimizer)
    if model is None or optimizer is None:
        return None
    optimizer = replace(optimizer, objects={**optimizer.objects, **reader.roles})
    return Folders(FSDP, optimizer, model, RANKS, reader.mesh)


def is_of_fsdp(path: str) -> bool:
    """Return whether a file in the root has weights that only an FSDP run saves, and resumes from."""
    return path == MODEL_FILE or is_shard(path)


def _read_model(root: Path, name: str) -> DcpCheckpoint:
    """Read the weights. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, MODEL_FILE)
    tree = as_dict(read_torch_file(root, MODEL_FILE, where).tree, "the file", where)
    tensors, objects = _split(((("model", key), value) for key, value in tree.items()), where)
    return DcpCheckpoint(tensors, objects, files=(MODEL_FILE,), at=MODEL_FILE)


def _read_optimizer(root: Path, name: str) -> DcpCheckpoint:
    """Read the optimizer's states and param groups. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, OPTIMIZER_FILE)
    with naming_others(where):
        tree = read_torch_file(root, OPTIMIZER_FILE, where).tree
    tensors, objects = _split(walk_optimizer(tree, where), where)
    return DcpCheckpoint(tensors, objects, files=(OPTIMIZER_FILE,), at=OPTIMIZER_FILE)


def _split(
    values: Iterator[tuple[KeyPath, Any]], where: str
) -> tuple[dict[str, Stored], dict[str, tuple[KeyPath, Any]]]:
    tensors: dict[str, Stored] = {}
    objects: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in values:
        key = ".".join(str(check_name(word, "a key", where) if isinstance(word, str) else word) for word in path)
        if as_tensor(value) is None:
            objects[key] = (path, value)
            continue
        tensors[key] = Stored(path, read_tensor(value, key, where).entry)
    return tensors, objects
