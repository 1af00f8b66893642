"""What an evaluation plays: which episodes, of which tasks, with which seeds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.buffers.tree import tree_leaves
from penstock.envs import (
    ColumnStreams,
    EnvContext,
    EnvFactory,
    EnvFn,
    MaskInObservation,
    Purpose,
    build_example_env,
    close_example_env,
    env_factories,
)
from penstock.envs.factory import are_arguments
from penstock.errors import ConfigError, SpaceError, brief
from penstock.evaluation.policies import Spaces
from penstock.vector.objects import has_fixed_shape
from penstock.workers.marking import marked


class Job(NamedTuple):
    """One episode to play."""

    policy: str
    task: int  #: its index among the tasks
    episode: int
    seed: int  #: of the reset
    options: dict[str, Any] | None  #: of the reset


@dataclass(frozen=True)
class EvaluationPlan:
    """All that decides what happens in the episodes, except for the policies themselves. Each episode has a number: all
    of a policy's tasks in order, all episodes of a task in order.
    """

    policies: tuple[str, ...]
    tasks: Mapping[str, Mapping[str, Any]]  #: the arguments of `env_fn` for each task
    episodes: Sequence[int]  #: their numbers, ascending
    factories: Sequence[EnvFactory]  #: one for each task
    spaces: Spaces
    options: Sequence[dict[str, Any] | None]  #: task by task, of each episode; empty without options
    seed: int
    success: str | None
    success_at: str  #: "last" or "any" step of an episode
    until_success: bool
    max_steps: int | None
    mask_key: str | None = None  #: the entry of `info` that becomes a part of the observation, for agents

    @classmethod
    def of(
        cls,
        env_fn: EnvFn,
        tasks: Mapping[str, Mapping[str, Any]],
        *,
        options: Callable[[str, int], Mapping[str, Any]] | None,
        episodes: Sequence[int],
        spaces: Spaces | None = None,
        **others: Any,
    ) -> EvaluationPlan:
        """The plan of what `evaluate` got. Without `spaces`, an environment is built to read them, and closed."""
        factories = factories_of(env_fn, tasks, others.get("mask_key"))
        spaces = _spaces_of(factories) if spaces is None else spaces
        for name, part in tree_leaves(spaces[1], "action"):
            if not has_fixed_shape(part):
                raise SpaceError(f"{name} of {part} has no fixed shape, which evaluate needs: change it with a wrapper")
        of_resets = [_options_of(options, name, k) for name in tasks for k in episodes] if options is not None else []
        return cls(tasks=tasks, episodes=episodes, factories=factories, spaces=spaces, options=of_resets, **others)

    @property
    def n(self) -> int:
        """The number of episodes."""
        return len(self.policies) * len(self.tasks) * len(self.episodes)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self.tasks)

    def job(self, number: int) -> Job:
        """The episode with this number."""
        which, k = divmod(number, len(self.episodes))
        policy, task = divmod(which, len(self.tasks))
        options = self.options[task * len(self.episodes) + k] if self.options else None
        episode = self.episodes[k]
        return Job(self.policies[policy], task, episode, self.env_seed(task, episode), options)

    def number(self, policy: str, task: str, episode: int) -> int:
        """The number of an episode. Raises `ConfigError` if this evaluation does not have it."""
        try:
            which = self.policies.index(policy) * len(self.tasks) + self.task_names.index(task)
            return which * len(self.episodes) + self.episodes.index(episode)
        except ValueError:
            raise ConfigError(
                f"there is no episode {episode} of the policy {policy!r} and the task {task!r}. The policies are "
                f"{brief(list(self.policies))}, the tasks {brief(list(self.tasks))}, and the episodes "
                f"{brief(self.episodes)}"
            ) from None

    def env_seed(self, task: int, episode: int) -> int:
        """The seed of the reset that begins an episode. It does not depend on the policy."""
        return seed_of(self.seed, self.task_names[task], episode)

    def rng(self, job: Job) -> np.random.Generator:
        """What the policy draws from in an episode."""
        return self._streams(job.task).rngs(Purpose.EVAL_ACTION, job.episode)[0]

    def _streams(self, task: int) -> ColumnStreams:
        return _streams(self.seed, self.task_names[task])

    def context(self, task: int, worker_rank: int) -> EnvContext:
        """What the environments of a task are built with. Nothing in it depends on the column."""
        return EnvContext(task, worker_rank, self._streams(task).env_seeds(Purpose.EVAL)[0], Purpose.EVAL)

    def differs(self, spaces: Spaces, task: int) -> str:
        """Which space of a task's environment is not that of this plan; "" if both are."""
        for name, space, wanted in zip(("observation", "action"), spaces, self.spaces, strict=True):
            if space != wanted:
                return (
                    f"the {name}_space of the task {self.task_names[task]!r} is {space}, expected was {wanted}: all "
                    "tasks of an evaluation must have the same spaces. Evaluate the others separately, or make the "
                    "spaces equal with wrappers"
                )
        return ""


