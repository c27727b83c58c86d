"""The names of params behind the ids of ``optimizer.pt``, and whether optimizer, weights and model fit.

If the param groups list names, these are used. Otherwise the params of each group must be in the order of the model,
frozen ones left out, in one group (``AdamW(model.parameters())``) or in the Trainer's own two: params with weight
decay, then those without. Shapes are compared id by id.

Only the model's code defines that order: ``optimizer.pt`` has bare ids, and safetensors are sorted by name. So
transformers builds the model from config.json on the meta device, in a separate process, and reports names, shapes,
ties, which params decay, and what ``save_pretrained`` makes of them: transformers 5 saves some families under other
names, and experts one by one. Code that comes with a checkpoint is never run (trust_remote_code is never given).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Bundled, Contiguous
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.errors import (
    COPY_CHECKPOINT,
    PathIn,
    Problem,
    SourceError,
    StorageError,
    Unanswered,
    UnsupportedCheckpoint,
    some,
)
from llmtailor.formats.torch_optimizer import SavedOptimizer
from llmtailor.frameworks.files import CONFIG
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.parts import Param, SavedAs
from llmtailor.storage.local import read_source, replace_durably
from llmtailor.timing import time_limit, too_slow

TIMEOUT_S = 300
WAITING = logging.getLogger("llmtailor.waiting")
"""Says what takes seconds although little is to be done"""
_MAX_ANSWER_BYTES = 64 << 20
_IRRELEVANT = re.compile(r"(torch_)?dtype|transformers_version|_name_or_path|auto_map|.*_implementation(_internal)?")
"""Keys of config.json that do not affect the model's params. ``attn_implementation`` may name a kernel to be
loaded from the Hub, and ``auto_map`` code."""
MAX_DATA_BYTES = 4 << 30
"""Memory limit of the process; a model without its tensors' data takes a few hundred MB."""
_NAME_THEM = (
    "train with the params' names in the param groups: give the optimizer model.named_parameters(), or each group a "
    "key lt_params beside params"
)

_PROGRAM = r"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
sys.path[:] = [path for path in sys.path if path]  # nothing from the current folder
import json, re
import torch, transformers

folder = sys.argv[1]
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
names = getattr(config, "architectures", None) or []
kinds = [getattr(transformers, name, None) for name in names]
if not names and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # of a model that was never saved or loaded
    kinds = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]]
kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
if not kinds:
    raise ValueError(f"this transformers ({transformers.__version__}) has no model class {', '.join(names) or '?'}")
with torch.device("meta"):
    model = kinds[0](config)
model.tie_weights()

# the rule of transformers 5.23's Trainer.get_decay_parameter_names
patterns = [re.compile(p) for p in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")]
layer_norms = tuple(n + "." for n, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm))
def decays(name):
    return not name.startswith(layer_norms) and not any(p.search(name.lower()) for p in patterns)

params, first, tied = [], {}, {}
for name, param in model.named_parameters(remove_duplicate=False):
    if id(param) in first:
        tied[name] = first[id(param)]
    else:
        first[id(param)] = name
        params.append([name, list(param.shape), decays(name)])
known = set(tied) | {name for name, _, _ in params}
buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in known}

# tensors on disk are views of the tensors in memory, but for copies of what is contiguous anyway
empty = {name: torch.empty_like(model.get_parameter(name)) for name, *_ in params}
empty |= {name: torch.empty_like(tensor) for name, tensor in buffers.items()}
owner = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
torch.Tensor.contiguous = torch.Tensor.clone = lambda self, *args, **kwargs: self
saved_as = {name: [] for name in empty}
try:
    with torch.no_grad():
        converted = transformers.core_model_loading.revert_weight_conversion(model, dict(empty))
except Exception:  # a model's conversion may raise anything; before version 5 nothing was converted
    converted = empty
for name, tensor in converted.items():
    if tensor.is_contiguous() and (of := owner.get(tensor.untyped_storage()._cdata)):
        saved_as[of].append([name, list(tensor.shape), tensor.storage_offset()])
