"""Pictures: they are written, as large as they should be, the same each time, and nothing loads before it is needed."""

import struct
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from support.inside import idle_shares, idle_stretches, time_unit

from stagewright.schedules import Action, Costs, Op, RankTrace, Timeline, attribute_idle, build, critical_path, simulate
from stagewright.viz import (
    Exhibit,
    FigureStyle,
    MeasuredStep,
    comparison_figure,
    render_comparison,
    render_timeline,
    timeline_figure,
    write_figure,
)


def size_of(path):
    """(width, height) in pixels, from the PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def example(*, num_ranks=2, num_microbatches=4, unit=1.0, **costs):
    schedule = build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule, Costs(forward=unit, backward=2 * unit, **costs))


@pytest.fixture
def texts(monkeypatch):
    """Texts on the figures that a test saves: a list that grows with each."""
    found = []
    save = Figure.savefig

    def savefig(figure, *args, **options):
        found.extend(text.get_text() for axes in figure.axes for text in axes.texts)
        found.extend(axes.get_title(loc="left") for axes in figure.axes)
        found.extend(text.get_text() for text in figure.texts)
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


@pytest.mark.thorough
def test_comparison_holds_both_panels(tmp_path, texts):
    simulated, measured = example(), replace(example(latency=0.5), measured=True)
    render_comparison(simulated, measured, tmp_path / "both.png")
    render_timeline(simulated, tmp_path / "one.png")
    assert size_of(tmp_path / "both.png")[1] > size_of(tmp_path / "one.png")[1] + 2 * 50
    assert "1f1b:  P=2  V=1  M=4" in texts
    assert any(text.startswith("simulated:  makespan 15 s,  makespan bubble 20.0%,") for text in texts)
    assert (simulated.makespan, measured.makespan) == (15.0, 17.0)
    assert any(text.startswith("measured:  makespan 17 s (1.133 times simulated)") for text in texts)


@pytest.mark.thorough
def test_numbers_where_they_fit(tmp_path, texts):
    render_timeline(example(num_microbatches=4), tmp_path / "wide.png")
    assert all(texts.count(str(k)) == 2 * 2 for k in range(4))  # F and B on both ranks
    texts.clear()
    render_timeline(example(num_microbatches=500), tmp_path / "narrow.png")
    assert "3" not in texts


def test_time_unit():
    units = {90.0: "s", 1.0: "s", 0.5: "ms", 2e-6: "µs", 1e-8: "ns", 1e-12: "ns", 0.0: "s"}
    assert {seconds: time_unit(seconds)[0] for seconds in units} == units


@pytest.mark.thorough
def test_the_critical_path_is_framed_and_its_shares_are_said(texts):
    timeline = example(latency=0.5)
    plain = timeline_figure(timeline)
    figure = timeline_figure(timeline, style=FigureStyle(critical_path=True))
    path = critical_path(timeline)
    framed = [c for c in figure.axes[0].collections if c not in plain.axes[0].collections and len(c.get_linewidths())]
    frames, lines = framed[-2:]
    assert len(frames.get_paths()) == sum(isinstance(step.what, Action) for step in path.steps)
    assert len(lines.get_paths()) == len(path.steps) - len(frames.get_paths()) > 0
    said = [text.get_text() for line in figure.legends for text in line.get_texts()]
    assert "simulated: backward 59%, forward 29%, message 12%" in said
    assert not any("message" in text.get_text() for line in plain.legends for text in line.get_texts())


def test_forwards_of_a_stream_wear_their_weight_version(texts):
    figure = timeline_figure(simulate(build("2bw", num_ranks=2, num_microbatches=2, num_batches=5), Costs()))
    found = [text.get_text().strip() for text in figure.axes[0].texts if text.get_text().startswith("v")]
    assert sorted(found) == sorted(f"v{max(batch - 1, 0)}" for batch in range(5) for _ in range(2 * 2))
    assert not any(text.get_text().startswith("v") for text in timeline_figure(example()).axes[0].texts)


def stream(name="2bw", *, num_batches=None, **costs):
    schedule = build(name, num_ranks=4, num_microbatches=4, num_batches=num_batches)
    return simulate(schedule, Costs(forward=1.0, backward=2.0, **costs))


def last_batches(timeline, first):
    """A measured window: what each rank did from the first forward of a batch on."""
    ranks = []
    for trace in timeline.ranks:
        at = next(i for i, span in enumerate(trace.compute) if span.what[1:] == (Op.F, 4 * first))
        comm = tuple(span for span in trace.comm if span.end >= trace.compute[at].start)
        ranks.append(RankTrace(compute=trace.compute[at:], comm=comm))
    return Timeline(schedule=timeline.schedule, ranks=tuple(ranks), measured=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_a_stream_is_titled_by_its_steady_state(name, tmp_path, texts):
    render_timeline(stream(name), tmp_path / "free.png")
    assert f"{name}:  P=4  V=1  M=4" in texts
    assert "simulated:  a batch every 12 s,  steady-state bubble 0.0%,  8 batches in 105 s" in texts
    texts.clear()
    simulated = stream(name, latency=0.5)
    render_comparison(simulated, last_batches(stream(name, latency=1.0), 4), tmp_path / "both.png")
    assert any(text.startswith("simulated:  a batch every 15 s,  steady-state bubble 20.0%,") for text in texts)
    assert any(text.startswith("measured:  a batch every 18 s (1.200 times simulated),") for text in texts)
    assert any(",  4 batches in " in text for text in texts)  # of the 8 of the schedule
    assert not any("makespan bubble" in text for text in texts)


def test_the_idle_time_of_a_window_is_each_ranks_own():
    """Ranks enter and leave a window one after the other; in between each is idle as the steady state is."""
    whole = stream("pipedream", num_batches=12, update=0.5)
    window = last_batches(whole, 5)
    first = replace(window, ranks=tuple(replace(r, compute=r.compute[:24]) for r in window.ranks))  # two batches
    for shares, rank in zip(idle_shares(first), first.ranks, strict=True):
        span = rank.compute[-1].end - rank.compute[0].start
        assert (shares.warm_up, shares.drain) == (0.0, 0.0)
        assert sum(shares) == pytest.approx(1 - rank.busy / span)
        assert sum(shares) == pytest.approx(whole.bubble)
    assert [sum(shares) for shares in idle_shares(whole)] == pytest.approx(
        [1 - rank.busy / whole.makespan for rank in whole.ranks]
    )


@pytest.mark.thorough
def test_updates_are_numbered_where_batches_overlap(tmp_path, texts):
    render_timeline(stream(num_batches=3, update=4.0), tmp_path / "t.png")
    assert [texts.count(f"U{batch}") for batch in range(4)] == [4, 4, 4, 0]
    texts.clear()
    render_timeline(example(update=2.0), tmp_path / "flush.png")
    assert texts.count("U") == 2


@pytest.mark.thorough
def test_sums_of_gradients_are_drawn_where_there_are_some(tmp_path, monkeypatch):
    labels, bars = [], []
    save = Figure.savefig

    def savefig(figure, *args, **options):
        bars.append(len(figure.axes[0].collections[-1].get_paths()))
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(Figure, "legend", lambda figure, handles, words, **options: labels.extend(words))
    schedule = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(1, 2))
    render_timeline(simulate(schedule, Costs(reduce_grad=2.0)), tmp_path / "sums.png")
    assert "all-reduces of shared gradients" in labels
    assert bars == [2]  # on the two ranks of stage 1
    labels.clear()
    render_timeline(simulate(schedule, Costs(latency=0.1)), tmp_path / "none.png")
    assert "all-reduces of shared gradients" not in labels


@pytest.mark.thorough
def test_nothing_ran(tmp_path, texts):
    """Neither a timeline without any action, nor one whose actions take no time, nor one idle rank."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    empty = Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2)
    render_timeline(empty, tmp_path / "empty.png")
    assert "simulated:  nothing ran" in texts
    render_comparison(empty, example(), tmp_path / "half.png")
    render_timeline(example(unit=0.0), tmp_path / "no_time.png")
    timeline = example()
    half = replace(timeline, ranks=(timeline.ranks[0], RankTrace(compute=())))
    render_timeline(half, tmp_path / "one_idle.png")
    assert size_of(tmp_path / "one_idle.png")[0] == 1600
    assert Action(0, Op.F, 0) == half.ranks[0].compute[0].what


