"""The explorer in headless Chromium: it draws what the timeline says, and answers pointer and keys."""

from dataclasses import replace

import pytest
from support.inside import CAUSE_HUES, OP_HUES

from stagewright.schedules import Costs, Link, Links, Op, RankTrace, StageBytes, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep, explorer_html

COSTS = Costs(forward=1.0, backward=2.0)


def example(name="1f1b", *, num_ranks=2, num_microbatches=4, steps=(), known=False, **options):
    """A prediction, steps of a run whose backwards take ever longer, and memory where it is `known`."""
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    links = Links(network=Link(latency=0.25), activation_bytes=3e6)
    measured = tuple(
        MeasuredStep(
            step, replace(simulate(schedule, Costs(forward=1.0, backward=2.0 + step, latency=0.5)), measured=True)
        )
        for step in steps
    )
    stage = StageBytes(weights=4e9, gradients=1e9, optimizer=2e9, activations=1.5e9)
    return Exhibit(
        name="run",
        simulated=simulate(schedule, COSTS, links),
        measured=measured,
        costs=COSTS,
        links=links,
        memory=(stage,) * schedule.num_stages if known else (),
        memory_limit=(12e9,) * num_ranks if known else None,
    )


def view(looked):
    """Start and end of what is seen [s]."""
    return looked.evaluate("[stagewright.view.start, stagewright.view.end]")


def test_boxes_stand_where_the_timeline_says_in_the_colours_of_their_ops(browser):
    exhibit = example("zb-h1")
    looked = browser.show(exhibit)
    spots, hues = [], []
    for rank, trace in enumerate(exhibit.simulated.ranks):
        for i, action in enumerate(trace.actions):
            if action.op is not Op.W:  # hatched
                x, y = looked.place(0, rank, i)
                spots.append((x - 4, y - 9))
                hues.append(OP_HUES[action.op])
    assert looked.colours(spots) == hues
    assert all(url.startswith("file:") for url in looked.requests)
    assert len(looked.requests) == 1


def test_hover_tells_what_is_known_of_an_action(browser):
    looked = browser.show(example())
    looked.page.mouse.move(*looked.place(0, 1, 0))
    looked.settle()
    told = looked.page.inner_text("#tooltip")
    for words in ("Forward of microbatch 0", "1F0 on rank 1", "1.25 s warm up", "0F0 on rank 0", "3 MB", "250 ms"):
        assert words in told


def test_versions_of_weights_are_told_under_asynchronous_schedules(browser):
    exhibit = example("2bw", num_batches=4)
    looked = browser.show(exhibit)
    at = exhibit.simulated.ranks[0].actions.index
    forward = next(a for a in exhibit.simulated.ranks[0].actions if a.op is Op.F and a.index == 12)
    looked.page.mouse.click(*looked.place(0, 0, at(forward)))
    assert "version 2" in looked.page.inner_text("#chosen")  # 2bw: the batch before the last
    assert "a batch every" in looked.evaluate("stagewright.panels.summary(stagewright.page.panels[0])")


def test_wheel_zooms_about_the_pointer_and_keys_move(browser):
    looked = browser.show(example())
    x, y = looked.place(0, 0, 4)
    middle = looked.evaluate("x => stagewright.view.seconds(x)", x)
    looked.page.mouse.move(x, y)
    looked.page.mouse.wheel(0, -400)
    looked.settle()
    start, end = view(looked)
    assert end - start < 0.6 * looked.evaluate("stagewright.view.length")
    assert looked.evaluate("x => stagewright.view.seconds(x)", x) == pytest.approx(middle, abs=0.02)
    looked.page.keyboard.press("ArrowLeft")
    assert view(looked)[0] < start
    looked.page.keyboard.press("0")
    assert view(looked) == [0, looked.evaluate("stagewright.view.length")]
    looked.page.mouse.move(100, 300)
    looked.page.keyboard.press("+")
    assert view(looked)[1] - view(looked)[0] == pytest.approx(looked.evaluate("stagewright.view.length") / 1.5)
    before = view(looked)[0]
    looked.page.mouse.move(400, 300)
    looked.page.mouse.down()
    looked.page.mouse.move(300, 300)
    looked.page.mouse.up()
    assert view(looked)[0] > before
    assert looked.evaluate("stagewright.state.chosen") is None  # a drag is no click


def test_keyboard_goes_through_programs_and_ranks(browser):
    exhibit = example()
    looked = browser.show(exhibit)
    looked.page.focus("#base")
    looked.page.keyboard.press("Tab")
    assert "0F0 on rank 0" in looked.page.inner_text("#chosen")
    for key in ("Tab", "ArrowRight"):
        looked.page.keyboard.press(key)
    assert f"{exhibit.simulated.ranks[0].actions[2]} on rank 0" in looked.page.inner_text("#chosen")
    looked.page.keyboard.press("ArrowDown")
    assert "on rank 1" in looked.page.inner_text("#chosen")
    assert "on rank 1" in looked.page.inner_text("#spoken")
    looked.page.keyboard.press("Escape")
    assert "Click a box" in looked.page.inner_text("#chosen")
    looked.page.keyboard.press("Tab")  # and then Tab leaves
    assert looked.evaluate("document.activeElement.id") != "base"
    looked.page.keyboard.press("?")
    assert looked.page.is_visible("#help-dialog")


