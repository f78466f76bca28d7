"""Memory at the peak of a rank of a measured plan, from what the plan says of its stages. No torch.

Aceso's engine trains in float16 with a sum of gradients in float16, float32 weights and Adam's two moments beside: 16
bytes a parameter, as `partition/formulas` has it, and of embedding, head and workspace what stands there, too. A layer
is 13 operations, which together keep what `partition/formulas` says of a layer; a stage keeps its own operations', for
each of its min(S - s, M) microbatches in flight under 1F1B. Beside them stand, of each microbatch in flight, what it
has sent (the engine lets go of it behind the backward) and what passes by its first operations.

Which operations run again the rows do not say, only how many. Taken is the order in which Aceso's published plans take
them, in all layers before the next ones:

    dropout of the scores and context; scores and softmax; up and GeLU; Q K V; a norm with the dropout before it, twice;
    projection; down

Behind the batch the gradients are in float32 beside nothing else that comes and goes: 18 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ...partition.formulas.device_model import DeviceModel
from ...partition.formulas.layers import transformer_profile
from ...partition.formulas.transformer import Transformer
from ...partition.memory import MemoryUse
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from .mist_messages import VALUE_BYTES, crossing
from .mist_plans import OPERATIONS, MeasuredPlan, Stage, measured, path_of

_VOCABULARY = 50304  # of GPT-2, padded to a multiple of 128
_OFF = 0.03  # of the peak: stages beyond are named
_RATIO = "tensors, predicted / measured"
_NORM, _QKV, _SCORES, _SOFTMAX, _DROPPED, _CONTEXT, _PROJECTION, _ADD, _NORM_2, _UP, _GELU, _DOWN, _ADD_2 = range(13)
_RUN_AGAIN = (
    (_DROPPED, _CONTEXT),
    (_SCORES, _SOFTMAX),
    (_UP, _GELU),
    (_QKV,),
    (_ADD, _NORM_2),
    (_ADD_2, _NORM),
    (_PROJECTION,),
    (_DOWN,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of a layer's operations on one tensor rank, for one microbatch.

    Arguments:
        kept: [13] that autograd keeps of each until the backward.
        saved: [8] that need not be kept where the operations at that place of `_RUN_AGAIN` run again.
        parameters: [13] in 16 bits.
    """

    kept: tuple[float, ...]
    saved: tuple[float, ...]
    parameters: tuple[float, ...]

    @classmethod
    def of(cls, plan: MeasuredPlan, stage: Stage) -> LayerBytes:
        """Those of a stage's layers."""
        h, t = plan.hidden, stage.tensor
        wide = plan.microbatch_size * plan.length * h / stage.data  # values of an activation
        scores = wide / h * plan.heads * plan.length / t
        kept = (2 * wide, 2 * wide, 4 * wide / t, 2 * scores, scores, 2 * scores + 2 * wide / t, 2 * wide / t, wide)
        return cls(
            kept=(*kept, 2 * wide, 2 * wide, 8 * wide / t, 8 * wide / t, wide),
            saved=(
                3 * scores,
                2 * scores,
                8 * wide / t,
                6 * wide / t,
                3 * wide,
                wide,  # what the addition takes is kept instead: the engine begins anew at each first norm
                2 * wide / t,
                8 * wide / t,
            ),
            parameters=tuple(
                VALUE_BYTES * count
                for count in (
                    *(2 * h, 3 * h * h / t + 3 * h / t, 0, 0, 0, 0, h * h / t + h, 0),
                    *(2 * h, 4 * h * h / t + 4 * h / t, 0, 4 * h * h / t + h, 0),
                )
            ),
        )

    def saved_by(self, places: Sequence[int]) -> float:
        """Bytes of one layer of which these of `_RUN_AGAIN` run again; all of it keeps its input alone."""
        if len(places) == len(_RUN_AGAIN):
            return sum(self.kept) - self.kept[_NORM]
        return sum(self.saved[place] for place in places)


