// Everything around the rows: headings, grid and axis, ends, idle time at the side, the overview.
(function (app) {
  "use strict";

  function heading(painter, place) {
    const { context, view, theme } = painter;
    const { panel } = place;
    const middle = place.top + 19;
    painter.font(12.5, 600);
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = theme.ink;
    const several = app.page.exhibits.length > 1;
    const hidden = app.rows.told(panel);
    const title = (several ? panel.exhibit.name + ", " : "") + panel.caption + (place.pinned ? " (pinned)" : hidden && " (" + hidden + ")");
    context.fillText(title, view.gutter, middle);
    const after = view.gutter + context.measureText(title).width + 12;
    painter.font(12);
    context.fillStyle = theme.muted;
    context.fillText(app.panels.summary(panel), after, middle, Math.max(view.gutter + view.plotWidth - after, 40));
    if (view.hasSide && panel.rows.some((row) => row.shares)) {
      context.fillText("idle [% of " + (panel.data.window ? "time" : "makespan") + "]", view.sideLeft, middle);
    }
  }

  // Where the timelines above and this one end.
  function ends(painter, place) {
    const { context, view, theme } = painter;
    const { panel } = place;
    const marks = [[panel.makespan, theme.faint, []]];
    const simulated = panel.exhibit.simulated;
    if (panel.kind === "measured" && simulated && !simulated.schedule.asynchronous) {
      marks.push([panel.exhibit.expected[1], theme.ink, [5, 4]]);
    }
    for (const [seconds, colour, dash] of marks) {
      const x = view.x(seconds);
      if (x < view.gutter || x > view.gutter + view.plotWidth + 1) continue;
      context.strokeStyle = colour;
      context.setLineDash(dash);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, place.first);
      context.lineTo(Math.round(x) + 0.5, place.bottom);
      context.stroke();
      context.setLineDash([]);
    }
  }

  function grid(painter, place) {
    const { context, view, theme } = painter;
    context.strokeStyle = theme.rule;
    context.lineWidth = 1;
    context.beginPath();
    for (const [x] of ticks(painter)) {
      context.moveTo(Math.round(x) + 0.5, place.first - 3);
      context.lineTo(Math.round(x) + 0.5, place.bottom);
    }
    context.stroke();
  }

  // The longest bar of idle time of all, so that bars of all panels compare.
  function sideLimit(painter) {
    let limit = 0;
    for (const panel of app.page.panels) {
      for (const row of panel.rows) if (row.shares) limit = Math.max(limit, row.shares.reduce((a, b) => a + b, 0));
    }
    return limit || 1;
  }

  function side(painter, row, limit) {
    const { context, view, theme } = painter;
    let x = view.sideLeft, total = 0;
    const height = Math.min(row.boxHeight, 18), top = row.box + (row.boxHeight - height) / 2;
    row.row.shares.forEach((share, cause) => {
      const width = (share / limit) * view.sideWidth;
      if (width < 0.2) return;
      context.fillStyle = app.page.palette.causes[cause][0];
      context.fillRect(x, top, width, height);
      x += width;
      total += share;
    });
    if (row.height < 13) return;
    painter.font(11);
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(app.words.percent(total, total < 0.0995 ? 1 : 0), x + 6, row.box + row.boxHeight / 2 + 0.5);
  }

  // [x, seconds] of round times, and the decimals that they need.
  function ticks(painter) {
    const { view } = painter;
    const rough = 90 * view.pixel;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let at = Math.ceil(view.start / step - 1e-9); at * step <= view.end + step * 1e-9; at++) found.push([view.x(at * step), at * step]);
    painter.step = step;
    return found;
  }

  // The overview and the axis, above what scrolls.
  function head(painter) {
    const { context, view, theme } = painter;
    view.in(null);
    context.fillStyle = theme.ground;
    context.fillRect(0, 0, view.width, view.head);
    const left = view.gutter, width = view.plotWidth;
    context.fillStyle = theme.row;
    context.fillRect(left, 8, width, 8);
    context.fillStyle = theme.faint;
    const from = left + (view.start / view.length) * width;
    context.fillRect(from, 8, Math.max(3, ((view.end - view.start) / view.length) * width), 8);
    if (!view.shows.own) axis(painter, view.head);
  }

  function axis(painter, bottom) {
    const { context, view, theme } = painter;
    const left = view.gutter;
    const marks = ticks(painter);
    const [name, unit] = app.words.unitOf(Math.max(view.end, painter.step));
    const places = Math.max(0, Math.ceil(-Math.log10(painter.step / unit) - 1e-9));
    painter.font(11);
    context.fillStyle = theme.muted;
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.strokeStyle = theme.faint;
    context.lineWidth = 1;
    context.beginPath();
    for (const [x, seconds] of marks) {
      context.fillText((seconds / unit).toFixed(places), Math.max(x, left + 6), bottom - 17);
      context.moveTo(Math.round(x) + 0.5, bottom - 7);
      context.lineTo(Math.round(x) + 0.5, bottom - 2);
    }
    context.moveTo(left, bottom - 1.5);
    context.lineTo(left + view.plotWidth, bottom - 1.5);
    context.stroke();
    context.textAlign = "right";
    context.fillText("time [" + name + "]", left - 12, bottom - 17);
  }

  app.frame = { heading, ends, grid, sideLimit, side, head, axis };
})(stagewright);
