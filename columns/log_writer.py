"""The episodes of one worker's environments: each has a number and a seed, and its actions are kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.buffers.named import map_leaves
from penstock.columns.episode_log import AT, EPISODE, FIRST_START, GENERATION, PLAN, POSITION, SEED, START, EpisodeLog
from penstock.columns.interface import Start
from penstock.envs.seeding import ColumnStreams, EpisodePlan, episode_options, episode_seed
from penstock.workers.control import Progress, T

_NO_REWARD = np.zeros(1, np.float32)
_BEGUN = [EPISODE, SEED, PLAN]
_SAVED = {"episode": EPISODE, "seed": SEED, "generation": GENERATION, "plan": PLAN}


class EpisodeLogWriter:
    """The worker's side of the episode log. The columns and the collector call it if `seed_episodes=True`."""

    slot = 0  #: of the running batch

    def __init__(
        self, log: EpisodeLog, envs: range, cells: Sequence[range], streams: ColumnStreams, progress: Progress
    ) -> None:
        """`cells`: the worker's columns of each policy. Those of a policy without columns here may be empty."""
        self._log, self._first, self._streams = log, envs.start, streams
        # In the order of the collector's recorders.
        self._cells = [(p, columns) for p, columns in enumerate(cells) if columns]
        self._recorder_of = {p: (i, columns.start) for i, (p, columns) in enumerate(self._cells)}
        self._t = progress.words[T : T + 1]
        arrays, rows = log.memory.arrays, slice(envs.start, envs.stop)
        self._words, self._begun = arrays.words[rows], arrays.begun[:, :, rows]
        self._words[:, EPISODE], self._words[:, GENERATION] = -1, streams.generation
        self._go_to(log.n_before)
        self._options: list[dict[str, Any] | None] = [None] * len(envs)  # of the reset that began the running episode

    def read_plan(self, first: EpisodePlan | None = None) -> None:
        """From the next reset on, follow the plan in the log, or the `first` plan if it is empty."""
        content = self._log.plan.read()
        self._plan = max(pickle.loads(content).items()) if content else (0, first)

    def _go_to(self, position: int) -> None:
        self._position, self._is_in_batch = position, False
        self._words[:, POSITION], self._words[:, AT] = position, position - 1

    def begin(self, env: int, start: Start) -> Start:
        """The next episode of this environment begins. Returns what `env.reset` gets."""
        words = self._words[env]
        words[EPISODE] += 1
        words[START] = 1 + (self._position + self._t[0] if self._is_in_batch else words[AT])
        key = self._streams.seed, self._streams.env_ranks[env], int(words[EPISODE]), int(words[GENERATION])
        words[SEED] = seed = episode_seed(*key)
        words[PLAN], plan = self._plan
        if self._is_in_batch:
            self._begun[self.slot, self._t[0] + 1 :, env] = words[_BEGUN]
        self._options[env] = options = start.options if plan is None else episode_options(plan, *key)
        return Start(seed, copy.deepcopy(options))  # the environment may change its own

    # ---- before the first batch ------------------------------------------------------------

    def plan_steps(self, env: int, n: int) -> None:
        """The environment is about to make `n` random steps."""
        first = self._position - n
        self._words[env, START], self._words[env, AT] = first, first - 1

    def begin_step(self, env: int, actions: Sequence[Any]) -> None:
        """The next of these steps begins, with the environment's part of `actions`, `[B, ...]` for each recorder."""
        words = self._words[env]
        for p, cell in self._log.seats[self._first + env]:
            i, first = self._recorder_of[p]
            action = actions[i][cell - first : cell - first + 1]
            self._log.write(p, cell, int(words[AT]) + 1, action, _NO_REWARD)
        words[AT] += 1

    def note_reward(self, env: int, i: int, column: int, reward: float) -> None:
        """This step has returned `reward` for a column of recorder i."""
        p, columns = self._cells[i]
        rewards = self._log.memory.arrays.policies[f"_{p}"].reward
        rewards[self._words[env, AT] % self._log.n_rows, columns.start + column] = reward

    # ---- resuming --------------------------------------------------------------------------

    def agents(self, env: int) -> Sequence[Any]:
        """The agents of this environment, in the order of their parts of its actions."""
        return self._log.agents[self._first + env]

    def column_state(self, env: int) -> dict[str, Any]:
        """The environment's running episode, between two batches."""
        words = self._words[env].tolist()
        position, n_missing = words[POSITION], max(0, words[POSITION] - words[START] - self._log.n_rows)
        actions, rewards = self._log.read(self._first + env, words[START] + n_missing, position)
        numbers = {name: words[i] for name, i in _SAVED.items()}
        options = self._options[env]
        return {**numbers, "options": options, "actions": actions, "rewards": rewards, "n_missing": n_missing}

    def load_column_state(self, env: int, state: Mapping[str, Any]) -> None:
        """Continue the episode with this `column_state`."""
        rewards, words = state["rewards"][-self._log.n_rows :], self._words[env]
        actions = map_leaves(lambda leaf: leaf[len(state["rewards"]) - len(rewards) :], state["actions"])
        self._log.write_env(self._first + env, self._position - len(rewards), actions, rewards)
        words[list(_SAVED.values())] = [state[name] for name in _SAVED]
        self._options[env] = state["options"]
        words[START] = self._position - len(state["rewards"]) - state["n_missing"]

    def restart(self, env: int, generation: int) -> None:
        """The next reset of the environment begins episode 0, with a seed of this generation."""
        self._words[env, EPISODE], self._words[env, GENERATION] = -1, generation

    # ---- batches ---------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A batch begins."""
        words = self._words
        words[:, FIRST_START], self._begun[self.slot] = words[:, START], words[:, _BEGUN]
        self._is_in_batch = True

    def end_batch(self, samples: Sequence[Any]) -> None:
        """The batch is complete: keep its actions and rewards, from the `samples` of each recorder."""
        for (p, columns), batch in zip(self._cells, samples, strict=True):
            self._log.write(p, slice(columns.start, columns.stop), self._position, batch.action[1:], batch.reward[1:])
        self._go_to(self._position + self._log.batch_T)
