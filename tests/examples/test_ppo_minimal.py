"""The shortest example, the one that goes on from a checkpoint, continuous actions, and the words of all examples."""

import importlib
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock import SerialSampler

from .. import starter
from ..scale import FULL, scaled

ROOT = Path(__file__).parent.parent.parent


run = partial(starter.run, cwd=ROOT)


@pytest.mark.slow
def test_the_minimal_example_is_short_and_learns(tmp_path: Path) -> None:
    text = (ROOT / "examples/ppo_minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert "n_batches=40" in text
    n_batches, script = scaled(40, 20), tmp_path / "ppo_minimal.py"
    script.write_text(text.replace("n_batches=40", f"n_batches={n_batches}"), encoding="utf-8")
    done = run(script)
    assert done.returncode == 0, done.stderr
    returns = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(returns) == n_batches
    assert max(returns[-10:]) > 5 * returns[0]


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint, earlier = tmp_path / "stopped/checkpoint.pt", tmp_path / "earlier.pt"
    for out, n_batches in (("stopped", 1), ("stopped", 2), ("stopped", 4), ("straight", 4)):
        done = run("examples/ppo_resume.py", "--out", tmp_path / out, "--n-batches", n_batches)
        assert done.returncode == 0, done.stderr
        if out == "stopped" and n_batches == 1:
            shutil.copy(checkpoint, earlier)
        elif n_batches == 2:
            shutil.copy(earlier, checkpoint)  # as if it was killed after it had logged batch 1, before it saved it
    stopped, straight = (torch.load(tmp_path / out / "checkpoint.pt") for out in ("stopped", "straight"))
    assert stopped["n_batches"] == straight["n_batches"] == 4
    for name, tensor in straight["agent"].items():
        assert torch.equal(stopped["agent"][name], tensor), name
    logs = list((tmp_path / "stopped").glob("events.out.tfevents.*"))
    assert len(logs) == 3, "one for each start"
    shown = EventAccumulator(str(tmp_path / "stopped"))
    shown.Reload()
    steps = [event.step for event in shown.Scalars("train/Return_mean")]
    assert steps == [2048 * n for n in range(1, 5)], "each point once"


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="full scale: 100,000 steps. Daily, an update of continuous actions is tested")
def test_ppo_learns_continuous_actions(tmp_path: Path) -> None:
    # A random policy stays near -1,200.
    options = {"env-id": "Pendulum-v1", "goal": -700, "discount": 0.9, "gae-lambda": 0.95, "n-workers": 2}
    done = run("examples/ppo.py", "--out", tmp_path, *(x for name, v in options.items() for x in (f"--{name}", v)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal of -700 reached" in done.stdout


@pytest.mark.slow
def test_one_update_of_continuous_actions_changes_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "ppo", raising=False)
    ppo = importlib.import_module("ppo")
    agent = ppo.make_agent("Pendulum-v1")
    with SerialSampler("Pendulum-v1", batch_T=16, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=1e-3)
        before = {name: parameter.detach().clone() for name, parameter in agent.model.named_parameters()}
        ppo.train(agent, optimizer, sampler.obtain_samples(0)[0], ppo.Config(minibatches=2, entropy_weight=0.01))
    assert "log_std" in before
    for name, parameter in agent.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    monkeypatch.delitem(sys.modules, "ppo")


def test_a_missing_tensorboard_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="needs tensorboard: pip install tensorboard"):
        runpy.run_path(str(ROOT / "examples/ppo_resume.py"), run_name="__main__")
    sys.modules.pop("ppo_minimal", None)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_have_the_names_of_the_field_and_plain_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name, pattern in {
        "an advantage that is called weight": r"\bweight\.(mean|std)\(\)|\bratio \* weight\b",
        "-(-a // b): use math.ceil(a / b)": r"-\(-",
        "result |= {...}": r"\|= \{",
        '"{x}".format(**values): use an f-string': r"\.format\(\*\*",
        "a generator that is unpacked into attributes": r"self\.\w+(, self\.\w+)+ = \(\n[^\n]+\n\s+for ",
    }.items():
        assert not re.search(pattern, text), name
