"""The example of self-play, shortened; and its ledger."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import TrajInfo

from .. import starter
from .programs import ROOT, imported

SHORT = ("--batch-T", 8, "--batch-B", 4, "--new-self-every", 2, "--eval-games", 10, "--goal", 0)
run = partial(starter.run, cwd=ROOT)


@pytest.fixture
def example() -> Iterator[Any]:
    pytest.importorskip("pettingzoo.classic.connect_four_v3", exc_type=ImportError)
    with imported("self_play") as module:
        yield module


@pytest.mark.slow
def test_a_run_that_continues_has_the_league_of_the_first(tmp_path: Path, example: Any) -> None:
    picture = tmp_path / "elo.png"
    done = run("examples/self_play.py", *SHORT, "--iterations", 4, "--folder", tmp_path, "--picture", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "games against random moves" in done.stdout
    assert picture.stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["league.pt", "self_0.pt", "self_1.pt", "self_2.pt"]
    first, old = (tmp_path / "matches.jsonl").read_text(), (tmp_path / "self_1.pt").read_bytes()
    with (tmp_path / "matches.jsonl").open("a") as file:  # as if it was killed between the two files of its state
        file.write(json.dumps({"players": ["self_3", "self_0"], "versions": [9, 9], "points": 1.0}) + "\n")
    done = run("examples/self_play.py", *SHORT, "--iterations", 6, "--matchmaking", "uniform", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("6: "), "it goes on where the first one has stopped"
    assert (tmp_path / "self_3.pt").exists()
    assert (tmp_path / "self_1.pt").read_bytes() == old, "a past self never changes"
    after = (tmp_path / "matches.jsonl").read_text()
    assert after.startswith(first)
    ledger, selves = example.Ledger.load(tmp_path / "matches.jsonl"), [f"self_{i}" for i in range(4)]
    assert len(ledger.matches) > len(first.splitlines()) > 10
    assert {name for match in ledger.matches for name in match.players} <= set(selves)
    assert not any(match.versions == (9, 9) for match in ledger.matches)
    assert ledger.results(selves)[1].sum() > 0


def infos(*games: tuple[int, int, str, str, float]) -> list[TrajInfo]:
    """The trajectories of games: (env_rank, number, who plays player_0, who player_1, the return of player_0). The
    agents end in any order."""
    found = []
    for rank, number, *policies, result in games:
        for seat in (number % 2, 1 - number % 2):
            info = TrajInfo()
            info.env_rank, info.number, info.agent_id = rank, number, f"player_{seat}"
            info.policy, info.Return = policies[seat], result if seat == 0 else -result
            found.append(info)
        game = TrajInfo()
        game.env_rank, game.number = rank, number
        found.append(game)
    return found


def test_a_match_says_who_sat_where_with_which_version_and_who_won(example: Any) -> None:
    ledger = example.Ledger()
    games = infos((0, 4, "main", "past_0", 1), (1, 4, "past_0", "main", 1), (1, 5, "main", "main", 0))
    started_before = infos((2, 0, "main", "past_0", 1))[:1]  # its other agent has ended in another batch
    ledger.record([*games, *started_before], {"main": "self_3", "past_0": "self_1"}, {"main": 57, "past_0": 4})
    assert [(match.players, match.versions, match.points) for match in ledger.matches] == [
        (("self_3", "self_1"), (57, 4), 1.0),
        (("self_1", "self_3"), (4, 57), 1.0),
        (("self_3", "self_3"), (57, 57), 0.5),
    ]


def test_the_payoff_matrix_and_the_ratings(example: Any, tmp_path: Path) -> None:
    def games(one: str, two: str, points: float, n: int) -> list[Any]:
        return [example.Match((one, two), (1, 1), points)] * n

    matches = [*games("a", "b", 1.0, 40), *games("b", "a", 0.0, 36), *games("a", "b", 0.0, 25)]
    ledger = example.Ledger([*matches, *games("c", "a", 0.5, 8), *games("a", "a", 1.0, 9)])
    points, n = ledger.results(["b", "a", "c", "nobody"])
    assert points.tolist() == [[0, 25, 0, 0], [76, 0, 4, 0], [0, 4, 0, 0], [0, 0, 0, 0]]
    assert n.tolist() == [[0, 101, 0, 0], [101, 0, 8, 0], [0, 8, 0, 0], [0, 0, 0, 0]]
    payoff = ledger.payoff(["b", "a", "c"])
    np.testing.assert_allclose(payoff + payoff.T, 1)
    assert payoff[1, 0] == pytest.approx(76.5 / 102)
    assert payoff[0, 2] == 0.5, "they have not met"
    ratings = ledger.ratings(["b", "a", "c"])
    assert ratings[0] == 0
    assert ratings[1] == pytest.approx(400 * np.log10(3), abs=0.1)  # that is what Elo says of 3 points to 1
    assert ratings[2] == pytest.approx(ratings[1], abs=0.1)
    ledger.save(tmp_path / "matches.jsonl")
    assert example.Ledger.load(tmp_path / "matches.jsonl") == ledger


def test_matchmaking(example: Any) -> None:
    """`hard` beats the newest player, `equal` has won every second game, `easy` none."""
    results = {"easy": 0.0, "equal": 0.5, "hard": 1.0}
    ledger = example.Ledger([example.Match((name, "new"), (1, 1), own) for name, own in results.items()] * 50)
    order = [*results, "new"]
    chances = {name: matchmaking(ledger, order) for name, matchmaking in example.MATCHMAKING.items()}
    for own in chances.values():
        assert own.sum() == pytest.approx(1)
        assert len(own) == 3
        assert (own > 0).all()
    assert chances["uniform"].tolist() == [1 / 3] * 3
    assert np.argsort(chances["prioritized"]).tolist() == [0, 1, 2]
    assert chances["elo_band"].argmax() == 1
    assert chances["elo_band"][0] == chances["elo_band"][2] < 0.1


def test_who_plays(example: Any) -> None:
    """In every second game main plays both sides; in the others it has each side equally often."""
    rng, sides = np.random.default_rng(0), []
    for number in range(400):
        sides.append([example.players(f"player_{i}", 1, number, rng, n_slots=3) for i in range(2)])
    assert sides.count(["main", "main"]) == 200
    assert sum(one == "main" != two for one, two in sides) == 100
    assert {name for game in sides for name in game} == {"main", "past_0", "past_1", "past_2"}
