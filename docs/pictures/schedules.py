"""Draws the pictures of docs/guides/schedules.md, all on one scale: python docs/pictures/schedules.py"""

from pathlib import Path

from matplotlib.transforms import Bbox

from stagewright.schedules import Costs, Timeline, build, simulate
from stagewright.viz import Exhibit, FigureStyle, comparison_figure

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "2bw")
TWO_CHUNKS = ("interleaved", "zb-v")


def timeline(name: str) -> Timeline:
    """Four ranks, eight microbatches; stages of equal work, F = I = W; of 2bw two batches."""
    chunks = 2 if name in TWO_CHUNKS else 1
    options = {"num_chunks": chunks} | ({"num_batches": 2} if name == "2bw" else {})
    schedule = build(name, num_ranks=4, num_microbatches=8, **options)
    return simulate(schedule, Costs(forward=1 / chunks, input_grad=1 / chunks, weight_grad=1 / chunks))


def main() -> None:
    exhibits = [Exhibit(name=name, simulated=timeline(name)) for name in NAMES]
    figure = comparison_figure(exhibits, style=FigureStyle(width=10, font=8, title=False, dpi=110))
    figure.canvas.draw()
    inch = figure.dpi_scale_trans.inverted()
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]  # without the bars at their right
    for exhibit, panel in zip(exhibits, panels, strict=True):
        name, seconds = exhibit.name, exhibit.simulated.makespan
        title = "2bw: a batch every 24 s; two are shown" if name == "2bw" else f"{name}: a batch in {seconds:g} s"
        panel.set_title(title, loc="left", size=9)
        box = panel.get_tightbbox().transformed(inch)
        strip = Bbox.from_extents(0, box.y0 - 0.02, box.x1 + 0.1, box.y1 + 0.04)
        figure.savefig(Path(__file__).parent / f"schedule-{name}.png", bbox_inches=strip)


if __name__ == "__main__":
    main()
