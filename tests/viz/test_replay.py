"""The page's replay of the simulator against the simulator itself, in Chromium; the sliders of its "what if" panel."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.inside import TimelineColumns, on_ranks, replay_data, whatif_data
from support.replay_cases import Case, cases

from stagewright.schedules import Costs, Link, Links, Op, Schedule, StepSamples, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep

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


LINKS = Links(network=Link(latency=0.25, seconds_per_byte=1e-7), activation_bytes=3e6)


def exhibit(schedule: Schedule, costs: Costs, links: Links | None = None) -> Exhibit:
    return Exhibit(name=schedule.name, simulated=simulate(schedule, costs, links), costs=costs, links=links)


def move(looked: Any, label: str, value: float) -> None:
    """Write into the box of a knob."""
    looked.evaluate(
        """([label, value]) => {
            const box = [...document.querySelectorAll(".knob input")].find((each) =>
                each.getAttribute("aria-label").startsWith(label) && each.type === "number");
            box.value = value;
            box.dispatchEvent(new Event("change"));
        }""",
        [label, value],
    )
    looked.settle()


def told(looked: Any) -> str:
    return str(looked.page.inner_text(".whatif .told"))


def panels(looked: Any) -> list[list[Any]]:
    found: list[list[Any]] = looked.evaluate("stagewright.page.panels.map((panel) => [panel.caption, panel.makespan])")
    return found


def test_a_slider_shows_the_schedule_as_it_would_be_simulated(browser: Any) -> None:
    schedule, costs = build("zb-h1", num_ranks=3, num_microbatches=6), Costs(forward=1.0, backward=2.5)
    looked = browser.show(exhibit(schedule, costs, LINKS))
    assert [caption for caption, _ in panels(looked)] == ["simulated"]
    labels = looked.evaluate(
        "[...document.querySelectorAll('.knob > span:first-child')].map((each) => each.textContent)"
    )
    assert labels == ["Forward F", "Input grad. I", "Weight grad. W", "Latency", "Bandwidth", "Update"]
    move(looked, "Forward F", 2)
    move(looked, "Bandwidth", 0.5)
    slower = replace(LINKS, network=Link(latency=0.25, seconds_per_byte=2e-7))
    timeline = simulate(schedule, Costs(forward=2.0, input_grad=1.25, weight_grad=1.25), slower)
    before = simulate(schedule, costs, LINKS)
    caption = "what if: Forward F \u00d7 2, Bandwidth \u00d7 0.5"
    assert panels(looked) == [["simulated", before.makespan], [caption, pytest.approx(timeline.makespan)]]
    assert told(looked) == (
        f"makespan {before.makespan:.4g} s → {timeline.makespan:.4g} s ({timeline.makespan / before.makespan:.4g} "
        f"times), bubble {before.bubble:.1%} → {timeline.bubble:.1%}"
    )
    move(looked, "Forward F", 99)  # as far as factors go
    assert panels(looked)[1][0] == "what if: Forward F \u00d7 4, Bandwidth \u00d7 0.5"
    looked.page.click("text=Reset all")
    looked.settle()
    assert [caption for caption, _ in panels(looked)] == ["simulated"]
    assert looked.said == []


def test_seconds_are_added_where_nothing_is_and_updates_come_behind(browser: Any) -> None:
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=4), Costs(forward=1.0, backward=2.0)
    looked = browser.show(exhibit(schedule, costs))
    move(looked, "Latency", 0.5)
    move(looked, "Update", 1.5)
    timeline = simulate(schedule, replace(costs, latency=0.5, update=1.5))
    assert panels(looked)[1] == ["what if: Latency + 500 ms, Update + 1.5 s", pytest.approx(timeline.makespan)]
    last = looked.evaluate("stagewright.page.panels[1].rows[0].program.ops.at(-1)")
    assert last == "U"
    x, y = looked.place(1, 1, 2)
    looked.page.mouse.move(x, y)
    looked.settle()
    assert "0F1 on rank 0 (500 ms under way" in looked.page.inner_text("#tooltip")


def test_a_stream_is_told_by_the_batch(browser: Any) -> None:
    schedule, costs = build("2bw", num_ranks=3, num_microbatches=4), Costs(forward=1.0, backward=2.0, update=0.5)
    looked = browser.show(exhibit(schedule, costs))
    move(looked, "Forward F", 2)
    timeline = simulate(schedule, replace(costs, forward=2.0))
    assert told(looked).startswith(
        f"a batch every {simulate(schedule, costs).batch_seconds:.4g} s → {timeline.batch_seconds:.4g}"
    )
    assert looked.evaluate("stagewright.page.panels[1].rows[2].program.versions[0]") == 0


def test_a_prediction_of_other_costs_is_told(browser: Any) -> None:
    schedule, costs = build("gpipe", num_ranks=2, num_microbatches=4), Costs(forward=1.0, backward=2.0)
    looked = browser.show(replace(exhibit(schedule, costs), simulated=simulate(schedule, Costs(forward=2.0))))
    move(looked, "Backward B", 2)
    assert told(looked).startswith("makespan 15 s \u2192 25 s (1.667 times)")
    assert told(looked).endswith("15 s would be simulated, not the 30 s above: compare with the former.")


def test_heading_and_sidebar_divide_by_the_same_simulation_where_durations_vary(browser: Any) -> None:
    """One percent more work is no step that takes 0.97 times as long; the bound is compared without noise."""
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=4), Costs(forward=1.0, backward=2.0)
    sampled = StepSamples(seconds=(15.4,) * 99, bubbles=(0.2,) * 99)
    simulated = exhibit(schedule, costs).simulated
    measured = (MeasuredStep(3, replace(simulated, measured=True)),)
    looked = browser.show(replace(exhibit(schedule, costs), sampled=sampled, measured=measured))
    told_of = looked.page.inner_text("#figures")
    assert "15 s 1 \u00d7 bound" in told_of
    assert "15.4 s 1.027 \u00d7 simulated" in told_of
    assert "15 s 0.974 \u00d7 predicted" in told_of
    heading = looked.evaluate("stagewright.panels.summary(stagewright.page.panels[1])")
    assert "makespan 15 s (0.974 times predicted)" in heading
    assert "predicted end" in looked.page.inner_text("#legend")
    move(looked, "Forward F", 1.01)
    heading = looked.evaluate("stagewright.panels.summary(stagewright.page.panels[1])")
    assert "(1.003 times unchanged)" in heading
    assert "(1.003 times)" in told(looked)


def test_edges(browser: Any) -> None:
    """One rank; no time at all; ranks with nothing to do."""
    free = Costs(forward=0.0, backward=0.0)
    alone = build("1f1b", num_ranks=1, num_microbatches=1)
    wide = on_ranks(build("1f1b", num_ranks=2, num_microbatches=2), (1, 3), num_ranks=4)
    looked = browser.show(exhibit(alone, free), exhibit(wide, Costs(forward=1.0)))
    move(looked, "Update", 1.0)
    assert panels(looked)[1] == ["what if: Update + 1 s", 1.0]
    looked.evaluate(
        """() => { const box = document.querySelectorAll(".whatif")[1].querySelector("input[type=number]");
                   box.value = 3; box.dispatchEvent(new Event("change")); }"""
    )
    looked.settle()
    assert panels(looked)[3] == [
        "what if: Forward F \u00d7 3",
        simulate(wide, Costs(forward=3.0, backward=2.0)).makespan,
    ]
    assert looked.said == []


def test_what_cannot_be_varied_says_why() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    assert whatif_data(Exhibit(name="no costs", simulated=simulate(schedule, Costs()))) is None
    huge = build("gpipe", num_ranks=2, num_microbatches=50_001)
    simulated = exhibit(schedule, Costs()).simulated
    data = whatif_data(Exhibit(name="huge", simulated=replace(simulated, schedule=huge), costs=Costs()))
    assert data == {"refused": "200,004 actions: costs can be varied up to 200,000."}
