"""Makes the `RecordedEpisode` of an environment from shared memory, when its worker fails or a batch is complete."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.arguments import integer
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.slots import layouts_of
from penstock.buffers.tree import map_tree
from penstock.columns.episode_log import AT, EPISODE, FIRST_START, GENERATION, PLAN, POSITION, SEED, START, EpisodeLog
from penstock.envs.calls import pickled
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.recorded_episode import RecordedEpisode, RecordedGame
from penstock.envs.seeding import ColumnStreams, EpisodePlan, Purpose, episode_options, require_plan
from penstock.errors import ConfigError, SamplerStateError
from penstock.samplers.refusals import EPISODE as EPISODE_CALL
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.sampler_plan import SamplerPlan
from penstock.workers.control import Phase
from penstock.workers.failures import WorkerStatus
from penstock.workers.plan import WorkerPlan

if TYPE_CHECKING:
    from penstock.samplers.run import Run

_IN_ENVIRONMENT = (Phase.STEPPING, Phase.RESETTING, Phase.DECORRELATING)


class EpisodeLogReader:
    """Makes the `RecordedEpisode` of a failure, or of any step of the last batch."""

    def __init__(
        self,
        memory: SamplerMemory,
        factories: Sequence[EnvFactory],
        seed: int,
        crash_dir: str | os.PathLike[str] | None,
        plan: EpisodePlan | None,
    ) -> None:
        """`factories` has one entry per environment. `plan` is the first. Raises `ConfigError` if the folder
        `crash_dir` cannot be made."""
        assert memory.episode_log is not None
        self._memory, self._factories, self._seed = memory, factories, seed
        self._log: EpisodeLog = memory.episode_log
        self._last: Sequence[Any] = ()  # `observation` and `valid` of the last batch, for each policy
        self._plans = {0: plan}  # by number: those that an episode in the log may have begun with, and the newest
        self._crash_dir, self._n_saved = None if crash_dir is None else Path(crash_dir), 0
        if self._crash_dir is not None:
            try:
                self._crash_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"crash_dir={os.fspath(self._crash_dir)!r} cannot be made: {error}") from error

    # ---- plans -----------------------------------------------------------------------------

    def set_plan(self, plan: EpisodePlan | None) -> None:
        """Workers follow this plan as soon as they read it. Raises `ConfigError` if it cannot be pickled."""
        newest = max(self._plans)
        content = pickled({newest + 1: require_plan("episode_plan", plan)}, "the episode plan")
        arrays = self._log.memory.arrays
        # Environments that are parked begin with the newest one so far, before their workers read this plan.
        used = {0, newest, *arrays.words[:, PLAN].flat, *np.unique(arrays.begun[..., 2])}
        self._plans = {n: plan for n, plan in self._plans.items() if n in used}
        self.load_plans(content)

    def load_plans(self, content: bytes) -> None:
        """Go on with these plans too, of which workers follow the newest. `content`: a dict of them, pickled."""
        self._plans |= pickle.loads(content)  # they stay as they are now, as in the workers
        self._log.plan.post(content)

    def save_plans(self) -> bytes | None:
        """What `load_plans` gets in a run that continues this one; None if no plan was set."""
        plans = {n: plan for n, plan in self._plans.items() if n}
        return pickled(plans, "the episode plan") if plans else None

    # ---- failures --------------------------------------------------------------------------

    def of_failure(self, status: WorkerStatus) -> RecordedEpisode | None:
        """The episode of a worker that has failed; `status` is its last one. None if it was not in a training
        environment, or if the memory has impossible values: a crash may write anywhere."""
        plan, progress, control = status.plan, status.progress, self._memory.control
        rank = plan.worker_rank
        if not isinstance(plan, SamplerPlan) or progress.phase not in _IN_ENVIRONMENT:
            return None
        command = control.command(rank, control.begun(rank)) if control.is_running(rank) else None
        is_other_command = command is not None and not command.is_batch
        if is_other_command or progress.env_rank not in plan.env_ranks:
            return None
        column = plan.columns[plan.env_ranks.index(progress.env_rank)]
        words = self._log.words(column)
        position, start = words[POSITION], words[START]
        if progress.phase is Phase.RESETTING:
            row = start - 1
        elif progress.phase is Phase.STEPPING and command is not None:
            row = position + progress.t
        else:
            row = words[AT]
        is_possible = words[EPISODE] >= 0 and start <= row + 1 and progress.t < self._log.batch_T
        if not is_possible or words[PLAN] not in self._plans:
            return None
        slot = 0 if command is None else command.batch % len(self._memory.slots)
        arrays = layouts_of(self._memory.slots[slot])
        begun = words[EPISODE], words[SEED], words[PLAN]
        try:
            episode = self._make(plan, column, begun, (start, row, position), arrays)
        except ConfigError:  # of the user's episode_plan, which has failed in the worker too
            return None
        return self._saved(replace(episode, failure=f"{status} failed while {status.doing}"))

    def _saved(self, episode: RecordedEpisode) -> RecordedEpisode:
        """`episode`, after it has been written into the folder `crash_dir`, if there is one."""
        if self._crash_dir is None:
            return episode
        name = f"env_rank_{episode.context.env_rank}-episode_{episode.episode}-step_{episode.step}"
        self._n_saved += 1
        path = self._crash_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._n_saved}.episode"
        episode = replace(episode, path=os.fspath(path))
        try:
            pickled = episode.pickled()
            with open(path, "xb") as file:  # a new file: somebody else may have put a link there
                file.write(pickled)
        except (OSError, ConfigError) as error:  # the failure itself must be reported in any case
            return replace(episode, path=f"not written: {error}")
        return episode

    # ---- any step --------------------------------------------------------------------------

    def keep(self, slot: int) -> None:
        """The learner gets the batch in `slot` next, and may change it: keep what `at` needs of it."""
        self._last = [
            NamedArrays(observation=map_leaves(np.copy, layout.observation), valid=layout.valid.copy())
            for layout in layouts_of(self._memory.slots[slot])
        ]

    def at(self, plan: WorkerPlan, env_rank: int, t: int, slot: int) -> RecordedEpisode:
        """The episode until step t of the last batch, which is complete and is in `slot`. Raises `ConfigError` if the
        environment waited for a reset at that step."""
        column = plan.columns[plan.env_ranks.index(env_rank)]
        words, begun = self._log.words(column), self._log.memory.arrays.begun[slot, :, column]
        if not any(self._last[p].valid[t, cell] for p, cell in self._log.seats[column]):
            raise ConfigError(f"env_rank {env_rank} made no step at t={t}: it waited for a reset (valid is False)")
        episode, seed, number = begun[t].tolist()
        first, stop = words[POSITION] - len(begun), words[POSITION]
        row = int(np.argmax(begun[:, 0] == episode))
        start = first + row if row else words[FIRST_START]
        return self._make(plan, column, (episode, seed, number), (start, first + t, stop), self._last, t)

    def seeds(self, slot: int) -> npt.NDArray[np.int64]:
        """Of each step of the batch in `slot`, and of each environment: the seed of the reset that began its episode,
        `[T, E]`."""
        seeds: npt.NDArray[np.int64] = self._log.memory.arrays.begun[slot, ..., 1]
        return seeds

    # ---- both ------------------------------------------------------------------------------

    def _make(
        self,
        plan: WorkerPlan,
        column: int,
        begun: tuple[int, int, int],
        positions: tuple[int, int, int],
        arrays: Sequence[Any],
        t: int | None = None,
    ) -> RecordedEpisode:
        """The episode. `begun`: its number, seed and plan. `positions` are `start`, where the episode began, `row`,
        before which the repetition stops, and `stop`: positions below it are in the log, the others are in `arrays`,
        those of each policy."""
        start, row, stop = positions
        is_open = t is None  # the last step has not returned yet
        kept = max(start, stop - self._log.n_rows)
        actions, rewards = self._log.read(column, kept, max(kept, min(row + 1, stop)))
        if row >= stop:  # in the batch that was being collected; row t + 1 of these arrays is step t
            rows = slice(1 + max(0, start - stop), row - stop + 2)
            more, more_rewards = self._log.of_env(column, arrays, rows)
            actions = map_tree(lambda *parts: np.concatenate(parts), actions, more)
            rewards = np.concatenate([rewards, more_rewards])
            t = row - stop
        has_observation = t is not None and row >= start
        last_reward = None if is_open else rewards[-1].copy()
        env_rank = plan.env_ranks[plan.columns.index(column)]
        seed_when_built = ColumnStreams(self._seed, range(env_rank, env_rank + 1), plan.generation)
        factory, cls, (episode, seed, number) = self._factories[column], RecordedEpisode, begun
        generation = self._log.words(column)[GENERATION]
        if self._log.has_games:
            from penstock.columns.seat_columns import whole_game  # here, since few need it

            as_view: Any = factory.as_seats
            as_game = partial(whole_game, as_view, env_rank, self._log.agents[column])
            factory, cls = replace(factory, as_seats=as_game), RecordedGame
        return cls(
            factory=factory,
            context=EnvContext(env_rank, plan.worker_rank, seed_when_built.env_seeds(Purpose.TRAIN)[0], Purpose.TRAIN),
            episode=episode,
            seed=seed,
            actions=actions,
            rewards=rewards[:-1].copy(),
            last_reward=last_reward,
            observation=map_leaves(np.copy, self._log.field(column, arrays, "observation", t))
            if has_observation
            else None,
            n_missing=kept - start,
            options=episode_options(self._plans[number], self._seed, env_rank, episode, generation),
        )


def episode_of(run: Run, env_rank: int, t: int) -> RecordedEpisode:
    """See `Sampler.episode`."""
    run.require(EPISODE_CALL)
    if run.log_reader is None:
        raise ConfigError(
            "episode needs to know the seeds of the episodes: construct the sampler with seed_episodes=True"
        )
    if not run.batches.held:
        raise SamplerStateError("episode was called before the first batch: call obtain_samples first")
    first, config = run.plans[0].env_ranks[0], run.config
    env_rank = integer("env_rank", env_rank, first, first + config.batch_B - 1)
    t = integer("t", t, 0, config.batch_T - 1)
    (plan,) = (status.plan for status in run.pool.statuses() if env_rank in status.plan.env_ranks)
    return run.log_reader.at(plan, env_rank, t, (run.batch - 1) % run.batches.n_slots)
