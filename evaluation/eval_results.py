"""What an evaluation has found: results of episodes, means and differences with intervals, tables and files."""

from __future__ import annotations

import csv
import json
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.buffers.named import as_named
from penstock.buffers.tree import tree_of
from penstock.envs.recorded_episode import RecordedEpisode
from penstock.errors import ConfigError, brief
from penstock.evaluation import intervals
from penstock.evaluation.intervals import Array, Interval
from penstock.evaluation.proof import PlayedEpisode, Trace, load_trace

if TYPE_CHECKING:
    from penstock.evaluation.jobs import EvaluationPlan


@dataclass
class EpisodeResult:
    """What became of one episode."""

    policy: str
    task: str
    episode: int  #: its number; the same for all policies
    seed: int  #: of the reset
    length: int = 0  #: steps
    attempts: int = 1  #: how often it began
    failed: str = ""  #: why it has no end, after the last attempt; "" if it has one
    terminated: bool = False
    truncated: bool = False
    #: "return", "success" if it was asked for, and the numbers in the info of the last step.
    metrics: dict[str, float | bool] = field(default_factory=dict)
    #: for `EvalResults.episode`; or the file that has it
    trace: Trace | Path | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, without the trace."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "trace"}

    def played(self) -> Trace | None:
        """The actions, the rewards and the marks of the observations; None for an episode that failed. Raises
        `ConfigError` if the file that has them is damaged."""
        return load_trace(self.trace, self.length) if isinstance(self.trace, Path) else self.trace


