"""Claims on CPUs: several processes on one machine must not all pin their workers to the first CPUs.

`claims.py` explains what a claim is. If a system has no claims, every process may use every CPU.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from penstock.workers.claims import Claim, claim
from penstock.workers.plan import Affinity, assign_cpus

#: Processes with different values of this environment variable do not see each other's claims.
NAMESPACE_VARIABLE = "PENSTOCK_CPU_NAMESPACE"

_lock = threading.RLock()
_claims: dict[int, Claim] = {}  # by CPU: what this process has claimed
_users: Counter[int] = Counter()  # how many samplers and vector environments of this process use a CPU


class CpuClaims:
    """The CPUs to which one sampler or vector environment pins workers. Several of one process may share a CPU."""

    def __init__(self) -> None:
        self._cpus: list[int] = []

    def choose(self, affinity: Affinity, n: int, mask: Sequence[int]) -> Sequence[int]:
        """The CPUs of `mask` that workers may be pinned to, and claims them.

        These are `n` CPUs that no other process has claimed (all CPUs of `mask` if it has fewer than `n`). CPUs that
        this process does not use yet come first. The list is empty if other processes have claimed too many. If
        `affinity` has `cpus` or `pin=False`, this claims nothing and returns `mask`.
        """
        if affinity.cpus is not None or not affinity.pin:
            return mask
        with _lock:
            wanted = min(n, len(mask))
            free = (cpu for cpu in sorted(mask, key=lambda cpu: _users[cpu]) if _is_ours(cpu))
            chosen = list(islice(free, wanted))
            if len(chosen) < wanted:
                chosen = []
            self.hold(chosen)
            _release_unused()
        return sorted(chosen, key=mask.index)

    def assign(self, affinity: Affinity, n_workers: int, mask: Sequence[int]) -> list[tuple[int, ...]]:
        """The CPUs of every worker, which are claimed then; see `assign_cpus`."""
        cpus = assign_cpus(affinity, n_workers, self.choose(affinity, n_workers, mask))
        self.hold(cpu for own in cpus for cpu in own)
        return cpus

    def hold(self, cpus: Iterable[int]) -> None:
        """Claim the free CPUs among `cpus`. `close` releases them."""
        with _lock:
            for cpu in set(cpus) - set(self._cpus):
                _is_ours(cpu)
                _users[cpu] += 1
                self._cpus.append(cpu)

    def close(self) -> None:
        """Give the CPUs back; harmless when repeated."""
        with _lock:
            while self._cpus:
                cpu = self._cpus.pop()
                _users[cpu] = max(0, _users[cpu] - 1)  # 0 in a fork
            _release_unused()


def _is_ours(cpu: int) -> bool:
    """Claim the CPU if no other process has claimed it. Returns whether this process has it."""
    if cpu in _claims:
        return True
    namespace = os.environ.get(NAMESPACE_VARIABLE, "").replace("/", "_")  # it becomes part of the name of a file
    try:
        new = claim("cpu", f"{cpu}-{namespace}")
    except OSError:  # this system has no claims
        return True
    if new is not None:
        _claims[cpu] = new
    return new is not None


def _release_unused() -> None:
    for cpu in list(_claims):
        if not _users[cpu]:
            _claims.pop(cpu).release()


def _abandon() -> None:
    """In a fork, which inherits no claim. Another thread of the parent may have held the lock."""
    global _lock  # noqa: PLW0603 - a property of the process
    _lock = threading.RLock()
    _claims.clear()
    _users.clear()


os.register_at_fork(after_in_child=_abandon)
