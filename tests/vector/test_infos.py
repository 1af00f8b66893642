"""The infos of ShmVectorEnv: each row has what its environment has returned, whatever the others return."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st

from penstock.vector import ShmVectorEnv

from ..scale import examples
from ..support import assert_same

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

N = 3
SAME = AutoresetMode.SAME_STEP

#: Values that Gymnasium can batch, if all environments return the same.
VALUES: list[Any] = [
    *(0, 3, True, 0.75, 2**60 + 1, None, "text", [1, "two"]),
    *(np.float32(0.1), np.int8(3), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.array(2.5), np.array([1, 2]), np.array([0.5, 1.5]), np.array([1, 2, 3]), np.array([True, False])),
    *(np.array(["abc", "d"]), np.array(["abcdef", "d"]), np.array([1, 2], "m8[s]"), np.zeros(2, "i4,f4")),
    *({"deep": 1}, {"deep": 0.5, "more": {"still": None}}, {"deep": "text"}, {}),
]
INFOS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([*VALUES, 2**70]))


def told(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """What is said of one row."""
    own = {key: value for key, value in infos.items() if key[0] != "_" and infos.get(f"_{key}", [True] * N)[row]}
    return {key: told(value, row) if isinstance(value, dict) else value[row] for key, value in own.items()}


def is_same(found: Any, wanted: Any) -> bool:
    """The same value. A number may have another dtype."""
    if isinstance(wanted, dict):
        is_dict = isinstance(found, dict) and found.keys() == wanted.keys()
        return is_dict and all(is_same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, np.ndarray) and wanted.dtype.kind != "V":
        kinds = {np.asarray(each).dtype.kind in "biuf" or np.asarray(each).dtype.kind for each in (found, wanted)}
        return len(kinds) == 1 and np.array_equal(found, wanted)
    return (found is None) == (wanted is None) and np.shape(found) == np.shape(wanted) and bool(np.all(found == wanted))


class Telling(gym.Env[Any, Any]):
    """Its infos are set from outside."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)
    infos: Any = ({}, {})  # of resets and of steps
    ends = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, self.infos[0]

    def step(self, action: Any) -> Any:
        return 1, 0.0, self.ends, False, self.infos[1]


class TellingGame:
    """As an environment of `N` agents."""

    metadata: ClassVar[Any] = {}
    possible_agents: ClassVar[Any] = list(range(N))
    infos: Any = (Telling.infos,) * N
    ends = False

    def observation_space(self, agent: int) -> Any:
        return Telling.observation_space

    def action_space(self, agent: int) -> Any:
        return Telling.action_space

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents = self.possible_agents
        return dict.fromkeys(self.agents, 0), {agent: self.infos[agent][0] for agent in self.agents}

    def step(self, actions: Any) -> Any:
        agents = self.agents
        self.agents = [] if self.ends else agents
        flags = dict.fromkeys(agents, self.ends), dict.fromkeys(agents, False)
        own = {agent: self.infos[agent][1] for agent in agents}
        return dict.fromkeys(agents, 1), dict.fromkeys(agents, 0.0), *flags, own

    def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.parametrize(("mode", "env_fn"), [*((mode, Telling) for mode in AutoresetMode), (SAME, TellingGame)])
def test_each_row_has_what_its_environment_has_returned(mode: AutoresetMode, env_fn: Any) -> None:
    has_seats = env_fn is TellingGame
    fns = [env_fn] if has_seats else [env_fn] * N

    @examples(60, 2_000)
    @given(st.lists(st.tuples(INFOS, INFOS), min_size=N, max_size=N), st.booleans(), st.booleans())
    def check(infos: Any, ends: bool, sends: bool) -> None:
        envs.set_attr("infos", [infos] if has_seats else infos)
        envs.set_attr("ends", ends)
        results = [(envs.reset()[1], [own for own, _ in infos])]
        if sends:
            envs.send(np.zeros(N, int))
            of_step = envs.recv(min_ready=N)[-1]
        else:
            of_step = envs.step(np.zeros(N, int))[-1]
        if ends and mode is SAME:
            assert (of_step["final_obs"].tolist(), of_step["final_obs"].dtype) == ([1] * N, object)
            results += [(of_step.pop("final_info"), [own for _, own in infos]), (of_step, [own for own, _ in infos])]
        else:
            results.append((of_step, [own for _, own in infos]))
        for batch, each in results:
            for row, wanted in enumerate(each):
                found = told({key: value for key, value in batch.items() if key.lstrip("_") in "abc"}, row)
                assert is_same(found, wanted), (found, wanted)

    with ShmVectorEnv(fns, n_workers=1, autoreset_mode=mode) as envs:
        check()


