"""The engine's own guard against a standstill, which a checked schedule cannot reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.inside import RankProgram, Transfer
from support.small import X, Y, make

from stagewright.comm import PipelineError


def test_a_standstill_in_one_process_names_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make()
    engine = pipe._building.built("the engine").engine
    run = engine.run

    def with_a_silent_rank(programs: Mapping[int, RankProgram]) -> None:
        second = programs[1]
        lost = next(
            step for step in second.steps if isinstance(step, Transfer) and step.is_send and step.message.index == 1
        )
        silent = replace(second, steps=tuple(step for step in second.steps if step != lost))
        run({**programs, 1: silent})

    monkeypatch.setattr(engine, "run", with_a_silent_rank)
    message = (
        r"deadlock in one process: rank 0 waits for the gradients of microbatch 1 from stage 1 to stage 0, "
        r"needed before 0B1; last actions of rank 0: 0F0 0F1 0B0 0F2; rank 1 waits for .* needed before 1F3"
    )
    with pytest.raises(PipelineError, match=message):
        pipe.train_step(X, Y)
