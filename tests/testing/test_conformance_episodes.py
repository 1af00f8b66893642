"""The kits for evaluation collectors and trajectory infos: good ones pass, broken ones are caught."""

import os
from typing import Any

import numpy as np
import pytest

import penstock.testing
from penstock import BaseEvalCollector, EvalCollector, TrajInfo
from penstock.envs import CountingEnv
from penstock.testing import ConformanceError, check_eval_collector, check_traj_info, episode_rules


def test_all_names_exist_and_are_sorted() -> None:
    # As ruff sorts them: constants, then classes, then functions.
    names = penstock.testing.__all__
    assert list(names) == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(getattr(penstock.testing, name) is not None for name in names)


# ---- evaluation ----------------------------------------------------------------------------


def test_the_stock_collector_keeps_all_rules() -> None:
    check_eval_collector(EvalCollector, CountingEnv)
    check_eval_collector(EvalCollector, "Pendulum-v1", n_workers=(3,))


class GoesOn(EvalCollector):
    def begin_evaluation(self, itr: int) -> None:
        if self._n_evaluations:
            self.agent.eval_mode(itr)
        else:
            super().begin_evaluation(itr)


class TakesItsTime(EvalCollector):
    def collect_evaluation(self, itr: int) -> None:
        self.max_T = 45
        super().collect_evaluation(itr)


class CountsTwice(EvalCollector):
    def begin_evaluation(self, itr: int) -> None:
        super().begin_evaluation(itr)
        self.tracker.preload(0, [1.0])


class Draws(EvalCollector):
    def begin_evaluation(self, itr: int) -> None:
        super().begin_evaluation(itr)
        self.max_T = int(np.random.default_rng().integers(5, 40))


class HangsOnColumns(EvalCollector):
    def begin_evaluation(self, itr: int) -> None:
        super().begin_evaluation(itr)
        self.max_T = 10 * len(self.envs)


EVAL_BROKEN: list[tuple[type[BaseEvalCollector], str, str]] = [
    (GoesOn, "an_evaluation_begins_anew", r"itr=8, eval_mode was called with \[8\] and of 4 environments \[\]"),
    (TakesItsTime, "an_evaluation_is_no_longer_than_it_may_be", r"45 steps of environment 0 .* max_T=40"),
    (CountsTwice, "an_evaluation_hands_over_what_ended", r"trajectory \d+ of the evaluation itr=5 has Length="),
    (Draws, "one_seed_gives_one_evaluation", r"in two runs with one seed"),
    (HangsOnColumns, "one_seed_gives_one_evaluation", r"in 2 workers, itr=5"),
]


@pytest.mark.parametrize(("cls", "rule", "words"), EVAL_BROKEN, ids=[entry[0].__name__ for entry in EVAL_BROKEN])
def test_what_breaks_a_rule_of_evaluation_is_caught(cls: type[BaseEvalCollector], rule: str, words: str) -> None:
    with pytest.raises(ConformanceError, match=f"(?s){words}") as caught:
        check_eval_collector(cls, CountingEnv)
    assert caught.value.rule == rule, str(caught.value)


def test_an_evaluation_that_disturbs_training_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import ResetCollector

    training: list[Any] = []
    start_envs = ResetCollector.start_envs

    def remember(self: Any) -> None:
        training[:] = [self]
        start_envs(self)

    monkeypatch.setattr(ResetCollector, "start_envs", remember)

    class Disturbs(EvalCollector):
        def begin_evaluation(self, itr: int) -> None:
            super().begin_evaluation(itr)
            training[0].reset_column(0)

    with pytest.raises(ConformanceError, match="with and without an evaluation before it") as caught:
        check_eval_collector(Disturbs, CountingEnv, n_workers=())
    assert caught.value.rule == "an_evaluation_leaves_training_alone"


# ---- trajectory infos ----------------------------------------------------------------------


class Longest(TrajInfo):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.Highest = 0.0
        self.Observations: list[Any] = []
        self._scale = scale

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.Highest = max(self.Highest, self._scale * reward)

    def terminate(self, final_observation: Any) -> None:
        self.Observations = [final_observation]


class CountsNothing(Longest):
    def step(self, *args: Any) -> None:
        pass


class KnowsItsHome(Longest):
    def terminate(self, final_observation: Any) -> None:
        self.Home = os.getpid()


class KeepsTheInfo(Longest):
    def step(self, *args: Any) -> None:
        super().step(*args)
        self.Info = args[-1]


def test_a_trajectory_info_of_ones_own_keeps_all_rules() -> None:
    check_traj_info(Longest, CountingEnv, traj_info_kwargs={"scale": 2.0})
    check_traj_info(TrajInfo, CountingEnv)


@pytest.mark.parametrize(
    ("cls", "rule", "words"),
    [
        (CountsNothing, "a_trajectory_counts_as_the_stock_one_does", r"Length is 0 in trajectory 0; it should be \d"),
        (KeepsTheInfo, "a_trajectory_keeps_nothing_that_changes", r"Info of trajectory 0 is \{'count': \d+.*, and \{"),
        (KnowsItsHome, "a_trajectory_travels", r"Home of trajectory 0 is \d+ here and \d+ from a worker"),
    ],
)
def test_what_breaks_a_rule_of_trajectories_is_caught(cls: type[TrajInfo], rule: str, words: str) -> None:
    with pytest.raises(ConformanceError, match=words) as caught:
        check_traj_info(cls, CountingEnv)
    assert caught.value.rule == rule


def test_every_rule_states_itself_and_is_shown_to_catch_something() -> None:
    rules = [*episode_rules.EVAL_RULES, *episode_rules.TRAJ_INFO_RULES]
    assert all(rule.__doc__ and rule.__doc__.rstrip().endswith(".") for rule in rules)
    shown = {rule for _, rule, _ in EVAL_BROKEN} | {"an_evaluation_leaves_training_alone"}
    shown |= {"a_trajectory_counts_as_the_stock_one_does", "a_trajectory_travels"}
    shown |= {"a_trajectory_keeps_nothing_that_changes"}
    assert {rule.__name__ for rule in rules} == shown
