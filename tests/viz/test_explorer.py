"""The explorer in headless Chromium: it draws what the timeline says, and answers pointer and keys."""

from dataclasses import replace

import pytest

from stagewright.schedules import Costs, Links, Op, Way, build, simulate
from stagewright.viz import Exhibit, MeasuredStep, Row, Slice, explorer_html
from stagewright.viz.palette import OP_HUES


def example(name="1f1b", *, num_ranks=2, num_microbatches=4, slower=0.0, steps=(), **options):
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    links = Links(network=Way(latency=0.25), activation_bytes=3e6)
    predicted = simulate(schedule, Costs(forward=1.0, backward=2.0), links)
    measured = tuple(
        MeasuredStep(
            step, replace(simulate(schedule, Costs(forward=1.0, backward=2.0 + step / 10, latency=0.5)), measured=True)
        )
        for step in steps
    )
    return Exhibit(name="run", predicted=predicted, measured=measured, links=links)


def find(timeline, rank, name):
    return [str(span.what) for span in timeline.ranks[rank].compute].index(name)


def test_boxes_stand_where_the_timeline_says_in_the_colours_of_their_ops(browser):
    exhibit = example("zb-h1")
    looked = browser.show(exhibit)
    spots, hues = [], []
    for rank, trace in enumerate(exhibit.predicted.ranks):
        for i, action in enumerate(trace.actions):
            if action.op is not Op.W:  # hatched
                x, y = looked.place(0, rank, i)
                spots.append((x - 4, y - 9))
                hues.append(OP_HUES[action.op])
    assert looked.colours(spots) == hues
    assert looked.said == []
    assert all(url.startswith("file:") for url in looked.requests)
    assert len(looked.requests) == 1


def test_hover_tells_what_is_known_of_an_action(browser):
    looked = browser.show(example())
    looked.page.mouse.move(*looked.place(0, 1, 0))
    looked.settle()
    told = looked.page.inner_text("#tooltip")
    for words in ("Forward of microbatch 0", "1F0 on rank 1", "1.25 s warm up", "0F0 on rank 0", "3 MB"):
        assert words in told


def test_names_are_text_whatever_they_hold(browser):
    hostile = "</script><script>document.title = 'broken'</script>\"'&<b>\u2028\u20ac @@DATA@@"
    foreign = Exhibit(
        name=hostile, foreign=(Row(name=hostile, slices=(Slice(hostile, 0.0, 1.0, hostile),)),), notes=(hostile,)
    )
    looked = browser.show(foreign, example())
    assert looked.said == []
    assert looked.page.title() == f"{hostile} / run"
    assert hostile in looked.page.inner_text("#title")
    assert hostile in looked.page.inner_text("#notes")


def test_nothing_to_show_is_refused():
    with pytest.raises(ValueError, match=r"exhibits=\[\]: expected at least one"):
        explorer_html([])
