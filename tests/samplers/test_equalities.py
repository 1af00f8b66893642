"""The table of equalities: one seed, one batch, whoever acts and whenever. The reference loop says what is in it.

A cell is a kind of environment, its form, an agent, a sampler, what is recorded, and a shape. `make cases`
runs the whole table. Daily some cells run, in which each two values meet that can. A new sampler, kind, agent or option
is a new row of its dict.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, product
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import (
    Agent,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    DeterministicPgAgent,
    EnvProcess,
    EpsilonGreedyAgent,
    FunctionAgent,
    GaussianPgAgent,
    GpuSampler,
    LinearSchedule,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    RecurrentEpsilonGreedyAgent,
    RecurrentGaussianPgAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    SquashedGaussianAgent,
)
from penstock.columns import Start
from penstock.envs import CountingEnv, NestedEnv
from penstock.envs.toy import ScriptedGame
from penstock.samplers import refusals
from penstock.testing import ReferenceLoop

from ..against_loop import compare
from ..models import CartPoleNet, Lstm, LstmQ, Modes, Net, Normed
from ..scale import FULL, START_METHODS, covering, examples, pairs, scaled, with_start_methods
from ..support import Diary
from ..toy_games import Numbered, Odd, Roles, StatefulTeam, Team, TurnGame, Valuing
from .digest_cases import IntoWalk, LongInfo, Nested, Plain, Stateful, Walk, rows_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*eval_max_steps.*:RuntimeWarning")]

# ---- the axes ------------------------------------------------------------------------------


class Fresh(Walk):
    """Returns a new array in each step. With one array for all, a last observation would be that after the reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation.copy(), info

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return observation.copy(), *others


def fresh_rows(mode: AutoresetMode, env_fn: Any = Fresh) -> Any:
    return lambda num_envs: SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


def in_own_process() -> Any:
    return EnvProcess(Walk)


class Rounded(Numbered):
    """Its rewards are whole numbers: the sum over all agents does not depend on the order."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        return observations, {agent: float(round(reward)) for agent, reward in rewards.items()}, *others


class Ruled(gym.Env[Any, Any]):
    """Some actions are illegal. The mask is in `info`, but not at the end of an episode; or in the observation."""

    def __init__(self, in_info: bool) -> None:
        self._in_info, seen = in_info, spaces.Box(-9, 99, (2,), np.float32)
        self.action_space = spaces.Discrete(3, start=1) if in_info else spaces.MultiDiscrete([2, 3], start=[0, 5])
        self._sizes, rules = ([3] if in_info else [2, 3]), spaces.Dict(legal=spaces.MultiBinary(5))
        self.observation_space = seen if in_info else spaces.Dict(seen=seen, rules=rules)

    def _look(self, *seen: float) -> Any:
        rng, self._legal = self.np_random, list[Any]()
        for n in self._sizes:
            self._legal.append(rng.random(n) < 0.5)
            self._legal[-1][rng.integers(n)] = True
        mask, self._t = np.concatenate(self._legal).astype(np.int8), int(seen[0])
        observation, info = np.array(seen, np.float32), {"n": seen[0]}
        if not self._in_info:
            return {"seen": observation, "rules": {"legal": mask}}, info
        return observation, info if self._t == self._most else {**info, "rules": {"legal": mask}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._most = int(self.np_random.integers(1, 9))
        return self._look(0, 0)

    def step(self, action: Any) -> Any:
        chosen = np.ravel(action) - np.ravel(self.action_space.start)
        assert all(legal[i] for legal, i in zip(self._legal, chosen.tolist(), strict=True))
        observation, info = self._look(self._t + 1, float(np.sum(action)))
        return observation, float(np.sum(action)), self._t == self._most, False, info


class RuledGame(ScriptedGame):
    """Some actions are illegal. Infos of agents that end have no mask."""

    def _infos(self) -> dict[str, Any]:
        self._legal = {agent: np.roll([1, 0, self.t % 2], own).astype(np.int8) for agent, own in self._own.items()}
        return {agent: {"rules": {"legal": self._legal[agent]}} for agent in self._own if agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self._legal[agent][action] for agent, action in actions.items())
        observations, *results, _ = super().step(actions)
        return observations, *results, self._infos()


class RuledTurns(TurnGame):
    """Its masks are where those of the others are."""

    def last(self, observe: bool = True) -> Any:
        *results, info = super().last(observe)
        return *results, {"rules": {"legal": info["action_mask"]}}


class Gifts(TurnGame):
    """Agents get a reward before they have decided anything."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self._rewards = {agent: 0.5 + i for i, agent in enumerate(self.agents)}


