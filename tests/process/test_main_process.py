"""The main process ends, however it ends: nothing of it is left, and another one continues its run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import RandomAgent, SerialSampler

from ..scale import START_METHODS, USUAL_METHODS, methods, pairs, scaled, with_start_methods
from ..support import PROGRAMS, until
from .support import SLACK, Script, generator, gone_after, is_running, note, pause

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that was killed

# How it is told to end, and the start method to try that with at quick scale.
TOLD = {signal.SIGTERM: "forkserver", signal.SIGHUP: "fork"}


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


@pytest.mark.parametrize(
    ("sig", "stuck", "start_method"),
    [
        *((signal.SIGKILL, *case) for case in pairs([False, True], START_METHODS)),
        *((sig, False, method) for sig, daily in TOLD.items() for method in scaled(START_METHODS, (daily,))),
    ],
)
def test_a_main_process_that_is_killed_or_told_to_end_leaves_nothing(
    sig: signal.Signals, stuck: bool, start_method: str, tmp_path: Path
) -> None:
    rng = generator("main", sig, start_method, stuck)
    for _ in range(scaled(5 if stuck else 50, 1)):
        assert end_by(sig, tmp_path, start_method, rng.uniform(0, 0.1), stuck=stuck) == ""


OF_OTHER_SAMPLERS = """
from penstock import SAMPLER
sampler = SAMPLER(SlowEnv, env_kwargs={"seconds": 0.001}, batch_T=20, batch_B=4, n_workers=2, OPTIONS)
sampler.initialize(RandomAgent())
if hasattr(sampler, "start"):
    sampler.start()
say("now")
for itr in range(10**9):
    sampler.obtain_samples(itr)
"""
STARTING = """
class Slow(CountingEnv):
    def reset(self, **kwargs):
        time.sleep(60)
sampler = ParallelSampler(Slow, batch_T=5, batch_B=2, n_workers=2, start_method="METHOD")
say("now")
sampler.initialize(RandomAgent())
"""
BODIES = {
    **{method: STARTING.replace("METHOD", method) for method in scaled(START_METHODS, ("forkserver",))},
    **{
        f"{cls}, {options}": OF_OTHER_SAMPLERS.replace("SAMPLER", cls).replace("OPTIONS", options)
        for cls, options in (
            ("GpuSampler", 'server="process"'),
            ("AsyncSampler", ""),
            ("AsyncSampler", 'server="process"'),
        )
    },
}


@pytest.mark.parametrize("what", BODIES)
def test_a_main_process_that_is_killed_while_workers_start_or_with_another_sampler(what: str, tmp_path: Path) -> None:
    rng = generator("main", what)
    for _ in range(scaled(25, 1)):
        with Script(tmp_path, BODIES[what]) as script:
            assert script.line() == ["now"]
            until(lambda s=script: len(s.descendants()) >= 3)
            pause(rng.uniform(0, 0.3))
            everyone, began = script.descendants(), time.monotonic()
            script.process.kill()
            assert script.end()[1] == ""
            seconds = gone_after(everyone, began, LEFT_SECONDS)
            note(f"main process of {what} killed, to nothing left, s", seconds, LEFT_SECONDS)


FORGOTTEN = """
sampler = ParallelSampler(CountingEnv, batch_T=50, batch_B=2, n_workers=2, start_method=METHOD)
sampler.initialize(RandomAgent())
sampler.obtain_samples(0)
say(*sampler.worker_pids)
"""


@with_start_methods("ending", ["", "sampler.start_samples(1)", "del sampler", "raise SystemExit(3)", "1 / 0"])
def test_a_forgotten_shutdown_leaves_no_process(ending: str, start_method: str, tmp_path: Path) -> None:
    with Script(tmp_path, FORGOTTEN + ending, tears_down=True, METHOD=start_method) as script:
        workers = script.pids()
        _, stderr = script.end()
        gone_after(workers, time.monotonic(), LEFT_SECONDS)
        assert script.process.returncode == {"raise SystemExit(3)": 3, "1 / 0": 1}.get(ending, 0)
    assert stderr.count("Traceback") == (ending == "1 / 0")
    assert ending == "1 / 0" or stderr == ""


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


# ---- what environments have started --------------------------------------------------------------


KINDS = ("serial", "parallel", "vector")


def games_of(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "games").read_text().split()]


def members_of(pids: list[int]) -> list[int]:
    """The shells that were started, and their children."""
    found = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            found += [child.pid for child in psutil.Process(pid).children()]
    return found


@pytest.mark.parametrize(("kind", "start_method"), pairs(KINDS, USUAL_METHODS))
@pytest.mark.parametrize("end", ["kill", "shutdown", "building"])
def test_no_game_outlives_the_main_process(kind: str, start_method: str, end: str, tmp_path: Path) -> None:
    given = {"start_method": start_method, "games": str(tmp_path / "games"), "kind": kind, "end": end}
    with Script(tmp_path, PROGRAMS / "games.py", **given) as script:
        (own,) = script.pids()
        if end == "building":
            assert script.line() == ["building"]
        try:
            games = members_of(games_of(tmp_path))
            assert len(games) >= 2
            began = time.monotonic()
            if end == "shutdown":
                script.process.send_signal(signal.SIGTERM)
            else:
                script.process.kill()
            note("end of the main process to no game left, s", gone_after(games, began, LEFT_SECONDS), LEFT_SECONDS)
            assert is_running(own)
        finally:
            os.kill(own, signal.SIGKILL)


SERVED = """
from penstock import SerialSampler
class Client(CountingEnv):
    server = None
    def __init__(self):
        super().__init__()
        if Client.server is None:
            Client.server = subprocess.Popen(["cat"], stdin=-1, stdout=-1, bufsize=0)
    def step(self, action):
        self.server.stdin.write(b"x")
        assert self.server.stdout.read(1) == b"x"
        return super().step(action)
