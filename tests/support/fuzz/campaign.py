"""Many cases, one after the other: counts of what became of them, and each fault as a script."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .cases import Case
from .generate import generate
from .shrink import shrink
from .verdict import Verdict, check

LIMIT = 300  # [s] for a case, which takes half a second of a core


class HungError(BaseException):
    """No except clause of what is tried may take it."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A case that takes longer is hung."""

    def end(number: int, frame: Any) -> None:
        raise HungError(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def checked(case: Case) -> Verdict:
    try:
        with limited(LIMIT):
            return check(case)
    except HungError as error:
        return Verdict(kind="hang", what=str(error))


def script(case: Case, verdict: Verdict) -> str:
    what = verdict.what.replace("\n", " ")[:300]
    return (
        f"# {verdict.kind}: {what}\n"
        "# from tests/: ../.venv/bin/python this.py\n"
        "from support.fuzz.campaign import show\n"
        "from support.fuzz.cases import Case, Model\n\n"
        f"show({case!r})\n"
    )


def show(case: Case) -> None:
    verdict = checker(case)(case)
    print(f"{verdict.kind} at call {verdict.at}: {verdict.what}\n{verdict.text}")


def checker(case: Case) -> Any:
    if not case.gloo:
        return checked
    from .over_gloo import check_gloo

    return check_gloo


@dataclass(kw_only=True)
class Report:
    """counts: by kind; refusals, faults: by what they say; scripts: that show each fault again."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[tuple[int, Case, Verdict]]] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)

    def add(self, number: int, case: Case, verdict: Verdict) -> bool:
        """Whether it is a fault that was not seen before."""
        self.counts[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refusals[verdict.signature] += 1
        if verdict.is_good or verdict.kind == "no case":
            return False
        self.faults.setdefault(verdict.signature, []).append((number, case, verdict))
        return len(self.faults[verdict.signature]) == 1

    def table(self) -> str:
        total = max(1, sum(self.counts.values()))
        lines = [
            f"{sum(self.counts.values())} cases: "
            + ", ".join(f"{k} {n} ({n / total:.1%})" for k, n in self.counts.most_common())
        ]
        lines += [f"  {count:4d}  {what}" for what, count in self.refusals.most_common(40)]
        lines += [
            f"fault, {len(found)} times, first in case {found[0][0]}: {what}" for what, found in self.faults.items()
        ]
        return "\n".join(lines)


def campaign(
    numbers: Iterable[int], *, gloo: bool = False, seconds: float = float("inf"), shrinks: bool = True
) -> Report:
    report, deadline = Report(), time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > deadline:
            break
        case = generate(number, gloo=gloo)
        check_one = checker(case)
        verdict = check_one(case)
        if verdict.kind == "no case":
            print(f"# case {number} makes no program: {verdict.what}\n{case!r}", flush=True)
        if report.add(number, case, verdict):
            smaller, shown = shrink(case, verdict, check_one) if shrinks else (case, verdict)
            report.scripts.append(script(smaller, shown))
            print(f"# case {number}\n{report.scripts[-1]}", flush=True)
    return report
