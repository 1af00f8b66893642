"""How long a process spins before it sleeps. Its recent waits decide."""

from __future__ import annotations

from penstock.workers.affinity import usable_cpus

#: The longest time. A wake-up takes 20 to 50 µs, and much longer where other programs run.
SPIN_SECONDS = 1e-3

_WEIGHT = 1 / 8  # of the last wait in the moving averages
_MARGIN_SECONDS = 20e-6  # added to twice the average wait
_FIRST_SECONDS = 100e-6  # the average before the first wait
_MOST_MISSES = 0.3  # with a larger share of misses, pause: after three misses in a row, for example
_MISSES_IN_TRIAL = 0.25  # the share at the end of a pause, so that one more miss begins the next pause
_PAUSES = (32, 512)  # how many waits a pause lasts: the first one, and at most


class SpinTime:
    """How long to spin in the next wait: about twice the moving average of the recent waits of the same kind.

    A spin is a *miss* if the process must sleep after it: because the wait is longer than `most_seconds`, or because
    another program takes the CPU. After too many misses there is a *pause*: the next waits do not spin. If the first
    spin after the pause is a miss too, another pause follows, which is twice as long. The first wait does not spin: it
    is for the start of all processes.

    If a spin ends much too late, another program got the CPU when this process yielded. A process that sleeps gets its
    CPU back sooner. So a pause begins at once.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most, self._average, self._misses = most_seconds, min(most_seconds, _FIRST_SECONDS), 0.0
        self._longest = min(most_seconds, 2 * self._average + _MARGIN_SECONDS)  # how long a spin may be now
        self._pause, self._left = _PAUSES[0], 1  # the length of the next pause, and the waits left of this one
        self.seconds = 0.0  #: how long to spin in the next wait; 0.0: sleep at once

    def note(self, seconds: float, has_slept: bool) -> None:
        """After each wait: it took `seconds`. `has_slept`: spinning was not enough."""
        is_late = not has_slept and seconds > self.seconds + self._most
        # A longer wait counts as one that a spin would just have covered. Otherwise one very long wait, for a learner
        # or because another program ran, would make the next spins much longer.
        self._average += (min(seconds, self._longest) - self._average) * _WEIGHT
        self._longest = min(self._most, 2 * self._average + _MARGIN_SECONDS)
        if self._left:
            self._left -= 1
        else:
            self._misses = 1.0 if is_late else self._misses + (has_slept - self._misses) * _WEIGHT
            if self._misses > _MOST_MISSES:
                self._misses, self._left = _MISSES_IN_TRIAL, self._pause
                self._pause = min(2 * self._pause, _PAUSES[1])
            elif self._misses < _MISSES_IN_TRIAL / 2:
                self._pause = _PAUSES[0]
        self.seconds = 0.0 if self._left else self._longest


def is_crowded(n_processes: int) -> bool:
    """Whether there are fewer CPUs than processes. Then each process that spins yields the CPU after each look."""
    cpus = usable_cpus()
    return not cpus or n_processes > len(cpus)
