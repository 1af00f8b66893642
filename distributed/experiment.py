"""An experiment of actors, policy workers and a trainer: what it consists of, and its run."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from penstock.agents import Agent
from penstock.arguments import integer, must_be, one_of, seconds, true_or_false
from penstock.distributed.actor_worker import Actors, ActorWorker
from penstock.distributed.closing import Closing
from penstock.distributed.keys import Connection
from penstock.distributed.launched import LaunchedProcess
from penstock.distributed.names import NameClient
from penstock.distributed.panel import WHERE_ITS_LOG_IS, ControlPanel, WireName
from penstock.distributed.parameters import layout_of, read_parameters
from penstock.distributed.policy_worker import AgentPlan, Policies, PolicyWorker
from penstock.distributed.role import Worker
from penstock.distributed.run_state import RunState, to_file
from penstock.distributed.statuses import Status
from penstock.distributed.trainer_worker import TrainerWorker, Training
from penstock.envs import fresh_seed
from penstock.envs.factory import build_example_env, close_example_env, env_factories
from penstock.envs.seats import ParallelView, view_of
from penstock.errors import ClusterError, ConfigError, PeerLostError
from penstock.samplers import AsyncSampler
from penstock.samplers.allocation import prepared_factories
from penstock.samplers.config import SamplerConfig
from penstock.samplers.seating import find_seating
from penstock.workers.marking import marked

_log = logging.getLogger("penstock")

_POLL_SECONDS = 0.25  # how often `wait` asks the workers for their figures
_STEP_SECONDS = 0.05  # between two looks at workers that start
_WRITE_SECONDS = 1.0  # between two writes of the figures
_START_SECONDS = 120.0  # how long a worker may take to be reached, and to be configured
_END_SECONDS = 2.0  # how long one that has failed may take to end by itself
_LONGEST_PAUSE = 30.0  # before a restart
_SOUND_SECONDS = 60.0  # a worker that has worked for so long does not fail in a row
_FAILED = (Status.ERROR.value, Status.LOST.value)
_KINDS = ("trainer", "policy", "actor")  # each needs those before it
_FACTS = "experiment"  # the name of what those that join must know


@dataclass(frozen=True)
class Experiment:
    """What an experiment consists of.

    Args:
        name: of the experiment.
        make_agent: returns an agent that is not initialized, or for environments of several agents a dict of agents
            (see `Actors.policy_of`). All workers call it, and initialize with the same seed.
        actors, policies, training: the workers. Without `policies`, the actors act themselves.
        seed: fixes the first parameters and all random streams; None takes a new seed.
    """

    name: str
    make_agent: Callable[[], Agent | Mapping[str, Agent]]
    actors: Actors
    training: Training
    policies: Policies | None = None
    seed: int | None = None

    def run(
        self,
        trial: str = "trial0",
        *,
        wire: WireName = "local",
        max_restarts: int = 3,
        hang_timeout: float = 60.0,
        close_timeout: float = 300.0,
        **panel: Any,
    ) -> RunningExperiment:
        """Start all workers, and return the run. Use it in a `with` statement.

        Args:
            trial: name of this run.
            wire: "local": workers are threads of this process; "zmq": they are processes; "ray": they are Ray actors,
                on the machines of the cluster that this process has joined, or of one that is started here.
            max_restarts: a worker that fails is started again. The run ends if one fails more often than this in a row,
                each time within a minute, or if all together fail more often than this times their number. The first
                failure of a worker after this process was suspended does not count.
            hang_timeout: seconds after which an actor or a policy worker is replaced whose process lives, but does not
                answer; inf: it never is. A trainer never is, since that would lose its training.
            close_timeout: seconds that a trainer may take at the end of the run, to end its step and to save itself. It
                is killed earlier if its process does not answer for `hang_timeout`.
            panel: more arguments of `ControlPanel`, such as `file` and `host`.

        Raises `ConfigError` if the parts do not fit together, and a `ClusterError` if a worker cannot start.
        """
        self._check_arguments(max_restarts, hang_timeout)
        timeouts = hang_timeout, seconds("close_timeout", close_timeout)
        if self.actors.joining and wire != "zmq":
            raise ConfigError(f'actors can join from other machines only with wire="zmq", got {wire!r}')
        if self.training.count > 1 and wire == "local":
            raise ConfigError(
                'several trainers must be processes: use wire="zmq" or "ray". With wire="local" they are threads'
            )
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
        plan = self.plan()
        joining = self.actors.joining_names
        makers = {name: make for name, make in self.makers(plan).items() if name not in joining}
        resources = {"actor": self.actors.resources, "trainer": self.training.resources}
        resources["policy"] = self.policies.resources if self.policies is not None else None
        facts = {"seed": plan.seed, "actors": self._facts(plan) if joining else {}}
        opened = ControlPanel(self.name, trial, wire=wire, **panel)
        return RunningExperiment(opened, makers, max_restarts, timeouts, resources, joining, facts)

    def join(
        self, file: str | Path, names: Sequence[str], *, host: str | None = None, timeout: float = 60.0
    ) -> dict[str, str]:
        """Take part in a run of this experiment, as these of its actors, until it ends. Each actor is a process.

        This machine has the code of the experiment: no code comes from the run, only the seed. A name can be used again
        when its actor has ended.

        Args:
            file: the connection file of the run, copied from its machine.
            names: some of those that `Actors(joining=...)` allows, for example `["actor/4", "actor/5"]`.
            host: the address of this machine at which the others reach it; by default the one from which it reaches
                them.
            timeout: seconds to wait for the file, and for the run.

        Returns how each actor has ended. Raises `ConfigError` if the run does not take these actors, or is of another
        experiment, and `NoReplyError` if there is no run.
        """
        allowed = self.actors.joining_names
        wrong = [name for name in names if name not in allowed]
        fits = not wrong and names and not isinstance(names, str) and len({*names}) == len(names)
        if not allowed:
            raise ConfigError("no actor of this experiment can join: give Actors(..., joining=1), for one")
        must_be("the names (after --as)", names, fits, f"some of {', '.join(allowed)}, such as --as {allowed[0]}")
        plan = self.plan()
        connection, facts = _find_run(file, host, seconds("timeout", timeout))
        theirs, ours = facts["actors"], self._facts(plan)
        if differs := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
            listed = "; ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in differs)
            raise ConfigError(
                f"the run and this experiment differ: {listed}. All machines need the same code and the same penstock"
            )
        makers = self.makers(replace(plan, seed=int(facts["seed"])))
        workers = {name: LaunchedProcess(makers[name], connection, name, has_joined=True) for name in names}
        try:
            while any(worker.ending() is None for worker in workers.values()):
                time.sleep(_POLL_SECONDS)
        finally:
            for worker in workers.values():
                worker.kill()
        return {name: str(worker.ending()) for name, worker in workers.items()}

    def _facts(self, plan: AgentPlan) -> dict[str, str]:
        """What a run and those that join it must have in common, as texts that a name can hold."""
        actors, sampler = self.actors, self.actors.make_sampler()
        facts = {
            "the version of penstock": version_of("penstock"),
            "the name": self.name,
            "the number of actors": (actors.count, actors.joining),
            "batch_T": sampler.batch_T,
            "batch_B": sampler.batch_B,
            "the observation space": plan.observation_space,
            "the action space": plan.action_space,
            "the parameters": layout_of(read_parameters(plan.agent())),
            "bootstrap_value": actors.bootstrap_value,
            "record": actors.record,
            "inference": actors.inference,
            "samples": actors.samples,
        }
        sampler.shutdown()
        return {name: _short(str(value)) for name, value in facts.items()}

    def _check_arguments(self, max_restarts: int, hang_timeout: float) -> None:
        actors, training, policies = self.actors, self.training, self.policies
        for name, function in (
            ("make_agent", self.make_agent),
            ("make_sampler", actors.make_sampler),
            ("make_trainer", training.make_trainer),
        ):
            must_be(name, function, callable(function), "a class or a function")
        integer("joining", actors.joining, 0)
        integer("the number of actors", actors.count, 0 if actors.joining else 1)
        integer("the number of trainers", training.count, 1)
        one_of("backend", training.backend, ("gloo", "nccl"))
        integer("batch of Training", training.batch, 1)
        integer("save_every", training.save_every, 1)
        integer("max_restarts", max_restarts, 0)
        seconds("hang_timeout", hang_timeout)
        seconds("panel_timeout", training.panel_timeout)
        true_or_false("trust_checkpoint", training.trust_checkpoint)
        if training.max_staleness is not None:
            integer("max_staleness", training.max_staleness, 0)
        if self.seed is not None:
            integer("seed", self.seed, 0)
        if policies is not None:
            integer("the number of policies", policies.count, 1)
            integer("max_batch", policies.max_batch, 1)
            delay = seconds("max_delay", policies.max_delay, zero=True)
            must_be("max_delay", delay, delay < float("inf"), "finite, or a policy worker would wait for a full batch")

    def plan(self) -> AgentPlan:
        """How all workers make the agent, with the spaces of an example environment. `TrainerWorker`, `PolicyWorker`
        and `ActorWorker` take it. Without a seed, each call draws a new one.

        Raises `ConfigError` if the actors' sampler, the environment and the agents do not fit together.
        """
        sampler = self.actors.make_sampler()
        if isinstance(sampler, AsyncSampler):
            raise ConfigError(
                "make_sampler returned an AsyncSampler, which samples all the time. An actor obtains one batch after "
                "another: use ParallelSampler or another sampler"
            )
        config = sampler.config
        batched = config.batched
        factory = env_factories(config.env_fn, config.env_kwargs, config.batch_B)[0]
        view = partial(view_of, global_state=config.global_state)
        factory = replace(factory, as_seats=view).as_example(config.spaces)
        with marked:
            env = build_example_env(factory, batched=config.example_size)
        try:
            prefix = "single_" if batched else ""
            if not isinstance(env, ParallelView):
                spaces = [getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action")]
            elif self.actors.inference is None:
                spaces = self._spaces_of_seats(config, env)
            else:
                raise ConfigError(
                    "policy workers act for environments of one agent, and env_fn returns one of several: leave "
                    "inference and policies out, so that the actors act"
                )
        finally:
            close_example_env(env)
            sampler.shutdown()
        seed = fresh_seed() if self.seed is None else self.seed
        n_actors = self.actors.count + self.actors.joining
        return AgentPlan(self.make_agent, spaces[0], spaces[1], seed, sampler.batch_B * n_actors)

    def _spaces_of_seats(self, config: SamplerConfig, env: ParallelView) -> list[Any]:
        """The observation space and the action space of the agents of an environment. With a dict of agents, each is a
        dict by policy."""
        agents = self.make_agent()
        if not isinstance(agents, Mapping):  # it plays all of them, and their spaces are equal
            return list(env.spaces[env.possible_agents[0]])
        if self.training.count > 1:
            raise ConfigError(
                "several trainers are for one agent, and make_agent returned a dict: use Training(count=1)"
            )
        factories = env_factories(config.env_fn, config.env_kwargs, config.batch_B)
        factories = prepared_factories(tuple(agents.values()), factories, config)
        as_seats: Any = factories[0].as_seats
        first = as_seats(env.env)  # a second view of this environment: its observations have the masks for the agents
        with marked:
            _, seats = find_seating([(factories, 0), ((), 0)], agents, self.actors.policy_of, (factories[0], first))
        return [dict(zip(agents, pair, strict=True)) for pair in zip(*(spaces for *_, spaces in seats), strict=True)]

    def makers(self, plan: AgentPlan) -> dict[str, Callable[[], Worker]]:
        """Functions that make the workers, by name, in the order in which the workers start. `plan` is that of
        `self.plan()`."""
        training, policies, actors = self.training, self.policies, self.actors
        if training.checkpoint is not None:  # a worker may work in another folder
            training = replace(training, checkpoint=Path(training.checkpoint).absolute())
        makers: dict[str, Callable[[], Worker]] = {}
        for i in range(training.count):
            makers[f"trainer/{i}"] = partial(TrainerWorker, training, plan, rank=i)
        if policies is not None:
            for i in range(policies.count):
                makers[f"policy/{i}"] = partial(PolicyWorker, policies, plan)
        # How many pieces of an actor are under way to each trainer. With max_staleness, a piece is under way until it
        # was trained on. All together are no more than what a trainer takes in max_staleness + 1 steps (3 steps keep
        # everybody busy), but enough for one batch.
        n, size, stale = actors.count + actors.joining, training.batch, training.max_staleness
        credit = 3 if stale is None else max(-(-size // n), min(stale + 1, 3) * size // n)
        for i in range(n):
            makers[f"actor/{i}"] = partial(ActorWorker, actors, plan, rank=i, world_size=n, credit=credit)
        return makers


class RunningExperiment(Closing):
    """A running experiment. `panel` commands its workers.

    If a worker fails, the start of the run or `wait` starts it again: a policy worker gets the newest parameters, a
    trainer continues from its checkpoint, and an actor begins new trajectories. `Experiment.run` makes it.
    """

    def __init__(
        self,
        panel: ControlPanel,
        makers: Mapping[str, Callable[[], Worker]],
        max_restarts: int,
        timeouts: tuple[float, float],  # `hang_timeout` and `close_timeout`
        resources: Mapping[str, Mapping[str, float] | None],  # by the first part of a worker's name
        joining: Sequence[str],  # the actors that may join
        facts: Mapping[str, Any],  # what those need
    ) -> None:
        self.panel, self._makers, self._max_restarts, self._resources = panel, makers, max_restarts, resources
        (self._hang_timeout, self._close_timeout), self._joining = timeouts, joining
        self._n_begun = Counter[str]()  # how often each worker was configured
        #: How often each worker was started again.
        self.restarts = dict.fromkeys(makers, 0)
        self._n_in_row = dict.fromkeys(makers, 0)  # failures of each worker
        self._n_failures = 0  # of all
        self._n_suspensions = dict.fromkeys(makers, 0)  # of the panel, when each worker was started
        self._up_since: dict[str, float] = {}
        self._trained: set[str] = set()  # trainers that may have to save themselves: they were up, or are ending
        self._silent_since: dict[str, float] = {}
        self._starting = {name: self._start(name) for name in makers}  # what is left to do for those that do not run
        self._version, self._saved = 1, 0
        self._began = time.monotonic()
        try:
            panel.names.add(_FACTS, facts, lasting=True)
            while any(not self.restarts[name] for name in self._starting):
                for name, error in self._step().items():
                    if not self.restarts[name]:
                        raise error
                    self._fail(name, str(error))
                self._watch_all(panel.stats(makers))  # the others may wait for one that has failed
                time.sleep(_STEP_SECONDS)
        except BaseException:
            with contextlib.suppress(ClusterError):
                self.close()
            raise

    def state(self) -> RunState:
        """The run now. While the trainer gives no figures, its version is the last that was known."""
        if self._joining:
            self.panel.autoconnect()
        joined = [name for name in self._joining if name in self.panel.worker_names]
        workers = self.panel.stats([*self._makers, *joined])
        self._version = int(workers["trainer/0"].get("version", self._version))
        self._saved = int(workers["trainer/0"].get("saved", self._saved))
        return RunState(self._version, time.monotonic() - self._began, workers)

    def wait(
        self,
        until: Callable[[RunState], bool],
        *,
        timeout: float = float("inf"),
        metrics: str | Path | Callable[[RunState], object] | None = None,
    ) -> RunState:
        """Watch the workers until `until(state)` is True, or for `timeout` seconds. Returns the last state.

        Args:
            until: called four times a second.
            metrics: where the figures of all workers go, once a second and at the end: a file, which gets a line of
                JSON each time, or a function that takes the state.

        Raises `ClusterError` if workers have failed too often: see `max_restarts`.
        """
        deadline, write_at = time.monotonic() + timeout, 0.0
        if isinstance(metrics, str | Path):
            metrics = to_file(metrics)
        while True:
            state = self.state()
            is_last = until(state) or time.monotonic() >= deadline
            if metrics is not None and (is_last or time.monotonic() >= write_at):
                write_at = time.monotonic() + _WRITE_SECONDS
                metrics(state)
            if is_last:
                return state
            self._watch_all(state.workers)
            poll_at = time.monotonic() + _POLL_SECONDS
            while (left := poll_at - time.monotonic()) > 0:
                for name, error in self._step().items():
                    self._fail(name, str(error))
                time.sleep(min(left, _STEP_SECONDS))

    def close(self) -> None:
        """End all workers. A trainer ends its step and saves itself before, for which it has `close_timeout` seconds.
        Calling it again does nothing, and nor does a call in a fork of its process.

        Raises `ClusterError` if a trainer has failed and was not started again yet, or fails meanwhile, for example
        because its last checkpoint cannot be written, or because it is killed: the error says which versions are lost.
        """
        if not self.panel.is_own:
            return
        trainers = sorted(self._trained)
        figures = self.panel.names.newest("figures/trainer/0")
        self.panel.close(longer=dict.fromkeys(trainers, self._close_timeout), hang_timeout=self._hang_timeout)
        errors = {name: self.panel.failed_at_end.pop(name, None) for name in sorted({"trainer/0", *trainers})}
        for name, error in errors.items():
            if error is not None:
                known = figures[0] if figures is not None else {}
                version, saved = int(known.get("version", self._version)), int(known.get("saved", self._saved))
                raise ClusterError(
                    f"worker {name} has failed at the end of the run: {error}. It had made version {version} or a "
                    f"later one, and had saved {f'version {saved} or a later one' if saved else 'none that is known'}"
                )

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        except ClusterError:
            if error[0] is None:
                raise
            _log.exception("the run has ended with another error too")

    def _watch_all(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        for name, figures in workers.items():
            if name not in self._starting:
                self._watch(name, figures)

    def _watch(self, name: str, figures: Mapping[str, Any]) -> None:
        """Let a worker begin that has joined. Start one again that has failed, or was silent for too long."""
        status, now, is_ours = figures["status"], time.monotonic(), name in self._makers
        if status in _FAILED and (is_ours or name in self._up_since):
            return self._fail(name, _why(figures))
        if status == Status.READY.value and not is_ours:
            self._starting[name] = self._begin(name)
        elif status != Status.UNRESPONSIVE.value or not is_ours:
            self._silent_since.pop(name, None)
        elif name not in self._silent_since:
            self._silent_since[name] = now
            _log.warning("worker %s lives, but does not answer. What it does:\n%s", name, self.panel.stacks(name))
        elif now - self._silent_since[name] > self._hang_timeout and not name.startswith("trainer/"):
            self._fail(name, f"it did not answer for hang_timeout={self._hang_timeout:g} s")
        return None

    def _fail(self, name: str, reason: str) -> None:
        """A worker has failed: start it again, if it may be. Another machine may let its own join again."""
        if name not in self._makers:
            _log.warning("worker %s, which has joined, has failed, and the run goes on: %s", name, reason)
            self._up_since.pop(name, None)
            if self._starting.pop(name, None) is not None:  # otherwise it may go on, if its link comes back
                with contextlib.suppress(PeerLostError):  # it has ended already
                    self.panel.async_request(name, "exit")
            return
        if name != "trainer/0":  # that one has the training, which is lost if it ends before it has begun again
            self._trained.discard(name)
        now, n_suspensions = time.monotonic(), self.panel.count_suspensions()
        if now - self._up_since.pop(name, now) > _SOUND_SECONDS:
            self._n_in_row[name] = 0
        counts = n_suspensions == self._n_suspensions[name]  # otherwise it may have ended since the panel was silent
        self._n_suspensions[name] = n_suspensions
        self._n_in_row[name] += counts
        n, total, most = self._n_in_row[name], self._n_failures, self._max_restarts
        self._n_failures += counts
        if counts and (n > most or total >= most * len(self.restarts)):
            raise ClusterError(
                f"worker {name} has failed {n} times in a row, and {total} workers were started again before, with "
                f"max_restarts={most}. The last time: {reason}"
            )
        _log.warning("worker %s has failed, and is started again: %s", name, reason)
        self.restarts[name] += 1
        # The trainers are one group: without one of them, the others wait for ever.
        for other in self._makers if name.startswith("trainer/") else ():
            if other.startswith("trainer/"):
                self._up_since.pop(other, None)
                self._starting[other] = self._start(other, most=self._close_timeout)
        self._silent_since.pop(name, None)
        self._starting[name] = self._start(name, 0.0 if n <= 1 else min(2.0 ** (n - 2), _LONGEST_PAUSE))

    def _step(self) -> dict[str, ClusterError]:
        """Do what can be done now for the workers that do not run. Returns why some of them have failed."""
        self._reached = self.panel.autoconnect() if self._starting else []
        errors: dict[str, ClusterError] = {}
        for name, steps in list(self._starting.items()):
            try:
                next(steps)
            except StopIteration:
                del self._starting[name]
                self._up_since[name] = time.monotonic()
                if name.startswith("trainer/"):
                    self._trained.add(name)
            except ClusterError as error:
                if not (name.startswith("trainer/") and any(other.startswith("trainer/") for other in errors)):
                    errors[name] = error  # one of the trainers is enough: all are started again
        return errors

    def _start(self, name: str, pause: float = 0.0, most: float = _END_SECONDS) -> Iterator[None]:
        """The steps from the end of a worker, which may take `most` seconds, to its first poll. Where one would wait,
        this yields."""
        base, _, index = name.partition("/")
        if not self.panel.has_ended(name):
            with contextlib.suppress(ClusterError):  # it may be lost
                self.panel.async_request(name, "exit", timeout=_END_SECONDS)
        begin, kill_at, is_killed = time.monotonic() + pause, time.monotonic() + most, False
        while time.monotonic() < begin or not self.panel.has_ended(name):
            if time.monotonic() > kill_at and not is_killed and not self.panel.has_ended(name):
                self.panel.kill(name)
                is_killed = True
            elif time.monotonic() > max(begin, kill_at) + _START_SECONDS:
                raise ClusterError("the one before has not ended, and cannot be killed")
            yield
        self._trained.discard(name)
        self.panel.launch(self._makers[name], name=base, first=int(index), resources=self._resources[base])
        yield
        yield from self._begin(name)

    def _begin(self, name: str) -> Iterator[None]:
        """The steps from the launch of a worker to its first poll."""
        base, until = name.partition("/")[0], time.monotonic() + _START_SECONDS
        while name not in self._reached:
            self.panel.require_alive(name)
            if time.monotonic() > until:
                raise ClusterError(f"it could not be reached within {_START_SECONDS:g} s")
            yield
        while not self._has_what_it_needs(base):
            self.panel.require_alive(name)
            yield
        lives, self._n_begun[name] = self._n_begun[name], self._n_begun[name] + 1
        if base == "trainer":  # they are one group
            lives = sum(n for other, n in self.restarts.items() if other.startswith("trainer/"))
        for command, kwargs in (("configure", {} if base == "policy" else {"generation": lives}), ("start", {})):
            answer = self.panel.async_request(name, command, timeout=_START_SECONDS, **kwargs)
            while not answer.done():
                yield
            answer.result()

    def _has_what_it_needs(self, kind: str) -> bool:
        """Whether a worker of each kind before this one runs. At the beginning, all of them."""
        for other in _KINDS[: _KINDS.index(kind)]:
            names = [name for name in self._makers if name.startswith(f"{other}/")]
            if any(name in self._starting and not self.restarts[name] for name in names):
                return False
            if names and all(name in self._starting for name in names):
                return False
        return True


def _why(figures: Mapping[str, Any]) -> str:
    """Why the worker with these figures has failed."""
    return f"{figures['status']}: {figures.get('text') or f'it has ended without a report: {WHERE_ITS_LOG_IS}'}"


def _short(text: str) -> str:
    """The text. If it is long, its beginning and a number that depends on all of it."""
    return text if len(text) <= 500 else f"{text[:500]} ... ({sha256(text.encode()).hexdigest()[:16]})"


def _address_towards(address: str) -> str:
    """The address of this machine from which it reaches `address`, of IPv4 or IPv6. Raises `OSError` for none."""
    name, _, port = address.rpartition("/")[2].rpartition(":")
    family, kind, *_, place = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # it sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


def _find_run(file: str | Path, host: str | None, timeout: float) -> tuple[Connection, dict[str, Any]]:
    """How to reach the run of this file, and what it says to those that join. An old file may be replaced meanwhile."""
    until = time.monotonic() + timeout
    while True:
        try:
            connection = Connection.read(file)
            connection = replace(connection, host=host or _address_towards(connection.address))
            with contextlib.closing(connection.wire()) as wire:
                names = NameClient(wire, connection.address)
                return connection, dict(names.wait(_FACTS, min(5.0, max(0.1, until - time.monotonic()))))
        except (ConfigError, ClusterError, OSError):  # OSError: its machine cannot be reached yet
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)
