"""Random programs around a pipeline against one plain process: a sample here, thousands in `make nightly`.

A failure prints a script that shows it again, made as small as it gets. More, or one by its number:

    cd tests; ../.venv/bin/python -m support.fuzz --cases 5000           (--gloo: over processes; --seed 17: that one)
    FUZZ_CASES=5000 make nightly ARGS="-k fuzz"
"""

import os
import time
from typing import Any

import pytest
from support.fuzz.blocks import BLOCKS
from support.fuzz.campaign import campaign, checked
from support.fuzz.cases import Case, Model
from support.fuzz.changes import ON_BLOCKS
from support.fuzz.generate import generate
from support.fuzz.models import CHAINS, STYLES
from support.fuzz.reads import READS
from support.grids import one_in

SAMPLE = range(16)
CHUNKS = 8
CASES = int(os.environ.get("FUZZ_CASES", "480"))  # in process; a fifth of it over gloo
FIRST = int(os.environ.get("FUZZ_FIRST", time.strftime("%y%j0000")))  # others each day


@pytest.mark.thorough(but=["9", "11"])
@pytest.mark.parametrize("number", SAMPLE)
def test_a_sample(number: int) -> None:
    verdict = checked(generate(number))
    assert verdict.is_good, f"{verdict.what}\n{verdict.text}"


ONCE = ("counter", "stash", "cached")  # would count again; is refused, since it leaves a tensor for others
CALLS = (("train", 9, 3), ("train", 8, 3), ("eval", 8, 3))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "pop"])
def test_modules_of_every_kind_in_a_chain_and_in_code_of_ones_own(name: str) -> None:
    for style, recompute in (("sequential", "full"), ("loop", "layer")):
        model = Model(style=style, blocks=("linear", name, "norm", name, "mlp"))
        options = () if name in ONCE else (("recompute", recompute),)
        verdict = checked(Case(model=model, P=3, M=4, options=options, calls=CALLS))
        assert verdict.kind == "equal", f"{style}: {verdict.what}\n{verdict.text}"


ORDERS: dict[str, dict[str, Any]] = {
    "1f1b": {"P": 3, "M": 4},
    "zb-h1": {"schedule": "zb-h1", "P": 2, "M": 4},
    "interleaved replicas": {"schedule": "interleaved", "P": 2, "V": 2, "M": 2, "data": 2},
    "2bw": {"schedule": "2bw", "P": 2, "M": 4, "options": (("recompute", "full"),), "refill": True},
}


GPIPE = (("schedule", "gpipe"), ("V", None), ("builder", ()))
MORE_CALLS = (("accumulate", 3, 8, 3, "clip-step"), ("load-state",), ("move", GPIPE), ("train", 9, 3))
IN_A_STREAM = (("train", 8, 3),) * 3


@pytest.mark.thorough(but=["stages-zb-h1"])
@pytest.mark.parametrize(("style", "order"), one_in(2, list(STYLES), list(ORDERS)))
def test_code_of_every_kind_around_modules(style: str, order: str) -> None:
    """The loss takes an auxiliary output too, where there is one. Gradients of several calls add up, and state goes on
    in another pipeline, where it has names that stay; batches of a stream are written over while they are under way."""
    model = Model(
        style=style, blocks=("linear", "mlp", "norm", "attention", "raw"), loss="mse" if style in CHAINS else "outputs"
    )
    more = IN_A_STREAM if order == "2bw" else (c for c in MORE_CALLS if c[0] != "move" or style != "stages")
    verdict = checked(Case(model=model, calls=(*CALLS, *more), **ORDERS[order]))
    assert verdict.kind == "equal", f"{verdict.what}\n{verdict.text}"


@pytest.mark.nightly
@pytest.mark.timeout(14400)
@pytest.mark.parametrize(
    ("chunk", "gloo"),
    [*((at, False) for at in range(CHUNKS)), *(pytest.param(at, True, marks=pytest.mark.gloo) for at in range(2))],
)
def test_cases(chunk: int, gloo: bool) -> None:
    numbers = range(FIRST + chunk, FIRST + CASES // 5, 2) if gloo else range(FIRST + chunk, FIRST + CASES, CHUNKS)
    report = campaign(numbers, gloo=gloo)
    assert not report.faults, report.table() + "\n\n" + "\n".join(report.scripts)
    assert report.counts["no case"] == 0, report.table()
    assert report.counts["equal"] > 0.6 * sum(report.counts.values()), report.table()


BLOCKS_OF_ALL = ("linear", "dropout", "norm", "mlp", "linear")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in READS if name != "nothing"])
def test_what_the_code_between_modules_reads_counts_from_the_next_batch_on(name: str) -> None:
    model = Model(style="loop", blocks=BLOCKS_OF_ALL, reads=name)
    verdict = checked(Case(model=model, M=4, calls=(*CALLS, ("change", "read", 0, 0.5), *CALLS[::-1])))
    assert verdict.kind == "equal", f"{verdict.what}\n{verdict.text}"


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "recompute"), one_in(2, [*ON_BLOCKS], ["none", "full"]))
def test_what_changes_in_a_module_between_steps_counts_from_the_next_batch_on(kind: str, recompute: str) -> None:
    """In a chain and in code of one's own; then with batches of another size."""
    for style in ("sequential", "loop"):
        model, changed = Model(style=style, blocks=BLOCKS_OF_ALL), ("change", kind, 1, 0.5)
        back = (("change", "unfreeze", 1, 1.0), ("change", "train", 1, 1.0))
        calls = (*CALLS, changed, *CALLS[::-1], *back, *CALLS)
        verdict = checked(Case(model=model, M=4, options=(("recompute", recompute),), calls=calls))
        assert verdict.kind == "equal", f"{style}: {verdict.what}\n{verdict.text}"
