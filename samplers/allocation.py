"""What `initialize` works out before any worker exists: spaces, examples, shared memory, the workers' program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

from penstock.agents.action_masks import info_key, mask_in, mask_of
from penstock.agents.agent import Agent, as_agent
from penstock.agents.function import FunctionAgent
from penstock.agents.joint import JointSeats
from penstock.agents.trial import inference_difference, try_agent
from penstock.arguments import must_be
from penstock.buffers import NamedArrays, SamplesBuffer, SampleSpec
from penstock.buffers.reports import in_one_line
from penstock.collectors import TrajInfo
from penstock.collectors.collector import extra_example
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
)
from penstock.envs.factory import example_observations
from penstock.envs.seats import AgentId, ParallelView, one_seat, view_of
from penstock.errors import ConfigError, SpaceError
from penstock.samplers.batches import Batch
from penstock.samplers.config import SamplerConfig
from penstock.samplers.log_reader import EpisodeLogReader
from penstock.samplers.refusals import (
    BATCHED,
    INFO_MASK,
    JOINT,
    JOINT_VALUES,
    NO_FINAL_OBS,
    PLAN,
    POLICIES,
    RECURRENT,
    SEEDED,
    SERVER,
    TURNS,
    UNRECORDED,
    refuse,
)
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, eval_max_T
from penstock.samplers.sampler_program import SamplerProgram, WorkerFactories
from penstock.samplers.seating import PolicyOf, Seating, find_seating
from penstock.workers import sigint

_log = logging.getLogger("penstock")


@dataclass(frozen=True)
class InitArguments:
    """What the arguments of `initialize` come to."""

    config: SamplerConfig
    agents: Agent | Mapping[str, Agent]
    plans: tuple[SamplerPlan, ...]
    seed: int
    env_range: EnvRange
    bootstrap_value: bool
    traj_info_kwargs: Mapping[str, Any]
    shared: bool  #: whether workers are processes
    central: bool  #: whether workers hold no agent
    policy_of: PolicyOf | None = None
    record: object = None  #: the names of the policies that are recorded; None: all
    seats: SeatingPlan | None = None  #: in a shard: its part of what the driver has found


@dataclass(frozen=True)
class Example:
    """What the environments of a policy are like, as the agent sees them."""

    factory: EnvFactory  #: builds one of them; with several agents, one seat as an environment of its own
    observation_space: Any
    action_space: Any
    env_info: NamedArrays | None  #: one step of the `env_info` to record


@dataclass(frozen=True)
class Environments:
    """What builds the environments, and of which kind they are."""

    train: Sequence[EnvFactory]  #: one for each environment
    evaluation: Sequence[EnvFactory]
    has_gaps: bool  #: whether some cells of a batch hold no step
    #: What the first environment is like. One of several agents is here itself, and is closed.
    first: Example | ParallelView


@dataclass(frozen=True)
class SeatingPlan:
    """Who sits where, and what the seats of each policy are like."""

    seating: Seating
    examples: Sequence[Example]


@dataclass(frozen=True)
class PreparedAgents:
    """The agents, ready to act. Each list has an entry for each policy."""

    agents: Sequence[Agent]  #: those of the learner, which are initialized
    copies: tuple[Agent, ...]  #: those of the workers
    specs: Sequence[SampleSpec]  #: what is recorded of each
    is_recorded: Sequence[bool]
    inference_difference: float | None  #: see `SamplerStats`


@dataclass(frozen=True)
class Layout:
    """Which worker has which cells, and the memory."""

    plans: tuple[SamplerPlan, ...]  #: with the columns of each policy
    batches: Sequence[Batch]  #: the public views of the samples buffer, by slot
    memory: SamplerMemory


@dataclass(frozen=True)
class Allocation:
    """The memory of one sampler, and what its workers run."""

    layout: Layout
    seats: SeatingPlan
    agents: PreparedAgents
    program: SamplerProgram
    worker_data: Sequence[WorkerFactories]  #: by worker rank
    log_reader: EpisodeLogReader | None  #: only with `seed_episodes=True`


def allocate(arguments: InitArguments, resources: ExitStack) -> Allocation:
    """Read the spaces, initialize the agents, try them on an example, and allocate everything.

    What must be closed goes onto `resources`. Raises `ConfigError` or `SpaceError`.
    """
    environments = read_spaces(arguments)
    seats = seat(arguments, environments)
    agents = prepare_agents(arguments, environments, seats)
    layout = lay_out(arguments, seats, agents, resources)
    program = make_program(arguments, seats, agents)
    train, evaluation, config = environments.train, environments.evaluation, arguments.config
    worker_data = [
        ([train[b] for b in plan.columns], [evaluation[b] for b in plan.eval_columns]) for plan in layout.plans
    ]
    log_reader = None
    if config.seed_episodes:
        log_reader = EpisodeLogReader(layout.memory, train, arguments.seed, config.crash_dir, config.episode_plan)
    return Allocation(layout, seats, agents, program, worker_data, log_reader)


# ---- 1: the environments ----------------------------------------------------------------------------


def read_spaces(arguments: InitArguments) -> Environments:
    """Make the factories, and read the spaces of the first environment."""
    config, agents = arguments.config, _checked_agents(arguments.agents)
    train = env_factories(config.env_fn, config.env_kwargs, config.batch_B)
    n_evals = config.eval_n_envs
    evaluation = env_factories(*config.eval_source, n_evals, "eval_") if n_evals else ()
    train, evaluation = (prepared_factories(agents, factories, config) for factories in (train, evaluation))
    # A batched environment that resets itself late takes a step for it; with "renew", a cut step is not valid.
    has_gaps = config.batched or config.on_game_failure == "renew"
    factory = train[0].as_example(config.spaces)
    env = build_example_env(factory, batched=config.example_size)
    if isinstance(env, ParallelView):
        close_example_env(env)
        return Environments(train, evaluation, has_gaps, env)
    try:
        _refuse_for_one_agent(arguments, env)
        return Environments(train, evaluation, has_gaps, _read_example(factory, env, config))
    finally:
        close_example_env(env)


def _read_example(factory: EnvFactory, env: Any, config: SamplerConfig) -> Example:
    """What `env` is like, which `factory` has built. Steps it, if it must show the entries of its `info`."""
    batched, wanted = config.batched, config.env_info
    prefix = "single_" if batched else ""
    observation_space, action_space = (getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action"))
    example_of(observation_space, "observation")
    example_of(action_space, "action")
    env_info = None
    if batched and wanted and not isinstance(wanted, Mapping):
        raise ConfigError("env_info of a batched environment needs examples: env_info={'name': 0.0}")
    if wanted is True or (wanted is not False and len(wanted)):
        env_info, skipped = info_example(env, wanted)
        if skipped:
            warnings.warn(f"these entries of info are not numeric and not recorded: {skipped}", stacklevel=5)
    return Example(factory, observation_space, action_space, env_info)


def _checked_agents(agents: object) -> tuple[Agent, ...]:
    given = tuple(agents.values()) if isinstance(agents, Mapping) else (agents,)
    return tuple(as_agent("agent", agent) for agent in given)


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


def _refuse_for_one_agent(arguments: InitArguments, env: object) -> None:
    given = {
        "a dict of agents": isinstance(arguments.agents, Mapping),
        "policy_of": arguments.policy_of is not None,
        "global_state=True": arguments.config.global_state,
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{wrong[0]} is for environments of several agents (PettingZoo's ParallelEnv), and env_fn returns "
            f"{type(env).__name__}, an environment of one: leave it out"
        )


# ---- 2: the seats -----------------------------------------------------------------------------------


def seat(arguments: InitArguments, environments: Environments) -> SeatingPlan:
    """Find out who sits where, and what the seats of each policy are like."""
    config, env_range, first = arguments.config, arguments.env_range, environments.first
    if arguments.seats is not None:
        _refuse_with_seats(arguments, arguments.seats.seating)
        return arguments.seats
    if isinstance(first, Example):
        return SeatingPlan(Seating.of_single(*config.env_counts, env_range), [first])
    sides = (environments.train, env_range.first_env_rank), (environments.evaluation, env_range.first_eval_env_rank)
    seating, seats = find_seating(sides, arguments.agents, arguments.policy_of, (environments.train[0], first))
    _refuse_with_seats(arguments, seating)
    examples = []
    for p, (factory, agent_id, _) in enumerate(seats):
        of_seat = _of_one_seat(factory, agent_id)
        with _naming_policy(seating, p):
            env = build_example_env(of_seat)
            try:
                examples.append(_read_example(of_seat, env, config))
            finally:
                close_example_env(env)
    return SeatingPlan(seating, examples)


@contextmanager
def _naming_policy(seating: Seating, p: int) -> Iterator[None]:
    """A context in which errors about an agent say which policy it is."""
    try:
        yield
    except (ConfigError, SpaceError) as error:
        if seating.is_shared:
            raise
        raise (SpaceError if isinstance(error, SpaceError) else ConfigError)(
            f"policy {seating.policies[p]!r}: {error}"
        ) from error


def _of_one_seat(factory: EnvFactory, agent_id: AgentId) -> EnvFactory:
    as_view: Any = factory.as_seats
    return replace(factory, as_seats=lambda env: one_seat(agent_id, as_view(env)))


def _refuse_with_seats(arguments: InitArguments, seating: Seating) -> None:
    """What environments of several agents cannot have. In a shard, the sampler may be another one than the driver's."""
    config = arguments.config
    if not seating.has_games:
        return
    refuse(
        {
            TURNS: seating.in_turns,
            PLAN: config.episode_plan is not None,
            SEEDED: config.seed_episodes,
            UNRECORDED: config.seed_episodes and not all(_are_recorded(arguments.record, arguments.agents)),
            POLICIES: len(seating.policies) > 1,
            SERVER: arguments.central,
        }
    )


