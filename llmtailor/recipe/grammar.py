"""The words of the recipe language: ours, mergekit's that mean the same here, and mergekit's that can't."""

from __future__ import annotations

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