def _spaces_of(factories: Sequence[EnvFactory]) -> Spaces:
    """The spaces of the first environment that can be built. A task without one fails alone, in its worker."""
    errors: list[ConfigError] = []
    for factory in factories:
        try:
            with marked:  # programs that it starts end with this process
                example = build_example_env(factory)
                spaces = example.observation_space, example.action_space
                close_example_env(example)
                return spaces
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _options_of(options: Callable[[str, int], Mapping[str, Any]], task: str, k: int) -> dict[str, Any] | None:
    given: Any = options(task, k)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"options({task!r}, {k}) must return a dict or None, got {brief(given)}")
    return None if given is None else dict(given)


def tasks_of(tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """The arguments of `env_fn` for each task, by its name. One without a name has none."""
    if tasks is None:
        return {"": {}}
    is_names = isinstance(tasks, Sequence) and not isinstance(tasks, str) and all(isinstance(t, str) for t in tasks)
    named: dict[str, Any] = {name: {"task": name} for name in tasks} if is_names else tasks  # type: ignore[assignment]
    fits = isinstance(named, Mapping) and named and all(are_arguments(kwargs) for kwargs in named.values())
    if not fits or not all(isinstance(name, str) for name in named) or len(named) != len(tasks):
        raise ConfigError(
            "tasks must be a list of different names, which env_fn gets as `task`, or a dict that has arguments of "
            f"env_fn for each name, got {brief(tasks)}"
        )
    return {name: dict(kwargs) for name, kwargs in named.items()}


def factories_of(env_fn: EnvFn, tasks: Mapping[str, Mapping[str, Any]], mask_key: str | None) -> tuple[EnvFactory, ...]:
    """A factory for each task."""
    wrapper: Any = None if mask_key is None else partial(MaskInObservation, key=mask_key)
    if isinstance(env_fn, Sequence) and not isinstance(env_fn, str):
        raise ConfigError("env_fn must be one callable or environment id: give what differs between tasks as tasks=...")
    return tuple(replace(env_factories(env_fn, kwargs, 1)[0], wrapper=wrapper) for kwargs in tasks.values())


def seed_of(seed: int, task: str, episode: int) -> int:
    """The seed of the reset that begins an episode of a task, in an evaluation with `seed`."""
    return _streams(seed, task).env_seeds(Purpose.EVAL, episode)[0]


def _streams(seed: int, task: str) -> ColumnStreams:
    """The random numbers of a task, which depend on its name, not on its place among the others."""
    return ColumnStreams(seed, (zlib.crc32(task.encode()),))


def plain(info: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of an info that any process can read: numbers, texts, arrays, None, and lists and dicts of them.
    Arrays are copies, since environments use them again, and tensors become arrays."""
    return {str(key): value for key, entry in info.items() if (value := _plain(entry)) is not _NOTHING}


_NOTHING = object()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _NOTHING if value.dtype.hasobject else value.copy()
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [part for entry in value if (part := _plain(entry)) is not _NOTHING]
    if hasattr(value, "detach"):
        return np.array(value.detach().cpu())
    return _NOTHING


def is_true(value: object) -> bool:
    """What the info says of the success. Raises `ConfigError` unless it is True or False, or one of their numbers."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
        raise ConfigError(
            f"the entry of the info that says whether it was a success must be a bool, got {brief(value)}"
        )
    return bool(array.item())


def leaves_of(space: Any, value: Any) -> list[Any]:
    """The parts of an element of a space, or of a batch, in order."""
    return [value] if isinstance(value, np.ndarray) else [part for _, _, part in tree_leaves(space, "", value)]
