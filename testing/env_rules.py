"""Check one environment: the same episode wherever it is played, what leaks, what is slow. And an engine of many
environments beside the original."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium.vector import AutoresetMode

from penstock.arguments import integer
from penstock.buffers import pickling
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import tree_leaves
from penstock.envs import EnvFn, env_factories
from penstock.envs.checks import checked_reset, checked_step
from penstock.envs.examples import example_of
from penstock.envs.factory import EnvFactory
from penstock.errors import ConfigError, SpaceError, brief
from penstock.testing.rules import Violation, apply, differ
from penstock.vector import ShmVectorEnv
from penstock.workers.plan import START_METHOD, StartMethod

#: Memory that grows less is noise: of each episode, and of all together.
_LEAK, _LEAK_IN_ALL = 50_000, 4_000_000  # bytes
_N_RUNS = 3  # episodes that are played in several places

#: A step as it is compared: observation, reward, terminated, truncated.
Step = tuple[Any, float, bool, bool]
#: The steps of some episodes, each with its actions.
Runs = list[tuple[list[Step], list[Any]]]
#: `policy(observation, info, rng)` returns an action.
Policy = Callable[[Any, Mapping[str, Any], np.random.Generator], Any]


@dataclass(frozen=True)
class EnvFigures:
    """What `check_env` has measured, in a worker. Times are in seconds, memory in bytes."""

    n_episodes: int
    reset: float  #: median of the resets
    slowest_reset: float
    step: float  #: median of the steps
    slowest_step: float
    memory_per_episode: float  #: how much the memory of the process grows with each episode, from the second half

    def __str__(self) -> str:
        return (
            f"reset: {1e3 * self.reset:.3g} ms, the slowest of {self.n_episodes} {1e3 * self.slowest_reset:.3g} ms\n"
            f"step: {1e3 * self.step:.3g} ms, the slowest {1e3 * self.slowest_step:.3g} ms\n"
            f"memory: grows by {self.memory_per_episode / 1e3:.3g} kB with each episode"
        )


def check_env(
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    n_episodes: int = 40,
    max_steps: int = 200,
    seed: int = 0,
    start_method: StartMethod = START_METHOD,
) -> EnvFigures:
    """Check an environment of one agent against the rules that samplers, replays and evaluations rely on.

    Some episodes are played with the same seeds and actions in a new environment, after other episodes, beside another
    environment, and in a worker. Observations, rewards and flags must be equal all the time; infos may differ, since
    many have times. Then a worker plays `n_episodes` of at most `max_steps` steps, and looks for what they leave
    behind: memory, open files, processes.

    Args:
        env_fn, env_kwargs, start_method: as for a sampler; one callable or id, and one dict.
        policy: `policy(observation, info, rng)` chooses actions. None: the action space does, at random.

    Raises `ConformanceError` for the first broken rule, with what was seen, where, and what to do; `ConfigError` for an
    environment of several agents (see `check_parallel_env`), or if a worker cannot get `env_fn`. Exceptions of the
    environment are not caught. Returns what was measured.
    """
    n_episodes, max_steps = integer("n_episodes", n_episodes, 4), integer("max_steps", max_steps, 1)
    factory = replace(env_factories(env_fn, env_kwargs, 1)[0], as_seats=_refuse_agents)
    setup = _Setup(factory, policy, n_episodes, max_steps, integer("seed", seed, 0), start_method)
    env = setup.build()
    name = type(env.unwrapped).__name__
    try:
        apply(values_fit_their_spaces, name, setup, env)
    finally:
        env.close()
    runs = setup.reference()
    apply(one_seed_gives_one_episode, name, setup, runs)
    apply(what_follows_repeats_too, name, setup)
    apply(earlier_episodes_leave_no_trace, name, setup, runs)
    apply(environments_share_nothing, name, setup, runs)
    with ShmVectorEnv([setup.build] * 2, n_workers=1, context=start_method) as envs:
        apply(a_worker_gives_the_same_episode, name, setup, runs, envs)
        figures: list[Any] = []
        apply(episodes_leave_nothing_behind, name, setup, envs, figures)
    return EnvFigures(n_episodes, *figures)


@dataclass(frozen=True)
class _Setup:
    factory: EnvFactory
    policy: Policy | None
    n_episodes: int
    max_steps: int
    seed: int
    start_method: StartMethod

    def build(self) -> gym.Env[Any, Any]:
        return self.factory()  # type: ignore[no-any-return]

    def played(
        self,
        env: gym.Env[Any, Any],
        episode: int,
        look: Callable[..., None] = lambda *_: None,
        *,
        is_seeded: bool = True,
    ) -> tuple[list[Step], list[Any]]:
        """The steps of this episode, the first from `reset`, and the actions. `look` sees each step."""
        rng = np.random.default_rng((self.seed, episode))
        env.action_space.seed(int(rng.integers(2**31)))
        observation, info = checked_reset(env.reset(seed=self.seed + episode if is_seeded else None), 0)
        look(env, f"episode {episode}, reset", observation, 0.0, info)
        steps: list[Step] = [(copy.deepcopy(observation), 0.0, False, False)]
        actions: list[Any] = []
        while len(actions) < self.max_steps and not (steps[-1][2] or steps[-1][3]):
            action = self.chosen(env, observation, info, rng)
            actions.append(copy.deepcopy(action))
            observation, *result, info = checked_step(env.step(action), 0)
            look(env, f"episode {episode}, step {len(actions)}", observation, result[0], info)
            steps.append((copy.deepcopy(observation), *result))
        return steps, actions

    def chosen(self, env: gym.Env[Any, Any], observation: Any, info: Any, rng: np.random.Generator) -> Any:
        """The next action: the policy's, or a random one."""
        return env.action_space.sample() if self.policy is None else self.policy(observation, info, rng)

    def reference(self) -> Runs:
        """The first episodes, each in an environment of its own."""
        runs = []
        for episode in range(_N_RUNS):
            env = self.build()
            runs.append(self.played(env, episode))
            env.close()
        return runs


