"""Action selection. Agents with a torch model are imported on first use, since the import of torch takes seconds."""

from typing import TYPE_CHECKING, Any

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import Agent, AgentStep
from penstock.agents.function import FunctionAgent
from penstock.agents.noise import ColumnNoise, OrnsteinUhlenbeck
from penstock.agents.random import RandomAgent, draw
from penstock.agents.schedules import ExponentialSchedule, LinearSchedule
from penstock.agents.shared_parameters import SharedParameters

if TYPE_CHECKING:
    from penstock.agents.categorical import CategoricalPgAgent
    from penstock.agents.deterministic import DeterministicPgAgent
    from penstock.agents.epsilon_greedy import EpsilonGreedyAgent
    from penstock.agents.gaussian import GaussianPgAgent
    from penstock.agents.normalization import Moments, ObservationNorm, RewardNorm
    from penstock.agents.policy_gradient import EvaluatedSteps, PgAgent, PolicyHead
    from penstock.agents.recurrent import (
        RecurrentCategoricalPgAgent,
        RecurrentEpsilonGreedyAgent,
        RecurrentGaussianPgAgent,
        RecurrentPgAgent,
        RecurrentState,
    )
    from penstock.agents.squashed import SquashedGaussianAgent
    from penstock.agents.torch_agent import TorchAgent

__all__ = [
    "ActionMask",
    "Agent",
    "AgentStep",
    "CategoricalPgAgent",
    "ColumnNoise",
    "DeterministicPgAgent",
    "EpsilonGreedyAgent",
    "EvaluatedSteps",
    "ExponentialSchedule",
    "FunctionAgent",
    "GaussianPgAgent",
    "LinearSchedule",
    "Moments",
    "ObservationNorm",
    "OrnsteinUhlenbeck",
    "PgAgent",
    "PolicyHead",
    "RandomAgent",
    "RecurrentCategoricalPgAgent",
    "RecurrentEpsilonGreedyAgent",
    "RecurrentGaussianPgAgent",
    "RecurrentPgAgent",
    "RecurrentState",
    "RewardNorm",
    "SharedParameters",
    "SquashedGaussianAgent",
    "TorchAgent",
    "draw",
    "mask_of",
]

# The modules that need torch. `__getattr__` looks through them in this order: each comes after those that it imports.
_WITH_TORCH = (
    "normalization",
    "torch_agent",
    "policy_gradient",
    "categorical",
    "gaussian",
    "squashed",
    "deterministic",
    "epsilon_greedy",
    "recurrent",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        for module in _WITH_TORCH:
            if (value := vars(import_module(f"penstock.agents.{module}")).get(name)) is not None:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
