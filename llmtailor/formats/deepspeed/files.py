"""The files of a DeepSpeed checkpoint, and the kinds of checkpoint that are refused by name.

Names (DeepSpeed 0.14 .. 0.19)::

    latest                                                    the tag, as text
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      one per rank; the prefix says the run was bf16
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt             ZeRO-3, one per rank
    TAG/mp_rank_00_model_states.pt                            ZeRO-0/1/2, one

AutoTP has all of these for each tensor-parallel rank, whose number is after ``mp_rank_``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import ACCELERATE
from llmtailor.checkpoint.step_names import ASIDE, NAMES, step_of
from llmtailor.codes import Code
from llmtailor.containers.json import is_path_below
from llmtailor.errors import (
    COPY_BACK,
    PathIn,
    Problem,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    attempt,
    counted,
    printable,
)
from llmtailor.frameworks.files import (
    FOLDER,
    LATEST,
    MODEL_STATES,
    OPTIM_STATES,
    UNSHARDED_MODEL,
    WHOLE_MODEL,
    is_shard_name,
)
from llmtailor.frameworks.framework import FRAMEWORKS, is_tag_alone
from llmtailor.storage.local import read_source
from llmtailor.storage.remote import open_location

STATE_KEYS = {
    True: ("fp32_flat_groups", "optimizer_state_dict"),
    False: ("single_partition_of_fp32_groups", "base_optimizer_state"),
}
"""Whether it is ZeRO-3 -> the keys of the masters, and of the state of torch's optimizer, in ``optim_states``"""
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*")
_SHOWN = 8
_RANKS_PER_FILE = 64
_MAX_TAG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shard files of a ZeRO checkpoint, in rank order, relative to the checkpoint's root."""

    tag: str
    is_bf16: bool
    optim: tuple[str, ...]
    model: tuple[str, ...]
    """ZeRO-3: one per rank. ZeRO-1/2: one for all."""
    is_zero3: bool = True
    missing: frozenset[str] = frozenset()
    """Those of the above that do not exist"""
    is_alone: bool = False
    """Whether the tag folder is the checkpoint's root"""
    tp_rank: int = 0
    peers: tuple[ShardFiles, ...] = ()
    """Those of the other tensor-parallel ranks, whose number of data-parallel ranks is the same"""

    @property
    def folder(self) -> str:
        """What the paths of the files begin with"""
        return "" if self.is_alone else f"{self.tag}/"


def survey_shard_files(root: Path, where: str, problems: Problems) -> ShardFiles | None:
    """Return the shard files; add missing ones to ``problems``.

    None if nothing can be found out. Raises SourceError or UnsupportedCheckpoint for other kinds of folder.
    """
    if is_tag_alone(root):
        return _survey_tag(root, root.name, where, problems, is_alone=True)
    _check_is_checkpoint(root, where)
    tags = [path.name for path in root.iterdir() if path.is_dir() and _is_tag(path)]
    if not tags and not (root / LATEST).exists():
        problems.add(_no_shards(root, where))
        return None
    tag = read_tag(root, where, LATEST, tags, problems)
    return None if tag is None else _survey_tag(root / tag, tag, where, problems)


def _survey_tag(folder: Path, tag: str, where: str, problems: Problems, *, is_alone: bool = False) -> ShardFiles | None:
    names = sorted(entry.name for entry in folder.iterdir())
    place = where if is_alone else PathIn(where, tag)
    refuse_other_parallelism(names, place, allows_tensor=True)
    matches = [match for name in names if (match := OPTIM_STATES.fullmatch(name))]
    optim, prefixes = {int(match[2]) for match in matches}, {match[1] or "" for match in matches}
    models = [match for name in names if (match := MODEL_STATES.fullmatch(name))]
    model = {int(match[1]) for match in models}
    if len(prefixes) > 1:
        what = "there are optimizer shards both with and without the bf16_ prefix"
        fix = "two runs have saved here; move the files of one to another folder"
        problems.add(SourceError.at(place, what, fix, Code.FILE_NAME))
        return None
    is_zero3 = bool(model) or WHOLE_MODEL not in names
    if not is_zero3 and not optim:
        raise _without_zero(place)
    if lacking := [kind for kind, shards in (("optim", optim), ("model", model)) if is_zero3 and not shards]:
        fix = "copy the whole tag folder again"
        what = "there are no {}_states files"
        problems.add(SourceError(Problem(place, what.format(kind), fix, Code.FILE_MISSING) for kind in lacking))
        return None
    whole = [match for name in names if (match := UNSHARDED_MODEL.fullmatch(name))]
    degree = max(int(match.groups()[-1]) for match in (*matches, *(models if is_zero3 else whole))) + 1
    files, count = ShardFiles(tag, "bf16_" in prefixes, (), (), is_zero3, is_alone=is_alone), max([*optim, *model]) + 1
    if _are_too_many(degree * count, len(names), PathIn(where, tag), problems):
        return None
    there = frozenset(names)
    first, *peers = (_of_ranks(replace(files, tp_rank=rank), count, there, where, problems) for rank in range(degree))
    return replace(first, peers=tuple(peers))


