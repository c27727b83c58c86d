"""Layout of folders of torch.distributed.checkpoint, from any base."""

from __future__ import annotations

from llmtailor.checkpoint.index import DCP, CheckpointIndex, DcpKeyLayout
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.errors import Problem, some
from llmtailor.formats.dcp.builder import FolderBuilder
from llmtailor.formats.dcp.links import has_linkable_files
from llmtailor.formats.dcp.target import DcpTarget, check_states
from llmtailor.formats.format import Writer
from llmtailor.frameworks.files import TRAINER_STATE
from llmtailor.frameworks.write import random_states

_USUAL = DcpKeyLayout(model=("model",), optimizer=("optim",))


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    target = DcpTarget.of(base, wanted, DCP, _USUAL)
    folder = FolderBuilder("", wanted.layout.world_size, target.links)
    folder.counter = int(target.links is not None)  # so that links to moments keep no weights on the disk
    target.add_model(folder)
    folder.counter = 0
    target.add_optimizer(folder)
    target.add_others(folder)
    target.add_roles(folder)
    notices = target.notices()
    lost = [*random_states(base), *(path for path in base.files if path == TRAINER_STATE)]
    if base.form.format != DCP and (lost or base.partial.inside):
        files = some(lost) if lost else "the trainer state"
        what = f"{files}, config and the like have no place in a DCP folder, and are left out"
        fix = "no action needed: a loop has its own data order and random states; keep the base if you need them"
        notices.append(Problem(base.name, what, fix))
    return [*folder.finish(), *target.linked()], notices


def lay_out_weights(base: CheckpointIndex) -> list[FileLayout]:
    """Return the layouts of a DCP folder's files with its model alone, cut for as many ranks."""
    target = DcpTarget(base, Wanted(layout=base.layout), base.dcp or _USUAL)
    folder = FolderBuilder("", base.world_size)
    target.add_model(folder)
    return folder.finish()


WRITER = Writer(
    lay_out=lay_out,
    lay_out_weights=lay_out_weights,
    has_linkable_files=has_linkable_files,
    check_linkable=lambda index: check_states(index, index.groups),
)
