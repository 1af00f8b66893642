"""What the compiled parts record is what numpy and Python record without them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import pytest

from penstock import CategoricalPgAgent, RandomAgent, SerialSampler
from penstock.agents import distributions
from penstock.buffers import native
from penstock.columns import stepping
from penstock.envs import NestedEnv, ScriptedGame

from ..models import CartPoleNet
from ..support import Batch, assert_same, collect_with

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="was built without a C compiler")

DRAWING = set(distributions.PYTHON)
FUNCTIONS = {*native.PYTHON, "step_ordinary"}
LOOPS = {"step_ordinary", "sum_episodes"}
ALWAYS = {"put_row", *LOOPS}


@contextmanager
def calls_of_native(*, compiled: bool) -> Iterator[list[str]]:
    """The names of the compiled functions that have done something; or what stands in for them is used."""
    done: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            has_done = {
                "step_ordinary": result is None,
                "step_game": isinstance(result, tuple) and result[0],
                **dict.fromkeys(DRAWING, result is not None),
                "sum_episodes": isinstance(result, int) and result != -1,
            }
            if has_done.get(name, result is True):
                done.append(name)
            return result

        return call

    users = [module for name, module in sys.modules.items() if name.startswith("penstock.")]
    with pytest.MonkeyPatch.context() as patch:
        for part in (native, distributions, stepping):
            for name, in_python in part.PYTHON.items():
                own = getattr(part, name)
                stand_in = watched(name, own) if compiled else in_python
                for module in users:
                    if vars(module).get(name) is own:
                        patch.setattr(module, name, stand_in)
        yield done


def sample(env_fn: Any, make_agent: Any, **kwargs: Any) -> list[Batch]:
    how = {"seed": 3, "traj_info_kwargs": {"discount": 0.9}}
    sizes = {"batch_T": 30, "batch_B": 5, "eval_n_envs": 2, "eval_max_steps": 100}
    return collect_with(SerialSampler, env_fn, make_agent(), 4, range(4), **{**how, **sizes, **kwargs})


#: 128 rows are one chunk of an evaluation.
LONG_GAMES = {
    "env_kwargs": [{"k": k, "script": [{}] * 128} for k in (3, 1, 4, 2, 3)],
    "eval_episodes": 4,
    "eval_max_steps": 3000,
}
CASES: list[tuple[Any, Any, dict[str, Any], set[str]]] = [
    ("CartPole-v1", partial(CategoricalPgAgent, CartPoleNet), {}, FUNCTIONS | DRAWING),
    ("CartPole-v1", RandomAgent, {"check_finite": True}, ALWAYS),
    (partial(gym.make, "Pendulum-v1", max_episode_steps=20), RandomAgent, {}, FUNCTIONS),
    (partial(gym.make, "MountainCarContinuous-v0", max_episode_steps=9), RandomAgent, {}, ALWAYS),
    (partial(gym.make, "Acrobot-v1", max_episode_steps=9), RandomAgent, {"record_final_obs": False}, ALWAYS),
    (NestedEnv, RandomAgent, {}, FUNCTIONS),
    ("FrozenLake-v1", RandomAgent, {}, ALWAYS),
    (ScriptedGame, RandomAgent, {}, {"put_row", "step_game", "sum_episodes"}),
    (ScriptedGame, RandomAgent, LONG_GAMES, {"put_row", "put_cell", "sum_episodes"}),
]


@pytest.mark.parametrize(("env_fn", "make_agent", "kwargs", "used"), CASES)
def test_batches_are_the_same_bit_for_bit(env_fn: Any, make_agent: Any, kwargs: Any, used: set[str]) -> None:
    with calls_of_native(compiled=True) as done:
        found = sample(env_fn, make_agent, **kwargs)
    assert used <= set(done)
    with calls_of_native(compiled=False):
        plain = sample(env_fn, make_agent, **kwargs)
    assert_same(found, plain)
    assert repr([infos for _, infos in found]) == repr([infos for _, infos in plain])  # to the last bit
