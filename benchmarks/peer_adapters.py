"""The contestants of `peers.py`, one function each: other libraries, penstock, and bare loops.

A contestant has `advance()`, which makes some environment steps and returns their number, and `close()`. A bare loop
has `turn(seconds)` too. All record the same fields as `[T, B]`, except the bare loops, which record nothing.
"""

from __future__ import annotations

import inspect
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from environments import PixelEnv, SleepingEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from policies import ImpalaCnn, Lstm, NatureCnn
from rlpyt_loop import RlpytLoop
from workloads import ENV, ActorCritic

import penstock
from penstock.envs import BatchedCartPole
from penstock.vector import ShmVectorEnv

MODELS: dict[str, Any] = {"mlp": ActorCritic, "nature": NatureCnn, "impala": ImpalaCnn, "lstm": Lstm}


@dataclass(frozen=True)
class Work:
    """What the contestants sample."""

    title: str
    make_env: Callable[[], gym.Env[Any, Any]]
    n_envs: int
    T: int
    policy: str = "random"
    n_workers: int = 2
    rows: int = 16  #: time steps between two looks at the clock, for contestants that need no whole batch

    @cached_property
    def _example(self) -> gym.Env[Any, Any]:
        return self.make_env()

    @property
    def observation_space(self) -> Any:
        """Of one environment."""
        return self._example.observation_space

    @property
    def action_space(self) -> Any:
        """Of one environment."""
        return self._example.action_space

    def make_model(self) -> Any:
        """The policy's network, or None for random actions."""
        return MODELS[self.policy](self.observation_space, self.action_space) if self.policy in MODELS else None

    def make_agent(self, **options: Any) -> Any:
        """penstock's agent."""
        if self.policy == "random":
            return penstock.RandomAgent()
        cls = penstock.RecurrentCategoricalPgAgent if self.policy == "lstm" else penstock.CategoricalPgAgent
        return cls(MODELS[self.policy], **options)

    def make_policy(self, n_envs: int) -> Callable[[Any, Any], tuple[Any, Any]]:
        """For observations `[n_envs, ...]` and `[n_envs]` flags of the episodes that have just ended: actions, and what
        is recorded beside them. With a network, all loops have penstock's agent, and so the same policy."""
        if self.policy == "random":
            table = np.random.default_rng(0).integers(0, int(self.action_space.n), (4096, n_envs))
            turn = iter(range(10**12))
            return lambda observation, ended: (table[next(turn) % 4096], None)
        agent = self.make_agent()
        agent.initialize(self.observation_space, self.action_space, seed=0)
        agent.seed_columns([np.random.default_rng(b) for b in range(n_envs)])
        agent.sample_mode(0)
        previous = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.float32)

        def act(observation: Any, ended: Any) -> tuple[Any, Any]:
            if agent.recurrent:
                for column in np.flatnonzero(ended).tolist():
                    agent.reset_one(column)
            return tuple(agent.step(observation, *previous))

        return act


WORKS = {
    "random": Work("CartPole, random actions", ENV, 32, 128),
    "mlp": Work("CartPole, MLP in the workers", ENV, 32, 128, "mlp"),
    "pixels": Work("84 x 84 x 4 bytes, random actions", PixelEnv, 16, 64),
    "sleeping": Work(
        "steps of 1 ms, 5 % of 10 ms", partial(SleepingEnv, 0.001, 0.010, 0.05), 16, 1024, n_workers=16, rows=8
    ),
    "central": Work("CartPole, MLP in one process", ENV, 32, 128, "mlp"),
    "short": Work("CartPole, MLP, T = 5", ENV, 32, 5, "mlp", rows=5),
    "nature": Work("84 x 84 x 4 bytes, Nature-CNN", PixelEnv, 16, 8, "nature", rows=8),
    "impala": Work("84 x 84 x 4 bytes, IMPALA-CNN", PixelEnv, 16, 2, "impala", rows=2),
    "lstm": Work("CartPole, LSTM of 64 units", ENV, 32, 32, "lstm"),
}


