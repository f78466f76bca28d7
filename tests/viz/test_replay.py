"""The page's replay of the simulator against the simulator itself, in Chromium; the sliders of its "what if" panel.

The editor of the page: orders that it builds, what they take, what it says; compared with Python.
"""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.inside import TimelineColumns, on_ranks, replay_data, whatif_data
from support.replay_cases import Case, cases

from stagewright.schedules import FAMILIES, Costs, Link, Links, Op, Schedule, StepSamples, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep

from .test_explorer import example

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


@pytest.mark.thorough
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
    own = columns["messages"]
    names = ("kind", "src", "dst", "index", "maker", "user", "receiver", "start", "end", "lane")
    return list(zip(*(own[name] for name in names), strict=True))


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


def test_a_stream_is_told_by_the_batch_and_a_prediction_of_other_costs_as_such(browser: Any) -> None:
    schedule, costs = build("2bw", num_ranks=3, num_microbatches=4), Costs(forward=1.0, backward=2.0, update=0.5)
    looked = browser.show(exhibit(schedule, costs))
    move(looked, "Forward F", 2)
    timeline = simulate(schedule, replace(costs, forward=2.0))
    assert told(looked).startswith(
        f"a batch every {simulate(schedule, costs).batch_seconds:.4g} s → {timeline.batch_seconds:.4g}"
    )
    assert looked.evaluate("stagewright.page.panels[1].rows[2].program.versions[0]") == 0
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


@pytest.mark.thorough
def test_what_cannot_be_varied_says_why() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    assert whatif_data(Exhibit(name="no costs", simulated=simulate(schedule, Costs()))) is None
    huge = build("gpipe", num_ranks=2, num_microbatches=50_001)
    simulated = exhibit(schedule, Costs()).simulated
    data = whatif_data(Exhibit(name="huge", simulated=replace(simulated, schedule=huge), costs=Costs()))
    assert data == {"refused": "200,004 actions: costs can be varied up to 200,000."}


EQUAL = Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)
UNEVEN = Costs(forward=1.0, input_grad=1.25, weight_grad=0.7, latency=0.15)
# name -> sizes (P, V, M): all of those by hand, some of those that are searched for
HAND = tuple(product(range(1, 9), (1,), range(1, 17)))
LOOPING = tuple(product(range(1, 9), (1, 2, 3), range(1, 17)))
LISTED = tuple(product((1, 2, 3, 4, 7, 8), (1, 2, 3), (1, 2, 5, 8, 13)))
GRID = {
    **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"), HAND),
    **dict.fromkeys(("interleaved", "looped-bfs", "interleaved-zb", "gis"), LOOPING),
    **dict.fromkeys(("zb-1p", "zb-2p"), tuple(size for size in LISTED if size[1] == 1)),
    **dict.fromkeys(("v-half", "v-min"), tuple(size for size in LISTED if size[1] == 2)),
    "hanayo": LISTED,
}
BUILD = """
(text) => JSON.stringify(JSON.parse(text).map(([name, P, V, M, costs, limit]) => {
  const schedule = stagewright.orders.build(name, { P, V, M, costs, limit });
  const run = new stagewright.replay.Replay(stagewright.orders.wiringOf(schedule, costs), {});
  return [
    schedule.programs.map((program) => program.map((action) => [action[0], action[1], action[2]].join("")).join(" ")),
    schedule.placement, run.makespan, run.bubble, stagewright.orders.peaks(schedule),
  ];
}))
"""


def seconds(costs: Costs) -> dict[str, float]:
    """Costs as the page has them."""
    table = costs.table(num_stages=1)
    return {**{op.value: row[0][0] for op, row in table.rows.items()}, "latency": table.latency[0]}


@pytest.mark.thorough
def test_the_page_builds_schedules_as_python_does(browser: Any) -> None:
    """Action by action, and what they take under even and uneven costs."""
    cases = []
    for at, (name, (P, V, M)) in enumerate((name, size) for name, sizes in GRID.items() for size in sizes):
        costs = UNEVEN if at % 2 else EQUAL
        limit = (None, 1, 2, 2.5, 5, 40)[at % 6] if name in ("zb-1p", "zb-2p") else None
        cases.append((name, P, V, M, costs, limit))
    assert len(cases) == 5 * 128 + 4 * 384 + 2 * 30 + 2 * 30 + 90
    looked = browser.show(example())
    found = json.loads(looked.evaluate(BUILD, json.dumps([[*case[:4], seconds(case[4]), case[5]] for case in cases])))
    for at, ((name, P, V, M, costs, limit), (programs, placement, makespan, bubble, peaks)) in enumerate(
        zip(cases, found, strict=True)
    ):
        options = {"costs": costs} if "costs" in FAMILIES[name].options else {}
        options |= {} if limit is None else {"memory_limit": limit}
        schedule = build(name, num_ranks=P, num_chunks=V, num_microbatches=M, **options)
        assert programs == [" ".join(map(str, program)) for program in schedule.programs], (name, P, V, M, limit)
        assert placement == [list(stages) for stages in schedule.placement]
        if at % 5 == 0:
            timeline = simulate(schedule, costs)
            assert makespan == pytest.approx(timeline.makespan, rel=1e-9), (name, P, V, M)
            assert bubble == pytest.approx(timeline.bubble, abs=1e-9)
            assert tuple(peaks) == timeline.peak_activations


