"""Members of a run that continues when processes die: agreed on at the launcher's store, epoch by epoch.

    FORM -> RUN -> error -> BREAK -> REPORT -> VERDICT -+-> all have the gradient: step --> FORM
                                                        +-> do the step again ------------> FORM

    a process that was started again: WANTS -> ADMITTED, between two steps ----------------> FORM

The launcher hosts the store, so that it outlives every rank, and writes which processes have ended. A process that has
neither reported nor ended within the run's time-out is named to the launcher, which kills it before it is listed as
dead: it cannot come back and write. Once each member has reported or is dead, any of them writes the verdict; the
first one counts.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from .failures import PeerLost, PipelineTimeout, short_reason
from .forked import kept_from_children
from .groups import connected
from .mesh import World
from .sealed import sealed

JUDGED = "STAGEWRIGHT_JUDGES_DEATHS"  # in the environment of ranks whose launcher does: its own folder
LIFE = "STAGEWRIGHT_LIFE"  # there, too: how often this one was started again
GOES_ON = "stagewright/goes on"  # key of the launcher's store: set where a death does not end the run
_POLL = 0.002  # [s]
_MORE = 0.25  # of the time-out, after a time-out


def dead(rank: int, life: int) -> str:
    """Key that the launcher sets when a process, by its first number, has ended."""
    return f"stagewright/dead/{rank}/{life}"


def silent(rank: int, life: int) -> str:
    """Key that the others set for the launcher to kill a process."""
    return f"stagewright/silent/{rank}/{life}"


def admitted(rank: int, life: int) -> str:
    """Key by which the others admit a process that was started again: the state that it joins with."""
    return f"stagewright/admitted/{rank}/{life}"


class Verdict(NamedTuple):
    """Outcome of an epoch."""

    members: tuple[int, ...]  # the remaining processes, by their first numbers
    is_whole: bool  # whether all of them have the gradient of the step, or have made the step
    failed: str  # why the run ends; empty: it continues


class Membership:
    """A process's view of the remaining processes. `made`: this process's options, by name: a process that was started
    again must have the same.

    Raises ValueError without a launcher that reports deaths, for a second run in this process, and for another `made`.
    """

    @kept_from_children()
    def __init__(self, world: World, *, timeout: float, made: Mapping[str, str]) -> None:
        if os.environ.get(JUDGED) is None:
            raise ValueError(
                'mesh=Mesh(on_failure="reroute") in processes whose launcher ends all of them with the first, as '
                "torchrun does: expected stagewright.cli.launcher.launch([...], num_ranks=N), after which the "
                'others continue, or on_failure="stop"'
            )
        address, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=timeout)
        self._store = sealed(TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit))
        self.life = int(os.environ.get(LIFE, "0"))  # how often this process was started again
        self._timeout, self._epoch = timeout, 0
        if self.life:  # until it is admitted the process is alone
            world = World(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
        self.me = world.rank  # number of this process in the first world
        self.members: tuple[int, ...] = tuple(range(world.size))  # such numbers, by rank of the present world
        self._lives, self._coming = dict.fromkeys(self.members, 0), dict[int, int]()
        self.changed = False  # whether the members are to form a new world
        self.step = 0  # the first one of a process that was started again
        self.calls = 0  # that all have made since the world was formed
        self.folder: Path | None = None  # with the state for joining processes, until the next step is made
        self._made_folder: Path | None = None
        if self._store.add(f"stagewright/runs of {self.me}/{self.life}", 1) > 1:
            raise ValueError(
                'a second PipelineModule with on_failure="reroute" in a process: both would form the world anew. '
                "Expected one"
            )
        self._store.set(GOES_ON, "")
        self._compare(made)

    def someone_died(self) -> bool:
        return any(self._store.check([dead(one, self._lives[one])]) for one in self.members)

    def _compare(self, made: Mapping[str, str]) -> None:
        key = f"stagewright/made/{self.me}"
        before = json.loads(self._store.get(key)) if self._store.check([key]) else made
        self._store.set(key, json.dumps(before))
        other = next((name for name in {**before, **made} if before.get(name) != made.get(name)), None)
        if other is not None:
            raise ValueError(
                f"rank {self.me}, which was started again, can't join with another {other}: {made.get(other)}, and "
                f"{before.get(other)} in the processes that it would join. Expected the same script and options"
            )

    @property
    def is_outside(self) -> bool:
        return self.life > 0 and self._epoch == 0

    def enter(self) -> None:
        """Ask to be admitted, and wait for it. Raises PipelineTimeout."""
        key, until = admitted(self.me, self.life), time.monotonic() + self._timeout
        self._store.set(self._wants(self.me), str(self.life))
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise PipelineTimeout(
                    f"rank {self.me}, which was started again, waited {self._timeout:g} s for the others to let it in "
                    f"at the beginning of a step: expected a longer timeout= than a step takes"
                )
            time.sleep(_POLL)
        given = self._store.get(key)
        try:
            epoch, members, lives, step = json.loads(given)
            self.members, self._lives = tuple(map(int, members)), dict(enumerate(map(int, lives)))
            self._epoch, self.step, self.folder = int(epoch), int(step), self._folder_of(int(epoch) - 1)
        except (ValueError, TypeError) as error:
            raise RuntimeError(
                f"{key!r} in the rendezvous store is {given!r:.80}, which no rank of this run writes: "
                f"expected a port that no other process reaches"
            ) from error
        self.changed = True

    def someone_comes(self, step: int) -> bool:
        """Whether processes that were started again join before this step: the same on all members. The first member
        announces them for the next step, which no member begins before the first has ended this one."""
        if len(self.members) == len(self._lives):
            return False
        key = self._key("admits")
        if self._store.check([key]):
            at, coming = json.loads(self._store.get(key))
            self._coming = {int(one): life for one, life in coming.items()}
            return bool(at == step)
        if self.me == self.members[0]:
            gone = [one for one in self._lives if one not in self.members and self._store.check([self._wants(one)])]
            found = {one: int(self._store.get(self._wants(one))) for one in gone}
            found = {one: life for one, life in found.items() if not self._store.check([dead(one, life)])}
            if found:
                self._store.set(key, json.dumps([step + 1, found]))
        return False

    def folder_for_those_that_come(self) -> Path:
        """A folder within the launcher's; the first member makes and removes it."""
        folder = self._folder_of(self._epoch)
        if self.me == self.members[0]:
            folder.mkdir(mode=0o700)
            self._made_folder = folder
        return folder

    def _folder_of(self, epoch: int) -> Path:
        return Path(os.environ[JUDGED], f"joining in epoch {epoch:d}")

    def let_in(self, step: int) -> None:
        """Make the joining processes members, which load what is in the folder."""
        is_first, coming = self.me == self.members[0], self._coming
        self._lives |= coming
        self.members = tuple(sorted((*self.members, *coming)))
        self.folder, self._epoch, self.changed = self._folder_of(self._epoch), self._epoch + 1, True
        self.calls = 0
        for one, life in coming.items() if is_first else ():
            state = [self._epoch, self.members, [*self._lives.values()], step]
            self._store.set(admitted(one, life), json.dumps(state))

    def step_made(self) -> None:
        """Remove the folder, if there is one: all have loaded its content."""
        made, self._made_folder, self.folder = self._made_folder, None, None
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)

    def fail(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # the store may be gone
            self._report(0, False, f"rank {self.me} failed: {type(error).__name__}: {error}")

    def agree(self, num_steps: int, *, is_ready: bool, has_waited: bool = False) -> Verdict:
        """Report, wait until every member has reported or is dead, and return the verdict.

        Arguments:
            num_steps: number of calls that this process has made.
            is_ready: whether it has all that the next step needs.
            has_waited: whether it has waited for others up to the time-out: live members learn of it at once, and get
                little more time.
        """
        self._report(num_steps, is_ready, "")
        key, until = self._key("verdict"), time.monotonic() + self._timeout * (_MORE if has_waited else 1.0)
        while not self._store.check([key]):
            alive = [one for one in self.members if not self._store.check([dead(one, self._lives[one])])]
            missing = [one for one in alive if not self._store.check([self._key("report", one)])]
            if not missing:
                reports = {one: json.loads(self._store.get(self._key("report", one))) for one in alive}
                self._store.compare_set(key, "", json.dumps(_judge(reports)))
            elif time.monotonic() > until:
                for one in missing:
                    self._store.set(silent(one, self._lives[one]), "")
                until += self._timeout
            time.sleep(_POLL)
        members, is_whole, failed = json.loads(self._store.get(key))
        if self.me not in members and not failed:  # killed a moment later
            failed = f"rank {self.me} was taken for dead by the others, which continue without it"
        self._epoch += 1
        self.members, self.changed, self.calls = tuple(members), True, 0
        return Verdict(self.members, is_whole, failed)

    @kept_from_children()
    def form(self) -> World:
        """Form the world of the remaining processes, with its process group. PeerLost where one more dies meanwhile."""
        what, until = "forming the processes that are left anew", time.monotonic() + self._timeout
        self._store.set(self._key("here", self.me), "")
        while not self._store.check([self._key("here", one) for one in self.members]):
            late = time.monotonic() > until
            if late or self.someone_died():
                kind = PipelineTimeout if late else PeerLost
                raise kind(f"rank {self.me}: {what}: one died, too, or does not come", peers=self._others())
            time.sleep(_POLL)
        if dist.is_initialized():
            dist.destroy_process_group()
        # The next world's name must be the same on every rank: an attempt that a death ended has counted on some.
        dist.distributed_c10d._world.group_count = 0
        world = World(rank=self.members.index(self.me), size=len(self.members))
        if world.distributed:
            store = PrefixStore(self._key("world"), self._store.clone())  # type: ignore[attr-defined]
            own: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
            limit = timedelta(seconds=self._timeout)
            join = partial(dist.init_process_group, "gloo", store=store, timeout=limit, **own)
            try:
                connected(join, self._timeout, someone_died=self.someone_died)
            except RuntimeError as error:
                raise PeerLost(f"rank {self.me}: {what} ({short_reason(error)})", peers=self._others()) from error
        return world

    def _others(self) -> Sequence[int]:
        return [one for one in self.members if one != self.me]

    def _report(self, num_steps: int, is_ready: bool, failed: str) -> None:
        self._store.set(self._key("report", self.me), json.dumps([num_steps, is_ready, failed]))

    def _wants(self, one: int) -> str:
        return f"stagewright/wants/{one}"

    def _key(self, what: str, one: int | None = None) -> str:
        return f"stagewright/epoch {self._epoch}/{what}" + ("" if one is None else f"/{one}")


def _judge(reports: dict[int, tuple[int, bool, str]]) -> Verdict:
    """The verdict on the reports of live members.

    >>> _judge({0: (4, True, ""), 2: (5, False, "")})  # rank 2 has made the step, and rank 0 can
    Verdict(members=(0, 2), is_whole=True, failed='')
    >>> _judge({0: (4, True, ""), 2: (4, False, "")}).is_whole
    False
    """
    failed = next((why for _, _, why in reports.values() if why), "")
    step = min(number for number, _, _ in reports.values())
    is_whole = all(number > step or ready for number, ready, _ in reports.values())
    if not is_whole and any(number > step for number, _, _ in reports.values()):
        failed = failed or f"ranks {[*reports]} report other steps: {reports}"
    return Verdict(tuple(reports), is_whole, failed)