# ---- loops ---------------------------------------------------------------------------------------


class Loop:
    """A loop over a vector environment, as in training scripts. `step(action)` returns observation, reward, terminated
    and truncated."""

    def __init__(self, work: Work, step: Callable[[Any], Any], observation: Any, close: Callable[[], Any]) -> None:
        shape, space = (work.T, work.n_envs), work.observation_space
        self._work, self._step, self._observation, self.close, self._t = work, step, observation, close, 0
        self._observations = np.zeros((*shape, *space.shape), space.dtype)
        self._actions, self._dones = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        self._rewards, self._log_probs, self._values = (np.zeros(shape, np.float32) for _ in range(3))
        self._policy = work.make_policy(work.n_envs)

    def advance(self, rows: int | None = None) -> int:
        rows = rows or self._work.rows
        for _ in range(rows):
            t = self._t = (self._t + 1) % self._work.T
            self._observations[t] = self._observation
            action, info = self._policy(self._observation, self._dones[t - 1])
            self._actions[t] = action
            if info is not None:
                self._log_probs[t], self._values[t] = info.log_prob, info.value
            self._observation, self._rewards[t], terminated, truncated = self._step(action)
            np.logical_or(terminated, truncated, out=self._dones[t])
        return rows * self._work.n_envs


def bare_process(work: Work, n_envs: int, pipe: Any) -> None:
    """Step `n_envs` environments and record nothing. For each message (seconds, rows): step for that many seconds or
    rows, whichever ends first. Then reply with the steps and the seconds."""
    torch.set_num_threads(1)
    envs = [work.make_env() for _ in range(n_envs)]
    observation = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    policy, has_model, ended = work.make_policy(n_envs), work.policy != "random", np.zeros(n_envs, np.bool_)
    while True:
        (seconds, rows), steps = pipe.recv(), 0
        began = time.perf_counter()
        while steps < rows * n_envs and time.perf_counter() - began < seconds:
            for b, (env, action) in enumerate(zip(envs, policy(observation, ended)[0].tolist(), strict=True)):
                seen, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    seen, _ = env.reset()
                if has_model:
                    observation[b], ended[b] = seen, terminated or truncated
            steps += n_envs
        pipe.send((steps, time.perf_counter() - began))


