"""A sampler beside the reference loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from penstock import (
    AsyncSampler,
    Collector,
    NamedArrays,
    PolicySamples,
    ResetCollector,
    Sampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.testing import ReferenceLoop

from .support import assert_same, deface

SEED = 3
#: What agents compute. The last bit of a matrix product may hang on the number of its rows.
OF_MODELS = ("agent_info", "bootstrap_value", "final_value")


class Waiting(ReferenceLoop):
    """As with a `WaitResetCollector`."""

    def begin_episodes(self, t: int, over: Collection[int]) -> None:
        if t < 0:
            super().begin_episodes(t, over)


def compare(
    cls: type[Sampler],
    env_fn: Any,
    make_agent: Any,
    *,
    n_batches: int,
    sampler: dict[str, Any] | None = None,
    collector: tuple[type[Collector], type[ReferenceLoop]] = (ResetCollector, ReferenceLoop),
    wait_reset: bool = False,
    rtol: float = 0.0,
    in_loop: Any = None,
    **options: Any,
) -> list[Any]:
    """Raise AssertionError unless a sampler and the loop return the same: bit for bit, but what a model has computed
    within `rtol`. `options` are those of the loop, `sampler` has what only the sampler knows, `collector` a class and
    the loop that does the same, `in_loop` another `env_fn` for it. With `env_info=True`, the loop records what the
    sampler does. Returns the loop's batches, each with its trajectories."""
    options = {"bootstrap_value": True, "traj_info_kwargs": {"discount": 0.9}, **options}
    names = ("bootstrap_value", "policy_of", "traj_info_kwargs")
    at_start = {name: options[name] for name in names if name in options}
    ours_too = {name: value for name, value in options.items() if name not in at_start}
    collector_cls, loop_cls = (WaitResetCollector, Waiting) if wait_reset else collector
    found = []
    with cls(env_fn, **{"collector_cls": collector_cls, **ours_too, **(sampler or {})}) as ours:
        ours.initialize(make_agent(), seed=SEED, **at_start)
        if isinstance(ours, AsyncSampler):
            ours.start()
        if options.get("env_info") is True:
            recorded = ours.samples_np.env.env_info
            options["env_info"] = {n: rows[0, 0] for n, rows in recorded.items() if f"_{n}" in recorded}
        loop = loop_cls(in_loop or env_fn, make_agent(), seed=SEED, extra_fields=collector_cls.extra_fields, **options)
        for itr in range(n_batches):
            samples, infos = ours.obtain_samples(itr)
            wanted, wanted_infos = loop.obtain_samples(itr)
            for name, own in samples.items() if isinstance(samples, PolicySamples) else [("", samples)]:
                _compare(own.numpy(), wanted[name] if name else wanted, rtol)
            assert_same(figures(infos), figures(wanted_infos))
            if "eval_n_envs" in options and itr in (0, 3):  # the second shows what the first has left
                assert_same(figures(ours.evaluate_agent(itr)), figures(loop.evaluate_agent(itr)))
            found.append((wanted, wanted_infos))
            deface(samples)  # no later batch may depend on it
        loop.close()
    return found


def _compare(samples: Any, wanted: NamedArrays, rtol: float) -> None:
    expected = dict(wanted.leaves())
    for path, leaf in samples.leaves():
        name = path.split(".", 1)[1]
        if name == "policy_version" or (name.startswith("extra.") and name not in expected):
            continue
        # With wait-reset, prev_done is True in the row after an end too, although that row is not valid.
        found = leaf & samples.env.valid if name == "prev_done" else leaf
        if rtol and name.startswith(OF_MODELS):
            assert found.dtype == expected[name].dtype
            np.testing.assert_allclose(found, expected[name], rtol, rtol / 1000, err_msg=name)
        else:
            np.testing.assert_array_equal(found, expected[name], err_msg=name, strict=True)


def figures(infos: Sequence[TrajInfo]) -> list[dict[str, Any]]:
    """What trajectories show."""
    own = {"env_rank", "number", "seed", "agent_id", "policy"}
    return [{name: getattr(info, name) for name in {n for n in vars(info) if n[0] != "_"} | own} for info in infos]
