from __future__ import annotations

from helpers.asking import answers_from_a_fork  # noqa: F401
