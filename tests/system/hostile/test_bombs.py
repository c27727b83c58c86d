"""What asks for the impossible is refused, within bounds of memory and time that the operating system enforces."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys

import pytest

from hostile.bombs import SAYINGS, TORCH_FILES, UNIVERSAL, WEIGHTS, laughs
from hostile.exploits import STOP

MEMORY = 2 << 30
"""Address space of the process that reads them, in bytes"""
SECONDS = 100
"""CPU time of that process for all of them together"""
KINDS = {"torch": TORCH_FILES, "weights": WEIGHTS, "zero3": SAYINGS, "universal": UNIVERSAL}
SLOW = {
    *("a million objects", "half a million dicts", "5 million lists", "config.json of nothing but lists"),
    *("a header full of tensors", "a header full of lists", "half a million marks", "half a million entries"),
    *("a million levels", "a tensor of a million dimensions", "a text of 60 MiB"),
}
"""Seconds each"""
ALL = [
    pytest.param(kind, name, told, id=f"{kind}: {name}", marks=pytest.mark.long if name in SLOW else ())
    for kind, bombs in KINDS.items()
    for name, (_, told) in bombs.items()
]

PROGRAM = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
from llmtailor.cli.tables import inspection_text
from llmtailor.errors import TailorError
from llmtailor.containers.safetensors import read_header
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.verify.inspect import inspect_checkpoint

def inspect(path):
    content = inspect_checkpoint(path)
    json.dumps(content), inspection_text(content)

read = {
    "torch": lambda path: read_torch_file(path.parent, path.name, path.name),
    "weights": lambda path: read_header(path.parent, path.name, path.name),
    "zero3": inspect,
    "universal": inspect,
}
for line in sys.stdin:
    kind, name, path = json.loads(line)
    told, crash = [], ""
    try:
        read[kind](Path(path))
    except TailorError as error:
        told = [problem.to_json() for problem in error.problems[:50]]
    except BaseException as error:
        crash = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps([kind, name, told, crash]), flush=True)
"""


@pytest.fixture(scope="module")
def verdicts(pristine, tmp_path_factory, request):
    """(kind, name) -> the problems that a process bounded in memory and time tells of each bomb that is to be tried, or
    its crash."""
    tried = [getattr(item, "callspec", None) for item in request.session.items if item.module is request.module]
    root = tmp_path_factory.mktemp("bombs")
    jobs = []
    for number, (kind, name) in enumerate((one.params["kind"], one.params["name"]) for one in tried if one):
        path = root / str(number)
        if kind in pristine:
            shutil.copytree(pristine[kind], path)
        build, _ = KINDS[kind][name]
        build(path)
        jobs.append((kind, name, str(path)))
    command = [sys.executable, "-c", PROGRAM, str(MEMORY), str(SECONDS)]
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    result = subprocess.run(command, input=lines, capture_output=True, text=True)
    shutil.rmtree(root)
    assert result.returncode == 0, f"{result.returncode} after {result.stdout[-500:]}: {result.stderr[-2000:]}"
    return {(kind, name): (told, crash) for kind, name, told, crash in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize(("kind", "name", "told"), ALL)
def test_it_is_refused_with_a_reason(verdicts, kind, name, told):
    problems, crash = verdicts[kind, name]
    assert not crash
    assert not told or problems, "it was read"
    assert any(re.search(told, problem["what"]) for problem in problems) or not told, problems
    assert all(problem["where"] and problem["fix"] for problem in problems)


def test_the_bombs_are_real():
    """A pickle of 450 bytes has 2**59 leaves to be walked; 64-bit keys of one hash make a dict quadratic."""
    data = b"\x80\x02(" + laughs(b"]", b"l") + b"t" + STOP
    assert len(data) < 600
    tree, depth = pickle.loads(data)[-1], 0
    while tree:
        tree, depth = tree[1], depth + 1
    assert depth == 59
    assert len({hash(at * (2**61 - 1)) for at in range(1, 1000)}) == 1
