"""The main process ends, however it ends, and nothing of it is left; what interrupts it does not harm it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import ParallelSampler, RandomAgent, SamplerState
from penstock.envs import CountingEnv, SlowEnv

from ..scale import FULL, START_METHODS, methods, scaled, with_start_methods
from ..support import BOUND, PROGRAMS, assert_same, until
from .support import SLACK, Script, check_counting, generator, gone_after, note, pause

LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that was killed

# How it is told to end, and the start method to try that with at quick scale.
TOLD = {signal.SIGTERM: "forkserver", signal.SIGHUP: "fork"}

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


def end_by(sig: int, folder: Path, start_method: str, delay: float, *, stuck: bool) -> str:
    """Run the script, signal it `delay` seconds after it has started to work; returns its stderr."""
    with Script(folder, PROGRAMS / "working.py", start_method=start_method, stuck=stuck) as script:
        workers = script.pids()
        if stuck:
            # The 60th step of its environment is the last of batch 2.
            until(lambda: script.line() == ["1"])
            until(lambda: psutil.Process(workers[1]).status() == psutil.STATUS_SLEEPING)
        pause(delay)
        everyone = script.descendants()
        games = [pid for worker in workers for pid in (c.pid for c in psutil.Process(worker).children())]
        assert len(games) == 4
        assert {*workers, *games} <= set(everyone)
        began = time.monotonic()
        script.process.send_signal(sig)
        _, stderr = script.end()
        assert script.process.returncode == -sig
        kind = "stuck in C, " if stuck else ""
        seconds = gone_after(everyone, began, LEFT_SECONDS)
        note(f"main process ended by {signal.Signals(sig).name}, {kind}to nothing left, s", seconds, LEFT_SECONDS)
    return stderr


@with_start_methods("stuck", [False, True], START_METHODS)
def test_a_killed_main_process_leaves_nothing(stuck: bool, tmp_path: Path, start_method: str) -> None:
    rng = generator("main", start_method, stuck)
    full, quick = (5, 1) if stuck else (100, {"fork": 2, "forkserver": 1, "spawn": 1}[start_method])
    for _ in range(scaled(full, quick)):
        stderr = end_by(signal.SIGKILL, tmp_path, start_method, rng.uniform(0, 0.1), stuck=stuck)
        assert stderr == ""


OF_OTHER_SAMPLERS = """
from penstock import SAMPLER
sampler = SAMPLER(SlowEnv, env_kwargs={"seconds": 0.001}, batch_T=20, batch_B=4, n_workers=2, OPTIONS)
sampler.initialize(RandomAgent())
if hasattr(sampler, "start"):
    sampler.start()
say(*sampler.worker_pids)
for itr in range(10**9):
    sampler.obtain_samples(itr)
"""


@pytest.mark.parametrize(
    ("cls", "options"),
    [("GpuSampler", 'server="process"'), ("AsyncSampler", ""), ("AsyncSampler", 'server="process"')],
)
def test_a_killed_main_process_of_another_sampler_leaves_nothing(cls: str, options: str, tmp_path: Path) -> None:
    rng = generator("main", cls, options)
    for _ in range(scaled(25, 1)):
        with Script(tmp_path, OF_OTHER_SAMPLERS.replace("SAMPLER", cls).replace("OPTIONS", options)) as script:
            assert len(script.pids()) == 2 + bool(options)
            pause(rng.uniform(0, 0.1))
            everyone, began = script.descendants(), time.monotonic()
            script.process.kill()
            assert script.end()[1] == ""
            seconds = gone_after(everyone, began, LEFT_SECONDS)
            note(f"main process of {cls} killed, to nothing left, s", seconds, LEFT_SECONDS)


FORGOTTEN = """
sampler = ParallelSampler(CountingEnv, batch_T=50, batch_B=2, n_workers=2, start_method=METHOD)
sampler.initialize(RandomAgent())
sampler.obtain_samples(0)
say(*sampler.worker_pids)
"""


@with_start_methods("ending", ["", "sampler.start_samples(1)", "del sampler", "raise SystemExit(3)", "1 / 0"])
def test_a_forgotten_shutdown_leaves_no_process(ending: str, start_method: str, tmp_path: Path) -> None:
    with Script(tmp_path, FORGOTTEN + ending, METHOD=start_method) as script:
        workers = script.pids()
        _, stderr = script.end()
        gone_after(workers, time.monotonic(), LEFT_SECONDS)
        assert script.process.returncode == {"raise SystemExit(3)": 3, "1 / 0": 1}.get(ending, 0)
    assert stderr.count("Traceback") == (ending == "1 / 0")
    assert ending == "1 / 0" or stderr == ""


@pytest.mark.parametrize(
    ("sig", "start_method"),
    [(sig, m) for sig in TOLD for m in ("fork", "forkserver", "spawn") if FULL or TOLD[sig] == m],
)
def test_a_main_process_that_is_told_to_end(sig: signal.Signals, tmp_path: Path, start_method: str) -> None:
    rng = generator("told", start_method, sig)
    for _ in range(scaled(20, 1)):
        assert end_by(sig, tmp_path, start_method, rng.uniform(0, 0.1), stuck=False) == ""


@methods("fork", "forkserver")
def test_ctrl_c_in_the_terminal(tmp_path: Path, start_method: str) -> None:
    rng = generator("ctrl-c", start_method)
    for _ in range(scaled(50, 1)):
        with Script(tmp_path, PROGRAMS / "working.py", start_method=start_method, stuck=False) as script:
            script.pids()
            pause(rng.uniform(0, 0.1))
            everyone = script.descendants()
            began = time.monotonic()
            os.killpg(script.pid, signal.SIGINT)
            _, stderr = script.end()
            note("Ctrl-C to the end of the script, s", time.monotonic() - began, 3.0 * SLACK)
            gone_after(everyone, began, 3.0 * SLACK + LEFT_SECONDS)
        assert script.process.returncode == -signal.SIGINT, stderr
        assert stderr.count("Traceback") == 1, stderr
        assert stderr.rstrip().endswith("KeyboardInterrupt")
        assert len(stderr.splitlines()) <= 16 + 2, stderr  # two are of the program that runs the script


@methods("forkserver")
def test_a_main_process_killed_while_workers_start(tmp_path: Path, start_method: str) -> None:
    rng = generator("starting", start_method)
    body = """
    class Slow(CountingEnv):
        def reset(self, **kwargs):
            time.sleep(60)
    sampler = ParallelSampler(Slow, batch_T=5, batch_B=2, n_workers=2, start_method=METHOD)
    say("now")
    sampler.initialize(RandomAgent())
    """
    for _ in range(scaled(20, 1)):
        with Script(tmp_path, body, METHOD=start_method) as script:
            script.line()
            until(lambda s=script: len(s.descendants()) >= 3)
            pause(rng.uniform(0, 0.3))
            everyone = script.descendants()
            began = time.monotonic()
            script.process.kill()
            gone_after(everyone, began, LEFT_SECONDS)
            assert script.end()[1] == ""


# ---- interruptions -------------------------------------------------------------------------


class Interrupts:
    """Sends this process a SIGINT from a process of its own."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def __enter__(self) -> None:
        code = f"import os, time; time.sleep({self._delay}); os.kill({os.getpid()}, 2)"
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code])

    def __exit__(self, *_: object) -> None:
        assert self._process.wait() == 0


