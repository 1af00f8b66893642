"""What the tests of `EnvProcess` share: environments there and here, walks through both, and old Pythons."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.games import EnvProcess, NotSent

from ..support import PROGRAMS

sys.path.append(str(PROGRAMS))
import own_envs

ROOT = Path(__file__).parent.parent.parent
#: Versions of Python, and the gym that `.ci/old_gyms` installs for each.
OLD = {"3.7": "0.21.0", "3.8": "0.25.2", "3.9": "0.26.2"}
ANYTHING = (NotSent, object)


def own(name: str, **options: Any) -> EnvProcess:
    """The environment of this name, in a process."""
    return EnvProcess(f"own_envs:{name}", path=[PROGRAMS], **options)


def here(name: str, **kwargs: Any) -> Any:
    """The same in place."""
    return getattr(own_envs, name)(**kwargs)


@cache
def old_python(version: str) -> str:
    """An interpreter of this version with its gym. Skips the test, with the reason, if there is none."""
    python = ROOT / ".venv" / "old_gyms" / version / "bin" / "python"
    code = "import gym, sys; print('%d.%d' % sys.version_info[:2], gym.__version__)"
    wanted = f"{version} {OLD[version]}"
    if not python.exists() or subprocess.check_output([python, "-c", code], text=True).strip() != wanted:
        pytest.skip(f"Python {version} with gym {OLD[version]} is not here: .ci/old_gyms installs it")
    return str(python)


def walk(env: Any, actions: Iterable[Any], seed: int | None = 5, options: Any = None) -> list[Any]:
    """All that an environment returns. It is reset at the end of each episode, and closed."""
    found = [env.reset(seed=seed, options=options)]
    for action in actions:
        found.append(env.step(action))
        if found[-1][2] or found[-1][3]:
            found.append(env.reset())
    env.close()
    return found


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    """Bit for bit, and type for type. An object that cannot be sent is a `NotSent`."""
    if type(wanted) is object:
        assert isinstance(found, NotSent), where
        assert repr(found) == "<NotSent: builtins.object>"
        return
    assert type(found) is type(wanted), (where, found, wanted)
    if isinstance(wanted, dict):
        assert_equal(list(found), list(wanted), f"{where}, keys")
        for key, value in wanted.items():
            assert_equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for i, value in enumerate(wanted):
            assert_equal(found[i], value, f"{where}[{i}]")
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert found.tobytes() == wanted.tobytes(), where
    else:
        assert repr(found) == repr(wanted), where
