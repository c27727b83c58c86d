"""The same run under ZeRO-3 on two ranks: what the Trainer and the saver write is converted at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from attempts.world import World
from helpers.commands import call
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.copying.pool import Stop
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.runs.conversion import Conversion
from llmtailor.runs.thin import write_conversion


class ZeroWorld(World):
    def save_full(self) -> None:
        if self.present.step > self.present.resumed_at:
            folder = self.run / f"checkpoint-{self.present.step}"
            shutil.rmtree(folder, ignore_errors=True)
            self._as_zero(folder)
            self.note("save_full", f"{self.present.number}@{self.present.step}")

    def save(self) -> None:
        """Write the parts that the saver chose, with its record of saves."""
        target = self.run / "partial" / f"step-{self.present.step:08}"
        was_there = target.exists()
        super().save()
        if was_there or not target.exists():
            return
        manifest, full = read_manifest(target, target.name), self.run.parent / f"checkpoint-{self.present.step}"
        index = index_checkpoint(self._as_zero(full))
        shutil.rmtree(target)
        ledger = Ledger.from_json(manifest.ledger, target.name)
        parts, masters = dict(manifest.parts), manifest.masters
        made = Conversion(index, find_structure(index), target, parts, ledger, {"name": "test"}, {}, masters)
        write_conversion(made, Stop())
        written = json.loads((target / "manifest.json").read_text())
        written["policy"].pop("made_of_full_checkpoints", None)
        (target / "manifest.json").write_text(json.dumps(written))
        shutil.rmtree(full)

    def _as_zero(self, out: Path) -> Path:
        plain = self.run.parent / "plain" / out.name
        self.write_full(plain)
        call("convert", plain, out, "--to", "deepspeed", "--stage", 3, "--num-gpu", 2, "-q")
        for name in ("llmtailor.json", "README.md"):
            (out / name).unlink()
        shutil.rmtree(plain.parent)
        return out
