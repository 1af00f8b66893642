"""What a worker hands over and the main process cannot unpickle, or did not expect."""

import os
from typing import Any

import pytest

from penstock import (
    ConfigError,
    EnvCallError,
    ParallelSampler,
    RandomAgent,
    SamplerState,
    TrajectoryCountError,
    TrajInfo,
)
from penstock.buffers.object_pipe import ObjectPipe
from penstock.envs import CountingEnv

from ..support import sampler_of

pytestmark = pytest.mark.timeout(120)


class NeedsTwo(Exception):
    """Its pickle calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class KeepsErrors(TrajInfo):
    def terminate(self, final_observation: Any) -> None:
        self.Error = NeedsTwo(1, 2)


def test_an_attribute_that_cannot_be_unpickled_is_named_in_that_batch_and_no_other() -> None:
    with sampler_of(ParallelSampler, batch_T=12, traj_info_cls=KeepsErrors) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        says = r"attribute 'Error' of a KeepsErrors of env_rank 0, .* cannot be unpickled .*TypeError"
        for itr in range(3):
            with pytest.raises(ConfigError, match=says) as caught:
                sampler.obtain_samples(itr)
            assert isinstance(caught.value.__cause__, TypeError)
            assert sampler.state is SamplerState.READY
            assert sampler.samples_np.env.valid.all()
            assert sampler.get_attr("length") == [5] * 4, "nothing of the batch is left in the pipes"
        assert sampler.stats().workers[0].batches == 3


def test_another_number_than_promised_breaks_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    with sampler_of(ParallelSampler, batch_T=12, traj_info_cls=KeepsErrors) as sampler:
        sampler.initialize(RandomAgent(), seed=0)

        def lose(self: ObjectPipe, promised: int, **options: Any) -> Any:
            return take(self, promised + 1, **options)

        take = ObjectPipe.take
        monkeypatch.setattr(ObjectPipe, "take", lose)
        for _ in range(2):
            with pytest.raises(TrajectoryCountError, match=r"1 results arrived|2 results arrived, 3 were expected"):
                sampler.get_attr("length")
            assert sampler.state is SamplerState.BROKEN


class AtHome:
    """Can be unpickled in one process alone."""

    def __reduce__(self) -> Any:
        return eval, (f"1 // (__import__('os').getpid() == {os.getpid()})",)


class Homely(CountingEnv):
    def answer(self) -> Any:
        return AtHome()


def test_a_result_that_cannot_be_unpickled_harms_nobody() -> None:
    says = "call .answer. on env_rank 0 returned a result .* cannot be unpickled .* ZeroDiv"
    with sampler_of(ParallelSampler, Homely) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for _ in range(2):
            with pytest.raises(EnvCallError, match=says):
                sampler.call("answer")
            assert sampler.get_attr("length") == [5] * 4
        sampler.obtain_samples(0)
