"""Calls in two halves, as AsyncVectorEnv has them, their timeouts, and errors that are also Gymnasium's."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from penstock import ConfigError, SamplerClosedError, SamplerStateError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

pytestmark = pytest.mark.slow


class Slow(CountingEnv):
    """Takes its time."""

    def __init__(self, step: float = 0.0, reset: float = 0.0) -> None:
        super().__init__()
        self.step_seconds, self.reset_seconds = step, reset

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(self.reset_seconds)
        observation, _ = super().reset(**kwargs)
        return observation, {"options": str(kwargs.get("options"))}

    def step(self, action: Any) -> Any:
        time.sleep(self.step_seconds)
        return super().step(action)


def test_a_reset_in_two_halves() -> None:
    with ShmVectorEnv([CountingEnv] * 2) as envs:
        for _ in range(2):
            envs.reset_async(seed=3, options={"reset_mask": np.array([True, True])})
            observation, _ = envs.reset_wait()
            assert observation[:, 1].tolist() == [0, 0]
            assert envs.step([0, 0])[1].tolist() == [1, 1]
        envs.reset_async(options={"reset_mask": np.array([True, False])})
        assert envs.reset_wait()[0][:, 1].tolist() == [0, 1]
        envs.reset_async()
        assert envs.reset()[0][:, 1].tolist() == [0, 0]
        assert envs.step([0, 0])[1].tolist() == [1, 1]


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_reset_of_some_during_a_step_drops_their_results(mode: str) -> None:
    with ShmVectorEnv([Slow] * 2, autoreset_mode=mode) as envs:
        envs.reset()
        envs.step_async([0, 0])
        _, infos = envs.reset(options={"reset_mask": np.array([True, False]), "n": 1})
        assert infos["options"].tolist() == ["{'n': 1}", None]
        observation, reward, *_, infos = envs.step_wait()
        assert observation[:, 1].tolist() == [0, 1]
        assert reward.tolist() == [0, 1]
        assert infos["_count"].tolist() == [False, True]
        assert "options" not in infos, "the info of the reset does not come twice"
        assert envs.step([0, 0])[1].tolist() == [1, 2]


def test_options_of_each_environment() -> None:
    with ShmVectorEnv([Slow] * 2) as envs:
        assert envs.reset(options=[{"a": 1}, None])[1]["options"].tolist() == ["{'a': 1}", "None"]
        for wrong in ([{}], [{}, 3], 3):
            with pytest.raises(ConfigError, match="options must be None, a dict, or a list of 2 dicts"):
                envs.reset(options=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, 0.1])
def test_a_step_that_is_late_goes_on(timeout: float) -> None:
    with ShmVectorEnv([partial(Slow, 0.5), CountingEnv]) as envs:
        envs.reset()
        envs.step_async([0, 0])
        with pytest.raises(
            TimeoutError, match=r"step_wait: environments \[0\] have not finished within timeout"
        ) as error:
            time.sleep(0.1)
            envs.step_wait(timeout=timeout)
        assert isinstance(error.value, multiprocessing.TimeoutError)
        assert envs.step_wait(timeout=20)[1].tolist() == [1, 1]
        assert envs.step([0, 0])[1].tolist() == [2, 2]
        envs.step_async([0, 0])
        for wrong in (-1, "soon", True):
            with pytest.raises(ConfigError, match="timeout must be a positive number of seconds"):
                envs.step_wait(timeout=wrong)  # type: ignore[arg-type]


def test_a_reset_that_is_late_goes_on() -> None:
    with ShmVectorEnv([partial(Slow, reset=0.4), CountingEnv]) as envs:
        envs.reset_async()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"call reset_wait again"):
            envs.reset_wait(timeout=0.05)
        assert time.monotonic() - began < 0.35
        assert envs.reset_wait(timeout=20)[0][:, 1].tolist() == [0, 0]
        assert envs.step([0, 0])[1].tolist() == [1, 1]


def test_errors_of_calls_out_of_order_are_also_gymnasiums() -> None:
    envs = ShmVectorEnv([CountingEnv] * 2)
    with pytest.raises(SamplerStateError, match="step was called out of order: the call expected now is reset"):
        envs.step([0, 0])
    for call in (envs.step_wait, envs.reset_wait, envs.recv):
        with pytest.raises(NoAsyncCallError, match=f"{call.__name__} was called out of order") as none:
            call()
        assert isinstance(none.value, SamplerStateError)
        assert none.value.name == call.__name__
    envs.reset_async()
    with pytest.raises(AlreadyPendingCallError, match="the call expected now is reset_wait") as pending:
        envs.reset_async()
    assert isinstance(pending.value, SamplerStateError)
    assert pending.value.name == "reset"
    envs.reset_wait()
    for begin, name in ((envs.send, "send"), (envs.step_async, "step")):
        begin([0, 0])
        for call in (lambda: envs.step([0, 0]), lambda: envs.step_async([0, 0]), envs.step_wait):
            if (name, call) != ("step", envs.step_wait):
                with pytest.raises(AlreadyPendingCallError) as pending:
                    call()
                assert pending.value.name == name
        if name == "step":
            for call in (lambda: envs.step_async([0, 0]), lambda: envs.get_attr("count"), envs.recv):
                with pytest.raises(SamplerStateError, match="the call expected now is step_wait"):
                    call()
        observation, infos = envs.reset()  # lets the step end
        assert (observation[:, 1].tolist(), infos) == ([0, 0], {})
        assert envs.step([0, 0])[1].tolist() == [1, 1]
    envs.close()
    envs.close()
    assert envs.closed
    assert repr(envs) == "ShmVectorEnv(num_envs=2)"
    for call in (lambda: envs.step([0, 0]), envs.reset, envs.render):
        with pytest.raises(ClosedEnvironmentError, match="after close: make a new vector environment") as closed:
            call()
        assert isinstance(closed.value, SamplerClosedError)


def test_a_reset_that_is_refused_loses_no_step() -> None:
    """The workers still reset when the second call fails: the step must not take their answer."""
    with ShmVectorEnv([partial(Slow, reset=0.1)] * 2, n_workers=2) as envs:
        envs.reset()
        envs.reset_async()
        with pytest.raises(ConfigError, match="seed"):
            envs.reset(seed="x")  # type: ignore[arg-type]
        with pytest.raises(AlreadyPendingCallError):
            envs.step([0, 0])
        envs.reset_wait()
        assert envs.step([0, 0])[1].tolist() == [1, 1]
