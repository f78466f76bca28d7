"""Nodes meet before work starts: whoever is missing, differs or cannot be reached is named on every node."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from support.inside import (
    Meeting,
    Met,
    NodeFacts,
    PreflightError,
    code_digest,
    differences,
    free_ports,
    meet,
    preflight,
)
from support.pool import ports_of_this_worker

from .nodes import WITHIN

HOST = "127.0.0.1"
FACTS = NodeFacts(
    host="h", python="3.11.7", torch="2.13.0", stagewright="1.0", code="abc", interfaces={"lo": (HOST,)}, free_port=1
)


def meeting(node_rank: int, *, names: str = "abc", port: int, **other) -> Meeting:
    named = tuple(f"node {rank} (host {name})" for rank, name in enumerate(names))
    given = {"address": HOST, "limit": WITHIN, "token": "t", **other}
    return Meeting(node_rank=node_rank, names=named, port=port, **given)


def come(*nodes: tuple[Meeting, NodeFacts, str]) -> list[Met | str]:
    """Facts that each of the nodes comes to know, or is told."""

    def one(node: tuple[Meeting, NodeFacts, str]) -> Met | str:
        try:
            return meet(*node)
        except PreflightError as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def test_three_nodes_meet_and_node_0_knows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; clocks are compared by the round trip; a second meeting finds the port free again."""
    (port,) = free_ports(1, among=ports_of_this_worker())
    for _ in range(2):
        first, *others = come(*((meeting(rank, port=port), replace(FACTS, host=f"h{rank}"), "") for rank in (0, 2, 1)))
        assert isinstance(first, Met)
        assert [node.facts.host for node in first.nodes] == ["h0", "h1", "h2"]
        assert first.local_address == HOST
        assert others == [Met(local_address=HOST)] * 2
        for node in first.nodes[1:]:
            assert abs(node.clock_ahead) <= node.round_trip / 2 + 1e-3


def test_the_clock_of_a_node_is_ahead_by_what_it_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real, name = time.time, "late"
    monkeypatch.setattr(preflight.time, "time", lambda: real() + (threading.current_thread().name == name) * 100)
    (port,) = free_ports(1, among=ports_of_this_worker())

    def ahead() -> None:
        meet(meeting(1, names="ab", port=port), FACTS)

    thread = threading.Thread(target=ahead, name=name)
    thread.start()
    met = meet(meeting(0, names="ab", port=port), FACTS)
    thread.join()
    late = met.nodes[1]
    assert abs(late.clock_ahead - 100) <= late.round_trip / 2 + 1e-3


def test_whatever_differs_is_told_to_all_by_name() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(
        (meeting(0, port=port), FACTS, ""),
        (meeting(1, port=port), replace(FACTS, torch="2.9.0", code="other"), ""),
        (meeting(2, port=port), FACTS, "no network interface 'x'"),
    )
    assert set(told) == {
        "node 2 (host c): no network interface 'x'\n"
        "node 1 (host b): torch 2.9.0 instead of 2.13.0 as on node 0 (host a)"
    }
    assert differences(replace(FACTS, code="def"), FACTS) == [
        "other source files of stagewright 1.0 (digest def instead of abc)"
    ]


def test_a_silent_node_is_named_on_those_that_came() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(*((meeting(rank, port=port, limit=3.0), FACTS, "") for rank in (0, 1)))
    assert (
        told
        == [f"node 2 (host c): silent for 3 s, expected at {HOST}:{port} (there: node 0 (host a), node 1 (host b))"] * 2
    )


def test_a_node_that_cannot_reach_node_0_says_so() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    assert come((meeting(1, port=port, limit=0.2), FACTS, "")) == [
        f"node 1 (host b): cannot reach node 0 (host a) at {HOST}:{port}, tried for 0.2 s (Connection refused): "
        "is there a route, and does a firewall let it through?"
    ]
    (told,) = come((meeting(1, port=port, address="no-such-host.invalid", limit=1.0), FACTS, ""))
    assert "node 1 (host b): " in told
    assert "no-such-host.invalid" in told


def test_a_port_that_is_taken_is_told_by_node_0() -> None:
    with socket.create_server((HOST, 0)) as taken:
        (told,) = come((meeting(0, port=taken.getsockname()[1]), FACTS, ""))
        assert told == (
            f"node 0 (host a): cannot listen at port {taken.getsockname()[1]} (Address already in use): is another run "
            "there, or what is left of one? Type another port"
        )


def test_strangers_at_the_port_are_left_standing() -> None:
    """One of another run, one that speaks another language, one that says nothing."""
    (port,) = free_ports(1, among=ports_of_this_worker())
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, meeting(0, names="ab", port=port), FACTS)
        while not listens(port):
            assert not first.done()
        other_run = pool.submit(come, (meeting(1, names="ab", port=port, token="other", limit=2.0), FACTS, ""))
        assert "did not say that all nodes have come" in other_run.result()[0]
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"token": "t", "node_rank": 7}\n', b""):
            with socket.create_connection((HOST, port)) as stranger:
                stranger.sendall(words)
        assert not first.done()
        assert pool.submit(meet, meeting(1, names="ab", port=port), FACTS).result() == Met(local_address=HOST)
        assert len(first.result().nodes) == 2


def listens(port: int) -> bool:
    """Whether somebody listens there: a stranger that says nothing."""
    try:
        socket.create_connection((HOST, port)).close()
    except OSError:
        return False
    return True


def test_two_nodes_of_one_rank_are_told() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(
        (meeting(0, port=port, limit=5.0), FACTS, ""),
        (meeting(1, port=port, limit=5.0), FACTS, ""),
        (meeting(1, port=port, limit=5.0), replace(FACTS, host="other"), ""),
    )
    assert "node 1 (host b): connected twice, from " in told[0]


def test_facts_of_this_host_travel_and_are_read_without_torch() -> None:
    here = NodeFacts.here()
    assert HOST in here.interfaces["lo"]
    assert here.interface_of(HOST) == "lo"
    assert here.interface_of("192.0.2.1") == ""
    assert len(code_digest()) == 12
    assert NodeFacts.from_json(asdict(here)) == here
    older = {"host": "x", "interfaces": {}, "colour": "red"}
    assert NodeFacts.from_json(older).torch == "unknown"
