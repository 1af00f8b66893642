"""Sequences, compared with brute force over stored episodes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, NamedArrays
from penstock.learning import Frames, Prioritized, Replay, Sequences

from ..scale import examples, scaled
from .streams import DISCOUNT, Stream, can_start, wanted_transition
from .test_drawing import p_value

pytestmark = pytest.mark.slow


def check_all(replay: Replay, stream: Stream, n: int) -> int:
    """Compare every position that was ever appended. Returns how many sequences there are."""
    sequences = replay.sequences
    assert sequences is not None
    (T, B), length, found = replay.contents.shape, sequences.length, replay.contents.index
    steps = range(max(stream.end - T, 0), stream.end)
    wanted = [
        s * B + b
        for s, b in itertools.product(steps, range(B))
        if can_start(stream, s, b, T=T, n=n, sequences=sequences)
    ]
    assert found.tolist() == wanted
    if not wanted:
        return 0
    fields = replay.contents.read(found).numpy()
    rows = np.empty((len(wanted), length + n), object)
    prev_reward = np.zeros(rows.shape)
    mask, return_, discount = (np.zeros((len(wanted), length)) for _ in range(3))
    next_number = np.zeros((len(wanted), length), np.int64)
    for k, position in enumerate(wanted):
        step, b = divmod(position, B)
        history = stream.history[b]
        rows[k] = history[step : step + length + n]
        for t, row in enumerate(rows[k]):
            prev_reward[k, t] = history[step + t - 1].reward if row.prev_number else 0
        for t in range(length):
            # Whether older frames are in the ring does not matter here: only what the window is.
            target = wanted_transition(stream, step + t, b, T=10**9, n=n)
            if target is not None and not _ends_truncated(stream, step + t, b, n) and t >= sequences.burn_in:
                mask[k, t], return_[k, t], discount[k, t] = True, target.return_, target.discount
                next_number[k, t] = target.next_stack[-1]

    def field(name: str) -> Any:
        return np.vectorize(lambda row: getattr(row, name))(rows).T

    stacks = np.array([[row.stack for row in line] for line in rows]).swapaxes(0, 1)
    number = field("number")
    expected = {name: field(name) for name in ("reward", "terminated", "truncated")}
    expected |= {"observation": stream.observation(stacks), "action": number, "prev_action": field("prev_number")}
    expected |= {"prev_reward": prev_reward.T, "mask": mask.T, "state": np.stack([number[0], -number[0]], -1)}
    for name, values in expected.items():
        np.testing.assert_array_equal(fields[name], values, err_msg=name)
    counts = mask.T != 0
    np.testing.assert_allclose(fields["return_"][counts], return_.T[counts], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(fields["discount"][counts], discount.T[counts].astype(np.float32))
    has_next = counts & (discount.T > 0)
    after = np.take_along_axis(number, fields["next_row"], 0)
    np.testing.assert_array_equal(after[has_next], next_number.T[has_next])
    return len(wanted)


def _ends_truncated(stream: Stream, step: int, b: int, n: int) -> bool:
    for row in stream.history[b][step : step + n]:
        if row.terminated or row.truncated:
            return not row.terminated
    return False


@pytest.mark.parametrize("T", scaled(range(4, 13), (4, 9)))
def test_every_size_offset_length_and_interval_is_exact(T: int) -> None:
    n_checked = 0
    ns, lengths, intervals = scaled((range(1, T), range(1, T), range(1, 5)), ((1, 3), (1, 2, 4), (1, 2, 3)))
    stacks = scaled((None, Frames(2), Frames(3, padding="zero")), (None,))
    for n, length, every, batch_T, frames in itertools.product(ns, lengths, intervals, (1, 3, T), stacks):
        if length + n + (frames.n - 1 if frames else 0) >= -(-T // every) * every:
            continue
        stream = Stream(T, 2, p_end=0.2, frames=frames)
        sequences = Sequences(length, length // 2, every)
        replay = Replay(2 * T, n, DISCOUNT, sequences=sequences, frames=frames, max_truncations=9 * T)
        while stream.end < 3 * T:
            replay.append(stream.batch(batch_T))
            n_checked += check_all(replay, stream, n)
    assert n_checked > 100


@examples(20, 200)
@given(data=st.data())
def test_gaps_restarts_parked_columns_and_frames(data: st.DataObject) -> None:
    bounds = (0, 2**32), (12, 40), (1, 3), (1, 6), (1, 8)
    seed, T, n, length, every = (data.draw(st.integers(*each)) for each in bounds)
    frames = data.draw(st.sampled_from([None, Frames(3), Frames(3, padding="zero")]))
    wait, p_restart = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.3]))
    stream = Stream(seed, 3, frames=frames, wait=wait, p_restart=p_restart)
    replay = Replay(3 * T, n, DISCOUNT, sequences=Sequences(length, 0, every), frames=frames, max_truncations=999)
    has_gap = False
    for _ in range(data.draw(st.integers(1, 8))):
        batch_T = data.draw(st.integers(1, T))
        if data.draw(st.integers(0, 5)) == 0:
            stream.batch(batch_T, lost=True)
            has_gap = True
        else:
            replay.append(stream.batch(batch_T), continues=not has_gap)
            has_gap = False
            check_all(replay, stream, n)


@pytest.mark.parametrize("prioritized", [None, Prioritized(alpha=0.5)])
def test_sequences_are_drawn_uniformly_or_by_priority(prioritized: Prioritized | None) -> None:
    stream = Stream(0, 2, p_end=0.1)
    replay = Replay(160, 2, DISCOUNT, prioritized, Sequences(6, 2, 4), max_truncations=99, seed=0)
    for _ in range(20):
        replay.append(stream.batch(10))
    index = replay.contents.index
    priority = np.random.default_rng(0).exponential(size=len(index)) if prioritized else np.ones(len(index))
    if prioritized:
        replay.update(index, priority)
        with pytest.raises(ConfigError, match="every 4th step"):
            replay.update(index + 2, priority)
        assert replay.sample(5).weight.shape == (5,)
    drawn = np.concatenate([replay.sample(100).index.numpy() for _ in range(200)])
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == index.tolist()
    expected = priority**0.5 / (priority**0.5).sum()
    np.testing.assert_allclose(replay.contents.probability, expected)
    assert p_value(counts, expected * 20_000) > 1e-3


def test_agents_without_a_state_have_none_in_the_batch() -> None:
    stream = Stream(0, 2)
    replay = Replay(160, sequences=Sequences(6), max_truncations=99)
    for _ in range(4):
        samples = stream.batch(10)
        replay.append(
            type(samples)(
                env=samples.env, agent=type(samples.agent)({**dict(samples.agent.items()), "agent_info": NamedArrays()})
            )
        )
    assert "state" not in replay.sample(3)


def marked(samples: Any, *, row_0_only: bool) -> Any:
    """The same samples, of an agent with `record_state="batch"`; or with recorded states that are all zero."""
    info = dict(samples.agent.agent_info.items())
    state = info["prev_rnn_state"]
    state[1 if row_0_only else 0 :] = 0
    if row_0_only:
        info["has_rnn_state"] = np.broadcast_to(np.arange(len(state))[:, None] == 0, state.shape[:2])
    agent = {**dict(samples.agent.items()), "agent_info": NamedArrays(info)}
    return type(samples)(env=samples.env, agent=type(samples.agent)(agent))


def test_recorded_states_may_all_be_zero() -> None:
    stream = Stream(0, 2, p_end=0.0)
    replay = Replay(160, sequences=Sequences(6, state_every=4), max_truncations=99)
    for _ in range(5):
        replay.append(marked(stream.batch(8), row_0_only=False))
    assert (replay.sample(5).state == 0).all()


def test_states_that_are_recorded_once_per_batch_are_refused_in_between() -> None:
    def batch(stream: Stream) -> object:
        return marked(stream.batch(8), row_0_only=True)

    with pytest.raises(ConfigError, match="state_every=batch_T"):
        Replay(160, sequences=Sequences(6, state_every=4)).append(batch(Stream(0, 2, p_end=0.0)))
    replay = Replay(160, sequences=Sequences(6, state_every=8), max_truncations=99)
    stream = Stream(0, 2, p_end=0.0)
    for _ in range(5):
        replay.append(batch(stream))
    assert (replay.sample(5).state != 0).any()


@pytest.mark.parametrize("options", [{"length": 0}, {"burn_in": 80}, {"state_every": 0}, {"burn_in": -1}])
def test_impossible_sequences_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sequences(**options)
