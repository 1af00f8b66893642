"""An evaluation in a process of its own."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock import (
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    EvalResults,
    SamplerStateError,
    WorkerDiedError,
    WorkerError,
    evaluate,
    start_evaluation,
)
from penstock.__main__ import main
from penstock.evaluation import background
from penstock.vector.vector_pool import WaitTimeoutError
from penstock.workers import launcher

from ..models import Net
from ..support import assert_same, until
from ..traces import TraceFile
from .reach import CHUNK, TASKS, Guilty, Moody, Reach, hang, moody, played, serial, vla

ARGUMENTS: dict[str, Any] = {"success": "is_success", "episodes": 3, "tasks": TASKS, "n_workers": 1, "batch_B": 2}
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_the_same_results() -> None:
    with start_evaluation(vla, Reach, **ARGUMENTS) as running:
        found = running.wait(60)
        assert running.is_done
        assert running.wait() is found
    assert found.episodes == evaluate(vla, Reach, **ARGUMENTS).episodes
    assert played(found) == serial(range(3))
    env, _ = found.episode("policy", "desk", 2).run()
    env.close()


def test_the_agent_as_it_was_and_a_folder_of_both_and_training_beside_it_is_the_same(tmp_path: Path) -> None:
    """The folder takes a process of its own and the caller's for the same policies, and other parameters for others."""

    def batches(evaluates: bool) -> list[Any]:
        agent = CategoricalPgAgent(partial(Net, 4, 2, 0), greedy_eval=True)
        policies = {"agent": agent, "function": lambda observation: (observation[:, 2] > 0).astype(int)}
        play = partial(evaluate, policies, "CartPole-v1", n_workers=1)
        with AsyncSampler("CartPole-v1", batch_T=8, batch_B=2, n_workers=1, lag=1) as sampler:
            sampler.initialize(agent, seed=0)
            sampler.start()
            with contextlib.ExitStack() as stack:
                if evaluates:
                    before = play(episodes=4)
                    play(episodes=1, folder=tmp_path)
                    running = start_evaluation(policies, "CartPole-v1", episodes=4, n_workers=1, folder=tmp_path)
                    stack.enter_context(running)
                found = []
                for itr in range(6):
                    found.append(sampler.obtain_samples(itr)[0].copy())
                    with torch.no_grad():
                        for parameter in agent.model.heads[0].parameters():  # training: now the other action is greedy
                            parameter.mul_(0.9 if itr else -0.9)
                    agent.sync_shared_memory()
                if evaluates:
                    assert running.wait(60).episodes == before.episodes
                    with pytest.raises(ConfigError, match="its code, its parameters"):
                        play(episodes=4, folder=tmp_path)
            return found

    assert_same(batches(True), batches(False))


def fault(path: Path, number: int, t: int) -> None:
    (path / "stepping").touch()
    hang()


def test_it_is_cancelled_and_killed_and_ends_with_its_object(tmp_path: Path) -> None:
    slow, folder = partial(Reach, fault=partial(fault, tmp_path)), tmp_path / "folder"
    running = start_evaluation(vla, slow, **ARGUMENTS, folder=folder)
    until((tmp_path / "stepping").exists, "the first step", 60)
    assert not running.is_done
    with pytest.raises(ConfigError, match="is in use by another evaluation"):
        evaluate(vla, Reach, **ARGUMENTS, folder=folder)
    with pytest.raises(WaitTimeoutError, match="it continues"):
        running.wait(0)
    running.cancel()
    running.cancel()
    with pytest.raises(SamplerStateError, match="was cancelled"):
        running.wait()
    with start_evaluation(vla, slow, **ARGUMENTS) as running:
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="ended without results: it was killed by SIGKILL"):
            running.wait(60)
    (tmp_path / "stepping").unlink()
    running = start_evaluation(vla, slow, **ARGUMENTS)
    until((tmp_path / "stepping").exists, "the first step", 60)
    with pytest.warns(ResourceWarning, match="was ended, since nothing referred to it"):
        del running  # the fixture `nothing_left` looks for its processes


def test_errors_and_warnings() -> None:
    with start_evaluation(moody, Reach, **ARGUMENTS) as running, pytest.raises(Moody, match="I will not"):
        running.wait(60)
    with pytest.raises(ConfigError, match="start_evaluation has no argument 'episode': did you mean 'episodes'"):
        start_evaluation(vla, Reach, episode=3)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        start_evaluation(vla, Reach, options=threading.Lock().acquire)
    faulty = partial(Reach, fault=Guilty(partial(operator.truediv, 1, 0), None))
    with (
        start_evaluation(vla, faulty, **{**ARGUMENTS, "episodes": 10, "attempts": 1}) as running,
        pytest.warns(RuntimeWarning, match="episodes failed by their environment"),
    ):
        found = running.wait(60)
    assert found.failed


