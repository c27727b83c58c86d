"""What completes a save on rank 0."""

from __future__ import annotations

import pytest

from llmtailor.background.writing import check_written
from llmtailor.errors import StorageError
from llmtailor.formats.partial.manifest import BundleFact


def test_files_of_ranks_must_be_there_as_they_were_written(tmp_path):
    """On several nodes they may not be, if the folder is on a disk of one node."""
    (tmp_path / "rank").write_bytes(b"1234")
    check_written(tmp_path, [BundleFact("rank", 4, 0)])
    for path, num_bytes in (("rank", 5), ("rank", 3), ("other", 4)):
        with pytest.raises(StorageError, match="differs from what its rank wrote"):
            check_written(tmp_path, [BundleFact(path, num_bytes, 0)])