def _refuse_agents(env: Any) -> Any:
    raise ConfigError(f"{type(env).__name__} has several agents: check it with check_parallel_env or check_aec_env")


def replayed(
    env: gym.Env[Any, Any], seed: int, actions: Sequence[Any], wanted: Sequence[Step], between: Any = lambda t: None
) -> list[Step]:
    """The steps of the episode with this seed and these actions, until one is not as `wanted`: the actions may be
    illegal then. Calls `between(t)` before each step."""
    steps: list[Step] = [(copy.deepcopy(env.reset(seed=seed)[0]), 0.0, False, False)]
    for t, action in enumerate(actions):
        if difference(wanted[t : t + 1], steps[-1:]) or steps[-1][2] or steps[-1][3]:
            break
        between(t)
        observation, *result, _ = checked_step(env.step(copy.deepcopy(action)), 0)
        steps.append((copy.deepcopy(observation), *result))
    return steps


def difference(wanted: Sequence[Step], got: Sequence[Step]) -> str:
    """The first difference of two episodes in words; empty if there is none."""
    for t, (a, b) in enumerate(zip(wanted, got, strict=False)):
        for name, left, right in zip(("observation", "reward", "terminated", "truncated"), a, b, strict=True):
            for path, *leaves in tree_leaves(left, name, right):
                one, other = map(np.asarray, leaves)
                if one.shape != other.shape or one.dtype != other.dtype:
                    return f"{path} at step {t}: {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
                if np.any(wrong := differ(one, other)):
                    at = tuple(np.argwhere(wrong)[0].tolist())
                    return f"{path}{list(at) if at else ''} at step {t}: {one[at]} and {other[at]}"
    return "" if len(wanted) == len(got) else f"the length: {len(wanted) - 1} and {len(got) - 1} steps"


# ---- the rules -------------------------------------------------------------------------------------