class Bare:
    """Bare loops in `n` processes. "In step" is the speed of the slowest, times `n`."""

    def __init__(self, n: int, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._rows = work.T
        work.make_policy(1)  # imports what the processes need
        for columns in np.array_split(range(work.n_envs), n):
            here, there = context.Pipe()
            process = context.Process(target=bare_process, args=(work, len(columns), there), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)

    def turn(self, seconds: float) -> dict[str, float]:
        """Steps of all processes in `seconds`."""
        parts = self._run(seconds, float("inf"))
        slowest = min(steps / took for steps, took in parts) * len(parts)
        steps, rate = sum(steps for steps, _ in parts), sum(steps / took for steps, took in parts)
        return {"steps": steps, "rate": rate, "in_step": slowest}

    def advance(self) -> int:
        """As many steps as a batch has. No process begins the next batch before all have ended this one."""
        return sum(steps for steps, _ in self._run(float("inf"), self._rows))

    def _run(self, seconds: float, rows: float) -> list[tuple[int, float]]:
        for pipe in self._pipes:
            pipe.send((seconds, rows))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


# ---- penstock ------------------------------------------------------------------------------------


class Sampling:
    """One of penstock's samplers."""

    def __init__(
        self, name: str, work: Work, agent: dict[str, Any] | None = None, env: Any = None, **options: Any
    ) -> None:
        if "serve_envs" not in options and name not in ("SerialSampler", "AlternatingSampler"):
            options["n_workers"] = work.n_workers
        self._sampler = getattr(penstock, name)(env or work.make_env, batch_T=work.T, batch_B=work.n_envs, **options)
        self._sampler.initialize(work.make_agent(**agent or {}), seed=0, bootstrap_value=work.policy == "mlp")
        self.close, self._itr = self._sampler.shutdown, 0

    def advance(self) -> int:
        self._sampler.obtain_samples(self._itr)
        self._itr += 1
        return int(self._sampler.batch_T * self._sampler.batch_B)


def numpy_inference(work: Work) -> Sampling:
    if "inference" not in inspect.signature(penstock.CategoricalPgAgent).parameters:
        raise ImportError("this version of penstock has no inference='numpy'")
    return Sampling("ParallelSampler", work, {"inference": "numpy"})


def batched(work: Work) -> Sampling:
    return Sampling("ParallelSampler", work, env=BatchedCartPole, collector_cls=penstock.VectorEnvCollector)


def shm(work: Work) -> Loop:
    # The same mode as Gymnasium's contestants have.
    envs = ShmVectorEnv([work.make_env] * work.n_envs, n_workers=work.n_workers, autoreset_mode=AutoresetMode.SAME_STEP)
    return Loop(work, lambda action: envs.step(action)[:4], envs.reset(seed=0)[0], envs.close)


class SendRecv:
    """ShmVectorEnv, stepping the environments that are ready."""

    def __init__(self, work: Work) -> None:
        self._envs = ShmVectorEnv([work.make_env] * work.n_envs, n_workers=work.n_workers)
        self._envs.reset(seed=0)
        self._envs.send(np.zeros(work.n_envs, np.int64))
        shape, space = (work.T, work.n_envs), work.observation_space
        self._observations = np.zeros((*shape, *space.shape), space.dtype)
        self._rewards, self._t, self._T = np.zeros(shape, np.float32), np.zeros(work.n_envs, int), work.T
        self.close = self._envs.close

    def advance(self) -> int:
        steps = 0
        while steps < len(self._t):
            observation, reward, _, _, infos = self._envs.recv()
            ids = infos["env_id"]
            rows = self._t[ids] % self._T
            self._observations[rows, ids], self._rewards[rows, ids] = observation, reward
            self._t[ids] += 1
            steps += len(ids)
            self._envs.send(np.zeros(len(ids), np.int64), ids)
        return steps


# ---- peers ---------------------------------------------------------------------------------------


def gymnasium_env(make: Callable[..., Any], work: Work) -> Loop:
    envs = make([work.make_env] * work.n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    return Loop(work, lambda action: envs.step(action)[:4], envs.reset(seed=0)[0], envs.close)


def sb3(name: str, work: Work) -> Loop:
    from stable_baselines3.common import vec_env

    options = {"start_method": "fork"} if name == "SubprocVecEnv" else {}
    envs = getattr(vec_env, name)([work.make_env] * work.n_envs, **options)

    def step(action: Any) -> Any:
        observation, reward, done, _ = envs.step(action)
        return observation, reward, done, False

    return Loop(work, step, envs.reset(), envs.close)


def tianshou(name: str, work: Work) -> Loop:
    import tianshou.env

    envs = getattr(tianshou.env, name)([work.make_env] * work.n_envs)

    def step(action: Any) -> Any:
        observation, reward, terminated, truncated, _ = envs.step(action)
        if len(ended := np.flatnonzero(terminated | truncated)):  # it does not reset by itself
            observation[ended] = envs.reset(ended)[0]
        return observation, reward, terminated, truncated

    return Loop(work, step, envs.reset()[0], envs.close)


def envpool(work: Work) -> Loop:
    import envpool as library

    envs = library.make_gymnasium("CartPole-v1", num_envs=work.n_envs, seed=0)
    return Loop(work, lambda action: envs.step(action.astype(np.int32))[:4], envs.reset()[0], envs.close)


def pufferlib(work: Work) -> Loop:
    import pufferlib.emulation
    import pufferlib.vector

    creator = partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=work.make_env)
    envs = pufferlib.vector.make(
        creator, backend=pufferlib.vector.Multiprocessing, num_envs=work.n_envs, num_workers=work.n_workers
    )
    return Loop(work, lambda action: envs.step(action)[:4], envs.reset()[0], envs.close)


def torchrl_env(work: Work, n: int) -> Any:
    from torchrl.envs import GymWrapper, SerialEnv

    return SerialEnv(n, lambda: GymWrapper(work.make_env(), categorical_action_encoding=True))


class TorchRL:
    """TorchRL's collector with two processes, each with its share of the environments and a copy of the policy."""

    def __init__(self, work: Work) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl import collectors
        from torchrl.modules import ProbabilisticActor

        cls = getattr(collectors, "MultiSyncCollector", None) or collectors.MultiSyncDataCollector
        policy = None
        if (model := work.make_model()) is not None:
            policy = ProbabilisticActor(
                TensorDictModule(model, ["observation"], ["logits", "state_value"]),
                in_keys=["logits"],
                distribution_class=torch.distributions.Categorical,
                return_log_prob=True,
            )
        self._steps = work.T * work.n_envs
        make = partial(torchrl_env, work, work.n_envs // work.n_workers)
        self._collector = cls([make] * work.n_workers, policy, frames_per_batch=self._steps, total_frames=-1)
        self._batches, self.close = iter(self._collector), self._collector.shutdown

    def advance(self) -> int:
        return int(next(self._batches).numel())


# ---- who takes part --------------------------------------------------------------------------------

ONE, ALL = "bare loop, 1 process", "bare loops"  #: the contestants that others are compared with
CARTPOLE = ("random", "mlp", "central", "short")
LARGE = ("nature", "impala", "lstm")  #: larger policies
EVERY = tuple(WORKS)

#: The function that makes the contestant, and the works in which it takes part.
CONTESTANTS: dict[str, tuple[Callable[[Work], Any], Sequence[str]]] = {
    ONE: (partial(Bare, 1), EVERY),
    ALL: (lambda work: Bare(work.n_workers, work), EVERY),
    "penstock ParallelSampler": (partial(Sampling, "ParallelSampler"), tuple(n for n in EVERY if n != "central")),
    'penstock ParallelSampler, "numpy"': (numpy_inference, ("mlp", "short")),
    "penstock ParallelSampler, BatchedCartPole": (batched, ("random",)),
    "penstock SerialSampler": (partial(Sampling, "SerialSampler"), ("random", "mlp", "pixels", "short", *LARGE)),
    "penstock GpuSampler": (partial(Sampling, "GpuSampler"), ("central", *LARGE)),
    "penstock GpuSampler, serve_envs": (partial(Sampling, "GpuSampler", serve_envs="auto"), ("central", *LARGE)),
    "penstock AlternatingSampler": (partial(Sampling, "AlternatingSampler"), ("central",)),
    "penstock ShmVectorEnv": (shm, ("random", "pixels", "sleeping", "central")),
    "penstock ShmVectorEnv, send and recv": (SendRecv, ("sleeping",)),
    "Gymnasium SyncVectorEnv": (partial(gymnasium_env, SyncVectorEnv), EVERY),
    "Gymnasium AsyncVectorEnv": (partial(gymnasium_env, AsyncVectorEnv), ("random", "pixels", "sleeping", "central")),
    "SB3 DummyVecEnv": (partial(sb3, "DummyVecEnv"), ("random", "pixels", "central")),
    "SB3 SubprocVecEnv": (partial(sb3, "SubprocVecEnv"), ("random", "pixels", "sleeping", "central")),
    "TorchRL MultiSync": (TorchRL, ("random", "mlp", "pixels", "short")),
    "tianshou DummyVectorEnv": (partial(tianshou, "DummyVectorEnv"), ("random", "pixels")),
    "tianshou ShmemVectorEnv": (partial(tianshou, "ShmemVectorEnv"), ("random", "pixels", "sleeping", "central")),
    "EnvPool (its own CartPole in C++)": (envpool, ("random", "central")),
    "PufferLib": (pufferlib, ("random", "pixels", "sleeping", "central")),
    "rlpyt's loop": (RlpytLoop, ("random", "mlp", "pixels", "sleeping", "short")),
}


def contestants_of(work: str) -> list[str]:
    """The names of the contestants that take part."""
    return [name for name, (_, works) in CONTESTANTS.items() if work in works]
