"""Runs of every kind of environment, whose batches must stay as they are. `test_digests.py` compares their digests.

All numbers come from integers, sums and products of single elements, so they are the same on every machine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import penstock
from penstock import Agent, AgentStep, GameError, NamedArrays, RandomAgent, SerialSampler, TrajInfo
from penstock.envs.toy import ScriptedGame
from penstock.vector import ShmVectorEnv
from tests.support import figures_of
from tests.toy_games import TurnGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


class Walk(gym.Env[Any, Any]):
    """Returns the same array again and again; episodes end both ways; with `step_into` where `writes`."""

    observation_space, action_space = spaces.Box(-99, 99, (4,), np.float32), spaces.Discrete(3)

    def __init__(self) -> None:
        self._seen = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        gym.Env.reset(self, seed=seed)
        self._n, self._most = 0, int(self.np_random.integers(1, 25))
        self._seen[:] = self.np_random.random(4, np.float32) + np.float32((options or {}).get("level", 0))
        return self._seen, {"n": -1.0}

    def _advance(self, out: Any, action: Any) -> Any:
        out[:] = self.np_random.random(4, np.float32) + np.float32(action)
        self._n += 1
        is_over = self._n >= self._most
        info = {"n": float(self._n)} if self._n % 2 else {}
        return float(out[0]), is_over and bool(self._most % 2), is_over and not self._most % 2, info

    def step(self, action: Any) -> Any:
        return (self._seen, *self._advance(self._seen, action))


class IntoWalk(Walk):
    """Writes its observations into the batch."""

    def step_into(self, out: Any, action: Any) -> Any:
        return self._advance(out, action)


class FailingInSteps(Walk):
    """Its game fails now and then."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.03:
            raise GameError("the game has failed")
        return super().step(action)


class FailingWalk(FailingInSteps):
    """Its game fails in resets too."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        if self.np_random.random() < 0.1:
            raise GameError("no start")
        return found


class Nested(gym.Env[Any, Any]):
    """Nested observations and actions, rewards of several types."""

    observation_space = spaces.Dict(
        a=spaces.Box(-9, 9, (3,), np.float32),
        b=spaces.Discrete(50),
        c=spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1e9, 1e9, (), np.float64)]),
    )
    action_space = spaces.Dict(x=spaces.Discrete(3), y=spaces.Box(-1, 1, (2,), np.float32))

    def _look(self) -> Any:
        self._a[:] = self.np_random.random(3)
        return {"a": self._a, "b": self._t % 50, "c": (np.array([1, self._t % 2], np.int8), np.array(self._sum))}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._a, self._t, self._sum = np.zeros(3, np.float32), 0, 0.0
        self._end = int(self.np_random.integers(1, 9))
        return self._look(), {"n": -1.0}

    def step(self, action: Any) -> Any:
        self._t += 1
        self._sum += float(action["x"]) + float(action["y"][0])
        reward = [1, 0.5, np.float32(2)][self._t % 3]
        info = {"n": float(self._t)} if self._t % 2 else {}
        is_over, ends = self._t == self._end, self._end % 2 == 0
        return self._look(), reward, is_over and ends, is_over and not ends, info


class Stateful(Agent):
    """Recurrent, with noise, values and a state for each column: whatever leaks between columns or episodes shows."""

    recurrent = True
    action_space: Any

    def seed_columns(self, rngs: Any) -> None:
        self._rngs = list(rngs)

    def reset(self) -> None:
        self._own = np.zeros(len(self._rngs), np.int64)

    def reset_one(self, column: int) -> None:
        self._own[column] = 0

    def _mixed(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        total = 3.0 * prev_reward.astype(np.float64)
        k = 0
        for _, leaf in NamedArrays(o=observation, a=prev_action).leaves():
            flat = np.asarray(leaf, np.float64).reshape(len(leaf), -1)
            for j in range(flat.shape[1]):
                k += 1
                total = total + flat[:, j] * ((k * 0.37) % 1.0)
        return total

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        chosen = range(len(prev_reward)) if self.selected is None else self.selected.tolist()
        for column in chosen:
            self._own[column] += 1
        own = self._own[list(chosen)]
        noise = np.array([self._rngs[column].random() for column in chosen])
        value = self._mixed(observation, prev_action, prev_reward) + 5.0 * own
        choice = (value * 7 + noise * 100).astype(np.int64)
        info = NamedArrays(own=own.copy(), value=value.astype(np.float32))
        return AgentStep(choice % int(self.action_space.n), info)

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        own = self._own if self.selected is None else self._own[self.selected]
        return (self._mixed(observation, prev_action, prev_reward) + 5.0 * own).astype(np.float32)


class Plain(Stateful):
    """The same without a state: its values are computed at the end of the batch."""

    recurrent = False

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        action, _ = super().step(observation, prev_action, prev_reward)
        return AgentStep(action)

    def reset_one(self, column: int) -> None:
        """There is no state."""

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return self._mixed(observation, prev_action, prev_reward).astype(np.float32)


class LongInfo(TrajInfo):
    """A trajectory is two episodes, and its figures depend on all that it gets."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ends, self.mixed = 0, 0.0

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        agent_info: Any,
        env_info: Any,
    ) -> None:
        super().step(observation, action, reward, terminated, truncated, agent_info, env_info)
        while isinstance(observation, dict):
            observation = next(iter(observation.values()))
        self.mixed += float(np.ravel(observation)[0]) + len(env_info)
        self.ends += terminated or truncated

    def traj_done(self, terminated: bool, truncated: bool, env_info: Any) -> bool:
        return self.ends >= 2


