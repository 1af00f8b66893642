"""Each of these benchmarks runs with few steps, and prints a row for every contestant."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import shlex
import sys
import warnings
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.agents import distributions
from penstock.buffers import native
from penstock.buffers.native import COMPILED
from penstock.columns import stepping

from .. import starter
from ..scale import FULL, scaled
from .support import ROOT, SECONDS, assert_measured, benchmark_modules

pytestmark = [pytest.mark.timeout(SECONDS), pytest.mark.usefixtures("starter"), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def _fork_server() -> None:
    """Two benchmarks use the fork server of `multiprocessing`, which lives as long as the process. It imports once what
    each of their processes needs."""
    multiprocessing.set_forkserver_preload(["torch", "penstock.testing", "stable_baselines3.common.vec_env"])
    forkserver.ensure_running()


def run_program(folder: Path, name: str, *options: object) -> tuple[str, Any]:
    """Run a benchmark as a program: what it prints, and what it writes."""
    file = folder / f"{name}.json"
    done = starter.run(f"benchmarks/{name}.py", *options, "--json", file, cwd=ROOT, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def run_benchmark(folder: Path, name: str, *options: object, starts: str = "") -> tuple[str, Any]:
    """The same in this process, whose supervisor has imported torch. `starts`: a module that starts programs. Daily,
    these are forks of a process that has imported torch."""
    file, printed = folder / f"{name}.json", io.StringIO()
    with benchmark_modules(), pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(sys, "argv", [name, *map(str, options), "--json", str(file)])
        if starts and not FULL:
            patched.setattr(importlib.import_module(starts), "subprocess", starter.FORKING_SUBPROCESS)
        with contextlib.redirect_stdout(printed):
            importlib.import_module(name).main()
    for process in multiprocessing.active_children():  # some benchmarks do not wait for theirs
        process.join(SECONDS)
    return printed.getvalue(), json.loads(file.read_text(encoding="utf-8"))


LAYERS = {"Tanh", "ELU", "GELU", "LayerNorm", "expand_as", "clamp"}  # those that are run in numpy too
CASES = "--cases 'CartPole, random' 'CartPole, mlp' 'Dict of 16' pixels" + scaled("", " --batch-T 8 --turn 1")
PARTS = {"nothing", *native.PYTHON, *distributions.PYTHON, *stepping.PYTHON, "everything"}
#: Benchmark, options, what it prints, and names of its measurements and contestants.
TWO_TURNS = {
    "spaces": ("--batch-B 4 --batch-T 8 --seconds 0.02", "observations of 288 bytes", {"flat", "nested, 16 leaves"}),
    "replay": ("--capacity 20000 --pictures 1100 --seconds 0.001", "penstock", {"sample", "prioritized", "pixels"}),
    "waits": ("--workers 1 2 --seconds 0.02", "than the hub", {"hub", "ParallelSampler", "GpuSampler", "ShmVectorEnv"}),
    "native": (CASES, "saved", PARTS),
    "inference": ("--layers --n-envs 1 --seconds 0.001", "torch / traced", {"torch", "traced", "numpy", *LAYERS}),
    "cluster_wire": ("--seconds 0.01", "time of bare, CURVE", {"bare", "bare, CURVE", "penstock", "penstock, arrays"}),
    "top": ("--workers 1 --seconds 0.1", "of alone", {"alone", "beside top", "alone again"}),
    "vector_env": ("--seconds 0.01 --n-envs 2 --batch-T 8", "steps/s", {"cartpole", "pixels", "sleeping"}),
}


def names_in(figures: Any) -> set[str]:
    return set(figures).union(*map(names_in, figures.values())) if isinstance(figures, dict) else set()


@pytest.mark.usefixtures("daily_forks")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.linux("eventfd")) if name == "waits" else name for name in TWO_TURNS],
)
def test_two_turns(folder: Path, request: pytest.FixtureRequest, name: str) -> None:
    if name == "waits" and not COMPILED:
        pytest.skip("was built without a C compiler")
    if name == "cluster_wire":
        pytest.importorskip("zmq")
        pytest.importorskip("msgpack")
    if name == "vector_env" and FULL:
        request.getfixturevalue("_fork_server")
    options, words, names = TWO_TURNS[name]
    printed, content = run_benchmark(folder, name, *shlex.split(options), "--repeats", 2)
    assert words in printed
    figures = content["figures" if name == "spaces" else "results"]
    assert names_in(figures) >= names
    assert_measured(figures)


@pytest.mark.parametrize(
    ("name", "options", "n"), [("noise", "--columns 2 3 --rows 10", 18), ("checks", "--n-envs 2 --rows 300", 9)]
)
def test_nanoseconds(folder: Path, name: str, options: str, n: int) -> None:
    printed, content = run_benchmark(folder, name, *options.split(), "--repeats", 2)
    assert "ns per environment step" in printed
    found = content["ns_per_step"].values() if name == "checks" else [result["ns"] for result in content["results"]]
    assert list(map(len, found)) == [2] * n


def test_traces(folder: Path) -> None:
    printed, content = run_benchmark(folder, "traces")
    assert "main process: note a wait" in printed
    assert min(content["ns"].values()) > 0
    assert content["file"]["events"] > 100_000


def test_seats_vector(folder: Path) -> None:
    pytest.importorskip("supersuit")
    games = scaled(("idle3", "idle20"), ("idle3",))
    printed, content = run_program(folder, "seats_vector", *games, "--repeats", 2, "--seconds", 0.01)
    assert "times faster" in printed
    contestants = {f"{name}, {n}" for name in ("SuperSuit", "ShmVectorEnv") for n in (1, 2)}
    assert names_in(content["results"]) >= {*games, *contestants}
    assert_measured(content["results"])


def test_batched(folder: Path) -> None:
    agents, n_envs = scaled(("random", "mlp"), ("mlp",)), scaled((4, 6), (4,))
    sizes = ["--batch-B", *n_envs, "--batch-T", 8, "--n-workers", 1, "--seconds", 0.02, "--repeats", 1]
    sizes += ["--kinds", "single", "batched", *scaled(["envpool"] if importlib.util.find_spec("envpool") else [], [])]
    printed, content = run_program(folder, "batched", "--agents", *agents, "none", *sizes)
    assert "times the first" in printed
    rows = {(row["agent"], row["kind"], row["batch_B"]): row for row in content["table"]}
    for agent in agents:
        assert rows.keys() >= {(agent, kind, n) for kind in ("single", "batched") for n in n_envs}
        assert rows[agent, "single", 4]["times_single"]["median"] == 1
    assert all(len(result["steps_per_s"]) == 1 and min(result["steps_per_s"]) > 0 for result in content["results"])


def test_batched_copies_and_atari() -> None:
    done = starter.run("benchmarks/batched_copies.py", "--batch-T", 8, "--batch-B", 4, "--repeats", 2, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "copies in each step" in done.stdout
    pytest.importorskip("ale_py")
    sizes = ["--batch-T", 4, "--batch-B", 2, "--repeats", 1, "--seconds", 0.001]
    names = ["whole games", "ShmVectorEnv", "bare", *scaled(["SameStep", "NextStep", "ShmVectorEnv, single"], [])]
    done = starter.run("benchmarks/batched_atari.py", *sizes, "--only", *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {line.split("│")[1].strip() for line in done.stdout.splitlines() if "│" in line}
    assert found >= {"single", *names}


@pytest.fixture(scope="module")
def central(folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, list[float]]]:
    """Figures by measurement and contestant."""
    sizes = ["--seconds", 0.02, "--batch-T", 8, "--n-envs", 2]
    few = ["--n-workers", scaled(8, 2)]
    _, content = run_benchmark(folder, "central", "uneven", "alternating", "--repeats", 2, *sizes, *few)
    if not FULL:
        return content["results"]
    request.getfixturevalue("_fork_server")
    # These start processes with torch.
    _, other = run_benchmark(folder, "central", "vector", "deadline", "sync", "--repeats", 1, *sizes)
    return {**content["results"], **other["results"]}


@pytest.mark.linux("masks of CPUs")
@pytest.mark.xdist_group("central")
@pytest.mark.parametrize(
    "what", scaled(["uneven", "deadline", "alternating", "vector", "sync"], ["uneven", "alternating"])
)
def test_central(central: Any, what: str) -> None:
    figures = central[what]
    assert {"GpuSampler", "AlternatingSampler", "lock-step", "1 worker"} & figures.keys()
    assert all(len(values) == (1 if what in ("vector", "deadline", "sync") else 2) for values in figures.values())
    assert what == "sync" or all(min(values) > 0 for values in figures.values())


def test_connect_four(folder: Path) -> None:
    """Peers that are not installed are left out; the games alone and penstock are always measured."""
    pytest.importorskip("pettingzoo")
    options = ["--repeats", scaled(2, 1), "--seconds", 0.05]
    _, written = run_benchmark(folder, "connect_four", "rates", *options, starts="peer_process")
    (rates,) = written["results"]
    assert all({"penstock ParallelSampler", "bare loops in step"} <= set(turn) for turn in rates["rounds"])
    printed, written = run_benchmark(folder, "connect_four", "record", "--repeats", scaled(2, 1), "--batch-B", 4)
    (record,) = written["results"]
    assert record["main"]["batch_bytes"] < record["all"]["batch_bytes"]
    assert "CPU of main, beside all: " in printed


def test_startup(folder: Path, tmp_path: Path) -> None:
    """Daily without the server, and in a fork: a new interpreter and its supervisor would import torch."""
    sampler = scaled("GpuSampler, server", "GpuSampler")
    options = ["--workers", 1, "--methods", "forkserver", "--samplers", sampler, "--repeats", 1]
    with benchmark_modules(), pytest.MonkeyPatch.context() as patched:
        startup, program = importlib.import_module("startup"), tmp_path / "program.py"
        program.write_text(startup._PROGRAM, encoding="utf-8")
        if not FULL:
            forking = SimpleNamespace(run=lambda command, **_: starter.run(program, *command[3:], cwd=ROOT))
            patched.setattr(startup, "subprocess", forking)
        printed, ((row),) = run_benchmark(folder, "startup", *options)
    assert "MB a worker" in printed
    (figures,) = row["figures"]
    assert figures.keys() == {"first", "again", "worker", *scaled(["server"], [])}
    assert min(figures.values()) > 0
    assert not FULL or figures["worker"] < figures["server"] / 4, "a process with torch takes more than one without"


def test_scale(folder: Path) -> None:
    """Daily, the contestants are forks of a process that has imported torch."""
    picture, points = folder / "scale.svg", [("computing", scaled(2, 1)), ("sleeping", scaled(3, 2))]
    options: list[object] = [option for kind, n in points for option in (f"--{kind}", n)]
    options += ["--repeats", 1, "--seconds", 0.05, "--only", "ShmVectorEnv", "--picture", picture]
    printed, content = run_benchmark(folder, "scale", *options, starts="peer_process")
    assert [(point["kind"], point["workers"]) for point in content["points"]] == points
    for point in content["points"]:
        own, bare = point["rounds"][0]
        assert min(own["rate"], bare["in_step"], own["cpu_us"], point["ready"], point["memory"]) > 0
        who, share = f"{point['kind']} | {point['workers']} | penstock ShmVectorEnv", own["rate"] / bare["in_step"]
        assert f"| {who} | {share:.2f} |" in printed
    assert "bare loops" in picture.read_text(encoding="utf-8")


def test_cluster_scale(folder: Path) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgpack")
    printed, content = run_benchmark(folder, "cluster_scale", "--workers", 4, "--seconds", 1, "--megabytes", 1)
    assert "until all have it" in printed
    (figures,) = content["results"]
    assert figures["workers"] == 4
    assert min(figures["table [%]"], figures["until all have it [s]"]) > 0


def test_what_a_user_waits_for(folder: Path) -> None:
    wheel = folder / f"penstock-1-cp{sys.version_info[0]}{sys.version_info[1]}-any-linux_x86_64.whl"
    wheel.write_bytes(bytes(1_500_000))
    options = ["--libraries", "penstock, vector", "--repeats", 1, "--wheels", folder]
    printed, content = run_benchmark(folder, "installing", *options)
    assert "| penstock, vector environment | 1.5 | " in printed
    (turns,) = content.values()
    assert min(*turns["import"], *turns["first step"]) > 0  # which is longer depends on what else runs


def test_compare(folder: Path) -> None:
    site = Path(penstock.__file__).parent.parent
    sizes = ["--repeats", 2, "--starts", 1, "--seconds", 0.01]
    cases = {"ShmVectorEnv, copy=False", *scaled(["first start, ShmVectorEnv"], [])}
    printed, content = run_benchmark(folder, "compare", site, site, *sizes, "--cases", *cases, starts="compare")
    assert "OLD and NEW in turns" in printed
    assert content["results"].keys() == cases
    for case, turns in content["results"].items():
        assert turns.keys() == {"old", "new"}
        for figures in turns.values():
            assert len(figures) == (1 if "start" in case else 2)
            assert all(min(turn.values()) > 0 for turn in figures)


def test_the_cost_of_evaluate(folder: Path) -> None:
    sizes = scaled([], ["--rows", 32, 64, "--batch-B", 1])
    few, many = scaled((256, 1024), (32, 64))
    printed, content = run_benchmark(folder, "learner", "--repeats", 2, *sizes)
    for setting in (f"Discrete, {few} rows", f"Box, {many} rows", f"LSTM, {few} rows"):
        assert f"{setting}, CPU time of evaluate beside lean" in printed
        assert content["results"][setting].keys() == {"torch", "lean"}
        assert_measured(content["results"][setting])


def test_game_requests(folder: Path) -> None:
    printed, figures = run_benchmark(folder, "game_requests", "--requests", 20, "--repeats", 2)
    assert list(figures) == ["bare blocking socket", "GameSocket.request", "settimeout"]
    assert all(name in printed and 0 < figures[name]["least"] <= figures[name]["median"] for name in figures)


def test_env_process(folder: Path) -> None:
    printed, figures = run_benchmark(folder, "env_process", "--rounds", 2, "--share", 0.02)
    assert list(figures) == ["4 numbers", "84x84x4", "256x256x6, 393 kB", "4 x 512x512x3, 3 MB"]
    assert all(name in printed and 0 < each["low"] <= each["ratio"] <= each["high"] for name, each in figures.items())
