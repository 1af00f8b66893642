"""Digests refuse another policy at once, and marks of observations tell two episodes apart."""

from __future__ import annotations

import collections
import copy
import copyreg
import functools
import logging
import threading
import types
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
from penstock.evaluation.proof import ObservationMarks, Trace, differs

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


def default(observation: Any, k: int = 0) -> Any:
    return observation + k


def adds(what: Any) -> Any:
    """A function with `what` in its closure."""
    return lambda observation: observation + what


def by_code(k: int) -> Any:
    """A function whose code has `k`."""
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(f"def function(*given):\n    return {k}", namespace)
    return namespace["function"]


made = gym.make("CartPole-v1")


def with_tensor(cls: Any, tensor: Any) -> Any:
    torch.manual_seed(0)
    layer = cls(2, 2)
    layer.mean = tensor
    return layer


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
    k: Any


class Unpicklable:
    def __init__(self, k: Any) -> None:
        self.k = k

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it holds a lock")


def greedy(eval_epsilon: float, model: Any = nn.Linear, cls: Any = EpsilonGreedyAgent) -> Any:
    made = cls(partial(model, 4, 2), epsilon=0.1, eval_epsilon=eval_epsilon)
    made.initialize(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), seed=0)
    return made


def with_code(base: Any, name: str, k: int) -> Any:
    """A subclass with a method that depends on `k`."""
    return type("Own", (base,), {"__module__": __name__, name: by_code(k)})


