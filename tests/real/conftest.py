"""Real environments. Modules that the tests share are pickled by value for the workers, like a script's classes."""

from __future__ import annotations

import cloudpickle

from ..envs import space_strategies
from . import environments

for module in (environments, space_strategies):
    cloudpickle.register_pickle_by_value(module)