def predicted(plan: MeasuredPlan, number: int) -> MemoryUse:
    """Tensors on each rank of a stage at the peak."""
    stage, last = plan.stages[number], number == len(plan.stages) - 1
    bytes_of = LayerBytes.of(plan, stage)
    model = Transformer(
        layers=1, hidden=plan.hidden, heads=plan.heads, vocabulary=_VOCABULARY, length=plan.length, gradients="16-bit"
    )
    embedding, layer, head = transformer_profile(
        model,
        microbatch_size=plan.microbatch_size // stage.data,
        tensor=stage.tensor,
        device=DeviceModel.preset("A100-80GB"),  # of whose speed nothing is asked
    ).nodes
    own = range(max(stage.first, 1), min(stage.last, OPERATIONS * plan.layers) + 1)
    by_layer = groupby(own, key=lambda each: (each - 1) // OPERATIONS)
    layers = [[(each - 1) % OPERATIONS for each in operations] for _, operations in by_layer]
    ends = [*([embedding] if number == 0 else []), *([head] if last else [])]
    weights = sum(node.parameter_bytes for node in ends)
    weights += sum(bytes_of.parameters[each] for operations in layers for each in operations)
    again = _run_again(layers, stage.recomputed)
    kept = sum(node.stash_bytes or 0.0 for node in ends)
    kept += sum(bytes_of.kept[each] for operations in layers for each in operations)
    kept -= sum(bytes_of.saved_by(places) for places in again)
    made_again = [sum(bytes_of.kept[each] for place in places for each in _RUN_AGAIN[place]) for places in again]
    sent = 0.0 if last else _on_a_rank(crossing(plan, stage.last), stage)
    received = _on_a_rank(crossing(plan, stage.first - 1), stage) if number else 0.0
    working = max(made_again, default=0.0) + layer.workspace_bytes
    # What goes round the attention or the MLP belongs to no operation between; a stage that begins there holds it.
    passing = 0.0 if (stage.first - 2) % OPERATIONS in (_ADD, _ADD_2) or not number else bytes_of.kept[_NORM]
    use = MemoryUse(
        parameters=weights,
        gradients=weights,
        optimizer=model.optimizer_ratio * weights,
        activations=min(len(plan.stages) - number, plan.num_microbatches) * (kept + sent + passing),
        workspace=max(working, head.workspace_bytes if last else 0.0),
        communication=sent + received,
    )
    behind = MemoryUse(parameters=weights, gradients=2 * weights, optimizer=use.optimizer)
    return max(use, behind, key=lambda each: each.total)


def memory_of_plans(case: Case, repetitions: int) -> Iterator[Figure]:
    """Peak of tensors on the ranks of each stage, predicted and measured; where it has several, the one with most.

    Case: `plans`, as `path_of` has it.
    """
    del repetitions
    place = 0
    for plan in measured(path_of(case)).plans:
        for number, stage in enumerate(plan.stages):
            place += 1
            own = case.also(
                place=place, model=plan.model, platform=plan.platform, stages=len(plan.stages), stage=number
            )
            found, expected = max(rank.peak_allocated for rank in stage.ranks), predicted(plan, number).total
            for how, value in ((How.PUBLISHED, found), (How.SIMULATED, expected)):
                yield Figure(case=own, name="peak of tensors", value=value, unit="bytes", how=how)
            yield Figure(case=own, name=_RATIO, value=expected / found, unit="ratio", how=How.SIMULATED)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    """How far the peaks are off, and which most."""
    off = {figure.case: figure.value - 1 for figure in figures if figure.name == _RATIO}
    if not off:
        return
    mean, most = fmean(map(abs, off.values())), max(map(abs, off.values()))
    yield f"Peaks of tensors are off by {mean:.1%} on average, {most:.1%} at most ({len(off)} stages)."
    named = "{model} on {platform}, stage {stage} of {stages} ({off:+.1%})"
    beyond = [named.format(**case.values, off=each) for case, each in off.items() if abs(each) > _OFF]
    if beyond:
        yield (
            f"Beyond {_OFF:.0%}: {', '.join(beyond)}. Half of the scores is 3% of such a device: which operations run "
            "again is taken for known."
        )


def _run_again(layers: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """By layer, places of `_RUN_AGAIN`, of which all operations are the stage's."""
    found: list[list[int]] = [[] for _ in layers]
    for place, together in enumerate(_RUN_AGAIN):
        for operations, own in zip(layers, found, strict=True):
            if set(together) <= set(operations) and len(together) <= number:
                own.append(place)
                number -= len(together)
    return found


def _on_a_rank(values: tuple[int, int], stage: Stage) -> float:
    whole, divided = values
    return VALUE_BYTES * (whole + divided / stage.tensor) / stage.data