def test_slider_shows_another_measured_step(browser):
    exhibit = example(steps=(0, 1, 2))
    looked = browser.show(exhibit)
    summary = "stagewright.panels.summary(stagewright.page.panels[1])"
    assert [step.timeline.makespan for step in exhibit.measured] == [17.0, 22.0, 27.0]
    assert "makespan 27 s" in looked.evaluate(summary)
    looked.page.mouse.click(*looked.place(1, 0, 3))
    name = str(exhibit.measured[2].timeline.ranks[0].actions[3])
    looked.page.focus("input[type=range]")
    looked.page.keyboard.press("ArrowLeft")
    assert "makespan 22 s" in looked.evaluate(summary)
    assert name in looked.page.inner_text("#chosen")  # the choice stays on the action
    assert view(looked) == [0, exhibit.measured[2].timeline.makespan]  # and the scale on the longest step


def test_figures_stand_in_the_header(browser):
    looked = browser.show(example(steps=(1,)))
    told = looked.page.inner_text("#figures")
    for words in ("lower bound", "15.5 s", "simulated", "measured", "22 s", "memory", "activations of the model"):
        assert words in told


def test_critical_path_stays_while_the_rest_grows_pale(browser):
    exhibit = example("gpipe")
    looked = browser.show(exhibit)
    on_path, beside = looked.place(0, 0, 0), looked.place(0, 1, 3 + 4)  # 0F0; the last backward of rank 1 is on it, too
    beside = looked.place(0, 0, 2)
    spots = [(x - 6, y - 8) for x, y in (on_path, beside)]
    assert looked.colours(spots) == [OP_HUES[Op.F]] * 2
    looked.page.keyboard.press("c")
    looked.settle()
    assert looked.colours(spots[:1]) == [OP_HUES[Op.F]]
    assert looked.colours(spots[1:]) != [OP_HUES[Op.F]]
    assert "message" in looked.page.inner_text("#path")


def test_memory_is_drawn_and_told(browser):
    looked = browser.show(example(known=True))
    x, _ = looked.place(0, 0, 3)
    y = looked.evaluate(
        """() => {
            const place = stagewright.view.panels[0].rows[0];
            return document.getElementById("base").getBoundingClientRect().top + place.memory + place.memoryHeight - 4;
        }"""
    )
    looked.page.mouse.move(x, y)
    told = looked.page.inner_text("#tooltip")
    for words in ("rank 0 holds", "weights", "4 GB", "limit", "12 GB", "activations"):
        assert words in told
    assert looked.colours([(x - 3, y)]) == ["#4477AA"]


def test_names_are_text_and_a_rank_that_left_nothing_is_told(browser):
    hostile = "</script ></script><script>document.title = 'broken'</script><!-- \"'&<b>\u20ac @@DATA@@ \u2028"
    looked = browser.show(replace(example(), name=hostile, notes=(hostile,)), example())
    assert looked.page.title().startswith("</script ></script><script>")
    for place in ("#title", "#notes"):
        assert "</script><script>document.title" in looked.page.inner_text(place)
    named = replace(example(), notes=("run: cut into 4", "rank 1 left no trace"))
    looked = browser.show(named, replace(example(), name="other"))
    assert looked.page.inner_text("#notes").split("\n") == ["run: cut into 4", "run: rank 1 left no trace"]
    exhibit = example(steps=(1,))
    whole = exhibit.measured[0].timeline
    part = replace(whole, ranks=(whole.ranks[0], RankTrace(compute=())), missing=(1,))
    looked = browser.show(replace(exhibit, measured=(MeasuredStep(1, part),), notes=("rank 1 left no trace.",)))
    assert looked.evaluate("stagewright.page.panels[1].rows.map(row => row.missing)") == [False, True]
    assert "rank 1 left no trace." in looked.page.inner_text("#notes")


def test_a_page_is_the_same_each_time_and_shows_something():
    assert explorer_html([example()]) == explorer_html([example()])
    with pytest.raises(ValueError, match=r"exhibits=\[\]: expected at least one"):
        explorer_html([])


def test_timelines_without_any_action_are_shown(browser):
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    empty = Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2)
    looked = browser.show(Exhibit(name="nothing ran", simulated=empty))
    looked.page.mouse.move(400, 300)
    looked.page.keyboard.press("c")


