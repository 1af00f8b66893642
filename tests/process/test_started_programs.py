"""What environments of the main process start ends with the main process: those of SerialSampler and `serve_envs`, and
the example environment. Its `close` leaves them running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from textwrap import indent

import pytest

from ..scale import START_METHODS, pairs, scaled
from .support import SLACK, Script, gone_after, is_running, note

LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that has ended

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

# Every environment starts a game in its process group, and one in a new session. Its first reset and first step start
# others.
HEAD = """
from penstock import GpuSampler, SerialSampler
from penstock.vector import ShmVectorEnv
sleep = ["/bin/sh", "-c", "sleep 600 & sleep 600"]
def start(**how):  # a Popen would warn that it was left
    game = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    game.returncode = 0
    with open(FOLDER + "/games", "a") as file:
        file.write(f"{game.pid}\\n")
class Game(CountingEnv):
    def __init__(self):
        super().__init__()
        start()
        start(start_new_session=True)
        self.has_reset = self.has_stepped = False
        if BUILDING:
            say("building")
            time.sleep(600)
    def reset(self, **kwargs):
        if not self.has_reset:
            start()
        self.has_reset = True
        return super().reset(**kwargs)
    def step(self, action):
        if not self.has_stepped:
            start()
        self.has_stepped = True
        return super().step(action)
own = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
own.returncode = 0
def sampler(cls, **how):
    return cls(Game, batch_T=5, batch_B=2, start_method=METHOD, **how)
"""

SAMPLERS = {
    "serial": "sampler(SerialSampler)",
    "parallel": "sampler(ParallelSampler, n_workers=1)",
    "serve_envs": "sampler(GpuSampler, n_workers=1, serve_envs=1)",
    "vector": "ShmVectorEnv([Game, Game], context=METHOD)",
}
SAMPLE = """
if MADE.startswith("Shm"):
    envs.reset()
else:
    envs.initialize(RandomAgent())
    envs.obtain_samples(0)
"""


def games_of(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "games").read_text().split()]


def members_of(pids: list[int]) -> list[int]:
    """The shells that were started, and their children."""
    children = [Path(f"/proc/{pid}/task/{pid}/children") for pid in pids]
    return [*pids, *(int(pid) for path in children if path.exists() for pid in path.read_text().split())]


@pytest.mark.parametrize(("kind", "start_method"), pairs(SAMPLERS, START_METHODS))
@pytest.mark.parametrize("end", ["kill", "shutdown", "building"])
def test_no_game_outlives_the_main_process(kind: str, start_method: str, end: str, tmp_path: Path) -> None:
    made = SAMPLERS[kind]
    work = {
        "kill": f"envs = {made}\n{SAMPLE}\nsay(own.pid)\ntime.sleep(600)",
        "shutdown": f"with {made} as envs:\n{indent(SAMPLE, '    ')}\nsay(own.pid)\nsys.stdin.read()",
        "building": f"say(own.pid)\nenvs = {made}\n{SAMPLE}",
    }[end]
    settings = {"METHOD": start_method, "FOLDER": str(tmp_path), "BUILDING": end == "building", "MADE": made}
    with Script(tmp_path, f"{HEAD}\n{work}", **settings) as script:
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


def test_a_program_that_serves_all_environments_of_a_process_stays(tmp_path: Path) -> None:
    """The first environment starts it. So the end of an environment, or of a sampler, must not end it."""
    body = """
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
    with Script(tmp_path, body) as script:
        assert script.end() == ("", "")
        assert script.process.returncode == 0
