"""Checks of the arguments of a vector environment, and of its seats, where environments have several agents.

Each seat, one agent of one environment, is a sub-environment of its own. The rows of the vector environment are the
seats, environment by environment, in the order of `possible_agents`. Requests, seeds and calls go to whole
environments. A seat is *idle* while its agent has ended or has not joined yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.arguments import MOST_ENVS, checks_of, integer, must_be, seconds, signature, unknown_argument
from penstock.envs.factory import EnvFactory, build_example_env, close_example_env, env_factories
from penstock.envs.seats import PLAYED_IN_TURNS, ParallelView, SeatTable, is_in_turns
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.exchange import Ids
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.claims import CpuClaims
from penstock.workers.plan import Affinity, PoolArguments, PoolKeywords, PoolOptions, StartMethod, WorkerPlan, split

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParallelEnvLike(Protocol):
    """What type checkers know of PettingZoo's `ParallelEnv`, which need not be installed."""

    possible_agents: Any

    def step(self, actions: Any) -> Any:
        """A step of all agents."""


Options = dict[str, Any] | None
OneEnv = Callable[[], gym.Env[Any, Any]] | Callable[[], ParallelEnvLike]
#: What builds the environments, with `num_envs` batched ones.
EnvFns = Sequence[OneEnv] | list[str] | list[str | OneEnv] | Callable[..., VectorEnv[Any, Any, Any]] | str
ModeName = Literal["NEXT_STEP", "NextStep", "SAME_STEP", "SameStep", "DISABLED", "Disabled"]


#: What to use instead of an argument of AsyncVectorEnv or of another library, by the name of this argument.
_REMEDIES = {
    "worker": "change what an environment does with a wrapper",
    "max_concurrency": "n_workers is the number of environments that step at once",
    "num_workers": "did you mean 'n_workers'?",
    "start_method": "did you mean 'context'?",
}


def refuse_unknown(caller: type, given: Mapping[str, Any], *others: type) -> None:
    """Raise `ConfigError` for the first argument that is unknown to the class `caller`, and to the classes `others`, to
    which it passes arguments on."""
    known = {name for cls in (caller, *others) for name in signature(cls).parameters} - {"unknown", "kwargs"}
    for name in given:
        if name not in known:
            raise unknown_argument(caller.__name__, name, sorted(known), _REMEDIES)


def check_async_arguments(shared_memory: object, daemon: object, observation_mode: object) -> None:
    """Raise `ConfigError` for values of AsyncVectorEnv's arguments that a ShmVectorEnv cannot have."""
    wanted = "True, since results are always in shared memory (parts without a fixed shape are always pickled)"
    must_be("shared_memory", shared_memory, shared_memory is True, wanted)
    wanted = "True, since workers always exit with the main process, and may start processes"
    must_be("daemon", daemon, daemon is True, wanted)
    is_same = isinstance(observation_mode, str) and observation_mode == "same"
    wanted = '"same", since all environments must have the same spaces (change them with wrappers)'
    must_be("observation_mode", observation_mode, is_same, wanted)


def as_factories(env_fns: EnvFns, num_envs: int | None, rows_per_env: int) -> tuple[tuple[EnvFactory, ...], int]:
    """One factory for each environment, the same one for the same function, and 0. With `num_envs`, the only factory of
    batched environments that have so many rows together, and how many of these belong together."""
    given: Any = env_fns
    if num_envs is not None:
        if not (callable(given) or isinstance(given, str)):
            raise ConfigError(
                "with num_envs, env_fns must be one callable or environment id that stands for batched environments, "
                f"got {brief(given)}. For a list of single environments, leave num_envs out: its length is their number"
            )
        rest = integer("num_envs", num_envs, 1, MOST_ENVS) % integer("rows_per_env", rows_per_env, 1)
        must_be("num_envs", num_envs, rest == 0, f"a multiple of rows_per_env={rows_per_env}")
        return (_as_factory(given, "env_fns"),), rows_per_env
    if rows_per_env != 1:
        raise ConfigError("rows_per_env is for batched environments: give num_envs too")
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    fits = is_list and all(callable(fn) or isinstance(fn, str) for fn in given)
    wanted = "a list of callables or environment ids, one for each environment (one for batched ones needs num_envs)"
    must_be("env_fns", given, fits, wanted)
    integer("the number of env_fns", len(given), 1, MOST_ENVS)
    made: dict[int, EnvFactory] = {}
    for i, fn in enumerate(given):
        if id(fn) not in made:
            made[id(fn)] = replace(_as_factory(fn, f"env_fns[{i}]"), as_seats=SharedSpaces)
    return tuple(made[id(fn)] for fn in given), 0


