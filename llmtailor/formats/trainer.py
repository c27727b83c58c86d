"""A checkpoint's folder around the shards: weights, scheduler, RNG, trainer state, config, tokenizer.

Its files are those of the Hugging Face Trainer, or of another client; see `formats.clients`.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import ACCELERATE, TRAINER, CheckpointIndex, TensorEntry
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.containers.safetensors import (
    INDEX,
    SINGLE,
    lay_out_index,
    lay_out_weights,
    list_tied,
    read_weights,
    survey_weights,
)
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import PathIn, Problems, SourceError, TailorError, UnsupportedCheckpoint, damaged, some
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.clients import (
    CLIENTS,
    TRAINER_STATE,
    Client,
    detect_client,
    is_accelerates,
    is_second_models,
    is_trainers_file,
)
from llmtailor.formats.format import Trees, Wanted, attempt
from llmtailor.formats.partial.manifest import MANIFEST as PARTIAL_MANIFEST
from llmtailor.formats.rng import (
    as_accelerates,
    as_trainers,
    check_random_states,
    check_rng,
    find_swapped,
    is_rng_file,
    rng_file,
)
from llmtailor.formats.scheduler import SchedulerFacts, check_scheduler, lay_out_scheduler, read_scheduler
from llmtailor.formats.trainer_checks import (
    TRAINING_ARGS,
    check_scaler,
    check_trainer_state,
    is_trainers,
    read_global_step,
    read_lags,
    read_scales_loss,
)
from llmtailor.model.disk_names import AS_IN_MEMORY, naming_of, on_disk
from llmtailor.model.parts import SavedAs
from llmtailor.model.states import WEIGHT, State
from llmtailor.storage.listing import FileFact
from llmtailor.storage.local import check_regular

MANIFEST = "llmtailor.json"
CARD = "README.md"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
OPTIMIZER = "optimizer.pt"
"""Of a training without DeepSpeed"""
CONFIG = "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What a PEFT run saves instead of the model's weights and config"""
_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model|jinja)|tokenizer\.model.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt|bpe)"
    r"|merges\.txt|spiece\.model|sentencepiece.*\.model|(source|target)\.spm|.*\.tiktoken|chat_template\.(jinja|json)"
)
"""The names under which transformers' tokenizers save"""
_OPENED = (TRAINER_STATE, SCALER, CONFIG, *(one.scheduler for one in CLIENTS.values()))
_OTHER_WEIGHTS = re.compile(r"pytorch_model.*\.(bin|json)|adapter_model\.bin")
_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """The content of the files in the checkpoint's root."""

    client: Client
    """Whose loader resumes from the checkpoint"""
    files: Mapping[str, FileFact]
    """Every regular file in the root"""
    inside: frozenset[str]
    """Stock files that a partial checkpoint contains in its rank shards"""
    trees: Mapping[str, Any]
    """See `TrainState.trees`"""
    weights: Mapping[State, TensorEntry]
    global_step: int | None
    """From trainer_state.json; None without the file"""
    step_lags: frozenset[int]
    """How many steps Adam may be behind the run; see `trainer_checks.read_lags`"""
    scheduler: SchedulerFacts | None
    """The content of the client's scheduler file; None without it"""
    scales_loss: bool | None
    """Whether the run trains in fp16, by training_args.bin; None if unknown"""
    findings: tuple[Finding, ...]
    has_all_weights: bool
    """Whether every weight file is intact"""


