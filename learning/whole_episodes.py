"""Whole episodes out of a sampler's batches, while training goes on: for data sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import Samples
from penstock.buffers.named import NamedArrays, as_named, map_leaves
from penstock.errors import ConfigError
from penstock.learning.appending import arrays, require_samples


@dataclass(frozen=True)
class WholeEpisode:
    """An episode of n steps. Observations and actions of Dict and Tuple spaces are dicts of arrays."""

    env_rank: int
    observations: Any  #: `[n + 1, ...]`, with the true last one
    actions: Any  #: `[n, ...]`
    rewards: npt.NDArray[np.float32]  #: `[n]`
    terminated: bool  #: how it ended: terminated, truncated or both
    truncated: bool
    number: int | None = None  #: which episode of its environment; None without `recorded`, and so are the next two
    seed: int | None = None  #: of its reset
    options: Any = None  #: of its reset


class WholeEpisodes:
    """Cuts batches into episodes. An episode may go over any number of batches. Give it every batch, in order.

    It keeps a copy of the episodes that still run. Episodes whose beginning it has not seen are left out: those that
    began in random steps before the first batch (`max_decorrelation_steps=0` has none), and those that
    `on_worker_failure="restart"` has cut. `n_left_out` counts them.

    For samplers of single environments and of batched ones, with `record_final_obs=True`, their default.
    """

    def __init__(self) -> None:
        self.n_left_out = 0
        self._parts: dict[int, list[Any]] = {}  # of each running episode: observations, actions and rewards
        self._after: Any = None  # what the first row of the next batch must have

    def add(self, samples: Samples, recorded: Callable[[int, int], Any] | None = None) -> list[WholeEpisode]:
        """The episodes that have ended in this batch `[T, B]`, by environment. They are copies.

        `recorded` is `sampler.episode` of a sampler with `seed_episodes=True`: it tells the number, the seed and the
        options of each episode.

        Raises `ConfigError` if the batch does not follow the one before, or has no `final_obs`.
        """
        require_samples(samples)
        env, action = samples.env, arrays(samples.agent.action)
        if "final_obs" not in env:
            raise ConfigError(
                "the last observations of episodes are missing: make the sampler with record_final_obs=True"
            )
        observation, final, after = arrays(env.observation), arrays(env.final_obs), arrays(env.bootstrap_obs)
        flags = (env.done, env.valid, env.prev_done, env.terminated, env.truncated, env.reward)
        done, valid, prev_done, terminated, truncated, reward = map(arrays, flags)
        self._require_next(valid, prev_done, observation, arrays(samples.agent.prev_action), arrays(env.prev_reward))
        ended = []
        for b in range(done.shape[1]):
            if prev_done[0, b] and valid[0, b]:
                self._begin(b)
            start = 0
            for stop in (*np.flatnonzero(done[:, b]).tolist(), len(done) - 1):
                rows = start + np.flatnonzero(valid[start : stop + 1, b])
                if b in self._parts and len(rows):
                    part = _cells(observation, rows, b), _cells(action, rows, b), reward[rows, b]
                    self._parts[b].append(part)
                if start <= stop and done[stop, b]:
                    if parts := self._parts.pop(b, None):
                        last, how = _cells(final, [stop], b), (bool(terminated[stop, b]), bool(truncated[stop, b]))
                        ended.append(_joined(b, parts, last, how, recorded(b, stop) if recorded is not None else None))
                    else:
                        self.n_left_out += 1
                    self._parts[b] = []
                start = stop + 1
        self._after = map_leaves(np.copy, after)
        return ended

    def _begin(self, b: int) -> None:
        if self._parts.get(b):  # its end was not seen
            self.n_left_out += 1
        self._parts[b] = []

    def _require_next(self, valid: Any, prev_done: Any, *firsts: Any) -> None:
        """Raise `ConfigError` if an episode that runs does not go on where it was: `firsts` are the observations, and
        the actions and rewards of the step before."""
        for b, parts in self._parts.items():
            if parts and valid[0, b] and not prev_done[0, b]:
                _, actions, rewards = parts[-1]
                wanted = _cells(self._after, b), _cells(actions, -1), rewards[-1]
                if not all(_is_equal(one, _cells(other, 0, b)) for one, other in zip(wanted, firsts, strict=True)):
                    raise ConfigError(
                        f"this batch does not follow the one before it: column {b} goes on at another step. Give every "
                        "batch to add(), in order, before you change it"
                    )


def _cells(tree: Any, *index: Any) -> Any:
    """What is at this index of each array; a copy, if there is a list of rows in it."""
    return map_leaves(lambda leaf: leaf[index], tree)


def _is_equal(one: Any, other: Any) -> bool:
    pairs = zip(NamedArrays(all=one).leaves(), NamedArrays(all=other).leaves(), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for (_, a), (_, b) in pairs)


def _joined(b: int, parts: list[Any], last: Any, how: tuple[bool, bool], episode: Any) -> WholeEpisode:
    observations, actions, rewards = zip(*parts, strict=True)
    whole = _concatenated([*observations, last]), _concatenated(actions), np.concatenate(rewards)
    if episode is None:
        return WholeEpisode(b, *whole, *how)
    known, n = _concatenated([episode.actions]), len(whole[2]) - episode.n_missing
    if episode.step + 1 != len(whole[2]) or not _is_equal(as_named(_last(whole[1], n)), as_named(known)):
        raise ConfigError(
            "`recorded` tells of another batch than this: sampler.episode knows the last one. Call add() before the "
            "next obtain_samples, with the samples that it has returned"
        )
    return WholeEpisode(b, *whole, *how, episode.episode, episode.seed, episode.options)


def _last(tree: Any, n: int) -> Any:
    """The last n rows."""
    return {name: _last(part, n) for name, part in tree.items()} if isinstance(tree, dict) else tree[len(tree) - n :]


def _concatenated(parts: Any) -> Any:
    if isinstance(parts[0], NamedArrays):
        return {name: _concatenated([part[name] for part in parts]) for name in parts[0].keys()}  # noqa: SIM118
    return np.concatenate(parts)