def _as_factory(env_fn: Callable[..., gym.Env[Any, Any]] | str, name: str) -> EnvFactory:
    try:
        return env_factories(env_fn, None, 1)[0]
    except ConfigError as error:  # it names the argument of the samplers
        raise ConfigError(
            f"{name}={env_fn!r} is not a registered environment id: {error.__cause__}"
        ) from error.__cause__


def as_mode(mode: ModeName | AutoresetMode | None, *, has_seats: bool) -> AutoresetMode:
    """An autoreset mode, or the one of that name (`"SameStep"` or `"SAME_STEP"`), or the default."""
    if mode is None:
        return AutoresetMode.SAME_STEP if has_seats else AutoresetMode.NEXT_STEP
    modes = {str(key): own for own in AutoresetMode for key in (own, own.name, own.value)}
    must_be("autoreset_mode", mode, str(mode) in modes, f"one of {', '.join(AutoresetMode.__members__)}")
    chosen = modes[str(mode)]
    if has_seats and chosen is not AutoresetMode.SAME_STEP:
        raise ConfigError(
            'autoreset_mode of environments of several agents must be "SAME_STEP", which is their default: each is '
            f"reset in the step in which nobody is left, got {mode!r}"
        )
    return chosen


def as_batch_mode(mode: ModeName | AutoresetMode | None, env_mode: AutoresetMode | None) -> AutoresetMode:
    """The autoreset mode of batched environments, whose own is `env_mode`. None: it is not known."""
    if mode is None and env_mode is None:
        raise ConfigError(
            "the batched environment does not say when it resets a row whose episode has ended: set "
            "metadata['autoreset_mode'] in its class, or pass autoreset_mode if you give `spaces`"
        )
    chosen = AutoresetMode(env_mode) if mode is None else as_mode(mode, has_seats=False)
    if env_mode is not None and chosen is not AutoresetMode(env_mode):
        raise ConfigError(
            f"autoreset_mode is {chosen.name}, but the batched environment has the mode "
            f"{AutoresetMode(env_mode).name}: let "
            'env_fns build it in the other mode, as in AtariVectorEnv(..., autoreset_mode="SameStep"), or leave '
            "autoreset_mode out"
        )
    return chosen


