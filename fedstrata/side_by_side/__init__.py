"""Several runs at a time on one device, each as if it were alone.

A run of few clients leaves most of a device idle. So some worker processes (``worker.py``) share a list of runs, each
taking the next one when it is done with its last; who has started them (``workers.py``) shows how far they have come.

**The same bytes as one after another.** In single precision the last bits depend on the engine, on how many clients are
trained at once and on the number of threads: on the plan of a run. So a run is planned as if it were alone: where that
takes a measurement, it is made before the first worker starts, and the number of threads stays what it was. Workers do
not bind threads to cores, and their threads sleep while they wait instead of spinning: so more threads than cores cost
little. Nor does memory change a plan: a run whose clients do not fit beside those of the others waits for these.

**What travels** between processes is JSON, one message a line; nothing is pickled. Experiments are text, results are
read from the folders of the runs. Python objects cannot travel (``travelling.py``).

**Ends.** A worker stops after its round, with a checkpoint, when it is told to, and when nobody is there any more to
tell it anything.
"""
