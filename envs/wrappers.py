"""Steps without the Python functions of the wrappers that `gym.make` adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from penstock.buffers.native import flat_step

#: Releases of Gymnasium whose wrappers do what `flat_step` does. tests/envs/test_wrappers.py has their code.
_KNOWN = ("1.1.", "1.2.", "1.3.", "1.4.")
_CLASSES = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


def flat_step_of(env: Any) -> Callable[[Any], Any]:
    """A function `step(action)` that does exactly what `env.step` does.

    It leaves out the Python functions of the outermost wrappers, as far as these are exactly `TimeLimit`,
    `OrderEnforcing`, or a `PassiveEnvChecker` that has checked all that it checks (from Gymnasium 1.4 on). It reads and
    writes the same attributes of the wrappers at every call.

    Returns `env.step` if there is no such wrapper, if nothing is compiled, or if Gymnasium is of another release.
    """
    step: Callable[[Any], Any] = env.step
    if type(env) not in _CLASSES or "step" in vars(env) or not _are_known():
        return step
    return flat_step(env, step, *_CLASSES, _finish_step)


def _finish_step(wrapper: Any, result: Any) -> Any:
    """What `TimeLimit.step` does after the step of its environment."""
    observation, reward, terminated, truncated, info = result
    wrapper._elapsed_steps += 1
    if wrapper._elapsed_steps >= wrapper._max_episode_steps:
        truncated = True
    return observation, reward, terminated, truncated, info


def _are_known() -> bool:
    """Whether Gymnasium's wrappers have their own methods, of a known release."""
    codes = [getattr(cls.step, "__code__", None) for cls in (*_CLASSES, gym.Wrapper)]
    are_own = all(code is not None and code.co_filename.startswith(gym.__path__[0]) for code in codes)
    return are_own and gym.__version__.startswith(_KNOWN)
