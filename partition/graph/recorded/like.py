"""The stages of one record carried over to another one of the same model: other shapes, or evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping

from .calls import UnitCall
from .flow import Flow


def stages_like(flow: Flow, stage_of: Mapping[int, int], other: Flow, *, same_modules: bool) -> dict[int, int]:
    """The stage of each call of `other`: by number where the calls are the same, else by the modules between them.

    Arguments:
        same_modules: whether the same modules have to run, since each is on a rank already.

    Raises ValueError, by name, where other modules run, or what they need would flow back.
    """
    if flow.same_calls(other):
        return {call: stage_of[mine] for call, mine in zip(other.order, flow.order, strict=True)}
    units = {call.name: stage_of[i] for i in flow.order if isinstance(call := flow.record.calls[i], UnitCall)}
    names = [call.name for i in other.order if isinstance(call := other.record.calls[i], UnitCall)]
    odd = sorted(set(units) ^ set(names))
    if odd and same_modules:
        how = "runs now and did not" if odd[0] in names else "does not run now and did"
        raise ValueError(
            f"module {odd[0]!r} {how} when the stages were built: the forward runs other modules for inputs "
            f"of other shapes, or since the model was changed. Expected the same modules for every batch, so that each "
            f"has its stage"
        )
    holders = {id(p): stage for call, stage in sorted(stage_of.items(), reverse=True) for p in flow.parameters(call)}
    last = max(stage_of.values())
    found: dict[int, int] = {}
    for i in other.order:
        call = other.record.calls[i]
        least = max((found[source] for source in other.sources(i) if source in found), default=0)
        held = [holders[id(p)] for p in other.parameters(i) if id(p) in holders]
        found[i] = units[call.name] if isinstance(call, UnitCall) and call.name in units else max([least, *held])
        if found[i] < least or found[i] > last:
            raise ValueError(
                f"{other.name_of(i)!r}{call.line} needs what a later stage makes, for inputs of other shapes or in "
                f"evaluation mode: expected values to flow as when the stages were built, or split points elsewhere"
            )
    why = other.parted(found)
    if why is not None:
        raise ValueError(why)
    return found
