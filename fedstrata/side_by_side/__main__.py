"""A worker process, which :mod:`fedstrata.side_by_side.workers` starts with the processors that it may run on."""

import os
import sys

if __name__ == "__main__":
    # Before PyTorch is loaded: who has started this process may be bound to one processor, and what it binds inherits.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(number) for number in sys.argv[1].split(",")])
    from fedstrata.side_by_side.worker import work

    work()
    os._exit(0)  # everything is written and told, and to take PyTorch down takes longer than a short run
