"""What a forked child does not inherit: the others see that a process has ended, though its children live on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.inside import keep_from_children, kept_from_children

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here")


@pytest.fixture
def three() -> Iterator[list[socket.socket]]:
    """A listening socket, one that is connected to it, and what it has accepted behind that."""
    with kept_from_children():
        listening = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listening.getsockname())
    found = [listening, ours, listening.accept()[0]]
    yield found
    for one in found:
        one.close()


def child() -> int:
    """One that is busy."""
    number = os.fork()
    if not number:
        signal.pause()
        os._exit(0)
    return number


@pytest.mark.parametrize("end", [1, 2])
def test_a_connection_ends_with_its_process(three: list[socket.socket], end: int) -> None:
    number = child()
    three[end].close()
    other = three[3 - end]
    other.settimeout(5.0)
    try:
        assert other.recv(1) == b""
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def test_numbers_stay_taken_and_what_came_later_under_one_stays_open(three: list[socket.socket]) -> None:
    other = socket.socketpair()
    os.dup2(other[0].fileno(), three[1].fileno(), inheritable=True)
    three[0].set_inheritable(True)
    reads, writes = os.pipe()
    number = os.fork()
    if not number:
        targets = [os.readlink(f"/proc/self/fd/{one.fileno()}") for one in three]
        os.write(writes, "\n".join(targets).encode())
        os._exit(0)
    os.waitpid(number, 0)
    found = os.read(reads, 1000).decode().split("\n")
    assert found == ["/dev/null", os.readlink(f"/proc/self/fd/{three[1].fileno()}"), "/dev/null"]
    for one in (reads, writes):
        os.close(one)
    for end in other:
        end.close()


def test_another_program_inherits_none_either(three: list[socket.socket], tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as lock:
        os.set_inheritable(lock.fileno(), True)
        keep_from_children(lock.fileno())
        kept = {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in (*three, lock)}
        said = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, close_fds=False, check=True)
    assert not [one for one in kept if one in said.stdout.decode()]
