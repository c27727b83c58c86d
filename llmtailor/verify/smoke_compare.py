"""What the engine holds after a resume against what the files say. Pure, apart from the checksums it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, Finding
from llmtailor.core.index import CheckpointIndex
from llmtailor.core.states import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.core.words import some

CrcOf = Callable[[State, int, int, str], int]
"""(state, begin, end, dtype) -> CRC-32 of those elements as the files have them, cast to a dtype"""

_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
}
_FIX = "the files are not what they seem to be; verify with --deep, or take another checkpoint"


def compare(index: CheckpointIndex, results: Sequence[Mapping[str, Any]], log: str, crc_of: CrcOf) -> list[Finding]:
    """Return everything in which a tried resume differs from the files; ``results`` are what each rank told.

    ``log`` is the end of what the ranks printed.
    """
    problems = [result["problem"] for result in results if result["problem"]]
    if problems or len(results) < (index.world_size if index.stage else 1):
        last = log.splitlines()[-1:] or ["nothing was printed"]
        what = f"a stock resume fails: {problems[0] if problems else f'a rank died or hung ({last[0]})'}"
        return [Finding(index.name, what, _FIX, Code.RESUME_FAILS, ERROR)]
    return [
        *_states(index, results, crc_of),
        *_steps(index, results),
        *_counters(index, results[0]),
        *_groups(index, results[0]),
    ]


def _states(index: CheckpointIndex, results: Sequence[Mapping[str, Any]], crc_of: CrcOf) -> Iterator[Finding]:
    counted: dict[State, int] = {}
    wrong: dict[str, dict[str, None]] = {}
    for result in results:
        for told in result["fragments"]:
            state, begin, end = State(told["param"], told["kind"]), told["begin"], told["end"]
            counted[state] = counted.get(state, 0) + end - begin
            dtype = _DTYPES.get(told["dtype"], "")
            source = State(state.param, MASTER) if state.kind == MODULE and index.stage == 3 else state
            if not _is_held(index, source) or crc_of(source, begin, end, dtype) != told["crc"]:
                wrong.setdefault(state.kind, {})[state.param] = None
    for state, held in index.held.items():
        if state.kind not in (WEIGHT, FROZEN, BUFFER) and counted.get(state, 0) != held.numel:
            wrong.setdefault(state.kind, {})[state.param] = None
    for kind, params in wrong.items():
        name = "weight in training" if kind == MODULE else kind
        what = f"after a resume the engine holds another {name} of {some(params)} than the files ({len(params)} params)"
        yield Finding(index.name, what, _FIX, Code.RESUME_DIFFERS, ERROR)


def _is_held(index: CheckpointIndex, state: State) -> bool:
    return state.param in index.module if state.kind == MODULE else state in index.held


def _steps(index: CheckpointIndex, results: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    has_state = any(state.kind not in (WEIGHT, MASTER, FROZEN, BUFFER) for state in index.held)
    expected = [flat.step if has_state else None for flat in index.flat_ids]
    for rank, result in enumerate(results):
        if result["steps"] != expected:
            what = f"after a resume Adam's steps on rank {rank} are {result['steps']}, in the files {expected}"
            yield Finding(index.name, what, _FIX, Code.RESUME_DIFFERS, ERROR)


def _counters(index: CheckpointIndex, result: Mapping[str, Any]) -> Iterator[Finding]:
    for key, expected in (("global_steps", index.global_step), ("skipped_steps", index.skipped_steps)):
        if result[key] not in (None, expected):
            what = f"after a resume {key} is {result[key]}, in the files {expected}"
            yield Finding(index.name, what, _FIX, Code.RESUME_DIFFERS, ERROR)
    scheduler = result["scheduler"]
    if scheduler["problem"]:
        what = f"after a resume the scheduler can't go on: {scheduler['problem']}"
        yield Finding(index.name, what, _FIX, Code.RESUME_DIFFERS, ERROR)


def _groups(index: CheckpointIndex, result: Mapping[str, Any]) -> Iterator[Finding]:
    for number, (group, told) in enumerate(zip(index.groups, result["groups"], strict=True)):
        off = [key for key, value in told.items() if key in group.hyper and _plain(group.hyper[key]) != _plain(value)]
        if off:
            what = f"after a resume {some(off)} of param group {number} are other than in the files"
            yield Finding(index.name, what, _FIX, Code.RESUME_DIFFERS, ERROR)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