Options = dict[str, Any]
#: Kinds of environments.
KINDS: dict[str, tuple[Any, Options]] = {
    "single": (Walk, {}),
    "nested": (Nested, {}),
    "own process": (in_own_process, {}),
    "batched, nested": (fresh_rows(AutoresetMode.DISABLED, Nested), {"batched": True}),
    **{f"batched, {mode.name}": (fresh_rows(mode), {"batched": True}) for mode in AutoresetMode},
    "lock-step": (partial(ScriptedGame, 4), {}),
    "lock-step, dicts": (Rounded, {}),
    "lock-step, roles": (partial(Roles, 3), {}),
    "turns": (partial(TurnGame, 3), {}),
}
#: The same with odd habits: arrays that are written or given again, rewards before the first decision.
ODD: dict[str, Any] = {
    "single": IntoWalk,
    **{f"batched, {mode.name}": rows_of(mode) for mode in AutoresetMode},
    "lock-step": partial(Odd, k=4),
    "turns": partial(Gifts, 3),
}


def own_start(e: int, n: int) -> tuple[int | None, dict[str, Any] | None]:
    """Seeds, or options, which some rows of a batched environment share; or nothing."""
    return [(100 * e + n, None), (None, {"level": 1.5}), (n, {"level": n}), (None, None)][n % 4]


class Starts(ResetCollector):
    """Says how each episode begins, or begins new ones before each batch."""

    own, fresh = True, False

    def start_envs(self) -> None:
        self.n_over = Counter[int]()
        super().start_envs()

    def begin_batch(self, itr: int) -> None:
        if self.fresh:
            self.reset_now(range(len(self.columns.env_ranks)))
        super().begin_batch(itr)

    def begin_episodes(self, events: Any, going: Any) -> Any:
        if not self.own:
            return super().begin_episodes(events, going)
        self.n_over.update(events.over)
        ranks, n_over = self.columns.env_ranks, self.n_over
        return self.columns.reset(events.over, [Start(*own_start(int(ranks[e]), n_over[e])) for e in events.over])


class StartsLoop(ReferenceLoop):
    """The same."""

    own, fresh = True, False

    def start_envs(self) -> None:
        self.n_over = Counter[int]()
        super().start_envs()

    def begin_episodes(self, t: int, over: Any) -> None:
        if t < 0 or not self.own:
            super().begin_episodes(t, range(self.batch_B) if t < 0 and self.fresh else over)
            return
        self.n_over.update(over)
        starts = {e: own_start(e, self.n_over[e]) for e in over}
        self.reset({e: {"seed": seed, "options": options} for e, (seed, options) in starts.items()})


class NewEpisodes(Starts):
    own, fresh = False, True


class NewEpisodesLoop(StartsLoop):
    own, fresh = False, True


class NewOwn(Starts):
    fresh = True


class NewOwnLoop(StartsLoop):
    fresh = True


class Sticky(ResetCollector):
    """Some environments get the action before. Writes fields of its own, and does more where episodes end."""

    extra_fields: ClassVar[Any] = {"twice": np.zeros(2, np.float32), "row": spaces.Discrete(99)}
    n_over = 0

    def act(self, t: int) -> None:
        before = [recorder.prev_action.copy() for recorder in self.recorders]
        super().act(t)
        for recorder, actions in zip(self.recorders, before, strict=True):
            ranks = np.array([int(rank) for rank in recorder.columns.env_ranks])
            is_stuck = (ranks % 3 == t % 3) & recorder.samples.valid[t]
            recorder.prev_action[is_stuck] = actions[is_stuck]
            recorder.samples.action[t + 1] = recorder.prev_action

    def settle(self, t: int, events: Any) -> None:
        self.n_over += 0 if events is None else len(events.over)
        super().settle(t, events)

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        for recorder in self.recorders:
            twice = np.stack([2 * recorder.samples.reward[t + 1]] * 2, axis=1)
            row = np.where(recorder.samples.valid[t], t, 0)
            self.record_extra(t, recorder.policy, twice=twice, row=row)


class StickyLoop(ReferenceLoop):
    """The same."""

    def change_action(self, t: int, column: Any, action: Any) -> Any:
        before = column.prev or column.policy.blank
        return before["action"] if column.env_rank % 3 == t % 3 else action

    def extra(self, t: int, column: Any, cell: Any) -> Any:
        return {"twice": 2 * cell["reward"], "row": t}


