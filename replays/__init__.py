"""Storage for off-policy learners: a ring of the newest steps, drawn uniformly, by priority, or as sequences."""

from penstock.replays.contents import Contents
from penstock.replays.estimate import Estimate
from penstock.replays.options import Frames, Prioritized, Sequences
from penstock.replays.ratio import Ratio
from penstock.replays.replay import Replay
from penstock.replays.replay_batches import ReplayBatch, SequenceBatch

__all__ = [
    "Contents",
    "Estimate",
    "Frames",
    "Prioritized",
    "Ratio",
    "Replay",
    "ReplayBatch",
    "SequenceBatch",
    "Sequences",
]
