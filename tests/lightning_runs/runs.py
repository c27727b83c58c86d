"""The trainings that the tests stand on."""

from __future__ import annotations

import importlib.util

import pytest

from lightning_runs.spec import Spec

RUNS = {
    spec.name: spec
    for spec in (
        Spec("ddp"),
        Spec("ddp-groups", groups=2, norm=True),
        Spec("zero-2", stage=2),
        Spec("zero-3", stage=3, groups=2),
    )
}
SAVERS = {
    spec.name: spec
    for spec in (
        Spec("ddp-saver", groups=2, norm=True, saver="full"),
        Spec("zero-2-saver", stage=2, saver="full"),
        Spec("zero-3-saver", stage=3, saver="full"),
    )
}
ALL = {**RUNS, **SAVERS}
IS_HERE = importlib.util.find_spec("lightning") is not None and importlib.util.find_spec("deepspeed") is not None
needs_lightning = pytest.mark.skipif(not IS_HERE, reason="needs lightning and deepspeed: pip install lightning")
