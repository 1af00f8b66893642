"""What is played again: at the end of an evaluation, when a folder continues, and by the user, step by step."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock import ConfigError, EvalResults, RepeatError, evaluate
from penstock.evaluation import episode_files

ONE = gym.spaces.Box(-99, 99, (1,), np.float32)
TWO = gym.spaces.Discrete(2)
run = partial(evaluate, n_workers=1)


def zeros(observation: Any) -> Any:
    return np.zeros(len(observation), int)


class Walk(gym.Env[Any, Any]):
    """Its observation is the sum of its random steps, and rewards come at the end only, as `reward` says.

    `source` draws its numbers: "seed", "numpy" for the global generator, "twelve" for numbers that come again after
    twelve resets, "one" for a seed of its own.
    """

    observation_space, action_space = ONE, TWO

    def __init__(self, reward: Callable[[], float] = lambda: 1.0, source: str = "seed", n: int = 5) -> None:
        self.reward, self.source, self.n, self.n_resets = reward, source, n, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=1 if self.source == "one" else seed)
        self.n_resets += 1
        self.t, self.x = 0, float((options or {}).get("x", 0.0))
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.x += self._drawn() + 0.1 * int(action)
        is_over = self.t == self.n
        return self._observation(), self.reward() if is_over else 0.0, is_over, False, {"x": self.x}

    def _drawn(self) -> float:
        if self.source == "numpy":
            return float(np.random.normal())
        if self.source == "twelve":
            return float(self.n_resets % 12)
        return float(self.np_random.normal())

    def _observation(self) -> Any:
        return np.array([self.x], np.float32)


# ---- the end of an evaluation ----------------------------------------------------------------------------

DIFFERENT = "were different when they were played again"


def coin(observation: Any) -> Any:
    return np.random.randint(0, 2, len(observation))


def of_task(task: str) -> Any:
    return Walk(source="seed" if task == "good" else "numpy")


class Lucky(Walk):
    """Only its success does not repeat: it is that of the first episode of the process, and no other."""

    n_all = 0

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        Lucky.n_all += result[2]
        return *result, {"lucky": Lucky.n_all == 1}


REPEAT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an environment with numbers of its own": (
        {"policies": zeros, "env_fn": partial(Walk, source="numpy")},
        {},
        r"1 of \d episodes were .*episode 19 of 'policy': its observation after 1 steps is another one",
    ),
    "the second policy": (
        {"policies": {"zeros": zeros, "coin": coin}, "env_fn": partial(Walk, n=60)},
        {},
        r"1 of \d episodes were .*episode 19 of 'coin': its action in step \d+ was",
    ),
    "the second task": (
        {"policies": zeros, "env_fn": of_task},
        {"tasks": ["good", "bad"]},
        r"1 of \d episodes were .*episode 19 of 'policy' in 'bad': its observation",
    ),
    "numbers that come again": (
        {"policies": zeros, "env_fn": partial(Walk, source="twelve")},
        {"episodes": 20},
        r"1 of \d episodes were .*episode 19 of 'policy': its observation after 1 steps",
    ),
    "the success": (
        {"policies": zeros, "env_fn": Lucky},
        {"success": "lucky"},
        r"1 of \d episodes were .*its success was (True|False), and is",
    ),
}


@pytest.mark.parametrize("case", REPEAT)
def test_what_does_not_repeat_is_named(case: str) -> None:
    given, others, message = REPEAT[case]
    with pytest.warns(RuntimeWarning, match=message):
        found = run(**given, batch_B=1, **{"episodes": 20, **others})
    assert found.n_proved == len(found.policies) * len(found.tasks) - 1


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_rounding_of_a_network_is_no_difference(act_in: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).eval()

    @torch.no_grad()
    def policy(observation: Any) -> Any:
        return 2 * torch.tanh(net(torch.as_tensor(observation)))

    assert run(policy, "Pendulum-v1", episodes=8, batch_B=8, act_in=act_in).n_proved == 1


class Chaos(gym.Env[Any, Any]):
    """A difference in an action doubles with each step."""

    observation_space, action_space = ONE, gym.spaces.Box(0, 1, (), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.x = 0, float(self.np_random.uniform(0.1, 0.9))
        return np.array([self.x], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.x = (3.9 * self.x * (1 - self.x) + float(action)) % 1
        return np.array([self.x], np.float32), self.x, self.t == 100, False, {}


def test_rounding_does_not_add_up_over_an_episode() -> None:
    def policy(observation: Any) -> Any:
        return np.full(len(observation), 0.01 + 1e-7 * len(observation))  # as a network, whose rows depend on the rest

    assert run(policy, Chaos, episodes=8, batch_B=8).n_proved == 1


class First(Walk):
    """Its first episode is another one than all later ones."""

    def _drawn(self) -> float:
        return float(self.n_resets == 1)


def test_each_episode_is_played_again_in_a_new_environment() -> None:
    with pytest.warns(RuntimeWarning, match="2 of 2 episodes were different"):
        assert run({"a": zeros, "b": zeros}, First, episodes=2, batch_B=1).n_proved == 0


def test_an_episode_that_fails_again_is_said(tmp_path: Path) -> None:
    def once() -> float:
        if (tmp_path / "file").exists():
            raise ValueError("it is there")
        (tmp_path / "file").touch()
        return 1.0

    with pytest.warns(RuntimeWarning, match=r"episode 0 of 'policy': failed: ValueError: it is there"):
        assert run(zeros, partial(Walk, once), episodes=1, attempts=1).n_proved == 0


# ---- folders ---------------------------------------------------------------------------------------------


def test_a_reward_that_has_changed_is_found(tmp_path: Path) -> None:
    file = tmp_path / "reward"

    def reward() -> float:
        return float(file.read_text())

    play = partial(run, zeros, partial(Walk, reward), folder=tmp_path / "folder")
    file.write_text("1.0")
    play(episodes=3)
    for text, message in (("2.0", "its reward of step 4 was 1.0, and is 2.0"), ("x", "failed: ValueError")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"folder has other results: episode 2 of 'policy' .*{message}"):
            play(episodes=3)
    file.write_text("1.000001")
    assert play(episodes=6).n_proved == 1
    found = play(episodes=6, trust_folder=False)
    assert [r.metrics["return"] for r in found.episodes] == [1.0] * 3 + [1.000001] * 3


def test_a_metric_that_has_changed_is_found(tmp_path: Path) -> None:
    file = tmp_path / "factor"

    class Scored(Walk):
        def step(self, action: Any) -> Any:
            *result, info = super().step(action)
            return *result, {**info, "score": float(file.read_text()) * self.x}

    play = partial(run, zeros, Scored, folder=tmp_path / "folder")
    file.write_text("1")
    play(episodes=3)
    file.write_text("100")
    with pytest.raises(ConfigError, match=r"episode 2 of 'policy' was played again, and its score was"):
        play(episodes=6)


settings = {"threshold": 0.0}


def by_settings(observation: Any) -> Any:
    return (observation[:, 0] > settings["threshold"]).astype(int)


def test_a_policy_that_has_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = partial(run, by_settings, partial(Walk, n=30), episodes=4)
    first = play(folder=tmp_path)
    assert play(folder=tmp_path).episodes == first.episodes
    monkeypatch.setitem(settings, "threshold", -50.0)
    with pytest.raises(ConfigError, match=r"episode 3 of 'policy' was played again, and its action in step 0 was 0"):
        play(folder=tmp_path)
    with pytest.warns(RuntimeWarning, match="no episode of the folder was played again"):
        assert play(folder=tmp_path, trust_folder=True).episodes == first.episodes


class Normalized(nn.Module):
    """Its mean is a tensor, but no buffer."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean, self.n_calls = torch.tensor(mean), 0

    def forward(self, observation: Any) -> Any:
        self.n_calls += 1
        self.train(self.n_calls % 2 == 0)
        return (torch.as_tensor(observation)[:, 2] > self.mean).long()


