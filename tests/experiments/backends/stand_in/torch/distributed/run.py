"""Stands in for torchrun where a test is about what surrounds it: the same options, no torch.

As torchrun does, it puts each rank into a session of its own, reads words as templates, and ends with its ranks.
"""

import os
import signal
import string
import subprocess
import sys
import time

options, words = {}, sys.argv[1:]
while words:
    name = words.pop(0)
    options[name] = words.pop(0)
    if name == "--module":
        break
words = [string.Template(word).safe_substitute(local_rank="0") for word in words]
count, node = int(options["--nproc-per-node"]), int(options["--node-rank"])
ranks = []
for local in range(count):
    variables = {
        "RANK": str(node * count + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(int(options["--nnodes"]) * count),
        "MASTER_ADDR": options["--master-addr"],
        "MASTER_PORT": options["--master-port"],
    }
    command = [sys.executable, "-u", "-m", options["--module"], *words]
    ranks.append(subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True))
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.02)
for rank in ranks:
    rank.terminate()
sys.exit(int(any(rank.wait() for rank in ranks)))
