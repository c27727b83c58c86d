"""Takes the optimizer out of a full checkpoint: a folder of links to what is left takes its place at once."""

from __future__ import annotations

import re
import shutil

from llmtailor.core.index import CheckpointIndex
from llmtailor.errors import VerificationError
from llmtailor.formats.deepspeed.files import LATEST
from llmtailor.formats.plain.optimizer import OPTIMIZER
from llmtailor.formats.safetensors_files import read_weights
from llmtailor.formats.trainer import SCALER, SCHEDULER
from llmtailor.io.rename import replace_folder
from llmtailor.retain.places import making, old, remove_replaced
from llmtailor.retain.readback import check_unchanged
from llmtailor.store import link_or_copy, sync

_OF_A_RESUME = re.compile(r"rng_state(_\d+)?\.pth|zero_to_\w+\.py")


def is_kept(path: str) -> bool:
    """Whether a file of a full checkpoint stays when its optimizer goes: all that is no state of a resume."""
    return "/" not in path and path not in (LATEST, OPTIMIZER, SCHEDULER, SCALER) and not _OF_A_RESUME.fullmatch(path)


def reduce_to_weights(index: CheckpointIndex) -> None:
    """Replace a full checkpoint by one without the optimizer's states; nothing is copied where files can be linked.

    Raises VerificationError if the weights don't read back, SourceError if it changes meanwhile, or OSError. It is
    whole until it is replaced.
    """
    root = index.root
    staging = making(root)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for path in index.files:
        if is_kept(path):
            link_or_copy(root / path, staging / path)
    sync(staging)
    if read_weights(staging, index.name) != read_weights(root, index.name):
        raise VerificationError.at(index.name, "its weights would not be there any more", "report this bug")
    check_unchanged(index)
    replace_folder(staging, root, old(root))
    sync(root.parent)
    remove_replaced(root, now_at=staging if staging.exists() else old(root))
