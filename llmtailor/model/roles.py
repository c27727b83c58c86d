"""Tensor names as paths in the module tree, the modules with a role (embeddings, final norm, head), and `State`.

The first integer in a name is a layer number; the path before it is a *stack*::

    model.language_model.layers . 3 . self_attn.q_proj.weight
    stack                         |   inside the layer
                                  number

Wrapper modules (``model``, ``language_model``, PEFT's ``base_model`` ...) mean nothing here and differ between memory
and disk: transformers keeps ``model.language_model.layers`` in memory and writes ``language_model.model.layers`` or
``model.layers`` to the safetensors file. So modules are compared by their *key*, the path without wrappers, which makes
both spellings of a layer the same part.

Roles come from mergekit's data, or else are guessed from module names. A `State` is one kind of data of one param, the
unit that recipes select and plans move.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmtailor.model.parts import EMBED, HEAD, NORM, ModelStructure, Part, layer_part

Key = tuple[str, ...]
"""A module path without wrappers."""

WRAPPERS = frozenset({"model", "language_model", "base_model", "module", "_orig_mod", "_fsdp_wrapped_module"})

# The maximum number of digits of a layer number; a hostile file may have longer ones.
NUMBER = re.compile(r"[0-9]{1,6}")

# PEFT puts the original module and its own tensors below the module that they replace.
ADAPTER = re.compile(r"base_layer|original_module|modules_to_save|lora_.*|ia3_.*|token_adapter")

# Stacks other than the decoder: towers of other modalities, encoders, heads for multi-token prediction.
ASIDE = re.compile(
    r"vision|visual|image|video|audio|speech|encoder|talker|wav|mtp|nextn|draft|medusa|eagle"
    r"|projector|merger|resampler|perceiver|^vit$"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in the module tree."""

    name: str
    module: Key
    """Key of its module, or of its stack for a tensor in a stack"""
    number: int | None
    """The layer's number, for a tensor in a stack"""
    depth: int
    """Names below the number: more than one in a transformer's layer, which has modules of its own"""
    path: Key
    """Key of the module that directly holds the tensor, numbers included"""


def place_of(name: str) -> Place:
    """Return the place that a tensor name describes."""
    components = name.split(".")
    modules = components[:-1]
    cut = next((at for at, word in enumerate(modules) if ADAPTER.fullmatch(word)), len(modules))
    for at, word in enumerate(components[:cut] if cut < len(modules) else components):
        if NUMBER.fullmatch(word):
            path = key_of(components[: max(cut, at + 1)])
            return Place(name, key_of(components[:at]), int(word), len(components) - at - 1, path)
    # A bare param of the model itself (image_newline) is its own module.
    module = key_of(modules[:cut]) or (components[-1],)
    return Place(name, module, None, 0, module)


def key_of(path: Iterable[str]) -> Key:
    """Return a path without wrappers."""
    return tuple(word for word in path if word not in WRAPPERS)


def is_aside(key: Key) -> bool:
    """Return whether a module is a tower, an encoder or an extra head, judging by its name."""
    return any(ASIDE.search(word) for word in key)


def stored_name(name: str, tied: Mapping[str, str]) -> str:
    """Return the name that a tensor's values are stored under; for a cycle of ties, one of its names."""
    seen = {name}
    while (target := tied.get(name)) is not None and target not in seen:
        seen.add(target)
        name = target
    return name


LAYER = "${layer_index}"
LAST = "${num_layers}"
"""Placeholders in a hint's names for a layer's number, and for the highest number of the stack"""