@pytest.mark.thorough
def test_no_pyplot(tmp_path):
    """Drawing leaves no state behind: pyplot is never loaded."""
    program = (
        "import sys\n"
        "from stagewright.schedules import Costs, build, simulate\n"
        "from stagewright.viz import render_timeline\n"
        "t = simulate(build('1f1b', num_ranks=2, num_microbatches=2), Costs())\n"
        f"render_timeline(t, {str(tmp_path / 't.png')!r})\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@pytest.mark.thorough
def test_a_pdf_has_its_fonts_in_it_and_no_date(tmp_path):
    """Publishers refuse Type 3 fonts, and fonts that are not embedded."""
    timeline = example()
    for name in ("a.pdf", "b.pdf"):
        render_timeline(timeline, tmp_path / name, style=FigureStyle(width=3.5, font=6.0, title=False, captions=False))
    content = (tmp_path / "a.pdf").read_bytes()
    assert content == (tmp_path / "b.pdf").read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    assert b"CreationDate" not in content


@pytest.mark.thorough
def test_an_svg_keeps_its_text_and_has_no_date(tmp_path):
    """The same bytes each time, whatever the clock's origin; words can be searched for."""
    timeline = example(latency=0.25)
    render_timeline(timeline, tmp_path / "a.svg")
    render_timeline(timeline.shifted(64.0), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ">rank 1</text>" in text
    assert "late peer</text>" in text
    assert "dc:date" not in text


@pytest.mark.thorough
def test_a_figure_for_a_paper(tmp_path, texts):
    style = FigureStyle(width=7, dpi=200, font=7, title=False)
    render_timeline(example(), tmp_path / "t.png", style=style)
    assert size_of(tmp_path / "t.png")[0] == 1400
    assert "1f1b:  P=2  V=1  M=4" not in texts
    legend = timeline_figure(example(latency=0.3, update=0.4), style=FigureStyle(width=4, font=9)).legends
    assert len(legend) > 2  # lines of keys that did not fit
    width = 4 * 72
    assert all(sum(len(text.get_text()) for text in line.get_texts()) * 9 * 0.5 < width for line in legend)


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "font"), [(4.0, 7.0), (5.0, 9.5), (16.0, 9.5), (16.0, 20.0)])
def test_no_words_are_cut_and_rows_keep_their_height(width, font):
    """On narrow pages headings, captions and the legend's words go on in a further line."""
    exhibits = [
        Exhibit(name=f"a plan with a long name, number {number}", simulated=example(num_ranks=3, latency=0.1 * number))
        for number in range(3)
    ]
    figure = comparison_figure(exhibits, style=FigureStyle(width=width, font=font, critical_path=True, idle="hatch"))
    figure.canvas.draw()
    page = figure.bbox.padded(1.0)
    ticks = [label for axes in figure.axes for label in axes.get_xticklabels()]  # some lie beyond the axis, undrawn
    words = [text for text in figure.findobj(Text) if text not in ticks and text.get_text().strip()]
    boxes = {text.get_text(): text.get_window_extent() for text in words}
    assert len(boxes) > 20
    assert {said: box for said, box in boxes.items() if not (page.x0 <= box.x0 and box.x1 <= page.x1)} == {}
    assert {said: box for said, box in boxes.items() if not (page.y0 <= box.y0 and box.y1 <= page.y1)} == {}
    heights = [axes.get_window_extent().height / 3 for axes in figure.axes]
    assert heights == pytest.approx([58 * font / 9.5] * 6, rel=0.03)  # of a row


