"""The agent's kit: correct agents pass, and each error is found by its rule."""

import functools
import itertools
import os
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from torch import nn

from penstock import Agent, AgentStep, CategoricalPgAgent, ConfigError, RandomAgent, ResetCollector
from penstock.agents.agent import AgentRuntime
from penstock.envs import CountingEnv, NestedEnv, ScriptedGame
from penstock.testing import DelegatingAgent, Fault, FaultyAgent, agent_rules, check_agent, check_collector

from ..models import CartPoleNet
from ..scale import FULL, some
from .broken import Broken, assert_rules_are_stated, finds

pytestmark = pytest.mark.slow

CARTPOLE = functools.partial(gym.make, "CartPole-v1")


# ---- what passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("env_fn", some([NestedEnv, "Pendulum-v1", CARTPOLE, CountingEnv], 2))
def test_the_random_agent_keeps_all_rules(env_fn: Any) -> None:
    check_agent(RandomAgent, env_fn)


def test_the_categorical_agent_keeps_all_rules_and_an_agent_with_a_fault_that_never_fires() -> None:
    check_agent(lambda: CategoricalPgAgent(CartPoleNet(16)), CARTPOLE)
    inside: Any = (lambda: CategoricalPgAgent(CartPoleNet)) if FULL else RandomAgent
    check_agent(lambda: FaultyAgent(inside(), Fault("raise", at=10_000)), CARTPOLE)


