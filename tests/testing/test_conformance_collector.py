"""The collector's kit: correct collectors pass, and leftovers and each broken rule are found."""

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock import (
    CategoricalPgAgent,
    Collector,
    ConfigError,
    RandomAgent,
    ResetCollector,
    WaitResetCollector,
    WorkerError,
)
from penstock.columns import Events
from penstock.envs import CountingEnv, NestedEnv, ScriptedGame
from penstock.testing import check_collector, collector_rules, run_rules
from penstock.testing.traces import ProbeAgent

from ..models import CartPoleNet
from ..samplers.digest_cases import rows_of
from ..scale import FULL, scaled
from ..toy_games import Roles, Team
from .broken import Broken, assert_rules_are_stated, finds

pytestmark = pytest.mark.slow

CARTPOLE = functools.partial(gym.make, "CartPole-v1")


# ---- what passes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_fn", "n_workers"), [(NestedEnv, (2,)), (CARTPOLE, scaled((2, 3), (3,))), *scaled([("Pendulum-v1", (4,))], [])]
)
def test_the_reset_collector_keeps_all_rules(env_fn: Any, n_workers: tuple[int, ...]) -> None:
    check_collector(ResetCollector, env_fn, n_workers=n_workers, central=FULL or env_fn is NestedEnv)


def test_with_the_users_policy() -> None:
    agent = CategoricalPgAgent(lambda: CartPoleNet().double())
    check_collector(ResetCollector, CARTPOLE, agent=agent, n_workers=(2,))


def test_the_wait_reset_collector_keeps_all_rules() -> None:
    check_collector(WaitResetCollector, CountingEnv, n_workers=(2,))
    check_collector(WaitResetCollector, CARTPOLE, batch_T=5, n_batches=5, n_workers=(), central=FULL)


def test_an_env_fn_gets_its_context_and_its_kwargs() -> None:
    def make(context: Any, length: int) -> CountingEnv:
        assert context.env_rank < 4
        return CountingEnv(length)

    check_collector(ResetCollector, make, env_kwargs={"length": 6}, n_workers=(2,), central=FULL)


class Alternates(ResetCollector):
    """Overrides all that a collector may override: environments wait every second time, and actions stick."""

    waits = True

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        self.n_rows = 0
        for t in range(self.batch_T):
            self.act(t)
            self.step_envs(t)
        assert self.n_rows == self.batch_T
        self.end_batch()

    def act(self, t: int) -> None:
        before = [recorder.prev_action.copy() for recorder in self.recorders]
        super().act(t)
        for own, actions in zip(self.recorders, before, strict=True):
            ranks = np.array([int(rank) for rank in own.columns.env_ranks])
            is_stuck = (ranks % 4 == t % 4) & own.samples.valid[t]
            own.prev_action[is_stuck] = actions[is_stuck]
            own.samples.action[t + 1] = own.prev_action

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.n_rows += 1

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        counts = vars(self).setdefault("counts", [0] * len(self.envs))
        for e in events.over:
            counts[e] += 1
        self.columns.park([e for e in events.over if counts[e] % 2])
        return self.columns.reset([e for e in events.over if not counts[e] % 2])


class OwnLoop(ResetCollector):
    """What `step_envs` does, in its parts."""

    def step_envs(self, t: int) -> None:
        self.progress.begin_stepping(t)
        events = self.columns.step([recorder.prev_action for recorder in self.recorders], t + 1)
        self.settle(t, events)


@pytest.mark.parametrize("cls", [Alternates, OwnLoop])
def test_subclasses_that_override_each_part_keep_all_rules(cls: type[ResetCollector]) -> None:
    check_collector(cls, CountingEnv, n_workers=(3,), central=FULL)


class Restarts(ResetCollector):
    def collect_batch(self, itr: int) -> None:
        self.reset_now(range(len(self.columns.env_ranks)))
        super().collect_batch(itr)


class InterruptsWithoutRejoin(ResetCollector):
    def begin_batch(self, itr: int) -> None:
        super().begin_batch(itr)
        self.samples.episode_start[:] = True

    def collect_batch(self, itr: int) -> None:
        (joined,) = self.columns.reset(range(len(self.envs)))
        self.recorders[0].begin(joined)
        self.prev_action[:] = self.prev_reward[:] = 0
        self.columns.policies[0].write_observations(self.samples.observation[self.batch_T])
        super().collect_batch(itr)