@pytest.mark.parametrize("wrong", [{"width": 1}, {"dpi": 0}, {"font": 1.0}, {"idle": "grey"}])
def test_a_style_that_cannot_be_read(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*expected"):
        FigureStyle(**wrong)


@pytest.mark.thorough
def test_several_exhibits_stand_on_one_scale(texts):
    """A measured panel is compared with its own prediction, every other one with the first of all."""
    short, long = example(), example(latency=0.5)
    run = Exhibit(name="run", simulated=long, measured=(MeasuredStep(7, replace(long, measured=True)),))
    odd = Exhibit(name="read $x 1$", simulated=example(latency=5.0))
    figure = comparison_figure([Exhibit(name="plan", simulated=short), run, odd])
    figure.savefig("/dev/null", format="png")
    assert any(text.startswith("run, simulated:  makespan 17 s (1.133 times plan, simulated)") for text in texts)
    assert any(text.startswith("run, measured, step 7:  makespan 17 s (1.000 times run, simulated)") for text in texts)
    assert any(text.startswith("read $x 1$, simulated:") for text in texts)  # as it is, not as mathematics
    assert {axes.get_xlim()[1] for axes in figure.axes} - {figure.axes[1].get_xlim()[1]} == {odd.simulated.makespan}
    with pytest.raises(ValueError, match="expected at least one Exhibit"):
        comparison_figure([])
    with pytest.raises(ValueError, match="expected at least one Timeline"):
        render_comparison(None, None, "/dev/null")


@pytest.mark.thorough
def test_a_figure_shows_itself_in_a_notebook_and_goes_to_png_svg_and_pdf_alone(tmp_path):
    assert timeline_figure(example())._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"t.eps: expected a name that ends in .png, .svg, .pdf"):
        write_figure(timeline_figure(example()), tmp_path / "t.eps")


