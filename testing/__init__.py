"""For tests of your own: faults to inject, and conformance kits for collectors and agents."""

from penstock.testing.conformance import ConformanceError, check_agent, check_collector
from penstock.testing.delegation import DelegatingAgent
from penstock.testing.episode_rules import check_eval_collector, check_traj_info
from penstock.testing.faults import HOWS, Fault, InjectedFault, Trigger, UnpicklableFault, UnspeakableFault
from penstock.testing.faulty import (
    FaultyAgent,
    FaultyEnv,
    faulty_collector,
    faulty_env,
    faulty_eval_collector,
    faulty_traj_info,
)

__all__ = [
    "HOWS",
    "ConformanceError",
    "DelegatingAgent",
    "Fault",
    "FaultyAgent",
    "FaultyEnv",
    "InjectedFault",
    "Trigger",
    "UnpicklableFault",
    "UnspeakableFault",
    "check_agent",
    "check_collector",
    "check_eval_collector",
    "check_traj_info",
    "faulty_collector",
    "faulty_env",
    "faulty_eval_collector",
    "faulty_traj_info",
]
