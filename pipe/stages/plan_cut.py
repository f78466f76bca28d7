"""A plan's stages on a model: which cut unit stands on which stage, or why the plan is for another model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from ...partition.plans.plan import Plan


def stage_by_node(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Node -> stage, for the model's cut units `names`.

    Raises ValueError unless the plan's nodes are the model's; it says what differs.
    """
    stages = {node: number for number, stage in enumerate(plan.stages) for node in stage.nodes}
    unknown = [node for node in stages if node not in names]
    missing = [name for name in names if name not in stages]
    if unknown or missing:
        story = []
        if unknown:
            near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.5)
            hint = f" (it has {near[0]!r})" if near else ""
            story.append(f"its node {unknown[0]!r} is not in the model{hint}")
        if missing:
            story.append(f"the model's {missing[0]!r} is in no stage of it")
        raise ValueError(
            f"the plan is for another model ({len(stages)} nodes, the model has {len(names)}): {' and '.join(story)}. "
            f"Expected a plan that was made from a profile of this model (stagewright profile, stagewright plan)"
        )
    return stages


def check_parameters(plan: Plan, stages: Sequence[nn.Module]) -> None:
    """ValueError unless each stage holds as many bytes of parameters as in the plan; in plans of older profiles those
    that a stage before holds, too, count with that one alone.

    Where the plan splits tensors over T ranks, its bytes may be those of one of them, or of some parameters whole.
    """
    seen: set[int] = set()
    for number, (planned, module) in enumerate(zip(plan.stages, stages, strict=True)):
        own = list(module.parameters())
        held = sum(p.numel() * p.element_size() for p in own)
        fresh = sum(p.numel() * p.element_size() for p in own if id(p) not in seen)
        seen.update(map(id, own))
        told = planned.parameter_bytes
        if told is not None and not any(each - 0.5 <= told <= each * planned.tensor + 0.5 for each in (held, fresh)):
            raise ValueError(
                f"the plan is for another model: stage {number} ({planned.nodes[0]} .. {planned.nodes[-1]}) has "
                f"{told:,.0f} bytes of parameters in the plan and {held:,} in the model. Expected a "
                f"plan made from a profile of a model of these sizes and types"
            )
