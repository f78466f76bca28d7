"""How far a plan was searched for, and what is known of all that was not looked at."""

from __future__ import annotations

from dataclasses import dataclass

from ...schedules.wording import duration

OUTSIDE = (
    "replicas that do not divide the microbatches or differ by stage, but for those of the dynamic program (1F1B, no "
    "tensor ranks)",
    "layouts that leave more than an eighth of more than 64 devices idle, while others fit",
    "tensor ranks beyond the innermost links",
    "microbatches, chunks and tensor ranks that differ by stage",
    "schedules that were not named",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search over configurations: sizes of the parallelisms, microbatch, schedule, chunks.

    Each is cut in a few ways (the dynamic program's, equal numbers of nodes, the same with level ranks), unless bounds
    show that it can't win. Recomputation and sharding are chosen for each way.

    Arguments:
        considered: configurations at all.
        cut, simulated: of these.
        unfit: that were cut, and take more memory than there is or are refused by their schedule.
        too_long: to be simulated.
        least_left: no configuration that was not simulated takes less with the cuts that are tried [s a batch]; None
            where none was left out.
        least: no configuration takes less, whatever its cuts and whatever it recomputes [s a batch].
    """

    considered: int
    cut: int
    simulated: int
    unfit: int
    too_long: int
    least_left: float | None
    least: float

    def faster_left(self, seconds: float) -> float:
        """By which part of its time a plan of so many seconds a batch is slower, at most, than what was left out."""
        return 0.0 if not self.least_left else max(0.0, seconds / self.least_left - 1)

    def lines(self, seconds: float) -> list[str]:
        """For people: what was looked at, what of the rest may be faster than so many seconds a batch."""
        done = f"searched {self.considered:,} configurations: {self.cut:,} cut, {self.simulated:,} simulated"
        if self.unfit:
            done += f", {self.unfit:,} do not fit the memory or the schedule"
        if self.too_long:
            done += f", {self.too_long:,} too long to simulate"
        more = self.faster_left(seconds)
        rest = (
            "none of the rest is faster" if not more else f"the plan is at most {more:.2%} slower than any of the rest"
        )
        lines = [f"{done}; by their bounds {rest}, in the cuts that are tried"]
        if self.least > 0:
            lines.append(
                f"whatever the cuts, no configuration takes less than {duration(self.least)} a batch: the plan is "
                f"at most {max(0.0, seconds / self.least - 1):.2%} slower"
            )
        return [*lines, f"not among them: {'; '.join(OUTSIDE)}"]
