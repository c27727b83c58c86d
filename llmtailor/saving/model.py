"""The model under training in parts: what a policy can choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmtailor.arch import dissect_model
from llmtailor.core.anatomy import Anatomy
from llmtailor.core.index import SavedAs
from llmtailor.formats.partial.manifest import ParamFact
from llmtailor.policies import Policy, check_policy
from llmtailor.saving.names import saved_names
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import Training, describe, tied_names

_BYTES_PER_PARAM = 12
"""Master and two moments in fp32"""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What does not change while a model is trained."""

    anatomy: Anatomy
    params_of: Mapping[str, tuple[str, ...]]
    """Part -> its trained params; parts without any are left out."""
    num_bytes: Mapping[str, int]
    """Part -> bytes of its states, over all ranks"""
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None
    """Param -> the tensors that ``save_pretrained`` would make of it; None if that can't be told"""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.params_of)

    @property
    def part_of(self) -> dict[str, str]:
        return {name: part for part, names in self.params_of.items() for name in names}


def dissect_training(training: Training, ranks: Ranks) -> TrainedModel:
    """Find the parts of a model, by its names and its config, and weigh them; all ranks take part."""
    anatomy, params_of = _dissect(training.model, training.params, training.tied)
    names = saved_names(training.model, training.params, training.tied)
    return weigh(TrainedModel(anatomy, params_of, {}, names), training, ranks)


def weigh(model: TrainedModel, training: Training, ranks: Ranks) -> TrainedModel:
    """Weigh the parts. Before the optimizer's first step that is an estimate: of AdamW, with its two moments."""
    part_of = model.part_of

    def weigh_mine() -> dict[str, int]:
        mine, has_state = dict.fromkeys(model.params_of, 0), training.has_state()
        for one in training.fragments(list(part_of)) if has_state else training.masters():
            mine[part_of[one.param]] += one.tensor.numel() * one.tensor.element_size() * (1 if has_state else 3)
        return mine

    told = ranks.together(weigh_mine)
    return replace(model, num_bytes={part: sum(one[part] for one in told) for part in model.params_of})


def check_before_training(model: Any, policy: Policy, max_staleness: int | None) -> None:
    """Refuse a policy for a model whose optimizer does not exist yet. Raises what `check_policy` raises."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    facts, tied = describe(model, trained), tied_names(model)
    anatomy, params_of = _dissect(model, facts, tied)
    num_bytes = {
        part: sum(_BYTES_PER_PARAM * math.prod(facts[name].shape) for name in names)
        for part, names in params_of.items()
    }
    check_policy(policy, anatomy, tuple(params_of), num_bytes, max_staleness)


def _dissect(
    model: Any, facts: Mapping[str, ParamFact], tied: Mapping[str, str]
) -> tuple[Anatomy, dict[str, tuple[str, ...]]]:
    numels = {name: math.prod(fact.shape) for name, fact in facts.items()}
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None
    anatomy = dissect_model([*facts, *tied], dict(tied), numels, known)
    params_of = {}
    for part in anatomy.parts:
        names = [name for name in anatomy.names(part) if name in facts and facts[name].role == "trainable"]
        if names:
            params_of[part] = tuple(names)
    return anatomy, params_of
