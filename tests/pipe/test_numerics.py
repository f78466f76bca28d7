"""All ranks in one process against the reference: loss, gradients, parameters, buffers, dropout on, float64.

    difference 0      one path, no ties: whatever the schedule, each sum runs over microbatches 0 .. M-1
    below 1e-12       traced models with skips or ties, (sum, count) losses, clipping
    below 1e-10       the same after AdamW steps

The protocol that every case runs is at the head of support/cases.py; it also watches the global random state.
"""

from typing import Any

import pytest
from support.cases import Case, Layout, agree
from support.matrix import MICROBATCHES, all_layouts, cover, make_case, sample
from support.models import make_batch
from support.pipeline import make_pipeline, run
from support.pool import Pool
from support.reference import reference, reference_model

pytestmark = pytest.mark.filterwarnings("ignore:the schedule splits the backward of stage")

RANKS = (1, 2, 3, 4)
LAYOUTS = all_layouts(ranks=RANKS)


def check(case: Case, layout: Layout) -> None:
    agree(run(case, layout), reference(case), case)


@pytest.mark.thorough(but=["1f1b-P2-M2"])
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        pytest.param(layout, MICROBATCHES[k % 4], id=f"{layout}-M{MICROBATCHES[k % 4]}")
        for k, layout in enumerate(LAYOUTS)
        if layout.num_ranks > 1
    ],
)
def test_mlp_under_every_schedule(layout: Layout, num_microbatches: int) -> None:
    check(make_case("mlp", layout, num_microbatches), layout)


@pytest.mark.thorough(but=["mlp-zb-h1-P3-M2"])
@pytest.mark.parametrize(("case", "layout"), sample(ranks=RANKS))
def test_every_model(case: Case, layout: Layout) -> None:
    check(case, layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "layout"), cover(ranks=RANKS))
def test_every_model_under_every_schedule(case: Case, layout: Layout) -> None:
    check(case, layout)


INTERLEAVED = {"schedule": "interleaved", "num_ranks": 2, "num_chunks": 2}
FROZEN: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {  # task, split points, prefixes
    "here and there": ("mlp", ("6", "12"), ("3.", "9.bias", "12.")),
    "first stage": ("mlp", ("6", "12"), ("0.", "3.")),
    "middle stage": ("mlp", ("6", "12"), ("6.", "9.")),
    "last stage": ("mlp", ("6", "12"), ("12.", "15.", "18.")),
    "embedding and blocks": ("gpt", ("4", "7"), ("0.", "2.", "3.")),
    "batchnorm still counts": ("batchnorm", ("4", "12"), ("0.", "1.")),
    "skip without gradient": ("unet", ("down.1", "up.0"), ("stem", "down.0")),
}
CUTS = {
    "mlp": ("1", "2", "17"),
    "gpt": ("2", "6", "11"),
    "unet": ("down.1", "middle", "up.1"),
    "tied-gpt": ("blocks.0", "blocks.2", "head"),
}
ASKED: dict[str, tuple[str, Layout, int, dict[str, Any]]] = {  # task, layout, M, options of the case
    **{
        f"frozen: {name}, {recompute}": (
            task, Layout(num_ranks=3, cut=points, recompute=recompute), 5, {"frozen": frozen}
        )
        for name, (task, points, frozen) in FROZEN.items()
        for recompute in ("none", "full")
    },
    **{
        f"recompute stage by stage: {task}, {words}": (task, Layout(**INTERLEAVED, recompute=words), 5, {})
        for task in ("gpt", "batchnorm")
        for words in (("full", "none", "none", "full"), ("none", "full", "full", "none"))
    },
    **{f"cut: {task}": (task, Layout(**INTERLEAVED, cut=points), 5, {}) for task, points in CUTS.items()},
    # Larger and smaller than the example; 5 samples are microbatches of one.
    **{
        f"sizes: {task}": (task, Layout(num_ranks=3), 5, {"sizes": (11, 13, 5, 10, 7)})
        for task in ("mlp", "gpt", "unet", "tied-gpt", "masked-stages")
    },
    **{
        f"sizes: {task}": (task, Layout(num_ranks=3, recompute="full"), 3, {"sizes": (9, 13, 6, 11, 7)})
        for task in ("batchnorm", "batchnorm-cnn")
    },
    # Over all stages at once; a tied weight counts once. SGD does not amplify the rounding of the norm.
    **{
        f"clipped: {task}": (task, Layout(**INTERLEAVED), 5, {"max_grad_norm": 0.05, "optimizer": "momentum"})
        for task in ("mlp", "batchnorm", "gpt-masked", "masked-stages", "tied-gpt")
    },
    "below the norm": ("mlp", Layout(num_ranks=2), 4, {"max_grad_norm": 1e6, "optimizer": "momentum"}),
    **{
        f"rates: {optimizer}": (
            "mlp", Layout(schedule="looped-bfs", num_ranks=2, num_chunks=3), 4, {"decay": True, "optimizer": optimizer}
        )
        for optimizer in ("adamw", "momentum")
    },
    # Tied embeddings on one rank of a V; blocks that run again in front of their I.
    "zb-v": ("tied-gpt", Layout(schedule="zb-v", num_ranks=2, num_chunks=2), 5, {}),
    "v-half": ("gpt", Layout(schedule="v-half", num_ranks=2, num_chunks=2, recompute="full"), 5, {}),
    "zb-h1: gpt": ("gpt", Layout(schedule="zb-h1", num_ranks=2, recompute="layer"), 3, {}),
    "zb-h1: tied-gpt": ("tied-gpt", Layout(schedule="zb-h1", num_ranks=2), 4, {}),
    "zb-h1: unet": ("unet", Layout(schedule="zb-h1", num_ranks=2, recompute="full"), 4, {}),
}  # fmt: skip