def rows_of(mode: AutoresetMode) -> Any:
    """Makes a batched environment of `Walk`s."""
    return lambda num_envs: SyncVectorEnv([Walk] * num_envs, autoreset_mode=mode, copy=False)


Case = tuple[str, Any, dict[str, Any], Callable[[], Any], dict[str, Any]]


def sampler_cases() -> Iterator[Case]:
    """Name, environment, arguments of the sampler, agent, arguments of `initialize`."""
    b, ev = {"bootstrap_value": True}, {"eval_n_envs": 3, "eval_max_steps": 600}
    no_steps = {"max_decorrelation_steps": 0}
    yield "single, random", Walk, ev, RandomAgent, {}
    yield "single, plain, counted episodes", Walk, {**ev, "eval_episodes": 5}, Plain, b
    yield "single, state, three slots, no final_obs", Walk, {"n_slots": 3, "record_final_obs": False}, Stateful, b
    yield "single, plain, no final_obs", Walk, {"record_final_obs": False}, Plain, b
    yield "single, env_info, at most 7", Walk, {"env_info": {"n": 0.0}, **ev, "eval_max_trajectories": 7}, Plain, b
    yield (
        "nested, env_info, checks",
        Nested,
        {**no_steps, "env_info": {"n": 0.0}, "check_finite": True, "debug": True, **ev},
        RandomAgent,
        {},
    )
    yield (
        "nested, two episodes",
        Nested,
        {**no_steps, "traj_info_cls": LongInfo, **ev, "eval_episodes": 6},
        RandomAgent,
        {},
    )
    yield "single, two episodes, state", Walk, {"traj_info_cls": LongInfo, **ev, "eval_episodes": 4}, Stateful, b
    yield "single, seeded episodes", Walk, {"seed_episodes": True, **ev}, Stateful, b
    yield "single, step_into", IntoWalk, ev, Stateful, b
    renewed = {"on_game_failure": "renew", "max_renewals": 999}
    yield "single, renewed", FailingWalk, {**no_steps, **renewed}, Stateful, b
    yield "single, renewed in evaluations", FailingInSteps, {**no_steps, **renewed, **ev}, Stateful, b
    yield "single, renewed, two episodes", FailingWalk, {**no_steps, **renewed, "traj_info_cls": LongInfo}, Plain, b
    waits = {"collector_cls": penstock.WaitResetCollector}
    yield "wait-reset, state", Walk, waits, Stateful, b
    yield "wait-reset, nested, env_info", Nested, {**no_steps, **waits, "env_info": {"n": 0.0}}, RandomAgent, {}
    yield "wait-reset, step_into, plain", IntoWalk, waits, Plain, b
    for mode in AutoresetMode:
        make, rows = rows_of(mode), {"batched": True, **ev}
        yield f"batched, {mode.name}, state", make, rows, Stateful, b
        yield f"batched, {mode.name}, plain", make, {**rows, "eval_episodes": 5}, Plain, b
        two = {"traj_info_cls": LongInfo, "env_info": {"n": 0.0}}
        yield f"batched, {mode.name}, two episodes", make, {**rows, **two}, RandomAgent, {}
    game, masked = partial(ScriptedGame, 4), partial(ScriptedGame, 3, mask=True)
    yield "seats, state, counted episodes", game, {**ev, "eval_episodes": 4}, Stateful, b
    yield "seats, plain, no final_obs", game, {**ev, "record_final_obs": False}, Plain, b
    yield "seats, global state", game, {"global_state": True}, Plain, b
    yield (
        "seats, masks, two episodes",
        masked,
        {**ev, "traj_info_cls": LongInfo, "eval_episodes": 5},
        partial(RandomAgent, mask_key="info.action_mask"),
        {},
    )
    yield (
        "seats, three policies, two slots",
        game,
        {"n_slots": 2, **ev, "eval_max_trajectories": 9},
        lambda: {"x": Stateful(), "y": RandomAgent(), "z": Stateful()},
        {"policy_of": lambda agent: "xyzx"[int(agent[1])]},
    )
    turns = partial(TurnGame, 3)
    yield "turns, state", turns, {**ev, "eval_episodes": 4}, Stateful, b
    yield (
        "turns, plain, masks",
        partial(TurnGame, 2, mask=True),
        ev,
        partial(RandomAgent, mask_key="info.action_mask"),
        {},
    )
    yield (
        "turns, two policies",
        turns,
        {"n_slots": 2, **ev},
        lambda: {"x": Stateful(), "y": Plain()},
        {"policy_of": lambda agent: "xyx"[int(agent[1])]},
    )


