"""FSDP checkpoints in two files, as accelerate saves them with FULL_STATE_DICT, the Trainer's default.

::

    pytorch_model_fsdp.bin    {param: tensor}                    rank 0 gathers whole tensors
    optimizer.bin             {state: {param: {step, exp_avg, ..}}, param_groups: [{.., params: [names]}]}

The content is that of the DCP folders of a sharded one, so it is read into the same form. Both are ``torch.save``
files. Checked against accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Contiguous
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.fields import as_dict, get, read_tensor
from llmtailor.containers.json import check_name
from llmtailor.containers.pickle_nodes import as_tensor
from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.errors import COPY_FILE, PathIn, SourceError
from llmtailor.formats.dcp.folder import MODEL_FILE, Folder, Stored
from llmtailor.formats.other_optimizers import naming_others
from llmtailor.model.states import ITEMSIZE

OPTIMIZER_FILE = "optimizer.bin"


def read_model_file(root: Path, name: str) -> Folder:
    """Read the weights. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, MODEL_FILE)
    tree = as_dict(read_torch_file(root, MODEL_FILE, where).tree, "the file", where)
    tensors, objects = _split(((("model", key), value) for key, value in tree.items()), where)
    return Folder(tensors, objects, files=(MODEL_FILE,))


def read_optimizer_file(root: Path, name: str) -> Folder:
    """Read the optimizer's states and param groups. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, OPTIMIZER_FILE)
    with naming_others(where):
        tree = read_torch_file(root, OPTIMIZER_FILE, where).tree
    tensors, objects = _split(_walk(tree, where), where)
    return Folder(tensors, objects, files=(OPTIMIZER_FILE,))


def _walk(tree: Any, where: str) -> Iterator[tuple[KeyPath, Any]]:
    for param, kinds in get(tree, "state", dict, where).items():
        if not isinstance(param, str):  # optimizer.pt of the plain Trainer under another name
            what = "its states have numbers instead of the names of params"
            raise SourceError.at(where, what, COPY_FILE, Code.FIELD_TYPE)
        for kind, value in as_dict(kinds, f"the state of {param}", where).items():
            yield ("optimizer", "state", param, check_name(kind, "a state", where)), value
    for number, group in enumerate(get(tree, "param_groups", list, where)):
        for option, value in as_dict(group, "a param group", where).items():
            yield ("optimizer", "param_groups", number, check_name(option, "an option", where)), value


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
        tensor = read_tensor(value, key, where)
        place = Contiguous(tensor.extent, ITEMSIZE[tensor.dtype])
        tensors[key] = Stored(path, TensorEntry(tensor.dtype, tensor.shape, place))
    return tensors, objects