def _without_zero(place: str) -> UnsupportedCheckpoint:
    what = "this checkpoint was saved by DeepSpeed without ZeRO (stage 0), which can't be read"
    fix = "train with zero_optimization.stage 1, 2 or 3, or leave this checkpoint out"
    return UnsupportedCheckpoint.at(place, what, fix)


def _of_ranks(files: ShardFiles, count: int, names: frozenset[str], where: str, problems: Problems) -> ShardFiles:
    """Return the files of ``count`` ranks, and report those that are not among the names in the tag folder."""
    optim = [optim_name(rank, files.is_bf16, files.tp_rank) for rank in range(count)]
    model = [model_name(rank, 3 if files.is_zero3 else 1, files.tp_rank) for rank in range(count)]
    if not files.is_zero3:
        del model[1:]
    missing = [
        (f"{files.folder}{name}", f"{kind} shard {rank} of {count} is missing (rank {rank} of 0..{count - 1})")
        for kind, shards in (("optim_states", optim), ("model_states", model))
        for rank, name in enumerate(shards)
        if name not in names
    ]
    unreported = [(path, what) for path, what in missing if path not in files.missing]
    for path, what in unreported[:_SHOWN]:
        problems.add(SourceError.at(PathIn(where, path), what, COPY_BACK, Code.FILE_MISSING))
    if len(unreported) > _SHOWN:
        what = f"{len(unreported) - _SHOWN} more shards of {count} ranks are missing"
        problems.add(SourceError.at(PathIn(where, files.tag), what, COPY_BACK, Code.FILE_MISSING))
    return replace(
        files,
        optim=tuple(f"{files.folder}{name}" for name in optim),
        model=tuple(f"{files.folder}{name}" for name in model),
        missing=frozenset(path for path, _ in missing),
    )


def _are_too_many(ranks: int, num_files: int, place: str, problems: Problems) -> bool:
    """Report whether hardly any of these ranks has files: a stray name or number must not cost memory."""
    is_so = ranks > _RANKS_PER_FILE * (num_files + 1)
    if is_so:
        what = f"its files are for {ranks} ranks, but there are only {num_files} files"
        problems.add(SourceError.at(place, what, "copy the whole tag folder again", Code.FILE_NAME))
    return is_so


def optim_name(rank: int, is_bf16: bool, tp_rank: int = 0) -> str:
    """Return the name of a rank's ``optim_states`` in the tag folder."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_{rank}_mp_rank_{tp_rank:02}_optim_states.pt"


def model_name(rank: int, stage: int, tp_rank: int = 0) -> str:
    """Return the name of the ``model_states`` in the tag folder: a rank's, or under ZeRO-1/2 that of all ranks."""
    return f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_{tp_rank:02}_model_states.pt"


def count_models(names: Iterable[str]) -> int:
    """Return the number of ranks whose ``model_states`` of ZeRO-3 are in a tag folder: at least 1, and not many more
    than there are files."""
    ranks = [int(match[1]) for name in names if (match := MODEL_STATES.fullmatch(name))]
    return max((rank for rank in ranks if rank < _RANKS_PER_FILE * (len(ranks) + 1)), default=0) + 1


def describe_shards(tag: str, stage: int, world_size: int, precision: str) -> dict[str, Any]:
    """Return the stock names of the shard files of all ranks; see `formats.partial.manifest.Manifest`."""
    is_bf16 = precision == "BF16"
    return {
        "is_bf16": is_bf16,
        "optim": [f"{tag}/{optim_name(rank, is_bf16)}" for rank in range(world_size)],
        "model": [f"{tag}/{model_name(rank, stage)}" for rank in range(world_size if stage == 3 else 1)],
    }


