"""Samplers against the reference loop, bit for bit: each kind of environment, with each kind of agent and of reset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    GpuSampler,
    ParallelSampler,
    PolicySamples,
    RandomAgent,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs.toy import ScriptedGame
from penstock.testing.reference_loop import ReferenceLoop
from tests.samplers.digest_cases import IntoWalk, LongInfo, Nested, Plain, Stateful, Walk, rows_of
from tests.seats_support import Numbered, Odd, Roles
from tests.turns_support import TurnGame, Valuing

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

pytestmark = pytest.mark.filterwarnings("ignore:.*eval_max_steps.*:RuntimeWarning")

SEED = 3
EVALUATED = {"eval_n_envs": 3, "eval_max_steps": 150}
COUNTED = {"eval_n_envs": 3, "eval_max_steps": 600, "eval_episodes": 5}


def compare(
    cls: type[Sampler], env_fn: Any, make_agent: Any, *, n_batches: int = 6, more: Any = None, **options: Any
) -> None:
    """A sampler and the loop return the same. `more` are options that only the sampler has."""
    options = {"batch_T": 5, "batch_B": 3, "bootstrap_value": True, **options}
    loop = ReferenceLoop(env_fn, make_agent(), seed=SEED, **options)
    at_start = {name: options.pop(name) for name in ("bootstrap_value", "policy_of") if name in options}
    if options.pop("wait_reset", False):
        options["collector_cls"] = WaitResetCollector
    with cls(env_fn, max_decorrelation_steps=0, **(more or {}), **options) as sampler:
        sampler.initialize(make_agent(), seed=SEED, **at_start)
        for itr in range(n_batches):
            samples, infos = sampler.obtain_samples(itr)
            wanted, wanted_infos = loop.obtain_samples(itr)
            for name, own in samples.items() if isinstance(samples, PolicySamples) else [("", samples)]:
                compare_batches(own.numpy(), wanted[name] if name else wanted)
            assert [figures(info) for info in infos] == [figures(info) for info in wanted_infos]
            if "eval_n_envs" in options and itr % 3 == 0:
                found = [figures(info) for info in sampler.evaluate_agent(itr)]
                assert found == [figures(info) for info in loop.evaluate_agent(itr)]


def compare_batches(samples: Any, wanted: Any) -> None:
    expected = dict(wanted.leaves())
    for path, leaf in samples.leaves():
        name = path.split(".", 1)[1]
        if name != "policy_version":
            # With wait-reset, prev_done is True in the row after an end too, although that row is not valid.
            found = leaf & samples.env.valid if name == "prev_done" else leaf
            np.testing.assert_array_equal(found, expected[name], err_msg=name, strict=True)


def figures(info: TrajInfo) -> dict[str, Any]:
    names = {name for name in vars(info) if name[0] != "_"} | {"env_rank", "episode", "seed", "agent_id", "policy"}
    return {name: getattr(info, name) for name in names}


class Fresh(Walk):
    """Returns a new array in each step. With one array for all, a last observation would be that after the reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        return observation.copy(), info

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return observation.copy(), *others


def fresh_rows(mode: AutoresetMode) -> Any:
    return lambda num_envs: SyncVectorEnv([Fresh] * num_envs, autoreset_mode=mode)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (Walk, {}),
    "single, wait-reset": (Walk, {"wait_reset": True}),
    **{f"batched, {mode.name}": (fresh_rows(mode), {"batched": True}) for mode in AutoresetMode},
    "lock-step": (partial(ScriptedGame, 4), {}),
    "turns": (partial(TurnGame, 3), {}),
}


@pytest.mark.parametrize("make_agent", [RandomAgent, Stateful, Plain], ids=["random", "with state", "with values"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, make_agent: Any) -> None:
    env_fn, options = KINDS[kind]
    compare(SerialSampler, env_fn, make_agent, **options, **EVALUATED)
    compare(SerialSampler, env_fn, make_agent, batch_T=1, batch_B=2, n_batches=25, **options)
    compare(SerialSampler, env_fn, make_agent, batch_T=23, batch_B=1, n_batches=2, **options)


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


def by_number(agent: str) -> str:
    return "xyzx"[int(agent[1])]


def three() -> Any:
    return {"x": Stateful(), "y": RandomAgent(), "z": Plain()}


def two() -> Any:
    return {"z": Plain(), "x": Stateful()}


def more_cases() -> Iterator[Any]:
    info, long = {"env_info": {"n": 0.0}}, {"traj_info_cls": LongInfo}
    for kind, (env_fn, options) in KINDS.items():
        yield f"{kind}, two episodes", env_fn, Stateful, {**options, **long, **COUNTED}
        if not kind.startswith(("lock", "turns")):
            yield f"{kind}, env_info", env_fn, Plain, {**options, **info, **COUNTED}
    for mode in AutoresetMode:
        yield f"batched, {mode.name}, reused arrays", rows_of(mode), Stateful, {"batched": True, **EVALUATED}
    yield "nested", Nested, RandomAgent, {**info, **long, **EVALUATED}
    yield "nested, wait-reset", Nested, RandomAgent, {**info, "wait_reset": True}
    yield "three slots, no final_obs", Walk, RandomAgent, {"more": {"n_slots": 3, "record_final_obs": False}}
    yield "step_into", IntoWalk, Stateful, EVALUATED
    yield "step_into, wait-reset", IntoWalk, Stateful, {"wait_reset": True}
    yield "lock-step, reused dicts", partial(Odd, k=4), Stateful, EVALUATED
    yield "lock-step, dicts", Rounded, RandomAgent, EVALUATED
    yield "lock-step, three policies", partial(ScriptedGame, 4), three, {"policy_of": by_number, **COUNTED}
    yield (
        "lock-step, roles",
        partial(Roles, 3),
        lambda: {"x": Stateful(), "o": Plain()},
        {
            "policy_of": lambda agent: "x" if agent == "a0" else "o",
            **EVALUATED,
        },
    )
    yield "turns, early rewards", partial(Gifts, 3), RandomAgent, EVALUATED
    yield "turns, values of open decisions", partial(TurnGame, 3), Valuing, {}
    yield "turns, two policies", partial(TurnGame, 3), two, {"policy_of": lambda agent: "xzx"[int(agent[1])], **COUNTED}


MORE = {name: case for name, *case in more_cases()}


@pytest.mark.parametrize("name", MORE)
def test_more_kinds(name: str) -> None:
    env_fn, make_agent, options = MORE[name]
    compare(SerialSampler, env_fn, make_agent, **options)


LAYOUTS = {"two workers": (ParallelSampler, 2), "three workers": (ParallelSampler, 3), "a server": (GpuSampler, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["single, wait-reset", "batched, NEXT_STEP", "lock-step", "turns"])
def test_layouts(kind: str, layout: str) -> None:
    (env_fn, options), (cls, n_workers) = KINDS[kind], LAYOUTS[layout]
    compare(cls, env_fn, Stateful, n_batches=4, more={"n_workers": n_workers}, **options, **EVALUATED)
