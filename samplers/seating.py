"""Which policy plays which seat of which environment; and the names of their trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

import numpy as np

from penstock.arguments import must_be, signature
from penstock.buffers import NamedArrays
from penstock.buffers.reports import in_one_line
from penstock.collectors import TrajInfo
from penstock.columns.turn_columns import MOST_EMPTY_GAMES
from penstock.envs import ColumnStreams, EnvFactory, build_example_env, close_example_env
from penstock.envs.seats import AgentId, ParallelView, SeatTable, TurnView
from penstock.errors import ConfigError, SpaceError
from penstock.samplers.refusals import CHOSEN, IN_STEP, refuse
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan

#: The name of the policy where one agent plays all seats.
SHARED = "agent"

#: `policy_of(agent_id)` names the policy of an agent. It may also have the parameters `env_rank`, `game` and `rng`.
PolicyOf = Callable[..., str]


@dataclass(frozen=True)
class Seating:
    """Who sits where. An environment of one agent has one seat. `train.policy` and `evaluation.policy` are indices in
    `policies`."""

    policies: tuple[str, ...]
    is_shared: bool  #: whether one agent was given, and not a dict of agents
    train: SeatTable
    evaluation: SeatTable
    has_games: bool = False  #: whether several agents share an environment: then the whole game has a trajectory too
    in_turns: bool = False  #: whether the agents of an environment take turns
    #: Chooses the policy of each seat in each game; None: a seat keeps its policy.
    chooser: Chooser | None = None
    #: How many trajectories end together: one for each seat of an environment, and one for its game.
    width: int = 1

    @classmethod
    def of_single(cls, batch_B: int, eval_n_envs: int, env_range: EnvRange) -> Seating:
        """One seat for each environment. One agent plays all of them."""
        train = SeatTable.of_single(batch_B, env_range.first_env_rank)
        return cls((SHARED,), True, train, SeatTable.of_single(eval_n_envs, env_range.first_eval_env_rank))

    def key(self, env_rank: int, seat: int | None) -> int:
        """What stands in the place of the env_rank in a trajectory's record: so records are ordered by environment,
        then by seat, with that of the environment itself last (`seat` None). A game that was cut is reported with the
        inverse `~key`, which is negative."""
        return env_rank * self.width + (self.width - 1 if seat is None else seat)

    def most_rounds(self, batch_T: int) -> int:
        """The most rows that a batch has stamps of."""
        if not self.in_turns:
            return batch_T
        # A round for each decision, and one for each game that asked nobody or has failed.
        return 2 * batch_T * self.width * len(self.policies) + MOST_EMPTY_GAMES

    def n_seats(self, p: int) -> int | None:
        """How many seats of each environment policy p plays; 0 if their number differs; None if all have one agent."""
        if not self.has_games:
            return None
        numbers = {len(self.train.cells(p, range(b, b + 1))) for b in range(len(self.train.agents))}
        return numbers.pop() if len(numbers) == 1 else 0

    def with_cells(self, plan: SamplerPlan) -> SamplerPlan:
        """The plan with its columns of the samples buffers."""
        n = range(len(self.policies))
        train = tuple(self.train.cells(p, plan.columns) for p in n)
        evaluation = tuple(self.evaluation.cells(p, plan.eval_columns) for p in n)
        n_games, n_eval_games = (self.has_games * len(envs) for envs in (plan.columns, plan.eval_columns))
        n_empty = MOST_EMPTY_GAMES + sum(map(len, train)) if self.in_turns else 0
        return replace(
            plan,
            cells=train,
            eval_cells=evaluation,
            # In turns, each row of a cell may also be the only decision of a game, after a game without decisions.
            n_records=sum(map(len, train)) + (2 * sum(map(len, train)) if self.in_turns else n_games),
            n_eval_records=sum(map(len, evaluation)) + (1 + self.in_turns) * n_eval_games,
            n_more_records=n_games + n_empty,  # n_games: those that were lost with the worker before this one
            policies=() if self.is_shared else self.policies,
        )

    def part(self, plan: SamplerPlan) -> Seating:
        """Who sits where in the plan's environments alone."""
        train, evaluation = self.train.part(plan.columns), self.evaluation.part(plan.eval_columns)
        return replace(self, train=train, evaluation=evaluation)

    def by_policy(self) -> dict[str, list[tuple[int, AgentId]]]:
        """See `Sampler.seats`."""
        envs = range(len(self.train.agents))
        return {
            name: [(int(rank), rank.agent_id) for rank in self.train.ranks(p, envs)]
            for p, name in enumerate(self.policies)
        }

    def name_infos(
        self,
        infos: Iterable[TrajInfo],
        ends: Iterable[tuple[int, int]],
        n_over: defaultdict[int, int],
        *,
        evaluation: bool,
    ) -> None:
        """Write into each info whose trajectory it is. `ends`: the last time step and the `key` of each. `n_over`: how
        many games of each environment are over, or finished trajectories, if it has one agent. Games that were cut
        count too, except in evaluations, where they are played again."""
        side, width = self.evaluation if evaluation else self.train, self.width
        for info, (_, key) in zip(infos, ends, strict=True):
            env_rank, seat = divmod(max(key, ~key), width)
            info.env_rank, info.number = env_rank, n_over[env_rank]
            if seat == width - 1:
                n_over[env_rank] += key >= 0 or not evaluation
            else:
                b = env_rank - side.first_env_rank
                if self.chooser is None:
                    p = side.policy[b][seat]
                else:
                    p, seat = divmod(seat, side.most)
                info.agent_id, info.policy = side.agents[b][seat], self.policies[p]

    def uncounted(self, ends: Sequence[tuple[int, int]], *, evaluation: bool) -> dict[int, int]:
        """What is no trajectory: its index, and its env_rank. It is the report of a game that was cut. In evaluations,
        which play this game again, it is also each agent that had ended in it."""
        uncounted, of_game = dict[int, int](), defaultdict[int, list[int]](list)
        if all(key >= 0 for _, key in ends):  # as usual
            return uncounted
        for i, (_, key) in enumerate(ends):
            env_rank, seat = divmod(max(key, ~key), self.width)
            if seat < self.width - 1:
                of_game[env_rank].append(i)
                continue
            ended = of_game.pop(env_rank, [])
            if key < 0:
                uncounted |= dict.fromkeys([i, *ended] if evaluation else [i], env_rank)
        return uncounted