def read_trainer_files(
    trees: Trees, name: str, problems: Problems, client: str | None = None, *, is_engines: bool = False
) -> TrainerFiles:
    """Read the files in the root. Damaged ones are added to ``problems``, missing ones become findings.

    ``client`` is whose loader they are judged by; None for the one that they are detected to be for, see
    `clients.detect_client`. Raises UnsupportedCheckpoint for several models of accelerate.
    """
    root, inside = trees.root, trees.inside
    found = ((path.name, file_fact(path)) for path in sorted(root.iterdir()))
    files = {path: fact for path, fact in found if fact is not None}
    _report_non_files(root, name, problems)
    findings: list[Finding] = []
    weights: dict[State, TensorEntry] = {}
    sound = len(problems.errors)
    for file in survey_weights(root, name, problems):
        weights.update({State(tensor, WEIGHT): held for tensor, held in file.tensors.items()})
    has_all_weights = len(problems.errors) == sound
    scales_loss = read_scales_loss(root, PathIn(name, TRAINING_ARGS))
    where = PathIn(name, TRAINER_STATE)
    content = attempt(lambda: read_json(root / TRAINER_STATE, where), problems) if TRAINER_STATE in files else {}
    is_the_trainers = content is None or is_trainers(content)
    entries = [f"{path.name}/" if path.is_dir() else path.name for path in root.iterdir()]
    if client is None:
        below = [f"{path.partition('/')[0]}/" if "/" in path else path for path in inside]
        is_trainers_state = is_the_trainers if TRAINER_STATE in files else None
        for_whom = detect_client([*entries, *below], is_trainers_state, is_engines)
    else:
        for_whom = CLIENTS[client]
    if for_whom.name == ACCELERATE and (others := sorted(filter(is_second_models, entries))):
        what = f"accelerate has saved several models or optimizers: {some(others)}"
        fix = "leave it out; checkpoints of one model and one optimizer can be composed"
        raise UnsupportedCheckpoint.at(name, what, fix)
    if not weights and has_all_weights and not inside and ADAPTER_CONFIG not in files and for_whom.saves_model:
        findings.append(_no_weights(files, name))
    global_step, scheduler = None, None
    if TRAINER_STATE in files and content is not None:
        global_step = attempt(lambda: read_global_step(content, where), problems)
        if global_step is not None:
            findings += check_trainer_state(content, where)
    saved_as: dict[str, str] = {}
    known: dict[str, Any] = {}
    whole, optimizer = (for_whom.optimizer, "") if for_whom.holds_all else ("", for_whom.optimizer)
    in_root = [path for path in inside if "/" not in path and path != optimizer]
    for path in (*files, *in_root):
        where, is_rng = PathIn(name, path), is_rng_file(path)
        try:
            if path == CONFIG:
                read_json(root / path, where)
            elif path in inside or is_rng or path in (for_whom.scheduler, SCALER, whole):
                decoded = trees.read(path, where)
                known[path] = decoded.tree
                if is_rng and decoded.archive is not None:
                    saved_as[path] = f"{decoded.archive}{Path(path).suffix}"
                if is_rng and path.endswith(".pkl"):
                    findings += check_random_states(root, decoded.tree, where)
                elif is_rng and is_the_trainers:
                    findings += check_rng(root, decoded.tree, where)
                elif path == for_whom.scheduler:
                    findings += check_scheduler(decoded.tree, where)
                    scheduler = _check_rates(decoded.tree, where)
                    if not for_whom.counts_steps:
                        scheduler = replace(scheduler, num_steps=None)
                elif path == SCALER:
                    findings += check_scaler(decoded.tree, scales_loss, where)
        except TailorError as error:
            problems.add(error)
    if for_whom.state and for_whom.state not in files:
        fix = f"copy it back; {for_whom.loader} can't resume without it"
        findings.append(Finding(PathIn(name, for_whom.state), "the file is missing", fix, Code.FILE_MISSING, ERROR))
    findings += find_swapped(saved_as, name, may_repeat=MANIFEST in files)
    return TrainerFiles(
        for_whom,
        files,
        frozenset(inside),
        known,
        weights,
        global_step,
        read_lags(content or {}),
        scheduler,
        scales_loss,
        tuple(findings),
        has_all_weights,
    )


