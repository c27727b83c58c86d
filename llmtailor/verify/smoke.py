"""``--resume-smoke``: a real resume on CPU ranks, with stock transformers and DeepSpeed, compared with the files.

The ranks run in their own processes (`smoke_worker`); this one imports no framework. They report checksums of the
states that the engine holds after loading; here the same elements are read from the checkpoint by its index.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmtailor
from llmtailor.checkpoint.index import ACCELERATE, DCP, DEEPSPEED, FSDP, TRAINER, UNIVERSAL, CheckpointIndex
from llmtailor.codes import Code
from llmtailor.errors import Interrupted, Problem, UsageError, some
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.loaders.files import CONFIG
from llmtailor.loaders.loader import loader_of
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.casts import cast
from llmtailor.storage.checksums import crc32
from llmtailor.storage.local import Files
from llmtailor.timing import Stopwatch, time_limit, too_slow
from llmtailor.verify.structure import held_of
from llmtailor.verify.values import CHUNK_ELEMENTS
from llmtailor.verify.verify import Verdict, by_severity

_DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_FIX = "verify with --deep to find damage, or use another checkpoint"


def compare(index: CheckpointIndex, results: Sequence[Mapping[str, Any]], log: str) -> list[Finding]:
    """Return the differences between a trial resume and the files; ``results`` has one item per rank.

    ``log`` is the end of the ranks' output.
    """
    problems = [result["problem"] for result in results if result["problem"]]
    if problems or len(results) < (index.world_size if index.form.stage else 1):
        last = log.splitlines()[-1:] or ["no output"]
        what = f"a stock resume fails: {problems[0] if problems else f'a rank died or hung ({last[0]})'}"
        return [Finding(index.name, what, _FIX, Code.RESUME_FAILS, ERROR)]
    with Files(index.root) as files:
        differences = [*_states(index, results, files), *_others(index, results)]
    return [Finding(index.name, f"after a resume {what}", _FIX, Code.RESUME_DIFFERS, ERROR) for what in differences]


def _states(index: CheckpointIndex, results: Sequence[Mapping[str, Any]], files: Files) -> Iterator[str]:
    counted: Counter[State] = Counter()
    wrong: dict[str, dict[str, None]] = {}
    for fragment in (fragment for result in results for fragment in result["fragments"]):
        state, begin, end = State(fragment["param"], fragment["kind"]), fragment["begin"], fragment["end"]
        counted[state] += end - begin
        source = State(state.param, MASTER) if state.kind == MODULE and index.form.stage == 3 else state
        is_held = source.param in index.zero.module if source.kind == MODULE else source in index.held
        dtype = _DTYPES.get(fragment["dtype"], "")
        if not is_held or _checksum(index, files, source, begin, end, dtype) != fragment["crc"]:
            wrong.setdefault(state.kind, {})[state.param] = None
    for state, held in index.held.items():
        if state.kind not in (WEIGHT, FROZEN, BUFFER) and counted[state] != held.numel:
            wrong.setdefault(state.kind, {})[state.param] = None
    for kind, params in wrong.items():
        name = "weight in training" if kind == MODULE else kind
        yield f"the engine holds another {name} of {some(params)} than the files ({len(params)} params)"


def _others(index: CheckpointIndex, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Compare Adam's steps, counters, scheduler and param groups."""
    has_state = any(state.kind not in (WEIGHT, MASTER, FROZEN, BUFFER) for state in index.held)
    steps = [one.step if has_state else None for one in index.sub_groups]
    for rank, result in enumerate(results):
        if result["steps"] != steps:
            yield f"Adam's steps on rank {rank} are {result['steps']}, but {steps} in the files"
    result = results[0]
    for key, expected in (("global_steps", index.global_step), ("skipped_steps", index.zero.skipped_steps)):
        if result.get(key, expected) != expected:
            yield f"{key} is {result[key]}, but {expected} in the files"
    if result["scheduler"]:
        yield f"the scheduler can't continue: {result['scheduler']}"
    for number, (group, have) in enumerate(zip(index.groups, result["groups"], strict=True)):
        off = [key for key, value in have.items() if key in group.hyper and _plain(group.hyper[key]) != _plain(value)]
        if off:
            yield f"{some(off)} of param group {number} differ from the files"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