def test_a_collector_may_interrupt_episodes_if_that_is_declared() -> None:
    check_collector(Restarts, CountingEnv, continues=False, n_workers=(2,), central=FULL)
    # The TrajInfo also counts the steps before the reset.
    with finds("each_episode_that_ends_gives_a_traj_info", r"Return=.*for the episode that ended"):
        check_collector(InterruptsWithoutRejoin, CountingEnv, continues=False)


# ---- every kind of environment -------------------------------------------------------------

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (CountingEnv, {}),
    **{f"batched, {mode.name}": (rows_of(mode), {"batched": True}) for mode in AutoresetMode},
    "seats": (functools.partial(ScriptedGame, 3), {}),
    "seats, two policies": (
        functools.partial(Roles, 3),
        {
            "agent": {"x": ProbeAgent(RandomAgent()), "y": ProbeAgent(RandomAgent())},
            "policy_of": lambda agent, env_rank: "x" if agent == "a0" else "y",
        },
    ),
    "seats, a team": (functools.partial(ScriptedGame, 3), {"agent": Team()}),
}
Joined = Sequence[Sequence[int]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "single"])
def test_right_collectors_keep_all_rules_with_each_kind_of_environment(kind: str) -> None:
    env_fn, options = KINDS[kind]
    cls = OwnLoop if "batched" in kind else Alternates
    check_collector(cls, env_fn, n_workers=scaled((2, 3), (2,)), central=FULL, **options)
    check_collector(Restarts, env_fn, continues=False, n_workers=(), central=FULL, **options)


