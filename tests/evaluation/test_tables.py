"""What results show: figures beside a plain loop, tables as text and of rich, pictures, and files."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import ConfigError, EvalResults
from penstock.evaluation import EpisodeResult, intervals
from penstock.evaluation.eval_results import _texts, _width

POLICIES, TASKS = ["new", "old", "$x_1$"], ["desk", "shelf", "bath"]
ODD_NAMES = [
    "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate",
    "two  spaces",
    "a line\nand another",
    "[bold]markup[/bold]",
    "_hidden",
    "$x_1$",
    "黒いボウル",
    "e\u0301",
    "",
]


def some_results(seed: int = 0, n: int = 6) -> EvalResults:
    """Tasks of different scales. Some episodes are missing, some failed: all in the last task of the last policy."""
    rng = np.random.default_rng(seed)
    found = []
    for policy in POLICIES:
        for t, task in enumerate(TASKS):
            for k in range(n):
                result = EpisodeResult(policy, task, 2 * k, k)
                if rng.random() < 0.2 or (policy, task) == (POLICIES[-1], TASKS[-1]):
                    result.failed = "a collision"
                else:
                    result.metrics = {"return": rng.normal(0, 10.0**t), "success": bool(rng.random() < 0.6)}
                if rng.random() < 0.9:
                    found.append(result)
    return EvalResults(found, POLICIES, TASKS)


def of(results: EvalResults, policy: str, task: str, metric: str) -> dict[int, float]:
    """The oracle: the values by episode."""
    chosen = [r for r in results.episodes if (r.policy, r.task) == (policy, task) and not r.failed]
    return {r.episode: float(r.metrics.get(metric, math.nan)) for r in chosen}


def average(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_a_plain_loop(seed: int) -> None:
    found = some_results(seed)
    row = found.metrics()
    for metric in ("return", "success"):
        for policy in POLICIES:
            cells = [of(found, policy, task, metric) for task in TASKS]
            failed = [sum(bool(r.failed) for r in found.failed if (r.policy, r.task) == (policy, t)) for t in TASKS]
            assert [list(cell.values()) for cell in cells] == [list(x) for x in found.values(policy, metric)]
            for tasks, name in ((TASKS, None), *(([task], task) for task in TASKS)):
                places = [TASKS.index(task) for task in tasks]
                kept = [cells[i].values() for i in places if cells[i]]
                mean = found.mean(policy, metric, name)
                assert mean.estimate == pytest.approx(average(map(average, kept)), nan_ok=True)
                prefix = f"{policy}/{name}/" if name else f"{policy}/"
                assert row[f"{prefix}{metric}_upper"] == pytest.approx(mean.upper, nan_ok=True)
                assert row[f"{prefix}n_failed"] == sum(failed[i] for i in places)
                assert row[f"{prefix}n_episodes"] == sum(failed[i] + len(cells[i]) for i in places)
                if name is not None and not kept and metric == "return":
                    continue  # nothing is known of this task
                known = [value for values in kept for value in values]
                ends = (0.0, 1.0) if metric == "success" else (min(known), max(known))
                filled = [[*cells[i].values(), *[end] * failed[i]] for end in ends for i in places]
                low, high = (average(map(average, part)) for part in (filled[: len(places)], filled[len(places) :]))
                assert found.bounds(policy, metric, name) == pytest.approx((low, high))
            for other in POLICIES:
                pairs = [(cell, of(found, other, task, metric)) for cell, task in zip(cells, TASKS, strict=True)]
                gaps = [[x[k] - y[k] for k in x if k in y] for x, y in pairs]
                difference = found.difference(policy, other, metric)
                assert difference.estimate == pytest.approx(average(map(average, filter(None, gaps))))
                kind = intervals.paired_share if metric == "success" else intervals.mean
                assert difference == pytest.approx(kind([np.array(gap) for gap in gaps]))


def test_the_extremes_of_bounds_can_be_given() -> None:
    episodes = [EpisodeResult("a", "", k, k, metrics={"return": float(k)}) for k in range(3)]
    found = EvalResults([*episodes, EpisodeResult("a", "", 3, 3, failed="it broke")], ["a"], [""])
    assert found.bounds("a", "return") == pytest.approx((3 / 4, 5 / 4))
    assert found.bounds("a", "return", least=-5, most=1.0) == pytest.approx((-2 / 4, 4 / 4))
    assert str(found).endswith("1 of them failed, and are not in the means (with them: a 0.750 to 1.250)")


def test_a_metric_that_only_some_episodes_have() -> None:
    def played(policy: str, k: int) -> EpisodeResult:
        metrics: dict[str, float | bool] = {"return": 1.0 * k}
        return EpisodeResult(policy, "", k, k, metrics={**metrics, **({"success": True} if k % 4 == 0 else {})})

    found = EvalResults([played(policy, k) for policy in ("a", "b") for k in range(20)], ["a", "b"], [""])
    assert found.headline == "return"
    (values,) = found.values("a", "success")
    assert [value == 1 for value in values] == [k % 4 == 0 for k in range(20)]
    assert np.isnan(found.mean("a", "success")).all()
    assert np.isnan(found.difference("a", "b", "success")).all()
    assert np.isnan(found.bounds("a", "success")[0])
    assert np.isnan([found.metrics()[f"a/success{end}"] for end in ("", "_lower", "_upper")]).all()
    lines = str(found).splitlines()
    assert lines[0].split() == ["return", "a", "b"]
    assert lines[-2] == "success: 10 of 40 episodes have it, so it has no mean"
    for result in found.episodes:
        result.metrics.setdefault("success", False)
    whole = EvalResults(found.episodes, ["a", "b"], [""])
    assert (whole.headline, whole.mean("a", "success").estimate) == ("success", 0.25)
    one = EpisodeResult("b", "", 20, 20, failed="it broke")  # it has no metrics, and needs none
    assert EvalResults([*found.episodes, one], ["a", "b"], [""]).headline == "success"


def test_results_without_an_end_have_a_table() -> None:
    found = EvalResults([EpisodeResult("a", "", 0, 0, failed="it broke")], ["a"], [""], n_missing=2)
    assert str(found).split("; ")[:2] == [
        "return  a\n1 episode",
        "1 of them failed, and are not in the means",
    ]
    assert found.metrics() == {"n_failed": 1, "n_episodes": 1}


def odd_results(figures: list[float]) -> EvalResults:
    episodes = [
        EpisodeResult(policy, task, k, k, metrics={"return": figure * (1 + 0.1 * k)})
        for policy in ODD_NAMES
        for task, figure in zip(ODD_NAMES, figures, strict=True)
        for k in range(3)
    ]
    return EvalResults(episodes, ODD_NAMES, ODD_NAMES)


def test_columns_never_touch_and_never_shift() -> None:
    figures = [1e-5, -1399.4, 12345.6, 0.0, 1.0, -1e300, 1e12, math.nan, math.inf]
    lines = str(odd_results(figures)).split("\n")
    table = lines[: 2 + len(ODD_NAMES)]
    ends = [[_width(line[: match.end()]) for match in re.finditer(r"\]", line)][-len(ODD_NAMES) :] for line in table]
    assert all(row == ends[1] for row in ends[1:])
    for line in table[1:]:
        assert len(re.findall(r"  \S+ \[\S+, \S+\]", line)) == len(ODD_NAMES)
    assert table[1].count("1.10e-05 [") == len(ODD_NAMES)
    assert {_width(line) for line in table[1:]} == {ends[1][-1]}
    assert len(lines) == len(table) + len(ODD_NAMES) - 1 + 1


@example(size=0.0, half=-6.0, sign=1, plus="")
@given(size=st.floats(-8, 12), half=st.floats(-6, 1), sign=st.sampled_from([1, -1, 0]), plus=st.sampled_from(["", "+"]))
def test_a_number_has_the_digits_that_matter(size: float, half: float, sign: int, plus: str) -> None:
    centre, spread = sign * 10**size, 10 ** (size + half)
    values = centre, centre - spread, centre + spread
    for text, value in zip(_texts(values, plus), values, strict=True):
        assert float(text) == pytest.approx(value, rel=0, abs=0.051 * spread)
        assert len(text) < 20
    assert _texts((0.0, -1.7e308, 1.7e308)) == ["0.00e+00", "-1.70e+308", "1.70e+308"]


def test_rich_shows_the_table() -> None:
    console = pytest.importorskip("rich.console")
    found = odd_results([1.0] * len(ODD_NAMES))
    screen = console.Console(file=io.StringIO(), width=400)
    screen.print(found)
    text = screen.file.getvalue()
    for name in ODD_NAMES:
        assert " ".join(name.split("\n")) in text
    assert text.count("1.100 [0.852, 1.348]") == len(ODD_NAMES) ** 2
    assert str(found).splitlines()[-1] in text
    narrow = console.Console(file=io.StringIO(), width=100)
    narrow.print(EvalResults(found.episodes, ODD_NAMES, ODD_NAMES))
    assert "…" not in narrow.file.getvalue()


@pytest.mark.parametrize(("policies", "tasks"), [(POLICIES, TASKS), (["new"], ["desk"]), (["_a", "$x_1$"], [""])])
def test_a_picture_shows_the_means_and_the_differences(policies: list[str], tasks: list[str]) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    episodes = [
        EpisodeResult(policy, task, k, k, metrics={"return": rng.normal()})
        for policy in policies
        for task in tasks
        for k in range(4)
    ]
    found = EvalResults(episodes, policies, tasks)
    figure = found.plot()
    figure.savefig(io.BytesIO())
    means, *differences = figure.axes
    rows = [*tasks, None] if len(tasks) > 1 else tasks
    dots = [line.get_xdata() for line in means.lines if line.get_marker() == "o"]
    ends = [tuple(line.get_xdata()) for line in means.lines if line.get_marker() != "o"]
    expected = [[found.mean(policy, "return", task) for task in rows] for policy in policies]
    assert [list(x) for x in dots] == [[mean.estimate for mean in row] for row in expected]
    assert ends == [(mean.lower, mean.upper) for row in expected for mean in row]
    assert [label.get_text() for label in means.get_yticklabels()] == [
        row if row is not None else "all" for row in rows
    ]
    assert len(differences) == (len(policies) > 1)
    for panel in differences:
        dots = [list(line.get_xdata()) for line in panel.lines if line.get_marker() == "o"]
        others = [[found.difference(other, policies[0], "return", task) for task in rows] for other in policies[1:]]
        assert dots == [[difference.estimate for difference in row] for row in others]
        assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == policies
    with pytest.raises(ConfigError, match="there is no metric 'gap'"):
        found.plot("gap")


def test_a_picture_of_odd_figures() -> None:
    pytest.importorskip("matplotlib")
    found = some_results()
    for result in found.episodes[::5]:
        result.metrics["return"] = math.nan
    EvalResults(found.episodes, POLICIES, TASKS).plot("return").savefig(io.BytesIO())


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        some_results().plot()


def test_json_has_no_nan(tmp_path: Path) -> None:
    found = EvalResults(
        [EpisodeResult("a", "", k, k, metrics={"return": x}) for k, x in enumerate([1.5, math.nan, math.inf])],
        ["a"],
        [""],
    )
    found.save(tmp_path / "x.json")
    rows = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert [row["metrics"]["return"] for row in rows] == [1.5, None, None]
    found.save(tmp_path / "x.csv")
    assert [line.split(",")[-1] for line in (tmp_path / "x.csv").read_text().splitlines()] == [
        "return",
        "1.5",
        "nan",
        "inf",
    ]
    assert math.isnan(found.episodes[1].metrics["return"])


def test_figures_of_the_same_name_are_refused() -> None:
    def results(policies: list[str], tasks: list[str], **metrics: float) -> EvalResults:
        episodes = [
            EpisodeResult(policy, task, k, k, 1, metrics={"return": 1.0, **metrics})
            for policy in policies
            for task in tasks
            for k in range(2)
        ]
        return EvalResults(episodes, policies, tasks)

    for found in (results(["a", "a/x"], ["x", "y"]), results(["a"], [""], return_lower=3.0, other=0.5)):
        with pytest.raises(ConfigError, match=r"two figures have the name '(a/x/return|return_lower)'"):
            found.metrics()
    assert results(["a"], [""], other=0.5).metrics()["other"] == 0.5


def test_ones_and_zeros_of_an_info_are_shares() -> None:
    values = [1.0, 0.0, 1.0, 1.0]
    episodes = [
        EpisodeResult("p", "", k, k, 1, metrics={"return": x, "solved": x, "bool": bool(x), "n": 2 * x})
        for k, x in enumerate(values)
    ]
    found = EvalResults(episodes, ["p"], [""])
    assert found.mean("p", "solved") == found.mean("p", "bool")
    assert [found.is_share(name) for name in ("return", "solved", "bool", "n")] == [False, True, True, False]
