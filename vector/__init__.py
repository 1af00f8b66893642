"""ShmVectorEnv: a Gymnasium vector environment on the same worker pool as the samplers."""

from penstock.vector.env import ShmVectorEnv
from penstock.vector.tiling import tile

__all__ = ["ShmVectorEnv", "tile"]