def values_fit_their_spaces(setup: _Setup, env: gym.Env[Any, Any]) -> None:
    """Observations are in their space, with its dtypes. Rewards are finite numbers, flags are bools, and infos can be
    pickled. Spaces have fixed shapes."""
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        try:
            example_of(space, name)
        except SpaceError as error:
            raise Violation(str(error), "change the space with a wrapper; ShmVectorEnv takes it as it is") from None
    for episode in range(setup.n_episodes):
        try:
            setup.played(env, episode, _require_fit)
        except SpaceError as error:
            raise Violation(str(error), "let reset return (observation, info), and step the five values") from None


def _require_fit(env: gym.Env[Any, Any], where: str, observation: Any, reward: float, info: Any) -> None:
    if not env.observation_space.contains(observation):
        wanted, got = (_described(value) for value in (env.observation_space.sample(), observation))
        do = "return what the space says, or declare the space that fits"
        raise Violation(f"{where}: {got}, which {env.observation_space} does not contain ({wanted} is in it)", do)
    if not np.isfinite(reward):
        raise Violation(f"{where}: the reward {reward}", "return finite rewards: a learner cannot use others")
    try:
        pickling.dumps(info)
    except Exception as error:  # pickling runs the user's code, which may raise anything
        do = "put numbers, texts and arrays into infos"
        raise Violation(f"{where}: the info cannot be pickled: {in_one_line(error)}", do) from None


def one_seed_gives_one_episode(setup: _Setup, runs: Runs) -> None:
    """A new environment gives the same episode for the same seed and actions."""
    for episode, (wanted, actions) in enumerate(runs):
        env = setup.build()
        got = replayed(env, setup.seed + episode, actions, wanted)
        _compare(wanted, got, episode, "in another new environment", _SEEDS)
        env.close()


def what_follows_repeats_too(setup: _Setup) -> None:
    """The episodes after a reset with a seed repeat too: a sampler seeds the first reset of an environment only."""
    runs = []
    for _ in range(2):
        env = setup.build()
        runs.append([setup.played(env, k, is_seeded=k == 0)[0] for k in range(_N_RUNS)])
        env.close()
    for k, (wanted, got) in enumerate(zip(*runs, strict=True)):
        _compare(wanted, got, k, "in another new environment, both without a seed of its own", _KEPT)


def earlier_episodes_leave_no_trace(setup: _Setup, runs: Runs) -> None:
    """An episode does not depend on episodes that were played before it in the same environment."""
    env = setup.build()
    for episode in (*range(_N_RUNS), *reversed(range(_N_RUNS))):
        wanted, actions = runs[episode]
        got = replayed(env, setup.seed + episode, actions, wanted)
        _compare(wanted, got, episode, "after other episodes", _RESET)
    env.close()


def environments_share_nothing(setup: _Setup, runs: Runs) -> None:
    """An episode does not depend on other environments of the same process."""
    wanted, actions = runs[0]
    env, other, rng = setup.build(), setup.build(), np.random.default_rng(setup.seed)

    def between(t: int) -> None:
        observation, info = other.reset(seed=setup.seed + 7 * t + 1)
        other.step(setup.chosen(other, observation, info, rng))

    got = replayed(env, setup.seed, actions, wanted, between)
    _compare(wanted, got, 0, "beside another environment", _SHARED)
    env.close()
    other.close()


def a_worker_gives_the_same_episode(setup: _Setup, runs: Runs, envs: ShmVectorEnv) -> None:
    """An episode is the same in a worker process, in each of its environments."""
    for episode, (wanted, actions) in enumerate(runs):
        play = partial(replayed, seed=setup.seed + episode, actions=actions, wanted=wanted)
        for i, got in enumerate(envs.apply(play)):
            _compare(wanted, got, episode, f"in a worker, as its environment {i}", _PROCESS)


