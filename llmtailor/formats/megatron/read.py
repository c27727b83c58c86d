"""From checkpoints of Megatron-core, with its optimizer, to a `CheckpointIndex`. Checked against megatron-core 0.16.1.

::

    iter_0000010/
      .metadata, __R_N.distcp    a folder of torch.distributed.checkpoint: whole tensors by Megatron's names, and the
                                 states optimizer.state.{param, exp_avg, exp_avg_sq}.KEY of each, in fp32
      common.pt                  what is not sharded: param groups, iteration; of Megatron-LM also args, the scheduler
      metadata.json              {"sharded_backend": "torch_dist", ...}
      config.json                the model's, if somebody put it there: Megatron does not

This is the format ``fully_reshardable`` of the distributed optimizer; that of the optimizer without it says
``fp32_param`` instead of ``param``. `names` says which elements are which param.

What the names leave open, the number of query groups and the size of the vocabulary without padding, is in
``config.json`` or in the args. Param groups do not list their params: biases and vectors have no weight decay
(``wd_mult`` 0), and experts are in groups of their own under expert parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    MEGATRON,
    CheckpointIndex,
    Form,
    MegatronLayout,
    TensorEntry,
    TrainState,
)
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup
from llmtailor.checkpoint.placement import StridedRuns
from llmtailor.codes import Code
from llmtailor.containers.dcp import DATA_FILE, METADATA
from llmtailor.containers.json import as_dict, get, is_count, read_json, read_option, read_step
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.containers.unpickle import ALLOWED, Call, Global, globals_in
from llmtailor.errors import (
    COPY_CHECKPOINT,
    PathIn,
    Problem,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    attempt,
    some,
)
from llmtailor.findings import NOTE, Finding
from llmtailor.formats.dcp.folder import DcpCheckpoint, read_folder
from llmtailor.formats.format import Draft, usual_dtype
from llmtailor.formats.megatron.names import (
    EMBEDDING,
    HEAD,
    has_decay,
    is_expert,
    is_known,
    layer_shape,
    select,
)
from llmtailor.frameworks.files import BACKEND, COMMON, CONFIG, MANIFEST
from llmtailor.frameworks.read import file_fact
from llmtailor.model.parts import Param
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, State

KINDS = {"param": MASTER, "fp32_param": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
"""How Megatron names states -> their kinds"""
IDENTITY = ("wd_mult", "is_expert_parallel", "is_decoupled_lr")
OWN_OPTIONS = frozenset((*IDENTITY, "lr_mult", "default_config", "max_lr", "min_lr", "step", "params"))
"""Options of a param group that only Megatron has"""
SHARDING, RESHARDABLE = "param_state_sharding_type", "fully_reshardable"
NAMESPACE = Global("argparse", "Namespace")
_STATE = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\.")
_SAVE_WHOLE = (
    "resume the run once and save it with --dist-ckpt-optim-fully-reshardable "
    '(in code: metadata={"distrib_optim_sharding_type": "fully_reshardable"})'
)
_GIVE_CONFIG = f"put the model's {CONFIG} (of Hugging Face) into the folder"


def detects(root: Path) -> bool:
    """Return whether a folder is, or was, a checkpoint of Megatron-core."""
    if not (root / COMMON).is_file():
        return False
    names = [one.name for one in root.iterdir()]
    return BACKEND in names or METADATA in names or any(map(DATA_FILE.fullmatch, names))


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint; see `Reader`."""
    problems = Problems()
    if (root / BACKEND).is_file():
        where = PathIn(name, BACKEND)
        backend = read_json(root / BACKEND, where).get("sharded_backend")
        if backend != "torch_dist":
            what = f"it was saved as {backend!r:.40}"
            raise UnsupportedCheckpoint.at(where, what, "save it with --ckpt-format torch_dist")
    common = attempt(lambda: _read_common(root, PathIn(name, COMMON)), problems)
    folder = read_folder(root, "", name, problems, decodes=False)
    if common is None or folder is None:
        return Draft(problems)
    return attempt(lambda: _MegatronIndexing(root, name, folder, common, problems).draft(), problems) or Draft(problems)


def _read_common(root: Path, where: PathIn) -> Mapping[str, Any]:
    # its args name classes of Megatron, which nothing here needs
    return as_dict(read_torch_file(root, COMMON, where, any_names=True).tree, "the file", where)


