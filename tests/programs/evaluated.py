"""Evaluates into the folder that it is told, until it is killed."""

import sys
from pathlib import Path

from penstock import evaluate

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.evaluation.reach import TASKS, Reach, vla

if __name__ == "__main__":
    folder, episodes = sys.argv[1:]
    evaluate(vla, Reach, success="is_success", episodes=int(episodes), tasks=TASKS, n_workers=2, folder=folder)