@dataclass(frozen=True, slots=True)
class ArchHints:
    """Names of the tensors that have a role in the text model, and the tensors of every submodel.

    The names need not occur in a model: optional tensors and other spellings are listed too.
    """

    stack: str | None
    """The path before a layer's number, e.g. ``model.layers``; None if the model has no layers."""
    embed: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Submodel -> its tensors; empty for a model without submodels."""


def undecided(structure: ModelStructure) -> bool:
    """Return whether names alone may have misled `find_parts_by_name`, or were not enough.

    This is the case if embeddings, final norm, output embeddings or layers were not found, or if there are layers
    outside the text model: what each stack is, and what belongs to it, is then a guess from names.
    """
    wanted = {EMBED, NORM, layer_part(0)} | (set() if structure.tied else {HEAD})
    numbered = {part for part in structure.parts if part.rpartition(".")[2].isdecimal()}
    # An nn.Sequential has numbers too, but its items are plain modules.
    has_other_stacks = any(part in numbered and place_of(name).depth > 1 for name, part in structure.part_of.items())
    return not wanted <= set(structure.parts) or has_other_stacks


# Names of the modules, the most specific first.
EMBED_WORDS = (
    "embed_tokens", "wte", "embed_in", "tok_embeddings", "word_embeddings", "word_embedding", "token_embedding",
    "embedding", "embeddings", "embed", "shared",
)  # fmt: skip
NORM_WORDS = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "ln_out", "layer_norm",
    "embedding_norm",  # LFM2's name for its last norm
)  # fmt: skip
RENAMED_HEAD = ("lm_head", "embed_out")
HEAD_WORDS = ("lm_head", "embed_out", "output_layer", "output", "head")


def find_stack(places: Iterable[Place], numels: Mapping[str, int], hints: ArchHints | None) -> Key | None:
    """Return the stack of the text decoder: of structured stacks that are no tower or extra head, the largest."""
    elements: dict[Key, int] = defaultdict(int)
    deep: set[Key] = set()
    for place in places:
        if place.number is not None:
            elements[place.module] += numels.get(place.name, 0)
            if place.depth > 1:
                deep.add(place.module)
    if not elements:
        return None
    if hints and hints.stack is not None and (hinted := place_of(f"{hints.stack}.0.weight").module) in elements:
        return hinted
    # An nn.Sequential of plain modules (a classifier, a projector) also has numbers, but its items have no modules.
    candidates = [key for key in elements if key in deep] or list(elements)
    candidates = [key for key in candidates if not is_aside(key)] or candidates
    return min(candidates, key=lambda key: (-elements[key], key))


def find_roles(
    stored: Mapping[str, str], places: Mapping[str, Place], around: Key, hints: ArchHints | None
) -> tuple[dict[Key, Part], bool]:
    """Return the part of each module with a role, by `Place.path`, and whether input and output embeddings are tied.

    `stored` maps names to the names that values are stored under, `places` has the places of both, and `around` is the
    path to the main stack. Hints decide the roles that they name and the model has; names decide the others.
    """
    # Stored names first: a role belongs to the module that holds the values, if one does.
    modules = list(dict.fromkeys(places[name].module for name in stored.values() if places[name].number is None))
    every = list(dict.fromkeys(place.module for place in places.values() if place.number is None))
    hinted = _hinted(stored, places, hints) if hints else {}

    embed = hinted.get(EMBED) or next(
        (found for keys in (modules, every) if (found := _find(EMBED_WORDS, keys, around, anywhere=True))), []
    )
    head = [key for key in hinted.get(HEAD, []) if key not in embed]
    head = head or _find(HEAD_WORDS, [key for key in every if key not in embed], around)
    norm = hinted.get(NORM) or [key for word in NORM_WORDS if (key := (*around, word)) in every][:1]
    holders = [{holder for name, holder in stored.items() if places[name].path in keys} for keys in (embed, head)]
    tied = not holders[0].isdisjoint(holders[1])

    roles = dict.fromkeys(norm, NORM)
    for key in head:
        roles[key] = EMBED if tied else HEAD
        # transformers calls GPT-NeoX's head lm_head in memory and embed_out on disk: one part under two names.
        if key[-1] in RENAMED_HEAD:
            roles.update({other: roles[key] for other in every if other[-1] in RENAMED_HEAD and other[:-1] == key[:-1]})
    roles.update(dict.fromkeys(embed, EMBED))
    return roles, tied


def _hinted(stored: Mapping[str, str], places: Mapping[str, Place], hints: ArchHints) -> dict[str, list[Key]]:
    """Return the modules in this model that have a role in the hints, and the ones that hold their values."""
    at: dict[Key, list[Key]] = defaultdict(list)
    last: dict[Key, int] = {}
    for name, holder in stored.items():
        place = places[name]
        at[place.path] += [place.path, places[holder].path]
        if place.number is not None:
            last[place.module] = max(place.number, last.get(place.module, 0))

    def paths(name: str) -> list[Key]:
        if LAST in name:
            name = name.replace(LAST, str(last.get(place_of(name.replace(LAST, "0")).module, "")))
        return at.get(place_of(name).path, [])

    listed = {EMBED: hints.embed, NORM: hints.norm, HEAD: hints.head}
    return {role: list(dict.fromkeys(path for name in names for path in paths(name))) for role, names in listed.items()}


def _find(words: Sequence[str], modules: Sequence[Key], around: Key, *, anywhere: bool = False) -> list[Key]:
    """Return the module with the most specific of these names, if any: next to the stack or above it, or else
    ``anywhere`` in the text model."""
    named = [key for key in modules if key[-1] in words]
    found = [key for key in named if around[: len(key) - 1] == key[:-1]]
    if anywhere and not found:
        found = [key for key in named if not is_aside(key)]
    return sorted(found, key=lambda key: (words.index(key[-1]), -len(key), key))[:1]


WEIGHT = "weight"
"""The param as stored in the safetensors file"""
MASTER = "master"
"""The fp32 copy that the optimizer updates."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
FROZEN = "frozen"
"""A frozen param as stored in ZeRO-3 model_states: sliced over the ranks, in the model's dtype"""
MODULE = "module"
"""A trainable param as stored in ZeRO-1/2 model_states: the rounded master. Not kept in an index; it is always made
from the master, so that the two agree."""
BUFFER = "buffer"
"""A persistent buffer as stored in the model_states: complete on every rank, and not always equal (running statistics
of local batches differ). So the state joins all ranks, in order: shape [world size, ...]."""

