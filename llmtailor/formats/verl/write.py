"""Layout of checkpoints of verl, from any base. `read` describes them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from llmtailor.checkpoint.index import RANKS, VERL, CheckpointIndex, DcpKeyLayout
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.optimizer import ParamGroup
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint
from llmtailor.formats.dcp.rank_layout import check_mesh, lay_out_ranks
from llmtailor.formats.dcp.target import DcpTarget
from llmtailor.formats.verl.read import EXTRA, MODEL, OPTIMIZER, verl_file
from llmtailor.frameworks.files import VERL_CONFIG
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.write import lay_out_settings, scheduler_for, scheduler_tree

_USUAL = DcpKeyLayout(model=("model",), optimizer=("optimizer",), form=RANKS)


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    target = DcpTarget.of(base, wanted, VERL, _USUAL)
    check_mesh(base, wanted.layout.world_size)
    ranks, notices = wanted.layout.world_size, target.notices()
    schedule = scheduler_tree(base, wanted.from_group)
    if base.form.format != VERL:
        schedule, more = scheduler_for(base, wanted)
        what = "random states and other files of its loader have no counterpart in verl, and are left out"
        notices += [*more, Problem(base.name, what, "no action needed: the run draws other numbers")]
        if (number := len(wanted.layout.groups)) > 1:
            what = f"its optimizer has {number} param groups, and verl's one: the run that resumes would refuse them"
            raise MismatchError.at(base.name, what, "add --groups one")
    extra = [{"lr_scheduler": schedule, **_rng(base, rank)} for rank in range(ranks)]
    files: list[FileLayout] = [
        lay_out_torch_file(verl_file(EXTRA, ranks, rank), tree) for rank, tree in enumerate(extra)
    ]
    config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4).encode()
    files.append(FileLayout(VERL_CONFIG, (Bytes(config, "made for the number of ranks"),)))
    files += lay_out_settings(base, FRAMEWORKS[VERL].settings)
    own = lay_out_ranks(
        target,
        lambda rank: (verl_file(MODEL, ranks, rank), verl_file(OPTIMIZER, ranks, rank)),
        partial(_owned, base),
    )
    return [*own, *files], notices


def _rng(base: CheckpointIndex, rank: int) -> dict[str, Any]:
    """Return the random states of a rank of verl; with more ranks than the base has, they repeat."""
    tree = base.train.trees.get(verl_file(EXTRA, base.world_size, rank % base.world_size))
    return {"rng": tree["rng"]} if isinstance(tree, dict) and "rng" in tree else {}


def _owned(base: CheckpointIndex, group: ParamGroup, number: int) -> tuple[str, ...]:
    """Return the params of a group of verl's optimizer, which has all of the model, frozen ones too.

    Raises UnsupportedCheckpoint if their order is not known. A base without groups does not say it.
    """
    known = base.dcp.owned[number : number + 1] if base.dcp else ()
    if known and set(group.params) <= set(known[0]):
        return known[0]
    frozen = {name for name, param in base.params.items() if param.role == "frozen"}
    if not frozen and not (base.dcp and base.dcp.is_flat):
        return group.params
    order = base.train.model_order
    if lost := (frozen | {*group.params}) - {*order}:
        what = f"it does not say where in the model {min(lost)} is, and verl numbers the params in the model's order"
        fix = "use a base that was saved with the Trainer or DeepSpeed, and no frozen params"
        raise UnsupportedCheckpoint.at(base.name, what, fix)
    return tuple(name for name in order if name in frozen or name in group.params)
