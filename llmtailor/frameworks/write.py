"""Layout of the files that a framework needs beside states: copied from the base, or synthesized.

A base of another framework lacks a scheduler's state and a trainer_state.json. The scheduler's state is taken from
accelerate's ``scheduler.bin``, from DeepSpeed's model states, or from ``lr_scheduler`` of a folder of
torch.distributed.checkpoint, where torchtitan keeps it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import ACCELERATE, DCP, DEEPSPEED, TRAINER, VERL, CheckpointIndex, DcpEntry
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout
from llmtailor.checkpoint.placement import Extent
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.codes import Code
from llmtailor.containers.json import is_count, read_json
from llmtailor.containers.safetensors import INDEX, SINGLE, lay_out_index, lay_out_weights, list_tied, read_weights
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.errors import COPY_BACK, PathIn, Problem, SourceError, UnsupportedCheckpoint, some
from llmtailor.frameworks.files import (
    CARD,
    CONFIG,
    MANIFEST,
    PARTIAL_MANIFEST,
    SCHEDULER,
    TRAINER_STATE,
    Holds,
    holds,
    is_of_states,
    is_rng_file,
    is_tokenizer_file,
    is_weight_file,
    owner_of,
    rng_file,
)
from llmtailor.frameworks.framework import FRAMEWORKS, framework_of
from llmtailor.frameworks.read import adapters_of, read_config
from llmtailor.frameworks.rng import to_accelerate, to_trainer
from llmtailor.frameworks.scheduler import is_torch_scheduler, read_scheduler, regroup_scheduler
from llmtailor.model.dtypes import DTYPES
from llmtailor.model.mergekit_data import AS_IN_MEMORY, naming_of, on_disk
from llmtailor.model.parts import SavedAs
from llmtailor.model.roles import WEIGHT, State
from llmtailor.storage.local import FileFact, read_source


def lay_out_trainer_files(
    base: CheckpointIndex,
    wanted: Wanted,
    made: Iterable[FileLayout],
    dtype: str | None,
    leave_out: Container[str],
    *,
    has_weights: bool = False,
) -> list[FileLayout]:
    """Return the layout of a composite's root, based on its base's: weights by slots, everything else unchanged.

    ``made`` are the layouts of the format's own files, which are also returned; ``has_weights`` says whether the
    weights are among them. Floating-point weights are cast to ``dtype``, None keeps theirs. ``leave_out`` are files of
    the base that the format does not have. `lay_out_tokenizer` lays out the tokenizer's files.
    """
    made, scheduler = list(made), FRAMEWORKS[base.framework].scheduler
    is_same_client = wanted.framework == base.framework
    if wanted.from_group is not None and is_same_client and base.offers(scheduler):
        where, groups = PathIn(base.name, scheduler), len(base.groups)
        tree = regroup_scheduler(base.train.trees[scheduler], where, groups, wanted.from_group)
        made.append(lay_out_torch_file(scheduler, tree))
    paths = {".", FRAMEWORKS[base.framework].optimizer, *(layout.path for layout in made)}
    others = {ACCELERATE, base.framework} & {ACCELERATE, TRAINER, VERL}
    in_folders = tuple(filter(None, adapters_of(base).values()))

    def is_left(path: str) -> bool:
        is_ours = path in (MANIFEST, CARD) or (base.form.is_partial and path == PARTIAL_MANIFEST)
        is_laid_out = path in paths or is_weight_file(path) or is_rng_file(path) or is_of_states(path)
        is_others = not is_same_client and owner_of(path) in others
        if path.startswith(in_folders):
            return path in paths or is_weight_file(path.rpartition("/")[2])
        return "/" in path or is_ours or is_laid_out or is_others or is_tokenizer_file(path) or path in leave_out

    layouts = _lay_out_rng(base, wanted.layout.world_size, wanted.framework)
    layouts += [lay_out_torch_file(path, base.train.trees[path]) for path in base.partial.inside if not is_left(path)]
    for path, fact in base.files.items():
        if not is_left(path):
            is_cast = path == CONFIG and dtype
            layouts.append(_config_with_dtype(base.root, dtype) if is_cast and dtype else carry(path, fact))
    if FRAMEWORKS[base.framework].settings:
        layouts += lay_out_settings(base)
    if not has_weights and (is_same_client or FRAMEWORKS[wanted.framework].saves_model):
        layouts += _lay_out_base_weights(base, wanted.layout.stage, dtype)
    return [*layouts, *made]


def lay_out_settings(base: CheckpointIndex, folder: str = "") -> list[FileLayout]:
    """Return the layouts of a base's config.json and the like in another folder, without the tokenizer's files."""
    return [
        FileLayout(folder + name, carry(path, fact).pieces)
        for name, path, fact in _settings(base)
        if holds(name, Holds.SETTINGS) and not is_tokenizer_file(name)
    ]


def _settings(base: CheckpointIndex) -> Iterator[tuple[str, str, FileFact]]:
    """Yield name, path and size of the files in the folder where a base has config.json and the tokenizer."""
    own = FRAMEWORKS[base.framework].settings
    for path, fact in base.files.items():
        if path.startswith(own):
            yield path.removeprefix(own), path, fact


def _lay_out_base_weights(base: CheckpointIndex, stage: int, dtype: str | None) -> list[FileLayout]:
    """Return layouts of weight files like the base's. ZeRO-3 runs list each tied weight once, others by both names."""
    if not (base.has_weight_files and any(state.kind == WEIGHT for state in base.held)):
        return []  # files that a salvage can't use are not in its index
    weights = read_weights(base.root, base.name)
    relists = (base.form.stage == 3) != (stage == 3)
    if relists:
        weights = list_tied(weights, base.tied, stage < 3)
    if dtype and base.form.has_masters:
        originals = params_on_disk(base)
        weights = tuple(replace(file, filled_by=originals) for file in weights)
    layouts = [lay_out_weights(file, dtype) for file in weights]
    if weights[0].path != SINGLE:
        layouts.append(lay_out_index(weights, dtype) if dtype or relists else carry(INDEX, base.files[INDEX]))
    return layouts


