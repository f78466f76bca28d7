"""`make tiers`: the marks `thorough`, written anew from a measured run of all cases.

python -m tiers FOLDER           FOLDER: what recorder.py wrote; found faults are kept in FOLDER/faults.json
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from faults.seeded import FAULTS, ROOMS
from faults.seeded import read as read_faults

from . import marks
from .catches import catching
from .choose import ROOT, Measured, choose, read


def main(folder: Path) -> None:
    """Read, try the faults, choose, write, and print what was chosen."""
    faults = [fault for room in ROOMS for fault in read_faults(room)]
    cases, num_branches = read(folder, lines={(fault.file, line) for fault in faults for line in fault.lines()})
    print(f"{len(cases)} cases measured, {num_branches} branches")
    caught = catching(cases, folder / "faults.json")
    missed = [name for name, those in caught.items() if not those]
    chosen = choose(cases, catching=[those for those in caught.values() if those], num_branches=num_branches)
    for fault in faults:
        by_tier = [name for name in caught[fault.name] if name in chosen]
        if by_tier and fault.caught_by not in {*by_tier, *(name.partition("[")[0] for name in by_tier)}:
            _rename(fault.name, fault.caught_by, min(by_tier, key=lambda name: cases[name].seconds))
    changed = marks.write(ROOT, cases=cases, chosen=set(chosen))
    for name, those in (("all", cases), ("first tier", chosen)):
        print(f"{name}: {_row(cases, those, num_branches)}")
    print(f"{len(changed)} files changed; faults that no tried case catches: {', '.join(missed) or 'none'}")


def _row(cases: dict[str, Measured], names: Iterable[str], num_branches: int) -> str:
    those = [cases[name] for name in names]
    taken = len(set().union(*(case.branches for case in those))) / num_branches
    return (
        f"{len(those)} cases, {sum(case.seconds for case in those):.0f} s of CPU as recorded, {taken:.2%} of branches"
    )


def _rename(fault: str, old: str, new: str) -> None:
    """The record names a test of the first tier."""
    for room in ROOMS:
        file = FAULTS / f"{room}.toml"
        before, found, record = file.read_text(encoding="utf-8").partition(f"[{fault}]\n")
        if found:
            file.write_text(before + found + record.replace(f'"{old}"', f'"{new}"', 1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
