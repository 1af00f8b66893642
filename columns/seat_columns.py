"""Environments of several agents that all act in each step (PettingZoo's `ParallelEnv`).

A *seat* is one agent of one environment, and has a column. It is idle while its agent is absent, dead or not there yet.
`SeatColumns` has the seats of one policy. `LockStepColumns` steps the environments, and finds who joins and who ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from penstock.buffers.tree import snapshot
from penstock.columns.interface import Columns, End, Events, PolicyEvents, Start
from penstock.columns.single_columns import ListedColumns
from penstock.columns.stepping import step_game
from penstock.envs.checks import NO_CHECKS, Checks, episode_flags, require_info, require_number, step_values
from penstock.envs.recorded_episode import follow
from penstock.envs.seats import AgentId, ParallelView, Result, SeatRank, are_by_agent, has_vanished
from penstock.errors import SpaceError, brief
from penstock.workers.control import ControlBlock, Phase, Progress, UntimedProgress


class SeatColumns(ListedColumns):
    """The seats of one policy in one worker: their observations, rewards and infos, by column.

    The observations of idle seats are zero, and so are their rewards after the row in which they ended.
    """

    env_ranks: Sequence[SeatRank]

    def __init__(
        self,
        env_ranks: Sequence[SeatRank],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        progress: Progress,
        checks: Checks = NO_CHECKS,
    ) -> None:
        super().__init__(env_ranks, spaces, progress, checks)
        #: The actions of all columns for the next step, as the environments get them.
        self.actions: Sequence[Any] = ()
        self.observations = [self.zero] * len(env_ranks)
        self.idle = list(range(len(env_ranks)))
        #: What has happened since the last `take`: ends, columns that joined or were cut, and late rewards by column.
        self.ends, self.joined, self.cut = list[End](), list[int](), list[int]()
        self.late: list[tuple[int, float]] = []
        self.begun: set[int] = set()  #: the columns of games that have begun since the last `take_begun`

        self.when_watched: Callable[[], None] = lambda: None

    def watched(self) -> None:
        super().watched()
        self.when_watched()

    def take(self) -> PolicyEvents:
        """What has happened since the last call."""
        ends, joined, cut, late = self.ends, self.joined, self.cut, self.late
        self.ends, self.joined, self.cut, self.late = [], [], [], []
        return PolicyEvents([end[0] for end in ends], ends, joined, cut, late)

    def take_begun(self, joined: Sequence[int]) -> Sequence[int]:
        begun = sorted(self.begun)
        self.begun.clear()
        return begun

    def join(self, column: int, observation: Any) -> None:
        """The agent of this column acts from now on; `observation` is its first."""
        self.observations[column] = snapshot(observation)
        if column in self.idle:
            self.idle = [other for other in self.idle if other != column]
        self.joined.append(column)

    def end(self, column: int, observation: Any, terminated: bool, truncated: bool) -> None:
        """The agent of this column has ended with `observation`, and with its reward in `rewards`."""
        self.ends.append((column, observation, self.rewards[column], terminated, truncated))
        self.leave(column)

    def leave(self, column: int) -> None:
        """The agent of this column does not act any more. Its reward of this step stays."""
        self.observations[column] = self.zero
        self.idle = sorted({*self.idle, column})

    def add_late(self, column: int, reward: float) -> None:
        """A reward has come for the agent of this column, which did not act. With `check_finite`, raise `SpaceError` if
        it is NaN or inf."""
        self.check_finite(column, reward)
        self.late.append((column, reward))

    def check_finite(self, column: int, reward: float) -> None:
        """With `check_finite`, raise `SpaceError` if a reward is NaN or inf."""
        if self.checks.check_finite and not math.isfinite(reward):
            raise self.not_finite(column, reward)


_START = Start()

Place = tuple[SeatColumns, int]


class LockStepColumns(Columns):
    """One worker's environments of several agents. See `Columns`.

    `places[e]` says where the seats of environment e are: the columns, and the index in them, by agent id, in the order
    of `possible_agents`. After `reset` and `step`, `infos` has the infos that each environment returned last, by agent
    and unchecked.

    Raises `SpaceError`, with the env_rank and the agent, for data that do not fit.
    """

    policies: Sequence[SeatColumns]

    def __init__(self, envs: list[ParallelView], policies: Sequence[SeatColumns], env_ranks: Sequence[int]) -> None:
        self.envs: list[Any] = envs
        self.policies, self.env_ranks, self.waiting = policies, env_ranks, list[int]()
        pairs = [(policy, i, rank) for policy in policies for i, rank in enumerate(policy.env_ranks)]
        seats = {(int(rank), rank.agent_id): (policy, i) for policy, i, rank in pairs}
        self.places: list[dict[AgentId, Place]] = [
            {agent: seats[e, agent] for agent in env.possible_agents} for e, env in zip(env_ranks, envs, strict=True)
        ]
        self.progress = progress = policies[0].progress
        self._words, self._rank_word = progress.words, progress.loop_words
        self.living: list[list[AgentId]] = [[] for _ in envs]  # who acts next, in the order of `env.agents`
        self._ended: list[set[AgentId]] = [set() for _ in envs]  # who has ended, but is in `env.agents` still
        self.infos: list[Mapping[Any, Any]] = [{}] * len(envs)
        self.late: list[tuple[int, float]] = []  # rewards of this step for agents that did not act, by environment
        self.over: list[int] = []  # the environments in which nobody is left
        self.cut: list[int] = []  # those whose game has failed in this step
        self._bound = [
            (env, env.env, rank, places, list(places), _span(places))
            for env, rank, places in zip(envs, env_ranks, self.places, strict=True)
        ]
        most = max(map(len, self.places))
        self._seen: tuple[list[Any], list[Any]] = [None] * most, [None] * most  # what the agents of a game get
        self._has_events = False  # whether this step has any so far
        self._nobody = [()] * len(policies)
        for policy in policies:
            policy.when_watched = self._watch
        self._watch()

    def _watch(self) -> None:
        self._is_watched = any(policy.on_step or policy.keep_info or policy.checks.debug for policy in self.policies)
        self._tells_infos = any(policy.on_info for policy in self.policies)

    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        places = self.places[e].values()
        return [[column for columns, column in places if columns is policy] for policy in self.policies]

    # ---- resets ----------------------------------------------------------------------------

    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        if not envs:
            return self._nobody
        phase = self._words[Progress.PHASE]
        self.waiting = [e for e in self.waiting if e not in envs]
        for i, e in enumerate(envs):
            start = _START if starts is None else starts[i]
            if start is not _START and self._continue(e, start):
                continue
            if self.log_writer is not None:
                self.progress.at_env(self.env_ranks[e])
                self.progress.enter(Phase.RESETTING)
                start = self.log_writer.begin(e, start)
            self.reset_env(e, start)
        self._words[Progress.PHASE] = phase
        return [policy.take().joined for policy in self.policies]

    def reset_env(self, e: int, start: Start) -> None:
        """Reset environment e; the agents that it lists join."""
        seed, options, phase = start.seed, start.options, Phase.RESETTING
        if self.renewals is not None and e in self.renewals.first_seeds:
            seed, phase = self._seed_after_renewal(e, seed), Phase.RENEWING
        while True:
            env, _, env_rank, *_ = self._bound[e]
            self.progress.at_env(env_rank)
            began = self.progress.enter(phase)
            try:
                result = env.reset(seed=seed, options=options)
                self.progress.add_resetting_since(began)
                self._enter(e, result)
                break
            except self.renewable as error:
                self._renew(e, error, is_cut=False)
                seed, phase = self._seed_after_renewal(e, seed), Phase.RENEWING
        if self.renewals is not None:
            self.renewals.note_reset(e)

    def _enter(self, e: int, result: Any) -> None:
        """A game begins with what `env.reset` has returned."""
        env_rank = self.env_ranks[e]
        if not are_by_agent(result, 2):
            raise SpaceError(
                f"env.reset of env_rank {env_rank} must return a tuple of two dicts, observations and infos by agent, "
                f"got {brief(result)}"
            )
        observations, infos = result
        self.infos[e] = infos
        agents = self._listed(e)
        if not agents:
            raise SpaceError(f"env.reset of env_rank {env_rank} must leave at least one agent in env.agents")
        self._require_known(e, [*agents, *observations])
        self.clear(e)
        for columns, column in self.places[e].values():
            columns.begun.add(column)
        self._join(e, agents, observations)
        if self._tells_infos:
            self._tell_infos(e, "reset")

    def _tell_infos(self, e: int, call: str) -> None:
        """Call `on_info` for each agent that has an info."""
        places, infos = self.places[e], self.infos[e]
        require_info(infos, self.env_ranks[e], call)
        for agent, info in infos.items():
            if (info.__class__ is dict and not info) or agent not in places:
                continue
            columns, column = places[agent]
            require_info(info, columns.env_ranks[column], call)
            if info and columns.on_info is not None:
                columns.on_info(column, info)

    def save(self, e: int) -> Any:
        living = self.living[e]
        seen = {
            agent: columns.observations[column] for agent, (columns, column) in zip(living, self.acting(e), strict=True)
        }
        ended = [agent for agent in self.places[e] if agent in self._ended[e]]
        return {"agents": list(living), "ended": ended, "observations": snapshot(seen)}

    def _continue(self, e: int, start: Start) -> bool:
        """Let environment e continue a saved run, if `start` says so. Raises `RepeatError` if an episode that is
        repeated differs. Returns whether it continues."""
        saved, env_rank = self._saved(e, start), self.env_ranks[e]
        if start.state is None:
            if start.actions is None:
                return False
            assert self.log_writer is not None
            game = WholeGame(self.envs[e], env_rank, self.log_writer.agents(e))  # no hook sees its steps
            follow(game, start, f"the episode of env_rank {env_rank}")
            saved = game.columns.save(0)
        self.clear(e)
        self._ended[e] = set(saved["ended"])
        self._join(e, saved["agents"], saved["observations"])
        if not saved["agents"]:
            self.park([e])
        for columns, column in self.acting(e):
            columns.check_column(column)
        return True

    def _use(self, e: int, env: ParallelView) -> None:
        self.envs[e] = env
        self._bound[e] = (env, env.env, *self._bound[e][2:])

    def park(self, envs: Sequence[int]) -> None:
        self.waiting = sorted({*self.waiting, *envs})
        for e in envs:
            self.clear(e)

    def clear(self, e: int) -> None:
        """Nobody is in environment e: it is reset next, or is parked."""
        for columns, column in self.acting(e):
            columns.rewards[column] = 0.0
            columns.leave(column)
        self.living[e], self._ended[e] = [], set()

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

    def step(self, actions: Sequence[Any], row: int | None = None, which: int | None = None) -> Events | None:
        for policy, action_row in zip(self.policies, actions, strict=True):
            policy.actions = policy.split_actions(action_row)
        self.begin_step()
        for e in range(len(self.envs)) if which is None else (which,):
            if self.living[e]:
                try:
                    self.step_env(e)
                except self.renewable as error:
                    self._cut_env(e, error)
        if not self._has_events:
            return None
        return Events(self.over, [policy.take() for policy in self.policies], self.cut, self.late)

    def begin_step(self) -> None:
        """A row begins: nothing has happened in it."""
        if self._has_events:
            self.late, self.over, self.cut, self._has_events = [], [], [], False

    def _cut_env(self, e: int, error: Exception) -> None:
        """The game of environment e has failed in this step, which has no result."""
        phase = self._words[Progress.PHASE]
        self._renew(e, error, is_cut=True)
        for columns, column in self.acting(e):
            columns.infos[column] = columns.no_info
            columns.cut.append(column)
        self.clear(e)
        self.over.append(e)
        self.cut.append(e)
        self._has_events = True
        self._words[Progress.PHASE] = phase

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
            given, first = {}, 0  # the columns are not neighbours
            for agent in living:
                columns, column = places[agent]
                given[agent] = columns.actions[column]
        before = self._before(e, given) if self._is_watched else None
        if self._is_watched or self._ended[e]:
            is_stored, result = False, env.step(given)
        else:
            lists = self._seen if whole is None else (columns.observations, columns.rewards)
            is_stored, result = step_game(env.step, given, living, raw, *lists, first)
        if not is_stored:
            if result.__class__ is not tuple or len(result) != 5:
                result = step_values(result, env_rank)
            if not are_by_agent(result, 5):
                raise SpaceError(
                    f"env.step of env_rank {env_rank} must return five dicts by agent (observations, rewards, "
                    f"terminations, truncations, infos), got {brief(result)}"
                )
        self.infos[e] = result[4]
        if self._tells_infos:
            self._tell_infos(e, "step")
        if not is_stored:
            self._settle(e, before, result)
        elif whole is None:
            self._spread(places, living)

    def _spread(self, places: Mapping[AgentId, Place], living: Sequence[AgentId]) -> None:
        """Store what these agents have got, each in its column."""
        for i, agent in enumerate(living):
            columns, column = places[agent]
            columns.observations[column], columns.rewards[column] = self._seen[0][i], self._seen[1][i]

    def _before(self, e: int, given: Mapping[AgentId, Any]) -> dict[AgentId, tuple[Any, Any]]:
        """For the hooks, copies of what each agent acts on, and of its action. `debug=True` checks the actions here."""
        before = {}
        for agent in given:
            columns, column = self.places[e][agent]
            if columns.checks.debug:
                columns.require_action(column, given[agent])
            if columns.on_step is not None:
                before[agent] = columns.observations[column], snapshot(given[agent])
        return before

    def _settle(self, e: int, before: Mapping[AgentId, tuple[Any, Any]] | None, result: Result) -> None:
        """Any step: someone may have joined or ended, or the dicts are in another order."""
        observations, rewards, terminated, truncated, infos = result
        places = self.places[e]
        agents = self._listed(e)
        flags_of = [agent for agent in (*terminated, *truncated) if agent != "__all__"]  # which RLlib's games have
        self._require_known(e, [*agents, *observations, *rewards, *flags_of])
        listed, acted, stay = set(agents), self.living[e], list[AgentId]()
        ended = self._ended[e] = self._ended[e] & listed
        for agent in acted:
            columns, column = places[agent]
            rank, info = columns.env_ranks[column], infos.get(agent, {})
            if info.__class__ is not dict:
                require_info(info, rank)
            flags = episode_flags(_flag_of(terminated, agent), _flag_of(truncated, agent), rank)
            columns.rewards[column] = reward = require_number(rewards.get(agent, 0.0), rank)
            columns.note_info(column, info)
            _require_consistent(rank, flags, is_listed=agent in listed, is_observed=agent in observations)
            observation = snapshot(observations.get(agent, columns.zero))
            if before is not None and columns.on_step is not None:
                columns.on_step(column, *before[agent], reward, *flags, info)
            if any(flags):
                columns.end(column, observation, *flags)
                ended |= {agent} & listed
            else:
                columns.observations[column] = observation
                stay.append(agent)
        for agent in [agent for agent in rewards if agent not in acted]:
            columns, column = places[agent]
            if number := require_number(rewards[agent], columns.env_ranks[column]):
                columns.add_late(column, number)
                self.late.append((e, number))
        self.living[e] = stay
        self._has_events = self._has_events or bool(self.late) or len(stay) < len(acted)
        # Who would join, but has ended already, has made no decision.
        ended |= {a for a in listed.difference(acted) if _flag_of(terminated, a) or _flag_of(truncated, a)}
        if joining := [agent for agent in agents if agent not in ended and agent not in acted]:
            self._join(e, joining, observations)
            self._has_events = True
        if not self.living[e]:
            self.over.append(e)
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


class WholeGame(gym.Env[Any, Any]):
    """All agents of a game as one environment, to repeat a recorded episode. Actions and observations are tuples with a
    part for each of `agents`, and rewards are a list. What is idle is zero. The episode is that of the game.

    `agents` are the `possible_agents` in the order of the recording: another process may list them in another order.
    It renders what the game renders.
    """

    def __init__(self, view: ParallelView, env_rank: int, agents: Sequence[AgentId]) -> None:
        progress = UntimedProgress(ControlBlock(1, 1, shared=False), 0)
        spaces = [view.spaces[agent] for agent in agents]
        self._seats = [
            SeatColumns([SeatRank(env_rank, agent)], pair, progress) for agent, pair in zip(agents, spaces, strict=True)
        ]
        self.columns, self._view, self._agents = LockStepColumns([view], self._seats, [env_rank]), view, agents
        self.observation_space, self.action_space = (gym.spaces.Tuple(parts) for parts in zip(*spaces, strict=True))
        self.metadata, self.render_mode = view.metadata, getattr(view.env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.columns.reset([0], [Start(seed, options)])
        return self._seen(), {}

    def _seen(self) -> tuple[Any, ...]:
        return tuple(seat.observations[0] for seat in self._seats)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        for seat, part in zip(self._seats, action, strict=True):
            seat.actions = [part]
        self.columns.begin_step()
        self.columns.step_env(0)
        rewards = [require_number(seat.rewards[0], seat.env_ranks[0]) for seat in self._seats]
        for seat in self._seats:
            seat.take()
            seat.blank_idle(None)
        return self._seen(), rewards, not self.columns.living[0], False, {}

    def handed_over(self, action: Any) -> tuple[Any, Any]:
        """The game itself, and the actions in it by agent, of those who act next; None if `action` is None."""
        by_agent = None if action is None else dict(zip(self._agents, action, strict=True))
        return self._view.env, by_agent and {agent: by_agent[agent] for agent in self.columns.living[0]}

    def render(self) -> Any:
        return self._view.env.render()

    def close(self) -> None:
        self._view.close()


def whole_game(as_view: Callable[[Any], ParallelView], env_rank: int, agents: Sequence[AgentId], env: Any) -> WholeGame:
    """The game `env`, of which `as_view` makes a view."""
    return WholeGame(as_view(env), env_rank, agents)


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
    is_one = all(other is columns for other, _ in places.values())
    return (columns, first, first + len(places)) if is_one else None
