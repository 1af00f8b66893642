"""The files of docs/recipes/machines.md: they parse, name what exists, and run where this machine can run them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes/machines.md").read_text(encoding="utf-8")

# Each of these prints its arguments. `srun` runs its command once per node.
_FAKES = {
    "scontrol": 'echo "$SLURM_JOB_NODELIST" | tr , "\\n"',
    "openssl": "echo 0123456789abcdef",
    "ray": 'echo "ray $* [$RAY_AUTH_MODE $RAY_AUTH_TOKEN]"',
    "python": 'echo "python $* [$RUN_HOST]"',
    "srun": """while [[ $1 == --* ]]; do shift; done
n=0; for node in ${SLURM_JOB_NODELIST//,/ }; do SLURM_PROCID=$n "$@"; n=$((n + 1)); done""",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run_block(block: str, folder: Path, **variables: str) -> list[str]:
    """The lines that a shell script prints, with false commands of the cluster."""
    for name, body in _FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    environ = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=block, env=environ, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_manifest_for_kuberay_is_complete() -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = blocks("yaml")
    job: dict[str, Any] = yaml.safe_load(block)
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("ray.io/v1", "RayJob", {"name": "penstock"})
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    least, bound = re.findall(r'"ray>=([\d.]+),<([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))[0]
    versions = [tuple(map(int, version.split(".")[:2])) for version in (least, cluster["rayVersion"], bound)]
    assert versions[0] <= versions[1] < versions[2]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"], "all nodes are there before the program begins"
    assert workers["template"] == cluster["headGroupSpec"]["template"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_slurm_starts_ray_on_each_node(tmp_path: Path) -> None:
    found = run_block(
        blocks("bash")[0], tmp_path, SLURM_JOB_NODELIST="a1,a2", SLURM_JOB_NUM_NODES="2", SLURM_CPUS_ON_NODE="8"
    )
    command = "ray symmetric-run --address a1:6379 --min-nodes 2 --num-cpus 8 -- python train.py --resume checkpoint.pt"
    assert found == [f"{command} [token 0123456789abcdef]"] * 2


def test_slurm_starts_an_experiment_and_those_that_join(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_NODELIST": "localhost,a2,a3"}
    found = run_block(blocks("bash")[1], tmp_path, **variables)
    assert found[0] == "python train.py [127.0.0.1]"
    for i, line in enumerate(found[1:], 1):
        actors = " ".join(f"actor/{4 * i + k}" for k in range(4))
        assert line == f"python -m penstock join run.json train.py:EXPERIMENT --wait 300 --as {actors} [127.0.0.1]"
    assert len(found) == 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_have_one_model(ray_cluster: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "symmetric-run", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "--min-nodes" in done.stdout
    (tmp_path / "ddp_ray.py").write_text(blocks("python")[0])
    environ = {**os.environ, "RAY_ADDRESS": ray_cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp_ray.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = dict(re.findall(r"(range\(\d+, \d+\)) (\S+)", done.stdout))
    assert ranks.keys() == {"range(0, 4)", "range(4, 8)"}, done.stdout
    assert len(set(ranks.values())) == 1, "the parameters are equal"
    assert float(next(iter(ranks.values()))) != 0.0
