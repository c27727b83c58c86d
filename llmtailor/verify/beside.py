"""The files that no state lies in and no resume reads: are they whole?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from llmtailor.codes import Code
from llmtailor.core.findings import WARNING, Finding
from llmtailor.core.index import CheckpointIndex
from llmtailor.errors import PathIn, SourceError
from llmtailor.formats.json_files import MAX_BYTES
from llmtailor.formats.trainer import CONFIG, MANIFEST, TRAINER_STATE
from llmtailor.formats.zip_records import list_records
from llmtailor.io.sources import read_source

_READ = re.compile(rf"rng_state.*\.pth|scheduler\.pt|scaler\.pt|optimizer\.pt|{TRAINER_STATE}|{CONFIG}|{MANIFEST}")
"""What the index has decoded already"""
_FIX = "a resume does not read it; copy it again if it is of use to you"


def check_files_beside(index: CheckpointIndex) -> Iterator[Finding]:
    """Tell of damaged tokenizer files, configs and other JSON and torch files in the checkpoint's root."""
    for path in index.files:
        where = PathIn(index.name, path)
        if "/" in path or _READ.fullmatch(path):
            continue
        try:
            if path.endswith(".json"):
                json.loads(read_source(index.root / path, where, MAX_BYTES).decode())
            elif path.endswith((".bin", ".pt", ".pth")):
                list_records(index.root, path, where)
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(where, f"the file is no JSON ({error})", _FIX, Code.FILE_DAMAGED, WARNING)
        except SourceError as error:
            for problem in error.problems:
                yield Finding(problem.where, problem.what, _FIX, problem.code, WARNING)
