"""`penstock eval`: what `evaluate` finds, on the command line."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

import penstock
from penstock import EvalResults, evaluate
from penstock.__main__ import main

from ..scale import FULL
from ..starter import Program
from ..support import until
from .reach import TASKS, Reach, vla

POLICIES = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

def lean(observation):
    return (observation[:, 2] > 0).astype(int)

def brake(observation):
    return (observation[:, 2] + 0.01 * observation[:, 3] > 0).astype(int)

def breaks(observation):
    raise OSError("no network")

class Always:
    action = 1

    def reset(self):
        pass

    def select_action(self, batch):
        return [self.action]

always, never = Always(), Always()
never.action = 0

def make_env(task="earth"):
    env = CartPoleEnv()
    env.gravity = {"earth": 9.8, "moon": 1.6}[task]
    return gym.wrappers.TimeLimit(env, 50)

def unfinished():
    raise RuntimeError("no display")

gym.register("Own-v0", make_env)
"""
REACH = "tests.evaluation.reach"
ONE = "--workers", "1"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has a module of policies, which no other test finds."""
    (tmp_path / "policies.py").write_text(POLICIES)
    (tmp_path / "torn.py").write_text("def")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(gym.registry, "Own-v0", None)  # type: ignore[arg-type]  so that it is taken away at the end
    monkeypatch.delitem(gym.registry, "Own-v0")
    monkeypatch.setitem(sys.modules, "policies", sys)
    monkeypatch.delitem(sys.modules, "policies")
    importlib.invalidate_caches()


def own(name: str) -> Any:
    """What the module of policies has, after `main` has imported it."""
    return getattr(sys.modules["policies"], name)


def lines(folder: str) -> list[str]:
    file = Path(folder, "episodes.jsonl")
    return file.read_text().splitlines() if file.exists() else []


def test_it_prints_the_table_writes_files_and_continues_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "eval",
        "policies.py:lean",
        "CartPole-v1",
        *ONE,
        "--folder",
        "kept",
        "--json",
        "a.json",
        "--csv",
        "a.csv",
    ]
    assert main([*command, "--episodes", "3"]) == 0
    first = lines("kept")
    assert len(first) == 3
    capsys.readouterr()
    assert main([*command, "--episodes", "5"]) == 0
    truth = evaluate({"policies.py:lean": own("lean")}, "CartPole-v1", episodes=5, n_workers=1)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{truth}\n", ""), "no progress where there is no terminal"
    assert lines("kept")[:3] == first
    assert len(lines("kept")) == 5
    assert EvalResults.load("kept").episodes == truth.episodes
    for suffix in ("json", "csv"):
        truth.save(f"truth.{suffix}")
        assert Path(f"a.{suffix}").read_bytes() == Path(f"truth.{suffix}").read_bytes()


def test_the_options_are_those_of_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", f"{REACH}:TASKS", "--success", "is_success", "--until-success", "--max-steps", "30"]
    command = ["eval", f"{REACH}:vla", f"{REACH}:Reach", *options, "--episodes", "2:4", "--seed", "3", *ONE]
    assert main([*command, "--json", "found.json"]) == 0
    table = capsys.readouterr().out
    how: dict[str, Any] = {"success": "is_success", "until_success": True, "max_steps": 30, "seed": 3, "n_workers": 1}
    truth = evaluate({f"{REACH}:vla": vla}, Reach, tasks=TASKS, episodes=range(2, 4), **how)
    assert table == f"{truth}\n"
    rows = [result.as_dict() for result in truth.episodes]
    assert json.loads(Path("found.json").read_text()) == json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--success-at", "any", "--success", "is_success"], {"success_at": "any", "success": "is_success"}),
        (["--trust-folder", "--folder", "kept"], {"trust_folder": True}),
    ],
)
def test_options_of_success_and_trust(
    words: list[str], how: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", f"{REACH}:vla", f"{REACH}:Reach", "--episodes", "2", *ONE, *words]) == 0
    truth = evaluate({f"{REACH}:vla": vla}, Reach, episodes=2, n_workers=1, **how)
    assert capsys.readouterr().out == f"{truth}\n"


def test_tasks_by_name_and_an_environment_of_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "policies:brake", "policies:make_env", "--tasks", "earth,moon", "--episodes", "2", *ONE]) == 0
    truth = evaluate(
        {"policies:brake": own("brake")}, own("make_env"), tasks=["earth", "moon"], episodes=2, n_workers=1
    )
    assert capsys.readouterr().out == f"{truth}\n"
    # The module registers the environment.
    assert main(["eval", "policies:brake", "policies:Own-v0", "--episodes", "2", *ONE]) == 0
    truth = evaluate({"policies:brake": own("brake")}, own("make_env"), episodes=2, n_workers=1)
    assert capsys.readouterr().out == f"{truth}\n"


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("random", penstock.RandomAgent),
        ("penstock:RandomAgent", penstock.RandomAgent),
        ("policies:Always", lambda: own("always")),
        ("policies:never", lambda: own("never")),
    ],
)
def test_the_forms_of_policies(text: str, policy: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A class is called without arguments. Anything else is the policy."""
    assert main(["eval", text, "CartPole-v1", "--episodes", "3", *ONE]) == 0
    assert capsys.readouterr().out == f"{evaluate({text: policy()}, 'CartPole-v1', episodes=3, n_workers=1)}\n"


