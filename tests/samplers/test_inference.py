"""inference="numpy" and "traced" in samplers: they follow publications, and are checked at the start."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

from penstock import (
    AlternatingSampler,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
)
from penstock.testing import DelegatingAgent

from ..models import CartPoleNet as Net
from ..scale import START_METHODS, pairs

pytestmark = pytest.mark.slow

FAST = ("traced", "numpy")
CARTPOLE = partial(gym.make, "CartPole-v1", max_episode_steps=25)
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": (SerialSampler, {}),
    "parallel": (ParallelSampler, {"n_workers": 2}),
    "central": (GpuSampler, {"n_workers": 2}),
    "central, first ready": (GpuSampler, {"n_workers": 2, "min_ready": 1}),
    "central, in a process": (GpuSampler, {"n_workers": 2, "server": "process"}),
    "alternating": (AlternatingSampler, {"n_workers": 2}),
}


def set_weights(agent: CategoricalPgAgent, action: int, value: float) -> None:
    """The agent then takes `action` everywhere, and estimates `value`."""
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter.zero_()
        agent.model.policy.bias[action] = 200.0
        agent.model.value.bias.fill_(value)


def check_publications(cls: Any, kind: Any, wrap: Any = lambda agent: agent, **options: Any) -> None:
    agent = CategoricalPgAgent(Net, inference=kind)
    with cls(CARTPOLE, batch_T=6, batch_B=5, eval_n_envs=2, eval_max_steps=60, **options) as sampler:
        outer = wrap(agent)
        sampler.initialize(outer, seed=1, bootstrap_value=True)
        for itr, (action, value) in enumerate([(0, 3.0), (1, -4.0), (0, 5.0)]):
            set_weights(agent, action, value)
            outer.sync_shared_memory()
            samples, _ = sampler.obtain_samples(itr)
            assert (samples.agent.action == action).all()
            assert (samples.agent.agent_info.value == value).all()
            assert (samples.agent.bootstrap_value == value).all()
            set_weights(agent, 1 - action, value)
            outer.sync_shared_memory()
            # A pole that is always pushed in one direction falls after 8 to 11 steps.
            assert {info.Length for info in sampler.evaluate_agent(itr)} <= {8, 9, 10, 11}


STARTED = [
    (*case, {"start_method": method})
    for case, method in pairs(product(["parallel", "central, in a process"], FAST), START_METHODS)
]


@pytest.mark.parametrize(("case", "kind", "more"), [*((*case, {}) for case in pairs(SAMPLERS, FAST)), *STARTED])
def test_every_sampler_follows_publications(case: str, kind: str, more: dict[str, Any]) -> None:
    cls, options = SAMPLERS[case]
    check_publications(cls, kind, **options, **more)


@pytest.mark.parametrize("kind", FAST)
def test_an_agent_around_it_follows_publications(kind: str) -> None:
    check_publications(SerialSampler, kind, DelegatingAgent)


# ---- the check at the start --------------------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), pairs(["serial", "parallel", "central, in a process", "central"], FAST))
def test_stats_have_the_difference_to_torch(case: str, kind: Any) -> None:
    cls, options = SAMPLERS[case]
    with cls(CARTPOLE, batch_T=2, batch_B=4, **options) as sampler:
        sampler.initialize(CategoricalPgAgent(Net, inference=kind), seed=0)
        difference = sampler.stats().inference_difference
        assert 0 <= difference < 1e-5


@pytest.mark.parametrize("agent", [RandomAgent(), CategoricalPgAgent(Net)], ids=["random", "torch"])
def test_without_it_there_is_no_difference_to_report(agent: Any) -> None:
    with SerialSampler(CARTPOLE, batch_T=2, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        assert sampler.stats().inference_difference is None


class Seen(gym.Wrapper[Any, Any, Any, Any]):
    """Observations far from zero, where the models below differ."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation + 1, info

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return observation + 1, *rest


class CountsCalls(Net):
    """Its outputs depend on a number that tracing takes for a constant."""

    calls = 0

    def forward(self, observation: Any) -> Any:
        self.calls += 1
        logits, value = super().forward(observation)
        return logits, value + self.calls * observation[:, 0]


@pytest.mark.parametrize("kind", FAST)
def test_a_model_that_computes_something_else_when_traced_is_refused(kind: Any) -> None:
    with SerialSampler(lambda: Seen(CARTPOLE()), batch_T=2, batch_B=2) as sampler:
        agent = CategoricalPgAgent(CountsCalls, inference=kind)
        with pytest.raises(ConfigError, match=f'inference="{kind}" computes other outputs.*output 1 dif'):
            sampler.initialize(agent, seed=0)


def test_a_refused_layer_is_named_by_initialize() -> None:
    class Rectified(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body[1] = nn.Softplus()

    with (
        ParallelSampler(CARTPOLE, batch_T=2, batch_B=2, n_workers=1) as sampler,
        pytest.raises(ConfigError, match=r"cannot run layer 'body\.1', a Softplus"),
    ):
        sampler.initialize(CategoricalPgAgent(Rectified, inference="numpy"), seed=0)


@pytest.mark.parametrize("kind", FAST)
def test_torch_compile_is_for_torch(kind: Any) -> None:
    with (
        GpuSampler(CARTPOLE, batch_T=2, batch_B=2, n_workers=1, compile_model=True) as sampler,
        pytest.raises(ConfigError, match=f'compile_model needs an agent with inference="torch", got "{kind}"'),
    ):
        sampler.initialize(CategoricalPgAgent(Net, inference=kind), seed=0)


def test_an_environment_that_does_not_reset_is_reported_by_its_worker() -> None:
    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            raise OSError("no such file")

    with (
        SerialSampler(lambda: Broken(CARTPOLE()), batch_T=2, batch_B=2) as sampler,
        pytest.raises(Exception, match="no such file") as caught,
    ):
        sampler.initialize(CategoricalPgAgent(Net, inference="numpy"), seed=0)
    assert type(caught.value).__name__ == "WorkerError"
