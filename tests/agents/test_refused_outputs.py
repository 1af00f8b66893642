"""What a model must not return, and for which action spaces an agent is not: errors name what there is and what must
be."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.agents import (
    CategoricalPgAgent,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    GaussianPgAgent,
    SquashedGaussianAgent,
)
from penstock.errors import SpaceError

from ..models import act, acting

OBSERVATIONS, DISCRETE, MULTI = spaces.Box(0, 1, (2,)), spaces.Discrete(4), spaces.MultiDiscrete([2, 3])
BOX, BOUNDED = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1, 1, (2,))
INF, NAN, Z = np.inf, np.nan, torch.zeros


class Outputs(nn.Module):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, observation: torch.Tensor) -> Any:
        return self.outputs


def acting_with(cls: Any, space: Any, outputs: Any) -> Any:
    return acting(cls(partial(Outputs, outputs)), OBSERVATIONS, space, range(3))


LOGITS, VALUES = ((3, 5), (3, 1, 4), (4,), (2, 4)), ((), (2,), (3, 2), (1, 3), (3, 1, 1))
NO_PAIR = "must return a tuple (logits, value), got "


@pytest.mark.parametrize(
    ("cls", "space", "outputs", "message"),
    [
        *[(CategoricalPgAgent, DISCRETE, (Z(s), Z(3)), f"logits must have shape (3, 4), got {s}") for s in LOGITS],
        *[
            (CategoricalPgAgent, DISCRETE, (Z(3, 4), Z(s)), f"value must have shape (3,) or (3, 1), got {s}")
            for s in VALUES
        ],
        (CategoricalPgAgent, DISCRETE, Z(3, 4), NO_PAIR + "Tensor"),
        (CategoricalPgAgent, DISCRETE, [Z(3, 4), Z(3)], NO_PAIR + "list"),
        (CategoricalPgAgent, DISCRETE, (Z(3, 4),), NO_PAIR + "tuple of 1"),
        (CategoricalPgAgent, MULTI, (Z(3, 6), Z(3)), "logits must have shape (3, 5), got (3, 6)"),
        (GaussianPgAgent, BOX, (Z(3, 3), Z(3)), "mean must have shape (3, 2), got (3, 3)"),
        (GaussianPgAgent, BOX, (Z(3, 2), Z(3), Z(3)), "log_std must have shape (3, 2) or (2,), got (3,)"),
        (GaussianPgAgent, BOX, (Z(3, 2), Z(3, 2)), "value must have shape (3,) or (3, 1), got (3, 2)"),
        (GaussianPgAgent, BOX, (Z(3, 2),), "(mean, value) or (mean, log_std, value), got tuple of 1: see Gaussian"),
        (GaussianPgAgent, BOX, ([[0.0] * 2] * 3, Z(3)), "mean must be a tensor of shape (3, 2), got list"),
        (SquashedGaussianAgent, BOUNDED, Z(3, 2), "must return a tuple (mean, log_std), got Tensor"),
        (SquashedGaussianAgent, BOUNDED, (Z(3, 2), Z(3, 1)), "log_std must have shape (3, 2), got (3, 1)"),
        (SquashedGaussianAgent, BOUNDED, (Z(3, 2, 2), Z(3, 2)), "mean must have shape (3, 2), got (3, 2, 2)"),
        (DeterministicPgAgent, BOX, Z(3, 3), "action must have shape (3, 2), got (3, 3)"),
        (EpsilonGreedyAgent, DISCRETE, Z(3, 5), "q must have shape (3, 4), got (3, 5)"),
        (EpsilonGreedyAgent, DISCRETE, (Z(3, 4), Z(3, 4)), "q must be a tensor of shape (3, 4), got tuple"),
    ],
)
def test_outputs_of_a_wrong_shape_name_both(cls: Any, space: Any, outputs: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=re.escape(message)):
        act(acting_with(cls, space, outputs), np.zeros((3, 2)))


def with_row(*numbers: float) -> torch.Tensor:
    """Outputs whose second row are these."""
    return torch.tensor([[0.0] * len(numbers), numbers, [0.0] * len(numbers)])


GREEDY = partial(CategoricalPgAgent, greedy_eval=True)


@pytest.mark.parametrize(
    ("cls", "space", "outputs", "message"),
    [
        (GREEDY, DISCRETE, (with_row(0, NAN, 0, 0), Z(3)), r"logits that are not finite: \[ ?0.*nan"),
        (GREEDY, DISCRETE, (with_row(0, INF, 0, 0), Z(3)), r"logits that are not finite: \[ ?0.*inf"),
        (GREEDY, DISCRETE, (with_row(-INF, -INF, -INF, -INF), Z(3)), "not finite"),
        (GREEDY, MULTI, (with_row(0, 0, -INF, -INF, -INF), Z(3)), "not finite"),
        (GaussianPgAgent, BOX, (with_row(0, NAN), Z(3)), "not finite: mean"),
        (GaussianPgAgent, BOX, (with_row(0, INF), Z(3)), "not finite: mean"),
        (DeterministicPgAgent, BOX, with_row(NAN, 0), "not finite"),
        (EpsilonGreedyAgent, DISCRETE, with_row(0, NAN, 0, 0), "returned NaN as q: .*nan"),
    ],
)
def test_outputs_that_are_not_finite_are_an_error_that_shows_them(
    cls: Any, space: Any, outputs: Any, message: str
) -> None:
    agent = acting_with(cls, space, outputs)
    for mode in (agent.sample_mode, agent.eval_mode):
        mode(0)
        with pytest.raises(FloatingPointError, match=message):
            act(agent, np.zeros((3, 2)))


DISCRETE_ONLY = r"needs a Discrete or MultiDiscrete action space, the environment has .*use an"


@pytest.mark.parametrize(
    ("cls", "space", "message"),
    [
        (CategoricalPgAgent, BOX, DISCRETE_ONLY),
        (CategoricalPgAgent, spaces.MultiBinary(2), DISCRETE_ONLY),
        (CategoricalPgAgent, spaces.Dict({"a": DISCRETE}), DISCRETE_ONLY),
        (GaussianPgAgent, DISCRETE, "GaussianPgAgent needs a Box action space of a floating-point type"),
        (GaussianPgAgent, spaces.Box(0, 3, (2,), np.int64), "GaussianPgAgent needs a Box action space of a floating"),
        (GaussianPgAgent, spaces.Dict({"a": BOX}), "GaussianPgAgent needs a Box action space of a floating-point type"),
        (SquashedGaussianAgent, DISCRETE, "SquashedGaussianAgent needs"),
        (SquashedGaussianAgent, spaces.Box(0, INF, (2,)), "SquashedGaussianAgent squashes"),
        (DeterministicPgAgent, DISCRETE, "DeterministicPgAgent needs a Box action space"),
        (partial(DeterministicPgAgent, squash=True), BOX, "DeterministicPgAgent squashes actions into their bounds"),
        (EpsilonGreedyAgent, BOX, "EpsilonGreedyAgent needs a Discrete action space"),
        (EpsilonGreedyAgent, MULTI, "EpsilonGreedyAgent needs a Discrete action space"),
    ],
)
def test_other_spaces_are_refused_with_a_way_out(cls: Any, space: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        acting_with(cls, space, None)
