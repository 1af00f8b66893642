"""The examples of several agents, shortened: they play, train, and say how good they are."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
SHORT = ("--batch-T", 25, "--batch-B", 4, "--total-steps", 300, "--eval-games", 4, "--print-every", 1)


run = partial(starter.run, cwd=ROOT)


@pytest.mark.parametrize("example", ["ippo_pettingzoo", "mappo"])
def test_a_short_run_says_how_good_it_is(example: str) -> None:
    pytest.importorskip("mpe2")
    done = run(f"examples/{example}.py", *SHORT, "--goal", -10)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *batches, last = done.stdout.splitlines()
    assert re.fullmatch(r"random policy: mean return per game -\d+\.\d", first)
    assert [line.split()[0] for line in batches] == ["100", "200", "300"]
    assert re.fullmatch(r"trained policy: mean return per game -\d+\.\d, -?\d+% better, after \d+ s", last)


def test_a_goal_that_is_missed_is_a_failure() -> None:
    pytest.importorskip("mpe2")
    done = run("examples/mappo.py", *SHORT, "--total-steps", 100, "--goal", 0.99)
    assert done.returncode == 1
    assert "goal missed: the trained policy must be better by 99%" in done.stderr


@pytest.mark.parametrize("env_id", ["sisl/pursuit-v5", *scaled(["mpe2.simple_spread_v3"], [])])
def test_the_shared_policy_plays_other_games(env_id: str) -> None:
    pytest.importorskip("mpe2")
    pytest.importorskip("pettingzoo.sisl")
    fewer = scaled((), ("--total-steps", 100, "--eval-games", 2))
    done = run("examples/ippo_pettingzoo.py", "--env-id", env_id, *SHORT, *fewer, "--max-cycles", 10, "--goal", -1000)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", ["ippo_pettingzoo", "mappo"])
def test_one_update_changes_all_parameters(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module(example)
    cfg = module.Config(batch_T=25, batch_B=2, minibatches=2, epochs=1)
    models = {"ippo_pettingzoo": "ActorCritic", "mappo": "ActorAndCentralCritic"}
    agent = module.CategoricalPgAgent(getattr(module, models[example]))
    with module.make_sampler(cfg) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples, traj_infos = sampler.obtain_samples(0)
        # The values of the workers are those of the learner's model, with the state of the game where it needs it.
        own = samples.agent
        assert torch.allclose(agent.evaluate(samples).value, own.agent_info.value, atol=1e-5)
        assert torch.allclose(agent.model(samples.env.bootstrap_obs)[1], own.bootstrap_value, atol=1e-5)
        ended = samples.env.truncated
        assert ended.any()
        assert torch.allclose(agent.model(samples.env.final_obs[ended])[1], own.final_value[ended], atol=1e-5)
        games = [info.Return for info in traj_infos if info.agent_id is None]
        assert module.mean_return(traj_infos) == pytest.approx(sum(games) / len(games))
        before = {name: value.detach().clone() for name, value in agent.model.named_parameters()}
        module.train(agent, torch.optim.Adam(agent.model.parameters(), lr=1e-3), samples, cfg)
    for name, value in agent.model.named_parameters():
        assert not torch.equal(value, before[name]), name
    del sys.modules[example]
