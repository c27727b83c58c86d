"""What the index of a partial checkpoint does not tell: can a composite of the run be made with it?"""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, WARNING, Finding
from llmtailor.core.index import CheckpointIndex
from llmtailor.errors import PathIn, SourceError
from llmtailor.formats.partial.manifest import MANIFEST, read_manifest, step_in_name
from llmtailor.history.retention import SaveRecord


def check_partial(index: CheckpointIndex) -> Iterator[Finding]:
    """Tell of a record of saves that is damaged or of another save, and of a folder with a wrong name."""
    manifest = read_manifest(index.root, index.name)
    where = PathIn(index.name, MANIFEST)
    try:
        record = SaveRecord.from_json(manifest.ledger, where)
    except SourceError as error:
        for problem in error.problems:
            yield Finding.of(problem, ERROR)
    else:
        if (record.step, record.parts) != (manifest.step, frozenset(manifest.parts)):
            what = "its record of earlier saves does not end with this save"
            yield Finding(where, what, "leave this checkpoint out; its save is damaged", Code.MANIFEST, ERROR)
    told = step_in_name(index.root.name)
    if told not in (None, index.global_step):
        what = f"the folder says step {told}, its content is of step {index.global_step}"
        yield Finding(
            index.name, what, "rename the folder: merge --run, salvage and thin go by it", Code.FOLDER_STEP, WARNING
        )
