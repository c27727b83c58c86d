"""Checks on the index alone: whether the states are those that a resume, evaluation and inference expect. Pure.

A composite is also compared with its manifest, which records what the merge wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from llmtailor.checkpoint.index import (
    ACCELERATE,
    DEEPSPEED,
    LIGHTNING,
    TRAINER,
    UNIVERSAL,
    CheckpointIndex,
    TensorEntry,
)
from llmtailor.checkpoint.placement import Extent, Runs, union
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, NOTE, WARNING, Finding
from llmtailor.formats.composite import ManifestFacts
from llmtailor.frameworks.files import CONFIG, MANIFEST, is_weight_file
from llmtailor.frameworks.framework import framework_of, is_resumed_from
from llmtailor.frameworks.read import adapters_of
from llmtailor.frameworks.stock_fields import ADAM_KINDS
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.roles import FROZEN, MASTER, MODULE, WEIGHT, State

_NOT_READ = "a DeepSpeed resume does not read them, but evaluation and inference do"
_OTHER_MODEL = f"{_NOT_READ}; they may belong to another model"
_COPY_AGAIN = "copy the composite again, or merge again"
ON_PURPOSE = "none needed if you changed it yourself"
Spans = dict[State, Runs]
Elements = tuple[State, tuple[int, int]]


def check_index(index: CheckpointIndex) -> list[Finding]:
    """Return the problems in the states of a full checkpoint that could be indexed."""
    fix, severity = "rename the folder: scripts and the Trainer's rotation rely on its name", WARNING
    if index.framework in (ACCELERATE, LIGHTNING, DEEPSPEED):  # a loop may count batches, epochs or saves
        fix = "none needed if the loop counts something else; merge --run and thin rely on the name"
        severity = NOTE
    step = check_step(index, step_of(index.root), fix, severity)
    return [*_dtypes(index), *_frozen(index), *_weights(index), *_config(index), *step]


def check_step(index: CheckpointIndex, step: int | None, fix: str, severity: str = WARNING) -> Iterator[Finding]:
    """Compare the step in the folder's name, if any, with the content."""
    if step not in (None, index.global_step):
        what = f"its name says step {step}, but its content is of step {index.global_step}"
        yield Finding(index.name, what, fix, Code.FOLDER_STEP, severity)


def check_manifest(index: CheckpointIndex, manifest: ManifestFacts) -> Iterator[Finding]:
    """Compare a composite with its manifest: counters, Adam's steps, and the size of every file."""
    where = PathIn(index.name, MANIFEST)
    numbers: list[tuple[str, float, float]] = [
        ("global_step", index.global_step, manifest.global_step),
        ("the world size", index.world_size, manifest.world_size),
    ]
    for number, flat in enumerate(index.sub_groups):
        if flat.step is not None:
            written_step = manifest.steps.get(number, flat.step)
            numbers.append((f"the optimizer's step of sub-group {number}", flat.step, written_step))
    for what, have, written in numbers:
        if have != written:
            text = f"{what} was {_number(written)} when written, and is now {_number(have)}"
            yield Finding(where, text, _COPY_AGAIN, Code.MANIFEST, ERROR)
    new_weight_files = [path for path in index.files if path.endswith(".safetensors") and path not in manifest.files]
    for path, (num_bytes, _) in manifest.files.items():
        place, fact = PathIn(index.name, path), index.files.get(path)
        severity, fix = (ERROR, _COPY_AGAIN) if is_resumed_from(path, index) else (WARNING, ON_PURPOSE)
        is_same = fact is not None and fact.num_bytes == num_bytes
        is_replaced = new_weight_files and index.has_weight_files  # an index has all weights
        if is_replaced and is_weight_file(path) and not is_same:
            what = f"the weights are no longer in the files that were written, but in {some(new_weight_files)}"
            yield Finding(place, what, ON_PURPOSE, Code.MANIFEST, WARNING)
        elif fact is None:
            yield Finding(place, "the file was written but is now missing", fix, Code.FILE_MISSING, severity)
        elif fact.num_bytes != num_bytes:
            text = f"it had {num_bytes:,} bytes when written, and now has {fact.num_bytes:,}"
            yield Finding(place, text, fix, Code.MANIFEST, severity)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _dtypes(index: CheckpointIndex) -> Iterator[Finding]:
    """Report moments that a resume casts. DeepSpeed keeps moments in fp32 unless configured to save space."""
    cast: dict[tuple[str, str, str], list[str]] = {}
    for state, entry in index.held.items():
        master = index.held.get(State(state.param, MASTER))
        if state.kind not in ADAM_KINDS or master is None or entry.live_dtype == master.dtype:
            continue
        if not index.form.has_masters or ITEMSIZE[entry.dtype] < ITEMSIZE[master.dtype]:
            cast.setdefault((state.kind, entry.dtype, master.dtype), []).append(state.param)
    for (kind, dtype, wanted), params in cast.items():
        what = f"{kind} of {some(params)} is {dtype}, but the param is trained in {wanted}; a resume casts it"
        fix = "use a checkpoint that was not rounded, if there is one"
        yield Finding(index.name, what, fix, Code.STATE_DTYPE, WARNING)


