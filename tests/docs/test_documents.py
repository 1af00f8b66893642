"""The code in README and docs is executed as it is written there."""

import ast
import csv
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    Agent,
    AgentStep,
    GameError,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    WaitResetCollector,
)
from penstock.agents.random import draw
from penstock.envs import CountingEnv, EnvContext, Purpose, stream
from penstock.envs.toy import ScriptedGame
from penstock.testing import (
    ConformanceError,
    agent_rules,
    check_agent,
    check_collector,
    check_eval_collector,
    check_traj_info,
    collector_rules,
    evaluation_rules,
    run_rules,
    seat_rules,
)

from ..models import Net
from ..scale import FULL, scaled
from ..starter import Program, run
from ..support import sampler_of
from . import test_pages as pages
from .test_pages import executed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
TESTING = (ROOT / "docs/testing.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def blocks(name: str) -> list[str]:
    return pages.blocks(f"../{name}")


def definitions(name: str) -> dict[str, Any]:
    """All names that the document's blocks define, executed one after the other in one module."""
    return executed("\n".join(blocks(name)), name)


@cache
def page(name: str) -> dict[str, Any]:
    """Those of a page whose blocks are executed once for all tests."""
    return definitions(name)


COLLECTORS, AGENTS, OWN_AGENTS = "docs/collectors.md", "docs/agents.md", "docs/own_agents.md"
ENVIRONMENTS, BATCHED, SUBCLASSING = "docs/environments.md", "docs/batched.md", "docs/subclassing.md"


@pytest.mark.usefixtures("starter")
def test_the_second_example_of_the_readme_shows_something_at_once(tmp_path: Path) -> None:
    example = blocks("README.md")[1]
    assert len(example.splitlines()) <= 15
    script = tmp_path / "script.py"
    script.write_text(example, encoding="utf-8")
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"torch.Size\(\[64, 16, 4\]\)\nTrajInfo\(.*Return=.*\)\n", done.stdout), done.stdout


@pytest.mark.usefixtures("starter")
def test_the_loop_of_the_readme_runs_as_a_script_and_learns(tmp_path: Path) -> None:
    example = blocks("README.md")[2].replace("range(100)", f"range({scaled(100, 40)})")
    script = tmp_path / "script.py"
    script.write_text(example, encoding="utf-8")
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    returns = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert sum(returns[-5:]) > 1.5 * sum(returns[:5])


