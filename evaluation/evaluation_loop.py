"""Plays all episodes of an evaluation: which begin, which run, and what to do when one fails."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from penstock.buffers.reports import load_exception
from penstock.buffers.tree import tree_leaves, tree_of
from penstock.errors import ConfigError, WorkerError
from penstock.evaluation.episode_env import LONGEST_CHUNK, NO_JOB
from penstock.evaluation.eval_results import EpisodeResult
from penstock.evaluation.jobs import EvaluationPlan
from penstock.evaluation.policies import Player, concatenated, take_rows
from penstock.vector import ShmVectorEnv
from penstock.vector.vector_pool import WaitTimeoutError

_Ids = npt.NDArray[np.intp]
_ENOUGH = 3  # failed episodes, to say that the environment is broken


@dataclass
class _Column:
    number: int = NO_JOB  # of the episode that runs in it
    policy: str = ""  # of this episode
    task: int = -1  # of its environment
    is_reset: bool = False  # whether the episode's reset has been made


def job_space(plan: EvaluationPlan) -> spaces.Dict:
    """The action space of an `EpisodeEnv`."""
    return spaces.Dict(
        action=batch_space(plan.spaces[1], LONGEST_CHUNK),
        order=spaces.MultiDiscrete([plan.n + 1, LONGEST_CHUNK + 1], start=[NO_JOB, 0]),
    )


class EvaluationLoop:
    """Gives each column its episodes, and lets policies act for the columns that wait. `players` act in this process;
    without them, the workers have the policies."""

    def __init__(
        self,
        plan: EvaluationPlan,
        numbers: Sequence[int],
        n_columns: int,
        players: Mapping[str, Player] | None,
        *,
        attempts: int,
        min_ready: float,
        max_wait: float | None,
        n_ended: int,
        on_result: Callable[[int, EpisodeResult], None],
    ) -> None:
        """`numbers`: which episodes to play. `n_ended` others have ended before. `on_result` is called with each number
        and its result. `min_ready`: for how many of its columns that wait a policy acts, a share if it is below 1."""
        self._plan, self._players, self._attempts, self._on_result = plan, players, attempts, on_result
        self._min_ready, self._max_wait = min_ready, max_wait
        self._todo: dict[int, deque[int]] = defaultdict(deque)  # by task
        for number in numbers:
            self._todo[plan.job(number).task].append(number)
        self.n_left, self.is_broken = len(numbers), False  # broken: an error says that nothing but failures came
        self._columns = [_Column() for _ in range(n_columns)]
        self._n_running = Counter[str]()  # by policy: its episodes that run
        self._n_failures, self._n_attempts = Counter[int](), Counter[int]()  # by episode
        self._n_ended, self._n_failed = n_ended, Counter[int]()  # failed: by task
        self._action_space = plan.spaces[1]
        leaves = [part for _, part in tree_leaves(self._action_space)]
        self._chunk = [np.zeros((n_columns, LONGEST_CHUNK, *part.shape), part.dtype) for part in leaves]
        # By column: the episode that begins with its next step, or NO_JOB, and how many actions it gets.
        self._order = np.tile((NO_JOB, 0), (n_columns, 1))
        self._resetting: set[int] = set()  # columns whose next step only resets them: their workers were replaced
        # By policy: columns that wait for it, their rows in these observations, and since when they wait.
        self._waiting: dict[str, list[tuple[_Ids, _Ids, Any, float]]] = defaultdict(list)

    # ---- episodes ----------------------------------------------------------------------------

    def _begin_next(self, c: int) -> bool:
        """Let column c begin its next episode with the step that comes, if there is one. It prefers the task that its
        environment was built for. Until an episode has ended, it prefers tasks in which none has failed."""
        column = self._columns[c]
        n_failed = Counter[int]() if self._n_ended else self._n_failed
        queue = self._todo.get(column.task)
        if not queue or n_failed[column.task]:
            _, queue = max(self._todo.items(), key=lambda each: (bool(each[1]), -n_failed[each[0]], len(each[1])))
        if not queue:
            return False
        column.number = number = queue.popleft()
        self._order[c] = number, 0
        job = self._plan.job(number)
        column.policy, column.task = job.policy, job.task
        self._n_running[job.policy] += 1
        self._n_attempts[number] += 1
        return True

    def end(self, c: int, *, failure: str = "", facts: Mapping[str, Any] | None = None) -> None:
        """The episode of this column, if one runs, has ended, with these `facts`. Without them it begins again later,
        unless it has now failed by itself (`failure`) as often as it may.

        Raises `WorkerError` if nothing but failures has come so far, in each task.
        """
        column = self._columns[c]
        number, column.number, column.is_reset = column.number, NO_JOB, False
        if number == NO_JOB:
            return
        self._n_running[column.policy] -= 1
        self._n_failures[number] += bool(failure)
        if facts is None and self._n_failures[number] < self._attempts:
            self._todo[column.task].appendleft(number)
            return
        plan, job = self._plan, self._plan.job(number)
        result = EpisodeResult(job.policy, plan.task_names[job.task], job.episode, job.seed, failed=failure)
        result.attempts = self._n_attempts[number]
        if facts is None:
            self._n_failed[job.task] += 1
        else:
            self._n_ended += 1
            result.length, result.terminated = facts["length"], facts["terminated"]
            result.truncated = facts["truncated"]
            result.metrics = _metrics(facts, plan)
            result.trace = facts["trace"]
        self.n_left -= 1
        self._on_result(number, result)
        n_failed, is_everywhere = self._n_failed.total(), len(self._n_failed) == len(self._todo)
        acts = self.n_left and (not is_everywhere or any(column.is_reset for column in self._columns))
        if n_failed >= _ENOUGH and not self._n_ended and not acts:
            self.is_broken = True
            raise WorkerError(f"the environment is broken: the first {n_failed} episodes have all failed. {failure}")

    def end_all(self) -> None:
        """All workers have ended: their episodes will begin again."""
        for c, column in enumerate(self._columns):
            self.end(c)
            column.task = -1
        self._waiting.clear()

    # ---- steps -------------------------------------------------------------------------------

    def play(self, envs: ShmVectorEnv) -> None:
        """Run until every episode has a result. Raises a `SamplerBrokenError` if the workers cannot go on."""
        envs.reset()
        n_seen, self._n_out = 0, 0  # replacements of workers, and columns that step
        self._resetting.clear()
        ids = np.array([c for c in range(envs.num_envs) if self._begin_next(c)], np.intp)
        while len(ids) or self._n_out:
            if len(ids):
                self._send(envs, ids)
            received = self._receive(envs)
            if received is None:
                ids = self._act(is_idle=False)
                continue
            observation, reward, _, _, infos = received
            for restart in envs.restarts[n_seen:]:
                if restart.env_rank is not None:
                    self.end(restart.env_rank, failure=restart.what)
            ids, n_seen = infos["env_id"], len(envs.restarts)
            self._n_out -= len(ids)
            acts, sends = self._read(ids, infos)
            if self._players is not None:
                sends &= ~acts
                self._wait_for_policies(ids, np.flatnonzero(acts), reward, observation)
            ids = ids[sends]
            if self._waiting:
                ids = np.concatenate([ids, self._act(is_idle=not (len(ids) or self._n_out))])

    def _send(self, envs: ShmVectorEnv, ids: _Ids) -> None:
        chunk = tree_of(self._action_space, [part[ids] for part in self._chunk])
        envs.send({"action": chunk, "order": self._order[ids]}, ids)
        self._order[ids] = NO_JOB, 0
        self._n_out += len(ids)

    def _read(self, ids: _Ids, infos: Mapping[str, Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Read what the steps of these columns say. Returns for which of them a policy must act, and which are to step
        again, if no policy acts in this process."""
        lost, notes = infos.get("worker_restarted"), infos.get("note")
        acts, sends = np.ones(len(ids), np.bool_), np.ones(len(ids), np.bool_)
        if lost is None and notes is None and not self._resetting and self._n_running.total() >= len(ids):
            return acts, sends  # the usual case
        for row, c in enumerate(ids.tolist()):
            acts[row] = False
            if lost is not None and lost[row]:
                self.end(c)
                self._resetting.add(c)
                continue
            kind, value = (notes[row] if notes is not None else None) or ("", None)
            if c in self._resetting:
                self._resetting.remove(c)
            elif self._columns[c].number != NO_JOB and self._take_note(c, kind, value):
                acts[row] = kind != "more"
                continue
            sends[row] = self._begin_next(c)
        return acts, sends

    def _receive(self, envs: ShmVectorEnv) -> Any:
        """The next results; None if a policy should not wait for them any longer."""
        wanted = 1 if self._players is None else max(1, self._n_missing())
        if not self._waiting or self._max_wait is None:
            return envs.recv(wanted)
        left = min(parts[0][-1] for parts in self._waiting.values()) + self._max_wait - time.monotonic()
        try:
            return envs.recv(wanted, timeout=max(left, 0.0))
        except WaitTimeoutError:
            return None

    def _n_missing(self) -> int:
        """How many results must come before some policy may act."""
        n_waiting = {name: sum(len(part[0]) for part in parts) for name, parts in self._waiting.items()}
        missing = [self._n_wanted(n) - n_waiting.get(name, 0) for name, n in self._n_running.items() if n]
        return min([self._n_out, *missing])

    def _n_wanted(self, n_running: int) -> int:
        """For how many waiting columns a policy acts, if it has so many."""
        wanted = self._min_ready if self._min_ready >= 1 else self._min_ready * n_running
        return max(1, min(n_running, -int(-wanted // 1)))

    def _take_note(self, c: int, kind: str, value: Any) -> bool:
        """Act on the note of a step. Returns whether the episode continues."""
        column = self._columns[c]
        player = None if self._players is None else self._players[column.policy]
        if kind == "ended":
            self.end(c, facts=value)
        elif kind == "raised":
            self.end(c, failure=value)
        elif kind == "policy raised":
            report = load_exception(*value)
            if report.exception is None:
                raise WorkerError(f"a policy raised {report.headline}") from report.as_cause()
            raise report.as_cause()
        elif kind == "begun":
            column.is_reset = True
            if player is not None:
                job = self._plan.job(column.number)
                player.begin(c, self._plan.rng(job), self._plan.task_names[job.task], value)
        elif player is not None and value:
            player.infos[c].update(value)
        return column.number != NO_JOB

    # ---- policies ----------------------------------------------------------------------------

    def _wait_for_policies(self, ids: _Ids, rows: _Ids, reward: npt.NDArray[np.float64], observation: Any) -> None:
        """Note that the columns in these rows wait for their policies."""
        assert self._players is not None
        if len(self._players) == 1:
            groups = {next(iter(self._players)): rows}
        else:
            names = np.array([self._columns[c].policy for c in ids[rows].tolist()])
            groups = {name: rows[names == name] for name in dict.fromkeys(names.tolist())}
        for name, group in groups.items():
            if len(group):
                columns = ids[group]
                self._players[name].last_reward[columns] = reward[group]
                self._waiting[name].append((columns, group, observation, time.monotonic()))

    def _act(self, *, is_idle: bool) -> _Ids:
        """Let each policy act for the columns that wait for it, if these are enough, or no other step runs. For which
        columns it acts together does not change the episodes. Returns the columns that have an action now."""
        assert self._players is not None
        ready, now = [np.zeros(0, np.intp)], time.monotonic()
        for name, parts in list(self._waiting.items()):
            columns = np.concatenate([part[0] for part in parts])
            is_late = self._max_wait is not None and now >= parts[0][-1] + self._max_wait
            if not (is_idle or is_late) and len(columns) < self._n_wanted(self._n_running[name]):
                continue
            del self._waiting[name]
            player, space = self._players[name], self._plan.spaces[0]
            observation = concatenated(space, [_rows(space, whole, rows) for _, rows, whole, _ in parts])
            chunks = player.act(columns, observation)
            n = chunks[0].shape[1]
            if n > LONGEST_CHUNK:
                raise ConfigError(
                    f"the policy {name!r} returns chunks of {n} actions, more than {LONGEST_CHUNK}: return the first "
                    "of them, and it is asked again"
                )
            self._order[columns, 1] = n
            for place, chunk in zip(self._chunk, chunks, strict=True):
                place[columns, :n] = chunk
            ready.append(columns)
        return np.concatenate(ready)


def _rows(space: gym.Space[Any], batch: Any, rows: _Ids) -> Any:
    first = next(iter(tree_leaves(space, "", batch)))[2]
    return batch if len(rows) == len(first) else take_rows(space, batch, rows.tolist())


def _metrics(facts: Mapping[str, Any], plan: EvaluationPlan) -> dict[str, float | bool]:
    """The return, the largest reward, success, and the numbers in the last info, of which booleans stay booleans: their
    mean is a share."""
    metrics: dict[str, float | bool] = {"return": facts["return"], "max_reward": float(facts["trace"].rewards.max())}
    if plan.success is not None:
        if facts["success"] is None:
            where, when = "the last step", "at the end"
            if plan.success_at == "any":
                where, when = "any step", "at least once"
            raise ConfigError(
                f"success={plan.success!r} is not in the info of {where} of an episode, which has "
                f"{sorted(facts['info'])}: the environment must say it {when} of each"
            )
        metrics["success"] = facts["success"]
    for key, value in facts["info"].items():
        array = np.zeros(0) if isinstance(value, dict | list | None) else np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            name = key
            while name in metrics:
                name = f"info.{name}"
            metrics[name] = bool(array.item()) if array.dtype.kind == "b" else float(array.item())
    return metrics
