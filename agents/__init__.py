"""Action selection. Agents that need torch are imported on first use, so that workers without one never pay."""

from typing import TYPE_CHECKING, Any

from penstock.agents.base import Agent, AgentStep
from penstock.agents.drawing import draw
from penstock.agents.noise import ColumnNoise
from penstock.agents.random import RandomAgent
from penstock.agents.shared_parameters import SharedParameters

if TYPE_CHECKING:
    from penstock.agents.categorical import CategoricalPgAgent
    from penstock.agents.torch_agent import TorchAgent

__all__ = [
    "Agent",
    "AgentStep",
    "CategoricalPgAgent",
    "ColumnNoise",
    "RandomAgent",
    "SharedParameters",
    "TorchAgent",
    "draw",
]

_WITH_TORCH = {"CategoricalPgAgent": "categorical", "TorchAgent": "torch_agent"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"penstock.agents.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
