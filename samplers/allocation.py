"""What `initialize` works out before any worker exists: spaces, examples, memory, plans, the job."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.agents import Agent, SharedParameters
from penstock.buffers import NamedArrays, RecordRings, SamplesBuffer, SampleSpec
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.named import map_leaves
from penstock.buffers.shared import NamedMemory
from penstock.buffers.step_buffer import StepBuffer
from penstock.collectors import BaseEvalCollector, EpisodeEvalCollector, EvalCollector, TrajInfo
from penstock.collectors.acting import agent_info_example, as_agent_step
from penstock.collectors.checks import Checks, write_action
from penstock.envs import (
    ColumnStreams,
    EnvFactory,
    Purpose,
    build_example_env,
    close_example_env,
    env_factories,
    example_of,
    info_example,
    observation_example,
)
from penstock.errors import ConfigError, PenstockError, SpaceError
from penstock.samplers.config import SamplerConfig
from penstock.samplers.program import Job, SharedState
from penstock.samplers.server_totals import ServerTotals
from penstock.workers.control import ControlBlock
from penstock.workers.plan import WorkerPlan, eval_max_T

__all__ = ["Allocation", "allocate"]

_TRIAL_COLUMNS = 2  # how many columns the agent is tried on; more than one, so that a lost dimension shows


@dataclass(frozen=True)
class Allocation:
    """The memory and the work orders of one sampler."""

    buffer: SamplesBuffer
    control: ControlBlock
    rings: RecordRings
    parameters: SharedParameters
    mailbox: Mailbox
    job: Job
    #: Where workers hold no agent: step buffers of training and, if there is one, of evaluation; and the server's
    #: statistics.
    steps: StepBuffer | None = None
    eval_steps: StepBuffer | None = None
    totals: ServerTotals | None = None

    @property
    def state(self) -> SharedState:
        """What of it a worker sees."""
        memory, serving = self.buffer.memory, (self.steps, self.eval_steps, self.totals)
        return SharedState(self.control, memory, self.rings, self.parameters, self.mailbox, *serving)

    @property
    def _own_memory(self) -> list[NamedMemory]:
        """All of it but the parameters, which the agent gives back."""
        parts = (self.buffer, self.control, self.rings, self.steps, self.eval_steps, self.totals)
        return [part.memory for part in parts if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(memory.nbytes for memory in [*self._own_memory, self.parameters.memory])

    def close(self) -> None:
        """Give descriptors back. Arrays stay valid as long as the user holds views of them."""
        for memory in self._own_memory:
            memory.close()
        self.mailbox.close()


def allocate(
    config: SamplerConfig,
    plans: Sequence[WorkerPlan],
    agent: Agent,
    *,
    seed: int,
    bootstrap_value: bool,
    traj_info_kwargs: Mapping[str, Any] | None,
    world_size: int,
    shared: bool,
    central: bool,
) -> Allocation:
    """Read the spaces, initialize the agent, try it on an example, and allocate everything; with what workers without
    agent exchange with it, if it is `central`.

    Raises `ConfigError` or `SpaceError`; nothing is left allocated then but the agent's model.
    """
    train = env_factories(config.env_fn, config.env_kwargs, config.batch_B)
    eval_kwargs = _eval_kwargs(config)
    evals = env_factories(_eval_fn(config), eval_kwargs, config.eval_n_envs, "eval_") if config.eval_n_envs else ()
    env_info = _prepare_agent(agent, train[0], seed, config)
    if not (traj_info_kwargs is None or isinstance(traj_info_kwargs, Mapping)):
        raise ConfigError(f"traj_info_kwargs must be a dict of arguments for traj_info_cls, got {traj_info_kwargs!r}")
    traj_kwargs = dict(traj_info_kwargs or {})
    _check_traj_info(config.traj_info_cls, traj_kwargs)
    worker_agent = agent.runtime.worker_copy()
    spec = replace(_try_agent(worker_agent, config, bootstrap_value, world_size), env_info=env_info)
    max_T = eval_max_T(config.eval_max_steps, config.eval_n_envs)
    # Objects of a TrajInfo subclass do not use the rings.
    stock = config.traj_info_cls is TrajInfo
    most = config.eval_max_trajectories or config.eval_episodes
    capacities = [plan.capacity(config.batch_T, max_T, most) if stock else 1 for plan in plans]
    job = Job(
        env_factories=train,
        eval_env_factories=evals,
        agent=worker_agent,
        collector_cls=config.collector_cls,
        eval_collector_cls=_eval_collector_cls(config),
        traj_info_cls=config.traj_info_cls,
        traj_info_kwargs=traj_kwargs,
        max_decorrelation_steps=config.max_decorrelation_steps,
        eval_max_T=max_T,
        eval_max_trajectories=config.eval_max_trajectories,
        eval_episodes=config.eval_episodes,
        n_envs=config.batch_B,
        eval_n_envs=config.eval_n_envs,
        world_size=world_size,
        seed=seed,
        checks=Checks(config.check_finite, config.debug),
    )
    buffer = SamplesBuffer(spec, config.batch_T, config.batch_B, shared=shared)
    serving: dict[str, Any] = {}
    if central:
        for name, n in (("steps", config.batch_B), ("eval_steps", config.eval_n_envs)):
            serving[name] = StepBuffer(buffer.memory.arrays, n, shared=shared) if n else None
        serving["totals"] = ServerTotals(max(config.batch_B, config.eval_n_envs), shared=shared)
    return Allocation(
        buffer=buffer,
        # Behind the workers' rows one for the inference server.
        control=ControlBlock(len(plans) + central, config.batch_T, shared=shared),
        rings=RecordRings(capacities, shared=shared),
        parameters=agent.runtime.share_memory(shared=shared),
        mailbox=Mailbox(),
        job=job,
        **serving,
    )


def _eval_collector_cls(config: SamplerConfig) -> type[BaseEvalCollector]:
    """Whole episodes are the business of a collector of their own, unless the user has given one."""
    if config.eval_episodes is not None and config.eval_collector_cls is EvalCollector:
        return EpisodeEvalCollector
    return config.eval_collector_cls


def _eval_fn(config: SamplerConfig) -> Any:
    """A list of functions is one per training environment; the first stands for evaluation."""
    is_list = not isinstance(config.env_fn, str) and not callable(config.env_fn)
    return config.env_fn[0] if is_list and config.env_fn else config.env_fn  # type: ignore[index]


def _eval_kwargs(config: SamplerConfig) -> Any:
    if config.eval_env_kwargs is not None:
        return config.eval_env_kwargs
    if config.env_kwargs is None or isinstance(config.env_kwargs, Mapping):
        return config.env_kwargs
    return config.env_kwargs[0] if config.env_kwargs else None


def _prepare_agent(agent: Agent, factory: EnvFactory, seed: int, config: SamplerConfig) -> NamedArrays | None:
    """Initialize the agent from an example environment; returns an example of the `env_info` to be recorded."""
    if not isinstance(agent, Agent):
        raise ConfigError(
            f"agent must be a penstock Agent, got {type(agent).__name__}: wrap a model, for example "
            "CategoricalPgAgent(model), or subclass penstock.Agent"
        )
    batched, wanted = config.collector_cls.batched, config.env_info
    env = build_example_env(factory, batched=batched)
    prefix = "single_" if batched else ""
    observation_space, action_space = (getattr(env, f"{prefix}{kind}_space") for kind in ("observation", "action"))
    example_of(observation_space, "observation")
    example_of(action_space, "action")
    env_info = None
    try:
        if batched and wanted and not isinstance(wanted, Mapping):
            raise ConfigError("env_info of a batched environment needs examples: env_info={'name': 0.0}")
        if wanted is True or (wanted is not False and len(wanted)):
            env_info, skipped = info_example(env, wanted)
            if skipped:
                warnings.warn(f"these entries of info are not numeric and not recorded: {skipped}", stacklevel=5)
    finally:
        close_example_env(env)
    model_seed = ColumnStreams(seed, range(1)).env_seeds(Purpose.MODEL)[0]
    agent.runtime.ensure_initialized(observation_space, action_space, model_seed)
    return env_info


def _check_traj_info(cls: type[TrajInfo], kwargs: Mapping[str, Any]) -> None:
    try:
        cls(**kwargs)
    except Exception as error:
        raise ConfigError(f"{cls.__name__}(**traj_info_kwargs) raised {type(error).__name__}: {error}") from error


def _try_agent(agent: Agent, config: SamplerConfig, bootstrap_value: bool, world_size: int) -> SampleSpec:
    """Step the agent once on zeros, to learn what it reports and to catch misfits before workers start."""
    observation = observation_example(agent.observation_space, config.observation_dtype)
    action = example_of(agent.action_space, "action")

    def columns(example: Any) -> Any:
        return map_leaves(lambda leaf: np.zeros((_TRIAL_COLUMNS, *leaf.shape), leaf.dtype), example)

    inputs = columns(observation), columns(action), np.zeros(_TRIAL_COLUMNS, np.float32)
    rngs = ColumnStreams(0, range(_TRIAL_COLUMNS)).rngs(Purpose.ACTION)
    try:
        trial = agent.runtime.column_copy(rngs)
        # Both pose as the first environment, which there always is.
        trial.runtime.set_columns([0] * _TRIAL_COLUMNS, config.batch_B * world_size)
        trial.sample_mode(0)
        step = as_agent_step(trial.step(*inputs), agent)
        value = np.asarray(trial.value(*inputs)) if bootstrap_value else None
    except PenstockError:
        raise
    except Exception as error:
        shapes = inputs[0] if isinstance(inputs[0], NamedArrays) else inputs[0].shape
        raise SpaceError(
            f"{type(agent).__name__} failed on example observations of shape {shapes}: {type(error).__name__}: {error}"
        ) from error
    write_action(columns(action), step.action)  # raises if it does not fit
    if value is not None and value.shape != (_TRIAL_COLUMNS,):
        raise SpaceError(f"agent.value must return one value per column: shape [B], got {list(value.shape)} for B=2")
    agent_info = agent_info_example(step.agent_info, _TRIAL_COLUMNS)
    return SampleSpec(
        observation, action, agent_info.map(lambda leaf: leaf[0]), bootstrap_value, config.record_final_obs
    )
