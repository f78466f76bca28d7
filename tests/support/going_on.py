"""A rank of a run that goes on when processes die, which strikes itself where it is told to.

    python going_on.py FOLDER SCHEDULE PIPE DATA STEPS    STRIKES="rank:step:point[:signal],..."

Points: begin, F (in a forward), B (in a backward), E (in a forward of an evaluation, under EVALUATES, which also saves
after each step), save, saving and snapshot (before that and in it), close, loss, vote (before them), ready (before the
vote), voted, update, form (before the world is formed anew), formed, or so many milliseconds from the beginning of the
step. A signal may be "raise". Each rank writes a line a step: step, loss, microbatches that a layer of it has seen.
STAGED: see `support.staged`.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stagewright as sw

WIDTH, LAYERS, SAMPLES, NUM_MICROBATCHES = 12, 4, 24, 4


_TOLD: dict[tuple[str, str | None], list[str]] = {}  # of this process: a loss has the same digest in another life


class Strikes:
    """Where this rank is to be struck, and what for."""

    def __init__(self, text: str, rank: int) -> None:
        told = [word.split(":") for word in text.split(",") if word]
        _TOLD.clear()
        _TOLD.update({(step, point): how for own, step, point, *how in told if int(own) == rank})
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step
        for (at, point), how in _TOLD.items():
            if at == str(step) and point.isdigit():
                threading.Timer(int(point) / 1000, strike, [how]).start()
        self.at("begin")

    def at(self, point: str | None) -> None:
        how = _TOLD.pop((str(self.step), point), None)
        if how is not None:
            strike(how)

    def around(self, target: Any, name: str, point: str | None, behind: str | None = None) -> None:
        """Strike before a method, or after it."""
        method: Callable[..., Any] = getattr(target, name)

        def struck(*args: Any, **options: Any) -> Any:
            self.at(point)
            answer = method(*args, **options)
            self.at(behind)
            return answer

        setattr(target, name, struck)


def strike(how: list[str]) -> None:
    if how == ["raise"]:
        raise ArithmeticError("so it was told")
    os.kill(os.getpid(), getattr(signal, how[0] if how else "SIGKILL"))


class Layer(nn.Module):
    def __init__(self, strikes: Strikes) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(float(os.environ.get(f"DROPOUT{os.environ.get('STAGEWRIGHT_LIFE')}", "0.1")))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._strikes = strikes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._strikes.at("F" if self.training else "E")
        self.seen += 1
        out: torch.Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        if out.requires_grad:
            out.register_hook(lambda _: self._strikes.at("B"))
        return out


def make_pipe(schedule: str, pipe: int, data: int, strikes: Strikes) -> sw.PipelineModule:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        strikes.at("loss")
        return ((output - target) ** 2).mean()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.Adam(parameters, lr=1e-2)
        strikes.around(made, "step", "update")
        return made

    torch.manual_seed(0)
    return sw.PipelineModule(
        nn.Sequential(*[Layer(strikes) for _ in range(max(LAYERS, 2 * pipe))]).double(),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=loss,
        optimizer=optimizer,
        max_grad_norm=1.0,
        mesh=sw.Mesh(pipe=pipe, data=data, on_failure="reroute"),
        timeout=60.0,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, y


def losses(schedule: str, pipe: int, data: int, steps: int) -> list[tuple[float, float]]:
    """Of each step and of an evaluation after it: those of an undisturbed run, in one process."""
    run = make_pipe(schedule, pipe, data, Strikes("", 0))
    calls = run.train_step, run.eval_step
    return [tuple(call(*batch(step)).loss or 0.0 for call in calls) for step in range(steps)]  # type: ignore[misc]


def wait_for_others(run: sw.PipelineModule) -> None:
    from support.inside import dead

    life: Any = run._building.life  # of Mesh(on_failure="reroute")
    members = life._members
    outside = {one: members._lives[one] for one in members._lives if one not in members.members}

    def asks(one: int, life: int) -> bool:
        """To be let in; or it has ended again, without."""
        key = members._wants(one)
        asked = members._store.check([key]) and int(members._store.get(key)) > life
        return asked or members._store.check([dead(one, life + 1)])

    while outside and not any(asks(*one) for one in outside.items()):
        time.sleep(0.01)


def main(folder: str, schedule: str, pipe: str, data: str, steps: str) -> None:
    from support.inside import FlushUpdate, Membership, PipeStateState, PipeTrainingTraining, report_to_launcher
    from support.staged import staging

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    life = os.environ.get("STAGEWRIGHT_LIFE", "")
    strikes = Strikes(os.environ.get(f"STRIKES{life}", ""), rank)
    strikes.around(Membership, "form", "form", behind="formed")
    strikes.around(FlushUpdate, "prepare", None, behind="ready")
    strikes.around(PipeTrainingTraining, "_vote", "vote", behind="voted")
    strikes.around(PipeStateState, "snapshot", "saving", behind="snapshot")
    staged = staging() if "STAGED" in os.environ else nullcontext()
    with staged, report_to_launcher(), Path(folder, f"{rank}.log").open("a", buffering=1) as log:
        run = make_pipe(schedule, int(pipe), int(data), strikes)
        for step in range(run.num_steps, int(steps)):
            if str(step) in os.environ.get("WAITS", "").split(","):  # for one that was started again
                wait_for_others(run)
            strikes.begin(step)
            loss = run.train_step(*batch(step)).loss
            evaluated = []
            if folder_of_saved := os.environ.get("EVALUATES"):
                evaluated = [run.eval_step(*batch(step)).loss]
                strikes.at("save")
                run.save(folder_of_saved)
            seen = max(int(b) for name, b in run.state_dict().items() if name.endswith("seen"))
            log.write(json.dumps([step, loss, seen, *evaluated]) + "\n")
        strikes.at("close")
        run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
