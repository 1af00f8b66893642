"""The table of equalities: one seed, one batch, whoever acts and whenever. The reference loop says what is in it.

A cell is a kind of environment, its form, an agent, a sampler, what is recorded, and a shape. `make cases`
runs the whole table. Daily some cells run, in which each two values meet that can. A new sampler, kind, agent or option
is a new row of its dict.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, product
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import (
    Agent,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    DeterministicPgAgent,
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
    Sampler,
    SerialSampler,
    SquashedGaussianAgent,
)
from penstock.envs import CountingEnv, NestedEnv
from penstock.envs.toy import ScriptedGame

from ..against_loop import compare
from ..models import CartPoleNet, Lstm, LstmQ, Modes, Net, Normed
from ..scale import FULL, START_METHODS, covering, examples, pairs, scaled, with_start_methods
from ..support import Diary
from ..toy_games import Numbered, Odd, Roles, TurnGame, Valuing
from .digest_cases import IntoWalk, LongInfo, Nested, Plain, Stateful, Walk, rows_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*eval_max_steps.*:RuntimeWarning")]

# ---- the axes ------------------------------------------------------------------------------


class Fresh(Walk):
    """Returns a new array in each step. With one array for all, a last observation would be that after the reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        return observation.copy(), info

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return observation.copy(), *others


def fresh_rows(mode: AutoresetMode, env_fn: Any = Fresh) -> Any:
    return lambda num_envs: SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


class Rounded(Numbered):
    """Its rewards are whole numbers: the sum over all agents does not depend on the order."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        return observations, {agent: float(round(reward)) for agent, reward in rewards.items()}, *others


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
#: How environments behave, and when they are reset.
FORMS: dict[str, Options] = {
    "": {},
    "odd": {},
    "wait-reset": {"wait_reset": True},
    "odd, wait-reset": {"wait_reset": True},
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
    "evaluations": {"eval_n_envs": 3, "eval_max_steps": 90},
    "counted episodes": {"eval_n_envs": 3, "eval_max_steps": 900, "eval_episodes": 5},
    "env_info": {"env_info": {"n": 0.0}},
    "long trajectories": {"traj_info_cls": LongInfo, "eval_n_envs": 2, "eval_max_steps": 90},
    "a diary": {"traj_info_cls": Diary, "traj_info_kwargs": {"discount": 0.5}, "eval_n_envs": 2, "eval_max_steps": 60},
    "checks": {"sampler": {"debug": True, "check_finite": True}},
    "three slots, no final_obs": {"sampler": {"n_slots": 3, "record_final_obs": False}},
}

#: batch_T, batch_B and the number of batches.
SHAPES: dict[str, tuple[int, int, int]] = {"5 x 3": (5, 3, 5), "1 x 4": (1, 4, 12), "23 x 2": (23, 2, 2)}

AXES: tuple[dict[str, Any], ...] = (KINDS, FORMS, AGENTS, SAMPLERS, RECORDED, SHAPES)
Cell = tuple[str, str, str, str, str, str]


def is_possible(cell: Cell) -> bool:
    """Whether the values go together. `samplers/refusals.py` says why others do not."""
    kind, form, agent, sampler, recorded, _ = cell
    has_seats, is_async = kind.startswith(("lock-step", "turns")), sampler.startswith("ahead")
    if ("odd" in form and kind not in ODD) or ("wait" in form and kind.startswith("batched")):
        return False
    if recorded == "env_info" and has_seats:
        return False  # these environments give no info
    if recorded == "three slots, no final_obs" and (is_async or agent == "that reports values"):
        return False
    if agent == "one policy":
        return kind == "lock-step"
    if agent in ("three policies", "two roles"):
        is_served = sampler.startswith(("central", "alternating")) or "own process" in sampler or "by one" in sampler
        of_three = kind == "lock-step"
        return (
            of_three if agent == "three policies" else kind in ("lock-step", "lock-step, roles", "turns")
        ) and not is_served
    if kind in RANDOM_ONLY:
        return agent == "random"
    return kind != "lock-step, roles" and (agent != "that reports values" or kind == "turns")


def every_cell() -> list[Cell]:
    return [cell for cell in product(*AXES) if is_possible(cell)]  # type: ignore[arg-type]


# ---- the table -----------------------------------------------------------------------------


@cache
def daily() -> list[Cell]:
    """Cells in which each two values of two axes meet, where they can."""
    return covering(every_cell())


@pytest.mark.parametrize("cell", every_cell() if FULL else daily(), ids="; ".join)
def test_batches_are_those_of_a_plain_loop(cell: Cell) -> None:
    kind, form, agent, sampler, recorded, shape = cell
    (env_fn, of_kind), (make_agent, of_agent), (cls, of_sampler) = KINDS[kind], AGENTS[agent], SAMPLERS[sampler]
    env_fn = ODD[kind] if "odd" in form else env_fn
    (T, B, n), more = SHAPES[shape], dict(RECORDED[recorded])
    only_ours = {**of_sampler, **more.pop("sampler", {})}
    sizes = {"batch_T": T, "batch_B": B, "n_batches": n}
    compare(cls, env_fn, make_agent, sampler=only_ours, **of_kind, **FORMS[form], **of_agent, **more, **sizes)


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
    has_value = {"bootstrap_value": model not in WITHOUT_VALUE}
    compare(cls, env_fn, make_agent, sampler=of_sampler, rtol=1e-6, **has_value, **sizes)


#: Daily, recurrent models also act in workers, in halves, and ahead. What torch cannot pickle is sent to all processes.
MORE = [
    ("recurrent categorical", "2 workers"),
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
