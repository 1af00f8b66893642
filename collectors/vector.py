"""VectorEnvCollector: a worker that holds one batched environment, which steps all its columns in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from penstock.buffers.control import Phase, Progress
from penstock.buffers.named import NamedArrays, as_named
from penstock.collectors.checks import Checks, checked_writer
from penstock.collectors.columns import DoneHook
from penstock.collectors.reset import ResetCollector
from penstock.collectors.tracking import StepHook
from penstock.errors import ConfigError, SpaceError

__all__ = ["VectorColumns", "VectorEnvCollector"]

_NO_OPTIONS = Checks()


class VectorEnvCollector(ResetCollector):
    """A `ResetCollector` on batched environments: `env_fn(num_envs=n)` returns a `gymnasium.vector.VectorEnv`.

    It must reset an environment in the step that ends its episode (`AutoresetMode.SAME_STEP`) or leave
    that to the caller (`AutoresetMode.DISABLED`). In the default mode, NEXT_STEP, a step after each
    episode would be none, with an action that is ignored.
    """

    batched = True


class VectorColumns:
    """One batched environment in the place of `EnvColumns`: the same calls, a row at a time.

    Seeds are given as a list, one per column; to an environment that takes a single one, the first of
    them. A parked column is stepped with the others, and what it does is ignored.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], env_ranks: range, progress: Progress, checks: Checks = _NO_OPTIONS
    ) -> None:
        self.env, self.env_ranks, self.checks, self._progress = env, env_ranks, checks, progress
        self.envs = [env]
        self._resets_itself = _mode_of(env) is AutoresetMode.SAME_STEP
        self._space: gym.Space[Any] = env.single_observation_space
        self._final_writer = checked_writer(self._space, checks, "the final observation")
        self._batch: Any = None  # current observations, as the environment batches them
        self._rewards: Any = np.zeros(len(env_ranks))
        #: Columns whose environments nobody looks at.
        self.parked: list[int] = []

    def __len__(self) -> int:
        return len(self.env_ranks)

    @property
    def observations(self) -> Sequence[Any]:
        """The current observations, one per column."""
        return list(iterate(self.env.observation_space, self._batch))

    def enter(self, phase: Phase, column: int) -> int:
        """Note in the progress row what is about to be done; returns the time."""
        self._progress.at_env(self.env_ranks[column])
        return self._progress.enter(phase)

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        """Reset every environment."""
        began = self.enter(Phase.RESETTING, 0)
        try:
            result = self.env.reset(seed=list(seeds))  # type: ignore[arg-type]
        except (TypeError, ValueError, gym.error.Error):
            result = self.env.reset(seed=seeds[0])
        self._batch = result[0]
        self._progress.add_resetting_since(began)

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        """The first observation of column's next episode."""
        if not self._resets_itself:
            began = self.enter(Phase.RESETTING, column)
            mask = np.zeros(len(self), np.bool_)
            mask[column] = True
            self._batch, _ = self.env.reset(seed=seed, options={"reset_mask": mask})
            self._progress.add_resetting_since(began)
        return None  # it is part of the batch already

    def step(self, action_row: Any, on_done: DoneHook, on_step: StepHook | None = None) -> None:
        """Step all environments with one call."""
        self._progress.at_env(self.env_ranks[0])
        before = self.observations if on_step is not None else ()
        actions = _batched_actions(self.env.single_action_space, action_row)
        self._batch, self._rewards, terminated, truncated, infos = self.env.step(actions)
        self._rewards[self.parked] = 0
        rewards, final = self._rewards, infos.get("final_obs")
        if on_step is not None:
            each_action = list(iterate(self.env.action_space, actions))
            for b, observation in enumerate(before):
                if b in self.parked:
                    continue
                info = _info_of(infos, b)
                on_step(b, observation, each_action[b], rewards[b], bool(terminated[b]), bool(truncated[b]), info)
        done = np.flatnonzero(terminated | truncated)
        ended = self.observations if done.size and not self._resets_itself else None
        for b in done.tolist():
            if b in self.parked:
                self.reset_one(b)
                continue
            observation = ended[b] if ended is not None else _element(final, b)
            if observation is None:
                raise SpaceError(
                    f"the batched environment gave no final_obs for env_rank {self.env_ranks[b]}, which ended"
                )
            on_done(b, observation, float(rewards[b]), bool(terminated[b]), bool(truncated[b]))
        self._progress.words[Progress.PHASE] = Progress.IS_STEPPING

    def park(self, column: int) -> None:
        """Ignore column from now on. Its environment goes on, so it must not stay at an episode's end."""
        self.parked = [*self.parked, column]
        self.reset_one(column)

    def unpark_all(self) -> None:
        """Look at every column again."""
        self.parked = []

    def check_final(self, column: int, observation: Any) -> None:
        """The batched environment's spaces hold for it."""

    def prepare_row(self, row: Any) -> Any:
        """Nothing is to be worked out."""
        return row

    def write_prepared(self, prepared: Any) -> None:
        """Write the current observations into `prepared`, a row `[B, ...]`."""
        batch = as_named(self._batch)
        _check_leaves(prepared, batch, self.env_ranks)
        prepared[...] = batch
        if self.checks != _NO_OPTIONS:
            writer = checked_writer(self._space, self.checks)
            writer.write(writer.prepare(prepared), self.observations)

    write_observations = write_prepared

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into their row `[B]`."""
        if np.shape(self._rewards) != row.shape:
            raise SpaceError(
                f"the batched environment's rewards must have shape {row.shape}, got {np.shape(self._rewards)}"
            )
        row[...] = self._rewards
        if self.checks.check_finite and not np.isfinite(row).all():
            column = int(np.isfinite(row).argmin())
            raise SpaceError(f"the reward of env_rank {self.env_ranks[column]} must be finite, got {row[column]}")

    def write_final(self, row: Any, column: int, observation: Any) -> None:
        """Write the last observation of column's episode into `row` `[1, ...]`."""
        self._final_writer.write(self._final_writer.prepare(row), [observation])


