"""The failure board and the guard, without processes: several boards over one store in memory.

What a forked child does not inherit: the others see that a process has ended, though its children live on.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.inside import Account, failures, find_cause, keep_from_children, kept_from_children
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import stagewright
from stagewright.comm import FailureBoard, Guard, PeerLost, PipelineError, PipelineTimeout


@pytest.fixture(autouse=True)
def _five_times_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures._LATER + failures._SOON <= 2.5, "after a time-out an error comes within 3 s"
    assert 2 * failures._STORE_LIMIT + failures._SOON <= 2.6, "also when the store is silent"
    for name in ("_SOON", "_LATER", "_STORE_LIMIT", "_POLL"):
        monkeypatch.setattr(failures, name, getattr(failures, name) / 5)


def boards(size: int) -> list[FailureBoard]:
    store = HashStore()
    return [FailureBoard(store, rank=rank, size=size) for rank in range(size)]


def lost(peer: int) -> PeerLost:
    return PeerLost(f"lost the connection to rank {peer}", peers=[peer])


def timed_out(*peers: int) -> PipelineTimeout:
    return PipelineTimeout("waited 3.0 s", peers=peers)


OWN = Account((), False, "KeyError: 'x'")


CAUSES: dict[str, tuple[dict[int, Account], str]] = {
    "the neighbour": ({0: Account((1,), False, "a"), 1: OWN}, "rank 1 failed: KeyError: 'x'"),
    "three ranks away": (
        {0: Account((1,), False, "a"), 1: Account((2,), False, "b"), 2: Account((3,), True, "c"), 3: OWN},
        "rank 3 failed: KeyError: 'x'",
    ),
    "stalled": (
        {0: Account((1,), True, "a"), 1: Account((2,), True, "b")},
        "rank 2, which rank 1 waited for, reports nothing: it is stalled, or still busy (b)",
    ),
    "dead": (
        {0: Account((1,), False, "a"), 1: Account((2,), False, "b")},
        "rank 2, which rank 1 waited for, reports nothing: it died, or ended without making this call (b)",
    ),
    "no report yet": (
        {0: Account((1,), True, "a")},
        "rank 1, which rank 0 waited for, reports nothing: it is stalled, or still busy",
    ),
    "I was too slow": (
        {0: Account((1,), False, "a"), 1: Account((0,), True, "rank 1: waited 3.0 s for rank 0")},
        "rank 1 gave up: rank 1: waited 3.0 s for rank 0",
    ),
    "each other": (
        {0: Account((1,), True, "a"), 1: Account((0,), True, "b")},
        "the ranks 0, 1 waited for each other: did all of them make the same calls, with batches of the same size, "
        "and does the network between them let all messages through? (b)",
    ),
    "a cut link": (
        {0: Account((1,), False, "a"), 1: Account((0,), False, "b")},
        "the connection between the ranks 0-1 broke while both ends were alive: look at the network between their "
        "hosts (interface, firewall, address) (b)",
    ),
    "a cut link further away": (
        {0: Account((1,), False, "a"), 1: Account((2,), False, "b"), 2: Account((1,), False, "c")},
        "the connection between the ranks 1-2 broke while both ends were alive: look at the network between their "
        "hosts (interface, firewall, address) (b; c)",
    ),
    "a collective without one": (
        {0: Account((1, 2, 3), True, "all"), 1: Account((0, 2, 3), False, "b"), 2: Account((0, 1, 3), False, "c")},
        "rank 3, which rank 0 waited for, reports nothing: it is stalled, or still busy",
    ),
    "a failure counts more than silence": ({0: Account((1, 2), False, "all"), 2: OWN}, "rank 2 failed: KeyError: 'x'"),
}


@pytest.mark.parametrize(("reports", "cause"), CAUSES.values(), ids=CAUSES)
def test_find_cause(reports: dict[int, Account], cause: str) -> None:
    assert find_cause(0, reports) == (cause, "reports nothing" not in cause)  # who is silent may report later


def test_ranks_that_waited_for_each_other_name_the_newest_call_of_each() -> None:
    first, second = boards(2)
    for board, call in ((first, "train_step (call 2)"), (second, "eval_step (call 2)")):
        Guard(board).set_call(call)
    second.write(timed_out(0))
    own, *_, other = str(first.explain(timed_out(1))).splitlines()
    assert own == "waited 3.0 s; newest call: train_step (call 2)"
    assert other.endswith(" (waited 3.0 s; newest call: eval_step (call 2))")


def test_the_cause_is_found_at_once_when_it_is_there() -> None:
    first, second, third = boards(3)
    third.write(ValueError("two\nlines"))
    second.write(lost(2))
    with mock.patch.object(failures.time, "sleep", side_effect=AssertionError("it need not wait")):
        told = first.explain(lost(1))
    assert isinstance(told, PeerLost)
    assert str(told) == "lost the connection to rank 1\ncause: rank 2 failed: ValueError: two\nlines"
    assert told.peers == (1,)


def test_reports_that_come_a_little_later_are_waited_for() -> None:
    first, *_ = boards(3)
    started = time.monotonic()
    told = first.explain(timed_out(1))
    waited = time.monotonic() - started
    assert waited >= failures._LATER  # of a rank that was stopped there is nothing to come
    assert (
        str(told)
        == "waited 3.0 s\ncause: rank 1, which rank 0 waited for, reports nothing: it is stalled, or still busy"
    )
    assert isinstance(told, PipelineTimeout)


def test_seconds_in_which_the_machine_stood_still_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(failures, "time", mock.Mock(monotonic=lambda: now))
    patience = failures._Patience(0.5)
    now += 100.0  # a virtual machine that was stopped
    assert not patience.is_over()
    for _ in range(5):
        assert not patience.is_over()
        now += 0.04
    assert not patience.is_over()
    now += 0.06
    assert patience.is_over()


@pytest.mark.parametrize("error", [KeyError("mine"), PipelineError("of nobody")])
def test_an_error_of_ones_own_stays_as_it_is(error: Exception) -> None:
    board, _ = boards(2)
    assert board.explain(error) is error


def test_reports_of_an_earlier_pipeline_do_not_count() -> None:
    store = HashStore()
    for reported in (True, False):
        first, second = (FailureBoard(store, rank=rank, size=2) for rank in range(2))
        if reported:
            second.write(KeyError("old"))
        assert ("old" in str(first.explain(lost(1)))) == reported


class Broken:
    """A store whose host died, or is stopped for ever: `add` still worked when the run began."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    def add(self, key: str, amount: int) -> int:
        return amount

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> None:
            if self.hangs:
                threading.Event().wait()
            raise RuntimeError("Broken pipe")

        return call


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_does_not_answer_is_asked_twice_at_most(hangs: bool) -> None:
    board = FailureBoard(Broken(hangs=hangs), rank=1, size=2)  # type: ignore[arg-type]
    with mock.patch.object(failures, "_within", wraps=failures._within) as asked:
        board.write(lost(0))
        told = board.explain(lost(0))
    assert asked.call_count == 2
    assert "cause: the rendezvous store does not answer either: its host (rank 0, unless a" in str(told)


