"""Plays all episodes of an evaluation: which begin, which run, and what to do when one fails."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
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
from penstock.evaluation.jobs import EvaluationPlan, is_true
from penstock.evaluation.policies import Player, concatenated, take_rows
from penstock.vector import ShmVectorEnv
from penstock.vector.vector_pool import WaitTimeoutError

_Ids = npt.NDArray[np.intp]
_ENOUGH = 3  # failed episodes, to say that the environment is broken


def job_space(plan: EvaluationPlan) -> spaces.Dict:
    """The action space of an `EpisodeEnv`."""
    return spaces.Dict(
        action=batch_space(plan.spaces[1], LONGEST_CHUNK),
        order=spaces.MultiDiscrete([plan.n + 2, LONGEST_CHUNK + 1], start=[NO_JOB, 0]),
    )


class EpisodeRun:
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
        self._running: dict[int, int] = {}  # by column: the number of its episode
        self._policy_of: dict[int, str] = {}  # by column: the policy of its episode
        self._task_of: dict[int, int] = {}  # by column: the task of its environment
        self._acting: set[int] = set()  # columns whose environment has been reset
        self._charges, self._begun = Counter[int](), Counter[int]()  # by episode: its failures, and its attempts
        self._n_ended, self._n_failed, self._last_failure = n_ended, 0, ""
        self._action_space = plan.spaces[1]
        leaves = [part for _, part in tree_leaves(self._action_space)]
        self._chunk = [np.zeros((n_columns, LONGEST_CHUNK, *part.shape), part.dtype) for part in leaves]
        # By column: the episode that begins with its next step, or NO_JOB, and how many actions it gets.
        self._order = np.tile((NO_JOB, 0), (n_columns, 1))
        self._swallow: set[int] = set()  # columns whose next step is only the reset after a replacement
        self._hungry: dict[str, list[tuple[_Ids, _Ids, Any]]] = defaultdict(list)  # columns, their rows, observations
        self._hungry_since: dict[str, float] = {}

    # ---- episodes ----------------------------------------------------------------------------

    def _give_job(self, column: int) -> bool:
        """Let the column begin its next episode with the step that comes, if there is one. It prefers the task that its
        environment was built for."""
        queue = self._todo.get(self._task_of.get(column, -1)) or max(self._todo.values(), key=len)
        if not queue:
            return False
        self._running[column] = number = queue.popleft()
        self._order[column] = number, 0
        job = self._plan.job(number)
        self._policy_of[column], self._task_of[column] = job.policy, job.task
        self._begun[number] += 1
        return True

    def give_back(self, column: int) -> None:
        """The episode of this column has no end: it will begin again."""
        self._acting.discard(column)
        self._policy_of.pop(column, None)
        if (number := self._running.pop(column, None)) is not None:
            self._todo[self._plan.job(number).task].appendleft(number)

    def give_all_back(self) -> None:
        """All workers have ended."""
        for column in list(self._running):
            self.give_back(column)
        self._task_of.clear()
        self._hungry.clear()
        self._hungry_since.clear()

    def charge(self, column: int | None, what: str) -> None:
        """The episode of this column caused a failure; None: no episode did. After its last attempt it has failed.

        Raises `WorkerError` if nothing but failures has come so far.
        """
        if column is None or (number := self._running.get(column)) is None:
            return
        self._acting.discard(column)
        self._charges[number] += 1
        if self._charges[number] < self._attempts:
            return
        self._finish(column, failed=what)
        self._n_failed, self._last_failure = self._n_failed + 1, what
        if self._n_failed >= _ENOUGH and not self._n_ended and not self._acting:
            raise self._broken(what)

    def require_an_end(self) -> None:
        """Raise `WorkerError` if all episodes have failed."""
        if self._n_failed >= _ENOUGH and not self._n_ended:
            raise self._broken(self._last_failure)

    def _broken(self, what: str) -> WorkerError:
        self.is_broken = True
        return WorkerError(f"the environment is broken: the first {self._n_failed} episodes have all failed. {what}")

    def _finish(self, column: int, failed: str = "", facts: Mapping[str, Any] | None = None) -> None:
        number = self._running.pop(column)
        del self._policy_of[column]
        self._acting.discard(column)
        plan, job = self._plan, self._plan.job(number)
        result = EpisodeResult(job.policy, plan.task_names[job.task], job.episode, job.seed, failed=failed)
        result.attempts = self._begun[number]
        if facts is not None:
            self._n_ended += 1
            result.length, result.terminated, result.truncated = (
                facts[key] for key in ("length", "terminated", "truncated")
            )
            result.metrics = _metrics(facts, plan.success)
            result.trace = facts["actions"], facts["rewards"]
        self.n_left -= 1
        self._on_result(number, result)

    # ---- steps -------------------------------------------------------------------------------

    def play(self, envs: ShmVectorEnv) -> None:
        """Run until every episode has a result. Raises a `SamplerBrokenError` if the workers cannot go on."""
        envs.reset()
        n_seen, self._n_out = 0, 0  # replacements of workers, and columns that step
        self._swallow.clear()
        ids = np.array([c for c in range(envs.num_envs) if self._give_job(c)], np.intp)
        while len(ids) or self._n_out:
            if len(ids):
                self._send(envs, ids)
            received = self._receive(envs)
            if received is None:
                ids = self._feed(is_idle=False)
                continue
            observation, reward, _, _, infos = received
            for restart in envs.restarts[n_seen:]:
                self.charge(restart.env_rank, restart.what)
            ids, n_seen = infos["env_id"], len(envs.restarts)
            self._n_out -= len(ids)
            acts, sends = self._read(ids, infos)
            if self._players is not None:
                sends &= ~acts
                self._note_hungry(ids, np.flatnonzero(acts), reward, observation)
            ids = ids[sends]
            if self._hungry:
                ids = np.concatenate([ids, self._feed(is_idle=not (len(ids) or self._n_out))])

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
        if lost is None and notes is None and not self._swallow and len(self._running) >= len(ids):
            return acts, sends  # the usual case
        for row, column in enumerate(ids.tolist()):
            acts[row] = False
            if lost is not None and lost[row]:
                self.give_back(column)
                self._swallow.add(column)
                continue
            kind, value = (notes[row] if notes is not None else None) or ("", None)
            if column in self._swallow:
                self._swallow.remove(column)
            elif column in self._running and self._goes_on(column, kind, value):
                acts[row] = kind != "more"
                continue
            sends[row] = self._give_job(column)
        return acts, sends

    def _receive(self, envs: ShmVectorEnv) -> Any:
        """The next results; None if a policy should not wait for them any longer."""
        wanted = 1 if self._players is None else max(1, self._n_missing())
        if not self._hungry or self._max_wait is None:
            return envs.recv(wanted)
        left = min(self._hungry_since.values()) + self._max_wait - time.monotonic()
        try:
            return envs.recv(wanted, timeout=max(left, 0.0))
        except WaitTimeoutError:
            return None

    def _n_missing(self) -> int:
        """How many results must come before some policy may act."""
        numbers = []
        for name, n in Counter(self._policy_of.values()).items():
            numbers.append(self._n_wanted(n) - sum(len(columns) for columns, _, _ in self._hungry.get(name, ())))
        return min([self._n_out, *numbers])

    def _n_wanted(self, n_running: int) -> int:
        """For how many waiting columns a policy acts, if it has so many."""
        wanted = self._min_ready if self._min_ready >= 1 else self._min_ready * n_running
        return max(1, min(n_running, -int(-wanted // 1)))

    def _goes_on(self, column: int, kind: str, value: Any) -> bool:
        """Take the note of a step. Returns whether the episode goes on."""
        player = None if self._players is None else self._players[self._policy_of[column]]
        if kind == "ended":
            self._finish(column, facts=value)
        elif kind == "raised":
            self.charge(column, value)
            self.give_back(column)
        elif kind == "policy raised":
            report = load_exception(*value)
            if report.exception is None:
                raise WorkerError(f"a policy raised {report.headline}") from report.as_cause()
            raise report.as_cause()
        elif kind == "begun":
            self._acting.add(column)
            if player is not None:
                job = self._plan.job(self._running[column])
                player.begin(column, self._plan.rng(job), self._plan.task_names[job.task], value)
        elif player is not None and value:
            player.infos[column].update(value)
        return column in self._running

    # ---- policies ----------------------------------------------------------------------------

    def _note_hungry(self, ids: _Ids, rows: _Ids, reward: npt.NDArray[np.float64], observation: Any) -> None:
        """The columns in these rows wait for their policy."""
        assert self._players is not None
        if len(self._players) == 1:
            groups = {next(iter(self._players)): rows}
        else:
            names = np.array([self._policy_of[column] for column in ids[rows].tolist()])
            groups = {name: rows[names == name] for name in dict.fromkeys(names.tolist())}
        for name, own in groups.items():
            if len(own):
                self._players[name].last_reward[ids[own]] = reward[own]
                self._hungry[name].append((ids[own], own, observation))
                self._hungry_since.setdefault(name, time.monotonic())

    def _feed(self, *, is_idle: bool) -> _Ids:
        """Let each policy act for the columns that wait for it, if these are enough, or no other step runs. For whom it
        acts together has no effect on the episodes. Returns the columns that have an action now."""
        assert self._players is not None
        fed, now = [np.zeros(0, np.intp)], time.monotonic()
        for name, parts in list(self._hungry.items()):
            columns = np.concatenate([own for own, _, _ in parts])
            is_late = self._max_wait is not None and now >= self._hungry_since[name] + self._max_wait
            n_running = len(self._running) if len(self._plan.policies) == 1 else [*self._policy_of.values()].count(name)
            if not (is_idle or is_late) and len(columns) < self._n_wanted(n_running):
                continue
            del self._hungry[name], self._hungry_since[name]
            player, space = self._players[name], self._plan.spaces[0]
            chunks = player.act(columns, concatenated(space, [_rows(space, whole, rows) for _, rows, whole in parts]))
            n = chunks[0].shape[1]
            if n > LONGEST_CHUNK:
                raise ConfigError(
                    f"the policy {name!r} returns chunks of {n} actions, more than {LONGEST_CHUNK}: return the first "
                    "of them, and it is asked again"
                )
            self._order[columns, 1] = n
            for place, chunk in zip(self._chunk, chunks, strict=True):
                place[columns, :n] = chunk
            fed.append(columns)
        return np.concatenate(fed)


def _rows(space: gym.Space[Any], batch: Any, rows: _Ids) -> Any:
    first = next(iter(tree_leaves(space, "", batch)))[2]
    return batch if len(rows) == len(first) else take_rows(space, batch, rows.tolist())


def _metrics(facts: Mapping[str, Any], success: str | None) -> dict[str, float | bool]:
    """The numbers in the last info, the return, and success. Booleans stay booleans: their mean is a share."""
    info = facts["info"]
    found: dict[str, float | bool] = {}
    for key, value in info.items():
        array = np.zeros(0) if isinstance(value, dict | list | None) else np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            found[key] = bool(array.item()) if array.dtype.kind == "b" else float(array.item())
    found["return"] = facts["return"]
    if success is not None:
        if success not in info:
            raise ConfigError(
                f"success={success!r} is not in the info of the last step of an episode, which has {sorted(info)}: the "
                "environment must say it at the end of each"
            )
        found["success"] = is_true(info[success])
    return found
