"""What a process of a run believes: forged values, pickles and folders do not count, and nothing of them is run."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.inside import (
    SECRET,
    HostShare,
    RecordsWork,
    SealedStore,
    batch_shared,
    keep_sample,
    kept_sample,
    launcher,
    load_sealed,
    membership,
    own_folder,
    rank_process,
    save_sealed,
    sealed,
    store_exchange,
)
from torch.distributed import HashStore

from stagewright.comm import FailureBoard, MeshPlace, PipelineTimeout, World


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SECRET, "of this run")
    return "of this run"


def written(value: str, key: str, secret: str) -> bytes:
    store = HashStore()
    SealedStore(store, secret).set(key, value)
    return store.get(key)


@pytest.mark.parametrize("forge", [("7", "k", ""), ("7", "k", "another"), ("7", "j", "of this run"), None, "short"])
def test_what_another_process_writes_does_not_count(secret: str, forge: Any) -> None:
    """Without the secret, with another, copied from another key, plain; and what is changed."""
    raw = HashStore()
    store: Any = sealed(raw)
    store.set("own", "7")
    assert store.check(["own"])
    assert store.get("own") == b"7"
    assert store.compare_set("first", "", "8") == store.compare_set("first", "", "9") == b"8"
    raw.set("k", "7" if forge in (None, "short") else written(*forge))
    if forge == "short":
        raw.set("k", raw.get("own")[:-1])
    assert not store.check(["k"])
    assert not store.check(["own", "k"])
    for asks in (lambda: store.get("k"), lambda: store.compare_set("k", "", "8")):
        with pytest.raises(
            RuntimeError, match=r"'k' in the rendezvous store .* a process that is not part of this run"
        ):
            asks()


def test_without_a_secret_the_store_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    store = HashStore()
    assert sealed(store) is store


@pytest.mark.parametrize("has_secret", [True, False])
def test_who_joins_takes_no_folder_from_the_store_and_removes_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_secret: bool
) -> None:
    """A forged word that let it in named the folder that it then read and deleted."""
    monkeypatch.setenv(SECRET, "of this run" if has_secret else "")
    store, victim = HashStore(), tmp_path / "victim"
    victim.mkdir()
    monkeypatch.setattr(membership, "TCPStore", lambda *_, **__: store)
    variables = {"JUDGES_DEATHS": tmp_path / "room", "LIFE": 1}
    for name, value in [(f"STAGEWRIGHT_{key}", value) for key, value in variables.items()] + [("RANK", 0)]:
        monkeypatch.setenv(name, str(value))
    for name, value in {"WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    for life, told in enumerate([[str(victim)], [], [[str(victim)]]], 1):
        monkeypatch.setenv("STAGEWRIGHT_LIFE", str(life))
        one = membership.Membership(World(rank=0, size=4), timeout=0.01, made={})
        epoch: Any = f"1/../../{victim.name}" if life == 3 else 1
        store.set(membership.admitted(0, life), json.dumps([epoch, [0, 1, 2, 3], [life, 0, 0, 0], 7, *told]))
        if has_secret or told:
            with pytest.raises(PipelineTimeout if has_secret else Exception):
                one.enter()
        else:
            one.enter()
            assert one.folder == tmp_path / "room" / "joining in epoch 0"
        one.step_made()
        assert victim.exists()


def test_a_forged_word_kills_nobody(secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher killed a rank that anybody's word in its store took for dead."""
    raw, killed = HashStore(), list[Any]()
    monkeypatch.setattr(rank_process.RankProcess, "kill", lambda *_: killed.append("kill"))
    process: Any = SimpleNamespace(returncode=None, poll=lambda: None, wait=lambda: None)
    rank = rank_process.RankProcess(number=0, process=process, folder=tmp_path)
    store: Any = SealedStore(raw, secret)
    judge = launcher._Judge([rank], store, lambda *_: rank, 0)
    raw.set("stagewright/goes on", "")
    judge.look()
    assert not judge._judges
    store.set("stagewright/goes on", "")
    raw.set(membership.silent(0, 0), "")
    judge.look()
    assert judge._judges
    assert not killed
    store.set(membership.silent(0, 0), "")
    judge.look()
    assert killed