# ---- 3: the agents ----------------------------------------------------------------------------------


def prepare_agents(arguments: InitArguments, environments: Environments, seats: SeatingPlan) -> PreparedAgents:
    """Initialize each agent, copy it for the workers, and try the copy."""
    config, seating, agents = arguments.config, seats.seating, _checked_agents(arguments.agents)
    is_recorded = _are_recorded(arguments.record, arguments.agents)
    extra, specs, copies, differences = extra_example(config.collector_cls), [], [], []
    for p, (agent, example) in enumerate(zip(agents, seats.examples, strict=True)):
        has_values = arguments.bootstrap_value and is_recorded[p]
        observe = partial(example_observations, example.factory, batched=config.example_size)
        with _naming_policy(seating, p):
            key = [p] if p else []
            model_seed = ColumnStreams(arguments.seed, range(1)).env_seeds(Purpose.MODEL, *key)[0]
            agent.runtime.ensure_initialized(example.observation_space, example.action_space, model_seed)
            mask_of(agent)  # raises for a wrong key
            copied = agent.runtime.worker_copy()
            if agent.joint:
                copied = JointSeats(copied, _seats_of_joint(agent, seating, p, arguments, has_values))
            dtype, n_envs = config.observation_dtype, arguments.env_range.n_envs
            spec = try_agent(copied, observe, n_envs, dtype=dtype, has_values=has_values)
        copies.append(copied)
        _refuse_in_turns(agent, spec, seating)
        spec = replace(spec, final_obs=config.record_final_obs, env_info=example.env_info, extra=extra)
        specs.append(replace(spec, n_seats=seating.n_seats(p), has_gaps=environments.has_gaps))
        differences.append(inference_difference(copied, observe, dtype))
    uses_mask = any(agent.mask_key or isinstance(agent, FunctionAgent) for agent in agents)
    if seating.has_games and not uses_mask and any(mask_in(a.observation_space, a.action_space) for a in agents):
        _log.warning(
            "the observations have an action_mask, but no agent uses it, so illegal actions are possible: make the "
            'agents with mask_key="observation.action_mask"'
        )
    difference = max((value for value in differences if value is not None), default=None)
    return PreparedAgents(agents, tuple(copies), specs, is_recorded, difference)