@pytest.mark.usefixtures("starter")
def test_the_sb3_example_of_the_readme_runs_as_a_script(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    script = tmp_path / "script.py"
    script.write_text(blocks("README.md")[0].replace("10_000", "1024"), encoding="utf-8")
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_readmes_and_the_change_log_are_short() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 900
    assert words.index("test") < 0.5 * len(words), "`make test` belongs in the first half"
    assert "multi-agent," in words, "the word for which people search"
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 1000
    words = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8").split()
    assert sum(word.strip("|-") != "" for word in words) <= 3000, "the marks of tables are not words"


def test_the_change_log_names_nothing_that_is_gone() -> None:
    """It is that of a first version: each name in it is in the code, or Gymnasium's."""
    rooms = [path.resolve() for path in (ROOT / "src/penstock").iterdir()]
    files = [file for room in rooms for file in (room.rglob("*.py") if room.is_dir() else [room])]
    code = "\n".join(file.read_text(encoding="utf-8") for file in (*files, ROOT / "setup.py") if file.suffix == ".py")
    known = {*re.findall(r"\w+", code), *vars(gym.wrappers)}
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    named = {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[A-Za-z_]\w*", code)}
    assert len(named) > 100
    assert named <= known
    assert not re.search(r"\b(gone|removed|renamed|no longer|formerly)\b", text)


def test_the_sticky_collector_of_the_guide() -> None:
    cls, batches = page(COLLECTORS)["StickyCollector"], []
    for n_workers in (1, 2, 3):
        with ParallelSampler(CountingEnv, batch_T=40, batch_B=8, n_workers=n_workers, collector_cls=cls) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            samples, _ = sampler.obtain_samples(0)
            batches.append(samples.agent.action.clone())
    done_before = torch.cat([torch.ones(1, 8, dtype=torch.bool), samples.env.done[:-1]])
    t, b = torch.meshgrid(torch.arange(40), torch.arange(8) % 4, indexing="ij")
    stuck = (b == t % 4) & ~done_before
    assert torch.equal(samples.agent.action[stuck], samples.agent.prev_action[stuck])
    assert all(torch.equal(batch, batches[0]) for batch in batches), "for any number of workers"


def test_a_collector_from_nothing() -> None:
    cls = page(COLLECTORS)["FreshStartCollector"]
    (block,) = (block for block in blocks(COLLECTORS) if "class FreshStartCollector" in block)
    assert len(block.splitlines()) <= 16  # of 80 columns
    with ParallelSampler(CountingEnv, batch_T=7, batch_B=3, collector_cls=cls) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(3):
            samples, infos = sampler.obtain_samples(itr)
            assert samples.env.observation[:, :, 1].tolist() == [[t % 5] * 3 for t in range(7)]
            assert [info.Length for info in infos] == [5, 5, 5]


def test_the_frame_skip_repeats_actions_within_an_episode() -> None:
    frame_skip = page(ENVIRONMENTS)["FrameSkip"]
    with SerialSampler(
        lambda: frame_skip(CountingEnv(), n=2), batch_T=6, batch_B=1, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert samples.env.reward[:, 0].tolist() == [1 + 2, 3 + 4, 5, 1 + 2, 3 + 4, 5]
        assert [(info.Length, info.Return) for info in infos] == [(3, 15), (3, 15)]


def test_environments_differ_by_rank_and_purpose() -> None:
    make_env = page(ENVIRONMENTS)["make_env"]
    train, evaluation = (make_env(EnvContext(2, 0, 0, purpose)) for purpose in (Purpose.TRAIN, Purpose.EVAL))
    for env, reward in ((train, 0.1), (evaluation, 1.0)):
        env.reset(seed=0)
        assert env.step(0)[1] == pytest.approx(reward)
        assert env.unwrapped.length == pytest.approx(0.7)


def test_a_batch_has_what_the_environments_page_chooses() -> None:
    names = page(ENVIRONMENTS)
    assert names["lengths"] == [0.5, 0.6, 0.7, 0.8]
    assert names["found"] == [True] * 4
    assert names["samples"].env.observation.dtype == torch.float32
    assert "final_obs" not in names["samples"].env
    assert "env.env_info.count" in [name for name, _ in names["samples"].leaves()]


def test_masks_and_acting_as_the_agents_page_says() -> None:
    names = page(AGENTS)
    observation, action = names["masked_samples"].env.observation, names["masked_samples"].agent.action
    assert observation.action_mask.gather(-1, action[..., None]).all()
    recorded = names["masked_samples"].agent.agent_info.log_prob
    torch.testing.assert_close(names["log_prob"].detach(), recorded)
    assert names["env"].observation_space.contains(names["row"])


def test_the_distribution_of_the_agents_page_is_evaluated() -> None:
    class Switches(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gym.spaces.MultiBinary(4)

    agent = page(OWN_AGENTS)["BernoulliPgAgent"](partial(Net, 2, 4, 0))
    with SerialSampler(Switches, batch_T=4, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        samples, _ = sampler.obtain_samples(0)
        found, recorded = agent.evaluate(samples), samples.agent.agent_info
        torch.testing.assert_close(found.log_prob.detach(), recorded.log_prob, check_dtype=False)
        torch.testing.assert_close(found.value.detach(), recorded.value, check_dtype=False)
        assert found.entropy.shape == (4, 2)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_the_tabular_agent(cls: Any) -> None:
    agent = page(OWN_AGENTS)["TabularAgent"]()
    with cls("FrozenLake-v1", batch_T=30, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        sampler.obtain_samples(0)
        agent.table[:, 3] = 9.0
        agent.sync_shared_memory()
        samples, _ = sampler.obtain_samples(1)
        greedy = ~samples.agent.agent_info.explored
        assert (samples.agent.action[greedy] == 3).all()
        assert (samples.agent.bootstrap_value == 9).all()


def test_the_trajectory_info() -> None:
    cls = page(COLLECTORS)["PushesTrajInfo"]
    with ParallelSampler(CountingEnv, batch_T=10, batch_B=1, traj_info_cls=cls, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0, traj_info_kwargs={"scale": 2.0})
        samples, infos = sampler.obtain_samples(0)
        assert [info.Pushes for info in infos] == [
            2 * int((samples.agent.action[i : i + 5] == 1).sum()) for i in (0, 5)
        ]
        assert all(info.LastObservation.tolist()[1] == 5 for info in infos)
        assert "Pushes" in repr(infos[0])
        assert "_scale" not in repr(infos[0])


@pytest.mark.parametrize("traj_info", ["TrajInfo", "PushesTrajInfo"])
def test_the_evaluation_of_one_episode_each(traj_info: str) -> None:
    names = page(COLLECTORS)
    how = {"eval_collector_cls": names["FirstEpisodeEval"], "traj_info_cls": names[traj_info]}
    sizes = {"eval_n_envs": 3, "eval_env_kwargs": [{"length": n} for n in (2, 9, 4)], "eval_max_steps": 90}
    with sampler_of(ParallelSampler, **sizes, **how) as sampler:
        sampler.initialize(RandomAgent())
        for itr in range(2):
            assert sorted(info.Length for info in sampler.evaluate_agent(itr)) == [2, 4, 9]


def test_the_testing_page_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    names = definitions("docs/testing.md")
    names["test_my_collector"]()
    shown = re.search(r"```\n(ClippingCollector breaks .*?)```", TESTING, re.DOTALL)
    assert shown is not None
    assert re.fullmatch(re.escape(shown[1]).replace(r"\.\.\.", r"\d+"), capsys.readouterr().out)
    names["test_my_batches"]()
    names["test_my_agent"]()
    names["test_my_environment"]()
    shown = re.search(r"```\n(Forgetful breaks .*?)```", TESTING, re.DOTALL)
    assert shown is not None
    assert re.fullmatch(re.escape(shown[1]).replace(r"\.\.\.", r"[^\n]+"), capsys.readouterr().out)
    names["test_my_single_environment"]()
    assert re.match(r"reset: .*\nstep: .*\nmemory: ", capsys.readouterr().out)
    names["test_my_engine"]()
    names["test_my_program_when_a_worker_is_killed"]()


def test_the_classes_of_the_pages_keep_the_rules() -> None:
    names = page(COLLECTORS)
    check_collector(names["FreshStartCollector"], CountingEnv, continues=False, n_workers=(2,))
    with pytest.raises(ConformanceError, match="continues=False"):
        check_collector(names["FreshStartCollector"], CountingEnv)
    check_collector(names["PlaceCollector"], "CartPole-v1", n_workers=(2,), central=FULL)
    check_collector(names["HarderStarts"], "CartPole-v1", n_workers=(2,), central=False)
    check_agent(page(OWN_AGENTS)["TabularAgent"], "FrozenLake-v1")
    check_traj_info(names["PushesTrajInfo"], CountingEnv, traj_info_kwargs={"scale": 2.0})
    check_eval_collector(names["FirstEpisodeEval"], CountingEnv)


def test_the_batched_environment_is_sampled() -> None:
    cls = page(BATCHED)["Walks"]
    with ParallelSampler(cls, batch_T=40, batch_B=6, n_workers=2, batched=True) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert infos
        assert (samples.env.final_obs[samples.env.done].abs() == 4).all()
        assert (samples.env.observation.abs() < 4).all()


def test_the_testing_page_lists_every_rule() -> None:
    rules = [*collector_rules.TRACE_RULES, collector_rules.a_traj_info_subclass_sees_every_step]
    own = [rule for rule in vars(run_rules).values() if getattr(rule, "__module__", "") == run_rules.__name__]
    rules += [rule for rule in own if not rule.__name__.startswith("_")]
    rules += [*agent_rules.ACTING_RULES, *agent_rules.PARAMETER_RULES]
    rules += [*agent_rules.BATCH_SIZE_RULES, *agent_rules.CENTRAL_RULES]
    rules += [*evaluation_rules.EVALUATION_RULES, *evaluation_rules.TRAJ_INFO_RULES]
    rules += [*seat_rules.GAME_RULES, *seat_rules.TURN_RULES]
    listed = re.findall(r"`(\w+)`", TESTING.split("## The rules")[1].split("##")[0])
    assert sorted(listed) == sorted(["TrajInfo", *(rule.__name__ for rule in rules)])


def test_every_link_between_documents_has_a_target() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_learning_page_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    names = definitions("docs/learning.md")
    assert ast.literal_eval(capsys.readouterr().out) == [[1.5, 4.0], [1.0, 6.0], [3.0, 3.0]]
    assert names["part"].env.observation.shape == (16, 8, 4)
    assert names["target"].shape == (512,)


def test_the_resume_page_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    names = definitions("docs/resume.md")
    assert capsys.readouterr().out.splitlines() == ["8 environments continue exactly, 0 began new episodes", "pickle"]
    for (name, ours), (_, theirs) in zip(names["resumed"].leaves(), names["straight"].leaves(), strict=True):
        if name != "agent.policy_version":  # agent.load_state_dict has published once more
            torch.testing.assert_close(ours, theirs, msg=name)


def test_a_failure_is_repeated_as_the_failures_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("docs/failures.md") if "episode.run()" in block)
    names = executed(block, "docs/failures.md")
    assert re.match(r"episode \d+ of env_rank \d until its step \d+ \(worker \d", capsys.readouterr().out)
    with pytest.raises(ValueError, match="this case was forgotten"):
        names["env"].step(names["action"])
    assert list((tmp_path / "crashes").iterdir())


def test_the_recipes_run_as_written(tmp_path: Path) -> None:
    can_film = all(importlib.util.find_spec(name) for name in ("moviepy", "pygame"))
    found = [block for block in blocks("docs/recipes.md") if not block.startswith("# ")]
    namespace = executed("\n".join(block for block in found if can_film or ".film(" not in block), "docs/recipes.md")
    with (tmp_path / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["sampler/env_steps"]) for row in rows] == [64 * 8 * n for n in range(1, 11)]
    assert [row["eval/Return_mean"] == "nan" for row in rows] == [True] * 4 + [False] * 6
    assert namespace["model"].observation_norm.count == 64 * 8 * 10
    assert namespace["GameInfo"]().traj_done(True, False, {"game_over": False}) is False
    assert namespace["GameInfo"]().traj_done(False, True, {"game_over": False}) is True
    assert (namespace["samples"].env.reward == 2).all()
    new, old = (namespace["results"].values(policy, "return") for policy in ("new", "old"))
    assert namespace["gain"].estimate == pytest.approx((np.array(new) - old).mean())
    if can_film:
        assert (tmp_path / "last.mp4").stat().st_size


def test_the_checkpoint_of_the_recipes_is_continued(capsys: pytest.CaptureFixture[str]) -> None:
    page = blocks("docs/recipes.md")
    (loop,) = (block for block in page if "training.pt" in block)
    for last_itr in (9, 19):
        executed(page[0] + loop, "docs/recipes.md")
        assert torch.load("training.pt")["itr"] == last_itr
    assert capsys.readouterr().out == "8 environments continue exactly, 0 began new episodes\n"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with the scripts of the recipes."""
    for block in blocks("docs/recipes.md"):
        if (name := re.match(r"# (\w+\.py)\n", block)) is not None:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    return tmp_path


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


#: Options of each `Program` in this file.
FORKED = {"forks_supervisor": True, "skips_teardown": True}


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    """What they print. All must end well."""
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
            found.append(output)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


@pytest.mark.usefixtures("starter")
def test_four_runs_at_once_give_what_one_alone_gives(scripts: Path) -> None:
    """Four processes, then two in a pool, and at full scale two of joblib. Daily the pool forks;
    process/test_coexistence.py has one whose processes import torch again."""
    runs = outputs(*(Program([scripts / "train.py", seed], cwd=scripts, **FORKED) for seed in range(4)))
    found = [re.search(r"seed (\d) return (\S+)", run) for run in runs]
    assert [match and match[1] for match in found] == list("0123")
    assert all(re.search(r"1 worker, (on CPUs \d+|not pinned)", run) for run in runs)
    expected = " ".join(["returns", *(match[2] for match in found[:2] if match)])
    sweep = scripts / "sweep.py"
    text = sweep.read_text().replace("range(4)", "range(2)").replace("4)", "2)")
    sweep.write_text(text if FULL else text.replace('"spawn"', '"fork"'))
    for launcher in scaled(("pool", "joblib"), ("pool",)):
        program = start(scripts, "sweep.py", launcher) if FULL else Program([sweep, launcher], cwd=scripts, **FORKED)
        assert outputs(program)[0].splitlines()[-1] == expected, launcher


def ranks(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(2):
        values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        yield Program([scripts / "ddp.py"], cwd=scripts, **FORKED)


@pytest.mark.usefixtures("starter")
def test_two_ranks_of_torchrun_have_one_model_and_different_environments(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At full scale with torchrun, daily with the environment variables that it sets."""
    if FULL:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py"]
        found = outputs(start(scripts, *command))
    else:
        found = outputs(*ranks(scripts, monkeypatch))
    found = re.findall(r"rank (\d) of 2: envs range\((\d+), (\d+)\), (\S+)", "".join(found))
    assert sorted(match[:3] for match in found) == [("0", "0", "8"), ("1", "8", "16")]
    assert found[0][3] == found[1][3]


# ---- samplers and collectors of subclassing.md -------------------------------------------------


@pytest.fixture(scope="module")
def subclassing() -> Any:
    """Its names, which hold a batch: so it is executed before a test is watched for what it leaves."""
    return definitions(SUBCLASSING)


def test_each_program_has_at_most_40_lines() -> None:
    for block in blocks(SUBCLASSING):
        assert len([line for line in block.splitlines() if line.strip()]) <= 40


@pytest.mark.parametrize("n_workers", [1, 3])
def test_the_episodes_are_the_first_that_began_and_are_whole(subclassing: Any, n_workers: int) -> None:
    with subclassing["EpisodeSampler"](CountingEnv, batch_T=7, batch_B=3, n_workers=n_workers) as sampler:
        sampler.n_episodes = 9
        sampler.initialize(RandomAgent(), seed=2)
        for itr in range(3):
            samples, infos = sampler.obtain_samples(itr)
            env = samples.copy().numpy().env
            starts = [(t, b) for t in range(len(env.done)) for b in range(3) if env.prev_done[t, b]][:9]
            found = subclassing["first_episodes"](samples, 9)
            assert [(rows.start, b) for rows, b in found] == starts
            for rows, b in found:
                assert env.done[rows.stop - 1, b]
                assert not env.done[rows.start : rows.stop - 1, b].any()
            assert len(infos) == env.done.sum()
            last = len(env.done) - 7
            assert not last or subclassing["first_episodes"](samples[:last], 9) is None, "it stops as soon as it can"


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_the_second_agent_acts_in_odd_rows_with_its_own_numbers(subclassing: Any, cls: Any) -> None:
    collector = subclassing["TwoAgentsCollector"]
    with cls(CountingEnv, batch_T=6, batch_B=3, collector_cls=collector, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        actions = [sampler.obtain_samples(itr)[0].agent.action.clone().numpy() for itr in range(2)]
    for b in range(3):
        rngs = [stream(5, Purpose.ACTION, b), stream(5, Purpose.ACTION, b, 1)]
        wanted = [draw(CountingEnv().action_space, rngs[t % 2], 1)[0] for t in range(12)]
        np.testing.assert_array_equal(np.concatenate(actions)[:, b], wanted)


class Counting(Agent):
    """Its state counts the steps since its last reset."""

    recurrent = True

    def seed_columns(self, rngs: Any) -> None:
        self.n = np.zeros(len(rngs), int)

    def reset(self) -> None:
        self.n[:] = 0

    def reset_one(self, column: int) -> None:
        self.n[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n += 1
        return AgentStep(np.zeros(len(self.n), np.int64), NamedArrays(n=self.n - 1))


class Stateless(Counting):
    reset_one = Agent.reset_one


class Fails(CountingEnv):
    """Its fourth step fails, so an episode is cut after three."""

    def step(self, action: Any) -> Any:
        if self.count == 3:
            raise GameError("the game is gone")
        return super().step(action)


def rows_of_counting(mode: AutoresetMode) -> Any:
    return lambda num_envs: SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("first", [Counting, Stateless])
@pytest.mark.parametrize(
    ("env_fn", "options"),
    [
        (CountingEnv, {}),
        (CountingEnv, {"waits": True}),
        (Fails, {"on_game_failure": "renew", "max_renewals": 99}),
        *((rows_of_counting(mode), {"batched": True}) for mode in AutoresetMode),
        (ScriptedGame, {}),
        (ScriptedGame, {"waits": True}),
    ],
)
def test_the_states_of_both_agents_begin_with_the_episode(
    subclassing: Any, first: Any, env_fn: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(subclassing, "RandomAgent", Counting)

    class Waits(subclassing["TwoAgentsCollector"]):  # type: ignore[misc]
        waits, begin_episodes = True, WaitResetCollector.begin_episodes

    options = dict(options)
    collector = Waits if options.pop("waits", False) else subclassing["TwoAgentsCollector"]
    options |= {"batch_T": 7, "batch_B": 3, "max_decorrelation_steps": 9, "collector_cls": collector}
    n, n_begun, is_seen = np.zeros((2, 9), int), 0, np.zeros(9, bool)
    with SerialSampler(env_fn, **options) as sampler:
        sampler.initialize(first(), seed=5)
        for itr in range(6):
            batch = sampler.obtain_samples(itr)[0].numpy()
            own = batch.env.observation[..., 2 if env_fn is ScriptedGame else 1]  # the steps of the episode so far
            for t, b in np.ndindex(own.shape):
                if batch.env.valid[t, b] and own[t, b] == 0:
                    n[:, b], n_begun, is_seen[b] = 0, n_begun + 1, True
                if batch.env.valid[t, b] and is_seen[b] and (first is Counting or t % 2):
                    assert batch.agent.agent_info.n[t, b] == n[t % 2, b], (itr, t, b)
                n[t % 2, b] += 1
    assert n_begun > 12


def test_both_samplers_give_the_same_batches_with_any_number_of_workers(subclassing: Any) -> None:
    for name in ("EpisodeSampler", "TwoAgentsSampler"):
        found = []
        for n_workers in (1, 3):
            with subclassing[name](CountingEnv, batch_T=7, batch_B=3, n_workers=n_workers) as sampler:
                sampler.initialize(RandomAgent(), seed=1)
                found.append([sampler.obtain_samples(itr)[0].env.reward.clone() for itr in range(3)])
        assert all(one.equal(other) for one, other in zip(*found, strict=True))
