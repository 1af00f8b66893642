"""Calls on the environments of a ShmVectorEnv, its pictures, its arguments, and the order of its calls."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from penstock import ConfigError, EnvCallError, SamplerClosedError, SamplerStateError, SpaceError, WorkerError
from penstock.envs import CountingEnv, EnvContext, EpisodicLife, MaskInObservation, ScriptedGame, Seats
from penstock.vector import ShmVectorEnv, tile

from ..children import exit_code_of_fork

pytestmark = pytest.mark.slow


class Pictured(CountingEnv):
    """Shows a picture of one colour, its level."""

    metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "colour": "grey"}

    def __init__(self, level: int = 0, shape: tuple[int, ...] = (4, 6, 3), render_mode: str = "rgb_array") -> None:
        super().__init__()
        self.level, self.shape, self.render_mode = level, shape, render_mode

    def raise_level(self, by: int, *, factor: int = 1) -> int:
        if by < 0:
            raise ValueError("never down")
        self.level += by * factor
        return self.level

    def render(self) -> Any:
        return np.full(self.shape, self.level, np.uint8)


def five() -> ShmVectorEnv:
    return ShmVectorEnv([partial(Pictured, level=10 * i) for i in range(5)], in_series=2)


def test_call_get_and_set() -> None:
    with five() as envs:
        assert envs.call("raise_level", 1, factor=2) == (2, 12, 22, 32, 42)
        assert envs.call("level") == envs.get_attr("level") == (2, 12, 22, 32, 42)
        assert envs.call_some([4, 0], "raise_level", 1) == (3, 43)
        envs.set_attr("level", 7)
        envs.set_attr("level", [1, 2, 3, 4, 5])
        assert envs.get_attr("level") == (1, 2, 3, 4, 5)
        with pytest.raises(ConfigError, match="set_attr needs one value, or 5 of them in a list, got 2"):
            envs.set_attr("level", [1, 2])
        assert envs.apply(lambda env: env.unwrapped.level * 2) == (2, 4, 6, 8, 10)


def test_parameters_are_there_when_broadcast_returns() -> None:
    with five() as envs:
        envs.reset()
        envs.broadcast({"level": 9, "reward_scale": 0.5})
        envs.broadcast({"reward_scale": 3.0}, [1, 4])
        assert envs.step(np.zeros(5, int))[1].tolist() == [0.5, 3, 0.5, 0.5, 3]
        assert envs.get_attr("level") == (9,) * 5
        for wrong in ([5], [0, 0]):
            with pytest.raises(ConfigError, match="env_ids must be different indices from 0 to 4"):
                envs.broadcast({"level": 1}, wrong)
        with pytest.raises(ConfigError, match="broadcast needs a dict"):
            envs.broadcast(["level"])  # type: ignore[arg-type]


def test_a_call_that_raises_is_told_and_harms_nobody() -> None:
    with five() as envs:
        with pytest.raises(EnvCallError, match=r"'raise_level' on env_rank 0 raised ValueError: never down") as caught:
            envs.call("raise_level", -1)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(EnvCallError, match="nothing_of_the_kind"):
            envs.get_attr("nothing_of_the_kind")
        with pytest.raises(ConfigError, match="cannot be pickled for the workers"):
            envs.call("raise_level", threading.Lock())
        with pytest.raises(ConfigError, match="the options of reset cannot be pickled"):
            envs.reset(options={"lock": threading.Lock()})
        envs.reset()
        assert envs.step(np.zeros(5, int))[1].tolist() == [1] * 5


def test_frames_one_by_one_and_in_one_picture() -> None:
    with five() as envs:
        frames = envs.render()
        assert frames is not None
        assert [int(frame[0, 0, 0]) for frame in frames] == [0, 10, 20, 30, 40]
        picture = envs.render_tiled()
        assert picture.shape == (2 * 4, 3 * 6, 3)
        assert picture.dtype == np.uint8
        corners = [[int(picture[4 * row, 6 * column, 0]) for column in range(3)] for row in range(2)]
        assert corners == [[0, 10, 20], [30, 40, 0]]
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["colour"] == "grey"


@pytest.mark.parametrize("frames", [[None], [np.zeros((2, 2, 3)), np.zeros((3, 2, 3))], [np.zeros((2, 2))], []])
def test_what_is_no_picture_is_not_tiled(frames: list[Any]) -> None:
    with pytest.raises(ConfigError, match="render_tiled needs one picture"):
        tile(frames)


def test_factories_are_told_where_they_build() -> None:
    def make(context: EnvContext) -> Any:
        env = CountingEnv()
        env.context = context  # type: ignore[attr-defined]
        return env

    with ShmVectorEnv([make] * 3, in_series=2) as envs:
        contexts = envs.get_attr("context")
    assert [context.env_rank for context in contexts] == [0, 1, 2]
    assert [context.worker_rank for context in contexts] == [0, 0, 1]
    assert len({context.seed for context in contexts}) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"env_fns": []}, "env_fns must be a list of callables"),
        ({"env_fns": "CartPole-v1"}, "env_fns must be a list of callables"),
        ({"env_fns": [1]}, "callable"),
        ({"env_fns": CountingEnv}, "env_fns must be a list of callables"),
        ({"env_fns": [lambda: 3]}, "the environment function must return a gymnasium.Env, got builtins.int"),
        ({"in_series": 0}, "in_series must be an integer of at least 1"),
        ({"n_workers": 0}, "n_workers must be an integer of at least 1"),
        ({"in_series": 2, "n_workers": 2}, "leave one out"),
        ({"context": "thread"}, "context must be one of fork, forkserver, spawn"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode must be one of NEXT_STEP, SAME_STEP, DISABLED"),
        ({"on_worker_failure": "shrug"}, "on_worker_failure must be one of raise, restart"),
        ({"step_timeout": 0}, "step_timeout must be a positive number of seconds"),
        ({"start_timeout": "x"}, "start_timeout must be a positive number of seconds"),
        ({"affinity": [0]}, "affinity lists CPUs for 1 workers, there are 2"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ShmVectorEnv(**{"env_fns": [CountingEnv] * 2, **arguments})


def test_seeds_and_masks_that_do_not_fit() -> None:
    with five() as envs:
        for seed in ([1, 2], 1.5, -1, ["a"] * 5):
            with pytest.raises(ConfigError, match="seed must be"):
                envs.reset(seed=seed)  # type: ignore[arg-type]
        for mask in ([True] * 5, np.zeros(5, bool), np.ones(4, bool), np.ones(5)):
            with pytest.raises(ConfigError, match=r"options\['reset_mask'\] must be a numpy array of 5 bools"):
                envs.reset(options={"reset_mask": mask})
        options = {"reset_mask": np.ones(5, bool), "x": 1}
        envs.reset(options=options)
        assert set(options) == {"reset_mask", "x"}  # the caller's own


@pytest.mark.parametrize("actions", [[0, 1], np.zeros((5, 1), int), np.zeros(5), None, "01201"])
def test_actions_that_do_not_fit_are_refused_and_harm_nobody(actions: Any) -> None:
    with five() as envs:
        envs.reset()
        with pytest.raises(SpaceError, match=r"action must have shape \(5,\) and dtype int64"):
            envs.step(actions)
        assert envs.step([0, 1, 2, 0, 1])[1].tolist() == [1] * 5


def test_nested_actions_that_do_not_fit() -> None:
    from penstock.envs import NestedEnv

    with ShmVectorEnv([NestedEnv] * 2) as envs:
        envs.reset()
        for wrong in ({"move": np.zeros((2, 3))}, [0, 1], {"move": np.zeros((2, 3)), "mode": np.zeros((2, 3))}):
            with pytest.raises(SpaceError, match="action"):
                envs.step(wrong)


def test_calls_out_of_order() -> None:
    envs = ShmVectorEnv([CountingEnv] * 2)
    with pytest.raises(SamplerStateError, match="step was called out of order: the call expected now is reset"):
        envs.step([0, 0])
    envs.reset()
    with pytest.raises(SamplerStateError, match="step_wait was called out of order"):
        envs.step_wait()
    envs.step_async([0, 0])
    for call in (lambda: envs.step_async([0, 0]), lambda: envs.get_attr("count"), envs.recv):
        with pytest.raises(SamplerStateError, match="the call expected now is step_wait"):
            call()
    envs.step_wait()
    envs.close()
    envs.close()
    assert envs.closed
    for call in (lambda: envs.step([0, 0]), envs.reset, envs.render):
        with pytest.raises(SamplerClosedError, match="was called after close: make a new vector environment"):
            call()
    assert repr(envs) == "ShmVectorEnv(num_envs=2)"


def test_a_fork_of_the_main_process_may_not_use_it() -> None:
    with five() as envs:
        envs.reset()

        def in_fork() -> None:
            message = "reset was called in process.*make a vector environment in this process"
            with pytest.raises(SamplerStateError, match=message):
                envs.reset()

        assert exit_code_of_fork(in_fork) == 0
        assert envs.step(np.zeros(5, int))[1].tolist() == [1] * 5


class OnlySeed(CountingEnv):
    """Its `reset` knows no options, as in many environments that people write."""

    told: ClassVar[dict[str, Any]] = {"lives": 1, "action_mask": np.ones(3, np.int8)}

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)[0], self.told

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self.told


class OnlySeedBatch(gym.vector.SyncVectorEnv):
    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class OnlySeedGame(ScriptedGame):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


def batch_of(num_envs: int) -> Any:
    return OnlySeedBatch([CountingEnv] * num_envs)


@pytest.mark.parametrize(
    "env_fn",
    [
        OnlySeed,
        lambda: EpisodicLife(OnlySeed()),
        lambda: MaskInObservation(OnlySeed()),
        OnlySeedGame,
        lambda: Seats(OnlySeedGame(), {"agent": 2}, kind=lambda agent: "agent"),
        batch_of,
    ],
)
def test_options_that_nobody_has_given_are_left_out(env_fn: Any) -> None:
    how = {"num_envs": 2} if env_fn is batch_of else {}
    with ShmVectorEnv(env_fn if how else [env_fn] * 2, **how) as envs:
        envs.reset(seed=1)
        envs.reset()
        for _ in range(3):
            envs.step(np.zeros(envs.num_envs, np.int64))
        if env_fn is OnlySeed:
            with pytest.raises(
                WorkerError, match=r"'options' \(Gymnasium demands reset\(self, \*, seed=None, options=N"
            ):
                envs.reset(options={"level": 3})
