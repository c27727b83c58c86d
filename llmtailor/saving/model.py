"""The model under training: its parts, from which a policy chooses, and the names of its weights on disk.

The names are those that the model's own ``save_pretrained`` would write. transformers 5 represents some models
differently in memory and on disk: names differ, and experts are fused. Its conversion is run on tensors without data,
whose storage and offset show which elements of which param they are. Where it copies (gate and up projections of
experts), the table of known families decides.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmtailor.formats.partial.manifest import ParamFact
from llmtailor.model.disk_names import naming_of, on_disk
from llmtailor.model.experts import split_experts
from llmtailor.model.find_parts import find_parts
from llmtailor.model.parts import ModelStructure, Param, SavedAs
from llmtailor.policies import Policy, check_policy, staleness_limit
from llmtailor.saving.pieces import in_pieces
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import Training, describe, tied_names

logger = logging.getLogger("llmtailor.saving")
Names = dict[str, tuple[SavedAs, ...]]


def is_adapted(model: Any) -> bool:
    """Return whether PEFT wraps the model. The Trainer then saves only the adapter, without frozen params."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def saved_names(model: Any, params: Mapping[str, ParamFact], tied: Mapping[str, str]) -> Names | None:
    """Return what each param is saved as, or None if that is unknown: a composite then has no weight files.

    Names of a model that is not from transformers stay unchanged. Some params of a model wrapped by PEFT are not saved.
    """
    empty = {name: torch.empty(fact.shape, device="meta") for name, fact in params.items()}
    if is_adapted(model):
        return _of_adapter(model, params, {**empty, **{name: empty[stored] for name, stored in tied.items()}})
    as_is: Names = {name: (SavedAs(name, fact.shape),) for name, fact in params.items()}
    if not hasattr(model, "save_pretrained"):
        return as_is
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 nothing was converted
        return as_is
    converted = _convert(model, lambda: revert_weight_conversion(model, dict(empty)))
    if converted is None:
        return None
    made = {name: tuple(tensor.shape) for name, tensor in converted.items()}
    for found in (_trace(empty, converted), _known(model, params)):
        if found is None or not all(found.values()):
            continue
        if {one.name: one.shape for ones in found.values() for one in ones} == made:
            return found
    return None


def _convert(model: Any, call: Callable[[], Any]) -> Any:
    try:
        with torch.no_grad():
            return call()
    except Exception as error:  # a model's conversion may raise anything
        logger.warning("the names of the weights of %s on disk are unknown (%s)", type(model).__name__, error)
        return None


def _of_adapter(model: Any, params: Mapping[str, ParamFact], named: Mapping[str, torch.Tensor]) -> Names | None:
    """Return what PEFT saves of the adapter in the root, None unless it saves each trained param once and no others."""
    from peft import get_peft_model_state_dict

    converted = _convert(model, lambda: get_peft_model_state_dict(model, dict(named), adapter_name="default"))
    traced = None if converted is None else _trace({name: named[name] for name in params}, converted)
    if traced is None:
        return None
    wrong = [name for name, fact in params.items() if len(traced[name]) != 1 and fact.role == "trainable"]
    wrong += [name for name in params if len(traced[name]) > 1]
    return None if wrong else traced


def _known(model: Any, params: Mapping[str, ParamFact]) -> Names | None:
    naming = naming_of(getattr(model.config, "model_type", None))
    if naming is None:
        return None
    return {name: tuple(on_disk(Param(name, fact.shape, fact.role), naming)) for name, fact in params.items()}


def _trace(empty: Mapping[str, torch.Tensor], converted: Mapping[str, torch.Tensor]) -> Names | None:
    """Return the tensors made from each param, if any.

    None if a tensor is not made from elements of a single param, or a param is only partly saved.
    """
    owner = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    traced: dict[str, list[SavedAs]] = {name: [] for name in empty}
    for saved, tensor in converted.items():
        name = owner.get(tensor.untyped_storage()._cdata)
        if name is None or not tensor.is_contiguous():
            return None
        traced[name].append(SavedAs(saved, tuple(tensor.shape), int(tensor.storage_offset())))
    whole = all(
        sum(torch.Size(one.shape).numel() for one in pieces) == empty[name].numel()
        for name, pieces in traced.items()
        if pieces
    )
    return {name: tuple(pieces) for name, pieces in traced.items()} if whole else None


