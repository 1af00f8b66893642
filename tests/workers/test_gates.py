"""The gates, one side against the other in threads, with and without eventfd."""

import os
import select
import threading

import pytest

from penstock.buffers.descriptors import InheritedFd
from penstock.workers.control import Command, ControlBlock
from penstock.workers.gates import Gate, MainProcessGone, WakeUp


@pytest.fixture(params=["eventfd", "pipe"])
def wake_up_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return str(request.param)


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_wake_up_is_readable_until_it_is_cleared(wake_up_kind: str) -> None:
    wake_up = WakeUp()
    wake_up.clear()  # nothing there: no harm, no wait
    assert not _is_readable(wake_up.fileno())
    for _ in range(100_000 if wake_up_kind == "pipe" else 3):  # a full pipe must not block
        wake_up.notify()
    assert _is_readable(wake_up.fileno())
    wake_up.clear()
    assert not _is_readable(wake_up.fileno())
    wake_up.close()


@pytest.mark.parametrize("spin", [True, False])
def test_every_opening_is_answered_once(wake_up_kind: str, spin: bool) -> None:
    control = ControlBlock(1, 1, shared=False)
    progress = control.progress(0)
    gate = Gate(control, 0, spin_seconds=50e-6 if spin else 0.0)
    work = []

    def worker() -> None:
        for _ in range(200):
            gate.wait_in(progress)
            work.append(progress.command.itr)
            gate.arrive(progress)

    thread = threading.Thread(target=worker)
    thread.start()
    for itr in range(200):
        gate.open(Command(itr))
        while not control.has_arrived(0):
            select.select([gate.fileno()], [], [], 10)
            gate.clear()
    thread.join(10)
    assert work == list(range(200))
    gate.close()


def test_stray_wake_ups_open_nothing(wake_up_kind: str) -> None:
    control = ControlBlock(1, 1, shared=False)
    gate = Gate(control, 0, spin_seconds=0.0)
    entered = threading.Event()

    def worker() -> None:
        gate.wait_in(control.progress(0))
        entered.set()

    thread = threading.Thread(target=worker)
    thread.start()
    for _ in range(10):
        gate._go.notify()
    assert not entered.wait(0.1)
    gate.open()
    assert entered.wait(10)
    thread.join(10)
    gate.close()


def test_a_waiting_worker_notices_the_end_of_the_main_process() -> None:
    control = ControlBlock(1, 1, shared=False)
    gate = Gate(control, 0, spin_seconds=0.0)
    read, write = os.pipe()
    os.close(write)  # readable at once, as the pidfd of a dead process is
    gate.main_process = main_process = InheritedFd(read)
    with pytest.raises(MainProcessGone):
        gate.wait_in(control.progress(0))
    main_process.close()
    gate.close()
