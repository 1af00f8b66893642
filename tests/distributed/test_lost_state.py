"""Recurrent state is lost with the policy worker that had it: what the pieces show before and after."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock import RecurrentCategoricalPgAgent
from penstock.distributed import Actors, ActorWorker, ControlPanel, Policies, PolicyWorker, SampleConsumer
from penstock.distributed.launched import LaunchedThread
from penstock.distributed.names import NameClient

from ..scale import scaled
from .support import MAKES, need, wait_until
from .test_experiment import SAMPLER, Publisher, experiment, recurrent_model, start

pytestmark = pytest.mark.slow


def unexpected_starts(pieces: list[Any], model: Any) -> list[int]:
    """The pieces in which new episodes begin, although those of the piece before have not ended. Checks all rows: each
    observation and recorded state follows from the row before, also across pieces."""
    state = torch.zeros(4, 5)
    breaks, before = [], pieces[0]["samples"]["env"]
    for i, piece in enumerate(pieces):
        env, recorded = piece["samples"]["env"], piece["samples"]["agent"]["agent_info"]["prev_rnn_state"]
        starts = env["prev_done"][0]
        if i and (starts & ~before["done"][-1]).any():
            assert starts.all()
            breaks.append(i)
        if i:
            assert (env["observation"][0] == before["bootstrap_obs"])[~starts].all()
        assert env["valid"].all()
        for t in range(len(env["reward"])):
            state = torch.where(torch.from_numpy(env["prev_done"][t].copy())[:, None], 0.0, state)
            np.testing.assert_allclose(recorded[t], state, atol=1e-5)
            with torch.no_grad():
                state = model(torch.from_numpy(env["observation"][t].copy()), None, None, state)[2]
        before = env
    return breaks


@pytest.mark.parametrize("make", scaled(MAKES, ("local",)))
def test_episodes_of_a_recurrent_agent_end_with_its_policy_worker(make: str, request: pytest.FixtureRequest) -> None:
    need(make, request)
    plan = experiment(agent=partial(RecurrentCategoricalPgAgent, recurrent_model)).plan()
    with ControlPanel("test", wire=make) as panel:
        start(panel, publisher=partial(Publisher, plan))
        policies = panel.launch(partial(PolicyWorker, Policies(1), plan), 2, name="policy")
        panel.connect(policies, timeout=60)
        acting = Actors(1, SAMPLER, inference="policy")
        actor = LaunchedThread(lambda: ActorWorker(acting, plan), panel.connection, "actor/0")
        wire = panel.connection.wire()
        consumer = SampleConsumer(wire, NameClient(wire, panel.connection.address), "train", "test")
        panel.connect(["actor/0"])
        for name in (*policies, "actor/0"):  # to be configured, the actor needs a policy worker that runs
            panel.request(name, "configure")
            panel.request(name, "start")

        def n_truncated() -> int:
            return int(panel.stats(["actor/0"], timeout=10)["actor/0"].get("truncated", 0))

        pieces = [consumer.get(20) for _ in range(8)]
        assert n_truncated() == 0

        def n_rows(name: str) -> int:
            return int(panel.stats([name], timeout=10)[name].get("samples", 0))

        wait_until(lambda: any(map(n_rows, policies)))
        asked = max(policies, key=n_rows)
        if make == "local":
            panel.request(asked, "exit")
        else:
            os.kill(panel.pid(asked), signal.SIGKILL)
        while n_truncated() == 0:
            pieces.append(consumer.get(20))
        pieces += [consumer.get(20) for _ in range(8)]  # two may have waited
        assert n_truncated() == 4
        panel.request("actor/0", "exit")
        assert actor.wait(10)
        wire.close()
    assert len(unexpected_starts(pieces, plan.agent().model)) == 1
    assert any(piece["samples"]["env"]["prev_done"][1:].any() for piece in pieces), "some episodes end by themselves"