logger = logging.getLogger(__name__)
MAX_RANKS = 8
TIMEOUT_S = 900
PROCESS_BYTES = 700 << 20
"""Memory of a rank before it has a model: torch, transformers and DeepSpeed"""
_TAIL_LINES = 8


def try_resume(verdict: Verdict) -> Verdict:
    """Add the findings of a trial resume to a verdict; a checkpoint known to be bad is not tried.

    Raises what `resume_smoke` raises, and UsageError for a partial checkpoint.
    """
    if verdict.is_partial:
        fix = "compose a checkpoint first (llmtailor merge --run) and try that"
        raise UsageError.at(
            "--resume-smoke", f"{verdict.name} is a partial checkpoint, which can't be resumed from directly", fix
        )
    if verdict.index is None or not verdict.is_resumable:
        what = "no resume was tried, because the checkpoint is not resumable"
        note = Finding(verdict.name, what, "fix the errors first", Code.NOT_TRIED, NOTE)
        return replace(verdict, findings=by_severity([*verdict.findings, note]))
    return replace(verdict, findings=by_severity([*verdict.findings, *resume_smoke(verdict.index)]))


def resume_smoke(index: CheckpointIndex) -> list[Finding]:
    """Make a trial resume of a checkpoint; return where the engine's state differs from the files.

    Raises UsageError if that is impossible here: packages or memory are missing, there are too many ranks, or
    transformers can't build the model. Raises Unanswered on a timeout, and Interrupted on Ctrl-C.
    """
    check_possible(index)
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as folder:
        results, log = _run(make_task(index, folder), index.world_size if index.form.stage else 1, Path(folder))
    if refusal := next((result["refusal"] for result in results if result["refusal"]), None):
        raise UsageError.at("--resume-smoke", refusal, "verify without it, or resume with the script that trained")
    return compare(index, results, log)


def _checksum(index: CheckpointIndex, files: Files, state: State, begin: int, end: int, dtype: str) -> int:
    """Return the CRC-32 of elements in the files, cast to a dtype."""
    held, crc = held_of(index, state), 0
    for low in range(begin, end, CHUNK_ELEMENTS):
        for fragment in held.place.cover(low, min(low + CHUNK_ELEMENTS, end)):
            data = bytearray(fragment.extent.num_bytes)
            files.read_into(fragment.extent.path, fragment.extent.start, memoryview(data))
            crc = crc32(memoryview(data) if dtype == held.dtype else cast(data, held.dtype, dtype), crc)
    return crc


def needed_bytes(index: CheckpointIndex) -> int:
    """Return an estimate of the ranks' total memory."""
    numel = sum(param.numel for param in index.params.values())
    ranks = index.world_size if index.form.stage else 1
    # a rank builds the model in fp32, and also has it in the run's precision; masters and moments exist twice: in the
    # engine and as loaded
    return ranks * (PROCESS_BYTES + 6 * numel) + 2 * 12 * numel


def check_possible(index: CheckpointIndex) -> None:
    """Raise UsageError with everything that prevents a trial resume here."""
    wanted = ("torch", "transformers", "accelerate", *(("deepspeed",) if index.form.stage else ()))
    lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
    dtypes = {held.dtype for state, held in index.held.items() if state.kind == MASTER}
    needed, free = needed_bytes(index), _available_bytes()
    problems: list[tuple[str, str]] = []
    if lacking:
        what = f"it needs {', '.join(lacking)}, which is not installed"
        problems.append((what, "pip install 'llmtailor[train]', or verify without it"))
    if index.form.family in (UNIVERSAL, FSDP, DCP) or (index.client == ACCELERATE and not index.form.stage):
        what = "a trial resume is made with ZeRO checkpoints and the plain Trainer's only"
        problems.append((what, "verify with --deep, or resume with the script that trained"))
    elif CONFIG not in index.files:  # as in every checkpoint of an adapter
        what = f"{CONFIG}, which describes the model, is missing"
        problems.append((what, "verify with --deep, or resume with the script that trained"))
    if index.form.stage and index.world_size > MAX_RANKS:
        what = f"the checkpoint is for {index.world_size} ranks, but at most {MAX_RANKS} processes are started"
        problems.append((what, f"llmtailor convert {index.root} OUT --num-gpu {MAX_RANKS}, then try OUT"))
    if index.form.stage and dtypes != {"F32"}:
        what = f"the masters are {', '.join(sorted(dtypes))}; only fp32 masters are supported"
        problems.append((what, "verify without it"))
    if needed > free:
        what = f"the ranks need about {needed / 1e9:.1f} GB of memory in total, but {free / 1e9:.1f} GB are free"
        problems.append((what, "try it on a larger machine, or verify without it"))
    if problems:
        raise UsageError(Problem("--resume-smoke", what, fix) for what, fix in problems)


