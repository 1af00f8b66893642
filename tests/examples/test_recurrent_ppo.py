"""Recurrent PPO: its state is nulled where an episode ended, and memory pays where memory is needed."""

import importlib.util
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import SerialSampler
from penstock.agents import RecurrentCategoricalPgAgent
from penstock.learning import gae

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def example() -> Any:
    name = "recurrent_ppo"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclass looks itself up there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


run = partial(starter.run, "examples/recurrent_ppo.py", cwd=ROOT)


def walk(env: Any, sign: int, *actions: int) -> list[Any]:
    """Steps of an episode that shows `sign`."""
    while env.reset()[0][0] != sign:
        pass
    return [env.step(action) for action in actions]


def test_the_maze_rewards_the_turn_that_was_shown(example: Any) -> None:
    env = example.TMaze(2, time_limit=5)
    env.reset(seed=0)
    for sign in (-1, 1):
        for turn in (1, 2):
            *corridor, last = walk(env, sign, 0, 2, 0, turn)
            assert [list(step[0]) for step in corridor] == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]
            assert all(step[1:4] == (0.0, False, False) for step in corridor)
            assert last[1:4] == (float((turn == 2) == (sign == 1)), True, False)
    assert [step[3] for step in walk(env, 1, 0, 0, 0, 0, 0)] == [False] * 4 + [True]


@pytest.fixture
def recorded(example: Any) -> Any:
    """The model, and a second batch of it: with ends of both kinds, and states that are not zero in the first row."""
    torch.manual_seed(0)
    agent = RecurrentCategoricalPgAgent(partial(example.Recurrent, 16), record_state="batch")
    with SerialSampler(partial(example.TMaze, 3, 6), batch_T=40, batch_B=8) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        with torch.no_grad():  # so that the state matters to the policy as much as to the value
            agent.model.policy.weight *= 100  # type: ignore[union-attr, operator]
        agent.sync_shared_memory()
        sampler.obtain_samples(0)
        samples, _ = sampler.obtain_samples(1)
        assert samples.env.terminated[:-1].any()
        assert samples.env.truncated[:-1].any()
        assert samples.agent.agent_info.prev_rnn_state[0].any()
        yield agent, samples


def test_replaying_a_batch_gives_what_was_recorded(recorded: Any) -> None:
    agent, samples = recorded
    for columns in (slice(None), torch.tensor([6, 1, 3])):
        part = samples[:, columns]
        now = agent.evaluate(part)
        torch.testing.assert_close(now.log_prob, part.agent.agent_info.log_prob, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(now.value, part.agent.agent_info.value, atol=1e-5, rtol=1e-5)


def test_a_state_that_outlives_its_episode_is_seen_by_that_test(recorded: Any) -> None:
    agent, samples = recorded
    begun_anew = samples.env.done.cumsum(0) - samples.env.done.long() > 0  # rows behind an end in the batch
    kept = samples.copy()
    kept.env.prev_done[1:] = False
    now, info = agent.evaluate(kept), samples.agent.agent_info
    for found, recorded_one in ((now.log_prob, info.log_prob), (now.value, info.value)):
        error = (found - recorded_one).abs()
        assert error[~begun_anew].max() < 1e-5
        assert error[begun_anew].max() > 1e-2


def test_advantages_see_truncation_as_no_end_of_reward(recorded: Any) -> None:
    _, samples = recorded
    env, agent = samples.env, samples.agent
    found, _ = gae(samples, 0.9, 0.0)  # one-step errors, which are easily written down
    delta = env.reward - agent.agent_info.value
    torch.testing.assert_close(found[env.terminated], delta[env.terminated])
    cut_short = env.truncated & ~env.terminated
    torch.testing.assert_close(found[cut_short], (delta + 0.9 * agent.final_value)[cut_short])
    assert agent.final_value[cut_short].all()
    last = (delta[-1] + 0.9 * agent.bootstrap_value)[~env.done[-1]]
    torch.testing.assert_close(found[-1][~env.done[-1]], last)


def test_a_short_run_writes_curves_and_picture(tmp_path: Path) -> None:
    done = run("--out", tmp_path, "--steps", 2000, "--batch-T", 16, "--n-workers", 2, "--eval-episodes", 16)
    assert done.returncode == 1, done.stderr
    assert "goal of 0.95 missed: recurrent " in done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert not results["goal_reached"]
    assert results["first_at_goal"] is None
    for curve in results["curves"].values():
        assert curve["steps"] == [0, 1024, 2048]
        assert all(math.isfinite(value) for values in curve.values() for value in values)
    assert (tmp_path / "recurrent.png").read_bytes().startswith(b"\x89PNG")


def test_memory_beats_none(tmp_path: Path) -> None:
    quick = "--length 2 --batch-T 16 --minibatches 2 --learning-rate 5e-3 --eval-every 8"
    done = run("--out", tmp_path, "--n-workers", 2, *quick.split(), "--steps", scaled(16_000, 10_000))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["final"]["recurrent"] >= 0.95
    assert results["final"]["feed-forward"] < 0.7, "a guess, over 192 episodes"
    assert results["first_at_goal"]["steps"] <= 16384
