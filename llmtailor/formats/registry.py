"""The checkpoint formats, and the entry point for a folder of any format.

A format is a folder next to this file, called as ``--to`` calls it, with a `Reader` and a `Writer`. To add one, write
both and list them here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import (
    DCP,
    DEEPSPEED,
    ELASTIC,
    FSDP,
    MEGATRON,
    TRAINER,
    UNIVERSAL,
    VERL,
    CheckpointIndex,
    Survey,
)
from llmtailor.checkpoint.optimizer import Mesh, OptimizerLayout, ParamGroup, lay_out_optimizer
from llmtailor.checkpoint.placement import without
from llmtailor.checkpoint.unclear import with_roles
from llmtailor.codes import Code
from llmtailor.containers.dcp import METADATA
from llmtailor.errors import (
    MismatchError,
    PathIn,
    Problem,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    counted,
    damaged,
    printable,
    some,
)
from llmtailor.formats.dcp import read as dcp_reader
from llmtailor.formats.dcp import write as dcp_writer
from llmtailor.formats.dcp.folder import check_blobs
from llmtailor.formats.deepspeed import read as deepspeed_reader
from llmtailor.formats.deepspeed import universal
from llmtailor.formats.deepspeed import write as deepspeed_writer
from llmtailor.formats.format import Reader, Writer, finish
from llmtailor.formats.fsdp import read as fsdp_reader
from llmtailor.formats.fsdp import write as fsdp_writer
from llmtailor.formats.fsdp.read import is_of_fsdp
from llmtailor.formats.lightning import read as lightning_reader
from llmtailor.formats.lightning import write as lightning_writer
from llmtailor.formats.megatron import read as megatron_reader
from llmtailor.formats.megatron import write as megatron_writer
from llmtailor.formats.param_names import describe_model, knows_model
from llmtailor.formats.partial import read as partial_reader
from llmtailor.formats.trainer import read as trainer_reader
from llmtailor.formats.trainer import write as trainer_writer
from llmtailor.formats.verl import read as verl_reader
from llmtailor.formats.verl import write as verl_writer
from llmtailor.frameworks.files import CONFIG, FOLDER, is_rng_file
from llmtailor.frameworks.framework import FRAMEWORKS, framework_of
from llmtailor.frameworks.read import read_config
from llmtailor.model.find_parts import find_parts, split_experts
from llmtailor.model.parts import ModelStructure, Part
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, is_moment
from llmtailor.storage.remote import UPLOADING, RemotePath, as_remote
from llmtailor.timing import Stopwatch

logger = logging.getLogger(__name__)
MANY_RANKS, MAX_RANKS = 1024, 65_536
"""Ranks that an output of any model may have; the most that one with large params may have"""


READERS: tuple[Reader, ...] = (
    partial_reader,
    lightning_reader,
    megatron_reader,
    fsdp_reader,
    verl_reader,
    dcp_reader,
    trainer_reader,
    universal,
    deepspeed_reader,
)
"""In the order in which they are tried; the last one reports why a folder is of no format."""


WRITERS: Mapping[str, Writer] = {
    DEEPSPEED: Writer(lay_out=deepspeed_writer.lay_out),
    UNIVERSAL: Writer(lay_out=universal.lay_out),
    TRAINER: Writer(lay_out=trainer_writer.lay_out),
    FSDP: fsdp_writer.WRITER,
    DCP: dcp_writer.WRITER,
    VERL: Writer(lay_out=verl_writer.lay_out),
    MEGATRON: Writer(lay_out=megatron_writer.lay_out),
}
_LIGHTNING = Writer(lay_out=lightning_writer.lay_out)


def writer_of(to_format: str, framework: str = TRAINER) -> Writer:
    """Return the writer of a format; ``framework`` will resume from the output."""
    return _LIGHTNING if to_format == TRAINER and FRAMEWORKS[framework].holds_all else WRITERS[to_format]


def own_writer(index: CheckpointIndex) -> Writer:
    """Return the writer of a checkpoint's own format."""
    return writer_of(index.form.file_format, index.framework)


def check_options(to_format: str, dtype: str | None, allow_split: bool) -> None:
    """Raise MismatchError for options that don't apply if the weights of a format are the master weights."""
    if to_format in (DEEPSPEED, UNIVERSAL, MEGATRON):
        return
    problems = []
    if dtype not in (None, "F32"):
        what = "without DeepSpeed the weights are the master weights, and rounding them would lose what was trained"
        problems.append(Problem("dtype", what, "leave dtype out of the recipe, or use --stage 1, 2 or 3"))
    if allow_split:
        what = "without DeepSpeed, weights and master weights are the same and can't come from different checkpoints"
        problems.append(Problem("--allow-split", what, "leave it out"))
    if problems:
        raise MismatchError(problems)


