"""Kills at random moments, counted: a run after the other, each of several processes of which some are killed.

    cd tests && ../.venv/bin/python -m support.deaths KILLS FIRST_SEED FILE    appends a line a run, prints the table
    cd tests && ../.venv/bin/python -m support.deaths table FILE...            prints it alone

Ranks are forked from this process, which has loaded all they need, so that a run takes two seconds and not thirty.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from . import going_on

SCHEDULES, MESHES = ("1f1b", "interleaved", "zb-h1"), ((2, 2), (2, 3), (4, 2))
POINTS = ["begin", "F", "B", "vote", "ready", "voted", "update"]
FORMING = ["form", "formed", "again", "joined"]
LIMIT, STILL = 240.0, 90.0  # [s] after which a run has hung: in all, and with nobody who computes
JOINS = "3,5,7,9"  # steps in front of which all wait for one that was started again
STEPS = 13


class Plan(NamedTuple):
    """Strikes of a run, by life of the process; they are survived unless a stage loses its last holder."""

    schedule: str
    pipe: int
    data: int
    restarts: int
    strikes: list[list[str]]
    limit: str = ""  # [s] of a wait, where one is stopped


def planned(seed: int) -> Plan:
    """2 to 4 kills: named points and random moments, some in one step, some while the others form anew."""
    choose = random.Random(seed)
    pipe, data = MESHES[seed // len(SCHEDULES) % len(MESHES)]
    lives = {p * data + choose.randrange(data) for p in range(pipe)}
    mortal = [rank for rank in choose.sample(range(pipe * data), pipe * data) if rank not in lives]
    restarts = choose.random() < 0.6
    strikes: list[list[str]] = [[], [], []]
    step, moment = 1, lambda: str(choose.randrange(60))
    for number, rank in enumerate(mortal[: choose.choice([2, 3]) if restarts else 4]):
        in_forming = number > 0 and choose.random() < 0.3
        point = choose.choice(FORMING) if in_forming else choose.choice([choose.choice(POINTS), moment()])
        strikes[0].append(f"{rank}:{step - (step > 1 and in_forming)}:{point}")
        step += choose.choice([0, 1, 2])
        if restarts and choose.random() < 0.6:  # it dies again: as it starts, as it joins, or in its first step
            again = choose.choice([f"start:{choose.randrange(1500)}", "first:" + choose.choice([*FORMING, *POINTS])])
            strikes[1].append(f"{rank}:{again}")
    limit = ""
    if choose.random() < 0.08 and len(strikes[0]) > 2:  # limits hold from the first forming on
        strikes[0][-1], limit = strikes[0][-1] + ":SIGSTOP", "10"
    return Plan(SCHEDULES[seed % len(SCHEDULES)], pipe, data, 8 * restarts, strikes, limit)


class Forked:
    """A process as subprocess.Popen has it, forked from this one."""

    def __init__(self, work: Callable[[], object], environment: dict[str, str], **_: Any) -> None:
        (stdin, self_in), (self_out, stdout) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.setsid()
                for own, number in ((stdin, 0), (stdout, 1), (stdout, 2)):
                    os.dup2(own, number)
                os.closerange(3, 256)
                os.environ.clear()
                os.environ.update(environment)
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(self_in, "wb"), os.fdopen(self_out, "rb")
        self.stderr = self.stdout  # which the launcher reads of rank 0

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        return self._waited(0)

    def _waited(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def launched(folder: Path, plan: Plan) -> dict[str, Any]:
    """What the launcher says of a run, in a process of its own."""
    from support.inside import launch, rank_process

    def forked(command: Sequence[str], *, env: dict[str, str], **_: Any) -> Forked:
        return Forked(lambda: going_on.main(*command), env)

    rank_process.subprocess = type("Forking", (), {"Popen": staticmethod(forked), "PIPE": subprocess.PIPE, "STDOUT": 0})
    words = [str(folder), plan.schedule, str(plan.pipe), str(plan.data), str(STEPS)]
    told = {f"STRIKES{life or ''}": ",".join(each) for life, each in enumerate(plan.strikes)}
    told |= {"WAITS": JOINS if plan.restarts else "", "KILLS": str(folder / "kills"), "OMP_NUM_THREADS": "1"}
    told |= {"LIMIT": plan.limit} if plan.limit else {}
    started = time.monotonic()
    number = plan.pipe * plan.data
    result = launch(words, num_ranks=number, timeout=LIMIT, stall=STILL, environment=told, restarts=plan.restarts)
    return {"status": result.status, "report": result.report, "seconds": round(time.monotonic() - started, 1)}


def judged(folder: Path, outcome: dict[str, Any], plan: Plan, wanted: list[float]) -> dict[str, Any]:
    """Counts of a run: kills, and whether it hung, was wrong, or ended by name, as it must where a stage is lost."""
    kills = [int(line) for line in (folder / "kills").read_text().split()] if (folder / "kills").exists() else []
    wrong, made = [], {}
    for path in sorted(folder.glob("*.log")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        made[int(path.stem)] = [line[0] for line in lines if line[0] != "threads"]
        losses = [line for line in lines if line[0] != "threads"]
        wrong += [f"rank {path.stem}: {line}" for line in losses if abs(line[1] / wanted[line[0]] - 1) > 1e-12]
    report = outcome["report"]
    hung = "not done after" in report or "stand still" in report
    lost = [stage for stage in range(plan.pipe) if set(range(stage * plan.data, (stage + 1) * plan.data)) <= {*kills}]
    named = bool(outcome["status"]) and not hung
    if named and not (lost and "are dead, and nobody else has stage" in report):
        wrong.append(f"ended: {report[-1500:]}")
    for rank, steps in made.items() if not outcome["status"] else ():
        alive = rank not in kills or plan.restarts
        if alive and (not steps or steps[-1] != STEPS - 1) and f"rank {rank}: killed" not in report:
            wrong.append(f"rank {rank} made {steps}")
    if hung:
        wrong.append(report[-1500:])
    return {"kills": len(kills), "hung": hung, "wrong": wrong, "named": named, "seconds": outcome["seconds"]}


def in_a_fork(work: Callable[[Path], object], folder: Path) -> Any:
    """What it gives, by way of a file."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            (folder / "answer").write_text(json.dumps(work(folder)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.waitpid(pid, 0)
    answer = json.loads((folder / "answer").read_text())
    (folder / "answer").unlink()
    return answer


