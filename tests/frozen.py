"""Imported last by a server that forks: what it holds is in no collection of its processes.

The first one, just after a fork, took half a second, and wrote to 120 MB that they shared.
"""

import gc

gc.collect()
gc.freeze()