def test_a_failure_ends_the_run_on_this_rank_and_lets_the_others_go() -> None:
    first, second = boards(2)
    let_go: list[str] = []
    guard = Guard(second)
    guard.on_failure(lambda: let_go.append("links"))
    guard.on_failure(lambda: let_go.append("collectives"))
    with guard.together():
        pass
    assert not guard.ended
    with pytest.raises(KeyError, match="mine"), guard.together():
        raise KeyError("mine")
    assert let_go == ["links", "collectives"]
    assert guard.ended
    message = r"this pipeline has ended: expected a new PipelineModule after KeyError: 'mine'"
    with pytest.raises(PipelineError, match=message), guard.together():
        pass
    assert "rank 1 failed: KeyError: 'mine'" in str(first.explain(lost(1)))  # not what came after it


def test_a_lost_connection_and_a_keyboard_interrupt_are_told_with_their_cause() -> None:
    first, second = boards(2)
    first.write(ValueError("theirs"))
    message = r"lost .*\ncause: rank 0 failed: ValueError: theirs"
    with pytest.raises(PeerLost, match=message) as error, Guard(second).together():
        raise lost(0)
    assert isinstance(error.value.__cause__, PeerLost)
    first, second = boards(2)
    with pytest.raises(KeyboardInterrupt), Guard(second).together():
        raise KeyboardInterrupt
    assert "rank 1 failed: KeyboardInterrupt" in str(first.explain(lost(1)))


