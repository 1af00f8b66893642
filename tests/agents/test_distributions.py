"""The arithmetic of distributions against torch.distributions, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.agents import distributions
from penstock.agents.distributions import BoxActions, choose, gaussian_log_prob, tanh_log_slope

from ..scale import examples

quick = examples(20, 60)
needs_compiler = pytest.mark.skipif(bool(distributions.WHY_NOT_COMPILED), reason="was built without a C compiler")


@quick
@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(-50, 50)), st.data())
def test_choosing_inverts_the_cumulative_distribution(logits: np.ndarray, data: st.DataObject) -> None:
    uniform = np.array(
        data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=len(logits), max_size=len(logits)))
    )
    index, log_prob = choose(logits, uniform)
    distribution = torch.distributions.Categorical(logits=torch.from_numpy(logits))
    np.testing.assert_allclose(log_prob, distribution.log_prob(torch.from_numpy(index)).numpy(), atol=1e-12)
    rows, cumulative = np.arange(len(logits)), distribution.probs.cumsum(1).numpy()
    below = np.where(index > 0, cumulative[rows, index - 1], 0)
    assert (below <= uniform + 1e-12).all()
    assert (uniform <= cumulative[rows, index] + 1e-12).all()


@needs_compiler
@given(st.data(), st.integers(0, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_the_compiled_choice_is_numpys_bit_for_bit(data: st.DataObject, rows: int, n: int, seed: int) -> None:
    dtype, scale = data.draw(st.sampled_from([np.float32, np.float64])), data.draw(st.sampled_from([1e-3, 1, 30, 1e30]))
    is_part, is_greedy = data.draw(st.booleans()), data.draw(st.booleans())
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, scale, (rows, n + 2))).astype(dtype)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 1] = 0
    if is_greedy:
        logits[:, n] = logits[:, 1:n].max(axis=1, initial=0)  # the last column ties with the largest of the others
    logits = logits[:, 1:-1] if is_part else logits[:, 1:-1].copy()
    uniform = None if is_greedy else rng.random(rows)
    found = choose(logits, uniform)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shift_rows", "draw_rows"):
            assert getattr(distributions, name) is not distributions.PYTHON[name]
            patch.setattr(distributions, name, distributions.PYTHON[name])
        expected = choose(logits, uniform)
    for ours, numpys in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (numpys.dtype, numpys.shape, numpys.tobytes())


@needs_compiler
def test_the_compiled_choice_leaves_unusual_arguments_to_numpy() -> None:
    logits = np.zeros((2, 3), np.float32)
    for unusual in (logits[0], logits.astype(np.float16), logits.astype(">f4"), logits[:, :0], [[0.0]], None):
        assert distributions.shift_rows(unusual) is None
    for value in (np.nan, np.inf):
        bad = logits.copy()
        bad[1, 2] = value
        assert distributions.shift_rows(bad) is None
    assert distributions.shift_rows(np.full((1, 2), -np.inf)) is None
    uniform = np.zeros(2)
    for weights, numbers, shifted in (
        (logits, uniform[:1], logits),
        (logits, uniform.astype(np.float32), logits),
        (logits, uniform, logits.astype(np.float64)),
        (logits, uniform, logits[:, :2]),
        (np.broadcast_to(np.float32(1), (2, 3)), uniform, logits),
        (np.ones((2, 3), np.float32), None, np.ones((2, 3), np.float32)),  # nothing is the largest
        (np.ones((2, 3), np.float32), np.array([0.5, 1.0]), logits),  # a uniform number is below 1
    ):
        assert distributions.draw_rows(weights, numbers, shifted) is None
    with pytest.raises(TypeError, match="expected 3 arguments, got 2"):
        distributions.draw_rows(logits, uniform)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_no_uniform_number_chooses_what_has_no_probability(dtype: type, n: int) -> None:
    rng = np.random.default_rng(n)
    logits = rng.normal(0, 3, (500, n + 1)).astype(dtype)
    logits[:, -1] = -np.inf
    assert choose(logits, np.full(500, 1 - 2**-53))[0].max() < n
    assert choose(logits[:, ::-1].copy(), np.zeros(500))[0].min() > 0


def test_without_noise_the_first_of_the_largest_is_chosen() -> None:
    index, log_prob = choose(np.array([[0.0, 1.0, 1.0], [2.0, 0.0, 2.0]]), None)
    assert index.tolist() == [1, 0]
    np.testing.assert_allclose(np.exp(log_prob), [np.e / (2 * np.e + 1), np.e**2 / (2 * np.e**2 + 1)])


@pytest.mark.parametrize(
    ("mean", "log_std"), [(np.nan, 0), (np.inf, 0), (0, np.nan), (0, np.inf), (0, -np.inf), (np.inf, 5)]
)
def test_a_distribution_that_is_not_finite_is_an_error_that_shows_it(mean: float, log_std: float) -> None:
    means, log_stds = np.zeros((2, 1)), np.zeros((2, 1))
    means[1], log_stds[1] = mean, log_std
    with pytest.raises(FloatingPointError, match=r"not finite: mean \[.*\], log_std \[.*\] \(column 1\)"):
        gaussian_log_prob(means, means, log_stds)


def test_the_slope_of_tanh_is_exact_far_out_too() -> None:
    x = np.array([-300.0, -20.0, -1.0, 0.0, 1e-3, 3.0, 50.0])
    expected = torch.distributions.TanhTransform().log_abs_det_jacobian(torch.from_numpy(x), torch.zeros(7)).numpy()
    np.testing.assert_allclose(tanh_log_slope(x), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.exp(tanh_log_slope(x[2:6])), 1 - np.tanh(x[2:6]) ** 2)


# ---- BoxActions: bounds of every kind, in the form that agents compute with ----------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_largest_numbers_of_a_type_do_not_overflow(dtype: Any) -> None:
    limit = np.finfo(dtype).max
    box = BoxActions(spaces.Box(-limit, limit, (2,), dtype), "A", bounded=True)
    corners = box.scale(np.array([[-1.0, 1.0]]))
    assert corners.tolist() == [[-limit, limit]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_squashed_actions_lie_in_the_space_whatever_the_bounds(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=(3, 2)).astype(dtype)
    space = spaces.Box(low, low + np.abs(rng.normal(size=(3, 2))).astype(dtype), dtype=dtype)
    box = BoxActions(space, "A", bounded=True)
    for row in box.scale(rng.choice([-1.0, 0.0, 0.3, 1.0], size=(50, 3, 2))):
        assert space.contains(row)


def test_tensors_are_scaled_alike_and_with_gradients() -> None:
    box = BoxActions(spaces.Box(np.float32([-1, 0]), np.float32([3, 10])), "A", bounded=True)
    x = torch.tensor([[0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    action = box.scale_torch(x)
    np.testing.assert_allclose(action.detach().numpy(), box.scale(x.detach().numpy()))
    action.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 5]]
