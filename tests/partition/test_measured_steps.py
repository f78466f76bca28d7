"""Steps of MLPerf, Megatron-Bridge and nanotron, predicted without a fit (docs/results.md): today's errors, pinned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

import pytest
from support.measured_steps import Step, calibrated, off, read


def mean(every: Iterable[float]) -> float:
    found = [*map(abs, every)]
    return sum(found) / len(found)


def of(file: str) -> list[Step]:
    return [step for step in read()[0] if step.file == file]


def test_every_row_is_priced_or_named_with_a_reason() -> None:
    priced, others = read()
    assert Counter(step.file for step in priced) == {"mlperf": 14, "nanotron": 13, "bridge": 37}
    assert Counter(reason.split(",")[0] for _, reason in others) == {
        "its attention is wider than its hidden size": 41,
        "state-space layers": 21,
        "latent attention": 18,
        "fully sharded": 4,
        "most weights are frozen": 3,
    }
    for step in priced:
        assert step.devices == step.replicas * step.tensor * step.pipeline * step.context
        assert len(step.cuts) == step.pipeline * step.chunks + 1
        assert step.batch % (step.replicas * step.microbatch_size) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "average", "worst"), [("mlperf", 0.083, 0.148), ("bridge", 0.083, 0.259), ("nanotron", 0.130, 0.516)]
)
def test_steps_of_others(file: str, average: float, worst: float) -> None:
    errors = {step: off(step) for step in of(file)}
    for machine, own in groupby(sorted(errors, key=lambda step: step.machine), lambda step: step.machine):
        every = [errors[step] for step in own]
        print(f"{file} {machine}: {mean(every):.1%} on average of {len(every)}, {max(map(abs, every)):.1%} at worst")
    for step, error in errors.items():
        print(f"  {step.name}: {error:+.1%}")
    assert mean(errors.values()) == pytest.approx(average, abs=0.003)
    assert max(map(abs, errors.values())) == pytest.approx(worst, abs=0.005)


@pytest.mark.thorough
def test_tensor_groups_on_one_node_and_over_several() -> None:
    """Tokens a second and GPU of 3.57 billion parameters by T and microbatch (nanotron at 0e0a27e,
    scripts/scaling_benchmarks.py, a comment): what is missing is as much on one node as on two and four."""
    model = next(step for step in of("nanotron") if step.name.startswith("3.57"))
    rows = (2, 3, 14167.25), (4, 9, 13460.16), (8, 18, 10888.53), (16, 40, 6159.30), (32, 90, 3609.73)
    errors = []
    for tensor, batch, tokens in rows:
        sizes = {"devices": tensor, "tensor": tensor, "batch": batch, "microbatch_size": batch}
        seconds = batch * 4096 / tensor / tokens
        errors.append(off(replace(model, **sizes, pipeline=1, is_sharded=False, seconds=seconds)))
    print(*(f"{each:+.1%}" for each in errors))
    assert all(-0.17 < each < -0.09 for each in errors)


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "average"), [("mlperf", 0.080), ("bridge", 0.074), ("nanotron", 0.119)])
def test_two_steps_of_a_machine_foretell_its_others(file: str, average: float) -> None:
    """The first two of each machine calibrate one constant, where one of them foretells the other."""
    errors = []
    for _, own in groupby(sorted(of(file), key=lambda step: step.machine), lambda step: step.machine):
        first, second, *others = [*own, *[None] * 2]
        held_out = [step for step in others if step is not None]
        if second is not None and held_out:
            device = calibrated(first, first, second)
            errors += [off(step, device) for step in held_out]
    print(f"{file}: {mean(errors):.1%} on average of {len(errors)}, {max(map(abs, errors)):.1%} at worst")
    assert mean(errors) == pytest.approx(average, abs=0.003)
