"""What agents may and may not return: errors name it, in the first step and in later ones."""

from collections.abc import Callable
from functools import partial
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

from ..scale import mostly_first
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
        good = AgentStep(zeros(B), {"x": np.full(B, self.n_steps, np.float32), "deep": {"y": np.zeros((B, 2))}})
        returned: AgentStep = good if self.n_steps < self.first else self.returned(B)
        return returned


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


def info(B: int, **fields: Any) -> dict[str, Any]:
    return {"x": np.zeros(B, np.float32), "deep": {"y": np.zeros((B, 2))}, **fields}


NO_STEPS: dict[str, Callable[[int], Any]] = {
    "None": lambda B: None,
    "an array": zeros,
    "a tuple": lambda B: (zeros(B), info(B)),
    "a dict": lambda B: {"action": zeros(B)},
}

BAD_INFO: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "None": (lambda B: None, "must be a dict of arrays .* got None", r"with the fields \['x', 'deep'\], .* got None"),
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
    "left out": (lambda B: NamedArrays(), r"with the fields \['x', 'deep'\], .* got the fields \[\]"),
    "a node left out": (lambda B: {"x": zeros(B)}, r"with the fields \['x', 'deep'\], .* got the fields \['x'\]"),
    "a field too many": (lambda B: info(B, z=zeros(B)), r"with the fields \['x', 'deep'\], .* got the fields \['x', "),
    "another field": (lambda B: {"x": zeros(B), "z": zeros(B)}, r"with the fields \['x', 'deep'\]"),
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


def test_a_report_that_comes_later_is_not_lost_in_silence() -> None:
    class Late(Scripted):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            step = super().step(observation, prev_action, prev_reward)
            return AgentStep(step.action) if self.n_steps < 3 else step

    with sampler_of(SerialSampler, batch_T=4) as sampler:
        sampler.initialize(Late(lambda B: None, first=99))
        with pytest.raises(
            WorkerError, match=r"with the fields \[\], as in the agent's first step, got the fields \['x', 'd"
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


# ---- values that would change in the dtype of the first step ------------------------------------

SIZES: dict[str, Any] = {"batch_T": 4, "batch_B": 3}
SAMPLERS: dict[str, Any] = {
    "serial": SerialSampler,
    "parallel": ParallelSampler,
    "gpu": GpuSampler,
    "gpu parts": partial(GpuSampler, min_ready=1),
}


class Reporting(Agent):
    """Reports `first` in its first step, and later `later` for the last environment."""

    def __init__(self, first: Any, later: Any) -> None:
        self.first, self.later, self.n_steps = first, later, 0

    def seed_columns(self, rngs: Any) -> None:
        self.n_steps = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n_steps += 1
        B = len(prev_reward)
        columns = range(B) if self.selected is None else self.selected
        assert self.env_ranks is not None
        is_last = [self.n_steps > 2 and self.env_ranks[b] == 2 for b in columns]
        values = np.array([self.later if last else self.first for last in is_last])
        return AgentStep(np.zeros(B, np.int64), {"eps": values})


CHANGED = [
    (0, 0.5, r"agent_info.eps of env_rank 2 must have dtype int64, as in the agent's first step, got float64 0.5"),
    (np.int8(1), np.int64(300), r"agent_info.eps of env_rank 2 must have dtype int8, .* got int64 300"),
    (np.uint8(0), np.int64(-1), r"agent_info.eps of env_rank 2 must have dtype uint8, .* got int64 -1"),
    (False, 2, r"agent_info.eps of env_rank \d must have dtype bool, .* got int64 \d"),
    (np.float32(0), np.float64(1e300), r"agent_info.eps of env_rank 2 must have dtype float32, .* float64 1e\+300"),
    (0.0, 1j, r"agent_info.eps of env_rank \d must have dtype float64, .* got complex128"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changed"), mostly_first(SAMPLERS, CHANGED))
def test_agent_info_that_would_change_is_refused(kind: str, changed: Any) -> None:
    first, later, message = changed
    with sampler_of(SAMPLERS[kind], CountingEnv, **SIZES) as sampler:
        sampler.initialize(Reporting(first, later))
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
        assert isinstance(caught.value.__cause__, SpaceError)


@pytest.mark.parametrize(
    ("first", "later", "recorded"),
    [(np.float64(0), 7, 7.0), (np.float32(0), 0.1, np.float32(0.1)), (5, np.int8(3), 3), (np.int8(5), 7, 7)],
)
def test_agent_info_that_fits_is_converted(first: Any, later: Any, recorded: Any) -> None:
    with sampler_of(SAMPLERS["serial"], CountingEnv, **SIZES) as sampler:
        sampler.initialize(Reporting(first, later))
        samples, _ = sampler.obtain_samples(0)
        assert sampler.samples_np.agent.agent_info.eps[-1, 2] == recorded
        assert samples.agent.agent_info.eps.shape == (4, 3)
