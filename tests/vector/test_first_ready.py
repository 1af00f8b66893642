"""send and recv: whoever is ready is received, nobody is left waiting, resets let steps end."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, SamplerStateError, SpaceError, WorkerDiedError
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv
from penstock.vector.vector_pool import WaitTimeoutError

from ..scale import examples
from .vector_support import Waiting, let_go


@pytest.fixture
def pipes(tmp_path: Path) -> list[Path]:
    found = [tmp_path / str(i) for i in range(4)]
    for path in found:
        os.mkfifo(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("max_wait", [1e-4, 0.02])
def test_with_max_wait_a_slow_environment_does_not_delay_those_that_have_finished(
    pipes: list[Path], max_wait: float
) -> None:
    with ShmVectorEnv([partial(Waiting, pipe) for pipe in pipes]) as envs:
        envs.reset()
        envs.send([0, 2, 0, 0])
        seen: list[int] = []
        while len(seen) < 3:
            seen += envs.recv(max_wait=max_wait)[4]["env_id"].tolist()  # of all four, unless it takes too long
        assert sorted(seen) == [0, 2, 3]
        let_go(pipes[1])
        assert envs.recv(min_ready=4, max_wait=max_wait)[4]["env_id"].tolist() == [1]
        envs.send([0] * 4)
        assert envs.recv(min_ready=4, max_wait=60.0)[1].tolist() == [2] * 4
        envs.send([0] * 4)
        with pytest.raises(ConfigError, match="max_wait must be a positive number of seconds, got 0"):
            envs.recv(max_wait=0)


def test_in_one_process_too_each_is_told_of_at_once(pipes: list[Path]) -> None:
    with ShmVectorEnv([partial(Waiting, pipe) for pipe in pipes], n_workers=1) as envs:
        envs.reset()
        envs.send([0, 0, 2, 0])
        assert envs.recv(min_ready=2)[4]["env_id"].tolist() == [0, 1]
        let_go(pipes[2])
        assert envs.recv(min_ready=99)[4]["env_id"].tolist() == [2, 3]  # all that there are


class Silent(Waiting):
    """An info would wake the main process too."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_the_reply_that_was_missing_ends_the_wait_and_no_other_does(pipes: list[Path], n_workers: int) -> None:
    looks = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal looks
        looks += event == "call" and frame.f_code.co_name == "_watch"

    with ShmVectorEnv([partial(Silent, pipe) for pipe in pipes], n_workers=n_workers) as envs:
        envs.reset()
        for _ in range(8):
            envs.send([2] * 4)
            for k, pipe in enumerate(pipes[:3], 1):  # most often, `recv` sleeps then
                (thread := Timer(0.02 * k, let_go, [pipe])).start()
            began = time.monotonic()
            sys.setprofile(count)
            try:
                ids = envs.recv(min_ready=3)[4]["env_id"].tolist()
            finally:
                sys.setprofile(None)
            assert ids == [0, 1, 2]
            assert time.monotonic() - began < 0.8, "a wait that nobody ends looks again after a second"
            thread.join()
            let_go(pipes[3])
            assert envs.recv()[4]["env_id"].tolist() == [3]
    assert looks < 8 * 3, "it sleeps once, or twice if it looks for deaths meanwhile"


@pytest.mark.slow
def test_a_reset_lets_outstanding_steps_end_first(pipes: list[Path]) -> None:
    with ShmVectorEnv([partial(Waiting, pipe) for pipe in pipes]) as envs:
        envs.reset()
        envs.send([0, 0, 0], [0, 1, 2])
        observation, _ = envs.reset()
        assert observation.tolist() == [[1, 0]] * 4
        with pytest.raises(SamplerStateError, match="expected now is step, step_async, send or reset"):
            envs.recv()
        # Of those that are not reset, results stay to be received.
        envs.send([0, 1], [1, 3])
        observation, _ = envs.reset(options={"reset_mask": np.array([True, True, False, False])})
        assert observation[:2].tolist() == [[2, 0]] * 2
        _, reward, _, _, infos = envs.recv()
        assert (infos["env_id"].tolist(), reward.tolist()) == ([3], [1])


def test_calls_between_sent_steps_wait_for_them_and_lose_nothing() -> None:
    with ShmVectorEnv([CountingEnv] * 3, in_series=2) as envs:
        envs.reset()
        envs.send([0, 0, 0])
        assert envs.get_attr("count") == (1, 1, 1)
        envs.broadcast({"reward_scale": 10.0}, [1])
        _, reward, _, _, infos = envs.recv(3)
        assert reward.tolist() == [1, 1, 1]
        assert infos["count"].tolist() == [1, 1, 1]
        envs.send([0, 0], [1, 2])
        assert envs.recv(2)[1].tolist() == [20, 2]


def test_what_is_out_of_order_or_does_not_fit_is_refused() -> None:
    with ShmVectorEnv([CountingEnv] * 3, autoreset_mode="DISABLED") as envs:
        with pytest.raises(SamplerStateError, match="expected now is reset"):
            envs.send([0, 0, 0])
        envs.reset()
        envs.send([0], [1])
        with pytest.raises(SamplerStateError, match=r"environments \[1\] have not been received yet: call recv"):
            envs.send([0, 0], [0, 1])
        with pytest.raises(SamplerStateError, match="expected now is recv, send or reset"):
            envs.step([0, 0, 0])
        for ids in ([3], [-1], [0, 0], [], [0.5], 1, [[0]]):
            with pytest.raises(ConfigError, match="env_ids must be different indices from 0 to 2"):
                envs.send([0], ids)  # type: ignore[arg-type]
        with pytest.raises(SpaceError, match=r"action must have shape \(2,\) and dtype int64, got shape \(3,\)"):
            envs.send([0, 0, 0], [0, 2])
        for wrong in (0, -1, 1.5, "all"):
            with pytest.raises(ConfigError, match="min_ready must be an integer of at least 1"):
                envs.recv(wrong)  # type: ignore[arg-type]
        envs.recv()
        for _ in range(4):
            envs.send([0], [1])
            envs.recv()
        with pytest.raises(SamplerStateError, match=r"environments \[1\] have ended, and autoreset_mode is DISABLED"):
            envs.send([0], [1])
        with pytest.raises(SamplerStateError, match=r"environments \[1\] have ended"):
            envs.step([0, 0, 0])