# ---- finding it -------------------------------------------------------------------------------------


def find_seating(
    sides: Sequence[tuple[Sequence[EnvFactory], int]],
    agents: Any,
    policy_of: PolicyOf | None,
    first: tuple[EnvFactory, ParallelView],
) -> tuple[Seating, Sequence[tuple[EnvFactory, AgentId, Any]]]:
    """Who sits where, and for each policy a factory and an agent that stand for its seats, with the agent's two spaces.

    `sides`: the factories of the training environments and the env_rank of the first, and those of evaluation. An
    example of each kind of environment is built, except of the `first`, which comes with its factory. Raises
    `ConfigError`, or `SpaceError` if two seats of a policy have different spaces.
    """
    seen = [first]
    views = [[_seen_as(factory, seen) for factory in factories] for factories, _ in sides]
    policies, is_shared = _names(agents), not isinstance(agents, Mapping)
    chooser, in_turns = _chooser(policy_of, policies, is_shared=is_shared), isinstance(first[1], TurnView)
    refuse({CHOSEN: chooser.is_dynamic, IN_STEP: not in_turns})
    train, evaluation = (
        SeatTable(
            [view.possible_agents for view in side_views],
            [
                [chooser(agent, first_rank + b, 0, lambda: np.random.default_rng(0)) for agent in view.possible_agents]
                for b, view in enumerate(side_views)
            ],
            first_rank,
            len(policies) if chooser.is_dynamic else 0,
        )
        for side_views, (_, first_rank) in zip(views, sides, strict=True)
    )
    if len({isinstance(view, TurnView) for side_views in views for view in side_views}) > 1:
        raise ConfigError("in some environments agents take turns and in others not: use a sampler for each kind")
    if evaluation.agents and chooser.is_dynamic and evaluation.most != train.most:
        raise ConfigError("with policy_of for each game, evaluation environments need as many agents as the others")
    width = 1 + max(train.most, evaluation.most) * (len(policies) if chooser.is_dynamic else 1)
    dynamic = chooser if chooser.is_dynamic else None
    seating = Seating(policies, is_shared, train, evaluation, True, in_turns, dynamic, width)
    return seating, _examples(seating, views, [factories for factories, _ in sides])