def _frozen(index: CheckpointIndex) -> Iterator[Finding]:
    lost = [
        param.name
        for param in index.params.values()
        if index.form.has_masters and param.role == "frozen" and State(param.name, FROZEN) not in index.held
    ]
    if lost:
        what = f"the frozen {some(lost)} {'is' if len(lost) == 1 else 'are'} not in the model states"
        fix = "a resume would silently keep the model's initial values; copy the model states again"
        yield Finding(index.name, what, fix, Code.FROZEN_MISSING, ERROR)


def _weights(index: CheckpointIndex) -> Iterator[Finding]:
    """Compare the weights with the params; without DeepSpeed they are masters: see `formats.param_names`."""
    weights = {state.param: entry for state, entry in index.held.items() if state.kind == WEIGHT}
    if not index.form.has_masters or not weights:
        return
    lacking = {name: param.numel for name, param in index.params.items() if name not in weights and param.numel}
    extra = {
        name: entry.numel for name, entry in weights.items() if name not in index.params and name not in index.tied
    }
    # transformers saves some models under other names than they have in memory, in other pieces
    if sum(lacking.values()) != sum(extra.values()):
        if lacking:
            what = f"the weights of {some(lacking)} are missing"
            yield Finding(index.name, what, _NOT_READ, Code.WEIGHTS_MISSING, WARNING)
        if extra:
            what = f"the weights hold {some(extra)}, which the shards do not have"
            yield Finding(index.name, what, _OTHER_MODEL, Code.WEIGHTS_UNKNOWN, WARNING)
    shapes = [
        f"{name} {list(entry.shape)} instead of {list(index.params[name].shape)}"
        for name, entry in weights.items()
        if name in index.params and entry.shape != index.params[name].shape
    ]
    if shapes:
        what = f"the weights have other shapes than the params: {some(shapes)}"
        yield Finding(index.name, what, _OTHER_MODEL, Code.WEIGHTS_SHAPE, WARNING)
    other_dtypes = {
        entry.dtype
        for name, entry in weights.items()
        if name in index.params and index.params[name].role == "trainable" and entry.dtype != index.precision
    }
    if other_dtypes:
        what = f"the weights are {', '.join(sorted(other_dtypes))}, but the run trained in {index.precision}"
        yield Finding(index.name, what, _NOT_READ, Code.WEIGHTS_DTYPE, NOTE)


def _config(index: CheckpointIndex) -> Iterator[Finding]:
    is_whole = index.form.file_format in (DEEPSPEED, UNIVERSAL, TRAINER)
    if is_whole and framework_of(index).saves_model and not (CONFIG in index.files or adapters_of(index)):
        fix = "a resume does not need it, but from_pretrained does: copy it back"
        yield Finding(index.name, "config.json is missing", fix, Code.CONFIG_MISSING, NOTE)


def elements_in(index: CheckpointIndex, is_meant: Callable[[Extent], bool]) -> Iterator[Elements]:
    """Yield the elements of states in chosen byte ranges."""
    for state, entry in index.all_held().items():
        for fragment in chain.from_iterable(entry.place.cover(*run) for run in entry.runs):
            if is_meant(fragment.extent):
                yield state, (fragment.begin, fragment.end)


def lost_elements(index: CheckpointIndex, paths: Collection[str]) -> Iterator[Elements]:
    """Yield the elements of states in unreadable files."""
    return elements_in(index, lambda extent: extent.path in paths) if paths else iter(())


def join(runs: Iterable[Elements]) -> Spans:
    """Return the elements of each state as one set."""
    spans_of: dict[State, list[tuple[int, int]]] = {}
    for state, run in runs:
        spans_of.setdefault(state, []).append(run)
    return {state: union(tuple(spans)) for state, spans in spans_of.items()}


def held_of(index: CheckpointIndex, state: State) -> TensorEntry:
    return index.zero.module[state] if state.kind == MODULE else index.held[state]
