"""One Ray for all tests of a process: a cluster of one node, to which tests may add others."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock

from .. import starter as starters
from ..scale import scaled
from .ray_support import our_processes, wait_for_none

# Every process that Ray or a test starts from here has this variable.
os.environ["PENSTOCK_TEST_RUN"] = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"

# Ray reads these when it is imported.
if find_spec("ray") is not None:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node that is silent is dead after 3 seconds.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "5",
    }


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the tests of Ray, in place of the suite's fixture: Ray's own processes and threads stay, but no process that
    a sampler or an environment has started."""
    if request.node.get_closest_marker("ray") is None:
        request.getfixturevalue("nothing_left")  # the suite's
        yield
        return
    request.getfixturevalue("_servers")
    if "ray" in getattr(getattr(request.node, "callspec", None), "params", {}).values():
        request.getfixturevalue("ray_cluster")
    before = our_processes()
    yield
    assert wait_for_none(before, scaled(2.0, 5.0)) == {}  # daily, other tests use the CPUs too


@pytest.fixture
def forked_workers(starter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisors of the workers that an experiment launches as processes are forks, and need not import torch."""
    cloudpickle.register_pickle_by_value(starters)
    monkeypatch.setattr("penstock.distributed.launched.run_worker", starters.run_launched_worker)


_clusters: list[Any] = []


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`, which this process has joined."""
    ray = pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')
    if ray.is_initialized():  # for a module that imports this fixture, pytest calls it once more
        yield _clusters[0]
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(penstock.__file__).parents[1]))  # for its nodes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own
            from ray.cluster_utils import Cluster

            cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 8, "object_store_memory": 100 * 2**20, "include_dashboard": False},
            )
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            _clusters[:] = [cluster]
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def nodes(ray_cluster: Any) -> Iterator[list[Any]]:
    """Those that a test adds to the cluster. They go after it."""
    added: list[Any] = []
    yield added
    for node in added:
        ray_cluster.remove_node(node)
