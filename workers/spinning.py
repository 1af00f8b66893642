"""How long a process spins before it sleeps: as long as it pays, by its recent waits."""

from __future__ import annotations

from penstock.workers.affinity import usable_cpus

#: The longest time. A wake-up takes 20 to 50 µs, and much longer where other programs run.
SPIN_SECONDS = 1e-3

_WEIGHT = 1 / 8  # of the last wait in the moving averages
_MARGIN_SECONDS = 20e-6  # beyond twice the average wait
_MOST_MISSES = 0.3  # the share of spins in vain with which spinning does not pay: three in a row are too many
_MISSES_IN_TRIAL = 0.25  # what this share is taken to be when it tries again: then one is too many
_PAUSES = (32, 512)  # for how many waits it does not spin then: at first, and at most


class SpinTime:
    """How long to spin in the next wait: about twice the moving average of the recent waits of the same kind.

    Where too many spins were in vain, the next waits do not spin. Then it tries again, and waits twice as long for the
    next trial if that is in vain too. Spins are in vain where waits are longer than `most_seconds`, and where another
    program takes the CPU.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most, self._average, self._misses = most_seconds, most_seconds / 2, 0.0
        self._pause, self._left = _PAUSES[0], 0  # the length of the next pause, and what is left of this one
        self.seconds = most_seconds  #: for the next wait; 0.0: sleep at once

    def note(self, seconds: float, has_slept: bool) -> None:
        """The last wait took `seconds`, and has slept or not."""
        # A very long wait, such as that for a learner, counts no more than a long one.
        self._average += (min(seconds, self._most) - self._average) * _WEIGHT
        if self._left:
            self._left -= 1
        else:
            self._misses += (has_slept - self._misses) * _WEIGHT
            if self._misses > _MOST_MISSES:
                self._misses, self._left = _MISSES_IN_TRIAL, self._pause
                self._pause = min(2 * self._pause, _PAUSES[1])
            elif self._misses < _MISSES_IN_TRIAL / 2:
                self._pause = _PAUSES[0]
        self.seconds = 0.0 if self._left else min(self._most, 2 * self._average + _MARGIN_SECONDS)


def is_crowded(n_processes: int) -> bool:
    """Whether so many processes have fewer CPUs: then each of them yields the CPU while it spins."""
    cpus = usable_cpus()
    return not cpus or n_processes > len(cpus)
