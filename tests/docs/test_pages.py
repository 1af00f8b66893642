"""The code of the site's pages runs as it is written there. A page about another library is skipped without it."""

import importlib
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ParallelSampler

from ..scale import FULL
from ..starter import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NEEDS = {
    "many_agents.md": "mpe2.simple_spread_v3",
    "vector_env.md": "mpe2",
    "migration/rllib.md": "ray.rllib.algorithms.ppo",
    "migration/sb3.md": "stable_baselines3",
    "migration/skrl.md": "skrl",
    "migration/supersuit.md": "supersuit",
    "migration/tianshou.md": "tianshou",
    "migration/torchrl.md": "torchrl",
    "recipes/atari.md": "ale_py",
    "recipes/datasets.md": "minari",
    "recipes/evaluations.md": "stable_baselines3",
    "recipes/self_play.md": "pettingzoo.classic.tictactoe_v3",
}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def executed(code: str, page: str) -> dict[str, Any]:
    """The names that it defines, as in a script: classes are pickled by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), names)
    return names


def shortened(block: str) -> str:
    """The same code, with fewer iterations of training, and no long batches. At full scale, runs of minutes stay."""
    most, few = (1_000, "3") if FULL else (2, "2")
    found = re.sub(r"(?<=for itr in range\()[\d_]+(?=\))", lambda n: n[0] if int(n[0]) <= most else few, block)
    found = re.sub(r"batch_T=128,(\s+)batch_B=8", r"batch_T=8,\1batch_B=2", found)
    if not FULL:  # fewer environments, episodes, and updates in an iteration
        found = found.replace("range(1, 41)", "range(1, 12)")
        found = re.sub(r"(batch_T=\d+,\s+batch_B=)(8|16|32)\b", r"\g<1>4", found)
        found = found.replace("buffer_num=8", "buffer_num=4")  # tianshou's: one part for each environment
        found = re.sub(r"(?<=[( ]episodes=)(10|20|50)\b", "4", found)
        found = re.sub(r"(?<=\.learn\()1_000\b", "300", found)
        found = re.sub(r"(?<=for _ in range\()(8|16|32)(?=\))", "4", found)
        found = found.replace("n_epochs=4", "n_epochs=1")
        if "Sampler(" in found and not re.search(r"max_decorrelation_steps|tune\(|check_", found):
            found = re.sub(r"(?<=[ (])batch_T=", "max_decorrelation_steps=4, batch_T=", found)
    return found


def definitions(page: str, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """All names that the blocks of the page define, executed one after the other in one module."""
    return executed("\n".join(map(shortened, blocks(page)[first:last])), page)


PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "```python" in path.read_text())
# Other tests execute these, and look at their results.
ELSEWHERE = re.findall(r'"docs/(\w+\.md)"', (Path(__file__).parent / "test_documents.py").read_text(encoding="utf-8"))
# tests/distributed executes the first three, test_engine.py the next.
ELSEWHERE += ["cluster.md", "control_plane.md", "recipes/machines.md", "recipes/engines.md", "migration/rlpyt.md"]
OWN = [page for page in PAGES if page not in ELSEWHERE]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some blocks write files


def skip_without(library: str) -> None:
    try:
        importlib.import_module(library)
    except ImportError as error:
        pytest.skip(f"needs {library.partition('.')[0]}: {error}")


@pytest.mark.filterwarnings("default")  # a page may warn: for example, tune on a busy machine
@pytest.mark.parametrize("page", [page for page in OWN if page not in NEEDS])
def test_a_page_runs_as_written(page: str) -> None:
    definitions(page)


@pytest.mark.filterwarnings("default")  # other libraries warn
@pytest.mark.usefixtures("starter")
@pytest.mark.parametrize("page", NEEDS)
def test_a_page_about_another_library_runs_as_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(NEEDS[page])
    monkeypatch.setenv("RAY_ADDRESS", "local")  # no cluster that runs on this machine
    # In a process of its own: these libraries leave processes and descriptors until theirs ends.
    (tmp_path / "page.py").write_text("\n\n".join(map(shortened, blocks(page))), encoding="utf-8")
    # In a fork as supervisor, a lock is held that an evaluation in a process of its own needs.
    done = run(tmp_path / "page.py", cwd=tmp_path, forks_supervisor=page != "recipes/evaluations.md")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("recipes")])
def test_a_recipe_is_short(page: str) -> None:
    assert max(len(block.splitlines()) for block in blocks(page)) <= 65


@pytest.mark.parametrize("page", ["evaluation.md", "recipes/evaluations.md"])
def test_the_commands_of_the_pages_about_evaluations_run(page: str, tmp_path: Path) -> None:
    for block in blocks("recipes/evaluations.md"):
        if (name := re.match(r"# (\w+\.py)\n", block)) is not None:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    commands = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert commands
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    for command in commands:
        done = subprocess.run(
            ["bash", "-euc", command], env={**os.environ, "PATH": programs}, capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert re.search(r"policies\.py:brake\s+[\d.]+ \[", done.stdout)


def test_the_recipe_with_hindsight_learns_goals_that_the_episode_reaches_later() -> None:
    page = blocks("recipes/algorithms.md")
    first = next(i for i, block in enumerate(page) if "class FlipBits" in block)
    imports = "import copy, gymnasium as gym, numpy as np\nfrom penstock import EpsilonGreedyAgent\n"
    program = page[0] + imports + "from penstock.learning import Replay\n" + "\n".join(page[first : first + 3])
    names = executed(shortened(program), "recipes/algorithms.md")
    batch, n_bits = names["replay"].sample(64), names["N_BITS"]
    reached, done = batch.extra.reached[:n_bits], (batch.terminated | batch.truncated)[:n_bits]
    assert done.any(), "the state after the last step of an episode is needed too"
    flipped = reached != batch.observation.bits[:n_bits]
    assert torch.equal(flipped, torch.nn.functional.one_hot(batch.action[:n_bits], n_bits).bool())
    goal, is_reached = names["with_new_goals"](batch, share=1.0)
    assert torch.equal(is_reached, (goal == reached).all(-1))
    episode = done.long().cumsum(0) - done.long()
    row = torch.arange(n_bits)
    is_later = (row[None] >= row[:, None])[..., None] & (episode[:, None] == episode[None])
    assert ((goal[:, None] == reached[None]).all(-1) & is_later).any(1).all()


def test_the_recipe_with_a_cost_weighs_it() -> None:
    page = blocks("recipes/algorithms.md")
    (loop,) = (block for block in page if "CostOfPlace" in block)
    (functions,) = (block.partition("agent = ")[0] for block in page if "def ppo_loss" in block)
    names = executed(shortened(page[0] + functions + loop), "recipes/algorithms.md")
    env, weight = names["samples"].env, names["weight"]
    # In CartPole, the place after a step is that of the next row; the cost of a last step is that of final_obs.
    assert torch.equal(names["cost"], (env.next_observation[..., 0] > 0).float())
    assert weight > 0
    assert torch.allclose(names["penalized"].env.reward, env.reward - weight * names["cost"])


def test_the_recipe_with_masks_takes_and_trains_legal_actions() -> None:
    page = blocks("recipes/algorithms.md")
    (loop,) = (block for block in page if "mask_key=" in block)
    (functions,) = (block.partition("agent = ")[0] for block in page if "def ppo_loss" in block)
    names = executed(page[0] + functions + loop.replace("range(20)", "range(2)"), "recipes/algorithms.md")
    samples, agent = names["samples"], names["agent"]
    mask = samples.env.observation.action_mask
    assert not mask.all()
    assert mask.gather(-1, samples.agent.action[..., None]).all()
    assert agent.evaluate(samples).log_prob.isfinite().all()
    assert agent.model.policy.weight.grad is not None


def test_the_rollout_of_cleanrl_is_that_of_gymnasiums_vector_environment() -> None:
    block = blocks("migration/cleanrl.md")[0].replace("returns = []", "returns = []\nenvs.action_space.seed(1)")
    plain = "gym.vector.SyncVectorEnv([make_env] * 8, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)"
    other = block.replace('ShmVectorEnv([make_env] * 8, n_workers=2, autoreset_mode="SAME_STEP")', plain)
    assert other != block
    found = []
    for program in (block, other):
        names = executed(program, "migration/cleanrl.md")
        found.append((names["returns"], names["real_next_obs"].tolist()))
    assert found[0] == found[1]
    assert len(found[0][0]) > 40


class RlpytLikeAgent:
    """The methods of rlpyt's agents that the bridge calls."""

    def __init__(self) -> None:
        self._rw_lock = open(os.devnull)  # noqa: SIM115  like a lock, it cannot be pickled

    def initialize(self, env_spaces: Any) -> None:
        self.model = torch.nn.Linear(env_spaces.observation.shape[0], int(env_spaces.action.n))

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        info, dist_info = namedtuple("AgentInfo", "dist_info value"), namedtuple("DistInfo", "prob")
        with torch.no_grad():
            prob = self.model(observation).softmax(-1)
        action = torch.multinomial(prob, 1).squeeze(-1)
        return action, info(dist_info(prob), prob[:, 0])

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        with torch.no_grad():
            return self.model(observation).softmax(-1)[:, 0]

    def sample_mode(self, itr: int) -> None:
        self.model.eval()

    eval_mode = sample_mode


def test_the_bridge_to_rlpyt() -> None:
    bridge, inner = definitions("migration/rlpyt.md", last=1)["RlpytAgent"], RlpytLikeAgent()
    agent = bridge(inner)
    with inner._rw_lock, ParallelSampler("CartPole-v1", batch_T=8, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        for itr in range(2):
            samples, _ = sampler.obtain_samples(itr)
            prob = inner.model(samples.env.observation).softmax(-1)
            info = samples.agent.agent_info
            assert prob.detach().numpy() == pytest.approx(info.dist_info.prob.numpy(), abs=1e-6)
            assert samples.agent.bootstrap_value.shape == (4,)
            inner.model.bias.data[0] += 1.0  # what an algorithm of rlpyt does
            agent.sync_shared_memory()
