"""The engine's own guard against a standstill, which a checked schedule cannot reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.small import X, Y, make

from stagewright.comm import PipelineError
from stagewright.schedules.messages import Transfer


def test_a_standstill_in_one_process_names_who_waits_for_what() -> None:
    pipe = make()
    mode = pipe._runtime._pipeline.train
    first, second = mode.programs
    lost = next(
        step for step in second.steps if isinstance(step, Transfer) and step.is_send and step.message.index == 1
    )
    silent = replace(second, steps=tuple(step for step in second.steps if step != lost))
    mode.programs = (first, silent)
    message = (
        r"deadlock in one process: rank 0 waits for the gradients of microbatch 1 from stage 1 to stage 0, "
        r"needed before 0B1; last actions of rank 0: 0F0 0F1 0B0 0F2; rank 1 waits for .* needed before 1F3"
    )
    with pytest.raises(PipelineError, match=message):
        pipe.train_step(X, Y)