class WritesTheWrongRow(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        for recorder in self.recorders:
            recorder.samples.observation[2] = recorder.samples.observation[1]


class ShiftsRewards(ResetCollector):
    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        for recorder in self.recorders:
            recorder.samples.reward[t + 1] = np.roll(recorder.samples.reward[t + 1], 1)


class RecordsNoEnds(ResetCollector):
    def settle(self, t: int, events: Events | None) -> None:
        if events is not None:
            for recorder, joined in zip(self.recorders, self.begin_episodes(events, ()), strict=True):
                recorder.begin(joined)
        super().settle(t, None)


class BeginsNothing(ResetCollector):
    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        return [()] * len(self.recorders)


class ResetsNoAgents(ResetCollector):
    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        super().begin_episodes(events, going)
        return [()] * len(self.recorders)


class SendsTooLittle(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        self.progress.n_results = max(self.progress.n_results - 1, 0)


class Counters(VectorEnv[Any, Any, Any]):
    """Counts steps. Takes steps after an end too, which Gymnasium's batched environments refuse."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = observation_space = spaces.Box(0, 99, (1,), np.float32)
    single_action_space = action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.count = num_envs, np.zeros((num_envs, 1), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count[(options or {}).get("reset_mask", slice(None))] = 0
        return self.count.copy(), {}

    def step(self, actions: Any) -> Any:
        self.count += 1
        over = self.count[:, 0] > 2 + np.arange(self.num_envs)
        return self.count.copy(), self.count[:, 0].copy(), over, np.zeros_like(over), {}


@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_found_with_each_kind_of_environment(kind: str) -> None:
    env_fn, options = KINDS[kind]
    faults: dict[type[Collector], str] = {
        WritesTheWrongRow: "observations_are_what_the_environment_returned",
        ShiftsRewards: "rewards_are_what_the_environment_returned",
        RecordsNoEnds: "ends_are_what_the_environment_returned",
        SendsTooLittle: "each_episode_that_ends_gives_a_traj_info",
    }
    if "NEXT_STEP" in kind:  # the row of the reset is not blank then
        faults[RecordsNoEnds] = "observations_are_what_the_environment_returned"
    if "seats" in kind:  # the rewards of absent agents are not zero then
        faults[RecordsNoEnds] = "rewards_are_what_the_environment_returned"
    if "DISABLED" in kind:
        env_fn = Counters
    if not kind.endswith("_STEP"):  # these environments, and the agents' columns in them, begin by themselves
        faults[BeginsNothing] = "environments_are_reset_after_an_episode"
    if not kind.endswith("_STEP") and "team" not in kind:  # a team is reset with its game
        faults[ResetsNoAgents] = "the_agent_is_reset_with_its_environment"
    for cls, rule in faults.items():
        with finds(rule, "env_rank=", cls.__name__) if cls is not SendsTooLittle else finds(rule, "trajectories"):
            check_collector(cls, env_fn, **options)


def test_a_check_without_the_end_of_an_episode_is_refused() -> None:
    never = functools.partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match="no episode has ended in 2 batches of 4 rows, so the check would miss much"):
        check_collector(
            ResetCollector,
            lambda num_envs: never([functools.partial(CountingEnv, 99)] * num_envs),
            batched=True,
            batch_T=4,
            n_batches=2,
        )


# ---- after shutdown -----------------------------------------------------------------------


def test_a_descriptor_that_stays_open_is_found(tmp_path: Path) -> None:
    opened: list[int] = []

    class Opens(ResetCollector):
        def start_envs(self) -> None:
            super().start_envs()
            opened.append(os.open(tmp_path / "log", os.O_CREAT))

    with finds("nothing_is_left_after_shutdown", r"after shutdown of a SerialSampler: descriptor \d+ \(.*log\)"):
        check_collector(Opens, CountingEnv, n_workers=(), central=False)
    for descriptor in opened:
        os.close(descriptor)


def test_a_process_that_outlives_its_worker_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_rules, "_EXIT_SECONDS", 0.3)
    note = tmp_path / "pids"

    class Spawns(ResetCollector):
        def start_envs(self) -> None:
            super().start_envs()
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            with note.open("a") as file:
                file.write(f"{child.pid}\n")
            child.returncode = 0  # otherwise subprocess warns

    try:
        with finds("nothing_is_left_after_shutdown", r"still running after shutdown: .*sleep 60 \(pid \d+\)"):
            check_collector(Spawns, CountingEnv, n_workers=(), central=False)
    finally:
        left = [psutil.Process(int(pid)) for pid in note.read_text().split() if psutil.pid_exists(int(pid))]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)


# ---- the kit itself ------------------------------------------------------------------------


def test_a_collector_that_cannot_run_raises_its_own_error() -> None:
    class Raises(ResetCollector):
        def collect_batch(self, itr: int) -> None:
            raise ValueError("not yet written")

    with pytest.raises(WorkerError, match="not yet written"):
        check_collector(Raises, CountingEnv)
    with pytest.raises(ConfigError, match="batch_T must be an integer of at least 2"):
        check_collector(ResetCollector, CountingEnv, batch_T=1)
    with pytest.raises(ConfigError, match="not a registered environment id"):
        check_collector(ResetCollector, "NoSuchEnv-v0")


def test_an_agent_without_values_can_be_used() -> None:
    class Mute(RandomAgent):
        def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
            raise ConfigError("no values here")

    check_collector(ResetCollector, CountingEnv, agent=Mute(), n_workers=(2,), central=FULL)


# ---- what breaks a rule ------------------------------------------------------------------------

BROKEN = Broken()


@BROKEN.breaks("one_seed_gives_one_batch", r"in two runs with one seed, itr=7")
class Draws(ResetCollector):
    def act(self, t: int) -> None:
        super().act(t)
        self.prev_action[:] = np.random.default_rng().integers(0, 2, len(self.envs))
        self.samples.action[t + 1] = self.prev_action


@BROKEN.breaks("every_cell_is_written", r"agent_info\.probe at t=1, env_rank=0: .* and nan")
class LeavesGaps(ResetCollector):
    def act(self, t: int) -> None:
        kept = self.samples.agent_info[t].copy()
        super().act(t)
        if t % 2:
            self.samples.agent_info[t] = kept


@BROKEN.breaks("every_cell_is_written", r"RuntimeError while .*: not finite.*read no row before it is written")
class ReadsAhead(ResetCollector):
    def act(self, t: int) -> None:
        if not np.isfinite(self.samples.observation[self.batch_T - 1]).all():
            raise RuntimeError("not finite")
        super().act(t)


@BROKEN.breaks("sample_mode_is_called_once_per_batch", r"sample_mode\(6\) in the batch itr=7")
class SaysLess(ResetCollector):
    def begin_batch(self, itr: int) -> None:
        super().begin_batch(itr - 1)


@BROKEN.breaks("the_agent_acts_once_per_row", r"32 calls of agent\.step in the batch itr=7 of 16 rows")
class ActsTwice(ResetCollector):
    def act(self, t: int) -> None:
        super().act(t)
        super().act(t)


@BROKEN.breaks("the_agent_acts_once_per_row", r"an extra environment step at itr=7, t=3, env_rank=0")
class StepsTwice(ResetCollector):
    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        if t == 3:
            super().step_envs(t)


@BROKEN.breaks("environments_are_reset_after_an_episode", r"after the end of the episode")
class NeverResets(ResetCollector):
    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        return [list(events.over)]


@BROKEN.breaks("environments_are_reset_after_an_episode", r"no reset before itr=7, t=.*waits = True")
class ParksWithoutSaying(ResetCollector):
    """`waits` is not set."""

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        self.columns.park(events.over)
        return [()]


@BROKEN.breaks("valid_marks_the_recorded_steps", r"valid is False at itr=7, t=2, env_rank=0; it should be True")
class LeavesOut(ResetCollector):
    def act(self, t: int) -> None:
        super().act(t)
        self.samples.valid[t] = t != 2


@BROKEN.breaks(
    "observations_are_what_the_environment_returned", r"observation is \[.*\] at itr=7.*the environment returned \["
)
class ShowsTheEnd(ResetCollector):
    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        done = self.samples.done[t]
        if self.samples.final_obs is not None:
            self.samples.observation[t + 1, done] = self.samples.final_obs[t, done]


@BROKEN.breaks(
    "actions_are_what_the_environment_took", r"action is . at itr=7, t=\d+, env_rank=0; the environment took ."
)
class Sticks(ResetCollector):
    def act(self, t: int) -> None:
        before = self.prev_action.copy()
        super().act(t)
        self.prev_action[0] = before[0]


@BROKEN.breaks(
    "rewards_are_what_the_environment_returned", r"reward is 1\.0 at itr=7, .*; the environment returned \d\.0"
)
class Clips(ResetCollector):
    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.samples.reward[t + 1] = np.sign(self.samples.reward[t + 1])


@BROKEN.breaks("ends_are_what_the_environment_returned", r"truncated is False at itr=7.*it should be True")
class ForgetsTruncation(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        self.samples.truncated[...] &= ~self.samples.terminated


@BROKEN.breaks("done_is_terminated_or_truncated", r"done is False at itr=7.*it should be True")
class Ends(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        self.samples.done[...] = self.samples.terminated


@BROKEN.breaks("prev_done_marks_the_first_step_of_an_episode", r"prev_done is True at itr=\d+, t=0.*it should be False")
class BeginsTooOften(ResetCollector):
    def begin_batch(self, itr: int) -> None:
        super().begin_batch(itr)
        self.samples.episode_start[:] = True


@BROKEN.breaks("final_obs_is_the_last_observation", r"final_obs is .* at itr=7.*it should be")
class KeepsTheWrongEnd(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        t, b = np.nonzero(self.samples.done)
        self.samples.final_obs[t, b] = self.samples.observation[t + 1, b]


@BROKEN.breaks("previous_values_carry_over", r"prev_reward is 0\.0 at itr=7, t=0, env_rank=.*the last one was")
class StartsFromZero(ResetCollector):
    def begin_batch(self, itr: int) -> None:
        super().begin_batch(itr)
        self.samples.reward[0] = 0


@BROKEN.breaks("the_agent_sees_what_is_recorded", r"agent\.step's observation is .*recorded is")
class ShowsSomethingElse(ResetCollector):
    def act(self, t: int) -> None:
        row = self.samples.observation_rows[t]
        self.samples.observation_rows[t] = row * 0.5
        super().act(t)
        self.samples.observation_rows[t] = row


@BROKEN.breaks("the_agent_sees_what_is_recorded", r"agent_info\.probe is .*the agent returned")
class MisreportsTheAgent(ResetCollector):
    def act(self, t: int) -> None:
        super().act(t)
        self.samples.agent_info.probe[t] += 1


@BROKEN.breaks("the_agent_gets_its_previous_values", r"agent\.step's prev_reward is .* at itr=7.*should be 0\.0")
class RemembersRewards(ResetCollector):
    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.prev_reward[...] = self.samples.reward[t + 1]


@BROKEN.breaks("the_agent_gets_its_previous_values", r"agent\.step's prev_reward is 0\.0 at itr=7.*it should be")
class ForgetsRewards(ResetCollector):
    def act(self, t: int) -> None:
        self.prev_reward[...] = 0
        super().act(t)


@BROKEN.breaks("the_agent_is_reset_with_its_environment", r"0 calls of agent\.reset_one\(.*where 1 episodes begin")
class ForgetsTheAgent(ResetCollector):
    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        super().begin_episodes(events, going)
        return [()]


@BROKEN.breaks("the_agent_is_reset_with_its_environment", r"2 calls of agent\.reset_one\(.*where 1 episodes begin")
class ResetsTheAgentTwice(ResetCollector):
    def begin_episodes(self, events: Events, going: Sequence[int]) -> Joined:
        (joined,) = super().begin_episodes(events, going)
        return [[*joined, *joined]]


@BROKEN.breaks("values_are_of_the_next_observation", r"bootstrap_value is .* at itr=7, env_rank=0; it should be")
class ValuesTheLastRow(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        last = self.samples.observation[self.batch_T - 1]
        self.samples.bootstrap_value[...] = self.agent.value(last, self.prev_action, self.prev_reward)


@BROKEN.breaks("values_are_of_the_next_observation", r"final_value is 0\.0 at itr=7")
class ValuesNoEnds(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        self.samples.final_value[...] = 0


@BROKEN.breaks(
    "episodes_continue_in_the_next_batch", r"in the middle of an episode, before itr=7, t=0, .*continues=False"
)
class Interrupts(ResetCollector):
    def collect_batch(self, itr: int) -> None:
        self.reset_now(range(len(self.envs)))
        super().collect_batch(itr)


@BROKEN.breaks("each_episode_that_ends_gives_a_traj_info", r"trajectories were returned for the batch itr=7")
class LosesTrajectories(ResetCollector):
    def end_batch(self) -> None:
        super().end_batch()
        self.progress.n_results = max(self.progress.n_results - 1, 0)


@BROKEN.breaks("a_traj_info_subclass_sees_every_step", r"SteppedTrajInfo\(Length=.*for the episode that ended")
class SkipsSteps(ResetCollector):
    def step_envs(self, t: int) -> None:
        (own,) = self.columns.policies
        hook, own.on_step = own.on_step, None
        super().step_envs(t)
        own.on_step = hook


@BROKEN.breaks("any_number_of_workers_gives_the_same_batch", r"in one process and in 2 workers, itr=7")
class DependsOnColumns(ResetCollector):
    def act(self, t: int) -> None:
        super().act(t)
        self.prev_action[0] = 0
        self.samples.action[t + 1] = self.prev_action


@BROKEN.breaks("central_samplers_give_the_same_batch", r"agent_info\.probe at t=.* and in a GpuSampler.*central=False")
class RecordsLate(ResetCollector):
    """Keeps the agent's output until the next step; a remote agent returns it in the same memory again."""

    last: Any = None

    def act(self, t: int) -> None:
        self.progress.begin_acting(t)
        step = self.agent.step(self.samples.observation[t], self.prev_action, self.prev_reward)
        self.samples.action[t + 1] = step.action
        self.prev_action[...] = step.action
        if t:
            self.samples.agent_info[t - 1] = self.last
        self.last = step.agent_info
        if t == self.batch_T - 1:
            self.samples.agent_info[t] = step.agent_info


@pytest.mark.parametrize(("cls", "rule", "words"), BROKEN, ids=BROKEN.names)
def test_each_broken_rule_is_found(cls: type[Collector], rule: str, words: str) -> None:
    with finds(rule, words, cls.__name__):
        check_collector(cls, CountingEnv)


def test_a_collector_need_not_be_for_central_samplers() -> None:
    check_collector(RecordsLate, CountingEnv, central=False, n_workers=(2,))


def test_every_rule_has_a_statement_and_a_class_that_breaks_it() -> None:
    rules: list[Callable[..., None]] = [
        *collector_rules.TRACE_RULES,
        collector_rules.a_traj_info_subclass_sees_every_step,
        *(rule for rule in vars(run_rules).values() if getattr(rule, "__module__", "") == run_rules.__name__),
    ]
    rules = [rule for rule in rules if not rule.__name__.startswith("_")]
    assert_rules_are_stated(rules, BROKEN.rules | {"nothing_is_left_after_shutdown"})
