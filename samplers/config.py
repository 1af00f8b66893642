"""The arguments of a sampler: their names and types, and their checks."""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.arguments import (
    MOST_ENVS,
    between,
    choice,
    kind_of,
    must_be,
    optional,
    signature,
    subclass_of,
    true_or_false,
    unknown_argument,
)
from penstock.collectors import Collector, EvalCollector, ResetCollector, TrajInfo
from penstock.envs import EnvFn, InfoWanted
from penstock.envs.examples import checked_spaces
from penstock.envs.seeding import EpisodePlan, require_plan
from penstock.errors import ConfigError, SpaceError
from penstock.samplers.refusals import BATCHED, PLAN, RENEWAL, SEEDED, WAITING, refuse
from penstock.workers.control import StopCollecting
from penstock.workers.plan import PoolArguments, PoolKeywords

if TYPE_CHECKING:
    from typing_extensions import Required


class SamplerState(enum.Enum):
    """The state of a sampler. The value names the calls that are expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples, evaluate_agent, or a call on the environments"
    SAMPLING = "wait_samples, which returns the batch that has been started"
    RUNNING = "obtain_samples, poll_samples, evaluate_agent, a call on the environments, hold, or pause"
    YIELDING = "the next piece, or the end of the loop over pieces"
    PAUSED = "resume, evaluate_agent, or a call on the environments"
    BROKEN = "shutdown"
    CLOSED = "none"


#: What other libraries call these arguments.
_OTHER_NAMES = {
    "n_envs": "batch_B",
    "num_envs": "batch_B",
    "n_steps": "batch_T",
    "num_steps": "batch_T",
    "num_workers": "n_workers",
    "workers": "n_workers",
    "EnvCls": "env_fn",
}

#: Which samplers have the arguments that not all of them have, and what to do where none has.
_ARGUMENTS_OF = {
    "min_ready": "GpuSampler has it",
    **dict.fromkeys(("compile_model", "spin_seconds"), "GpuSampler and AlternatingSampler have it"),
    "server": "GpuSampler, AlternatingSampler and AsyncSampler have it",
    "overlap": "AlternatingSampler has it",
    **dict.fromkeys(("lag", "replay", "ratio"), "AsyncSampler has it"),
    **dict.fromkeys(("n_shards", "on_node_failure"), "RaySampler has it"),
    **dict.fromkeys(
        ("options", "reset_options"),
        "Gymnasium's reset options come from episode_plan, or from the reset of a wrapper in env_fn; or change the "
        "environments between two batches with sampler.call or sampler.set_attr",
    ),
}


def _float_dtype(name: str, value: Any) -> Any:
    try:
        is_float = np.dtype(value).kind == "f"
    except TypeError:
        is_float = False
    return must_be(name, value, is_float, "a floating-point numpy dtype or None")


def _names_or_examples(name: str, value: Any) -> Any:
    is_names = isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(x, str) for x in value)
    wanted = "True, False, a list of names or a dict of examples"
    return must_be(name, value, isinstance(value, bool) or is_names, wanted)


def _curable(name: str, value: Any) -> Any:
    """The check of exception classes that say that a game has failed, and not that its values or calls are wrong."""
    for cls in value if isinstance(value, tuple) else (value,):
        must_be(name, value, isinstance(cls, type) and issubclass(cls, Exception), "a tuple of exception classes")
        not_cured = ((SpaceError, "SpaceError"), (StopCollecting, "penstock's own signals"))
        if included := " and ".join(text for other, text in not_cured if issubclass(other, cls)):
            raise ConfigError(
                f"{name} must not contain {cls.__name__}, since it includes {included}: name the exceptions of your "
                "game's library"
            )
    return value


_kwargs_or_none = kind_of("a dict, a list of dicts or None", Mapping, Sequence, type(None))
_folder_or_none = kind_of("the path of a folder or None", str, os.PathLike, type(None))

OnGameFailure = Literal["raise", "renew"]

EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class SamplerOptions(PoolKeywords, total=False):
    """The keyword arguments of every sampler, for type checkers; `Sampler` documents them."""

    env_kwargs: EnvKwargs
    batch_T: Required[int]
    batch_B: Required[int]
    n_workers: int | None
    spaces: tuple[gym.Space[Any], gym.Space[Any]] | None
    n_slots: int
    batched: bool
    rows_per_env: int
    collector_cls: type[Collector]
    max_decorrelation_steps: int
    traj_info_cls: type[TrajInfo]
    eval_n_envs: int
    eval_max_steps: int
    eval_max_trajectories: int | None
    eval_episodes: int | None
    eval_env_fn: EnvFn | None
    eval_env_kwargs: EnvKwargs
    eval_collector_cls: type[EvalCollector]
    on_game_failure: OnGameFailure
    max_renewals: int
    renew_on: tuple[type[Exception], ...]
    observation_dtype: npt.DTypeLike | None
    record_final_obs: bool
    env_info: InfoWanted
    global_state: bool
    flatten_wrappers: bool
    check_finite: bool
    debug: bool
    seed_episodes: bool
    episode_plan: EpisodePlan | None
    crash_dir: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(PoolArguments):
    """The arguments of every sampler: the one table of their names, types, checks, defaults and documentation.

    A check is called with name and value, and the field gets what it returns. `__post_init__` compares arguments.

    Args:
        env_fn: a callable that returns a `gymnasium.Env` or an environment of PettingZoo (`ParallelEnv`, `AECEnv`), an
            environment id of either, or a list of `batch_B` callables. Lambdas and closures are fine. It is called once
            more in the main process, to read the spaces.
        env_kwargs: arguments for `env_fn`: one dict, or a list of `batch_B` dicts.
        batch_T: time steps per batch.
        batch_B: environments per batch.
        n_slots: how many batches stay readable, the newest included. Each takes the memory of a batch.
        n_workers: worker processes; by default one for each CPU that this process may use, and no more than the CPU
            quota of its container. Never more than `batch_B`.
            `SerialSampler` always has one worker.
        batched: whether each worker builds one batched environment, `env_fn(num_envs=n)`, in place of n single ones. It
            may reset a row in the step that ends its episode (Gymnasium's `AutoresetMode.SAME_STEP`), or leave the
            reset to the caller (`DISABLED`). In the mode `NEXT_STEP` the step after is only a reset, and not `valid`.
        rows_per_env: how many rows of a batched environment belong together, such as the players of one game. A worker
            gets all of them, so `batch_B` and `eval_n_envs` are multiples of this number.
        collector_cls: the `Collector` subclass that runs in the workers.
        spaces: `(observation_space, action_space)` of the environments. Then no example environment is built to read
            them: give this where an environment takes long to start, or needs a licence. `env_info` then needs examples
            of its values, and the agent is tried on zeros only.
        max_decorrelation_steps: before the first batch, each environment makes a random number of random steps, at
            most this many.
        traj_info_cls: `TrajInfo` or a subclass of it.
        eval_n_envs: evaluation environments, in the same workers; 0 for none.
        eval_max_steps: the most steps of one evaluation, all its environments together.
        eval_max_trajectories: an evaluation also ends when this many trajectories have finished. It may return a few
            more.
        eval_episodes: run exactly this many whole episodes instead, the same in each evaluation (see `evaluate_agent`).
            Each environment runs a fixed number of them, so that short episodes are not favoured. If `eval_max_steps`
            ends some early, a `RuntimeWarning` says how many.
        eval_env_fn: the same as `env_fn`, for the evaluation environments, with the same spaces; by default `env_fn`.
        eval_env_kwargs: the same as `env_kwargs`, for the evaluation environments; by default `env_kwargs`, or nothing
            with `eval_env_fn`. From lists (env_fn, env_kwargs), all evaluation environments use the first entry.
        eval_collector_cls: `EvalCollector` or a subclass of it, which evaluates.
        start_method: "forkserver", "spawn" or "fork". The default is "forkserver", on macOS "spawn".
        step_timeout: seconds that a worker may make no progress (an environment step, a reset, an agent step) before
            `WorkerTimeoutError`; None waits for ever, as long as the worker lives.
        start_timeout: the same, while environments are built and are reset for the first time. Without `step_timeout`,
            also for each of the random steps before the first batch.
        close_timeout: seconds that the `close` of each environment may take in `shutdown`. Then its worker is killed.
        on_worker_failure: "raise" breaks the sampler when a worker raises, dies or hangs. "restart" replaces the
            worker: the new one builds its environments again, with new but reproducible random streams, and collects
            its columns of the running batch again from the first step. No other column is touched.
        max_restarts: the most replacements within `restart_window` seconds; one more raises an error that
            lists the earlier ones.
        restart_window: the seconds over which `max_restarts` and `max_renewals` count. Failed starts in a row count
            without it.
        on_game_failure: "raise" treats a `GameError` of an environment as any error of a worker. "renew" builds only
            this environment again, with new but reproducible seeds, and cuts its episode: see docs/games.md.
        max_renewals: the most renewals of one environment within `restart_window` seconds, and the most starts in a
            row that fail. One more raises an error that lists the earlier ones.
        renew_on: a tuple of further exception classes that say that a game has failed, such as those of its library.
        observation_dtype: record floating-point observations in this dtype (for example `np.float32`) instead of that
            of the space.
        record_final_obs: whether to record the last observation of each episode (`env.final_obs`), which takes as much
            memory as the observations.
        global_state: with several agents in an environment: each observation gets `env.state()` beside its own part, as
            `observation.global_state`, for a critic that sees everything.
        env_info: the entries of `info` to record as `samples.env.env_info`: names (`"stats.speed"` for nested ones), a
            dict of names and examples of their values, or True for every numeric one that a step of an example
            environment shows. `env_info._name` is True where `info` had `name`.
        flatten_wrappers: step the wrappers that `gym.make` adds without their Python functions, with the same results.
            False: call the `step` of the outermost wrapper in any case.
        check_finite: refuse NaN and inf in rewards and floating-point observations, with a `SpaceError` that names
            field, environment and value.
        debug: check each action and observation with `space.contains`. Slow. Shapes, dtypes and structure are always
            checked. Samples whose memory was given back raise `StaleSamplesError`, and this memory is overwritten with
            NaN, False, or the smallest or largest integer. There is memory for one more batch then.
        seed_episodes: seed every reset of a training environment by (env_rank, episode), so that `error.episode` and
            `sampler.episode` can repeat an episode. It keeps the last actions of each environment, up to 4 MB each.
        episode_plan: `episode_plan(env_rank, episode, rng)` returns the `options` of the reset that begins this episode
            of a training environment: a dict or None. `rng` is a numpy generator that depends on the seed, `env_rank`
            and `episode`. The plan must depend on nothing else: each worker has a copy of it. It implies
            `seed_episodes=True`. See `set_episode_plan`.
        crash_dir: a folder in which the episode of each failure is written too, as a file for `RecordedEpisode.load`,
            and a trace of the last batches before each of the first 20: see `trace`.
    """

    env_fn: EnvFn
    env_kwargs: EnvKwargs = None
    batch_T: Annotated[int, between(1)]
    batch_B: Annotated[int, between(1, MOST_ENVS)]
    n_workers: Annotated[int | None, optional(between(1))] = None
    spaces: Annotated[tuple[gym.Space[Any], gym.Space[Any]] | None, checked_spaces] = None
    n_slots: Annotated[int, between(1, 10_000)] = 1
    batched: Annotated[bool, true_or_false] = False
    rows_per_env: Annotated[int, between(1)] = 1
    collector_cls: Annotated[type[Collector], subclass_of(Collector)] = ResetCollector
    max_decorrelation_steps: Annotated[int, between(0, 10**9)] = 100
    traj_info_cls: Annotated[type[TrajInfo], subclass_of(TrajInfo)] = TrajInfo
    eval_n_envs: Annotated[int, between(0, MOST_ENVS)] = 0
    eval_max_steps: Annotated[int, between(0)] = 10_000
    eval_max_trajectories: Annotated[int | None, optional(between(1))] = None
    eval_episodes: Annotated[int | None, optional(between(1))] = None
    eval_env_fn: EnvFn | None = None
    eval_env_kwargs: Annotated[EnvKwargs, _kwargs_or_none] = None
    eval_collector_cls: Annotated[type[EvalCollector], subclass_of(EvalCollector)] = EvalCollector
    on_game_failure: Annotated[OnGameFailure, choice(*get_args(OnGameFailure))] = "raise"
    max_renewals: Annotated[int, between(0)] = 3
    renew_on: Annotated[tuple[type[Exception], ...], _curable] = ()
    observation_dtype: Annotated[npt.DTypeLike | None, optional(_float_dtype)] = None
    record_final_obs: Annotated[bool, true_or_false] = True
    env_info: Annotated[InfoWanted, _names_or_examples] = False
    global_state: Annotated[bool, true_or_false] = False
    flatten_wrappers: Annotated[bool, true_or_false] = True
    check_finite: Annotated[bool, true_or_false] = False
    debug: Annotated[bool, true_or_false] = False
    seed_episodes: Annotated[bool, true_or_false] = False
    episode_plan: Annotated[EpisodePlan | None, require_plan] = None
    crash_dir: Annotated[str | os.PathLike[str] | None, _folder_or_none] = None

    @classmethod
    def of(cls, caller: str, env_fn: EnvFn, options: Mapping[str, Any]) -> SamplerConfig:
        """The config from the arguments of the class `caller`; `ConfigError` for a wrong or missing name."""
        known = {field.name: field.default for field in fields(cls)}
        for name in options:
            if name not in known:
                hints = {other: f"did you mean {name!r}?" for other, name in _OTHER_NAMES.items()} | _ARGUMENTS_OF
                of_caller = [other for other, text in _ARGUMENTS_OF.items() if caller in text]
                raise unknown_argument(caller, name, [*known, *of_caller], hints)
        missing = [name for name, default in known.items() if default is MISSING and name not in {"env_fn", *options}]
        if missing:
            raise ConfigError(f"{caller} needs {' and '.join(missing)}")
        return cls(env_fn=env_fn, **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episode_plan is not None:
            object.__setattr__(self, "seed_episodes", True)
        self._check_evaluation()
        self._check_rows_per_env()
        refuse(
            {
                PLAN: self.episode_plan is not None,
                SEEDED: self.seed_episodes,
                BATCHED: self.batched,
                RENEWAL: self.on_game_failure == "renew",
                WAITING: self.collector_cls.waits,
            }
        )
        if self.spaces is not None and self.env_info and not isinstance(self.env_info, Mapping):
            raise ConfigError(
                f"with spaces, no example environment is stepped for env_info={self.env_info!r}: give examples of the "
                "values, env_info={'name': 0.0}"
            )
        if self.crash_dir is not None and not self.seed_episodes:
            raise ConfigError("crash_dir needs seed_episodes=True: otherwise no failure can be replayed")
        if self.on_game_failure == "raise" and self.renew_on:
            raise ConfigError('renew_on needs on_game_failure="renew"')

    @property
    def env_counts(self) -> tuple[int, int]:
        """How many training and evaluation environments there are."""
        return self.batch_B, self.eval_n_envs

    @property
    def n_built(self) -> int:
        """How many parts the training environments can be divided into."""
        return self.batch_B // self.rows_per_env

    @property
    def example_size(self) -> int:
        """How many environments the batched example environment has; 0: it is a single one."""
        return self.rows_per_env if self.batched else 0

    @property
    def eval_source(self) -> tuple[Any, EnvKwargs]:
        """What builds the evaluation environments: a function or an id, and its arguments. Where those for training are
        lists with an entry for each environment, evaluations take the first entry."""
        if self.eval_env_fn is not None:
            return self.eval_env_fn, self.eval_env_kwargs
        env_fn: Any = self.env_fn
        kwargs = _first(self.env_kwargs) if self.eval_env_kwargs is None else self.eval_env_kwargs
        return env_fn if callable(env_fn) else _first(env_fn), kwargs

    @property
    def memory_slots(self) -> int:
        """How many batches there is memory for. With `debug`, one more, which stays poisoned for a while."""
        return self.n_slots + self.debug

    def _check_evaluation(self) -> None:
        least = f"at least eval_n_envs={self.eval_n_envs}, one step for each evaluation environment"
        must_be("eval_max_steps", self.eval_max_steps, self.eval_max_steps >= self.eval_n_envs, least)
        for name in ("eval_env_fn", "eval_env_kwargs", "eval_episodes"):
            if getattr(self, name) and not self.eval_n_envs:
                raise ConfigError(f"{name} needs evaluation environments: give eval_n_envs too")
        if self.eval_episodes is not None and self.eval_max_trajectories is not None:
            raise ConfigError("eval_episodes and eval_max_trajectories exclude each other: leave one out")

    def _check_rows_per_env(self) -> None:
        k = self.rows_per_env
        if k > 1 and not self.batched:
            raise ConfigError("rows_per_env is for batched environments: give batched=True, too")
        for name, n in (("batch_B", self.batch_B), ("eval_n_envs", self.eval_n_envs)):
            must_be(name, n, n % k == 0, f"a multiple of rows_per_env={k}")


def _first(given: Any) -> Any:
    """The first entry of a list; anything else itself."""
    return given[0] if isinstance(given, Sequence) and not isinstance(given, str) and given else given


def show_arguments(cls: Any, base: Any) -> None:
    """Let `help` and completion of the sampler class `cls` show the arguments of `SamplerConfig`. `base` is `Sampler`,
    whose docstring has no others."""
    if cls.__doc__ and cls.__module__.startswith("penstock."):
        table = inspect.cleandoc(SamplerConfig.__doc__ or "").partition("Args:\n")[2]
        doc, title = inspect.cleandoc(cls.__doc__), "Args" if cls is base else "Arguments of every sampler"
        raises = doc[doc.find("\n\nRaises ") :] if cls is base else ""
        cls.__doc__ = f"{doc.removesuffix(raises)}\n\n{title}:\n{table}{raises}"
    shown = signature(cls.__init__)
    *parameters, last = shown.parameters.values()
    if last.annotation == "Unpack[SamplerOptions]":
        for field in sorted(fields(SamplerConfig), key=lambda field: field.name in PoolKeywords.__annotations__):
            if field.name not in shown.parameters:
                default = cls._defaults.get(field.name, last.empty if field.default is MISSING else field.default)
                note = SamplerOptions.__annotations__[field.name].__forward_arg__
                annotation = note.removeprefix("Required[").removesuffix("]") if note.startswith("Req") else note
                parameters.append(
                    inspect.Parameter(field.name, last.KEYWORD_ONLY, default=default, annotation=annotation)
                )
        shown = shown.replace(parameters=parameters)
        cls.__init__.__signature__ = shown
    _, *others = shown.parameters.values()
    cls.__signature__ = shown.replace(parameters=others)


def require_env_fn(caller: str, options: Iterable[str]) -> None:
    """Raise `ConfigError` if one of the options is another library's name for `env_fn`. As the first parameter it would
    only be missing."""
    for name in options:
        if _OTHER_NAMES.get(name) == "env_fn":
            raise unknown_argument(caller, name, ["env_fn"], {name: "did you mean 'env_fn'?"})
