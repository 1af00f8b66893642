"""The messages between a learner and the process of an environment, and what that process needs."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import GameError
from penstock.games import EnvProcess, host
from penstock.games.env_process import _space
from penstock.games.host import PREFIX, decoded, encoded, length

from ..scale import scaled
from .own_envs_support import OLD, assert_equal, here, old_python

dtypes = st.sampled_from(["<i1", "<u8", ">f4", "<f8", "|b1", "<c16", "<U3", "|S2", "<f2"])
arrays = st.builds(
    lambda dtype, shape, seed: np.random.RandomState(seed).randint(0, 2, shape).astype(dtype),
    dtypes,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 99),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers())
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values: Any = st.recursive(
    st.one_of(leaves, arrays, arrays.map(lambda array: array.dtype.type(True if array.dtype.kind == "b" else "1"))),
    lambda parts: st.one_of(st.lists(parts), st.lists(parts).map(tuple), st.dictionaries(keys, parts)),
    max_leaves=8,
)


@given(values, st.booleans())
def test_a_value_arrives_as_it_is(value: Any, has_memory: bool) -> None:
    memory = np.zeros(1 << 20, np.uint8) if has_memory else None
    assert_equal(decoded(encoded(value, memory, strict=True), memory), value)


@pytest.mark.parametrize("n", [host.INLINE, host.INLINE + 1, 1 << 18, (1 << 18) + 1])
def test_many_bytes_go_through_the_memory_if_they_fit(n: int) -> None:
    memory, value = np.zeros(1 << 18, np.uint8), (np.arange(n - 8).astype(np.uint8), np.float64(2.5))
    message = encoded(value, memory)
    assert (len(message) < 200) == (host.INLINE < n <= 1 << 18)
    assert length(message) == len(message)
    found = decoded(message, memory)
    memory[:] = 7  # the next message
    assert_equal(found, value)


ARRAYS = {"image": np.zeros((4, 4), np.uint8), "t": "x", "n": 3, "s": np.array(["a", "bb"])}
INFO = {"a": (1, 2), "b": b"xx", "g": np.float32(2), 3: 4, "c": 1j, "o": object()}
MESSAGES = [
    encoded(("ok", (ARRAYS, 1.0, False, False, INFO))),
    encoded(("raised", "KeyError: 3", "Traceback")),
    encoded(("ok", (9, host._described(here("Words").observation_space), ["Discrete", 2, 0, "<i8"], None, {}))),
]
NOISE = b'0123456789[]{}",:-eE<>|biufcSUapdgtx\\.'


def mutated(rng: random.Random) -> bytes:
    """A message in which some bytes are others, missing, or new. Half of the prefixes fit it."""
    data = bytearray(rng.choice(MESSAGES))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at:at] = bytes(rng.choices(NOISE, k=rng.randint(1, 8)))
            case 2:
                del data[at : at + rng.randint(1, 4)]
            case 3:
                data[at] = rng.choice(NOISE)
    if rng.random() < 0.5 and len(data) > PREFIX.size:
        size = min(PREFIX.unpack(MESSAGES[0][: PREFIX.size])[1], len(data) - PREFIX.size)
        data[: PREFIX.size] = PREFIX.pack(len(data) - PREFIX.size - size, size, rng.random() < 0.1)
    return bytes(data)


@pytest.mark.timeout(scaled(600, 60))
def test_a_broken_message_is_an_error_and_takes_no_memory() -> None:
    """What it raises is what `EnvProcess` names, and spaces made of it do no harm either."""
    rng, memory, n_taken = random.Random(0), np.zeros(64, np.uint8), 0
    tracemalloc.start()
    try:
        for _ in range(scaled(100_000, 2_000)):
            data = mutated(rng)
            try:
                answer = decoded(data, memory)
            except ValueError:
                continue
            n_taken += 1
            with suppress(Exception):  # it is named, whatever it is
                _space(answer[1][1])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_taken > scaled(1000, 20)
    assert most < 8 << 20


@pytest.mark.parametrize(
    "header",
    [
        '{"a": ["<f8", [1000000000]]}',
        '{"a": ["<U999999999", [9]]}',
        '{"a": ["<U0", [1000000000]]}',
        '{"a": ["<f8", [1000000000, "aaaa"]]}',
        '{"a": ["<f8", [-1, -1]]}',
        '{"a": ["|O8", [1]]}',
        '{"a": [["f", "i"], [1]]}',
        '{"a": ["<f8", [' + "1," * 70 + "1]]}",
        '{"b": -1}',
        '{"b": 10000000000}',
        '{"x": 1, "y": 2}',
        '{"q": 1}',
        "[" * 100_000,
        "1" * 10_000,
        '{"p": [[[], 1]]}',
    ],
    ids=lambda header: header[:30],
)
def test_what_a_header_must_not_say(header: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^no message: "):
        decoded(PREFIX.pack(len(header), 0, 0) + header.encode())
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_message_that_is_too_large_is_refused_unread() -> None:
    for sizes in ((host.MAX_HEADER + 1, 0), (0, host.MAX_BODY + 1)):
        with pytest.raises(ValueError, match="is too large"):
            length(PREFIX.pack(*sizes, 0))
    with pytest.raises(ValueError, match="is cut"):
        decoded(PREFIX.pack(2, 8, 1) + b"{}", None)


@pytest.mark.parametrize(
    "answer", [("ok",), ("ok", 1, 2), ("raised", "x"), (), 3, "ok", ("no", 1), None, {"ok": 1}, ("ok", (1, 2, 3, 4))]
)
def test_an_answer_that_is_none_is_named(answer: Any, tmp_path: Path) -> None:
    """From a program that says it has no spaces, or something else."""
    script = tmp_path / "python"
    lines = "import socket, sys; token = decoded(sys.stdin.buffer.read())[0]"
    lines += "; s = socket.create_connection(('127.0.0.1', int(sys.argv[-1])))"
    lines += f"; s.sendall(token.encode() + {encoded(answer)!r}); s.recv(1)"
    script.write_text(f"#!{sys.executable}\nfrom penstock.games.host import decoded\n{lines}\n")
    script.chmod(0o755)
    with pytest.raises(GameError, match=r"^the environment \(pid \d+, port \d+\) sent (a broken message|no spaces): "):
        EnvProcess("own_envs:Numbers", python=script)


# ---- what the process needs ------------------------------------------------------------------------


def test_the_other_side_needs_python_37_the_standard_library_and_numpy() -> None:
    source = Path(host.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 7))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"numpy"}
    assert not any(isinstance(node, ast.NamedExpr | ast.Match) for node in ast.walk(tree))


@pytest.mark.parametrize("version", OLD)
def test_an_old_python_compiles_it(version: str, tmp_path: Path) -> None:
    code = f"import py_compile; py_compile.compile({host.__file__!r}, {str(tmp_path / 'x')!r}, doraise=True)"
    subprocess.run([old_python(version), "-c", code], check=True, timeout=60)
