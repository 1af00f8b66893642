"""For the command line, and `tune`: what this machine offers, what slows samplers down on it, and the best sampler for
an environment. No sampler needs this room."""

from penstock.tools.tuning import TuneReport, TuneRow, tune

__all__ = ["TuneReport", "TuneRow", "tune"]