def test_the_difference_of_two_policies_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = "policies:brake", "policies:lean"
    command = ["eval", a, "CartPole-v1", "--against", b, "--episodes", "10", *ONE, "--at-least", "return=60"]
    assert main(command) == 0, "the bound is one for the first policy, not for what it is compared with"
    truth = evaluate({a: own("brake"), b: own("lean")}, "CartPole-v1", episodes=10, n_workers=1)
    text = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*truth.difference(a, b, "return"))
    assert f"{a} - {b}: {text}" in capsys.readouterr().out
    assert truth.mean(b, "return").lower < 60


def test_a_bound_holds_if_the_lower_end_of_the_interval_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "policies:lean", "CartPole-v1", "--episodes", "5", *ONE, "--at-least"]
    assert main([*command, "return=-1e9"]) == 0
    mean = evaluate(own("lean"), "CartPole-v1", episodes=5, n_workers=1).mean("policy", "return")
    capsys.readouterr()
    assert main([*command, f"return={mean.lower!r}"]) == 0
    assert f": yes, the lower end is {mean.lower:.10g}\n" in capsys.readouterr().out
    above = math.nextafter(mean.lower, math.inf)
    assert main([*command, f"return={above!r}", "--at-least", "return=0"]) == 1, "all must hold"
    out = capsys.readouterr().out
    assert ": NO, the lower end is" in out
    assert out.endswith(f"at least return=0: yes, the lower end is {mean.lower:.10g}\n")
    assert main([*command, f"return={(mean.lower + mean.estimate) / 2}"]) == 1, "the mean is above this"
    # One episode has no interval: it shows nothing.
    assert main(["eval", "policies:lean", "CartPole-v1", "--episodes", "1", *ONE, "--at-least", "return=0"]) == 1


class Failing(Reach):
    """Always a success at the first step. Half of its episodes raise instead."""

    def step(self, action: Any) -> Any:
        if self.number % 2:
            raise OSError("the arm does not answer")
        observation, reward, *_ = super().step(action)
        return observation, reward, True, False, {"is_success": True}


@pytest.mark.filterwarnings("default")
def test_episodes_that_failed_hold_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", f"{REACH}:vla", f"{__name__}:Failing", "--success", "is_success", "--episodes", "40", *ONE]
    assert main([*command, "--at-least", "success=0.7"]) == 1
    printed = capsys.readouterr()
    assert "success" in printed.out
    assert "penstock eval: " in printed.err
    assert "episodes failed by their environment" in printed.err
    assert "RuntimeWarning" not in printed.err, "a line, without the source that warned"
    assert main([*command, "--at-least", "success=0.1"]) == 0
    capsys.readouterr()
    assert main([*command, "--at-least", "return=-1e9"]) == 1, "an episode that failed may be worse than all others"
    assert "the lower end is -inf (episodes failed, and may be worse than all others)" in capsys.readouterr().out


class Says(Failing):
    """Its info says 1 in place of True, and nobody asked for a success."""

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return *result, {"solved": 1}


