// Starts the page, and holds what is hovered, chosen and shown. Frames are drawn once per requestAnimationFrame.
(function (app) {
  "use strict";

  const byId = (id) => document.getElementById(id);
  const page = (app.page = new app.model.Page(JSON.parse(byId("data").textContent)));
  const view = (app.view = new app.View(page));
  const painter = (app.painter = new app.Painter(byId("base"), view));
  const marks = (app.marks = new app.Marks(byId("marks"), view, painter));
  const tooltip = byId("tooltip");
  app.scroller = byId("scroller");
  app.state = { hover: null, chosen: null, pointer: null, range: null, marked: null, meant: null, row: null, left: false };
  app.frames = { drawn: 0, seconds: 0 }; // for measurements

  let wanted = 0; // 1: marks alone, 2: everything

  function frame() {
    const begin = performance.now();
    if (wanted > 1) painter.draw();
    marks.draw(app.state);
    wanted = 0;
    app.frames.drawn++;
    app.frames.seconds = (performance.now() - begin) / 1000;
  }

  function ask(level) {
    if (!wanted) requestAnimationFrame(frame);
    wanted = Math.max(wanted, level);
  }

  // What is seen has changed.
  app.changed = () => {
    ask(2);
    if (app.state.pointer !== null) app.hover(app.state.pointer, app.state.pointerY);
  };

  // Rows have changed: places, sizes.
  app.layOut = () => {
    const box = byId("stage").getBoundingClientRect();
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    view.width = app.scroller.clientWidth;
    view.height = Math.floor(box.height);
    painter.font(12);
    view.layOut((text) => painter.measure(text));
    byId("spacer").style.height = Math.max(view.contentHeight, 1) + "px";
    view.width = app.scroller.clientWidth; // a scrollbar may have come
    for (const canvas of [byId("base"), byId("marks")]) {
      canvas.width = Math.round(view.width * ratio);
      canvas.height = Math.round(view.height * ratio);
      canvas.style.width = view.width + "px";
      canvas.style.height = view.height + "px";
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    view.scroll = app.scroller.scrollTop;
    app.changed();
  };

  // Position of a mark: {place, row}; null if its row is hidden.
  app.placeOf = (mark) => {
    const spot = view.spots.has(mark.panel) && view.spots.get(mark.panel).get(mark.row.rank);
    return spot || null;
  };

  app.find = (x, y) => {
    const hit = x === null ? null : view.hit(x, y);
    return hit && hit.track ? { panel: hit.place.panel, row: hit.row.row, track: hit.track, i: hit.i } : null;
  };

  app.hover = (x, y) => {
    app.state.pointer = x;
    app.state.pointerY = y;
    const mark = app.find(x, y);
    app.state.hover = mark;
    byId("base").classList.toggle("over", Boolean(mark));
    const hit = mark || x === null ? null : view.hit(x, y);
    if (mark) showTooltip(app.words.describe(page, mark.panel, mark.row, mark.track, mark.i), x, y);
    else if (hit && hit.memory && x >= view.gutter && x < view.gutter + view.plotWidth) showTooltip(app.layers.memoryAt(hit.row.row, view.seconds(x)), x, y);
    else app.hideTooltip();
    ask(1);
  };

  function showTooltip(described, x, y) {
    tooltip.replaceChildren(app.panels.make("strong", {}, described.title), app.panels.facts(described));
    tooltip.hidden = false;
    const box = byId("stage").getBoundingClientRect();
    const left = x + 16 + tooltip.offsetWidth < box.width ? x + 16 : Math.max(4, x - 16 - tooltip.offsetWidth);
    const top = y + 18 + tooltip.offsetHeight < box.height ? y + 18 : Math.max(4, y - 14 - tooltip.offsetHeight);
    tooltip.style.left = left + "px";
    tooltip.style.top = top + "px";
  }

  app.hideTooltip = () => {
    tooltip.hidden = true;
  };

  // Keep a box chosen. reveal: bring it into sight; speak: to screen readers.
  app.choose = (mark, { reveal = false, speak = false } = {}) => {
    app.state.chosen = mark;
    app.state.row = null;
    app.panels.chosen(mark);
    if (mark && reveal) {
      app.rows.reveal(mark.panel, mark.row);
      view.in(mark.panel).reveal(mark.track.start[mark.i], mark.track.end[mark.i]);
      const place = app.placeOf(mark);
      const top = place.row.top - view.top, bottom = place.row.top + place.row.height - view.height;
      if (place.place.pinned) ask(2);
      else if (app.scroller.scrollTop > top) app.scroller.scrollTop = top;
      else if (app.scroller.scrollTop < bottom) app.scroller.scrollTop = bottom;
    }
    if (mark && speak) {
      const described = app.words.describe(page, mark.panel, mark.row, mark.track, mark.i);
      byId("spoken").textContent = described.title + ", " + described.facts.map(([label, text]) => label + " " + text).join("; ");
    }
    app.state.left = false;
    ask(2);
  };

  // Choose an action of a panel by its name, and bring it into sight.
  app.jump = (panel, rank, name) => {
    const found = panel.find(rank, name);
    if (!found) return;
    const row = panel.rows[found.row];
    app.choose({ panel, row, track: row.compute, i: found.i }, { reveal: true, speak: true });
  };

  // Bring a rank's row into sight, and mark it for a while.
  app.showRank = (panel, rank) => {
    const row = panel.rows[rank];
    app.rows.reveal(panel, row);
    const place = app.placeOf({ panel, row });
    if (!place.place.pinned) app.scroller.scrollTop = place.row.top - view.height / 2;
    app.state.row = row;
    ask(1);
  };

  // Say something for a while, to screen readers too.
  let saying = 0;
  app.tell = (text) => {
    byId("told").textContent = text;
    byId("told").hidden = false;
    clearTimeout(saying);
    saying = setTimeout(() => (byId("told").hidden = true), 5000);
  };

  app.redraw = () => ask(1);

  // Mark the chosen action; of two, show the distance.
  app.mark = () => {
    const { chosen, marked } = app.state;
    app.state.marked = marked ? null : chosen;
    if (marked) app.measure(marked, chosen);
    ask(1);
  };

  app.zoom = (factor) => {
    const inside = app.state.pointer !== null && app.state.pointer > view.gutter && app.state.pointer < view.gutter + view.plotWidth;
    view.zoom(factor, inside ? view.seconds(app.state.pointer) : undefined);
    app.changed();
  };

  // Show another measured step; a choice stays on the action of the same name.
  app.chooseStep = (exhibit, number) => {
    if (number < 0 || number >= exhibit.steps.length || number === exhibit.chosen) return;
    const old = exhibit.measured;
    const { chosen } = app.state;
    exhibit.chosen = number;
    exhibit.showStep();
    let now = chosen;
    if (chosen && chosen.panel === old) {
      const found = chosen.track.kind === "compute" && chosen.row.rank < exhibit.measured.rows.length
        ? exhibit.measured.find(chosen.row.rank, old.name(chosen.row.rank, chosen.i)) : null;
      const row = found && exhibit.measured.rows[found.row];
      now = found && { panel: exhibit.measured, row, track: row.compute, i: found.i };
    }
    app.refresh();
    app.choose(now);
  };

  // Panels have come, gone or changed.
  app.refresh = () => {
    const whole = view.in(null).start === 0 && view.end === view.length;
    view.whole = page.longest;
    view.set(view.start, whole ? view.length : view.end);
    if (app.state.chosen && !page.panels.includes(app.state.chosen.panel)) app.choose(null);
    app.state.hover = app.state.marked = null;
    app.panels.refresh(page);
    app.select(app.state.range);
    app.search.refresh();
    for (const each of app.toggles) each.show();
    app.rows.changed();
  };

  app.otherTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    painter.retheme();
    ask(2);
  }

  // Buttons that show and hide a layer of the drawing, where there is something of it: {key, show, flip}.
  function makeToggles() {
    const some = (has) => () => page.panels.some((panel) => panel.rows.some(has));
    const wished = [
      ["i", "idle", "Idle", "Idle time by cause", some((row) => row.idle && row.idle.count)],
      ["l", "messages", "Messages", "Messages and collectives", some((row) => row.lanes.length)],
      ["m", "memory", "Memory", "Memory of each rank", some((row) => row.memory)],
      ["o", "own", "Own scales", "A time scale for each exhibit", () => page.exhibits.length > 1],
      ["r", "replicas", "Replicas", "All equal replicas, or one row for them", () => page.panels.some((panel) => app.rows.list(panel).some(({ group }) => group.members.length > 1))],
      ["c", "path", "Critical path", "The critical path", () => page.panels.some((panel) => panel.path)],
    ];
    app.toggles = wished.map(([key, layer, name, words, there]) => {
      const show = () => {
        button.hidden = !there();
        button.setAttribute("aria-pressed", String(view.shows[layer]));
      };
      const flip = () => {
        view.shows[layer] = !view.shows[layer];
        show();
        app.rows.changed();
      };
      const button = app.panels.make("button", { title: words + " (" + key + ")", onclick: flip }, name);
      byId("toggles").append(button);
      return { key, show, flip, get there() { return !button.hidden; } };
    });
    for (const each of app.toggles) each.show();
  }

  app.panels.start(page);
  app.rows.startMenu();
  app.startSearch(page);
  makeToggles();
  byId("zoom-in").addEventListener("click", () => app.zoom(1.5));
  byId("zoom-out").addEventListener("click", () => app.zoom(1 / 1.5));
  byId("fit").addEventListener("click", () => {
    view.set(0, view.length);
    app.changed();
  });
  byId("theme").addEventListener("click", app.otherTheme);
  byId("png").addEventListener("click", () => app.save("png"));
  byId("svg").addEventListener("click", () => app.save("svg"));
  byId("link").addEventListener("click", app.link.copy);
  byId("help").addEventListener("click", app.panels.help);
  app.input.pointer(byId("base"), view);
  app.input.keyboard(byId("base"), view);
  app.scroller.addEventListener("scroll", () => {
    view.scroll = app.scroller.scrollTop;
    app.changed();
  });
  app.startEditor(page);
  byId("edit-open").addEventListener("click", app.editor.open);
  for (const [name, mount] of app.extensions) {
    for (const exhibit of page.exhibits) {
      const given = exhibit.extras[name];
      if (given !== null && given !== undefined) mount({ app, exhibit, data: given });
    }
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(dark.matches ? "dark" : "light");
  new ResizeObserver(app.layOut).observe(byId("stage"));
  app.layOut();
  app.link.start();
})(stagewright);