def test_parameters_count_and_counters_do_not(tmp_path: Path) -> None:
    policy = Normalized(9.0).eval()
    play = partial(run, env_fn="CartPole-v1", folder=tmp_path)
    play(policy, episodes=2)
    assert policy.n_calls > 0
    play(policy, episodes=4)
    with pytest.raises(ConfigError, match="another policy of the name 'policy': its code, its parameters"):
        play(Normalized(0.0).eval(), episodes=4)


def test_a_policy_of_stable_baselines3_continues(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=1, n_steps=8, batch_size=8)

    def policy(observation: Any) -> Any:
        return model.predict(observation, deterministic=True)[0]

    play = partial(run, policy, "CartPole-v1", folder=tmp_path)
    first = play(episodes=3)
    assert play(episodes=6).episodes[:3] == first.episodes
    with torch.no_grad():
        next(model.policy.parameters()).add_(1)
    with pytest.raises(ConfigError, match="another policy of the name 'policy'"):
        play(episodes=6)


def test_what_did_not_repeat_is_noted_in_the_folder(tmp_path: Path) -> None:
    play = partial(run, {"zeros": zeros, "coin": coin}, partial(Walk, n=60), folder=tmp_path)
    with pytest.warns(RuntimeWarning, match=DIFFERENT):
        play(episodes=2)
    with pytest.raises(ConfigError, match="folder says that an episode of 'coin' was different"):
        play(episodes=4)
    with pytest.warns(RuntimeWarning, match="trust_folder=True: no episode of the folder"):
        assert len(play(episodes=4, trust_folder=True).episodes) == 8
    with pytest.warns(RuntimeWarning, match=r"different when they were played again: \[\['coin', ''\]\]"):
        EvalResults.load(tmp_path)
    assert run({"zeros": zeros}, partial(Walk, n=60), folder=tmp_path, episodes=4).n_proved == 1


