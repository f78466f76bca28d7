"""Starts the starters of all nodes and supervises them to any ending: the common part of back ends that have nodes.

run_nodes <-- stdout: events: up, reached, line, failed   starter of node i (here, in a namespace, over ssh)
          --- stdin: the order once all are up, then held open -->
          <-- stderr: output of agents and ranks ---> folder/nodeI.log, and `say` line by line
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ... import __version__
from ...cli.launcher import sigterm_as_interrupt
from ...cli.processes import Process, Supervision, all_ended, let_go
from .facts import NodeFacts, code_digest, differences
from .node import TIMED_OUT, TOKEN, UNAVAILABLE, Order
from .preflight import Meeting
from .records import Nodes, Outcome, Work

Say = Callable[[str], None]

_GRACE = 10.0  # [s] from the first failure to the end of the other nodes, for their errors
_SAME = 0.5  # [s] the same before ranks run: all nodes report the same verdict
_SLACK = 15.0  # [s] for a node to report its preflight
_SIGNS = 5  # signs of life per NodeStart.silence
_LET_GO = 10.0  # [s] for a starter to end its ranks after its stdin closes
_SHOWN = 15  # of them in the report of a failed node
_FEW = 3  # of a node that never came up
_AGENT = re.compile(
    r"elastic/multiprocessing/api\.py:\d+\] (failed .*?)( of binary.*)?$"
)  # what follows is its own stack


def failure(name: str, status: int | None, log: Path, lines: Sequence[str]) -> str:
    """Report of a failed node with its last lines: those of its ranks, and the agent's summary."""
    kept: list[str] = []
    for line in lines:
        found = _AGENT.search(line)
        kept.append(found[1] if found else line)
        if found:  # what follows is the agent's own stack
            break
    shown = "".join(f"\n  {line}" for line in kept[-_SHOWN:]) or " none"
    return f"{name}: failed (exit status {status}); all it said is in {log}, its last lines:{shown}"


def to_stderr(line: str) -> None:
    """Print a line on stderr, the default of `say`: stdout may hold JSON."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """Command that starts a node's starter."""

    name: str  # as shown: "node 1 (host b)"
    command: tuple[str, ...]  # runs the starter there, such as `STARTER` with a prefix
    interface: str = ""  # for gloo; empty: the one through which the node reaches node 0
    # without signs of life for so long the node ends its ranks [s]; 0: it relies on the end of its stdin, which a
    # failed network does not show
    silence: float = 0.0
    hint: str = ""  # what to type if it does not start


def run_nodes(
    starts: Sequence[NodeStart], work: Work, nodes: Nodes, *, address: str, port: int = 0, say: Say = to_stderr
) -> Outcome:
    """Run the work on all nodes; returns when all have ended and nothing of them is left.

    Arguments:
        starts: by node rank.
        address, port: of node 0, for the preflight; port 0: one that is free there.
        say: prints lines: the torchrun line of each node, and the nodes' output.

    Ctrl-C and SIGTERM end all nodes and raise KeyboardInterrupt.
    """
    work = work.begun()
    work.folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    (work.folder / TOKEN).write_text(token)
    running: list[_Running] = []
    with sigterm_as_interrupt():
        try:
            for rank, start in enumerate(starts):
                running.append(_Running.of(start, work.folder / f"node{rank}.log", say))
            if failure := _gather(running, work):
                return failure
            names = tuple(start.name for start in starts)
            assert running[0].facts is not None
            port = port or running[0].facts.free_port
            for rank, (start, node) in enumerate(zip(starts, running, strict=True)):
                meeting = Meeting(
                    node_rank=rank, names=names, address=address, port=port, limit=work.join_timeout, token=token
                )
                order = Order(
                    work=work,
                    nodes=nodes,
                    meeting=meeting,
                    folder=os.getcwd(),
                    interface=start.interface,
                    silence=start.silence,
                )
                node.tell(order.to_json())
            return _see_through(running, work)
        finally:
            _end(running)
            (work.folder / TOKEN).unlink(missing_ok=True)