plan = getattr(model, "_tp_plan", None) or {}
print()
print(json.dumps({"params": params, "tied": tied, "buffers": [*buffers], "tp_plan": plan, "saved_as": saved_as}))
"""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts, according to its code."""

    params: Mapping[str, tuple[int, ...]]
    """Shapes, in the order of ``named_parameters()``; a tied param is listed under its first name"""
    decaying: frozenset[str]
    """Params that the Trainer puts into the group with weight decay"""
    tied: Mapping[str, str]
    """Tied name -> the name its values are stored under"""
    buffers: frozenset[str]
    """Names of persistent buffers"""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """Module, with ``*`` for numbers -> how tensor parallelism cuts it in transformers"""
    saved_as: Mapping[str, tuple[SavedAs, ...]] = field(default_factory=dict)
    """Param or buffer -> the tensors that ``save_pretrained`` makes of it, as far as each is made of one"""


_live: ContextVar[ModelFacts | None] = ContextVar("_live", default=None)


@contextmanager
def known_model(facts: ModelFacts) -> Iterator[None]:
    """Within it, checkpoints are of a model that is at hand, so transformers need not build it."""
    token = _live.set(facts)
    try:
        yield
    finally:
        _live.reset(token)


def knows_model(root: Path) -> bool:
    """Return whether `describe_model` can be asked about a checkpoint."""
    return _live.get() is not None or (root / CONFIG).exists()


def describe_model(root: Path, where: str, *, is_named: bool = False) -> ModelFacts:
    """Return the facts of a checkpoint's model; takes seconds the first time, no time for the same config again.

    ``is_named``: the checkpoint names its params already, so that only their order is asked for.

    Raises UnsupportedCheckpoint if transformers can't build it, and Unanswered if it timed out or was killed.
    Neither says anything about the checkpoint.
    """
    if (facts := _live.get()) is not None:
        return facts
    if not (root / CONFIG).exists():
        what = "the file is missing; nothing else states the params' order"
        fix = "copy it back, or put it there with model.config.save_pretrained()"
        raise UnsupportedCheckpoint.at(PathIn(where, CONFIG), what, fix if is_named else f"{fix}; or {_NAME_THEM}")
    return describe_config(read_json(root / CONFIG, PathIn(where, CONFIG)), PathIn(where, CONFIG))


def describe_config(config: Mapping[str, Any], where: str) -> ModelFacts:
    """Return the facts of the model of a config.json, which ``where`` names; see `describe_model`."""
    text = json.dumps(_relevant(config), sort_keys=True)
    try:
        facts = _describe(text)
    except subprocess.TimeoutExpired as error:
        raise too_slow(where, "building the model in transformers", error.timeout) from error
    except OSError as error:
        what = f"can't run transformers to build the model: {error.strerror or error}"
        raise Unanswered.at(error.filename or tempfile.gettempdir(), what, "check the disk and the memory") from error
    if isinstance(facts, str):
        fix = f"install a transformers that knows this model, or {_NAME_THEM}"
        raise UnsupportedCheckpoint.at(where, f"transformers can't build the model: {facts}", fix)
    return facts


def _relevant(value: Any) -> Any:
    """Return a config without irrelevant keys, including the configs of submodels."""
    if isinstance(value, dict):
        return {key: _relevant(inner) for key, inner in value.items() if not _IRRELEVANT.fullmatch(key)}
    return [_relevant(inner) for inner in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=64)
