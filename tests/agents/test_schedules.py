"""Settings that change with itr and from environment to environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.agents.schedules import ColumnSetting, ExponentialSchedule, LinearSchedule
from penstock.errors import ConfigError


def test_a_linear_schedule_goes_from_start_to_end_and_stays() -> None:
    schedule = LinearSchedule(1.0, 0.2, n_itrs=4)
    assert [schedule(itr) for itr in (0, 1, 2, 4, 5, 999)] == pytest.approx([1, 0.8, 0.6, 0.2, 0.2, 0.2])
    assert schedule(10**9) == 0.2
    for n_itrs in (0, -5, "3"):
        with pytest.raises(ConfigError, match=f"n_itrs of a LinearSchedule must be at least 1, got {n_itrs!r}"):
            LinearSchedule(1.0, 0.5, n_itrs=n_itrs)  # type: ignore[arg-type]


def test_an_exponential_schedule_decays_to_its_end() -> None:
    schedule = ExponentialSchedule(1.0, 0.5, end=0.2)
    assert [schedule(itr) for itr in range(4)] == [1, 0.5, 0.25, 0.2]


@pytest.mark.parametrize(
    ("value", "columns", "n_envs", "expected"),
    [
        (0.5, None, None, [0.5, 0.5]),
        (0.5, range(4, 7), 9, [0.5] * 3),
        ([0.1, 0.2, 0.3, 0.4, 0.5], range(3, 5), 5, [0.4, 0.5]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [0, 2, 4], 5, [0.1, 0.3, 0.5]),
        ([0.1, 0.2], None, None, [0.1, 0.1]),  # not told yet: all alike
        (lambda itr: 1 / (1 + itr), None, None, [0.25, 0.25]),
        (lambda itr: [itr, 2 * itr], [1], 2, [6]),
    ],
)
def test_a_setting_is_that_of_the_columns_environments(value: Any, columns: Any, n_envs: Any, expected: Any) -> None:
    assert ColumnSetting("x", value).at(3, len(expected), columns, n_envs).tolist() == expected


def test_the_spread_is_that_of_ape_x() -> None:
    setting, n = ColumnSetting("epsilon", 0.4, highest=1.0, spread=7), 8
    expected = [0.4 ** (1 + 7 * i / (n - 1)) for i in range(n)]
    np.testing.assert_allclose(setting.at(0, n, range(n), n), expected)
    np.testing.assert_allclose(setting.at(0, 3, range(5, 8), n), expected[5:])
    assert setting.at(0, 1, range(1), 1).tolist() == [0.4]
    assert setting.at(0, 2, None, None).tolist() == [0.4, 0.4]


def test_a_list_cannot_be_spread() -> None:
    with pytest.raises(ConfigError, match=r"with spread, epsilon must be one number, got \[0.1, 0.2\]"):
        ColumnSetting("epsilon", [0.1, 0.2], spread=7)


def test_a_sequence_of_a_wrong_length_names_both() -> None:
    with pytest.raises(ConfigError, match="sigma has 2 values for 3 environments"):
        ColumnSetting("sigma", [0.1, 0.2]).at(0, 3, range(3), 3)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, np.nan, [0.1, 2.0]], ids=str)
def test_values_out_of_range_are_refused_where_they_are_given(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"epsilon must be between 0 and 1, got"):
        ColumnSetting("epsilon", wrong, highest=1.0)


@pytest.mark.parametrize("wrong", ["much", [], [[0.1]], {}], ids=str)
def test_what_is_no_setting_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="sigma must be a number, or one per environment, or a function of itr"):
        ColumnSetting("sigma", wrong)


def test_what_a_schedule_gives_is_checked_with_its_itr() -> None:
    with pytest.raises(ConfigError, match=r"sigma must be 0 or more, got -1 at itr 7"):
        ColumnSetting("sigma", lambda itr: -1).at(7, 1, None, None)
