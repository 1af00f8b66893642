"""Builds a worker's environments, checks their spaces, and closes them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from penstock.buffers.reports import in_one_line
from penstock.envs.factory import EnvContext, EnvFactory, announce_end, rebuilding
from penstock.envs.seats import AgentId, ParallelView, SeatRank
from penstock.envs.seeding import seed_generators
from penstock.errors import SpaceError
from penstock.workers.control import Phase, Progress

_log = logging.getLogger("penstock")


class EnvBuilder:
    """Builds environments and remembers them, so that all are closed, even if start-up fails."""

    def __init__(
        self,
        progress: Progress,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: Sequence[int] = (),
    ) -> None:
        """`seeds`: what the global generators are seeded from; () in the caller's process, where they are not."""
        self._progress, self._seeds = progress, seeds
        self.seed_generators()
        self._spaces = {"observation_space": observation_space, "action_space": action_space}
        self._built: list[tuple[int, Any]] = []

    def seed_generators(self, *more: int) -> None:
        """Seed the global generators, for environments that use them. `more` numbers give other seeds."""
        self._has_torch = "torch" in sys.modules
        if self._seeds:
            seed_generators(*self._seeds, *more)

    def _note(self, context: EnvContext, env: object) -> None:
        self._built.append((context.env_rank, env))
        if not self._has_torch and "torch" in sys.modules:  # the environment has imported it
            self.seed_generators(0)  # no number of the others comes twice

    def build(self, factory: EnvFactory, context: EnvContext, phase: Phase = Phase.BUILDING) -> Any:
        """One environment. Raises `SpaceError` if it has other spaces than the example environment."""
        self._at(context, phase)
        env = factory(context)
        self._note(context, env)
        if isinstance(env, ParallelView) and not hasattr(env, "observation_space"):
            raise SpaceError(
                f"env_fn returned an environment of several agents for env_rank {context.env_rank}, but the example "
                "environment, or the argument `spaces`, is of one agent: leave `spaces` out, or use a sampler for each "
                "kind"
            )
        self._check_spaces(env, context)
        return env

    def build_view(
        self, factory: EnvFactory, spaces: Mapping[AgentId, Any], context: EnvContext, phase: Phase = Phase.BUILDING
    ) -> ParallelView:
        """One environment of several agents. `spaces` has those of each agent in the example environment. Raises
        `SpaceError` if the new environment has other agents or other spaces."""
        self._at(context, phase)
        env = factory(context)
        self._note(context, env)
        if not isinstance(env, ParallelView):
            raise SpaceError(
                f"env_fn returned {env} for env_rank {context.env_rank}, an environment of one agent, and one of "
                "several agents in the main process: it must return the same kind everywhere"
            )
        for agent in {**env.spaces, **spaces}:
            built, of_example = env.spaces.get(agent, "none"), spaces.get(agent, "none")
            if built != of_example:
                raise SpaceError(
                    f"env_rank {SeatRank(context.env_rank, agent)} has the spaces {built}, but in the example "
                    f"environment of the main process it has {of_example}: possible_agents and their spaces must be "
                    "the same"
                )
        return env

    def _check_spaces(self, env: object, context: EnvContext, prefix: str = "") -> None:
        for name, space in self._spaces.items():
            if not _are_equal(other := getattr(env, f"{prefix}{name}"), space):
                raise SpaceError(
                    f"the {name} of env_rank {context.env_rank} is {other}, that of the example environment, or of the "
                    f"argument `spaces`, is {space}: all environments must have the same spaces"
                )

    def build_batched(self, factory: EnvFactory, num_envs: int, context: EnvContext) -> Any:
        """One `VectorEnv` of `num_envs` environments, the first of which `context` describes."""
        self._at(context)
        env = factory.batched(num_envs, context)
        self._note(context, env)
        self._check_spaces(env, context, "single_")
        return env

    def replace(self, old: Any, new: Any) -> None:
        """Close `old`, which was built here, and remember `new` in its place."""
        at = next(i for i, (_, env) in enumerate(self._built) if env is old)
        self._built[at] = self._built[at][0], new
        old.close()

    def renew(self, old: object, build: Callable[[EnvContext, Phase], Any], context: EnvContext) -> Any:
        """Close `old`, if there is one, which was built here and whose game has failed; then build another one."""
        self._at(context, Phase.RENEWING)
        with rebuilding():
            if old is not None:
                _, env = self._built.pop(next(i for i, (_, env) in enumerate(self._built) if env is old))
                try:
                    env.close()
                except Exception as error:  # it may use a connection that is lost
                    text = "env.close of env_rank %d raised, after its game had failed: %s"
                    _log.warning(text, context.env_rank, in_one_line(error))
            return build(context, Phase.RENEWING)

    def _at(self, context: EnvContext, phase: Phase = Phase.BUILDING) -> None:
        self._progress.enter(phase)
        self._progress.at_env(context.env_rank)

    def close(self) -> None:
        """Close every environment that was built, then raise the first exception."""
        failed: tuple[int, BaseException] | None = None
        announce_end.append(self._progress.announce)
        while self._built:
            env_rank, env = self._built.pop()
            self._progress.at_env(env_rank)
            self._progress.enter(Phase.CLOSING)  # a heartbeat for each: see `close_timeout`
            try:
                env.close()
            except BaseException as error:  # SystemExit too: the others must be closed
                failed = failed or (env_rank, error)
        announce_end.clear()
        if failed is not None:
            self._progress.at_env(failed[0])
            raise failed[1]


def _are_equal(other: Any, space: gym.Space[Any]) -> bool:
    """Whether `other == space`. Bounds are compared exactly first: with Gymnasium's tolerance it takes much longer."""
    if type(other) is type(space) is Box and other.dtype == space.dtype and np.array_equal(other.low, space.low):
        return np.array_equal(other.high, space.high) or bool(other == space)
    return bool(other == space)
