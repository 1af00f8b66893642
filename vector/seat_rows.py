"""Environments of several agents: each seat, one agent of one environment, is a sub-environment of its own.

The rows of a vector environment are the seats, environment by environment, in the order of `possible_agents`. Requests,
seeds and calls go to whole environments. A seat is *idle* while its agent has ended or has not joined yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.tree import map_tree
from penstock.columns.interface import Start
from penstock.columns.seat_columns import LockStepColumns, SeatColumns
from penstock.envs.calls import EnvCall
from penstock.envs.checks import require_info, require_number
from penstock.envs.factory import EnvFactory, build_example_env, close_example_env
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, write_row
from penstock.envs.seats import PLAYED_IN_TURNS, AgentId, ParallelView, SeatRank, SeatTable, is_in_turns
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.exchange import Exchange, Flags, Ids, Infos, require_finite
from penstock.vector.step_memory import VectorMemory, copy_rows
from penstock.vector.step_program import RESTARTED, ResetMessage, VectorProgram, keeps_types
from penstock.workers.control import Phase, Progress


class SharedSpaces(ParallelView):
    """A `ParallelEnv` whose agents all have the same spaces, as the rows of a vector environment must."""

    spec = None

    def __init__(self, env: Any) -> None:
        if is_in_turns(env):
            raise ConfigError(f"{type(env).__name__} {PLAYED_IN_TURNS}")
        super().__init__(env)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The observation space of each agent. Raises `SpaceError` if two differ."""
        return self._common(0, "observation")

    @property
    def action_space(self) -> gym.Space[Any]:
        """The action space of each agent. Raises `SpaceError` if two differ."""
        return self._common(1, "action")

    @property
    def render_mode(self) -> Any:
        """The render mode of the environment, if it says one."""
        return self.get_wrapper_attr("render_mode") if self.has_wrapper_attr("render_mode") else None

    def _common(self, which: int, name: str) -> gym.Space[Any]:
        (first, spaces), *others = self.spaces.items()
        for agent, own in others:
            if own[which] != spaces[which]:
                raise SpaceError(
                    f"the {name}_space of agent {agent!r} is {own[which]}, that of agent {first!r} is {spaces[which]}: "
                    f"in a vector environment all agents must have the same; pad them, for example with SuperSuit's "
                    f"pad_{name}{'s' if name == 'observation' else '_space'}_v0"
                )
        return spaces[which]


def refuse_seats(env: object) -> NoReturn:
    """In the place of `SharedSpaces`, where all environments must have one agent."""
    raise ConfigError(
        f"{type(env).__name__} has several agents, but env_fns[0] returns an environment of one agent, or `spaces` is "
        "given: let all functions return a ParallelEnv, and leave `spaces` out"
    )


def read_seats(factories: Sequence[EnvFactory], first: SharedSpaces) -> SeatTable:
    """Builds an example environment for each different factory. `first` is that of the first."""
    found = {id(factories[0]): first.possible_agents}
    for i, factory in enumerate(factories):
        if id(factory) not in found:
            env = build_example_env(factory)
            close_example_env(env)
            if not isinstance(env, SharedSpaces):
                raise ConfigError(
                    f"env_fns[{i}] returns {type(env).__name__}, an environment of one agent, but env_fns[0] one of "
                    "several: let all functions return a ParallelEnv"
                )
            found[id(factory)] = env.possible_agents
    agents = [found[id(factory)] for factory in factories]
    return SeatTable(agents, [[0] * len(own) for own in agents])


