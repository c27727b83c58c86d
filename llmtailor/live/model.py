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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import torch

from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.partial.manifest import ParamFact
from llmtailor.live.training import Inventory, LiveShard, Training
from llmtailor.model.find_parts import find_parts, split_experts
from llmtailor.model.mergekit_data import naming_of, on_disk
from llmtailor.model.parts import ModelStructure, Param, Part, SavedAs
from llmtailor.model.roles import EXP_AVG_SQ, MASTER, is_moment
from llmtailor.policies import Policy, check_policy
from llmtailor.ranks.team import Ranks


class _InPieces:
    """A training with fragments of pieces of params, such as experts, instead of those of the params.

    Has all of `Training`: what is not defined here is that of the training itself.
    """

    def __init__(self, training: Training, structure: ModelStructure) -> None:
        self._training = training
        self._pieces, self._names = structure.pieces, structure.pieces_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def fragments(self, params: Collection[str]) -> Iterator[LiveShard]:
        wanted = set(params)
        whole = dict.fromkeys(self._pieces[name].param if name in self._pieces else name for name in params)
        yield from (one for one in self._cut(self._training.fragments(list(whole))) if one.param in wanted)

    def masters(self) -> Iterator[LiveShard]:
        yield from self._cut(self._training.masters())

    def _cut(self, fragments: Iterable[LiveShard]) -> Iterator[LiveShard]:
        for one in fragments:
            if one.param not in self._names:
                yield one
                continue
            if one.shape is not None or one.box is not None:
                what = f"the optimizer's state {one.kind} of {one.param} can't be divided among its experts"
                raise UnsupportedCheckpoint.at("experts", what, "leave out experts, so that layers are saved whole")
            for name in self._names[one.param]:
                piece = self._pieces[name]
                begin, end = max(one.begin, piece.begin), min(one.begin + one.tensor.numel(), piece.end)
                if begin < end:
                    yield LiveShard(
                        name, one.kind, begin - piece.begin, one.tensor[begin - one.begin : end - one.begin]
                    )


logger = logging.getLogger("llmtailor.saving")
Names = dict[str, tuple[SavedAs, ...]]


def is_adapted(model: Any) -> bool:
    """Return whether PEFT wraps the model. The Trainer then saves only the adapter, without frozen params."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def saved_adapter(model: Any) -> str:
    """Return the adapter of a model wrapped by PEFT whose files a composite has."""
    return "default" if "default" in model.peft_config else str(next(iter(model.peft_config)))


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
    """Return what PEFT saves of an adapter, None unless it saves each trained param once and no others."""
    from peft import get_peft_model_state_dict

    adapter = saved_adapter(model)
    converted = _convert(model, lambda: get_peft_model_state_dict(model, dict(named), adapter_name=adapter))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The parts of a model under training, their sizes and names on disk."""

    structure: ModelStructure
    params_of: Mapping[Part, tuple[str, ...]]
    """Part -> its trained params, or pieces of params (`ModelStructure.pieces`); parts without any are left out."""
    num_bytes: Mapping[str, int]
    """Part -> bytes of its states, over all ranks"""
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None
    """Param -> the tensors that ``save_pretrained`` would make from it; None if unknown"""
    always: Mapping[Part, str] = field(default_factory=dict)
    """Parts that every save holds, and why: what shares memory must be of one step"""

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self.params_of)

    @property
    def part_of(self) -> dict[str, Part]:
        return {name: part for part, names in self.params_of.items() for name in names}

    def names_in(self, parts: Iterable[Part]) -> list[str]:
        """Return the trained params, or pieces of params, of some parts."""
        return [name for part in parts for name in self.params_of[part]]


def find_trained_parts(training: Training, ranks: Ranks, experts: str | None) -> tuple[TrainedModel, Training]:
    """Return the parts of a model, by its names and its config, with their sizes, and the training with params or
    pieces of params as these parts have them. All ranks call it.

    ``experts`` is that of `SavingOptions`.
    """
    structure, params_of = _find_parts(training.model, training.params, training.tied, experts)
    names = saved_names(training.model, training.params, training.tied)
    shared = {name: other for one in ranks.all_gather({**training.inventory.shared}) for name, other in one.items()}
    always = {
        part: f"{name} shares memory with {shared[name]}"
        for part, params in params_of.items()
        for name in map(structure.stored_in, params)
        if name in shared
    }
    if structure.pieces:
        training = cast(Training, _InPieces(training, structure))
    return weigh(
        TrainedModel(structure=structure, params_of=params_of, num_bytes={}, saved_as=names, always=always),
        training,
        ranks,
    ), training


