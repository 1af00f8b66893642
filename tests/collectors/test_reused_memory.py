"""Environments that write into the same memory again: a trajectory info sees what was there before the step."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import AgentStep, GpuSampler, ParallelSampler, RandomAgent, SerialSampler, TrajInfo
from penstock.envs import ScriptedGame
from penstock.vector import ShmVectorEnv

from ..against_loop import compare
from ..scale import quick_first
from ..support import Diary
from ..toy_games import TurnGame

# ---- one buffer for several environments -------------------------------------------------------

BOARD, SHARED = np.zeros(2, np.float32), np.zeros(4, np.float32)  # workers have one each
SPACE = spaces.Box(0, 99, (2,), np.float32)


class OneBoard(gym.Env[Any, Any]):
    """Shows its number, drawn if none is given, and its count on the board of all environments; episodes of three
    steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, i: int | None = None, kind: str = "array") -> None:
        self.i, self.kind, self.count, self.shown = i, kind, 0, BOARD
        self.observation_space = spaces.Dict(parts=spaces.Tuple([SPACE, SPACE])) if kind == "parts" else SPACE

    def observe(self) -> Any:
        BOARD[:] = self.i, self.count
        self.shown = BOARD.copy() if self.kind == "own" or (self.kind == "only reset" and self.count) else BOARD
        return {"parts": (self.shown.copy(), self.shown)} if self.kind == "parts" else self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.i = self.i if seed is None or self.i is not None else int(self.np_random.integers(99))
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 0.0, self.count == 3, False, {}


class OneBoardGame(ScriptedGame):
    """Its agents see the same board, which is that of all games."""

    def observe(self) -> Any:
        SHARED[:] = *self.np_random.random(3), self.t
        return dict.fromkeys(super().observe(), SHARED)


class OneBoardInTurns(TurnGame):
    """The same in turns."""

    def last(self, observe: bool = True) -> Any:
        SHARED[:], *rest = super().last(observe)
        return SHARED, *rest


class Mirror(RandomAgent):
    """Reports what it sees."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"seen": np.array(observation)})


CHECKS = {"sampler": {"debug": True, "check_finite": True}}


@pytest.mark.parametrize(
    ("cls", "env_fn", "how"),
    quick_first(
        [
            (SerialSampler, OneBoard, {}),
            (SerialSampler, OneBoard, CHECKS),
            (ParallelSampler, partial(OneBoard, kind="only reset"), {}),
            (SerialSampler, partial(OneBoard, kind="parts"), {"agent": RandomAgent}),
            (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo}),
            (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo, **CHECKS}),
            (GpuSampler, OneBoard, {}),
            (SerialSampler, OneBoardGame, {}),
            (ParallelSampler, OneBoardGame, {"traj_info_cls": TrajInfo}),
            (SerialSampler, OneBoardInTurns, {}),
            (ParallelSampler, OneBoardInTurns, {}),
        ],
        3,
    ),
)
def test_environments_that_share_a_buffer_are_recorded_as_if_each_had_its_own(cls: Any, env_fn: Any, how: Any) -> None:
    how = {"traj_info_cls": Diary, "batch_T": 7, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 21, **how}
    compare(cls, env_fn, how.pop("agent", Mirror), n_batches=2, **how)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_so_are_the_rows_of_a_vector_environment(mode: str) -> None:
    with ShmVectorEnv([partial(OneBoard, i) for i in range(3)], n_workers=1, autoreset_mode=mode) as envs:
        envs.reset()
        counts = {"NEXT_STEP": [1, 2, 3, 0, 1, 2, 3], "SAME_STEP": [1, 2, 0, 1, 2, 0, 1], "DISABLED": [1, 2, 3]}[mode]
        for count in counts:
            observation, _, terminated, _, infos = envs.step(np.zeros(3, int))
            assert observation.tolist() == [[i, count] for i in range(3)]
            if terminated.any() and mode == "SAME_STEP":
                assert [each.tolist() for each in infos["final_obs"]] == [[i, 3] for i in range(3)]
