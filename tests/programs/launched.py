"""What a process does that a `LaunchedProcess` has started."""

import sys

from penstock.workers.child import run_child

run_child(int(sys.argv[1]))