def _are_recorded(record: Any, agents: object) -> Sequence[bool]:
    """Whether each policy is recorded. Raises `ConfigError` unless `record` is None or has names of policies."""
    names = list(agents) if isinstance(agents, Mapping) else [""]
    if record is None:
        return [True] * len(names)
    if not isinstance(agents, Mapping):
        raise ConfigError("record says which policies of a dict of agents are recorded: leave it out for one agent")
    is_list = isinstance(record, list | tuple) and len(record) > 0
    fits = is_list and all(isinstance(name, str) and name in names for name in record)
    must_be("record", record, fits, f"a list with some of the policies {names}")
    return [name in record for name in names]


def _seats_of_joint(agent: Agent, seating: Seating, p: int, arguments: InitArguments, has_values: bool) -> int:
    """How many seats of each environment a joint agent plays."""
    k = seating.n_seats(p)
    if not k:
        raise ConfigError(
            f"{type(agent).__name__} is joint, so it must play the same number of agents in each environment: give a "
            "sampler to each kind of environment"
        )
    no_final_obs = not arguments.config.record_final_obs
    needs = {RECURRENT: agent.recurrent, SERVER: arguments.central, NO_FINAL_OBS: no_final_obs}
    refuse({JOINT_VALUES: has_values, **needs})
    return k


