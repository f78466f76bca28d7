"""Weights of which each rank keeps a part alone: gathered for a program, let go as soon as it needs them no more.

worker meets UNSHARD    -> begin: the parts leave
a forward of the stage  -> whole: wait for those of the others
worker meets RESHARD    -> let go
program is through      -> settle: let go of what several stages of the rank use, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...partition.profiler.clock import Stamp
from ...schedules import Collective, Op
from ..measure.recorder import Recorder
from .parts import StageParts


class Unsharding:
    """Weights of one rank's stages.

    Arguments:
        stages: by number, those that it has parts of.

    Attributes:
        awaited: stages whose weights are on their way.
    """

    def __init__(self, stages: Mapping[int, StageParts], recorder: Recorder) -> None:
        self.awaited: dict[int, Callable[[], None]] = {}
        self._stages = stages
        self._recorder = recorder

    def begin(self, collective: Collective) -> None:
        """UNSHARD or RESHARD."""
        stage = self._stages.get(collective.stages[0])
        if stage is None:  # nothing of it could be divided
            return
        stamp = self._recorder.clock.stamp
        stamps: list[Stamp] = [stamp()]
        if collective.op is Op.RESHARD:
            if stage.stage not in self.awaited:  # else this program does not use it, and they go when it is through
                stage.let_go()
            self._recorder.collective(collective, stamps[0], stamp())
            return
        gathered = stage.begin_gather(on_through=lambda: stamps.append(stamp()))

        def wait() -> None:
            gathered()
            self._recorder.collective(collective, stamps[0], stamps[-1] if len(stamps) > 1 else stamp())

        self.awaited[stage.stage] = wait

    def whole(self, stage: int) -> None:
        """Wait for the weights of a stage, also among the parts of another. Raises PipelineTimeout or PeerLost."""
        for each in [each for each in self.awaited if each == stage or self._stages[each].are_shared]:
            self.awaited.pop(each)()

    def settle(self) -> None:
        """The program is through."""
        for stage in list(self.awaited):
            self.whole(stage)
        self.drop()

    def drop(self) -> None:
        """Keep the parts alone."""
        self.awaited.clear()
        for stage in self._stages.values():
            stage.let_go(all_of_them=True)