@pytest.mark.parametrize("costs", [{}, {"latency": 0.4}, {"latency": 0.4, "update": 0.5, "norm": 0.2}])
def test_idle_stretches_add_up_to_the_causes(costs):
    """They lie between the actions, and their lengths are those of `attribute_idle`."""
    timeline = example(num_ranks=3, num_microbatches=5, **costs)
    for trace, stretches, idle in zip(timeline.ranks, idle_stretches(timeline), attribute_idle(timeline), strict=True):
        spans = sorted([(start, end) for _, start, end in (*trace.compute, *stretches)])
        assert all(after[0] == pytest.approx(before[1], abs=1e-9) for before, after in pairwise(spans))
        for cause in ("warm_up", "drain", "transfer", "unexplained"):
            total = sum(end - start for c, start, end in stretches if c == cause)
            assert total == pytest.approx(getattr(idle, cause), abs=1e-9)
        late = sum(end - start for c, start, end in stretches if c == "late_peer")
        assert late == pytest.approx(idle.late_peer + idle.imbalance, abs=1e-9)


@pytest.mark.thorough
def test_a_missing_rank_is_said_and_clocks_are(tmp_path, texts):
    simulated = example(latency=0.5)
    ranks = (simulated.ranks[0], RankTrace(compute=()))
    measured = replace(simulated, ranks=ranks, measured=True, missing=(1,), clock_error=(0.0, 0.002))
    exhibit = Exhibit(name="run", simulated=simulated, measured=(MeasuredStep(7, measured),))
    write_figure(comparison_figure([exhibit]), tmp_path / "t.png")
    assert " nothing was recorded" in texts
    assert any(text.startswith("measured, step 7, clocks \u00b12.00 ms:") for text in texts)
    assert idle_stretches(measured)[1] == []
    assert sum("%" in text and len(text) < 5 for text in texts) == 3  # totals of three ranks out of four