@dataclass
class SeatProgram(VectorProgram):
    """The `VectorProgram` of environments of several agents."""

    seats: SeatTable

    def _bind(self, memory: VectorMemory) -> None:
        plan, seats = self._plan, self.seats
        for i, e in enumerate(plan.columns):
            if (own := self._envs[i].possible_agents) != (wanted := seats.agents[e]):
                raise SpaceError(
                    f"possible_agents of env_rank {e} are {brief(own)}, those of its example environment "
                    f"{brief(wanted)}: each call of a function must return the same; give different functions for "
                    "different agents"
                )
        cells = seats.cells(0, plan.columns)
        self._seat_rows = rows = memory.rows.arrays[cells.start : cells.stop]
        self._reward, self._terminated, self._truncated = rows.reward, rows.terminated, rows.truncated
        self._alive, self._valid, self._late = rows.alive, rows.valid, rows.late_reward
        self._observation = arrays_like(self.observation_space, rows.observation[np.newaxis])
        self._final = arrays_like(self.observation_space, rows.final_observation[np.newaxis])
        self._action, self._split = rows.action, action_splitter(self.action_space)
        spaces = self.observation_space, self.action_space
        self._ranks = seats.ranks(0, plan.columns)
        self._columns = columns = SeatColumns(self._ranks, spaces, self._progress)
        self._env_of = [int(rank) - plan.columns.start for rank in self._ranks]
        own = [seats.cells(0, range(e, e + 1)) for e in plan.columns]
        self._spans = [slice(each.start - cells.start, each.stop - cells.start) for each in own]
        self._games = LockStepColumns(self._envs, [columns], plan.env_ranks)
        self._lost = set(self._unseeded)  # environments whose next step is truncated
        #: Environments in which somebody joined, ended or came late. At all others, valid is alive and no flag is set.
        self._eventful = set(range(len(self._envs)))
        self._ended: set[int] = set()  # the columns that ended in this step of their environment
        self._kept: dict[AgentId, Any] = {}  # last observations in this step whose types the arrays cannot keep

    # ---- what happens at a seat ------------------------------------------------------------

    def _take_events(self) -> None:
        """Write what has happened at the seats since the last call."""
        late, events = self._columns.late, self._columns.take()
        for end in events.ends:
            self._end(*end)
        for column, reward in late:
            self._late[column] += reward
            self._eventful.add(self._env_of[column])
        for column in events.joined:
            self._join(column)

    def _join(self, column: int) -> None:
        self._alive[column] = True
        if not self._valid[column]:  # an idle stretch ends
            self._truncated[column] = True
            self._columns.write_final(self._final, 0, column, self._columns.zero)
        self._eventful.add(self._env_of[column])

    def _end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        self._alive[column], self._terminated[column], self._truncated[column] = False, terminated, truncated
        self._columns.write_final(self._final, 0, column, observation)
        if not keeps_types(self._final, observation):
            self._kept[self._ranks[column].agent_id] = observation
        self._ended.add(column)
        self._eventful.add(self._env_of[column])

    # ---- stepping --------------------------------------------------------------------------

    def _step_all(self) -> None:
        columns = self._columns
        self._begin_step(range(len(self._envs)))
        columns.actions = self._split(self._action)
        for i in range(len(self._envs)):
            self._step_env(i)
        self._games.end_row()
        columns.write_step(self._observation, self._reward[np.newaxis], 0)
        self._reply()

    def _step_one(self, i: int) -> None:
        span, actions = self._spans[i], [None] * len(self._ranks)
        self._begin_step([i])
        actions[span] = self._split(self._action[span])
        self._columns.actions = actions
        self._step_env(i)
        self._write_env(i)
        self._games.end_row()
        self._reply(i)

    def _begin_step(self, which: Sequence[int]) -> None:
        """Clear what the last step of these environments has left."""
        self._games.begin_step()
        self._columns.blank_idle(None)
        for i in [i for i in self._eventful if i in which]:
            span = self._spans[i]
            self._terminated[span] = self._truncated[span] = False
            self._valid[span], self._late[span] = self._alive[span], 0.0
            self._eventful.remove(i)

    def _step_env(self, i: int) -> None:
        games = self._games
        if i in self._lost:
            self._cut(i)
            return
        games.step_env(i)
        self._take_events()
        try:
            has_infos = any(games.infos[i].values())
        except (AttributeError, ValueError):  # not a dict of dicts
            has_infos = True
        if has_infos or self._ended:
            self._send_infos(i)
        if not games.living[i]:
            self._begin_game(i)

    def _cut(self, i: int) -> None:
        """The first step after a replacement. Who was idle is not known, so all seats are cut off."""
        span = self._spans[i]
        self._valid[span] = False
        self._begin_game(i)
        self._truncated[span] = True
        self._seat_rows.final_observation[span] = self._seat_rows.observation[span]
        self._record_info(i, "final_info", {rank.agent_id: {RESTARTED: True} for rank in self._ranks[span]})

    def _begin_game(self, i: int) -> None:
        """Reset environment i within a step."""
        self._reset_env(i, None, None)
        self._send_infos(i)
        self._progress.enter(Phase.STEPPING)

    def _send_infos(self, i: int) -> None:
        """Keep the infos of environment i for the main process, and last observations that the arrays cannot keep."""
        infos, env_rank = self._games.infos[i], self._plan.env_ranks[i]
        require_info(infos, env_rank)
        if self._kept:
            self._record_info(i, "final_obs", self._kept)
            self._kept = {}
        if given := {agent: info for agent, info in infos.items() if info and agent in self._games.places[i]}:
            ended = {self._ranks[column].agent_id for column in self._ended}
            for agent, info in given.items():
                require_info(info, SeatRank(env_rank, agent))
            self._record_info(i, "final_info", {agent: info for agent, info in given.items() if agent in ended})
            self._record_info(i, "info", {agent: info for agent, info in given.items() if agent not in ended})
        self._ended.clear()

    def _write_env(self, i: int) -> None:
        """Write observations and rewards of one environment."""
        columns, span = self._columns, self._spans[i]
        for column in range(span.start, span.stop):
            self._reward[column] = require_number(columns.rewards[column], self._ranks[column])
        try:
            write_row(map_tree(lambda array: array[:, span], self._observation), 0, columns.observations[span])
        except ColumnError as error:
            raise columns.with_env_rank(span.start + error.column, error) from None

    # ---- resetting and calling -------------------------------------------------------------

    def _reset(self, message: ResetMessage) -> None:
        for i in self._with_request():
            column, span = self._plan.columns[i], self._spans[i]
            self._reset_env(i, message.seeds[column], message.options[column])
            self._progress.words[Progress.PHASE] = Progress.IS_RESETTING  # errors in what follows belong to the reset
            self._terminated[span] = self._truncated[span] = self._valid[span] = False
            self._late[span], self._columns.rewards[span] = 0.0, [0.0] * (span.stop - span.start)
            self._send_infos(i)
            self._write_env(i)
            self._reply(i)

    def _reset_env(self, i: int, seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset one environment; its agents join."""
        self._lost.discard(i)
        self._alive[self._spans[i]] = False
        self._eventful.add(i)
        self._games.reset_env(i, Start(self._seed_of(i, seed), options))
        self._take_events()

    def _call(self, call: EnvCall, envs: Sequence[Any] | None = None) -> None:
        is_function = call.verb == "apply"  # it gets the user's environment
        super()._call(call, [view.env for view in self._envs] if is_function else None)


class SeatExchange(Exchange):
    """The `Exchange` of environments of several agents: requests are counted by environment, and data lie in rows."""

    def __init__(self, memory: VectorMemory, program: SeatProgram, *, check_finite: bool) -> None:
        super().__init__(memory, program, check_finite=check_finite)
        rows, seats, everywhere = memory.rows.arrays, program.seats, range(len(self.all))
        self._late = rows.late_reward
        self._states = [(name, "_" + name, rows[name]) for name in ("valid", "alive", "late_reward")]
        self.ranks = seats.ranks(0, everywhere)
        self._rows_of = [np.array(seats.cells(0, range(e, e + 1))) for e in everywhere]
        self._row_of = {(int(rank), rank.agent_id): row for row, rank in enumerate(self.ranks)}
        self._env_of = np.array(self.ranks, np.intp)
        self._everywhere = np.ones(len(self.ranks), np.bool_)
        self._everywhere.flags.writeable = False

    def rows_of(self, which: Ids) -> Ids:
        if which is self.all:
            return self._everywhere.nonzero()[0]
        return np.concatenate([self._rows_of[e] for e in which.tolist()] or [which])

    def states(self, rows: Ids | slice = slice(None)) -> dict[str, npt.NDArray[Any]]:
        everywhere = self._everywhere[rows]
        states: dict[str, npt.NDArray[Any]] = {}
        for name, mask_name, values in self._states:
            states[name], states[mask_name] = values[rows].copy(), everywhere
        return states

    def _require_finite(self, rows: Ids) -> None:
        super()._require_finite(rows)
        require_finite(self._late, rows, "late_reward", self.ranks)

    def _infos_of(self, is_new: Flags, has_info: Flags, ids: list[int]) -> Infos:
        ended = (self.terminated | self.truncated).nonzero()[0]
        if not ids and not len(ended):  # the ordinary step
            return []
        found: dict[str, dict[int, Any]] = {"final_obs": {}, "final_info": {}, "info": {}}
        for e in ids:
            for kind, by_agent in self._unpickled_infos(e).items():
                found[kind].update({self._row_of[e, agent]: info for agent, info in by_agent.items()})
        infos: dict[int, dict[str, Any]] = {}
        for row in ended[is_new[self._env_of[ended]]].tolist():
            kept = found["final_obs"]
            final_obs = kept[row] if row in kept else copy_rows(self._final, row)
            infos[row] = {"final_obs": final_obs, "final_info": found["final_info"].get(row, {})}
        for row, info in found["info"].items():
            infos[row] = {**infos.get(row, {}), **info}
        return sorted(infos.items())
