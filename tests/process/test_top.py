"""`penstock top` beside runs of other processes, in each state that they can be in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import __version__, system
from penstock.__main__ import main
from penstock.tools import top

from ..children import exit_code_of_fork
from ..support import until
from ..traces import TraceFile
from .support import Script, is_running

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

STUCK = """
from penstock import GpuSampler
from penstock.vector import ShmVectorEnv
class Stuck(CountingEnv):
    n = 0
    def step(self, action):
        self.n += 1
        if self.n == 4:
            say(os.getpid())
            threading.Event().wait()
        return super().step(action)
FNS = [CountingEnv] * 3 + [Stuck]
def stick(cls, **options):
    with cls(FNS, batch_T=8, batch_B=4, n_workers=2, max_decorrelation_steps=0, **options) as sampler:
        sampler.initialize(RandomAgent())
        if cls is AsyncSampler:
            sampler.start(7)
        sampler.obtain_samples(7)
def stick_vector():
    with ShmVectorEnv(FNS, n_workers=2) as envs:
        envs.reset()
        for _ in range(4):
            envs.step([0] * 4)
"""
IDLE = """
def idle(n=1):
    samplers = [ParallelSampler(CountingEnv, batch_T=4, batch_B=3, n_workers=1) for _ in range(n)]
    for sampler in samplers:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    say(*(pid for sampler in samplers for pid in sampler.worker_pids))
    signal.sigwait([signal.SIGUSR2])
    for sampler in samplers:
        sampler.shutdown()
    say("closed")
    signal.pause()
