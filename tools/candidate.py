"""One candidate of `tune` in its own process. If it raises, hangs or is slow, the others are not affected."""

from __future__ import annotations

import inspect
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import psutil
from gymnasium import spaces

from penstock.agents import Agent, RandomAgent
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.reports import in_one_line
from penstock.envs import EnvFn
from penstock.envs.factory import build_example_env, close_example_env, env_factories
from penstock.errors import ConfigError
from penstock.samplers.central import AlternatingSampler, GpuSampler
from penstock.samplers.parallel import ParallelSampler
from penstock.samplers.sampler import Sampler
from penstock.samplers.serial import SerialSampler
from penstock.workers.affinity import limit_threads
from penstock.workers.cpu_claims import NAMESPACE_VARIABLE
from penstock.workers.launcher import Launcher, StartMethod
from penstock.workers.marking import marked
from penstock.workers.supervisor import SupervisedProcess

SAMPLERS: dict[str, type[Sampler]] = {
    cls.__name__: cls for cls in (SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler)
}
_IMPORT_SECONDS = 120.0  # for the imports in a new process, on a busy machine
_CLOSE_SECONDS = 4.0
_END_SECONDS = 2.0  # workers notice within milliseconds that their main process was killed
_HIDDEN = 64

Policy = str | Callable[..., Agent]  #: "random", "mlp", or a function that makes an agent


@dataclass(frozen=True)
class Candidate:
    """A sampler and its arguments. `inference` is an argument of the agent; None leaves it at its default."""

    sampler: str
    batch_T: int
    batch_B: int
    n_workers: int | None = None
    serve_envs: str | None = None
    inference: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The sampler's arguments."""
        names = ("batch_T", "batch_B", "n_workers", "serve_envs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def code(self, env: str) -> str:
        """A line of Python that makes the sampler. `env` is the code of its first argument."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        agent = f"  # and the agent with inference={self.inference!r}" if self.inference else ""
        return f"sampler = {self.sampler}({env}, {arguments}){agent}"


@dataclass(frozen=True)
class Turn:
    """What a candidate did in one turn: steps per second, and CPU microseconds of all its processes per step."""

    steps_per_s: float
    cpu_us: float


@dataclass(frozen=True)
class Task:
    """What all candidates of one search have in common."""

    env_fn: EnvFn
    policy: Policy
    start_method: StartMethod

    def pickled(self) -> bytes:
        """For the trials' processes. Raises `ConfigError`."""
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"env_fn or policy cannot be pickled for the trials' processes: {in_one_line(error)}"
            ) from error


# ---- in the main process ---------------------------------------------------------------------------


