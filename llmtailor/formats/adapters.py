"""PEFT: a run that trains an adapter saves that alone, as ``adapter_model.safetensors``.

The checkpoint holds the trained params only; the model below them comes from elsewhere, as it was. On disk a param goes
without the name of the adapter (``lora_A.default.weight`` is ``lora_A.weight``); the file in the root is that of the
adapter ``default``, others have folders of their own. A resume with DeepSpeed reads none of these; without DeepSpeed
the file holds the masters. Checked against peft 0.21.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from llmtailor.core.index import CheckpointIndex, Held, Param
from llmtailor.core.layout import FileLayout
from llmtailor.core.states import WEIGHT, State
from llmtailor.errors import PathIn, Problem, SourceError
from llmtailor.formats.disk_names import Naming, on_disk
from llmtailor.formats.new_weights import new_weights
from llmtailor.formats.safetensors_files import WeightFile, lay_out_weights, read_header
from llmtailor.formats.trainer import ADAPTER, ADAPTER_CONFIG, carry

NAMING = Naming(r"(?<=\.lora_magnitude_vector)\.default\.weight$|(\.modules_to_save)?\.default(?=\.[^.]+$)|\.default$")
_COPY = "copy it back, or leave this checkpoint out"
_EXPORT = "nothing, to resume; to export the adapter, call trainer.save_model() after the resume"


def lay_out_adapter(base: CheckpointIndex, dtype: str | None, is_alone: bool) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out the adapter's file of a ZeRO base, its tensors rounded from the masters, and say what is left out.

    Where tensors are no params by the rule, the base's file is taken as it is if nothing comes from another source
    (``is_alone``), or left out.
    """
    folders = sorted(path.parent.name for path in base.root.glob(f"*/{ADAPTER_CONFIG}"))
    notices = [Problem(PathIn(base.name, folder), "this adapter's folder is left out", _EXPORT) for folder in folders]
    if file := adapter_file(base):
        return [lay_out_weights(file, dtype)], notices
    if ADAPTER in base.files and is_alone:
        return [carry(ADAPTER, base.files[ADAPTER])], notices
    what = f"{ADAPTER} is left out: its tensors have other names than the trained params, by a rule that is not known"
    return [], [*notices, Problem(base.name, what, _EXPORT)]


def adapter_file(base: CheckpointIndex) -> WeightFile | None:
    """Return the adapter's file, each tensor with the param that fills it: that of the base, or else one of all that is
    trained. None where tensors are no params by the rule, or trained params are not those of the adapter ``default``.
    """
    file = read_header(base.root, ADAPTER, PathIn(base.name, ADAPTER)) if ADAPTER in base.files else None
    if file is None or not file.tensors:  # older Trainers save an empty one where ZeRO-3 does not gather
        return _new_file(base)
    named = {tensor.name: param for param in base.params.values() for tensor in on_disk(param, NAMING)}
    if any(_shape(named.get(name)) != held.shape for name, held in file.tensors.items()):
        return None
    return replace(file, filled_by={name: (State(named[name].name, WEIGHT), 0) for name in file.tensors})


def read_adapter(root: Path, name: str, trained: Iterable[str]) -> dict[str, Held]:
    """Return the tensors of the adapter's file by the params' names, which for all but ``trained`` are those on disk.

    Raises SourceError if the file is missing or damaged.
    """
    where = PathIn(name, ADAPTER)
    if not (root / ADAPTER).exists():
        raise SourceError.at(where, "the file is missing; without DeepSpeed it is what the optimizer updates", _COPY)
    named = {tensor.name: param for param in trained for tensor in on_disk(Param(param, (), "trainable"), NAMING)}
    return {named.get(tensor, tensor): held for tensor, held in read_header(root, ADAPTER, where).tensors.items()}


def _shape(param: Param | None) -> tuple[int, ...] | None:
    return param.shape if param else None


def _new_file(base: CheckpointIndex) -> WeightFile | None:
    """Return a file of all that the base says is saved, or else of all trained params.

    None if some of these are not those of the adapter ``default``.
    """
    params = {name: param for name, param in base.params.items() if param.role == "trainable"}
    if base.saved_as is not None:
        params = {name: base.params[name] for name, tensors in base.saved_as.items() if tensors}
    elif any(tensor.name == name for name, param in params.items() for tensor in on_disk(param, NAMING)):
        return None
    files = new_weights(replace(base, params=params), NAMING)
    tensors = {name: held for file in files for name, held in file.tensors.items()}
    return WeightFile(ADAPTER, tensors, files[0].metadata, {k: v for file in files for k, v in file.filled_by.items()})