def _report_non_files(root: Path, name: str, problems: Problems) -> None:
    """Report folders, pipes and the like under the names of files that a resume opens, and may block on."""
    for path in sorted(root.iterdir()):
        if (path.name in _OPENED or is_rng_file(path.name)) and path.exists():
            try:
                check_regular(path.stat().st_mode, PathIn(name, path.name))
            except SourceError as error:
                problems.add(error)


def file_fact(path: Path) -> FileFact | None:
    """Return size and time of a regular file, following links; None for anything else."""
    try:
        status = path.stat()
    except FileNotFoundError:  # a dangling link
        return None
    return FileFact.of(status) if stat.S_ISREG(status.st_mode) else None


def _no_weights(files: Mapping[str, FileFact], name: str) -> Finding:
    what = "there are no weights in safetensors form (with ZeRO-3: stage3_gather_16bit_weights_on_model_save is off)"
    if any(map(is_pickled_weights, files)):
        what = "the weights are in pytorch_model.bin form, which is left out"
    fix = "nothing: a resume does not read them, and they can be rounded from the master weights"
    return Finding(name, what, fix, Code.WEIGHTS_MISSING)


def _check_rates(tree: Any, where: str) -> SchedulerFacts:
    facts = read_scheduler(tree)
    if not facts.lengths:
        raise damaged(where, "the scheduler state holds no learning rates", Code.FIELD_MISSING)
    return facts


def is_weight_file(path: str) -> bool:
    """Return whether a file in the root holds weights or their index: written again, or left out."""
    return path.endswith(".safetensors") or path == INDEX or bool(_OTHER_WEIGHTS.fullmatch(path))


def is_pickled_weights(path: str) -> bool:
    """Return whether a file in the root holds weights in the form of ``torch.save``, which is not read."""
    return bool(_OTHER_WEIGHTS.fullmatch(path)) and path.endswith(".bin")


def is_tokenizer_file(path: str) -> bool:
    """Return whether a file in the root of a checkpoint belongs to the tokenizer."""
    return bool(_TOKENIZER.fullmatch(path))


def lay_out_trainer_files(
    base: CheckpointIndex,
    wanted: Wanted,
    made: Iterable[FileLayout],
    dtype: str | None,
    leave_out: Container[str],
    *,
    has_weights: bool = False,
) -> list[FileLayout]:
    """Return the layout of a composite's root, based on its base's: weights by slots, everything else unchanged.

    ``made`` are the files that the format has laid out itself, which are returned as well, ``has_weights`` whether the
    weights are among them; ``dtype`` is what floating-point weights are cast to, None to keep theirs; ``leave_out``
    names files of the base that have no place in the format. The tokenizer's files are left to `formats.tokenizer`.
    """
    made, scheduler = list(made), CLIENTS[base.client].scheduler
    is_same_client = wanted.client == base.client
    if wanted.from_group is not None and is_same_client and base.offers(scheduler):
        where = PathIn(base.name, scheduler)
        made.append(lay_out_scheduler(base.train.trees[scheduler], where, len(base.groups), wanted.from_group))
    paths = {".", CLIENTS[base.client].optimizer, *(layout.path for layout in made)}

    def is_left(path: str) -> bool:
        is_ours = path in (MANIFEST, CARD) or (base.is_partial and path == PARTIAL_MANIFEST)
        is_laid_out = path in paths or is_weight_file(path) or is_rng_file(path)
        is_others = not is_same_client and (is_accelerates(path) or (base.client == TRAINER and is_trainers_file(path)))
        return "/" in path or is_ours or is_laid_out or is_others or is_tokenizer_file(path) or path in leave_out

    layouts = _lay_out_rng(base, wanted.layout.world_size, wanted.client)
    layouts += [lay_out_torch_file(path, base.train.trees[path]) for path in base.inside if not is_left(path)]
    for path, fact in base.files.items():
        if not is_left(path):
            is_cast = path == CONFIG and dtype
            layouts.append(_config_with_dtype(base.root, dtype) if is_cast and dtype else carry(path, fact))
    if not has_weights and (is_same_client or CLIENTS[wanted.client].saves_model):
        layouts += _lay_out_base_weights(base, wanted.layout.stage, dtype)
    return [*layouts, *made]


