"""Layout of Lightning's one file, based on that of another checkpoint of the run, or of a partial one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout, Slot
from llmtailor.containers.pickle_nodes import Ordered, make_tensor
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import Problem
from llmtailor.formats.common.lightning import OPTIMIZERS, SCHEDULERS, STATE_DICT, regrouped
from llmtailor.formats.common.write import check_masters, optimizer_tree
from llmtailor.loaders.files import CKPT
from llmtailor.loaders.write import Wanted, lay_out_trainer_files
from llmtailor.model.states import KIND_OF_ROLE, State

check = check_masters


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a composite's files, and notices. Raises SourceError if its scheduler's lists don't fit."""
    tree = dict(base.train.trees[CKPT])
    tree[STATE_DICT] = _state_dict(base, tree[STATE_DICT])
    tree[OPTIMIZERS] = [optimizer_tree(base, wanted.layout)]
    if wanted.from_group is not None:
        tree |= regrouped(tree, f"{base.name}: {SCHEDULERS}", len(base.groups), wanted.from_group)
    made = [lay_out_torch_file(CKPT, tree)]
    return lay_out_trainer_files(base, wanted, made, None, frozenset(), has_weights=True), []


def _state_dict(base: CheckpointIndex, names: Mapping[str, Any]) -> Ordered:
    """Return the weights in the order of the base's, bound to states. Tied names share their tensors."""
    made: dict[str, Any] = {}
    for param in base.params.values():
        state = State(param.name, KIND_OF_ROLE[param.role])
        dtype = base.held[state].live_dtype
        made[param.name] = make_tensor(dtype, param.shape, (Slot(state, dtype, 0, param.numel),) if param.numel else ())
    content = {name: made.get(base.tied.get(name, name), node) for name, node in names.items()}
    return Ordered(content.items(), getattr(names, "attributes", None))
