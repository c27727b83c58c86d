"""What an index alone tells: are the states those that a resume, and what follows it, expects? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.containers.json import step_of
from llmtailor.errors import some
from llmtailor.findings import ERROR, NOTE, WARNING, Finding
from llmtailor.formats.trainer import ADAPTER_CONFIG, CONFIG
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHT, State

_NOT_MOMENTS = {WEIGHT, MASTER, FROZEN, BUFFER}
_NOT_READ = "a DeepSpeed resume does not read them; evaluation and inference do"


def check_index(index: CheckpointIndex) -> list[Finding]:
    """Return what is wrong with the states of a full checkpoint that could be indexed."""
    return [*_dtypes(index), *_frozen(index), *_weights(index), *_config(index), *_step_in_name(index)]


def _dtypes(index: CheckpointIndex) -> Iterator[Finding]:
    """A resume casts moments to what it keeps them in. DeepSpeed keeps them in fp32 unless told to save space."""
    cast: dict[tuple[str, str, str], list[str]] = {}
    for state, held in index.held.items():
        master = index.held.get(State(state.param, MASTER))
        if state.kind in _NOT_MOMENTS or master is None or held.dtype == master.dtype:
            continue
        if index.stage == 0 or ITEMSIZE[held.dtype] < ITEMSIZE[master.dtype]:
            cast.setdefault((state.kind, held.dtype, master.dtype), []).append(state.param)
    for (kind, dtype, wanted), params in cast.items():
        what = f"{kind} of {some(params)} is {dtype}, the param is trained in {wanted}; a resume casts it"
        yield Finding(
            index.name, what, "take a checkpoint that was not rounded, if there is one", Code.STATE_DTYPE, WARNING
        )


def _frozen(index: CheckpointIndex) -> Iterator[Finding]:
    lost = [
        param.name
        for param in index.params.values()
        if index.stage and param.role == "frozen" and State(param.name, FROZEN) not in index.held
    ]
    if lost:
        what = f"the frozen {some(lost)} {'is' if len(lost) == 1 else 'are'} not in the model states"
        fix = "a resume keeps there what the model is built with, without a word; copy the model states again"
        yield Finding(index.name, what, fix, Code.FROZEN_MISSING, ERROR)


def _weights(index: CheckpointIndex) -> Iterator[Finding]:
    """Without DeepSpeed the weights are the masters, and `formats.plain.names` has compared them already."""
    weights = {state.param: held for state, held in index.held.items() if state.kind == WEIGHT}
    if not index.stage or not weights:
        return
    lacking = {name: param.numel for name, param in index.params.items() if name not in weights and param.numel}
    extra = {name: held.numel for name, held in weights.items() if name not in index.params and name not in index.tied}
    # transformers saves some models under other names than they have in memory, in other pieces
    if sum(lacking.values()) != sum(extra.values()):
        if lacking:
            yield Finding(
                index.name, f"the weights of {some(lacking)} are missing", f"{_NOT_READ}", Code.WEIGHTS_MISSING, WARNING
            )
        if extra:
            what = f"the weights hold {some(extra)}, of which the shards know nothing"
            yield Finding(index.name, what, f"{_NOT_READ}; they may be another model's", Code.WEIGHTS_UNKNOWN, WARNING)
    shapes = [
        f"{name} {list(held.shape)} instead of {list(index.params[name].shape)}"
        for name, held in weights.items()
        if name in index.params and held.shape != index.params[name].shape
    ]
    if shapes:
        what = f"the weights have other shapes than the params: {some(shapes)}"
        yield Finding(index.name, what, f"{_NOT_READ}; they may be another model's", Code.WEIGHTS_SHAPE, WARNING)
    other = {
        held.dtype
        for name, held in weights.items()
        if name in index.params and index.params[name].role == "trainable" and held.dtype != index.precision
    }
    if other:
        what = f"the weights are {', '.join(sorted(other))}, the run trained in {index.precision}"
        yield Finding(index.name, what, _NOT_READ, Code.WEIGHTS_DTYPE, NOTE)


def _step_in_name(index: CheckpointIndex) -> Iterator[Finding]:
    told = step_of(index.root)
    if told not in (None, index.global_step):
        what = f"the folder says step {told}, its content is of step {index.global_step}"
        yield Finding(
            index.name,
            what,
            "rename the folder: scripts and the Trainer's rotation go by it",
            Code.FOLDER_STEP,
            WARNING,
        )


def _config(index: CheckpointIndex) -> Iterator[Finding]:
    if not index.files.keys() & {CONFIG, ADAPTER_CONFIG}:
        what = "config.json is missing"
        yield Finding(
            index.name, what, "a resume does without; from_pretrained does not: copy it back", Code.CONFIG_MISSING, NOTE
        )
