"""inference="numpy" and "traced" in samplers: they follow publications, and are checked at the start."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.wrappers import TransformObservation
from torch import nn

from penstock import CategoricalPgAgent, GpuSampler, ParallelSampler, RandomAgent, WorkerError
from penstock.testing import DelegatingAgent, Fault, faulty_env

from ..models import CartPoleNet as Net
from ..scale import USUAL_METHODS, pairs
from .started import check_refused, started
from .test_equalities import SAMPLERS

pytestmark = pytest.mark.slow

FAST = ("traced", "numpy")
CARTPOLE = partial(gym.make, "CartPole-v1", max_episode_steps=25)
USED = ("serial", "2 workers", "central", "central, first-ready", "central, own process", "alternating")


def set_weights(agent: CategoricalPgAgent, action: int, value: float) -> None:
    """The agent then takes `action` everywhere, and estimates `value`."""
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter.zero_()
        agent.model.policy.bias[action] = 200.0
        agent.model.value.bias.fill_(value)


STARTED = [
    (*case, False, {"start_method": method})
    for case, method in pairs(product(["2 workers", "central, own process"], FAST), USUAL_METHODS[::-1])
]


@pytest.mark.parametrize(
    ("case", "kind", "is_wrapped", "more"),
    [*((*case, False, {}) for case in pairs(USED, FAST)), *(("serial", kind, True, {}) for kind in FAST), *STARTED],
)
def test_every_sampler_follows_publications(case: str, kind: Any, is_wrapped: bool, more: dict[str, Any]) -> None:
    (cls, options), agent = SAMPLERS[case], CategoricalPgAgent(Net, inference=kind)
    outer = DelegatingAgent(agent) if is_wrapped else agent
    sizes: dict[str, Any] = {"batch_T": 6, "batch_B": 5, "eval_n_envs": 2, "eval_max_steps": 60}
    with started(CARTPOLE, outer, cls, bootstrap_value=True, **sizes, **options, **more) as sampler:
        assert 0 <= sampler.stats().inference_difference < 1e-5, "from what torch computes"
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


# ---- the check at the start --------------------------------------------------------------------


@pytest.mark.parametrize("agent", [RandomAgent(), CategoricalPgAgent(Net)], ids=["random", "torch"])
def test_without_it_there_is_no_difference_to_report(agent: Any) -> None:
    with started(CARTPOLE, agent) as sampler:
        assert sampler.stats().inference_difference is None


def far_from_zero() -> Any:
    """Observations where the models below differ."""
    return TransformObservation(CARTPOLE(), lambda observation: observation + 1, None)


class CountsCalls(Net):
    """Its outputs depend on a number that tracing takes for a constant."""

    calls = 0

    def forward(self, observation: Any) -> Any:
        self.calls += 1
        logits, value = super().forward(observation)
        return logits, value + self.calls * observation[:, 0]


@pytest.mark.parametrize("kind", FAST)
def test_a_model_that_computes_something_else_when_traced_is_refused(kind: Any) -> None:
    message = f'inference="{kind}" computes other outputs.*output 1 dif'
    check_refused(far_from_zero, message, CategoricalPgAgent(CountsCalls, inference=kind))


def test_a_refused_layer_is_named_by_initialize() -> None:
    class Rectified(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body[1] = nn.Softplus()

    agent = CategoricalPgAgent(Rectified, inference="numpy")
    check_refused(CARTPOLE, r"cannot run layer 'body\.1', a Softplus", agent, cls=ParallelSampler)


@pytest.mark.parametrize("kind", FAST)
def test_torch_compile_is_for_torch(kind: Any) -> None:
    message = f'compile_model needs an agent with inference="torch", got "{kind}"'
    check_refused(CARTPOLE, message, CategoricalPgAgent(Net, inference=kind), cls=GpuSampler, compile_model=True)


def test_an_environment_that_does_not_reset_is_reported_by_its_worker() -> None:
    env_fn = faulty_env(CARTPOLE, Fault("raise"), "reset")
    check_refused(env_fn, "InjectedFault", CategoricalPgAgent(Net, inference="numpy"), error=WorkerError)
