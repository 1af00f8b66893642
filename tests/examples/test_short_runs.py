"""Each example, shortened: it learns, or says that it has missed its goal, and writes what it promises."""

import csv
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from .. import starter
from ..scale import FULL, scaled
from .programs import EXAMPLES, ROOT

pytestmark = pytest.mark.slow

run = partial(starter.run, cwd=ROOT)
#: Options of programs whose updates and evaluations take most of their time.
FEW_STEPS = scaled([], ["--eval-max-steps", 1600, "--epochs", 4])

#: Example, options, and what it prints. A random policy stays near 22 in CartPole, one that does not learn near 10. In
#: Acrobot, most games end after 500 steps.
LEARNS = {
    "a2c": ("--goal 60 --eval-every 5000 --total-steps 200000 --n-workers 2", "goal of 60 reached"),
    "dqn": ("--goal 60 --eval-every 1000 --total-steps 20000", "goal of 60 reached"),
    "numpy_pg": ("--goal 60 --time-limit 60", ""),
    "action_repeats": (
        scaled("--total-steps 60000 --goal -250", "--total-steps 20000 --goal -330 --lengths 4 5"),
        "steps for each decision",
    ),
}


@pytest.mark.parametrize("example", LEARNS)
def test_a_short_run_learns(example: str) -> None:
    options, words = LEARNS[example]
    done = run(f"examples/{example}.py", *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout


SAC = "--total-steps 1100 --eval-every 100 --eval-episodes 4 --max-episode-steps 50"
R2D1 = "--total-steps 2600 --min-steps 1000 --eval-every 1200 --eval-episodes 32"
SHORT = "--batch-T 25 --batch-B 4 --total-steps 300 --eval-games 4 --print-every 1"
FEWER = "--batch-T 10 --batch-B 2 --total-steps 20 --eval-games 2"
#: Example, options, what it says at its end, and a pattern of what it has printed.
MISSES = [
    ("a2c", "--total-steps 320 --eval-every 320 --eval-episodes 8", "goal of 475 missed", ""),
    ("ppo", f"--total-steps {scaled(4096, 2048)}", "goal of 475 missed", ""),
    ("ppo", "--time-limit 0.1", "goal of 475 missed", ""),
    ("dqn", "--total-steps 1600 --eval-every 500 --asynchronous 1", "goal of 475 missed", ""),
    *(
        (
            "sac",
            f"{SAC} --truncation-terminates {wrong} --asynchronous {1 - wrong}",
            "goal of -200 missed",
            r"1,1\d\d s",
        )
        for wrong in scaled((0, 1), (1,))
    ),
    *(
        (
            "r2d1",
            f"{R2D1} --asynchronous {ahead} --stored-state {ahead}",
            "goal of 0.95 missed",
            r"(?s) steps, .* steps,",
        )
        for ahead in scaled((0, 1), (1,))
    ),
    ("mappo", f"{FEWER} --goal 0.99", "goal missed: the trained policy must be better by 99%", ""),
]


@pytest.mark.parametrize(("example", "options", "words", "printed"), MISSES)
def test_a_missed_goal_is_said_and_is_a_failure(
    example: str, options: str, words: str, printed: str, tmp_path: Path
) -> None:
    if example == "mappo":
        pytest.importorskip("mpe2")
    own = ["--out", tmp_path, *scaled([], ["--eval-max-steps", 800])] if example == "ppo" else []
    done = run(f"examples/{example}.py", *options.split(), *own)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert re.search(printed, done.stdout)


# ---- PPO ---------------------------------------------------------------------------------------


def written_by(
    example: str, folder: Path, *options: object
) -> tuple[list[dict[str, str]], list[float], dict[str, Any]]:
    """The rows of its table, the returns of its evaluations, and its summary."""
    done = run(f"examples/{example}.py", "--out", folder, "--n-workers", 2, *FEW_STEPS, *options)
    assert done.returncode == 0, done.stderr
    with (folder / "progress.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    returns = [float(row["eval_return_mean"]) for row in rows if row["eval_return_mean"]]
    return rows, returns, json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_ppo_learns_and_is_reported(tmp_path: Path) -> None:
    rows, returns, summary = written_by("ppo", tmp_path, "--goal", 60, *scaled([], ["--batch-B", 16]))
    assert returns[0] < 60 <= min(returns[-2:]), "a policy falls at once until it is trained"
    assert [worker["steps"] for worker in summary["workers"]] == [int(rows[-1]["steps"]) // 2] * 2
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "row"} == {"acting", "stepping"}
    for runs in scaled(([tmp_path], [tmp_path] * 2), ([tmp_path] * 2,)):
        done = run("benchmarks/report.py", *runs, "--seconds", 0)
        assert done.returncode == 0, done.stderr
        assert "steps/s" in done.stdout
        for picture in ("learning_curve.svg", "timeline.svg"):
            assert "<svg" in (tmp_path / picture).read_text(encoding="utf-8")
            (tmp_path / picture).unlink()


def test_asynchronous_ppo_learns_and_can_be_repeated(tmp_path: Path) -> None:
    sizes = scaled([], ["--batch-T", 32, "--eval-every", 3, "--learning-rate", 2e-3])
    first, returns, summary = written_by("async_ppo", tmp_path / "first", "--goal", 45, *sizes)
    goal = scaled(45, 1)  # 1: two evaluations
    again, *_ = written_by("async_ppo", tmp_path / "again", "--goal", goal, "--n-slots", 4, *sizes)
    found = [[(row["train_return_mean"], row["eval_return_mean"]) for row in rows] for rows in (first, again)]
    assert len(again) == scaled(len(first), 4)
    assert found[0][: len(again)] == found[1]
    assert returns[0] < 45 <= min(returns[-2:])
    assert summary["lag"]["max"] == 1


def test_the_minimal_example_is_short_and_learns(tmp_path: Path) -> None:
    text = (EXAMPLES / "ppo_minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    n_batches, script = scaled(40, 12), tmp_path / "ppo_minimal.py"
    for size, fewer in (("n_batches=40", f"n_batches={n_batches}"), ("batch_T=128", f"batch_T={scaled(128, 64)}")):
        assert size in text
        text = text.replace(size, fewer)
    script.write_text(text, encoding="utf-8")
    done = run(script)
    assert done.returncode == 0, done.stderr
    returns = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(returns) == n_batches
    assert max(returns[-10:]) > 5 * returns[0]


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint, earlier = tmp_path / "stopped/checkpoint.pt", tmp_path / "earlier.pt"
    for out, n_batches in (("stopped", 1), ("stopped", 2), ("stopped", 3), ("straight", 3)):
        done = run("examples/ppo_resume.py", "--out", tmp_path / out, "--n-batches", n_batches)
        assert done.returncode == 0, done.stderr
        if out == "stopped" and n_batches == 1:
            shutil.copy(checkpoint, earlier)
        elif n_batches == 2:
            shutil.copy(earlier, checkpoint)  # as if it was killed after it had logged batch 1, before it saved it
    stopped, straight = (torch.load(tmp_path / out / "checkpoint.pt") for out in ("stopped", "straight"))
    assert stopped["n_batches"] == straight["n_batches"] == 3
    for name, tensor in straight["agent"].items():
        assert torch.equal(stopped["agent"][name], tensor), name
    assert len(list((tmp_path / "stopped").glob("events.out.tfevents.*"))) == 3, "one for each start"
    shown = EventAccumulator(str(tmp_path / "stopped"))
    shown.Reload()
    steps = [event.step for event in shown.Scalars("train/Return_mean")]
    assert steps == [2048 * n for n in range(1, 4)], "each point once"


@pytest.mark.skipif(not FULL, reason="full scale: 100,000 steps. Daily, an update of continuous actions is tested")
def test_ppo_learns_continuous_actions(tmp_path: Path) -> None:
    # A random policy stays near -1,200.
    options = "--env-id Pendulum-v1 --goal -700 --discount 0.9 --gae-lambda 0.95 --n-workers 2"
    done = run("examples/ppo.py", "--out", tmp_path, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal of -700 reached" in done.stdout


@pytest.mark.parametrize(("game", "envs"), [("Breakout", "batched"), *scaled([("Pong", "single")], [])])
def test_two_batches_of_atari(game: str, envs: str) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    sizes = "--total-frames 64 --batch-T 4 --batch-B 2 --n-workers 2 --eval-every 0"
    done = run("examples/ppo_atari.py", "--game", game, "--envs", envs, *sizes.split())
    assert done.returncode == 0, done.stderr
    assert "64 frames" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the extra `jax`")
def test_ppo_in_jax_learns(tmp_path: Path) -> None:
    # In a new interpreter: a process in which JAX runs must not be forked.
    command = [sys.executable, EXAMPLES / "jax_ppo.py", "--goal", "60", "--time-limit", "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("example", "module", "remedy"),
    [
        ("jax_ppo", "jax", "pip install '.[jax]'"),
        ("ppo_atari", "ale_py", "pip install '.[atari]'"),
        ("ppo_resume", "torch.utils.tensorboard", "needs tensorboard: pip install tensorboard"),
    ],
)
def test_a_module_that_is_missing_is_named_with_its_remedy(
    example: str, module: str, remedy: str, tmp_path: Path
) -> None:
    script, path = tmp_path / "script.py", str(EXAMPLES / f"{example}.py")
    code = f"import sys, runpy; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules[{module!r}] = None"
    script.write_text(f"{code}; runpy.run_path({path!r}, run_name='__main__')")
    done = run(script)
    assert done.returncode == 1
    assert remedy in done.stderr


# ---- other examples ----------------------------------------------------------------------------


def test_recurrent_ppo_writes_curves_and_a_picture_and_memory_beats_none(tmp_path: Path) -> None:
    options = scaled(
        "--length 2 --batch-T 16 --learning-rate 5e-3 --steps 16000 --eval-every 8",
        "--length 1 --batch-T 8 --learning-rate 1e-2 --steps 5000 --eval-every 10",
    )
    sizes = ["--n-workers", 2, "--minibatches", 2, *options.split()]
    done = run("examples/recurrent_ppo.py", "--out", tmp_path, *sizes)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["goal_reached"]
    assert results["final"]["recurrent"] >= 0.95
    assert results["final"]["feed-forward"] < 0.7, "a guess, over 192 episodes"
    for curve in results["curves"].values():
        assert curve["steps"][0] == 0
        assert all(math.isfinite(value) for values in curve.values() for value in values)
    assert (tmp_path / "recurrent.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", ["ippo_pettingzoo", "mappo"])
def test_a_run_of_many_agents_says_how_good_it_is(example: str) -> None:
    pytest.importorskip("mpe2")
    done = run(f"examples/{example}.py", *SHORT.split(), "--goal", -10)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *batches, last = done.stdout.splitlines()
    assert re.fullmatch(r"random policy: mean return per game -\d+\.\d", first)
    assert [line.split()[0] for line in batches] == ["100", "200", "300"]
    assert re.fullmatch(r"trained policy: mean return per game -\d+\.\d, -?\d+% better, after \d+ s", last)


@pytest.mark.parametrize("env_id", ["sisl/pursuit-v5", *scaled(["mpe2.simple_spread_v3"], [])])
def test_the_shared_policy_plays_other_games(env_id: str) -> None:
    pytest.importorskip("mpe2")
    pytest.importorskip("pettingzoo.sisl")
    fewer = ["--env-id", env_id, *scaled(SHORT, FEWER).split()]
    done = run("examples/ippo_pettingzoo.py", *fewer, "--max-cycles", 10, "--goal", -1000)
    assert done.returncode == 0, done.stdout + done.stderr


def printed_by(*command: object) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ppo_learns_the_same_on_our_vector_environment_and_on_gymnasiums() -> None:
    ours, theirs = (
        printed_by("examples/vector_ppo.py", "--vector", kind, "--total-steps", 3072) for kind in ("shm", "sync")
    )
    outcome = re.compile(r"return +([\d.]+)|magnitudes: ([\d.]+)")
    assert outcome.findall(ours) == outcome.findall(theirs)
    assert len(outcome.findall(ours)) == 2


def test_stable_baselines3_trains_on_it() -> None:
    pytest.importorskip("stable_baselines3")
    printed = printed_by("examples/vector_sb3.py", "--steps", 512, "--num-envs", 4)
    assert re.search(r"return \d+\.\d \+- \d+\.\d after 512 steps", printed)