def is_checkpoint(root: Path) -> bool:
    """Return whether this is, or was, a checkpoint of any format."""
    return any(reader.detects(root) for reader in READERS)


def choose_format(base: CheckpointIndex, to: str | None, stage: int | None) -> tuple[str, int]:
    """Return the format and the ZeRO stage of an output for the options ``--to`` and ``--stage``.

    Raises MismatchError if the options contradict each other.
    """
    if to is None and stage is None:
        return base.form.format, base.form.stage
    to_format = to or (DEEPSPEED if stage else TRAINER)
    has_stage = to_format in (DEEPSPEED, UNIVERSAL)
    chosen = (base.form.stage or 3 if stage is None else stage) if has_stage else stage or 0
    if has_stage != bool(chosen):
        what = f"{to_format} {'needs a ZeRO stage' if has_stage else 'has no ZeRO stages'}"
        raise MismatchError.at("--stage", what, "leave out --stage or --to")
    return to_format, chosen


def settle_roles(
    indexes: Sequence[CheckpointIndex], base: int, to_format: str, stage: int
) -> tuple[CheckpointIndex, ...]:
    """Return the indexes; if the output keeps frozen params and buffers apart, with what the model says of tensors that
    may be either.

    Raises UnsupportedCheckpoint if it can't be asked.
    """
    wanted, of_deepspeed = indexes[base].train.unclear, to_format == DEEPSPEED
    if not wanted or not (to_format == VERL or (of_deepspeed and stage == 3)):
        return (*indexes,)
    name, known = indexes[base].name, dict[str, bool]()
    if (asked := next((index for index in indexes if knows_model(index.root)), None)) is not None:
        facts = describe_model(asked.root, asked.name)
        known = dict.fromkeys(facts.params, False) | dict.fromkeys(facts.buffers, True)
    if lost := sorted(wanted - known.keys()):
        title = "ZeRO-3" if of_deepspeed else to_format
        what = f"{title} keeps frozen params and buffers in different forms, and nothing says which {some(lost)} are"
        fix, other = "put the model's config.json (model.config.save_pretrained) into it", "use --stage 2 or --to dcp"
        if asked is not None:
            what, fix = f"{what}: the model of its {CONFIG} has no such names", other
        else:
            fix = f"{fix}, or {other}"
        raise UnsupportedCheckpoint.at(name, what, fix)
    buffers = [param for param, is_buffer in known.items() if is_buffer]
    return tuple(with_roles(index, known, buffers) for index in indexes)


def find_model_order(index: CheckpointIndex) -> list[str]:
    """Return the names of the model's params, in its order. Raises SourceError if the order is unknown."""
    return list(index.train.model_order or describe_model(index.root, index.name, is_named=True).params)


def index_checkpoint(root: Path, name: str | None = None, framework: str | None = None) -> CheckpointIndex:
    """Index the checkpoint in a folder; messages call it ``name``. See `survey_checkpoint` on ``framework``.

    Raises SourceError if it is missing or damaged, UnsupportedCheckpoint for a kind that can't be read.
    """
    return survey_checkpoint(root, name, framework).sound_index()


def survey_checkpoint(root: Path, name: str | None = None, framework: str | None = None) -> Survey:
    """Index what is left of a checkpoint, damaged or not, and report all damage.

    ``framework`` is the one to judge it by, see `frameworks.framework`; None uses the one that its files indicate.

    Raises SourceError or UnsupportedCheckpoint for a folder that is not a readable checkpoint.
    """
    name, watch = name or display_name(root), Stopwatch()
    try:
        if (root / UPLOADING).is_file():
            raise damaged(name, "its upload was cut off: it is incomplete", Code.FILE_MISSING)
        reader = next((one for one in READERS[:-1] if one.detects(root)), READERS[-1])
        survey = finish(reader.read(root, name, framework), root, name)
        if survey.index is None:
            logger.info("%s can't be indexed", name)
            return survey
        about = (survey.index.format, survey.index.global_step, survey.index.world_size, len(survey.index.files))
        logger.info("indexed %s in %s: %s, step %d, %d ranks, %d files", name, watch.lap(), *about)
        return survey
    except OSError as error:
        fix = "run as a user who may read the checkpoint" if isinstance(error, PermissionError) else "check the disk"
        path = None if error.filename is None else Path(f"{error.filename}")  # which is a number for a descriptor
        path = root if path == root / UPLOADING else path  # which is hardly ever there
        at = f"{as_remote(path) or path}" if path is not None else "it"
        what = f"can't read {at}: {error.strerror or error}"
        raise SourceError.at(name, what, fix, Code.FILE_UNREADABLE) from error


