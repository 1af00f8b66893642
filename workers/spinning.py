"""How long a process spins before it sleeps: as long as it pays, by its recent waits."""

from __future__ import annotations

from penstock.workers.affinity import usable_cpus

#: The longest time. A wake-up takes 20 to 50 µs, and much longer where other programs run.
SPIN_SECONDS = 1e-3

_WEIGHT = 1 / 8  # of the last wait in the moving average
_MARGIN_SECONDS = 20e-6  # beyond twice the average
_SLEEPS_PER_TRIAL = 64  # after so many long waits, it tries again whether spinning pays


class SpinTime:
    """How long to spin in the next wait, from a moving average of the recent waits of the same kind.

    If the recent waits were longer than `most_seconds`, the next wait does not spin at all. Waits may be long because
    both sides sleep and must be woken. So after some of them, the average starts again.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most, self._average, self._n_sleeps = most_seconds, most_seconds / 2, 0

    @property
    def seconds(self) -> float:
        """For the next wait."""
        if self._average < self._most:
            return min(self._most, 2 * self._average + _MARGIN_SECONDS)
        return 0.0

    def note(self, seconds: float) -> None:
        """The last wait took `seconds`, sleep included."""
        # One very long wait, such as that for a learner, counts no more than a long one.
        self._average += (min(seconds, 2 * self._most) - self._average) * _WEIGHT
        if self._average >= self._most:
            self._n_sleeps += 1
            if self._n_sleeps == _SLEEPS_PER_TRIAL:
                self._average, self._n_sleeps = self._most / 2, 0


def is_crowded(n_processes: int) -> bool:
    """Whether so many processes have fewer CPUs: then each of them yields the CPU while it spins."""
    cpus = usable_cpus()
    return not cpus or n_processes > len(cpus)
