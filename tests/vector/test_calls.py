"""Calls on the environments of a ShmVectorEnv, its pictures, its arguments, and the order of its calls."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import ConfigError, EnvCallError, SamplerStateError, SpaceError, WorkerError
from penstock.envs import CountingEnv, EnvContext, EpisodicLife, MaskInObservation, NestedEnv, ScriptedGame, Seats
from penstock.vector import ShmVectorEnv, tile

from ..children import exit_code_of_fork
from .vector_support import OnlySeed, Pictured

pytestmark = pytest.mark.slow


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
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="env_fns cannot be pickled for the workers"):
        ShmVectorEnv([lambda: CountingEnv() if lock else None] * 2)  # type: ignore[list-item, return-value]


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


def test_actions_that_do_not_fit_are_refused_and_harm_nobody() -> None:
    with five() as envs:
        envs.reset()
        for actions in ([0, 1], np.zeros((5, 1), int), None, "01201"):
            with pytest.raises(SpaceError, match=r"action must have shape \(5,\) and dtype int64"):
                envs.step(actions)
        for dtype in ("bool", "float64"):
            with pytest.raises(SpaceError, match=rf"dtype int64, got shape \(5,\) and dtype {dtype}"):
                envs.step(np.zeros(5, dtype))
        assert envs.step([0, 1, 2, 0, 1])[1].tolist() == [1] * 5
    with ShmVectorEnv([NestedEnv] * 2) as envs:
        envs.reset()
        for wrong in ({"move": np.zeros((2, 3))}, [0, 1], {"move": np.zeros((2, 3)), "mode": np.zeros((2, 3))}):
            with pytest.raises(SpaceError, match="action"):
                envs.step(wrong)


def test_a_fork_of_the_main_process_may_not_use_it() -> None:
    with five() as envs:
        envs.reset()

        def in_fork() -> None:
            message = "reset was called in process.*make a vector environment in this process"
            with pytest.raises(SamplerStateError, match=message):
                envs.reset()

        assert exit_code_of_fork(in_fork) == 0
        assert envs.step(np.zeros(5, int))[1].tolist() == [1] * 5


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
