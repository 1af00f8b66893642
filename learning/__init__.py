"""What a learner needs: advantages and returns that are right at all ends of episodes, and storage for off-policy data.

A `Replay` is a ring of the newest steps, drawn uniformly, by priority, or as sequences.
"""

from penstock.learning.contents import Contents
from penstock.learning.feed import Ratio
from penstock.learning.options import Frames, Prioritized, Sequences
from penstock.learning.replay import Replay
from penstock.learning.replay_batches import ReplayBatch, SequenceBatch
from penstock.learning.returns import gae, lambda_return, n_step_return, vtrace
from penstock.learning.ring import Estimate
from penstock.learning.steps import Steps
from penstock.learning.whole_episodes import WholeEpisode, WholeEpisodes

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
    "Steps",
    "WholeEpisode",
    "WholeEpisodes",
    "gae",
    "lambda_return",
    "n_step_return",
    "vtrace",
]
