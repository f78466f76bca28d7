"""Inputs as measured steps show them."""

from __future__ import annotations

from dataclasses import replace

from support.inside import Cause, Input, measured_inputs

from stagewright.schedules import Collective, Costs, Op, Span, build, simulate


def test_a_gap_in_which_a_sum_begins_is_around_no_action() -> None:
    """One rank of two chunks: behind the last chunk's backward its gradients are copied and sent off for 4 s."""
    step = simulate(
        build("interleaved", num_ranks=1, num_microbatches=1, num_chunks=2), Costs(forward=1.0, backward=2.0)
    )
    (trace,) = step.ranks
    later = {2: 0.0, 3: 4.0}
    compute = tuple(
        Span(s.what, s.start + later.get(n, 0.0), s.end + later.get(n, 0.0)) for n, s in enumerate(trace.compute)
    )
    begun = Span(Collective((1,), Op.REDUCE_GRAD, 0), compute[2].end, compute[3].end)
    seen = [
        measured_inputs([replace(step, ranks=(replace(trace, compute=compute, collectives=sums),))])
        for sums in ((), (begun,))
    ]
    around = [each.get(Input(Cause.OVERHEAD, "overhead", (1,))) for each in seen]
    assert around == [2.0, 0.0]
