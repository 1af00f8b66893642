"""The socket game follows its rules, recovers from a killed server, and leaves no process behind."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium.utils.env_checker import check_env

from penstock import GameError

from .. import starter
from .programs import ROOT, imported

pytestmark = [pytest.mark.xdist_group("ports"), pytest.mark.slow]


@pytest.fixture
def env() -> Any:
    with imported("socket_game") as module:
        game = module.SocketGame()
    pid = game.server_pid
    yield game
    game.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.filterwarnings("ignore:.*WARN.*")  # the game has no spec and no render mode
def test_the_game_keeps_gymnasiums_rules(env: Any) -> None:
    check_env(env, skip_render_check=True, skip_close_check=True)


def test_a_ball_is_caught_or_not(env: Any) -> None:
    for caught in (True, False):
        observation, _ = env.reset(seed=1)
        over = False
        for t in range(9):
            assert not over
            assert observation[1] == t
            way = observation[0] - observation[2]
            observation, reward, over, truncated, _ = env.step(1 + (way > 0) - (way < 0) if caught else 0)
        assert over
        assert not truncated
        assert (observation[0] == observation[2]) == caught == (reward == 1.0)


def test_a_killed_server_raises_an_error(env: Any) -> None:
    env.reset(seed=1)
    os.kill(env.server_pid, signal.SIGKILL)
    with pytest.raises(GameError, match="ended with SIGKILL"):
        for _ in range(9):
            env.step(1)


def test_the_example_recovers_from_a_killed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = tmp_path / "locks"
    monkeypatch.setenv("PENSTOCK_PORT_FOLDER", str(locks))
    done = starter.run("examples/socket_game.py", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 game was renewed" in done.stdout
    assert "env_rank 0 is built again (renewal 1), and its episode is cut: the game (pid" in done.stderr, (
        "the sampler logs the reason"
    )
    assert list(locks.iterdir()) == []
    servers = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert not any(str(ROOT / "examples" / "socket_game_server.py") in line for line in servers)