class EverySecond(ResetCollector):
    """Every second episode begins only with the next batch."""

    waits = True

    def begin_episodes(self, events: Any, going: Any) -> Any:
        self.n_over = vars(self).get("n_over", Counter()) + Counter(events.over)
        self.columns.park([e for e in events.over if self.n_over[e] % 2])
        return self.columns.reset([e for e in events.over if self.n_over[e] % 2 == 0])


class EverySecondLoop(ReferenceLoop):
    """The same."""

    def begin_episodes(self, t: int, over: Any) -> None:
        before, over = vars(self).get("waiting", set()), set(over)
        self.n_over = vars(self).get("n_over", Counter()) + Counter(over - before)
        self.waiting = set() if t < 0 else before | {e for e in over if self.n_over[e] % 2}
        self.reset({e: {} for e in over if e not in self.waiting})


#: How environments behave, and what the collector does.
FORMS: dict[str, Options] = {
    "": {},
    "odd": {},
    "wait-reset": {"wait_reset": True},
    "odd, wait-reset": {"wait_reset": True},
    "odd, own starts": {"collector": (Starts, StartsLoop)},
    "new episodes in each batch": {"collector": (NewEpisodes, NewEpisodesLoop)},
    "odd, own starts, new episodes in each batch": {"collector": (NewOwn, NewOwnLoop)},
    "own actions and fields": {"collector": (Sticky, StickyLoop)},
    "odd, every second waits": {"collector": (EverySecond, EverySecondLoop)},
}
#: The other agents of the table need one array.
RANDOM_ONLY = ("nested", "batched, nested", "lock-step, dicts")


def by_number(agent: str) -> str:
    return "xyzx"[int(agent[1])]


def by_role(agent: str) -> str:
    return "x" if agent == "a0" else "y"


#: Who acts: agents whose choices show whatever leaks, and dicts of them.
AGENTS: dict[str, tuple[Callable[[], Any], Options]] = {
    "random": (RandomAgent, {}),
    "with a state": (Stateful, {}),
    "with values": (Plain, {}),
    "that reports values": (Valuing, {}),
    "one policy": (lambda: {"x": Stateful()}, {"policy_of": lambda agent: "x"}),
    "three policies": (lambda: {"x": Stateful(), "y": RandomAgent(), "z": Plain()}, {"policy_of": by_number}),
    "two roles": (lambda: {"x": Stateful(), "y": Plain()}, {"policy_of": by_role}),
    "a team": (Team, {}),
    "a team with a state": (StatefulTeam, {"bootstrap_value": False}),
}

PROCESS = {"server": "process"}
#: Samplers: who calls the agent (workers, the caller, a process), and when (on demand, ahead).
SAMPLERS: dict[str, tuple[type[Sampler], Options]] = {
    "serial": (SerialSampler, {}),
    "1 worker": (ParallelSampler, {"n_workers": 1}),
    "2 workers": (ParallelSampler, {"n_workers": 2}),
    "3 workers, spawn": (ParallelSampler, {"n_workers": 3, "start_method": "spawn" if FULL else "forkserver"}),
    "central": (GpuSampler, {"n_workers": 2}),
    "central, first-ready": (GpuSampler, {"n_workers": 3, "min_ready": 1}),
    "central, at most 0.1 ms": (GpuSampler, {"n_workers": 2, "max_wait": 1e-4}),
    "central, own process": (GpuSampler, {"n_workers": 2, **PROCESS}),
    "central, own process, first-ready": (GpuSampler, {"n_workers": 2, "min_ready": 0.5, **PROCESS}),
    "alternating": (AlternatingSampler, {"n_workers": 3}),
    "alternating, no overlap": (AlternatingSampler, {"n_workers": 2, "overlap": False}),
    "alternating, own process": (AlternatingSampler, {"n_workers": 2, **PROCESS}),
    "ahead": (AsyncSampler, {"n_workers": 2, "n_slots": 3}),
    "ahead by one batch": (AsyncSampler, {"n_workers": 2, "n_slots": 2, "lag": 1}),
    "ahead, own process": (AsyncSampler, {"n_workers": 2, "n_slots": 2, **PROCESS}),
}

