"""Each node's share of the processor: by a control group if one can be made, else by whole cores.

A group's name identifies its owner: stagewright-PROCESS-START-NODE. Linux keeps an empty group when its owner is
killed, so the next run removes those whose owner is gone (`leftovers`), and no others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

_PERIOD = 10_000  # [us] of a share: short, so that a pipeline is never paused for long
_LEAST = 1_000  # [us] Linux's minimum
_JOIN = 'echo $$ > "$1" && shift && exec "$@"'
_NUMBERS = count()


@contextmanager
def shares(share: float | None, num_nodes: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """A context with the command prefix per node that limits it to its share of all cores; None: no limit. Raises
    ValueError if this machine cannot provide such a share."""
    if share is None:
        yield ((),) * num_nodes
        return
    root = group_root()
    if root is None:
        yield _whole_cores(share, num_nodes)
        return
    owner = f"stagewright-{os.getpid()}-{_start_of(os.getpid())}"
    groups = [root / f"{owner}-{next(_NUMBERS)}" for _ in range(num_nodes)]
    try:
        for group in groups:
            _make(group, share)
        yield tuple(("sh", "-c", _JOIN, "sh", str(group / "cgroup.procs")) for group in groups)
    finally:
        for group in groups:
            with suppress(OSError):
                group.rmdir()


def why_no_share(share: float, num_nodes: int) -> str:
    """Why nodes cannot have such a share of the cores here; empty if they can."""
    if not 0 < share <= 1:
        return f"cpu_share={share:g}: expected a part of this machine's cores, above 0 and at most 1"
    cores = len(os.sched_getaffinity(0))
    if share * cores * _PERIOD < _LEAST:
        return f"cpu_share={share:g}: expected at least {_LEAST / _PERIOD / cores:g} on {cores} cores"
    if group_root() is None:
        try:
            _whole_cores(share, num_nodes)
        except ValueError as error:
            return str(error)
    return ""


def group_root() -> Path | None:
    """Folder in which groups with a share of the processor can be made; None: there is none."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if kind == "cgroup" and "cpu" in options.split(",") and os.access(root, os.W_OK):
            return root
        if kind == "cgroup2" and _hands_down_shares(root):
            return root
    return None


def leftovers() -> list[Path]:
    """Groups of runs whose owner is gone."""
    root = group_root()
    return [] if root is None else [group for group in sorted(root.glob("stagewright-*")) if _is_orphan(group.name)]


def remove_leftovers() -> list[str]:
    """Remove groups of killed runs. Returns their names."""
    removed = []
    for group in leftovers():
        with suppress(OSError):  # a process still runs in it, or another run removed it
            group.rmdir()
            removed.append(group.name)
    return removed


def _hands_down_shares(root: Path) -> bool:
    with suppress(OSError):
        if "cpu" not in (root / "cgroup.controllers").read_text().split():
            return False
        if "cpu" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+cpu")
        return os.access(root, os.W_OK)
    return False


def _make(group: Path, share: float) -> None:
    group.mkdir()
    quota = round(share * len(os.sched_getaffinity(0)) * _PERIOD)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def _whole_cores(share: float, num_nodes: int) -> tuple[tuple[str, ...], ...]:
    """Whole cores for each node. Raises ValueError for shares that are not whole cores, and for too few cores."""
    cores: Sequence[int] = sorted(os.sched_getaffinity(0))
    each = share * len(cores)
    if each != round(each) or each * num_nodes > len(cores):
        raise ValueError(
            f"cpu_share={share:g}: {each:g} of {len(cores)} cores for each of {num_nodes} nodes needs control groups, "
            f"which cannot be made here (a container needs --privileged); expected whole cores, and enough of them"
        )
    own = [cores[node * int(each) : (node + 1) * int(each)] for node in range(num_nodes)]
    return tuple(("taskset", "--cpu-list", ",".join(map(str, mine))) for mine in own)


def _is_orphan(name: str) -> bool:
    with suppress(ValueError):
        process, start, _ = name.removeprefix("stagewright-").split("-")
        return _start_of(int(process)) != int(start)
    return False


def _start_of(process: int) -> int | None:
    """Start of a process in ticks since boot, which distinguishes it from a later one with the same id."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
