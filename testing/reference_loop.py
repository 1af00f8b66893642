"""The reference loop: what a sampler must return, from a plain loop over the environments.

It is slow and simple: one process, one step after the other. It follows the documents of Gymnasium and PettingZoo. Of
penstock it uses agents, `NamedArrays` and `TrajInfo`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from gymnasium import Space

from penstock.agents.random import draw
from penstock.arguments import signature
from penstock.buffers.named import NamedArrays, as_named, map_leaves
from penstock.collectors import TrajInfo
from penstock.envs.seeding import Purpose
from penstock.testing.reference_envs import Batched, Games, Key, Singles, Starts, element_of, row_of, sizes_of, stack

Cell = dict[str, Any]  # of the batch: its fields by name


@dataclass(eq=False)
class Column:
    """One agent of one environment: its cells of the batch, and what its next one depends on."""

    env_rank: int
    agent_id: Any  #: None if it is the only agent of its environment
    seat: int  #: its number in the environment
    key: tuple[int, ...]  #: of its random numbers
    policy: Policy
    info: TrajInfo  #: its trajectory
    seen: Any = None  #: the observation that it acts on next, or has acted on while its cell is open; None: it is idle
    cell: Cell | None = None  #: its decision, while the reward is missing
    prev: Cell | None = None  #: its decision before, in the same episode
    cells: list[Cell] = field(default_factory=list)  #: of this batch
    before: Cell | None = None  #: the last one before this batch


class Policy:
    """An agent, and the columns for which it acts: for all at once, or `in_turns` for one that is asked."""

    def __init__(self, name: str, agent: Any, spaces: Any, more: Cell, *, in_turns: bool) -> None:
        self.name, self.source, self.agent, self.spaces = name, agent, agent, spaces
        self.columns, self.in_turns = list[Column](), in_turns
        #: The cell of an idle column.
        self.blank: Cell = {"observation": row_of(spaces[0]), "action": row_of(spaces[1]), "reward": np.float32(0)}
        self.blank |= dict.fromkeys(("terminated", "truncated", "done", "prev_done", "valid"), np.False_)
        self.blank |= {"final_obs": row_of(spaces[0]), "final_value": np.float32(0), **more}

    def begin(self, n_envs: int, rng_of: Callable[[Column], np.random.Generator], model_seed: int) -> None:
        """Prepare the agent for its columns, as a sampler does."""
        if not hasattr(self.source, "observation_space"):
            self.source.initialize(*self.spaces, seed=model_seed)
        self.agent = copy.deepcopy(self.source)
        ranks = [column.env_rank for column in self.columns]
        self.k = ranks.count(ranks[0]) if self.agent.joint else 1  # so many columns have one state
        self.agent.runtime.set_columns(ranks[:: self.k], n_envs)
        self.agent.seed_columns([rng_of(column) for column in self.columns[:: self.k]])
        self.agent.reset()
        trial = self._call(copy.deepcopy(self.agent).step, self.columns)
        self.blank["agent_info"] = trial.agent_info.map(np.zeros_like)[0]

    def _call(self, method: Callable[..., Any], columns: Sequence[Column]) -> Any:
        """`agent.step` or `agent.value` for these columns. A joint agent sees all those of an environment as one."""
        prev = [column.prev or self.blank for column in columns]
        seen = stack([row_of(self.spaces[0], column.seen) for column in columns])
        inputs = seen, stack([cell["action"] for cell in prev]), stack([cell["reward"] for cell in prev])
        if not self.agent.joint:
            return as_named(method(*inputs))
        result = method(*(map_leaves(lambda rows: rows.reshape(-1, self.k, *rows.shape[1:]), tree) for tree in inputs))
        return map_leaves(lambda rows: np.reshape(rows, (-1, *np.shape(rows)[2:])), as_named(result))

    def _called_with(self, column: Column) -> list[Column]:
        """The columns for which the agent is called."""
        if self.in_turns:
            self.agent.select(np.array([self.columns.index(column)]))
        return [column] if self.in_turns else self.columns

    def act(self, asked: Column | None = None) -> None:
        """Act for the column that is asked, or for all; also for idle ones, so that nobody's random numbers depend on
        who is idle."""
        columns = self.columns if asked is None else self._called_with(asked)
        step = self._call(self.agent.step, columns)
        actions, agent_info = stack([self.blank["action"]] * len(columns)), step.agent_info.map(np.array)
        actions[...] = step.action
        for i, column in enumerate(columns):
            if column.seen is None:
                column.cells.append(self.blank)
            else:
                self.open(column, actions[i], agent_info=agent_info[i], valid=np.True_)

    def open(self, column: Column, action: Any, **more: Any) -> None:
        """The column has decided. Without `valid`, it is a random step before the first batch."""
        seen, is_start = row_of(self.spaces[0], column.seen), np.bool_(column.prev is None)
        column.cell = {**self.blank, "observation": seen, "action": action, "prev_done": is_start, **more}

    def draw(self, column: Column, rng: np.random.Generator) -> Any:
        """A random action; a legal one, if there is a mask of legal actions."""
        key, mask, space = self.agent.mask_key or "", row_of(self.spaces[0], column.seen), self.spaces[1]
        for name in key.split(".")[1:] if key.startswith("observation.") else ["action_mask"]:
            mask = mask[name] if isinstance(mask, NamedArrays) and name in mask else None
        if mask is None:
            return draw(space, rng, 1)[0]
        sizes, chosen = sizes_of(space), []
        for part, u in zip(np.split(mask != 0, np.cumsum(sizes)[:-1]), rng.random(len(sizes)), strict=True):
            legal = np.flatnonzero(part if part.any() else ~part)
            chosen.append(legal[int(u * len(legal))])
        return (np.reshape(chosen, space.shape) + space.start).astype(space.dtype)

    def value(self, column: Column) -> Any:
        """The value of what the column has seen; zero if it is idle. That of an open decision is as when it was made:
        a state has gone on since."""
        if column.seen is None or (column.cell and "value" in column.cell["agent_info"]):
            return np.float32(0) if column.cell is None else column.cell["agent_info"].value
        columns = self._called_with(column)
        return np.asarray(self._call(self.agent.value, columns), np.float32)[columns.index(column)]

    def batch(self, T: int, *, bootstrap_value: bool) -> NamedArrays:
        """The batch of the cells, which are dropped."""
        rows, before, seen, values = list[Any](), list[Any](), list[Any](), np.zeros(len(self.columns), np.float32)
        for b, column in enumerate(self.columns):
            cells = [*column.cells, *[self.blank] * (T - len(column.cells))]
            is_random = column.cell is not None and not column.cell["valid"]
            if column.cell is not None and not is_random:  # an open decision shows what it was made on
                cells[len(column.cells)] = {**self.blank, "observation": column.cell["observation"]}
            rows.append(cells)
            before.append([column.before or self.blank, *cells[:-1]])
            column.before, column.cells = column.cells[-1] if column.cells else column.before, []
            seen.append(row_of(self.spaces[0], None if is_random else column.seen))
            values[b] = self.value(column) if bootstrap_value and not is_random else 0
        samples = {name: stack([stack([steps[t][name] for steps in rows]) for t in range(T)]) for name in self.blank}
        for name in ("action", "reward"):
            samples[f"prev_{name}"] = stack([stack([steps[t][name] for steps in before]) for t in range(T)])
        return NamedArrays(samples, bootstrap_obs=stack(seen), bootstrap_value=values)


@dataclass
class ReferenceLoop:
    """What a sampler with these arguments and a `ResetCollector` returns. It acts with the present parameters of
    `agents`.

    For a collector of your own, override what this changes: `begin_episodes`, `change_action`, `extra` or `start_envs`.
    Not here: `global_state`, players that change from game to game, games that fail or end before anybody acts.
    """

    env_fn: Any  #: `env_fn()`, or `env_fn(num_envs=n)` if `batched`; or a list of functions, one for each environment
    agents: Any  #: an agent, or a dict of them by the names of policies
    seed: int
    batch_T: int
    batch_B: int
    batched: bool = False
    max_decorrelation_steps: int = 100
    bootstrap_value: bool = False
    policy_of: Callable[..., str] = field(default_factory=lambda: str)
    env_info: Mapping[str, Any] = field(default_factory=dict)  #: examples of entries of info, by name
    extra_fields: Mapping[str, Any] = field(default_factory=dict)  #: those of the collector
    traj_info_cls: type[TrajInfo] = field(default_factory=lambda: TrajInfo)
    traj_info_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_n_envs: int = 0
    eval_max_steps: int = 10_000
    eval_episodes: int | None = None

    def __post_init__(self) -> None:
        n, key = self.batch_B, next(iter(self._agents.values())).mask_key or ""
        makers = self.env_fn if isinstance(self.env_fn, Sequence) else [self.env_fn] * n
        envs = [self.env_fn(num_envs=n)] if self.batched else [make() for make in makers[:n]]
        self._has_seats, self._in_turns = hasattr(envs[0], "possible_agents"), hasattr(envs[0], "agent_iter")
        kind, mask_name = Games if self._has_seats else Singles, key.removeprefix("info.") if key[:5] == "info." else ""
        self._envs: Any = Batched(*envs) if self.batched else kind(envs, mask_name)
        self._groups: Sequence[Sequence[int]] = [range(n)] if self.batched else [[e] for e in range(n)]
        self._is_starting = True  # until the first row of the first batch
        self._start()
        if self.eval_n_envs:
            arguments = {field.name: getattr(self, field.name) for field in fields(ReferenceLoop)}
            self._evaluation = _Evaluation(**{**arguments, "batch_B": self.eval_n_envs, "eval_n_envs": 0})

    @property
    def _agents(self) -> Mapping[str, Any]:
        return self.agents if isinstance(self.agents, Mapping) else {"agent": self.agents}

    # ---- what a collector of your own may change ---------------------------------------------------

    def start_envs(self) -> None:
        """Begin the first episodes, and make random steps in them, so that they do not end together."""
        self.reset({e: {"seed": self._seed_of(Purpose.TRAIN, e)} for e in range(self.batch_B)})
        for e in range(0 if self.batched else self.batch_B):
            rng = self._rng_of(Purpose.DECORRELATE, e)
            for _ in range(int(rng.integers(0, self.max_decorrelation_steps + 1))):
                self.random_step(e, lambda column, rng=rng: column.policy.draw(column, rng))  # type: ignore[misc]
                self.reset({e: {} for e in self._over})

    def begin_episodes(self, t: int, over: Collection[int]) -> None:
        """Called after each row t, and before row 0 with t = -1. Begin the next episodes of the environments that are
        `over`, with `reset`. Those that you leave wait for the next call."""
        self.reset({e: {} for e in over})

    def change_action(self, t: int, column: Column, action: Any) -> Any:
        """What the environment gets in row t in place of this action of the agent."""
        return action

    def extra(self, t: int, column: Column, cell: Cell) -> Mapping[str, Any]:
        """The values of `extra_fields` for this cell of row t. The step has returned `column.seen`."""
        return {}

    # ---- what it calls -----------------------------------------------------------------------------

    def reset(self, starts: Starts) -> None:
        """Begin episodes in these environments, each with these arguments of its `reset`. What was running there is
        dropped."""
        starts = {e: {name: value for name, value in how.items() if value is not None} for e, how in starts.items()}
        at_end = self._over.issuperset(starts)
        self._over -= starts.keys()
        for column in [column for e in starts for column in self._of(e)]:
            column.info = column.info if column.prev is None else self._new_info()
            column.seen = column.prev = column.cell = None
            index = column.policy.columns.index(column)
            if column.policy.agent.joint and index % column.policy.k == 0:  # it has one state for the whole game
                column.policy.agent.reset_one(index // column.policy.k)
        for group in self._groups:
            if begun := {e: starts[e] for e in group if e in starts}:
                self._rewards |= {e: [0.0] for e in begun}
                self._join(self._envs.reset(begun, at_end=at_end))
        for e in starts if self._in_turns else ():
            self._ask(e)

    def random_step(self, e: int, action_of: Callable[[Column], Any]) -> None:
        """A step of environment e before the first batch, with these actions. They are drawn for idle columns too, so
        that nobody's random numbers depend on who is idle."""
        asked, everyone = self._asked[e], [seat for policy in self.policies.values() for seat in policy.columns]
        for column in [asked] if asked else [seat for seat in everyone if seat.env_rank == e]:
            action = action_of(column)
            if column.seen is not None:
                column.policy.open(column, action)
        if asked:
            self._take_turn(e, asked)
        else:
            self._advance([e])

    # ---- the loop ----------------------------------------------------------------------------------

    def obtain_samples(self, itr: int) -> tuple[Any, list[TrajInfo]]:
        """The next batch and its trajectories. The batch is the fields `[T, B, ...]` without their groups (`reward`,
        not `env.reward`), or a dict of them by policy."""
        self._times, self._found = [-1] * self.batch_B, list[tuple[Any, TrajInfo]]()
        self.begin_episodes(-1, sorted(self._over))
        for seat in self._columns.values() if self._is_starting and not self._in_turns else ():
            seat.before = seat.prev
        self._is_starting = False
        for policy in self.policies.values():
            policy.agent.write_parameters(policy.source.read_parameters())
            policy.agent.sample_mode(itr)
        for _ in range(0 if self._in_turns else self.batch_T):
            self._step()
        for e in range(self.batch_B if self._in_turns else 0):
            while (column := self._asked[e]) and len(column.cells) < self.batch_T:
                self._decide(e, column)
        T, has_values = self.batch_T, self.bootstrap_value
        batch = {name: policy.batch(T, bootstrap_value=has_values) for name, policy in self.policies.items()}
        return batch if isinstance(self.agents, Mapping) else batch["agent"], self._ordered()

    def evaluate_agent(self, itr: int) -> list[TrajInfo]:
        """The trajectories of an evaluation."""
        return self._evaluation.evaluate(itr)

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs.envs:
            env.close()
        if self.eval_n_envs:
            self._evaluation.close()

    # ---- before the first step ---------------------------------------------------------------------

    def _start(self) -> None:
        self._prepare(Purpose.ACTION)
        self.start_envs()
        for policy in self.policies.values():
            policy.agent.reset()

    def _prepare(self, purpose: Purpose, *key: int) -> None:
        """Make the columns, in environments that are all over."""
        n = self.batch_B
        self._times, self._over, self._ended, self._rewards = [-1] * n, set(range(n)), [0] * n, dict[int, list[float]]()
        self._found, self._asked = list[tuple[Any, TrajInfo]](), list[Column | None]([None] * n)
        infos = {k: np.zeros_like(v) for k, v in self.env_info.items()} | {f"_{k}": np.False_ for k in self.env_info}
        extra = {k: row_of(v) if isinstance(v, Space) else np.zeros_like(v) for k, v in self.extra_fields.items()}
        more = {"env_info": NamedArrays(infos), "extra": NamedArrays(extra)}
        self._columns, policies = dict[Key, Column](), dict[str, Policy]()
        for (e, agent), spaces in self._envs.spaces.items():
            rank = {"env_rank": e} if "env_rank" in signature(self.policy_of).parameters else {}
            name = self.policy_of(agent, **rank) if isinstance(self.agents, Mapping) else "agent"
            if name not in policies:
                policies[name] = Policy(name, self._agents[name], spaces, more, in_turns=self._in_turns)
            seat = len(self._of(e))
            own_key = (e, seat) if self._has_seats else (e,)
            self._columns[e, agent] = column = Column(e, agent, seat, own_key, policies[name], self._new_info())
            policies[name].columns.append(column)
        #: Those that act, by name. Of an evaluation some may have no column.
        self.policies = {name: policies[name] for name in self._agents if name in policies}
        for p, name in enumerate(self._agents):
            if name in policies:
                model_seed = self._seed_of(Purpose.MODEL, 0, *([p] if p else []))
                policies[name].begin(n, lambda column: self._rng_of(purpose, *column.key, *key), model_seed)

    def _of(self, e: int) -> list[Column]:
        """The columns of environment e."""
        return [column for column in self._columns.values() if column.env_rank == e]

    def _seed_of(self, *key: int) -> int:
        return int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1)[0])

    def _rng_of(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key)))

    def _new_info(self) -> TrajInfo:
        return self.traj_info_cls(**self.traj_info_kwargs)

    # ---- steps -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Everybody acts."""
        self._times = [t + 1 for t in self._times]
        for policy in self.policies.values():
            policy.act()
        for column in self._columns.values():
            if column.cell is not None:
                column.cell["action"] = self.change_action(self._times[0], column, column.cell["action"])
        for group in self._groups:
            self._advance(group)
        self.begin_episodes(self._times[0], sorted(self._over))

    def _advance(self, envs: Sequence[int]) -> None:
        """These environments, which step together, get what was decided."""
        acting = {key: column for key, column in self._columns.items() if key[0] in envs and column.cell is not None}
        steps, joined, others = self._envs.step({key: _given(column) for key, column in acting.items()})
        for key, step in steps.items():
            self._close(acting[key], *step)
        self._join(joined)
        ended = [(acting[key], step[-1]) for key, step in steps.items() if step[2] or step[3]]
        for column, _ in ended:
            self._record_end(column)
        for column, info in ended:
            self._end(column, info)
        for e in dict.fromkeys(e for e, _ in steps):
            rewards = [float(step[1]) for (env_rank, _), step in steps.items() if env_rank == e]
            self._rewards[e].append(others.get(e, 0.0) + sum(rewards))
            if all(column.seen is None for column in self._of(e)):
                self._end_game(e)

    def _decide(self, e: int, column: Column) -> None:
        """The agent that environment e has asked decides."""
        column.policy.act(column)
        self._times[e] += 1
        self._take_turn(e, column)

    def _take_turn(self, e: int, column: Column) -> None:
        """Environment e gets the decision of this column, and asks the next one."""
        self._rewards[e].append(0.0)
        self._envs.envs[e].step(_given(column))
        self._ask(e)

    def _ask(self, e: int) -> None:
        """Find who decides next in environment e."""
        env, self._asked[e] = self._envs.envs[e], None
        while env.agents:
            key = e, env.agent_selection
            column, (observation, reward, terminated, truncated, info) = self._columns[key], env.last()
            observation = self._envs.seen(key, observation, info)
            self._rewards[e][-1] += reward
            if column.cell is not None:
                self._close(column, observation, reward, terminated, truncated, info)
                if terminated or truncated:
                    self._record_end(column)
                    self._end(column, info)
            if not (terminated or truncated):
                if column.seen is None:
                    self._join({key: observation})
                self._asked[e] = column
                return
            env.step(None)
        self._end_game(e)
        if not self._is_starting:
            self.begin_episodes(self._times[e], [e])

    def _join(self, seen: Mapping[Key, Any]) -> None:
        """These columns act next, with these observations."""
        for key, observation in seen.items():
            column = self._columns[key]
            column.seen = copy.deepcopy(observation)
            if not column.policy.agent.joint:
                column.policy.agent.reset_one(column.policy.columns.index(column))

    def _close(self, column: Column, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """What the column gets for its decision. It sees the last observation of its episode until `_end`."""
        cell, policy, before = column.cell, column.policy, column.seen
        assert cell is not None
        terminated, truncated = bool(terminated), bool(truncated)
        column.seen = element_of(policy.spaces[0], policy.blank["observation"]) if seen is None else copy.deepcopy(seen)
        cell |= {"reward": np.float32(reward), "terminated": np.bool_(terminated), "truncated": np.bool_(truncated)}
        cell |= {"done": np.bool_(terminated or truncated), "env_info": cell["env_info"].map(np.array)}
        for name in [name for name in self.env_info if name in info]:
            cell["env_info"][name], cell["env_info"][f"_{name}"] = info[name], True
        column.cell, column.prev, action = None, cell, element_of(policy.spaces[1], cell["action"])
        # Without a subclass, nothing is called for each step: the figures come from the rewards of the batch.
        counted = float(cell["reward"]) if self.traj_info_cls is TrajInfo and cell["valid"] else reward
        column.info.step(before, action, counted, terminated, truncated, cell["agent_info"], info)
        if cell["valid"]:
            cell["extra"] = cell["extra"].map(np.array)
            for name, value in self.extra(self._times[column.env_rank], column, cell).items():
                cell["extra"][name] = value
            column.cells.append(cell)
        else:
            column.before = cell

    def _record_end(self, column: Column) -> None:
        """The column's episode has ended with what it sees. Its environment has stepped, so that a joint agent sees
        the others as they are next."""
        assert column.prev is not None
        if column.prev["valid"]:
            column.prev["final_obs"] = row_of(column.policy.spaces[0], column.seen)
            if self.bootstrap_value and not column.prev["terminated"]:
                column.prev["final_value"] = column.policy.value(column)

    def _end(self, column: Column, info: Any) -> None:
        """The column is idle. Its trajectory has ended too, unless that has several episodes."""
        cell, final, column.seen, column.prev = column.prev, column.seen, None, None
        assert cell is not None
        if column.info.traj_done(bool(cell["terminated"]), bool(cell["truncated"]), info):
            column.info.terminate(final)
            if cell["valid"]:  # else it has ended with a random step, and is in no batch
                self._finish(column.info, column.env_rank, column)
            column.info = self._new_info()

    def _end_game(self, e: int) -> None:
        """Nobody is left in environment e."""
        self._over.add(e)
        if self._has_seats and not self._is_starting:
            info, (early, first, *rest) = self._new_info(), self._rewards[e]  # early: before the first decision
            for reward in (early + first, *rest):
                TrajInfo.step(info, None, None, float(np.float32(reward)), False, False, None, {})
            self._finish(info, e)

    def _finish(self, info: TrajInfo, e: int, column: Column | None = None) -> None:
        """A trajectory has ended: that of a column, or that of the whole game in environment e."""
        info.env_rank, info.number = e, self._ended[e]
        if column and self._has_seats:
            info.agent_id, info.policy = column.agent_id, column.policy.name
        else:
            self._ended[e] += 1
        self._found.append(((self._times[e], e, column.seat if column else np.inf), info))

    def _ordered(self) -> list[TrajInfo]:
        return [info for _, info in sorted(self._found, key=lambda entry: entry[0])]


class _Evaluation(ReferenceLoop):
    """The same loop, in which each environment plays its share of the episodes, each with its seed."""

    def _start(self) -> None:
        self._number, self._is_starting, self.bootstrap_value = 0, False, False

    def evaluate(self, itr: int) -> list[TrajInfo]:
        """The trajectories of the next evaluation."""
        n, most = self.batch_B, self.eval_episodes
        self._left = [np.inf if most is None else most // n + (e < most % n) for e in range(n)]
        self._begun = [0] * n
        self._prepare(Purpose.EVAL_ACTION, self._number)
        self._number += 1
        used = [e for e in range(n) if self.batched or self._left[e]]
        self.reset({e: {"seed": self._seed_of(Purpose.EVAL_EPISODE, e)} for e in used})
        for policy in self.policies.values():
            policy.agent.eval_mode(itr)
        for _ in range(max(1, self.eval_max_steps // n)):
            if not self._in_turns:
                self._step()
            for e, column in enumerate(self._asked):
                if column:
                    self._decide(e, column)
        return sorted(self._ordered(), key=lambda info: (info.number, info.env_rank))

    def begin_episodes(self, t: int, over: Collection[int]) -> None:
        starts = dict[int, dict[str, Any]]()
        for e in [e for e in over if self._left[e]]:
            # Each trajectory has its seed; one that goes on in another episode has no second one.
            is_seeded, self._begun[e] = self._begun[e] < self._ended[e] and not self.batched, self._ended[e]
            seed = self._seed_of(Purpose.EVAL_EPISODE, self._ended[e] * self.batch_B + e)
            starts[e] = {"seed": seed} if is_seeded else {}
        self.reset(starts)

    def _join(self, seen: Mapping[Key, Any]) -> None:
        super()._join({key: observation for key, observation in seen.items() if self._left[key[0]]})

    def _finish(self, info: TrajInfo, e: int, column: Column | None = None) -> None:
        n_ended = self._ended[e]
        super()._finish(info, e, column)
        self._left[e] -= self._ended[e] - n_ended
        if not (self.batched and info.number):
            info.seed = self._seed_of(Purpose.EVAL_EPISODE, n_ended * self.batch_B + e)


def _given(column: Column) -> Any:
    """What the environment gets for the column's decision."""
    assert column.cell is not None
    return element_of(column.policy.spaces[1], column.cell["action"])
