"""The folder of an evaluation: it continues, joins with others, and is refused where it is of another one."""

from __future__ import annotations

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import ConfigError, EvalResults, evaluate

from ..scale import scaled
from ..starter import Program
from ..support import until
from .reach import TASKS, Reach, played, serial, vla, weaker

PROGRAM = Path(__file__).parent.parent / "programs" / "evaluated.py"
N = scaled(50, 12)
run = partial(evaluate, env_fn=Reach, success="is_success", tasks=TASKS, n_workers=1, batch_B=2)


def lines(folder: Path) -> list[str]:
    file = folder / "episodes.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(scaled(900, 300))
def test_a_killed_evaluation_continues(tmp_path: Path, starter: None) -> None:
    n_kills, n, truth = scaled(50, 3), 4 * N, serial(range(N))
    for kill in range(n_kills):
        known = len(lines(tmp_path))
        wanted = known + max(1, (n - known) // (n_kills - kill + 1))
        with Program([PROGRAM, tmp_path, N], cwd=tmp_path) as program:
            until(lambda wanted=wanted: len(lines(tmp_path)) >= wanted, "the next episode", 60)  # type: ignore[misc]
            program.kill()
        with pytest.warns(RuntimeWarning, match="episodes have not been played yet"):
            loaded = EvalResults.load(tmp_path)
        assert "are still to be played" in str(loaded)
        known_episodes = {(r.task, r.episode) for r in loaded.episodes}
        assert played(loaded) == [row for row in truth if (row.task, row.episode) in known_episodes]
    known = len(lines(tmp_path))
    found = run(vla, episodes=N, folder=tmp_path)
    assert played(found) == truth
    assert len(lines(tmp_path)) == n
    assert known < n


def test_of_a_complete_folder_one_episode_of_each_task_is_played_again(tmp_path: Path) -> None:
    n_begun = [0]

    def counted(observation: Any, rngs: Any, states: Any) -> Any:
        n_begun[0] += states.count(None)
        return vla(observation, rngs), [1] * len(states)

    first = run(counted, episodes=3, folder=tmp_path)
    n_lines = len(lines(tmp_path))
    assert n_begun == [4 * len(TASKS)]  # one of each task twice
    again = run(counted, episodes=3, folder=tmp_path)
    assert first.episodes == again.episodes
    assert (first.n_proved, again.n_proved) == (len(TASKS), len(TASKS))
    assert (len(lines(tmp_path)), n_begun) == (n_lines, [5 * len(TASKS)])
    assert played(again) == serial(range(3))
    assert np.array_equal(again.episode("policy", "desk", 1).actions, first.episode("policy", "desk", 1).actions)


def test_parts_of_several_machines(tmp_path: Path) -> None:
    run(vla, episodes=range(2), folder=tmp_path / "a")
    run({"policy": vla, "weaker": weaker}, episodes=range(2, 4), folder=tmp_path / "b")
    found = EvalResults.load(tmp_path / "a", tmp_path / "b", env_fn=Reach, tasks=TASKS)
    assert played(found) == serial(range(4))
    assert played(found, "weaker") == serial(range(2, 4), policy=weaker)
    assert found.policies == ["policy", "weaker"]
    env, _ = found.episode("weaker", "shelf", 3).run()
    env.close()
    with pytest.raises(ConfigError, match="give env_fn to"):
        EvalResults.load(tmp_path / "a").episode("policy", "desk", 0)


def test_more_episodes_and_more_policies(tmp_path: Path) -> None:
    run(vla, episodes=2, folder=tmp_path)
    found = run({"policy": vla, "weaker": weaker}, episodes=3, folder=tmp_path)
    assert played(found) == serial(range(3))
    assert len(lines(tmp_path)) == 2 * 4 + 1 * 4 + 3 * 4


def test_pairs_are_the_episodes_that_both_have(tmp_path: Path) -> None:
    run({"a": vla}, episodes=range(3), folder=tmp_path / "a")
    run({"b": weaker}, episodes=range(1, 4), folder=tmp_path / "b")
    run({"c": vla}, episodes=range(3, 4), folder=tmp_path / "c")
    found = EvalResults.load(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    totals = [{(row.task, row.episode): row.total for row in played(found, name)} for name in "ab"]
    pairs = [totals[0][key] - totals[1][key] for key in totals[0].keys() & totals[1].keys()]
    assert len(pairs) == 2 * len(TASKS)
    assert found.difference("a", "b", "return").estimate == pytest.approx(np.mean(pairs))
    assert all(map(math.isnan, found.difference("a", "c", "return")))
    assert "nan" in str(found)


def test_options_of_another_evaluation(tmp_path: Path) -> None:
    run(vla, episodes=2, folder=tmp_path, options=lambda task, k: {"speed": 0.1})
    run(vla, episodes=3, folder=tmp_path, options=lambda task, k: {"speed": 0.1})
    with pytest.raises(ConfigError, match="with other options of its reset"):
        run(vla, episodes=2, folder=tmp_path, options=lambda task, k: {"speed": 0.2})
    with pytest.raises(ConfigError, match="with other options of its reset"):
        run(vla, episodes=2, folder=tmp_path)


def test_two_folders_that_contradict_each_other(tmp_path: Path) -> None:
    for name in "ab":
        run(vla, episodes=2, folder=tmp_path / name)
    EvalResults.load(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "episodes.jsonl"
    file.write_text(file.read_text().replace('"length": ', '"length": 1'))
    with pytest.raises(ConfigError, match="has another result of episode"):
        EvalResults.load(tmp_path / "a", tmp_path / "b")


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    run(vla, episodes=2, folder=tmp_path)
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.warns(RuntimeWarning, match="1 episodes have not been played yet"):
        assert len(EvalResults.load(tmp_path).episodes) == 7
    assert played(run(vla, episodes=2, folder=tmp_path)) == serial(range(2))
    assert played(EvalResults.load(tmp_path)) == serial(range(2))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "Its seed: 0; of this one: 1"),
    "tasks": ({"tasks": {"desk": {"radius": 1.0}}}, "Its tasks: "),
    "arguments": ({"tasks": {**TASKS, "desk": {"radius": 2.0}}}, "Its environment: "),
    "max_steps": ({"max_steps": 3}, "Its max_steps: None"),
    "policy": ({"policies": weaker}, "another policy of the name 'policy'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_of_another_evaluation(change: str, tmp_path: Path) -> None:
    given, message = CHANGES[change]
    run(vla, episodes=1, folder=tmp_path)
    arguments: dict[str, Any] = {"policies": vla, "episodes": 1, **given}
    with pytest.raises(ConfigError, match=message):
        run(folder=tmp_path, **arguments)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder that evaluate"):
        EvalResults.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        run(vla, episodes=1, folder="/dev/null/nowhere")

    def nested(observation: Any, rngs: Any) -> Any:
        return run(vla, episodes=1, folder=tmp_path / "busy")

    with pytest.raises(ConfigError, match="is in use by another evaluation"):
        run(nested, episodes=1, folder=tmp_path / "busy")
    with pytest.raises(ConfigError, match="got an empty text"):
        run(vla, episodes=1, folder="")
    with pytest.raises(ConfigError, match="at least one"):
        EvalResults.load()
    run(vla, episodes=1, folder=tmp_path)
    (tmp_path / "episodes.jsonl").write_text('{"policy": 3}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .*episodes.jsonl cannot be read"):
        EvalResults.load(tmp_path)


def test_tables_and_files(tmp_path: Path) -> None:
    found = run({"new": vla, "old": weaker}, episodes=4)
    lines = str(found).splitlines()
    assert lines[0].split() == ["success", "new", "old"]
    assert [line.split()[0] for line in lines[1:6]] == [*TASKS, "all"]
    assert lines[6].startswith("old - new: ")
    assert lines[7] == "32 episodes; 0 of them failed, and are not in the means"
    flat = found.metrics()
    assert flat["new/success"] == np.mean([r.metrics["success"] for r in found.episodes if r.policy == "new"])
    assert flat["old/desk/return"] == found.mean("old", "return", "desk").estimate
    assert flat["old/desk/n_episodes"] == 4
    found.save(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == [r.as_dict() for r in found.episodes]
    found.save(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["return"]) for row in rows] == [r.metrics["return"] for r in found.episodes]
    with pytest.raises(ConfigError, match=r"saved as .json or .csv"):
        found.save(tmp_path / "x.txt")
    for call, message in (
        (lambda: found.mean("newer", "return"), "there is no policy 'newer'"),
        (lambda: found.mean("new", "reward"), "there is no metric 'reward'"),
        (lambda: found.mean("new", "return", "bath"), "there is no task 'bath'"),
        (lambda: found.episode("new", "desk", 9), "there is no episode 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_differences_are_in_pairs() -> None:
    found = run({"new": vla, "old": weaker}, episodes=4)
    new, old = (np.array([row.total for row in played(found, name)]) for name in ("new", "old"))
    assert found.difference("new", "old", "return").estimate == pytest.approx((new - old).mean())
    each = [np.array([row.is_success for row in played(found, name)], float) for name in ("new", "old")]
    assert found.difference("new", "old", "success").estimate == pytest.approx((each[0] - each[1]).mean())


def test_progress_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run(vla, episodes=2, progress=True)
    lines = capsys.readouterr().err.split("\r")
    assert len(lines) == 1 + 2 * len(TASKS)
    assert lines[1].startswith("1 of 8 episodes, success ")
    assert lines[-1].startswith("8 of 8 episodes, success ")
    assert lines[-1].endswith("\n")
