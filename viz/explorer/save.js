// What is seen as a picture, with title and legend: all rows that are not hidden, over the stretch of time in sight.
(function (app) {
  "use strict";

  const TITLE = 38, EDGE = 12, LINE = 22;
  const LARGEST = 16000; // of a canvas [pixels]

  // Lay out the legend below each other in lines: [{x, y, swatches, text}], and its height.
  function legend(painter, width) {
    const items = [];
    let x = EDGE, y = 0;
    painter.font(12);
    for (const key of document.getElementById("legend").children) {
      const swatches = [...key.querySelectorAll(".swatch")];
      const text = key.textContent;
      const wide = swatches.reduce((sum, each) => sum + parseFloat(getComputedStyle(each).width), swatches.length ? 6 : 0) + painter.measure(text) + 18;
      if (key.classList.contains("break") || (x > EDGE && x + wide > width)) [x, y] = [EDGE, y + LINE];
      if (key.classList.contains("break")) continue;
      items.push({ x, y, swatches, text });
      x += wide;
    }
    return [items, items.length ? y + LINE + EDGE : 0];
  }

  function drawKey(painter, { x, y, swatches, text }, top) {
    const { context, theme } = painter;
    const middle = top + y + LINE / 2;
    for (const swatch of swatches) {
      const style = getComputedStyle(swatch);
      const [width, height, line] = ["width", "height", "borderTopWidth"].map((name) => parseFloat(style[name]));
      if (line > 0) {
        context.strokeStyle = theme.ink;
        context.lineWidth = line;
        context.setLineDash({ dashed: [5, 4], dotted: [1, 3] }[style.borderTopStyle] || []);
        context.beginPath();
        context.moveTo(x, middle);
        context.lineTo(x + width, middle);
        context.stroke();
        context.setLineDash([]);
      } else {
        context.fillStyle = style.backgroundImage === "none" ? style.backgroundColor : painter.hatch(style.backgroundColor, "rgba(255,255,255,.5)");
        context.fillRect(x, middle - height / 2, width, height);
      }
      x += width;
    }
    painter.font(12);
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, x + (swatches.length ? 6 : 0), middle);
  }

  // Draw on another context, all rows below each other.
  // make: of a width and height, the context.
  function draw(make) {
    const { view, painter, marks } = app;
    const { scroll, height } = view;
    view.scroll = 0;
    view.height = Math.max(view.contentHeight, view.head + 60);
    const [items, below] = legend(painter, view.width);
    const context = make(view.width, TITLE + view.height + below);
    const draws = [painter, marks], before = draws.map((each) => each.context);
    for (const each of draws) each.context = context;
    try {
      context.fillStyle = painter.theme.ground;
      context.fillRect(0, 0, view.width, TITLE + view.height + below);
      painter.font(14, 600);
      context.fillStyle = painter.theme.ink;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(document.getElementById("title").textContent, EDGE, TITLE / 2 + 2, view.width - 2 * EDGE);
      context.save();
      context.translate(0, TITLE);
      painter.draw();
      marks.draw({ ...app.state, hover: null, pointer: null });
      context.restore();
      for (const item of items) drawKey(painter, item, TITLE + view.height);
    } finally {
      draws.forEach((each, at) => (each.context = before[at]));
      view.height = height;
      view.scroll = scroll;
    }
    return context;
  }

  function svg() {
    return new Blob([String(draw((width, height) => new app.SvgContext(width, height)))], { type: "image/svg+xml" });
  }

  function png() {
    const canvas = document.createElement("canvas");
    draw((width, height) => {
      const ratio = Math.min(2, LARGEST / Math.max(width, height));
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      context.clearRect = () => {}; // marks are drawn above what is there
      return context;
    });
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  async function save(ending) {
    const blob = await (ending === "svg" ? svg() : png());
    const name = document.title.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "timeline";
    const link = app.panels.make("a", { href: URL.createObjectURL(blob), download: name + "." + ending });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    app.tell("Saved as " + link.download + ".");
  }

  app.save = save;
})(stagewright);
