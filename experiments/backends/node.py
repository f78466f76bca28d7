"""The starter of a node, `python -P -m stagewright.experiments.backends.node`: runs the preflight, then torchrun.

    stdin    one line with the order; then empty lines as signs of life: when it closes, or over a network is silent,
             the sender of the order is gone
    stdout   events, a JSON object per line: up (with this node's facts), reached (facts of all nodes), line, failed
    stderr   output of agents and ranks, one stream

torchrun's agent starts each rank in its own session, so that killing the agent or its group leaves ranks running.
Therefore the starter adopts orphans among its descendants (PR_SET_CHILD_SUBREAPER) and, after any ending, kills all
that remain. Its exit status is the agent's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...cli.processes import Supervision, die_with_parent, exit_with_stdin
from .facts import NodeFacts
from .preflight import Meeting, PreflightError, meet
from .records import Nodes, Shape, Work
from .torchrun import torchrun_words

STARTER = (sys.executable, "-P", "-m", "stagewright.experiments.backends.node")
TOKEN = ".token"  # a file in the work's folder, by which a node checks that all share the folder
TIMED_OUT = 124  # exit status of a run, as of timeout(1)
UNAVAILABLE = 69  # exit status if the nodes cannot work together (EX_UNAVAILABLE of sysexits.h)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LIBC = ctypes.CDLL(None)
_ASKED = 3.0  # [s] between asking processes to end and killing them
_KILLED = 5.0  # [s] for killed processes to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Task of a node."""

    work: Work
    nodes: Nodes
    meeting: Meeting
    folder: str  # working folder
    interface: str = ""  # for gloo; empty: the one through which this node reaches node 0
    silence: float = 0.0  # longest time between signs of life [s]; 0: none are expected

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Order:
        read = json.loads(line)
        work, nodes, meeting = (read.pop(name) for name in ("work", "nodes", "meeting"))
        shape = Shape(**nodes["shape"] | {"sites": tuple(nodes["shape"]["sites"])})
        return cls(
            work=Work(**work | {"arguments": tuple(work["arguments"]), "folder": Path(work["folder"])}),
            nodes=Nodes(**nodes | {"shape": shape}),
            meeting=Meeting(**meeting | {"names": tuple(meeting["names"])}),
            **read,
        )


def main() -> int:
    facts = NodeFacts.here()
    _say("up", facts=facts.to_json())
    line = sys.stdin.buffer.readline()
    if not line:
        return 128 + signal.SIGHUP
    order = Order.from_json(line.decode())
    exit_with_stdin(lambda: os.kill(os.getpid(), signal.SIGHUP), silence=order.silence)
    try:
        words = _prepared(order, facts)
    except PreflightError as error:
        _say("failed", report=str(error))
        return UNAVAILABLE
    wake = _wake_on_signals()  # until here each of them ends this process
    _say("line", words=words)
    try:
        return _run(words, order, wake)
    finally:
        _end_descendants()


def _prepared(order: Order, facts: NodeFacts) -> tuple[str, ...]:
    met = meet(order.meeting, facts, _own_problem(order, facts))
    if met.nodes:
        _say("reached", nodes=[asdict(node) for node in met.nodes])
    return torchrun_words(
        order.work,
        order.nodes,
        node_rank=order.meeting.node_rank,
        master_address=order.meeting.address,
        master_port=order.meeting.port,
        interface=order.interface or facts.interface_of(met.local_address),
    )


def _own_problem(order: Order, facts: NodeFacts) -> str:
    found = []
    if order.interface and order.interface not in facts.interfaces:
        found.append(f"no network interface {order.interface!r}: expected one of {', '.join(sorted(facts.interfaces))}")
    if not os.path.isdir(order.folder):
        found.append(f"no folder {order.folder!r} to work in")
    folder = order.work.folder
    with suppress(OSError):
        if (folder / TOKEN).read_text() != order.meeting.token or not os.access(folder, os.W_OK):
            raise FileNotFoundError
        return "; ".join(found)
    found.append(f"the folder {str(folder)!r} is not here, or not to be written: expected one that all nodes share")
    return "; ".join(found)


def _run(words: tuple[str, ...], order: Order, wake: int) -> int:
    agent = subprocess.Popen(
        words,
        env={**os.environ, **order.work.environment},
        cwd=order.folder,
        stdin=subprocess.DEVNULL,
        stdout=2,  # this process's own stderr
        stderr=2,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - one system call, and the other thread only reads
    )
    while agent.poll() is None:
        for number in os.read(wake, 512):
            if number != signal.SIGCHLD:
                return 128 + number
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def _wake_on_signals() -> int:
    """A descriptor to read the numbers of signals from: those that end this process, and SIGCHLD."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _LIBC.prctl(_SUBREAPER, 1)
    return reading


def _end_descendants() -> None:
    for number, patience in ((signal.SIGTERM, _ASKED), (signal.SIGKILL, _KILLED)):
        asked: set[int] = set()
        for _ in Supervision(patience):
            if not (left := descendants(os.getpid())):
                return
            for process in left - asked:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            asked |= left
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def descendants(process: int) -> set[int]:
    """All descendants of a process, by /proc, including zombies."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {process}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def _say(event: str, **values: Any) -> None:
    with suppress(OSError):  # no reader is left, which stdin shows, too
        print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
