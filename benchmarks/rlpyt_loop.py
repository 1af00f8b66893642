"""How rlpyt samples, written from its description: a contestant of `peers.py`. It contains no code of rlpyt.

Each worker has a copy of the agent and some of the environments. Between two barriers it steps them one after the
other, and writes each value into its slice of the shared arrays `[T, B]`. Finished trajectories go through a queue.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import queue
from typing import Any

import gymnasium as gym
import numpy as np
import torch

_SECONDS = 60  # a barrier breaks if a process has not arrived by then


def shared_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros in memory that forks share."""
    memory = mmap.mmap(-1, max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
    return np.ndarray(shape, dtype, memory)


class Trajectory:
    """Length and return of an episode."""

    def __init__(self) -> None:
        self.length, self.total, self.nonzero = 0, 0.0, 0

    def step(self, reward: float) -> None:
        self.length += 1
        self.total += reward
        self.nonzero += reward != 0


class Worker:
    """Runs in its own process: the environments of the columns `columns`, and a copy of the agent."""

    def __init__(self, work: Any, arrays: dict[str, Any], columns: slice) -> None:
        torch.set_num_threads(1)
        self.T, self.arrays = work.T, {name: array[:, columns] for name, array in arrays.items()}
        self.envs: list[gym.Env[Any, Any]] = [work.make_env() for _ in range(columns.stop - columns.start)]
        self.observation = np.stack([env.reset(seed=columns.start + i)[0] for i, env in enumerate(self.envs)])
        self.action = np.zeros(len(self.envs), np.int64)
        self.reward = np.zeros(len(self.envs), np.float32)
        self.trajectories = [Trajectory() for _ in self.envs]
        self.model = work.make_model()
        self.rng, self.n_actions = np.random.default_rng(columns.start), int(work.action_space.n)

    def act(self, t: int) -> Any:
        """Actions for row `t`."""
        if self.model is None:
            return self.rng.integers(0, self.n_actions, len(self.envs))
        with torch.no_grad():
            logits, value = self.model(torch.from_numpy(self.observation))
            probability = torch.softmax(logits, -1)
            action = torch.multinomial(probability, 1).squeeze(-1)
        self.arrays["probability"][t] = probability.numpy()
        self.arrays["value"][t] = value.numpy()
        return action.numpy()

    def collect(self) -> list[Trajectory]:
        """One batch; returns the trajectories that have finished."""
        finished, arrays = [], self.arrays
        for t in range(self.T):
            arrays["observation"][t] = self.observation
            arrays["prev_action"][t], arrays["prev_reward"][t] = self.action, self.reward
            self.action = self.act(t)
            for b, env in enumerate(self.envs):
                seen, reward, terminated, truncated, _ = env.step(self.action[b])
                done = terminated or truncated
                self.trajectories[b].step(float(reward))
                if done:
                    finished.append(self.trajectories[b])
                    self.trajectories[b] = Trajectory()
                    seen, _ = env.reset()
                self.observation[b] = seen
                self.reward[b] = reward
                arrays["done"][t, b] = done
            arrays["action"][t], arrays["reward"][t] = self.action, self.reward
        return finished


def run_worker(work: Any, arrays: dict[str, Any], columns: slice, gates: Any, quit_flag: Any, results: Any) -> None:
    """Collect a batch between the two barriers until `quit_flag` is set."""
    worker = Worker(work, arrays, columns)
    barrier_in, barrier_out = gates
    while True:
        barrier_in.wait()
        if quit_flag.value:
            break
        for trajectory in worker.collect():
            results.put(trajectory)
        barrier_out.wait()


class RlpytLoop:
    """The main process's part."""

    def __init__(self, work: Any) -> None:
        shape, space = (work.T, work.n_envs), work.observation_space
        arrays = {
            "observation": shared_array((*shape, *space.shape), space.dtype),
            **{name: shared_array(shape, np.int64) for name in ("action", "prev_action")},
            **{name: shared_array(shape, np.float32) for name in ("reward", "prev_reward", "value")},
            "done": shared_array(shape, np.bool_),
            "probability": shared_array((*shape, int(work.action_space.n)), np.float32),
        }
        context = multiprocessing.get_context("fork")
        n = work.n_workers
        self._gates = context.Barrier(n + 1, timeout=_SECONDS), context.Barrier(n + 1, timeout=_SECONDS)
        self._quit, self._results = context.RawValue("b", 0), context.Queue()
        self._steps = work.T * work.n_envs
        edges = np.linspace(0, work.n_envs, n + 1).astype(int).tolist()
        self._processes = [
            context.Process(
                target=run_worker,
                args=(work, arrays, slice(a, b), self._gates, self._quit, self._results),
                daemon=True,
            )
            for a, b in itertools.pairwise(edges)
        ]
        for process in self._processes:
            process.start()

    def advance(self) -> int:
        """Collect one batch; returns its environment steps."""
        for gate in self._gates:
            gate.wait()
        finished = []
        while True:
            try:
                finished.append(self._results.get_nowait())
            except queue.Empty:
                return self._steps

    def close(self) -> None:
        """End the workers."""
        self._quit.value = 1
        self._gates[0].wait()
        for process in self._processes:
            process.join(_SECONDS)
