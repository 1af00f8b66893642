"""Whatever an exception is made of, the error that reaches the user is short, complete and says where."""

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from penstock import ParallelSampler, RandomAgent, WorkerError
from penstock.envs import CountingEnv

from ..scale import scaled

MOST_BYTES = 64 * 1024

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


class Long(Exception):
    def __init__(self, size: int) -> None:
        super().__init__("x" * size)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class TwoArguments(Exception):
    """Pickles, but cannot be rebuilt: its __init__ wants more than its args hold."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Hostile(Exception):
    """Raises whatever one asks of it."""

    def __str__(self) -> str:
        raise SystemExit("not even this")

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def chain(depth: int) -> None:
    try:
        if depth:
            chain(depth - 1)
    except ValueError as error:
        raise ValueError(f"link {depth}") from error
    raise ValueError("the first link")


def recursion() -> None:
    recursion()


def group() -> None:
    raise BaseExceptionGroup("several", [ValueError("one"), KeyError("two"), SystemExit(3)])  # noqa: F821


def from_a_private_module() -> None:
    """A class that only the worker can import."""
    folder = Path(os.environ["PENSTOCK_PRIVATE"])
    sys.path.insert(0, str(folder))
    import penstock_private  # type: ignore[import-not-found]

    raise penstock_private.PrivateError("for the worker's eyes", "only")


RAISERS: dict[str, tuple[Any, str]] = {
    "100 MB": (lambda: _throw(Long(100_000_000)), r"Long: x{100}"),
    "unspeakable": (lambda: _throw(Unspeakable("?")), r"Unspeakable"),
    "unpicklable": (lambda: _throw(Unpicklable("said all the same")), r"Unpicklable: said all the same"),
    "two arguments": (lambda: _throw(TwoArguments("one", "two")), r"TwoArguments: one and two"),
    "hostile": (lambda: _throw(Hostile()), r"Hostile"),
    "private module": (from_a_private_module, r"PrivateError: for the worker's eyes only"),
    "chain": (lambda: chain(100), r"ValueError: link 100"),
    "recursion": (recursion, r"RecursionError: maximum recursion depth"),
    "many lines": (lambda: _throw(ValueError("first line\n" + "line\n" * 100_000)), r"ValueError"),
    "no message": (lambda: _throw(ValueError()), r"ValueError"),
    "surrogates": (lambda: _throw(ValueError("\udcff\x00\x1b[31m")), r"ValueError"),
    "stop iteration": (lambda: next(iter(())), r"StopIteration"),
    "interrupt": (lambda: _throw(KeyboardInterrupt("from within")), r"KeyboardInterrupt: from within"),
    "generator exit": (lambda: _throw(GeneratorExit("from within")), r"GeneratorExit: from within"),
}
if sys.version_info >= (3, 11):
    RAISERS["group"] = (group, r"ExceptionGroup: several")


def _throw(error: BaseException) -> None:
    raise error


class Raising(CountingEnv):
    def __init__(self, raiser: Any = None) -> None:
        super().__init__()
        self.raiser = raiser

    def step(self, action: Any) -> Any:
        if self.raiser is not None and self.count == 2:
            self.raiser()
        return super().step(action)


def error_of(raiser: Any, **kwargs: Any) -> WorkerError:
    env_kwargs = [{}, {"raiser": raiser}]
    with (
        ParallelSampler(
            Raising, env_kwargs=env_kwargs, batch_T=4, batch_B=2, n_workers=2, max_decorrelation_steps=0, **kwargs
        ) as sampler,
        pytest.raises(WorkerError) as caught,
    ):
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
    return caught.value


@pytest.mark.parametrize("name", RAISERS)
def test_a_strange_exception_is_told_in_short(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_private.py").write_text(
        "class PrivateError(Exception):\n"
        "    def __init__(self, first, second):\n"
        "        super().__init__(f'{first} {second}')\n"
    )
    monkeypatch.setenv("PENSTOCK_PRIVATE", str(tmp_path))
    raiser, words = RAISERS[name]
    error = error_of(raiser)
    message = str(error)
    assert re.match(r"worker 1 \(pid \d+, env_rank 1\) raised ", message), message[:500]
    kind, _, says = words.partition(": ")
    told = rf"raised \S*{kind} while stepping env_rank 1, t=2 \(itr=0\).*{says}"
    assert re.search(told, message), message[:500]
    assert error.__cause__ is not None
    text = "".join(traceback.format_exception(error))
    assert re.search(says or kind, text)
    own_part = text.partition("The above exception was the direct cause")[0]
    assert "in step" in own_part or name in ("many lines", "recursion", "chain", "100 MB"), "the worker's traceback"
    both = len(message.encode(errors="replace")) + len(own_part.encode(errors="replace"))
    assert both <= MOST_BYTES, both
    if name == "private module":
        assert "penstock_private" not in sys.modules


@pytest.mark.parametrize(("what", "n"), scaled([("many lines", 64), ("100 MB", 3)], [("many lines", 3)]))
def test_many_workers_fail_at_once_and_it_is_still_short(what: str, n: int) -> None:
    kwargs: dict[str, Any] = {"batch_T": 4, "batch_B": n, "n_workers": n, "max_decorrelation_steps": 0}
    raiser = RAISERS[what][0]
    with (
        ParallelSampler(Raising, env_kwargs={"raiser": raiser}, **kwargs) as sampler,
        pytest.raises(WorkerError) as caught,
    ):
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
    assert len("".join(traceback.format_exception(caught.value)).encode(errors="replace")) <= 2 * MOST_BYTES
    assert len(str(caught.value)) <= MOST_BYTES
