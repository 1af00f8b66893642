"""The arguments of a sampler: their names and types, and their checks."""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, get_args

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.arguments import MOST_ENVS, integer, one_of, seconds, true_or_false, unknown_argument
from penstock.collectors import BaseEvalCollector, Collector, EvalCollector, ResetCollector, TrajInfo
from penstock.envs import EnvFn, InfoWanted
from penstock.envs.examples import checked_spaces
from penstock.errors import ConfigError, SpaceError, brief
from penstock.workers.control import StopCollecting
from penstock.workers.failures import ON_WORKER_FAILURE, OnWorkerFailure
from penstock.workers.launcher import START_METHODS, StartMethod

if TYPE_CHECKING:
    from typing_extensions import Required, Self


class SamplerState(enum.Enum):
    """The state of a sampler. The value names the calls that are expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples, evaluate_agent, or a call on the environments"
    SAMPLING = "wait_samples, which returns the batch that has been started"
    RUNNING = "obtain_samples, poll_samples, evaluate_agent, a call on the environments, hold, or pause"
    STREAMING = "the next piece of stream, or the end of its loop"
    PAUSED = "resume, evaluate_agent, or a call on the environments"
    BROKEN = "shutdown"
    CLOSED = "none"


#: The bounds of every number that is always given.
_BOUNDS = {
    "batch_T": (1, 2**63 - 1),
    "batch_B": (1, MOST_ENVS),
    "n_slots": (1, 10_000),
    "max_decorrelation_steps": (0, 10**9),
    "eval_n_envs": (0, MOST_ENVS),
    "eval_max_steps": (0, 2**63 - 1),
    "max_restarts": (0, 2**63 - 1),
    "max_renewals": (0, 2**63 - 1),
}

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
    **dict.fromkeys(("n_shards", "on_node_failure"), "penstock.cluster.RaySampler has it"),
    **dict.fromkeys(
        ("options", "reset_options"),
        "Gymnasium's reset options are not an option of a sampler: give them in the reset of a wrapper in env_fn, or "
        "change the environments between two batches with sampler.call or sampler.set_attr",
    ),
}


class TakesEnvFn:
    """A base of samplers. Without it, another name for `env_fn`, which comes first, would be a bare `TypeError`, and
    `help` and completion would not list the options."""

    _defaults: ClassVar[Mapping[str, Any]] = {}  #: of options whose default is another one in this class

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        shown = inspect.signature(cls.__init__)
        *own, last = shown.parameters.values()
        if last.annotation == "Unpack[SamplerOptions]":
            for option in fields(SamplerConfig):
                if option.name not in shown.parameters:
                    default = cls._defaults.get(option.name, option.default)
                    default = last.empty if default is MISSING else default
                    own.append(
                        inspect.Parameter(option.name, last.KEYWORD_ONLY, default=default, annotation=option.type)
                    )
            shown = shown.replace(parameters=own)
            cls.__init__.__signature__ = shown  # type: ignore[attr-defined]
        _, *others = shown.parameters.values()
        cls.__signature__ = shown.replace(parameters=others)  # type: ignore[attr-defined]

    def __new__(cls, *args: object, **options: Any) -> Self:
        for name in options:
            if (own := _OTHER_NAMES.get(name)) == "env_fn":
                raise unknown_argument(cls.__name__, name, [own], {name: f"did you mean {own!r}?"})
        return super().__new__(cls)


OnGameFailure = Literal["raise", "renew"]
ON_GAME_FAILURE: tuple[str, ...] = get_args(OnGameFailure)

EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class SamplerOptions(TypedDict, total=False):
    """The keyword arguments of every sampler, for type checkers; `Sampler` documents them."""

    env_kwargs: EnvKwargs
    batch_T: Required[int]
    batch_B: Required[int]
    n_workers: int | None
    spaces: tuple[gym.Space[Any], gym.Space[Any]] | None
    n_slots: int
    collector_cls: type[Collector]
    max_decorrelation_steps: int
    traj_info_cls: type[TrajInfo]
    eval_n_envs: int
    eval_max_steps: int
    eval_max_trajectories: int | None
    eval_episodes: int | None
    eval_env_fn: EnvFn | None
    eval_env_kwargs: EnvKwargs
    eval_collector_cls: type[BaseEvalCollector]
    start_method: StartMethod
    step_timeout: float | None
    start_timeout: float
    close_timeout: float
    on_worker_failure: OnWorkerFailure
    max_restarts: int
    restart_window: float
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
    crash_dir: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """The arguments of a sampler, checked; `Sampler` documents them."""

    env_fn: EnvFn
    env_kwargs: EnvKwargs = None
    batch_T: int
    batch_B: int
    n_workers: int | None = None
    spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None
    n_slots: int = 1
    collector_cls: type[Collector] = ResetCollector
    max_decorrelation_steps: int = 100
    traj_info_cls: type[TrajInfo] = TrajInfo
    eval_n_envs: int = 0
    eval_max_steps: int = 10_000
    eval_max_trajectories: int | None = None
    eval_episodes: int | None = None
    eval_env_fn: EnvFn | None = None
    eval_env_kwargs: EnvKwargs = None
    eval_collector_cls: type[BaseEvalCollector] = EvalCollector
    start_method: StartMethod = "forkserver"
    step_timeout: float | None = None
    start_timeout: float = 120.0
    close_timeout: float = 10.0
    on_worker_failure: OnWorkerFailure = "raise"
    max_restarts: int = 3
    restart_window: float = 60.0
    on_game_failure: OnGameFailure = "raise"
    max_renewals: int = 3
    renew_on: tuple[type[Exception], ...] = ()
    observation_dtype: npt.DTypeLike | None = None
    record_final_obs: bool = True
    env_info: InfoWanted = False
    global_state: bool = False
    flatten_wrappers: bool = True
    check_finite: bool = False
    debug: bool = False
    seed_episodes: bool = False
    crash_dir: str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, caller: str, env_fn: EnvFn, options: Mapping[str, Any]) -> SamplerConfig:
        """The config from the arguments of the class `caller`; `ConfigError` for a wrong or missing name."""
        known = {field.name: field.default for field in fields(cls)}
        for name in options:
            if name not in known:
                hints = {other: f"did you mean {own!r}?" for other, own in _OTHER_NAMES.items()} | _ARGUMENTS_OF
                own = [other for other, text in _ARGUMENTS_OF.items() if caller in text]
                raise unknown_argument(caller, name, [*known, *own], hints)
        missing = [name for name, default in known.items() if default is MISSING and name not in {"env_fn", *options}]
        if missing:
            raise ConfigError(f"{caller} needs {' and '.join(missing)}")
        return cls(env_fn=env_fn, **options)

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            self._put(name, integer(name, getattr(self, name), least, most))
        for name in ("n_workers", "eval_max_trajectories", "eval_episodes"):
            if getattr(self, name) is not None:
                self._put(name, integer(name, getattr(self, name), 1))
        for name in ("step_timeout", "start_timeout", "close_timeout", "restart_window"):
            if name != "step_timeout" or self.step_timeout is not None:
                self._put(name, seconds(name, getattr(self, name)))
        for name in ("record_final_obs", "global_state", "flatten_wrappers", "check_finite", "debug", "seed_episodes"):
            self._put(name, true_or_false(name, getattr(self, name)))
        self._check_evaluation()
        one_of("start_method", self.start_method, START_METHODS)
        one_of("on_worker_failure", self.on_worker_failure, ON_WORKER_FAILURE)
        self._check_kinds()
        self._check_replays()
        self._check_renewal()

    @property
    def own_envs(self) -> tuple[int, int]:
        """How many training and evaluation environments there are."""
        return self.batch_B, self.eval_n_envs

    @property
    def rows_per_env(self) -> int:
        """How many columns belong together."""
        return self.collector_cls.rows_per_env

    @property
    def n_built(self) -> int:
        """How many parts the training environments can be divided into."""
        return self.batch_B // self.rows_per_env

    @property
    def example_size(self) -> int:
        """How many environments the batched example environment has; 0: it is a single one."""
        return self.rows_per_env if self.collector_cls.batched else 0

    @property
    def memory_slots(self) -> int:
        """How many batches there is memory for. With `debug`, one more, which stays poisoned for a while."""
        return self.n_slots + self.debug

    def _check_evaluation(self) -> None:
        if self.eval_max_steps < self.eval_n_envs:
            raise ConfigError(
                f"eval_max_steps must be at least eval_n_envs={self.eval_n_envs}, one step for each evaluation "
                f"environment, got {self.eval_max_steps}"
            )
        if not isinstance(self.eval_env_kwargs, Mapping | Sequence | None):
            raise ConfigError(
                f"eval_env_kwargs must be a dict, a list of dicts or None, got {brief(self.eval_env_kwargs)}"
            )
        for name in ("eval_env_fn", "eval_env_kwargs", "eval_episodes"):
            if getattr(self, name) and not self.eval_n_envs:
                raise ConfigError(f"{name} needs evaluation environments: give eval_n_envs too")
        if self.eval_episodes is not None and self.eval_max_trajectories is not None:
            raise ConfigError("eval_episodes and eval_max_trajectories exclude each other: leave one out")

    def _check_replays(self) -> None:
        if self.seed_episodes and self.collector_cls.batched:
            raise ConfigError("seed_episodes=True needs single environments: the collector uses a batched one")
        if self.crash_dir is None:
            return
        if not isinstance(self.crash_dir, str | os.PathLike):
            raise ConfigError(f"crash_dir must be the path of a folder or None, got {self.crash_dir!r}")
        if not self.seed_episodes:
            raise ConfigError("crash_dir needs seed_episodes=True: otherwise no failure can be replayed")

    def _check_renewal(self) -> None:
        one_of("on_game_failure", self.on_game_failure, ON_GAME_FAILURE)
        for cls in self.renew_on if isinstance(self.renew_on, tuple) else (self.renew_on,):
            if not (isinstance(cls, type) and issubclass(cls, Exception)):
                raise ConfigError(f"renew_on must be a tuple of exception classes, got {brief(self.renew_on)}")
            not_cured = ((SpaceError, "SpaceError"), (StopCollecting, "penstock's own signals"))
            if included := " and ".join(name for each, name in not_cured if issubclass(each, cls)):
                raise ConfigError(
                    f"renew_on must not contain {cls.__name__}, since it includes {included}: name the exceptions of "
                    "your game's library"
                )
        if self.on_game_failure == "raise":
            if self.renew_on:
                raise ConfigError('renew_on needs on_game_failure="renew"')
            return
        if self.collector_cls.batched:
            raise ConfigError('on_game_failure="renew" needs single environments: the collector uses a batched one')
        for name, base in (("collector_cls", ResetCollector), ("eval_collector_cls", EvalCollector)):
            cls = getattr(self, name)
            if not issubclass(cls, base):
                raise ConfigError(
                    f'on_game_failure="renew" needs a {name} that is a {base.__name__}, since it cuts episodes as that '
                    f"class does, got {cls.__name__}"
                )

    def _check_kinds(self) -> None:
        if self.observation_dtype is not None and not _is_float_dtype(self.observation_dtype):
            raise ConfigError(
                f"observation_dtype must be a floating-point numpy dtype or None, got {self.observation_dtype!r}"
            )
        for name, base in (
            ("collector_cls", Collector),
            ("eval_collector_cls", BaseEvalCollector),
            ("traj_info_cls", TrajInfo),
        ):
            cls = getattr(self, name)
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise ConfigError(f"{name} must be a subclass of {base.__name__} (the class itself), got {cls!r}")
        self._check_rows_per_env()

        wanted = self.env_info
        is_names = isinstance(wanted, Collection) and not isinstance(wanted, str)
        if not (isinstance(wanted, bool) or (is_names and all(isinstance(name, str) for name in wanted))):
            raise ConfigError(f"env_info must be True, False, a list of names or a dict of examples, got {wanted!r}")
        self._put("spaces", checked_spaces(self.spaces))
        if self.spaces is not None and wanted and not isinstance(wanted, Mapping):
            raise ConfigError(
                f"with spaces, no example environment is stepped for env_info={wanted!r}: give examples of the values, "
                "env_info={'name': 0.0}"
            )

    def _check_rows_per_env(self) -> None:
        cls = self.collector_cls
        k = integer(f"rows_per_env of {cls.__name__}", cls.rows_per_env, 1)
        if k > 1 and not cls.batched:
            raise ConfigError(f"rows_per_env of {cls.__name__} is for batched environments: set batched = True, too")
        for name, n in (("batch_B", self.batch_B), ("eval_n_envs", self.eval_n_envs)):
            if n % k:
                raise ConfigError(f"{name} must be a multiple of {k}, the rows_per_env of {cls.__name__}, got {n}")

    def _put(self, name: str, value: object) -> None:
        """Replace an argument by its checked value."""
        object.__setattr__(self, name, value)


def _is_float_dtype(value: Any) -> bool:
    try:
        return bool(np.dtype(value).kind == "f")
    except TypeError:
        return False
