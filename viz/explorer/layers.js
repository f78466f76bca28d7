// Layers over the rows that can be switched on and off: memory below a rank's boxes, the critical path through them.
(function (app) {
  "use strict";

  // The highest line of all rows, so that ranks compare; a limit far above what is held is left out.
  function ceiling() {
    let most = 0;
    const limits = [];
    for (const panel of app.page.panels) {
      for (const { memory } of panel.rows) {
        if (!memory) continue;
        most = Math.max(most, memory.peak, memory.predicted || 0, memory.measured || 0);
        if (memory.limit) limits.push(memory.limit);
      }
    }
    const near = limits.filter((limit) => limit < 2.5 * most);
    return Math.max(most, ...near) * 1.06 || 1;
  }

  function memory(painter, panel, place) {
    const { context, view, theme } = painter;
    const { memory: curve } = place.row;
    const top = place.memory, height = place.memoryHeight, bottom = top + height;
    const scale = height / ceiling();
    context.fillStyle = theme.row;
    context.fillRect(view.gutter, top, view.plotWidth, height);
    const { times, parts } = curve;
    const right = Math.min(view.x(panel.makespan), view.gutter + view.plotWidth);
    // One column a pixel: of the points in it, the one at which most is held.
    const from = Math.max(app.model.firstAbove(times, view.start, 0, times.length) - 1, 0);
    const tops = parts.map(() => []);
    let i = from;
    while (i < times.length && times[i] <= view.end) {
      const x = Math.max(view.x(times[i]), view.gutter);
      let best = i, most = -1, j = i;
      do {
        let total = 0;
        for (const { values } of parts) total += values[j];
        if (total > most) [most, best] = [total, j];
        j++;
      } while (j < times.length && view.x(times[j]) < x + 1);
      const end = Math.min(j < times.length ? view.x(times[j]) : right, right);
      let sum = 0;
      parts.forEach(({ values }, p) => {
        sum += values[best];
        tops[p].push(x, end, sum);
      });
      i = j;
    }
    for (let p = parts.length - 1; p >= 0; p--) {
      context.fillStyle = app.page.palette.memory[parts[p].part][0];
      const list = tops[p];
      context.beginPath();
      context.moveTo(list[0], bottom);
      for (let at = 0; at < list.length; at += 3) {
        const y = bottom - list[at + 2] * scale;
        context.lineTo(list[at], y);
        context.lineTo(list[at + 1], y);
      }
      context.lineTo(list[list.length - 2], bottom);
      context.fill();
    }
    lines(painter, place, curve, bottom, scale, top);
  }

  const LINES = [["limit", "limit", [], "ink"], ["predicted", "predicted peak", [5, 4], "ink"], ["measured", "measured peak", [1, 3], "ink"]];

  function lines(painter, place, curve, bottom, scale, top) {
    const { context, view, theme } = painter;
    for (const [name, , dash, colour] of LINES) {
      if (curve[name] === null || curve[name] === undefined) continue;
      const y = Math.round(bottom - curve[name] * scale) + 0.5;
      if (y < top) continue; // far above
      context.strokeStyle = theme[colour];
      context.lineWidth = 1;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(view.gutter, y);
      context.lineTo(view.gutter + view.plotWidth, y);
      context.stroke();
      context.setLineDash([]);
    }
  }

  // What a rank holds at a time: {title, facts}.
  function memoryAt(row, seconds) {
    const { words, page } = app;
    const { times, parts, peak, limit, predicted, measured } = row.memory;
    const i = Math.max(app.model.firstAbove(times, seconds, 0, times.length) - 1, 0);
    const held = parts.map(({ part, values }) => [page.palette.memory[part][1], values[i]]).filter(([, count]) => count > 0);
    const total = held.reduce((sum, [, count]) => sum + count, 0);
    const facts = [["at", words.time(seconds, 5)], ...held.reverse().map(([name, count]) => [name, words.bytes(count)]), ["peak", words.bytes(peak)]];
    if (predicted) facts.push(["predicted peak", words.bytes(predicted)]);
    if (measured) facts.push(["measured peak", words.bytes(measured)]);
    if (limit) facts.push(["limit", words.bytes(limit)]);
    return { title: row.name + " holds " + words.bytes(total), facts };
  }

  // What does not lie on the path is paler, and what does has an edge.
  function path(painter, panel, place) {
    const { context, view, theme } = painter;
    const { start, end, action } = panel.path;
    const steps = place.members.flatMap(({ rank }) => panel.path.rows[rank]).sort((a, b) => start[a] - start[b]);
    const tick = app.page.tick;
    const top = place.box, height = place.boxHeight;
    const right = view.gutter + view.plotWidth;
    let edge = view.gutter;
    const stretches = [];
    for (const step of steps) {
      if (end[step] * tick < view.start) continue;
      if (start[step] * tick > view.end) break;
      if (action[step] < 0) continue;
      const from = Math.max(view.x(start[step] * tick), view.gutter - 4), to = Math.min(view.x(end[step] * tick), right + 4);
      const last = stretches[stretches.length - 1];
      if (last && from - last[1] < 1.5) last[1] = Math.max(to, last[1]);
      else stretches.push([from, to]);
    }
    context.fillStyle = theme.ground;
    context.globalAlpha = 0.62;
    for (const [from, to] of stretches) {
      if (from > edge) context.fillRect(edge, top, from - edge, height);
      edge = to;
    }
    if (edge < right) context.fillRect(edge, top, right - edge, height);
    context.globalAlpha = 1;
    context.fillStyle = theme.mark;
    for (const [from, to] of stretches) {
      context.fillRect(from, top - 2, Math.max(to - from, 1), 2.5);
      context.fillRect(from, top + height - 0.5, Math.max(to - from, 1), 2.5);
    }
  }

  // Its messages, from rank to rank.
  function pathLinks(painter, place) {
    const { context, view, theme } = painter;
    const { start, end, sender, rank } = place.panel.path;
    const spots = view.spots.get(place.panel);
    const tick = app.page.tick;
    context.save();
    context.beginPath();
    context.rect(view.gutter, view.scroll, view.plotWidth, view.height);
    context.clip();
    context.strokeStyle = theme.mark;
    context.lineWidth = 1.6;
    context.beginPath();
    for (let step = 0; step < start.length; step++) {
      if (sender[step] < 0 || end[step] * tick < view.start || start[step] * tick > view.end) continue;
      const [from, to] = [sender[step], rank[step]].map((each) => (spots.get(each) || {}).row);
      if (!from || !to || from === to) continue;
      const down = to.top > from.top;
      context.moveTo(view.x(start[step] * tick), down ? from.box + from.boxHeight : from.box);
      context.lineTo(view.x(end[step] * tick), down ? to.box : to.box + to.boxHeight);
    }
    context.stroke();
    context.restore();
  }

  app.layers = { memory, memoryAt, path, pathLinks, LINES };
})(stagewright);