PAIRS: dict[str, Any] = {
    "an array of a closure": lambda k: adds(np.full(2, k)),
    "an array of a partial": lambda k: partial(weighted, np.full(2, k)),
    "a number of a partial": lambda k: partial(weighted, k),
    "a number of a default": lambda k: types.FunctionType(default.__code__, globals(), "default", (k,)),
    "a bound method": lambda k: Holder(k).act,
    "an object in an argument": lambda k: partial(Holder.act, Holder(k)),
    "an agent": agent,
    "a function agent": lambda k: FunctionAgent(partial(weighted, k)),
    "keywords": lambda k: partial(gym.make, "Pendulum-v1", g=k),
    "the name of an environment": lambda k: adds(("Pendulum-v1", "CartPole-v1")[k - 1]),
    "a module": lambda k: Holder(k).model,
    "a set": lambda k: {"a", "b", str(k)},
    "a nested module": Nested,
    "a function of a nested module": wrapped,
    "what is deep": lambda k: functools.reduce(lambda inner, _: {"a": [inner]}, range(50), np.full(2, k)),
    "inherited code": lambda k: with_base(by_code(k)),
    "an array of a class": lambda k: with_base(weighted, gains=np.full(2, k)),
    "a dict of a class": lambda k: with_base(weighted, gains={"a": np.full(2, k)}),
    "a static method": lambda k: with_base(weighted, gain=staticmethod(by_code(k))),
    "a property": lambda k: with_base(weighted, gain=property(by_code(k))),
    "a cached property": lambda k: with_base(weighted, gain=functools.cached_property(by_code(k))),
    "slots": lambda k: Slots(np.full(2, k)),
    "what cannot be pickled": lambda k: Unpicklable(np.full(2, k)),
    "a traced module": lambda k: torch.jit.trace(Nested(k), torch.zeros(1, 2)),
    "a cached function": lambda k: functools.lru_cache(by_code(k)),
    "the code of an agent": lambda k: greedy(0.0, cls=with_code(EpsilonGreedyAgent, "value", k)),
    "the code of an agent's model": lambda k: greedy(0.0, model=with_code(nn.Linear, "helper", k)),
    "a tensor that is no buffer": lambda k: with_tensor(nn.Linear, torch.full((2,), float(k))),
    "a tensor in a list": lambda k: partial(weighted, [[torch.full((2,), float(k))]]),
    "a bfloat16, conjugated, sparse tensor": lambda k: [
        torch.full((2,), k, dtype=torch.bfloat16),
        torch.full((2,), k * 1j).conj(),
        torch.eye(2).mul(k).to_sparse(),
    ],
    "a model in an object of a library": lambda k: gym.wrappers.TransformObservation(made, Nested(k), None),
    "a masked array": lambda k: np.ma.masked_array(np.zeros(2), [k == 1, False]),
    "a text in an attribute": lambda k: Slots(f"greedy {k}"),
    "a nested tensor": lambda k: torch.nested.nested_tensor(
        [torch.full((2,), float(k)), torch.zeros(3)], layout=torch.jagged
    ),
    "an array of objects": lambda k: np.array([np.full(2, k), "a"], object),
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


class Counting(nn.Module):
    """Everything in it that changes while it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n, self.rng = nn.Linear(2, 2), 0, np.random.default_rng(0)
        self.queue, self.log, self.lock = collections.deque([1]), logging.getLogger("penstock.test"), threading.Lock()
        self.device, self.generator = torch.device("cpu"), torch.Generator()

    @functools.cached_property
    def table(self) -> Any:
        return np.zeros(3)

    def act(self) -> None:
        self.n, self.rate = self.n + 1, 0.5
        self.rng.random()
        self.queue.append(2)
        self.eval()
        assert len(self.table) == 3


def test_what_changes_while_a_policy_acts_does_not_count() -> None:
    space, counting = gym.spaces.Discrete(2, seed=0), Counting()
    numbers = [0]
    policy = partial(Holder.act, {"space": space, "counting": counting})
    counting.act()  # an attribute that is new counts
    before = digest([policy, lambda: numbers])
    counting.train()
    counting.act()
    copyreg._slotnames(Counting)  # type: ignore[attr-defined] # as pickling does
    space.sample()
    numbers[0] += 1
    logging.getLogger("penstock.test.child")
    assert digest([policy, lambda: numbers]) == before


def test_a_long_list_and_a_circle_have_digests() -> None:
    chain = functools.reduce(lambda inner, _: [inner], range(5000), [np.zeros(0)])
    circle = Holder(1)
    circle.again = {circle}  # type: ignore[attr-defined]
    assert len({digest(chain), digest(circle), digest(Holder(1))}) == 3


SCRIPT = """
import sys
from functools import partial
import numpy as np, torch
from torch import nn
from penstock.buffers import pickling
from penstock.evaluation.digests import digest
from penstock.evaluation.proof import ObservationMarks, Trace, differs

torch.manual_seed(0)
model, words = nn.Linear(2, 2), {"a", "b", "c", "d"}

class Own:
    def __init__(self):
        self.words, self.model = words, model
    def act(self, x):
        return model(x), helper(x), {1, 2, 3} & {x}, (lambda: 10**20)

def helper(x):
    return [word for word in words if len(word) == 1 or word in ("x", "y")]

value = [Own().act, Own, partial(helper, x=np.arange(3)), lambda x: helper(x)]
with open("pickled", "wb") as file:
    file.write(pickling.dumps(value))
print(digest(value))
"""


@pytest.mark.slow
def test_another_process_finds_the_same(tmp_path: Path, starter: None) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    load = "import pickle\nfrom penstock.evaluation.digests import digest\n"
    (tmp_path / "load.py").write_text(f"{load}print(digest(pickle.load(open('pickled', 'rb'))))")
    found = [run(tmp_path / name, cwd=tmp_path) for name in ("script.py", "script.py", "load.py")]
    assert [each.returncode for each in found] == [0, 0, 0], found[0].stderr + found[2].stderr
    assert found[0].stdout == found[1].stdout == found[2].stdout != ""


# ---- marks of observations ------------------------------------------------------------------------------

SPACES = gym.spaces.Dict(
    image=gym.spaces.Box(0, 255, (3, 5), np.uint8),
    pose=gym.spaces.Tuple([gym.spaces.Box(-9, 9, (3,), np.float32), gym.spaces.Discrete(7)]),
    text=gym.spaces.Text(5),
    things=gym.spaces.Sequence(gym.spaces.Box(-1, 1, (2,))),
)


def trace(observations: list[Any], space: Any = SPACES) -> Trace:
    marks = ObservationMarks(space)
    marks.clear()
    for observation in observations:
        marks.add(observation)
    return Trace([], np.zeros(0), *marks.take())


def drawn(n: int, space: Any = SPACES) -> list[Any]:
    space.seed(0)
    return [space.sample() for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 600])
def test_marks_depend_on_the_observation_alone(n: int) -> None:
    observations = drawn(n)
    whole = trace(observations)
    assert whole.checks.shape == (n, 2)
    for i, observation in enumerate(observations):
        alone = trace([observation])
        assert alone.checks[0].tolist() == whole.checks[i].tolist()
        assert alone.sums[0] == pytest.approx(whole.sums[i])


def changed(observation: Any, where: str) -> Any:
    new = copy.deepcopy(observation)
    (place, number) = new["pose"]
    if where == "image":
        new["image"][2, 4] ^= 1
    elif where == "float":
        place[2] += 0.01
    elif where == "swapped floats":
        place[:2] = place[1], place[0]
    elif where == "number":
        new["pose"] = place, (number + 1) % 7
    elif where == "text":
        new["text"] += "a"
    else:
        new["things"] = (*new["things"], np.zeros(2, np.float32))
    return new


@pytest.mark.parametrize("where", ["image", "float", "swapped floats", "number", "text", "things"])
def test_each_part_of_each_observation_counts(where: str) -> None:
    observations = drawn(270)
    stored = trace(observations)
    for i in (0, 1, 255, 256, 269):
        again = [changed(o, where) if k == i else o for k, o in enumerate(observations)]
        assert differs(stored, trace(again)) == (f"its observation after {i} steps is another one", False)
    assert differs(stored, trace(observations)) == ("", True)


def test_rounding_is_no_difference_but_is_said() -> None:
    space = gym.spaces.Box(-np.inf, np.inf, (400,), np.float32)
    observations = [np.float32([*np.geomspace(1e-6, 1e6, 398), np.inf, np.nan]) for _ in range(3)]
    rounded = [np.nextafter(o, np.float32(0)) for o in observations]
    stored, again = trace(observations, space), trace(rounded, space)
    assert differs(stored, again) == ("", False)
    assert differs(stored, trace(observations, space)) == ("", True)


def test_an_observation_that_does_not_fit_has_a_mark_too() -> None:
    space = gym.spaces.Box(0, 255, (2, 3), np.uint8)
    marks, good = ObservationMarks(space), space.sample()
    found = []
    for odd in (np.zeros(7), "text", None, 300):
        marks.clear()
        for observation in (good, odd, good):
            marks.add(observation)
        found.append(marks.take()[0].tolist())
    assert found[1:] == found[:1] * 3
    assert found[0][0] == found[0][2] == trace([good], space).checks.tolist()[0]


def test_large_observations_are_marked_in_little_memory() -> None:
    space = gym.spaces.Box(0, 255, (1 << 20, 2), np.uint8)
    marks = ObservationMarks(space)
    assert sum(part.nbytes for part in marks._bytes) == 1 << 21
    observation = np.zeros(space.shape, np.uint8)
    assert trace([observation] * 3, space).checks.tolist() == [[0, 0]] * 3


def test_the_first_difference_is_named() -> None:
    stored = Trace([np.arange(4), np.zeros((4, 2))], np.arange(4.0), np.zeros((5, 2), np.uint32), np.zeros(5))
    for new, text in (
        (stored._replace(actions=[np.array([0, 1, 5, 3]), stored.actions[1]]), "part 0 of its action in step 2 was 2"),
        (stored._replace(rewards=np.array([0, 1, 2, 9.0])), "its reward of step 3 was 3.0, and is 9.0"),
        (Trace([p[:2] for p in stored.actions], np.arange(2.0), stored.checks[:3], np.zeros(3)), "has 2 steps, and"),
    ):
        problem, is_equal = differs(stored, new)
        assert text in problem
        assert not is_equal
