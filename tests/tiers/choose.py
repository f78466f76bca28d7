"""The first tier, chosen from what a run of `recorder.py` wrote.

    1. in one process, tests whose cases cost at most `CHEAP` together, and the cheapest case of the others; the
       cheapest case of each file
    2. for each seeded fault that none of those catches, the cheapest case that does
    3. one after the other the case that takes the most new branches per second, until all but `POINT` of the branches
       that the measured run took are taken

Greedy set cover (Chvatal 1979): at most ln(branches) times as dear as the cheapest, in practice within some percent.
"""

import base64
import heapq
import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coverage.parser import PythonParser

ROOT = Path(__file__).parents[2]
PACKAGES = ("schedules", "partition", "pipe", "comm")
CHEAP = 0.3  # [s] of CPU, measured with the recorder, which about doubles it
DEAR = 8.0  # [s] that the only test of a file may cost
POINT = 0.006  # of all branches: 1 point is promised, the rest is room for what changes until the next choice

Branch = tuple[str, int, int]


@dataclass(slots=True)
class Measured:
    """What a case costs [s of CPU, all its processes], how many of them run the package, the branches it takes."""

    seconds: float = 0.0
    processes: int = 0
    branches: set[Branch] = field(default_factory=set)
    lines: set[tuple[str, int]] = field(default_factory=set)  # of those asked for


def possible_branches() -> dict[str, tuple[PythonParser, set[tuple[int, int]]]]:
    """By file, how measured lines are read, and each way out of a line that has several."""
    found = {}
    for file in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        parser = PythonParser(text=file.read_text(encoding="utf-8"), filename=str(file))
        parser.parse_source()
        several = {line for line, exits in parser.exit_counts().items() if exits > 1}
        found[str(file.relative_to(ROOT))] = (parser, {arc for arc in parser.arcs() if arc[0] in several})
    return found


def read(folder: Path, *, lines: Collection[tuple[str, int]] = ()) -> tuple[dict[str, Measured], int]:
    """What each case of a run cost and covered, also of the given `lines`, and how many branches there are."""
    possible = possible_branches()
    cases: dict[str, Measured] = defaultdict(Measured)
    shared: dict[str, set[str]] = defaultdict(set)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            case = cases[record["test"]]
            shared[record["test"]].update(record["shared"])
            case.seconds += record["seconds"]
            by_file = json.loads(zlib.decompress(base64.b85decode(record["arcs"])))
            case.processes += bool(by_file)
            for name, arcs in by_file.items():
                if name in possible:
                    parser, ways = possible[name]
                    taken = ways.intersection(parser.translate_arcs([(a, b) for a, b in arcs]))
                    case.branches.update((name, *arc) for arc in taken)
                    case.lines.update((name, line) for arc in arcs for line in arc if (name, line) in lines)
    for name, fixtures in shared.items():
        for fixture in (cases[fixture] for fixture in fixtures if fixture in cases):
            cases[name].seconds += fixture.seconds
            cases[name].processes = max(cases[name].processes, fixture.processes)
            cases[name].branches |= fixture.branches
            cases[name].lines |= fixture.lines
    return {name: case for name, case in cases.items() if "::" in name}, sum(len(ways) for _, ways in possible.values())


def choose(cases: dict[str, Measured], *, catching: Iterable[Collection[str]], num_branches: int) -> list[str]:
    """The cases of the first tier; `catching` lists for each fault the cases that catch it."""
    everything: set[Branch] = set().union(*(case.branches for case in cases.values()))
    enough = len(everything) - POINT * num_branches
    chosen = dict.fromkeys(_cheap(cases))
    for those in catching:
        if not chosen.keys() & those:
            chosen[min(those, key=lambda name: cases[name].seconds)] = None
    taken: set[Branch] = set().union(*(cases[name].branches for name in chosen))

    def gain_of(name: str) -> float:
        return len(cases[name].branches - taken) / max(cases[name].seconds, 0.01)

    heap = [(-gain_of(name), name) for name in cases if name not in chosen]  # gains when they were last looked at
    heapq.heapify(heap)
    while heap and len(taken) < enough:
        _, name = heapq.heappop(heap)
        gain = gain_of(name)
        if heap and -gain > heap[0][0]:  # gains only fall: one that is the best even so is the best
            heapq.heappush(heap, (-gain, name))
        elif gain > 0:
            chosen[name] = None
            taken |= cases[name].branches
    return list(chosen)


def _cheap(cases: dict[str, Measured]) -> list[str]:
    """In one process: cheap tests whole, and a cheap case of the others; the cheapest case of each file."""
    tests: dict[str, list[str]] = defaultdict(list)
    files: dict[str, list[str]] = defaultdict(list)
    for name in sorted(cases, key=lambda name: cases[name].seconds):
        if cases[name].processes <= 1:
            tests[name.partition("[")[0]].append(name)
        files[name.partition("::")[0]].append(name)
    found = [names[0] for names in files.values() if cases[names[0]].seconds <= DEAR]
    for names in tests.values():
        is_cheap = sum(cases[name].seconds for name in names) <= CHEAP
        found += names if is_cheap else [name for name in names[:1] if cases[name].seconds <= CHEAP]
    return found