def check_headers(index: CheckpointIndex, problems: Problems) -> set[str]:
    """Read what reading a checkpoint has left out: the headers of all blobs in DCP folders. Damage is added to
    ``problems``; returns the files that can't be read."""
    folders = [path for path in index.files if path.rpartition("/")[2] == METADATA]
    return {lost for path in folders for lost in check_blobs(index.root, path, index.name, problems)}


def resumes_from_weights(root: Path, path: str) -> bool:
    """Return whether a stock resume reads the weights in a file, and config.json: without DeepSpeed it does."""
    return trainer_reader.detects(root) or is_of_fsdp(path)


def display_name(path: Path) -> str:
    """Return a path as messages show it: relative to the current folder if that is shorter."""
    if isinstance(path, RemotePath):
        return printable(f"{path}")
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    return printable(relative if len(relative) < len(absolute) and not relative.startswith("../..") else absolute)


def check_base(base: CheckpointIndex, framework: str) -> None:
    """Raise UnsupportedCheckpoint or SourceError if a checkpoint can't be the base of an output for this framework."""
    if base.form.variant == ELASTIC:
        raise UnsupportedCheckpoint.at(
            base.name,
            "an elastic checkpoint holds no hyperparameters, so it can supply states but can't be the base",
            "use another checkpoint of the run as base_model, saved without elastic_checkpoint",
        )
    own = framework_of(base)
    if own.state and own.state not in base.files and framework == own.name:
        raise SourceError.at(
            PathIn(base.name, own.state),
            f"the file is missing, and {own.title} can't resume without it",
            "copy it back, or use another base_model",
        )