_BYTES_PER_PARAM = 12
"""Master and two moments in fp32"""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The parts of a model under training, their sizes and names on disk."""

    structure: ModelStructure
    params_of: Mapping[str, tuple[str, ...]]
    """Part -> its trained params, or pieces of params (`ModelStructure.pieces`); parts without any are left out."""
    num_bytes: Mapping[str, int]
    """Part -> bytes of its states, over all ranks"""
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None
    """Param -> the tensors that ``save_pretrained`` would make from it; None if unknown"""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.params_of)

    @property
    def part_of(self) -> dict[str, str]:
        return {name: part for part, names in self.params_of.items() for name in names}

    def names_in(self, parts: Iterable[str]) -> list[str]:
        """Return the trained params, or pieces of params, of some parts."""
        return [name for part in parts for name in self.params_of[part]]


def find_trained_parts(training: Training, ranks: Ranks, experts: str | None) -> tuple[TrainedModel, Training]:
    """Return the parts of a model, by its names and its config, with their sizes, and the training with params or
    pieces of params as these parts have them. All ranks call it.

    ``experts`` is that of `SavingOptions`.
    """
    structure, params_of = _find_parts(training.model, training.params, training.tied, experts)
    names = saved_names(training.model, training.params, training.tied)
    training = in_pieces(training, structure.pieces)
    return weigh(TrainedModel(structure, params_of, {}, names), training, ranks), training


def weigh(model: TrainedModel, training: Training, ranks: Ranks) -> TrainedModel:
    """Return the model with the sizes of its parts; before the optimizer's first step, an estimate for AdamW."""
    part_of = model.part_of

    def weigh_mine() -> dict[str, int]:
        mine, has_state = dict.fromkeys(model.params_of, 0), training.has_state()
        for one in training.fragments(list(part_of)) if has_state else training.masters():
            mine[part_of[one.param]] += one.tensor.numel() * one.tensor.element_size() * (1 if has_state else 3)
        return mine

    results = ranks.together(weigh_mine)
    return replace(model, num_bytes={part: sum(one[part] for one in results) for part in model.params_of})


def limit_for(policy: Policy, model: TrainedModel, max_staleness: int | None, is_tested: bool) -> int:
    """Return what `staleness_limit` does, and what it raises; `check_policy` tests the policy unless it was tested."""
    if is_tested:
        return staleness_limit(policy, model.structure, model.parts, max_staleness)
    return check_policy(policy, model.structure, model.parts, model.num_bytes, max_staleness)


def check_before_training(model: Any, policy: Policy, max_staleness: int | None, experts: str | None) -> None:
    """Check a policy for a model whose optimizer does not exist yet. Raises what `check_policy` raises."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    facts, tied = describe(model, trained), tied_names(model)
    structure, params_of = _find_parts(model, facts, tied, experts)
    numels = {name: math.prod(fact.shape) for name, fact in facts.items()}
    numels |= {name: piece.numel for name, piece in structure.pieces.items()}
    num_bytes = {part: sum(_BYTES_PER_PARAM * numels[name] for name in names) for part, names in params_of.items()}
    check_policy(policy, structure, tuple(params_of), num_bytes, max_staleness)


def _find_parts(
    model: Any, facts: Mapping[str, ParamFact], tied: Mapping[str, str], experts: str | None
) -> tuple[ModelStructure, dict[str, tuple[str, ...]]]:
    numels = {name: math.prod(fact.shape) for name, fact in facts.items()}
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None
    structure = find_parts([*facts, *tied], dict(tied), numels, known)
    if experts:
        shapes = {name: fact.shape if fact.role != "buffer" else () for name, fact in facts.items()}
        structure = split_experts(structure, {**dict.fromkeys(tied, ()), **shapes})
    trained = {name for name, fact in facts.items() if fact.role == "trainable"}
    names_of: dict[str, list[str]] = {part: [] for part in structure.parts}
    for name, part in structure.part_of.items():
        if structure.stored_in(name) in trained:
            names_of[part].append(name)
    return structure, {part: tuple(names) for part, names in names_of.items() if names}
