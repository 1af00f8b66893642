"""What the workers of an evaluation step: an environment whose step plays a part of an episode."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.named import as_named, map_leaves
from penstock.buffers.reports import dump_exception, dump_exception_by_value, in_one_line
from penstock.buffers.tree import tree_of
from penstock.envs import EnvContext
from penstock.envs.checks import checked_reset, checked_step, reset_with
from penstock.envs.direct_steps import flat_step_of
from penstock.envs.rows import action_splitter
from penstock.errors import EnvCallError, GameError, PenstockError, SpaceError
from penstock.evaluation.jobs import EvaluationPlan, Job, is_true, leaves_of, plain
from penstock.evaluation.policies import Player, make_player, one_row
from penstock.evaluation.proof import ObservationMarks, Trace

_log = logging.getLogger("penstock")

NO_JOB = -1  #: the number that begins no episode
LONGEST_CHUNK = 128  #: actions
_SLICE_SECONDS = 0.05  # a step returns at least so often: a sign of life, and other environments of the worker go on
_FIRST = np.zeros(1, np.intp)


class EpisodeEnv(gym.Env[Any, Any]):
    """Plays episodes. The action `{"order": (j, n), "action": chunk}` begins episode j, unless that is `NO_JOB`, and
    makes n steps. So a reset, and a chunk of actions, run while other environments step.

    A step returns the last observation and reward. What else there is to say is `info["note"]`, a pair:

    - `("begun", info)`: the reset has been made.
    - `("more", infos)`: some of the actions are still to be made, and `("info", infos)`: all have been made.
    - `("ended", facts)`: the episode has ended.
    - `("raised", text)`: the environment has raised an exception. It is built again for the next episode.
    - `("policy raised", report)`: the policy has.

    With `policies`, it acts itself. An error that would come again, such as other spaces than expected, is raised.

    An episode that `proofs` has, by its number, is played in a new environment, and ends where it ended. Its steps get
    the actions that are stored in place of those of the policy. What the policy would have done is in the facts.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        policies: Mapping[str, Any] | None,
        action_space: gym.Space[Any],
        context: EnvContext,
        *,
        wants_infos: bool,
        proofs: Mapping[int, Trace],
    ) -> None:
        self.observation_space, self.action_space = plan.spaces[0], action_space
        self._plan, self._policies, self._rank, self._wants_infos = plan, policies, context.worker_rank, wants_infos
        self._reads_each = plan.until_success or plan.success_at == "any"  # the info of each step for the success
        self._proofs = proofs
        self._proof: Iterator[Any] | None = None  # the stored actions of an episode that is a proof
        self._last_step = NO_JOB  # after so many steps the episode ends in any case
        self._split = action_splitter(plan.spaces[1])
        self._env: gym.Env[Any, Any] | None = None
        self._step_env: Any = None  # what makes its steps
        self._task = -1
        self._players: dict[str, Player] = {}
        self._idle = self._observation = plan.spaces[0].sample()
        self._pending: deque[Any] = deque()
        self._begun: tuple[str, Any] | None = None
        self._marks = ObservationMarks(plan.spaces[0])
        self._mark = self._marks.add
        self._rewards: list[float] = []
        self._success: bool | None = None  # of the steps so far, if any may say it
        self._chunks: list[Any] = []  # of actions, since the episode began

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._idle, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        note: tuple[str, Any] | None
        try:
            number, n = action["order"].tolist()
            if number != NO_JOB:
                self._begin(self._plan.job(number), self._proofs.get(number))
            if n:
                self._put(map_leaves(lambda part: part[:n].copy(), as_named(action["action"])))
            note = self._play()
        except _PolicyError as error:
            note = "policy raised", dump_exception_by_value(error.exception)
        except (GameError, EnvCallError, _UnfitError) as error:
            note = self._raised(error)
        except PenstockError:
            raise
        except Exception as error:  # of the environment, or of its constructor
            note = self._raised(error)
        reward = self._rewards[-1] if self._rewards else 0.0
        return self._observation, reward, False, False, {} if note is None else {"note": note}

    def _raised(self, error: Exception) -> tuple[str, Any]:
        self.close()
        self._observation = self._idle
        if isinstance(error, _UnfitError):  # a traceback through penstock says nothing
            return "raised", str(error)
        headline, text, _ = dump_exception(error)
        return "raised", f"{headline.decode()}\n{text.decode()}"

    def _put(self, chunk: Any) -> None:
        """Keep the actions `[n, ...]` for the steps to come."""
        self._chunks.append(chunk)
        actions = self._split(chunk)  # copies: the environment may change its action
        self._pending.extend(actions if self._proof is None else islice(self._proof, len(actions)))

    def _begin(self, job: Job, proof: Trace | None) -> None:
        self._rewards, self._chunks, self._job, self._begun, self._success = [], [], job, None, None
        self._pending.clear()
        self._marks.clear()
        self._proof, self._last_step = None, self._plan.max_steps or NO_JOB
        if proof is not None:
            self._proof = iter(self._split(as_named(tree_of(self._plan.spaces[1], proof.actions))))
            self._last_step = len(proof.rewards)
        if self._task != job.task or self._env is None or proof is not None:
            self.close()
            self._env, self._task = self._plan.factories[job.task](self._plan.context(job.task, self._rank)), job.task
            env_spaces = self._env.observation_space, self._env.action_space
            if problem := self._plan.differs(env_spaces, job.task):
                raise SpaceError(problem)
            self._step_env = flat_step_of(self._env)
        options = copy.deepcopy(job.options)  # an environment may take entries out
        result = reset_with(self._env, job.seed, options)
        self._observation, info = self._checked(checked_reset, result)
        self._mark(self._observation)
        self._begun = "begun", plain(info)
        if self._policies is not None:
            try:
                self._player(job.policy).begin(0, self._plan.rng(job), self._plan.task_names[job.task], plain(info))
            except Exception as error:
                raise _PolicyError(error) from error

    def _player(self, name: str) -> Player:
        assert self._policies is not None
        if name not in self._players:
            self._players[name] = make_player(self._policies[name], self._plan.spaces, 1, batched=True)
        return self._players[name]

    def _play(self) -> tuple[str, Any] | None:
        """Make the steps whose actions are there, for a while, or until the episode ends. With `policies`, act."""
        infos: dict[str, Any] = {}
        until, acts = time.monotonic() + _SLICE_SECONDS, self._policies is not None
        note, self._begun = self._begun, None
        while self._env is not None and (self._pending or acts):
            if not self._pending:
                self._put(self._own_chunk())
            result = self._checked(checked_step, self._step_env(self._pending.popleft()))
            self._observation, reward, terminated, truncated, info = result
            self._mark(self._observation)
            self._rewards.append(reward)
            may_end = terminated or truncated or self._reads_each or len(self._rewards) == self._last_step
            if may_end and (facts := self._facts(info, terminated, truncated)) is not None:
                self._pending.clear()
                return "ended", facts
            if acts:
                self._player(self._job.policy).last_reward[0] = reward
            if self._wants_infos:
                (self._player(self._job.policy).infos[0] if acts else infos).update(plain(info))
            if time.monotonic() >= until:
                break
        if note is not None:
            return note
        if self._pending:
            return "more", infos
        return ("info", infos) if infos else None

    def _checked(self, check: Callable[[Any, int], Any], result: Any) -> Any:
        """What the environment has returned, checked; what does not fit fails the episode, not the evaluation."""
        try:
            return check(result, self._job.task)
        except SpaceError as error:
            raise _UnfitError(str(error)) from error

    def _own_chunk(self) -> Any:
        """The actions that the policy returns in this worker."""
        space, player = self._plan.spaces[0], self._player(self._job.policy)
        try:
            chunks = player.act(_FIRST, one_row(space, self._observation))
        except Exception as error:
            raise _PolicyError(error) from error
        return player.in_space([chunk[0] for chunk in chunks])

    def _facts(self, info: Mapping[str, Any], terminated: bool, truncated: bool) -> dict[str, Any] | None:
        """What there is to say of an episode that has ended with this step; None if it goes on."""
        plan, n, success = self._plan, len(self._rewards), self._success_so_far(info)
        is_over = terminated or truncated or (plan.until_success and success is True)
        if not (is_over or n == self._last_step):
            return None
        parts = zip(*(leaves_of(plan.spaces[1], chunk) for chunk in self._chunks), strict=True)
        return {
            "length": n,
            "terminated": terminated,
            "truncated": truncated or (n == plan.max_steps and not is_over),
            "success": success,
            "return": sum(self._rewards),
            "info": plain(info),
            "trace": Trace([np.concatenate(part)[:n] for part in parts], np.array(self._rewards), *self._marks.take()),
        }

    def _success_so_far(self, info: Mapping[str, Any]) -> bool | None:
        """Whether the step with this info, or any so far, was a success; None if no such info says it."""
        key = self._plan.success
        says = [] if key is None or key not in info else list(plain({key: info[key]}).values())  # an info may be large
        success = is_true(says[0]) if says else None
        if self._plan.success_at == "any":
            success = self._success = self._success if success is None or self._success else success
        return success

    def close(self) -> None:
        """Close the environment that plays."""
        env, self._env, self._step_env = self._env, None, None  # a function of the environment keeps it alive
        if env is not None:
            try:
                env.close()
            except Exception as error:  # the next episode has a new environment in any case
                _log.warning("an environment of an evaluation could not be closed: %s", in_one_line(error))


class _UnfitError(SpaceError):
    """The environment has returned what it must not."""


class _PolicyError(Exception):
    """The policy has raised `exception`."""

    def __init__(self, exception: Exception) -> None:
        super().__init__(str(exception))
        self.exception = exception
