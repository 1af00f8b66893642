"""The example in numpy: its gradients are those of torch, and it learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.buffers import AgentSamples, EnvSamples, NamedArrays, Samples

from .. import starter

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "numpy_pg.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("numpy_pg", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["numpy_pg"] = module  # its dataclass looks itself up there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["numpy_pg"]


def test_the_gradients_are_those_of_torch(example: Any) -> None:
    cfg, rng = example.Config(hidden=5), np.random.default_rng(0)
    parameters = example.new_parameters(rng, 4, 5, 2)
    observation, (log_prob, advantage, target) = rng.normal(size=(30, 4)), rng.normal(size=(3, 30))
    action, log_prob = rng.integers(0, 2, 30), np.log(0.5) + 0.3 * log_prob  # some ratios are clipped
    part = Samples(
        env=EnvSamples(observation=observation, reward=advantage),
        agent=AgentSamples(action=action, agent_info=NamedArrays(log_prob=log_prob)),
        targets=NamedArrays(advantage=advantage, value=target),
    )
    tensors = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in parameters.items()}

    def network(name: str) -> Any:
        hidden = torch.tanh(torch.tensor(observation) @ tensors[f"{name}.hidden"] + tensors[f"{name}.hidden.bias"])
        return hidden @ tensors[f"{name}.out"] + tensors[f"{name}.out.bias"]

    chosen = network("policy").log_softmax(1).gather(1, torch.tensor(action)[:, None]).squeeze(1)
    ratio = (chosen - torch.tensor(log_prob)).exp()
    weight = torch.tensor((advantage - advantage.mean()) / (advantage.std() + 1e-8))
    objective = torch.min(ratio * weight, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * weight).mean()
    error = network("value").squeeze(1) - torch.tensor(target)
    (0.5 * error.square().mean() - objective).backward()
    assert ((ratio - 1).abs() > cfg.clip).any()
    found = example.gradients(parameters, part, cfg)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(found[name], tensor.grad, atol=1e-5, err_msg=name)


def test_a_short_run_learns(tmp_path: Path) -> None:
    done = starter.run(EXAMPLE, "--goal", 60, "--time-limit", 60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