def find_optimizers(common: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the optimizers, several of them if one is chained."""
    tree = get(common, "optimizer", dict, where)
    if "optimizer" in tree:
        return [tree]
    return [as_dict(one, "an optimizer", where) for key, one in tree.items() if isinstance(key, int)]


def identity_of(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether a group's params have no weight decay, are experts, and have a learning rate of their own."""
    wd_mult = group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    return (wd_mult == 0, group.get("is_expert_parallel") is True, group.get("is_decoupled_lr") is True)


def assign(keys: Mapping[str, tuple[int, ...]], identities: Sequence[tuple[bool, ...]], where: str) -> dict[str, int]:
    """Return the param group of each tensor, given by its shape in a layer, by Megatron's rule.

    Raises UnsupportedCheckpoint if the groups do not follow it.
    """
    has = [any(one[flag] for one in identities) for flag in range(3)]
    owner = {}
    for key, shape in keys.items():
        at_end = key in ("embedding.word_embeddings.weight", "output_layer.weight")
        wanted = (not has_decay(key, shape), is_expert(key), at_end)
        expected = tuple(flag and there for flag, there in zip(wanted, has, strict=True))
        fitting = [at for at, one in enumerate(identities) if one == expected]
        if len(fitting) != 1:
            may = f"{len(fitting)} of {len(identities)} may own {key}"
            what = f"its param groups do not list their params, and by Megatron's rule {may}"
            fix = "save it with Megatron's own groups: no weight decay for biases and vectors"
            raise UnsupportedCheckpoint.at(where, what, fix)
        owner[key] = fitting[0]
    return owner


@dataclass(frozen=True, slots=True)
class _MegatronIndexing:
    root: Path
    name: str
    folder: DcpCheckpoint
    common: Mapping[str, Any]
    problems: Problems

    @property
    def where(self) -> PathIn:
        return PathIn(self.name, COMMON)

    def draft(self) -> Draft:
        weights, states = self._tensors()
        groups, vocab = self._facts()
        try:
            selections = select({key: held.shape for key, held in weights.items()}, groups, vocab)
        except (ValueError, KeyError) as error:
            raise SourceError.at(self.name, f"its tensors don't fit together: {error}", _GIVE_CONFIG) from error
        options, steps = self._groups()
        shapes = {key: layer_shape(key, held.shape) for key, held in weights.items()}
        owner = assign(shapes, [identity_of(one) for one in options], self.where)
        held = {
            State(one.param, kind): TensorEntry(entry.dtype, one.shape, StridedRuns(entry.place, one.cuts, one.offsets))
            for one in selections
            for kind, entry in ((WEIGHT, weights[one.key]), *states[one.key].items())
        }
        names = [[one.param for one in selections if owner[one.key] == at] for at in range(len(options))]
        kept, dropped = _writable(self.common)
        args = _args(self.common)
        ranks = None if (self.root / MANIFEST).is_file() else args.get("world_size")
        iteration: Any = self.common.get("iteration")
        index = CheckpointIndex(
            root=self.root,
            name=self.name,
            form=Form(MEGATRON),
            world_size=ranks if is_count(ranks) and ranks else self.folder.ranks,
            global_step=iteration if is_count(iteration) else int(max(steps)),
            precision=usual_dtype(one.dtype for one in weights.values()),
            params={one.param: Param(one.param, one.shape, "trainable") for one in selections},
            tied={HEAD: EMBEDDING} if "output_layer.weight" not in weights else {},
            held=held,
            groups=tuple(
                ParamGroup(tuple(own), {key: value for key, value in one.items() if key not in OWN_OPTIONS})
                for own, one in zip(names, options, strict=True)
            ),
            sub_groups=tuple(SubGroup(at, tuple(own), steps[at]) for at, own in enumerate(names)),
            files={path.name: fact for path in sorted(self.root.iterdir()) if (fact := file_fact(path))},
            findings=(*self.folder.findings, *self._notes(dropped)),
            unreadable=self.folder.unreadable,
            framework=MEGATRON,
            train=TrainState(model_order=tuple(one.param for one in selections)),
            megatron=MegatronLayout(
                common=kept,
                groups=groups,
                tensors={key: stored.held for key, stored in self.folder.tensors.items()},
                objects={key: extent for key, (_, extent) in self.folder.objects.items()},
                written=self._written(),
            ),
        )
        return Draft(self.problems, index)

    def _tensors(self) -> tuple[dict[str, TensorEntry], dict[str, dict[str, TensorEntry]]]:
        """Return the weights, and the states of each by kind. Raises UnsupportedCheckpoint for other formats."""
        tensors = {key: stored.held for key, stored in self.folder.tensors.items()}
        optimizers = find_optimizers(self.common, self.where) if "optimizer" in self.common else []
        others = {str(one[SHARDING]) for one in optimizers if one.get(SHARDING, RESHARDABLE) != RESHARDABLE}
        if others or any(map(_BUCKETS.match, (*tensors, *self.folder.objects))):
            listed = some(sorted(others)) if others else "dp_reshardable"
            what = f"its optimizer was saved as {listed}, which does not say which elements are which param's"
            raise UnsupportedCheckpoint.at(self.name, what, _SAVE_WHOLE)
        weights = {key: held for key, held in tensors.items() if not _STATE.fullmatch(key)}
        if not weights or len(weights) == len(tensors):
            what = "it holds no optimizer states" if weights else "it holds no weights"
            raise UnsupportedCheckpoint.at(self.name, what, "save it with the optimizer (without --no-save-optim)")
        if unknown := [key for key in weights if not is_known(key)]:
            what = f"{some(unknown)} have no counterpart in a model of Hugging Face that is known here"
            raise UnsupportedCheckpoint.at(self.name, what, "use a model like Llama, Qwen2, Qwen3 or Mixtral")
        states: dict[str, dict[str, TensorEntry]] = {key: {} for key in weights}
        for full, held in tensors.items():
            if not (match := _STATE.fullmatch(full)):
                continue
            kind, key = match.groups()
            if kind not in KINDS or key not in weights:
                what = (
                    f"it holds {full}, a state of another optimizer than Adam"
                    if key in weights
                    else f"{full} has no weight"
                )
                raise UnsupportedCheckpoint.at(self.name, what, "train with Adam")
            if held.shape != weights[key].shape:
                what = f"{full} has shape {list(held.shape)}, the weight {list(weights[key].shape)}"
                raise SourceError.at(self.name, what, COPY_CHECKPOINT, Code.STATE_SIZE)
            states[key][KINDS[kind]] = held
        for key, kinds in states.items():
            if lost := {EXP_AVG, EXP_AVG_SQ} - kinds.keys():
                what = f"{some(sorted(lost))} of {key} is missing"
                raise SourceError.at(self.name, what, COPY_CHECKPOINT, Code.STATE_MISSING)
            kinds.setdefault(MASTER, weights[key])  # in fp32 without the distributed optimizer
        return weights, states

    def _written(self) -> dict[tuple[str, str], str]:
        matches = ((_STATE.fullmatch(full), full) for full in self.folder.tensors)
        return {(KINDS[match[1]], match[2]) if match else (WEIGHT, full): full for match, full in matches}

    def _facts(self) -> tuple[int, int]:
        """Return the number of query groups, and of words. Raises UnsupportedCheckpoint if they are unknown."""
        path, args = self.root / CONFIG, _args(self.common)
        config = read_json(path, PathIn(self.name, CONFIG)) if path.is_file() else {}
        first = config.get("num_key_value_heads") or config.get("num_attention_heads")
        other = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_attention_heads")
        stated = {"query groups": (first, other), "words": (config.get("vocab_size"), args.get("vocab_size"))}
        known = {what: next((one for one in both if is_count(one) and one), 0) for what, both in stated.items()}
        lost = [f"the number of {what} is neither in {CONFIG} nor in its args" for what in stated if not known[what]]
        problems = [Problem(self.name, what, _GIVE_CONFIG) for what in lost]
        if is_count(first) and is_count(other) and first != other:
            what = f"{CONFIG} says {first} query groups, the args in {COMMON} say {other}"
            problems.append(Problem(self.name, what, _GIVE_CONFIG, Code.FIELD_CONFLICT))
        if problems:
            raise UnsupportedCheckpoint(problems)
        return known["query groups"], known["words"]

    def _groups(self) -> tuple[list[dict[str, Any]], list[float]]:
        """Return the options of all param groups, and their steps."""
        groups, steps = [], []
        for one in find_optimizers(self.common, self.where):
            inner = get(one, "optimizer", dict, self.where)
            shared = as_dict(inner.get("state", {}), "the state", self.where).get("common_step")
            for node in get(inner, "param_groups", list, self.where):
                group = as_dict(node, "a param group", self.where)
                step = group.get("step", shared)
                if step is None:
                    what = "a param group has no step"
                    raise SourceError.at(self.where, what, COPY_CHECKPOINT, Code.FIELD_MISSING)
                steps.append(read_step(self.root, step, 0, self.where))
                groups.append({key: read_option(self.root, value, self.where) for key, value in group.items()})
        return groups, steps

    def _notes(self, dropped: Sequence[str]) -> Iterator[Finding]:
        if dropped:
            what = f"{some(dropped)} name classes that are not known here"
            yield Finding(
                self.where,
                what,
                "no action needed: a composite in this format leaves them out",
                Code.FIELD_UNKNOWN,
                NOTE,
            )


def _args(common: Mapping[str, Any]) -> Mapping[str, Any]:
    node = common.get("args")
    return node.state if isinstance(node, Call) and node.func == NAMESPACE and isinstance(node.state, dict) else {}


def _writable(common: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what may be written back, that is, names no class but the usual ones, and the names of the rest."""
    kept, dropped = {}, []
    for key, value in common.items():
        args = _args(common) if key == "args" else {}
        if args:
            good = {name: one for name, one in args.items() if _is_usual(one)}
            dropped += [f"args.{name}" for name in args.keys() - good.keys()]
            kept[key] = Call(NAMESPACE, (), new=True, state=good, has_state=True)
        elif _is_usual(value):
            kept[key] = value
        else:
            dropped.append(str(key))
    return kept, sorted(dropped)


def _is_usual(node: Any) -> bool:
    return all(one.name in ALLOWED.get(one.module, ()) for one in globals_in(node))
