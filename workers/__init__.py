"""Worker processes: a pool of workers that run commands between two gates. Nothing here imports Gymnasium or an agent.

Read in this order: `control.py` (the shared words), `gates.py` (barrier_in and barrier_out), `process.py` (the loop of
a worker), `pool.py` and `monitor.py` (what the main process does).
"""