def test_differences_lead_to_the_action_that_departs_most(browser):
    exhibit = example(steps=(1,), num_microbatches=8)
    measured = exhibit.measured[0].timeline
    spans = measured.ranks[1].compute
    late = spans[5]._replace(end=spans[5].end + 4)  # stands over what follows, which only makes it longer
    slow = replace(
        measured.ranks[1],
        compute=(*spans[:5], late, *(s._replace(start=s.start + 4, end=s.end + 4) for s in spans[6:])),
    )
    exhibit = replace(exhibit, measured=(MeasuredStep(1, replace(measured, ranks=(measured.ranks[0], slow))),))
    looked = browser.show(exhibit)
    looked.evaluate("stagewright.view.set(0, 1)")
    looked.page.click("#differences li button >> nth=0")
    assert f"{late.what} on rank 1" in looked.page.inner_text("#chosen")
    start, end = view(looked)
    assert start <= late.start - measured.start
    assert late.end - measured.start <= end


def test_a_rank_that_straggles_is_named(browser):
    schedule = build("1f1b", num_ranks=3, num_microbatches=8)
    slow = simulate(schedule, Costs(forward=[1.0, 1.4, 1.0], backward=[2.0, 2.8, 2.0]))
    measured = (MeasuredStep(0, replace(slow, measured=True)),)
    looked = browser.show(Exhibit(name="run", simulated=simulate(schedule, COSTS), measured=measured))
    assert "rank 1\n1.4 \u00d7 simulated" in looked.page.inner_text("#differences")
    looked.page.click("#differences li button >> nth=0")
    assert looked.evaluate("stagewright.state.row.rank") == 1


def test_idle_time_says_its_cause_and_what_it_waits_for(browser):
    looked = browser.show(example("gpipe"))
    (first, y), (last, _) = looked.place(0, 0, 3), looked.place(0, 0, 4)  # F3, then waiting for B0
    looked.page.mouse.move((first + last) / 2, y)
    told = looked.page.inner_text("#tooltip")
    for words in ("Idle: late peer", "not yet computed", "0B0", "gradients of 1B0 on rank 1"):
        assert words in told
    looked.page.mouse.click((first + last) / 2, y)
    assert "late peer" in looked.page.inner_text("#chosen")
    line = looked.evaluate("stagewright.view.panels[0].rows[0].boxHeight") / 2 - 2
    looked.page.mouse.move(10, 10)
    looked.settle()
    assert looked.colours([((first + last) / 2, y + line)]) == [CAUSE_HUES["late_peer"]]


def test_each_exhibit_has_a_scale_of_its_own_on_demand(browser):
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    slow = Exhibit(name="slow", simulated=simulate(schedule, Costs(forward=60.0, backward=120.0)))
    looked = browser.show(example(), slow)
    end = "panel => { const p = stagewright.page.panels[panel]; return stagewright.view.in(p).x(p.makespan); }"
    assert looked.evaluate(end, 0) < looked.evaluate(end, 1) / 5
    looked.page.click("text=Own scales")
    assert looked.evaluate(end, 0) == pytest.approx(looked.evaluate(end, 1))
    looked.page.mouse.move(*looked.place(0, 1, 2))
    assert f"{example().simulated.ranks[1].actions[2]} on rank 1" in looked.page.inner_text("#tooltip")
    looked.evaluate("stagewright.jump(stagewright.page.panels[0], 1, '1B3')")  # the last of the short one
    assert "1B3" in looked.page.inner_text("#chosen")
    looked.page.keyboard.press("o")
    assert looked.evaluate(end, 0) < looked.evaluate(end, 1) / 5


def test_a_narrow_window_cuts_nothing_off(browser):
    looked = browser.show(example(steps=(0, 1, 2), known=True))
    looked.page.set_viewport_size({"width": 800, "height": 700})
    looked.settle()
    for part in ("figures", "legend", "aside"):
        for length in ("Width", "Height"):
            assert looked.evaluate(f"{part}.scroll{length} - {part}.client{length}") == 0
    assert looked.evaluate("document.documentElement.scrollWidth") == 800


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [250, pytest.param(2500, marks=pytest.mark.nightly)])
def test_a_hundred_thousand_actions_are_drawn(num_microbatches, browser):
    exhibit = example("gpipe", num_ranks=20, num_microbatches=num_microbatches)
    looked = browser.show(exhibit)
    count = "stagewright.page.panels[0].rows.reduce((sum, row) => sum + row.compute.count, 0)"
    assert looked.evaluate(count) == 40 * num_microbatches
    x, y = looked.place(0, 3, 120)  # among forwards, many to a pixel
    assert looked.colours([(x, y)]) == [OP_HUES[Op.F]]
    looked.evaluate("stagewright.jump(stagewright.page.panels[0], 3, '3B17')")
    looked.settle()
    x, y = looked.place(0, 3, exhibit.simulated.ranks[3].actions.index((3, "B", 17)))
    assert looked.colours([(x - 4, y - 8)]) == [OP_HUES[Op.B]]
