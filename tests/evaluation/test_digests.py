"""A folder of results knows whether a policy or a function is the same, also in another process."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock import CategoricalPgAgent, EpsilonGreedyAgent, FunctionAgent
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


class Nested(nn.Module):
    """Its weights are `k`, three modules below it."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter[:] = k

    def forward(self, observation: Any) -> Any:
        return self.body(observation)


def wrapped(k: float) -> Any:
    model = Nested(k)
    return lambda observation: model(observation) + 1


def with_base(act: Any, **attributes: Any) -> Any:
    """An object whose class inherits `act`."""
    return type("Own", (type("Base", (), {"__call__": act, **attributes}),), {})()


@dataclass(slots=True)  # type: ignore[call-overload,unused-ignore]
class Slots:
    k: float


class Unpicklable:
    def __init__(self, k: float) -> None:
        self.k = k

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it holds a lock")


def greedy(eval_epsilon: float, model: Any = nn.Linear, cls: Any = EpsilonGreedyAgent) -> Any:
    made = cls(partial(model, 4, 2), epsilon=0.1, eval_epsilon=eval_epsilon)
    made.initialize(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), seed=0)
    return made


def with_code(base: Any, name: str, k: int) -> Any:
    """A subclass with a method that depends on `k`."""
    return type("Own", (base,), {"__module__": __name__, name: lambda self, *given: (k, *given)})


class WithGain(EpsilonGreedyAgent):
    """An agent with a setting of its own."""

    _gain = 0

    def gain(self) -> int:
        return self._gain


def with_gain(k: int) -> Any:
    made = greedy(0.0, cls=WithGain)
    made._gain = k
    return made


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
    "a nested module": Nested,
    "a function of a nested module": wrapped,
    "what is deep": lambda k: functools.reduce(lambda inner, _: {"a": [inner]}, range(50), np.full(2, k)),
    "inherited code": lambda k: with_base(lambda self, observation: observation + k),
    "an array of a class": lambda k: with_base(weighted, gains=np.full(2, k)),
    "a dict of a class": lambda k: with_base(weighted, gains={"a": k}),
    "a static method": lambda k: with_base(weighted, gain=staticmethod(lambda: k)),
    "a property": lambda k: with_base(weighted, gain=property(lambda self: k)),
    "slots": Slots,
    "what cannot be pickled": Unpicklable,
    "a traced module": lambda k: torch.jit.trace(Nested(k), torch.zeros(1, 2)),
    "a cached function": lambda k: functools.lru_cache(lambda observation: observation + k),
    "a setting of an agent": lambda k: greedy(k / 2),
    "a private setting of a user's agent": with_gain,
    "the code of an agent": lambda k: greedy(0.0, cls=with_code(EpsilonGreedyAgent, "value", k)),
    "the code of an agent's model": lambda k: greedy(0.0, model=with_code(nn.Linear, "helper", k)),
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


def test_a_function_of_another_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for sign in "+-":
        (tmp_path / f"helper{len(found)}.py").write_text(f"def act(x):\n    return {sign}x")
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(f"import helper{len(found)} as helper\ndef policy(x):\n    return helper.act(x)", namespace)
        monkeypatch.setattr(namespace["helper"], "__name__", "helper")
        monkeypatch.setattr(namespace["helper"].act, "__module__", f"helper{len(found)}")
        found.append(digest(namespace["policy"]))
    assert found[0] != found[1]


def test_what_changes_while_a_policy_acts_does_not_count() -> None:
    space, rng, queue = gym.spaces.Discrete(2, seed=0), np.random.default_rng(0), collections.deque([1])
    policy = partial(Holder.act, {"space": space, "rng": rng, "queue": queue, "device": torch.device("cpu")})
    before = digest(policy)
    space.sample()
    rng.random()
    queue.append(2)
    assert digest(policy) == before


def test_a_long_list_and_a_circle_have_digests() -> None:
    chain = functools.reduce(lambda inner, _: [inner], range(5000), [0])
    circle = Holder(1)
    circle.again = {circle}  # type: ignore[attr-defined]
    assert len({digest(chain), digest(circle), digest(Holder(1))}) == 3


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
