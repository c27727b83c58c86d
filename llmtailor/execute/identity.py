"""What a merge is, so that another run can tell whether it may go on with what is there. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmtailor.core.index import FileFact
from llmtailor.core.plan import Convert, Copy, Inline, Plan


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides every byte of the output, and a few words for messages."""

    tool_version: str
    plan: str
    """Digest of the plan: every piece with the folders it reads from, literal bytes included."""
    sources: Mapping[str, FileFact]
    """Every file that pieces read from, by path."""
    request: str
    """Digest of the recipe and the options. It tells whether the user wants the same, even if the plan has changed."""
    recipe: str
    begun: str
    num_bytes: int

    def digest(self) -> str:
        """Return the SHA-256 of what decides the bytes of the output, and of the states that the sources were in."""
        facts = [(path, fact.num_bytes, fact.mtime_ns) for path, fact in sorted(self.sources.items())]
        return hashlib.sha256(repr((self.tool_version, self.plan, facts)).encode()).hexdigest()


def identify(
    plan: Plan,
    facts: Sequence[Mapping[str, FileFact]],
    *,
    tool_version: str,
    recipe: str,
    request: object,
    begun: str,
) -> Identity:
    """Identify a merge. ``facts`` are those of each source's files; ``request`` is anything whose repr is stable."""
    read = {
        (piece.source, piece.path) for file in plan.files for piece in file.pieces if isinstance(piece, (Copy, Convert))
    }
    sources = {f"{plan.sources[source]}/{path}": facts[source][path] for source, path in sorted(read)}
    asked = hashlib.sha256(repr(request).encode()).hexdigest()
    return Identity(tool_version, plan_digest(plan), sources, asked, recipe, begun, plan.num_bytes)


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of all that a plan says."""
    digest = hashlib.sha256(repr(plan.sources).encode())
    for file in plan.files:
        digest.update(f"{file.path!r} {file.num_bytes}".encode())
        for piece in file.pieces:
            if isinstance(piece, Inline):  # its data may be large, and a repr four times that
                digest.update(b"Inline %d %d " % (piece.start, len(piece.data)))
                digest.update(piece.data)
            else:
                digest.update(repr(piece).encode())
    return digest.hexdigest()


def why_not(old: Identity, new: Identity) -> str:
    """Return why the merge ``new`` can't go on with what ``old`` has written; empty if it can."""
    changed = [
        path for path, fact in new.sources.items() if path not in old.sources or not fact.is_like(old.sources[path])
    ]
    if old.tool_version != new.tool_version:
        return f"it was begun by llmtailor {old.tool_version}, and this is {new.tool_version}"
    if old.plan == new.plan and not changed:
        return ""
    if old.plan != new.plan and old.request != new.request:
        return "it is of another recipe, or has other options"
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more files" if len(changed) > 3 else "")
    return f"its sources have changed since: {shown}" if shown else "its sources have changed since"


def is_another(old: Identity, new: Identity) -> bool:
    """Whether somebody may still want what ``old`` has written, because it is not the same merge in an older state."""
    return old.request != new.request and old.plan != new.plan