@pytest.mark.thorough(but=["frozen: first stage, none"])
@pytest.mark.parametrize("name", ASKED)
def test_what_a_case_may_ask_for(name: str) -> None:
    task, layout, num_microbatches, options = ASKED[name]
    case = make_case(task, layout, num_microbatches, **options)
    limit = case.max_grad_norm
    assert limit is None or all(norm and (norm > limit) == (limit < 1) for norm in reference(case).grad_norms)
    check(case, layout)


def gloo_check(gloo: Pool, case: Case, layout: Layout) -> None:
    """Agreement includes: the same loss and the same full_state_dict on every rank."""
    agree(gloo.run(run, ranks=layout.num_ranks, args=(case, layout)), reference(case), case)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "layout"), sample(ranks=(2, 3, 4), times=1))
def test_every_model_gloo(gloo: Pool, case: Case, layout: Layout) -> None:
    gloo_check(gloo, case, layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "layout"), cover(ranks=(2, 3, 4)))
def test_every_model_under_every_schedule_gloo(gloo: Pool, case: Case, layout: Layout) -> None:
    gloo_check(gloo, case, layout)


def train_as_torchrun_does(case: Case, layout: Layout) -> tuple[int, int, float]:
    """No process group, no mesh, no example inputs: all of it comes from outside and the first call."""
    inputs, target = make_batch(case.task, index=0, size=case.batch_sizes[0])
    pipe = make_pipeline(case, layout, reference_model(case), mesh=None, example_inputs=None)
    loss = pipe.forward_backward(*inputs, target).loss
    position = (pipe.rank, pipe.num_ranks, loss)
    pipe.close()
    return position


@pytest.mark.thorough
def test_the_environment_alone_is_enough(gloo: Pool) -> None:
    layout = Layout(num_ranks=2)
    case = make_case("mlp", layout, 5)
    found = gloo.run(train_as_torchrun_does, ranks=2, args=(case, layout), group=False)
    loss = reference(case).losses[0]
    assert found == [(0, 2, loss), (1, 2, loss)]
