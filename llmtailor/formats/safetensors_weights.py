"""Weight files for a composite whose base has no usable ones, laid out from the facts on its params; also adapters.

A PEFT run saves its adapters, each as ``adapter_model.safetensors``, not the model below them. On disk, a param's
name omits the adapter's (``lora_A.default.weight`` is ``lora_A.weight``). The file in the root is that of the adapter
``default``; others have their own folders. A resume with DeepSpeed reads none of these; without DeepSpeed the files
hold the master weights. Checked against peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.placement import Absent
from llmtailor.containers.safetensors import SINGLE, WeightFile, lay_out_weight_files, lay_out_weights, read_header
from llmtailor.errors import COPY_BACK, PathIn, Problem, SourceError, some
from llmtailor.frameworks.files import ADAPTER, adapters_among
from llmtailor.frameworks.read import adapters_of, read_config
from llmtailor.frameworks.write import carry
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.mergekit_data import AS_IN_MEMORY, Naming, naming_of, on_disk
from llmtailor.model.parts import Param, SavedAs
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State

SHARD_BYTES = 5_000_000_000
"""Larger weights are split over several files, which are then written in parallel."""


def new_weights(
    index: CheckpointIndex, naming: Naming = AS_IN_MEMORY, *, dtype: str | None = None, list_tied: bool = False
) -> tuple[WeightFile, ...]:
    """Return the layout of all params and buffers as weight files. Nothing of the folder is read.

    Their names are those that the checkpoint records, or else those that ``naming`` gives. ``dtype`` is that of params;
    None uses the run's precision, and for frozen params the dtype of their stored values. Buffers keep theirs.
    ``list_tied`` also lists tied names, as ZeRO-1/2 runs do.
    """
    tensors: dict[str, TensorEntry] = {}
    filled_by: dict[str, tuple[State, int]] = {}
    listed = [(name, param) for name, param in index.params.items()]
    listed += [(name, index.params[stored]) for name, stored in index.tied.items() if list_tied]
    for name, stored in listed:
        held_as = _dtype(stored, index, dtype)
        saved_as = index.partial.saved_as
        known = None if saved_as is None else saved_as.get(name, (SavedAs(name, stored.shape),))  # a tied name has none
        for tensor in on_disk(replace(stored, name=name), naming) if known is None else known:
            tensors[tensor.name] = TensorEntry(held_as, tensor.shape, Absent())
            filled_by[tensor.name] = (State(stored.name, WEIGHT), tensor.begin)
    # the order of the safetensors library, so that the files match those that the Trainer would have written
    ordered = sorted(tensors.items(), key=lambda item: (-ITEMSIZE[item[1].dtype], item[0]))
    return tuple(
        WeightFile(path, shard, {"format": "pt"}, {name: filled_by[name] for name in shard})
        for path, shard in _shard(ordered)
    )


def _dtype(param: Param, index: CheckpointIndex, dtype: str | None) -> str:
    if param.role == "buffer":
        held = index.held.get(State(param.name, BUFFER))  # an empty one may not be held
        return held.dtype if held else "F32"
    if dtype or param.role == "trainable":
        if not (index.form.has_masters or dtype):  # the weights are the master weights
            return index.held[State(param.name, MASTER)].live_dtype
        return dtype or index.precision
    return index.held[State(param.name, FROZEN)].dtype


def _shard(tensors: Iterable[tuple[str, TensorEntry]]) -> list[tuple[str, dict[str, TensorEntry]]]:
    shards: list[dict[str, TensorEntry]] = [{}]
    room = SHARD_BYTES
    for name, held in tensors:
        if shards[-1] and held.num_bytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = held
        room -= held.num_bytes
    count = len(shards)
    paths = [SINGLE] if count == 1 else [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    return list(zip(paths, shards, strict=True))


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The weight files of a run's adapters."""

    files: tuple[WeightFile, ...]
    """Each tensor with the param that fills it"""
    frozen: tuple[str, ...]
    """Paths of those that hold no trained param: of an adapter that is not active, such as a reference model"""
    unknown: tuple[str, ...]
    """Paths of those whose tensors follow no known rule for the trained params"""


_EXPORT_ADAPTER = "no action needed to resume; to export the adapter, call trainer.save_model() after the resume"


def adapter_naming(adapter: str) -> Naming:
    """Return the rule for the names on disk of an adapter's params."""
    name = re.escape(adapter)
    return Naming(rf"(?<=\.lora_magnitude_vector)\.{name}\.weight$|(\.modules_to_save)?\.{name}(?=\.[^.]+$)|\.{name}$")


