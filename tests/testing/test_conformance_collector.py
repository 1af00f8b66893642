"""The collector's kit: correct collectors pass, and leftovers are found; test_broken_collectors.py has the rest."""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from penstock import CategoricalPgAgent, ConfigError, RandomAgent, ResetCollector, WaitResetCollector, WorkerError
from penstock.columns import Events
from penstock.envs import CountingEnv, NestedEnv
from penstock.testing import check_collector, run_rules

from ..models import CartPoleNet
from ..scale import FULL, scaled
from .broken import finds

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
    check_collector(WaitResetCollector, CARTPOLE, batch_T=5, n_batches=5, n_workers=())


def test_an_env_fn_gets_its_context_and_its_kwargs() -> None:
    def make(context: Any, length: int) -> CountingEnv:
        assert context.env_rank < 4
        return CountingEnv(length)

    check_collector(ResetCollector, make, env_kwargs={"length": 6}, n_workers=(2,))


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
        before = self.prev_action.copy()
        super().act(t)
        is_stuck = (np.array(self.columns.env_ranks) % 4 == t % 4) & self.samples.valid[t]
        self.prev_action[is_stuck] = before[is_stuck]
        self.samples.action[t + 1] = self.prev_action

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
        self.record_env_info(t)
        if events is not None:
            self.settle(t, events)
        self.write_step(t)


@pytest.mark.parametrize("cls", [Alternates, OwnLoop])
def test_subclasses_that_override_each_part_keep_all_rules(cls: type[ResetCollector]) -> None:
    check_collector(cls, CountingEnv, n_workers=(3,), central=FULL)


class Interrupts(ResetCollector):
    def collect_batch(self, itr: int) -> None:
        (joined,) = self.columns.reset(range(len(self.envs)))
        self.recorders[0].begin(joined)
        self.prev_action[:] = self.prev_reward[:] = 0
        self.columns.policies[0].write_observations(self.samples.observation[self.batch_T])
        super().collect_batch(itr)


class Restarts(ResetCollector):
    def collect_batch(self, itr: int) -> None:
        for recorder, joined in zip(self.recorders, self.columns.reset(range(len(self.envs))), strict=True):
            recorder.rejoin(joined)
        super().collect_batch(itr)


def test_a_collector_may_interrupt_episodes_if_that_is_declared() -> None:
    check_collector(Restarts, CountingEnv, continues=False, n_workers=(2,), central=FULL)
    # The TrajInfo also counts the steps before the reset.
    with finds("each_episode_that_ends_gives_a_traj_info", r"Return=.*for the episode that ended"):
        check_collector(Interrupts, CountingEnv, continues=False)


# ---- after shutdown -----------------------------------------------------------------------


def test_a_descriptor_that_stays_open_is_found(tmp_path: Path) -> None:
    opened: list[int] = []

    class Opens(ResetCollector):
        def start_envs(self) -> None:
            super().start_envs()
            opened.append(os.open(tmp_path / "log", os.O_CREAT))

    with finds("nothing_is_left_after_shutdown", r"after shutdown of a SerialSampler: descriptor \d+ \(.*log\)"):
        check_collector(Opens, CountingEnv, n_workers=())
    for descriptor in opened:
        os.close(descriptor)


def test_a_process_that_outlives_its_worker_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_rules, "_EXIT_SECONDS", 0.3)
    note = tmp_path / "pids"

    class Spawns(ResetCollector):
        def start_envs(self) -> None:
            super().start_envs()
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            with note.open("a") as file:
                file.write(f"{child.pid}\n")
            child.returncode = 0  # otherwise subprocess warns

    try:
        with finds("nothing_is_left_after_shutdown", r"still running after shutdown: .*sleep\(60\) \(pid \d+\)"):
            check_collector(Spawns, CountingEnv, n_workers=())
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
    with pytest.raises(ConfigError, match="must be 2 or more"):
        check_collector(ResetCollector, CountingEnv, batch_T=1)
    with pytest.raises(ConfigError, match="not a registered environment id"):
        check_collector(ResetCollector, "NoSuchEnv-v0")


def test_an_agent_without_values_can_be_used() -> None:
    class Mute(RandomAgent):
        def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
            raise ConfigError("no values here")

    check_collector(ResetCollector, CountingEnv, agent=Mute(), n_workers=(2,), central=FULL)
