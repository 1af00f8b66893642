"""The conformance kits: check your own collector, agent, evaluation collector or `TrajInfo` against the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.agents import Agent
from penstock.arguments import integer
from penstock.collectors import Collector, EvalCollector, TrajInfo
from penstock.envs import EnvFn, env_factories
from penstock.errors import ConfigError
from penstock.testing import agent_rules, collector_rules, run_rules
from penstock.testing.agent_setup import AgentSetup
from penstock.testing.evaluation_rules import EVALUATION_RULES, TRAJ_INFO_RULES, EvaluationSetup, TrajInfoSetup
from penstock.testing.rules import apply
from penstock.testing.seat_rules import GAME_RULES, TURN_RULES, GameSetup
from penstock.testing.traces import CollectorSetup, record, run
from penstock.workers.plan import START_METHOD, StartMethod


def check_collector(
    collector_cls: type[Collector],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    batched: bool = False,
    agent: Agent | Mapping[str, Agent] | None = None,
    policy_of: Callable[..., str] | None = None,
    batch_T: int = 16,
    batch_B: int = 4,
    n_batches: int = 4,
    n_workers: Sequence[int] = (2, 3),
    continues: bool = True,
    central: bool = True,
    seed: int = 0,
    start_method: StartMethod = START_METHOD,
) -> None:
    """Check a collector against every rule.

    The collector runs in environments of `env_fn`, which may be single, batched, or have several agents that all act in
    each step. The kit ends their episodes after at most 3 to 11 steps, by termination, truncation or both; those of
    batched environments must end by themselves. It compares what is recorded and returned with a `ReferenceLoop`: this
    resets its environments when the collector did, and gives them the same actions.

    Args:
        collector_cls: the collector.
        env_fn, env_kwargs: as for a sampler, but without lists: one callable or id, and one dict, for all
            environments. The environments must be deterministic under a seed.
        batched, policy_of: as for a sampler and its `initialize`.
        agent: acts in every run, or a dict of agents, one for each policy; by default a random agent with agent_info.
            Its output must not depend on the number of columns. Its values are not used.
        batch_T, batch_B, start_method: as for a sampler.
        n_batches: the number of batches in a run.
        n_workers: numbers of workers. With each of them, the batches must be the same as in one process.
        continues: False if the collector may interrupt running episodes, for example at the start of a batch.
        central: False if the collector or `agent` does not work with central inference (`GpuSampler`,
            `AlternatingSampler`), which several policies never do.
        seed: as for a sampler's `initialize`.

    Raises `ConformanceError` for the first broken rule, with what was seen, where, and what to do. If the
    collector cannot run, raises the sampler's own error.
    """
    for argument, n in {"batch_T": batch_T, "batch_B": batch_B, "n_batches": n_batches}.items():
        integer(argument, n, 2)
    setup = CollectorSetup(
        env_fn,
        env_kwargs,
        int(batch_T),
        int(batch_B),
        seed,
        start_method,
        collector_cls=collector_cls,
        agent=agent,
        policy_of=policy_of,
        n_batches=int(n_batches),
        batched=batched,
    )
    name, trace = collector_cls.__name__, record(setup)
    if not any(fields.done.any() for batch in trace.wanted for fields in batch.fields.values()):
        raise ConfigError(
            f"no episode has ended in {n_batches} batches of {batch_T} rows, so the check would miss much: give an "
            "env_fn with shorter episodes, or a larger batch_T"
        )
    apply(run_rules.one_seed_gives_one_batch, name, trace, run(setup))
    apply(run_rules.every_cell_is_written, name, trace)
    for rule in collector_rules.TRACE_RULES:
        if continues or rule is not collector_rules.episodes_continue_in_the_next_batch:
            apply(rule, name, trace)
    stepped = record(setup, collector_rules.SteppedTrajInfo)
    apply(collector_rules.a_traj_info_subclass_sees_every_step, name, stepped)
    apply(run_rules.any_number_of_workers_gives_the_same_batch, name, trace, n_workers)
    if central and not isinstance(agent, Mapping):
        apply(run_rules.central_samplers_give_the_same_batch, name, trace)
    apply(run_rules.nothing_is_left_after_shutdown, name, setup)


def check_agent(
    make_agent: Callable[[], Agent],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    batch_T: int = 16,
    batch_B: int = 4,
    batch_invariant: bool = True,
    central: bool = True,
    seed: int = 0,
    start_method: StartMethod = START_METHOD,
) -> None:
    """Check an agent against every rule.

    Copies of the agent, made as a sampler makes them, act on `[batch_T, batch_B]` observations that were
    recorded with random actions.

    Args:
        make_agent: returns a new agent; called without arguments. Its parameters may differ each time.
        env_fn, env_kwargs: the environment that gives the spaces and the observations: one callable or id, and one
            dict. For a joint agent it has several agents, with equal spaces.
        batch_T, batch_B, start_method: as for a sampler.
        batch_invariant: False if an action may depend on the number of columns (with batch normalization,
            or if rounding decides between two actions). The rules of central inference are then not checked either.
        central: False if the agent does not work with central inference (`GpuSampler`, `AlternatingSampler`), which
            serves a few columns at a time.
        seed: as for a sampler's `initialize`.

    Raises `ConformanceError` for the first broken rule, with what was seen, where, and what to do. An
    exception of the agent itself is not caught.
    """
    integer("batch_T", batch_T, 4)
    integer("batch_B", batch_B, 2)
    setup = AgentSetup(env_fn, env_kwargs, int(batch_T), int(batch_B), seed, start_method, make_agent)
    rules = agent_rules.ACTING_RULES + agent_rules.PARAMETER_RULES
    if batch_invariant:
        rules += agent_rules.BATCH_SIZE_RULES + (agent_rules.CENTRAL_RULES if central else ())
    for rule in rules:
        apply(rule, type(setup.agent).__name__, setup)


def check_parallel_env(
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    mask_key: str | None = None,
    n_steps: int = 200,
    seed: int = 0,
) -> None:
    """Check an environment of several agents, a PettingZoo `ParallelEnv`, against every rule.

    Random agents make `n_steps` steps in it, as a sampler does. `mask_key` names the mask of legal actions, as for an
    agent. Raises `ConformanceError` for the first broken rule, or `ConfigError` if `env_fn` returns something else.
    """
    _check_game(GAME_RULES, GameSetup(env_factories(env_fn, env_kwargs, 1)[0], mask_key, int(n_steps), seed))


def check_aec_env(
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    mask_key: str | None = None,
    n_steps: int = 200,
    seed: int = 0,
) -> None:
    """Check an environment whose agents take turns, a PettingZoo `AECEnv`, against every rule.

    Arguments and errors are those of `check_parallel_env`. `n_steps` counts the actions of all agents.
    """
    setup = GameSetup(env_factories(env_fn, env_kwargs, 1)[0], mask_key, int(n_steps), seed, in_turns=True)
    _check_game(TURN_RULES, setup)


def _check_game(rules: Sequence[Callable[[GameSetup], None]], setup: GameSetup) -> None:
    name = setup.name()
    for rule in rules:
        apply(rule, name, setup)


def check_eval_collector(
    eval_collector_cls: type[EvalCollector],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    n_envs: int = 4,
    max_T: int = 40,
    n_workers: Sequence[int] = (2,),
    seed: int = 0,
    start_method: StartMethod = START_METHOD,
) -> None:
    """Check an evaluation collector against every rule.

    A random agent acts for up to `max_T` steps in each of `n_envs` environments, whose episodes end as in
    `check_collector`. The collector may return any of the episodes that ended. Raises `ConformanceError` for
    the first broken rule.
    """
    setup = EvaluationSetup(
        env_fn, env_kwargs, 4, n_envs, seed, start_method, eval_collector_cls, max_T=max_T, n_workers=n_workers
    )
    for rule in EVALUATION_RULES:
        apply(rule, eval_collector_cls.__name__, setup)


def check_traj_info(
    traj_info_cls: type[TrajInfo],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    traj_info_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    start_method: StartMethod = START_METHOD,
) -> None:
    """Check a `TrajInfo` subclass against every rule.

    Raises `ConformanceError` for the first broken rule. If trajectories cannot be sent to the main process,
    raises the sampler's own error.
    """
    setup = TrajInfoSetup(env_fn, env_kwargs, 16, 4, seed, start_method, traj_info_cls, traj_info_kwargs)
    for rule in TRAJ_INFO_RULES:
        apply(rule, traj_info_cls.__name__, setup)
