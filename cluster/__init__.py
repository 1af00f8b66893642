"""Many machines: `RaySampler` runs samplers on the machines of a Ray cluster. `pip install ".[cluster]"` installs Ray.

Everything is imported on first use: `import penstock.cluster` does not import ray. Distributed experiments are in
`penstock.control`.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cluster.ray_sampler import RaySampler, RayStats, ShardStats
    from penstock.cluster.stream import Piece

__all__ = ["Piece", "RaySampler", "RayStats", "ShardStats"]

_OLD_NAMES = {"InferenceServer": "InferenceInbox", "Metrics": "MetricsSink"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        # Older names, which go in version 0.3. By name, since control/ stands above this room.
        control = import_module("penstock.control")
        new = _OLD_NAMES.get(name, name)
        if new in control.__all__:
            warnings.warn(f"penstock.cluster.{name} is now penstock.control.{new}", DeprecationWarning, stacklevel=2)
            return getattr(control, new)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is None:
        raise ImportError(f'penstock.cluster.{name} needs ray, which is not installed: pip install ".[cluster]"')
    return getattr(import_module(f"penstock.cluster.{'stream' if name == 'Piece' else 'ray_sampler'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
