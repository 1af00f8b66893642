"""`Agent.save` and `Agent.load`: one file with the state of an agent, which torch reads without running code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError

_NUMPY = "numpy array"  # marks a tensor that was an array


def save(path: str | os.PathLike[str], state: Mapping[str, Any], agent: str) -> None:
    """Write `state`, and the class name `agent`. If the process is killed meanwhile, the old file stays."""
    import torch

    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save({"agent": agent, "state": _packed(state)}, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], agent: str) -> Any:
    """The state in the file. Raises `ConfigError` if another class of agent, or something else, has written it."""
    import torch

    foreign = f"{os.fspath(path)} was not written by agent.save: "
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise  # the file is missing, or cannot be read
    except Exception as error:  # torch raises many kinds for a file that it has not written
        raise ConfigError(f"{foreign}torch cannot read it ({type(error).__name__})") from error
    if not (isinstance(saved, dict) and saved.keys() == {"agent", "state"}):
        raise ConfigError(f"{foreign}load it yourself, with load_state_dict")
    if saved["agent"] != agent:
        raise ConfigError(f"{os.fspath(path)} has the state of a {saved['agent']}, this agent is a {agent}")
    return _unpacked(saved["state"])


def _packed(value: object) -> Any:
    if isinstance(value, np.ndarray):
        import torch

        return {_NUMPY: torch.from_numpy(np.ascontiguousarray(value)), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {key: _packed(part) for key, part in value.items()}
    return [_packed(part) for part in value] if isinstance(value, list) else value


def _unpacked(value: object) -> Any:
    if isinstance(value, dict):
        if _NUMPY in value:
            return value[_NUMPY].numpy().reshape(value["shape"])
        return {key: _unpacked(part) for key, part in value.items()}
    return [_unpacked(part) for part in value] if isinstance(value, list) else value