def _seen_as(factory: EnvFactory, seen: list[tuple[EnvFactory, ParallelView]]) -> ParallelView:
    """What the environments of this factory are like: an example, which is closed."""
    for other, view in seen:
        if other.fn is factory.fn and _are_equal(other.kwargs, factory.kwargs):
            return view
    env = build_example_env(factory)
    close_example_env(env)
    if not isinstance(env, ParallelView):
        raise ConfigError("some environments have several agents and others one: use a sampler for each kind")
    seen.append((factory, env))
    return env


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two environments get the same arguments. If that cannot be told, they may differ."""
    try:
        return bool(one == other)
    except Exception:  # arrays cannot be compared so, and objects of users may raise anything
        return False


def _names(agents: object) -> tuple[str, ...]:
    if not isinstance(agents, Mapping):
        return (SHARED,)
    if not agents:
        raise ConfigError("the dict of agents is empty: give an agent for each policy")
    for name in agents:
        is_name = isinstance(name, str) and name.isidentifier() and not iskeyword(name) and name[0] != "_"
        if not is_name or hasattr(NamedArrays, name) or name in ("batch", "is_current", "valid_until"):
            raise ConfigError(
                f"a policy cannot be called {name!r}, since batch.NAME are its samples: give it another name"
            )
    if len({id(agent) for agent in agents.values()}) < len(agents):
        raise ConfigError("two policies have the same agent: let policy_of give its seats one name, or copy it")
    return tuple(agents)


@dataclass(frozen=True)
class Chooser:
    """Names the policy of a seat in a game: the index of what `policy_of` returns. Raises `ConfigError`."""

    policy_of: PolicyOf
    names: frozenset[str]  #: of its parameters
    policies: tuple[str, ...]

    @classmethod
    def of(cls, policy_of: PolicyOf, policies: tuple[str, ...]) -> Chooser:
        """The chooser for `policies`."""
        must_be("policy_of", policy_of, callable(policy_of), "a function of agent_id")
        return cls(policy_of, frozenset(signature(policy_of).parameters), policies)

    def like(self, policy_of: PolicyOf) -> Chooser:
        """A chooser for the same policies, with another function."""
        return Chooser.of(policy_of, self.policies)

    @property
    def is_dynamic(self) -> bool:
        """Whether it chooses for each game."""
        return not self.names.isdisjoint(("game", "rng"))

    def __call__(self, agent: AgentId, env_rank: int, game: int, rng: Callable[[], np.random.Generator]) -> int:
        """`rng` is called if `policy_of` asks for it."""
        more: dict[str, Any] = {"env_rank": env_rank, "game": game}
        more = {name: value for name, value in more.items() if name in self.names}
        if "rng" in self.names:
            more["rng"] = rng()
        where = f"env_rank {env_rank}, agent {agent!r}"
        try:
            name = self.policy_of(agent, **more)
        except Exception as error:
            raise ConfigError(f"policy_of raised {in_one_line(error)} for {where}") from error
        if name not in self.policies:
            hint = ": give policy_of, which names the policy of an agent" if self.policy_of is str else ""
            raise ConfigError(
                f"policy_of returned {name!r} for {where}, but the policies are {list(self.policies)}{hint}"
            )
        return self.policies.index(name)


def _chooser(policy_of: PolicyOf | None, policies: tuple[str, ...], *, is_shared: bool) -> Chooser:
    """What chooses the policy of a seat."""
    if is_shared and policy_of is not None:
        raise ConfigError("policy_of needs a dict of agents: initialize({'NAME': agent, ...}, policy_of=...)")
    if is_shared:
        return Chooser(lambda agent: SHARED, frozenset(), policies)
    return Chooser(str, frozenset(), policies) if policy_of is None else Chooser.of(policy_of, policies)


def _examples(
    seating: Seating, views: Sequence[Sequence[ParallelView]], factories: Sequence[Sequence[EnvFactory]]
) -> list[tuple[EnvFactory, AgentId, Any]]:
    """For each policy, its first seat and the spaces there. Raises `SpaceError` if another one has other spaces."""
    examples: dict[int, tuple[EnvFactory, AgentId, Any, str]] = {}
    text = "observations {}, actions {}".format
    for side, side_views, side_factories in zip((seating.train, seating.evaluation), views, factories, strict=True):
        for b, (view, factory) in enumerate(zip(side_views, side_factories, strict=True)):
            for agent, p in _played(side, b):
                where = f"env_rank {side.first_env_rank + b}, agent {agent!r}"
                first = examples.setdefault(p, (factory, agent, view.spaces[agent], where))
                if first[2] != view.spaces[agent]:
                    raise SpaceError(
                        f"{first[3]} and {where} have the same policy, {seating.policies[p]!r}, but different spaces: "
                        f"{text(*first[2])}; {text(*view.spaces[agent])}. Give them different policies (policy_of), or "
                        "wrap the environment so that their spaces are equal"
                    )
    in_training = {p for b in range(len(seating.train.agents)) for _, p in _played(seating.train, b)}
    if missing := [name for p, name in enumerate(seating.policies) if p not in in_training]:
        raise ConfigError(
            f"no agent of the training environments has the policy {missing[0]!r}: leave it out, or let policy_of "
            "return it"
        )
    return [examples[p][:3] for p in range(len(seating.policies))]


def _played(side: SeatTable, b: int) -> list[tuple[AgentId, int]]:
    """The agents of environment b, with each policy that may play them."""
    if side.n_policies:
        return [(agent, p) for agent in side.agents[b] for p in range(side.n_policies)]
    return list(zip(side.agents[b], side.policy[b], strict=True))


def env_streams(plan: SamplerPlan, seed: int, *, evaluation: bool = False) -> ColumnStreams:
    """The random streams of a worker's environments."""
    return ColumnStreams(seed, plan.eval_env_ranks if evaluation else plan.env_ranks, plan.generation)


def column_streams(
    seating: Seating, plan: SamplerPlan, seed: int, p: int = 0, *, evaluation: bool = False
) -> ColumnStreams:
    """The random streams of a worker's columns of policy p. With one seat in each environment, they are those of the
    environments: they have no number of a seat."""
    if not seating.has_games:
        return env_streams(plan, seed, evaluation=evaluation)
    side, envs = (seating.evaluation, plan.eval_columns) if evaluation else (seating.train, plan.columns)
    numbers = tuple(seat for _, seat, _ in side.seats(p, envs))
    return ColumnStreams(seed, side.ranks(p, envs), plan.generation, numbers)


def keys_of(seating: Seating, streams: ColumnStreams) -> Sequence[int]:
    """The keys of the records of these columns; of environments if they are no seats."""
    seats: Iterable[int | None] = streams.seats or [None] * len(streams.env_ranks)
    return [seating.key(int(rank), seat) for rank, seat in zip(streams.env_ranks, seats, strict=True)]
