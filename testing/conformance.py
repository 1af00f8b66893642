"""The conformance kits: hold a collector or an agent of your own against the rules of penstock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.agents import Agent
from penstock.collectors import Collector
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.testing import run_rules
from penstock.testing.agent_rules import (
    ACTING_RULES,
    CENTRAL_RULES,
    COLUMN_RULE,
    PARAMETER_RULES,
    acts_for_central_samplers_as_here,
    acts_in_a_worker_as_here,
)
from penstock.testing.collector_rules import CONTINUITY_RULE, STEPPED_RULE, TRACE_RULES, SteppedTrajInfo
from penstock.testing.rules import ConformanceError, apply
from penstock.testing.subjects import Subject
from penstock.testing.traces import Setup, record

__all__ = ["ConformanceError", "check_agent", "check_collector"]


def check_collector(
    collector_cls: type[Collector],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    agent: Agent | None = None,
    batch_T: int = 16,
    batch_B: int = 4,
    n_batches: int = 4,
    n_workers: Sequence[int] = (2, 3),
    continues: bool = True,
    central: bool = True,
    seed: int = 0,
    start_method: str = "forkserver",
) -> None:
    """Hold a collector against every rule; returns if it keeps them all.

    It is run in environments of `env_fn` (a callable or an id) that are made to end after 3 to 11 steps,
    by termination, truncation or both, and everything that they and the agent are called with is
    compared with what is recorded and handed over.

    Args:
        collector_cls: the collector.
        env_fn, env_kwargs: as for a sampler; one function and one dict for all environments. They must
            be deterministic under a seed.
        agent: who acts, in every run anew; by default a random agent that reports numbers of its own. It
            must act alike in batches of any number of columns.
        batch_T, batch_B, n_batches, seed, start_method: of the runs.
        n_workers: numbers of workers that must all give what one process gives.
        continues: False if the collector may give running episodes up, for example to begin every
            batch with new ones.
        central: False if the collector, or `agent`, is not for the samplers whose workers hold no agent.

    Raises `ConformanceError` for the first rule that is broken, saying which, what was seen and where, and
    what to do; and what the sampler raises where the collector cannot run at all.
    """
    if batch_T < 2 or batch_B < 2 or n_batches < 2:
        raise ConfigError(
            f"batch_T, batch_B and n_batches must be 2 or more for a check to see anything, got {batch_T}, {batch_B} "
            f"and {n_batches}"
        )
    setup = Setup(
        collector_cls, env_fn, env_kwargs, agent, int(batch_T), int(batch_B), int(n_batches), seed, start_method
    )
    name = collector_cls.__name__
    trace = record(setup)
    apply(run_rules.one_seed_gives_one_batch, name, trace, record(setup))
    apply(run_rules.every_cell_is_written, name, setup, trace)
    for rule in (CONTINUITY_RULE, *TRACE_RULES) if continues else TRACE_RULES:
        apply(rule, name, trace)
    apply(STEPPED_RULE, name, record(setup, SteppedTrajInfo))
    apply(run_rules.any_number_of_workers_gives_the_same, name, setup, n_workers)
    if central:
        apply(run_rules.central_samplers_give_the_same, name, setup)
    apply(run_rules.nothing_is_left_over, name, setup)


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
    start_method: str = "forkserver",
) -> None:
    """Hold an agent against every rule; returns if it keeps them all.

    It is shown `[batch_T, batch_B]` observations that random actions have led to, and copies of it, made
    as a sampler makes them, must act as the rules say.

    Args:
        make_agent: gives a new agent, without arguments; the agents may have other parameters each time.
        env_fn, env_kwargs: as for a sampler; for the spaces and the observations.
        batch_T, batch_B, seed, start_method: of the runs.
        batch_invariant: False if what the agent does for a column may depend on how many columns there
            are (batch normalization, say, or a sum in another order that decides between two actions).
        central: False if the agent is not for the samplers that serve a few columns at a time.

    Raises `ConformanceError` for the first rule that is broken, saying which, what was seen and where, and
    what to do; and whatever the agent raises.
    """
    if batch_T < 4 or batch_B < 2:
        raise ConfigError(
            f"batch_T must be 4 or more and batch_B 2 or more for a check to see anything, got {batch_T}, {batch_B}"
        )
    subject = Subject(make_agent, env_fn, env_kwargs, int(batch_T), int(batch_B), seed, start_method)
    invariance = ((COLUMN_RULE,), CENTRAL_RULES if central else ()) if batch_invariant else ()
    for rule in (*ACTING_RULES, *(rule for rules in invariance for rule in rules), *PARAMETER_RULES):
        apply(rule, subject.name, subject)
    if batch_invariant:
        apply(acts_in_a_worker_as_here, subject.name, subject)
    if batch_invariant and central:
        apply(acts_for_central_samplers_as_here, subject.name, subject)
