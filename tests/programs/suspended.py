"""Runs an experiment, and prints its state four times a second: `suspended.py WIRE CHECKPOINT TRAINERS POLICIES`.
Its workers wait for 2 seconds in place of 30 when their panel is silent. On Ray, the program is suspended twice, and
max_restarts is 1. Over sockets, it is suspended once, and max_restarts is 0. So a suspension may not be a failure."""

import json
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from penstock import CategoricalPgAgent, SerialSampler
from penstock.distributed import Actors, Batch, Experiment, Policies, RunningExperiment, RunState, Training, role
from penstock.workers import launcher


class Model(nn.Module):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: Any) -> Any:
        out = self.layer(observation)
        return out[..., :2], out[..., 2]


class Slow:
    """Each step of several trainers waits for all of them."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.rows = agent, 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        time.sleep(0.05)  # leave the CPUs to others
        self.agent.model(batch.samples.env.observation)[1].mean().backward()
        self.rows += batch.samples.env.reward.numel()
        return {"rows": self.rows, "pid": os.getpid()}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def make_agent() -> CategoricalPgAgent:
    role.ORPHAN_SECONDS = 2.0
    return CategoricalPgAgent(Model)


def make_sampler() -> SerialSampler:
    role.ORPHAN_SECONDS = 2.0
    return SerialSampler("CartPole-v1", batch_T=8, batch_B=4)


def say(run: RunningExperiment, state: RunState) -> bool:
    statuses = {name: figures["status"] for name, figures in state.workers.items()}
    pid = int(state.trainer.get("pid", 0))
    print(json.dumps({"version": state.version, "pid": pid, "restarts": run.restarts, **statuses}), flush=True)
    return False


if __name__ == "__main__":
    wire: Any = sys.argv[1]
    n_trainers, n_policies = map(int, sys.argv[3:])
    experiment = Experiment(
        "suspended",
        make_agent,
        Actors(2, make_sampler, inference="policy" if n_policies else None),
        Training(Slow, checkpoint=sys.argv[2], save_every=10**6, count=n_trainers),
        Policies(n_policies) if n_policies else None,
        seed=0,
    )
    if "starter" in sys.modules:
        launcher.shared_supervisor([])  # it is a fork: so now, while this process has one thread
    with experiment.run(wire=wire, max_restarts=int(wire == "ray")) as run:
        run.wait(partial(say, run))
