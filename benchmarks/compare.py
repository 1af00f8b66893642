"""Two versions of penstock side by side: the same work, in turns, in one run. Install each version in a folder:

    pip install --no-deps --no-build-isolation --target /tmp/old OLD_CHECKOUT
    pip install --no-deps --no-build-isolation --target /tmp/new NEW_CHECKOUT

Then compare the two folders:

    python benchmarks/compare.py /tmp/old /tmp/new

Each version runs in a separate process, which has the folder first in PYTHONPATH and stays alive for the whole
case. The two take short turns, in alternating order. A turn of sampling is whole batches for `--seconds`, and its
figures are wall-clock time and the CPU time of all processes together. A turn of a start-up case is one start.

The table shows the speed of NEW divided by the speed of OLD in the same turn: above 1, NEW is faster. To see the noise,
compare OLD with OLD.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from clocks import cpu_clocks, processes, used

Turn = dict[str, float]  #: "count" of steps or starts, "wall" and "cpu" seconds
VERSIONS = ("old", "new")

# ---- in the process of one version -----------------------------------------------------------------


class Sampling:
    """A sampler that collects one batch after another."""

    def __init__(
        self,
        name: str,
        make_agent: Callable[[], Any],
        env: Any,
        T: int,
        B: int,
        bootstrap_value: bool = True,
        **options: Any,
    ) -> None:
        import penstock

        bootstrap_value = bootstrap_value and make_agent is not random_agent
        self._sampler = getattr(penstock, name)(env, batch_T=T, batch_B=B, **options)
        self._sampler.initialize(make_agent(), seed=0, bootstrap_value=bootstrap_value)
        if name == "AsyncSampler":
            self._sampler.start()
        self._steps, self._itr = T * B, 0

    def batch(self) -> int:
        """Collect one batch; returns its environment steps."""
        self._sampler.obtain_samples(self._itr)
        self._itr += 1
        return self._steps

    def close(self) -> None:
        self._sampler.shutdown()


class VectorEnv:
    """ShmVectorEnv with random actions."""

    def __init__(self, env: Any, T: int, B: int, **options: Any) -> None:
        import numpy as np

        self._envs = shm_vector_env()([env] * B, **options)
        self._actions = np.random.default_rng(0).integers(0, 2, (T, B))
        self._envs.reset(seed=0)

    def batch(self) -> int:
        """Step T times; returns the environment steps."""
        for action in self._actions:
            self._envs.step(action)
        return int(self._actions.size)

    def close(self) -> None:
        self._envs.close()


def shm_vector_env() -> Any:
    """The class `ShmVectorEnv`. In earlier versions it is in `penstock.envs`."""
    try:
        from penstock.vector import ShmVectorEnv
    except ImportError:
        from penstock.envs import ShmVectorEnv  # type: ignore[attr-defined, no-redef]
    return ShmVectorEnv


def random_agent() -> Any:
    from penstock import RandomAgent

    return RandomAgent()


def mlp(hidden: int = 64, **options: Any) -> Any:
    from penstock import CategoricalPgAgent

    return CategoricalPgAgent(partial(workload("ActorCritic"), hidden=hidden), **options)


def cartpole(**kwargs: Any) -> Any:
    import gymnasium as gym

    return partial(gym.make, "CartPole-v1", **kwargs)


def workload(name: str) -> Any:
    import workloads

    return getattr(workloads, name)


def counting() -> Any:
    from penstock.envs import CountingEnv

    return partial(CountingEnv, length=100)


def acting(make_agent: Callable[[], Any]) -> Any:
    """Makes an agent that acts for 16 environments."""

    return lambda: workload("Acting")(make_agent(), 16)


def sampling(name: str, make_agent: Callable[[], Any] = mlp, T: int = 128, B: int = 32, **options: Any) -> Any:
    """Makes a contestant on CartPole-v1."""
    workers = {} if name == "SerialSampler" else {"n_workers": 2}
    return lambda: Sampling(name, make_agent, cartpole(), T, B, **workers, **options)


def random_on(name: str, make_env: Callable[[], Any], T: int = 128, B: int = 32, **options: Any) -> Any:
    """Makes a contestant with random actions. `make_env` returns its environment function."""
    workers = {} if name == "SerialSampler" else {"n_workers": 2}
    return lambda: Sampling(name, random_agent, make_env(), T, B, **workers, **options)


def batched(make_agent: Callable[[], Any], task: str | None = None, T: int = 128, B: int = 256) -> Any:
    """Makes a contestant on batched environments, those of EnvPool if it is given a `task`."""

    def make() -> Sampling:
        import penstock
        from penstock import envs

        env = envs.BatchedCartPole if task is None else partial(envs.BatchedEnvPool, task)
        # Earlier versions have a collector for batched environments.
        old = getattr(penstock, "VectorEnvCollector", None)
        options: dict[str, Any] = {"batched": True} if old is None else {"collector_cls": old}
        return Sampling("ParallelSampler", make_agent, env, T, B, n_workers=2, **options)

    return make


def pong() -> Any:
    import gymnasium as gym

    return partial(gym.make, "ale_py:ALE/Pong-v5")


def vector_env(**options: Any) -> Any:
    """Makes a ShmVectorEnv of 32 CartPole-v1."""
    return lambda: VectorEnv(cartpole(), 128, 32, n_workers=2, **options)


#: Steps: a contestant is made once and then asked for batches.
STEPS: dict[str, Callable[[], Any]] = {
    **{
        f"{name}, {make_agent.__name__.removesuffix('_agent')}, T={T}": sampling(name, make_agent, T)
        for name in ("SerialSampler", "ParallelSampler", "AsyncSampler")
        for make_agent in (random_agent, mlp)
        for T in (128, 5)
    },
    "GpuSampler": sampling("GpuSampler"),
    "AlternatingSampler": sampling("AlternatingSampler"),
    'GpuSampler, server="process"': sampling("GpuSampler", server="process"),
    **{
        f"{name}, short batches, T={T}{'' if has_value else ', without values'}": sampling(
            name, T=T, B=8, bootstrap_value=has_value
        )
        for name in ("GpuSampler", "AlternatingSampler")
        for T, has_value in ((1, False), (1, True), (5, True), (20, True))
    },
    **{
        f'{name}, mlp, inference="{inference}"': sampling(name, partial(mlp, inference=inference))
        for name in ("ParallelSampler", "GpuSampler")
        for inference in ("traced", "numpy")
    },
    **{
        f'ParallelSampler, mlp of 512, inference="{inference}"': sampling(
            "ParallelSampler", partial(mlp, hidden=512, inference=inference)
        )
        for inference in ("torch", "numpy")
    },
    "one row of 16, mlp": acting(mlp),
    **{
        f'one row of 16, mlp, inference="{inference}"': acting(partial(mlp, inference=inference))
        for inference in ("traced", "numpy")
    },
    "ShmVectorEnv": vector_env(),
    "ShmVectorEnv, copy=False": vector_env(copy=False),
    "nested, 4 leaves, SerialSampler": random_on(
        "SerialSampler", lambda: partial(workload("Returning"), workload("nested_space"))
    ),
    "nested, 16 leaves, SerialSampler": random_on(
        "SerialSampler", lambda: partial(workload("Returning"), workload("deep_space"))
    ),
    "nested, 16 leaves, ParallelSampler": random_on(
        "ParallelSampler", lambda: partial(workload("Returning"), workload("deep_space"))
    ),
    "short episodes": random_on("SerialSampler", lambda: cartpole(max_episode_steps=5)),
    "CountingEnv": random_on("SerialSampler", counting),
    "pixels, SerialSampler": random_on("SerialSampler", lambda: workload("Pixels"), 32, 16),
    "pixels, ParallelSampler": random_on("ParallelSampler", lambda: workload("Pixels"), 32, 16),
    "pixels, ShmVectorEnv": lambda: VectorEnv(workload("Pixels"), 32, 16, n_workers=2),
    "pixels that the environment keeps, SerialSampler": random_on(
        "SerialSampler", lambda: workload("HeldPixels"), 32, 16
    ),
    "env_info, SerialSampler": random_on("SerialSampler", lambda: workload("Telling"), env_info=["cost", "forces"]),
    "env_info, ParallelSampler": random_on("ParallelSampler", lambda: workload("Telling"), env_info=["cost", "forces"]),
    "batched, random": batched(random_agent),
    "batched, mlp": batched(mlp),
    "EnvPool, CartPole": batched(random_agent, "CartPole-v1"),
    "EnvPool, Pong": batched(random_agent, "Pong-v5", 32, 16),
    "ALE, Pong, SerialSampler": random_on("SerialSampler", pong, 32, 16),
    "ALE, Pong, ParallelSampler": random_on("ParallelSampler", pong, 32, 16),
}
#: Starts: a contestant is made, and closed, in every turn. The supervisor runs already.
STARTS: dict[str, Callable[[], Any]] = {
    "start, SerialSampler": sampling("SerialSampler", T=8),
    "start, ParallelSampler": sampling("ParallelSampler", T=8),
    "start, ParallelSampler, fork": sampling("ParallelSampler", T=8, start_method="fork"),
    "start, ParallelSampler, spawn": sampling("ParallelSampler", T=8, start_method="spawn"),
    "start, GpuSampler": sampling("GpuSampler", T=8),
    "start, AlternatingSampler": sampling("AlternatingSampler", T=8),
    'start, GpuSampler, server="process"': sampling("GpuSampler", T=8, server="process"),
    "start, ShmVectorEnv": vector_env(),
}
#: First starts: as STARTS, in a new Python process that imports penstock and starts the supervisor.
FIRST = {f"first {name}": name for name in ("start, SerialSampler", "start, ParallelSampler", "start, ShmVectorEnv")}
CASES = (*STEPS, *STARTS, *FIRST)


def turn_of_steps(contestant: Any, seconds: float) -> Turn:
    """Whole batches for `seconds`."""
    pids, steps = processes(), 0
    before, began = cpu_clocks(pids), time.perf_counter()
    while (wall := time.perf_counter() - began) < seconds:
        steps += contestant.batch()
    return {"count": steps, "wall": wall, "cpu": used(before, cpu_clocks(pids))}


def turn_of_start(make: Callable[[], Any]) -> Turn:
    """One start, from the constructor until all workers are ready."""
    before, began = cpu_clocks(processes()), time.perf_counter()
    contestant = make()
    wall, own = time.perf_counter() - began, cpu_clocks([os.getpid()])
    turn = {"count": 1, "wall": wall, "cpu": used(before, cpu_clocks(processes()) | own)}
    contestant.batch()
    contestant.close()
    return turn


def turn_of_first_start(case: str) -> Turn:
    """One start in a new Python process."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--serve", FIRST[case], "--once"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        turn: Turn = json.loads(process.stdout.readline())
    return {**turn, "wall": time.perf_counter() - began}


