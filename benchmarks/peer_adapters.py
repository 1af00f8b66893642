"""The contestants of `peers.py`, one function each: other libraries, penstock, and bare loops.

A contestant has `advance()`, which makes some environment steps and returns their number, and `close()`. A bare loop
has `turn(seconds)` too. All record the same fields as `[T, B]`, except the bare loops, which record nothing.
"""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from environments import PixelEnv, SleepingEnv, pong
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
    "uneven": Work(
        "steps of 1 ms, 5 % of 10 ms, MLP in one process",
        partial(SleepingEnv, 0.001, 0.010, 0.05),
        16,
        256,
        "mlp",
        n_workers=16,
        rows=8,
    ),
    "pong": Work("Pong, random actions", pong, 16, 32, rows=4),
    "nature": Work("84 x 84 x 4 bytes, Nature-CNN", PixelEnv, 16, 8, "nature", rows=8),
    "impala": Work("84 x 84 x 4 bytes, IMPALA-CNN", PixelEnv, 16, 2, "impala", rows=2),
    "lstm": Work("CartPole, LSTM of 64 units", ENV, 32, 32, "lstm"),
}


# ---- loops ---------------------------------------------------------------------------------------


class Loop:
    """A loop over a vector environment, as in training scripts. `step(action)` returns observation, reward, terminated
    and truncated."""

    def __init__(
        self, work: Work, step: Callable[..., Any], observation: Any, close: Callable[[], Any], n: int | None = None
    ) -> None:
        shape, space = (work.T, work.n_envs), work.observation_space
        self._work, self._step, self._observation, self.close, self._t = work, step, observation, close, 0
        self.observations = np.zeros((*shape, *space.shape), space.dtype)
        self._actions, self._dones = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        self._rewards, self.log_probs, self._values = (np.zeros(shape, np.float32) for _ in range(3))
        self._policy = work.make_policy(n or work.n_envs)  # acts for n environments in one call

    def advance(self, rows: int | None = None) -> int:
        rows = rows or self._work.rows
        for _ in range(rows):
            t = self._t = (self._t + 1) % self._work.T
            self.observations[t] = self._observation
            action, info = self._policy(self._observation, self._dones[t - 1])
            self._actions[t] = action
            if info is not None:
                self.log_probs[t], self._values[t] = info.log_prob, info.value
            self._observation, self._rewards[t], terminated, truncated = self._step(action)
            np.logical_or(terminated, truncated, out=self._dones[t])
        return rows * self._work.n_envs


class SendRecv(Loop):
    """Steps the environments that are ready, at most `n`: `recv()` returns what their vector environment returns, with
    their indices as `infos["env_id"]`, and `send(action, indices)` steps them."""

    def __init__(
        self, work: Work, send: Callable[..., Any], recv: Callable[[], Any], close: Callable[[], Any], n: int
    ) -> None:
        super().__init__(work, send, None, close, n)
        self._recv, self.times = recv, np.zeros(work.n_envs, int)

    def advance(self, rows: int | None = None) -> int:
        steps = 0
        while steps < len(self.times):
            observation, reward, terminated, truncated, infos = self._recv()
            ids = infos["env_id"]
            cells = self.times[ids] % self._work.T, ids
            done = np.logical_or(terminated, truncated)
            action, info = self._policy(observation, done)
            action = action[: len(ids)]
            self.observations[cells], self._rewards[cells], self._dones[cells] = observation, reward, done
            self._actions[cells] = action
            if info is not None:
                self.log_probs[cells], self._values[cells] = info.log_prob, info.value
            self._step(action, ids)
            self.times[ids] += 1
            steps += len(ids)
        return steps


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
        if name not in ("SerialSampler", "AlternatingSampler"):
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


def batched(env: Any, work: Work) -> Sampling:
    return Sampling("ParallelSampler", work, env=env, batched=True)


def atari_vector_env(num_envs: int = 1, batch_size: int = 0, num_threads: int = 1) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs, batch_size=batch_size, num_threads=num_threads, autoreset_mode="SameStep")


def shm(work: Work) -> Loop:
    # The same mode as Gymnasium's contestants have.
    envs = ShmVectorEnv([work.make_env] * work.n_envs, n_workers=work.n_workers, autoreset_mode=AutoresetMode.SAME_STEP)
    return Loop(work, lambda action: envs.step(action)[:4], envs.reset(seed=0)[0], envs.close)


def shm_send_recv(work: Work) -> SendRecv:
    envs = ShmVectorEnv([work.make_env] * work.n_envs, n_workers=work.n_workers)
    envs.reset(seed=0)
    envs.send(np.zeros(work.n_envs, np.int64))
    return SendRecv(work, envs.send, envs.recv, envs.close, work.n_envs)


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


