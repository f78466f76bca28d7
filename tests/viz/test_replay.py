"""The page's replay of the simulator against the simulator itself, in Chromium."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.inside import TimelineColumns, replay_data
from support.replay_cases import Case, cases

from stagewright.schedules import Op, Timeline, simulate
from stagewright.viz import Exhibit

TICK = 1e-6  # [s]
REPLAY = """
(text) => JSON.stringify(JSON.parse(text).map(([data, changed, like]) => {
  const wiring = new stagewright.replay.Wiring(data);
  const run = new stagewright.replay.Replay(wiring, changed);
  const messages = [];
  for (const wire of wiring.wires) {
    for (let k = 0; k < wiring.total; k++) {
      const slot = wire.base + k, route = wire.routes[k];
      if (route < 0 || Number.isNaN(run.arrived[slot])) continue;
      const { receiver } = wiring.routes[route];
      messages.push([receiver, wire.kind, wire.src, wire.dst, k, run.ready[slot], run.arrived[slot]]);
    }
  }
  const meetings = [];
  for (const { stages, op, begun, through } of run.jointSteps) {
    for (const [group, end] of through) {
      for (const [rank, start] of begun.get(group)) {
        meetings.push([rank, stages.join("+") + op + group, start, end]);
      }
    }
  }
  return {
    starts: run.starts.map((own) => [...own]), ends: run.ends.map((own) => [...own]), updates: run.updates,
    messages: run.hasMessages ? messages : [], meetings,
    figures: [run.makespan, run.batchSeconds, run.bubble],
    panel: like && stagewright.replay.panelOf({ ...stagewright.page, tick: 1e-6 }, wiring, run, like),
  };
}))
"""


@pytest.fixture(scope="module")
def replayed(browser: Any) -> list[tuple[Case, dict[str, Any]]]:
    """200 cases, and what the page makes of them; of every fourth, its panel too."""
    drawn = list(cases(200))
    looked = browser.show(Exhibit(name="any", simulated=simulate(drawn[0].schedule, drawn[0].costs)))
    given = [
        [replay_data(each.schedule, each.costs, each.links), each.changed, None if at % 4 else panel(each)]
        for at, each in enumerate(drawn)
    ]
    found = json.loads(looked.evaluate(REPLAY, json.dumps(given)))  # as text: many times faster than as objects
    return list(zip(drawn, found, strict=True))


def panel(case: Case, *, varied: bool = False) -> dict[str, Any]:
    """Python's panel of a case, in a page whose tick is that of the fixture's."""
    costs, links = case.varied if varied else (case.costs, case.links)
    timeline = simulate(case.schedule, costs, links)
    return TimelineColumns(Exhibit(name="any", simulated=timeline, links=links), timeline, TICK, {}).columns()


def expected(timeline: Timeline) -> dict[str, Any]:
    """Figures of a timeline as the page gives them."""
    sizes = [len(program) for program in timeline.schedule.compute_programs]
    own = [trace.compute[:size] for trace, size in zip(timeline.ranks, sizes, strict=True)]
    epilogue = [trace.compute[size:] for trace, size in zip(timeline.ranks, sizes, strict=True)]
    assert all(span.what.op is Op.U for spans in epilogue for span in spans)
    return {
        "starts": [[span.start for span in spans] for spans in own],
        "ends": [[span.end for span in spans] for spans in own],
        "updates": [[{"stage": s.what.stage, "start": s.start, "end": s.end} for s in spans] for spans in epilogue],
        "messages": sorted(
            [rank, m.kind.value, m.src, m.dst, m.index, start, end]
            for rank, trace in enumerate(timeline.ranks)
            for m, start, end in trace.comm
        ),
        "meetings": sorted(
            [rank, str(what), start, end]
            for rank, trace in enumerate(timeline.ranks)
            for what, start, end in trace.transfers
        ),
    }


def test_the_page_plays_200_schedules_as_the_simulator_does(replayed: list[tuple[Case, dict[str, Any]]]) -> None:
    """Equal to the last bit, so that of actions that end at one time the same one comes first."""
    for case, found in replayed:
        timeline = simulate(case.schedule, *case.varied)
        found["messages"].sort()
        found["meetings"].sort()
        figures = found["figures"]
        wanted = expected(timeline)
        assert {name: found[name] for name in wanted} == wanted, case
        assert figures == pytest.approx([timeline.makespan, timeline.batch_seconds, timeline.bubble], rel=1e-12), case


@pytest.mark.thorough
def test_idle_time_lanes_and_messages_of_the_panel_are_those_of_python(
    replayed: list[tuple[Case, dict[str, Any]]],
) -> None:
    for case, found in replayed[::4]:
        own, other = found["panel"], panel(case, varied=True)
        assert numbers(own["idle_shares"]) == pytest.approx(numbers(other["idle_shares"]), abs=1e-6), case
        for row, wanted in zip(own["rows"], other["rows"], strict=True):
            assert (row["stages"], row["lanes"]) == (wanted["stages"], wanted["lanes"]), case
            assert numbers([row["times"]]) == pytest.approx(numbers([wanted["times"]]), abs=2), case  # ticks
            assert stretches(row["idle"]) == pytest.approx(stretches(wanted["idle"]), abs=3), case
            assert sorted(row["together"]) == sorted(wanted["together"]), case
        assert sorted(messages(own)) == sorted(messages(other)), case


def numbers(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


def stretches(idle: list[int]) -> dict[int, int]:
    """Ticks by cause."""
    found: dict[int, int] = {}
    for _, length, cause in zip(idle[::3], idle[1::3], idle[2::3], strict=True):
        found[cause] = found.get(cause, 0) + length
    return found


def messages(columns: dict[str, Any]) -> list[tuple[int, ...]]:
    """All columns; of lanes, in which messages of equal times may change places, whether there is one."""
    own = columns["messages"]
    names = ("kind", "src", "dst", "index", "maker", "user", "receiver", "start", "end")
    return list(zip(*(own[name] for name in names), (lane >= 0 for lane in own["lane"]), strict=True))
