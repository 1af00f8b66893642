"""Sequences, compared with brute force over stored episodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import ConfigError, NamedArrays
from penstock.replays import Frames, Prioritized, Replay, Sequences

from .streams import DISCOUNT, Stream, can_start, wanted_transition
from .test_drawing import chi_square


def check_all(replay: Replay, stream: Stream, n: int) -> int:
    """Compare every position that was ever appended. Returns how many sequences there are."""
    storage, sequences = replay._storage, replay.sequences
    assert storage is not None
    assert sequences is not None
    T, B, length = storage.ring.T, stream.B, sequences.length
    low, high = storage.places.bounds()
    found = storage.places.positions(storage.places.all_eligible(low, high))
    steps = range(max(stream.end - T, 0), stream.end)
    wanted = [
        s * B + b
        for s, b in itertools.product(steps, range(B))
        if can_start(stream, s, b, T=T, n=n, sequences=sequences)
    ]
    assert found.tolist() == wanted
    if not wanted:
        return 0
    fields = storage.reader.read(found)
    assert fields is not None
    for k, position in enumerate(wanted):
        step, b = divmod(position, B)
        rows = stream.history[b][step : step + length + n]
        number = np.array([row.number for row in rows])
        np.testing.assert_array_equal(
            fields["observation"][:, k], stream.observation(np.array([r.stack for r in rows]))
        )
        np.testing.assert_array_equal(fields["action"][:, k], number)
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(fields[name][:, k], [getattr(row, name) for row in rows])
        np.testing.assert_array_equal(fields["prev_action"][:, k], [row.prev_number for row in rows])
        prev_reward = [
            0.0 if row.prev_number == 0 else before.reward
            for before, row in zip(
                stream.history[b][step - 1 : step + length + n - 1] if step else [rows[0], *rows[:-1]],
                rows,
                strict=True,
            )
        ]
        np.testing.assert_array_equal(fields["prev_reward"][:, k], prev_reward)
        np.testing.assert_array_equal(fields["state"][k], [number[0], -number[0]])
        for t in range(length):
            # Frames before the ring do not matter here: only what the window is.
            target = wanted_transition(stream, step + t, b, T=10**9, n=n)
            reaches_truncation = target is not None and _ends_truncated(stream, step + t, b, n)
            counts = target is not None and not reaches_truncation and t >= sequences.burn_in
            assert fields["mask"][t, k] == counts
            if counts:
                assert target is not None
                np.testing.assert_allclose(fields["return_"][t, k], target.return_, rtol=1e-6, atol=1e-6)
                assert fields["discount"][t, k] == np.float32(target.discount)
                if target.discount:
                    assert rows[fields["next_row"][t, k]].stack == target.next_stack
    return len(wanted)


def _ends_truncated(stream: Stream, step: int, b: int, n: int) -> bool:
    for row in stream.history[b][step : step + n]:
        if row.terminated or row.truncated:
            return not row.terminated
    return False


@pytest.mark.parametrize("T", range(4, 13))
def test_every_size_offset_length_and_interval_is_exact(T: int) -> None:
    n_checked = 0
    for n, length, every, batch_T in itertools.product((1, 2, 4), (1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 3, T)):
        if length + n >= -(-T // every) * every:
            continue
        stream = Stream(T, 2, p_end=0.2)
        replay = Replay(2 * T, n, DISCOUNT, sequences=Sequences(length, length // 2, every), max_truncations=9 * T)
        while stream.end < 3 * T:
            replay.append(stream.batch(batch_T))
            n_checked += check_all(replay, stream, n)
    assert n_checked > 100


@given(
    seed=st.integers(0, 2**32),
    T=st.integers(12, 40),
    n=st.integers(1, 3),
    length=st.integers(1, 6),
    every=st.integers(1, 8),
    frames=st.sampled_from([None, Frames(3), Frames(3, padding="zero")]),
    wait=st.booleans(),
    p_restart=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_gaps_restarts_parked_columns_and_frames(
    seed: int,
    T: int,
    n: int,
    length: int,
    every: int,
    frames: Frames | None,
    wait: bool,
    p_restart: float,
    data: st.DataObject,
) -> None:
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
    storage = replay._storage
    assert storage is not None
    places = storage.places
    index = places.positions(places.all_eligible(*places.bounds()))
    priority = np.random.default_rng(0).exponential(size=len(index)) if prioritized else np.ones(len(index))
    if prioritized:
        replay.update(index, priority)
        with pytest.raises(ConfigError, match="every 4th step"):
            replay.update(index + 2, priority)
    drawn = np.concatenate([replay.sample(100).index.numpy() for _ in range(200)])
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == index.tolist()
    expected = priority**0.5 / (priority**0.5).sum()
    assert chi_square(counts, expected * 20_000) < 4


def test_a_batch_of_sequences_has_time_first() -> None:
    stream = Stream(0, 2)
    replay = Replay(160, 2, DISCOUNT, Prioritized(), Sequences(6, 2, 4), max_truncations=99)
    for _ in range(8):
        replay.append(stream.batch(10))
    batch = replay.sample(5)
    assert batch.observation.shape == (8, 5, 2)
    assert batch.return_.shape == batch.mask.shape == batch.next_row.shape == (6, 5)
    assert batch.state.shape == (5, 2)
    assert batch.index.shape == batch.weight.shape == (5,)


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


def test_states_that_are_recorded_once_per_batch_are_refused_in_between() -> None:
    def batch(stream: Stream) -> object:
        samples = stream.batch(8)
        samples.agent.agent_info.prev_rnn_state[1:] = 0
        return samples

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