# ---- who waits, and who does not -------------------------------------------------------------------------


def wait_for(file: Path, number: int, t: int) -> None:
    while not file.exists():
        time.sleep(0.001)


def test_one_with_a_folder_goes_on_when_nothing_refers_to_it(tmp_path: Path) -> None:
    slow = partial(Reach, fault=partial(wait_for, tmp_path / "go"))
    pid = start_evaluation(vla, slow, **ARGUMENTS, folder=tmp_path / "folder").pid
    assert psutil.pid_exists(pid)
    (tmp_path / "go").touch()
    until(lambda: all(process.join(0) is not None for process in background._unkept), "its end", 60)
    background._unkept.clear()
    found = EvalResults.load(tmp_path / "folder")  # no warning: it is complete
    assert played(found) == serial(range(3))


DROPS = """
import gymnasium, sys
from penstock import start_evaluation
if __name__ == "__main__":
    idle = lambda observation: [0] * len(observation)
    print(start_evaluation(idle, "CartPole-v1", episodes=10**5, n_workers=1, folder=sys.argv[1]).pid)
"""


def test_it_ends_with_the_main_process_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(DROPS)
    command = [sys.executable, "-W", "error", str(tmp_path / "drops.py"), str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    until(lambda: not psutil.pid_exists(int(done.stdout)), "its end", 30)


def in_threads(n: int, call: Callable[[], Any], meanwhile: Callable[[], Any]) -> list[Any]:
    """What this returns in n threads, or raises."""
    found: list[Any] = []

    def keep() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=keep) for _ in range(n)]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(60)
    assert len(found) == n
    return found


def test_several_threads_wait(tmp_path: Path) -> None:
    with start_evaluation(vla, partial(Reach, fault=partial(wait_for, tmp_path / "go")), **ARGUMENTS) as running:
        late = in_threads(3, lambda: running.wait(0.01), lambda: running.is_done)
        assert all(isinstance(error, WaitTimeoutError) for error in late)
        found = in_threads(4, lambda: running.wait(60), (tmp_path / "go").touch)
    assert played(found[0]) == serial(range(3))
    assert all(results is found[0] for results in found)
    assert running.wait() is found[0]


def hold(path: Path, number: int, t: int) -> None:
    if t == CHUNK and not (path / "go").exists():
        (path / f"{os.getpid()}.held").touch()
        wait_for(path / "go", number, t)


def test_a_trace_of_evaluations_shows_their_workers_on_one_clock(tmp_path: Path) -> None:
    """`penstock top --trace` writes it while they play: here, and in a process of its own. All workers hang then."""
    held, file = partial(Reach, fault=partial(hold, tmp_path)), tmp_path / "trace.json"
    arguments, moments = {**ARGUMENTS, "n_workers": 2}, list[int]()

    def look() -> None:
        until(lambda: len(list(tmp_path.glob("*.held"))) == 4, "the hang of all workers", 60)
        moments.append(time.time_ns())
        assert main(["top", str(running.pid), str(os.getpid()), "--trace", str(file)]) == 0
        moments.append(time.time_ns())
        (tmp_path / "go").touch()

    with start_evaluation(vla, held, **arguments) as running:
        (here,) = in_threads(1, partial(evaluate, vla, held, **arguments), look)
        assert here.episodes == running.wait(60).episodes
    trace, workers = TraceFile(file), {int(path.stem) for path in tmp_path.glob("*.held")}
    runs = [i for i, run in enumerate(trace.runs) if workers & set(run["pids"])]
    assert {trace.runs[i]["kind"] for i in runs} == {"ShmVectorEnv"}
    assert [trace.runs[i]["pid"] for i in runs] == [running.pid, os.getpid()]
    assert {pid for i in runs for pid in trace.runs[i]["pids"]} == workers
    for i in runs:
        for rank in (0, 1):
            *steps, hanging = (s for s in trace.track(f"worker {rank}: env_rank {rank}", i) if s["name"] == "step")
            began = trace.base + 1e3 * hanging["ts"]
            assert steps, "one for each chunk"
            assert began < moments[0] <= began + 1e3 * hanging["dur"] <= moments[1]