def test_each_launch_hands_its_ranks_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it, and whatever that one's own secret. It writes with it, too."""
    with launcher._rendezvous_store(1, "s") as store:
        store.set("k", "v")
        assert SealedStore(store._store, "s").get("k") == b"v" != store._store.get("k")
    given: list[str] = []

    def start(command: Any, number: int, environment: dict[str, str], folder: str) -> None:
        given.append(environment[SECRET])
        raise InterruptedError

    monkeypatch.setattr(rank_process.RankProcess, "start", start)
    monkeypatch.setenv(SECRET, "of the one around")
    for _ in range(2):
        with pytest.raises(InterruptedError):
            launcher.launch(["true"], num_ranks=1)
    one, other = (RecordsWork(module="m", folder=Path("f")).begun().environment[SECRET] for _ in range(2))
    assert len({*given, one, other}) == 4
    assert {len(each) for each in (*given, one, other)} == {64}
    assert RecordsWork(module="m", folder=Path("f"), environment={SECRET: "x"}).begun().environment[SECRET] == "x"


def test_a_board_and_an_exchange_take_nothing_that_is_forged(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = HashStore()
    board = FailureBoard(raw, rank=0, size=2)
    raw.set("failure/1/1", '[[], false, "forged"]')
    assert not board.others_failed()
    monkeypatch.setattr(store_exchange, "_get_default_store", lambda: raw)
    exchange: Any = store_exchange.exchanges(World(rank=0, size=2), what="it")(0, lambda: bool(raw.num_keys() > 4))
    raw.set("exchange/it/1/0/0/1", '"forged"')
    with pytest.raises(store_exchange.ExchangeError, match="no process waits"):
        exchange.gather("mine", what="asking")


def test_a_folder_of_batches_is_named_by_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What another process says of it is the end of its name alone, and that one must be this user's own."""
    victim, told = tmp_path / "victim", list[Any]()
    victim.mkdir(mode=0o700)
    place = MeshPlace.line(World(rank=1, size=2))
    monkeypatch.setattr(batch_shared, "_SHARED_MEMORY", tmp_path)

    class Rounds:
        def gather(self, mine: Any, *, what: str) -> list[Any]:
            return [mine, mine] if mine is not None else [told[0], None]

    monkeypatch.setattr(batch_shared, "exchanges", lambda *_, **__: lambda *_: Rounds())
    for name in (str(victim), "../victim", "/../victim", "", "..", "x/../../victim"):
        told[:] = [name]
        with pytest.raises(FileNotFoundError):
            batch_shared.share_on_host(place, timeout=1.0)
    (tmp_path / "stagewright-data-x").mkdir(mode=0o755)
    told[:] = ["x"]
    with pytest.raises(ValueError, match=r"\(drwxr-xr-x, .*that no other user may enter"):
        batch_shared.share_on_host(place, timeout=1.0)
    assert not list(victim.iterdir())


def test_only_a_folder_of_this_user_that_nobody_else_may_enter_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    assert own_folder(own) == own
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "file").touch(mode=0o600)
    for name in ("open", "searched"):
        (tmp_path / name).mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "searched").chmod(0o701)
    for name in ("link", "file", "open", "searched"):
        with pytest.raises(ValueError, match=rf"{name} .* expected a folder of user .* and no link"):
            own_folder(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    with pytest.raises(ValueError, match=r"own .drwx------, of user"):
        HostShare(own, 0, (0, 1), timeout=1.0)
    assert not list(own.iterdir())


def test_pickles_of_other_processes_are_not_run(secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and samples of a host: any object, sealed."""
    mark, path = tmp_path / "ran", tmp_path / "sample.0"
    for value in ({"x": torch.arange(3), "y": ["a", torch.device("cpu")]}, torch.ones(2, 3).T, b"bytes"):
        save_sealed(value, path)
        assert str(load_sealed(path)) == str(value)
    keep_sample(tmp_path, 0, {"x": torch.arange(3)}, share_of=1e9)
    assert torch.equal(kept_sample(tmp_path, 0)[0]["x"], torch.arange(3))
    reader, other = (HostShare(tmp_path, process, (0, 1), timeout=1.0) for process in range(2))
    other.begin()
    monkeypatch.setenv(SECRET, "of another run")
    save_sealed(Trap(mark), tmp_path / "sealed")
    monkeypatch.setenv(SECRET, secret)
    torch.save(Trap(mark), tmp_path / "plain")
    torch.save(Trap(mark), tmp_path / "legacy", _use_new_zipfile_serialization=False)
    for forged in ("sealed", "plain", "legacy"):
        (tmp_path / forged).replace(path)
        with pytest.raises(RuntimeError):
            kept_sample(tmp_path, 0)
        path.replace(other._path(1))
        with pytest.raises(RuntimeError):
            other.take((0, 0))
    assert not mark.exists()
    del reader
