"""Mistakes of the engine that the exactness tests of asynchronous schedules must see."""

from __future__ import annotations

from typing import Any

import pytest
from support.async_pipeline import run
from support.async_reference import AsyncCase, agree
from support.inside import StreamRank, WeightVersions
from torch import nn

pytestmark = pytest.mark.nightly  # a test of tests

CONV = AsyncCase(task="conv-norm", num_ranks=2)
RECOMPUTED = AsyncCase(task="small-gpt", num_ranks=2, recompute="full")


def seen(case: AsyncCase) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        agree(run(case), case)


@pytest.mark.parametrize("case", [CONV, RECOMPUTED], ids=lambda case: case.task)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_version_off_by_one_is_seen(case: AsyncCase, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    version = StreamRank.version

    def wrong(self: StreamRank, stage: int, index: int) -> int:
        return version(self, stage, index) + shift

    def nearest(self: WeightVersions, version: int) -> list[nn.Parameter]:
        return leaves(self, min(max(version, self.newest - self._count + 1, 0), self.newest))

    leaves = WeightVersions._leaves
    agree(run(case), case)
    monkeypatch.setattr(StreamRank, "version", wrong)
    monkeypatch.setattr(WeightVersions, "_leaves", nearest)
    seen(case)


def test_a_backward_on_the_newest_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation runs the forward again: on what is bound then."""
    begin = WeightVersions.begin_backward

    def wrong(self: WeightVersions, version: int, group: int) -> None:
        begin(self, version, group)
        self.bind(self.newest)

    monkeypatch.setattr(WeightVersions, "begin_backward", wrong)
    seen(RECOMPUTED)


@pytest.mark.parametrize("case", [CONV, AsyncCase(task="lstm", num_ranks=2)], ids=lambda case: case.task)
def test_one_storage_for_all_versions_is_seen(case: AsyncCase, monkeypatch: pytest.MonkeyPatch) -> None:
    init = WeightVersions.__init__

    def wrong(self: WeightVersions, **arguments: Any) -> None:
        init(self, **{**arguments, "count": 1})

    monkeypatch.setattr(WeightVersions, "__init__", wrong)
    monkeypatch.setattr(WeightVersions, "_leaves", lambda self, version: self._sets[0])
    seen(case)


def test_storage_rebound_and_not_restored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module keeps its Parameters, and a forward points them at a version's storage: the backward finds another."""

    def wrong(self: WeightVersions, version: int) -> None:
        for original, leaf in zip(self._originals, self._leaves(version), strict=True):
            original.data = leaf.data

    monkeypatch.setattr(WeightVersions, "bind", wrong)
    monkeypatch.setattr(WeightVersions, "release", lambda self: None)
    monkeypatch.setattr(WeightVersions, "changed_outside", lambda self: [])
    seen(CONV)


def test_gradients_of_another_batch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    end = WeightVersions.end_backward
    monkeypatch.setattr(
        WeightVersions, "end_backward", lambda self, version, group: end(self, version, max(0, group - 1))
    )
    seen(CONV)
