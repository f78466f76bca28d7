"""Sizes of schedules that a family takes."""

from stagewright.schedules import build


def fitting(name: str, num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    """The least P and M from these on that the family takes: some need an even P, or M of at least 2P."""
    for P in (num_ranks, num_ranks + 1):
        for M in range(num_microbatches, num_microbatches + 2 * P + 2):
            try:
                build(name, num_ranks=P, num_microbatches=M)
            except ValueError:
                continue
            return P, M
    raise AssertionError(f"{name}: no sizes from P={num_ranks}, M={num_microbatches} on")