class CandidateProcess:
    """The process of one candidate. After a failure, `failure` says why, and the process is gone."""

    def __init__(self, candidate: Candidate, task: bytes, launcher: Launcher) -> None:
        self.candidate = candidate
        self.failure: str | None = None
        self.takes_inference = False  #: whether the agent has the argument; known once the trial is ready
        ours, given = socket.socketpair()
        self._pipe, theirs = Connection(ours.detach()), InheritedFd(given.detach())
        try:
            name = f"the trial of {candidate.sampler}"
            self._process: SupervisedProcess | None = launcher.start(name, _main, theirs, candidate, task)
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def wait_until_loaded(self) -> None:
        """Wait for the imports. No code of the user runs before them."""
        self._receive("importing", _IMPORT_SECONDS, time.monotonic())

    def wait_until_ready(self, limit: float, since: float) -> None:
        """Wait until the sampler has collected its first batch, at most until `limit` seconds after `since`."""
        if (ready := self._receive("start and first batch", limit, since)) is not None:
            self.takes_inference = ready

    def turn(self, seconds: float, limit: float) -> Turn | None:
        """Let it collect batches for `seconds`. None if it fails, or if this takes more than `limit` seconds longer."""
        self._send(seconds)
        doing = f"a batch of {self.candidate.batch_T} time steps"
        turn: Turn | None = self._receive(doing, limit, time.monotonic() + seconds)
        return turn

    def _send(self, message: float | None) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            pass  # the process has died, which `_receive` notices

    def _receive(self, doing: str, limit: float, since: float) -> Any:
        """The next message. After a failure None: if no message comes until `limit` seconds after `since`, if the
        process has died, or if the message is a text, which says the failure. `doing` is for the error."""
        if self._process is None:
            return None
        try:
            if self._pipe.poll(max(0.0, since + limit - time.monotonic())):
                message = self._pipe.recv()
                if not isinstance(message, str):
                    return message
                self.failure = message
            else:
                self.failure = (
                    f"slow or hanging: {doing} took more than {limit:.3g} s (--limit, in Python limit, allows more)"
                )
        except (EOFError, OSError):
            self.failure = f"its process died ({doing})"
        self._kill()
        return None

    def ask_to_close(self) -> None:
        """Tell the process to end, and do not wait for it, so that several can end at the same time."""
        if self._process is not None:
            self._send(None)

    def close(self) -> None:
        """Wait for the end of the process, after `ask_to_close`. Kill it if it does not end. May be called twice."""
        if self._process is not None:
            self._process.join(_CLOSE_SECONDS)
            self._kill()

    def _kill(self) -> None:
        """Kill the process, and wait until its workers have noticed."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            others = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            others = []
        process.kill()
        process.join(_END_SECONDS)
        _, alive = psutil.wait_procs(others, timeout=_END_SECONDS)
        for other in alive:
            other.kill()
        self._pipe.close()
        process.close()


# ---- in the process of the trial -------------------------------------------------------------------


def _main(theirs: InheritedFd, candidate: Candidate, pickled: bytes) -> None:
    """Send a message when the imports are done, and another when the first batch is complete. Then, for each number of
    seconds that comes, collect batches for so long and send a `Turn`. After a failure, send a text that says it."""
    pipe = Connection(os.dup(theirs.fd))
    try:
        import torch  # noqa: F401 - samplers return its tensors

        limit_threads(1)
        pipe.send(True)
        _serve(pipe, candidate, pickled)
    except (EOFError, BrokenPipeError):
        pass  # the main process is gone
    except BaseException as error:  # SystemExit too: the main process must know
        pipe.send(in_one_line(error))


def _serve(pipe: Connection, candidate: Candidate, pickled: bytes) -> None:
    task = cloudpickle.loads(pickled)
    # Candidates take turns, so each may use all CPUs.
    os.environ[NAMESPACE_VARIABLE] = f"-trial-{os.getpid()}"
    make_agent = agent_maker(task.policy, task.env_fn)
    takes_inference = "inference" in inspect.signature(make_agent).parameters
    arguments = {"inference": candidate.inference} if candidate.inference else {}
    options = {"max_decorrelation_steps": 0, "start_method": task.start_method, **candidate.options}
    with SAMPLERS[candidate.sampler](task.env_fn, **options) as sampler:
        sampler.initialize(make_agent(**arguments), seed=0, bootstrap_value=task.policy != "random")
        sampler.obtain_samples(0)
        pipe.send(takes_inference)
        while (seconds := pipe.recv()) is not None:
            pipe.send(_take_turn(sampler, seconds))


def _take_turn(sampler: Sampler, seconds: float) -> Turn:
    """Collect batches for `seconds`, at least one."""
    pids = [os.getpid(), *sampler.worker_pids]
    steps, cpu, began = 0, _cpu_seconds(pids), time.perf_counter()
    while not steps or time.perf_counter() - began < seconds:
        sampler.obtain_samples(1)
        steps += sampler.batch_T * sampler.batch_B
    took = time.perf_counter() - began
    return Turn(steps / took, (_cpu_seconds(pids) - cpu) / steps * 1e6)


def _cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds of these processes so far."""
    try:
        # Linux's clock of another process: exact, where /proc counts in hundredths of a second.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
    except OSError:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


# ---- the policy ------------------------------------------------------------------------------------


def agent_maker(policy: Policy, env_fn: EnvFn) -> Callable[..., Agent]:
    """The function that makes the agent. Raises `ConfigError` if no agent fits the environment's spaces."""
    if policy == "random":
        return RandomAgent
    if callable(policy):
        return policy
    with marked:
        env = build_example_env(env_factories(env_fn, None, 1)[0])
    observation_space, action_space = env.observation_space, env.action_space
    close_example_env(env)
    from penstock.agents import CategoricalPgAgent, GaussianPgAgent

    is_discrete = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete)
    if not isinstance(observation_space, spaces.Box) or not (is_discrete or isinstance(action_space, spaces.Box)):
        raise ConfigError(
            'policy="mlp" needs Box observations, and Discrete, MultiDiscrete or Box actions; the environment has '
            f'{observation_space} and {action_space}: use policy="random", or a function that makes your agent'
        )
    return partial(CategoricalPgAgent if is_discrete else GaussianPgAgent, _mlp)


def _mlp(observation_space: spaces.Box, action_space: spaces.Box | spaces.Discrete | spaces.MultiDiscrete) -> Any:
    """A model with two hidden layers of 64 units. It returns the policy's outputs `[B, n]` and the value `[B]`."""
    import torch
    from torch import nn

    if isinstance(action_space, spaces.Box):
        n_outputs = math.prod(action_space.shape)
    else:
        n_outputs = int(np.sum(action_space.n if isinstance(action_space, spaces.Discrete) else action_space.nvec))
    is_flat = len(observation_space.shape) == 1 and np.issubdtype(observation_space.dtype, np.floating)

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n_inputs = math.prod(observation_space.shape)
            hidden = nn.Linear(n_inputs, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh()
            self.body = nn.Sequential(*hidden)
            self.policy, self.value = nn.Linear(_HIDDEN, n_outputs), nn.Linear(_HIDDEN, 1)

        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            features = self.body(observation if is_flat else observation.flatten(1).float())
            return self.policy(features), self.value(features).squeeze(-1)

    return MLP()
