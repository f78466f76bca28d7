"""The rate of a link as the experiment `links` finds it, where measured seconds agree and where they don't."""

from __future__ import annotations

import pytest
import torch
from support.inside import links

RATE, LATENCY = 125e6, 0.001


def found(monkeypatch: pytest.MonkeyPatch, late: dict[int, float]) -> float:
    """Bytes per second that are found where messages of some sizes take longer than the link does."""

    def exchange(message: torch.Tensor, sender: int, receiver: int) -> float:
        return LATENCY + len(message) / RATE + late.get(len(message), 0.0)

    monkeypatch.setattr(links, "exchange", exchange)
    monkeypatch.setattr(links, "_pass", lambda message, sender, receiver: None)
    return links._rate(0, 1)


def test_a_steady_rate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, {}) == pytest.approx(RATE)


def test_a_delay_of_one_message_makes_no_faster_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest but one came late, so that the longest takes little longer: their difference says 1.9 of the rate."""
    late = {1 << 25: 0.1, 1 << 26: 0.25}
    assert 0.95 * RATE < found(monkeypatch, late) <= RATE
