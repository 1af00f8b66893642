"""Games: the environments of several agents of one worker. They step, and find who joins, who ends and who waits.

A seat is one agent of one environment, and has a column. A seat is *idle* while its agent is absent, dead or not there
yet. `SeatColumns` has the seats of one policy. `Games` steps the environments, and tells the columns what happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from penstock.buffers.tree import map_tree
from penstock.columns.interface import Returned, StepHook, snapshot
from penstock.columns.renewal import Renewals
from penstock.columns.single_columns import ListedColumns
from penstock.columns.stepping import store_game_step
from penstock.envs.checks import NO_CHECKS, Checks, episode_flags, require_info, require_number, step_values
from penstock.envs.examples import example_of
from penstock.envs.rows import action_splitter, arrays_like
from penstock.envs.seats import AgentId, ParallelView, SeatRank, are_by_agent, has_vanished
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase, Progress

#: What a seat's end is reported to: (column, last observation, reward, terminated, truncated).
SeatEndHook = Callable[[int, Any, float, bool, bool], None]


class SeatColumns(ListedColumns):
    """The seats of one policy in one worker: their observations, rewards and infos, by column.

    `parked` are the idle ones. Their observations are zero, and so are their rewards after the row in which they ended.
    """

    envs: Sequence[Any] = ()  # `Games` has the environments
    env_ranks: Sequence[SeatRank]

    def __init__(
        self,
        env_ranks: Sequence[SeatRank],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        progress: Progress,
        checks: Checks = NO_CHECKS,
    ) -> None:
        observation_space, self.action_space = spaces
        super().__init__(env_ranks, observation_space, progress, checks)
        self.split_actions = action_splitter(self.action_space)
        #: The actions of all columns for the next step, as the environments get them.
        self.actions: Sequence[Any] = ()
        #: An observation of zeros, as an environment would return it. Numbers are numbers, not arrays without a shape.
        self.zero: Any = map_tree(
            lambda array: array if array.ndim else array[()],
            arrays_like(observation_space, example_of(observation_space)),
        )
        self.observations = [self.zero] * len(env_ranks)
        self.parked = list(range(len(env_ranks)))
        self.on_join: Callable[[int], None] = lambda column: None
        self.on_cut: Callable[[int], None] = lambda column: None
        self.on_end: SeatEndHook = lambda *end: None
        self.on_late: Callable[[int, float], None] = lambda column, reward: None
        self.on_step: StepHook | None = None

    def join(self, column: int, observation: Any) -> None:
        """The agent of this column acts from now on; `observation` is its first."""
        self.observations[column] = observation
        if column in self.parked:
            self.parked = [other for other in self.parked if other != column]
        self.on_join(column)

    def end(self, column: int, observation: Any, terminated: bool, truncated: bool) -> None:
        """The agent of this column has ended with `observation`, and with its reward in `rewards`."""
        self.keep_info(column)
        self.on_end(column, observation, self.rewards[column], terminated, truncated)
        self.observations[column] = self.zero
        self.parked = sorted([*self.parked, column])

    def zero_idle_rewards(self) -> None:
        """The row is recorded: who ended in it has no reward in the next one."""
        for column in self.parked:
            self.rewards[column], self.infos[column] = 0.0, {}

    def _write_row(self, arrays: object, t: int, skip: Collection[int] = ()) -> None:
        super()._write_row(arrays, t, self.parked)

    def check_late(self, column: int, reward: float) -> None:
        """With `check_finite`, raise `SpaceError` for a late reward that is NaN or inf."""
        if self.checks.check_finite and not math.isfinite(reward):
            raise self._not_finite(column, reward)

    def check_action(self, column: int) -> None:
        """Raise `SpaceError` unless the action of this column is in its space."""
        if not self.action_space.contains(action := self.actions[column]):
            raise SpaceError(
                f"the action of env_rank {self.env_ranks[column]}, given by the agent, must be in "
                f"{self.action_space} (debug=True), got {brief(action)}"
            )


Place = tuple[SeatColumns, int]


class Games:
    """One worker's environments of several agents, whose seats are in `columns`. These have their `on_step` already.

    `places[e]` says where the seats of environment e are: the columns, and the index in them, by agent id, in the order
    of `possible_agents`.

    After `reset` and `step`: `infos` has the infos that each environment returned last, by agent and unchecked.
    After `step`: `late` has the rewards of the step that belong to no decision, as pairs (e, reward): the agent had
    ended, or had not joined yet. `over` has the environments in which nobody is left. `step` resets these, unless
    `may_reset(e)` is False. `cut` has those whose game has failed in this step: for each seat that has acted, `on_cut`
    was called, and the environment was built again and reset.

    Raises `SpaceError`, with the env_rank and the agent, for data that do not fit.
    """

    renewals: Renewals | None = None
    renewable: tuple[type[Exception], ...] = ()  #: see `EnvColumns`

    def __init__(self, envs: list[ParallelView], columns: Sequence[SeatColumns], env_ranks: Sequence[int]) -> None:
        self.envs, self.env_ranks = envs, env_ranks
        seats = {(int(rank), rank.agent_id): (own, i) for own in columns for i, rank in enumerate(own.env_ranks)}
        self.places: list[dict[AgentId, Place]] = [
            {agent: seats[e, agent] for agent in env.possible_agents} for e, env in zip(env_ranks, envs, strict=True)
        ]
        self.progress = progress = columns[0].progress
        self._words, self._rank_word = progress.words, progress.loop_words
        self.living: list[list[AgentId]] = [[] for _ in envs]  # who acts next, in the order of `env.agents`
        self._ghosts: list[set[AgentId]] = [set() for _ in envs]  # who has ended, but is in `env.agents` still
        self.infos: list[Mapping[Any, Any]] = [{}] * len(envs)
        self.late: list[tuple[int, float]] = []
        self.over: list[int] = []
        self.cut: list[int] = []
        self.may_reset: Callable[[int], bool] = lambda e: True
        self.seed_of: Callable[[int], int | None] = lambda e: None  # of the next game; None: not given
        self._bound = [
            (env, env.env, rank, own, list(own), _span(own))
            for env, rank, own in zip(envs, env_ranks, self.places, strict=True)
        ]
        self._has_hooks = any(own.on_step or own.info_writer or own.checks.debug for own in columns)
        self.returned = Returned(len(envs), always=any(own.checks.debug for own in columns))
        self._is_watched = self._has_hooks or self.returned.copies

    # ---- resets ----------------------------------------------------------------------------

    def reset(self, e: int, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Reset environment e; the agents that it lists join."""
        self._reset(e, seed, options, Phase.RESETTING)

    def _reset(self, e: int, seed: int | None, options: dict[str, Any] | None, phase: Phase) -> None:
        while True:
            env, _, env_rank, *_ = self._bound[e]
            self.progress.at_env(env_rank)
            began = self.progress.enter(phase)
            try:
                result = env.reset(seed=seed, options=options)
                break
            except self.renewable as error:
                seed, phase = self._renew(e, error, is_cut=False), Phase.RENEWING
        self.progress.add_resetting_since(began)
        if self.renewals is not None:
            self.renewals.note_reset(e)
        if not are_by_agent(result, 2):
            raise SpaceError(
                f"env.reset of env_rank {env_rank} must return a tuple of two dicts, observations and infos by agent, "
                f"got {brief(result)}"
            )
        observations, infos = result
        observations = self.returned.own(e, observations, is_reset=True)
        self.infos[e] = infos
        agents = self._listed(e)
        if not agents:
            raise SpaceError(f"env.reset of env_rank {env_rank} must leave at least one agent in env.agents")
        self._require_known(e, [*agents, *observations])
        self.clear(e)
        self._join(e, agents, observations)

    def clear(self, e: int) -> None:
        """Nobody is in environment e: it is reset next, or is not used."""
        for columns, column in self.acting(e):
            columns.observations[column], columns.rewards[column] = columns.zero, 0.0
            columns.parked = sorted({*columns.parked, column})
        self.living[e], self._ghosts[e] = [], set()

    def acting(self, e: int) -> list[Place]:
        """Where the agents are that act next in environment e."""
        return [self.places[e][agent] for agent in self.living[e]]

    def _join(self, e: int, agents: Sequence[AgentId], observations: Mapping[Any, Any]) -> None:
        for agent in agents:
            columns, column = self.places[e][agent]
            if agent not in observations:
                raise SpaceError(f"env_rank {columns.env_ranks[column]} is in env.agents, but has no observation")
            columns.join(column, observations[agent])
        self.living[e] = [*self.living[e], *agents]

    # ---- steps -----------------------------------------------------------------------------

    def step(self) -> None:
        """Step every environment with the `actions` of the columns, and reset those that are over."""
        self.late, self.over, self.cut = [], [], []
        for e in range(len(self.envs)):
            if self.living[e]:
                try:
                    self.step_env(e)
                except self.renewable as error:
                    self.cut_env(e, error)
        self.end_row()

    def end_row(self) -> None:
        """Every environment has stepped, and the row is written next."""
        if self.returned.copies:
            self.returned.end_row()
            self._is_watched = self._has_hooks or self.returned.copies

    def cut_env(self, e: int, error: Exception) -> None:
        """The game of environment e has failed in this step, which has no result."""
        seed = self._renew(e, error, is_cut=True)
        for columns, column in self.acting(e):
            columns.rewards[column], columns.infos[column] = 0.0, {}
            columns.on_cut(column)
        self.cut.append(e)
        self.clear(e)
        self._reset(e, seed, None, Phase.RENEWING)
        self._words[Progress.PHASE] = Progress.IS_STEPPING

    def _renew(self, e: int, error: Exception, *, is_cut: bool) -> int:
        """Build environment e again. Returns the seed of its first reset."""
        if self.renewals is None or self.renewals.is_exhausted:
            raise error
        self.envs[e], seed = self.renewals.renew(e, self.envs[e], error, is_cut=is_cut)
        self._bound[e] = (self.envs[e], self.envs[e].env, *self._bound[e][2:])
        own = self.seed_of(e)
        return seed if own is None else own

    def step_env(self, e: int) -> None:
        """Step one environment; see `step`."""
        env, raw, env_rank, places, everyone, span = self._bound[e]
        self._rank_word[-1] = env_rank
        living = self.living[e]
        whole = span if living == everyone else None
        if whole is not None:
            columns, first, end = whole
            given = dict(zip(living, columns.actions[first:end], strict=True))
        else:
            given, first = {}, -1  # the columns are not neighbours
            for agent in living:
                columns, column = places[agent]
                given[agent] = columns.actions[column]
        before = self._before(e, given) if self._is_watched else None
        result = self.returned.of_step(e, env.step, given) if self._is_watched else env.step(given)
        watched = self._is_watched or self._ghosts[e]
        if not watched and store_game_step(result, living, raw.agents, columns.observations, columns.rewards, first):
            if whole is None:
                observations, rewards, *_ = result
                for agent in living:
                    columns, column = places[agent]
                    columns.observations[column], columns.rewards[column] = observations[agent], rewards[agent]
            self.infos[e] = result[4]
            return
        if result.__class__ is not tuple or len(result) != 5:
            result = step_values(result, env_rank)
        if not are_by_agent(result, 5):
            raise SpaceError(
                f"env.step of env_rank {env_rank} must return five dicts by agent (observations, rewards, "
                f"terminations, truncations, infos), got {brief(result)}"
            )
        self.infos[e] = result[4]
        self._settle(e, before, *result)

    def _before(self, e: int, given: Mapping[AgentId, Any]) -> dict[AgentId, tuple[Any, Any]]:
        """For the hooks, copies of what each agent acts on, and of its action. `debug=True` checks the actions here."""
        before = {}
        for agent in given:
            columns, column = self.places[e][agent]
            if columns.checks.debug:
                columns.check_action(column)
            if columns.on_step is not None:
                before[agent] = snapshot(columns.observations[column]), snapshot(given[agent])
        return before

    def _settle(
        self,
        e: int,
        before: Mapping[AgentId, tuple[Any, Any]] | None,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminated: Mapping[Any, Any],
        truncated: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> None:
        """Any step: someone may have joined or ended, or the dicts are in another order."""
        places = self.places[e]
        agents = self._listed(e)
        flags_of = [agent for agent in (*terminated, *truncated) if agent != "__all__"]  # which RLlib's games have
        self._require_known(e, [*agents, *observations, *rewards, *flags_of])
        listed, acted, stay = set(agents), self.living[e], list[AgentId]()
        ghosts = self._ghosts[e] = self._ghosts[e] & listed
        for agent in acted:
            columns, column = places[agent]
            rank, info = columns.env_ranks[column], infos.get(agent, {})
            if info.__class__ is not dict:
                require_info(info, rank)
            flags = episode_flags(_flag_of(terminated, agent), _flag_of(truncated, agent), rank)
            columns.rewards[column] = reward = require_number(rewards.get(agent, 0.0), rank)
            columns.infos[column] = info
            _require_consistent(rank, flags, is_listed=agent in listed, is_observed=agent in observations)
            observation = observations.get(agent, columns.zero)
            if before is not None and columns.on_step is not None:
                columns.on_step(column, *before[agent], reward, *flags, info)
            if any(flags):
                columns.end(column, observation, *flags)
                ghosts |= {agent} & listed
            else:
                columns.observations[column] = observation
                stay.append(agent)
        for agent in [agent for agent in rewards if agent not in acted]:
            columns, column = places[agent]
            if number := require_number(rewards[agent], columns.env_ranks[column]):
                columns.check_late(column, number)
                self.late.append((e, number))
                columns.on_late(column, number)
        self.living[e] = stay
        # Who would join, but has ended already, has made no decision.
        ghosts |= {a for a in listed.difference(acted) if _flag_of(terminated, a) or _flag_of(truncated, a)}
        self._join(e, [agent for agent in agents if agent not in ghosts and agent not in acted], observations)
        if not self.living[e]:
            self.over.append(e)
            if self.may_reset(e):
                self.reset(e, self.seed_of(e))
                self._words[Progress.PHASE] = Progress.IS_STEPPING
        elif set(self.living[e]) == listed:
            self.living[e] = agents  # the order in which the environment will return them

    def _listed(self, e: int) -> list[AgentId]:
        """A copy of `env.agents`: environments change this list in place."""
        if isinstance(agents := self.envs[e].agents, Iterable):
            return list(agents)
        raise SpaceError(f"env.agents of env_rank {self.env_ranks[e]} must be a list of agents, got {brief(agents)}")

    def _require_known(self, e: int, agents: Sequence[AgentId]) -> None:
        for agent in agents:
            if agent not in self.places[e]:
                raise SpaceError(
                    f"env_rank {SeatRank(self.env_ranks[e], agent)} is not one of possible_agents, "
                    f"{brief(list(self.places[e]))}"
                )


def _flag_of(flags: Mapping[Any, Any], agent: AgentId) -> Any:
    """The agent's flag. A missing one is False. The ordinary step takes 0.0 for False, so 0.0 and 1.0 are flags."""
    flag = flags.get(agent, False)
    return bool(flag) if flag.__class__ is float and flag in (0.0, 1.0) else flag


def _require_consistent(rank: int, flags: tuple[bool, bool], *, is_listed: bool, is_observed: bool) -> None:
    """Raise `SpaceError` for an agent that vanishes without a flag, or goes on or is truncated without observation."""
    terminated, truncated = flags
    if not (is_listed or terminated or truncated):
        raise has_vanished(f"env_rank {rank}")
    if not (is_observed or terminated):
        why = "was truncated" if truncated else "goes on"
        raise SpaceError(f"env_rank {rank} {why}, but env.step returned no observation for it")


def _span(places: Mapping[AgentId, Place]) -> tuple[SeatColumns, int, int] | None:
    """Where all seats of an environment are, if they are neighbours in the same columns."""
    columns, first = next(iter(places.values()))
    is_one = all(own is columns for own, _ in places.values())
    return (columns, first, first + len(places)) if is_one else None
