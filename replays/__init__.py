"""Storage for off-policy learners: a ring of the newest steps, drawn uniformly, by priority, or as sequences."""

from penstock.replays.batches import ReplayBatch, SequenceBatch
from penstock.replays.estimate import Estimate
from penstock.replays.options import Frames, Prioritized, Sequences
from penstock.replays.ratio import Ratio
from penstock.replays.replay import Replay

__all__ = ["Estimate", "Frames", "Prioritized", "Ratio", "Replay", "ReplayBatch", "SequenceBatch", "Sequences"]
