"""Batches, trajectories and evaluations stay the same from version to version, unless CHANGELOG says otherwise.

`PENSTOCK_FAULTS=full PENSTOCK_DIGESTS=write pytest -n 0 tests/samplers/test_digests.py` writes the file again. Daily,
each sampler has one of the two shapes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ..scale import pairs
from .digest_cases import SHAPES, digest_of_vector, digests_of_sampler, sampler_cases, vector_cases

FILE = Path(__file__).with_name("digests.json")


def compare(name: str, found: Any) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("PENSTOCK_DIGESTS") == "write":
        known[name] = found
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert found == known[name]


@pytest.mark.filterwarnings("ignore:.*eval_max_steps.*:RuntimeWarning")
@pytest.mark.parametrize(("case", "shape"), pairs(sampler_cases(), SHAPES), ids=lambda each: str(each[0]))
def test_a_sampler_collects_what_it_always_did(case: Any, shape: tuple[int, int]) -> None:
    compare(f"{case[0]}, {list(shape)}", digests_of_sampler(case, shape))


@pytest.mark.parametrize("case", list(vector_cases()), ids=lambda case: case[0])
def test_a_vector_environment_returns_what_it_always_did(case: Any) -> None:
    compare(case[0], digest_of_vector(case))
