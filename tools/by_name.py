"""What the command line names as `MODULE:NAME`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from penstock.errors import ConfigError


def search_here() -> None:
    """Modules of the current folder can be imported, as with `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def load_named(text: str) -> Any:
    """What `MODULE:NAME` names, where the module may be a file `MODULE.py` of this folder. Of `MODULE:ID-v0`, the
    module is imported, to register its environments, and the id is returned. Other texts are returned as they are.

    Raises `ConfigError` for what cannot be imported.
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    search_here()
    try:
        found = import_module(module.removesuffix(".py"))
        return getattr(found, name) if name.isidentifier() else name
    except (ImportError, AttributeError, ValueError) as error:  # the last for an empty name
        raise ConfigError(
            f"cannot load {text}: {error}. Give MODULE:NAME, where MODULE can be imported from this folder"
        ) from error
