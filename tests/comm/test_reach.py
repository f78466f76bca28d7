"""Hosts that do not reach each other are named before gloo tries to connect their ranks."""

from __future__ import annotations

import json
import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import Place, gloo_address, reach, read_place, refusals
from support.pool import Pool

from stagewright.comm import PeerLost, join_world


def test_refusals_are_told_apart_from_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        targets = {"open": server.getsockname(), "closed": bound.getsockname()}
        assert refusals(targets, seconds=5.0) == {"closed": "Connection refused"}
        with mock.patch("selectors.DefaultSelector.select", return_value=[]):
            silent = refusals({"a": server.getsockname()}, seconds=0.01)
    assert silent == {"a": "no answer within 0.01 s"}


def test_who_is_not_reached_and_what_to_do() -> None:
    first = {"a": Place(host="a", address="10.0.0.1"), "b": Place(host="b", address="127.0.1.1")}
    assert reach._story(first, {"a": {"b": "Connection refused"}, "b": {}}) == (
        "a does not reach b at 127.0.1.1 (Connection refused): expected the address of a network that all hosts share "
        "(its interface: type GLOO_SOCKET_IFNAME=eth0 before the command), and that nothing, such as "
        "a firewall, blocks it: gloo connects to any free TCP port"
    )
    assert reach._story(first, {"a": {}, "b": {}}) == ""


def test_the_address_is_the_interfaces_or_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert gloo_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=nothing0: no network interface of .*: expected one of"):
        gloo_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0)) for at in ("192.0.2.1", "127.0.0.5")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert gloo_address() == "127.0.0.5"  # the first is no address of this host
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror))
    assert gloo_address() == "127.0.0.1"


def test_a_place_is_told() -> None:
    found = Place(socket.gethostname(), gloo_address())
    assert read_place(json.dumps(found)) == found
    with pytest.raises(ValueError, match="at the rendezvous is no place of a rank"):
        read_place("{}")


def join_as_two_hosts() -> list[str]:
    """Each rank's answers where the second host's address leads elsewhere, and then where it does not."""
    device, rank = torch.device("cpu"), int(os.environ["RANK"])

    def elsewhere(_: str, *, backlog: int) -> socket.socket:
        return socket.create_server(("127.0.0.2", 0))

    named = mock.patch("socket.gethostname", return_value="ab"[rank])
    wrong = mock.patch.object(reach, "_server", side_effect=elsewhere if rank else reach._server)
    with named, wrong, pytest.raises(PeerLost) as error:
        join_world(device=device, timeout=120.0)
    with named:
        world = join_world(device=device, timeout=120.0)
    dist.destroy_process_group()
    return [str(error.value), str(world.size)]


@pytest.mark.gloo
def test_all_ranks_name_the_hosts_that_are_not_reached(gloo: Pool) -> None:
    for rank, (story, size) in enumerate(gloo.run(join_as_two_hosts, ranks=2, group=False)):
        begins = f"rank {rank} of 2 cannot be connected with all others: a does not reach b at 127.0.0.1 (Connection re"
        assert story.startswith(begins)
        assert "b does not reach a" not in story
        assert size == "2"