def test_in_one_process_nothing_ends() -> None:
    let_go: list[str] = []
    guard = Guard(None)
    guard.on_failure(lambda: let_go.append("mailbox"))
    with pytest.raises(KeyError), guard.together():
        raise KeyError("mine")
    assert let_go == ["mailbox"]
    with guard.together():
        pass


def test_an_error_of_the_run_that_nobody_catches_shows_the_users_own_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    told: list[type[BaseException]] = []
    guard = failures.Guard(None)

    def plainly(kind: type[BaseException], error: BaseException, traceback: object) -> None:
        told.append(kind)

    plainly.__module__ = "torch.distributed.distributed_c10d"  # its hook, which shows all of the chain
    for kind in (failures.PipelineTimeout, ValueError):
        try:
            try:
                raise OSError("gloo timed out")
            except OSError as below:
                raise kind("rank 0: waited 8.0 s") from below
        except Exception as error:
            failures._tell_uncaught(weakref.ref(guard), plainly, kind, error, error.__traceback__)
    assert told == [ValueError]
    shown = capsys.readouterr().err
    assert re.search(r"test_failures\.py.*\n.*raise kind", shown)
    assert shown.rstrip().endswith("PipelineTimeout: rank 0: waited 8.0 s")
    assert "gloo" not in shown
    log = Path(re.search(r"all of it: (.*)\)", shown)[1])  # type: ignore[index]
    assert "gloo timed out" in log.read_text()
    log.unlink()


def test_torchrun_ends_with_the_cause_and_the_users_own_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it would say how to enable tracebacks. An echo comes behind its cause, though rank 0 saw it first."""

    def echo() -> None:
        raise lost(1)

    def cause() -> None:
        stagewright.schedules.build("1f1b", num_ranks=0, num_microbatches=4)

    failed = {}
    for rank, call in enumerate((echo, cause)):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        for again in (call, echo):  # the first that is left stays
            try:
                again()
            except Exception as error:
                known = weakref.ref(failures.Guard(None))
                failures._tell_uncaught(known, sys.__excepthook__, type(error), error, error.__traceback__)
        assert list(file.parent.glob("stagewright-*.log"))
        failed[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    failures._tell_uncaught(weakref.ref(Guard(None)), sys.__excepthook__, PeerLost, lost(1), None)
    shown = capsys.readouterr().err
    assert "registry.py" not in shown
    elsewhere = Path(re.findall(r"all of it: (.*)\)", shown)[-1])
    assert elsewhere.exists()
    elsewhere.unlink()
    ended = ChildFailedError("train.py", failed)
    assert ended.get_first_failure()[0] == 1
    last = str(ended).partition("Root Cause")[2]
    assert re.search(
        r"test_failures\.py.*\n.*build\(.*num_ranks=0.*\n(.*\^+\n)? *ValueError: num_ranks=0 for ", last
    ), last
    assert "registry.py" not in last


@pytest.fixture
def three() -> Iterator[list[socket.socket]]:
    """A listening socket, one that is connected to it, and what it has accepted behind that."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
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