@pytest.mark.filterwarnings("default")
def test_a_one_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", f"{REACH}:vla", f"{__name__}:Says", "--episodes", "40", *ONE, "--at-least"]
    assert main([*command, "solved=0.7"]) == 1
    assert main([*command, "solved=0.1"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nothing_of_this_name:lean CartPole-v1", "cannot load nothing_of_this_name:lean: No module named"),
        ("policies:nothing CartPole-v1", "cannot load policies:nothing: module 'policies' has no attribute"),
        (":lean CartPole-v1", "cannot load :lean: Empty module name"),
        ("lean CartPole-v1", "POLICY must be MODULE:NAME, a policy as penstock.evaluate takes it"),
        ("policies:le-an CartPole-v1", "POLICY must be MODULE:NAME"),
        ("policies:POLICIES.lean CartPole-v1", "POLICY must be MODULE:NAME"),
        ("torn:lean CartPole-v1", "SyntaxError: invalid syntax"),
        ("policies:gym CartPole-v1", "a policy is an Agent, a function of the observations, or"),
        ("policies:breaks CartPole-v1", "OSError: no network"),
        ("policies:lean NoSuchEnv-v0", "not a registered environment id"),
        ("policies:lean policies:NoSuchEnv-v0", "not a registered environment id"),
        ("policies:lean policies:nothing", "cannot load policies:nothing"),
        ("policies:lean policies:unfinished", "RuntimeError: no display"),
        ("policies:lean CartPole-v1 --against policies:lean", "--against policies:lean is the policy itself"),
        ("policies:lean CartPole-v1 --against nothing:x", "cannot load nothing:x"),
        ("policies:lean CartPole-v1 --tasks policies:nothing", "cannot load policies:nothing"),
        ("policies:lean CartPole-v1 --until-success", "until_success needs success"),
        ("policies:lean CartPole-v1 --episodes 0", "episodes must be"),
        ("policies:lean CartPole-v1 --episodes 2 --at-least win=1", "there is no metric 'win'"),
        ("policies:lean CartPole-v1 --folder policies.py", "cannot be written"),
        ("model.zip CartPole-v1", "model.zip is no model that Stable-Baselines3 has saved"),
    ],
)
def test_what_is_wrong_is_said_and_is_not_the_status_of_a_missed_bound(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if ".zip" in words:
        pytest.importorskip("stable_baselines3")
    assert main(["eval", *words.split(), *ONE]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("policies:lean", "the following arguments are required: ENV"),
        ("policies:lean CartPole-v1 --episodes ten", "'ten' is not N or FIRST:END"),
        ("policies:lean CartPole-v1 --episodes 1:", "'1:' is not N or FIRST:END"),
        ("policies:lean CartPole-v1 --at-least success", "'success' is not METRIC=VALUE"),
        ("policies:lean CartPole-v1 --at-least return=nan", "'return=nan' is not METRIC=VALUE"),
        ("policies:lean CartPole-v1 --at-least success=most", "'success=most' is not METRIC=VALUE"),
        ("policies:lean CartPole-v1 --json a.txt", "'a.txt' must end in .json, in a folder that is there"),
        ("policies:lean CartPole-v1 --csv nowhere/a.csv", "must end in .csv, in a folder that is there"),
    ],
)
def test_wrong_options_are_refused_before_the_first_episode(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["eval", *words.split()])
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


def test_progress_where_there_is_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["eval", "policies:lean", "CartPole-v1", "--episodes", "2", *ONE]) == 0
    assert "2 of 2 episodes, return" in capsys.readouterr().err


# ---- files of Stable-Baselines3 ---------------------------------------------------------------------


@pytest.fixture
def sb3() -> Any:
    return pytest.importorskip("stable_baselines3")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # SB3 warns; and a network rounds differently in batches of another size