def _describe(config: str) -> ModelFacts | str:
    """Return the facts, or why there are none. Raises TimeoutExpired or OSError if there is no answer."""
    path = _place_of_answer(config)
    with suppress(SourceError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if path is not None:
            return _facts(read_source(path, path.name, _MAX_ANSWER_BYTES).decode())
    WAITING.info("building the model of %s in transformers, to know the order of its params", CONFIG)
    answer, is_known = _ask_transformers(config)
    if not is_known:
        return answer
    facts = _facts(answer)
    if path is not None:
        with suppress(OSError, StorageError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(path, answer.encode())
    return facts


def _place_of_answer(config: str) -> Path | None:
    """Return the file in the user's cache folder for the answer of the installed versions; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # imports more than the rest of a merge

    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llmtailor", "models")
        about = [version("transformers"), version("torch"), _PROGRAM, config]
    except (PackageNotFoundError, RuntimeError):
        return None
    return folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.json"


def _ask_transformers(config: str) -> tuple[str, bool]:
    """Return what `_PROGRAM` prints, or why it failed, and which of the two it is."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as folder:
        Path(folder, CONFIG).write_text(config)
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, folder, str(MAX_DATA_BYTES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=time_limit(TIMEOUT_S),
            env=environment,
            cwd=folder,
        )
    if done.returncode < 0:
        raise OSError(0, f"the process was killed by signal {-done.returncode}")
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode or not lines:
        failed = f"the process ended with {done.returncode}"
        return (lines[-1].replace(folder, "the checkpoint") if lines else failed), False
    return lines[-1], True


def _facts(answer: str) -> ModelFacts:
    found = json.loads(answer)
    return ModelFacts(
        params={name: tuple(shape) for name, shape, _ in found["params"]},
        decaying=frozenset(name for name, _, decays in found["params"] if decays),
        tied=found["tied"],
        buffers=frozenset(found["buffers"]),
        tp_plan=found["tp_plan"],
        saved_as={
            name: tuple(SavedAs(key, tuple(shape), begin) for key, shape, begin in made)
            for name, made in found["saved_as"].items()
        },
    )


_OTHER_RUN = "use the optimizer.pt and the config.json of the same save"
_LIST_NAMES = f"{_NAME_THEM}; without names, only one group, or the Trainer's own two, can be read"
_SHOWN = 5
_Shapes = Mapping[str, tuple[int, ...]]
_Shape = tuple[int, ...] | None
"""None for that of a param that has no state yet: any will do"""


def has_names(saved: SavedOptimizer) -> bool:
    """Return whether every group lists the names of its params."""
    return all(group.names is not None or not group.ids for group in saved.groups)


def listed_names(saved: SavedOptimizer, where: str) -> tuple[tuple[str, ...], ...]:
    """Return the names that the groups list. Raises SourceError for duplicates."""
    groups = tuple(group.names or () for group in saved.groups)
    listed = Counter(name for group in groups for name in group)
    if twice := sorted(name for name, count in listed.items() if count > 1):
        raise SourceError.at(where, f"the param groups list {', '.join(twice[:_SHOWN])} twice", _OTHER_RUN)
    return groups


def derived_names(saved: SavedOptimizer, model: ModelFacts, where: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the params of each group by the order of the model, and the Trainer's rule for two groups.

    Raises SourceError for every shape that does not fit, and UnsupportedCheckpoint if the names are ambiguous: for
    other groups, or if frozen params allow more than one way to name the ids.
    """
    is_one = len(saved.groups) == 1
    if not is_one and (len(saved.groups) != 2 or saved.groups[1].hyper.get("weight_decay") != 0):
        what = f"it has {len(saved.groups)} param groups without names, and they are not the Trainer's two"
        raise UnsupportedCheckpoint.at(where, what, _LIST_NAMES)
    problems: list[Problem] = []
    groups = []
    for number, group in enumerate(saved.groups):
        names = [name for name in model.params if is_one or (name in model.decaying) == (number == 0)]
        shapes = [saved.shape(param) for param in group.ids]
        if len(shapes) > len(names):
            what = f"group {number} has {len(shapes)} ids, but the model has {len(names)} such params"
            problems.append(Problem(where, what, _OTHER_RUN))
        elif len(shapes) == len(names):
            problems += compare_shapes(group.ids, shapes, names, model.params, where)
            groups.append(tuple(names))
        elif chosen := _without_frozen(number, shapes, names, model.params, where):
            groups.append(chosen)
        else:
            what = f"the shapes of group {number}'s {len(shapes)} states do not fit the model's {len(names)} params"
            problems.append(Problem(where, what, _OTHER_RUN))
    sizes = [len(group.ids) for group in saved.groups]
    trainers = [sum((name in model.decaying) == (number == 0) for name in model.params) for number in range(len(sizes))]
    if not is_one and sizes != trainers and sum(sizes) == sum(trainers):
        what = f"its two param groups without names have {sizes[0]} and {sizes[1]} params, and the Trainer's have"
        raise UnsupportedCheckpoint.at(where, f"{what} {trainers[0]} and {trainers[1]}", _LIST_NAMES)
    if problems:
        raise SourceError(problems)
    return tuple(groups)


def compare_shapes(
    ids: Sequence[int], shapes: Sequence[_Shape], names: Sequence[str], wanted: _Shapes, where: str
) -> list[Problem]:
    """Return a problem for every id whose state's shape differs from its param's."""
    return [
        Problem(where, f"the state of id {number} has shape {list(shape)}, {name} has {list(wanted[name])}", _OTHER_RUN)
        for number, shape, name in zip(ids, shapes, names, strict=True)
        if shape is not None and shape != wanted[name]
    ]


def _without_frozen(
    group: int, shapes: Sequence[_Shape], names: Sequence[str], params: _Shapes, where: str
) -> tuple[str, ...] | None:
    """Return the names of fewer ids than the model has params: others are frozen; the shapes must be unambiguous.

    If matching each id as early and as late as possible gives the same result, it is the only one. None if there is
    none.
    """
    available = [params[name] for name in names]
    early, late = _match(shapes, available), _match(shapes[::-1], available[::-1])
    if early is None or late is None:
        return None
    if early != [len(names) - 1 - at for at in reversed(late)]:
        frozen = "some are frozen, or their ids missing, and the shapes do not show which"
        what = f"group {group} has {len(shapes)} ids for {len(names)} params; {frozen}"
        raise UnsupportedCheckpoint.at(where, what, _LIST_NAMES)
    return tuple(names[at] for at in early)


def _match(wanted: Sequence[_Shape], available: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the earliest positions of ``wanted`` in ``available``, in order; None if it is not contained."""
    found: list[int] = []
    for at, shape in enumerate(available):
        if len(found) < len(wanted) and wanted[len(found)] in (None, shape):
            found.append(at)
    return found if len(found) == len(wanted) else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The known params and buffers of the model."""

    params: Mapping[str, Param]
    tied: Mapping[str, str]
    weights: Mapping[str, TensorEntry]
    """Each param's weight, which may have another name on disk, or be several tensors there"""
    unclear: frozenset[str]
    """Those that are taken for frozen params, but may be buffers: the model is unknown, or does not have them"""


def fit(
    groups: tuple[tuple[str, ...], ...],
    optimizer: SavedOptimizer,
    held: Mapping[str, TensorEntry],
    model: ModelFacts | None,
    where: PathIn,
    *,
    listed: Collection[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Fitted:
    """Return the params with their roles. ``held`` are the weights, ``where`` is the optimizer's file; the weight files
    list the buffers ``listed``, and ``aliases``, names for tensors that they hold under other names.

    Raises SourceError if optimizer, weights and model do not fit together.
    """
    name, trainable = where.checkpoint, {param: None for group in groups for param in group}
    ids = [number for group in optimizer.groups for number in group.ids]
    shapes = [optimizer.shape(number) for number in ids]
    ties = {**aliases, **{stored: name for name, stored in aliases.items()}, **(model.tied if model else {})}
    weights = _under_own_names(held, {*trainable, *(model.params if model else ())}, ties, model)
    others = [weight for weight in weights if weight not in trainable and not (model and weight in model.tied)]
    if model and all(param in model.params for param in trainable):
        roles = _roles_in_model(model, weights, others, listed)
    else:
        roles = _roles_by_names(dict(zip(trainable, shapes, strict=True)), weights, others, listed, model, ties)
    problems = compare_shapes(ids, shapes, list(trainable), roles.shapes, where)
    problems += _odd_weights(roles, weights, trainable, name)
    lacking = {param: shape for param, shape in roles.shapes.items() if param not in weights}
    # what may be the missing ones under other names
    extra = {
        other: weights[other].shape
        for other in others
        if (other not in roles.shapes or (lacking and other not in roles.buffers))
        and not (model and other in model.params)
    }
    if lacking and _numel(lacking) != _numel(extra):
        what = f"the weights of {some(lacking)} are missing; a resume would keep their initial values"
        problems.append(Problem(name, what, COPY_CHECKPOINT))
    if problems:
        raise SourceError(problems)
    entries = {param: weights[param] for param in roles.shapes if param in weights}
    if len(lacking) == 1 and [*lacking.values()] == [*extra.values()]:
        entries |= {param: weights[weight] for param, weight in zip(lacking, extra, strict=True)}
    params = {param: Param(param, shape, roles.role(param, trainable)) for param, shape in roles.shapes.items()}
    known = model.params if model else {}
    unclear = frozenset(name for name, param in params.items() if param.role == "frozen" and name not in known)
    return Fitted(params, roles.tied, entries, unclear)


def _under_own_names(
    held: Mapping[str, TensorEntry], own: Collection[str], ties: Mapping[str, str], model: ModelFacts | None
) -> dict[str, TensorEntry]:
    """Return the weights by the params' names: a tied one may be stored under any of its names, others in pieces."""
    by_alias = {
        name: alias
        for alias, name in ties.items()
        if name in own and name not in held and alias in held and alias not in own
    }
    moved = {name: held[alias] for name, alias in by_alias.items()}
    weights = {name: entry for name, entry in held.items() if name not in by_alias.values()} | moved
    joined, used = _saved_otherwise(model, weights) if model else ({}, set[str]())
    return {weight: entry for weight, entry in weights.items() if weight not in used} | joined


class _Roles(NamedTuple):
    shapes: Mapping[str, tuple[int, ...]]
    """Of all params and buffers"""
    buffers: Collection[str]
    tied: Mapping[str, str]

    def role(self, param: str, trainable: Container[str]) -> str:
        return "trainable" if param in trainable else "buffer" if param in self.buffers else "frozen"


def _roles_in_model(
    model: ModelFacts, weights: Mapping[str, TensorEntry], others: Sequence[str], listed: Collection[str]
) -> _Roles:
    buffers = {buffer for buffer in others if buffer in model.buffers or buffer in listed}
    if model.params.keys() <= weights.keys():  # the rest are modules that the config does not describe
        buffers |= {name for name in others if name not in model.params and _is_integer(weights[name])}
        added = others
    else:  # or other names of the params that are missing
        added = [name for name in others if name in buffers]
    return _Roles({**model.params, **{name: weights[name].shape for name in added}}, buffers, model.tied)


def _roles_by_names(
    trained: Mapping[str, _Shape],
    weights: Mapping[str, TensorEntry],
    others: Sequence[str],
    listed: Collection[str],
    model: ModelFacts | None,
    ties: Mapping[str, str],
) -> _Roles:
    """Return those of a custom model, known by the names in the param groups."""
    of_weights = {name: entry.shape for name, entry in weights.items()}
    known = {param: shape or of_weights.get(param, ()) for param, shape in trained.items()}
    shapes = {**known, **{other: of_weights[other] for other in others}}
    buffers = {other for other in others if _is_integer(weights[other])} | set(listed)
    own = {*trained, *(model.params if model else ())}
    tied = {name: stored for name, stored in model.tied.items() if stored in shapes} if model else {}
    return _Roles(shapes, buffers, tied | {name: of for name, of in ties.items() if of in own and name not in own})


def _odd_weights(
    roles: _Roles, weights: Mapping[str, TensorEntry], trainable: Container[str], name: str
) -> Iterator[Problem]:
    for param, shape in roles.shapes.items():
        if param in weights and weights[param].shape != shape:
            what = f"the weight {param} has shape {list(weights[param].shape)} instead of {list(shape)}"
            yield Problem(name, what, COPY_CHECKPOINT)
    for param, entry in weights.items():
        if param in trainable and _is_integer(entry):
            what = f"the weight {param} is {entry.dtype}, not floating-point"
            yield Problem(name, what, COPY_CHECKPOINT, Code.WEIGHTS_DTYPE)


def _saved_otherwise(model: ModelFacts, weights: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], set[str]]:
    """Return the params that the files hold under other names, or in pieces, and these names."""
    found, used = dict[str, TensorEntry](), set[str]()
    for name, pieces in model.saved_as.items():
        held = [weights.get(piece.name) for piece in pieces]
        if name in weights or not pieces or any(one is None for one in held):
            continue
        shape = model.params.get(name, pieces[0].shape)
        listed = sorted((piece.begin, one) for piece, one in zip(pieces, held, strict=True) if one is not None)
        cuts = [*accumulate((one.numel for _, one in listed), initial=0)]
        extents = [place.extent for _, one in listed if isinstance(place := one.place, Contiguous)]
        is_whole = [begin for begin, _ in listed] == cuts[:-1] and cuts[-1] == math.prod(shape)
        if is_whole and len(extents) == len(listed) and len(dtypes := {one.dtype for _, one in listed}) == 1:
            [dtype] = dtypes
            paths, starts = zip(*((extent.path, extent.start) for extent in extents), strict=True)
            found[name] = TensorEntry(dtype, shape, Bundled(paths, starts, cuts, ITEMSIZE[dtype]))
            used |= {piece.name for piece in pieces}
    return found, used


def _is_integer(held: TensorEntry) -> bool:
    return held.dtype not in FLOATING


def _numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
