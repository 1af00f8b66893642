"""An experiment of actors, policy workers and a trainer: what it consists of, and its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.agents import Agent
from penstock.arguments import integer, seconds
from penstock.control.actor_worker import ActorWorker
from penstock.control.metric_sinks import JsonLines, MetricsSink, RunState
from penstock.control.panel import ControlPanel
from penstock.control.policy_worker import AgentPlan, PolicyWorker
from penstock.control.statuses import Status
from penstock.control.streams import Routing
from penstock.control.trainer_worker import Trainer, TrainerWorker
from penstock.control.trial_wires import WireName
from penstock.control.worker import Worker
from penstock.envs import fresh_seed
from penstock.envs.factory import build_example_env, close_example_env, env_factories
from penstock.errors import ClusterError, ConfigError
from penstock.samplers import AsyncSampler, Sampler
from penstock.workers.marking import marked

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_SECONDS = 0.25  # how often `wait` asks the workers for their figures
_WRITE_SECONDS = 1.0  # between two writes of the figures
_START_SECONDS = 120.0  # how long a worker may take to start
_FAILED = (Status.ERROR.value, Status.LOST.value)


@dataclass(frozen=True)
class Actors:
    """`count` actors, each with a sampler that `make_sampler` returns, for example
    `partial(AlternatingSampler, "CartPole-v1", batch_T=64, batch_B=16)`.

    With `inference`, the name of a stream of policy workers, these act for the actors. Otherwise each actor acts
    itself, with the newest parameters. `samples` is the name of the stream for the samples; `SampleProducer` explains
    `routing`. `resources` is what Ray reserves for each, such as `{"CPU": 2}`.
    """

    count: int
    make_sampler: Callable[[], Sampler]
    inference: str | None = None
    samples: str = "train"
    routing: Routing = "any"
    bootstrap_value: bool = True
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Policies:
    """`count` policy workers; `PolicyWorker` explains the other arguments. `resources` is what Ray reserves for each,
    such as `{"GPU": 0.5}`."""

    count: int
    stream: str = "policy"
    max_batch: int = 256
    max_delay: float = 0.0
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Training:
    """One trainer worker; `TrainerWorker` explains the arguments. `stream` is the name of the stream of samples.
    `resources` is what Ray reserves for it, such as `{"GPU": 1}`."""

    make_trainer: Callable[[Agent], Trainer]
    stream: str = "train"
    batch: int = 1
    max_staleness: int | None = None
    checkpoint: str | Path | None = None
    save_every: int = 10
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Experiment:
    """What an experiment consists of.

    Args:
        name: of the experiment.
        make_agent: returns an agent that is not initialized. All workers call it, and initialize with the same seed.
        actors, policies, training: the workers. Without `policies`, the actors act themselves.
        seed: fixes the first parameters and all random streams; None takes a new seed.
    """

    name: str
    make_agent: Callable[[], Agent]
    actors: Actors
    training: Training
    policies: Policies | None = None
    seed: int | None = None

    def run(self, trial: str = "trial0", *, wire: WireName = "local", max_restarts: int = 3, **panel: Any) -> Run:
        """Start all workers, and return the run. Use it in a `with` statement.

        Args:
            trial: name of this run.
            wire: "local": workers are threads of this process; "zmq": they are processes; "ray": they are Ray actors,
                on the machines of the cluster that this process has joined, or of one that is started here.
            max_restarts: how often each worker may be started again after it has failed.
            panel: more arguments of `ControlPanel`, such as `file` and `host`.

        Raises `ConfigError` if the parts do not fit together, and a `ClusterError` if a worker cannot start.
        """
        self._check_arguments(max_restarts)
        if self.policies is not None and self.policies.stream != self.actors.inference:
            raise ConfigError(
                f"the policies serve the stream {self.policies.stream!r}, the actors ask {self.actors.inference!r}: "
                "give Policies(stream=...) and Actors(inference=...) the same name"
            )
        if self.policies is None and self.actors.inference is not None:
            raise ConfigError(
                f"there are no policies for the inference stream {self.actors.inference!r}: give "
                "policies=Policies(...), or leave inference out"
            )
        if self.actors.samples != self.training.stream:
            raise ConfigError(
                f"actors fill {self.actors.samples!r}, the trainer reads {self.training.stream!r}: give "
                "Actors(samples=...) and Training(stream=...) the same name"
            )
        makers = self._makers(self._plan())
        resources = {"actor": self.actors.resources, "trainer": self.training.resources}
        resources["policy"] = self.policies.resources if self.policies is not None else None
        return Run(ControlPanel(self.name, trial, wire=wire, **panel), makers, max_restarts, resources)

    def _check_arguments(self, max_restarts: int) -> None:
        actors, training, policies = self.actors, self.training, self.policies
        for name, function in (
            ("make_agent", self.make_agent),
            ("make_sampler", actors.make_sampler),
            ("make_trainer", training.make_trainer),
        ):
            if not callable(function):
                raise ConfigError(f"{name} must be a class or a function, got {function!r}")
        integer("the number of actors", actors.count, 1)
        integer("batch of Training", training.batch, 1)
        integer("save_every", training.save_every, 1)
        integer("max_restarts", max_restarts, 0)
        if training.max_staleness is not None:
            integer("max_staleness", training.max_staleness, 0)
        if self.seed is not None:
            integer("seed", self.seed, 0)
        if policies is not None:
            integer("the number of policies", policies.count, 1)
            integer("max_batch", policies.max_batch, 1)
            if seconds("max_delay", policies.max_delay, zero=True) == float("inf"):
                raise ConfigError("max_delay must be finite, got inf: a policy worker would wait for a full batch")

    def _plan(self) -> AgentPlan:
        """How all workers make the agent. It has the spaces of an example environment."""
        sampler = self.actors.make_sampler()
        if isinstance(sampler, AsyncSampler):
            raise ConfigError(
                "make_sampler returned an AsyncSampler, which samples all the time. An actor obtains one batch after "
                "another: use ParallelSampler or another sampler"
            )
        config = sampler.config
        batched = config.collector_cls.batched
        factory = env_factories(config.env_fn, config.env_kwargs, config.batch_B)[0].as_example(config.spaces)
        with marked:
            env = build_example_env(factory, batched=config.example_size)
        try:
            prefix = "single_" if batched else ""
            spaces = [getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action")]
        finally:
            close_example_env(env)
            sampler.shutdown()
        seed = fresh_seed() if self.seed is None else self.seed
        return AgentPlan(self.make_agent, spaces[0], spaces[1], seed, sampler.batch_B * self.actors.count)

    def _makers(self, plan: AgentPlan) -> dict[str, Callable[[int], Worker]]:
        """Functions that make the workers, by name, in the order in which the workers start. Their argument is the
        number of restarts of this worker."""
        training, policies, actors = self.training, self.policies, self.actors
        checkpoint = training.checkpoint and Path(training.checkpoint).absolute()  # it may work in another folder
        makers: dict[str, Callable[[int], Worker]] = {}
        options: dict[str, Any] = {
            "samples": training.stream,
            "batch": training.batch,
            "max_staleness": training.max_staleness,
            "checkpoint": checkpoint,
            "save_every": training.save_every,
        }
        makers["trainer/0"] = partial(_make, TrainerWorker, (training.make_trainer, plan), options)
        if policies is not None:
            options = {"stream": policies.stream, "max_batch": policies.max_batch, "max_delay": policies.max_delay}
            for i in range(policies.count):
                makers[f"policy/{i}"] = partial(_make, PolicyWorker, (plan,), options)
        for i in range(actors.count):
            options = {"rank": i, "world_size": actors.count, "bootstrap_value": actors.bootstrap_value}
            options |= {"inference": actors.inference, "samples": actors.samples, "routing": actors.routing}
            makers[f"actor/{i}"] = partial(_make, ActorWorker, (actors.make_sampler, plan), options)
        return makers


def _make(cls: type[Worker], args: tuple[Any, ...], options: dict[str, Any], n_restarts: int) -> Worker:
    if cls is ActorWorker:  # each generation of an actor has other random streams
        options = {**options, "generation": n_restarts}
    return cls(*args, **options)


class Run:
    """A running experiment. `panel` commands its workers.

    If a worker fails, `wait` starts it again: a policy worker gets the newest parameters, a trainer continues from its
    checkpoint, and an actor begins new trajectories.

    Args:
        panel: the run closes it.
        makers: functions that make the workers, by name. Their argument is the number of restarts of this worker.
        max_restarts: for each worker.
        resources: what Ray reserves for a worker, by the first part of its name.
    """

    def __init__(
        self,
        panel: ControlPanel,
        makers: Mapping[str, Callable[[int], Worker]],
        max_restarts: int,
        resources: Mapping[str, Mapping[str, float] | None],
    ) -> None:
        self.panel, self._makers, self._max_restarts, self._resources = panel, makers, max_restarts, resources
        #: How often each worker was started again.
        self.restarts = dict.fromkeys(makers, 0)
        self._began = time.monotonic()
        try:
            for name in makers:
                self._launch(name)
            for name in makers:  # in this order, because an actor needs its policy worker, which needs the trainer
                self._start(name)
        except BaseException:
            panel.close()
            raise

    def state(self) -> RunState:
        """The run now."""
        workers = self.panel.stats(list(self._makers), timeout=5.0)
        version = int(workers["trainer/0"].get("version", 0))
        return RunState(version, time.monotonic() - self._began, workers)

    def wait(
        self,
        until: Callable[[RunState], bool],
        *,
        timeout: float = float("inf"),
        metrics: str | Path | MetricsSink | Sequence[MetricsSink] = (),
    ) -> RunState:
        """Watch the workers until `until(state)` is True, or for `timeout` seconds. Returns the last state.

        Args:
            until: called four times a second.
            metrics: where the figures of all workers go, once a second and at the end: a file of JSON lines, or
                `JsonLines`, `TensorBoard`, `Prometheus`, or several of these.

        Raises `ClusterError` if a worker has failed more often than `max_restarts`.
        """
        deadline, write_at = time.monotonic() + timeout, 0.0
        sinks = _sinks(metrics)
        while True:
            state = self.state()
            is_last = until(state) or time.monotonic() >= deadline
            if is_last or time.monotonic() >= write_at:
                write_at = time.monotonic() + _WRITE_SECONDS
                for sink in sinks:
                    sink.write(state)
            if is_last:
                return state
            for name, figures in state.workers.items():
                if figures["status"] in _FAILED:
                    self._restart(name, figures)
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End all workers. Calling it again does nothing."""
        self.panel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _launch(self, name: str) -> None:
        base, _, index = name.partition("/")
        make, resources = partial(self._makers[name], self.restarts[name]), self._resources[base]
        self.panel.launch(make, name=base, first=int(index), resources=resources)

    def _restart(self, name: str, figures: Mapping[str, Any]) -> None:
        if self.restarts[name] >= self._max_restarts:
            reason = f"{figures['status']}: {figures.get('text') or 'it has ended without a report: see its log'}"
            raise ClusterError(
                f"worker {name} has failed {self.restarts[name] + 1} times, with max_restarts={self._max_restarts}. "
                f"The last time: {reason}"
            )
        self.restarts[name] += 1
        self.panel.discard(name)
        self._launch(name)
        self._start(name)

    def _start(self, name: str) -> None:
        self.panel.connect([name], timeout=_START_SECONDS)
        self.panel.request(name, "configure", timeout=_START_SECONDS)
        self.panel.request(name, "start")


def _sinks(metrics: str | Path | MetricsSink | Sequence[MetricsSink]) -> list[MetricsSink]:
    if isinstance(metrics, str | Path):
        return [JsonLines(metrics)]
    return [metrics] if isinstance(metrics, MetricsSink) else list(metrics)
