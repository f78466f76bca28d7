"""The convergence experiment: what its curves say, and a short run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done

from stagewright.experiments.cli import main
from stagewright.experiments.convergence.command import table
from stagewright.experiments.convergence.curves import Curve, of_method, seconds_to, summarize, within_spread


def curve(method: str, seed: int, losses: list[float], *, pace: float = 1.0) -> Curve:
    steps = [10 * i for i in range(len(losses))]
    return Curve(
        method=method,
        seed=seed,
        tokens_per_step=100,
        steps=steps,
        seconds=[pace * step for step in steps],
        losses=losses,
    )


CURVES = [
    curve("1f1b", 0, [5.0, 3.0, 2.0]),
    curve("1f1b", 1, [5.0, 3.0, 2.4]),
    curve("2bw", 1, [5.0, 3.4, 2.3], pace=0.5),
    curve("2bw", 0, [5.0, 3.4, 2.1], pace=0.5),
]


def test_curves_of_a_method_come_by_seed() -> None:
    assert [c.seed for c in of_method(CURVES, "2bw")] == [0, 1]


@pytest.mark.parametrize(("target", "expected"), [(5.0, 0.0), (4.0, 5.0), (3.0, 10.0), (2.5, 15.0), (2.0, 20.0)])
def test_when_a_loss_is_reached(target: float, expected: float) -> None:
    assert seconds_to(target, [0.0, 10.0, 20.0], [5.0, 3.0, 2.0]) == expected


def test_a_loss_that_is_never_reached() -> None:
    with pytest.raises(ValueError, match="the loss never reaches 1"):
        seconds_to(1.0, [0.0, 10.0], [5.0, 3.0])


def test_a_method_is_judged_at_a_loss_that_both_reach() -> None:
    one, two = summarize(CURVES, reference="1f1b")
    assert (one.method, one.seeds, one.final, one.low, one.high) == ("1f1b", 2, pytest.approx(2.2), 2.0, 2.4)
    assert (two.common_loss, two.seconds_to_common, two.reference_seconds) == pytest.approx((2.2, 10.0, 20.0))
    assert (one.tokens_per_second, two.tokens_per_second) == (100.0, 200.0)
    assert within_spread([one, two], "2bw", "1f1b")
    text = table([one, two])
    assert "2.00 x" in text
    assert "2bw ends within the seed spread of 1f1b" in text
    worse = summarize([*CURVES[:2], curve("2bw", 0, [5.0, 4.0, 2.5])], reference="1f1b")
    assert "2bw ends outside" in table(worse)
    assert worse[1].common_loss == 2.5
    assert worse[1].reference_seconds == pytest.approx(10 + 10 * 0.5 / 0.8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convergance"], "unknown experiment 'convergance'; did you mean convergence"),
        (["convergence", "--methods", "3bw"], "--methods 3bw: expected some of single, 1f1b, 2bw"),
        (["convergence", "--methods", "2bw"], "--methods 2bw: expected 1f1b among them"),
        (["convergence", "--seeds", "0"], "--seeds 0: expected at least 1"),
        (["convergence", "--batch", "1"], "--batch 1 for --microbatches 2"),
    ],
)
def test_a_users_mistake(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", *argv]) == 2
    assert message in capsys.readouterr().err


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment"]) == 0
    assert "convergence" in capsys.readouterr().out


@pytest.mark.gloo
def test_a_short_run(command: Callable[..., Done], tmp_path: Path) -> None:
    words = "--steps 4 --seeds 1 --evaluate-every 2 --methods single 1f1b 2bw --layers 2 --width 16 --length 16"
    out = tmp_path / "c"
    done = command("experiment", "convergence", *words.split(), "--windows", "16", "--out", str(out), "--json")
    assert done.status == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == json.loads((out / "results.json").read_text())
    single, flush, stream = (Curve(**c) for c in answer["curves"])
    assert single.steps == [0, 2, 4]
    assert single.losses == pytest.approx(flush.losses, abs=1e-5)  # one process and 1f1b do the same
    assert stream.losses[0] == pytest.approx(flush.losses[0], abs=1e-5)
    assert (out / "convergence.png").stat().st_size > 10_000
