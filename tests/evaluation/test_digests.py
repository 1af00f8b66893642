"""A folder of results knows whether a policy or a function is the same, also in another process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock import CategoricalPgAgent, FunctionAgent
from penstock.evaluation.digests import digest

from ..models import Net
from ..starter import run

net = nn.Linear(2, 2)


def with_global(observation: Any) -> Any:
    return net(observation)


class Holder:
    def __init__(self, k: float) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.model.weight[:] = k

    def act(self, observation: Any) -> Any:
        return self.model(observation)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"n": 3}


def weighted(weights: Any, observation: Any) -> Any:
    return observation @ weights


def agent(bias: float) -> Any:
    made = CategoricalPgAgent(partial(Net, 4, 2, 0))
    made.initialize(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), seed=0)
    with torch.no_grad():
        made.model.heads[0].bias += bias
    return made


def function(k: int) -> Any:
    return FunctionAgent(lambda observation: observation + k)


PAIRS: dict[str, Any] = {
    "a closure": lambda k: lambda observation: observation + k,
    "an array of a partial": lambda k: partial(weighted, np.full(2, k)),
    "a bound method": lambda k: Holder(k).act,
    "an object in an argument": lambda k: partial(Holder.act, Holder(k)),
    "an agent": agent,
    "a function agent": function,
    "keywords": lambda k: partial(gym.make, "Pendulum-v1", g=k),
    "an environment of a lambda": lambda k: lambda: gym.make("Pendulum-v1", g=k),
    "a module": lambda k: Holder(k).model,
    "a set": lambda k: {"a", "b", str(k)},
}


@pytest.mark.parametrize("kind", PAIRS)
def test_other_things_have_other_digests(kind: str) -> None:
    make = PAIRS[kind]
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_global_variables_and_code_count() -> None:
    before = digest(with_global)
    with torch.no_grad():
        net.bias += 1
    assert digest(with_global) != before
    namespaces: list[dict[str, Any]] = [{"__name__": "__main__"} for _ in range(2)]
    for namespace, sign in zip(namespaces, "+-", strict=True):
        exec(f"def policy(x):\n    return [x {sign} 1 for _ in x]", namespace)
    assert digest(namespaces[0]["policy"]) != digest(namespaces[1]["policy"])
    digest(Extra(2, 2))  # its state has more than tensors


SCRIPT = """
from functools import partial
import numpy as np, torch
from torch import nn
from penstock.evaluation.digests import digest

torch.manual_seed(0)
model, words = nn.Linear(2, 2), {"a", "b", "c", "d"}

class Own:
    def __init__(self):
        self.words, self.model = words, model
    def act(self, x):
        return model(x), helper(x)

def helper(x):
    return [word for word in words if len(word) == 1]

print(digest([Own().act, Own, partial(helper, x=np.arange(3)), lambda x: helper(x)]))
"""


@pytest.mark.slow
def test_another_process_finds_the_same(tmp_path: Path, starter: None) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = [run(tmp_path / "script.py", cwd=tmp_path) for _ in range(2)]
    assert [each.returncode for each in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout != ""
