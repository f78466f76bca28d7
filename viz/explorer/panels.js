// Everything around the canvas: title, notes, figures, legend, and the sections at the right. Text goes in as text, never
// as HTML, since names may contain anything.
(function (app) {
  "use strict";

  // An element with a class, attributes and children (strings become text).
  function make(tag, options = {}, ...children) {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "class") found.className = value;
      else if (name === "style") Object.assign(found.style, value);
      else if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
      else found.setAttribute(name, value);
    }
    found.append(...children.filter((child) => child !== null));
    return found;
  }

  // The figures of a panel, next to its caption.
  function summary(panel) {
    const { time, percent } = app.words;
    const { data } = panel;
    const before = panel.kind === "simulated" ? null : panel.exhibit.simulated;
    const clocks = data.clocks ? ", " + data.clocks : "";
    const expected = panel.exhibit.expected;
    const ratio = (base, name) => (base > 0 ? " (" + app.words.digits(data.batch_seconds / base, 4) + " times " + name + ")" : "");
    const isStream = panel.schedule.asynchronous;
    const times = !before ? "" : panel.kind === "what if" ? ratio(data.before, "unchanged") // what its sliders divide by
      : before.schedule.asynchronous && !isStream ? ratio(before.data.makespan, "simulated") : ratio(expected[1], expected[0]);
    if (isStream) return "a batch every " + time(data.batch_seconds) + times + ", steady-state bubble " + percent(data.bubble) + ", shown " + time(data.makespan) + clocks;
    return "makespan " + time(data.makespan) + times + ", bubble " + percent(data.bubble) + clocks;
  }

  // Name and schedule of an exhibit, and its sizes.
  function headline(exhibit) {
    const panel = exhibit.simulated || exhibit.measured;
    if (!panel) return [exhibit.name, ""];
    const { name, ranks, chunks, microbatches, slices, batches, asynchronous } = panel.schedule;
    const sizes = "P=" + ranks + " V=" + chunks + " M=" + microbatches + (slices > 1 ? ", " + slices + " slices each" : "") + (batches > 1 && !asynchronous ? ", " + batches + " batches" : "");
    return [(exhibit.name === name ? "" : exhibit.name + ": ") + name, sizes];
  }

  function title(page) {
    const lines = page.exhibits.map(headline);
    const alike = lines.every(([, sizes]) => sizes === lines[0][1]);
    const own = lines.map(([name, sizes]) => name + (alike || !sizes ? "" : ", " + sizes));
    document.getElementById("title").textContent = own.join(" / ") + (alike && lines[0][1] ? ", " + lines[0][1] : "");
    const notes = page.exhibits.flatMap((each) => each.notes.map((note) => (page.exhibits.length > 1 && !note.startsWith(each.name + ":") ? each.name + ": " : "") + note));
    const list = document.getElementById("notes");
    list.hidden = !notes.length;
    list.replaceChildren(...notes.map((note) => make("li", {}, note)));
  }

  const OWN = ["simulated", "predicted", "measured"];
  const FIGURES = { step: ["lower bound", ...OWN], bubble: OWN, memory: OWN };
  const FULLEST = "on the fullest rank: bytes, or where no stage's are known the activations it holds, of microbatches of the whole model";

  // A row per exhibit: the bound of a step, and what is simulated, predicted and measured of it, its bubble and memory.
  function figures(page) {
    const { time, percent, digits } = app.words;
    const rows = page.exhibits.filter((each) => each.data.figures.length).map((exhibit) => ({
      exhibit, given: new Map(exhibit.data.figures.map(([label, seconds, bubble, how]) => [label, { seconds, bubble, how }])),
    }));
    const place = document.getElementById("figures");
    place.hidden = !rows.length;
    const groups = Object.entries(FIGURES).map(([group, labels]) => [group, labels.filter((label) => rows.some(({ exhibit, given }) => (group === "memory" ? (exhibit.data.memory || {})[label] : given.has(label))))]).filter(([, labels]) => labels.length);
    const columns = groups.flatMap(([group, labels]) => labels.map((label, i) => ({ group, label, first: i ? "" : "first" })));
    const several = page.exhibits.length > 1;
    const cell = ({ exhibit, given }, { group, label, first }) => {
      const found = group === "memory" ? (exhibit.data.memory || {})[label] : given.get(label);
      if (!found) return make("td", { class: first }, make("small", {}, "\u2013"));
      if (group === "memory") return make("td", { class: first, title: FULLEST }, exhibit.data.memory[label]);
      if (group === "bubble") return make("td", { class: first, title: found.how }, percent(found.bubble));
      const other = { simulated: "lower bound", predicted: "simulated", measured: given.has("predicted") ? "predicted" : "simulated" }[label];
      const beside = other && given.has(other) ? " " + digits(found.seconds / given.get(other).seconds, 4) + " \u00d7 " + other.replace("lower ", "") : "";
      const how = /^(median|90%)/.test(found.how) ? ", " + found.how.split(";")[0] : "";
      return make("td", { class: first, title: found.how }, time(found.seconds), make("small", {}, beside + how));
    };
    const stream = page.panels.some((panel) => panel.schedule && panel.schedule.asynchronous);
    const blank = several ? make("th", {}) : null;
    place.replaceChildren(make("table", {},
      make("thead", {},
        make("tr", {}, blank && blank.cloneNode(), ...groups.map(([group, labels]) => make("th", { class: "columns", scope: "colgroup", colspan: labels.length }, stream && group === "step" ? "batch to batch" : group))),
        make("tr", {}, blank, ...columns.map(({ label, first }) => make("th", { scope: "col", class: first }, label)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, several ? make("th", { scope: "row" }, row.exhibit.name) : null, ...columns.map((column) => cell(row, column)))))));
  }

  // A slider for each exhibit with several measured steps.
  function steps(page) {
    const place = document.getElementById("steps");
    place.replaceChildren();
    for (const exhibit of page.exhibits) {
      if (exhibit.steps.length < 2) continue;
      const told = make("output", {}, "");
      const range = make("input", { type: "range", min: 0, max: exhibit.steps.length - 1, step: 1, "aria-label": "Measured step of " + exhibit.name });
      const show = () => {
        range.value = exhibit.chosen;
        told.textContent = "step " + exhibit.steps[exhibit.chosen];
        range.setAttribute("aria-valuetext", told.textContent);
      };
      range.addEventListener("input", () => app.chooseStep(exhibit, +range.value));
      exhibit.showStep = show;
      show();
      place.append(make("label", { class: "steps" }, page.exhibits.length > 1 ? exhibit.name : "", range, told));
    }
  }

  // --- the legend ---

  function legend(page) {
    const panels = page.panels;
    const keys = [];
    const seen = new Set();
    const swatch = (colour, extra = "") => make("span", { class: "swatch" + extra, style: { background: colour } });
    for (const [op, [hue, words]] of Object.entries(page.palette.ops)) {
      const shades = panels.map((panel) => panel.data.shades[op]).filter(Boolean).sort((a, b) => b.length - a.length)[0];
      if (!shades) continue;
      const several = panels.some((panel) => panel.schedule.batches > 1);
      const colours = shades.flatMap((pair) => (several ? pair : pair.slice(0, 1)).map(([colour]) => colour));
      const tiles = make("span", { class: "swatches", "aria-hidden": "true" }, ...colours.slice(0, 8).map((colour) => {
        const tile = swatch(colour);
        if (op === "W") tile.style.background = "repeating-linear-gradient(135deg, rgba(255,255,255,.5) 0 1.2px, transparent 1.2px 4px) " + (colour || hue);
        return tile;
      }));
      const first = !seen.size && (shades.length > 1 || several);
      const notes = [shades.length > 1 ? "chunk 0 to " + (shades.length - 1) : "", several ? "even, odd batches" : ""].filter(Boolean);
      keys.push(make("span", { class: "key" }, tiles, words + (first && notes.length ? " (" + notes.join("; ") + ")" : "")));
      seen.add(op);
    }
    const told = new Set();
    for (const panel of panels) {
      for (const key of panel.styleNumbers.keys()) {
        if (!/^[mc]/.test(key) || told.has(key)) continue;
        told.add(key);
        const text = key[0] === "m" ? page.palette.messages[+key.slice(1)][2] : (page.palette.collectives[key.slice(1)] || ["", key.slice(1)])[1];
        keys.push(make("span", { class: "key" }, swatch(page.laneHue(key), " thin"), text));
      }
    }
    const ends = new Set(panels.filter((panel) => panel.kind === "measured" && panel.exhibit.simulated && !panel.schedule.asynchronous).map((panel) => panel.exhibit.expected[0]));
    if (ends.size) keys.push(make("span", { class: "key" }, make("span", { class: "swatch line" }), [...ends].sort().join(" or ") + " end"));
    const memories = panels.flatMap((panel) => panel.rows.map((row) => row.memory).filter(Boolean));
    if (memories.length) {
      keys.push(make("span", { class: "break" }), make("span", {}, "Memory:"));
      page.palette.memory.forEach(([hue, text], part) => {
        if (memories.some((memory) => memory.parts.some((each) => each.part === part))) keys.push(make("span", { class: "key" }, swatch(hue), text));
      });
      for (const [name, text] of app.layers.LINES) {
        if (memories.some((memory) => memory[name])) keys.push(make("span", { class: "key" }, make("span", { class: "swatch line " + name }), text));
      }
    }
    const causes = page.palette.causes.filter((_, cause) => panels.some((panel) => panel.rows.some((row) => row.shares && row.shares[cause] > 1e-3)));
    if (causes.length) {
      keys.push(make("span", { class: "break" }), make("span", {}, "Idle by cause:"));
      for (const [hue, text] of causes) keys.push(make("span", { class: "key" }, swatch(hue), text));
    }
    const place = document.getElementById("legend");
    place.hidden = !keys.length;
    place.replaceChildren(...keys);
  }

  // --- the sections at the right ---

  // A section whose heading, its first child, folds it away.
  // before: the next section; at the end by default.
  function section(id, heading, before = null) {
    const head = make("h2", { role: "button", tabindex: "0", "aria-expanded": "true" }, heading);
    const found = make("section", { id }, head);
    const flip = () => {
      head.setAttribute("aria-expanded", String(!found.classList.toggle("folded")));
      found.dispatchEvent(new Event("fold"));
    };
    head.addEventListener("click", flip);
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      flip();
    });
    document.getElementById("aside").insertBefore(found, before);
    return found;
  }

  function facts(described) {
    return make("dl", {}, ...described.facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]));
  }

  // The chosen action, or how to choose one.
  function chosen(mark) {
    const place = document.getElementById("chosen");
    const heading = place.firstChild;
    if (!mark) {
      heading.textContent = "Actions";
      place.replaceChildren(heading, make("p", {}, "Click a box to keep what is known of it here, or press Tab on the timelines."));
      return;
    }
    const described = app.words.describe(app.page, mark.panel, mark.row, mark.track, mark.i);
    heading.textContent = described.title;
    place.replaceChildren(heading, facts(described));
  }

  // Idle seconds of all ranks of a panel by cause.
  function idle(page) {
    const place = document.getElementById("idle");
    const parts = [place.firstChild];
    for (const panel of page.panels) {
      if (!panel.rows.some((row) => row.shares)) continue;
      const sums = page.palette.causes.map((_, cause) => panel.rows.reduce((sum, row) => sum + (row.shares ? row.shares[cause] : 0), 0) / panel.rows.length);
      const total = sums.reduce((a, b) => a + b, 0);
      if (!total) continue;
      const shown = sums.map((share, cause) => [share, ...page.palette.causes[cause]]).filter(([share]) => share > 5e-4).sort((a, b) => b[0] - a[0]);
      parts.push(
        make("h3", {}, panelName(page, panel)),
        make("p", {}, app.words.percent(total) + " of all ranks' time"),
        make("div", { class: "bar", "aria-hidden": "true" }, ...shown.map(([share, hue]) => make("span", { style: { background: hue, flex: String(share) } }))),
        make("ul", { class: "plain" }, ...shown.map(([share, hue, text]) => make("li", {}, make("span", { class: "swatch", style: { background: hue } }), make("span", {}, text), make("span", {}, app.words.percent(share))))),
      );
    }
    place.hidden = parts.length < 2;
    place.replaceChildren(...parts);
  }

  // Shares of the critical path of each panel.
  function path(page) {
    const place = document.getElementById("path");
    const parts = [place.firstChild];
    for (const panel of page.panels) {
      if (!panel.path) continue;
      const { kinds, links, ranks } = panel.path.shares;
      parts.push(make("h3", {}, panelName(page, panel)));
      for (const [heading, group] of [["by kind", kinds], ["by link", links], ["by rank", ranks]]) {
        const shown = group.filter(([, share]) => share > 5e-4).slice(0, 5);
        if (!shown.length) continue;
        parts.push(make("p", {}, heading), make("ul", { class: "plain" }, ...shown.map(([text, share]) => make("li", {}, make("span", {}, text), make("span", {}, app.words.percent(share))))));
      }
    }
    place.hidden = parts.length < 2;
    place.replaceChildren(...parts);
  }

  // What each measured step departs from its simulation in, and who straggles.
  function differences(page) {
    const place = document.getElementById("differences");
    const { time, digits } = app.words;
    const more = (seconds) => (seconds < 0 ? "\u2212" : "+") + time(Math.abs(seconds), 3);
    const parts = [place.firstChild];
    for (const { measured, simulated } of page.exhibits) {
      if (!measured) continue;
      const { departures, causes, stragglers, notes = [] } = measured.data.difference;
      const found = [];
      for (const each of stragglers) {
        found.push(make("li", {},
          make("button", { class: "link", onclick: () => app.showRank(measured, each.rank) }, each.name),
          make("span", {}, digits(each.ratio, 3) + " \u00d7 " + each.against + " (" + more(each.seconds) + ")")));
      }
      const lists = [["who straggles", found]];
      const least = 0.002 * measured.makespan;
      const changed = causes.filter(([, seconds]) => Math.abs(seconds) > least).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
      lists.push(["by cause, of the mean rank", changed.map(([name, seconds]) => make("li", {}, make("span", {}, name), make("span", {}, more(seconds))))]);
      const seen = departures.filter(([, , before, after]) => before !== after);
      lists.push(["actions that depart most", seen.map(([rank, name, before, after]) => make("li", {},
        make("button", { class: "link", onclick: () => app.jump(measured, rank, name) }, name + " on rank " + rank),
        make("span", {}, more(after - before) + (before > 0 ? ", " + digits(after / before, 3) + " \u00d7" : ""))))]);
      const shown = lists.filter(([, items]) => items.length);
      if (!shown.length && !notes.length) continue;
      parts.push(make("h3", {}, panelName(page, measured) + (simulated ? " against simulated" : "")));
      for (const note of notes) parts.push(make("p", {}, note));
      for (const [heading, items] of shown) parts.push(make("p", {}, heading), ...folded(items));
    }
    place.hidden = parts.length < 2;
    place.replaceChildren(...parts);
  }

  // A list of which the first items show, and the rest on demand.
  function folded(items, first = 6) {
    const lists = [make("ul", { class: "plain" }, ...items.slice(0, first))];
    if (items.length > first) {
      lists.push(make("details", {}, make("summary", {}, (items.length - first) + " more"), make("ul", { class: "plain" }, ...items.slice(first))));
    }
    return lists;
  }

  function panelName(page, panel) {
    return (page.exhibits.length > 1 ? panel.exhibit.name + ", " : "") + panel.caption;
  }

  // --- help ---

  const KEYS = [
    ["wheel, ctrl + wheel, + −, w s", "zoom at the pointer, or in the middle"],
    ["drag, ← →, a d, shift + wheel", "move along the time; drag up and down, or wheel over the names, to other rows"],
    ["p, h, shift + h", "pin the row above what scrolls, hide it, show all; so do clicks on names and headings, and Rows at the right"],
    ["e", "edit: a schedule, P, V, M, memory limit and costs, simulated in the page"],
    ["r", "all equal replicas, or one row for them"],
    ["shift + drag, drag the axis", "select a stretch of time: what each rank does in it"],
    ["f", "zoom into what is selected, or the chosen action"],
    ["shift + click, x", "the distance from the chosen action to another; x marks one, and then x the other"],
    ["/", "find actions; Enter and shift + Enter go along them, Esc ends it"],
    ["0, double click", "show everything"],
    ["click, Enter", "keep an action at the right; Esc lets go, of the selection too"],
    ["Tab, shift + Tab", "next and previous action of the rank's program"],
    ["arrow keys", "once an action is chosen: along its program, and to other ranks"],
    ["[ ]", "the measured step before and after"],
    ["i, l, m, c", "idle time, messages, memory, critical path on and off"],
    ["o", "a time scale for each exhibit, or one for all"],
    ["PNG, SVG", "save what is shown, with title and legend: all rows that are not hidden, the time in sight"],
    ["Link", "copy an address that shows this view again: time, rows, choice, layers, step, what is edited"],
    ["t", "light or dark"],
    ["?", "this help"],
  ];

  function help() {
    const dialog = document.getElementById("help-dialog");
    dialog.replaceChildren(
      make("h2", { id: "help-title" }, "Keys and pointer"),
      make("dl", {}, ...KEYS.flatMap(([keys, text]) => [make("dt", {}, make("kbd", {}, keys)), make("dd", {}, text)])),
      make("p", { class: "muted" }, "Where boxes are narrower than a pixel, each column shows the shares of its time: work from the bottom up, then idle time by cause."),
      make("button", { onclick: () => dialog.close() }, "Close"),
    );
    dialog.showModal();
    dialog.scrollTop = 0; // the focused button is at the end
  }

  function start(page) {
    steps(page);
    section("chosen", "Actions");
    section("selection", "Selection").hidden = true;
    section("differences", "Differences");
    section("rows", "Rows").addEventListener("fold", () => app.rows.section());
    document.getElementById("rows").firstChild.click(); // folded
    section("idle", "Idle time");
    section("path", "Critical path");
    chosen(null);
    refresh(page);
  }

  // After another step, or what an extension supposes.
  function refresh(page) {
    title(page);
    figures(page);
    legend(page);
    differences(page);
    idle(page);
    path(page);
  }

  app.panels = { make, summary, section: (id, heading) => section(id, heading, document.getElementById("idle")), chosen, facts, folded, panelName, help, start, refresh };
})(stagewright);
