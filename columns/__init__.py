"""One worker's environments of any kind, stepped: single ones, batched ones, and seats in lock-step or in turns."""

from penstock.columns.interface import EnvBatch
from penstock.columns.single_columns import EnvColumns

__all__ = ["EnvBatch", "EnvColumns"]