@dataclass
class EvalResults:
    """The results of an evaluation, ordered by policy, task and episode. `print(results)` shows a table.

    Means are over the episodes that ended; `bounds` says what the others could change. All intervals are of 95 %, over
    the episodes that may be drawn: of other tasks, or other training runs, they say nothing.
    """

    episodes: list[EpisodeResult]
    policies: list[str]
    tasks: list[str]
    n_restarts: int = 0  #: how many workers were replaced
    n_rebuilt: int = 0  #: how often all workers were built again, since one of them had corrupted memory
    n_missing: int = 0  #: loaded results: episodes of the evaluation that have not ended yet
    n_proved: int = 0  #: for how many pairs of a policy and a task an episode was the same when it was played again
    _plan: EvaluationPlan | None = field(default=None, repr=False, compare=False)

    # ---- figures ---------------------------------------------------------------------------

    @property
    def failed(self) -> list[EpisodeResult]:
        """The episodes that have no end, because of their environment."""
        return [result for result in self.episodes if result.failed]

    @property
    def headline(self) -> str:
        """The metric that the table shows: "success" if every episode that ended has it, else "return"."""
        return "success" if self._figures.n_have.get("success") == self._figures.ended.sum() else "return"

    @cached_property
    def _figures(self) -> _Figures:
        return _Figures(self)

    def values(self, policy: str, metric: str, task: str | None = None) -> list[Array]:
        """The values of a metric by task, or of this task alone, in the order of the episodes. Episodes that failed are
        left out. One that ended without the metric is NaN. Raises `ConfigError` for names that are not there."""
        values, ended = self._chosen(policy, metric, task)
        return [row[mask] for row, mask in zip(values, ended, strict=True)]

    def _chosen(self, policy: str, metric: str, task: str | None) -> tuple[Array, Array]:
        """The values of a metric `[task, episode]`, and which episodes have ended."""
        for what, name, plural, known in (
            ("policy", policy, "policies", self.policies),
            ("task", task, "tasks", self.tasks),
            ("metric", metric, "metrics", list(self._figures.metrics)),
        ):
            if name is not None and name not in known:
                raise ConfigError(f"there is no {what} {name!r}: the {plural} are {brief(known)}")
        place = self._figures.place(policy, task)
        return self._figures.metrics[metric][place], self._figures.ended[place]

    def mean(self, policy: str, metric: str, task: str | None = None) -> Interval:
        """The mean of a metric in one task, or the mean of the tasks' means: estimate, lower and upper end. Where the
        metric is True or False, this is the share, with Wilson's interval; else Student's. It is NaN if the metric is
        NaN in one episode, or if one that ended does not have it."""
        of = intervals.share if self.is_share(metric) else intervals.mean
        return of(self.values(policy, metric, task))

    def difference(self, a: str, b: str, metric: str, task: str | None = None) -> Interval:
        """How much larger a metric is for the policy `a` than for `b`, in pairs: over the episodes that ended for both.
        It is NaN where `mean` is."""
        (x, x_ended), (y, y_ended) = (self._chosen(policy, metric, task) for policy in (a, b))
        with np.errstate(invalid="ignore"):  # inf - inf
            differences = x - y
        of = intervals.paired_share if self.is_share(metric) else intervals.mean
        return of([row[mask] for row, mask in zip(differences, x_ended & y_ended, strict=True)])

    def bounds(
        self,
        policy: str,
        metric: str,
        task: str | None = None,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> tuple[float, float]:
        """The mean if each failed episode had the `least` value of the metric, and if each had the `most`. They are 0
        and 1 for a share, and otherwise by default the extremes of the other episodes. Tasks weigh as in `mean`."""
        strata, n_failed = self.values(policy, metric, task), self._figures.failed[self._figures.place(policy, task)]
        known = np.concatenate([*strata, [math.nan] * (not any(map(len, strata)))])
        extremes = (0.0, 1.0) if self.is_share(metric) else (float(known.min()), float(known.max()))
        low, high = (extreme if end is None else end for end, extreme in zip((least, most), extremes, strict=True))
        parts = [(values, n) for values, n in zip(strata, n_failed.sum(-1).tolist(), strict=True) if len(values) + n]
        parts = parts or [(known, 0)]  # NaN, where there is no episode
        lower, upper = (np.mean([np.append(values, [end] * n).mean() for values, n in parts]) for end in (low, high))
        return float(lower), float(upper)

    def metrics(self) -> dict[str, float]:
        """All means and their intervals in one flat dict, for a logger: `policy/task/metric`, with `_lower` and
        `_upper`, without the task for all of them together, and without names that are the only one; `n_failed` and
        `n_episodes` are counts. Raises `ConfigError` if two figures would have the same name."""
        row: dict[str, float] = {}
        for policy in self.policies:
            for task in [None, *self.tasks] if len(self.tasks) > 1 else [None]:
                parts = [policy] * (len(self.policies) > 1) + [task] * (task is not None)
                prefix = "".join(f"{part}/" for part in parts)
                for metric in self._figures.metrics:
                    ends = zip(("", "_lower", "_upper"), self.mean(policy, metric, task), strict=True)
                    _add(row, {f"{prefix}{metric}{end}": value for end, value in ends})
                place = self._figures.place(policy, task)
                n_failed, n_ended = (int(which[place].sum()) for which in (self._figures.failed, self._figures.ended))
                _add(row, {f"{prefix}n_failed": n_failed, f"{prefix}n_episodes": n_failed + n_ended})
        return row

    def is_share(self, metric: str) -> bool:
        """Whether the mean of a metric is a share: it is True or False in all episodes, or a number of the info that is
        0 or 1 in all of them."""
        return metric not in self._figures.numbers

    # ---- tables and pictures -------------------------------------------------------------------

    def __str__(self) -> str:
        rows, notes = self._rows()
        widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            (name, *cells), (first, *others) = row, widths
            padded = [" " * (width - _width(cell)) + cell for cell, width in zip(cells, others, strict=True)]
            lines.append("  ".join([name + " " * (first - _width(name)), *padded]).rstrip())
        return "\n".join([*lines, *notes])

    def __rich__(self) -> Any:
        """The table, for `rich.print`."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        (header, *rows), notes = self._rows()
        table = Table()
        for i, name in enumerate(header):
            table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table, *map(Text, notes))

    def _rows(self) -> tuple[list[list[str]], list[str]]:
        """The cells of the table, and the lines below it."""
        metric, first = self.headline, self.policies[0]
        rows, notes = [[metric, *self.policies]], []
        n, n_failed, n_ended = len(self.episodes), len(self.failed), int(self._figures.ended.sum())
        counts = f"{n} episode{'s' * (n != 1)}; {n_failed} of them failed, and are not in the means"
        if n_ended:
            for task in [*self.tasks, None] if len(self.tasks) > 1 else self.tasks:
                cells = [_cell(self.mean(policy, metric, task)) for policy in self.policies]
                rows.append(["all" if task is None else task, *cells])
            for other in self.policies[1:]:
                text = _cell(self.difference(other, first, metric), "+")
                notes.append(f"{other} - {first}: {text}, in pairs of the same episodes")
            if n_failed:
                ends = [f"{policy} {' to '.join(_texts(self.bounds(policy, metric)))}" for policy in self.policies]
                counts += f" (with them: {', '.join(ends)})"
        if 0 < (n_have := self._figures.n_have.get("success", 0)) < n_ended:
            notes.append(f"success: {n_have} of {n_ended} episodes have it, so it has no mean")
        if self.n_missing:
            counts += f"; {self.n_missing} are still to be played, the longest among them: do not trust these means"
        return [[_one_line(cell) for cell in row] for row in rows], [_one_line(note) for note in (*notes, counts)]

    def plot(self, metric: str | None = None) -> Any:
        """A figure of matplotlib: the means of the policies by task with their intervals and, if there are several
        policies, their paired differences from the first. The metric is the headline, if none is given.

        `results.plot().savefig("eval.png")` writes it. Raises `ConfigError` if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("plot needs matplotlib: pip install matplotlib") from error
        metric, names = metric or self.headline, [_one_line(name) for name in self.policies]
        tasks = [*self.tasks, None] if len(self.tasks) > 1 else self.tasks
        panels = {metric: [[self.mean(policy, metric, task) for task in tasks] for policy in self.policies]}
        if len(names) > 1:
            first, *others = self.policies
            pairs = [[self.difference(other, first, metric, task) for task in tasks] for other in others]
            panels[f"{metric}, minus that of {names[0]}"] = [[], *pairs]
        size = 5.0 + 4.0 * len(panels), 1.5 + len(tasks) * (0.15 + 0.15 * len(names))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        dots = []
        for panel, (title, rows) in zip(axes, panels.items(), strict=True):
            for i, row in enumerate(rows):
                if row:
                    estimates, *ends = np.array(row).T
                    y = np.arange(len(tasks)) + 0.7 * ((i + 0.5) / len(names) - 0.5)
                    panel.plot(ends, [y, y], color=f"C{i}")
                    dots += panel.plot(estimates, y, "o", color=f"C{i}")
            panel.set_xlabel(title, parse_math=False)
        labels = ["all" if task is None else _one_line(task) for task in tasks]
        axes[0].set_yticks(range(len(tasks)), labels, parse_math=False)
        axes[0].set_ylim(len(tasks) - 0.5, -0.5)
        if len(names) > 1:
            axes[1].axvline(0, color="grey", linewidth=1)
            legend = figure.legend(dots[: len(names)], [""] * len(names), loc="outside upper center", ncols=4)
            for text, name in zip(legend.get_texts(), names, strict=True):  # given at once, "_name" is left out
                text.set(text=name, parse_math=False)
        return figure

    # ---- episodes and files ------------------------------------------------------------------

    def episode(self, policy: str, task: str, episode: int) -> RecordedEpisode:
        """An episode, to be repeated in this process: debug it, or make a film of it. It raises `RepeatError` at the
        first step that is not as it was.

        The task of an evaluation without tasks is "". Raises `ConfigError` for an episode that is not there or has
        failed, and for loaded results without `env_fn`.
        """
        if self._plan is None:
            raise ConfigError("these results do not know the environment: give env_fn to EvalResults.load")
        plan = self._plan
        job = plan.job(plan.number(policy, task, episode))
        chosen = [r for r in self.episodes if (r.policy, r.task, r.episode) == (policy, task, episode)]
        if not chosen:
            raise ConfigError(f"episode {episode} of {policy!r} is not among these results")
        (result,) = chosen
        if (trace := result.played()) is None:
            raise ConfigError(f"episode {episode} of {policy!r} has no actions: {result.failed or 'none were kept'}")
        rewards = trace.rewards
        return PlayedEpisode(
            factory=plan.factories[job.task],
            context=plan.context(job.task, 0),
            episode=episode,
            seed=result.seed,
            actions=as_named(tree_of(plan.spaces[1], trace.actions)),
            rewards=np.array(rewards[:-1], np.float32),
            options=job.options,
            last_reward=np.float32(rewards[-1]),
            terminated=result.terminated,
            checks=trace.checks,
            sums=trace.sums,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all results into a file, `.json` or `.csv`: a list of episodes, or a row for each.
        What is no finite number is null in JSON."""
        rows = [result.as_dict() for result in self.episodes]
        if Path(path).suffix == ".json":
            for row in rows:  # JSON has no NaN and no infinity
                row["metrics"] = {k: v if math.isfinite(v) else None for k, v in row["metrics"].items()}
            Path(path).write_text(json.dumps(rows, indent=1, allow_nan=False))
        elif Path(path).suffix == ".csv":
            flat = []
            for row in rows:
                metrics = row.pop("metrics")
                flat.append({**row, **{f"info.{key}" if key in row else key: value for key, value in metrics.items()}})
            names = list(dict.fromkeys(name for row in flat for name in row))
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(flat)
        else:
            raise ConfigError(f"results are saved as .json or .csv, got {os.fspath(path)!r}")

    @staticmethod
    def load(
        *folders: str | os.PathLike[str],
        env_fn: Any = None,
        tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
        options: Callable[[str, int], Mapping[str, Any]] | None = None,
    ) -> EvalResults:
        """The results in the folders of one or several evaluations, which must have played the same tasks with the same
        seed. `episode` also needs `env_fn`, `tasks` and `options`, as `evaluate` got them.

        Raises `ConfigError` for folders that do not fit together, or that `evaluate` has not written.
        """
        from penstock.evaluation.episode_files import load_folders

        return load_folders(folders, env_fn, tasks, options)


class _Figures:
    """All metrics as arrays `[policy, task, episode]`."""

    def __init__(self, results: EvalResults) -> None:
        axes: Any = results.policies, results.tasks, sorted({result.episode for result in results.episodes})
        self._places: Any = [{name: i for i, name in enumerate(names)} for names in axes]
        shape = tuple(map(len, axes))
        self.ended, self.failed = np.zeros(shape, bool), np.zeros(shape, bool)
        self.metrics: dict[str, Array] = {}  #: NaN where an episode has none
        self.numbers: set[str] = set()  #: the metrics that are no shares
        self.n_have: Counter[str] = Counter()  #: how many episodes have a metric
        for result in results.episodes:
            places = zip(self._places, (result.policy, result.task, result.episode), strict=True)
            place = tuple(index[name] for index, name in places)
            (self.failed if result.failed else self.ended)[place] = True
            for name, value in result.metrics.items():
                if name not in self.metrics:
                    self.metrics[name] = np.full(shape, math.nan)
                self.metrics[name][place] = value
                if not isinstance(value, bool):
                    self.numbers.add(name)
            self.n_have.update(result.metrics.keys())
        for name in self.numbers - {"return", "max_reward"}:  # an environment may say 1 for True
            values = self.metrics[name][~np.isnan(self.metrics[name])]
            if np.isin(values, (0, 1)).all():
                self.numbers.discard(name)

    def place(self, policy: str, task: str | None) -> tuple[int, slice]:
        """Where the arrays have a policy and a task, or all tasks."""
        first = None if task is None else self._places[1][task]
        return self._places[0][policy], slice(first, None if first is None else first + 1)


def _add(row: dict[str, float], values: dict[str, float]) -> None:
    if twice := sorted(row.keys() & values.keys()):
        raise ConfigError(f"two figures have the name {twice[0]!r}: rename a policy, a task or an entry of the info")
    row |= values


def _cell(interval: Interval, sign: str = "") -> str:
    return "{} [{}, {}]".format(*_texts(interval, sign))


def _texts(values: Sequence[float], sign: str = "") -> list[str]:
    """Numbers with so many digits that their differences can be seen: at least three decimals, or an exponent."""
    known = [value for value in values if math.isfinite(value)]
    size, spread = max(map(abs, known), default=0.0), max(known, default=0.0) / 2 - min(known, default=0.0) / 2
    if size == 0:
        spec = ".3f"
    else:
        digits, last = (math.floor(math.log10(x)) for x in (size, spread if spread > 1e-7 * size else size))
        spec = f".{max(3, 1 - last)}f" if 1e-3 <= size < 1e9 else f".{max(2, digits - last + 1)}e"
    return [f"{value:{sign}{spec}}" for value in values]


def _one_line(text: str) -> str:
    """`text` without line breaks and other characters that have no width."""
    return "".join(character if character.isprintable() else " " for character in text)


def _width(text: str) -> int:
    """The columns of a terminal that a text takes: East Asian characters take two, and combining ones none."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "FW")
        for character in text
    )
