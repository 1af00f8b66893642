"""Deathmatches with two engines each: killed engines end no run, and nothing is left, whatever is killed."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import ParallelSampler, RandomAgent

from ..scale import scaled
from ..starter import Program, run
from ..support import until
from .programs import ROOT

pytest.importorskip("vizdoom")
pytest.importorskip("pettingzoo")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ports"), pytest.mark.timeout(scaled(3000, 120))]


def _files() -> set[str]:
    """The files of all engines of this machine. Each has them while it starts."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("ViZDoom")}


def _no_file_stays(before: set[str]) -> None:
    """Those of other runs go by themselves."""
    new = _files() - before
    until(lambda: not new & _files(), "the end of the engines' files")


def test_a_run_goes_on_when_engines_are_killed() -> None:
    sizes = scaled(("20000", "1000", "4"), ("100", "50", "2"))
    command = ("examples/vizdoom_match.py", "--steps", sizes[0], "--kill-every", sizes[1], "--n-envs", sizes[2])
    done = run(*command, cwd=ROOT, seconds=scaled(2900, 110))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left: 0 engines, 0 files" in done.stdout
    assert scaled("19 engines killed, 19 matches", "1 engines killed, 1 matches") in done.stdout


def test_nothing_is_left_after_the_main_process_is_killed() -> None:
    before = _files()
    n_envs = scaled(4, 2)
    command = ["examples/vizdoom_match.py", "--kill-every", 0, "--steps", 100_000, "--n-envs", n_envs]
    with Program(command, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("playing"):
                engines = [psutil.Process(int(pid)) for pid in line.split()[1:]]
                break
        assert len(engines) == 2 * n_envs
        ports = [c.laddr.port for c in psutil.net_connections("udp") if c.pid in {each.pid for each in engines}]
        assert len(ports) == 2 * n_envs
        process.kill()
        process.communicate()
    until(lambda: not any(each.is_running() for each in engines), "the end of the engines", 10)
    _no_file_stays(before)
    assert not {c.laddr.port for c in psutil.net_connections("udp")} & set(ports)


def test_one_player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the engine writes its settings here
    before = _files()

    def make() -> Any:
        import gymnasium as gym
        import vizdoom.gymnasium_wrapper  # noqa: F401 - it registers the scenarios

        return gym.make("VizdoomBasic-v1")

    with ParallelSampler(make, batch_T=10, batch_B=2, n_workers=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(3):
            samples, _ = sampler.obtain_samples(itr)
            screen = samples.env.observation.screen
            assert screen.shape == (10, 2, 240, 320, 3)
            assert screen.float().std() > 5
            assert samples.env.valid.all()
    _no_file_stays(before)
