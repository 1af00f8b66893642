"""The engine of docs/recipes/engines.md, compiled by the command of that page, beside a plain loop."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent
from penstock.envs import independent_seeds
from penstock.testing import ConformanceError, check_batched

from .test_pages import DOCS, blocks, executed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

PAGE = "recipes/engines.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Those of the page, in a folder with the engine."""
    text, folder = (DOCS / PAGE).read_text(encoding="utf-8"), tmp_path_factory.mktemp("engine")
    (source,), (command,) = re.findall(r"```c\n(.*?)```", text, re.DOTALL), re.findall(r"```\n(cc .*)\n```", text)
    (folder / "walk.c").write_text(source, encoding="utf-8")
    subprocess.run([*command.split(), "-Wall", "-Werror"], cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield executed("\n".join(blocks(PAGE)), PAGE)


class Row:
    """One row of the engine in Python, with its own random numbers."""

    def __init__(self, seed: int) -> None:
        self.state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) | 1
        self.begin()

    def begin(self) -> None:
        state = self.state
        state ^= state << 13 & 2**64 - 1
        state ^= state >> 7
        state ^= state << 17 & 2**64 - 1
        self.state, self.at = state, np.float32(state >> 40) / np.float32(8388608) - np.float32(1)

    def step(self, action: int) -> tuple[np.float32, float, bool]:
        self.at += np.float32(0.5) if action else np.float32(-0.5)
        return self.at, float(self.at >= 3), bool(abs(self.at) >= 3)


@pytest.mark.parametrize("n_workers", [1, 3])
def test_the_batches_are_those_of_a_plain_loop_with_any_number_of_workers(names: Any, n_workers: int) -> None:
    sizes = {"batch_T": 40, "batch_B": 12, "n_workers": n_workers}
    rows = [Row(seed) for seed in independent_seeds(5, 12)]
    n_ended = 0
    with ParallelSampler(names["Walk"], batched=True, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(2):
            batch = sampler.obtain_samples(itr)[0].numpy()
            for t, b in np.ndindex(40, 12):
                assert batch.env.observation[t, b, 0] == rows[b].at
                at, reward, over = rows[b].step(batch.agent.action[t, b])
                assert (batch.env.reward[t, b], batch.env.terminated[t, b]) == (reward, over)
                if over:
                    assert batch.env.final_obs[t, b, 0] == at
                    rows[b].begin()
                    n_ended += 1
    assert n_ended > 10


def test_the_comparison_of_the_page_finds_another_environment(names: Any) -> None:
    class Other(names["Original"]):  # type: ignore[misc]
        def step(self, action: int) -> Any:
            observation, reward, _, *others = super().step(action)
            return observation, reward, bool(abs(self.at[0]) >= 2.9), *others

    with pytest.raises(ConformanceError, match=r"step \d+, row \d, .*: terminated is False, that of the original True"):
        check_batched(names["Walk"], Other, begin=names["begin"], n_steps=1_000)