def episodes_leave_nothing_behind(setup: _Setup, envs: ShmVectorEnv, figures: list[Any]) -> None:
    """Memory, open files and processes do not grow from episode to episode."""
    memory, files, processes, resets, steps = envs.apply(lambda env: _watched(setup, env))[0]
    half = len(memory) // 2
    growth = (memory[-1] - memory[half]) / (len(memory) - 1 - half)
    figures += [np.median(resets), max(resets), np.median(steps), max(steps), max(0.0, growth)]
    renew = "find who keeps it, or give the environment a process that is renewed: EnvProcess(..., renew_every=100)"
    if growth > _LEAK and growth * (len(memory) - 1 - half) > _LEAK_IN_ALL:
        raise Violation(f"the memory of a worker grows by {growth / 1e6:.3g} MB with each episode", renew)
    for what, counts in (("open files", files), ("processes", processes)):
        if counts[-1] > counts[half] > counts[1]:
            seen = f"{what}: {counts[1]} after episode 1, {counts[half]} after {half}, {counts[-1]} after {len(memory)}"
            raise Violation(seen, f"close in reset what the episode has opened; or {renew}")


_SEEDS = "draw from self.np_random, which super().reset(seed=seed) seeds, and not from global or unseeded generators"
_KEPT = "make a generator only in a reset with a seed, and keep it: super().reset(seed=seed) and self.np_random do so"
_RESET = f"set all state in reset, also that of wrappers. And {_SEEDS}"
_SHARED = "keep state in the object, not in its class, its module or a global generator"
_PROCESS = f"look for what differs between processes: environment variables, hash seeds, files, times. And {_SEEDS}"


def _compare(wanted: Sequence[Step], got: Sequence[Step], episode: int, where: str, do: str) -> None:
    if seen := difference(wanted, got):
        raise Violation(f"episode {episode}, first in a new environment, then {where}: {seen}", do)


def _described(value: Any) -> str:
    parts = []
    for path, leaf in tree_leaves(value, "observation"):
        array = np.asarray(leaf)
        bounds = f" from {array.min()} to {array.max()}" if array.size and array.dtype.kind in "biuf" else ""
        parts.append(f"{path} {array.dtype}{list(array.shape)}{bounds}")
    return ", ".join(parts)


