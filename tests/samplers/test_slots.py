"""Who owns a batch: how long it stays valid, that torch notices when it ends, and what `debug` adds."""

import inspect
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    Sampler,
    SerialSampler,
    StaleSamplesError,
)
from penstock.envs import CountingEnv
from penstock.samplers.batches import Batches

from .async_support import batch_of, check_streams, until_idle
from .started import started

T, B = 4, 4
every = pytest.mark.parametrize(
    "cls", [SerialSampler, ParallelSampler, AsyncSampler, GpuSampler, AlternatingSampler], ids=lambda cls: cls.__name__
)


def begin(cls: type[Sampler], **options: Any) -> Any:
    return started(CountingEnv, None, cls, **{"batch_T": T, "batch_B": B, "n_workers": 2, "seed": 3, **options})


@every
def test_a_backward_pass_is_right_until_its_batch_is_given_back_and_then_raises(cls: type[Sampler]) -> None:
    with begin(cls) as sampler:
        for itr in range(3):
            weight = torch.ones((), requires_grad=True)
            samples, _ = sampler.obtain_samples(itr)
            kept = samples.copy()
            now, late, safe = ((weight * own.env.reward).sum() for own in (samples, samples, kept))
            now.backward()
            sampler.obtain_samples(3 + itr)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                late.backward()  # the gradient needs the reward itself
            safe.backward()
            assert weight.grad is not None
            assert float(weight.grad) == 2 * float(kept.env.reward.sum())


@pytest.mark.slow
@every
def test_a_batch_tells_its_number_and_whether_it_is_current(cls: type[Sampler]) -> None:
    with begin(cls) as sampler:
        first, _ = sampler.obtain_samples(10)
        row, kept, arrays = first[0], first.copy(), first.numpy()
        assert (first.batch, first.is_current, first.valid_until) == (0, True, 1)
        assert (row.batch, arrays.batch) == (0, 0)
        second, _ = sampler.obtain_samples(11)
        assert first is not second
        assert (second.batch, second.is_current, second.valid_until) == (1, True, 2)
        assert [old.is_current for old in (first, row, arrays)] == [False] * 3
        assert (kept.batch, kept.is_current, kept.valid_until) == (None, True, None)
        if cls is not AsyncSampler:
            sampler.start_samples(12)
            assert not second.is_current, "the next batch has begun"
            assert sampler.wait_samples()[0].is_current


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ParallelSampler, SerialSampler, GpuSampler])
def test_synchronous_samplers_keep_the_last_batches_valid(cls: type[Sampler]) -> None:
    with begin(cls, n_slots=3) as sampler:
        held: list[Any] = []
        for itr in range(8):
            samples, _ = sampler.obtain_samples(itr)
            held.append((samples, batch_of(samples)))
            assert [old.is_current for old, _ in held] == [old.batch > itr - 3 for old, _ in held]
            assert samples.valid_until == itr + 3
            for old, content in held[-3:]:
                assert batch_of(old) == content
        assert [samples.batch for samples, _ in held] == list(range(8))
        check_streams([samples for samples, _ in held[-3:]])


@every
def test_with_debug_what_was_given_back_is_poisoned_and_refused(cls: type[Sampler]) -> None:
    with begin(cls, debug=True) as sampler:
        samples, _ = sampler.obtain_samples(0)
        env, leaves = samples.env, list(samples.leaves())
        observation = samples.env.observation
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        newer, _ = sampler.obtain_samples(1)
        for use in (lambda: samples.env, lambda: samples[0], lambda: env.reward, samples.copy, lambda: list(env)):
            with pytest.raises(
                StaleSamplesError, match=f"batch 0 was used .* batch 1, which began at .*test_slots.py:{line}[.] "
            ):
                use()
        assert not samples.is_current
        assert observation.isnan().all()
        for name, leaf in leaves:
            array = leaf.numpy()
            kind = array.dtype.kind
            expected = np.isnan(array) if kind == "f" else ~array if kind == "b" else array == np.iinfo(array.dtype).min
            assert expected.all(), name
        assert newer.env.reward.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "way", "options"),
    [
        (ParallelSampler, "each", {}),
        (ParallelSampler, "each", {"n_slots": 2}),
        (GpuSampler, "each", {"server": "process"}),
        (AsyncSampler, "each", {"n_slots": 2}),
        (AsyncSampler, "each", {"lag": 1}),
        (AsyncSampler, "each", {"server": "process"}),
        (AsyncSampler, "newest", {}),
        (AsyncSampler, "hold", {}),
        (AsyncSampler, "pause", {}),
    ],
)
def test_debug_overwrites_nothing_that_workers_have_written_since(
    cls: type[Sampler], way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, n_infos = Batches.give_back, 0

    def give_back_late(*args: Any, **kwargs: Any) -> None:
        until_idle(sampler)
        plain(*args, **kwargs)

    def take(itr: int, **kwargs: Any) -> None:
        nonlocal n_infos
        samples, infos = sampler.obtain_samples(itr, **kwargs)
        env, step = samples.numpy().env, samples.batch * T + np.arange(T)[:, None]
        assert (env.observation == np.stack([step // 5, step % 5], -1)).all()
        assert (env.reward == step % 5 + 1).all()
        assert (env.done == (step % 5 == 4)).all()
        n_infos += len(infos)
        assert n_infos == (samples.batch + 1) * T // 5 * B

    monkeypatch.setattr(Batches, "give_back", give_back_late)
    with begin(cls, debug=True, max_decorrelation_steps=0, **options) as sampler:
        for itr in range(0, 12, 2):
            if isinstance(sampler, AsyncSampler) and way == "pause":
                sampler.pause()
                take(itr)
                sampler.resume()
            elif way == "newest":
                until_idle(sampler)
                take(itr, newest=True)
            with sampler.hold() if isinstance(sampler, AsyncSampler) and way == "hold" else nullcontext():
                take(itr)
                take(itr + 1)