@dataclass(slots=True, kw_only=True, eq=False)
class _Running(Process):
    start: NodeStart
    name: str
    say: Say
    log: Path
    words: tuple[str, ...] = ()
    facts: NodeFacts | None = None
    problem: str = ""
    told_at: float = 0.0

    @classmethod
    def of(cls, start: NodeStart, log: Path, say: Say) -> _Running:
        pipe = subprocess.PIPE
        node = cls.begin(start.command, None, out=pipe, err=pipe, start=start, name=start.name, say=say, log=log)
        node.read(node.process.stdout, node._events)
        node.read(node.process.stderr, node._lines)
        return node

    def tell(self, line: str = "") -> None:
        """Send a line to the starter: the order, or a sign of life."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as its exit status shows
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        self.told_at = time.monotonic()

    def poll(self) -> bool:
        was_known = self.ended_at
        if (has_ended := super(_Running, self).poll()) and not was_known:
            self.last_lines()
        return has_ended

    def story(self) -> str:
        if self.problem:
            return self.problem
        if self.facts is None:
            return f"{self.name}: could not be started (exit status {self.status}): {self.last_words}{self.start.hint}"
        return failure(self.name, self.status, self.log, self.last_lines())

    @property
    def last_words(self) -> str:
        return "; ".join(self.last_lines()[-_FEW:]) or "without a word"

    def _events(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                event: dict[str, Any] = json.loads(line)
                kind = event["event"]
            except (ValueError, KeyError, TypeError):  # the greeting of a login shell
                self.keep(line)
                continue
            if kind == "up":
                self.facts = NodeFacts.from_json(event["facts"])
            hear(self, event)

    def _lines(self, stream: IO[bytes]) -> None:
        with self.log.open("wb") as file:
            for line in stream:
                file.write(line)
                file.flush()
                self.keep(line)
                self.say(f"{self.name}: {self.tail[-1]}")


def _gather(running: list[_Running], work: Work) -> Outcome | None:
    for _ in Supervision(work.join_timeout):
        absent = [node for node in running if node.facts is None]
        ended = [node for node in running if node.poll()]
        if not absent:
            break
        if ended:
            return _judge(running)
    wrong = [f"{node.name}: not up after {work.join_timeout:g} s ({node.last_words})" for node in absent]
    for node in running:
        if node.facts and (node.facts.stagewright, node.facts.code) != (__version__, code_digest()):
            wrong += [f"{node.name}: {told} as here" for told in differences(node.facts, NodeFacts.here())]
    return outcome(running, status=UNAVAILABLE, report="\n".join(wrong)) if wrong else None


def _see_through(running: list[_Running], work: Work) -> Outcome:
    started = time.monotonic()
    patience = 2 * work.join_timeout + _SLACK  # [s] for all to connect, and for node 0 to report missing ones
    for _ in (looks := Supervision(work.timeout)):
        if all_ended(running):
            break
        if failed_of(running):
            looks.begin_grace(_GRACE if any(node.words for node in running) else _SAME)
        now = time.monotonic()
        absent = [node for node in running if not node.words and not node.poll()]
        if absent and not looks.in_grace and now > started + patience:
            report = "\n".join(f"{node.name}: does not say after {now - started:.0f} s whom it met" for node in absent)
            return outcome(running, status=UNAVAILABLE, report=report)
        for node in running:
            if node.start.silence and now > node.told_at + node.start.silence / _SIGNS:
                node.tell()
    return late(running, work) if looks.is_late else _judge(running)


def _judge(running: list[_Running]) -> Outcome:
    failed = failed_of(running)
    if not failed:
        return outcome(running, status=0)
    stories = list(dict.fromkeys(node.problem for node in failed if node.problem)) or stories_of(failed)
    stories += [
        f"{node.name}: still ran {_GRACE:g} s later; stopped" for node in running if node.words and not node.poll()
    ]
    return outcome(running, status=failed[0].status, report="\n".join(stories))


def hear(node: Any, event: Mapping[str, Any]) -> None:
    """Store a node's event: the result of its preflight, its torchrun line, or its failure."""
    match event["event"]:
        case "reached":
            (node.log.parent / "nodes.json").write_text(json.dumps(event["nodes"], indent=1) + "\n")
        case "line":
            node.say(f"{node.name}: {shlex.join(event['words'])}")
            node.words = tuple(event["words"])
        case "failed":
            node.problem = event["report"]


def failed_of(nodes: Sequence[Any]) -> list[Any]:
    """Failed nodes in the order of failure."""
    return sorted((node for node in nodes if node.status), key=lambda node: node.ended_at)


def stories_of(failed: Sequence[Any]) -> list[str]:
    """Reports of failed nodes in the order of failure, the first one in full."""
    others = [f"{node.name}: failed after it (exit status {node.status})" for node in failed[1:]]
    return [*(node.story() for node in failed[:1]), *others]


def late(nodes: Sequence[Any], work: Work) -> Outcome:
    """Outcome of a run that the time limit ended."""
    names = ", ".join(node.name for node in nodes if node.status is None)
    report = f"{names}: not done after {work.timeout:g} s; stopped"
    return outcome(nodes, status=TIMED_OUT, timed_out=True, report=report)


def outcome(nodes: Sequence[Any], *, status: int, timed_out: bool = False, report: str = "") -> Outcome:
    """Outcome of a run; `nodes` have the `words` of their torchrun lines, empty without one."""
    commands = tuple(shlex.join(node.words) for node in nodes if node.words)
    return Outcome(status=status, timed_out=timed_out, report=report, commands=commands)


def _end(running: list[_Running]) -> None:
    for node in running:
        if node.facts is None and not node.poll():  # the starter does not read its stdin there
            node.kill(signal.SIGTERM)
    let_go(running, patience=_LET_GO)
    for node in running:
        for reader in node.readers:
            reader.join(timeout=_LET_GO)  # its stream ends with the last process that may write to it
        node.close()
