"""`tune`: which sampler, how many workers and which batch size are fastest on this machine, by trial."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from penstock.arguments import integer, one_of
from penstock.arguments import seconds as seconds_of
from penstock.envs import EnvFn
from penstock.envs.factory import env_factories
from penstock.errors import ConfigError
from penstock.samplers.central import count_alternating
from penstock.samplers.parallel import PRELOAD
from penstock.tools.candidate import Candidate, CandidateProcess, Policy, Task, Turn
from penstock.tools.doctor import describe_machine
from penstock.workers import sigint
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.launcher import START_METHODS, Launcher, StartMethod
from penstock.workers.plan import PoolOptions

_ROUNDS = 8  # turns of each candidate in a stage, if there is time
_LEAST_TURN = 0.05  # seconds
_TOLERANCE = 0.03  # a simpler candidate is chosen if it is slower by less than 3 %
_MOST_WORKERS = 64
_INFERENCE = ("traced", "numpy")  # in addition to the agent's default
_LAUNCH = PoolOptions(
    start_method="forkserver",
    step_timeout=None,
    start_timeout=120.0,
    max_restarts=0,
    restart_window=0.0,
    preload=("torch", *PRELOAD),
)


@dataclass
class TuneRow:
    """The figures of one candidate. `rounds[i]` is the round in which it had `turns[i]`."""

    candidate: Candidate
    rounds: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None  #: why it has no turns, or no more

    @property
    def rates(self) -> dict[int, float]:
        """Steps per second by round."""
        return {number: turn.steps_per_s for number, turn in zip(self.rounds, self.turns, strict=True)}

    def ratios(self, other: TuneRow, learner_us: float = 0.0) -> list[float]:
        """The speed divided by that of `other`, for each round in which both had a turn. Both speeds are of a loop that
        also trains for `learner_us` microseconds a step."""
        pairs = [(rate, other.rates[number]) for number, rate in self.rates.items() if number in other.rates]
        return [rate / slow * ((1e6 + learner_us * slow) / (1e6 + learner_us * rate)) for rate, slow in pairs]


@dataclass
class TuneReport:
    """What `tune` has found. `str(report)` is a table with the recommendation."""

    env: str = "env_fn"  #: the code of the environment function
    rows: list[TuneRow] = field(default_factory=list)  #: in the order of trial: simple candidates first
    is_interrupted: bool = False
    learner_us: float = 0.0  #: microseconds that the learner takes for each environment step

    @property
    def best(self) -> TuneRow | None:
        """The recommended row; None if no candidate had a turn."""
        return choose(self.rows, self.learner_us)

    @property
    def recommendation(self) -> str:
        """Lines of Python: a comment that says how fast the best candidate is, and the sampler."""
        best = self.best
        if best is None:
            return "# No candidate had a turn, so there is no recommendation."
        one, candidate = self.rows[0], best.candidate  # the first row is that of SerialSampler
        ratios, training = best.ratios(one, self.learner_us), ", with your training" if self.learner_us else ""
        if candidate.sampler == "SerialSampler" and not any(row.turns and not row.failure for row in self.rows[1:]):
            verdict = "No other candidate could be measured."
        elif candidate.sampler == "SerialSampler":
            verdict = f"One process is fastest here{training}."
        elif ratios:
            verdict = f"{np.median(ratios):.2f} times the speed of one process{training}."
        else:
            verdict = f"The fastest of {sum(bool(row.turns) for row in self.rows)} candidates."
        return f"# {verdict}\n{candidate.code(self.env)}"

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows = [
            {
                **asdict(row.candidate),
                "rounds": row.rounds,
                "steps_per_s": [turn.steps_per_s for turn in row.turns],
                "cpu_us_per_step": [turn.cpu_us for turn in row.turns],
                "times_one_process": row.ratios(self.rows[0]),
                "failure": row.failure,
            }
            for row in self.rows
        ]
        return {
            "env": self.env,
            "machine": describe_machine(),
            "is_interrupted": self.is_interrupted,
            "learner_us": self.learner_us,
            "rows": rows,
            "recommendation": self.recommendation,
        }

    def __str__(self) -> str:
        headings = ("sampler", "workers", "T", "B", "inference", "steps/s", "CPU µs a step", "times one process")
        lines = _aligned([headings, *(self._cells(row) for row in self.rows)])
        notes = ["Figures are medians; the middle half of the turns follows in parentheses.", *_failures(self.rows)]
        notes += self._with_learner()
        if self.is_interrupted:
            notes.append("Interrupted: the candidates that are missing were not tried, or not to the end.")
        return "\n".join([*lines, "", *notes, "", self.recommendation])

    def _with_learner(self) -> list[str]:
        """What is left of the gain when the learner trains after each batch."""
        best, one = self.best, self.rows[0] if self.rows else None
        if best is None or one is None or not one.turns:
            return []
        if not self.learner_us:
            return [
                "Nothing was trained. If training takes 80 % of your time, no sampler makes the whole more than 1.25 "
                "times as fast: count it with --learner-us, in Python learner_us."
            ]
        own, fastest = (1e6 / float(np.median([turn.steps_per_s for turn in row.turns])) for row in (one, best))
        whole, learner = own + self.learner_us, self.learner_us
        return [
            f"With {learner:g} µs of training for each step, training takes {learner / whole:.0%} of the time of one "
            f"process: no sampler makes the whole more than {whole / learner:.2f} times as fast. The recommended one "
            f"gives {1e6 / (fastest + learner):,.0f} steps/s, {whole / (fastest + learner):.2f} times one process. "
            f"AsyncSampler, which samples while you train, gives at most {whole / max(fastest, learner):.2f} times."
        ]

    def _cells(self, row: TuneRow) -> tuple[str, ...]:
        candidate = row.candidate
        workers = "-" if candidate.n_workers is None else str(candidate.n_workers)
        if candidate.serve_envs:
            workers += " + main"
        figures = [
            _figure([turn.steps_per_s for turn in row.turns], "{:,.0f}"),
            _figure([turn.cpu_us for turn in row.turns], "{:.1f}"),
            _figure(row.ratios(self.rows[0]), "{:.2f}"),
        ]
        if not row.turns:
            figures[0] = "failed" if row.failure else "-"
        sizes = str(candidate.batch_T), str(candidate.batch_B)
        return candidate.sampler, workers, *sizes, candidate.inference or "-", *figures


def choose(rows: Sequence[TuneRow], learner_us: float = 0.0) -> TuneRow | None:
    """The first of the rows that are slower than the fastest by less than 3 %, with `learner_us` of training a step.
    The simple ones come first. All are compared with `rows[0]`, round by round. None if no row without a failure has
    had a turn."""
    running = [row for row in rows if row.turns and not row.failure]
    if not running:
        return None
    figures = [row.ratios(rows[0], learner_us) for row in running]
    if not all(figures):  # the first candidate failed: compare the steps per second
        figures = [list(row.rates.values()) for row in running]
    speeds = [np.median(values) for values in figures]
    return next(row for row, speed in zip(running, speeds, strict=True) if speed >= max(speeds) * (1 - _TOLERANCE))


def first_candidates(batch_T: int, batch_B: int, n_cpus: int, n_workers: Sequence[int] | None) -> list[Candidate]:
    """The samplers and numbers of workers to try, simple ones first. Without `n_workers`, these are from half to eight
    times the number of CPUs: environments that wait for something gain from many workers."""
    wanted = n_workers or (n_cpus // 2, n_cpus, 2 * n_cpus, min(8 * n_cpus, _MOST_WORKERS))
    counts = [n for n in sorted({min(n, batch_B) for n in wanted}) if n > 1 or n_workers]
    one = Candidate("SerialSampler", batch_T, batch_B)
    candidates = [one, *(replace(one, sampler="ParallelSampler", n_workers=n) for n in counts)]
    central_counts = [n for n in counts if n_workers or n in (min(n_cpus, batch_B), counts[-1])]
    candidates += [replace(one, sampler="GpuSampler", n_workers=n) for n in central_counts]
    n_served = min(max(1, n_cpus - 1), batch_B - 1)
    if n_served and not n_workers:
        candidates.append(replace(one, sampler="GpuSampler", n_workers=n_served, serve_envs="auto"))
    n_alternating = min(count_alternating(n_cpus), batch_B)
    if n_workers is None and n_alternating >= 2:
        candidates.append(replace(one, sampler="AlternatingSampler", n_workers=n_alternating))
    return candidates


def tune(
    env_fn: EnvFn,
    *,
    policy: Policy = "mlp",
    batch_T: int | Iterable[int] = (128, 32),
    batch_B: int | Iterable[int] = (32, 128),
    n_workers: int | Iterable[int] | None = None,
    seconds: float = 20.0,
    limit: float = 20.0,
    learner_us: float = 0.0,
    start_method: StartMethod = "fork",
    report: TuneReport | None = None,
    say: Callable[[str], Any] | None = None,
) -> TuneReport:
    """Try samplers and their arguments with your environment, and recommend the fastest. `AsyncSampler` is not tried.

    Each candidate has its own processes, and the candidates take turns. First the samplers and the numbers of workers
    compete, then the agent's `inference` if the agent has this argument, then the sizes of the batch. All are compared
    with `SerialSampler`: one process. The report names candidates that raise, hang or are too slow.

    Args:
        env_fn: a callable that returns a `gymnasium.Env`, or an environment id.
        policy: "random", "mlp" (two layers of 64 units), or a function that makes an agent. It is called without
            arguments, or with `inference` if it has a parameter of this name.
        batch_T, batch_B: the sizes to try. The samplers compete with the first of each. Other sizes give the learner
            other batches: leave out what you do not want.
        n_workers: the numbers of workers to try; by default chosen from the number of CPUs.
        seconds: the time for the turns of all candidates; they need more time to start. Each has at least one turn of
            at least one batch.
        limit: seconds that a candidate may take to start and collect its first batch, and for each later batch. After
            that it is stopped.
        learner_us: microseconds that your learner trains for each environment step. The recommendation counts them, and
            the report says how much any sampler can gain.
        start_method: "fork" starts quickly. Use "forkserver" or "spawn" if your environment does not work after a fork.
        report: is filled during the search. If Ctrl-C ends the search, it has the figures so far.
        say: is called from time to time with a line about the progress.

    Raises `ConfigError` for arguments that cannot work.
    """
    sizes_T, sizes_B = _integers("batch_T", batch_T), _integers("batch_B", batch_B)
    counts = None if n_workers is None else _integers("n_workers", n_workers)
    one_of("start_method", start_method, START_METHODS)
    if not (policy in ("random", "mlp") or callable(policy)):
        raise ConfigError(f'policy must be "random", "mlp" or a function that makes an agent, got {policy!r}')
    env_factories(env_fn, None, 1)
    seconds, limit = seconds_of("seconds", seconds), seconds_of("limit", limit)
    report = TuneReport() if report is None else report
    report.learner_us = seconds_of("learner_us", learner_us) if learner_us else 0.0
    report.env = _code_of(env_fn)
    candidates = first_candidates(sizes_T[0], sizes_B[0], cpus_to_fill(usable_cpus()), counts)
    try:
        task, launcher = Task(env_fn, policy, start_method).pickled(), Launcher(_LAUNCH, 1)
        search = _Search(report, task, launcher, seconds, limit, say or (lambda text: None))
        search.run(candidates, [(T, B) for B in sizes_B for T in sizes_T], policy != "random")
    except KeyboardInterrupt:
        report.is_interrupted = True
        raise
    return report


class _Search:
    """The stages of one search. `task` and `launcher` are for the `CandidateProcess`s."""

    def __init__(
        self,
        report: TuneReport,
        task: bytes,
        launcher: Launcher,
        seconds: float,
        limit: float,
        say: Callable[[str], Any],
    ) -> None:
        self._report, self._task, self._launcher = report, task, launcher
        self._seconds, self._limit, self._say = seconds, limit, say
        self._round = 0

    def run(self, candidates: Sequence[Candidate], sizes: Sequence[tuple[int, int]], has_model: bool) -> None:
        """Let the candidates compete, then variants of the best with other inference, then with other sizes."""
        one = candidates[0]
        n_stages = 1 + has_model + (len(sizes) > 1)
        takes_inference = self._compete(candidates, self._seconds / n_stages)
        if takes_inference and (best := self._best()):
            variants = [replace(each, inference=name) for each in (one, best) for name in _INFERENCE]
            self._compete([one, best, *variants], self._seconds / n_stages)
        if len(sizes) > 1 and (best := self._best()):
            variants = [
                replace(best, batch_T=T, batch_B=B)
                for T, B in sizes
                if best.n_workers is None or best.n_workers + (best.serve_envs is not None) <= B
            ]
            self._compete([one, best, *variants], self._seconds / n_stages)

    def _best(self) -> Candidate | None:
        best = self._report.best
        return None if best is None else best.candidate

    def _row(self, candidate: Candidate) -> TuneRow:
        for row in self._report.rows:
            if row.candidate == candidate:
                return row
        row = TuneRow(candidate)
        self._report.rows.append(row)
        return row

    def _compete(self, candidates: Iterable[Candidate], seconds: float) -> bool:
        """Let the candidates take turns for `seconds`. Returns whether their agent has the argument `inference`."""
        rows = [row for candidate in dict.fromkeys(candidates) if not (row := self._row(candidate)).failure]
        processes: list[CandidateProcess] = []
        try:
            self._say(f"starting {len(rows)} candidates")
            for row in rows:
                with sigint.deferred():  # a trial that has started must be in the list
                    processes.append(CandidateProcess(row.candidate, self._task, self._launcher))
            for process in processes:
                process.wait_until_loaded()
            began = time.monotonic()
            for process in processes:
                process.wait_until_ready(self._limit, began)
            self._say("they take turns")
            self._take_turns(rows, processes, seconds)
        finally:
            for row, process in zip(
                rows, processes, strict=False
            ):  # there are fewer processes if a start was interrupted
                row.failure = process.failure
            with sigint.deferred():
                for process in processes:
                    process.ask_to_close()
                for process in processes:
                    process.close()
        return any(process.takes_inference for process in processes)

    def _take_turns(self, rows: Sequence[TuneRow], processes: Sequence[CandidateProcess], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        length = max(_LEAST_TURN, seconds / (max(1, len(rows)) * _ROUNDS))
        pairs = list(zip(rows, processes, strict=True))
        is_first = True
        while pairs and (is_first or time.monotonic() < deadline):
            self._round += 1
            random.Random(self._round).shuffle(pairs)
            for row, process in pairs:
                if process.failure is None and (turn := process.turn(length, self._limit)) is not None:
                    row.rounds.append(self._round)
                    row.turns.append(turn)
            pairs = [(row, process) for row, process in pairs if process.failure is None]
            if is_first:
                self._say("each has had a turn")
            is_first = False


# ---- texts -----------------------------------------------------------------------------------------


def _integers(name: str, value: int | Iterable[int]) -> list[int]:
    values = list(value) if isinstance(value, Iterable) else [value]
    if not values:
        raise ConfigError(f"{name} is empty: give at least one integer")
    return [integer(name, each, 1) for each in values]


def _code_of(env_fn: object) -> str:
    """Python code that names the environment function: its id or name, or `env_fn` if it has none (a lambda)."""
    if isinstance(env_fn, str):
        return repr(env_fn).replace("'", '"')
    name = str(getattr(env_fn, "__name__", ""))
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "env_fn"


def _short(candidate: Candidate) -> str:
    """How the notes below the table name a candidate."""
    options = {**candidate.options, "inference": candidate.inference}
    return f"{candidate.sampler} ({', '.join(f'{name}={value}' for name, value in options.items() if value)})"


def _failures(rows: Sequence[TuneRow]) -> list[str]:
    """A line for each error. Errors that differ only in numbers, such as the pid, are one."""
    failed: dict[str, list[TuneRow]] = {}
    for row in rows:
        if row.failure:  # of several workers that fail, each has a line
            failed.setdefault(re.sub(r"\d+", "", row.failure.splitlines()[0]), []).append(row)
    lines = []
    for first, *others in failed.values():
        more = f" (the same error for {len(others)} more)" if others else ""
        lines.append(f"{_short(first.candidate)}: {' '.join(str(first.failure).split())}{more}")
    return lines


def _figure(values: Sequence[float], form: str) -> str:
    """The median and the quartiles; "-" without figures."""
    if not values or not all(map(math.isfinite, values)):
        return "-"
    if len(values) == 1:
        return form.format(values[0])
    low, middle, high = (form.format(x) for x in np.quantile(values, (0.25, 0.5, 0.75)))
    return f"{middle} ({low} to {high})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
