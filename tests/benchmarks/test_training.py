"""The benchmark of whole trainings: all loops take the same steps of PPO, and every arm runs."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch

from penstock import CategoricalPgAgent, GaussianPgAgent, SerialSampler

from .. import starter
from ..scale import FULL, scaled
from .support import ROOT, benchmark_modules

pytest.importorskip("rich")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("starter")]


@pytest.fixture(scope="module")
def training() -> Iterator[Any]:
    """The module of the benchmark."""
    with benchmark_modules():
        yield importlib.import_module("training")


@pytest.mark.parametrize(("env_id", "name"), [("CartPole-v1", "cartpole"), ("Pendulum-v1", "halfcheetah")])
def test_the_updates_are_the_same(training: Any, env_id: str, name: str) -> None:
    """From one batch, CleanRL's update and penstock's lead to the same parameters. With one minibatch, their random
    order does not matter."""
    loops = importlib.import_module("training_loops")
    task = replace(loops.TASKS[name], batch_T=32, batch_B=4, minibatches=1, epochs=3, learning_rate=1e-2)
    agent: Any = (CategoricalPgAgent if name == "cartpole" else GaussianPgAgent)(loops.Network)
    with SerialSampler(lambda: gym.make(env_id), batch_T=task.batch_T, batch_B=task.batch_B) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples = sampler.obtain_samples(0)[0].copy()
    model = agent.model
    assert not samples.env.truncated.any(), "CleanRL takes the end of a time limit for the end of the episode"

    def optimizer(network: Any, **options: Any) -> Any:
        return torch.optim.Adam(network.parameters(), lr=task.learning_rate, eps=loops.ADAM_EPS, **options)

    agent.model = copy.deepcopy(model)
    loops.penstock_update(task, agent, optimizer(agent.model, fused=True), samples)
    network = copy.deepcopy(model)
    loops.cleanrl_update(task, network, optimizer(network), *loops.as_storage(samples))
    for key, parameter in network.named_parameters():
        assert not torch.equal(parameter, dict(model.named_parameters())[key]), key
        torch.testing.assert_close(dict(agent.model.named_parameters())[key], parameter, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("env", "arm"),
    [("cartpole", "penstock"), ("halfcheetah", "sb3"), *scaled([("halfcheetah", "penstock, lag=1")], [])],
)
def test_an_arm(env: str, arm: str) -> None:
    for module in ("mujoco", "stable_baselines3"):
        pytest.importorskip(module)
    steps = {"cartpole": 1024, "halfcheetah": 2048}[env]
    done = starter.run("benchmarks/training_loops.py", env, arm, 1, steps, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["start"] < found["start"] + found["learning"] < found["seconds"]
    assert 0 < found["learning_cpu"] < found["cpu"]
    limits = {"cartpole": (1, 500), "halfcheetah": (-2000, 2000)}[env]  # a return of CartPole is a number of steps
    assert len(found["returns"]) >= 2
    assert all(limits[0] <= each <= limits[1] for each in found["returns"])
    assert env == "halfcheetah" or sum(found["returns"]) <= steps


def test_the_table(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "training.json"
    options = ["--envs", "cartpole", "--arms", "cleanrl, 1 thread", "--seeds", "1", "--steps", "512"]
    monkeypatch.setattr(sys, "argv", ["training.py", *options, "--json", str(file)])
    if not FULL:  # the training is a fork of a process that has imported torch
        forking = SimpleNamespace(run=lambda command, **_: starter.run(*command[1:], cwd=ROOT))
        monkeypatch.setattr(training, "subprocess", forking)
    training.main()
    assert "cartpole, 512 steps, 1 seeds" in capsys.readouterr().out
    (run,) = json.loads(file.read_text(encoding="utf-8"))["results"]["cartpole"]["runs"]["cleanrl, 1 thread"]
    assert 0 < run["share"] < 1
    assert run["return"] > 0
    monkeypatch.setattr(sys, "argv", ["training.py", "--envs", "cartpole", "--updates", "2", "--json", str(file)])
    training.main()
    assert "one update, cartpole" in capsys.readouterr().out
    updates = json.loads(file.read_text(encoding="utf-8"))["results"]["cartpole"]
    assert len(updates) == 4
    assert all(len(values) == 2 and min(values) > 0 for values in updates.values())
