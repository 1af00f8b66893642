"""On real environments, in both reset modes, every field of a batch equals the reference loop."""

from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, SerialSampler, TrajInfo

from ..against_loop import compare
from ..scale import FULL, pairs
from ..support import Diary
from .environments import ENVIRONMENTS, agent_maker, env_fns

pytestmark = pytest.mark.slow

T = 8
#: Time limits within a batch, at its end, and beyond it.
LIMITS = dict.fromkeys(ENVIRONMENTS, (3, 8, 11)) | {"Blackjack": (1, 2, 3)}  # most hands end within two steps

#: Slow environments. Daily each runs in one test: Atari in the first, dm_control in the last.
HEAVY = ("Atari", "dm_control")


def cases(*heavy: str) -> list[str]:
    """All environments at full scale; daily without the heavy ones but these."""
    return [name for name in ENVIRONMENTS if FULL or name not in HEAVY or name in heavy]


def compare_on(sampler_cls: Any, name: str, recurrent: bool, **kwargs: Any) -> list[Any]:
    pytest.importorskip(ENVIRONMENTS[name].needs)
    fns = env_fns(name, LIMITS[name])
    env = fns[0]()
    make_agent = agent_maker(env.observation_space, env.action_space, recurrent)
    env.close()
    return compare(sampler_cls, fns, make_agent, batch_T=T, batch_B=len(fns), env_info=True, **kwargs)


@pytest.mark.parametrize(("name", "wait_reset"), pairs(cases("Atari"), [False, True]))
def test_a_stateless_agent(name: str, wait_reset: bool) -> None:
    found = compare_on(SerialSampler, name, recurrent=False, n_batches=4, wait_reset=wait_reset)
    # The compared data must hold all kinds of episode ends: [environment, batch, T].
    terminated, truncated, value = (
        np.array([batch[name] for batch, _ in found]).transpose(2, 0, 1)
        for name in ("terminated", "truncated", "final_value")
    )
    np.testing.assert_array_equal(value != 0, truncated & ~terminated)
    assert truncated[0, :, :-1].any(), "time limits within a batch"
    if name == "Blackjack":
        assert terminated.any()
        assert (terminated & truncated).any()
    else:
        assert truncated[1, 0, -1], "one at its very end"
        assert not truncated[2, 0].any(), "and one that is reached in the next"
        assert truncated[2, 1].any()


@pytest.mark.parametrize(("name", "wait_reset"), pairs(cases(), [True, False]))
def test_a_recurrent_agent(name: str, wait_reset: bool) -> None:
    traj_info_cls = Diary if wait_reset else TrajInfo
    compare_on(SerialSampler, name, recurrent=True, wait_reset=wait_reset, n_batches=3, traj_info_cls=traj_info_cls)


@pytest.mark.parametrize("name", cases("dm_control"))
@pytest.mark.timeout(60)
def test_in_processes(name: str) -> None:
    # Every second environment with the other mode and the other kind of agent. The tests above have the rest.
    odd = list(ENVIRONMENTS).index(name) % 2 == 1
    options: dict[str, Any] = {"n_batches": 4, "sampler": {"n_workers": 2}, "wait_reset": odd}
    compare_on(ParallelSampler, name, recurrent=odd, traj_info_cls=TrajInfo if odd else Diary, **options)