def test_one_thread_cancels_while_others_wait(tmp_path: Path) -> None:
    running = start_evaluation(vla, partial(Reach, fault=partial(wait_for, tmp_path / "never")), **ARGUMENTS)
    found = in_threads(3, lambda: running.wait(60), running.cancel)
    assert [str(error) for error in found] == ["the evaluation was cancelled: start another one"] * 3
    assert all(isinstance(error, SamplerStateError) for error in found)
    assert running.is_done


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the end of a process that cannot end, or be seen to end, waits too long for the test."""
    monkeypatch.setattr(background, "_REAP_SECONDS", 1e5)


def test_it_is_cancelled_while_the_supervisor_is_stopped(patient: None, tmp_path: Path) -> None:
    running = start_evaluation(vla, partial(Reach, fault=partial(wait_for, tmp_path / "never")), **ARGUMENTS)
    supervisor = psutil.Process(psutil.Process(running.pid).ppid())
    supervisor.suspend()
    try:
        running.cancel()
    finally:
        supervisor.resume()


def test_a_fork_neither_waits_for_it_nor_ends_it(patient: None, tmp_path: Path) -> None:
    with start_evaluation(vla, partial(Reach, fault=partial(wait_for, tmp_path / "go")), **ARGUMENTS) as running:
        if (pid := os.fork()) == 0:
            try:
                running.cancel()
                running._dropped()
                os._exit(0)
            finally:
                os._exit(1)
        until(lambda: os.waitpid(pid, os.WNOHANG) == (pid, 0), "the end of the fork", 30)
        (tmp_path / "go").touch()
        assert played(running.wait(60)) == serial(range(3))


# ---- policies that end their process, and do not let it end ----------------------------------------------


def leaves(observation: Any) -> Any:
    raise SystemExit(0)


def interrupts(observation: Any) -> Any:
    raise KeyboardInterrupt


def forks(observation: Any, rngs: Any) -> Any:
    if not hasattr(forks, "child"):
        forks.child = os.fork()  # type: ignore[attr-defined]
    return vla(observation, rngs)


def stays(observation: Any, rngs: Any) -> Any:
    if threading.active_count() < 50:
        threading.Thread(target=hang).start()
    return vla(observation, rngs)


@pytest.mark.parametrize(("policy", "what"), [(leaves, "SystemExit: 0"), (interrupts, "KeyboardInterrupt")])
def test_a_policy_that_would_end_the_process(policy: Any, what: str) -> None:
    with (
        start_evaluation(policy, Reach, **ARGUMENTS) as running,
        pytest.raises(WorkerError, match=f"^the evaluation has raised {what}$"),
    ):
        running.wait(60)


@pytest.mark.parametrize("policy", [forks, stays])
def test_a_policy_that_leaves_something_behind(policy: Any) -> None:
    with start_evaluation(policy, Reach, **ARGUMENTS) as running:
        assert played(running.wait(60)) == serial(range(3))


# ---- threads of its libraries ----------------------------------------------------------------------------


@pytest.fixture
def new_supervisors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """No supervisor runs."""
    own: list[Any] = []
    monkeypatch.setattr(launcher, "_supervisors", own)
    yield own
    for supervisor in own:
        supervisor.close()


def threads(observation: Any) -> Any:
    import torch

    n = torch.get_num_threads()
    return np.full((len(observation["hand"]), 2), n / 100, np.float32)


class Imports:
    """`threads`, with something of torch."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1)

    def __call__(self, observation: Any) -> Any:
        return threads(observation)


@pytest.mark.parametrize(("policy", "wanted"), [(threads, 1), (Imports(), 1), (Imports(), 7)])
def test_torch_has_as_many_threads_as_here(policy: Any, wanted: int, new_supervisors: list[Any]) -> None:
    """Also if it is imported by the policies, or later, in a process whose supervisor has not imported it."""
    n = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        with start_evaluation(policy, Reach, **ARGUMENTS, max_steps=1) as running:
            (action, *_) = {float(r.played()[0][0].flat[0]) for r in running.wait(60).episodes}
    finally:
        torch.set_num_threads(n)
    assert action == pytest.approx(wanted / 100)


def test_it_begins_where_most_has_been_imported(new_supervisors: list[Any]) -> None:
    launcher.shared_supervisor(["penstock.workers.process"])
    launcher.shared_supervisor(["penstock.workers.process", "json.tool"])
    assert launcher.shared_supervisor(["penstock.workers.process"]) is new_supervisors[1]
