"""The worker's side of `pool.py`: one process, one rank of every case that it is given."""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from .hangs import write_stacks_when_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A case for one rank. `payload` is the pickled (args, kwargs)."""

    case: int
    module: str
    file: str
    function: str
    payload: bytes
    rank: int
    ranks: int
    timeout: float
    group: bool
    master_port: int
    filters: tuple[str, ...]
    test: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The outcome of a case on one rank: kind is ok, error, died or hung; text a traceback or log tail."""

    kind: str
    value: Any = None
    text: str = ""


def leave_out_what_few_look_at() -> None:
    """No first batch is verified unless a test asks for it: most do not look at it, and it takes two steps. A process
    measures once what the runtime takes of a step, not for each schedule="auto": it runs 61 batches for that."""
    from stagewright.pipe import PipelineModule
    from support.inside import auto

    auto.measure_runtime_seconds = cache(auto.measure_runtime_seconds)

    defaults = PipelineModule.__init__.__kwdefaults__
    assert defaults is not None
    defaults["verify"] = False


def _leave_at_the_end(connection: Connection) -> None:
    """Waits until the other side is gone, which may have been killed while this process is in a case."""
    end = select.poll()
    end.register(connection.fileno(), 0)
    end.poll()
    os._exit(0)


def serve(connection: Connection, log: str, store_port: int) -> None:
    threading.Thread(target=_leave_at_the_end, args=(connection,), daemon=True).start()
    output = open(log, "w", buffering=1)  # noqa: SIM115  (lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(output)
    write_stacks_when_asked(output)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist
    from tiers.recorder import recording

    torch.set_num_threads(1)
    leave_out_what_few_look_at()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    gc.freeze()  # what is loaded stays: to look through it for cycles after each case takes 0.2 s of a core
    connection.send_bytes(b"ready")
    while True:
        try:
            order: Order = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        output.write(f"case {order.case}, rank {order.rank} of {order.ranks}: {order.function}\n")
        try:
            with recording(order.test):
                value = _run(order, dist.PrefixStore(f"case{order.case}", store))
            answer = pickle.dumps(Reply(kind="ok", value=value))
        except BaseException:  # whatever a case raises is its result
            answer = pickle.dumps(Reply(kind="error", text=traceback.format_exc()))
        gc.collect()
        connection.send_bytes(answer)


def _run(order: Order, store: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)  # ranks begin alike, as in processes of their own, whatever they drew in cases before
    os.environ |= torchrun_environment(rank=order.rank, num_ranks=order.ranks, port=order.master_port)
    function = _find(order)
    args, kwargs = pickle.loads(order.payload)
    if order.group:
        dist.init_process_group(
            "gloo", store=store, rank=order.rank, world_size=order.ranks, timeout=timedelta(seconds=order.timeout)
        )
        # A case may end at once: nobody leaves while another one still connects.
        store.set(f"connected {order.rank}", b"")
        store.wait([f"connected {rank}" for rank in range(order.ranks)], timedelta(seconds=order.timeout))
    with _warning_filters(order.filters):
        value = function(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def torchrun_environment(*, rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Variables that torchrun sets, and on Linux the interface of this host alone."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return variables | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def _find(order: Order) -> Any:
    """The function by its module's name, or by its file: a worker can't import test modules by name."""
    if order.module.startswith("support."):
        module = importlib.import_module(order.module)
    elif order.module in sys.modules:
        module = sys.modules[order.module]
    else:
        spec = importlib.util.spec_from_file_location(order.module, order.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Pickling what is defined there imports the packages above it, which no path leads to.
        *above, _ = order.module.split(".")
        for depth in range(1, len(above) + 1):
            package = ".".join(above[:depth])
            sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[order.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in order.function.split("."):
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def _warning_filters(filters: tuple[str, ...]) -> Iterator[None]:
    """Sets pytest's `filterwarnings` lines: action[:message[:category]], the last one that fits wins."""
    with warnings.catch_warnings():
        for line in filters:
            action, message, category = (*line.split(":"), "", "")[:3]
            module, _, name = category.rpartition(".")
            kind = getattr(importlib.import_module(module or "builtins"), name) if name else Warning
            warnings.filterwarnings(action, message=message.strip(), category=kind)  # type: ignore[arg-type]
        yield
