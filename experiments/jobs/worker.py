"""A job's own processes: `python -m stagewright.experiments.jobs.worker FOLDER [--ranks]`.

Alone, or with --ranks as one of all ranks under torchrun or the launcher, which then meet in a gloo group before the
first case. The figures of rank 0 count.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from ...schedules.user_code import check_call, load
from ..launcher import report_to_launcher
from .case import Case
from .figure import Figure
from .job import Assignment

WorkFunction = Callable[[Case, int], Iterable[Figure]]
_TIMEOUT = timedelta(seconds=300)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases of the job and leave its figures."""
    parser = argparse.ArgumentParser(prog="stagewright.experiments.jobs.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", action="store_true", help="one of all ranks")
    parser.add_argument("--watch", action="store_true", help="end when the standard input does")
    options = parser.parse_args(argv)
    if options.watch:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    assignment = Assignment.read(options.folder)
    if not options.ranks:
        run_cases(assignment, options.folder / "figures.jsonl")
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with report_to_launcher():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        run_cases(assignment, options.folder / "figures.jsonl" if dist.get_rank() == 0 else None)
        dist.barrier()  # all figures are out
    sys.stdout.flush()
    # Not through the interpreter's end: there torch aborts one process in some thirty, and a job of many ranks with it.
    os._exit(0)


def run_cases(assignment: Assignment, path: Path | None) -> None:
    """Run all cases; their figures go to the file, a line each. None: another rank writes them, and talks."""
    work: WorkFunction = load("work", assignment.work)
    check_call("work", assignment.work, work, num_arguments=2)
    with Path(path or os.devnull).open("w", encoding="utf-8") as file:
        for case in assignment.cases:
            began = time.perf_counter()
            found = work(case, assignment.repetitions)
            if not isinstance(found, Iterable):
                raise TypeError(f"{assignment.work} gave {found!r}: expected Figures, as by `yield Figure(...)`")
            for figure in found:
                if not isinstance(figure, Figure):
                    raise TypeError(f"{assignment.work} gave {figure!r}: expected a Figure")
                file.write(f"{figure.to_json()}\n")
            file.flush()
            if path is not None:
                print(f"{case}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