def test_the_only_episode_may_be_the_one_that_did_not_repeat(tmp_path: Path) -> None:
    play = partial(run, coin, partial(Walk, n=60), folder=tmp_path, episodes=1)
    with pytest.warns(RuntimeWarning, match=DIFFERENT):
        play()
    with pytest.raises(ConfigError, match="folder says that an episode of 'policy' was different"):
        play()


def test_another_version_of_python_has_other_code(tmp_path: Path) -> None:
    run(zeros, Walk, episodes=2, folder=tmp_path)
    change(tmp_path, python="3.9.0", policies={"policy": "zeros 0"})
    assert run(zeros, Walk, episodes=2, folder=tmp_path).n_proved == 1


# ---- what the user repeats ---------------------------------------------------------------------------------


def test_other_options_or_another_environment_are_found_step_by_step(tmp_path: Path) -> None:
    def options(task: str, k: int) -> dict[str, float]:
        return {"x": 50.0 + k}

    found = run(zeros, partial(Walk, lambda: 0.0), episodes=2, options=options, folder=tmp_path)
    loaded = EvalResults.load(tmp_path, env_fn=partial(Walk, lambda: 0.0), options=options)
    assert [step.info["x"] for step in loaded.episode("policy", "", 1).steps()][-1] == found.episodes[1].metrics["x"]
    for env_fn, arguments, n in (
        (Walk, {}, 0),
        (partial(Walk, lambda: 0.0, "one"), {"options": options}, 1),
        (partial(Walk, lambda: 0.0, n=6), {"options": options}, 5),
    ):
        other = EvalResults.load(tmp_path, env_fn=env_fn, **arguments).episode("policy", "", 1)
        with pytest.raises(RepeatError, match=rf"observation after {n} steps|terminated=False, recorded was True"):
            list(other.steps())
        if n < 5:
            with pytest.raises(RepeatError, match=f"observation after {n} steps is another one"):
                other.run()


# ---- damage ------------------------------------------------------------------------------------------------


def change(folder: Path, **values: Any) -> None:
    file = folder / "evaluation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def line(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "episodes.jsonl"
    first, *others = file.read_text().splitlines()
    row = json.loads(first)
    change(row)
    file.write_text("\n".join([json.dumps(row), *others, ""]))


def with_lines(folder: Path, content: bytes) -> None:
    file = folder / "episodes.jsonl"
    file.write_bytes(content + file.read_bytes())


LINE, ABOUT = r"line 1 of .*episodes\.jsonl cannot be read", r"evaluation\.json cannot be read"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda f: (f / "evaluation.json").write_text("{"), ABOUT),
    "null": (lambda f: (f / "evaluation.json").write_text("null"), ABOUT),
    "no text": (lambda f: (f / "evaluation.json").write_bytes(b"\xff\xfe\x00"), ABOUT),
    "a list": (lambda f: (f / "evaluation.json").write_text("[]"), ABOUT),
    "another format": (lambda f: change(f, format=1), r"written by another version of penstock: its format is 1, and"),
    "tasks": (lambda f: change(f, tasks=None), ABOUT + ".*its tasks is None"),
    "policies": (lambda f: change(f, policies=[]), ABOUT),
    "wanted": (lambda f: change(f, wanted={"policy": 3}), ABOUT),
    "wanted texts": (lambda f: change(f, wanted={"policy": [["a", "b"]]}), ABOUT),
    "a number as line": (lambda f: with_lines(f, b"3\n"), LINE),
    "half a line": (lambda f: with_lines(f, b'{"policy": "policy"\n'), LINE),
    "bytes": (lambda f: with_lines(f, b"\x00\xff\n"), LINE),
    "no seed": (lambda f: line(f, lambda row: row.pop("seed")), LINE),
    "no options": (lambda f: line(f, lambda row: row.pop("options")), LINE),
    "another field": (lambda f: line(f, lambda row: row.update(more=1)), LINE),
    "another seed": (lambda f: line(f, lambda row: row.update(seed=1)), LINE + ".*its seed is 1, and that of this"),
    "another policy": (lambda f: line(f, lambda row: row.update(policy="x")), LINE + ".*does not have the policy 'x'"),
    "another task": (lambda f: line(f, lambda row: row.update(task="x")), LINE),
    "a list as policy": (lambda f: line(f, lambda row: row.update(policy=[])), LINE),
    "a text as episode": (lambda f: line(f, lambda row: row.update(episode="x")), LINE),
    "a negative length": (lambda f: line(f, lambda row: row.update(length=-1)), LINE),
    "metrics": (lambda f: line(f, lambda row: row.update(metrics=[])), LINE),
    "a metric": (lambda f: line(f, lambda row: row.update(metrics={"return": "x"})), LINE),
    "a file": (lambda f: line(f, lambda row: row.update(file=3)), LINE),
}
TRACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no trace": (lambda f: f.unlink(), "cannot be read"),
    "an empty trace": (lambda f: f.write_bytes(b""), "cannot be read"),
    "half a trace": (lambda f: f.write_bytes(f.read_bytes()[:500]), "cannot be read"),
    "no arrays": (lambda f: np.savez(f, x=np.zeros(3)), "cannot be read"),
    "objects": (lambda f: np.savez(f, rewards=np.array([None]), checks=0, sums=0), "cannot be read"),
    "another trace": (lambda f: f.write_bytes(f.with_name("1.npz").read_bytes()), "is not that of an episode of"),
}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


