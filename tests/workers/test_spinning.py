"""How long the next wait spins, after waits of these lengths."""

from itertools import pairwise

import pytest

from penstock.workers import spinning
from penstock.workers.spinning import SpinTime, is_crowded


def after(waits: list[float], spin_time: SpinTime) -> float:
    """The time to spin after waits of these lengths."""
    for seconds in waits:
        spin_time.note(seconds, has_slept=seconds > spin_time.seconds)
    return spin_time.seconds


def test_it_spins_for_about_twice_the_recent_waits() -> None:
    assert after([100e-6] * 50, SpinTime(1e-3)) == pytest.approx(220e-6, rel=0.05)
    assert after([400e-6] * 50, SpinTime(1e-3)) == pytest.approx(820e-6, rel=0.05)
    assert 220e-6 < after([100e-6] * 50 + [10.0], SpinTime(1e-3)) < 260e-6, "one long wait changes little"
    assert after([10.0] * 30 + [400e-6] * 50, SpinTime(1e-3)) == pytest.approx(820e-6, rel=0.05), "many change it"


def test_it_does_not_spin_where_waits_are_long() -> None:
    assert after([0.1] * 4, SpinTime(1e-3)) == 0.0, "the first wait does not spin, the next three are misses"
    assert after([1.5e-3] * 20, SpinTime(1e-3)) == 0.0
    assert after([], SpinTime(0.0)) == after([1e-6] * 9, SpinTime(0.0)) == 0.0


def test_it_spins_again_when_waits_become_short() -> None:
    spin_time = SpinTime(1e-3)
    assert after([0.1] * 1001, spin_time) == 0.0
    assert after([50e-6] * 512, spin_time) > 0.0
    assert after([50e-6] * 50, spin_time) == pytest.approx(120e-6, rel=0.05)


def test_among_long_waits_it_tries_again_ever_more_rarely() -> None:
    spin_time, spins = SpinTime(1e-3), list[int]()
    for i in range(3000):
        if spin_time.seconds > 0:
            spins.append(i)
        spin_time.note(0.1, has_slept=True)
    pauses = [b - a - 1 for a, b in pairwise(spins)]
    assert pauses == [0, 0, 32, 64, 128, 256, 512, 512, 512, 512]


def test_it_sleeps_after_another_program_has_taken_the_cpu_for_long() -> None:
    spin_time = SpinTime(1e-3)
    assert after([50e-6] * 50, spin_time) > 0
    spin_time.note(3e-3, has_slept=False)
    assert spin_time.seconds == 0.0
    assert after([50e-6] * 31, spin_time) == 0.0
    assert after([50e-6], spin_time) > 0, "it tries again"


@pytest.mark.parametrize(("cpus", "crowds"), [((0, 3), [3]), ((), [1, 2, 3])], ids=["two", "how many is not said"])
def test_processes_are_a_crowd_if_there_are_more_than_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...], crowds: list[int]
) -> None:
    monkeypatch.setattr(spinning, "usable_cpus", lambda: cpus)
    assert [n for n in (1, 2, 3) if is_crowded(n)] == crowds
