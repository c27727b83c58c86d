"""The weights of a composite whose base saved none: rounded from the masters, if it is known what to call them."""

from __future__ import annotations

from llmtailor.core.index import CheckpointIndex
from llmtailor.core.layout import FileLayout
from llmtailor.core.states import FROZEN, WEIGHT, State
from llmtailor.core.target import Target
from llmtailor.core.words import some
from llmtailor.errors import PathIn, Problem
from llmtailor.formats.adapters import lay_out_adapter
from llmtailor.formats.disk_names import AS_IN_MEMORY, naming_of
from llmtailor.formats.json_files import read_json
from llmtailor.formats.new_weights import new_weights
from llmtailor.formats.safetensors_files import lay_out_weight_files
from llmtailor.formats.trainer import ADAPTER_CONFIG, CONFIG

_EXPORT = "nothing, to resume; to export the model, call trainer.save_model() after the resume"


def lay_out_missing_weights(
    base: CheckpointIndex, target: Target, dtype: str | None, is_alone: bool
) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out weight files if a ZeRO base has none, as a run of the target's stage would have saved them.

    ``dtype`` is that of floating-point weights, None takes the run's; ``is_alone`` says that no other source gives
    anything. Where it can't be done, a notice says so.
    """
    if any(state.kind == WEIGHT for state in base.held):
        return [], []
    if ADAPTER_CONFIG in base.files:
        return lay_out_adapter(base, dtype, is_alone)
    config = read_json(base.root / CONFIG, PathIn(base.name, CONFIG)) if CONFIG in base.files else {}
    model_type = str(config["model_type"]) if "model_type" in config else None
    naming = AS_IN_MEMORY if base.saved_as is not None else naming_of(model_type)
    frozen = [param.name for param in base.params.values() if param.role == "frozen"]
    lost = [name for name in frozen if State(name, FROZEN) not in base.held]
    if naming is not None and not lost:
        return lay_out_weight_files(new_weights(base, naming, list_tied=target.stage < 3), dtype), []
    reason = f"transformers may save a {model_type} by other names than it has in memory"
    if lost:
        reason = f"nor do the shards hold the frozen {some(lost)}"
    return [], [Problem(base.name, f"it has no weights, and neither will the composite: {reason}", _EXPORT)]