def weigh(model: TrainedModel, training: Training, ranks: Ranks) -> TrainedModel:
    """Return the model with the sizes of its parts; before the optimizer's first step, an estimate for AdamW."""
    part_of = model.part_of

    def weigh_mine() -> dict[str, int]:
        mine: dict[str, int] = dict.fromkeys(model.params_of, 0)
        has_state = training.has_state()
        for one in training.fragments(list(part_of)) if has_state else training.masters():
            mine[part_of[one.param]] += one.tensor.numel() * one.tensor.element_size() * (1 if has_state else 3)
        return mine

    results = ranks.run_on_all(weigh_mine)
    return replace(model, num_bytes={part: sum(one[part] for one in results) for part in model.params_of})


_NEAR = 0.1
_FEW = 16
"""Relative distance"""


def copies_of_weights(training: Training, params: Collection[str], ranks: Ranks) -> list[str]:
    """Return the kinds of state that have the names of moments but, by a sample, values near those of the weights.

    All ranks call it. Such a kind is a copy of the weights, as some optimizers keep for params in bf16, maybe of some
    params only.
    """

    def measure_mine() -> dict[tuple[str, str], tuple[float, float]]:
        sums: dict[tuple[str, str], tuple[float, float]] = {}
        masters: dict[tuple[str, int], torch.Tensor] = {}
        for fragment in training.fragments(params):
            place, values = (fragment.param, fragment.begin), _sample(fragment.tensor).float()
            if fragment.kind == MASTER:
                masters[place] = values
            elif is_moment(fragment.kind) and fragment.shape is None and fragment.tensor.is_floating_point():
                weights = masters[place]
                squares = torch.stack([(values - weights).square().sum(), weights.square().sum()]).tolist()
                # of all params together, and of each that has enough elements not to be near by chance
                for whose in ("", fragment.param) if values.numel() >= _FEW else ("",):
                    apart, size = sums.get((fragment.kind, whose), (0.0, 0.0))
                    sums[fragment.kind, whose] = apart + squares[0], size + squares[1]
        return sums

    measured = ranks.run_on_all(measure_mine)
    total = {
        key: [sum(own[key][at] for own in measured if key in own) for at in (0, 1)] for own in measured for key in own
    }
    return sorted({kind for (kind, _), (apart, size) in total.items() if apart < _NEAR**2 * size})


def check_before_training(model: Any, policy: Policy, max_staleness: int | None, experts: str | None) -> None:
    """Check a policy for a model whose optimizer does not exist yet. Raises what `check_policy` raises."""
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    inventory = Inventory.of(model, [trained])
    facts = inventory.params
    structure, params_of = _find_parts(model, facts, inventory.tied, experts)
    numels = {name: math.prod(fact.shape) for name, fact in facts.items()}
    numels |= {name: piece.numel for name, piece in structure.pieces.items()}
    num_bytes: dict[str, int] = {
        part: sum(_BYTES_PER_PARAM * numels[name] for name in names) for part, names in params_of.items()
    }
    check_policy(policy, structure, tuple(params_of), num_bytes, max_staleness)


def _find_parts(
    model: Any, facts: Mapping[str, ParamFact], tied: Mapping[str, str], experts: str | None
) -> tuple[ModelStructure, dict[Part, tuple[str, ...]]]:
    numels = {name: math.prod(fact.shape) for name, fact in facts.items()}
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None
    structure = find_parts([*facts, *tied], dict(tied), numels, known)
    if experts:
        shapes = {name: fact.shape if fact.role != "buffer" else () for name, fact in facts.items()}
        structure = split_experts(structure, {**dict.fromkeys(tied, ()), **shapes})
    trained = {name for name, fact in facts.items() if fact.role == "trainable"}
    names_of: dict[Part, list[str]] = {part: [] for part in structure.parts}
    for name, part in structure.part_of.items():
        if structure.stored_in(name) in trained:
            names_of[part].append(name)
    return structure, {part: tuple(names) for part, names in names_of.items() if names}


STRIDES = (3, 7, 13, 31, 61, 127, 251, 509, 1021)
"""Primes, so that a sample has elements of all columns of a matrix"""
LEAST = 1024
"""A sample has at least this number of elements. It has few more up to the largest stride, because each costs a read
from memory."""
WHOLE = 4096
"""Fragments with at most this number of elements are kept whole."""


Sums = dict[str, tuple[float, float, float]]
"""Part -> the sum of squares of its change, that of its size, and its expected loss"""
Samples = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartChanges:
    """What was measured of the parts since each was last saved."""

    drift: Mapping[str, float] = field(default_factory=dict)
    """Part -> |w - saved| / |saved|"""
    expected_loss: Mapping[str, float] = field(default_factory=dict)
    """Part -> see `policies.Situation`"""


def change_of(ranks: Sequence[Sums]) -> PartChanges:
    """Return the change of every recorded part from the sums of all ranks.

    Without ``exp_avg_sq`` (Lion), the relative change stands for the expected loss.
    """
    drift, expected = {}, {}
    for part in sorted({part for sums in ranks for part in sums}):
        sums = [one.get(part, (0.0, 0.0, 0.0)) for one in ranks]
        moved, size, weighed = (math.fsum(one[at] for one in sums) for at in range(3))
        drift[part] = math.sqrt(moved / size) if size else math.inf if moved else 0.0
        expected[part] = weighed
    if not any(expected.values()):
        expected = dict(drift)
    return PartChanges(drift, expected)