def _refuse_in_turns(agent: Agent, spec: SampleSpec, seating: Seating) -> None:
    """What an agent cannot do where agents take turns."""
    if not seating.in_turns:
        return
    info = spec.agent_info
    refuse({TURNS: True, JOINT: agent.joint})
    if agent.recurrent and spec.bootstrap_value and "value" not in info:
        raise ConfigError(
            f"where agents take turns, {type(agent).__name__} must report `value` in agent_info, since it is recurrent "
            "and bootstrap_value=True: its state has gone on when a batch ends whose last reward is not complete"
        )


# ---- 4: the memory ----------------------------------------------------------------------------------


def lay_out(arguments: InitArguments, seats: SeatingPlan, agents: PreparedAgents, resources: ExitStack) -> Layout:
    """Say which worker has which cells, and allocate the memory."""
    plans = tuple(seats.seating.with_cells(plan) for plan in arguments.plans)
    config, seating, shared = arguments.config, seats.seating, arguments.shared
    numbers = [last.stop - first.start for first, last in zip(plans[0].cells, plans[-1].cells, strict=True)]
    specs: Any = agents.specs[0]
    batch_B: Any = numbers[0]
    if not seating.is_shared:
        specs = dict(compress(zip(seating.policies, agents.specs, strict=True), agents.is_recorded))
        batch_B = dict(zip(seating.policies, numbers, strict=True))
    buffer = SamplesBuffer(specs, config.batch_T, batch_B, shared=shared, n_slots=config.memory_slots)
    with sigint.deferred():  # Ctrl-C could lose a descriptor that nobody owns yet
        memory = SamplerMemory.allocate(
            config, plans, buffer, agents.agents, seating, shared=shared, central=arguments.central
        )
    plan = () if memory.episode_log is None else (memory.episode_log.plan.file,)
    for part in [*memory.parts, memory.mailbox.file, *plan]:
        resources.callback(part.close)
    for agent, parameters in zip(agents.agents, memory.parameters, strict=True):
        resources.callback(agent.runtime.unshare_memory, parameters)
    return Layout(plans, buffer.batches, memory)


# ---- 5: the program ---------------------------------------------------------------------------------


def make_program(arguments: InitArguments, seats: SeatingPlan, agents: PreparedAgents) -> SamplerProgram:
    """What each worker runs."""
    config = arguments.config
    return SamplerProgram(
        agents=agents.copies,
        config=replace(config, env_fn="", env_kwargs=None, eval_env_fn=None, eval_env_kwargs=None, env_info=False),
        traj_info_kwargs=arguments.traj_info_kwargs,
        eval_max_T=eval_max_T(config.eval_max_steps, config.eval_n_envs),
        env_range=arguments.env_range,
        seed=arguments.seed,
        seating=seats.seating,
        unrecorded={p: spec for p, spec in enumerate(agents.specs) if not agents.is_recorded[p]},
    )


def checked_traj_info_kwargs(cls: type[TrajInfo], kwargs: object) -> dict[str, Any]:
    """The arguments of `cls`, after a try. Raises `ConfigError`."""
    fits = isinstance(kwargs, Mapping | None)
    arguments = dict(must_be("traj_info_kwargs", kwargs, fits, "a dict of arguments for traj_info_cls") or {})
    try:
        cls(**arguments)
    except Exception as error:
        raise ConfigError(f"{cls.__name__}(**traj_info_kwargs) raised {in_one_line(error)}") from error
    return arguments
