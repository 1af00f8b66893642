"""Evaluation: the same episodes for every policy, in parallel, and figures that can be trusted."""

from penstock.evaluation.background import RunningEvaluation, start_evaluation
from penstock.evaluation.eval_results import EpisodeResult, EvalResults
from penstock.evaluation.evaluating import evaluate
from penstock.evaluation.intervals import Interval
from penstock.evaluation.policies import Policy, SelectsActions

__all__ = [
    "EpisodeResult",
    "EvalResults",
    "Interval",
    "Policy",
    "RunningEvaluation",
    "SelectsActions",
    "evaluate",
    "start_evaluation",
]
