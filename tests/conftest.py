"""Fixtures for tests that need real training. They are lazy: a session that asks for no run trains nothing.

Tests marked ``long`` run only with ``--all``, and so do those parametrized with the name of a training that is long.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helpers.asking import answers_from_a_fork  # noqa: F401
from helpers.reflinks import copied, folder, reflinks, small_limits  # noqa: F401
from llmtailor.salvage import replace
from trainings import harness
from trainings.catalogue import LONG
from trainings.forkserver import MIN_HOST_BUFFER
from trainings.harness import Run, Runs, Train, TrainingFailed, missing
from trainings.spec import Training

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for DeepSpeed's own tools, which tests call
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny, and threads that wait for work take the other core
os.environ.setdefault("LLMTAILOR_ON_MISMATCH", "stop")  # every resume that a callback attests in the suite is clean

TRAINING = {"runs", "train"}
FIRST = ("formats/partial/test_real.py", "system/real/test_merge.py")
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long too")


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C, which tests send, again: shells let what they run in the background ignore it."""
    gc.disable()  # until everything is imported
    replace.SETTLED_S = 0.0  # what tests damage has just been written
    if hasattr(config, "workerinput"):  # of pytest-xdist
        sys.argv = config.workerinput["mainargv"]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time; LLMTAILOR_HYPOTHESIS=random looks for new ones. A busy machine is no failure.
    count = 100 if config.getoption("--all") else 30
    settings.register_profile("same", derandomize=True, deadline=None, max_examples=count)
    settings.register_profile("random", deadline=None)
    settings.load_profile(os.environ.get("LLMTAILOR_HYPOTHESIS", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = missing()
    for item in items:
        fixtures = TRAINING & set(getattr(item, "fixturenames", ()))
        if fixtures:
            item.add_marker("real")
            params = getattr(item, "callspec", None)
            if LONG & set(names_in(params and params.params)):
                item.add_marker("long")
        if absent and item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=f"real training needs {', '.join(absent)}"))
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    # Files that train go first, so that no worker of pytest-xdist waits for another at the end; of these first two that
    # train longest, each something else, because others wait until what they share with them is trained.
    training = {item.path for item in items if TRAINING & set(getattr(item, "fixturenames", ()))}
    items.sort(key=lambda item: (item.path not in training, item.path.relative_to(TESTS).as_posix() not in FIRST))


def pytest_collection_finish() -> None:
    """Leave the libraries and the tests out of garbage collections, which trainings ask for all the time."""
    gc.freeze()
    gc.enable()
    if arena := sys.modules.get("llmtailor.background.arena"):
        arena.LEAST_BUFFER = MIN_HOST_BUFFER  # type: ignore[attr-defined]


def names_in(value: object) -> Iterator[str]:
    """All strings in the values of an item's parameters."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from names_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from names_in(each)


@pytest.fixture(autouse=True, scope="module")
def unsearched() -> None:
    """Leave what earlier modules imported late, and keep, out of garbage collections too."""
    gc.freeze()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, where ``tmp_path`` may be in memory: see scripts/test.sh."""
    if os.major(tmp_path.stat().st_dev):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def runs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """``runs["llama"]`` is a finished training of trainings/catalogue.py. Never write into its folder."""
    session = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        session = session.parent
    return Runs(pytestconfig.getoption("--all"), session / "runs")


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(specs)`` trains them one after another, in a new folder or the one that is given."""

    def start(specs: Iterable[Training], place: Path | None = None) -> dict[str, Run]:
        try:
            return harness.train(specs, place or tmp_path_factory.mktemp("train"))
        except TrainingFailed as error:
            pytest.fail(str(error), pytrace=False)

    return start


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> set[Any]:
    """The parameters, and the pairs of the first two, of the tests of this module that run and use these fixtures:
    ``resumed`` or ``found``.

    They train for all of them at once, and leave out what nobody asks for.
    """
    found: set[Any] = set()
    for item in request.session.items:
        uses = {"resumed", "found"} & {*getattr(item, "fixturenames", ())}
        if item.path == request.path and uses and hasattr(item, "callspec"):
            values = tuple(item.callspec.params.values())
            found |= {*values, values[:2]}
    return found