class Lengths(Walk):
    """The length of an episode depends on its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self.n = 3 + (seed or 0) % 50
        return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two episodes."""
    folder = tmp_path_factory.mktemp("whole")
    assert len({r.length for r in run(zeros, Lengths, episodes=2, folder=folder).episodes}) == 2
    return folder


def copied(whole: Path, folder: Path) -> Path:
    for name, data in content(whole).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_lost(kind: str, whole: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(copied(whole, tmp_path))
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=message):
        EvalResults.load(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run(zeros, Lengths, episodes=2, folder=tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("kind", TRACES)
def test_a_damaged_trace_is_named(kind: str, whole: Path, tmp_path: Path) -> None:
    damage, message = TRACES[kind]
    damage(copied(whole, tmp_path) / "0.npz")
    rows = map(json.loads, (tmp_path / "episodes.jsonl").read_text().splitlines())
    (episode,) = [row["episode"] for row in rows if row["file"] == "0.npz"]
    loaded = EvalResults.load(tmp_path, env_fn=Lengths)
    with pytest.raises(ConfigError, match=message):
        loaded.episode("policy", "", episode)
    loaded.episode("policy", "", 1 - episode)


def test_a_folder_without_its_description_is_refused(whole: Path, tmp_path: Path) -> None:
    (copied(whole, tmp_path) / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match=r"has episodes\.jsonl, but no evaluation\.json, so its policies are unknown"):
        run(zeros, Lengths, episodes=2, folder=tmp_path)


def test_an_empty_line_is_none_and_numbers_of_any_kind_come_back(whole: Path, tmp_path: Path) -> None:
    with_lines(copied(whole, tmp_path), b"\n  \n")
    assert EvalResults.load(tmp_path).episodes == EvalResults.load(whole).episodes

    class Odd(Walk):
        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return *result, {"a": np.nan, "b": np.inf, "c": -np.inf, "d": True, "e": 1e-300}

    found = run(zeros, Odd, episodes=1, folder=tmp_path / "odd")
    (text,) = (tmp_path / "odd" / "episodes.jsonl").read_text().splitlines()
    json.loads(text, parse_constant=pytest.fail)
    assert str(EvalResults.load(tmp_path / "odd").episodes[0].metrics) == str(found.episodes[0].metrics)


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """A function that sets the largest size of a file, above which writes are cut off, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_the_disk_does_not_take_is_taken_back(
    whole: Path, tmp_path: Path, small_files: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied(whole, tmp_path) / "episodes.jsonl"
    with file.open("ab") as stream:  # longer than the other files
        stream.write(b" " * 20_000 + b"\n")
    monkeypatch.setattr(episode_files.ResultFolder, "append", limited(file, small_files))
    with pytest.raises(OSError, match="File too large"):
        run(zeros, Lengths, episodes=3, folder=tmp_path)
    monkeypatch.undo()
    assert file.read_bytes()[-1:] == b"\n"
    with pytest.warns(RuntimeWarning, match="1 episodes have not been played"):
        assert EvalResults.load(tmp_path).episodes == EvalResults.load(whole).episodes
    assert run(zeros, Lengths, episodes=3, folder=tmp_path).episodes == run(zeros, Lengths, episodes=3).episodes


def limited(file: Path, small_files: Callable[[int], None]) -> Any:
    append = episode_files.ResultFolder.append

    def append_in_part(self: Any, result: Any) -> None:
        small_files(file.stat().st_size + 30)
        try:
            append(self, result)
        finally:
            small_files(resource.RLIM_INFINITY)

    return append_in_part
