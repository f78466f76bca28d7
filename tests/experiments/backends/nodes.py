"""Work of small Python programs for the tests of back ends, without torch unless said so, and what is left of it."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.inside import RecordsWork as Work

WITHIN = 200.0  # [s] guards against hangs alone: what is waited for comes sooner or later
STAND_IN = Path(__file__).parent / "stand_in"  # torchrun without torch

HOSTILE = ("a b", "it's", '"', "$HOME", "$$", "${local_rank}", ";", "`id`", "--", "-x", "", "*", "\\", "\n", "ü", "~")

TELL = r"""
import json, os, sys
from pathlib import Path
names = ("WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "SECRET")
told = {name: os.environ.get(name) for name in names} | {"words": sys.argv[2:], "folder": os.getcwd()}
Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
sys.stdout.write(f"rank {os.environ['RANK']} was here\n")  # at once: torchrun lets ranks write without buffers
"""

SLEEP = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(120)
"""

FAIL = (  # on rank 1, once rank 0 has written down its process
    """
import os, sys, time
from pathlib import Path
other = Path(sys.argv[1], "pid0")
while os.environ["RANK"] == "1":
    if other.exists() and other.read_text():
        raise SystemExit("no luck")
    time.sleep(0.02)
"""
    + SLEEP
)

SUM = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
Path(sys.argv[1], f"sum{dist.get_rank()}").write_text(f"{total.item()} on {os.environ.get('SLURMD_NODENAME')}")
dist.destroy_process_group()
"""


def work(folder: Path, program: str, *arguments: str, torch: bool = False, **other: Any) -> Work:
    """A program that finds `folder` as its first word."""
    (folder / "program.py").write_text(program)
    path = str(folder) if torch else f"{STAND_IN}{os.pathsep}{folder}"
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **other.pop("environment", {})}
    return Work(module="program", arguments=(str(folder), *arguments), folder=folder, environment=environment, **other)


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of loopback that nobody can have meanwhile, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def processes(folder: Path, count: int, *, within: float = WITHIN) -> list[int]:
    """Process ids that ranks of SLEEP wrote down, by rank, once there are `count`."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        texts = [path.read_text() for path in sorted(folder.glob("pid*"))]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"{count} ranks did not start within {within} s: {list(folder.iterdir())}")


def written(folder: Path) -> list[int]:
    """Process ids that ranks of SLEEP have written down so far."""
    return [int(text) for path in folder.glob("pid*") if (text := path.read_text())]


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def network_of(process: int) -> int:
    """Its network namespace; 0 of none."""
    try:
        return os.stat(f"/proc/{process}/ns/net").st_ino
    except OSError:
        return 0


def processes_in(inode: int) -> list[str]:
    return [path.name for path in Path("/proc").glob("[0-9]*") if network_of(int(path.name)) == inode]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def gone(ids: list[int], *, within: float = WITHIN) -> bool:
    """Whether all of these processes end within the time."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(lives(process) for process in ids):
            return True
        time.sleep(0.02)
    return False


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
