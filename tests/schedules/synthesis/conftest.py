"""Searches that count their orders end by that count, however busy the machine is."""

import pytest

from stagewright.schedules import synthesize


@pytest.fixture(autouse=True)
def _no_hurry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nightly tests judge seconds."""
    if request.node.get_closest_marker("nightly") is None:
        monkeypatch.setitem(synthesize.__kwdefaults__, "seconds", 400.0)