#: Batches of each run, and its shapes.
N_BATCHES, SHAPES = 7, ((5, 3), (37, 4))


def _update(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    else:
        digest.update(repr(value).encode())


def digests_of_sampler(case: Case, shape: tuple[int, int]) -> str:
    """One digest of all batches, one of their trajectories, one of the evaluations."""
    _, env_fn, options, make_agent, arguments = case
    batches, infos, evaluations = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    with SerialSampler(env_fn, batch_T=shape[0], batch_B=shape[1], **options) as sampler:
        sampler.initialize(make_agent(), seed=3, **arguments)
        for itr in range(N_BATCHES):
            obtained: Any = sampler.obtain_samples(itr)
            samples, found = obtained
            each = samples.items() if isinstance(samples, penstock.PolicySamples) else [("", samples)]
            for name, own in each:
                for path, leaf in own.numpy().leaves():
                    _update(batches, f"{itr} {name} {path}", leaf)
            _update(infos, f"{itr}", [sorted(figures.items()) for figures in figures_of(found)])
            if "eval_n_envs" in options and itr % 2 == 0:
                evaluated = figures_of(sampler.evaluate_agent(itr))
                _update(evaluations, f"{itr}", [sorted(figures.items()) for figures in evaluated])
    digests = {"batches": batches, "trajectories": infos, "evaluations": evaluations}
    return ", ".join(f"{name} {digest.hexdigest()[:16]}" for name, digest in digests.items())


VectorCase = tuple[str, Any, dict[str, Any]]


def vector_cases() -> Iterator[VectorCase]:
    """Name, environment, arguments of `ShmVectorEnv`."""
    for mode in AutoresetMode:
        yield f"vector, single, {mode.name}", Walk, {"autoreset_mode": mode}
        yield f"vector, step_into, {mode.name}", IntoWalk, {"autoreset_mode": mode}
    yield "vector, seats", partial(ScriptedGame, 3), {}
    yield "vector, nested", Nested, {}
    yield "vector, batched", rows_of(AutoresetMode.SAME_STEP), {"num_envs": 4, "rows_per_env": 2}


def digest_of_vector(case: VectorCase) -> str:
    """One digest of all that the environment returns."""
    _, env_fn, options = case
    digest = hashlib.sha256()
    envs = env_fn if "num_envs" in options else [env_fn] * 4
    with ShmVectorEnv(envs, n_workers=2, **options) as env:
        observation, info = env.reset(seed=5)
        update_tree(digest, (observation, info))
        env.action_space.seed(1)
        for _ in range(80):
            results = env.step(env.action_space.sample())
            update_tree(digest, results)
            over = np.asarray(results[2]) | np.asarray(results[3])
            if options.get("autoreset_mode") is AutoresetMode.DISABLED and over.any():
                update_tree(digest, env.reset(options={"reset_mask": over}))
    return digest.hexdigest()[:16]


def update_tree(digest: Any, tree: Any) -> None:
    if isinstance(tree, dict):
        for name in sorted(tree):
            digest.update(name.encode())
            update_tree(digest, tree[name])
    elif isinstance(tree, tuple | list):
        for leaf in tree:
            update_tree(digest, leaf)
    elif isinstance(tree, np.ndarray) and tree.dtype == object:
        update_tree(digest, tree.tolist())
    elif tree is None:
        digest.update(b"None")
    else:
        _update(digest, "", np.asarray(tree))
