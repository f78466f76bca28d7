"""The page's replay of the simulator against the simulator itself, in Chromium."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from stagewright.schedules import Op, Timeline, simulate
from stagewright.viz import Exhibit
from stagewright.viz.explorer.replay_data import replay_data

from .replay_cases import Case, cases

SCRIPT = files("stagewright.viz.explorer").joinpath("replay.js").read_text(encoding="utf-8")
REPLAY = """
(text) => JSON.stringify(JSON.parse(text).map(([data, changed]) => {
  const wiring = new stagewright.replay.Wiring(data);
  const run = new stagewright.replay.Replay(wiring, changed);
  const messages = [];
  for (const wire of wiring.wires) {
    for (let k = 0; k < wiring.total; k++) {
      const slot = wire.base + k, passage = wire.passages[k];
      if (passage < 0 || Number.isNaN(run.arrived[slot])) continue;
      const { receiver } = wiring.passages[passage];
      messages.push([receiver, wire.kind, wire.src, wire.dst, k, run.ready[slot], run.arrived[slot]]);
    }
  }
  const meetings = [];
  for (const { stages, op, begun, through } of run.meetings) {
    for (const [group, end] of through) {
      for (const [rank, start] of begun.get(group)) meetings.push([rank, stages.join("+") + op + group, start, end]);
    }
  }
  return {
    starts: run.starts.map((own) => [...own]), ends: run.ends.map((own) => [...own]), updates: run.updates,
    messages: run.hasMessages ? messages : [], meetings,
    figures: [run.makespan, run.batchSeconds, run.bubble],
  };
}))
"""


@pytest.fixture(scope="module")
def replayed(browser: Any) -> list[tuple[Case, dict[str, Any]]]:
    """200 cases, and what the page makes of them."""
    drawn = list(cases(200))
    looked = browser.show(Exhibit(name="any", predicted=simulate(drawn[0].schedule, drawn[0].costs)))
    looked.page.add_script_tag(content=SCRIPT)
    given = [[replay_data(each.schedule, each.costs, each.links), each.changed] for each in drawn]
    found = json.loads(looked.evaluate(REPLAY, json.dumps(given)))  # as text: many times faster than as objects
    return list(zip(drawn, found, strict=True))


def expected(timeline: Timeline) -> dict[str, Any]:
    """What the page gives, of a timeline."""
    sizes = [len(program) for program in timeline.schedule.programs]
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
            for what, start, end in trace.collectives
        ),
    }


def test_the_page_plays_200_schedules_as_the_simulator_does(replayed: list[tuple[Case, dict[str, Any]]]) -> None:
    """Equal to the last bit, so that of actions that end at one time the same one comes first."""
    for case, found in replayed:
        timeline = simulate(case.schedule, *case.varied)
        found["messages"].sort()
        found["meetings"].sort()
        figures = found.pop("figures")
        assert found == expected(timeline), case
        assert figures == pytest.approx([timeline.makespan, timeline.batch_seconds, timeline.bubble], rel=1e-12), case


def test_the_cases_meet_everything_that_can_be_varied(replayed: list[tuple[Case, dict[str, Any]]]) -> None:
    drawn = [case for case, _ in replayed]
    met = {
        "replicas": any(len(ranks) > 1 for case in drawn for ranks in case.schedule.owners),
        "several batches": any(case.schedule.is_asynchronous for case in drawn),
        "an idle rank": any(not program for case in drawn for program in case.schedule.programs),
        "sums of gradients from several stages": any(
            wire["last"] is not None
            for case in drawn
            for wire in replay_data(case.schedule, case.costs, case.links)["wires"]
        ),
    }
    met |= {
        op.value: any(a.op is op for c in drawn for p in c.schedule.programs for a in p) for op in Op if len(op) == 1
    }
    assert all(met.values()), met
