"""Worker processes, whatever they work on: started, let through gates, watched, replaced, ended. To see the
protocol, read in this order: `gates`, `process` (the worker's loop), `work` (what it is given to do), `crew` and
`supervision` (the main process's side)."""