def envpool(task: str, work: Work, *, is_async: bool = False) -> Loop:
    import envpool as library

    if not is_async:
        envs = library.make_gymnasium(task, num_envs=work.n_envs, seed=0)
        return Loop(work, lambda action: envs.step(action.astype(np.int32))[:4], envs.reset()[0], envs.close)
    n = work.n_envs // 2  # of the environments at a time
    envs = library.make_gymnasium(task, num_envs=work.n_envs, batch_size=n, num_threads=work.n_workers, seed=0)
    envs.async_reset()
    return SendRecv(work, lambda action, ids: envs.send(action.astype(np.int32), ids), envs.recv, envs.close, n)


def ale(work: Work, *, is_async: bool = False) -> Loop:
    n = work.n_envs // 2 if is_async else work.n_envs
    envs = atari_vector_env(work.n_envs, batch_size=n, num_threads=work.n_workers)
    observation, _ = envs.reset(seed=0)
    if not is_async:
        return Loop(work, lambda action: envs.step(action)[:4], observation, envs.close)
    envs.send(np.zeros(n, np.int64))
    return SendRecv(work, lambda action, _: envs.send(action), envs.recv, envs.close, n)


def pufferlib(work: Work) -> Loop:
    import pufferlib.emulation
    import pufferlib.vector

    creator = partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=work.make_env)
    sizes = {"num_envs": work.n_envs, "num_workers": work.n_workers}
    # overwork: otherwise it refuses more workers than physical cores
    envs = pufferlib.vector.make(creator, backend=pufferlib.vector.Multiprocessing, overwork=True, **sizes)
    return Loop(work, lambda action: envs.step(action)[:4], envs.reset()[0], envs.close)


class TorchRL:
    """One of TorchRL's collectors."""

    def __init__(self, collector: Any) -> None:
        self._collector, self._batches = collector, iter(collector)

    def advance(self) -> int:
        return int(next(self._batches).numel())

    def close(self) -> None:
        self._collector.shutdown()
        self._batches.close()  # now: at the end of the interpreter it raises


def torchrl_env(work: Work) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(work.make_env(), categorical_action_encoding=True)