@pytest.mark.slow
@examples(5, 20)
@given(data=st.data(), mode=st.sampled_from(list(AutoresetMode)), n_workers=st.integers(1, 4))
def test_every_environment_goes_its_own_way(data: Any, mode: AutoresetMode, n_workers: int) -> None:
    """Whoever is sent to whenever: each environment's results are those of its own steps, each once, infos included."""
    lengths = [2, 3, 4, 5]
    with ShmVectorEnv(
        [partial(CountingEnv, length=length) for length in lengths], n_workers=n_workers, autoreset_mode=mode
    ) as envs:
        envs.reset()
        counts, is_over, away = [0] * 4, [False] * 4, set[int]()
        for _ in range(25):
            idle = sorted(set(range(4)) - away)
            chosen = data.draw(st.lists(st.sampled_from(idle), min_size=0 if away else 1, unique=True)) if idle else []
            if mode is AutoresetMode.DISABLED and (ended := [i for i in chosen if is_over[i]]):
                envs.reset(options={"reset_mask": np.isin(np.arange(4), ended)})
                for i in ended:
                    counts[i], is_over[i] = 0, False
            if chosen:
                envs.send(np.zeros(len(chosen), int), chosen)
                away |= set(chosen)
            observation, reward, terminated, _, infos = envs.recv(data.draw(st.integers(1, 4)))
            for k, i in enumerate(infos["env_id"].tolist()):
                away.remove(i)
                if is_over[i] and mode is AutoresetMode.NEXT_STEP:
                    counts[i], is_over[i] = 0, False
                    assert (reward[k], terminated[k]) == (0, False)
                    assert "count" not in infos or not infos["_count"][k]
                    continue
                counts[i] += 1
                is_over[i] = counts[i] == lengths[i]
                assert (reward[k], terminated[k]) == (counts[i], is_over[i])
                if is_over[i] and mode is AutoresetMode.SAME_STEP:
                    assert infos["final_obs"][k][1] == counts[i]
                    assert infos["final_info"]["count"][k] == counts[i]
                    counts[i], is_over[i] = 0, False
                else:
                    assert infos["count"][k] == counts[i]
                assert observation[k][1] == counts[i]


def test_a_wait_with_a_timeout(pipes: list[Path]) -> None:
    with ShmVectorEnv([partial(Waiting, pipe) for pipe in pipes]) as envs:
        envs.reset()
        envs.send([0, 2, 0, 0])
        assert envs.recv(3, timeout=60)[4]["env_id"].tolist() == [0, 2, 3]
        for seconds in (0.01, 0):
            with pytest.raises(WaitTimeoutError, match=rf"environments \[1\] .* within timeout={seconds} s"):
                envs.recv(timeout=seconds)
        let_go(pipes[1])
        assert envs.recv(timeout=60)[4]["env_id"].tolist() == [1]
        envs.send([0], [1])
        with pytest.raises(ConfigError, match="max_wait or timeout, not both"):
            envs.recv(max_wait=1, timeout=1)
        envs.recv()


@pytest.mark.slow
def test_a_failure_says_which_environment_was_stepping(tmp_path: Path) -> None:
    once, always = Fault("exit", marker=str(tmp_path / "marker")), Fault("exit")
    with ShmVectorEnv(
        [CountingEnv] * 3 + [faulty_env(CountingEnv, once)], n_workers=2, on_worker_failure="restart"
    ) as envs:
        envs.reset()
        assert list(envs.restarts) == []
        envs.step([0] * 4)
        (restart,) = envs.restarts
        assert (restart.rank, restart.env_rank) == (1, 3)
        assert "exited with code 0 while stepping env_rank 3" in restart.what
    with ShmVectorEnv([CountingEnv, faulty_env(CountingEnv, always), CountingEnv], n_workers=2) as envs:
        envs.reset()
        with pytest.raises(WorkerDiedError) as caught:
            envs.step([0] * 3)
        assert caught.value.env_rank == 1


def test_a_slow_environment_keeps_nobody_waiting(pipes: list[Path]) -> None:
    with ShmVectorEnv([partial(Waiting, pipe) for pipe in pipes]) as envs:
        envs.reset()
        envs.send([0, 2, 0, 0])
        seen: list[int] = []
        for _ in range(5):  # the others step on and on
            while not {0, 2, 3} <= set(seen):
                seen += envs.recv()[4]["env_id"].tolist()
            assert sorted(seen) == [0, 2, 3]
            envs.send([0, 0, 0], [3, 0, 2])
            seen = []
        _, reward, _, _, infos = envs.recv(min_ready=3)
        assert dict(zip(infos["env_id"].tolist(), reward.tolist(), strict=True)) == {0: 6, 2: 6, 3: 6}
        let_go(pipes[1])
        observation, reward, _, _, infos = envs.recv()
        assert infos["env_id"].tolist() == [1]
        assert infos["count"].tolist() == [1]
        assert infos["_count"].tolist() == [True]
        assert observation[:, 1].tolist() == reward.tolist() == [1]
        assert envs.step(np.zeros(4, int))[1].tolist() == [7, 2, 7, 7]