def _mode_of(env: Any) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    if mode is AutoresetMode.NEXT_STEP:
        raise ConfigError(
            f"{env} resets an environment in the step after its episode's end (AutoresetMode.NEXT_STEP): build it with "
            "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP (make_vec: in vector_kwargs)"
        )
    return AutoresetMode(mode)


def _batched_actions(space: gym.Space[Any], row: Any) -> Any:
    """A recorded row in the form in which Gymnasium batches actions; a copy, to be kept or changed."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _batched_actions(sub, row[str(key)]) for key, sub in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_batched_actions(sub, row[f"_{i}"]) for i, sub in enumerate(space))
    return row.copy()


def _element(batched: Any, b: int) -> Any:
    if isinstance(batched, Mapping):
        return {key: _element(value, b) for key, value in batched.items()}
    return None if batched is None else batched[b]


def _info_of(infos: Mapping[str, Any], b: int) -> dict[str, Any]:
    """Environment b's own info; that of the step, where an episode's end hides it behind the next one's."""
    info = {}
    for key, value in infos.items():
        if key.startswith("_") or key in ("final_obs", "final_info") or not infos.get(f"_{key}", _ALL)[b]:
            continue
        info[key] = _info_of(value, b) if isinstance(value, Mapping) else value[b]
    if infos.get("_final_info", _NONE)[b]:
        info = _info_of(infos["final_info"], b)
    return info


class _Every:
    def __init__(self, value: bool) -> None:
        self._value = value

    def __getitem__(self, b: int) -> bool:
        return self._value


_ALL, _NONE = _Every(True), _Every(False)


def _check_leaves(row: Any, batch: Any, env_ranks: range) -> None:
    rows = row.leaves() if isinstance(row, NamedArrays) else [("observation", row)]
    given = dict(batch.leaves() if isinstance(batch, NamedArrays) else [("observation", batch)])
    for name, leaf in rows:
        array = np.asarray(given.get(name))
        if array.shape != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise SpaceError(
                f"{name} of the batched environment (env_rank {env_ranks[0]} to {env_ranks[-1]}) must have shape "
                f"{leaf.shape} and dtype {leaf.dtype}, got {array.shape} {array.dtype}"
            )