def test_where_all_return_the_same_type_it_is_as_in_gymnasium() -> None:
    with ShmVectorEnv([Telling] * N, n_workers=1) as ours:
        theirs = SyncVectorEnv([Telling] * N)
        ours.reset()
        theirs.reset()
        for value in VALUES:
            for whose in ([0, 1, 2], [1], [2, 0]):
                infos = [({}, {"a": value, "b": {"c": value}} if i in whose else {}) for i in range(N)]
                both = []
                for envs in (ours, theirs):
                    envs.set_attr("infos", infos)
                    both.append(envs.step(np.zeros(N, int))[-1])
                assert_same(*both, repr(value))
                assert list(both[0]) == list(both[1])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((0, 0.75, 3.9), np.float64),
        ((False, 2, 0), np.int64),
        ((np.float32(1), np.int8(1), True), np.float32),
        ((np.float32(1), 0.1, np.float32(2)), np.float64),
        ((np.bool_(False), True, False), np.bool_),
        ((np.array(["a"]), np.array(["abc"]), np.array(["ab"])), "<U3"),
        ((np.zeros(2, np.uint8), np.ones(2), np.zeros(2, int)), np.float64),
        ((0.5, 2**60 + 1, 0), object),  # float64 does not hold it
        ((np.array([1]), np.array(["1"]), np.array([1])), object),
    ],
)
def test_unlike_values_get_a_dtype_that_holds_them(values: Any, dtype: Any) -> None:
    with ShmVectorEnv([Telling] * N, n_workers=1) as envs:
        envs.reset()
        envs.set_attr("infos", [({}, {"a": value}) for value in values])
        assert envs.step(np.zeros(N, int))[-1]["a"].dtype == dtype


# ---- batched environments -------------------------------------------------------------------------

#: Entries of a batched environment of n rows.
BATCHES: list[Any] = [
    np.arange,
    lambda n: np.arange(n) + 0.75,
    lambda n: np.arange(n) > 0,
    lambda n: np.arange(n).astype(np.uint64) + np.uint64(2**63),
    lambda n: np.array(["abc", "abcdef"][-n:]),
    lambda n: np.arange(n * 4).reshape(n, 4),
    lambda n: np.arange(n * 5).reshape(n, 5) / 2,
    lambda n: np.array([None, 3][:n], object),
    lambda n: [[1], [1, 2]][:n],
    lambda n: {"deep": np.arange(n), "_deep": np.arange(n) > 0},
    lambda n: {"deep": np.full(n, "text")},
]


class TellingBatch(VectorEnv[Any, Any, Any]):
    metadata: ClassVar[Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    infos: Any = MappingProxyType({})

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Telling.observation_space, Telling.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(self.num_envs, int), self.infos

    def step(self, actions: Any) -> Any:
        n = self.num_envs
        return np.zeros(n, int), np.zeros(n), np.zeros(n, bool), np.zeros(n, bool), self.infos


def test_rows_of_batched_environments_too() -> None:
    @examples(60, 2_000)
    @given(st.lists(st.dictionaries(st.sampled_from("ab"), st.sampled_from(BATCHES)), min_size=2, max_size=2))
    def check(makers: Any) -> None:
        infos = [{key: make(n) for key, make in own.items()} for n, own in zip((2, 1), makers, strict=True)]
        envs.set_attr("infos", infos)
        for batch in (envs.reset()[1], envs.step(np.zeros(N, int))[-1]):
            for row, (own, b) in enumerate([(infos[0], 0), (infos[0], 1), (infos[1], 0)]):
                found, wanted = told(batch, row), told(own, b)
                assert is_same(found, wanted), (found, wanted)

    with ShmVectorEnv(TellingBatch, num_envs=N, n_workers=2) as envs:
        check()


# ---- adapters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["sb3", "tianshou"])
def test_adapters_hand_on_what_each_environment_has_returned(adapter: str) -> None:
    if adapter == "sb3":
        pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    values = [{"a": 0, "b": True, "c": np.array([1])}, {"a": 0.75, "b": None}, {"a": "text", "b": 2, "c": {"d": 1}}]
    mode: Any = "SAME_STEP" if adapter == "sb3" else "DISABLED"
    with ShmVectorEnv([Telling] * N, n_workers=2, autoreset_mode=mode) as envs:
        envs.set_attr("infos", [({}, own) for own in values])
        own: Any = envs.to_sb3() if adapter == "sb3" else envs.to_tianshou()
        own.reset()
        infos = own.step(np.zeros(N, int))[-1]
        for i, (info, wanted) in enumerate(zip(infos, values, strict=True)):
            assert info.pop("env_id", i) == i
            info.pop("TimeLimit.truncated", None)
            assert repr(info) == repr(wanted), "Python's numbers stay Python's"
