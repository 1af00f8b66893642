"""Data are stored before the word that announces them, with a fence in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.agents import shared_parameters
from penstock.buffers import native, ordering
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers import control, gates, monitor
from penstock.workers.control import Command, ControlBlock


def test_every_kind_of_fence_can_be_called() -> None:
    ordering.fence_of_locks()
    ordering.fence()
    if native.COMPILED:
        from penstock.buffers import _native

        assert _native.fence() is None  # type: ignore[func-returns-value]
        with pytest.raises(TypeError, match="expected 0 arguments, got 1"):
            _native.fence(1)  # type: ignore[call-arg]


def test_the_fence_is_compiled_where_that_is_possible() -> None:
    assert ordering.fence.__name__ == ("fence" if native.COMPILED else "fence_of_locks")


@pytest.fixture
def seen_at_fences(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`seen_at_fences(module, look)` returns a list, to which each fence of the module adds what `look()` then returns:
    what other processes see at that moment."""

    def watch(module: Any, look: Callable[[], Any] = lambda: None) -> list[Any]:
        seen: list[Any] = []
        monkeypatch.setattr(module, "fence", lambda: seen.append(look()))
        return seen

    return watch


def test_a_command_is_there_before_its_opening(seen_at_fences: Any) -> None:
    block = ControlBlock(1, 1, shared=False)
    seen = seen_at_fences(control, lambda: (block.command(0, 1).itr, block.opened[0]))
    block.open(Command(7), [0])
    assert seen == [(7, 0)]
    assert block.opened[0] == 1


def test_what_a_worker_writes_is_there_before_it_arrives_or_requests(seen_at_fences: Any) -> None:
    block = ControlBlock(1, 1, shared=False)
    row = block.progress(0)
    records = block.memory.arrays.records[0, :, control.BATCHES]
    seen = seen_at_fences(control, lambda: (row.arrived, block.last_request(0)[0], int(records[1])))
    row.words[control.BATCHES] = 9
    row.arrived = 1
    row.request(1)
    assert seen == [(0, 0, 9), (1, 0, 9)]
    assert (row.arrived, block.last_request(0)[0]) == (1, 1)


def test_actions_are_there_before_the_reply(seen_at_fences: Any) -> None:
    block = ControlBlock(1, 1, shared=False)
    seen = seen_at_fences(control, lambda: block.replied(0))
    block.reply([0], [1])
    assert seen == [0]
    assert block.replied(0) == 1


def test_parameters_are_fenced_on_both_sides(seen_at_fences: Any) -> None:
    parameters = shared_parameters.SharedParameters({"w": np.zeros(2)}, shared=False)
    slot = parameters.memory.arrays.slots.s1.p0

    def look() -> Any:
        # Only the stamp of a slot says that it is being written.
        return parameters._stamps[1], slot.tolist(), parameters.version

    seen = seen_at_fences(shared_parameters, look)
    parameters.publish({"w": np.ones(2)})
    assert seen == [(1, [0, 0], 0), (1, [1, 1], 0), (2, [1, 1], 0)]
    seen.clear()
    parameters.read()
    assert len(seen) == 2


def test_both_waits_end_with_a_fence(seen_at_fences: Any) -> None:
    seen = seen_at_fences(monitor)
    with ShmVectorEnv([CountingEnv]) as envs:
        envs.reset()
        seen.clear()
        envs.step([0])
    assert len(seen) == 1
    block = ControlBlock(1, 1, shared=False)
    gate = gates.Gate(block, 0, spin_seconds=0.1)
    block.open(Command(), [0])
    seen = seen_at_fences(gates)
    gate.wait_in(block.progress(0))
    assert len(seen) == 1
    gate.go.close()
    gate.done.close()
