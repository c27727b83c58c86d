"""The words of the recipe language: ours, mergekit's that mean the same here, and mergekit's that can't.

mergekit's ``parameters:``. Of them passthrough knows one, ``scale``, which would change the weights.
"""

from __future__ import annotations

from llmtailor.errors import Problem
from llmtailor.recipe.yaml_tree import Items, Reader, Scalar, Table, Value, is_null, place

TOP_KEYS = (
    "merge_method", "base_model", "slices", "models", "modules", "pre_weights", "post_weights", "parts", "dtype",
    "out_dtype", "tokenizer_source", "tokenizer", "chat_template", "parameters", "output",
)  # fmt: skip
NULLABLE = (
    "merge_method", "base_model", "models", "modules", "dtype", "out_dtype", "tokenizer_source", "tokenizer",
    "chat_template", "parameters",
)  # fmt: skip
"""Keys that may stand there with nothing behind them, as mergekit writes them."""
LAYERS_FROM = ("slices", "models", "modules")
"""mergekit's ways to say where layers come from; a recipe has one of them."""
SLICE_KEYS = ("sources", "base_model", "parameters")
SOURCE_KEYS = ("model", "layer_range", "parameters")
MODEL_KEYS = ("model", "parameters")
MODULE_KEYS = ("slices", "models", "parameters")
WEIGHT_KEYS = ("name", "model", "parameters")
PART_KEYS = ("from", "select")
TOKENIZER_KEYS = ("source", "tokens", "pad_to_multiple_of")

NO_EFFECT_IN_SLICE = {"residual_weight": "mergekit itself reads it and does nothing with it"}
"""mergekit's keys that are read and reported, but change nothing; and why."""

SAME_VOCABULARY = (
    "rows of the embeddings, and their optimizer states, belong to token ids, "
    "so a checkpoint that can be resumed keeps its vocabulary"
)
NOT_SCALED = "scaled weights have no optimizer state that a training run has had"
CHAT_TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")
"""The templates that mergekit brings along."""

OTHER_METHODS = (
    "arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "core_space", "dare_linear", "dare_ties", "della",
    "della_linear", "karcher", "linear", "model_breadcrumbs", "model_stock", "multislerp", "nearswap", "nuslerp",
    "ram", "ramplus_tl", "sce", "slerp", "task_arithmetic", "ties", "consensus_ta", "consensus_ties",
)  # fmt: skip
"""mergekit's other values of ``merge_method``."""

DTYPES = {
    "bfloat16": "BF16",
    "bf16": "BF16",
    "float16": "F16",
    "fp16": "F16",
    "half": "F16",
    "float32": "F32",
    "fp32": "F32",
    "float": "F32",
}

OWN_PLACE = (
    "optimizer state and learning-rate schedule belong to a place in the model, "
    "so a checkpoint that can be resumed keeps every layer in its own place"
)


def check_parameters(owner: Table, path: str, reader: Reader) -> None:
    """Refuse a scale other than 1 in the ``parameters`` of a mapping; name the others as idle."""
    value = owner.entries.get("parameters")
    inside = f"{path}.parameters" if path else "parameters"
    if value is None or is_null(value):
        return
    if not isinstance(value, Table):
        reader.flaw(value.line, inside, "parameters is no mapping of names to values", "leave parameters out")
        return
    scale = value.entries.get("scale")
    if scale is not None and not _is_one(scale):
        fix = "leave scale out; to scale weights alone use mergekit on the finished composite"
        reader.flaw(value.lines["scale"], f"{inside}.scale", f"scale would change weights: {NOT_SCALED}", fix)
    elif value.entries:
        what = f"parameters has no effect ({', '.join(value.entries)}): states are taken over as they are"
        where = place(reader.name, owner.lines["parameters"], inside)
        reader.notices.append(Problem(where, what, "leave parameters out"))


def _is_one(value: Value) -> bool:
    """Tell whether a setting is 1 whatever it is applied to: a number, a gradient, or values with filters."""
    if isinstance(value, Items):
        return all(_is_one(item) for item in value.items)
    if isinstance(value, Table):
        return "value" in value.entries and _is_one(value.entries["value"])
    return is_null(value) or _is_number_one(value)


def _is_number_one(value: Scalar) -> bool:
    try:
        return float(value.text) == 1
    except ValueError:
        return False