def use_one_thread() -> None:
    """In this process alone: its threads would disturb the other version. Workers limit theirs themselves."""
    import threadpoolctl
    import torch

    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)


def serve(case: str, once: bool) -> None:
    """Run one turn for each line of stdin, which is a number of seconds. With `once`, run one start without a line."""
    # Not stdout: workers inherit it, and an environment may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    if once:
        contestant = STARTS[case]()
        answer({"count": 1, "cpu": used({}, cpu_clocks(processes()))})
        contestant.close()
        return
    use_one_thread()
    try:
        contestant = STEPS[case]() if case in STEPS else None
        if case in STARTS:
            turn_of_start(STARTS[case])
    except (ImportError, AttributeError, TypeError) as error:
        return answer({"missing": f"{type(error).__name__}: {error}"})
    import penstock

    answer({"file": penstock.__file__, "version": penstock.__version__})
    for line in sys.stdin:
        if case in STEPS:
            answer(turn_of_steps(contestant, float(line)))
        else:
            answer(turn_of_start(STARTS[case]) if case in STARTS else turn_of_first_start(case))
    if contestant is not None:
        contestant.close()
    return None


# ---- in the process that compares --------------------------------------------------------------------


_numbers = count()


class Version:
    """A process of one version, at one case."""

    def __init__(self, folder: Path, case: str) -> None:
        # Versions take turns, so each may use all CPUs. Those before the folder alone decided need the second variable.
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "PENSTOCK_CPU_FOLDER": os.devnull, "PENSTOCK_CPU_NAMESPACE": f"-{next(_numbers)}"}
        command = [sys.executable, __file__, "--serve", case]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}
        )
        hello = self._read()
        self.missing: str | None = hello.get("missing")
        if self.missing is None and folder not in Path(hello["file"]).parents:
            raise SystemExit(f"{hello['file']} was imported, which is not in {folder}: install a penstock there")

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of one version ended with code {self._process.wait()}: see its error above")
        return json.loads(line)

    def turn(self, seconds: float) -> Turn:
        """Run one turn of this version."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        turn: Turn = self._read()
        return turn

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def compare(case: str, folders: Sequence[Path], repeats: int, seconds: float) -> dict[str, list[Turn]] | str:
    """`repeats` turns of each version, or a text that says what a version lacks."""
    versions = {}
    try:
        for name, folder in zip(VERSIONS, folders, strict=True):
            versions[name] = Version(folder, case)
            if versions[name].missing is not None:
                return f"not in {name}: {versions[name].missing}"
        for version in versions.values():
            version.turn(seconds)  # warm-up
        turns: dict[str, list[Turn]] = {name: [] for name in VERSIONS}
        for repeat in range(repeats):
            for name in VERSIONS if repeat % 2 else reversed(VERSIONS):
                turns[name].append(versions[name].turn(seconds))
        return turns
    finally:
        for version in versions.values():
            version.close()


def cost(turn: Turn, clock: str) -> float:
    """Seconds for one step or one start."""
    return turn[clock] / turn["count"]


def cells(case: str, turns: dict[str, list[Turn]]) -> list[str]:
    """One row of the table."""
    from turns import cell

    scale, form = (1e6, "{:.2f}") if case in STEPS else (1e3, "{:.0f}")
    row = []
    for clock in ("wall", "cpu"):
        old, new = ([cost(turn, clock) * scale for turn in turns[name]] for name in VERSIONS)
        speeds = [a / b for a, b in zip(old, new, strict=True)]
        row += [cell(old, form), cell(new, form), cell(speeds, "{:.3f}")]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD", help="a folder that pip installed into")
    parser.add_argument("new", type=Path, metavar="NEW", help="another such folder")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help="parts of names; default: all")
    parser.add_argument("--repeats", type=int, default=40, help="turns of each version in a case of steps")
    parser.add_argument("--starts", type=int, default=15, help="turns of each version in a case of starts")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn of steps, at least")
    parser.add_argument("--json", help="write the machine and all turns to this file")
    args = parser.parse_args()
    cases = [case for case in CASES if any(part in case for part in args.cases)]
    if not cases:
        parser.error(f"no case has such a name; there are {'; '.join(CASES)}")

    from rich.console import Console
    from rich.table import Table

    results: dict[str, Any] = {}
    table = Table(
        title="OLD and NEW in turns", caption="median (middle half of the turns); a start is in ms, a step in µs"
    )
    for heading in ("", *(f"{text}, {clock}" for clock in ("wall", "CPU") for text in ("OLD", "NEW", "speed"))):
        table.add_column(heading, justify="right" if heading else "left")
    for case in cases:
        repeats = args.repeats if case in STEPS else args.starts
        results[case] = compare(case, [args.old.resolve(), args.new.resolve()], repeats, args.seconds)
        found = results[case]
        row = [found] if isinstance(found, str) else cells(case, found)
        print(case, *row, sep=" | ", flush=True)
        table.add_row(case, *row)
    Console(width=200).print(table)
    if args.json:
        from turns import machine

        Path(args.json).write_text(json.dumps({"machine": machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], once="--once" in sys.argv)
    else:
        main()
