"""What ``llmtailor attest`` adds to a program that it has started. It imports nothing: torch is being imported then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtailor.attestation.report import Attestation
    from llmtailor.ranks.team import Ranks


@dataclass(slots=True)
class AttestHooks:
    """Calls of a saver, and of whatever else attests. Both may end the program.

    1) ``before_saving``, where the saver of a loop would begin to change the run. 2) ``take``, with each attestation
    and the other arguments of `check.announce`, in its place.
    """

    before_saving: Callable[[], None] | None = None
    take: Callable[[Attestation, Ranks, str], None] | None = None


PROCESS_HOOKS = AttestHooks()
"""Those of a saver that is given no others, and of what attests without a saver"""
