"""How long the next wait spins, after waits of these lengths."""

import pytest

from penstock.workers import spinning
from penstock.workers.spinning import SpinTime, is_crowded


def after(waits: list[float], most: float = 1e-3) -> float:
    spin_time = SpinTime(most)
    for seconds in waits:
        spin_time.note(seconds)
    return spin_time.seconds


def test_it_spins_for_about_twice_the_recent_waits() -> None:
    assert after([100e-6] * 50) == pytest.approx(220e-6, rel=0.05)
    assert after([400e-6] * 50) == pytest.approx(820e-6, rel=0.05)
    assert after([100e-6] * 50 + [10.0]) < 1e-3, "one long wait changes little"


def test_it_does_not_spin_where_waits_are_long() -> None:
    assert after([0.1] * 20) == 0.0
    assert after([1.5e-3] * 40) == 0.0
    assert after([], most=0.0) == after([1e-6] * 9, most=0.0) == 0.0


def test_it_spins_again_when_waits_become_short() -> None:
    assert after([0.1] * 20 + [50e-6] * 10) > 0


def test_among_long_waits_it_tries_again_now_and_then() -> None:
    spin_time, n_spins = SpinTime(1e-3), 0
    for _ in range(1000):
        n_spins += spin_time.seconds > 0
        spin_time.note(0.1)
    assert 10 <= n_spins <= 100


def test_processes_are_a_crowd_if_there_are_more_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "usable_cpus", lambda: (0, 3))
    assert not is_crowded(2)
    assert is_crowded(3)
    monkeypatch.setattr(spinning, "usable_cpus", tuple)
    assert is_crowded(1), "the system does not say how many CPUs there are"
