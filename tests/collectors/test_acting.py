"""What agents may and may not return: errors name it, in the first step and in later ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock import (
    Agent,
    AgentStep,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    Sampler,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.testing import check_agent

from ..support import sampler_of

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])


class Scripted(Agent):
    """Acts as a function says from its n-th step on, and as it should before."""

    def __init__(self, returned: Callable[[int], Any], first: int = 1) -> None:
        self.returned, self.first, self.n_steps = returned, first, 0

    def seed_columns(self, rngs: Any) -> None:
        self.n_steps = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n_steps += 1
        B = len(prev_reward)
        good = AgentStep(zeros(B), info(B, x=np.full(B, self.n_steps, np.float32)))
        returned: AgentStep = good if self.n_steps < self.first else self.returned(B)
        return returned


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


def info(B: int, **fields: Any) -> dict[str, Any]:
    numbers = {"x": np.zeros(B, np.float32), "n": zeros(B), "small": np.zeros(B, np.int8), "flag": np.zeros(B, bool)}
    return {**numbers, "deep": {"y": np.zeros((B, 2))}, **fields}


NO_STEPS: dict[str, Callable[[int], Any]] = {
    "None": lambda B: None,
    "an array": zeros,
    "a tuple": lambda B: (zeros(B), info(B)),
    "a dict": lambda B: {"action": zeros(B)},
}

ALL = r"with the fields \['x', 'n', 'small', 'flag', 'deep'\]"
BAD_INFO: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "None": (lambda B: None, "must be a dict of arrays .* got None", ALL + ", .* got None"),
    "an array": (zeros, r"must be a dict of arrays .* got array", r"with the fields .* got array"),
    "text": (
        lambda B: info(B, x=["a"] * B),
        r"agent_info\.x must be a numeric array \[B, ...\], got \[2\] <U1",
        r"agent_info\.x with shape \(\d,\) and dtype float32, as in the agent's first step, got \(\d,\) <U1",
    ),
    "a number": (
        lambda B: info(B, x=1.0),
        r"agent_info\.x must be a numeric array \[B, ...\], got \[\] float64",
        r"agent_info\.x with shape \(\d,\) and dtype float32, as in the agent's first step, got \(\) float64",
    ),
    "nothing in a field": (
        lambda B: info(B, x=None),
        r"agent_info\.x must be a numeric array \[B, ...\], got \[\] object",
        r"agent_info\.x with shape \(\d,\) .* got \(\) object",
    ),
    "a number below": (
        lambda B: info(B, deep={"y": 1.0}),
        r"agent_info\.deep\.y must be a numeric array",
        r"agent_info\.deep\.y with shape \(\d, 2\) .* got \(\) float64",
    ),
    "ragged": (
        lambda B: info(B, x=[[1], [1, 2]]),
        r"agent_info\.x cannot be converted to an array: ValueError",
        r"agent_info\.x cannot be converted to an array: ValueError",
    ),
    "a gradient": (
        lambda B: info(B, x=torch.zeros(B, requires_grad=True)),
        r"agent_info\.x cannot be converted to an array: RuntimeError: .*grad",
        r"agent_info\.x cannot be converted to an array: RuntimeError: .*grad",
    ),
}

BAD_LATER: dict[str, tuple[Callable[[int], Any], str]] = {
    "left out": (lambda B: NamedArrays(), ALL + r", .* got the fields \[\]"),
    "a node left out": (lambda B: {"x": zeros(B)}, ALL + r", .* got the fields \['x'\]"),
    "a field too many": (lambda B: info(B, z=zeros(B)), ALL + r", .* got the fields \['x', 'n', "),
    "another field": (lambda B: {"x": zeros(B), "z": zeros(B)}, ALL),
    "no whole number": (
        lambda B: info(B, n=np.arange(B) / 2),
        r"agent_info.n of env_rank 1 must have dtype int64, as in the agent's first step, got float64 0.5",
    ),
    "too large": (lambda B: info(B, small=zeros(B) + 300), "agent_info.small of env_rank 0 must .* int8, .* int64 300"),
    "too large for float32": (
        lambda B: info(B, x=np.full(B, 1e300)),
        r"agent_info.x of .* float32, .* float64 1e\+300",
    ),
    "no flag": (lambda B: info(B, flag=zeros(B) + 2), "agent_info.flag of env_rank 0 must have dtype bool, .* int64 2"),
    "complex": (lambda B: info(B, deep={"y": np.zeros((B, 2), complex)}), r"deep\.y .* float64, .* got complex128"),
    "another shape": (lambda B: info(B, x=np.zeros((B, 2))), r"agent_info\.x with shape \(\d,\) .* got \(\d, 2\)"),
    "a leaf for a node": (lambda B: info(B, deep=zeros(B)), r"agent_info\.deep with the fields \['y'\], .* got array"),
}


def later(cls: type[Sampler], returned: Callable[[int], Any], message: str, **kwargs: Any) -> None:
    with sampler_of(cls, **{"batch_T": 4, **kwargs}) as sampler:
        sampler.initialize(Scripted(returned, first=3))
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
    assert isinstance(caught.value.__cause__, SpaceError)
    assert "t=2" in str(caught.value)


@pytest.mark.parametrize("name", NO_STEPS)
def test_what_is_no_agent_step_is_refused_by_name(name: str) -> None:
    returned, message = NO_STEPS[name], r"Scripted\.step must return AgentStep\(action, agent_info\): got "
    with sampler_of(SerialSampler, batch_T=4) as sampler, pytest.raises(SpaceError, match=message):
        sampler.initialize(Scripted(returned))
    with pytest.raises(SpaceError, match=message):
        check_agent(lambda: Scripted(returned), CountingEnv)
    later(SerialSampler, returned, message)


@pytest.mark.parametrize("name", BAD_INFO)
def test_a_bad_agent_info_is_named_in_the_first_step_and_later(name: str) -> None:
    returned, at_first, afterwards = BAD_INFO[name]
    with sampler_of(SerialSampler, batch_T=4) as sampler, pytest.raises(SpaceError, match=at_first):
        sampler.initialize(Scripted(lambda B: AgentStep(zeros(B), returned(B))))
    later(SerialSampler, lambda B: AgentStep(zeros(B), returned(B)), afterwards)


@pytest.mark.parametrize("name", BAD_LATER)
def test_an_agent_info_that_changes_is_named(name: str) -> None:
    returned, message = BAD_LATER[name]
    later(SerialSampler, lambda B: AgentStep(zeros(B), returned(B)), message)


class Reporting(Agent):
    """Reports a number that does not fit for the environment with rank 2, from its third step on."""

    def seed_columns(self, rngs: Any) -> None:
        self.n_steps = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n_steps += 1
        B = len(prev_reward)
        columns = range(B) if self.selected is None else self.selected
        assert self.env_ranks is not None
        large = [300 if self.n_steps > 2 and self.env_ranks[b] == 2 else 1 for b in columns]
        return AgentStep(zeros(B), {"n": np.array(large, np.int16) if 300 in large else np.ones(B, np.int8)})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"min_ready": 1}])
def test_a_central_sampler_names_the_environment_too(options: dict[str, Any]) -> None:
    """Also if the agent acts for some of the environments."""
    message = r"agent_info.n of env_rank 2 must have dtype int8, .* got int16 300"
    with sampler_of(GpuSampler, batch_T=4, batch_B=3, **options) as sampler:
        sampler.initialize(Reporting())
        with pytest.raises(WorkerError, match=message):
            sampler.obtain_samples(0)


def test_a_report_that_comes_later_is_not_lost_in_silence() -> None:
    class Late(Scripted):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            step = super().step(observation, prev_action, prev_reward)
            return AgentStep(step.action) if self.n_steps < 3 else step

    with sampler_of(SerialSampler, batch_T=4) as sampler:
        sampler.initialize(Late(lambda B: None, first=99))
        with pytest.raises(
            WorkerError, match=r"with the fields \[\], as in the agent's first step, got the fields \['x', 'n', "
        ):
            sampler.obtain_samples(0)


class WithHandle(nn.Module):
    """What it opened when it was built cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.layer.handle = (i for i in range(3))  # type: ignore[assignment]

    def forward(self, observation: torch.Tensor) -> Any:
        return self.layer(observation)[:, :3], self.layer(observation)[:, 3]


@both
def test_a_model_that_cannot_be_copied_is_told_with_its_attribute(cls: type[Sampler]) -> None:
    message = (
        r"the model, a WithHandle, cannot be copied for the workers, .* its attribute layer\.handle raised TypeError"
    )
    with sampler_of(cls, batch_T=4) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(CategoricalPgAgent(WithHandle))


@pytest.mark.parametrize(("field", "later_values"), [("x", 7), ("x", 0.1), ("n", np.int8(3)), ("small", 7)])
def test_agent_info_that_fits_is_converted(field: str, later_values: Any) -> None:
    returned = Scripted(lambda B: AgentStep(zeros(B), info(B, **{field: np.full(B, later_values)})), first=3)
    with sampler_of(SerialSampler, batch_T=4) as sampler:
        sampler.initialize(returned)
        sampler.obtain_samples(0)
        recorded = sampler.samples_np.agent.agent_info[field]
        assert (recorded[-1] == recorded.dtype.type(later_values)).all()
