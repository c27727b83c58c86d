"""The FSDP trainings of tests/dcp."""

from __future__ import annotations

from dcp.conftest import trained

__all__ = ["trained"]
