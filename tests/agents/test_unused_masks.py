"""An environment raises for an illegal action, and the agent uses no mask: the error says which one there is."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    WorkerError,
)
from penstock.envs import CountingEnv

from ..toy_games import ScriptedGame, TurnGame

MASK = np.array([0, 1], np.int8)


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


class Masked(CountingEnv):
    """Only action 1 is legal. The mask is in `info`, in the observation, or nowhere."""

    def __init__(self, where: str = "info", refuses: int = 0) -> None:
        super().__init__()
        self.where, self.refuses = where, refuses
        self.action_space = spaces.Discrete(2)
        if where == "observation":
            self.observation_space = spaces.Dict(count=self.observation_space, action_mask=spaces.MultiBinary(2))

    def _result(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        info: dict[str, Any] = {"info": {"action_mask": MASK}, "nested": {"rules": {"legal": [False, True]}}}.get(
            self.where, {"other": np.arange(2.0) + 1, "text": "no", "ragged": [[1], [0, 1]], "bad": Unreadable()}
        )
        return ({"count": observation, "action_mask": MASK} if self.where == "observation" else observation), info

    def reset(self, **kwargs: Any) -> Any:
        return self._result(super().reset(**kwargs)[0])

    def step(self, action: Any) -> Any:
        if action == self.refuses:
            raise ValueError(f"illegal action {action}")
        observation, *rest, _ = super().step(action)
        observation, info = self._result(observation)
        return observation, *rest, info


class Game(ScriptedGame):
    """Action 0 is illegal."""

    def _infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.array([0, 1, 1])} for agent in self._own}

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(actions.values())
        return super().step(actions)


def batch(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Masked, "info")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def failure(cls: type[Sampler], env_fn: Any, agent: Any = None, **options: Any) -> str:
    """What a sampler raises, in random steps or in batches."""
    sizes: dict[str, Any] = {"batch_T": 40, "batch_B": 2, "n_workers": 2, **options}
    with cls(env_fn, **sizes) as sampler, pytest.raises(WorkerError) as caught:
        sampler.initialize(agent or RandomAgent(), seed=0)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        sampler.obtain_samples(0)
    return str(caught.value).splitlines()[0]


#: The environment, the mask that the error names, and what it begins with.
KINDS: dict[str, tuple[Any, str, str]] = {
    "info": (partial(Masked, "info"), "info.action_mask", "ValueError .*: illegal action 0"),
    "nested": (partial(Masked, "nested"), "info.rules.legal", "ValueError .*: illegal action 0"),
    "observation": (partial(Masked, "observation"), "observation.action_mask", "ValueError .*: illegal action 0"),
    "lock-step": (Game, "info.action_mask", "AssertionError .*"),
    "turns": (partial(TurnGame, mask=True), "info.action_mask", "AssertionError .*"),
    "batched": (batch, "info.action_mask", "ValueError .*: illegal action 0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_mask_that_nobody_uses(kind: str) -> None:
    env_fn, key, begin = KINDS[kind]
    steps = 0 if kind in ("observation", "batched", "turns") else 30
    text = failure(SerialSampler, env_fn, max_decorrelation_steps=steps, batched=kind == "batched")
    assert re.search(rf"raised {begin} \({key} has a 0 or 1 for each action: if it says which are legal, ", text), text
    assert ("in the random steps before the first batch" in text) == bool(steps)
    remedy = 'put it into the observations, and make the agent with mask_key="observation.NAME")'
    assert text.endswith(remedy if kind == "batched" else f"make the agent with mask_key='{key}')")


PROCESS = {"server": "process"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options"),
    [(ParallelSampler, {}), (GpuSampler, {}), (GpuSampler, PROCESS), (AlternatingSampler, {}), (AsyncSampler, {})],
)
def test_so_does_each_other_sampler(cls: type[Sampler], options: Any) -> None:
    text = failure(cls, partial(Masked, "info"), **options)
    assert text.endswith(": if it says which are legal, make the agent with mask_key='info.action_mask')"), text


def test_where_no_mask_is_unused_the_error_says_nothing_of_masks() -> None:
    masked = RandomAgent(mask_key="info.action_mask")
    for env_fn, agent in ((partial(Masked, "none"), None), (partial(Masked, "info", 1), masked)):
        assert re.search(r": illegal action [01]$", failure(SerialSampler, env_fn, agent))
