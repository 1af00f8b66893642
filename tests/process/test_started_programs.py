"""What environments of the main process start ends with the main process: those of SerialSampler, and the example
environment. Its `close` leaves them running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ..scale import USUAL_METHODS, pairs, scaled
from ..support import PROGRAMS
from .support import SLACK, Script, gone_after, is_running, note

LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that has ended

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

KINDS = ("serial", "parallel", "vector")


def games_of(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "games").read_text().split()]


def members_of(pids: list[int]) -> list[int]:
    """The shells that were started, and their children."""
    children = [Path(f"/proc/{pid}/task/{pid}/children") for pid in pids]
    return [*pids, *(int(pid) for path in children if path.exists() for pid in path.read_text().split())]


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
