"""Games in lock-step whose lists and flags are unusual: who joins, who ends and who waits, against the plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import RandomAgent, SerialSampler
from penstock.envs.toy import ScriptedGame

from ..against_loop import compare
from ..toy_games import OPENING, STORY, split_agents

SIZES: dict[str, Any] = {"batch_T": 7, "batch_B": 2, "n_batches": 3}


@pytest.mark.parametrize("n_policies", [1, 2])
@pytest.mark.parametrize("debug", [False, True])
def test_the_story_of_a_game(n_policies: int, debug: bool) -> None:
    own = split_agents(n_policies)
    policy_of = {"policy_of": own["policy_of"]} if n_policies == 2 else {}
    game = partial(ScriptedGame, 3, STORY, OPENING)
    compare(SerialSampler, game, lambda: own["agent"], sampler={"debug": debug}, **policy_of, **SIZES)


class Listing(ScriptedGame):
    """Lists agents as `lists` says for each step, and flags those in `ends`."""

    def __init__(self, lists: list[list[str]], ends: dict[int, list[str]]) -> None:
        super().__init__(2, [{}] * (len(lists) + 1), ["a0"])
        self.lists, self.ends = [*lists, []], ends

    def step(self, actions: Any) -> Any:
        assert actions.keys() <= {"a0", "a1"}
        self.t += 1
        self.agents = self.lists[self.t - 1]
        seen = {agent: np.full(4, self.t, np.float32) for agent in self.possible_agents}
        flagged = self.possible_agents if not self.agents else self.ends.get(self.t, [])
        return seen, {}, dict.fromkeys(flagged, True), {}, {}


def joined_at(lists: list[list[str]], ends: dict[int, list[str]]) -> list[int]:
    """The steps before which a1 joins the first game."""
    ((samples, _),) = compare(SerialSampler, partial(Listing, lists, ends), RandomAgent, **{**SIZES, "n_batches": 1})
    return np.flatnonzero(samples.prev_done[: len(lists) + 1, 1]).tolist()


def test_who_is_flagged_when_it_is_listed_first_does_not_join_and_may_come_later() -> None:
    lists = [["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]]
    assert joined_at(lists, {1: ["a1"]}) == [4], "it joins when it was not listed in between"


def test_who_was_listed_after_its_end_can_come_back() -> None:
    lists = [["a0", "a1"], ["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]]
    assert joined_at(lists, {2: ["a1"]}) == [1, 5]
