"""Who is in a run that goes on: several memberships over one store in memory, without processes."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import Membership, Verdict, membership
from torch.distributed import HashStore, distributed_c10d

from stagewright.comm import PeerLost, PipelineTimeout, World

TIMEOUT = 8.0


class Clock:
    """Seconds that pass by sleeping alone, a thread's own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def monotonic(self) -> float:
        return float(getattr(self._own, "now", 0.0))

    def sleep(self, seconds: float) -> None:
        self._own.now = self.monotonic() + max(seconds, 0.5)
        threading.Event().wait(0.0005)


class Run:
    """A launcher's store, and processes that meet there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
        self.store, self.clock, self._monkeypatch, self._size = HashStore(), Clock(), monkeypatch, size
        monkeypatch.setattr(membership, "TCPStore", lambda *_, **__: self.store)
        monkeypatch.setattr(membership, "time", self.clock)
        for name, value in (("MASTER_ADDR", "x"), ("MASTER_PORT", "1"), ("STAGEWRIGHT_JUDGES_DEATHS", str(folder))):
            monkeypatch.setenv(name, value)

    def member(self, rank: int, life: int = 0, made: Mapping[str, str] | None = None) -> Any:
        self._monkeypatch.setenv("STAGEWRIGHT_LIFE", str(life))
        self._monkeypatch.setenv("RANK", str(rank))
        self._monkeypatch.setenv("WORLD_SIZE", str(self._size))
        world = World(rank=0, size=1) if life else World(rank=rank, size=self._size)
        return Membership(world, timeout=TIMEOUT, made=made or {})

    def dies(self, rank: int, life: int = 0) -> None:
        self.store.set(membership.dead(rank, life), "")

    def is_told(self, key: str) -> bool:
        return bool(self.store.check([key]))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path, 3)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(timeout=60) for each in [pool.submit(call) for call in calls]]


def test_who_lives_goes_on_and_all_say_the_same(run: Run) -> None:
    one, two, _ = members = [run.member(rank) for rank in range(3)]
    assert not one.someone_died()
    run.dies(2)
    assert one.someone_died()
    first, second = together(lambda: one.agree(4, is_ready=True), lambda: two.agree(4, is_ready=False))
    assert first == second == Verdict((0, 1), False, "")
    assert one.members == (0, 1)
    assert one.changed
    assert not one.someone_died()  # of those that are left
    assert not run.is_told(membership.silent(2, 0))
    assert together(*[lambda each=each: each.agree(5, is_ready=True) for each in members[:2]])[0].is_whole


def test_the_first_verdict_counts(run: Run) -> None:
    """One that dies behind it is found missing when the world is formed."""
    members = [run.member(rank) for rank in range(3)]
    members[2]._report(4, True, "")
    members[1]._report(4, True, "")
    verdict = members[0].agree(4, is_ready=True)
    run.dies(2)
    assert members[1].agree(4, is_ready=True) == verdict == Verdict((0, 1, 2), True, "")


def test_a_verdict_that_comes_between_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, _ = (run.member(rank) for rank in range(3))
    run.dies(1)
    run.dies(2)
    others = json.dumps([[0, 1], True, ""])
    judge = membership._judge

    def late(reports: Any) -> Verdict:
        run.store.set(one._key("verdict"), others)
        return judge(reports)

    monkeypatch.setattr(membership, "_judge", late)
    assert one.agree(4, is_ready=False).members == (0, 1)


@pytest.mark.parametrize(("has_waited", "seconds"), [(False, TIMEOUT), (True, TIMEOUT / 4)])
def test_who_is_silent_is_named_to_the_launcher(run: Run, has_waited: bool, seconds: float) -> None:
    """Behind a wait that took the time-out already, a quarter of it is left."""
    one, two, _ = (run.member(rank) for rank in range(3))
    two._report(4, True, "")
    named: list[float] = []
    set_in_store = run.store.set

    def launcher(key: str, value: str) -> None:
        set_in_store(key, value)
        if key == membership.silent(2, 0):
            named.append(run.clock.monotonic())
            run.dies(2)

    one._store = SimpleNamespace(**{name: getattr(run.store, name) for name in ("check", "get", "compare_set")})
    one._store.set = launcher
    assert one.agree(4, is_ready=True, has_waited=has_waited).members == (0, 1)
    assert seconds < named[0] <= seconds + 1.0
    assert not run.is_told(membership.silent(1, 0))


def test_who_was_taken_for_dead_stays_outside(run: Run) -> None:
    one, two, three = (run.member(rank) for rank in range(3))
    run.dies(2)
    together(lambda: one.agree(4, is_ready=True), lambda: two.agree(4, is_ready=True))
    assert "rank 2 was taken for dead by the others" in three.agree(4, is_ready=True).failed


def test_an_error_of_ones_own_ends_all(run: Run) -> None:
    one, two, three = (run.member(rank) for rank in range(3))
    three.fail(ArithmeticError("so it is"))
    for verdict in together(lambda: one.agree(4, is_ready=True), lambda: two.agree(4, is_ready=True)):
        assert verdict.failed == "rank 2 failed: ArithmeticError: so it is"


def test_members_that_have_made_other_steps_end_by_name() -> None:
    assert "report other steps" in membership._judge({0: (4, False, ""), 1: (5, True, "")}).failed
    assert "report other steps" not in membership._judge({0: (4, True, ""), 1: (5, True, "")}).failed


def without_one(run: Run) -> list[Any]:
    """Two of three, behind the death of rank 1."""
    members = [run.member(rank) for rank in range(3)]
    run.dies(1)
    together(*[lambda each=each: each.agree(2, is_ready=True) for each in members[::2]])
    for each in members[::2]:
        each.changed = False
    return members[::2]


def test_one_that_was_started_again_is_let_in_at_the_next_step(run: Run, tmp_path: Path) -> None:
    """All find it in front of the same step; who is killed again waits for its next life."""
    members = one, three = without_one(run)
    assert not any(each.someone_comes(3) for each in members)  # it has not asked
    again = run.member(1, 1)
    assert again.is_outside
    entering = ThreadPoolExecutor(1).submit(again.enter)
    while not run.is_told(again._wants(1)):
        run.clock.sleep(0.0)
    assert not three.someone_comes(4)  # the first one looks
    assert not run.is_told(three._key("admits"))
    assert not one.someone_comes(4)
    assert not three.someone_comes(4)  # in a step that the first has begun without it
    assert one.someone_comes(5)
    assert three.someone_comes(5)
    folder = one.folder_for_those_that_come()
    assert folder.parent == tmp_path
    three.let_in(5)
    assert not run.is_told(membership.admitted(1, 1))  # the first one says so
    one.let_in(5)
    entering.result(timeout=60)
    for each in (one, three, again):
        assert each.members == (0, 1, 2)
        assert (each.changed, each.folder) == (True, folder)
        assert each._lives == {0: 0, 1: 1, 2: 0}
        assert each._epoch == 2  # what was said in the one before is not taken for an answer
        assert not each.someone_died()  # that its first life has ended is known
    assert (again.step, again.is_outside) == (5, False)
    assert not one.someone_comes(6)  # what it had asked for is done
    three.step_made()
    assert folder.exists()
    one.step_made()
    assert not folder.exists()
    assert one.folder is None
    run.dies(1, 1)
    assert one.someone_died()
    together(*[lambda each=each: each.agree(6, is_ready=True) for each in members])
    assert not one.someone_comes(6)
    assert not one.someone_comes(7)  # the wish of a dead one


def test_the_wish_of_one_that_is_in_again_is_no_new_one(run: Run) -> None:
    one, three = without_one(run)
    run.store.set(one._wants(1), "1")
    one.someone_comes(4)
    assert one.someone_comes(5)
    assert three.someone_comes(5)
    for each in (three, one):
        each.let_in(5)
    again = run.member(1, 1)
    again.enter()
    run.dies(2)
    together(*[lambda each=each: each.agree(6, is_ready=True) for each in (one, again)])
    assert not one.someone_comes(7)
    assert not run.is_told(one._key("admits"))


def test_a_whole_run_asks_the_store_nothing(run: Run) -> None:
    one = run.member(0)
    one._store = None
    assert not one.someone_comes(3)


def test_one_that_died_as_it_asked_is_not_let_in(run: Run) -> None:
    one, _ = without_one(run)
    run.store.set(one._wants(1), "1")
    run.dies(1, 1)
    assert not one.someone_comes(4)
    assert not one.someone_comes(5)
    run.store.set(one._wants(1), "2")
    assert not one.someone_comes(6)
    assert one.someone_comes(7)
    one.let_in(7)
    assert run.is_told(membership.admitted(1, 2))


@pytest.mark.parametrize("told", ['[1, [0, 1], [1, 0], 7, "/home"]', "7", "[1, 0, 0, 7]", "{", '[1, ["a"], [0], 7]'])
def test_what_no_rank_writes_lets_nobody_in(run: Run, told: str) -> None:
    without_one(run)
    again = run.member(1, 1)
    run.store.set(membership.admitted(1, 1), told)
    with pytest.raises(RuntimeError, match=r"1/1' in the rendezvous store .* which no rank of this run writes"):
        again.enter()
    assert again.is_outside


def test_nobody_waits_for_ever_to_be_let_in(run: Run) -> None:
    without_one(run)
    with pytest.raises(PipelineTimeout, match="waited 8 s for the others to let it in"):
        run.member(1, 1).enter()


def test_one_that_is_told_otherwise_is_not_let_in(run: Run) -> None:
    told = {"schedule": "1f1b", "loss_fn": "af01"}
    run.member(1, made=told)
    run.member(1, 1, made=told)
    with pytest.raises(ValueError, match="can't join with another loss_fn: bf02, and af01 in the processes"):
        run.member(1, 2, made=told | {"loss_fn": "bf02"})
    with pytest.raises(ValueError, match="another model: other, and None"):
        run.member(1, 3, made=told | {"model": "other"})


def test_two_in_one_process_are_refused(run: Run) -> None:
    run.member(0)
    with pytest.raises(ValueError, match="a second PipelineModule"):
        run.member(0)


def test_forming_ends_when_one_more_dies_or_does_not_come(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = without_one(run)
    with pytest.raises(PipelineTimeout) as raised:
        one.form()
    assert raised.value.peers == (2,)
    run.dies(2)
    with pytest.raises(PeerLost, match="one died, too"):
        one.form()

    def fails(join: object, *_: Any, someone_died: Callable[[], bool]) -> None:
        raise RuntimeError("no link")

    monkeypatch.setattr(membership, "connected", fails)
    monkeypatch.setattr(run.store.__class__, "clone", lambda self: self, raising=False)
    one._store.set(one._key("here", 2), "")
    with pytest.raises(PeerLost, match=re.escape("(no link)")):  # all are here, and one dies behind that
        three.form()


def test_ranks_of_the_world_that_is_formed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = without_one(run)
    asked: list[Any] = []
    monkeypatch.setattr(membership, "connected", lambda join, *_, **__: asked.append(join.keywords))
    monkeypatch.setattr(run.store.__class__, "clone", lambda self: self, raising=False)
    worlds = together(one.form, three.form)
    assert [(each.rank, each.size) for each in worlds] == [(0, 2), (1, 2)]
    assert sorted((each["rank"], each["world_size"]) for each in asked) == [(0, 2), (1, 2)]


def test_worlds_have_one_name_where_some_had_begun_to_form_one_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second death: who had all here is left with a thread that joins, and torch has counted one world more there."""
    one, three = without_one(run)
    names: list[str] = []
    monkeypatch.setattr(distributed_c10d._world, "group_count", 0)
    monkeypatch.setattr(
        membership, "connected", lambda *_, **__: names.append(distributed_c10d._process_group_name([], False))
    )
    monkeypatch.setattr(run.store.__class__, "clone", lambda self: self, raising=False)
    monkeypatch.setattr(membership.dist, "is_initialized", lambda: False)
    for each, counted in ((one, 1), (three, 0)):
        each._store.set(each._key("here", 2 - each.me), "")
        distributed_c10d._world.group_count = counted
        each.form()
    assert names == ["0", "0"]
