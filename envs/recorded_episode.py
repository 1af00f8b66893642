"""An episode of one environment that can be repeated in any process, up to one step: see `RecordedEpisode`."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers import pickling
from penstock.buffers.named import map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import tree_leaves
from penstock.envs.checks import reset_with
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.rows import action_splitter, arrays_like, write_cell
from penstock.errors import ConfigError, RepeatError, brief


class Transition(NamedTuple):
    """One step of an episode that is repeated, as the environment returns it; observations are copies."""

    observation: Any  #: before the step
    action: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    next_observation: Any


@dataclass(frozen=True)
class RecordedEpisode:
    """The beginning of an episode: how the environment was built and reset, and which actions it got.

    `run` repeats it in this process, and stops before one step, or before the reset if there are no actions. After a
    failure (`error.episode`), this is the step or reset that failed. `steps` and `film` repeat it with the last action.
    It works for environments whose episodes depend only on what `env.reset` gets and on the actions.
    """

    factory: EnvFactory  #: builds the environment
    context: EnvContext  #: the context that `factory` gets; `context.env_rank` is the index of the environment
    episode: int  #: the number of the episode; each environment counts its resets from 0
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
    #: What the step of the last action returned, and whether it was a termination; None where that is unknown.
    last_reward: Any = None
    terminated: bool | None = None

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
        next step, or None if the next call is `env.reset(seed=episode.seed, options=episode.options)`. You close the
        environment.

        Raises `RepeatError`, naming the step, as soon as the environment does not do what was recorded.
        """
        env, action = self._built(self.factory), None
        try:
            if not self.is_reset:
                for _ in self._repeated(env, self.step):
                    pass
                (action,) = action_splitter(env.action_space)(map_leaves(lambda leaf: leaf[-1:], self.actions))
        except BaseException:
            env.close()
            raise
        return env, action

    def steps(self) -> Iterator[Transition]:
        """Build the environment in this process, repeat the episode, and yield each step, also that of the last action;
        nothing if the episode stops at its reset. The environment is closed at the end.

        Raises `RepeatError` as `run` does, also for the last action where its reward is known. What the environment
        raises there is raised unchanged.
        """
        if self.is_reset:
            return
        env = self._built(self.factory)
        try:
            before: Any = None
            for action, (observation, *others) in self._repeated(env, len(self)):
                after = copy.deepcopy(observation)  # environments may use the same memory again
                if before is not None:
                    yield Transition._make((before, action, *others, after))
                before = after
        finally:
            env.close()

    def film(
        self, path: str | os.PathLike[str] | None = None, *, fps: float | None = None, **env_kwargs: Any
    ) -> npt.NDArray[np.uint8]:
        """Repeat the episode as `steps` does, and return what the environment renders after its reset and after each
        step, `[n, height, width, 3]`. If the last action has failed, it is left out.

        The environment is built with `render_mode="rgb_array"`, if it takes this argument, and with `env_kwargs`. With
        a `path`, the frames are written into this file, such as "episode.mp4": `fps` of them a second, by default
        `render_fps` of the environment's metadata, or 30. This needs moviepy.

        Raises `ConfigError` if the environment does not render, or moviepy is missing, and `RepeatError` as `run` does.
        """
        if path is not None and importlib.util.find_spec("moviepy") is None:
            raise ConfigError(
                'a video needs moviepy, which is not installed: pip install moviepy, or ".[video]" in the checkout'
            )
        if self.is_reset:
            raise ConfigError(f"{self._name} cannot be filmed: it stops before its reset")
        env = self._rendering(env_kwargs)
        try:
            n_steps = len(self) - bool(self.failure)
            frames = [self._frame(env) for _ in self._repeated(env, n_steps)]
            fps = env.metadata.get("render_fps", 30) if fps is None else fps
        finally:
            env.close()
        if path is not None:
            from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

            ImageSequenceClip(frames, fps=fps).write_videofile(os.fspath(path), logger=None)
        return np.stack(frames)

    def _built(self, factory: EnvFactory) -> Any:
        """The environment. Raises `RepeatError` if the log does not have the whole episode."""
        if self.n_missing:
            raise RepeatError(
                f"{self._name} cannot be repeated: it is too long. Of its {self.step} steps, the log no longer has the "
                f"first {self.n_missing}"
            )
        return factory(self.context)

    def _rendering(self, env_kwargs: Mapping[str, Any]) -> Any:
        """The environment, which renders arrays. Raises `ConfigError` if it does not."""
        kwargs = {**self.factory.kwargs, "render_mode": "rgb_array", **env_kwargs}
        try:
            env = self._built(replace(self.factory, kwargs=kwargs))
        except TypeError:  # perhaps it does not take the argument; if that is not why, this raises the error again
            env = self._built(replace(self.factory, kwargs={**self.factory.kwargs, **env_kwargs}))
        if (mode := getattr(env, "render_mode", None)) != "rgb_array":
            env.close()
            raise ConfigError(
                f'{self._name} cannot be filmed: its environment needs render_mode="rgb_array", but has {mode!r}. Give '
                "env_fn a parameter render_mode, and let it pass this on to the environment"
            )
        return env

    def _frame(self, env: Any) -> npt.NDArray[np.uint8]:
        frame = env.render()
        if getattr(frame, "dtype", None) == np.uint8 and frame.shape[2:] == (3,):
            return np.array(frame)  # a copy
        raise ConfigError(
            f"{self._name} cannot be filmed: env.render() must return an array [height, width, 3] of uint8, got "
            f"{brief(frame)}"
        )

    def _repeated(self, env: gym.Env[Any, Any], n_steps: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """As `repeated`, for this episode and so many steps. Compares the recorded observation too."""
        actions = map_leaves(lambda leaf: leaf[:n_steps], self.actions)
        for i, (action, result) in enumerate(repeated(env, self.seed, actions, self.rewards, self._name, self.options)):
            if i == self.step and self.observation is not None:
                self._compare(env, result[0])
            if i == self.step + 1:
                self._compare_end(result)
            yield action, result

    def _compare_end(self, result: tuple[Any, ...]) -> None:
        """Raise `RepeatError` unless the step of the last action has returned what was recorded."""
        _, reward, terminated, _, _ = result
        if self.last_reward is not None and not _is_equal(reward, self.last_reward):
            problem = f"the reward of its last step is {reward}, recorded was {self.last_reward}"
        elif self.terminated is not None and bool(terminated) != self.terminated:
            problem = f"its last step has terminated={bool(terminated)}, recorded was {self.terminated}"
        else:
            return
        raise _differs(self._name, self.step + 1, problem)

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
            pickled = pickling.dumps(self)
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
    are those of a Tuple space with a part for each of `possible_agents` (`_0`, `_1`, …), and `rewards` are `[n, k]`; so
    are those of `steps`, which is terminated when nobody is left. Where an agent is not in the game, all of them are
    zero.
    """

    def run(self) -> tuple[Any, Any]:
        env: Any
        env, action = super().run()
        return env.handed_over(action)  # type: ignore[no-any-return]


def repeated(
    env: gym.Env[Any, Any],
    seed: int | None,
    actions: Any,
    rewards: npt.NDArray[Any],
    name: str,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Reset `env` and make the steps of a recorded episode: `actions` `[n, ...]`, which must bring `rewards` `[n]`, or
    `[n, k]` in a game. With one action more than rewards, the last step may do anything. Yields each action with what
    `env.step` has returned; first those of the reset: None, its observation, and its info as the last.

    Raises `RepeatError`, with the episode's `name` and the step, as soon as a reward differs, a call raises, or the
    episode ends.
    """
    n = len(rewards)
    try:
        # The environment may change what it gets.
        observation, info = reset_with(env, seed, None if options is None else copy.deepcopy(dict(options)))
    except Exception as error:
        raise _differs(name, n, f"env.reset raised {in_one_line(error)}") from error
    yield None, (observation, 0.0, False, False, info)
    for i, action in enumerate(action_splitter(env.action_space)(actions)):
        given = copy.deepcopy(action)
        if i == n:
            yield action, env.step(given)
            return
        try:
            result = observation, reward, terminated, truncated, _ = env.step(given)
        except Exception as error:
            raise _differs(name, n, f"step {i} raised {in_one_line(error)}") from error
        if not _is_equal(reward, rewards[i]):
            raise _differs(name, n, f"the reward of step {i} is {reward}, recorded was {rewards[i]}")
        if terminated or truncated:
            raise _differs(name, n, f"it ends at step {i}")
        yield action, result


def _is_equal(reward: Any, recorded: Any) -> bool:
    """Whether a reward is the one that was recorded, in 32 bits."""
    with np.errstate(over="ignore"):
        return np.array_equal(np.float32(reward), recorded, equal_nan=True)


def follow(env: gym.Env[Any, Any], start: Any, name: str) -> Any:
    """Make the steps of `repeated`, which a `penstock.columns.interface.Start` has, and return the last observation."""
    actions, rewards = start.actions
    for _, result in repeated(env, start.seed, actions, rewards, name, start.options):
        observation = result[0]
    return observation


def _differs(name: str, n_steps: int, problem: str) -> RepeatError:
    return RepeatError(
        f"{name} differs from the recording of its {n_steps} steps: {problem}. The environment depends on something "
        "else than the seed of its reset and its actions"
    )
