"""Many machines: `RaySampler` runs samplers on the machines of a Ray cluster. `pip install ".[cluster]"` installs Ray.

Everything is imported on first use: `import penstock.cluster` does not import ray. Distributed experiments are in
`penstock.control`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cluster.ray_sampler import Piece, RaySampler, RayStats, ShardStats

__all__ = ["Piece", "RaySampler", "RayStats", "ShardStats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is None:
        raise ImportError(f'penstock.cluster.{name} needs ray, which is not installed: pip install ".[cluster]"')
    return getattr(import_module("penstock.cluster.ray_sampler"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
