"""Layout of Lightning's one file, from any base of it. `read` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.containers.unpickle import Ordered, state_tensor
from llmtailor.errors import Problem
from llmtailor.formats.lightning_tree import OPTIMIZERS, SCHEDULERS, STATE_DICT, regrouped
from llmtailor.formats.torch_states import optimizer_tree
from llmtailor.frameworks.files import CKPT
from llmtailor.frameworks.write import lay_out_trainer_files
from llmtailor.model.roles import KIND_OF_ROLE, State


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
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
        made[param.name] = state_tensor(state, base.held[state].live_dtype, param.shape)
    content = {name: made.get(base.tied.get(name, name), node) for name, node in names.items()}
    return Ordered(content.items(), getattr(names, "attributes", None))
