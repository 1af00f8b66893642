"""Signals processes at the moments that it reads: delay, signal, root, nth, and the process ids, in each line.

With `nth`, the ids are those that are known, and the nth new descendant of `root` is signalled.
"""

import os
import sys
import time

import psutil


def newborn(root: int, nth: int, known: set[int]) -> int:
    while True:
        found = {child.pid for child in psutil.Process(root).children(recursive=True)} - known
        if len(found) >= nth:
            return sorted(found)[nth - 1]


for line in sys.stdin:
    delay, sig, root, nth, *ids = map(float, line.split())
    pids = list(map(int, ids))
    if nth:
        pids = [newborn(int(root), int(nth), set(pids) | {os.getpid()})]
    time.sleep(delay)
    print(time.monotonic(), *pids, flush=True)
    for pid in pids:
        try:
            os.kill(pid, int(sig))
        except ProcessLookupError:
            pass
