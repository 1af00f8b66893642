"""`final_obs` under SAME_STEP is what the environment returned: the same value, type and dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv, VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from penstock.vector import ShmVectorEnv, exchange
from penstock.vector.vector_infos import batch_infos

from ..scale import quick_first

BOX, DISCRETE = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(5)


class Returning(gym.Env[Any, Any]):
    """Episodes of one step, which ends with `last`."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space: Any, last: Any) -> None:
        self.observation_space, self.last = observation_space, last

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.last, {}

    def step(self, action: Any) -> Any:
        return self.last, 1.0, True, False, {}


@pytest.mark.parametrize(
    ("space", "last", "is_sent"),
    quick_first(
        [
            (BOX, np.ones(2, np.float32), False),
            (BOX, np.full(2, 0.1), True),
            (BOX, [0.5, 1], True),
            (DISCRETE, 2, True),
            (DISCRETE, np.int64(2), False),
            (spaces.Box(-1, 1, ()), np.array(0.5, np.float32), True),
            (spaces.Dict(a=BOX, b=DISCRETE), {"a": np.ones(2, np.float32), "b": np.int64(1)}, False),
            (spaces.Dict(a=BOX, b=DISCRETE), {"a": np.ones(2, np.float32), "b": 1}, True),
            (spaces.Tuple([BOX, DISCRETE]), (np.ones(2, np.float32), np.int64(1)), False),
            (spaces.Tuple([BOX, DISCRETE]), [np.ones(2, np.float32), np.int64(1)], True),
        ],
        2,
    ),
)
def test_it_is_what_the_environment_returned(space: Any, last: Any, is_sent: bool, monkeypatch: Any) -> None:
    n_unpickled = 0
    unpickled = exchange.unpickled

    def counting(*args: Any) -> Any:
        nonlocal n_unpickled
        n_unpickled += 1
        return unpickled(*args)

    monkeypatch.setattr(exchange, "unpickled", counting)
    fns = [partial(Returning, space, last)] * 2
    theirs = SyncVectorEnv(fns, autoreset_mode="SameStep")
    theirs.reset()
    for in_series in (1, 2):
        with ShmVectorEnv(fns, in_series, autoreset_mode="SAME_STEP") as envs:
            envs.reset()
            got, wanted = envs.step([0, 0])[4]["final_obs"], theirs.step([0, 0])[4]["final_obs"]
        for one, other in zip(got, wanted, strict=True):
            assert type(one) is type(other)
            assert data_equivalence(one, other)
    assert (n_unpickled > 0) is is_sent


class Reference(VectorEnv[Any, Any, Any]):
    """Gymnasium's own way to batch infos."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.closed = num_envs, True


OBSERVATIONS = st.one_of(
    st.just(np.ones(3, np.float32)), st.just(np.array(2.5)), st.just({"a": np.zeros(2)}), st.just((1, 2)), st.just(7)
)
INFOS = st.one_of(
    st.fixed_dictionaries({"final_obs": OBSERVATIONS, "final_info": st.just({})}),
    st.fixed_dictionaries({"final_obs": OBSERVATIONS, "final_info": st.just({"x": 1.5})}),
    st.fixed_dictionaries({"final_obs": OBSERVATIONS, "final_info": st.just({}), "y": st.just(2)}),
)


def flat(node: Any, name: str = "") -> dict[str, Any]:
    if isinstance(node, dict):
        return {k: v for key, part in node.items() for k, v in flat(part, f"{name}/{key}").items()} or {name: {}}
    return {name: (type(node), node.dtype, node.tolist()) if isinstance(node, np.ndarray) else node}


@given(
    infos=st.dictionaries(st.integers(0, 4), st.one_of(INFOS, st.fixed_dictionaries({"z": st.just(1)})), max_size=5),
    only_ends=st.booleans(),
)
def test_infos_are_batched_as_gymnasium_does_it(infos: dict[int, Any], only_ends: bool) -> None:
    if only_ends:
        infos = {i: {**info, "final_info": {}} for i, info in infos.items() if "final_obs" in info and "y" not in info}
    expected: dict[str, Any] = {}
    for i, info in infos.items():
        expected = Reference(5)._add_info(expected, info, i)
    found = batch_infos(list(infos.items()), 5)
    assert repr(sorted(flat(found).items())) == repr(sorted(flat(expected).items()))
    masks = [array for name, array in found.items() if name.startswith("_")]
    assert len({id(mask) for mask in masks}) == len(masks), "the user may change one of them"