def lay_out_target(
    base: CheckpointIndex,
    to_format: str,
    stage: int,
    world_size: int | None,
    groups: Sequence[ParamGroup] | None,
    mesh: Mesh | None = None,
) -> OptimizerLayout:
    """Return the optimizer's layout in an output of a format; None keeps the base's ranks or param groups.

    Raises MismatchError for a mesh that the output can't have.
    """
    mesh = mesh or Mesh()
    if mesh.dp_replicate:
        what = "replicas save no files of their own, so an output has none"
        raise MismatchError.at("--mesh", what, "omit dp_replicate")
    tp = mesh.tp or (base.tp if to_format == DEEPSPEED else 1)
    if tp > 1 and (tp != base.tp or to_format != DEEPSPEED):
        has = (
            f"the base {base.name} has tp={base.tp}"
            if to_format == DEEPSPEED
            else f"{to_format} has no tensor parallelism"
        )
        what = f"tp={tp} can't be written: {has}"
        fix = "use tp=1, or the base's; with load_universal, a run with any tp resumes from --to universal"
        raise MismatchError.at("--mesh", what, fix)
    if mesh.dp:
        if world_size:
            what = "both say how many ranks the output has"
            raise MismatchError.at("--mesh and --num-gpu", what, "give one of them")
        world_size = mesh.dp * tp
    if (ranks := world_size or base.world_size) % tp:
        what = f"{counted(ranks, 'rank')} can't be dealt to tensor parallelism of {tp} ranks each"
        raise MismatchError.at("--num-gpu", what, f"use a multiple of {tp}, or --mesh tp=1")
    mean = sum(param.numel for param in base.params.values()) // max(len(base.params), 1)
    if ranks > (most := max(base.world_size, min(MAX_RANKS, max(mean, MANY_RANKS)))):
        elements = f"; its params have {mean:,} elements on average" if most < MAX_RANKS else ""
        what = f"{ranks:,} ranks are more than the {most:,} that this model is cut for at most{elements}"
        raise MismatchError.at("--num-gpu", what, "give the number of GPUs of the run that resumes")
    if to_format == MEGATRON:
        return megatron_writer.arrange(base, world_size)
    settings = base.zero.settings
    if to_format == UNIVERSAL:  # which has no sub-groups
        settings = replace(settings, sub_group_size=sys.maxsize)
    if to_format == TRAINER and not any(map(is_rng_file, (*base.files, *base.partial.inside))):
        world_size = 1  # without random states, nothing in this format is of a rank
    if groups is None and (UNIVERSAL in (to_format, base.form.file_format) or tp != base.tp):
        groups = base.groups  # whose sub-groups are laid out again
    numels = {name: param.numel for name, param in base.params.items()}
    if tp > 1 and base.zero.tensor_parallel:  # the first rank's, which has the most elements
        numels |= {name: cut.shards[0].numel for name, cut in base.zero.tensor_parallel.cuts.items()}
    own, cut_over = replace(base.layout, world_size=base.world_size // base.tp), (world_size or base.world_size) // tp
    layout = lay_out_optimizer(own, numels, settings, base.precision, world_size=cut_over, stage=stage, groups=groups)
    return replace(layout, world_size=cut_over * tp, tp=tp)


def default_output(base: CheckpointIndex) -> Path:
    """Return the folder of a composite with this base, if none is named: in the run's folder for a partial one."""
    if base.form.is_partial and base.root.parent.name == FOLDER:
        return output_in(base.root.parent.parent, base.global_step)
    return base.root.with_name(base.root.name + BESIDE)


BESIDE = "-merged"
"""The end of an output's name if the name without it is taken"""


def output_in(run: Path, step: int) -> Path:
    """Return the folder for a composite in a run's folder, named as its loader looks for it: Megatron, torchtitan."""
    name = f"checkpoint-{step}"
    if any(megatron_reader.detects(one) for one in run.glob("iter_*")):
        name = f"iter_{step:07}"
    elif any((one / METADATA).is_file() for one in run.glob("step-*")):
        name = f"step-{step}"
    out = run / name
    # a skipped checkpoint may have that name: a damaged one, or one of an abandoned attempt
    return out.with_name(f"{out.name}{BESIDE}") if out.exists() else out


def find_structure(index: CheckpointIndex) -> ModelStructure:
    """Return the parts of the model in a checkpoint."""
    numels = {name: param.numel for name, param in index.params.items()}
    numels |= {state.param: held.numel for state, held in index.held.items() if state.kind == WEIGHT}
    return find_parts([*numels, *index.tied], dict(index.tied), numels, read_config(index) or None)


def split_parts(structure: ModelStructure, *indexes: CheckpointIndex) -> ModelStructure:
    """Return the parts of a model with experts as parts in the `shared_layers` of these checkpoints."""
    layers = {layer for index in indexes for layer in shared_layers(index, structure)}
    return with_experts(structure, indexes[0], layers)


def with_experts(
    structure: ModelStructure, index: CheckpointIndex, layers: Collection[Part] | None = None
) -> ModelStructure:
    """Return the parts of the model in a checkpoint with experts as parts in these layers; None means all."""
    shapes = {name: () if param.role == "buffer" else param.shape for name, param in index.params.items()}
    return split_experts(structure, {**dict.fromkeys(index.tied, ()), **shapes}, layers)


def shared_layers(index: CheckpointIndex, structure: ModelStructure) -> set[Part]:
    """Return the layers that a partial checkpoint holds in part, or whose experts have several steps in a composite.

    In ``structure``, layers are whole.
    """
    layers = index.split_layers
    here: dict[tuple[str, bool], bool] = {}
    for state, held in index.held.items() if index.form.is_partial else ():
        if state.kind not in (WEIGHT, FROZEN, BUFFER) and held.numel:
            part, key = structure.part_of[state.param], is_moment(state.kind)
            if held.is_here != held.is_whole or here.setdefault((part, key), held.is_here) != held.is_here:
                layers.add(part)
    return layers


def absent_parts(index: CheckpointIndex, structure: ModelStructure, kind: str | None = None) -> frozenset[Part]:
    """Return the parts that a partial checkpoint left out, entirely or in part; with ``kind``, those of this kind."""
    absent, pieces_of = set(), structure.pieces_of
    for state, held in index.held.items():
        if held.is_whole or kind not in (None, state.kind):
            continue
        if kind == MASTER and state.param in index.partial.differences:
            continue  # as good, as long as the save that they need is there: see `lineage.newer_masters`
        if state.param not in pieces_of:
            absent.add(structure.part_of[state.param])
        for name in pieces_of.get(state.param, ()):
            piece = structure.pieces[name]
            if without(((piece.begin, piece.end),), held.runs):
                absent.add(structure.part_of[name])
    return frozenset(absent)
