"""For your tests: make workers fail, and check your own environments, collectors, agents, evaluation collectors and
`TrajInfo`s."""

from penstock.agents.joint import DelegatingAgent
from penstock.envs import check_env_state
from penstock.testing.conformance import (
    check_aec_env,
    check_agent,
    check_collector,
    check_eval_collector,
    check_parallel_env,
    check_traj_info,
)
from penstock.testing.env_rules import EnvFigures, check_batched, check_env
from penstock.testing.faults import (
    HOWS,
    Fault,
    FaultyAgent,
    FaultyEnv,
    InjectedFault,
    Trigger,
    UnpicklableFault,
    UnprintableFault,
    faulty_collector,
    faulty_env,
    faulty_eval_collector,
    faulty_traj_info,
)
from penstock.testing.reference_loop import ReferenceLoop
from penstock.testing.rules import ConformanceError

__all__ = [
    "HOWS",
    "ConformanceError",
    "DelegatingAgent",
    "EnvFigures",
    "Fault",
    "FaultyAgent",
    "FaultyEnv",
    "InjectedFault",
    "ReferenceLoop",
    "Trigger",
    "UnpicklableFault",
    "UnprintableFault",
    "check_aec_env",
    "check_agent",
    "check_batched",
    "check_collector",
    "check_env",
    "check_env_state",
    "check_eval_collector",
    "check_parallel_env",
    "check_traj_info",
    "faulty_collector",
    "faulty_env",
    "faulty_eval_collector",
    "faulty_traj_info",
]
