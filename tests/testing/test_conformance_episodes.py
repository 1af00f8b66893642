"""The kits for evaluation collectors and trajectory infos: correct ones pass, and each error is found by its rule."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock.testing
from penstock import EvalCollector, TrajInfo
from penstock.columns import Events, Start
from penstock.envs import CountingEnv, NestedEnv
from penstock.testing import check_eval_collector, check_traj_info, evaluation_rules

from ..scale import FULL
from .broken import Broken, assert_rules_are_stated, finds

EVAL_BROKEN, INFOS_BROKEN = Broken(), Broken()


def test_all_names_exist_and_are_sorted() -> None:
    # As ruff sorts them: constants, then classes, then functions.
    names = penstock.testing.__all__
    assert list(names) == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(getattr(penstock.testing, name) is not None for name in names)


# ---- evaluation ----------------------------------------------------------------------------


class SkipsEven(EvalCollector):
    """One episode in each environment that has an even env_rank, with an own loop."""

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.acted = 0

    def act(self, t: int) -> None:
        super().act(t)
        self.acted += 1

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        assert self.acted

    def must_stop(self) -> bool:
        return super().must_stop() or len(self.columns.waiting) == len(self.envs)

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        self.columns.park([e for e in events.over if self.columns.env_ranks[e] % 2 == 0])
        others = [e for e in events.over if self.columns.env_ranks[e] % 2]
        return self.columns.reset(others, [Start(self.seed_of(e)) for e in others])


@pytest.mark.slow
def test_the_eval_collector_keeps_all_rules() -> None:
    check_eval_collector(EvalCollector, "Pendulum-v1", n_workers=(3,))
    check_eval_collector(SkipsEven, CountingEnv, n_workers=(2,))
    if FULL:
        check_eval_collector(EvalCollector, CountingEnv)


@EVAL_BROKEN.breaks(
    "an_evaluation_starts_with_resets", r"itr=8, eval_mode was called with \[8\], and of 4 environments \[\]"
)
class SkipsTheReset(EvalCollector):
    def begin_evaluation(self) -> None:
        if not self._n_evaluations:
            super().begin_evaluation()


@EVAL_BROKEN.breaks("an_evaluation_makes_at_most_max_T_steps", r"45 steps of environment 0 .* max_T=40")
class IgnoresMaxT(EvalCollector):
    def collect_evaluation(self, itr: int) -> None:
        self.limits = replace(self.limits, max_T=45)
        super().collect_evaluation(itr)


@EVAL_BROKEN.breaks("an_evaluation_returns_episodes_that_ended", r"trajectory \d+ of the evaluation itr=5 has Length=")
class CountsTwice(EvalCollector):
    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.tracker.preload(0, [1.0])


@EVAL_BROKEN.breaks("one_seed_gives_one_evaluation", r"in two runs with one seed")
class Draws(EvalCollector):
    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.limits = replace(self.limits, max_T=int(np.random.default_rng().integers(5, 40)))


@EVAL_BROKEN.breaks("one_seed_gives_one_evaluation", r"in 2 workers, itr=5")
class DependsOnColumns(EvalCollector):
    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.limits = replace(self.limits, max_T=10 * len(self.envs))


@pytest.mark.parametrize(("cls", "rule", "words"), EVAL_BROKEN, ids=EVAL_BROKEN.names)
def test_each_broken_rule_of_evaluation_is_found(cls: type[EvalCollector], rule: str, words: str) -> None:
    with finds(rule, words):
        check_eval_collector(cls, CountingEnv)


def test_an_evaluation_that_changes_training_is_found() -> None:
    class Offset(CountingEnv):
        offset = 0

        def observe(self) -> Any:
            return super().observe() + Offset.offset

        step_into = None  # type: ignore[assignment]

    class Disturbs(EvalCollector):
        def collect_evaluation(self, itr: int) -> None:
            super().collect_evaluation(itr)
            Offset.offset += 1

    with finds("an_evaluation_does_not_change_training", "with and without an evaluation before it"):
        check_eval_collector(Disturbs, Offset, n_workers=())


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


@INFOS_BROKEN.breaks("a_traj_info_counts_like_its_base_class", r"Length is 0 in trajectory 0; it should be \d")
class CountsNothing(Longest):
    def step(self, *args: Any) -> None:
        pass


@INFOS_BROKEN.breaks("a_traj_info_is_the_same_from_a_worker", r"Pid of trajectory 0 is \d+, and \d+ from a worker")
class KeepsThePid(Longest):
    def terminate(self, final_observation: Any) -> None:
        self.Pid = os.getpid()


@INFOS_BROKEN.breaks("a_traj_info_copies_what_it_keeps", r"Info of trajectory 0 is \{'count': \d+.*, and \{")
class KeepsTheInfo(Longest):
    def step(self, *args: Any) -> None:
        super().step(*args)
        self.Info = args[-1]


def test_a_subclass_keeps_all_rules() -> None:
    check_traj_info(Longest, CountingEnv, traj_info_kwargs={"scale": 2.0})
    check_traj_info(TrajInfo, CountingEnv)
    check_traj_info(Longest, NestedEnv)


@pytest.mark.parametrize(("cls", "rule", "words"), INFOS_BROKEN, ids=INFOS_BROKEN.names)
def test_each_broken_rule_of_a_traj_info_is_found(cls: type[TrajInfo], rule: str, words: str) -> None:
    with finds(rule, words):
        check_traj_info(cls, CountingEnv)


def test_every_rule_has_a_statement_and_a_class_that_breaks_it() -> None:
    broken = EVAL_BROKEN.rules | INFOS_BROKEN.rules | {"an_evaluation_does_not_change_training"}
    assert_rules_are_stated([*evaluation_rules.EVALUATION_RULES, *evaluation_rules.TRAJ_INFO_RULES], broken)
