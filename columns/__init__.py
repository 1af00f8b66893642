"""One worker's environments of any kind, stepped: single ones, batched ones, and seats in lock-step or in turns."""

from penstock.columns.batched_columns import BatchedColumns
from penstock.columns.interface import BatchedEnds, Columns, End, Events, PolicyColumns, PolicyEvents, Start
from penstock.columns.single_columns import SingleColumns

__all__ = [
    "BatchedColumns",
    "BatchedEnds",
    "Columns",
    "End",
    "Events",
    "PolicyColumns",
    "PolicyEvents",
    "SingleColumns",
    "Start",
]
