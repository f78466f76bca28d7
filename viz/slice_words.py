"""Name, category and args of slices in trace files: what a reader sees who clicks on one."""

from __future__ import annotations

from typing import Any

from ..schedules import Action, Collective, Message, Op, Timeline
from ..schedules.messages import STAGE_KINDS
from ..schedules.timing.attribution import Gap
from ..schedules.versions import derive_versions

Event = dict[str, Any]  # as the Trace Event Format has it


class SliceWords:
    """Words for the slices of one timeline."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self._versions = derive_versions(schedule) if schedule.is_asynchronous else None
        self._clock_error = timeline.clock_error
        self._num_slices = schedule.num_slices

    def of_action(self, rank: int, action: Action, gap: Gap | None) -> Event:
        """An action, with the idle time before it [us] and its cause, the version of the weights that it uses, and by
        how much the clock of its rank may be wrong [us]."""
        stage, op, index = action
        args: Event = {"action": str(action), "stage": stage}
        args |= {"update_group": index} if op is Op.U else self._part(index)
        if gap is not None:
            args |= {"idle_before_us": round(gap.seconds * 1e6, 3), "idle_cause": gap.cause}
        if op is not Op.U and self._versions is not None:
            args["weight_version"] = self._versions.read_by(action)
        if self._clock_error:
            args["clock_error_us"] = round(self._clock_error[rank] * 1e6, 3)
        return {"name": f"{op.value} {index}", "cat": "compute", "args": args}

    def of_message(self, message: Message) -> Event:
        """A message that arrives."""
        kind, src, dst, index = message
        args: Event = {"message": str(message)}
        if kind in STAGE_KINDS:
            args |= {"from_stage": src, "to_stage": dst, **self._part(index)}
        else:
            args |= {"from_rank": src, "to_rank": dst, "update_group": index}
        return {"name": f"{kind.value} {index}", "cat": "receive", "args": args}

    def of_move(self, move: Action) -> Event:
        """Activations that leave the rank, or come."""
        stage, op, index = move
        return {"name": f"{op.value} {index}", "cat": "moves", "args": {"stage": stage, **self._part(index)}}

    def _part(self, index: int) -> Event:
        """The microbatch of an index, and its slice of the sequence where there are several."""
        if self._num_slices == 1:
            return {"microbatch": index}
        return {"microbatch": index // self._num_slices, "sequence_slice": index % self._num_slices}

    def of_collective(self, collective: Collective) -> Event:
        """A step that ranks take together."""
        stages, op, index = collective
        args: Event = {"collective": str(collective), "stages": list(stages), "update_group": index}
        return {"name": f"{op.value} {index}", "cat": "together", "args": args}
