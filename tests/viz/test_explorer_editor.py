"""The editor of the page: orders that it builds, what they take, what it says; compared with Python."""

import json
from itertools import product
from typing import Any

import pytest

from stagewright.schedules import FAMILIES, Costs, build, simulate

from .test_explorer import example

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


def told(looked: Any) -> str:
    return str(looked.page.inner_text("#edit-told"))


def panels(looked: Any) -> list[Any]:
    found: list[Any] = looked.evaluate("stagewright.page.panels.map((panel) => [panel.caption, panel.makespan])")
    return found


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
    assert told(looked).startswith("Simulated in the page: makespan")
    assert f"at most {max(timeline.peak_activations)} stage activations on a rank" in told(looked)
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
    assert "at most 2 stage activations" in told(looked)
    looked.page.select_option("#edit select", "zb-h1")
    looked.until("stagewright.page.panels[1].schedule.name === 'zb-h1'")
    assert "over the limit of 2 on ranks 0, 1, 2: zb-1p and zb-2p keep a limit" in told(looked)
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
    assert looked.said == []


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
    assert told(looked).startswith("num_chunks=2 for schedule '1f1b': it has one stage per rank; expected 1")
    fill(looked, "Chunks V", 1)
    fill(looked, "Microbatches M", 60_000)
    assert told(looked) == "240,000 actions: 1f1b is built in the page up to 200,000."
    fill(looked, "Microbatches M", 8)
    fill(looked, "Latency", -1)
    assert told(looked) == "latency=-1: expected a finite number of seconds, at least 0"
    assert looked.said == []