def params_on_disk(base: CheckpointIndex) -> dict[str, tuple[State, int]]:
    """Return the source of each tensor in the weight files, by its name there: a param and its first element.

    So a weight can be rounded from the master weights even under another name. Names that follow an unknown rule are
    left out.
    """
    config = read_config(base)
    naming = naming_of(str(config["model_type"]) if "model_type" in config else None) or AS_IN_MEMORY
    found = {one.name: (param, one) for param in base.params.values() for one in on_disk(param, naming)}
    found |= {param.name: (param, SavedAs(param.name, param.shape)) for param in base.params.values()}
    found |= {name: found[stored] for name, stored in base.tied.items()}
    return {
        name: (State(param.name, WEIGHT), one.begin)
        for name, (param, one) in found.items()
        if (held := base.held.get(State(name, WEIGHT))) and held.shape == one.shape
    }


def _lay_out_rng(base: CheckpointIndex, new: int, framework: str) -> list[FileLayout]:
    """Return layouts of random number states, one per rank; with more ranks than the base has, they repeat."""
    layouts: list[FileLayout] = []
    if framework != base.framework and not FRAMEWORKS[framework].saves_rng:
        return layouts
    old = base.world_size
    for rank in range(new):
        source = rng_file(rank % old, old, base.framework)
        path = rng_file(rank, new, framework)
        if ACCELERATE in (base.framework, framework) and base.framework != framework:
            convert = to_trainer if base.framework == ACCELERATE else to_accelerate
            if source in base.train.trees:
                layouts.append(lay_out_torch_file(path, convert(base.train.trees[source])))
        elif source in base.files:
            layouts.append(FileLayout(path, carry(source, base.files[source]).pieces))
        elif source in base.partial.inside:
            layouts.append(lay_out_torch_file(path, base.train.trees[source]))
    return layouts


def carry(path: str, fact: FileFact) -> FileLayout:
    """Return the layout of a file copied unchanged from the base."""
    extent = Extent(path, 0, fact.num_bytes)
    return FileLayout(path, (Copy(extent),) if fact.num_bytes else ())


def _config_with_dtype(root: Path, dtype: str) -> FileLayout:
    config = read_json(root / CONFIG, CONFIG)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = DTYPES[dtype].torch
    return FileLayout(CONFIG, (Bytes(json.dumps(config, indent=2).encode() + b"\n", "config.json with the new dtype"),))