#: What is recorded or asked for. `sampler` holds options that the loop does not have.
RECORDED: dict[str, Options] = {
    "nothing more": {},  # the first: of equal cells, those with it are chosen
    "evaluations": {"eval_n_envs": 3, "eval_max_steps": 90},
    "counted episodes": {"eval_n_envs": 3, "eval_max_steps": 900, "eval_episodes": 5},
    "env_info": {"env_info": {"n": 0.0}},
    "long trajectories": {"traj_info_cls": LongInfo, "eval_n_envs": 2, "eval_max_steps": 90},
    "a diary": {"traj_info_cls": Diary, "traj_info_kwargs": {"discount": 0.5}, "eval_n_envs": 2, "eval_max_steps": 60},
    "checks, no random steps": {"max_decorrelation_steps": 0, "sampler": {"debug": True, "check_finite": True}},
    "three slots, no final_obs": {"sampler": {"n_slots": 3, "record_final_obs": False}},
}

#: batch_T, batch_B and the number of batches.
SHAPES: dict[str, tuple[int, int, int]] = {"5 x 3": (5, 3, 5), "1 x 4": (1, 4, 12), "23 x 2": (23, 2, 2)}

AXES: tuple[dict[str, Any], ...] = (KINDS, FORMS, AGENTS, SAMPLERS, RECORDED, SHAPES)
Cell = tuple[str, str, str, str, str, str]


def makes_sense(cell: Cell) -> bool:
    """Whether the agent takes what the environments return, and these have what is asked for."""
    kind, form, agent, _, recorded, _ = cell
    has_games = kind.startswith(("lock-step", "turns"))
    if kind == "own process" and not FULL:  # it takes a second to start those of a cell
        return (form, agent, recorded, cell[-1]) == ("", "random", "nothing more", "5 x 3")
    if ("odd" in form and kind not in ODD) or (recorded == "env_info" and has_games):  # they give no info
        return False
    if "own starts" in form and kind.endswith("_STEP"):  # it resets its rows itself
        return False
    if form == "own actions and fields" and kind == "turns":  # whose rounds are no rows
        return False
    if "team" in agent:
        return kind == "lock-step" or (kind == "turns" and agent == "a team with a state")
    if kind in RANDOM_ONLY:
        return agent == "random"
    if kind == "lock-step, roles":  # whose agents have different spaces
        return agent == "two roles"
    if agent == "that reports values":  # which is for turns: elsewhere it is as "with a state"
        return kind == "turns"
    return has_games or agent not in ("one policy", "three policies", "two roles")


def asked(cell: Cell) -> frozenset[str]:
    """What the cell asks for, by the names of the table of `refusals`."""
    kind, form, agent, sampler, recorded, _ = cell
    names = {
        refusals.BATCHED: kind.startswith("batched"),
        refusals.TURNS: kind == "turns",
        refusals.WAITING: "wait" in form,
        refusals.POLICIES: agent in ("three policies", "two roles"),
        refusals.JOINT: "team" in agent,
        refusals.JOINT_VALUES: agent == "a team",
        refusals.SERVER: sampler.startswith(("central", "alternating")) or "own process" in sampler,
        refusals.ASYNC: sampler.startswith("ahead"),
        refusals.LAG: sampler == "ahead by one batch",
        refusals.ALTERNATING: sampler.startswith("alternating"),
        refusals.FIRST_READY: sampler.endswith(("first-ready", "0.1 ms")),
        refusals.NO_FINAL_OBS: recorded == "three slots, no final_obs",
    }
    return frozenset(name for name, is_asked in names.items() if is_asked)


@cache
def go_together(names: frozenset[str]) -> bool:
    """Whether the table of `refusals`, which the documentation shows, refuses nothing of it."""
    try:
        refusals.refuse(dict.fromkeys(names, True))
    except ConfigError:
        return False
    return True


def is_possible(cell: Cell) -> bool:
    return makes_sense(cell) and go_together(asked(cell))


def every_cell() -> list[Cell]:
    return [cell for cell in product(*AXES) if is_possible(cell)]  # type: ignore[arg-type]


def refused_cells() -> dict[tuple[str, str], Cell]:
    """For each pair that the table refuses and that cells ask for: the cell that asks for the least."""
    found: dict[tuple[str, str], Cell] = {}
    cells: Any = filter(makes_sense, product(*AXES[:-1], ["5 x 3"]))  # type: ignore[arg-type]
    for cell in sorted(cells, key=lambda cell: len(asked(cell)), reverse=True):
        for row in () if go_together(names := asked(cell)) else refusals.TABLE:
            found.update(dict.fromkeys(product(names.intersection(row.features), names.intersection(row.others)), cell))
    return found


