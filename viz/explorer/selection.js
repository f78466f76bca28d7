// A stretch of time that is selected: how long it is, and what each rank did in it. `state.range` is in seconds of the
// scale of all panels.
(function (app) {
  "use strict";

  // Seconds of each group of a track between two times.
  function between(track, from, to) {
    const sums = new Float64Array(track.groups);
    track.sumBefore(to, track.from(to), sums, 1);
    track.sumBefore(from, track.from(from), sums, -1);
    return sums;
  }

  // By rank {row, busy, idle by cause, bytes that arrived} of a panel.
  function statistics(panel, from, to) {
    const bytes = panel.rows.map(() => 0);
    const { receiver, end, kind, src, dst } = panel.messages;
    for (let m = 0; m < end.length; m++) {
      const at = end[m] * app.page.tick;
      if (at >= from && at < to) bytes[receiver[m]] += panel.bytes.get(kind[m] + "/" + src[m] + "/" + dst[m]) || 0;
    }
    return panel.rows.filter((row) => !row.missing).map((row) => ({
      row, busy: between(row.compute, from, to).reduce((a, b) => a + b, 0), idle: between(row.idle, from, to), bytes: bytes[row.rank],
    }));
  }

  function ofPanel(panel) {
    const { make, folded, panelName } = app.panels;
    const { time, percent, bytes } = app.words;
    const [from, to] = app.state.range.map((seconds) => seconds / app.view.in(panel).unit);
    const items = statistics(panel, from, to).map((each) => {
      const causes = app.page.palette.causes.map(([hue, text], cause) => [each.idle[cause], hue, text]).filter(([seconds]) => seconds > app.page.tick);
      const size = each.bytes ? ", " + bytes(each.bytes) + " in" : "";
      return make("li", { class: "rank" }, make("strong", {}, each.row.name), " busy " + time(each.busy, 3) + " (" + percent(each.busy / (to - from), 0) + ")" + size,
        ...causes.map(([seconds, hue, text]) => make("span", { class: "key" }, make("span", { class: "swatch", style: { background: hue } }), time(seconds, 3) + " " + text)));
    });
    return [make("h3", {}, panelName(app.page, panel) + ": " + time(to - from) + ", from " + time(from) + " to " + time(to)), ...folded(items, 8)];
  }

  // How far two actions are apart: [[label, text]].
  function distance([one, other]) {
    const name = (mark) => mark.panel.name(mark.row.rank, mark.i) + " on rank " + mark.row.rank;
    const [a, b] = [one, other].map(({ track, i }) => [track.start[i], track.end[i]]);
    return [
      ["from, to", name(one) + ", " + name(other)], ["start to start", app.words.time(b[0] - a[0])], ["end to start", app.words.time(b[0] - a[1])],
      ["end to end", app.words.time(b[1] - a[1])],
    ];
  }

  // Select a stretch; null lets go.
  // marks: two actions between which it lies, if it does.
  app.select = (range, marks = null) => {
    app.state.range = range && range[1] > range[0] ? range : null;
    const place = document.getElementById("selection");
    place.hidden = !app.state.range;
    const shown = app.state.range ? app.page.panels.filter((panel) => !marks || panel === marks[0].panel) : [];
    place.replaceChildren(place.firstChild, ...(marks ? [app.panels.facts({ facts: distance(marks) })] : []), ...shown.flatMap(ofPanel));
    app.redraw();
  };

  // The distance from the first action that was marked, or is chosen, to another one.
  app.measure = (one, other) => {
    if (!one || !other || one.panel !== other.panel || one.track.kind !== "compute" || other.track.kind !== "compute") return;
    const { unit } = app.view.in(one.panel);
    const ends = [one, other].flatMap(({ track, i }) => [track.start[i] * unit, track.end[i] * unit]);
    app.select([Math.min(...ends), Math.max(...ends)], [one, other]);
  };

  // Zoom into what is selected, or else the chosen box.
  app.focus = () => {
    const { range, chosen } = app.state;
    if (range) app.view.in(null).set(...range);
    else if (chosen) app.view.in(chosen.panel).set(chosen.track.start[chosen.i], chosen.track.end[chosen.i]);
    app.changed();
  };
})(stagewright);