for _ in range(2):
    with SerialSampler(Client, batch_T=5, batch_B=2) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
Client.server.communicate()
"""


def test_a_program_that_serves_all_environments_of_a_process_stays(tmp_path: Path) -> None:
    """The first environment starts it. So the end of an environment, or of a sampler, must not end it."""
    with Script(tmp_path, SERVED) as script:
        assert script.end() == ("", "")
        assert script.process.returncode == 0


# ---- a run that is killed and continued ----------------------------------------------------------


def straight(env_id: str, n_batches: int, options: dict[str, Any]) -> list[str]:
    """The digests of one run."""
    digests = []
    with SerialSampler(env_id, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        for itr in range(n_batches):
            _, infos = sampler.obtain_samples(itr)
            words = hashlib.sha256(repr([vars(info) for info in infos]).encode())
            for _, leaf in sampler.samples_np.leaves():
                words.update(leaf.tobytes())
            digests.append(words.hexdigest())
    return digests


@pytest.mark.parametrize("env_id", scaled(("CartPole-v1", "Blackjack-v1", "FrozenLake-v1"), ("CartPole-v1",)))
def test_a_run_that_is_killed_continues_as_if_nothing_had_happened(env_id: str, tmp_path: Path) -> None:
    n_batches, n_kills = scaled(60, 8), scaled(12, 2)
    options: dict[str, Any] = {"batch_T": 20, "batch_B": 6, "max_decorrelation_steps": 30, "seed_episodes": True}
    rng, path = generator("resume", env_id), tmp_path / "checkpoint.pt"
    variables = {"env_id": env_id, "path": str(path), "n_batches": n_batches, "settings": options}
    for i in range(n_kills + 1):
        kind, n_workers = rng.choice([("serial", 1), ("parallel", 1), ("parallel", 2), ("parallel", 3)])
        with Script(tmp_path, PROGRAMS / "resumed.py", kind=kind, n_workers=n_workers, **variables) as script:
            _, began = script.line()
            if i == n_kills:
                _, errors = script.end()
                assert script.process.returncode == 0, errors
                break
            for _ in range(min(rng.randrange(1, 4), n_batches - int(began) - 1)):
                script.line()
            pause(rng.uniform(0, 0.03))
            os.kill(script.pid, signal.SIGKILL)
            script.end()
    assert torch.load(path)["digests"] == straight(env_id, n_batches, options)
