"""States of a saved run that are damaged, and what of a state every reader can read. `test_resume.py` has the runs."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from penstock import ConfigError, ParallelSampler, RandomAgent, Sampler, SamplerBrokenError, SerialSampler
from penstock.samplers.resuming import checksum

from ..scale import pairs
from ..support import sampler_of

CHANGED_BYTES = object()  # of the data of a column
both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])


def started_sampler(cls: type[Sampler] = SerialSampler) -> Any:
    sampler = sampler_of(cls, batch_T=4)
    sampler.initialize(RandomAgent(), seed=1)
    return sampler


def saved_state(n_batches: int = 2, **options: Any) -> dict[str, Any]:
    with started_sampler() as sampler:
        for itr in range(n_batches):
            sampler.obtain_samples(itr)
        return sampler.state_dict(**options)


@pytest.mark.slow
@both
def test_a_column_that_cannot_be_loaded_breaks_the_sampler(cls: type[Sampler]) -> None:
    state = saved_state(env_state="require")
    state["columns"][2]["data"] = state["columns"][2]["data"][:20]
    state["checksum"] = checksum(state["columns"])
    with started_sampler(cls) as sampler:
        with pytest.raises(SamplerBrokenError, match=r"load_state_dict failed.*UnpicklingError.*make a new sampler"):
            sampler.load_state_dict(state)
        with pytest.raises(SamplerBrokenError, match="load_state_dict failed"):
            sampler.obtain_samples(0)


@both
def test_counts_continue_after_a_resume(cls: type[Sampler]) -> None:
    state = saved_state(3)
    with started_sampler(cls) as sampler:
        sampler.load_state_dict(state)
        before = sampler.metrics()
        sampler.obtain_samples(3)
        after, again = sampler.metrics(), sampler.state_dict()
    assert before["sampler/env_steps"] == 3 * 16
    assert before["sampler/steps_per_second"] == 0
    assert (after["sampler/env_steps"], after["sampler/batches"]) == (4 * 16, 4)
    assert after["sampler/trajectories"] >= before["sampler/trajectories"] == state["counts"]["trajectories"] > 0
    assert after["sampler/seconds"] > state["counts"]["seconds"]
    with started_sampler() as sampler:  # a resume of a resume
        sampler.load_state_dict(again)
        assert sampler.metrics()["sampler/env_steps"] == 4 * 16


@pytest.mark.parametrize(
    ("part", "damaged", "message"),
    [
        ("evaluations", None, "its counts, columns, evaluations and episodes must be dicts"),
        ("evaluations", {0: 3}, "its evaluations must be pairs of integers"),
        ("episodes", 3, "its counts, columns, evaluations and episodes must be dicts"),
        ("columns", [], "its counts, columns, evaluations and episodes must be dicts"),
        ("columns", {}, "it has no column 0"),
        ("columns", {0: {"kind": "pickle"}}, "it has no column 0"),
        ("columns", {0: {"kind": "pickle", "why": "", "data": None}}, "its column 0 has no data"),
        ("columns", {0: {"kind": "x", "why": "", "data": b""}}, "it has no column 0"),
        ("counts", {"env_steps": "3"}, "its counts have no number env_steps"),
        *[
            ("counts", {"env_steps": wrong}, "its counts have no number env_steps of at least 0, but")
            for wrong in (-1, float("nan"), float("inf"), np.array([1, 2]))
        ],
        ("counts", {"env_steps": 1e30}, r"its counts have no number env_steps of at least 0, but 1e\+30"),
        ("evaluations", {0: [-1, 0]}, "its evaluations must be pairs of integers"),
        ("columns", CHANGED_BYTES, "the checksum of its columns"),
        ("checksum", 0, "the checksum of its columns differs. Load another"),
        ("checksum", None, "the checksum of its columns differs. Load another"),
    ],
)
def test_a_damaged_state_changes_nothing(part: str, damaged: Any, message: str) -> None:
    state = saved_state()
    with started_sampler() as sampler:
        version = sampler.run.memory.parameters[0].version
        if damaged is CHANGED_BYTES:
            data = bytearray(state["columns"][1]["data"])
            data[len(data) // 2] ^= 1
            damaged = {**state["columns"], 1: {**state["columns"][1], "data": bytes(data)}}
        with pytest.raises(ConfigError, match=f"this state is damaged: {message}"):
            sampler.load_state_dict({**state, part: damaged})
        assert sampler.run.memory.parameters[0].version == version
        assert len(sampler.load_state_dict(state).exact) == 4


@pytest.mark.parametrize(
    ("name", "array"),
    pairs(["seed", "env_ranks", "spaces", "central", "seed_episodes"], [np.arange(4), torch.arange(4), np.arange(1)]),
)
def test_an_array_in_a_state_is_refused_by_name(name: str, array: Any) -> None:
    state = saved_state(0)
    with started_sampler() as sampler:
        for value in (array, [array, array]):
            with pytest.raises(ConfigError, match=f"^the state has {name}=.*(array|tensor).*, this sampler has"):
                sampler.load_state_dict({**state, name: value})
        with pytest.raises(ConfigError, match="load_state_dict needs what state_dict has returned, of format"):
            sampler.load_state_dict({**state, "format": array})


def test_a_state_of_other_classes_says_what_to_use() -> None:
    state = pickle.loads(pickle.dumps(saved_state()))
    says = "use an agent, a collector and a TrajInfo of the same"
    with started_sampler() as sampler, pytest.raises(ConfigError, match=says):
        sampler.load_state_dict({**state, "classes": ["Other", "ResetCollector", "TrajInfo"]})
