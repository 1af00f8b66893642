"""ShmVectorEnv: a Gymnasium vector environment on the same worker pool as the samplers."""

from typing import TYPE_CHECKING, Any

from penstock.vector.env import ShmVectorEnv, tile
from penstock.vector.making import concat_vec_envs, make_vec

if TYPE_CHECKING:
    from penstock.vector.sb3 import Sb3VecEnv

__all__ = ["Sb3VecEnv", "ShmVectorEnv", "concat_vec_envs", "make_vec", "tile"]


def __getattr__(name: str) -> Any:
    if name != "Sb3VecEnv":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stable-Baselines3 is imported on first use: it needs torch, and may not be installed.
    try:
        from penstock.vector.sb3 import Sb3VecEnv
    except ImportError as error:
        raise ImportError(f"Sb3VecEnv needs Stable-Baselines3: pip install '.[sb3]' ({error})") from error
    return Sb3VecEnv
