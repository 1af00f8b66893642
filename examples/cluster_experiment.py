"""PPO on CartPole with actors, a policy worker and a trainer: as threads, as processes with sockets, or in Ray.

    python examples/cluster_experiment.py --wire zmq

Stops when the mean return of the last 100 episodes reaches the goal. Exits with status 1 if this takes too long. Model
and loss are as in examples/ppo.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, GpuSampler, Samples
from penstock.distributed import Actors, Batch, Experiment, Policies, RunState, Training
from penstock.learning import gae

DISCOUNT, GAE_LAMBDA, CLIP, EPOCHS, MINIBATCH = 0.98, 0.9, 0.2, 8, 512


class ActorCritic(nn.Module):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()

        def mlp(n_out: int) -> nn.Sequential:
            layers = nn.Linear(observation_space.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
            return nn.Sequential(*layers, nn.Linear(64, n_out))

        self.policy, self.value = mlp(int(action_space.n)), mlp(1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(observation), self.value(observation).squeeze(-1)


class PpoTrainer:
    """One PPO update per batch."""

    def __init__(self, agent: CategoricalPgAgent) -> None:
        torch.set_num_threads(1)
        self.agent = agent
        self.optimizer = torch.optim.Adam(agent.model.parameters(), 1e-3)
        self.returns: deque[float] = deque(maxlen=100)

    def step(self, batch: Batch) -> Mapping[str, float]:
        advantage, target = gae(batch.samples, DISCOUNT, GAE_LAMBDA)
        samples = batch.samples.with_targets(advantage=advantage, value=target)
        n_minibatches = math.ceil(samples.env.reward.numel() / MINIBATCH)
        for _ in range(EPOCHS):
            for part in samples.minibatches(n_minibatches):
                self._update(part)
        self.returns.extend(batch.infos.get("Return", ()))
        return {"return": sum(self.returns) / max(1, len(self.returns)), "episodes": len(self.returns)}

    def _update(self, part: Samples) -> None:
        now, old_log_prob = self.agent.evaluate(part), part.agent.agent_info.log_prob
        advantage = part.targets.advantage
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (now.log_prob - old_log_prob).exp()
        clipped_ratio = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
        loss = policy_loss + 0.5 * mse_loss(now.value, part.targets.value)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.model.parameters(), 0.5)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def make_agent() -> CategoricalPgAgent:
    return CategoricalPgAgent(ActorCritic)


def make_experiment(*, seed: int = 0, checkpoint: Path | None = None) -> Experiment:
    """Two actors with 16 environments each; one batch is a piece of each, on average."""
    make_sampler = partial(GpuSampler, "CartPole-v1", batch_T=64, batch_B=16, n_workers=1)
    return Experiment(
        "cartpole",
        make_agent,
        Actors(2, make_sampler, inference="policy"),
        Training(PpoTrainer, batch=2, max_staleness=4, checkpoint=checkpoint),
        Policies(1),
        seed=seed,
    )


def has_learned(state: RunState, goal: float) -> bool:
    return state.trainer.get("episodes", 0) >= 100 and state.trainer["return"] >= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="local", choices=["local", "zmq", "ray"])
    parser.add_argument("--goal", type=float, default=400.0, help="mean return (400)")
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds (150)")
    parser.add_argument("--metrics", type=Path, help="write the figures of all workers to this file, as JSON lines")
    parser.add_argument("--kill-policy", type=int, metavar="VERSION", help="kill the policy worker at this version")
    args = parser.parse_args()
    with make_experiment().run(wire=args.wire) as run:
        if args.kill_policy:
            run.wait(lambda s: s.version >= args.kill_policy, timeout=args.time_limit)
            run.panel.kill("policy/0")  # the run starts it again. As a thread, it cannot be killed
        left = args.time_limit - run.state().seconds
        shown = 0.0

        def is_over(state: RunState) -> bool:
            nonlocal shown
            if state.seconds >= shown + 5:
                shown = state.seconds
                print(f"version {state.version}, mean return {state.trainer.get('return', 0):.0f}", flush=True)
            return has_learned(state, args.goal)

        state = run.wait(is_over, timeout=left, metrics=args.metrics)
        print(run.panel.table())
        print("restarts:", run.restarts)
    print(f"version {state.version}, mean return {state.trainer.get('return', 0):.0f}, {state.seconds:.0f} s")
    return 0 if has_learned(state, args.goal) else 1


if __name__ == "__main__":
    sys.exit(main())