class Drift:
    """Measures, from a sample, how far each part has moved since it was last saved, and what that means for the loss.

    A sample of each rank's masters is kept in fp32, on the same device: at least `LEAST` elements of each fragment, one
    in 1021 of large ones. Small fragments are kept whole.

    If the weights w of a part are replaced by saved ones, the loss changes by about ``sum(g * (saved - w))``, where g
    are gradients. These change from batch to batch, so ``sum(sqrt(exp_avg_sq) * |w - saved|)`` is measured instead:
    Adam's debiased ``exp_avg_sq`` is the mean of their squares. benchmarks/fidelity.md compares it with other measures.
    """

    def __init__(self, part_of: Mapping[str, str]) -> None:
        self.part_of = part_of
        self._kept: Samples = {}

    def samples(self, masters: Iterable[LiveShard], parts: Iterable[Part]) -> Samples:
        """Return samples of the masters of these parts."""
        wanted = set(parts)
        return {
            (one.param, one.begin): _sample(one.tensor).float().clone()
            for one in masters
            if self.part_of[one.param] in wanted
        }

    def remember(self, samples: Samples) -> None:
        """Record what was sampled as saved."""
        self._kept.update(samples)

    def kept(self) -> Samples:
        """Return what is recorded, for `restore`."""
        return dict(self._kept)

    def restore(self, samples: Samples) -> None:
        """Return to an earlier record: what was saved since has failed."""
        self._kept = dict(samples)

    def sums(self, fragments: Iterable[LiveShard], correction: float) -> Sums:
        """Return this rank's part of the measurement, for each recorded part.

        Args:
            fragments: masters and moments of the trained params, as `Training.fragments` yields them.
            correction: what ``exp_avg_sq`` is divided by; see `bias_correction`.
        """
        mine: Sums = {}
        for param, found in self._squares(fragments):
            before = mine.get(self.part_of[param], (0.0, 0.0, 0.0))
            moved, size, weighed = (one + other for one, other in zip(before, found, strict=True))
            mine[self.part_of[param]] = moved, size, weighed
        return {part: (moved, size, weighed / math.sqrt(correction)) for part, (moved, size, weighed) in mine.items()}

    def _squares(self, fragments: Iterable[LiveShard]) -> Iterator[tuple[str, list[float]]]:
        found_at: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        for one in fragments:
            if one.kind in (MASTER, EXP_AVG_SQ) and one.shape is None:
                found_at.setdefault((one.param, one.begin), {})[one.kind] = one.tensor
        known = [(at, states) for at, states in found_at.items() if at in self._kept]
        by_device: dict[torch.device, list[tuple[tuple[str, int], dict[str, torch.Tensor]]]] = {}
        for at, states in known:
            by_device.setdefault(self._kept[at].device, []).append((at, states))
        for own in by_device.values():
            kept = [self._kept[at] for at, _ in own]
            masters = [_sample(states[MASTER]).float() for _, states in own]
            squares = [states.get(EXP_AVG_SQ) for _, states in own]
            roots = torch._foreach_sqrt(
                [
                    torch.zeros_like(old) if one is None else _sample(one).float()
                    for old, one in zip(kept, squares, strict=True)
                ]
            )
            change = torch._foreach_sub(masters, kept)
            norms = [torch._foreach_norm(change), torch._foreach_norm(kept)]
            norms.append(torch._foreach_norm(torch._foreach_mul(roots, change), 1))
            # one transfer, because each waits for all work of the device
            moved, size, weighed = torch.stack([torch.stack(of_kind) for of_kind in norms]).tolist()
            for number, (at, states) in enumerate(own):
                every = states[MASTER].numel() / max(1, kept[number].numel())  # elements per sampled one
                yield at[0], [moved[number] ** 2 * every, size[number] ** 2 * every, weighed[number] * every]


def bias_correction(optimizers: Iterable[Any]) -> float:
    """Return ``1 - beta2**step``, Adam's bias correction of ``exp_avg_sq``; 1 for another optimizer.

    Of several params the first one's step: on a GPU, each that is read is a transfer.
    """
    for optimizer in optimizers:
        # under ZeRO-3, groups do not list what the states belong to
        states = chain(optimizer.state.values(), optimizer.param_groups)
        step = next((float(one["step"]) for one in states if "step" in one), 0.0)
        betas = next((group["betas"] for group in optimizer.param_groups if len(group.get("betas", ())) == 2), None)
        if step and betas:
            return 1.0 - math.pow(betas[1], step)
    return 1.0


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numel = tensor.numel()
    return tensor if numel <= WHOLE else tensor[:: max(one for one in STRIDES if one * LEAST <= numel)]