LR_SCHEDULER = "lr_scheduler"
_CONTROL = ("should_epoch_stop", "should_evaluate", "should_log", "should_save", "should_training_stop")


def saved_scheduler(base: CheckpointIndex) -> Any:
    """Return the scheduler's state that a base holds, for its own param groups; None if it holds none.

    The Trainer steps it with each optimizer step, accelerate once per process and step, so its count is replaced.
    """
    tree = base.train.trees.get(framework_of(base).scheduler)
    if tree is not None:
        if framework_of(base).counts_steps or read_scheduler(tree).num_steps is None:
            return tree
        return {**tree, "last_epoch": base.global_step, "_step_count": base.global_step + 1}
    if base.framework == DEEPSPEED:
        return base.zero.engine.scheduler
    entries = (entry for entry in base.others.values() if is_of_scheduler(base, entry) and not entry.is_tensor)
    return {str(entry.path[-1]): entry.content for entry in entries} or None


def is_of_scheduler(base: CheckpointIndex, entry: DcpEntry) -> bool:
    """Return whether a value is one of the scheduler's, in a DCP folder."""
    return base.dcp is not None and entry.path[:-1] == (*base.dcp.root, LR_SCHEDULER)


def scheduler_tree(base: CheckpointIndex, from_group: Sequence[int] | None) -> Any:
    """Return the scheduler's state that a base holds, for the wanted param groups; None if it holds none.

    Raises SourceError if its lists don't fit the groups.
    """
    tree = saved_scheduler(base)
    if tree is None or from_group is None:
        return tree
    return regroup_scheduler(tree, base.name, len(base.groups), from_group)


def first_rates(base: CheckpointIndex, wanted: Wanted) -> list[Any]:
    """Return the learning rate that each wanted param group started with; None if unknown.

    DeepSpeed's schedulers, and loops that set ``lr``, leave no ``initial_lr`` in the groups.
    """
    known = read_scheduler(saved_scheduler(base)).base_rates
    origins = wanted.from_group or range(len(wanted.layout.groups))
    return [
        group.hyper.get("initial_lr", known[origin] if len(known) == len(base.groups) else None)
        for group, origin in zip(wanted.layout.groups, origins, strict=True)
    ]


