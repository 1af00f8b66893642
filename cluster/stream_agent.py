"""An agent that asks the policy workers of an inference stream for its actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep
from penstock.cluster.pieces import from_tree, to_tree
from penstock.cluster.streams import InferenceClient
from penstock.errors import ConfigError


class StreamAgent(Agent):
    """Sends one message per step for all its columns. The policy worker keeps the noise and the recurrent state.

    `agent_info` is what the agent of the policy worker reports, and `stream_version`: the version of the parameters
    that acted. Use this agent in a sampler that acts in the actor's own process: `GpuSampler`, `AlternatingSampler` or
    `SerialSampler`.
    """

    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._starts: npt.NDArray[np.bool_] = np.ones(len(rngs), np.bool_)

    def reset(self) -> None:
        self._starts[:] = True

    def reset_one(self, column: int) -> None:
        self._starts[column] = True

    def eval_mode(self, itr: int) -> None:
        raise ConfigError("an inference stream does not serve evaluations: evaluate in the trainer, with its own agent")

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        answer = self._ask("step", observation, prev_action, prev_reward)
        return AgentStep(from_tree(answer["action"]), from_tree(answer["agent_info"]))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return self._ask("value", observation, prev_action, prev_reward)["value"]

    def _ask(self, kind: str, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        assert self.env_ranks is not None
        own = range(len(self.env_ranks)) if self.selected is None else self.selected
        ranks = np.array([self.env_ranks[column] for column in own], np.int64)
        starts = self._starts[list(own)]
        if len(set(ranks.tolist())) < len(ranks):  # `initialize` tries the agent, with observations of no environment
            kind = f"trial {kind}"
        else:
            self._starts[list(own)] = False
        message = {
            "kind": kind,
            "env_ranks": ranks,
            "starts": starts,
            "observation": to_tree(observation),
            "prev_action": to_tree(prev_action),
            "prev_reward": prev_reward,
        }
        return self._client.ask(message)