@pytest.mark.parametrize(
    ("name", "env", "algo"),
    [
        ("PPO", "CartPole-v1", None),
        ("DQN", "CartPole-v1", None),
        ("SAC", "Pendulum-v1", None),
        ("TD3", "Pendulum-v1", None),
        ("DDPG", "Pendulum-v1", "DDPG"),
        ("A2C", "CartPole-v1", "stable_baselines3:A2C"),
    ],
)
def test_a_file_of_sb3(sb3: Any, name: str, env: str, algo: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"net_arch": [8]}
    model = getattr(sb3, name)("MlpPolicy", env, seed=0, policy_kwargs=small)
    model.save("model.zip")
    command = ["eval", "model.zip", env, "--episodes", "2", *ONE, "--csv", "found.csv", "--max-steps", "20"]
    assert main([*command, *([] if algo is None else ["--algo", algo])]) == 0

    def act(observation: Any) -> Any:
        return model.predict(observation, deterministic=True)[0]

    evaluate({"model.zip": act}, env, episodes=2, n_workers=1, max_steps=20).save("truth.csv")
    assert Path("found.csv").read_bytes() == Path("truth.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_file_of_sb3_that_cannot_be_loaded(sb3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sb3.PPO("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8]}).save("model.zip")
    command = ["eval", "model.zip", "CartPole-v1", "--episodes", "2", *ONE]
    assert main([*command, "--algo", "DQN"]) == 2
    assert "DQN cannot load model.zip" in capsys.readouterr().err
    for name in ("NoSuch", "HerReplayBuffer", "get_system_info", "stable_baselines3:get_system_info"):
        assert main([*command, "--algo", name]) == 2
        assert f"--algo {name} is no algorithm" in capsys.readouterr().err
    own_policy = type("OwnPolicy", (sb3.ppo.MlpPolicy,), {"__module__": "own.nets"})
    sb3.PPO(own_policy, "CartPole-v1", policy_kwargs={"net_arch": [8]}).save("model.zip")
    assert main(command) == 2
    assert "a policy of own.nets, which tells no algorithm" in capsys.readouterr().err
    assert main([*command, "--algo", "PPO"]) == 0


# ---- processes -------------------------------------------------------------------------------------


def program(*options: str) -> subprocess.Popen[str]:
    """`python -m penstock eval`, in a session of its own. Daily, it is a fork of a process that has imported torch."""
    if FULL:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "penstock", "eval", *options]
        return subprocess.Popen(command, start_new_session=True, **pipes)
    return Program([penstock.__main__.__file__, "eval", *options], forks_supervisor=True)


def test_a_new_interpreter_finds_modules_of_its_folder_and_misses_a_bound() -> None:
    command = [sys.executable, "-W", "error", "-m", "penstock", "eval", "policies:lean", "policies:make_env", *ONE]
    command += ["--episodes", "3", "--folder", "kept", "--at-least", "return=1000"]
    found = [subprocess.run(command, capture_output=True, text=True, timeout=100) for _ in range(2)]
    assert [(done.returncode, done.stderr) for done in found] == [(1, "")] * 2
    assert found[0].stdout == found[1].stdout
    table, bound = found[0].stdout.split("\n3 episodes; ")
    assert table.split()[:2] == ["return", "policies:lean"]
    assert "at least return=1000: NO" in bound
    assert len(lines("kept")) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("starter")
@pytest.mark.parametrize("to_all", [False, True], ids=["process", "group"])
def test_ctrl_c_leaves_nothing_but_the_folder_and_the_same_command_continues(to_all: bool) -> None:
    words = ["policies:lean", "CartPole-v1", "--workers", "2", "--folder", "kept"]
    with program(*words, "--episodes", "20000") as process:
        until(partial(lines, "kept"), "the first episode", 60)
        started = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "")
    assert errors == "\nInterrupted. The same command continues in kept.\n"
    assert len(started) >= 2
    assert psutil.wait_procs(started, timeout=10)[1] == []
    known = len(lines("kept"))
    assert known > 0
    assert main(["eval", *words, "--episodes", "5"]) == 0
    assert len(lines("kept")) <= known + 5
    with pytest.warns(RuntimeWarning, match="have not been played yet"):
        found = {r.episode: r.metrics for r in EvalResults.load("kept").episodes}
    truth = evaluate(own("lean"), "CartPole-v1", episodes=5, n_workers=1)
    assert [found[k] for k in range(5)] == [r.metrics for r in truth.episodes]


@pytest.mark.slow
@pytest.mark.usefixtures("starter")
def test_a_reader_that_ends_early_costs_neither_the_files_nor_the_status() -> None:
    words = ["policies:lean", "CartPole-v1", *ONE, "--episodes", "2", "--json", "found.json"]
    with program(*words, "--at-least", "return=1000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(60)
    assert (process.returncode, errors) == (1, "")
    assert len(json.loads(Path("found.json").read_text())) == 2
    assert np.isfinite([row["metrics"]["return"] for row in json.loads(Path("found.json").read_text())]).all()
