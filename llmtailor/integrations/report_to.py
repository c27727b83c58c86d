"""``--report_to llmtailor``: importing this module makes the name valid for the Trainer of transformers.

``llmtailor run`` imports it. The options come from the environment.
"""

from __future__ import annotations

import sys

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from llmtailor.saving.callbacks import PartialSaving


class NamedSaving(PartialSaving):
    """A saver that the Trainer creates. It reports on stderr that it is active: scripts rarely show the log at level
    INFO."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        super().on_train_begin()
        if self.saver is not None and self.saver.ranks.is_first:
            by_strategy = f"by save_strategy={self.trainer.args.save_strategy.value}"
            how = self.save_steps or ("auto" if self.overhead is not None else by_strategy)
            what = f"llmtailor: saving parts ({self.policy.name}, save_steps: {how}) in {self.saver.folder.partial}"
            print(what, file=sys.stderr)


INTEGRATION_TO_CALLBACK["llmtailor"] = NamedSaving
