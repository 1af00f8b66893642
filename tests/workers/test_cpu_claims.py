"""Runs on one machine do not all pin their workers to the first CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.workers import cpu_claims
from penstock.workers.cpu_claims import CpuClaims
from penstock.workers.plan import Affinity

from ..children import waiting_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has claims")

OTHER = """
import os, sys
from penstock.workers.cpu_claims import CpuClaims
from penstock.workers.plan import Affinity
if sys.argv[2]:
    os.setuid(int(sys.argv[2]))
claims = CpuClaims()
print(list(claims.choose(Affinity(), int(sys.argv[1]), (100, 101, 102, 103))), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run(n: int, user: str = "") -> Iterator[list[int]]:
    command = [sys.executable, "-c", OTHER, str(n), user]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield list(map(int, process.stdout.readline().strip("[]\n").split(", ")))
        process.kill()  # the kernel gives the CPUs back


MASK = (100, 101, 102, 103)


def chosen(n: int, affinity: Affinity = Affinity()) -> tuple[list[int], CpuClaims]:  # noqa: B008
    claims = CpuClaims()
    return list(claims.choose(affinity, n, MASK)), claims


@pytest.mark.slow
def test_each_run_gets_the_first_cpus_that_are_free() -> None:
    with another_run(1) as first, another_run(2) as second:
        assert (first, second) == ([100], [101, 102])
        cpus, claims = chosen(1)
        assert cpus == [103]
        assert set(cpu_claims._claims) == {103}
        claims.close()
        claims.close()
        cpus, claims = chosen(2)
        assert cpus == [], "not pinned: one CPU is left for two workers"
        claims.close()
    cpus, claims = chosen(9)
    assert cpus == [100, 101, 102, 103]
    claims.close()
    assert not cpu_claims._claims


@pytest.mark.slow
def test_samplers_of_one_process_share_what_it_has_but_take_others_first() -> None:
    with another_run(2):
        first, first_claims = chosen(1)
        second, second_claims = chosen(1)
        third, third_claims = chosen(2)
        assert (first, second, third) == ([102], [103], [102, 103])
        for claims in (first_claims, second_claims):
            claims.close()
        assert set(cpu_claims._claims) == {102, 103}, "the third still uses them"
        third_claims.close()
    assert not cpu_claims._claims


def test_what_the_user_says_is_done_and_claimed() -> None:
    claims = CpuClaims()
    with another_run(1):
        assert claims.choose(Affinity(cpus=[100, 101]), 2, MASK) == MASK
        claims.hold([100, 101])  # 100 belongs to the other run: both use it
        with another_run(1) as third:
            assert third == [102]
    claims.close()
    assert chosen(0, Affinity(pin=False))[0] == list(MASK)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can be two users")
@pytest.mark.slow
def test_two_users_get_different_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU_FOLDER", str(tmp_path / "locks"))  # the other user may not even look into it
    with another_run(2, user="65534") as theirs, another_run(1) as ours:
        assert (theirs, ours) == ([100, 101], [102])


@pytest.mark.slow
def test_a_fork_keeps_no_claim() -> None:
    cpus, claims = chosen(1)
    assert cpus == [100]
    with waiting_fork():
        claims.close()
        with another_run(1) as other:
            assert other == [100]


def test_a_cpu_that_is_not_needed_is_not_claimed_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(cpu_claims, "_is_ours", lambda cpu: tried.append(cpu) or True)  # type: ignore[func-returns-value]
    _, claims = chosen(2)
    assert set(tried) == {100, 101}
    claims.close()
