"""Small files of a checkpoint that do not change during a run: config, generation config, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from llmtailor.errors import StorageError
from llmtailor.saving.names import is_adapted
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
    if is_adapted(model):
        return [_adapter_as_saved(model), processing_class]
    return [_as_saved(config, model), generation if can_generate else None, processing_class]


def _adapter_as_saved(model: Any) -> Any:
    """Return the config of the adapter in the root, with what PEFT's own ``save_pretrained`` writes into it."""
    adapters, base = model.peft_config, model.get_base_model()
    config = copy.deepcopy(adapters.get("default") or next(iter(adapters.values())))
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    if config.task_type is None:
        config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return config


def _as_saved(config: Any, model: Any) -> Any:
    """Return a config with what ``model.save_pretrained`` would write into it; the model's own stays as it is."""
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        return config
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    return config
