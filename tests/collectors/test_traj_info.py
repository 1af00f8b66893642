"""TrajInfo: the record of one trajectory, stepped by hand."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.collectors import TrajInfo
from penstock.errors import ConfigError

REWARDS = st.lists(st.one_of(st.just(0.0), st.floats(-100, 100)), max_size=20)


def stepped(rewards: list[Any], **kwargs: Any) -> TrajInfo:
    info = TrajInfo(**kwargs)
    for reward in rewards:
        info.step(None, None, reward, False, False, None, {})
    return info


@given(REWARDS, st.sampled_from([1.0, 0.9, 0.0]))
def test_the_figures_are_those_of_the_rewards(rewards: list[float], discount: float) -> None:
    info = stepped(rewards, discount=discount)
    assert info.Length == len(rewards)
    assert info.Return == pytest.approx(sum(rewards))
    assert info.NonzeroRewards == sum(reward != 0 for reward in rewards)
    assert info.DiscountedReturn == pytest.approx(sum(discount**t * reward for t, reward in enumerate(rewards)))


@given(REWARDS)
def test_undiscounted_is_the_default(rewards: list[float]) -> None:
    info = stepped(rewards)
    assert info.DiscountedReturn == info.Return


@pytest.mark.parametrize(
    "number", [float, int, bool, np.float32, np.float64, np.int64, np.array], ids=lambda n: n.__name__
)
def test_figures_are_plain_numbers_whatever_kind_the_reward_is(number: Any) -> None:
    info = stepped([number(1), number(0), number(1)])
    assert json.loads(json.dumps(vars(info)))["NonzeroRewards"] == 2
    assert (type(info.Length), type(info.Return), type(info.DiscountedReturn)) == (int, float, float)


def test_the_end_of_a_trajectory_changes_nothing() -> None:
    info = stepped([1.0, 2.0])
    before = dict(vars(info))
    info.terminate("final observation")
    assert vars(info) == before


class Own(TrajInfo):
    """Adds a figure and a private attribute."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.Scaled = 0.0
        self._factor = factor

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.Scaled += self._factor * reward


def test_a_restored_object_has_the_class_and_attributes_and_steps_on() -> None:
    original = Own(factor=3.0, discount=0.5)
    original.step(None, None, 2.0, False, False, None, {})
    twin = Own.restore(pickle.loads(pickle.dumps(vars(original))))
    assert type(twin) is Own
    assert vars(twin) == vars(original)
    for info in (original, twin):
        info.step(None, None, 1.0, True, False, None, {})
    assert (twin.Scaled, twin.DiscountedReturn) == (9.0, 2.5) == (original.Scaled, original.DiscountedReturn)


def test_restoring_shares_nothing_with_the_attributes_given() -> None:
    attributes = {"Length": 1}
    twin = TrajInfo.restore(attributes)
    twin.Length = 2
    assert attributes == {"Length": 1}


def test_repr_shows_the_record_and_hides_what_is_private() -> None:
    assert repr(Own(2.0)) == "Own(Length=0, Return=0.0, NonzeroRewards=0, DiscountedReturn=0.0, Scaled=0.0)"


@pytest.mark.parametrize("discount", ["0.9", None])
def test_a_discount_that_is_no_number_is_refused(discount: Any) -> None:
    with pytest.raises(ConfigError, match="discount must be a number, got"):
        TrajInfo(discount)
