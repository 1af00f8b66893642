"""What `initialize` works out before any worker exists: spaces, examples, shared memory, the workers' program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from keyword import iskeyword
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.agents.action_masks import info_key, mask_in, mask_of
from penstock.agents.agent import Agent, as_agent_step
from penstock.agents.function import FunctionAgent
from penstock.agents.joint import JointSeats
from penstock.buffers import NamedArrays, SamplesBuffer, SampleSpec, TrajectoryRecords
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.samples import layouts_of
from penstock.collectors import (
    Collector,
    EvalCollector,
    ResetCollector,
    TrajInfo,
)
from penstock.collectors.acting import agent_info_example, write_action
from penstock.columns.episode_log import EpisodeLog
from penstock.columns.interface import snapshot
from penstock.envs import (
    ColumnStreams,
    EnvFactory,
    MaskInObservation,
    Purpose,
    build_example_env,
    close_example_env,
    env_factories,
    example_of,
    info_example,
    observation_example,
)
from penstock.envs.infos import element
from penstock.envs.rows import arrays_like, write_row
from penstock.envs.seats import AgentId, ParallelView, one_seat, view_of
from penstock.errors import ConfigError, PenstockError, SpaceError, brief
from penstock.samplers.batches import Batch
from penstock.samplers.config import SamplerConfig
from penstock.samplers.recorded_episodes import RecordedEpisodes
from penstock.samplers.refusals import (
    BATCH_STATE,
    BATCHED,
    INFO_MASK,
    JOINT,
    JOINT_VALUES,
    NO_FINAL_OBS,
    OWN_COLLECTOR,
    POLICIES,
    RECURRENT,
    RENEWAL,
    SEATS,
    SEEDED,
    SERVER,
    TURNS,
    refuse,
)
from penstock.samplers.sampler_memory import SamplerMemory, StepBuffer
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, eval_max_T
from penstock.samplers.sampler_program import SamplerProgram, WorkerFactories
from penstock.samplers.seating import PolicyOf, Seating, find_seating
from penstock.samplers.stats import ServerTotals
from penstock.workers import sigint
from penstock.workers.control import ControlBlock

_log = logging.getLogger("penstock")

_DRY_RUN_COLUMNS = 2  # the agent is tried on more than one column, so that a lost dimension shows
_CHECKED_ROWS = 16  # observations on which fast inference is compared with torch


@dataclass(frozen=True)
class InitArguments:
    """What the arguments of `initialize` come to."""

    plans: tuple[SamplerPlan, ...]
    seed: int
    env_range: EnvRange
    bootstrap_value: bool
    traj_info_kwargs: Mapping[str, Any] | None
    shared: bool  #: whether workers are processes
    central: bool  #: whether workers hold no agent
    policy_of: PolicyOf | None = None
    record: object = None  #: the names of the policies that are recorded; None: all
    #: In a shard: who sits where, and what builds the example environment of each policy, as the driver has found them.
    seats: tuple[Seating, Sequence[EnvFactory]] | None = None


@dataclass(frozen=True)
class Allocation:
    """The memory of one sampler, and what its workers run."""

    batches: Sequence[Batch]  #: the public views of the samples buffer, by slot
    memory: SamplerMemory
    program: SamplerProgram
    plans: tuple[SamplerPlan, ...]  #: with the columns of each policy
    worker_data: Sequence[WorkerFactories]  #: by worker rank
    examples: Sequence[EnvFactory]  #: what builds an example environment, for each policy
    inference_difference: float | None  #: see `SamplerStats`
    episodes: RecordedEpisodes | None  #: the recorded ones, if `seed_episodes=True`


def allocate(
    config: SamplerConfig, agents: Agent | Mapping[str, Agent], setup: InitArguments, resources: ExitStack
) -> Allocation:
    """Read the spaces, initialize the agents, try them on an example, and allocate everything.

    What must be closed goes onto `resources`. Raises `ConfigError` or `SpaceError`.
    """
    each, env_range = _checked_agents(agents), setup.env_range
    train = env_factories(config.env_fn, config.env_kwargs, config.batch_B)
    n_evals = config.eval_n_envs
    evals = env_factories(eval_fn(config), eval_kwargs(config), n_evals, "eval_") if n_evals else ()
    train, evals = (prepared_factories(each, factories, config) for factories in (train, evals))
    examples, plans, seating = [train[0].as_example(config.spaces)], setup.plans, None
    built = build_example_env(examples[0], batched=config.example_size)
    if isinstance(built, ParallelView):
        close_example_env(built)
        if setup.seats is None:
            sides = (train, env_range.first_env_rank), (evals, env_range.first_eval_env_rank)
            seating, seats = find_seating(sides, agents, setup.policy_of, (train[0], built))
            examples = [_of_one_seat(factory, agent_id) for factory, agent_id, _ in seats]
        else:
            seating, examples = setup.seats[0], list(setup.seats[1])
        _refuse_with_seats(config, setup, seating)
        plans = tuple(seating.with_cells(plan) for plan in plans)
    else:
        _refuse_for_one_agent(config, agents, setup.policy_of, built)
    traj_info_kwargs = _checked_traj_info_kwargs(config.traj_info_cls, setup.traj_info_kwargs)
    is_recorded = _are_recorded(setup.record, agents)
    extra, specs, copies, differences = _extra_example(config.collector_cls), [], [], []
    for p, (agent, example) in enumerate(zip(each, examples, strict=True)):
        env = built if seating is None else build_example_env(example)
        with _naming_policy("" if seating is None or seating.is_shared else seating.policies[p]):
            env_info = _prepare_agent(agent, env, setup.seed, config, p)
            copied = agent.runtime.worker_copy()
            own_setup = replace(setup, bootstrap_value=setup.bootstrap_value and is_recorded[p])
            if agent.joint:
                copied = JointSeats(copied, _seats_of_joint(agent, seating, p, config, own_setup))
            spec = replace(_try_agent(copied, example, config, own_setup), env_info=env_info, extra=extra)
        copies.append(copied)
        _refuse_in_turns(agent, spec, seating)
        specs.append(replace(spec, n_seats=None if seating is None else seating.n_seats(p)))
        differences.append(copied.runtime.inference_difference(partial(_real_inputs, copied, example, config)))
    uses_mask = any(agent.mask_key or isinstance(agent, FunctionAgent) for agent in each)
    if seating is not None and not uses_mask and any(mask_in(a.observation_space, a.action_space) for a in each):
        _log.warning(
            "the observations have an action_mask, but no agent uses it, so illegal actions are possible: make the "
            'agents with mask_key="observation.action_mask"'
        )
    difference = max((own for own in differences if own is not None), default=None)
    # Whole episodes need another collector, unless the user has chosen one.
    program = SamplerProgram(
        agents=tuple(copies),
        config=replace(config, env_fn="", env_kwargs=None, eval_env_fn=None, eval_env_kwargs=None, env_info=False),
        traj_info_kwargs=traj_info_kwargs,
        eval_max_T=eval_max_T(config.eval_max_steps, config.eval_n_envs),
        env_range=env_range,
        seed=setup.seed,
        seating=seating,
        unrecorded={p: spec for p, spec in enumerate(specs) if not is_recorded[p]},
    )
    worker_data = [([train[b] for b in plan.columns], [evals[b] for b in plan.eval_columns]) for plan in plans]
    buffer = _samples_buffer(config, setup, plans, specs, is_recorded, seating)
    with sigint.deferred():  # Ctrl-C could lose a descriptor that nobody owns yet
        memory = _allocate_memory(config, each, setup, plans, buffer, program.eval_max_T)
    for part in [*memory.parts, memory.mailbox.file]:
        resources.callback(part.close)
    for agent, parameters in zip(each, memory.parameters, strict=True):
        resources.callback(agent.runtime.unshare_memory, parameters)
    episodes = RecordedEpisodes(memory, train, setup.seed, config.crash_dir) if config.seed_episodes else None
    return Allocation(buffer.batches, memory, program, plans, worker_data, examples, difference, episodes)


@contextmanager
def _naming_policy(name: str) -> Iterator[None]:
    """A context in which errors about an agent say which policy it is."""
    try:
        yield
    except (ConfigError, SpaceError) as error:
        if not name:
            raise
        raise (SpaceError if isinstance(error, SpaceError) else ConfigError)(f"policy {name!r}: {error}") from error


def _checked_agents(agents: object) -> tuple[Agent, ...]:
    each = tuple(agents.values()) if isinstance(agents, Mapping) else (agents,)
    for agent in each:
        if not isinstance(agent, Agent):
            raise ConfigError(
                f"agent must be a penstock Agent, got {type(agent).__name__}: wrap a model, for example "
                "CategoricalPgAgent(model), or subclass penstock.Agent"
            )
    return each


def _are_recorded(record: Any, agents: object) -> Sequence[bool]:
    """Whether each policy is recorded. Raises `ConfigError` unless `record` is None or has names of policies."""
    names = list(agents) if isinstance(agents, Mapping) else [""]
    if record is None:
        return [True] * len(names)
    if not isinstance(agents, Mapping):
        raise ConfigError("record says which policies of a dict of agents are recorded: leave it out for one agent")
    is_list = isinstance(record, list | tuple) and len(record) > 0
    if not is_list or not all(isinstance(name, str) and name in names for name in record):
        raise ConfigError(f"record must be a list with some of the policies {names}, got {brief(record)}")
    return [name in record for name in names]


def prepared_factories(agents: Sequence[Agent], factories: Sequence[EnvFactory], config: SamplerConfig) -> Any:
    """The factories, which may return environments of several agents; with masks in the observations, if the agents
    have them in `info`."""
    keys = {info_key(getattr(agent, "mask_key", None)) for agent in agents}
    if len(keys) > 1:
        raise ConfigError(
            f"the masks in info must be the same for all policies, got {sorted(map(str, keys))}: put them in the "
            'observations, and give mask_key="observation.NAME"'
        )
    key = keys.pop() if keys else None  # without agents: refused later
    view = partial(view_of, mask_key=key, global_state=config.global_state)
    if key is None:
        return tuple(replace(factory, as_seats=view) for factory in factories)
    refuse({BATCHED: config.batched, INFO_MASK: True})
    return tuple(replace(factory, as_seats=view, wrapper=partial(MaskInObservation, key=key)) for factory in factories)


def _of_one_seat(factory: EnvFactory, agent_id: AgentId) -> EnvFactory:
    as_view: Any = factory.as_seats
    return replace(factory, as_seats=lambda env: one_seat(agent_id, as_view(env)))


def _refuse_for_one_agent(config: SamplerConfig, agents: object, policy_of: object, built: Any) -> None:
    given = {
        "a dict of agents": isinstance(agents, Mapping),
        "policy_of": policy_of is not None,
        "global_state=True": config.global_state,
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        close_example_env(built)
        raise ConfigError(
            f"{wrong[0]} is for environments of several agents (PettingZoo's ParallelEnv), and env_fn returns "
            f"{type(built).__name__}, an environment of one: leave it out"
        )


def _seats_of_joint(agent: Agent, seating: Seating | None, p: int, config: SamplerConfig, setup: InitArguments) -> int:
    """How many seats of each environment a joint agent plays."""
    k = 1 if seating is None else seating.n_seats(p)
    if k == 0:
        raise ConfigError(
            f"{type(agent).__name__} is joint, so it must play the same number of agents in each environment: give a "
            "sampler to each kind of environment"
        )
    needs = {RECURRENT: agent.recurrent, SERVER: setup.central, NO_FINAL_OBS: not config.record_final_obs}
    refuse({JOINT_VALUES: setup.bootstrap_value, **needs})
    return k


def _refuse_with_seats(config: SamplerConfig, setup: InitArguments, seating: Seating) -> None:
    """What environments of several agents cannot have."""
    has_own = config.collector_cls is not ResetCollector or config.eval_collector_cls is not EvalCollector
    refuse(
        {
            SEATS: True,
            TURNS: seating.in_turns,
            OWN_COLLECTOR: has_own,
            RENEWAL: config.on_game_failure == "renew",
            SEEDED: config.seed_episodes,
            POLICIES: len(seating.policies) > 1,
            SERVER: setup.central,
        }
    )


def _refuse_in_turns(agent: Agent, spec: SampleSpec, seating: Seating | None) -> None:
    """What an agent cannot do where agents take turns."""
    if seating is None or not seating.in_turns:
        return
    info = spec.agent_info
    refuse({TURNS: True, JOINT: agent.joint, BATCH_STATE: "has_rnn_state" in info})
    if agent.recurrent and spec.bootstrap_value and "value" not in info:
        raise ConfigError(
            f"where agents take turns, {type(agent).__name__} must report `value` in agent_info, since it is recurrent "
            "and bootstrap_value=True: its state has gone on when a batch ends whose last reward is not complete"
        )


def _samples_buffer(
    config: SamplerConfig,
    setup: InitArguments,
    plans: Sequence[SamplerPlan],
    specs: Sequence[SampleSpec],
    is_recorded: Sequence[bool],
    seating: Seating | None,
) -> SamplesBuffer:
    shared, n_slots, T = setup.shared, config.memory_slots, config.batch_T
    numbers = [last.stop - first.start for first, last in zip(plans[0].cells, plans[-1].cells, strict=True)]
    if seating is None or seating.is_shared:
        return SamplesBuffer(specs[0], T, numbers[0], shared=shared, n_slots=n_slots)
    by_name = dict(compress(zip(seating.policies, specs, strict=True), is_recorded))
    batch_B = dict(zip(seating.policies, numbers, strict=True))
    return SamplesBuffer(by_name, T, batch_B, shared=shared, n_slots=n_slots)


def _allocate_memory(
    config: SamplerConfig,
    agents: Sequence[Agent],
    setup: InitArguments,
    plans: Sequence[SamplerPlan],
    buffer: SamplesBuffer,
    max_T: int,
) -> SamplerMemory:
    shared = setup.shared
    # Objects of a TrajInfo subclass do not use the record arrays.
    is_stock = config.traj_info_cls is TrajInfo
    most = config.eval_max_trajectories or config.eval_episodes
    sizes = config.batch_T, config.memory_slots, max_T, most
    capacities = [plan.most_trajectories(*sizes) if is_stock else 1 for plan in plans]
    server: dict[str, Any] = {}
    if setup.central:
        numbers = [cells[0].stop for cells in (plans[-1].cells, plans[-1].eval_cells)]
        own = layouts_of(buffer.slots[0])[0]  # of the only policy
        for name, n in zip(("steps", "eval_steps"), numbers, strict=True):
            server[name] = StepBuffer(own, n, shared=shared) if n else None
        server["totals"] = ServerTotals(max(numbers), shared=shared)
    return SamplerMemory(
        # The inference server has the last progress row.
        control=ControlBlock(len(plans) + setup.central, config.batch_T, shared=shared),
        samples=buffer.memory,
        records=TrajectoryRecords(capacities, shared=shared),
        parameters=tuple(agent.runtime.share_memory(shared=shared) for agent in agents),
        mailbox=Mailbox(),
        episodes=EpisodeLog(buffer.slots[0].action, config.batch_T, config.max_decorrelation_steps, shared=shared)
        if config.seed_episodes
        else None,
        **server,
    )


def eval_fn(config: SamplerConfig) -> Any:
    """What builds the evaluation environments. A list in `env_fn` is one function per training environment; evaluation
    uses the first, unless it has its own."""
    if config.eval_env_fn is not None:
        return config.eval_env_fn
    is_list = not isinstance(config.env_fn, str) and not callable(config.env_fn)
    return config.env_fn[0] if is_list and config.env_fn else config.env_fn  # type: ignore[index]


def eval_kwargs(config: SamplerConfig) -> Any:
    """The arguments for it."""
    if config.eval_env_kwargs is not None or config.eval_env_fn is not None:
        return config.eval_env_kwargs
    if config.env_kwargs is None or isinstance(config.env_kwargs, Mapping):
        return config.env_kwargs
    return config.env_kwargs[0] if config.env_kwargs else None


def _prepare_agent(agent: Agent, env: Any, seed: int, config: SamplerConfig, p: int) -> NamedArrays | None:
    """Initialize the agent of policy p from an example environment, which is closed then; returns an example of the
    `env_info` to record."""
    batched, wanted = config.batched, config.env_info
    prefix = "single_" if batched else ""
    observation_space, action_space = (getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action"))
    env_info = None
    try:
        example_of(observation_space, "observation")
        example_of(action_space, "action")
        if batched and wanted and not isinstance(wanted, Mapping):
            raise ConfigError("env_info of a batched environment needs examples: env_info={'name': 0.0}")
        if wanted is True or (wanted is not False and len(wanted)):
            env_info, skipped = info_example(env, wanted)
            if skipped:
                warnings.warn(f"these entries of info are not numeric and not recorded: {skipped}", stacklevel=4)
    finally:
        close_example_env(env)
    model_seed = ColumnStreams(seed, range(1)).env_seeds(Purpose.MODEL, *([p] if p else []))[0]
    agent.runtime.ensure_initialized(observation_space, action_space, model_seed)
    mask_of(agent)  # raises for a wrong key
    return env_info


def _extra_example(cls: type[Collector]) -> NamedArrays | None:
    """Zeros for one step of the fields that a collector declares; None if there are none."""
    fields: Any = cls.extra_fields
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in fields):
        raise ConfigError(
            f"extra_fields of {cls.__name__} must be a dict of names and spaces or examples, such as "
            f'{{"cost": np.float32(0)}}, got {brief(fields)}'
        )
    found = {}
    for name, value in fields.items():
        if iskeyword(name) or name.startswith("_") or hasattr(NamedArrays, name):
            raise ConfigError(
                f"extra_fields of {cls.__name__} must not contain {name!r}: samples.env.extra.{name} is a method of "
                "NamedArrays, a private name or not Python. Give the field another name"
            )
        where = f"extra_fields[{name!r}] of {cls.__name__}"
        if isinstance(value, gym.Space):
            found[name] = example_of(value, where)
            continue
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise ConfigError(f"{where} must be a space, a number or an array of numbers, got {brief(value)}")
        found[name] = np.zeros_like(array)
    return NamedArrays(found) if found else None


def _checked_traj_info_kwargs(cls: type[TrajInfo], kwargs: object) -> dict[str, Any]:
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ConfigError(f"traj_info_kwargs must be a dict of arguments for traj_info_cls, got {kwargs!r}")
    arguments = dict(kwargs or {})
    try:
        cls(**arguments)
    except Exception as error:
        raise ConfigError(f"{cls.__name__}(**traj_info_kwargs) raised {in_one_line(error)}") from error
    return arguments


def _try_agent(agent: Agent, factory: EnvFactory, config: SamplerConfig, setup: InitArguments) -> SampleSpec:
    """Step the agent once: this shows what it reports, and what does not fit, before workers start.

    The first trial is on zeros. An agent may not take these (a mask of zeros allows no action), so the second trial is
    on an observation that an environment returns. It is not the first, since `env.reset` may take long.
    """
    space = agent.observation_space
    n = _dry_run_columns(agent)
    rows = _columns(observation_example(space, config.observation_dtype), n)
    try:
        return _dry_run(agent, rows, config, setup)
    except PenstockError:
        real = _real_observations(factory, config, 1)
        if not real:
            raise
    write_row(arrays_like(space, rows[np.newaxis]), 0, real * n, "the observation of env.reset")
    return _dry_run(agent, rows, config, setup)


def _real_inputs(agent: Agent, factory: EnvFactory, config: SamplerConfig) -> tuple[Any, Any, Any]:
    """Inputs of `agent.step` with observations of the example environment."""
    space, real = agent.observation_space, _real_observations(factory, config, _CHECKED_ROWS)
    n = max(1, len(real))  # zeros, if the environment does not reset
    rows = _columns(observation_example(space, config.observation_dtype), n)
    if real:
        write_row(arrays_like(space, rows[np.newaxis]), 0, real, "an observation of the environment")
    action = _columns(example_of(agent.action_space, "action"), n)
    return rows, action, np.zeros(n, np.float32)


def _real_observations(factory: EnvFactory, config: SamplerConfig, n: int) -> list[Any]:
    """Up to `n` observations of the example environment with random actions; fewer if it raises."""
    batched = config.batched
    env, found = build_example_env(factory, batched=config.example_size), []
    try:
        env.action_space.seed(0)
        observation, _ = env.reset(seed=0)
        while True:
            found.append(snapshot(element(observation, 0) if batched else observation))
            if len(found) == n:
                break
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if not batched and (terminated or truncated):
                observation, _ = env.reset()
    except Exception:  # the workers will report it
        return found
    finally:
        close_example_env(env)
    return found


def _dry_run_columns(agent: Agent) -> int:
    return _DRY_RUN_COLUMNS * (agent.k if isinstance(agent, JointSeats) else 1)


def _columns(example: ArrayTree, n: int) -> Any:
    return map_leaves(lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), example)


def _dry_run(agent: Agent, observation: ArrayTree, config: SamplerConfig, setup: InitArguments) -> SampleSpec:
    """Step a copy of the agent with `observation` `[2, ...]`. Raises `SpaceError` if something does not fit."""
    action, n = example_of(agent.action_space, "action"), _dry_run_columns(agent)
    inputs = observation, _columns(action, n), np.zeros(n, np.float32)
    rngs = ColumnStreams(0, range(n)).rngs(Purpose.ACTION)
    try:
        trial = agent.runtime.column_copy(rngs)
        # Both columns stand for the first environment, since there may be only one.
        trial.runtime.set_columns([0] * n, setup.env_range.n_envs)
        trial.sample_mode(0)
        step = as_agent_step(trial.step(*inputs), agent)
        value = np.asarray(trial.value(*inputs)) if setup.bootstrap_value else None
    except PenstockError:
        raise
    except Exception as error:
        shapes = observation if isinstance(observation, NamedArrays) else observation.shape
        raise SpaceError(
            f"{type(agent).__name__} failed on example observations of shape {shapes}: {in_one_line(error)}"
        ) from error
    write_action(_columns(action, n), step.action)  # raises if it does not fit
    if value is not None and value.shape != (n,):
        raise SpaceError(f"agent.value must return one value per column: shape [B], got {list(value.shape)} for B={n}")
    agent_info = agent_info_example(step.agent_info, n).map(lambda leaf: leaf[0])
    # A batched environment that resets itself late takes a step for it; with "renew", a cut step is not valid.
    has_gaps = config.batched or config.on_game_failure == "renew"
    return SampleSpec(
        observation[0], action, agent_info, setup.bootstrap_value, config.record_final_obs, has_gaps=has_gaps
    )