def lay_out_adapters(
    base: CheckpointIndex, dtype: str | None, is_alone: bool
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the weight files of a ZeRO base's adapters, their tensors rounded from the master weights, and notices.

    A file whose tensors follow no known naming rule is used unchanged if nothing comes from another source
    (``is_alone``), and left out otherwise.
    """
    adapters = find_adapter_files(base)
    carried = [path for path in adapters.unknown if path in base.files and is_alone]
    what = "the file is left out: the names of its tensors follow no known rule for the trained params"
    left_out = [PathIn(base.name, path) for path in adapters.unknown if path not in carried]
    layouts = [lay_out_weights(file, dtype) for file in adapters.files]
    layouts += [carry(path, base.files[path]) for path in (*adapters.frozen, *carried)]
    return layouts, [Problem(where, what, _EXPORT_ADAPTER) for where in left_out]


def find_adapter_files(base: CheckpointIndex) -> AdapterFiles:
    """Return the files of the base's adapters; one that is missing or empty is that of all its trained params."""
    known, others, unknown = list[WeightFile](), list[str](), list[str]()
    adapters = adapters_of(base)
    for adapter, folder in adapters.items():
        path, naming = f"{folder}{ADAPTER}", adapter_naming(adapter)
        file = read_header(base.root, path, PathIn(base.name, path)) if path in base.files else None
        if file is None or not file.tensors:  # older Trainers save an empty one where ZeRO-3 does not gather
            if (file := _new_file(base, path, naming, len(adapters) == 1)) is not None:
                known.append(file)
            elif len(adapters) == 1:
                unknown.append(path)
            continue
        named = {tensor.name: param for param in base.params.values() for tensor in on_disk(param, naming)}
        fitting = [name for name, held in file.tensors.items() if name in named and named[name].shape == held.shape]
        if len(fitting) == len(file.tensors):
            known.append(replace(file, filled_by={name: (State(named[name].name, WEIGHT), 0) for name in fitting}))
        else:
            (unknown if fitting else others).append(path)
    trained = {name for name, param in base.params.items() if param.role == "trainable"}
    if trained <= {state.param for file in known for state, _ in file.filled_by.values()}:
        return AdapterFiles(tuple(known), tuple(others), tuple(unknown))
    return AdapterFiles(tuple(known), (), (*unknown, *others))


def read_adapters(root: Path, name: str, files: Iterable[str], trained: Sequence[str]) -> dict[str, TensorEntry]:
    """Return the tensors of the adapters' files by the params' names; those not in ``trained`` keep the names on disk,
    and files with none of these are left out if there are several.

    Raises SourceError if a file is missing or damaged.
    """
    weights: dict[str, TensorEntry] = {}
    adapters = adapters_among(files)
    for adapter, folder in adapters.items():
        path, naming = f"{folder}{ADAPTER}", adapter_naming(adapter)
        where = PathIn(name, path)
        if not (root / path).exists():
            what = "the file is missing; without DeepSpeed it is what the optimizer updates"
            raise SourceError.at(where, what, COPY_BACK)
        tensors = read_header(root, path, where).tensors
        params = (Param(param, (), "trainable") for param in trained)
        named = {tensor.name: param.name for param in params for tensor in on_disk(param, naming)}
        if len(adapters) == 1 or not named.keys().isdisjoint(tensors):
            weights |= {named.get(tensor, tensor): held for tensor, held in tensors.items()}
    return weights


def _new_file(base: CheckpointIndex, path: str, naming: Naming, is_only: bool) -> WeightFile | None:
    """Return a file of everything that the base says is saved, or else of all trained params with the adapter's name.

    None if there are none, or if others are trained as well and may belong to the only adapter.
    """
    params = {name: param for name, param in base.params.items() if param.role == "trainable"}
    if base.partial.saved_as is not None and is_only:
        params = {name: base.params[name] for name, tensors in base.partial.saved_as.items() if tensors}
    else:
        own = {name for name, param in params.items() if all(one.name != name for one in on_disk(param, naming))}
        if is_only and own != params.keys():
            return None
        params = {name: params[name] for name in params if name in own}
    if not params:
        return None
    files = new_weights(replace(base, params=params), naming)
    tensors = {name: held for file in files for name, held in file.tensors.items()}
    return WeightFile(path, tensors, files[0].metadata, {k: v for file in files for k, v in file.filled_by.items()})


_EXPORT = "no action needed to resume; to export the model, call trainer.save_model() after the resume"


def lay_out_missing_weights(
    base: CheckpointIndex, stage: int, dtype: str | None, is_alone: bool
) -> tuple[list[FileLayout], list[Problem]]:
    """Return weight files if a ZeRO base has none, as a run of that ZeRO stage would have saved them, and notices.

    ``dtype`` is that of floating-point weights, None uses the run's; ``is_alone`` says that there is no other source.
    If they can't be made, a notice says so.
    """
    if base.has_weight_files and any(state.kind == WEIGHT for state in base.held):
        return [], []
    if adapters_of(base):
        return lay_out_adapters(base, dtype, is_alone)
    config = read_config(base)
    model_type = str(config["model_type"]) if "model_type" in config else None
    naming = AS_IN_MEMORY if base.partial.saved_as is not None else naming_of(model_type)
    frozen = [param.name for param in base.params.values() if param.role == "frozen"]
    lost = [name for name in frozen if State(name, FROZEN) not in base.held]
    if naming is not None and not lost:
        return lay_out_weight_files(new_weights(base, naming, list_tied=stage < 3), dtype), []
    reason = f"the names under which transformers saves a {model_type} may differ from those in memory"
    if lost:
        reason = f"the shards lack the frozen {some(lost)} as well"
    return [], [Problem(base.name, f"it has no weights, so the composite will have none: {reason}", _EXPORT)]