@with_start_methods("where", ["training", "evaluation"])
def test_an_interrupted_call_changes_nothing_that_follows(where: str, start_method: str) -> None:
    def batches(interrupt: bool) -> list[Any]:
        arguments: dict[str, Any] = {"batch_T": 20, "batch_B": 2, "n_workers": 2, "eval_n_envs": 2}
        arguments.update(env_kwargs={"seconds": 0.002}, eval_env_kwargs={"seconds": 0.005}, eval_max_steps=10**6)
        kept = []
        with ParallelSampler(SlowEnv, start_method=start_method, **arguments) as sampler:
            sampler.initialize(RandomAgent(), seed=4)
            for itr in range(4):
                if interrupt and where == "evaluation" and itr % 2:
                    with Interrupts(0.05), pytest.raises(KeyboardInterrupt):
                        sampler.evaluate_agent(itr)
                    assert sampler.state is SamplerState.READY
                if interrupt and where == "training" and itr == 2:
                    sampler.start_samples(itr)
                    with Interrupts(0.0), pytest.raises(KeyboardInterrupt):
                        while True:
                            until(lambda: False, seconds=BOUND)
                    _, infos = sampler.wait_samples()
                else:
                    _, infos = sampler.obtain_samples(itr)
                assert len(infos) == int(sampler.samples_np.env.done.sum())
                kept.append(sampler.samples_np.copy())
        return kept

    assert_same(batches(True), batches(False))


@methods("forkserver")
def test_obtain_samples_interrupted_gives_its_batch_to_wait_samples(start_method: str) -> None:
    arguments: dict[str, Any] = {"batch_T": 100, "batch_B": 2, "n_workers": 2, "max_decorrelation_steps": 0}
    with ParallelSampler(SlowEnv, env_kwargs={"seconds": 0.003}, start_method=start_method, **arguments) as sampler:
        sampler.initialize(RandomAgent(), seed=4)
        with Interrupts(0.05), pytest.raises(KeyboardInterrupt):
            while True:
                sampler.obtain_samples(0)
        samples, infos = sampler.wait_samples() if sampler.state is SamplerState.SAMPLING else sampler.obtain_samples(1)
        check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
        assert len(infos) == int(samples.env.done.sum())
        sampler.obtain_samples(2)


@methods("fork")
def test_an_exception_in_the_users_loop_does_no_harm(start_method: str) -> None:
    with ParallelSampler(CountingEnv, batch_T=5, batch_B=2, n_workers=2, start_method=start_method) as sampler:
        sampler.initialize(RandomAgent())
        for itr in range(5):
            with pytest.raises(ZeroDivisionError):
                sampler.obtain_samples(itr)
                raise ZeroDivisionError
        assert sampler.state is SamplerState.READY