def fill(looked: Any, label: str, value: object) -> None:
    """Write into a field of the editor, and wait until it was heard."""
    looked.page.fill(f"#edit input[aria-label^='{label}']", str(value))
    looked.evaluate("new Promise(done => setTimeout(done, 120))")  # the editor's pause, which began before this one
    looked.settle()


def edit_told(looked: Any) -> str:
    return str(looked.page.inner_text("#edit-told"))


def test_a_schedule_is_edited_and_drawn_anew(browser: Any) -> None:
    looked = browser.show(example(num_ranks=4, num_microbatches=8))
    looked.page.keyboard.press("e")
    assert looked.evaluate("document.activeElement.ariaLabel") == "Schedule"
    values = looked.evaluate(
        "[...document.querySelectorAll('#edit .field:not([hidden]) input')].map(({ value }) => value)"
    )
    assert values == ["4", "1", "8", "", "1", "2", "0.25"]  # P, V, M, no limit, F, B, latency: those of the page
    assert len(panels(looked)) == 1
    looked.page.select_option("#edit select", "interleaved")
    looked.until("stagewright.page.panels.length > 1")
    halves = Costs(forward=0.5, backward=1.0, latency=0.25)  # the same work in twice as many stages
    timeline = simulate(build("interleaved", num_ranks=4, num_microbatches=8), halves)
    assert panels(looked)[1] == ["interleaved P=4 V=2 M=8, simulated in the page", pytest.approx(timeline.makespan)]
    assert edit_told(looked).startswith("Simulated in the page: makespan")
    assert f"at most {max(timeline.peak_activations)} stage activations on a rank" in edit_told(looked)
    fill(looked, "Ranks P", 3)
    fill(looked, "Backward", 3)
    timeline = simulate(
        build("interleaved", num_ranks=3, num_microbatches=8), Costs(forward=0.5, backward=1.5, latency=0.25)
    )
    assert panels(looked)[1][1] == pytest.approx(timeline.makespan)
    looked.page.mouse.move(*looked.place(1, 2, 2))
    assert f"{timeline.ranks[2].actions[2]} on rank 2" in looked.page.inner_text("#tooltip")
    assert "I input gradient" not in looked.page.inner_text("#legend")
    looked.page.select_option("#edit select", "zb-1p")
    fill(looked, "Memory limit", 2)
    costs = Costs(forward=1.0, input_grad=1.5, weight_grad=1.5, latency=0.25)
    timeline = simulate(build("zb-1p", num_ranks=3, num_microbatches=8, costs=costs, memory_limit=2), costs)
    assert panels(looked)[1][1] == pytest.approx(timeline.makespan)
    assert "at most 2 stage activations" in edit_told(looked)
    looked.page.select_option("#edit select", "zb-h1")
    looked.until("stagewright.page.panels[1].schedule.name === 'zb-h1'")
    assert "over the limit of 2 on ranks 0, 1, 2: zb-1p and zb-2p keep a limit" in edit_told(looked)
    looked.page.click("#link")
    looked.until("location.hash.includes('edit=zb-h1')")
    before, link = panels(looked), looked.page.url
    looked.page.goto("about:blank")
    looked.page.goto(link)
    looked.settle()
    assert panels(looked) == before
    looked.page.click("#edit h2")
    looked.page.click("#edit >> text=Remove")
    assert len(panels(looked)) == 1


def test_sizes_that_do_not_fit_are_refused_in_python_s_words(browser: Any) -> None:
    looked = browser.show(example())
    refused: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "1f1b", "P": 0}, {}),
        ({"name": "1f1b", "M": None}, {}),
        ({"name": "gis", "V": 1.5}, {}),
        ({"name": "zb-h1", "V": 2}, {}),
        ({"name": "v-half", "V": 3}, {}),
        ({"name": "zb-1p", "limit": 0.5}, {"memory_limit": 0.5}),
        ({"name": "zb-2p", "costs": {"F": 1, "I": 0, "W": 1, "latency": 0}}, {}),
    ]
    for changed, options in refused:
        given = {"P": 4, "V": 1, "M": 8, "limit": None, "costs": {"F": 1, "I": 1, "W": 1, "latency": 0}, **changed}
        if "costs" in changed:
            options = {"costs": Costs(forward=1.0, input_grad=0.0, weight_grad=1.0)}
        with pytest.raises(ValueError, match=r".") as error:
            build(given["name"], num_ranks=given["P"], num_chunks=given["V"], num_microbatches=given["M"], **options)
        said = looked.evaluate(
            """({ name, ...given }) => {
                try { stagewright.orders.build(name, given); } catch (error) { return error.message; }
            }""",
            given,
        )
        assert said == str(error.value)
    looked.page.keyboard.press("e")
    fill(looked, "Chunks V", 2)
    assert edit_told(looked).startswith("num_chunks=2 for schedule '1f1b': it has one stage per rank; expected 1")
    fill(looked, "Chunks V", 1)
    fill(looked, "Microbatches M", 60_000)
    assert edit_told(looked) == "240,000 actions: 1f1b is built in the page up to 200,000."
    fill(looked, "Microbatches M", 8)
    fill(looked, "Latency", -1)
    assert edit_told(looked) == "latency=-1: expected a finite number of seconds, at least 0"
