"""PPO that logs to TensorBoard, saves a checkpoint after each batch, and goes on from it when it is started again.

    python examples/ppo_resume.py --out runs/resume     # stop it with Ctrl-C, then start it again
    tensorboard --logdir runs/resume

A run that was stopped and one that was not end with the same parameters. Needs tensorboard: pip install tensorboard
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from ppo_minimal import ActorCritic, ppo_loss

from penstock import CategoricalPgAgent, ParallelSampler
from penstock.learning import gae

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise SystemExit(f"this example needs tensorboard: pip install tensorboard ({error})") from error

BATCH_T, BATCH_B = 128, 16


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a new file, then put it in the place of the old one: there is a complete file at any moment."""
    new = path.with_suffix(".new")
    torch.save(checkpoint, new)
    os.replace(new, path)


def train(agent: CategoricalPgAgent, optimizer: torch.optim.Optimizer, samples: Any, rng: torch.Generator) -> float:
    advantage, target = gae(samples, discount=0.98, lambda_=0.95)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(8):
        for part in samples.minibatches(8, rng):
            loss = ppo_loss(agent, part)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    agent.sync_shared_memory()  # the workers get the new parameters
    return float(loss)


def main(out: Path, n_batches: int, seed: int = 0) -> dict[str, Any]:
    """Train until batch `n_batches`. Returns the last checkpoint."""
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    out.mkdir(parents=True, exist_ok=True)
    path = out / "checkpoint.pt"
    checkpoint = torch.load(path) if path.exists() else None
    first = 0 if checkpoint is None else checkpoint["n_batches"]
    # What a run has logged after its last checkpoint comes again: TensorBoard then drops the older points.
    purge_step = first * BATCH_T * BATCH_B + 1
    agent, rng = CategoricalPgAgent(ActorCritic), torch.Generator().manual_seed(seed)  # rng orders the minibatches
    with (
        ParallelSampler("CartPole-v1", batch_T=BATCH_T, batch_B=BATCH_B, eval_n_envs=4, eval_episodes=8) as sampler,
        SummaryWriter(str(out), purge_step=purge_step) as writer,
    ):
        sampler.initialize(agent, seed=seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=2e-3)
        if checkpoint is not None:
            agent.load_state_dict(checkpoint["agent"])  # before the sampler, which publishes the parameters
            optimizer.load_state_dict(checkpoint["optimizer"])
            rng.set_state(checkpoint["rng"])
            print(sampler.load_state_dict(checkpoint["sampler"]))
        for itr in range(first, n_batches):
            samples, _ = sampler.obtain_samples(itr)
            loss = train(agent, optimizer, samples, rng)
            if itr % 5 == 4:
                sampler.evaluate_agent(itr)
            metrics = {**sampler.metrics(), "train/loss": loss}
            for name, value in metrics.items():
                writer.add_scalar(name, value, int(metrics["sampler/env_steps"]))
            print(f"batch {itr}: mean return {metrics['train/Return_mean']:.0f}")
            checkpoint = {
                "n_batches": itr + 1,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": rng.get_state(),
                "sampler": sampler.state_dict(),
            }
            save(path, checkpoint)
    assert checkpoint is not None
    return checkpoint


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/resume"), help="folder for checkpoint.pt and the logs")
    parser.add_argument("--n-batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