def torchrl_policy(work: Work) -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor

    if (model := work.make_model()) is None:
        return None
    return ProbabilisticActor(
        TensorDictModule(model, ["observation"], ["logits", "state_value"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def torchrl_multi(name: str, work: Work) -> TorchRL:
    """Each process has its share of the environments and a copy of the policy. An asynchronous collector returns the
    batch of the process that is the first to have one."""
    multiprocessing.set_start_method("fork")  # by default, each process imports torch: 16 take a minute
    from torchrl import collectors
    from torchrl.envs import SerialEnv

    n = work.n_workers
    make = partial(SerialEnv, work.n_envs // n, partial(torchrl_env, work))
    steps = work.T * work.n_envs // (n if "Async" in name else 1)
    cls = getattr(collectors, name)
    return TorchRL(cls([make] * n, torchrl_policy(work), frames_per_batch=steps, total_frames=-1))


def torchrl_batched(work: Work, *, is_process: bool = False) -> TorchRL:
    """A server acts for half of the environments as soon as they are ready, and for fewer after 1 ms. The
    server is a thread, and two processes step the environments. With `is_process`, the server is a process, and so is
    each environment."""
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.modules.inference_server import ProcessSlotTransport

    options: dict[str, Any] = {"frames_per_batch": work.rows * work.n_envs, "max_batch_size": work.n_envs}
    options |= {"min_batch_size": work.n_envs // 2, "server_timeout": 0.001}
    make, policy = partial(torchrl_env, work), torchrl_policy(work)
    if is_process:
        request = make().fake_tensordict().select(*policy.in_keys)
        with torch.no_grad():
            reply = policy(request.clone()).select(*policy.out_keys)
        reply["policy_version"] = torch.zeros((), dtype=torch.long)
        fork = multiprocessing.get_context("fork")
        options["transport"] = ProcessSlotTransport(request, reply, num_slots=work.n_envs, ctx=fork)
        options["policy_factory"] = partial(torchrl_policy, work)
    else:
        options |= {"policy": policy, "transport": "driver", "env_backend": "multiprocessing"}
        options |= {"env_exchange": "shm", "envs_per_worker": work.n_envs // 2}
    return TorchRL(AsyncBatchedCollector([make] * work.n_envs, **options))


class SampleFactory:
    """Sample Factory's sampler in the virtual environment that `make peers` makes for it."""

    def __init__(self, work: Work) -> None:
        what = pickle.dumps(work.make_env).hex(), work.n_workers, work.n_envs // work.n_workers, work.T
        python, script = (
            Path(sys.prefix, "sample-factory/bin/python"),
            Path(__file__).with_name("sample_factory_loop.py"),
        )
        command = [str(part) for part in (python, script, *what)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def advance(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("its process ended")
        return int(line)

    def close(self) -> None:
        self._process.communicate(timeout=60)


# ---- who takes part --------------------------------------------------------------------------------

ONE, ALL = "bare loop, 1 process", "bare loops"  #: the contestants that others are compared with
LARGE = ("nature", "impala", "lstm")  #: larger policies
EVERY = tuple(WORKS)

SERVED = ("central", "uneven")  #: one process acts for all environments
PROCESSES = ("random", "pixels", "sleeping", "pong", *SERVED)  #: for vector environments

#: The function that makes the contestant, and the works in which it takes part.
CONTESTANTS: dict[str, tuple[Callable[[Work], Any], Sequence[str]]] = {
    ONE: (partial(Bare, 1), EVERY),
    ALL: (lambda work: Bare(work.n_workers, work), EVERY),
    "penstock ParallelSampler": (partial(Sampling, "ParallelSampler"), tuple(n for n in EVERY if n not in SERVED)),
    'penstock ParallelSampler, "numpy"': (numpy_inference, ("mlp", "short")),
    "penstock ParallelSampler, BatchedCartPole": (partial(batched, BatchedCartPole), ("random",)),
    "penstock ParallelSampler, AtariVectorEnv": (partial(batched, atari_vector_env), ("pong",)),
    "penstock SerialSampler": (
        partial(Sampling, "SerialSampler"),
        ("random", "mlp", "pixels", "short", "pong", *LARGE),
    ),
    "penstock GpuSampler": (partial(Sampling, "GpuSampler"), (*SERVED, *LARGE)),
    "penstock GpuSampler, min_ready=1": (partial(Sampling, "GpuSampler", min_ready=1), ("uneven",)),
    "penstock AlternatingSampler": (partial(Sampling, "AlternatingSampler"), ("central",)),
    "penstock ShmVectorEnv": (shm, PROCESSES),
    "penstock ShmVectorEnv, send and recv": (shm_send_recv, ("sleeping",)),
    "Gymnasium SyncVectorEnv": (partial(gymnasium_env, SyncVectorEnv), EVERY),
    "Gymnasium AsyncVectorEnv": (partial(gymnasium_env, AsyncVectorEnv), PROCESSES),
    "SB3 DummyVecEnv": (partial(sb3, "DummyVecEnv"), ("random", "pixels", "central")),
    "SB3 SubprocVecEnv": (partial(sb3, "SubprocVecEnv"), PROCESSES),
    "TorchRL MultiSync": (partial(torchrl_multi, "MultiSyncCollector"), ("random", "mlp", "pixels", "short", "pong")),
    "TorchRL MultiAsync": (
        partial(torchrl_multi, "MultiAsyncCollector"),
        ("random", "mlp", "pixels", "sleeping", "short", "pong"),
    ),
    "TorchRL AsyncBatched": (torchrl_batched, SERVED),
    "TorchRL AsyncBatched, server process": (partial(torchrl_batched, is_process=True), SERVED),
    "tianshou DummyVectorEnv": (partial(tianshou, "DummyVectorEnv"), ("random", "pixels")),
    "tianshou ShmemVectorEnv": (partial(tianshou, "ShmemVectorEnv"), PROCESSES),
    "EnvPool (its own CartPole in C++)": (partial(envpool, "CartPole-v1"), ("random", "central")),
    "EnvPool, send and recv (its own CartPole)": (
        partial(envpool, "CartPole-v1", is_async=True),
        ("random", "central"),
    ),
    "EnvPool (its own Pong)": (partial(envpool, "Pong-v5"), ("pong",)),
    "EnvPool, send and recv (its own Pong)": (partial(envpool, "Pong-v5", is_async=True), ("pong",)),
    "ALE AtariVectorEnv": (ale, ("pong",)),
    "ALE AtariVectorEnv, send and recv": (partial(ale, is_async=True), ("pong",)),
    "Sample Factory": (SampleFactory, SERVED),
    "PufferLib": (pufferlib, PROCESSES),
    "a loop in rlpyt's style": (RlpytLoop, ("random", "mlp", "pixels", "sleeping", "short", "pong")),
}


def contestants_of(work: str) -> list[str]:
    """The names of the contestants that take part."""
    return [name for name, (_, works) in CONTESTANTS.items() if work in works]
