"""What torch offers to move a folder of torch.distributed.checkpoint: python dcp_tools.py load_save|to_torch FROM TO.

``load_save`` loads every tensor into memory in one process, and saves it again, in one file. ``to_torch`` makes one
file of torch.save. Neither fsyncs. `bench_convert.py` measures them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    warnings.simplefilter("ignore")
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tool, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if tool == "to_torch":
        target.mkdir()
        dcp_to_torch_save(source, target / "all.pt")
        return
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(source)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target, sync_files=False), no_dist=True)


if __name__ == "__main__":
    main()