def _lay_out_base_weights(base: CheckpointIndex, stage: int, dtype: str | None) -> list[FileLayout]:
    """Return layouts of weight files like the base's. ZeRO-3 runs list each tied weight once, others by both names."""
    if not (
        base.has_weight_files and any(state.kind == WEIGHT for state in base.held)
    ):  # files that a salvage can't use are not in its index
        return []
    weights = read_weights(base.root, str(base.root))
    relists = (base.stage == 3) != (stage == 3)
    if relists:
        weights = list_tied(weights, base.tied, stage < 3)
    if dtype and base.has_masters:
        originals = params_on_disk(base)
        weights = tuple(replace(file, filled_by=originals) for file in weights)
    layouts = [lay_out_weights(file, dtype) for file in weights]
    if weights[0].path != SINGLE:
        layouts.append(lay_out_index(weights, dtype) if dtype or relists else carry(INDEX, base.files[INDEX]))
    return layouts


def read_config(index: CheckpointIndex) -> dict[str, Any]:
    """Return the content of ``config.json``; empty without the file. Raises SourceError for a damaged one."""
    return read_json(index.root / CONFIG, PathIn(index.name, CONFIG)) if CONFIG in index.files else {}


def params_on_disk(base: CheckpointIndex) -> dict[str, tuple[State, int]]:
    """Return the source of each tensor in the weight files, by its name there: a param and its first element.

    With it, a weight can be rounded from the master weights even under another name. Names that follow an unknown rule
    are not included.
    """
    config = read_config(base)
    naming = naming_of(str(config["model_type"]) if "model_type" in config else None) or AS_IN_MEMORY
    found = {one.name: (param, one) for param in base.params.values() for one in on_disk(param, naming)}
    found |= {param.name: (param, SavedAs(param.name, param.shape)) for param in base.params.values()}
    found |= {name: found[stored] for name, stored in base.tied.items()}
    return {
        name: (State(param.name, WEIGHT), one.begin)
        for name, (param, one) in found.items()
        if (held := base.held.get(State(name, WEIGHT))) and held.shape == one.shape
    }


def _lay_out_rng(base: CheckpointIndex, new: int, client: str) -> list[FileLayout]:
    """Return layouts of random number states, one per rank; with more ranks than the base, they repeat in turn."""
    layouts: list[FileLayout] = []
    if client != base.client and not CLIENTS[client].saves_rng:
        return layouts
    old = base.world_size
    for rank in range(new):
        source = rng_file(rank % old, old, base.client)
        path = rng_file(rank, new, client)
        if ACCELERATE in (base.client, client) and base.client != client:
            convert = as_trainers if base.client == ACCELERATE else as_accelerates
            if source in base.train.trees:
                layouts.append(lay_out_torch_file(path, convert(base.train.trees[source])))
        elif source in base.files:
            layouts.append(FileLayout(path, carry(source, base.files[source]).pieces))
        elif source in base.inside:
            layouts.append(lay_out_torch_file(path, base.train.trees[source]))
    return layouts


def carry(path: str, fact: FileFact) -> FileLayout:
    """Return the layout of a file copied unchanged from the base."""
    extent = Extent(path, 0, fact.num_bytes)
    return FileLayout(path, (Copy(extent),) if fact.num_bytes else ())


def _config_with_dtype(root: Path, dtype: str) -> FileLayout:
    config = read_json(root / CONFIG, CONFIG)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = _TORCH_DTYPES[dtype]
    return FileLayout(CONFIG, (Bytes(json.dumps(config, indent=2).encode() + b"\n", "config.json with the new dtype"),))