def _available_bytes() -> float:
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return math.inf
    return int(facts["MemAvailable"].split()[0]) << 10 if "MemAvailable" in facts else math.inf


def make_task(index: CheckpointIndex, folder: str) -> dict[str, Any]:
    """Return what the ranks must build: the optimizer's groups, and the DeepSpeed settings that decide the layout."""
    return {
        "root": str(index.root.absolute()),
        "folder": folder,
        "stage": index.form.stage,
        "precision": index.precision,
        "frozen": [param.name for param in index.params.values() if param.role == "frozen"],
        "groups": [
            {"params": list(group.params), "hyper": {key: group.hyper[key] for key in _ADAMW if key in group.hyper}}
            for group in index.groups
        ],
        **(_deepspeed_task(index) if index.form.stage else {}),
    }


_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad")


def _deepspeed_task(index: CheckpointIndex) -> dict[str, Any]:
    settings = index.zero.settings
    zero: dict[str, Any] = {"stage": index.form.stage}
    if index.form.stage == 3:
        zero["sub_group_size"] = settings.sub_group_size
    else:
        zero |= {"round_robin_gradients": settings.round_robin}
        zero |= {"parameter_alignment": True} if settings.parameter_alignment else {}  # unknown before 0.19.8
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": index.precision == "BF16"},
        "fp16": {"enabled": index.precision == "F16"},
    }
    if settings.fp32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    tree = next(tree for tree in index.train.model if tree is not None)
    saved = tree.get("ds_config") or {}
    if "scheduler" in saved:
        config["scheduler"] = saved["scheduler"]
        kind = "deepspeed"
    else:
        kind = "trainer" if tree.get("lr_scheduler") is None else "handed to deepspeed"
    client = loader_of(index)
    if kind == "trainer" and not client.needs_scheduler:
        kind = "none"
    tag = None if client.name == DEEPSPEED else index.zero.tag
    return {"config": config, "scheduler": kind, "is_trainers": client.name == TRAINER, "tag": tag}


def _run(task: Mapping[str, Any], ranks: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Start the ranks and wait for them; return each one's report, by rank, and the end of their output."""
    (folder / "task.json").write_text(json.dumps(task))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if task["stage"] else []
    worker = ["-m", "llmtailor.verify.smoke_worker", str(folder / "task.json"), str(folder)]
    command = [sys.executable, *launcher, *worker]
    log, watch = folder / "log", Stopwatch()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(time_limit(TIMEOUT_S))
        except subprocess.TimeoutExpired as error:
            raise too_slow("--resume-smoke", "the trial resume", error.timeout) from error
        except KeyboardInterrupt:
            raise Interrupted.at("", "interrupted", "rerun the same command") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    written = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.removeprefix("rank-")))
    logger.info("trial resume with %d processes took %s; exit code %s", ranks, watch.lap(), process.returncode)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    logger.debug("end of their output: %s", tail)
    return [json.loads(path.read_text()) for path in written], tail


def _environment() -> dict[str, str]:
    """Return the ranks' environment: offline, on the CPU, one thread each, and with this package importable."""
    package = str(Path(llmtailor.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