def synthesize_files(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the files that the wanted framework needs and a base of another one lacks, and notices.

    An engine has none: it keeps a scheduler's state in the model states.

    Raises UnsupportedCheckpoint for an adapter, and SourceError for a base that has lost its scheduler.
    """
    if wanted.framework == base.framework:
        notices = [*_other_ranks(base, wanted.layout.world_size)]
        if wanted.layout.stage or base.offers(SCHEDULER) or not FRAMEWORKS[base.framework].needs_scheduler:
            return [], notices
        if base.zero.engine.scheduler is None:
            what = "there is no scheduler state; without DeepSpeed, a resume then drops the optimizer state as well"
            raise SourceError.at(PathIn(base.name, SCHEDULER), what, COPY_BACK, Code.SCHEDULER_MISSING)
        scheduler, more = _scheduler(base, wanted)  # DeepSpeed kept its own
        return [scheduler], [*notices, *more]
    if wanted.framework != TRAINER and adapters_of(base):
        what = "it is a PEFT adapter, and other loaders than the Trainer's miss the frozen params"
        raise UnsupportedCheckpoint.at(base.name, what, "leave out --layout")
    made: list[FileLayout] = []
    notices = []
    own = base.zero.engine.scheduler
    is_engines = bool(wanted.layout.stage and own) and not is_torch_scheduler(own)  # made from the DeepSpeed config
    if wanted.framework == TRAINER or (wanted.framework == ACCELERATE and not is_engines):
        scheduler, notices = _scheduler(base, wanted)
        made.append(scheduler)
    if lost := [*_without_counterpart(base, wanted.framework)]:
        what = (
            f"its {'values under ' if base.framework == DCP else ''}{some(lost)} have no counterpart, and are left out"
        )
        notices.append(Problem(base.name, what, "no action needed if the run that resumes does not need them"))
    if wanted.framework == ACCELERATE and not any(map(is_rng_file, (*base.files, *base.partial.inside))):
        what = "it has no random states; accelerate logs that, and draws other numbers"
        notices.append(Problem(base.name, what, "no action needed if the run that resumes seeds its processes"))
    if wanted.framework == TRAINER:
        size = base.zero.engine.ds_config.get("train_micro_batch_size_per_gpu")
        what = f"it holds no {TRAINER_STATE}; one is made, with step {base.global_step} and an empty log"
        fix = (
            "set logging_steps, save_steps and eval_steps in it to those of the run that resumes: the Trainer takes "
            "them from there, not from its arguments, and they are 500 here"
        )
        if not is_count(size) or not size:
            size = 1
            fix += "; with auto_find_batch_size, also set train_batch_size, which is 1 here"
        notices.append(Problem(base.name, what, fix))
        data = json.dumps(_trainer_state(base.global_step, size), indent=2, sort_keys=True).encode() + b"\n"
        made.append(FileLayout(TRAINER_STATE, (Bytes(data, "made for the step"),)))
    return made, notices


def scheduler_for(base: CheckpointIndex, wanted: Wanted) -> tuple[Any, list[Problem]]:
    """Return the state of a torch scheduler that has counted the base's steps, for another framework, and notices.

    If the base holds none, it is made from the rates in the param groups. Without ``base_lrs``, a scheduler keeps those
    of the run's arguments.
    """
    tree, notices = scheduler_tree(base, wanted.from_group), []
    if tree is None or not read_scheduler(tree).lengths:
        why = "it holds no scheduler state" if tree is None else "its scheduler's state is not torch's"
        step, first = base.global_step, first_rates(base, wanted)
        last = [group.hyper["lr"] for group in wanted.layout.groups if "lr" in group.hyper]
        tree = {
            **({} if None in first else {"base_lrs": first}),
            "last_epoch": step,
            "_step_count": step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": last,
            "lr_lambdas": [None] * len(first),
        }
        in_file = wanted.framework != DEEPSPEED
        made = FRAMEWORKS[wanted.framework].scheduler if in_file else f"{LR_SCHEDULER} in the model states"
        made = made or LR_SCHEDULER  # verl keeps it beside the random states
        what = f"{why}; {made} is made for step {step}, from the rates in the param groups"
        fix = "linear, cosine and the Trainer's other lambda schedules continue; any other schedule restarts"
        if None in first:
            fix += "; the rates that they start from are not known, and are those of the run that resumes"
        notices.append(Problem(base.name, what, fix))
    return tree, notices


def _scheduler(base: CheckpointIndex, wanted: Wanted) -> tuple[FileLayout, list[Problem]]:
    framework, step = FRAMEWORKS[wanted.framework], base.global_step
    tree, notices = scheduler_for(base, wanted)
    if not framework.counts_steps and read_scheduler(tree).num_steps is not None:
        count = step * wanted.layout.world_size
        tree = {**tree, "last_epoch": count, "_step_count": count + 1}
        if count != step:
            what = f"the schedule is set to {count} for step {step}, because accelerate steps it once per process"
            fix = f"if the loop that resumes steps it once, set its last_epoch to {step} after load_state"
            notices.append(Problem(PathIn(base.name, framework.scheduler), what, fix))
    return lay_out_torch_file(framework.scheduler, tree), notices


def _without_counterpart(base: CheckpointIndex, framework: str) -> list[str]:
    """Return the files, or values, of a base's framework that another framework does not have."""
    if base.framework in (ACCELERATE, TRAINER):
        own = [path for path in base.files if owner_of(path) == base.framework]
        known = {framework_of(base).scheduler, framework_of(base).optimizer}
        has_rng = FRAMEWORKS[framework].saves_rng
        return [path for path in own if path not in known and not (is_rng_file(path) and has_rng)]
    others = [entry.path for entry in base.others.values() if not is_of_scheduler(base, entry)]
    root = base.dcp.root if base.dcp else ()
    within = (path[len(root) :] if path[: len(root)] == root else path for path in others if path[0] != "llmtailor")
    return [*sorted({str(path[0]) for path in within}), *random_states(base)]


def random_states(base: CheckpointIndex) -> list[str]:
    """Return the files of random states; of verl, which has more in these files, with the key there."""
    of_verl = [path for path, tree in base.train.trees.items() if base.framework == VERL and "rng" in tree]
    return [path for path in base.files if is_rng_file(path)] + [f"rng in {path}" for path in of_verl]


def _other_ranks(base: CheckpointIndex, ranks: int) -> Iterator[Problem]:
    """Yield notices on files of accelerate that depend on the number of processes."""
    if base.framework != ACCELERATE or ranks == base.world_size:
        return
    scheduler = framework_of(base).scheduler
    counted = read_scheduler(base.train.trees.get(scheduler)).num_steps
    if counted not in (None, base.global_step):
        what = (
            f"the schedule is at {counted} for step {base.global_step}, because accelerate steps it once per process; "
            f"it will move by {ranks} with each step"
        )
        fix = (
            "no action needed if the batch of each process stays the same, as the schedule then counts batches; with "
            f"the same global batch, set last_epoch of the scheduler to {base.global_step * ranks} after load_state"
        )
        yield Problem(PathIn(base.name, scheduler), what, fix)
    if ranks > base.world_size and any(map(is_rng_file, base.files)):
        what = f"it has random states of {base.world_size} processes, which the others repeat"
        yield Problem(base.name, what, "seed each process after load_state, if they must draw different numbers")


def _trainer_state(step: int, batch_size: int) -> dict[str, Any]:
    """Return transformers' own defaults, with the step and the batch of each process, which is required."""
    control = {"args": dict.fromkeys(_CONTROL, False), "attributes": {}}
    return {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 0.0,
        "eval_steps": 500,
        "global_step": step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [],
        "logging_steps": 500,
        "max_steps": 0,
        "num_input_tokens_seen": 0,
        "num_train_epochs": 0,
        "save_steps": 500,
        "stateful_callbacks": {"TrainerControl": control},
        "total_flos": 0.0,
        "train_batch_size": batch_size,
        "trial_name": None,
        "trial_params": None,
    }


MAX_BYTES = 256 << 20
"""Size limit of a tokenizer file; the largest have about 30 MB."""
CHAT_TEMPLATE = "chat_template.jinja"


def lay_out_tokenizer(
    base: CheckpointIndex, source: Path | None, chat_template: str | None, copy: bool, framework: str
) -> list[FileLayout]:
    """Return the layouts of the tokenizer files: the base's, or another folder's; none unless ``copy``.

    ``framework`` is the one that will resume, whose checkpoints may have them in a folder of their own.
    ``chat_template`` (a Jinja text, or the name of one that mergekit includes) replaces the tokenizer's.
    Raises SourceError if the folder has no tokenizer files, or mergekit has no such template.
    """
    if not copy:
        return []
    if source is None:
        found = ((name, carry(path, fact)) for name, path, fact in _settings(base) if is_tokenizer_file(name))
        layouts = [FileLayout(name, layout.pieces) for name, layout in found]
    else:
        layouts = _from_folder(source)
    if chat_template is not None:
        text = Bytes(_template(chat_template).encode(), "chat_template of the recipe")
        layouts = [layout for layout in layouts if layout.path != CHAT_TEMPLATE] + [FileLayout(CHAT_TEMPLATE, (text,))]
    folder = FRAMEWORKS[framework].settings
    return [FileLayout(folder + layout.path, layout.pieces) for layout in layouts] if folder else layouts


def _from_folder(source: Path) -> list[FileLayout]:
    try:
        paths = sorted(path for path in source.iterdir() if path.is_file() and is_tokenizer_file(path.name))
        files = [(path.name, read_source(path, f"{source}/{path.name}", MAX_BYTES)) for path in paths]
    except OSError as error:
        what = f"tokenizer_source can't be read: {error.strerror}"
        raise SourceError.at(source, what, "name a folder with tokenizer files") from error
    if not files:
        raise SourceError.at(source, "tokenizer_source has no tokenizer files", "name a folder with tokenizer files")
    return [FileLayout(name, (Bytes(data, f"tokenizer of {source}"),) if data else ()) for name, data in files]


def _template(value: str) -> str:
    if "{" in value:
        return value
    spec = importlib.util.find_spec("mergekit")  # finds it without importing it
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], "_data", "chat_templates", f"{value}.jinja") if folders else None
    if path is None or not path.is_file():
        fix = "write the template itself (Jinja), or install mergekit, which has the named ones"
        raise SourceError.at("chat_template", f"there is no template named {value!r}", fix)
    return read_source(path, path.name, MAX_BYTES).decode()
