"""The gates, one side against the other in threads, with and without eventfd."""

import os
import select
import threading

import pytest

from penstock import RandomAgent, SerialSampler
from penstock.buffers.ordering import full_fence
from penstock.envs import CountingEnv
from penstock.workers import control as control_module
from penstock.workers import gates
from penstock.workers.control import AWAKE, FOR_ANY, Command, ControlBlock
from penstock.workers.gates import Gate, WakeUp


@pytest.fixture(params=["eventfd", "pipe"])
def wake_up_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return str(request.param)


def opened(control: ControlBlock, gate: Gate, itr: int = 0, rank: int = 0) -> None:
    for _ in control.open(Command(itr), [rank]):
        gates.notify(gate.go.writer.fd)


def closed(gate: Gate) -> None:
    gate.go.close()
    gate.done.close()


def is_woken(side: WakeUp) -> bool:
    return bool(select.select([side.reader.fd], [], [], 0)[0])


def test_a_wake_up_is_readable_until_it_is_cleared(wake_up_kind: str) -> None:
    wake_up = WakeUp()
    gates.clear(wake_up.reader.fd)  # nothing there: no harm, no wait
    assert not is_woken(wake_up)
    for _ in range(100_000 if wake_up_kind == "pipe" else 3):  # a full pipe must not block
        gates.notify(wake_up.writer.fd)
    assert is_woken(wake_up)
    gates.clear(wake_up.reader.fd)
    assert not is_woken(wake_up)
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
        opened(control, gate, itr)
        control.main_asleep[0] = FOR_ANY if itr % 2 else 1
        full_fence()
        while not control.has_arrived(0):
            assert select.select([gate.done.reader.fd], [], [], 10)[0], "the worker wakes a main process that sleeps"
            gates.clear(gate.done.reader.fd)
        control.main_asleep[0] = AWAKE
    thread.join(10)
    assert work == list(range(200))
    closed(gate)


def test_sides_that_are_awake_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    control = ControlBlock(2, 1, shared=False)
    progress, gate = control.progress(0), Gate(control, 0, spin_seconds=1.0)
    cleared: list[int] = []
    monkeypatch.setattr(gates, "clear", cleared.append)
    for itr in range(3):
        opened(control, gate, itr)
        gate.wait_in(progress)
        gate.arrive(progress)
        opened(control, gate)
        control.reply([0], [progress.n_requests + 1])
        gate.request(progress, 1)
        progress.arrived += 1
        assert not any(map(is_woken, (gate.go, gate.done)))
    assert cleared == []
    closed(gate)


def test_where_no_fence_orders_a_load_behind_a_store_everybody_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    control = ControlBlock(1, 1, shared=False)
    gate = Gate(control, 0, spin_seconds=1.0)
    monkeypatch.setattr(gates, "HAS_FULL_FENCE", False)
    monkeypatch.setattr(control_module, "HAS_FULL_FENCE", False)
    opened(control, gate)
    assert is_woken(gate.go)
    gate.wait_in(control.progress(0))
    gate.arrive(control.progress(0))
    assert is_woken(gate.done)
    closed(gate)


def test_a_main_process_that_waits_for_all_is_woken_by_the_last() -> None:
    control = ControlBlock(3, 1, shared=False)
    all_gates = [Gate(control, rank, spin_seconds=0.0) for rank in range(3)]
    for rank, gate in enumerate(all_gates):
        opened(control, gate, rank=rank)
    control.main_asleep[0] = 3
    for rank in (2, 0, 1):
        assert not any(is_woken(gate.done) for gate in all_gates)
        all_gates[rank].arrive(control.progress(rank))
    assert [is_woken(gate.done) for gate in all_gates] == [False, True, False]
    control.main_asleep[0] = FOR_ANY
    opened(control, all_gates[0])
    all_gates[0].arrive(control.progress(0))
    assert is_woken(all_gates[0].done)
    for gate in all_gates:
        closed(gate)


def test_a_worker_that_sleeps_says_so_before_its_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opening comes when the worker has looked, and before it polls: it is seen, and the worker does not sleep."""
    control = ControlBlock(1, 1, shared=False)
    gate, woken = Gate(control, 0, spin_seconds=0.0), []
    monkeypatch.setattr(gates, "notify", lambda fd: woken.append("wake"))

    def open_the_gate() -> None:
        if not control.opened[0]:
            opened(control, gate)

    monkeypatch.setattr(gates, "full_fence", open_the_gate)
    gate.wait_in(control.progress(0))
    assert woken == ["wake"]
    assert not control.is_asleep(0)
    closed(gate)


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
        gates.notify(gate.go.writer.fd)
    assert not entered.wait(0.1)
    opened(control, gate)
    assert entered.wait(10)
    thread.join(10)
    closed(gate)


def test_a_worker_in_place_is_never_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="samplers need torch")
    monkeypatch.setattr(control_module, "HAS_FULL_FENCE", False)
    with SerialSampler(CountingEnv, batch_T=2, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert sampler.obtain_samples(0)[0].env.reward.shape == (2, 2)
