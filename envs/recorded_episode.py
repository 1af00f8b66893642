"""An episode of one environment that can be repeated in any process, up to one step: see `RecordedEpisode`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.named import map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import tree_leaves
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.rows import action_splitter, arrays_like, write_cell
from penstock.errors import ConfigError, RepeatError, brief


@dataclass(frozen=True)
class RecordedEpisode:
    """The beginning of an episode: how the environment was built and reset, and which actions it got.

    `run` repeats it in this process, and stops before one step, or before the reset if there are no actions. After a
    failure (`error.episode`), this is the step or reset that failed. It works for environments whose episodes depend
    only on `env.reset(seed=...)` and the actions.
    """

    factory: EnvFactory  #: builds the environment
    context: EnvContext  #: the context that `factory` gets; `context.env_rank` is the index of the environment
    episode: int  #: the number of the episode; each environment counts its episodes from 0
    seed: int  #: of the reset that begins the episode
    #: `[n + 1, ...]`, as they are recorded: those of n steps, and that of the step before which `run` stops. If it is
    #: `[0, ...]`, `run` stops before the reset.
    actions: Any
    rewards: npt.NDArray[np.float32]  #: `[n]`, of the n steps
    observation: Any = None  #: the recorded observation after the n steps; None if it is unknown
    n_missing: int = 0  #: how many steps at the start of the episode are not in `actions`: the log has no room for them
    failure: str = ""  #: if it ended with a failure: what failed
    path: str = ""  #: the file that holds a copy, or why there is none
    options: Mapping[str, Any] | None = None  #: of the reset

    @property
    def step(self) -> int:
        """How many steps the episode has before the step or reset at which `run` stops."""
        return len(self.rewards) + self.n_missing

    @property
    def is_reset(self) -> bool:
        """Whether `run` stops before the reset."""
        return self.n_missing == 0 and len(self) == 0

    def __len__(self) -> int:
        _, first = next(tree_leaves(self.actions))
        return len(first)

    def run(self) -> tuple[gym.Env[Any, Any], Any]:
        """Build the environment in this process and repeat the episode. Returns the environment and the action of the
        next step, or None if the next call is `env.reset(seed=episode.seed)`. You close the environment.

        Raises `RepeatError`, naming the step, as soon as the environment does not do what was recorded.
        """
        if self.n_missing:
            raise RepeatError(
                f"{self._name} cannot be repeated: it is too long. Of its {self.step} steps, the log no longer has the "
                f"first {self.n_missing}"
            )
        env = self.factory(self.context)
        try:
            return env, None if self.is_reset else self._follow(env)
        except BaseException:
            env.close()
            raise

    def _follow(self, env: gym.Env[Any, Any]) -> Any:
        """Repeat the steps in `env`. Returns the next action."""
        actions = map_leaves(lambda leaf: leaf[:-1], self.actions)
        observation = follow(env, self.seed, actions, self.rewards, self._name, self.options)
        if self.observation is not None:
            self._compare(env, observation)
        return action_splitter(env.action_space)(map_leaves(lambda leaf: leaf[-1:], self.actions))[0]

    def _compare(self, env: gym.Env[Any, Any], observation: object) -> None:
        """Raise `RepeatError` unless `observation` is the recorded one."""
        row = map_leaves(lambda leaf: np.zeros((1, 1, *leaf.shape), leaf.dtype), self.observation)
        write_cell(arrays_like(env.observation_space, row), 0, 0, observation)
        recorded = map_leaves(lambda leaf: np.asarray(leaf)[None, None], self.observation)
        for name, ours, theirs in tree_leaves(row, "observation", recorded):
            if ours.tobytes() != theirs.tobytes():
                got, expected = brief(ours[0, 0]), brief(theirs[0, 0])
                problem = f"{name} before step {self.step} is {got}, recorded was {expected}"
                raise _differs(self._name, self.step, problem)

    @property
    def _name(self) -> str:
        return f"episode {self.episode} of env_rank {self.context.env_rank}"

    @property
    def _stop(self) -> str:
        return "its reset" if self.is_reset else f"its step {self.step}"

    def __str__(self) -> str:
        return f"{self._name} until {self._stop}" + (f" ({self.failure})" if self.failure else "")

    @property
    def advice(self) -> str:
        """For an error: how to repeat this episode."""
        text = f"error.episode.run() repeats {self._name} in this process, until {self._stop}"
        return f"{text}; a copy for RecordedEpisode.load: {self.path}" if self.path else text

    # ---- files -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this into a file, with cloudpickle. Raises `ConfigError` if the environment's factory cannot be
        pickled."""
        Path(path).write_bytes(self.pickled())

    def pickled(self) -> bytes:
        """What `save` writes."""
        try:
            pickled: bytes = cloudpickle.dumps(self)
        except Exception as error:  # pickling runs the user's code
            raise ConfigError(f"the episode cannot be pickled: {in_one_line(error)}") from error
        return pickled

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RecordedEpisode:
        """Read an episode from a file. The file may contain code: load only your own. Raises `ConfigError` if it
        contains something else, or cannot be read."""
        content = Path(path).read_bytes()
        try:
            episode = pickle.loads(content)
        except Exception as error:  # pickle raises many kinds for a file that it has not written
            problem = in_one_line(error)
            raise ConfigError(
                f"{path} cannot be read as a RecordedEpisode that `save` has written: {problem}"
            ) from error
        if not isinstance(episode, RecordedEpisode):
            raise ConfigError(f"{path} does not contain a RecordedEpisode, but a {type(episode).__name__}")
        return episode


@dataclass(frozen=True)
class RecordedGame(RecordedEpisode):
    """The beginning of a game of several agents, all of which act in each step.

    `run` returns the game as `env_fn` makes it, and the actions of the next step by agent. `actions` and `observation`
    are those of a Tuple space with a part for each of `possible_agents` (`_0`, `_1`, …), and `rewards` are `[n, k]`.
    Where an agent is not in the game, all of them are zero.
    """

    def run(self) -> tuple[Any, Any]:
        env: Any
        env, action = super().run()
        return env.handed_over(action)  # type: ignore[no-any-return]


def follow(
    env: gym.Env[Any, Any],
    seed: int | None,
    actions: Any,
    rewards: npt.NDArray[Any],
    name: str,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Reset `env` and make the steps of a recorded episode: `actions` `[n, ...]`, which must bring `rewards` `[n]`, or
    `[n, k]` in a game. Returns the last observation.

    Raises `RepeatError`, with the episode's `name` and the step, as soon as a reward differs, a call raises, or the
    episode ends.
    """
    n = len(rewards)
    try:
        observation, _ = env.reset(seed=seed, options=None if options is None else dict(options))
    except Exception as error:
        raise _differs(name, n, f"env.reset raised {in_one_line(error)}") from error
    for i, (action, recorded) in enumerate(zip(action_splitter(env.action_space)(actions), rewards, strict=True)):
        try:
            observation, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:
            raise _differs(name, n, f"step {i} raised {in_one_line(error)}") from error
        with np.errstate(over="ignore"):
            is_equal = np.array_equal(np.float32(reward), recorded, equal_nan=True)
        if not is_equal:
            raise _differs(name, n, f"the reward of step {i} is {reward}, recorded was {recorded}")
        if terminated or truncated:
            raise _differs(name, n, f"it ends at step {i}")
    return observation


def _differs(name: str, n_steps: int, problem: str) -> RepeatError:
    return RepeatError(
        f"{name} differs from the recording of its {n_steps} steps: {problem}. The environment depends on something "
        "else than the seed of its reset and its actions"
    )
