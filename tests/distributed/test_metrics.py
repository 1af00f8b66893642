"""Where the figures of a run go: JSON lines, and the recipes for TensorBoard and Prometheus."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from penstock import ConfigError
from penstock.distributed import RunState
from penstock.distributed.run_state import to_file
from penstock.distributed.trainer_worker import _figures

STATES = [
    RunState(n, 2.0 * n, {"trainer/0": {"status": "RUNNING", "version": n, "return": 10.5, "up": 0.25}, **more})
    for n, more in ((1, {}), (2, {"actor/0": {"status": "LOST", "text": ""}}))
]


def test_what_a_step_returns_is_a_dict_of_numbers() -> None:
    assert _figures(None) == {}
    assert _figures({"a": np.float32(2), "b": np.ones(1)[0]}) == {"a": 2.0, "b": 1.0}
    with pytest.raises(ConfigError, match="what step of the trainer returns must be a dict of figures or None, got 5"):
        _figures(5)
    for value in ("x", [1.0, 2.0], np.ones(2)):
        with pytest.raises(ConfigError, match="the trainer's figure 'loss' must be one number"):
            _figures({"loss": value})


def test_a_line_of_json_for_each_moment(tmp_path: Path) -> None:
    write = to_file(tmp_path / "figures")
    for state in STATES:
        write(state)
    lines = [json.loads(line) for line in (tmp_path / "figures").read_text().splitlines()]
    assert lines == [{"version": s.version, "seconds": s.seconds, "workers": dict(s.workers)} for s in STATES]


@pytest.mark.parametrize("plant", [os.symlink, os.link, lambda source, link: os.mkfifo(link)])
def test_figures_go_into_no_file_that_somebody_has_planted(tmp_path: Path, plant: Any) -> None:
    diary = tmp_path / "diary"
    diary.write_text("mine")
    plant(diary, tmp_path / "figures")
    with pytest.raises(ConfigError, match="figures is a link, no file, or not your own: give the path of a file"):
        to_file(tmp_path / "figures")(STATES[0])
    assert diary.read_text() == "mine"
    to_file(tmp_path / "own")(RunState(1, 1.0, {"a": {"status": "RUNNING", "strange": np.zeros(2)}}))
    assert json.loads((tmp_path / "own").read_text())["workers"]["a"]["strange"] == "[0. 0.]"
    with pytest.raises(FileNotFoundError):
        to_file(tmp_path / "no folder" / "figures")(STATES[0])


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, before = tmp_path / "figures", resource.getrlimit(resource.RLIMIT_FSIZE)
    write = to_file(path)
    write(STATES[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, before[1]))
    try:
        for _ in range(3):
            write(STATES[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write(STATES[1])
    write(STATES[0])
    lines = path.read_text().split("\n")
    assert [json.loads(lines[i])["version"] for i in (0, -3, -2)] == [1, 2, 1]
    assert lines[-1] == ""
    assert all(len(line) <= 9 for line in lines[1:-3])
    assert [r.getMessage() for r in caplog.records] == [
        f"figures cannot be written to {path}, so lines are missing: File too large"
    ]


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    figures = {"loss": float("nan"), "up": float("inf"), "all": [1, -np.inf, (np.float64("nan"), 2.5)], "n": 3}
    to_file(tmp_path / "figures")(RunState(1, 1.0, {"a": figures}))
    line = json.loads((tmp_path / "figures").read_text(), parse_constant=pytest.fail)
    assert line["workers"]["a"] == {"loss": None, "up": None, "all": [1, None, [None, 2.5]], "n": 3}


def recipe(library: str, *replaced: str) -> dict[str, Any]:
    """The names of the block of docs/recipes/machines.md that uses this library, with a text replaced by another."""
    page = (Path(__file__).parents[2] / "docs/recipes/machines.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if library in block]
    names: dict[str, Any] = {}
    exec(block.replace(*replaced), names)
    return names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard and its libraries
def test_the_recipe_for_tensorboard_has_a_curve_for_each_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = recipe("tensorboard", '"runs"', repr(str(tmp_path)))
    with board["writer"]:
        for state in STATES:
            board["write"](state)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["trainer/0/version", "trainer/0/return", "trainer/0/up"]
    assert [(event.step, event.value) for event in events.Scalars("trainer/0/return")] == [(1, 10.5), (2, 10.5)]


def test_the_recipe_for_prometheus_has_the_newest_figures_and_whether_each_worker_is_up() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    gauges = recipe("prometheus_client", "9100", "0")
    with gauges["server"] as server:
        host, port = server.server_address
        for state in STATES:
            gauges["write"](state)
        with urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        server.shutdown()
        gauges["thread"].join()
    assert host == "127.0.0.1"
    assert [line for line in lines if not line.startswith("#")] == [
        'penstock{figure="version",worker="trainer/0"} 2.0',
        'penstock{figure="return",worker="trainer/0"} 10.5',
        'penstock{figure="up",worker="trainer/0"} 1.0',
        'penstock{figure="up",worker="actor/0"} 0.0',
    ]
    with socket.socket() as free, pytest.raises(ConnectionError):
        free.connect((host, port))
