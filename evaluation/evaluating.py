"""`evaluate`: the same episodes for every policy, in parallel, with the results that a plain loop would have."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from penstock.agents import Agent
from penstock.agents.action_masks import info_key
from penstock.arguments import integer, kind_of, one_of, optional, seconds, true_or_false
from penstock.buffers import pickling
from penstock.buffers.reports import in_one_line
from penstock.envs import EnvFn
from penstock.envs.examples import checked_spaces
from penstock.errors import ConfigError, PenstockError, SamplerBrokenError, brief
from penstock.evaluation.episode_env import EpisodeEnv
from penstock.evaluation.episode_files import ResultFolder, opened
from penstock.evaluation.eval_results import EpisodeResult, EvalResults
from penstock.evaluation.evaluation_loop import EvaluationLoop, job_space
from penstock.evaluation.jobs import EvaluationPlan, tasks_of
from penstock.evaluation.policies import Policy, as_policies, make_player, snapshot, training_modes
from penstock.evaluation.proof import TOLERANCE, Trace, differs
from penstock.vector import ShmVectorEnv
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.plan import START_METHOD, Affinity, PoolArguments, StartMethod

_log = logging.getLogger("penstock")
_LISTED = 5  # failed episodes in a warning
_MOST_RESTARTS = 10**9  # it is the attempts of the episodes that are limited


def evaluate(
    policies: Policy | Mapping[str, Policy],
    env_fn: EnvFn,
    *,
    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    options: Callable[[str, int], Mapping[str, Any]] | None = None,
    episodes: int | range = 200,
    seed: int = 0,
    success: str | None = None,
    success_at: Literal["last", "any"] = "last",
    until_success: bool = False,
    max_steps: int | None = None,
    n_workers: int | None = None,
    batch_B: int | None = None,
    act_in: Literal["caller", "workers"] = "caller",
    batched: bool = True,
    min_ready: float | None = None,
    max_wait: float | None = None,
    attempts: int = 5,
    step_timeout: float | None = 300.0,
    folder: str | os.PathLike[str] | None = None,
    trust_folder: bool = False,
    spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None,
    affinity: Affinity | None = None,
    start_method: StartMethod = START_METHOD,
    progress: bool = False,
) -> EvalResults:
    """Play the same episodes with each policy, in worker processes, and return their results.

    Episode k of a task has a seed that depends on `seed`, the task and k alone. So it is the same for every policy,
    number of workers and machine. All episodes that begin count, so short ones are not favoured. The state and the
    random numbers of a policy belong to the episode. If an environment raises, dies or hangs, the same episode
    begins again. One episode of each policy and task is played once more at the end: `results.n_proved`. If one
    differs, a `RuntimeWarning` says so.

    Args:
        policies: a policy, or a dict of policies by name. A policy is an `Agent`; a function of observations `[k, ...]`
            that returns actions `[k, ...]` or chunks of actions `[k, n, ...]`; or an object with `reset()` and
            `select_action(batch)`. See `docs/evaluation.md`.
        env_fn: returns a `gymnasium.Env`, or an environment id.
        tasks: names, each of which is the argument `task` of `env_fn`; or a dict of arguments of `env_fn` by name. All
            must have the same spaces.
        options: `options(task, k)` returns the options of the reset that begins episode k. It is called once for each,
            before the first episode.
        episodes: how many episodes of each task, or their numbers as a range.
        success: the key of the info that says whether an episode was a success.
        success_at: "last": the info of the episode's last step says it. "any": it was a success if the info of any step
            says so; that does not end the episode or cut its return.
        until_success: end an episode with the first step that is a success.
        max_steps: end an episode, as truncated, after so many steps.
        n_workers: worker processes. By default as many as CPUs may be used.
        batch_B: environments that play at the same time; by default two for each worker.
        act_in: "caller": policies act in this process, for all environments that wait. "workers": each worker acts for
            its environments, one at a time, on the CPU.
        batched: False: policies act for one environment at a time. A network may give slightly different numbers in
            batches of different sizes; then this makes results equal for any number of environments.
        min_ready: how many environments must wait before a policy acts for them: a number, or a share, below 1, of
            those that it plays in. By default one half.
        max_wait: seconds after which a policy acts in any case.
        attempts: after so many failures that are its own, an episode counts as failed.
        step_timeout: seconds that a reset or step may take; None for no limit.
        folder: keeps each episode as soon as it has ended. The same call continues there, and plays failed episodes
            again. First it plays one episode of each policy and task in the folder again: if one differs, in more than
            rounding, the folder is refused.
        trust_folder: True: take the episodes in the folder. No code is compared, and none of them is played again.
        spaces: `(observation_space, action_space)`: then no environment is built in this process to read them.
        affinity, start_method: as in `ParallelSampler`.
        progress: say on the standard error output how many episodes have ended.

    Raises `ConfigError` and `SpaceError` for arguments that cannot work, and `WorkerError` if nothing but failures
    came. What a policy raises is raised unchanged.
    """
    named, by_task, numbers = as_policies(policies), tasks_of(tasks), _numbers(episodes)
    if not (options is None or callable(options)):
        raise ConfigError(f"options must be a function of the task and the number of an episode, got {brief(options)}")
    optional(kind_of("a key of the info, a text", str))("success", success)
    optional(kind_of("the path of a folder", str, os.PathLike))("folder", folder)
    batched, until_success = true_or_false("batched", batched), true_or_false("until_success", until_success)
    true_or_false("trust_folder", trust_folder)
    is_any = one_of("success_at", success_at, ("last", "any")) == "any"
    if (until_success or is_any) and success is None:
        name = "until_success" if until_success else 'success_at="any"'
        raise ConfigError(f"{name} needs success: the key of the info that says whether a step was a success")
    in_workers = one_of("act_in", act_in, ("caller", "workers")) == "workers"
    attempts = integer("attempts", attempts, 1)
    plan = EvaluationPlan.of(
        env_fn,
        by_task,
        options=options,
        episodes=numbers,
        mask_key=_mask_key(named.values()),
        spaces=checked_spaces("spaces", spaces),
        policies=tuple(named),
        seed=integer("seed", seed, 0),
        success=success,
        success_at=success_at,
        until_success=until_success,
        max_steps=None if max_steps is None else integer("max_steps", max_steps, 1),
    )
    for message in training_modes(named):
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    snapshots = {n: snapshot(policy, plan.spaces, plan.seed, for_workers=in_workers) for n, policy in named.items()}
    with opened(folder, plan, named, trusted=trust_folder) as files:
        so_far = _ResultsSoFar(plan, files, progress=true_or_false("progress", progress))
        play = partial(
            _play_part,
            plan,
            snapshots,
            sizes=partial(_sizes, n_workers, batch_B),
            in_workers=in_workers,
            batched=batched,
            of_loop={
                "attempts": attempts,
                "min_ready": _share(min_ready),
                "max_wait": None if max_wait is None else seconds("max_wait", max_wait, zero=True),
            },
            of_envs={
                "context": PoolArguments(start_method=start_method).start_method,
                "step_timeout": step_timeout,
                "affinity": affinity,
            },
        )
        if trust_folder:
            so_far.trust()
        else:
            so_far.prove_kept(play)
        so_far.add(play(so_far.missing, {}, on_result=so_far.put, n_ended=len(so_far.by_number)))
        so_far.prove_new(play)
    results = EvalResults(
        [so_far.by_number[number] for number in range(plan.n)],
        list(named),
        list(by_task),
        *so_far.counts,
        n_proved=so_far.n_proved,
        _plan=plan,
    )
    for message in so_far.warnings():
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return results


_Counts = tuple[int, int]  # replaced workers, and how often all were built again
_PlayPart = Callable[..., _Counts]


class _ResultsSoFar:
    """The results so far, by the number of the episode, and which policies and tasks are proved: an episode of them was
    the same when it was played again."""

    def __init__(self, plan: EvaluationPlan, files: ResultFolder | None, *, progress: bool) -> None:
        self._plan, self._files, self._progress = plan, files, progress
        kept = {} if files is None else files.results
        self.by_number = {
            plan.number(*key): result
            for key, result in kept.items()
            if not result.failed and key[0] in plan.policies and key[2] in plan.episodes
        }
        self._metric = "return" if plan.success is None else "success"
        self._n_values, self._total = 0, 0.0  # of this metric: `progress` shows the mean
        for result in self.by_number.values():
            self._count(result)
        self.missing = [number for number in range(plan.n) if number not in self.by_number]
        self._to_prove = {(policy, task) for policy in plan.policies for task in plan.tasks}
        self.counts: _Counts = 0, 0
        self.n_proved, self._is_trusted = 0, False
        self._problems: list[str] = []  # what was different, of episodes of this call

    def add(self, counts: _Counts) -> None:
        """A part of the evaluation has ended, with these counts."""
        self.counts = self.counts[0] + counts[0], self.counts[1] + counts[1]

    def put(self, number: int, result: EpisodeResult) -> None:
        """Keep the result of an episode."""
        self.by_number[number] = result
        if self._files is not None:
            self._files.append(result)
        if self._progress:
            self._count(result)
            self._say()

    def _count(self, result: EpisodeResult) -> None:
        if self._metric in result.metrics:
            self._n_values, self._total = self._n_values + 1, self._total + result.metrics[self._metric]

    def _say(self) -> None:
        mean = f", {self._metric} {self._total / self._n_values:.3f}" if self._n_values else ""
        n, end = len(self.by_number), "\n" if len(self.by_number) == self._plan.n else ""
        print(f"\r{n} of {self._plan.n} episodes{mean}", end=end, file=sys.stderr, flush=True)

    # ---- proofs ------------------------------------------------------------------------------

    def trust(self) -> None:
        """The episodes in the folder are taken as they are."""
        self._is_trusted = bool(self.by_number)
        self._to_prove -= {(result.policy, result.task) for result in self.by_number.values()}

    def prove_kept(self, play: _PlayPart) -> None:
        """Play an episode of each policy and task in the folder again. Raises `ConfigError` if one differs."""
        for policy, task in sorted(self._to_prove):
            is_unproven = self._files is not None and self._files.is_unproven(policy, task)
            if is_unproven and self._stored(policy, task) is not None:
                raise ConfigError(
                    f"the folder says that an episode of {_name(policy, task)} was different when it was played again, "
                    "so it cannot be proved that this call would have the same results. Give another folder; or "
                    "trust_folder=True, and the results are taken as they are"
                )
        if found := self._differences(play):
            (policy, task, episode), problem = next(iter(found.items()))
            raise ConfigError(
                f"the folder has other results: episode {episode} of {_name(policy, task)} was played again, and "
                f"{problem}. The policy or the environment has changed, or depends on something else than the seed. "
                "Give another folder; or trust_folder=True, and the results are taken as they are"
            )

    def prove_new(self, play: _PlayPart) -> None:
        """Play an episode of each other policy and task again, and note which differ."""
        for (policy, task, episode), problem in self._differences(play).items():
            self._problems.append(f"episode {episode} of {_name(policy, task)}: {problem}")
            if self._files is not None:
                self._files.note_unproven(policy, task)

    def _stored(self, policy: str, task: str) -> int | None:
        """The number of the last episode of a policy and a task that has ended: its environment was not new."""
        last = self._plan.number(policy, task, self._plan.episodes[-1])
        numbers = range(last, last - len(self._plan.episodes), -1)
        return next((n for n in numbers if n in self.by_number and not self.by_number[n].failed), None)

    def _differences(self, play: _PlayPart) -> dict[tuple[str, str, int], str]:
        """Play an episode of each policy and task that is still to be proved, and has one. Returns what differs."""
        stored = {pair: number for pair in self._to_prove if (number := self._stored(*pair)) is not None}
        self._to_prove -= stored.keys()
        proofs = {number: trace for number in stored.values() if (trace := self.by_number[number].played()) is not None}
        found: dict[tuple[str, str, int], str] = {}

        def compare(number: int, again: EpisodeResult) -> None:
            if problem := _difference(self.by_number[number], proofs[number], again):
                found[again.policy, again.task, again.episode] = problem

        self.add(play(sorted(proofs), proofs, on_result=compare, n_ended=1))  # so that no failure ends it
        self.n_proved += len(proofs) - len(found)
        return found

    def warnings(self) -> Iterator[str]:
        """What the user must know: which episodes failed, and which were different when they were played again."""
        if failed := [result for result in self.by_number.values() if result.failed]:
            texts = [
                f"episode {r.episode} of {_name(r.policy, r.task)}, begun {r.attempts} times: "
                f"{r.failed.splitlines()[0]}"
                for r in failed[:_LISTED]
            ]
            yield (
                f"{len(failed)} of {self._plan.n} episodes failed by their environment, and are not in the means "
                f"(results.failed has them all): {'; '.join(texts)}"
            )
        if self._is_trusted:
            yield "trust_folder=True: no episode of the folder was played again, so nothing shows whose results it has"
        if self._problems:
            n = self.n_proved + len(self._problems)
            yield (
                f"{len(self._problems)} of {n} episodes were different when they were played again. "
                f"{'; '.join(self._problems[:_LISTED])}. The environment or the policy depends on earlier episodes, or "
                "on random numbers that are not its own, so results can be different in each run"
            )


def _name(policy: str, task: str) -> str:
    return f"{policy!r} in {task!r}" if task else repr(policy)


def _difference(stored: EpisodeResult, trace: Trace, again: EpisodeResult) -> str:
    """What differs in an episode that was played again; "" if nothing does."""
    new = again.played()
    if new is None:
        return f"failed: {again.failed}"
    problem, is_equal = differs(trace, new)
    for name in ("terminated", "truncated") if not problem else ():
        if getattr(stored, name) != getattr(again, name):
            problem = f"{name} of its last step was {getattr(stored, name)}, and is {getattr(again, name)}"
    for name in {**stored.metrics, **again.metrics} if not problem else ():
        then, now = stored.metrics.get(name, math.nan), again.metrics.get(name, math.nan)
        if not np.isclose(then, now, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            problem = f"its {name} was {then}, and is {now}"
            break
    if not (problem or is_equal):
        _log.info(
            "episode %d of %s was played again: its numbers differ by rounding, by less than %g",
            again.episode, _name(again.policy, again.task), TOLERANCE,
        )  # fmt: skip
    return problem


def _play_part(
    plan: EvaluationPlan,
    snapshots: Mapping[str, Any],
    numbers: Sequence[int],
    proofs: Mapping[int, Trace],
    *,
    sizes: Callable[[int], tuple[int, int]],
    in_workers: bool,
    batched: bool,
    of_loop: Mapping[str, Any],
    of_envs: Mapping[str, Any],
    n_ended: int,
    on_result: Callable[[int, EpisodeResult], None],
) -> _Counts:
    """Start workers, play the episodes with these numbers in them, and end the workers."""
    n_workers, batch_B = sizes(len(numbers))
    if not numbers:
        return 0, 0
    n_columns = 1 if in_workers else batch_B  # each worker makes its players itself
    players = {n: make_player(policy, plan.spaces, n_columns, batched=batched) for n, policy in snapshots.items()}
    loop = EvaluationLoop(
        plan,
        numbers,
        batch_B,
        None if in_workers else players,
        n_ended=n_ended,
        on_result=on_result,
        **of_loop,
    )
    actions = job_space(plan)
    make = partial(
        EpisodeEnv,
        plan,
        _picklable(snapshots) if in_workers else None,
        actions,
        wants_infos=any(player.wants_infos for player in players.values()),
        proofs=proofs,
    )
    return _play(
        loop,
        [make] * batch_B,
        of_loop["attempts"],
        n_workers=n_workers,
        spaces=(plan.spaces[0], actions),
        on_worker_failure="restart",
        max_restarts=_MOST_RESTARTS,
        **of_envs,
    )


def _play(loop: EvaluationLoop, makes: Sequence[Any], attempts: int, **options: Any) -> tuple[int, int]:
    """Run all episodes. Returns how many workers were replaced, and how often all were built again."""
    n_restarts = n_rebuilt = in_vain = 0
    while left := loop.n_left:
        with ShmVectorEnv(makes, **options) as envs:
            try:
                loop.play(envs)
            except SamplerBrokenError as error:
                if isinstance(error.__cause__, PenstockError):
                    raise error.__cause__ from error  # such as a `SpaceError`, which would come again
                in_vain = 0 if loop.n_left < left or error.env_rank is not None else in_vain + 1
                if loop.is_broken or in_vain >= attempts:
                    raise
                # Such as a SIGSEGV: nothing in that memory is trusted, so all is built again.
                n_rebuilt += 1
                if error.env_rank is not None:
                    loop.end(error.env_rank, failure=str(error))
                loop.end_all()
            finally:
                n_restarts += envs.n_restarts
    return n_restarts, n_rebuilt


def _picklable(policies: Mapping[str, Any]) -> Mapping[str, Any]:
    """`policies`. Raises `ConfigError` for one that cannot be sent to the workers."""
    for name, policy in policies.items():
        try:
            pickling.dumps(policy)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"the policy {name!r} cannot be pickled for the workers: {in_one_line(error)}. Let it act here, with "
                'act_in="caller"'
            ) from error
    return policies


def _mask_key(policies: Any) -> str | None:
    """The entry of the info with the mask of legal actions, if agents want it from there."""
    keys = {info_key(policy.mask_key) for policy in policies if isinstance(policy, Agent)} - {None}
    if len(keys) > 1:
        raise ConfigError(f"the masks in info must be the same for all policies, got {sorted(map(str, keys))}")
    return keys.pop() if keys else None


def _numbers(episodes: int | range) -> range:
    if not isinstance(episodes, range):
        return range(integer("episodes", episodes, 1))
    if not episodes or episodes.step != 1 or episodes.start < 0:
        raise ConfigError(f"episodes must be a number, or a range of numbers from 0 on, got {episodes}")
    return episodes


def _sizes(n_workers: int | None, batch_B: int | None, n_episodes: int) -> tuple[int, int]:
    """How many workers there are, and how many environments; not more than episodes."""
    if n_workers is None:
        n_workers = cpus_to_fill(usable_cpus())
        n_workers = n_workers if batch_B is None else min(n_workers, integer("batch_B", batch_B, 1))
    n_workers = integer("n_workers", n_workers, 1)
    batch_B = 2 * n_workers if batch_B is None else integer("batch_B", batch_B, 1)
    if batch_B < n_workers:
        raise ConfigError(f"batch_B={batch_B} is less than n_workers={n_workers}: each worker needs an environment")
    most = max(1, n_episodes)
    return min(n_workers, most), min(batch_B, most)


def _share(min_ready: float | None) -> float:
    if min_ready is None:
        return 0.5
    is_number = isinstance(min_ready, int | float) and not isinstance(min_ready, bool)
    if not is_number or not 0 < min_ready < math.inf or (min_ready > 1 and min_ready != int(min_ready)):
        raise ConfigError(f"min_ready must be a number of environments, or a share below 1, got {brief(min_ready)}")
    return float(min_ready)