def check_archive(archive: str | None, path: str, where: str) -> None:
    """Raise SourceError if a shard was saved as another rank's.

    torch.save names the archive after the file. Files of all ranks look alike, and in ZeRO-3, as in those of
    tensor-parallel ranks, nothing else identifies their rank.
    """
    saved_as, name = f"{archive}.pt", Path(path).name
    if _rank(saved_as) not in (None, _rank(name)):
        what = f"the file was saved as {saved_as}, so it is the shard of another rank"
        fix = "rename the file to its own name; then check which one is missing"
        raise SourceError.at(where, what, fix, Code.FILE_NAME)


def _rank(name: str) -> tuple[str, ...] | None:
    match = OPTIM_STATES.fullmatch(name) or MODEL_STATES.fullmatch(name) or UNSHARDED_MODEL.fullmatch(name)
    return match.groups()[-2:] if match else None


def fit_world_size(files: ShardFiles, world_size: int, where: str, problems: Problems) -> ShardFiles | None:
    """Return as many ranks' files as the world size stored in them; report missing and surplus ones.

    None if far too many are missing.
    """
    have = len(files.optim)
    if have > world_size:
        saved = counted(world_size, "rank")
        what = f"there are shards of {counted(have, 'rank')}, but they say that {saved} saved them"
        fix = f"move the shards of ranks {world_size} and up, of another run, out of the folder"
        problems.add(SourceError.at(PathIn(where, files.tag), what, fix, Code.FILE_UNKNOWN))
    if have == world_size:
        return files
    there = {path.rpartition("/")[2] for path in (*files.optim, *files.model) if path not in files.missing}
    if _are_too_many(world_size, len(there), PathIn(where, files.tag), problems):
        return None
    return _of_ranks(files, world_size, frozenset(there), where, problems)


def _check_is_checkpoint(root: Path, where: str) -> None:
    if not root.exists():
        raise SourceError.at(where, *_why_not_there(root), Code.NO_CHECKPOINT)
    if not root.is_dir():
        what, fix = "this is a file, not a checkpoint folder", f"name the folder that it is in, such as {NAMES}"
        raise SourceError.at(where, what, fix, Code.NO_CHECKPOINT)
    has_optim = any(OPTIM_STATES.fullmatch(entry.name) for entry in root.iterdir())
    if (root / WHOLE_MODEL).is_file() and not has_optim and not (root / "zero").exists():  # a tag folder itself
        raise _without_zero(where)
    if has_optim:
        what, fix = "this is the tag folder inside a checkpoint", f"name the folder above it: {root.parent}"
        raise SourceError.at(where, what, fix, Code.NO_CHECKPOINT)


def _why_not_there(root: Path) -> tuple[str, str]:
    """Return what is wrong with a path that does not exist, and what there is instead."""
    folder, _, tag = f"{root}".rpartition("@")
    if folder and tag and (beside := open_location(folder)).is_dir():
        there = sorted(path.name for path in beside.iterdir() if path.is_dir() and _is_tag(path))
        if there:
            return f"{printable(folder)} has no tag {printable(tag)}", f"its tags are {', '.join(there[-5:])}"
    step, saves = step_of(root), root.parent / FOLDER
    if step is not None and (there := [path.name for path in saves.glob("step-*") if step_of(path) == step]):
        what = "there is no such full checkpoint, but a partial one of its step: llmtailor thin may have replaced it"
        return what, f"name {printable(f'{saves / there[0]}')} instead"
    near = _checkpoints_in(root.parent)
    hint = f"; next to it are {', '.join(near[-5:])}" if near else ""
    return "there is no such checkpoint folder", f"check the path{hint}"


def _checkpoints_in(folder: Path) -> list[str]:
    found = [(step, path.name) for path in folder.glob("*") if (step := step_of(path)) is not None]
    return [name for _, name in sorted(found)]


