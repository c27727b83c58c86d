"""Whether a training holds what the checkpoint says that it was resumed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

take: Callable[[Any, Any], None] | None = None
"""Gets each attestation and its ranks in place of the user: ``llmtailor attest`` sets it, and ends the program."""
before_saving: Callable[[], None] | None = None
"""Called where a saver of a loop would begin to change the run; set likewise"""
