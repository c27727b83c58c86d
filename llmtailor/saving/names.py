"""What the model's own ``save_pretrained`` would call the weights, asked of transformers itself.

transformers 5 holds some models otherwise in memory than on disk: names differ, and experts are fused. The conversion
back is run on tensors without data, whose storage and offset tell which elements of which param they are. Where
it copies (gate and up projections of experts), the table of known families decides.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from llmtailor.core.index import Param, SavedAs
from llmtailor.formats.disk_names import naming_of, on_disk
from llmtailor.formats.partial.manifest import ParamFact

logger = logging.getLogger("llmtailor.saving")
Names = dict[str, tuple[SavedAs, ...]]


def is_adapted(model: Any) -> bool:
    """Whether PEFT wraps the model. The Trainer then saves the adapter alone, without what is frozen."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def saved_names(model: Any, params: Mapping[str, ParamFact], tied: Mapping[str, str]) -> Names | None:
    """Return what each param is saved as, or None if that can't be told: then a composite has no weight files.

    A model that is not of transformers is saved as it is. Of one that PEFT wraps some params are not saved at all.
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
    except Exception as error:  # whatever a model's conversion trips over
        logger.warning("what %s calls its weights on disk can't be told (%s)", type(model).__name__, error)
        return None


def _of_adapter(model: Any, params: Mapping[str, ParamFact], named: Mapping[str, torch.Tensor]) -> Names | None:
    """Ask PEFT what it saves of the adapter in the root. None unless that is all that is trained, once each."""
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
    """Return the tensors that are made of each param, maybe none.

    None if one is made of anything else than elements of one param, or a param is saved in part.
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
