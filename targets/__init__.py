"""What policies and values learn from: advantages and returns `[T, B]`, right at every end of an episode."""

from penstock.targets.off_policy import vtrace
from penstock.targets.returns import gae, lambda_return, n_step_return
from penstock.targets.steps import Steps

__all__ = ["Steps", "gae", "lambda_return", "n_step_return", "vtrace"]
