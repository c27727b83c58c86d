"""A callback of ms-swift: a file for ``--external_plugins`` imports this module, ``--callbacks llmtailor`` names it.

Its options are in the environment: ms-swift gives a callback none.
"""

from __future__ import annotations

from swift.callbacks import callbacks_map

from llmtailor.saving import PartialSaving


class SwiftSaving(PartialSaving):
    """`PartialSaving` as ms-swift makes its callbacks."""

    def __init__(self, args: object, trainer: object) -> None:
        super().__init__()


callbacks_map["llmtailor"] = SwiftSaving