def table(paths: Sequence[str]) -> str:
    rows: dict[tuple[str, str], list[float]] = {}
    for line in (json.loads(line) for path in paths for line in Path(path).read_text().splitlines()):
        counts = rows.setdefault((line["schedule"], line["mesh"]), [0] * 5)
        for at, count in enumerate((1, line["kills"], line["hung"], bool(line["wrong"]), line["named"])):
            counts[at] += count
    head = ["| schedule | mesh | runs | kills | hangs | wrong | ended by name |", f"|{' --- |' * 7}"]
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    every = [*sorted(rows.items()), (("all", ""), total)]
    return "\n".join([*head, *(f"| {' | '.join(map(str, [*key, *counts]))} |" for key, counts in every)])


def main(kills: str, first_seed: str, path: str) -> None:
    import torch.distributed  # noqa: F401 - what a rank needs, loaded once

    import stagewright.pipe  # noqa: F401
    from support.inside import FlushUpdate, launch  # noqa: F401

    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    references: dict[tuple[str, int, int], list[float]] = {}
    done, seed = 0, int(first_seed)
    while done < int(kills):
        plan = planned(seed)
        mesh = plan.schedule, plan.pipe, plan.data
        with TemporaryDirectory(prefix="stagewright-") as name:
            if mesh not in references:
                references[mesh] = in_a_fork(lambda _, mesh=mesh: going_on.losses(*mesh, STEPS), Path(name))
            outcome = in_a_fork(lambda folder, plan=plan: launched(folder, plan), Path(name))
            counts = judged(Path(name), outcome, plan, references[mesh])
        with Path(path).open("a") as file:
            told = {"seed": seed, "schedule": plan.schedule, "mesh": f"{plan.pipe}x{plan.data}"}
            file.write(json.dumps(told | counts | {"plan": plan._asdict(), "report": outcome["report"]}) + "\n")
        done, seed = done + counts["kills"], seed + 1
    print(table([path]))


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(table(sys.argv[2:]))
    else:
        main(*sys.argv[1:])