def _watched(setup: _Setup, env: gym.Env[Any, Any]) -> tuple[list[int], list[int], list[int], list[float], list[float]]:
    """In a worker: memory, open files and processes after each episode, and the seconds of each reset and step."""
    process, clock, rng = psutil.Process(), time.perf_counter, np.random.default_rng(setup.seed)
    memory, files, processes, resets, steps = list[int](), list[int](), list[int](), list[float](), list[float]()
    for episode in range(setup.n_episodes):
        began = clock()
        observation, info = env.reset(seed=setup.seed + episode)
        resets.append(clock() - began)
        for _ in range(setup.max_steps):
            action = setup.chosen(env, observation, info, rng)
            began = clock()
            observation, _, terminated, truncated, info = env.step(action)
            steps.append(clock() - began)
            if terminated or truncated:
                break
        if episode in (1, setup.n_episodes // 2, setup.n_episodes - 1):
            gc.collect()  # these are compared, and garbage is no leak
        memory.append(process.memory_info().rss)
        files.append(process.num_fds())
        processes.append(len(process.children(recursive=True)))
    return memory, files, processes, resets, steps


# ---- an engine beside its original --------------------------------------------------------------


def check_batched(
    make_batched: Callable[..., Any] | str,
    make_env: EnvFn,
    *,
    num_envs: int = 3,
    n_steps: int = 500,
    begin: Callable[[Any, Any], object] | None = None,
    close: bool = False,
    seed: int = 0,
) -> int:
    """Compare a batched environment with its original, row by row and step by step.

    Args:
        make_batched: `make_batched(num_envs=n)` returns a `gymnasium.vector.VectorEnv`; or an id of `make_vec`.
        make_env: makes the original, one environment.
        num_envs, n_steps: rows, and steps of all.
        begin: `begin(env, observation)` puts an original that was just reset into the state in which a row has begun.
            Needed if both draw their first states from different generators. Then only steps are compared. None: both
            get the same seeds, and the first observations are compared too.
        close: floating-point numbers may differ by rounding (1e-4 of their size).

    Raises `ConformanceError` with the first difference: which row, which step, and what to do; `ConfigError` if no
    episode has ended. Returns how many did. Infos are not compared.
    """
    n = integer("num_envs", num_envs, 1)
    batched = env_factories(make_batched, None, 1)[0].batched(n)
    build = env_factories(make_env, None, 1)[0]
    envs = [build() for _ in range(n)]
    try:
        pair = _Pair(batched, envs, begin, close, integer("seed", seed, 0))
        name = type(getattr(batched, "unwrapped", batched)).__name__
        apply(the_engine_does_what_the_original_does, name, pair, integer("n_steps", n_steps, 1))
    finally:
        batched.close()
        for env in envs:
            env.close()
    if not pair.n_ends:
        raise ConfigError(f"no episode has ended in {n_steps} steps, so the check would miss much: give more n_steps")
    return pair.n_ends


@dataclass
class _Pair:
    batched: Any
    envs: list[Any]
    begin: Callable[[Any, Any], object] | None
    close: bool
    seed: int
    n_ends: int = 0

    def start(self, i: int, t: int, observation: Any, seed: int | None) -> None:
        """Row i has begun an episode with this observation."""
        own, _ = self.envs[i].reset(seed=seed)
        if self.begin is not None:
            self.begin(self.envs[i], observation)
        else:
            self.require(i, t, "the first observation", own, observation)

    def require(self, i: int, t: int, name: str, wanted: Any, got: Any) -> None:
        """Raise `Violation` unless both are equal."""
        for path, *leaves in tree_leaves(wanted, name, got):
            one, other = map(np.asarray, leaves)
            if one.shape != other.shape or np.any(differ(one, other, close=self.close)):
                raise Violation(
                    f"step {t}, row {i}, episode end {self.n_ends}: {path} is {brief(other.tolist())}, that of the "
                    f"original {brief(one.tolist())}",
                    "mend the engine; close=True allows rounding; with other random numbers at resets, give begin",
                )


def the_engine_does_what_the_original_does(pair: _Pair, n_steps: int) -> None:
    """Each row returns what an environment of the original returns for the same actions."""
    batched, n, rng = pair.batched, len(pair.envs), np.random.default_rng(pair.seed)
    mode = AutoresetMode(batched.metadata["autoreset_mode"])
    batched.action_space.seed(int(rng.integers(2**31)))
    seeds = [pair.seed + i for i in range(n)]
    try:
        observation, _ = batched.reset(seed=seeds)
    except Exception as error:
        if pair.begin is None:
            raise ConfigError(
                f"the batched environment takes no list of seeds ({in_one_line(error)}), so it has other first states "
                "than the original: give begin"
            ) from error
        observation, _ = batched.reset(seed=pair.seed)
    for i, seed in enumerate(seeds):
        pair.start(i, 0, _row(observation, i), seed)
    is_over = np.zeros(n, np.bool_)
    for t in range(1, n_steps + 1):
        if mode is AutoresetMode.DISABLED and is_over.any():
            observation, _ = batched.reset(options={"reset_mask": is_over.copy()})
            for i in np.flatnonzero(is_over).tolist():
                pair.start(i, t, _row(observation, i), None)
            is_over[:] = False
        actions = batched.action_space.sample()
        observation, reward, terminated, truncated, infos = batched.step(actions)
        for i, env in enumerate(pair.envs):
            row = _row(observation, i)
            if is_over[i]:  # NEXT_STEP: this step has only begun the next episode
                pair.start(i, t, row, None)
                is_over[i] = False
                continue
            seen, own_reward, *flags, _ = env.step(_row(actions, i))
            is_over[i] = any(flags)
            is_same_step = bool(is_over[i]) and mode is AutoresetMode.SAME_STEP
            pair.require(i, t, "terminated", flags[0], bool(terminated[i]))
            pair.require(i, t, "truncated", flags[1], bool(truncated[i]))
            pair.require(i, t, "observation", seen, infos["final_obs"][i] if is_same_step else row)
            pair.require(i, t, "reward", np.float32(own_reward), np.float32(reward[i]))
            pair.n_ends += bool(is_over[i])
            if is_same_step:
                pair.start(i, t, row, None)
                is_over[i] = False


def _row(batch: Any, i: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _row(part, i) for key, part in batch.items()}
    return tuple(_row(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]
