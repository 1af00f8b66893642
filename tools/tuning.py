"""`tune`: which sampler, with how many workers, is fastest on this machine, by trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from gymnasium.spaces import Box, Discrete, MultiDiscrete, flatdim

from penstock import agents, arguments
from penstock.agents import Agent
from penstock.arguments import must_be
from penstock.buffers.reports import in_one_line
from penstock.envs import EnvFn, build_example_env, env_factories
from penstock.errors import ConfigError
from penstock.samplers import AlternatingSampler, GpuSampler, ParallelSampler, Sampler, SerialSampler
from penstock.samplers.central import count_alternating
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.marking import marked

_ROUNDS = 8


@dataclass
class TuneRow:
    """One sampler, and its figures: one for each turn."""

    sampler: type[Sampler]
    options: dict[str, Any]  #: `batch_T`, `batch_B`, and `n_workers` if it has workers
    steps_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  #: CPU microseconds of all its processes for each step
    resetting: list[float] = field(default_factory=list)  #: the share of the workers' time that resets took
    failure: str | None = None  #: why it has no turns, or no more


@dataclass
class TuneReport:
    """What `tune` has found. `str(report)` is a table with the recommendation."""

    env: str = "env_fn"  #: the code of the environment function
    rows: list[TuneRow] = field(default_factory=list)  #: `SerialSampler` first, and few workers before many
    busy: str = ""  #: what else ran on this machine when the search began, if it was much

    @property
    def best(self) -> TuneRow | None:
        """The fastest row, or an earlier one that is slower by less than 3 %. None if no sampler could be measured."""
        speeds = [(np.median(row.steps_per_s), row) for row in self.rows if row.steps_per_s and not row.failure]
        enough = max((speed for speed, _ in speeds), default=0.0) * 0.97
        return next((row for speed, row in speeds if speed >= enough), None)

    @property
    def recommendation(self) -> str:
        """Lines of Python: a comment that says how fast the best sampler is, and the sampler."""
        if (best := self.best) is None:
            return "# No sampler could be measured, so there is no recommendation."
        options = ", ".join(f"{name}={value}" for name, value in best.options.items())
        speed = f"# The fastest here: {np.median(best.steps_per_s):,.0f} steps/s"
        return f"{speed}\nsampler = {best.sampler.__name__}({self.env}, {options})"

    def __str__(self) -> str:
        form, forms = "{:<18} {:>7}  {:<32} {:<24} {}", ("{:,.0f}", "{:.1f}", "{:.0%}")
        lines = [form.format("sampler", "workers", "steps/s", "CPU µs a step", "resetting")]
        for row in self.rows:
            figures = map(_figure, (row.steps_per_s, row.cpu_us, row.resetting), forms)
            cells = (f"failed: {row.failure}", "", "") if row.failure else figures
            lines.append(form.format(row.sampler.__name__, row.options.get("n_workers", "-"), *cells).rstrip())
        lines += ["", "Figures are medians, with the middle half of the turns in parentheses. Nothing was trained."]
        if self.best and (share := float(np.median(self.best.resetting))) > 0.2:
            lines += [f"Resets take {share:.0%} of the workers' time: faster resets or longer episodes help most."]
        if self.busy:
            lines += [
                f"The machine was busy when this began: {self.busy}. Beside other programs, many workers get more of "
                "the CPUs than few, so this says little. Run it again when the machine is idle."
            ]
        return "\n".join([*lines, "", self.recommendation])


def tune(
    env_fn: EnvFn,
    *,
    policy: str | Callable[[], Agent] = "mlp",
    batch_T: int = 128,
    batch_B: int = 32,
    n_workers: int | Sequence[int] = (),
    seconds: float = 20.0,
    start_timeout: float = 60.0,
    step_timeout: float = 20.0,
    report: TuneReport | None = None,
    say: Callable[[str], Any] = lambda text: None,
) -> TuneReport:
    """Try samplers with your environment, and recommend the fastest. `AsyncSampler` is not tried.

    All samplers live at the same time and take turns. If one raises, hangs or loses a worker, the report says so, and
    the others go on. `SerialSampler` steps the environments in your process, where nothing can end a hang or survive a
    crash: it is the last in each round, and is left out when every other sampler has failed.

    Args:
        env_fn: a callable that returns a `gymnasium.Env`, or an environment id.
        policy: "random", "mlp" (two layers of 64 units), or a function that makes an agent.
        batch_T, batch_B, start_timeout, step_timeout: arguments of every sampler.
        n_workers: the numbers of workers to try; by default chosen from the number of CPUs.
        seconds: the time for all turns; the samplers need more time to start. Each has at least one turn of one batch.
        report: is filled during the search. If Ctrl-C ends the search, it has the figures so far.
        say: is called with a line about the progress.

    Raises `ConfigError` for arguments that cannot work.
    """
    from penstock.tools.doctor import busy  # here, since it imports games

    counts = [arguments.integer("n_workers", n, 1) for n in np.atleast_1d(n_workers)]
    sizes = {"batch_T": batch_T, "batch_B": arguments.integer("batch_B", batch_B, 1)}
    length, report = arguments.seconds("seconds", seconds) / _ROUNDS, report or TuneReport()
    more: dict[str, Any] = {"start_timeout": start_timeout, "step_timeout": step_timeout, "max_decorrelation_steps": 0}
    rows = [TuneRow(cls, {**sizes, **workers}) for cls, workers in _to_try(sizes["batch_B"], counts)]
    make_agent = _agent_maker(policy, env_fn)
    name = f'"{env_fn}"' if isinstance(env_fn, str) else getattr(env_fn, "__name__", "<lambda>")
    report.env, report.rows, report.busy = name.replace("<lambda>", "env_fn"), rows, busy()
    if report.busy:  # before the search itself makes it so
        say(f"the machine is busy: {report.busy}")
    with ExitStack() as stack:
        pairs = [(row, stack.enter_context(row.sampler(env_fn, **more, **row.options))) for row in rows]
        for number in range(1 + _ROUNDS):
            say(f"round {number} of {_ROUNDS}" if number else f"starting {len(rows)} samplers")
            for row, sampler in reversed(pairs):
                if row is rows[0] and all(other.failure for other in rows[1:]):
                    row.failure = row.failure or "not tried, since every other sampler has failed"
                if row.failure is None:
                    try:
                        if number == 0:
                            sampler.initialize(make_agent(), seed=0, bootstrap_value=policy != "random")
                            sampler.obtain_samples(0)
                        else:
                            _take_turn(row, sampler, length / len(rows))
                    except Exception as error:  # environments and agents may raise anything
                        row.failure = in_one_line(error)
                        sampler.shutdown()
            if number == 0:
                began = time.monotonic()
            elif time.monotonic() - began > seconds:
                break
    return report


def _to_try(batch_B: int, counts: Sequence[int]) -> Iterator[tuple[type[Sampler], dict[str, int]]]:
    """Classes and numbers of workers, simple ones first. Environments that wait gain from many workers."""
    yield SerialSampler, {}
    n_cpus = cpus_to_fill(usable_cpus())
    wanted = counts or [max(2, n_cpus // 2), n_cpus, 2 * n_cpus, min(8 * n_cpus, 64)]
    several = sorted({min(n, batch_B) for n in wanted})
    yield from ((ParallelSampler, {"n_workers": n}) for n in several)
    yield from ((GpuSampler, {"n_workers": n}) for n in several if counts or n in (n_cpus, several[-1]))
    if batch_B > 1 and not counts:
        yield AlternatingSampler, {"n_workers": min(count_alternating(n_cpus), batch_B)}


def _take_turn(row: TuneRow, sampler: Sampler, seconds: float) -> None:
    """Collect batches for `seconds`, at least one, and add the figures to the row."""
    n_steps, before = 0, _spent(sampler)
    while not n_steps or time.perf_counter() - before[0] < seconds:
        sampler.obtain_samples(1)
        n_steps += sampler.batch_T * sampler.batch_B
    took, cpu, resetting = np.subtract(_spent(sampler), before).tolist()
    row.steps_per_s.append(n_steps / took)
    row.cpu_us.append(cpu / n_steps * 1e6)
    row.resetting.append(resetting / took)


def _spent(sampler: Sampler) -> tuple[float, float, float]:
    """Seconds so far: of the clock, of CPU time in all its processes, and of resets, on average over the workers."""
    cpu = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (None, *sampler.worker_pids))
    return time.perf_counter(), cpu, float(np.mean([own.resetting for own in sampler.stats().workers]))


def _figure(values: Sequence[float], form: str) -> str:
    """The median and the quartiles."""
    low, middle, high = (form.format(x) for x in np.quantile(values or [np.nan], (0.25, 0.5, 0.75)))
    return f"{middle} ({low} to {high})" if values else "-"


def _agent_maker(policy: str | Callable[[], Agent], env_fn: EnvFn) -> Callable[[], Agent]:
    (factory,) = env_factories(env_fn, None, 1)  # raises for what makes no environment
    if callable(policy) or policy == "random":
        return policy if callable(policy) else agents.RandomAgent
    must_be("policy", policy, policy == "mlp", '"random", "mlp" or a function that makes an agent')
    with marked:
        env = build_example_env(factory)
        env.close()
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, Box) or not isinstance(actions, Box | Discrete | MultiDiscrete):
        other = f'the environment has {observations} and {actions}: use "random", or a function that makes your agent'
        raise ConfigError(f'policy="mlp" needs Box observations, and Discrete, MultiDiscrete or Box actions; {other}')
    return lambda: (agents.GaussianPgAgent if isinstance(actions, Box) else agents.CategoricalPgAgent)(_mlp)


def _mlp(observation_space: Box, action_space: Box | Discrete | MultiDiscrete) -> Any:
    """Two hidden layers of 64 units. The model returns the policy's outputs `[B, n]` and the value `[B]`."""
    from torch import Tensor, nn

    class MLP(nn.Sequential):
        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            outputs = super().forward(observation.float())  # type: ignore[no-untyped-call]
            return outputs[:, :-1], outputs[:, -1]

    hidden = nn.Flatten(), nn.Linear(flatdim(observation_space), 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return MLP(*hidden, nn.Linear(64, flatdim(action_space) + 1))
