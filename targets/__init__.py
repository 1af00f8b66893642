"""Advantages and returns `[T, B]`, from which policies and values learn. They are right at all ends of episodes."""

from penstock.targets.off_policy import vtrace
from penstock.targets.returns import gae, lambda_return, n_step_return
from penstock.targets.steps import Steps

__all__ = ["Steps", "gae", "lambda_return", "n_step_return", "vtrace"]
