"""The methods that are compared. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Method(NamedTuple):
    """A way to train.

    schedule: None: one process, a plain loop. warmup: the learning rate rises over the first tenth of the steps.
    """

    summary: str
    schedule: str | None
    num_ranks: int
    warmup: bool = False


METHODS: dict[str, Method] = {
    "single": Method("one process, no pipeline", None, 1),
    "1f1b": Method("two ranks, a flush a batch", "1f1b", 2),
    "2bw": Method("two ranks, double-buffered weights", "2bw", 2),
    "pipedream": Method("two ranks, weight stashing, an update a batch", "pipedream", 2),
    "1f1b-warmup": Method("1f1b with learning-rate warm-up", "1f1b", 2, True),
    "2bw-warmup": Method("2bw with learning-rate warm-up", "2bw", 2, True),
}
