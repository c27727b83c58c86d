"""The object tree of Lightning's one file, and what a resume needs of it.

::

    state_dict                  {name: tensor}, with the names of the LightningModule; tied params share their storage
    optimizer_states            [a torch optimizer's state dict]
    lr_schedulers               [a scheduler's state dict]; may be empty
    loops                       {fit_loop, validate_loop, ..}: where the training is
    callbacks                   {name: state}
    epoch, global_step, pytorch-lightning_version, hyper_parameters, ..

Under DeepSpeed, everything but the first two is in the model states. Read by ``_CheckpointConnector`` of lightning
2.6.6, which takes the step from ``loops``. A partial checkpoint holds the same tree. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import as_dict, get, is_count
from llmtailor.containers.unpickle import Ordered, as_tensor
from llmtailor.errors import COPY_FILE, Problem, SourceError, UnsupportedCheckpoint, damaged
from llmtailor.findings import ERROR, Finding
from llmtailor.frameworks.files import LIGHTNING_VERSION_KEY
from llmtailor.frameworks.scheduler import regroup_scheduler

STATE_DICT, OPTIMIZERS, SCHEDULERS = "state_dict", "optimizer_states", "lr_schedulers"
SCALED = "MixedPrecision"
"""The key of the loss scale; a step whose gradients overflow counts, but Adam makes none"""
_FIT = ("loops", "fit_loop")
_OPTIMIZER = ("epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total", "completed")
_MANUAL = ("epoch_loop.manual_optimization.optim_step_progress", "total", "completed")


def is_from_lightning(tree: Any) -> bool:
    """Return whether Lightning saved a tree, as its own file or in DeepSpeed's model states."""
    return isinstance(tree, Mapping) and LIGHTNING_VERSION_KEY in tree


def read_optimizer_tree(tree: Any, where: str) -> Any:
    """Return the optimizer's state dict.

    Raises SourceError for a file without one, UnsupportedCheckpoint for one of several optimizers.
    """
    tree = as_dict(tree, "the file", where)
    if not is_from_lightning(tree):
        fix = "name a checkpoint that Lightning's Trainer has saved"
        raise SourceError.at(
            where, f"it is not Lightning's: {LIGHTNING_VERSION_KEY} is missing", fix, Code.FIELD_MISSING
        )
    if OPTIMIZERS not in tree:
        fix = "name one that was saved without save_weights_only"
        raise SourceError.at(where, "it holds weights only, no optimizer state", fix, Code.NO_CHECKPOINT)
    found = get(tree, OPTIMIZERS, list, where)
    if len(found) != 1:
        what = f"the training has {len(found)} optimizers"
        raise UnsupportedCheckpoint.at(where, what, "leave it out; checkpoints of one optimizer can be composed")
    return found[0]


def check_loops(tree: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings on the progress of the loops, from which a resume takes epoch, batch and step."""
    loop = _at(tree, _FIT)
    if not isinstance(loop, Mapping):
        fix = f"silent: a resume starts at epoch 0 and step 0; {COPY_FILE}"
        yield Finding(where, "loops.fit_loop is missing", fix, Code.FIELD_MISSING, ERROR)
        return
    made = [_at(loop, _OPTIMIZER), _at(loop, _MANUAL)]
    if not all(map(is_count, made)):
        fix = f"a resume fails, or starts at step 0; {COPY_FILE}"
        yield Finding(where, "loops.fit_loop does not count the optimizer's steps", fix, Code.FIELD_TYPE, ERROR)
    elif sum(made) != tree.get("global_step"):
        what = f"loops.fit_loop has counted {sum(made)} optimizer steps, but global_step is {tree.get('global_step')}"
        fix = f"silent: a resume continues at the former; {COPY_FILE}"
        yield Finding(where, what, fix, Code.STEPS_DIFFER, ERROR)


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def without_states(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the names only of what weights and optimizer hold."""
    names = tree[STATE_DICT]
    kept = [(name, None if as_tensor(node) else node) for name, node in names.items()]
    return {**tree, STATE_DICT: Ordered(kept, getattr(names, "attributes", None)), OPTIMIZERS: []}


def read_names(tree: Any, where: str) -> dict[Any, Any]:
    """Return ``state_dict``. Raises SourceError if it is missing or empty."""
    found = as_dict(get(tree, STATE_DICT, dict, where), STATE_DICT, where)
    if not found:
        raise damaged(where, f"{STATE_DICT} is empty", Code.WEIGHTS_MISSING)
    if others := [name for name in found if not isinstance(name, str)]:
        raise SourceError([Problem(where, f"{STATE_DICT} has the key {others[0]!r}", COPY_FILE, Code.FIELD_TYPE)])
    return found


def check_engine(tree: Mapping[str, Any], where: str) -> list[Finding]:
    """Return findings on what Lightning adds to DeepSpeed's model states."""
    try:
        get(tree, SCHEDULERS, list, where)  # without the list, no resume works
    except SourceError as error:
        return [Finding.of(problem, ERROR) for problem in error.problems]
    return [*check_loops(tree, where)]


def regrouped(tree: Mapping[str, Any], where: str, num_groups: int, from_group: Sequence[int]) -> dict[str, Any]:
    """Return the states of Lightning's schedulers for other param groups, if a tree has them; see
    `regroup_scheduler`."""
    found = tree.get(SCHEDULERS) if is_from_lightning(tree) else None
    if not isinstance(found, list):
        return {}
    return {SCHEDULERS: [regroup_scheduler(one, where, num_groups, from_group) for one in found]}
