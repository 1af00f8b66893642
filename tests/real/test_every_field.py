"""Every field of a batch equals the reference loop: on real environments, in both reset modes, and with any spaces."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from penstock import ParallelSampler, RandomAgent, SerialSampler, TrajInfo
from penstock.testing.reference_envs import row_of

from ..against_loop import compare
from ..envs.space_strategies import any_space, discrete, sample
from ..scale import FULL, examples, pairs, scaled
from ..support import Diary
from .environments import ENVIRONMENTS, agent_maker, env_fns

pytestmark = pytest.mark.slow


T = 8
#: Two workers. Daily they are forks, which need not import the environments again.
IN_TWO = {"n_workers": 2, "start_method": scaled("forkserver", "fork")}
#: Time limits within a batch, at its end, and beyond it.
LIMITS = dict.fromkeys(ENVIRONMENTS, (3, 8, 11)) | {"Blackjack": (1, 2, 3)}  # most hands end within two steps

#: Slow environments. Daily, dm_control runs in the last test, and `test_whole_games.py` plays Atari.
HEAVY = ("Atari", "dm_control")


def cases(*heavy: str) -> list[str]:
    """All environments at full scale; daily without the heavy ones but these."""
    return [name for name in ENVIRONMENTS if FULL or name not in HEAVY or name in heavy]


def compare_on(sampler_cls: Any, name: str, recurrent: bool, **kwargs: Any) -> list[Any]:
    pytest.importorskip(ENVIRONMENTS[name].needs)
    fns = env_fns(name, LIMITS[name])
    env = fns[0]()
    make_agent = agent_maker(env.observation_space, env.action_space, recurrent)
    env.close()
    return compare(sampler_cls, fns, make_agent, batch_T=T, batch_B=len(fns), env_info=True, **kwargs)


@pytest.mark.parametrize(("name", "wait_reset"), pairs(cases(), [False, True]))
def test_a_stateless_agent(name: str, wait_reset: bool) -> None:
    options = {"n_batches": 4, "wait_reset": wait_reset, "max_decorrelation_steps": 0}
    found = compare_on(SerialSampler, name, recurrent=False, **options)
    # The compared data must hold all kinds of episode ends: [environment, batch, T].
    terminated, truncated, value = (
        np.array([batch[name] for batch, _ in found]).transpose(2, 0, 1)
        for name in ("terminated", "truncated", "final_value")
    )
    np.testing.assert_array_equal(value != 0, truncated & ~terminated)
    assert truncated[0, :, :-1].any(), "time limits within a batch"
    if name == "Blackjack":
        assert terminated.any()
        assert (terminated & truncated).any()
    else:
        assert truncated[1, 0, -1], "one at its very end"
        assert not truncated[2, 0].any(), "and one that is reached in the next"
        assert truncated[2, 1].any()


@pytest.mark.parametrize(("name", "wait_reset"), pairs(cases(), [True, False]))
def test_a_recurrent_agent(name: str, wait_reset: bool) -> None:
    traj_info_cls = Diary if wait_reset else TrajInfo
    compare_on(SerialSampler, name, recurrent=True, wait_reset=wait_reset, n_batches=3, traj_info_cls=traj_info_cls)


@pytest.mark.parametrize("name", cases("dm_control"))
@pytest.mark.timeout(60)
def test_in_processes(name: str) -> None:
    # Every second environment with the other mode and the other kind of agent. The tests above have the rest.
    odd = list(ENVIRONMENTS).index(name) % 2 == 1
    options: dict[str, Any] = {"n_batches": 4, "sampler": IN_TWO, "wait_reset": odd}
    compare_on(ParallelSampler, name, recurrent=odd, traj_info_cls=TrajInfo if odd else Diary, **options)


# ---- any spaces, nested or of unusual types ------------------------------------------------------


ODD = {
    "float16": spaces.Box(-np.inf, np.inf, (3,), np.float16),
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "no dimensions": spaces.Box(0, 1, (), np.float32),
    "empty": spaces.Box(0, 1, (0, 3), np.float32),
    "picture": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "flags": spaces.Box(0, 1, (3,), np.bool_),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "uint32": spaces.Box(0, 2**32 - 1, (2,), np.uint32),
    "discrete": spaces.Discrete(7, start=-3),
    "small discrete": discrete(250, 5, np.uint8),
    "binary": spaces.MultiBinary((2, 3)),
    "multi": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[-1, 0], [1, 2]]),
    "tuple": spaces.Tuple([spaces.Dict({"x": spaces.Discrete(3)}), spaces.Box(-9, 9, (1,), np.int16)]),
}


class Drawn(gym.Env[Any, Any]):
    """Observations are elements of the space in turn. Reward and end depend on every bit of the actions."""

    def __init__(self, observation_space: Any, action_space: Any, b: int) -> None:
        # A space has a random generator, which environments must not share.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.elements = sample(self.observation_space, 23, seed=b)
        self.count, self.age, self.b = 0, 0, b

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.age = 0
        return self.next_observation(), {}

    def step(self, action: Any) -> Any:
        leaves = row_of(self.action_space, action)  # with the recorded dtype
        arrays = [leaf for _, leaf in leaves.leaves()] if hasattr(leaves, "leaves") else [leaves]
        code = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        self.age += 1
        terminated, truncated = code % 7 == 0, self.age == 5 + self.b
        return self.next_observation(), (code % 1000) / 8, terminated, truncated, {"code": code % 1000}

    def next_observation(self) -> Any:
        self.count += 1
        return self.elements[self.count % len(self.elements)]


def compare_with(sampler_cls: Any, observation_space: Any, action_space: Any, **kwargs: Any) -> None:
    env_fns = [lambda b=b: Drawn(observation_space, action_space, b) for b in range(3)]
    options = {"batch_B": 3, "env_info": {"code": 0}, "n_batches": 3, "traj_info_cls": Diary}
    compare(sampler_cls, env_fns, RandomAgent, **(options | kwargs))


both_modes = pytest.mark.parametrize("wait_reset", [False, True])


@both_modes
@examples(8, 50)
@given(observation_space=any_space, action_space=any_space, T=st.integers(1, 9))
def test_batches_equal_what_a_plain_loop_records(
    wait_reset: bool, observation_space: Any, action_space: Any, T: int
) -> None:
    compare_with(SerialSampler, observation_space, action_space, batch_T=T, wait_reset=wait_reset)


@pytest.mark.parametrize(("name", "wait_reset"), pairs(ODD, [False, True]))
def test_odd_spaces(name: str, wait_reset: bool) -> None:
    compare_with(SerialSampler, ODD[name], ODD[name], batch_T=7, wait_reset=wait_reset)


@both_modes
@pytest.mark.timeout(60)
def test_all_odd_spaces_at_once_in_processes(wait_reset: bool) -> None:
    together = spaces.Dict(ODD)
    compare_with(ParallelSampler, together, together, batch_T=7, wait_reset=wait_reset, sampler=IN_TWO)
