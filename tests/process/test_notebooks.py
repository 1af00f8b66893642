"""Samplers in a notebook: an event loop runs, `__main__` has no file, cells keep values, and errors show lines."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..scale import FULL, scaled
from ..starter import run
from .support import python_path

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]

CELLS = [
    """
import asyncio
import gymnasium as gym
from penstock import ParallelSampler, RandomAgent
from penstock.vector import ShmVectorEnv

class Twice(gym.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, 2 * reward, *rest

def make():
    return Twice(gym.make("CartPole-v1"))

if "sampler" in globals():
    sampler.shutdown()
sampler = ParallelSampler(make, batch_T=3, batch_B=2, n_workers=2)
sampler.initialize(RandomAgent(), seed=0)
""",
    """
samples, infos = sampler.obtain_samples(0)
print("reward", samples.env.reward.mean().item())
""",
    """
samples, infos = await asyncio.to_thread(sampler.obtain_samples, 1)
print("in a thread", samples.env.reward.sum().item())
""",
    """
with ShmVectorEnv([make] * 2) as envs:
    envs.reset(seed=0)
    print("vector", envs.step([0, 1])[1].sum())
""",
]
#: The first cell is run again: it ends the sampler of its first run.
RUN = [*CELLS, CELLS[0], CELLS[1], "sampler.shutdown()\nprint(sampler.state.name)"]
EXPECTED = ["reward 2.0", "in a thread 12.0", "vector 4.0", "reward 2.0", "CLOSED"]


def plain(cells: Sequence[str]) -> str:
    """A script that runs cells as IPython does: in the module `__main__`, inside a running event loop, with `await` at
    the top level. Tracebacks find the lines of the cells in `linecache`."""
    return f"""
import ast, asyncio, inspect, linecache

async def notebook():
    for number, cell in enumerate({cells!r}):
        name = f"<cell {{number}}>"
        linecache.cache[name] = len(cell), None, cell.splitlines(True), name
        code = compile(cell, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(result := eval(code, globals())):
            await result

assert "__file__" not in globals()
asyncio.run(notebook())
"""


def run_cells(cells: Sequence[str], folder: Path, **how: bool) -> list[str]:
    """What this notebook prints, in `folder`. `how` is for `run`. At full scale it runs in a new interpreter."""
    if FULL:
        command = [sys.executable, "-c", plain(cells)]
        env = {**os.environ, "PYTHONPATH": python_path()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder, env=env)
    else:
        (folder / "cells.py").write_text(f"del __file__\n{plain(cells)}")
        done = run(folder / "cells.py", cwd=folder, seconds=150, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_cells_in_a_running_event_loop_without_a_file(tmp_path: Path) -> None:
    assert run_cells(RUN, tmp_path, light=True, forks_supervisor=False) == EXPECTED


BROKEN = """
import traceback
from penstock import ParallelSampler, RandomAgent, WorkerError
from penstock.envs import CountingEnv

class Broken(CountingEnv):
    def step(self, action):
        raise RuntimeError("no battery")  # in any case

with ParallelSampler(Broken, batch_T=3, batch_B=2, n_workers=1) as sampler:
    try:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
    except WorkerError as error:
        print("".join(traceback.format_exception(error)))
"""


@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_workers_traceback_shows_the_line_of_the_script_or_of_the_cell(tmp_path: Path, is_notebook: bool) -> None:
    script = tmp_path / "broken.py"
    if is_notebook:
        printed, file = run_cells([BROKEN], tmp_path, light=True, forks_supervisor=False), "<cell 0>"
    else:
        script.write_text(BROKEN)
        printed, file = run(script, cwd=tmp_path).stdout.splitlines(), str(script)
    at = printed.index(f'  File "{file}", line 8, in step')
    assert printed[at + 1] == '    raise RuntimeError("no battery")  # in any case'


def test_the_notebook_of_the_first_run_is_its_page_and_runs_from_top_to_bottom(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("docs_notebook", ROOT / ".ci/notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    content = (ROOT / "docs/first_run.ipynb").read_text(encoding="utf-8")
    assert content == module.notebook(), "python .ci/notebook.py writes it again"
    cells = ["".join(cell["source"]) for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    cells[-2] = cells[-2].replace("range(1, 41)", f"range(1, {scaled(41, 11)})")
    printed = run_cells(cells, tmp_path)
    assert "torch.Size([64, 16, 4])" in printed
    assert float(printed[-1].split()[1]) > 15
