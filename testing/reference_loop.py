"""The reference loop: what a sampler must return, from a plain loop over the environments.

It is slow and simple: one process, one step after the other. It follows the documents of Gymnasium and PettingZoo. Of
penstock it uses agents, `NamedArrays`, `TrajInfo` and the streams of random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays, as_named
from penstock.collectors import TrajInfo
from penstock.envs.seeding import ColumnStreams, Purpose, eval_seed
from penstock.testing.reference_envs import Batched, Several, Single, element_of, row_of, stack

Cell = dict[str, Any]  # of the batch: its fields by name


@dataclass(eq=False)
class _Column:
    env_rank: int
    agent: Any  # its id
    number: int  # of its seat in the environment
    policy: _Policy
    info: TrajInfo  # its trajectory
    seen: Any = None  # the observation that it acts on next, or has acted on while its cell is open; None: it is idle
    prev: Cell | None = None  # the cell whose action and reward the agent gets; None for zeros
    action: Any = None  # its newest action, as the environment gets it
    is_start: bool = True  # whether an episode begins
    cell: Cell | None = None  # what it has decided, while the reward is missing
    cells: list[Cell] = field(default_factory=list)  # of this batch
    before: Cell | None = None  # the last one of the batch before


class _Policy:
    """An agent, and the columns for which it acts: for all at once, or `in_turns` for one that is asked."""

    def __init__(self, name: str, agent: Any, spaces: Any, env_info: Mapping[str, Any], *, in_turns: bool) -> None:
        self.name, self.source, self.agent, self.spaces = name, agent, agent, spaces
        self.columns, self.in_turns = list[_Column](), in_turns
        info = {k: np.zeros_like(v) for k, v in env_info.items()} | {f"_{k}": np.False_ for k in env_info}
        #: The cell of an idle column.
        self.blank: Cell = {"observation": row_of(spaces[0]), "final_obs": row_of(spaces[0])}
        self.blank |= dict.fromkeys(("terminated", "truncated", "done", "prev_done", "valid"), np.False_)
        self.blank |= {"action": row_of(spaces[1]), "reward": np.float32(0), "final_value": np.float32(0)}
        self.blank["env_info"] = NamedArrays(info)

    def begin(self, n_envs: int, rngs: Sequence[np.random.Generator], model_seed: int) -> None:
        """Prepare the agent for its columns, as a sampler does."""
        if not hasattr(self.source, "observation_space"):
            self.source.initialize(*self.spaces, seed=model_seed)
        self.agent = copy.deepcopy(self.source)
        self.agent.runtime.set_columns([column.env_rank for column in self.columns], n_envs)
        self.agent.seed_columns(rngs)
        self.agent.reset()
        trial = copy.deepcopy(self.agent).step(*self._inputs(self.columns))
        self.blank["agent_info"] = as_named(trial.agent_info).map(np.zeros_like)[0]

    def _called_with(self, column: _Column) -> list[_Column]:
        """The columns for which the agent is called."""
        if self.in_turns:
            self.agent.select(np.array([self.columns.index(column)]))
        return [column] if self.in_turns else self.columns

    def _inputs(self, columns: Sequence[_Column]) -> tuple[Any, Any, Any]:
        """Observation, prev_action, prev_reward."""
        prev = [column.prev or self.blank for column in columns]
        seen = stack([row_of(self.spaces[0], column.seen) for column in columns])
        return seen, stack([cell["action"] for cell in prev]), stack([cell["reward"] for cell in prev])

    def act(self, asked: _Column | None = None) -> None:
        """Act for the column that is asked, or for all; also for idle ones, so that nobody's random numbers depend on
        who is idle."""
        columns = self.columns if asked is None else self._called_with(asked)
        action, agent_info = map(as_named, self.agent.step(*self._inputs(columns)))
        rows, agent_info = stack([self.blank["action"]] * len(columns)), agent_info.map(np.array)
        rows[...] = action
        for i, column in enumerate(columns):
            column.action = element_of(self.spaces[1], rows[i])
            if column.seen is None:
                column.cells.append(self.blank)
                continue
            column.cell = {**self.blank, "observation": row_of(self.spaces[0], column.seen), "action": rows[i]}
            column.cell |= {"agent_info": agent_info[i], "valid": np.True_, "prev_done": np.bool_(column.is_start)}

    def value(self, column: _Column) -> Any:
        """The value of what the column has seen; zero if it is idle. That of an open decision is as when it was made:
        a state has gone on since."""
        if column.seen is None or (column.cell and "value" in column.cell["agent_info"]):
            return np.float32(0) if column.cell is None else column.cell["agent_info"].value
        columns = self._called_with(column)
        return np.asarray(self.agent.value(*self._inputs(columns)), np.float32)[columns.index(column)]

    def batch(self, T: int, *, bootstrap_value: bool) -> NamedArrays:
        """The batch of the cells, which are dropped."""
        rows, before, values = list[Any](), list[Any](), np.zeros(len(self.columns), np.float32)
        for b, own in enumerate(self.columns):
            cells = [*own.cells, *[self.blank] * (T - len(own.cells))]
            if own.cell is not None:  # an open decision shows what it was made on
                cells[len(own.cells)] = {**self.blank, "observation": own.cell["observation"]}
            rows.append(cells)
            before.append([own.before or self.blank, *cells[:-1]])
            own.before, own.cells = own.cells[-1] if own.cells else own.before, []
            values[b] = self.value(own) if bootstrap_value else 0
        fields = {name: stack([stack([own[t][name] for own in rows]) for t in range(T)]) for name in self.blank}
        for name in ("action", "reward"):
            fields[f"prev_{name}"] = stack([stack([own[t][name] for own in before]) for t in range(T)])
        seen = stack([row_of(self.spaces[0], own.seen) for own in self.columns])
        return NamedArrays(fields, bootstrap_obs=seen, bootstrap_value=values)


@dataclass
class ReferenceLoop:
    """What a sampler with these arguments returns, without random steps before the first batch.

    It acts with the present parameters of `agents`. Not here: masks from `info`, `global_state`, joint agents, players
    that change from game to game, games that fail or end before anybody acts.
    """

    env_fn: Any  #: `env_fn()`, or `env_fn(num_envs=n)` if `batched`; or a list of functions, one for each environment
    agents: Any  #: an agent, or a dict of them by the names of policies
    seed: int
    batch_T: int
    batch_B: int
    batched: bool = False
    wait_reset: bool = False  #: whether environments that are over wait for the end of the batch
    #: How environment e begins again after its n-th episode, if its collector says so: (e, n) -> (seed, options).
    start_of: Callable[[int, int], tuple[int | None, dict[str, Any] | None]] | None = None
    fresh_batches: bool = False  #: whether each batch begins with new episodes in all environments
    bootstrap_value: bool = False
    policy_of: Callable[[Any], str] = str
    env_info: Mapping[str, Any] = field(default_factory=dict)  #: examples of entries of info, by name
    traj_info_cls: type[TrajInfo] = TrajInfo
    traj_info_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_n_envs: int = 0
    eval_max_steps: int = 10_000
    eval_episodes: int | None = None
    is_evaluation: bool = False  #: for the loop itself

    def __post_init__(self) -> None:
        n, self._n_evaluations = self.batch_B, 0
        makers = self.env_fn if isinstance(self.env_fn, Sequence) else [self.env_fn] * n
        envs = [self.env_fn(num_envs=n)] if self.batched else [make() for make in makers[:n]]
        self._has_seats, self._in_turns = hasattr(envs[0], "possible_agents"), hasattr(envs[0], "agent_iter")
        kind: Any = Batched if self.batched else Several if self._has_seats else Single
        self._envs, self._shares, self._n_over = [kind(env) for env in envs], [float("inf")] * n, [0] * n
        if self.batched and self.start_of is not None and not self.is_evaluation:
            self._envs[0].start_of = self._next_start
        if not self.is_evaluation:
            self._begin(ColumnStreams(self.seed, range(n)).env_seeds(Purpose.TRAIN), Purpose.ACTION)
        if self.eval_n_envs:
            self._evaluation = replace(self, batch_B=self.eval_n_envs, eval_n_envs=0, is_evaluation=True)

    def _begin(self, seeds: Sequence[int], purpose: Purpose, *key: int) -> None:
        """Begin again, with new columns."""
        n, agents = self.batch_B, self.agents if isinstance(self.agents, Mapping) else {"agent": self.agents}
        self._ended, self._begun, self._times, self._waiting = [0] * n, [0] * n, [-1] * n, list[int]()
        self._found, self._rewards = list[tuple[Any, TrajInfo]](), [[0.0] for _ in range(n)]
        self._columns: list[dict[Any, _Column]] = [{} for _ in self._envs]
        self._asked, self._policies = list[_Column | None]([None] * n), dict[str, _Policy]()
        for e, env in enumerate(self._envs):
            for number, (agent, own) in enumerate(env.seats.items()):
                name = self.policy_of(agent) if isinstance(self.agents, Mapping) else "agent"
                if name not in self._policies:
                    made = _Policy(name, agents[name], own, self.env_info, in_turns=self._in_turns)
                    self._policies[name] = made
                policy, rank = self._policies[name], number if self.batched else e
                self._columns[e][agent] = column = _Column(rank, agent, number, policy, self._new_info())
                policy.columns.append(column)
        for p, name in enumerate(agents):
            if name not in self._policies:  # it plays in no environment of an evaluation
                continue
            columns = self._policies[name].columns
            seats = [column.number for column in columns] if self._has_seats else ()
            streams = ColumnStreams(self.seed, [column.env_rank for column in columns], seats=seats)
            (model_seed,) = ColumnStreams(self.seed, range(1)).env_seeds(Purpose.MODEL, *([p] if p else []))
            self._policies[name].begin(n, streams.rngs(purpose, *key), model_seed)
        for e in range(len(self._envs)):
            self._reset(e, *(seeds if self.batched else [seeds[e]]))

    def _new_info(self) -> TrajInfo:
        return self.traj_info_cls(**self.traj_info_kwargs)

    def obtain_samples(self, itr: int) -> tuple[Any, list[TrajInfo]]:
        """The next batch and its trajectories. The batch is the fields `[T, B, ...]` without their groups (`reward`,
        not `env.reward`), or a dict of them by policy."""
        waiting, self._waiting, self._times, self._found = self._waiting, [], [-1] * self.batch_B, []
        for e in waiting:
            self._reset(e, None)
        if self.fresh_batches:
            self._drop_episodes()
        for policy in self._policies.values():
            policy.agent.write_parameters(policy.source.read_parameters())
            policy.agent.sample_mode(itr)
        for _ in range(0 if self._in_turns else self.batch_T):
            self._step()
        for e in range(self.batch_B if self._in_turns else 0):
            while (column := self._asked[e]) and len(column.cells) < self.batch_T:
                self._decide(e, column)
        own = {n: p.batch(self.batch_T, bootstrap_value=self.bootstrap_value) for n, p in self._policies.items()}
        return own if isinstance(self.agents, Mapping) else own["agent"], self._ordered()

    def evaluate_agent(self, itr: int) -> list[TrajInfo]:
        """The trajectories of an evaluation."""
        own, n, key = self._evaluation, self.eval_n_envs, self._n_evaluations
        self._n_evaluations += 1
        if self.eval_episodes is not None:
            own._shares = [self.eval_episodes // n + (e < self.eval_episodes % n) for e in range(n)]
        own._begin([eval_seed(self.seed, e) for e in range(n)], Purpose.EVAL_ACTION, key)
        for policy in own._policies.values():
            policy.agent.eval_mode(itr)
        for _ in range(max(1, self.eval_max_steps // n)):
            if not self._in_turns:
                own._step()
            for e, column in enumerate(own._asked):
                if column:
                    own._decide(e, column)
        return sorted(own._ordered(), key=lambda info: (info.number, info.env_rank))

    def _ordered(self) -> list[TrajInfo]:
        return [info for _, info in sorted(self._found, key=lambda found: found[0])]

    # ---- steps ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Everybody acts."""
        self._times = [t + 1 for t in self._times]
        for policy in self._policies.values():
            policy.act()
        for e, (env, own) in enumerate(zip(self._envs, self._columns, strict=True)):
            if not (self.batched or any(column.cell for column in own.values())):
                continue
            steps, joined, late = env.step({agent: column.action for agent, column in own.items()})
            self._rewards[e].append(late + sum(float(step[1]) for step in steps.values()))
            for agent, step in steps.items():
                self._close(own[agent], *step)
            self._join(own, joined)
            if not self.batched and all(column.seen is None for column in own.values()):
                self._restart(e)

    def _decide(self, e: int, column: _Column) -> None:
        """The agent that environment e has asked decides."""
        column.policy.act(column)
        self._times[e] += 1
        self._rewards[e].append(0.0)
        self._envs[e].env.step(column.action)
        self._ask(e)

    def _ask(self, e: int) -> None:
        """Find who decides next in environment e."""
        env, self._asked[e] = self._envs[e].env, None
        while env.agents:
            column = self._columns[e][env.agent_selection]
            observation, reward, terminated, truncated, info = env.last()
            self._rewards[e][-1] += reward
            self._close(column, observation, reward, terminated, truncated, info)
            if not (terminated or truncated):
                if column.seen is None:
                    self._join(self._columns[e], {column.agent: observation})
                self._asked[e] = column
                return
            env.step(None)
        self._restart(e)

    def _join(self, own: dict[Any, _Column], joined: dict[Any, Any]) -> None:
        """These agents act next, with these observations."""
        for agent, observation in joined.items():
            column = own[agent]
            if self._ended[column.env_rank] < self._shares[column.env_rank]:
                column.seen = copy.deepcopy(observation)
                column.policy.agent.reset_one(column.policy.columns.index(column))

    def _close(self, column: _Column, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """What the column gets for its last action, if it has made one."""
        if (cell := column.cell) is None:
            return
        terminated, truncated = bool(terminated), bool(truncated)
        policy, ended, before = column.policy, terminated or truncated, column.seen
        column.seen = element_of(policy.spaces[0], policy.blank["observation"]) if seen is None else copy.deepcopy(seen)
        cell |= {"reward": np.float32(reward), "terminated": np.bool_(terminated), "truncated": np.bool_(truncated)}
        cell |= {"done": np.bool_(ended), "env_info": cell["env_info"].map(np.array)}
        for name in [name for name in self.env_info if name in info]:
            cell["env_info"][name], cell["env_info"][f"_{name}"] = info[name], True
        column.cells.append(cell)
        column.cell, column.prev, column.is_start = None, cell, ended
        # Without a subclass, nothing is called for each step: the figures come from the rewards of the batch.
        counted = float(cell["reward"]) if self.traj_info_cls is TrajInfo else reward
        action = element_of(policy.spaces[1], cell["action"])
        column.info.step(before, action, counted, terminated, truncated, cell["agent_info"], info)
        if not ended:
            return
        cell["final_obs"] = row_of(policy.spaces[0], column.seen)
        if truncated and not terminated and self.bootstrap_value and not self.is_evaluation:
            cell["final_value"] = policy.value(column)
        final, column.seen, column.prev = column.seen, None, None
        if column.info.traj_done(terminated, truncated, info):
            column.info.terminate(final)
            self._finish(column.info, column.env_rank, column)
            column.info = self._new_info()

    def _finish(self, info: TrajInfo, e: int, column: _Column | None = None) -> None:
        """A trajectory has ended: that of a column, or that of the whole game in environment e."""
        info.env_rank, info.number = e, self._ended[e]
        if self.is_evaluation and not (self.batched and info.number):
            info.seed = eval_seed(self.seed, info.number * self.batch_B + e)
        if column and self._has_seats:
            info.agent_id, info.policy = column.agent, column.policy.name
        else:
            self._ended[e] += 1
        self._found.append(((self._times[e], e, column.number if column else np.inf), info))

    def _restart(self, e: int) -> None:
        """Nobody is left in environment e."""
        if self._has_seats:
            info, (early, first, *rest) = self._new_info(), self._rewards[e]  # early: before the first decision
            for reward in (early + first, *rest):
                TrajInfo.step(info, None, None, float(np.float32(reward)), False, False, None, {})
            self._finish(info, e)
        self._rewards[e] = [0.0]
        if self._ended[e] >= self._shares[e]:
            return
        if self.wait_reset and not self.is_evaluation:
            self._waiting.append(e)
            return
        # Each trajectory of an evaluation has its seed; one that goes on in another episode has no second one.
        is_seeded, self._begun[e] = self.is_evaluation and self._begun[e] < self._ended[e], self._ended[e]
        if self.start_of is not None and not self.is_evaluation:
            seed, options = self._next_start(e)
            self._join(self._columns[e], self._envs[e].reset(seed, options))
            return
        self._reset(e, eval_seed(self.seed, self._ended[e] * self.batch_B + e) if is_seeded else None)

    def _next_start(self, e: int) -> tuple[int | None, dict[str, Any] | None]:
        assert self.start_of is not None
        self._n_over[e] += 1
        return self.start_of(e, self._n_over[e])

    def _drop_episodes(self) -> None:
        """Begin new episodes everywhere. A trajectory goes on if its last episode has just ended."""
        for column in (column for own in self._columns for column in own.values()):
            column.info = column.info if column.is_start else self._new_info()
            column.seen, column.prev, column.is_start = None, None, True
        self._rewards = [[0.0] for _ in self._rewards]
        for e in range(len(self._envs)):
            self._reset(e, *([None] * self.batch_B if self.batched else [None]))

    def _reset(self, e: int, *seeds: int | None) -> None:
        self._join(self._columns[e], self._envs[e].reset(*seeds))
        if self._in_turns and self._ended[e] < self._shares[e]:
            self._ask(e)