class Recurrent(Agent):
    """Keeps all rules: remembers a running mean and its last action per column, has parameters and noise."""

    recurrent = True

    def initialize(self, observation_space: Any, action_space: Any, *, seed: Any = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        rng = np.random.default_rng(seed)
        self.weight = rng.normal(size=(2,)).astype(np.float32)

    def seed_columns(self, rngs: Any) -> None:
        self.rngs = list(rngs)
        self.mean = np.zeros((len(self.rngs), 2), np.float32)

    def reseed_columns(self, columns: Any, rngs: Any) -> None:
        for b, rng in zip(columns, rngs, strict=True):
            self.rngs[b] = rng

    @property
    def mine(self) -> Any:
        return np.arange(len(self.rngs)) if self.selected is None else self.selected

    def reset(self) -> None:
        self.mean[:] = 0

    def reset_one(self, column: int) -> None:
        self.mean[column] = 0

    def draw(self) -> Any:
        return np.array([self.rngs[b].random() for b in self.mine])

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.mean[self.mine] = mean = 0.5 * self.mean[self.mine] + 0.5 * observation
        score = (mean * self.weight).sum(1) + prev_reward
        action = np.floor(self.draw() * 3).astype(np.int64)
        return AgentStep((action + (score > 0)) % 3, {"score": score, "mean": mean})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return ((0.5 * self.mean[self.mine] + 0.5 * observation) * self.weight).sum(1)

    def read_parameters(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def write_parameters(self, parameters: Any) -> None:
        self.weight = parameters["weight"].copy()


@pytest.mark.parametrize("make", [Recurrent, lambda: DelegatingAgent(Recurrent())])
def test_an_agent_with_state_keeps_all_rules_also_inside_another(make: Any) -> None:
    check_agent(make, CountingEnv)


def test_a_collector_keeps_all_rules_with_an_agent_with_state() -> None:
    check_collector(ResetCollector, CountingEnv, agent=Recurrent(), n_workers=(2,), central=FULL)


# ---- what does not -------------------------------------------------------------------------

calls = itertools.count()
BROKEN = Broken()


@BROKEN.breaks("agent_info_keeps_its_shape", r"at t=\d+, fields .*score: \[4\] float.*; at t=0")
class OneDtypeLess(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(
            action, {**info, "score": info["score"].astype(np.float64 if info["score"][0] > 0 else np.float32)}
        )


@BROKEN.breaks("agent_info_keeps_its_shape", r"agent_info\.mean is \[2\] float32 for 4 columns")
class OneForAll(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(action, {"mean": info["mean"].sum(0)})


@BROKEN.breaks("actions_have_the_spaces_shape", r"action is float64, not of the same kind as the space's int64")
class FloatActions(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(action + 0.5, info)


@BROKEN.breaks("actions_have_the_spaces_shape", r"action has shape \[4, 1\]; it must be \[4\]")
class ColumnOfActions(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(action[:, None], info)


@BROKEN.breaks("actions_lie_in_the_space", r"the action at t=\d+, env_rank=\d is 3; the space is Discrete\(3\)")
class Outside(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(action + 1, info)


@BROKEN.breaks("one_seed_gives_the_same_actions", r"action at t=\d, env_rank=\d: . and ., in two copies")
class GlobalNoise(Recurrent):
    def draw(self) -> Any:
        return np.random.default_rng().random(len(self.rngs))


@BROKEN.breaks("inputs_are_not_changed", r"observation at .* before and after agent\.step, t=\d")
class WritesIntoObservations(Recurrent):
    def step(self, observation: Any, *rest: Any) -> AgentStep:
        observation *= 0.5
        return super().step(observation, *rest)


@BROKEN.breaks("inputs_are_not_changed", r"prev_reward at env_rank=0: 0\.0 and 1\.0 before and after agent\.value")
class WritesInValue(Recurrent):
    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        prev_reward += 1
        return super().value(observation, prev_action, prev_reward)


@BROKEN.breaks("inputs_are_not_kept", r"agent_info\.change at t=\d.*in memory that is overwritten")
class KeepsReferences(Recurrent):
    last: Any = None

    def seed_columns(self, rngs: Any) -> None:
        super().seed_columns(rngs)
        self.last = np.zeros((len(self.rngs), 2), np.float32)

    def reset(self) -> None:
        super().reset()
        self.last = self.last * 0

    def reset_one(self, column: int) -> None:
        super().reset_one(column)
        self.last = self.last.copy()
        self.last[column] = 0

    def step(self, observation: Any, *rest: Any) -> AgentStep:
        action, info = super().step(observation, *rest)
        before, self.last = self.last, observation
        return AgentStep(action, {**info, "change": observation - before})


@BROKEN.breaks("value_gives_one_number_per_column", r"\[4, 1\] float32 for B=4")
class ValueColumn(Recurrent):
    def value(self, *inputs: Any) -> Any:
        return super().value(*inputs)[:, None]


@BROKEN.breaks("value_does_not_change_the_state", r"agent_info\.\w+ at t=.*without and with calls of agent\.value")
class ValueMoves(Recurrent):
    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * observation
        return super().value(observation, prev_action, prev_reward)


@BROKEN.breaks("copies_share_no_state", r"agent_info\.sum at t=.*alone and with another copy")
class SharedState(Recurrent):
    """Creates its state in `initialize`, so that all copies share it."""

    def initialize(self, observation_space: Any, action_space: Any, *, seed: Any = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.shared = np.zeros((64, 2), np.float32)

    def reset(self) -> None:
        super().reset()
        self.shared[:] = 0

    def reset_one(self, column: int) -> None:
        super().reset_one(column)
        self.shared[column] = 0

    def step(self, observation: Any, *rest: Any) -> AgentStep:
        self.shared[: len(observation)] += observation
        action, info = super().step(observation, *rest)
        return AgentStep(action, {**info, "sum": self.shared[: len(observation)].copy()})


@BROKEN.breaks("reset_one_changes_no_other_column", r"agent_info\.\w+ at t=8.*without and with reset_one\(1\) at t=8")
class ResetsAll(Recurrent):
    def reset_one(self, column: int) -> None:
        self.reset()


@BROKEN.breaks("reset_one_resets_its_column", r"agent_info\.\w+ at t=0.*in column 1 after two different pasts")
class ResetsNone(Recurrent):
    def reset_one(self, column: int) -> None:
        pass


@BROKEN.breaks("reset_resets_every_column", r"agent_info\.\w+ at t=0, env_rank=1.*two different pasts and reset\(\)")
class ResetsTheFirst(Recurrent):
    def reset(self) -> None:
        self.mean[0] = 0


@BROKEN.breaks("columns_do_not_depend_on_the_batch_size", r"among 4 columns and among 2.*batch_invariant=False")
class Normalizes(Recurrent):
    def step(self, observation: Any, *rest: Any) -> AgentStep:
        return super().step(observation - observation.mean(0), *rest)


@BROKEN.breaks("select_steps_only_some_columns", r"ValueError: operands .*, for the columns \[\d")
class IgnoresTheSelection(Recurrent):
    mine = slice(None)  # type: ignore[assignment]

    def draw(self) -> Any:
        return np.array([rng.random() for rng in self.rngs])


@BROKEN.breaks("select_steps_only_some_columns", r" at t=\d+, env_rank=\d.*all columns together and a few at a time")
class TakesTheFirst(Recurrent):
    @property
    def mine(self) -> Any:
        return np.arange(len(self.rngs) if self.selected is None else len(self.selected))


@BROKEN.breaks("reseeded_columns_use_the_new_streams", r"action at t=\d+, env_rank=0: . and ., in the reseeded columns")
class KeepsItsStreams(Recurrent):
    def reseed_columns(self, columns: Any, rngs: Any) -> None:
        pass


class OtherwiseInAServer(AgentRuntime):
    def server_copy(self) -> Any:
        twin: Any = super().server_copy()
        twin.offset = 1
        return twin


@BROKEN.breaks("central_samplers_give_the_same_actions", r" in this process and in a GpuSampler")
class ServesOtherwise(Recurrent):
    runtime_cls = OtherwiseInAServer
    offset = 0

    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep((action + self.offset) % 3, info)


@BROKEN.breaks("pickling_changes_nothing", r"TypeError: cannot pickle '_thread\.lock' object")
class Unpicklable(Recurrent):
    def copy_for_worker(self) -> Any:
        twin = super().copy_for_worker()
        twin.lock = threading.Lock()
        return twin


class RemembersInColumns(AgentRuntime):
    def column_copy(self, rngs: Any) -> Any:
        twin: Any = super().column_copy(rngs)
        twin.weight = self.agent.weight  # type: ignore[attr-defined]
        return twin


@BROKEN.breaks("pickling_changes_nothing", r" at t=.*before and after pickling")
class ForgetsItself(Recurrent):
    runtime_cls = RemembersInColumns

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if "weight" in state:
            state["weight"] = state["weight"] * 0 - 5
        return state

    def copy_for_worker(self) -> Any:
        twin = super().copy_for_worker()
        twin.weight = self.weight
        return twin


@BROKEN.breaks("parameters_survive_a_round_trip", r"agent_info\.hidden at t=0.*in an agent and in one with")
class HidesParameters(Recurrent):
    def initialize(self, observation_space: Any, action_space: Any, *, seed: Any = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.hidden = np.float32(next(calls))

    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        return AgentStep(action, {**info, "hidden": np.full(len(action), self.hidden)})


@BROKEN.breaks("parameters_survive_a_round_trip", r"parameter weight at .* after write_parameters")
class RoundsParameters(Recurrent):
    def write_parameters(self, parameters: Any) -> None:
        self.weight = parameters["weight"].round(1)


@BROKEN.breaks("parameters_are_copied", r"parameter weight at .*: .* and 0\.0 when the given arrays are set to zero")
class KeepsParameters(Recurrent):
    def write_parameters(self, parameters: Any) -> None:
        self.weight = parameters["weight"]


@BROKEN.breaks("worker_copies_follow_sync_shared_memory", r"parameter weight at .* before sync_shared_memory")
class LeaksParameters(Recurrent):
    def write_parameters(self, parameters: Any) -> None:
        self.weight[...] = parameters["weight"]


class PullsNothing(AgentRuntime):
    def pull_shared_memory(self) -> None:
        pass


@BROKEN.breaks("worker_copies_follow_sync_shared_memory", r"parameter weight at .* after sync_shared_memory")
class IgnoresTheLearner(Recurrent):
    runtime_cls = PullsNothing


@BROKEN.breaks("worker_processes_give_the_same_actions", r"agent_info\.here at t=0, env_rank=0.*in two workers")
class TellsTheProcess(Recurrent):
    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*inputs)
        here = np.full(len(action), float(os.getpid()))
        return AgentStep(action, {**info, "here": here})


@pytest.mark.parametrize(("make", "rule", "words"), BROKEN, ids=BROKEN.names)
def test_each_broken_rule_is_found(make: Any, rule: str, words: str) -> None:
    with finds(rule, words, make.__name__):
        check_agent(make, CountingEnv)


def test_columns_may_depend_on_each_other_if_that_is_declared() -> None:
    check_agent(Normalizes, CountingEnv, batch_invariant=False)


@pytest.mark.parametrize("make", [IgnoresTheSelection, KeepsItsStreams, ServesOtherwise])
def test_an_agent_need_not_be_for_central_samplers(make: Any) -> None:
    check_agent(make, CountingEnv, central=False)


def test_every_rule_has_a_statement_and_a_class_that_breaks_it() -> None:
    rules = agent_rules.ACTING_RULES + agent_rules.PARAMETER_RULES
    rules += agent_rules.BATCH_SIZE_RULES + agent_rules.CENTRAL_RULES
    assert_rules_are_stated(rules, BROKEN.rules)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"what make_agent returns must be a penstock Agent .*, got Linear"):
        check_agent(lambda: nn.Linear(1, 1), CountingEnv)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="batch_T must be an integer of at least 4"):
        check_agent(RandomAgent, CountingEnv, batch_T=3)


# ---- joint agents --------------------------------------------------------------------------


class FollowTheLeader(Agent):
    """The first agent of an environment moves at random, the others do the same. It counts its steps."""

    joint = True

    def seed_columns(self, rngs: Any) -> None:
        self.rngs, self.counts = list(rngs), np.zeros(len(rngs), np.int64)

    def reseed_columns(self, columns: Any, rngs: Any) -> None:
        for b, rng in zip(columns, rngs, strict=True):
            self.rngs[b], self.counts[b] = rng, 0

    def reset(self) -> None:
        self.counts[:] = 0

    def reset_one(self, column: int) -> None:
        self.counts[column] = 0

    def _selected(self) -> Any:
        return range(len(self.rngs)) if self.selected is None else self.selected

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        k = prev_reward.shape[1]
        columns = list(self._selected())
        leaders = [self.rngs[b].integers(int(self.action_space.n)) for b in columns]  # type: ignore[attr-defined]
        action = np.repeat(np.array(leaders)[:, None], k, axis=1)
        self.counts[columns] += 1
        return AgentStep(action, {"count": np.repeat(self.counts[columns][:, None], k, axis=1)})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.zeros(prev_reward.shape, np.float32)


class LosesTheAgents(FollowTheLeader):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action[:, 0])


class OneValuePerGame(FollowTheLeader):
    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.zeros(len(prev_reward), np.float32)


class LeavesTheSpace(FollowTheLeader):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action + 3)


GAME = {"k": 3, "script": [{}, {"a1": "die"}, {}, {"a1": "join"}, {}]}


def test_agents_of_several_seats_keep_all_rules() -> None:
    check_agent(lambda: DelegatingAgent(FollowTheLeader()), ScriptedGame, env_kwargs=GAME)
    if FULL:
        check_agent(FollowTheLeader, ScriptedGame, env_kwargs=GAME)
        check_agent(RandomAgent, ScriptedGame, env_kwargs=GAME)
    check_agent(lambda: RandomAgent(mask_key="info.action_mask"), ScriptedGame, env_kwargs={"mask": True})


@pytest.mark.parametrize(
    ("make", "rule", "seen"),
    [
        (LosesTheAgents, "actions_have_the_spaces_shape", r"shape \[4\]; it must be \[4, 3\]"),
        (OneValuePerGame, "value_gives_one_number_per_column", r"\[4\] float32"),
        (LeavesTheSpace, "actions_lie_in_the_space", "env_rank=0 is"),
    ],
)
def test_a_joint_agent_that_breaks_a_rule(make: Any, rule: str, seen: str) -> None:
    with finds(rule, seen):
        check_agent(make, ScriptedGame, env_kwargs=GAME)


def test_a_joint_agent_needs_an_environment_of_several_agents() -> None:
    with pytest.raises(ConfigError, match="joint, so env_fn must return"):
        check_agent(FollowTheLeader, CARTPOLE)
