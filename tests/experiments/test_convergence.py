"""The convergence experiment: what its runs say, and short ones of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.inside import (
    Case,
    How,
    Setting,
    batch,
    derive_versions,
    draw,
    label,
    load_corpus,
    loss,
    outcomes,
    reference,
    seconds_of,
)
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool

TINY = {"total_updates": 8, "evaluate_every": 4, "windows": 128, "layers": 2, "width": 16, "length": 16, "sequences": 4}


def figures(case: dict[str, object], losses: dict[float, list[float]]) -> list[Figure]:
    """Runs of one method: by rate the final losses of seeds 0, 1, ..., each with a curve of two points."""
    made = []
    for rate, by_seed in losses.items():
        for seed, value in enumerate(by_seed):
            at = Case.of({**case, "rate": rate})
            kind = {"unit": "nats", "how": How.MEASURED, "repetition": seed}
            for updates, part in ((50, 2.0), (100, 1.2), (150, 1.0)):
                one = at.also(updates=updates)
                made.append(Figure(case=one, name="validation loss", value=part * value, **kind))  # type: ignore[arg-type]
            made.append(Figure(case=at, name="final loss", value=value, **kind))  # type: ignore[arg-type]
    return made


FLUSH = {"schedule": "1f1b", "optimizer": "muon"}
LATE = {"schedule": "2bw", "optimizer": "muon", "correction": "error-feedback", "factor": 2.0}
FOUND = [
    *figures({"schedule": "1f1b", "optimizer": "adamw"}, {0.001: [2.2], 0.002: [2.1], 0.004: [2.4]}),
    *figures(FLUSH, {0.002: [1.9], 0.004: [1.7, 1.8, 1.6], 0.008: [1.75]}),
    *figures(LATE, {0.002: [1.8], 0.004: [1.76, 1.78, 1.7]}),
    *(
        Figure(case=Case.of({**case, "rate": 0.004}), name="throughput", value=value, unit="tokens/s", how=How.MEASURED)
        for case, value in ((FLUSH, 1000.0), ({**LATE, "factor": 1.0}, 1500.0))
    ),
]


@pytest.mark.thorough
def test_methods_are_judged_at_their_best_rates(tmp_path: Path) -> None:
    adamw, flush, late = outcomes(FOUND)
    assert reference([adamw, flush, late]) is flush
    assert (flush.best_rate, flush.best, flush.is_bracketed) == (0.004, [1.7, 1.8, 1.6], True)
    assert (late.best_rate, late.is_bracketed) == (0.004, False)
    assert label(late.method) == "2bw, Muon, feedback x 2"
    pictures = [tmp_path / name for _, name in draw(FOUND, tmp_path)]
    assert [path.name for path in pictures] == ["convergence.png"]
    assert all(path.stat().st_size > 10_000 for path in pictures)


def test_updates_with_a_flush_take_the_time_of_one() -> None:
    method = Case.of({**LATE, "flush_first": 10})
    assert seconds_of(FOUND, method) is None  # nobody timed 1f1b with this correction
    timed = Figure(
        case=Case.of({**LATE, "schedule": "1f1b"}), name="throughput", value=500.0, unit="tokens/s", how=How.MEASURED
    )
    seconds, setting = seconds_of([*FOUND, timed], method), Setting.of(method.values)
    per_update = setting.sequences * setting.length
    assert seconds(10) == pytest.approx(10 * per_update / 500)
    assert seconds(30) == pytest.approx(10 * per_update / 500 + 20 * per_update / 1500)


@pytest.mark.thorough
def test_the_first_updates_may_have_a_flush() -> None:
    def run(**values: object) -> list[float]:
        return [found.value for found in loss(Case.of({**TINY, "correction": "error-feedback", **values}), 1)]

    flush, late = run(schedule="1f1b"), run(schedule="2bw")
    both = run(schedule="2bw", flush_first=4)
    assert both[0] == flush[0] != late[0]
    assert both[1] not in (flush[1], late[1])
    assert run(schedule="2bw", flush_first=8) == flush


def test_schedules_that_update_behind_each_microbatch_see_the_same_batches() -> None:
    flush, stream = Setting(schedule="1f1b"), Setting(schedule="pipedream", ranks=4)
    corpus = load_corpus()
    whole = batch(stream, corpus, 1)
    assert len(whole.tokens) == 160
    for at, part in enumerate(whole.tokens.split(16)):
        assert torch.equal(part, batch(flush, corpus, 10 + at).tokens)
    assert stream.make_schedule().weight_rule == "stashing"
    cut = Setting(schedule="pipedream", ranks=4, update_every=8)  # in as many microbatches as the flush schedule's
    assert torch.equal(batch(cut, corpus, 3).tokens, batch(flush, corpus, 3).tokens)
    assert derive_versions(cut.make_schedule()).staleness == (1, 1, 1, 0)
    assert derive_versions(stream.make_schedule()).staleness == (3, 2, 1, 0)


def _raced(values: dict[str, object]) -> list[tuple[str, bool]]:
    return [(found.name, found.value > 0) for found in loss(Case.of(values), 1)]


@pytest.mark.thorough
@pytest.mark.gloo
def test_runs_on_processes_tell_their_seconds(gloo: Pool) -> None:
    values = {**TINY, "schedule": "2bw", "optimizer": "nadam", "evaluate_every": 1000}
    told = [("validation loss", True), ("final loss", True), ("training time", True)]
    assert gloo.run(_raced, ranks=2, args=(values,)) == [told, told]


@pytest.mark.thorough(but=["values0-schedule='3bw': expected 1f1b, 2bw"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "3bw"}, "schedule='3bw': expected 1f1b, 2bw"),
        ({"schedule": "2bw", "optimizer": "lion"}, "optimizer='lion': expected adamw, nadam, muon"),
        ({"schedule": "pipedream", "total_updates": 25}, "total_updates=25, evaluate_every=50: expected multiples of"),
        ({"schedule": "2bw", "lr": 1.0}, "lr: expected some of schedule"),
        ({"schedule": "pipedream", "flush_first": 25}, "flush_first=25: expected a multiple of 10, the updates of one"),
        ({"schedule": "2bw", "flush_first": 501}, "flush_first=501: expected a multiple of 1, .* total_updates=500"),
    ],
)
def test_a_setting_that_cannot_be_meant(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(loss(Case.of(values), 1))