"""


def frames(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    """The runs in one frame."""
    assert main(["top", *map(str, arguments), "--once", "--json"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    (line,) = output.splitlines()
    runs: list[dict[str, Any]] = json.loads(line, parse_constant=pytest.fail)["runs"]
    return runs


@pytest.mark.parametrize(
    "call", ["stick(ParallelSampler)", "stick(AsyncSampler)", 'stick(GpuSampler, server="process")', "stick_vector()"]
)
def test_a_hang_is_named_in_the_first_frame(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it hangs, and so does the main process, its stack and the trace can be read."""
    monkeypatch.setattr(top, "_SILENT", 0.2)
    with Script(tmp_path, f"{STUCK}\n{call}", new=False) as script:
        (worker,) = script.pids()
        (run,) = frames(capsys, script.pid)
        while run["workers"][0]["progress"]["phase"] not in ("WAITING", "REQUESTING"):  # a busy machine
            (run,) = frames(capsys, script.pid)
        has_batches = call != "stick_vector()"
        doing = "stepping env_rank 3, t=3" if has_batches else "stepping env_rank 3"
        _, stuck, *server = run["workers"]
        assert (stuck["pid"], stuck["env_ranks"], stuck["doing"]) == (worker, [2, 4], doing)
        assert stuck["silent"] > 0.2
        assert stuck["rss"] > 2**20
        assert [each["name"] for each in server] == ["the inference server"] * ("GpuSampler" in call)
        assert run["main"].startswith("waits for")
        assert run["itr"] == (7 if has_batches else 0)
        assert main(["top", str(script.pid), "--once"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "NO PROGRESS" in line]
        assert line.split()[:5] == ["1", str(worker), "2", "to", "3"]
        assert f"  {doing} for " in line
        assert main(["top", str(script.pid), "--stacks", "1"]) == 0
        shown = capsys.readouterr().out
        assert f"worker 1 (pid {worker}, env_rank 2 to 3), {doing}:\n" in shown
        assert "threading.py" in shown
        assert "_run_commands" in shown
        assert main(["top", str(script.pid), "--trace", str(tmp_path / "trace.json")]) == 0
        trace = TraceFile(tmp_path / "trace.json")
        (track,) = [place for place, name in trace.names.items() if name == "worker 1: env_rank 2 to 3"]
        last = max(trace.tracks[track], key=lambda span: span["ts"] + span["dur"])
        assert last["dur"] > 0.2e6, last
        assert is_running(worker)


@pytest.mark.parametrize("victim", ["main", "worker"])
def test_of_a_run_that_was_killed_the_last_state_stays(tmp_path: Path, victim: str) -> None:
    with Script(tmp_path, f"{STUCK}\nstick(ParallelSampler)") as script:
        (worker,) = script.pids()
        runs = top.Runs([script.pid])
        until(lambda: runs.look()[0]["main"] == "waits for 1 of 2 workers", "the end of the other's batch")
        os.kill(script.pid if victim == "main" else worker, signal.SIGKILL)
        until(lambda: runs.look()[0]["main"] == "has ended", "its end is seen")
        (after,) = runs.look()
        assert [each["doing"] for each in after["workers"]][1] == "stepping env_rank 3, t=3"
        assert (after["itr"], after["steps_per_second"]) == (7, 0.0)
        shown = top.frame([after])
        assert shown.startswith(f"ParallelSampler pid {script.pid} T=8 B=4  itr 7  has ended  up 0:")
        assert "NO PROGRESS" not in shown


@pytest.mark.linux("what only the kernel protects; elsewhere a file does")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_see_nothing_and_nothing_is_on_the_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def files() -> list[Path]:
        return [*Path(os.environ["PENSTOCK_RUN_FOLDER"]).glob("*")]  # another test may have made it

    before = files()
    with Script(tmp_path, f"{IDLE}\nidle()") as script:
        script.pids()

        def look() -> None:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            assert main(["top", "--once"]) == 1
            assert main(["top", str(script.pid)]) == 2

        assert exit_code_of_fork(look) == 0
        output, errors = capfd.readouterr()
        assert "no sampler or vector environment" in output
        assert f"process {script.pid} is another user's: only that user and root see what it does" in errors
        assert system.files_of(script.pid, "penstock-run")
        assert files() == before


def test_several_runs_of_a_process_and_how_they_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Script(tmp_path, f"{IDLE}\nidle(2)", new=True) as script:
        pids, runs = script.pids(), top.Runs([script.pid])
        found = frames(capsys, script.pid)
        assert sorted(each["pid"] for run in found for each in run["workers"]) == sorted(pids)
        assert {(run["kind"], run["batch_T"], run["batch_B"], run["main"]) for run in found} == {
            ("ParallelSampler", 4, 3, "has the results of all 1 workers")
        }
        assert str(script.process.args[-1]) in found[0]["command"]  # type: ignore[index]
        assert main(["top", str(script.pid), "--trace", str(tmp_path / "trace.json")]) == 0
        trace = TraceFile(tmp_path / "trace.json")
        assert sorted(pid for run in trace.runs for pid in run["pids"]) == sorted(pids)
        assert main(["top", str(script.pid), "--trace", str(tmp_path / "no" / "trace.json")]) == 2
        assert main(["top", str(pids[0])]) == 2
        assert f"process {pids[0]} has no sampler or vector environment with" in capsys.readouterr().err
        os.kill(pids[0], signal.SIGKILL)  # its main process does not wait for it
        until(lambda: "ITS PROCESS HAS ENDED" in top.frame(runs.look()), "its end is shown")


def test_a_pool_inside_of_a_worker_is_a_run_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = f"""{STUCK}
class Outer(CountingEnv):
    def reset(self, **kwargs):
        stick_vector()
with ShmVectorEnv([Outer]) as envs:
    envs.reset()
"""
    with Script(tmp_path, body) as script:
        (inner,) = script.pids()
        (run,) = frames(capsys, script.pid)
        (outer,) = run["workers"]
        assert outer["doing"] == "resetting env_rank 0"
        (nested,) = frames(capsys, outer["pid"])
        assert nested["workers"][1]["pid"] == inner
        assert nested["workers"][1]["doing"] == "stepping env_rank 3"
        assert main(["top", str(script.pid), "--stacks", "0"]) == 0
        assert "in stick_vector" in capsys.readouterr().out


def test_a_process_without_a_handler_is_not_asked_for_its_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal would kill it."""
    body = f"""{IDLE}
class Deaf(CountingEnv):
    def __init__(self):
        super().__init__()
        signal.signal({system.ASK_STACKS}, signal.SIG_DFL)
CountingEnv = Deaf
idle()
"""
    with Script(tmp_path, body) as script:
        (worker,) = script.pids()
        assert main(["top", str(script.pid), "--stacks"]) == 0
        says = "no stack: it has no handler of the signal" if system.OPENS_OTHERS else "it does not answer"
        assert says in capsys.readouterr().out
        assert is_running(worker)
        assert main(["top", str(script.pid), "--stacks", "1"]) == 2
        assert "there is no worker 1: give PID before --stacks" in capsys.readouterr().err


def test_a_run_of_another_format_is_named_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = f"from penstock.workers import about\nabout.FORMAT = 99\n{IDLE}\nidle()"
    with Script(tmp_path, body) as script:
        script.pids()
        assert main(["top", str(script.pid), "--once"]) == 2
        says = f"process {script.pid} runs penstock {__version__}. Its control block has format 99"
        assert says in capsys.readouterr().err
        main(["top", "--once"])
        assert says in capsys.readouterr().out


# ---- where a process cannot open what another one has open -------------------------------------------------


@pytest.fixture
def _without_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
    monkeypatch.setenv("PENSTOCK_RUN_FOLDER", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "without_linux"), prepend=os.pathsep)


def top_of(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "top", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("_without_linux")
def test_a_named_file_goes_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with Script(tmp_path, f"{IDLE}\nidle()", new=True) as script:
        (worker,) = script.pids()
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".penstock-run", ".penstock-stack0"]
        assert folder.stat().st_mode & 0o777 == 0o700
        done = top_of(script.pid, "--once", "--json")
        assert done.returncode == 0, done.stderr
        (run,) = json.loads(done.stdout)["runs"]
        assert [each["pid"] for each in run["workers"]] == [worker]
        assert "_run_commands" in top_of(script.pid, "--stacks").stdout
        os.kill(script.pid, signal.SIGUSR2)
        assert script.line() == ["closed"]
        assert [*folder.iterdir()] == []
        assert top_of("--once").returncode == 1


@pytest.mark.usefixtures("_without_linux")
def test_the_file_of_a_killed_run_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with Script(tmp_path, f"{IDLE}\nidle()", new=True) as script:
        script.pids()
        left = [*folder.iterdir()]
    assert len(left) == 3
    assert not psutil.pid_exists(script.pid)
    with Script(tmp_path, f"{IDLE}\nidle()", new=True) as script:
        script.pids()
        assert not {*left} & {*folder.iterdir()}
        assert len([*folder.iterdir()]) == 3