# ---- the table -----------------------------------------------------------------------------


@cache
def daily() -> list[Cell]:
    """Cells in which each two values of two axes meet, where they can."""
    return covering(every_cell())


@pytest.mark.parametrize("cell", every_cell() if FULL else daily(), ids="; ".join)
def test_batches_are_those_of_a_plain_loop(cell: Cell) -> None:
    run_cell(cell)


def run_cell(cell: Cell) -> None:
    """Raise AssertionError unless the sampler's batches are those of the loop."""
    kind, form, agent, sampler, recorded, shape = cell
    (env_fn, of_kind), (make_agent, of_agent), (cls, of_sampler) = KINDS[kind], AGENTS[agent], SAMPLERS[sampler]
    env_fn = ODD[kind] if "odd" in form else env_fn
    (T, B, n), more = SHAPES[shape], dict(RECORDED[recorded])
    only_ours = {**of_sampler, **more.pop("sampler", {})}
    sizes = {"batch_T": T, "batch_B": B, "n_batches": n}
    options = {"max_decorrelation_steps": scaled(100, 25), **of_kind, **FORMS[form], **of_agent, **more}
    in_loop = Walk if kind == "own process" else None
    compare(cls, env_fn, make_agent, sampler=only_ours, in_loop=in_loop, **options, **sizes)


@pytest.mark.parametrize(("pair", "cell"), sorted(refused_cells().items()), ids="; ".join)
def test_what_the_table_of_refusals_has_is_refused(pair: tuple[str, str], cell: Cell) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{pair[0]} and {pair[1]} do not go together")):
        run_cell(cell)


def test_each_two_values_of_the_table_that_can_meet_do_so_daily() -> None:
    found = {pair for cell in daily() for pair in combinations(enumerate(cell), 2)}
    assert found == {pair for cell in every_cell() for pair in combinations(enumerate(cell), 2)}
    assert {value for cell in daily() for value in cell} == {value for axis in AXES for value in axis}


# ---- agents with models --------------------------------------------------------------------

CARTPOLE = partial(gym.make, "CartPole-v1", max_episode_steps=25)
PENDULUM = partial(gym.make, "Pendulum-v1", max_episode_steps=12)
COUNTING = partial(CountingEnv, truncate=True)


def scripted(observation: Any, rngs: Any) -> Any:
    mode = np.stack([rng.integers(0, [2, 3]) for rng in rngs])
    return {"move": 0.9 * observation.position.astype(np.float32), "mode": mode}


#: Models in float64: the last bit, in which matrix products of other numbers of rows may differ, decides no action.
MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "categorical": (CARTPOLE, lambda: CategoricalPgAgent(lambda: Net(4, 2, 0))),
    "multi-discrete": (Modes, lambda: CategoricalPgAgent(lambda: Net(3, 5, 0))),
    "gaussian": (PENDULUM, lambda: GaussianPgAgent(lambda: Net(3, 1, 0))),
    "epsilon-greedy": (COUNTING, lambda: EpsilonGreedyAgent(lambda: Net(2, 3), epsilon=LinearSchedule(1, 0.1, 4))),
    "deterministic": (
        PENDULUM,
        lambda: DeterministicPgAgent(lambda: Net(3, 1), noise="ou", squash=True, warmup_random_itrs=2),
    ),
    "squashed": (PENDULUM, lambda: SquashedGaussianAgent(lambda: Net(3, 1, 1), warmup_random_itrs=1)),
    "recurrent categorical": (CARTPOLE, lambda: RecurrentCategoricalPgAgent(lambda: Lstm(4, 2))),
    "its states of the batch": (
        CARTPOLE,
        lambda: RecurrentCategoricalPgAgent(lambda: Lstm(4, 2), record_state="batch"),
    ),
    "recurrent gaussian": (PENDULUM, lambda: RecurrentGaussianPgAgent(lambda: Lstm(3, 1))),
    "recurrent epsilon-greedy": (COUNTING, lambda: RecurrentEpsilonGreedyAgent(lambda: LstmQ(2, 3), epsilon=0.3)),
    "function": (NestedEnv, lambda: FunctionAgent(scripted)),
    "computed weights": (CARTPOLE, lambda: CategoricalPgAgent(lambda: Normed(2))),
    "numpy": (CARTPOLE, lambda: CategoricalPgAgent(lambda: CartPoleNet().double(), inference="numpy")),
    "traced": (CARTPOLE, lambda: CategoricalPgAgent(lambda: CartPoleNet().double(), inference="traced")),
}
#: They have no value.
WITHOUT_VALUE = ("deterministic", "squashed", "function")


