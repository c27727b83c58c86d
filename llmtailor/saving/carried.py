"""Small files of a checkpoint that do not change during a run: config, generation config, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from llmtailor.errors import StorageError
from llmtailor.store import link_or_copy, sync


class CarriedFiles:
    """Written by their owners at the first save, then hard links to the save before."""

    def __init__(self, *owners: Any) -> None:
        self.owners = [owner for owner in owners if hasattr(owner, "save_pretrained")]
        self.written: list[Path] = []

    def put(self, folder: Path) -> None:
        """Put the files into a folder. Raises OSError, or StorageError."""
        if self.written and all(path.is_file() for path in self.written):
            for path in self.written:
                link_or_copy(path, folder / path.name)
            self.written = [folder / path.name for path in self.written]
            return
        before = set(folder.iterdir())
        for owner in self.owners:
            try:
                owner.save_pretrained(folder)
            except Exception as error:
                if isinstance(error, OSError) or "os error" not in str(error):
                    raise
                fix = "free some space, or check the disk"  # tokenizers tell it in a bare Exception
                raise StorageError.at(folder, str(error), fix) from error
        self.written = sorted(path for path in set(folder.iterdir()) - before if path.is_file())
        for path in self.written:
            sync(path)


def owners_of(model: Any, processing_class: Any = None) -> list[Any]:
    """Return what the Trainer would call ``save_pretrained`` of, beside the model itself."""
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    can_generate = generation is not None and getattr(model, "can_generate", lambda: False)()
    adapters = getattr(model, "peft_config", None)  # of PEFT, by the name of the adapter
    if isinstance(adapters, dict):
        return [*adapters.values(), processing_class]
    return [_as_saved(config, model), generation if can_generate else None, processing_class]


def _as_saved(config: Any, model: Any) -> Any:
    """Return a config with what ``model.save_pretrained`` would write into it; the model's own stays as it is."""
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        return config
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    return config
