"""Fixtures for tests that need real training. They are lazy: a session that asks for no run trains nothing.

``LLMTAILOR_TEST_CACHE=DIR`` keeps the runs (not what tests resume) for the next session.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest
from hypothesis import settings

from real import harness
from real.harness import Run, Runs, Train, TrainingFailed, missing
from real.spec import Spec

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for DeepSpeed's own tools, which tests call

TRAINING = {"runs", "train"}

# The same examples every time; LLMTAILOR_HYPOTHESIS=random looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("LLMTAILOR_HYPOTHESIS", "same"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long too")


def pytest_configure() -> None:
    """Take Ctrl-C, which tests send, again: shells let what they run in the background ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = missing()
    if not config.getoption("--all"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    for item in items:
        if TRAINING & set(getattr(item, "fixturenames", ())):
            item.add_marker("real")
        if absent and item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=f"real training needs {', '.join(absent)}"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """``runs["llama"]`` is a finished training of real/runs.py. Never write into its folder."""
    return Runs(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(specs, ranks)`` trains them one after another in one set of ranks."""

    def start(specs: Iterable[Spec], ranks: int, program: str = "real.train") -> dict[str, Run]:
        try:
            return harness.train(specs, ranks, tmp_path_factory.mktemp("train"), program=program)
        except TrainingFailed as error:
            pytest.fail(str(error), pytrace=False)

    return start
