"""However the main process ends, no worker outlives it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ..children import exit_code_of_fork
from ..process.support import is_running
from ..scale import FULL, START_METHODS, USUAL_METHODS, pairs, scaled, with_start_methods
from ..starter import Program

pytestmark = [pytest.mark.usefixtures("starter"), pytest.mark.slow]
ENDING = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]
LATER_METHODS = scaled(("forkserver", "spawn", "fork"), ("forkserver", "fork"))

HEAD = """
import os, sys, time, signal
from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv, SlowEnv
def start(env=CountingEnv, **kwargs):
    sampler = ParallelSampler(env, batch_T=50, batch_B=2, n_workers=2, start_method=METHOD, **kwargs)
    sampler.initialize(RandomAgent())
    sampler.obtain_samples(0)
    print(*sampler.worker_pids, flush=True)
    return sampler
"""


def launch(tmp_path: Path, method: str, body: str, *, new: bool = False) -> "subprocess.Popen[str]":
    """Run a script that prints its workers' process ids in its first line. `new`: in a new interpreter."""
    script = tmp_path / "script.py"
    # At the script's top level, without a __main__ guard: the workers must not run it again.
    script.write_text(f"METHOD = {method!r}\n{HEAD}\n{textwrap.dedent(body)}")
    if not new:
        return Program([script], strict=True, light=True)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    # A script may have ended before this process looks: its workers are gone then.
    return [psutil.Process(int(pid)) for pid in line.split() if psutil.pid_exists(int(pid))]


def assert_gone(workers: list[psutil.Process]) -> None:
    """They have ended within 2 s. Since their parent has ended too, they may stay zombies for some seconds."""
    _, left = psutil.wait_procs(workers, timeout=2)
    assert not [process for process in left if is_running(process.pid)]


FORGOTTEN = ""


@pytest.mark.parametrize(
    ("ending", "start_method"),
    [
        *scaled([], [(FORGOTTEN, "fork")]),
        *pairs([FORGOTTEN, "sampler.start_samples(1)", "del sampler", "raise SystemExit(3)", "1 / 0"], LATER_METHODS),
    ],
)
def test_a_forgotten_shutdown_leaves_no_process(tmp_path: Path, ending: str, start_method: str) -> None:
    process = launch(
        tmp_path, start_method, f"sampler = start()\n{ending}", new=FULL and not ending and start_method == "forkserver"
    )
    workers = workers_of(process)
    _, stderr = process.communicate(timeout=30)
    assert_gone(workers)
    if "1 / 0" in ending:
        assert stderr.count("Traceback") == 1
    else:
        assert stderr == ""
    assert process.returncode == {"raise SystemExit(3)": 3, "1 / 0": 1}.get(ending, 0)


@pytest.mark.parametrize(
    ("sig", "start_method"),
    [
        *scaled([], [(signal.SIGKILL, method) for method in USUAL_METHODS]),
        *pairs(scaled(ENDING, ENDING[1:]), scaled(START_METHODS, ("fork", "forkserver"))),
    ],
)
def test_workers_die_with_a_killed_main_process(tmp_path: Path, sig: signal.Signals, start_method: str) -> None:
    body = """
    sampler = start(SlowEnv, env_kwargs={"seconds": 0.001})
    while True:
        sampler.obtain_samples(1)
    """
    process = launch(tmp_path, start_method, body)
    workers = workers_of(process)
    process.send_signal(sig)
    process.communicate(timeout=30)
    assert process.returncode == -sig
    assert_gone(workers)


@with_start_methods("sig", [signal.SIGKILL, signal.SIGTERM])
def test_what_environments_started_dies_with_a_killed_main_process(
    tmp_path: Path, sig: signal.Signals, start_method: str
) -> None:
    body = """
    import subprocess
    class Game(CountingEnv):
        def reset(self, **kwargs):
            if not hasattr(self, "game"):
                self.game = subprocess.Popen(["sleep", "600"])
                with open(FOLDER + f"/{self.game.pid}", "w"):
                    pass
            return super().reset(**kwargs)
    sampler = start(Game)
    time.sleep(60)
    """
    pids = tmp_path / "pids"
    pids.mkdir()
    process = launch(tmp_path, start_method, f"FOLDER = {str(pids)!r}\n" + textwrap.dedent(body))
    workers = workers_of(process)
    games = [psutil.Process(int(path.name)) for path in pids.iterdir()]
    assert len(games) == 2
    process.send_signal(sig)
    process.communicate(timeout=30)
    assert_gone(workers + games)


@with_start_methods("where", ["training", "sampling", "starting"], START_METHODS)
def test_ctrl_c_gives_one_traceback_and_leaves_no_process(tmp_path: Path, where: str, start_method: str) -> None:
    bodies = {
        "training": "sampler = start()\nprint(flush=True)\ntime.sleep(60)",
        "sampling": """
            sampler = start(SlowEnv, env_kwargs={"seconds": 0.001})
            print(flush=True)
            while True:
                sampler.obtain_samples(1)
            """,
        "starting": """
            class Slow(CountingEnv):
                def reset(self, **kwargs):
                    print(os.getpid(), flush=True)
                    time.sleep(60)
            ParallelSampler(Slow, batch_T=50, batch_B=1, start_method=METHOD).initialize(RandomAgent())
            """,
    }
    process = launch(tmp_path, start_method, bodies[where])
    workers = workers_of(process)
    if where != "starting":
        assert process.stdout is not None
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, stderr = process.communicate(timeout=30)
    assert_gone(workers)
    assert process.returncode == -signal.SIGINT
    assert stderr.count("Traceback") == 1, stderr
    assert stderr.strip().endswith("KeyboardInterrupt")


def test_a_batch_survives_a_keyboard_interrupt_of_the_wait() -> None:
    import threading

    from penstock import ParallelSampler, RandomAgent, SamplerState
    from penstock.envs import SlowEnv

    with ParallelSampler(SlowEnv, env_kwargs={"seconds": 0.01}, batch_T=60, batch_B=1, n_workers=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start_samples(0)
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sampler.wait_samples()
        timer.join()
        assert sampler.state is SamplerState.SAMPLING
        samples, _ = sampler.wait_samples()
        assert (samples.env.reward > 0).all()


def test_a_fork_of_the_main_process_owns_nothing() -> None:
    from penstock import ParallelSampler, RandomAgent
    from penstock.envs import CountingEnv

    with ParallelSampler(CountingEnv, batch_T=4, batch_B=1) as sampler:
        sampler.initialize(RandomAgent())
        assert exit_code_of_fork(sampler.shutdown) == 0
        sampler.obtain_samples(0)
