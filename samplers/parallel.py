"""ParallelSampler and SerialSampler: each worker acts for its environments, as a process or in the caller's."""

from __future__ import annotations

from penstock.samplers.sampler import Sampler
from penstock.samplers.who_acts import Acting, CallerSteps, WorkersAct


class ParallelSampler(Sampler):
    """Each worker holds a copy of the agent and a share of the environments.

    It writes its columns of the batch straight into shared memory. After a batch, while the learner trains, it resets
    the environments that need a reset. Then it waits at barrier_in. Use this sampler when the policy is small enough
    for a CPU core: for such policies it is the fastest.
    """

    def acting(self) -> Acting:
        """Each worker acts."""
        return WorkersAct()


class SerialSampler(Sampler):
    """The same collectors and the same results as `ParallelSampler`, without processes.

    `breakpoint()` works in environments, agents and collectors, and nothing needs to be pickled. But a model must allow
    `copy.deepcopy`, since this sampler acts with a copy too. `n_workers`, `affinity`, `start_method` and the timeouts
    have no effect. `start_samples` collects the whole batch before it returns.
    """

    def acting(self) -> Acting:
        """The caller's process is the only worker."""
        return CallerSteps()
