"""The samples buffer: what a collector writes into its columns is what the user finds, row for row."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers import AgentSamples, BatchColumns, EnvSamples, NamedArrays, Samples, SamplesBuffer, SampleSpec
from penstock.buffers.named import map_leaves
from penstock.buffers.slots import FirstRow, for_user

from ..scale import examples
from ..support import leave_memory

T, B = 5, 4
PER_COLUMN = ("agent.bootstrap_value", "env.bootstrap_obs")
quick = examples(15, 30)

OBSERVATION = NamedArrays(camera=np.zeros((2, 3), np.uint8), goal=NamedArrays(_0=np.zeros((), np.int64)))
ACTION = np.zeros(2, np.float16)
INFO = NamedArrays(log_prob=np.zeros((), np.float32), logits=np.zeros(6, np.float64))


def begin_next_batch(columns: BatchColumns, learner: Any = lambda: None) -> None:
    """End the batch, let the learner do what it likes with it, and begin the next one in the same memory."""
    first = FirstRow(columns)
    columns.end_batch(first)
    learner()
    columns.begin_batch(first)


def buffer_of(T: int = T, B: int = B, shared: bool = False, **changes: Any) -> SamplesBuffer:
    options = {"observation": OBSERVATION, "action": ACTION, "agent_info": INFO, "bootstrap_value": True, **changes}
    return SamplesBuffer(SampleSpec(**options), T, B, shared=shared)


def fill(value: Any, seed: int = 0) -> None:
    """Put random bytes everywhere: whatever changes afterwards shows."""
    rng = np.random.default_rng(seed)
    for _, leaf in value.leaves() if isinstance(value, NamedArrays) else [("", value)]:
        leaf[...] = rng.integers(1, 100, leaf.shape)


def shapes(value: NamedArrays) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in value.leaves()}


# ---- the public view ---------------------------------------------------------------------------


@quick
@given(st.integers(1, 6), st.integers(1, 6))
def test_every_field_has_its_leading_dimensions_and_the_examples_dtype(n_T: int, n_B: int) -> None:
    cells = (n_T, n_B)
    assert shapes(buffer_of(n_T, n_B).batches[0]) == {
        "env.observation.camera": ((*cells, 2, 3), np.uint8),
        "env.observation.goal._0": (cells, np.int64),
        "env.reward": (cells, np.float32),
        "env.prev_reward": (cells, np.float32),
        "env.terminated": (cells, np.bool_),
        "env.truncated": (cells, np.bool_),
        "env.done": (cells, np.bool_),
        "env.prev_done": (cells, np.bool_),
        "env.valid": (cells, np.bool_),
        "env.final_obs.camera": ((*cells, 2, 3), np.uint8),
        "env.final_obs.goal._0": (cells, np.int64),
        "env.bootstrap_obs.camera": ((n_B, 2, 3), np.uint8),
        "env.bootstrap_obs.goal._0": ((n_B,), np.int64),
        "agent.action": ((*cells, 2), np.float16),
        "agent.prev_action": ((*cells, 2), np.float16),
        "agent.agent_info.log_prob": (cells, np.float32),
        "agent.agent_info.logits": ((*cells, 6), np.float64),
        "agent.bootstrap_value": ((n_B,), np.float32),
        "agent.final_value": (cells, np.float32),
        "agent.policy_version": (cells, np.int64),
    }


def test_a_field_that_is_not_recorded_is_not_there_and_says_how_to_record_it() -> None:
    buffer = buffer_of(bootstrap_value=False, final_obs=False)
    (samples,) = buffer.batches
    assert [type(samples), type(samples.env), type(samples.agent)] == [Samples, EnvSamples, AgentSamples]
    for name in ("bootstrap_value", "final_value"):
        assert name not in samples.agent
        with pytest.raises(AttributeError, match=rf"no field '{name}'.*To record it, call .*bootstrap_value=True"):
            getattr(samples.agent, name)
    assert "final_obs" not in samples.env
    with pytest.raises(AttributeError, match="To record it, make the sampler with record_final_obs=True"):
        _ = samples.env.final_obs
    with pytest.raises(AttributeError, match="To record it, make the sampler with env_info="):
        _ = samples.env.env_info
    with pytest.raises(AttributeError, match=r"no field 'rewards'; it has .*prev_done, valid, bootstrap_obs$"):
        _ = samples.env.rewards  # type: ignore[attr-defined]
    columns = BatchColumns(buffer.slots[0], slice(0, B))
    assert columns.bootstrap_value is columns.final_value is columns.final_obs is None
    columns.reward[T] = 3
    columns.done[...] = True
    begin_next_batch(columns)  # carries all the same
    assert columns.episode_start.all()
    assert (columns.reward[0] == 3).all()
    assert not columns.done.any()


@pytest.mark.parametrize("shared", [False, True])
def test_everything_starts_at_zero_and_valid(shared: bool) -> None:
    buffer = buffer_of(shared=shared)
    for name, leaf in buffer.batches[0].leaves():
        assert (leaf == (name == "env.valid")).all(), name
    buffer.memory.close()


@pytest.mark.parametrize(("now", "before"), [("agent.action", "agent.prev_action"), ("env.reward", "env.prev_reward")])
def test_prev_fields_are_the_same_memory_one_step_later(now: str, before: str) -> None:
    samples = buffer_of().batches[0]
    fields = dict(samples.leaves())
    fill(fields[now])
    np.testing.assert_array_equal(fields[before][1:], fields[now][:-1])
    assert not fields[before][0].any()


def test_the_error_for_too_large_a_buffer_names_its_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_memory(monkeypatch, 10, small=0)
    with pytest.raises(ValueError, match="batch_T=5, batch_B=4 needs"):
        buffer_of(shared=True)


# ---- columns -----------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_columns_write_their_own_cells_and_no_others(widths: list[int]) -> None:
    buffer = buffer_of(B=sum(widths))
    bounds = np.cumsum([0, *widths])
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        columns = BatchColumns(buffer.slots[0], slice(int(start), int(stop)))
        assert (columns.batch_T, columns.n_columns) == (T, stop - start)
        fields = "observation", "action", "reward", "final_obs", "final_value", "agent_info", "bootstrap_value"
        for name in (*fields, "policy_version"):
            getattr(columns, name)[...] = rank
    owner = np.repeat(np.arange(len(widths)), widths)
    for name, leaf in buffer.batches[0].leaves():
        if leaf.dtype != np.bool_ and not name.startswith(("env.prev", "agent.prev")):
            column_axis = 0 if name.startswith(PER_COLUMN) else 1
            np.testing.assert_array_equal(np.moveaxis(leaf, column_axis, -1) - owner, 0, err_msg=name)


def test_columns_have_a_row_more_than_the_batch_where_the_next_one_starts() -> None:
    columns = BatchColumns(buffer_of().slots[0], slice(0, B))
    lengths = {name: map_leaves(len, getattr(columns, name)) for name in ("action", "reward", "done", "valid")}
    assert lengths == {"action": T + 1, "reward": T + 1, "done": T, "valid": T}
    assert {length for _, length in columns.observation.map(len).leaves()} == {T + 1}


# ---- begin_batch -------------------------------------------------------------------------------


def snapshot(buffer: SamplesBuffer) -> dict[str, Any]:
    return {name: leaf.copy() for name, leaf in buffer.slots[0].leaves()}


CARRIED = ("action", "reward", "done")
CLEARED = ("terminated", "truncated", "final_value", "final_obs.camera", "final_obs.goal._0")


@pytest.mark.parametrize("columns", [slice(0, B), slice(1, 3)])
def test_a_batch_begins_with_the_last_row_and_cleared_flags_whatever_the_learner_writes(columns: slice) -> None:
    buffer = buffer_of()
    fill(buffer.slots[0])
    last = snapshot(buffer)
    fill(buffer.slots[0].valid, seed=2)
    written = BatchColumns(buffer.slots[0], columns)
    begin_next_batch(written, lambda: fill(buffer.slots[0], seed=1))
    fill(changed := buffer_of().slots[0], seed=1)
    expected = {name: leaf.copy() for name, leaf in changed.leaves()}
    for name in CARRIED:
        expected[name][0, columns] = last[name][T, columns]
    for name in CLEARED:
        expected[name][:, columns] = 0
    expected["done"][1:, columns] = 0
    for name, leaf in snapshot(buffer).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@quick
@given(st.lists(st.tuples(st.integers(0, T - 1), st.integers(0, B - 1))), st.booleans(), st.booleans())
def test_final_obs_is_cleared_where_an_episode_ended_and_everywhere_if_it_was_taken(
    ends: list[tuple[int, int]], nested: bool, is_taken: bool
) -> None:
    buffer = buffer_of() if nested else buffer_of(observation=np.zeros(3, np.float32))
    columns = BatchColumns(buffer.slots[0], slice(0, B))
    samples = for_user(buffer.batches[0], buffer.slots[0])
    for t, b in ends:
        columns.done[t, b] = True
        columns.final_obs[t, b] = 9

    def learn() -> None:
        _ = samples.env.reward, samples.env.done, samples.agent
        samples.env.done[...] = False
        if is_taken:
            samples.env.final_obs[...] = 7

    begin_next_batch(columns, learn)
    assert not any(leaf.any() for _, leaf in NamedArrays(x=columns.final_obs).leaves())
    assert buffer.slots[0].final_obs_taken.tolist() == [is_taken]


@pytest.mark.parametrize(
    "take",
    [
        lambda samples: samples.env.final_obs,
        lambda samples: samples.env["final_obs"],
        lambda samples: samples[0],
        lambda samples: samples.copy(),
        lambda samples: samples.env.to_dict(),
        lambda samples: list(samples.leaves()),
        lambda samples: list(samples.env),
        lambda samples: samples.env.items(),
        lambda samples: copy.copy(samples.env),
        lambda samples: pickle.dumps(samples.env),
        lambda samples: {**samples.env._values},
        lambda samples: samples.env.__setitem__(0, 1),
    ],
)
def test_whoever_takes_final_obs_is_noticed(take: Any) -> None:
    buffer = buffer_of()
    samples = for_user(buffer.batches[0], buffer.slots[0])
    assert "final_obs" in samples.env
    assert not buffer.slots[0].final_obs_taken[0]
    take(samples)
    assert buffer.slots[0].final_obs_taken[0]


def test_final_obs_of_memory_that_others_have_used_is_cleared() -> None:
    buffer = buffer_of()
    fill(buffer.slots[0].final_obs)
    columns = BatchColumns(buffer.slots[0], slice(0, B), is_clean=False)
    columns.begin_batch(FirstRow(columns))
    assert not any(leaf.any() for _, leaf in columns.final_obs.leaves())


def test_a_column_that_was_parked_at_the_end_begins_an_episode() -> None:
    columns = BatchColumns(buffer_of().slots[0], slice(0, B))
    columns.valid[T - 1, 1] = False
    columns.done[T - 1, 2] = True
    begin_next_batch(columns)
    assert columns.episode_start.tolist() == [b in (1, 2) for b in range(B)]
