"""A job's own processes: `python -m stagewright.experiments.jobs.worker FOLDER [--ranks]`.

One process, or with --ranks one of all ranks under torchrun or the launcher, which then form a gloo group before the
first case. The figures of rank 0 count.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from ...cli.launcher import report_to_launcher
from ...cli.processes import exit_with_stdin
from ...partition.strict import fail, parse_object, read_text
from ...schedules.custom.user_code import check_call, load
from ...schedules.wording import duration
from .case import Case
from .figure import Figure

WorkFunction = Callable[[Case, int], Iterable[Figure]]
_TIMEOUT = timedelta(seconds=300)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="stagewright.experiments.jobs.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", action="store_true", help="one of all ranks")
    parser.add_argument("--watch", action="store_true", help="end when the standard input does")
    options = parser.parse_args(argv)
    if options.watch:
        exit_with_stdin()
    if not options.ranks:
        _run_cases(options.folder, options.folder / "figures.jsonl")
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with report_to_launcher():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        _run_cases(options.folder, options.folder / "figures.jsonl" if dist.get_rank() == 0 else None)
        dist.barrier()  # all figures are out
    sys.stdout.flush()
    # Skips the interpreter's teardown, in which torch aborts one process in some thirty, and so jobs of many ranks.
    os._exit(0)


def _run_cases(folder: Path, path: Path | None) -> None:
    record = parse_object(read_text(folder / "job.json"), source=str(folder / "job.json"))
    name, repetitions = record.text("work"), record.count("repetitions")
    work: WorkFunction = load("work", name)
    check_call("work", name, work, num_arguments=2)
    known = tuple(map(str, record.items("figures", default=[])))
    with Path(path or os.devnull).open("w", encoding="utf-8") as file:
        for case in (Case.of(values) for values in record.items("cases") if isinstance(values, dict)):
            began = time.perf_counter()
            found = work(case, repetitions)
            if not isinstance(found, Iterable):
                raise TypeError(f"{name} gave {found!r}: expected Figures, as by `yield Figure(...)`")
            for figure in found:
                if not isinstance(figure, Figure):
                    raise TypeError(f"{name} gave {figure!r}: expected a Figure")
                if known and figure.name not in known:
                    fail(f"{name}: figure", figure.name, f"one of those that its part declares ({', '.join(known)})")
                file.write(f"{figure.to_json()}\n")
            file.flush()
            if path is not None:
                print(f"{case}: {duration(time.perf_counter() - began)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
