"""What an evaluation has found: results of episodes, means and differences with intervals, tables and files."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import as_named
from penstock.buffers.tree import tree_of
from penstock.envs.recorded_episode import RecordedEpisode
from penstock.errors import ConfigError, brief
from penstock.evaluation import intervals
from penstock.evaluation.intervals import Interval
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

    def values(self, policy: str, metric: str, task: str | None = None) -> list[npt.NDArray[np.float64]]:
        """The values of a metric by task, or of this task alone, in the order of the episodes. Episodes that failed, or
        do not have the metric, are left out. Raises `ConfigError` for names that are not there."""
        return [np.array(list(values.values())) for values in self._by_episode(policy, metric, task)]

    def _by_episode(self, policy: str, metric: str, task: str | None) -> list[dict[int, float]]:
        """The values of a metric by task and episode."""
        if policy not in self.policies:
            raise ConfigError(f"there is no policy {policy!r}: the policies are {brief(self.policies)}")
        if task is not None and task not in self.tasks:
            raise ConfigError(f"there is no task {task!r}: the tasks are {brief(self.tasks)}")
        if metric not in (known := self._metrics()):
            raise ConfigError(f"there is no metric {metric!r}: the metrics are {brief(list(known))}")
        by_task: dict[str, dict[int, float]] = {name: {} for name in (self.tasks if task is None else [task])}
        for result in self.episodes:
            if result.policy == policy and result.task in by_task and metric in result.metrics:
                by_task[result.task][result.episode] = float(result.metrics[metric])
        return list(by_task.values())

    def mean(self, policy: str, metric: str, task: str | None = None) -> Interval:
        """The mean of a metric over all tasks, or one: estimate, lower and upper end. Where the metric is True or
        False, this is the share, with Wilson's interval; else Student's. NaN in one episode makes it NaN."""
        return self._interval(intervals.share, metric, self.values(policy, metric, task))

    def difference(self, a: str, b: str, metric: str, task: str | None = None) -> Interval:
        """How much larger a metric is for the policy `a` than for `b`, in pairs: over the episodes that both have."""
        pairs = zip(self._by_episode(a, metric, task), self._by_episode(b, metric, task), strict=True)
        differences = [np.array([x[k] - y[k] for k in x if k in y]) for x, y in pairs]
        return self._interval(intervals.paired_share, metric, differences)

    def _interval(
        self, of_shares: Callable[..., Interval], metric: str, by_task: Sequence[npt.NDArray[np.float64]]
    ) -> Interval:
        strata = [values for values in by_task if len(values)]
        return (of_shares if self._is_share(metric) else intervals.mean)(strata or [np.zeros(0)])

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
        and 1 for a share, and otherwise by default the extremes of the other episodes."""
        known = np.concatenate(self.values(policy, metric, task))
        n_failed = sum(r.policy == policy and task in (None, r.task) for r in self.failed)
        if self._is_share(metric):
            least, most = 0.0 if least is None else least, 1.0 if most is None else most
        if not len(known) and (least is None or most is None):
            return math.nan, math.nan
        ends = (known.min() if least is None else least, known.max() if most is None else most)
        low, high = (float((known.sum() + n_failed * end) / (len(known) + n_failed)) for end in ends)
        return low, high

    def metrics(self) -> dict[str, float]:
        """All means and their intervals in one flat dict, for a logger: `policy/task/metric`, with `_lower` and
        `_upper`, without the task for all of them together, and without names that are the only one; `n_failed` and
        `n_episodes` are counts."""
        row: dict[str, float] = {}
        for policy in self.policies:
            for task in [None, *self.tasks] if len(self.tasks) > 1 else [None]:
                parts = [policy] * (len(self.policies) > 1) + [task] * (task is not None)
                prefix = "".join(f"{part}/" for part in parts)
                for metric in self._metrics():
                    ends = zip(("", "_lower", "_upper"), self.mean(policy, metric, task), strict=True)
                    row |= {f"{prefix}{metric}{end}": value for end, value in ends}
                chosen = [r for r in self.episodes if r.policy == policy and task in (None, r.task)]
                row[f"{prefix}n_failed"] = sum(bool(result.failed) for result in chosen)
                row[f"{prefix}n_episodes"] = len(chosen)
        return row

    def _metrics(self) -> dict[str, Any]:
        """The names of all metrics, with an example of each."""
        return {name: value for result in self.episodes for name, value in result.metrics.items()}

    def _is_share(self, metric: str) -> bool:
        return all(isinstance(r.metrics[metric], bool) for r in self.episodes if metric in r.metrics)

    def __str__(self) -> str:
        metric = "success" if "success" in self._metrics() else "return"
        lines = [f"{metric:16}" + "".join(f"{policy:>28}" for policy in self.policies)]
        if metric in self._metrics():
            for task in [*self.tasks, None] if len(self.tasks) > 1 else self.tasks:
                cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*self.mean(policy, metric, task)) for policy in self.policies]
                lines.append(f"{'all' if task is None else task:16}" + "".join(f"{cell:>28}" for cell in cells))
            first = self.policies[0]
            for other in self.policies[1:]:
                text = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*self.difference(other, first, metric))
                lines.append(f"{other} - {first}: {text}, in pairs of the same episodes")
        n = len(self.episodes)
        counts = f"{n} episode{'s' * (n != 1)}; {len(self.failed)} of them failed, and are not in the means"
        if self.failed:
            ends = ", ".join("{} {:.3f} to {:.3f}".format(p, *self.bounds(p, metric)) for p in self.policies)
            counts += f" (with them: {ends})" if metric in self._metrics() else ""
        if self.n_missing:
            counts += f"; {self.n_missing} are still to be played, the longest among them: do not trust these means"
        return "\n".join([*lines, counts])

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
        """Write all results into a file, `.json` or `.csv`: a list of episodes, or a row for each."""
        rows = [result.as_dict() for result in self.episodes]
        if Path(path).suffix == ".json":
            Path(path).write_text(json.dumps(rows, indent=1))
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
