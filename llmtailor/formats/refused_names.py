"""Which names ``torch.load(weights_only=True)`` refuses, with which the Trainer reads its own files."""

from __future__ import annotations

from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Global, children
from llmtailor.findings import ERROR, Finding

_FIX = "a resume fails: torch.load takes it for unsafe; copy the file again, or save it with plain numbers and tensors"
_LEAVES = (str, bytes, int, float, type(None))
OF_ARRAYS = frozenset(("_reconstruct", "ndarray", "dtype"))
"""What the Trainer allows in the files with random number states, of numpy"""


def find_refused(tree: Any, where: str, of_numpy: frozenset[str] = frozenset()) -> list[Finding]:
    """Tell of names that our reader takes and torch's does not; ``of_numpy`` are those of numpy that it does take.

    A file with names that our reader does not take is refused before.
    """
    refused: dict[str, None] = {}
    seen: set[int] = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Global):
            module = node.module.partition(".")[0]
            if module == "deepspeed" or (module == "numpy" and node.name not in of_numpy):
                refused[str(node)] = None
        elif not isinstance(node, _LEAVES) and id(node) not in seen:
            seen.add(id(node))
            nodes += children(node)
    return [Finding(where, f"it names {name}", _FIX, Code.FIELD_TYPE, ERROR) for name in refused]
