"""Signals become requests, and workers stop at the next chunk."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from llmtailor.copying.pool import run_all, stoppable
from llmtailor.errors import Interrupted, SourceError


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request):
    """A signal that raises KeyboardInterrupt, as both do under the command line."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_is_a_request_and_no_exception(number):
    with stoppable() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(Interrupted):
            stop.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
        time.sleep(1)


def test_the_handlers_of_the_program_still_run(number):
    """A training script may save its own state on SIGTERM; a merge in it is none the wiser."""
    seen = []
    signal.signal(number, lambda *arguments: seen.append(arguments[0]))
    with stoppable() as stop:
        os.kill(os.getpid(), number)
        assert seen == [number]
        assert not stop.requested
    signal.signal(number, signal.SIG_IGN)
    with stoppable():
        assert signal.getsignal(number) == signal.SIG_IGN


def test_other_threads_leave_the_handlers_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with stoppable() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_workers_stop_on_a_signal_however_often_it_comes(number):
    before = set(threading.enumerate())  # other tests leave some: tqdm's monitor
    running = threading.Barrier(3)

    def work(stop):
        running.wait(30)
        while True:
            stop.check()

    with stoppable() as stop:
        signaller = threading.Thread(
            target=lambda: [running.wait(30), *(os.kill(os.getpid(), number) for _ in range(5))]
        )
        signaller.start()
        with pytest.raises(Interrupted):
            run_all([lambda: work(stop)] * 50, 2, stop)
        signaller.join()
    assert not set(threading.enumerate()) - before


def test_a_signal_that_the_kernel_gives_to_a_worker_is_seen(number):
    """The main thread sleeps meanwhile, and Python runs handlers in the main thread only."""

    def work():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        time.sleep(0.1)  # until the main thread waits
        os.kill(os.getpid(), number)
        while True:
            stop.check()

    with stoppable() as stop:
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        try:
            with pytest.raises(Interrupted):
                run_all([work], 1, stop)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def test_the_first_failure_is_told_and_not_what_follows_from_it():
    running = threading.Barrier(2)

    def fail():
        running.wait(30)
        raise SourceError.at("x", "it")

    def work():
        running.wait(30)
        while True:
            stop.check()

    with stoppable() as stop, pytest.raises(SourceError, match="it"):
        run_all([work, fail, *[work] * 50], 2, stop)