KIND_OF_ROLE = {"trainable": MASTER, "frozen": FROZEN, "buffer": BUFFER}
"""The role of a param -> the state whose values it has in training"""

ADAM_BYTES = 8.0
"""Per param: AdamW's exp_avg and exp_avg_sq in fp32"""
_NO_MOMENTS = frozenset((MASTER, WEIGHT, MODULE, FROZEN, BUFFER))


MOMENTS = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "sum", "prev", "step_size", "mean_square"),
        *("exp_avg_diff", "prev_grad"),  # Adan
        "mu_product",  # of NAdam's updates so far; elementwise for a param without dimensions
        *("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"),
        *("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2", "unorm_vec"),  # bitsandbytes
        *("m", "v", "vmean", "v_mean"),  # Adam-mini, and many of one file
    )
)
"""What optimizers keep of past gradients. From an earlier step than the master, it only changes the next updates. Any
other state may be a copy or a part of the weights: the masters of Transformer Engine, the slow weights of Lookahead,
``z`` of schedule-free optimizers, low bits of sums (optimi, AnyPrecisionAdamW, FlashAdamW)."""


def is_optimizer_state(kind: str) -> bool:
    """Return whether a kind of state is one of those that an optimizer keeps beside the master."""
    return kind not in _NO_MOMENTS


def is_moment(kind: str) -> bool:
    """Return whether this kind is a moment, which may come from another step than the master weight.

    Of a quantized state, ``kind`` names an inner tensor: ``exp_avg.codes``.
    """
    return kind.partition(".")[0] in MOMENTS


def is_tied_to_master(kind: str) -> bool:
    """Return whether this kind is a state of the optimizer that must be of the same step as the master weight."""
    return is_optimizer_state(kind) and not is_moment(kind)


class State(NamedTuple):  # which hashes several times faster than a dataclass
    """One kind of data of one param.

    ``kind`` is one of the constants above or, for optimizers with more elementwise state than
    AdamW, the optimizer's own name for it (``max_exp_avg_sq``).
    """

    param: str
    """Fully qualified name of the param"""
    kind: str
