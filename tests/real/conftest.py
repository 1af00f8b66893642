"""Real environments: what the tests share travels to the workers by value, as a script's own classes do."""

from __future__ import annotations

import cloudpickle

from ..envs import space_strategies
from . import comparing, environments, reference

for module in (comparing, environments, reference, space_strategies):
    cloudpickle.register_pickle_by_value(module)
