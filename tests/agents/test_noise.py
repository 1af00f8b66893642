"""Column noise: what a column gets depends on its own stream and on how many rows have gone by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.agents import ColumnNoise, OrnsteinUhlenbeck, noise
from penstock.buffers import NamedArrays

from ..support import assert_same


def numbers(rng: np.random.Generator, n: int) -> Any:
    return rng.random((n, 2))


def nested(rng: np.random.Generator, n: int) -> Any:
    return NamedArrays(a=rng.integers(0, 1000, n), b=NamedArrays(c=rng.random((n, 3))))


def generators(columns: range) -> list[np.random.Generator]:
    return [np.random.default_rng([5, column]) for column in columns]


def rows_of(source: ColumnNoise, n: int) -> list[Any]:
    return [source.next_row().copy() for _ in range(n)]


@pytest.mark.parametrize("n_columns", [1, 8])
@pytest.mark.parametrize("chunk", [1, 7, 128, 1000])
def test_a_columns_rows_are_its_streams_numbers_in_order_however_many_are_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int, n_columns: int
) -> None:
    monkeypatch.setattr(noise, "_CHUNK", chunk)
    rows = np.stack(rows_of(ColumnNoise(generators(range(n_columns)), numbers), 300))
    for column, rng in enumerate(generators(range(n_columns))):
        np.testing.assert_array_equal(rows[:, column], numbers(rng, 300))


def test_nested_draws_give_nested_rows() -> None:
    rows = rows_of(ColumnNoise(generators(range(2)), nested), 200)
    for column, rng in enumerate(generators(range(2))):
        # Drawn 128 at a time: one field's numbers before the other's.
        expected = [nested(rng, 128), nested(rng, 128)]
        for t, row in enumerate(rows):
            drawn = expected[t // 128][t % 128]
            assert row.a[column] == drawn.a
            assert row.b.c[column].tolist() == drawn.b.c.tolist()


@pytest.mark.parametrize("draw", [numbers, nested])
def test_a_row_stays_as_it_was_while_the_next_128_are_drawn(draw: Any) -> None:
    source = ColumnNoise(generators(range(2)), draw)
    kept: list[tuple[Any, Any]] = []
    for _ in range(400):
        row = source.next_row()
        kept = [*kept[-128:], (row, row.copy())]
        for given_out, as_it_was in (kept[0], kept[-2] if len(kept) > 1 else kept[0]):
            assert_same(given_out, as_it_was)


# ---- Ornstein-Uhlenbeck ------------------------------------------------------------------------


@pytest.mark.parametrize(("theta", "dt"), [(0.15, 1.0), (0.5, 0.5), (1.0, 1.0)])
def test_the_process_has_the_deviation_and_the_correlation_that_it_documents(theta: float, dt: float) -> None:
    process, sigma = OrnsteinUhlenbeck(400, (), theta, dt), 0.3
    normals = np.random.default_rng(0).standard_normal((600, 400))
    rows = np.stack([process.next_row(row, np.float64(sigma)) for row in normals])[100:]
    expected = sigma / np.sqrt(theta * (2 - theta * dt))
    assert abs(rows.mean()) < 0.03 * expected
    assert rows.std() == pytest.approx(expected, rel=0.03)
    for k in (1, 3):
        assert np.corrcoef(rows[:-k].ravel(), rows[k:].ravel())[0, 1] == pytest.approx((1 - theta * dt) ** k, abs=0.02)


def test_a_column_that_is_reset_starts_from_zero_and_the_others_go_on() -> None:
    process, zero, ones = OrnsteinUhlenbeck(3, (2,), 0.25, 1.0), np.zeros((3, 2)), np.ones((3, 2))
    sigma = np.array([[1.0], [2.0], [4.0]])
    first = process.next_row(ones, sigma)
    assert first.tolist() == [[1, 1], [2, 2], [4, 4]]
    process.reset_one(1)
    assert process.next_row(zero, sigma).tolist() == [[0.75, 0.75], [0, 0], [3, 3]]


def test_columns_that_go_apart_and_together_again_get_what_they_would_have_got() -> None:
    together, apart = (ColumnNoise(generators(range(4)), numbers) for _ in range(2))
    wanted = np.stack([together.next_row() for _ in range(301)])
    first = apart.next_row()
    kept = first.copy()
    at = np.ones(4, int)
    order = np.random.default_rng(0)
    while at.min() < 260:
        columns = np.flatnonzero(order.random(4) < 0.5)
        columns = columns[at[columns] < 300]
        if len(columns):
            np.testing.assert_array_equal(apart.next_row(columns), wanted[at[columns], columns])
            at[columns] += 1
    np.testing.assert_array_equal(first, kept)  # what was handed out has not changed
    for column in range(4):
        for _ in range(at[column], 300):
            apart.next_row(np.array([column]))
    np.testing.assert_array_equal(apart.next_row(), wanted[300])


def test_a_column_with_a_new_stream_begins_it_and_the_others_go_on() -> None:
    source = ColumnNoise(generators(range(3)), numbers)
    rows_of(source, 5)
    source.reseed(np.array([1]), generators(range(7, 8)))
    rows = np.stack(rows_of(source, 200))
    for column, rng, n_before in zip(
        range(3), map(np.random.default_rng, ([5, 0], [5, 7], [5, 2])), (5, 0, 5), strict=True
    ):
        np.testing.assert_array_equal(rows[:, column], numbers(rng, n_before + 200)[n_before:])
