"""For training scripts: layer-aligned param groups that get through DeepSpeed. The only room that imports torch."""

from __future__ import annotations

from llmtailor.training.groups import LayerGroupsMixin, layer_param_groups

__all__ = ["LayerGroupsMixin", "layer_param_groups"]
