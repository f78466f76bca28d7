"""Random programs around a pipeline against one plain process: a sample here, thousands in `make nightly`.

A failure prints a script that shows it again, made as small as it gets. More, or one by its number:

    cd tests; ../.venv/bin/python -m support.fuzz --cases 5000           (--gloo: over processes; --seed 17: that one)
    FUZZ_CASES=5000 make nightly ARGS="-k fuzz"
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fuzz.campaign import Report, campaign, checked
from support.fuzz.cases import Case, Model
from support.fuzz.generate import generate
from support.fuzz.models import blocks_of
from support.inside import TrainingWorker, reader

from stagewright.pipe import PipelineModule

SAMPLE = range(16)
CHUNKS = 8
CASES = int(os.environ.get("FUZZ_CASES", "480"))  # in process; a fifth of it over gloo
FIRST = int(os.environ.get("FUZZ_FIRST", time.strftime("%y%j0000")))  # others each day


@pytest.mark.parametrize("number", SAMPLE)
def test_a_sample(number: int) -> None:
    verdict = checked(generate(number))
    assert verdict.is_good, f"{verdict.what}\n{verdict.text}"


def test_a_case_is_its_number_and_its_own_text() -> None:
    cases = [generate(number, gloo=number % 2 == 0) for number in range(50)]
    assert cases == [generate(number, gloo=number % 2 == 0) for number in range(50)]
    assert cases == [eval(repr(case), {"Case": Case, "Model": Model}) for case in cases]


def _faultless(report: Report) -> None:
    assert not report.faults, report.table() + "\n\n" + "\n".join(report.scripts)
    assert report.counts["no case"] == 0, report.table()
    assert report.counts["equal"] > 0.6 * sum(report.counts.values()), report.table()


@pytest.mark.nightly
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_cases_in_process(chunk: int) -> None:
    _faultless(campaign(range(FIRST + chunk, FIRST + CASES, CHUNKS)))


@pytest.mark.nightly
@pytest.mark.gloo
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("chunk", range(2))
def test_cases_over_gloo(chunk: int) -> None:
    _faultless(campaign(range(FIRST + chunk, FIRST + CASES // 5, 2), gloo=True))


# --- mistakes in the library that it has to find ---


def _equal_weights(patch: pytest.MonkeyPatch) -> None:
    """Each microbatch counts alike, however many samples it has."""
    patch.setattr(reader, "weigh", lambda sizes, group_size: [1 / group_size] * len(sizes))


def _swapped_microbatches(patch: pytest.MonkeyPatch) -> None:
    """The first stage takes microbatch 1 for 0 and 0 for 1."""
    inputs = TrainingWorker._inputs

    def swapped(self: Any, s: int, index: int, batch: Any, k: int) -> list[torch.Tensor]:
        other = 1 - k if k < 2 and len(batch.sizes) > 1 and batch.sizes[0] == batch.sizes[1] else k
        return inputs(self, s, index, batch, other if s == 0 else k)

    patch.setattr(TrainingWorker, "_inputs", swapped)


def _frozen_attributes(patch: pytest.MonkeyPatch) -> None:
    """An attribute stays what it was in the first step."""
    step = PipelineModule.train_step
    firsts: dict[int, float] = {}

    def frozen(self: Any, *batch: Any, **keywords: Any) -> Any:
        blocks = [] if self._model is None else [one for one in blocks_of(self._model) if hasattr(one, "alpha")]
        now = {id(block): block.alpha for block in blocks}
        for block in blocks:
            block.alpha = firsts.setdefault(id(block), block.alpha)
        try:
            return step(self, *batch, **keywords)
        finally:
            for block in blocks:
                block.alpha = now[id(block)]

    patch.setattr(PipelineModule, "train_step", frozen)


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", [_equal_weights, _swapped_microbatches, _frozen_attributes])
def test_it_finds_a_mistake_and_makes_it_small(
    mistake: Callable[[pytest.MonkeyPatch], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        report = campaign(range(400), stops=True)
        (script,) = report.scripts
        capsys.readouterr()
        exec(script, {})
        assert capsys.readouterr().out.startswith(("wrong", "error")), script
    exec(script, {})
    assert capsys.readouterr().out.startswith("equal"), script
    assert script.count("'train'") <= 3, script
