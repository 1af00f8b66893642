"""Signals processes at the moments that it reads: delay, signal, root, nth, and the process ids, in each line.

With `nth`, the ids are those that are known, and the nth new descendant of `root` is signalled.
"""

import os
import sys
import time


def parents() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                pass
    return found


def newborn(root: int, nth: int, known: set[int]) -> int:
    while True:
        tree, found = parents(), []
        for pid, start in tree.items():
            parent = start
            while parent != root and parent in tree:
                parent = tree[parent]
            if parent == root and pid not in known:
                found.append(pid)
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
