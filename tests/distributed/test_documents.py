"""The code of docs/control_plane.md and docs/migration/srl.md, and the example, run as they are written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from ..scale import scaled
from ..starter import run

pytest.importorskip("zmq", reason="the documents use the wire over sockets")
pytest.importorskip("msgpack", reason="the documents use the wire over sockets")

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow]


ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/control_plane.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_experiment_of_the_document_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples/cluster_experiment.py"))
    assert "state.version >= 200" in BLOCKS[0]
    exec(BLOCKS[0].replace(">= 200", ">= 2"), example)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") >= 1
    assert (tmp_path / "trainer.pt").exists()


def test_the_policies_of_the_document_play(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(BLOCKS[0].partition("experiment =")[0], names)
    exec(BLOCKS[1], names)
    assert {"leader torch.Size([8, 8])", "others torch.Size([8, 16])"} <= {*capsys.readouterr().out.splitlines()}


def test_the_worker_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[2], {"__name__": "__main__"})
    first, pulse = capsys.readouterr().out.splitlines()
    assert first == "30"
    assert pulse.count("RUNNING") == 8  # name and value of each status


def test_the_other_blocks_name_what_exists() -> None:
    for block in BLOCKS[3:]:
        compile(block, "control_plane.md", "exec")


def test_the_page_for_users_of_srl_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/migration/srl.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        exec(block, {"__name__": "__main__"})
        comments = re.findall(r"print\(.*  # (.*)", block)
        assert comments == capsys.readouterr().out.splitlines()
    assert len(blocks) == 2


# The document's experiment is the example, over sockets.
ON_RAY = [pytest.param("ray", is_killed, marks=pytest.mark.ray) for is_killed in (False, True)]
LEARNS = [("local", False), *scaled([("zmq", False), ("zmq", True), *ON_RAY], [])]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("wire", "is_killed"), LEARNS)
def test_the_example_learns(wire: str, is_killed: bool) -> None:
    if wire == "ray":
        pytest.importorskip("ray")
    goal = scaled("400", "30")  # at random, the mean return is 22
    command = ["examples/cluster_experiment.py", "--wire", wire, "--goal", goal]
    command += ["--time-limit", "270", *(["--kill-policy", "10"] if is_killed else [])]
    done = run(*command, cwd=ROOT, seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer/0" in done.stdout
    assert f"'policy/0': {int(is_killed)}" in done.stdout
    print(done.stdout.splitlines()[-1])