def as_plans(
    n_envs: int,
    in_series: int | None,
    n_workers: int | None,
    affinity: Affinity | Sequence[int | Sequence[int]] | None,
    claims: CpuClaims,
    unit: int = 0,
) -> tuple[WorkerPlan, ...]:
    """Divide the environments among processes. With a `unit`, they are rows of batched environments, and so many
    belong together."""
    if isinstance(in_series, bool | np.bool_):
        raise ConfigError(
            f"in_series must be an integer, got {in_series}: the second argument of AsyncVectorEnv is shared_memory, "
            "that of ShmVectorEnv is in_series; pass all arguments after env_fns by name"
        )
    mask = usable_cpus()
    if n_workers is None and in_series is None:
        n_workers = cpus_to_fill(mask) if unit else n_envs
    elif n_workers is None:
        n_workers = -(-n_envs // integer("in_series", in_series, 1))
    elif in_series is not None and integer("in_series", in_series, 1) != 1:
        raise ConfigError("in_series and n_workers both say how many processes there are: leave one out")
    unit = unit or 1
    n_workers = min(integer("n_workers", n_workers, 1), n_envs // unit)
    if affinity is None:
        affinity = Affinity(pin=n_workers <= len(mask))
    elif not isinstance(affinity, Affinity):
        affinity = Affinity(cpus=affinity)
    cpus = claims.assign(affinity, n_workers, mask)
    return tuple(
        WorkerPlan(
            worker_rank=rank, columns=part, env_ranks=part, cpus=cpus[rank], torch_threads=affinity.torch_threads
        )
        for rank, part in enumerate(split(n_envs, n_workers, unit))
    )


def as_options(context: StartMethod | None, **given: Unpack[PoolKeywords]) -> PoolOptions:
    """The options of the worker pool."""
    start_method = checks_of(PoolArguments)["start_method"]("context", context or PoolArguments.start_method)
    return replace(PoolArguments(**given), start_method=start_method).pool_options(
        preload=("penstock.vector.step_program", "gymnasium.envs.classic_control"),
        keeps_messages=True,  # an info belongs to a reply that has been made, even if the worker dies afterwards
    )


def as_timeout(timeout: float) -> float:
    """The most seconds of a wait. 0: check once and do not wait."""
    return 0.0 if isinstance(timeout, int | float) and timeout == 0 else seconds("timeout", timeout)


def as_seeds(seed: int | Sequence[int | None] | None, n_envs: int) -> list[int | None]:
    """The seed of each environment's reset: `seed + i`, or the i-th of a list."""
    if seed is None:
        return [None] * n_envs
    given: Any = seed
    if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        if len(given) != n_envs:
            raise ConfigError(f"seed must be a list of {n_envs} seeds, one for each environment, got {len(given)}")
        return [None if one is None else integer("seed", one, 0, None) for one in given]
    first = integer("seed", seed, 0, None)
    return [first + i for i in range(n_envs)]


def as_plan_seeds(seed: object, options: object, n_envs: int) -> list[int | None]:
    """The same for environments with an episode plan: all have the same seed, and `options` come from the plan."""
    is_mask = options is None or (isinstance(options, dict) and options.keys() <= {"reset_mask"})
    must_be("options", options, is_mask, "None, or a dict with reset_mask only: the others come from episode_plan")
    return [None if seed is None else integer("seed (with episode_plan)", seed, 0, 2**63 - 1)] * n_envs


def split_mask(options: Options | Sequence[Options], n_envs: int) -> tuple[Ids, Sequence[Options]]:
    """The environments to reset, by `options["reset_mask"]` if there is one, and the options of each environment."""
    given: Any = options if isinstance(options, list) else [options] * n_envs
    fits = len(given) == n_envs and all(one is None or isinstance(one, dict) for one in given)
    must_be("options", options, fits, f"None, a dict, or a list of {n_envs} dicts")
    if not isinstance(options, dict) or "reset_mask" not in options:
        return np.arange(n_envs), given
    mask = options["reset_mask"]
    is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (n_envs,) and mask.any()
    must_be("options['reset_mask']", mask, is_mask, f"a numpy array of {n_envs} bools, one at least True")
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    return np.flatnonzero(mask), [rest] * n_envs


def as_one_dict(options: Sequence[Options]) -> Options:
    """The options of a batched environment, which must be the same object for each row."""
    first, *others = options
    if any(other is not first for other in others):
        raise ConfigError("options of batched environments must be None or one dict, got a list of different ones")
    return first


def env_ids_within(env_ids: object, n_envs: int) -> Ids:
    """`env_ids` as an array; raises `ConfigError` unless they are different indices of environments."""
    ids = np.asarray(env_ids)
    fits = ids.ndim == 1 and len(ids) > 0 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < n_envs
    ids = ids.astype(np.intp) if fits else ids
    if not fits or np.bincount(ids).max() > 1:
        raise ConfigError(f"env_ids must be different indices from 0 to {n_envs - 1}, got {brief(env_ids)}")
    return ids


class SharedSpaces(ParallelView):
    """A `ParallelEnv` whose agents all have the same spaces, as the rows of a vector environment must."""

    spec = None

    def __init__(self, env: Any) -> None:
        if is_in_turns(env):
            raise ConfigError(f"{type(env).__name__} {PLAYED_IN_TURNS}")
        super().__init__(env)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The observation space of each agent. Raises `SpaceError` if two differ."""
        return self._common(0, "observation")

    @property
    def action_space(self) -> gym.Space[Any]:
        """The action space of each agent. Raises `SpaceError` if two differ."""
        return self._common(1, "action")

    @property
    def render_mode(self) -> Any:
        """The render mode of the environment, if it says one."""
        return self.get_wrapper_attr("render_mode") if self.has_wrapper_attr("render_mode") else None

    def _common(self, which: int, name: str) -> gym.Space[Any]:
        (first, spaces), *others = self.spaces.items()
        for agent, pair in others:
            if pair[which] != spaces[which]:
                raise SpaceError(
                    f"the {name}_space of agent {agent!r} is {pair[which]}, that of agent {first!r} is "
                    f"{spaces[which]}: in a vector environment all agents must have the same; pad them, for example "
                    f"with SuperSuit's pad_{name}{'s' if name == 'observation' else '_space'}_v0"
                )
        return spaces[which]


def refuse_seats(env: object) -> NoReturn:
    """In the place of `SharedSpaces`, where all environments must have one agent."""
    raise ConfigError(
        f"{type(env).__name__} has several agents, but env_fns[0] returns an environment of one agent, or `spaces` is "
        "given: let all functions return a ParallelEnv, and leave `spaces` out"
    )


def read_seats(factories: Sequence[EnvFactory], first: SharedSpaces) -> SeatTable:
    """Builds an example environment for each different factory. `first` is that of the first."""
    known = {id(factories[0]): first.possible_agents}
    for i, factory in enumerate(factories):
        if id(factory) not in known:
            env = build_example_env(factory)
            close_example_env(env)
            if not isinstance(env, SharedSpaces):
                raise ConfigError(
                    f"env_fns[{i}] returns {type(env).__name__}, an environment of one agent, but env_fns[0] one of "
                    "several: let all functions return a ParallelEnv"
                )
            known[id(factory)] = env.possible_agents
    agents = [known[id(factory)] for factory in factories]
    return SeatTable(agents, [[0] * len(names) for names in agents])