def read_tag(root: Path, where: str, file: str, tags: list[str], problems: Problems) -> str | None:
    """Return the tag in ``latest`` or ``latest_universal``. If it is wrong, report it and return the newest of the tag
    folders ``tags``, if any."""
    tags = sorted(tags, key=lambda tag: (len(tag), tag))
    latest = root / file
    if not latest.exists() and (named := FRAMEWORKS[ACCELERATE].tag) in tags:  # accelerate does not look for the file
        return named
    if not latest.exists() and tags:
        what = "the file is missing, so DeepSpeed will not find the tag folder"
        fix = f"write the tag into it: {write_latest(latest, tags[-1])}"
        problems.add(SourceError.at(PathIn(where, file), what, fix, Code.FILE_NAME))
        return tags[-1]
    data = attempt(lambda: read_source(latest, PathIn(where, file), _MAX_TAG_BYTES), problems)
    if data is None:
        return tags[-1] if tags else None
    tag = data.decode("utf-8", "replace").strip()
    # a single name, so that nothing outside the checkpoint is read, and nothing outside the output is written
    is_name = tag not in ("", "..") and Path(tag).name == tag and tag.isprintable() and len(tag.encode()) <= 255
    if is_name and (root / tag).is_dir():
        return tag
    found = f"the tag folders here are {', '.join(tags)}" if tags else "there is no tag folder here"
    what = f"it points to {tag!r}, which is not a folder of this checkpoint"
    fix = f"{found}; write the right one into {file}, or copy the folder back"
    fits = all(len(part.encode()) <= 255 for part in tag.split("/"))
    if fits and is_path_below(tag) and (root / tag).is_dir():  # `salvage --replace` has written it into a run's folder
        fix = f"name that checkpoint: {(root / tag).parent}"
    problems.add(SourceError.at(PathIn(where, file), what, fix, Code.FILE_NAME))
    return tags[-1] if tags else None


def write_latest(latest: Path, tag: str) -> str:
    """Return a command that writes the tag into the file."""
    return f"printf %s {shlex.quote(tag)} > {shlex.quote(str(latest))}"


def _is_tag(folder: Path) -> bool:
    if folder.name.startswith(ASIDE):
        return False
    return folder.name.startswith("global_step") or any(is_shard_name(path.name) for path in folder.iterdir())


def _no_shards(root: Path, where: str) -> SourceError:
    """Return what is wrong with a Trainer's folder without optimizer states. Raises for any other folder."""
    inside = _checkpoints_in(root)
    if inside:
        fix = f"name one of {', '.join(inside[-5:])} inside it"
        raise SourceError.at(where, "this is a run's folder, not a checkpoint", fix, Code.NO_CHECKPOINT)
    if (root / "zero").exists():
        what = "this is the tag folder inside a universal checkpoint"
        raise UnsupportedCheckpoint.at(where, what, f"name the folder above it: {root.parent}")
    if any(root.glob("*.safetensors")):
        what = "this folder holds weights only, no optimizer state: nothing to resume from"
        return SourceError.at(where, what, "name a full checkpoint (save_only_model must be off)", Code.NO_CHECKPOINT)
    what = "this is not a checkpoint: there is neither latest nor a global_step folder"
    raise SourceError.at(where, what, "check the path", Code.NO_CHECKPOINT)


def refuse_other_parallelism(names: list[str], place: str, *, allows_tensor: bool = False) -> None:
    """Raise UnsupportedCheckpoint if the names in a tag folder are those of pipeline or tensor parallelism, or MoE."""
    for name in names:
        match = OPTIM_STATES.fullmatch(name) or MODEL_STATES.fullmatch(name) or UNSHARDED_MODEL.fullmatch(name)
        signs = (
            (_PIPELINE.fullmatch(name), "pipeline parallelism"),
            (_EXPERT.fullmatch(name), "DeepSpeed expert parallelism (MoE)"),
            (name == "offloaded_tensors", "optimizer state offloaded to NVMe"),
            (match and int(match.groups()[-1]) > 0 and not allows_tensor, "tensor (model) parallelism"),
        )
        for present, kind in signs:
            if present:
                raise unsupported_parallelism(place, kind, f"it holds {name}")


def unsupported_parallelism(place: str, kind: str, evidence: str) -> UnsupportedCheckpoint:
    """Return the refusal of a checkpoint whose states are partitioned by something other than ZeRO."""
    fix = "leave it out, or load it in its own program and save the weights; llmtailor reads ZeRO-1, 2, 3 and AutoTP"
    return UnsupportedCheckpoint.at(place, f"the checkpoint uses {kind}, which is not supported ({evidence})", fix)
