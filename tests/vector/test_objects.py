"""Spaces whose elements have no fixed shape: value for value what SyncVectorEnv gives."""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from penstock import SpaceError, WorkerError
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import pairs
from .vector_support import compare, modes, pair, step_or_send

pytestmark = pytest.mark.slow


class Custom(spaces.Space[Any]):
    """A space of the user's: pairs of a word and a number."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return {"word": "w" * int(self.np_random.integers(9)), "number": int(self.np_random.integers(9))}

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
OBJECTS = {
    "text": spaces.Text(20),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "stacked": spaces.Sequence(spaces.Discrete(4), stack=True),
    "graph": GRAPH,
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Text(4)]),
    "custom": Custom(),
}
NESTED = spaces.Dict(
    {
        "z": spaces.Box(-1, 1, (3,)),
        "mission": spaces.Text(9),
        "t": spaces.Tuple([spaces.Discrete(5), spaces.Dict({"g": GRAPH, "b": spaces.MultiBinary(2)}), Custom()]),
    }
)
some_space = pytest.mark.parametrize("space", [*OBJECTS.values(), NESTED], ids=[*OBJECTS, "nested"])


class Sampling(gym.Env[Any, Any]):
    """Observations are samples of the space, drawn from the seed. It tells its action as text."""

    def __init__(self, observation_space: Any, action_space: Any, length: int = 3) -> None:
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.length = length

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.age = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        is_over = self.age >= self.length
        return self.observation_space.sample(), float(self.age), is_over, False, {"action": str(_plain(action))}


def _plain(value: Any) -> Any:
    """Without the types of numbers and the order of dicts, which may differ."""
    if isinstance(value, dict):
        return [(key, _plain(value[key])) for key in sorted(value)]
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def run_and_compare(fns: list[Any], mode: AutoresetMode, **options: Any) -> None:
    ours, theirs = pair(fns, mode, in_series=2, **options)
    with ours:
        assert ours.observation_space == theirs.observation_space
        compare(ours, theirs, 8, seed=3, step=step_or_send)


@pytest.mark.parametrize(("mode", "space"), pairs(AutoresetMode, [*OBJECTS.values(), NESTED]))
def test_observations(space: Any, mode: AutoresetMode) -> None:
    fns = [partial(Sampling, space, spaces.Discrete(2), length) for length in (2, 3, 4)]
    run_and_compare(fns, mode)


@some_space
def test_actions(space: Any) -> None:
    run_and_compare([partial(Sampling, space, space)] * 3, AutoresetMode.NEXT_STEP, copy=False)


class Texts(gym.Env[Any, Any]):
    """Tells the number of its step, as a number and as a text."""

    observation_space = spaces.Dict({"n": spaces.Discrete(99), "text": spaces.Text(9)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = 0
        return self._observe(), {}

    def _observe(self) -> Any:
        return {"n": np.int64(self.n), "text": f"step {self.n}"}

    def step(self, action: Any) -> Any:
        self.n += 1
        return self._observe(), 1.0, False, False, {}


@modes
def test_a_replaced_worker_leaves_its_last_observation(mode: AutoresetMode, tmp_path: Path) -> None:
    fault = Fault("kill", at=3, marker=str(tmp_path / "marker"))
    fns: Any = [faulty_env(Texts, fault), Texts]
    with ShmVectorEnv(fns, autoreset_mode=mode, on_worker_failure="restart") as envs:
        envs.reset()
        for _ in range(2):
            envs.step([0, 0])
        observation, _, _, truncated, infos = envs.step([0, 0])
        assert truncated.tolist() == [True, False]
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][0] == {"n": 2, "text": "step 2"}
            assert observation["text"] == ("step 0", "step 3")
        else:
            assert observation["text"] == ("step 2", "step 3")
            assert observation["n"].tolist() == [2, 3]


def test_what_does_not_fit_is_named() -> None:
    with ShmVectorEnv([partial(Sampling, NESTED, spaces.Text(3))] * 2) as envs:
        envs.reset()
        for wrong in ("ab", ["a"], 5):
            with pytest.raises(
                SpaceError, match="each part of the actions without a fixed shape must be a sequence of 2"
            ):
                envs.step(wrong)
        with pytest.raises(SpaceError, match="action has an object that cannot be sent to the workers"):
            envs.step(["a", threading.Lock()])
        assert envs.step(["a", "b"])[4]["action"].tolist() == ["a", "b"]
    with ShmVectorEnv([partial(Sampling, spaces.Discrete(2), NESTED)] * 2) as envs:
        envs.reset()
        with pytest.raises(SpaceError, match="action must be one dict with the keys"):
            envs.step({"z": np.zeros((2, 3))})


class Wrong(Texts):
    def __init__(self, what: Any) -> None:
        self.what = what

    def step(self, action: Any) -> Any:
        return self.what() if callable(self.what) else self.what, 1.0, False, False, {}


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({"n": 1}, r"observation of env_rank 1 must have the entries \['n', 'text'\], got \['n'\]"),
        ({"n": 1, "text": "", "more": 1}, r"must have the entries \['n', 'text'\], got \['n', 'text', 'more'\]"),
        ("text", r"observation of env_rank 1 must have the entries"),
        (lambda: {"n": 1, "text": threading.Lock()}, "the observation of env_rank 1 cannot be sent"),
    ],
)
def test_an_observation_of_another_structure_is_named(what: Any, problem: str) -> None:
    with ShmVectorEnv([Texts, partial(Wrong, what)], in_series=2) as envs:
        envs.reset()
        with pytest.raises(WorkerError, match=problem):
            envs.step([0, 0])