def compare_model(model: str, cls: type[Sampler], of_sampler: Options) -> None:
    """Four batches and two evaluations."""
    env_fn, make_agent = MODELS[model]
    sizes = {"batch_T": 20, "batch_B": 5, "n_batches": 4, "eval_n_envs": 2, "eval_max_steps": 60}
    sizes["max_decorrelation_steps"] = scaled(100, 25)
    has_value = {"bootstrap_value": model not in WITHOUT_VALUE}
    compare(cls, env_fn, make_agent, sampler=of_sampler, rtol=1e-6, **has_value, **sizes)


#: Daily, recurrent models also act in workers, for the first that are ready, in halves, and ahead. What torch cannot
#: pickle is sent to all processes.
MORE = [
    ("recurrent categorical", "2 workers"),
    ("its states of the batch", "central, first-ready"),
    ("recurrent gaussian", "alternating"),
    ("recurrent epsilon-greedy", "ahead"),
    *(("computed weights", sampler) for sampler in ("2 workers", "central, own process", "ahead, own process")),
]


@pytest.mark.parametrize(("model", "sampler"), [*pairs(MODELS, SAMPLERS), *scaled([], MORE)])
def test_agents_with_models_act_as_in_a_plain_loop(model: str, sampler: str) -> None:
    compare_model(model, *SAMPLERS[sampler])


def test_every_stock_agent_is_among_them() -> None:
    public = (getattr(penstock, name) for name in penstock.__all__)
    agents = {cls for cls in public if inspect.isclass(cls) and issubclass(cls, Agent) and not inspect.isabstract(cls)}
    assert agents == {RandomAgent, *(type(make_agent()) for _, make_agent in MODELS.values())}


#: Environments with masks of legal actions: in `info`, or in the observation.
MASKED: dict[str, tuple[Any, str]] = {
    "single": (partial(Ruled, True), "info"),
    "single, several components": (partial(Ruled, False), "observation"),
    "lock-step": (partial(RuledGame, 3), "info"),
    "turns": (partial(RuledTurns, 2, mask=True), "info"),
}


@pytest.mark.parametrize(("kind", "sampler"), pairs(MASKED, SAMPLERS))
def test_random_steps_and_agents_take_the_masks_of_a_plain_loop(kind: str, sampler: str) -> None:
    (env_fn, where), (cls, of_sampler) = MASKED[kind], SAMPLERS[sampler]
    sizes = {"batch_T": 5, "batch_B": 3, "n_batches": 5, "eval_n_envs": 3, "eval_max_steps": 90}
    sizes["max_decorrelation_steps"] = scaled(100, 25)
    agent = partial(RandomAgent, mask_key=f"{where}.rules.legal")
    compare(cls, env_fn, agent, sampler=of_sampler, traj_info_cls=Diary, **sizes)


@with_start_methods("sampler", ["2 workers", "central", "central, own process", "ahead by one batch"], START_METHODS)
def test_every_start_method(sampler: str, start_method: str) -> None:
    cls, of_sampler = SAMPLERS[sampler]
    only_ours = {**of_sampler, "start_method": start_method}
    compare(cls, Walk, Stateful, sampler=only_ours, batch_T=5, batch_B=3, n_batches=2)


@examples(5, 50)
@given(
    batch_T=st.integers(1, 12),
    batch_B=st.integers(1, 7),
    n_workers=st.integers(1, 6),
    kind=st.sampled_from(["single", "batched, NEXT_STEP", "lock-step", "turns"]),
    ready=st.one_of(st.none(), st.integers(1, 7), st.floats(0.01, 1.0)),
)
def test_any_shape_and_any_number_of_workers(batch_T: int, batch_B: int, n_workers: int, kind: str, ready: Any) -> None:
    env_fn, of_kind = KINDS[kind]
    only_ours = {
        "n_workers": n_workers,
        "start_method": "fork",
        **({} if ready is None else {"min_ready": min(ready, batch_B) if isinstance(ready, int) else ready}),
    }
    cls = ParallelSampler if ready is None else GpuSampler
    sizes = {"batch_T": batch_T, "batch_B": batch_B, "n_batches": 3}
    compare(cls, env_fn, Stateful, sampler=only_ours, **of_kind, **sizes)
