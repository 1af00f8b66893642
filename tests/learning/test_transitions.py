"""n-step transitions, compared with brute force over stored episodes: which may be drawn, and what they are."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.learning import Frames, Replay

from ..scale import FULL, examples, scaled
from ..support import assert_same
from .streams import DISCOUNT, Stream, in_python, wanted_transition

pytestmark = [pytest.mark.timeout(3600 if FULL else 120), pytest.mark.slow]


def check_all(replay: Replay, stream: Stream, n: int, max_finals: int = 10**9) -> int:
    """Compare every position that was ever appended. Returns how many may be drawn."""
    T, B = replay.contents.shape
    wanted = {}
    for step, b in itertools.product(range(max(stream.end - T, 0), stream.end), range(B)):
        found = wanted_transition(stream, step, b, T=T, n=n, max_finals=max_finals)
        if found is not None:
            wanted[step * B + b] = found
    assert replay.contents.index.tolist() == list(wanted)
    if not wanted:
        return 0
    fields = replay.contents.read(list(wanted)).numpy()
    rows = list(wanted.values())
    assert_same(fields["observation"], stream.observation(np.array([row.stack for row in rows])))
    assert_same(fields["next_observation"], stream.observation(np.array([row.next_stack for row in rows])))
    assert_same(fields["action"], np.array([row.number for row in rows]))
    assert fields["return_"].dtype == np.float32
    np.testing.assert_allclose(fields["return_"], [row.return_ for row in rows], rtol=1e-6, atol=1e-6)
    assert_same(fields["discount"], np.array([row.discount for row in rows], np.float32))
    return len(wanted)


FRAMES = [None, Frames(2), Frames(3, padding="zero"), Frames(4)]


@pytest.mark.parametrize("T", scaled(range(2, 13), (2, 3, 5, 7)))
def test_every_size_offset_window_and_stack_is_exact(T: int) -> None:
    for n, batch_T, frames in itertools.product(range(1, T), scaled(range(1, T + 1), {1, 2, 5, T - 1, T}), FRAMES):
        back = frames.n - 1 if frames else 0
        if batch_T > T or n + back >= T:
            continue
        stream = Stream(T * 1000 + n * 100 + batch_T, 2, frames=frames)
        replay = Replay(2 * T, n, DISCOUNT, frames=frames, max_truncations=2 * T)
        while stream.end < 3 * T:
            replay.append(stream.batch(batch_T))
            check_all(replay, stream, n)


@pytest.mark.filterwarnings("ignore:more than max_truncations:RuntimeWarning")
@pytest.mark.parametrize("version", [nullcontext, in_python])
@examples(25, 500)
@given(data=st.data())
def test_gaps_restarts_parked_columns_and_lost_final_observations(data: st.DataObject, version: Any) -> None:
    seed, T, B, n = (data.draw(st.integers(*bounds)) for bounds in ((0, 2**32), (3, 40), (1, 4), (1, 7)))
    frames, max_finals = data.draw(st.sampled_from(FRAMES)), data.draw(st.sampled_from([1, 3, 1000]))
    p_end, p_restart = data.draw(st.sampled_from([0.02, 0.2, 0.7])), data.draw(st.sampled_from([0.0, 0.3]))
    wait = data.draw(st.booleans())
    n = min(n, T - 1 - (frames.n - 1 if frames else 0))
    if n < 1:
        return
    with version():
        stream = Stream(seed, B, frames=frames, wait=wait, p_end=p_end, p_restart=p_restart, nested=True)
        replay = Replay(T * B, n, DISCOUNT, frames=frames, max_truncations=max_finals)
        has_gap, lost = False, set[int]()
        for _ in range(data.draw(st.integers(1, 8))):
            batch_T = data.draw(st.integers(1, T))
            if data.draw(st.integers(0, 5)) == 0:
                stream.batch(batch_T, lost=True)
                has_gap = True
            else:
                replay.append(stream.batch(batch_T), continues=not has_gap)
                has_gap = False
                check_all(replay, stream, n, max_finals)
                for step, row in enumerate(zip(*stream.history, strict=True)):
                    orders = [each.final_order for each in row if each.final_order >= 0]
                    if step >= stream.end - T:
                        lost |= {order for order in orders if order < stream.n_finals - max_finals}
                assert replay.n_without_final == len(lost)


@pytest.mark.parametrize("version", [nullcontext, in_python])
@pytest.mark.parametrize(("B", "p_end"), [(8, 0.0), (1, 0.5)])
def test_a_gap_is_found_without_being_told_wherever_episodes_end(B: int, p_end: float, version: Any) -> None:
    stream = Stream(0, B, p_end=p_end)
    replay = Replay(B * 1000, 3, DISCOUNT, max_truncations=1000)
    for lost in (False, True, False, False, True, True, False) * 10:
        samples = stream.batch(3, lost=lost)
        if not lost:
            with version():
                replay.append(samples)
            check_all(replay, stream, 3)


def test_lost_final_observations_are_counted_and_said_once() -> None:
    stream = Stream(0, 2, p_end=1.0)
    replay = Replay(100, max_truncations=3)
    replay.append(stream.batch(1))
    assert replay.n_without_final == 0
    with pytest.warns(RuntimeWarning, match="Raise max_truncations"):
        replay.append(stream.batch(40))
    for _ in range(20):
        replay.append(stream.batch(2))  # no second warning, which would be an error
    assert replay.n_without_final > 3


def test_returns_ignore_rewards_after_the_end() -> None:
    stream = Stream(1, 1, p_end=0.0)
    replay = Replay(50, 3, DISCOUNT)
    samples = stream.batch(20)
    samples.env.terminated[4] = samples.env.done[4] = True
    samples.env.prev_done[5] = True
    samples.env.reward[5:] = np.nan
    replay.append(samples)
    assert torch.isfinite(replay.contents.read([2, 3, 4]).return_).all()
