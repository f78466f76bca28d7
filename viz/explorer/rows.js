// The rows on the page: some are hidden, some pinned above what scrolls, and of replicas that do the same work one
// represents all. Keys name them in links: "0s" is the simulated timeline of exhibit 0 (w what if, m measured), "0s3" its
// row of rank 3.
(function (app) {
  "use strict";

  const panelKey = (panel) => app.page.exhibits.indexOf(panel.exhibit) + panel.kind[0];
  const rowKey = (panel, row) => panelKey(panel) + row.rank;

  // Whether two rows of the same stages are replicas: the same work in the same order, and simulated ones at the same times.
  function alike(panel, one, other) {
    const { program: a, compute: times } = one, { program: b, compute: others } = other;
    if (a.ops !== b.ops || a.stages.some((stage, i) => stage !== b.stages[i])) return false;
    const slack = 1.5 * app.page.tick;
    return panel.kind === "measured" || times.end.every((end, i) => Math.abs(end - others.end[i]) < slack && Math.abs(times.start[i] - others.start[i]) < slack);
  }

  const busy = (row) => row.compute.end.reduce((sum, end, i) => sum + end - row.compute.start[i], 0);

  const groupsOfPanel = new WeakMap();

  // [{row, members}] of a panel: the row that represents its replicas, of measured ones the slowest.
  function groupsOf(panel) {
    if (!groupsOfPanel.has(panel)) {
      const groups = [];
      const byStages = new Map();
      for (const row of panel.rows) {
        const key = row.stages.join();
        const near = byStages.get(key) || [];
        byStages.set(key, near);
        const found = row.compute.count && !row.missing && near.find((group) => group.members[0].compute.count && alike(panel, group.members[0], row));
        if (found) found.members.push(row);
        else {
          const group = { row, members: [row] };
          groups.push(group);
          if (!row.missing) near.push(group);
        }
      }
      if (panel.kind === "measured") for (const group of groups) group.row = group.members.reduce((most, each) => (busy(each) > busy(most) ? each : most));
      groupsOfPanel.set(panel, groups);
    }
    return groupsOfPanel.get(panel);
  }

  class Rows {
    constructor() {
      this.hidden = new Set(); // of panels and rows
      this.pinned = new Set(); // of rows
      this.open = new Set(); // of rows whose replicas all show
    }

    // Rows of a panel by the order of ranks, of replicas the one that represents all unless they are open: {row, members}.
    list(panel) {
      const apart = (group) => app.view.shows.replicas || group.members.length < 2 || group.members.some((row) => this.open.has(rowKey(panel, row)));
      return groupsOf(panel).flatMap((group) => (apart(group) ? group.members.map((row) => ({ row, members: [row], group })) : [{ ...group, group }]))
        .sort((a, b) => a.members[0].rank - b.members[0].rank);
    }

    // Those that are not hidden; none of a panel that is.
    shown(panel) {
      if (this.hidden.has(panelKey(panel))) return [];
      return this.list(panel).filter(({ row }) => !this.hidden.has(rowKey(panel, row)));
    }

    isPinned(panel, row) {
      return this.pinned.has(rowKey(panel, row));
    }

    hides(panel, row = null) {
      return this.hidden.has(panelKey(panel)) || (row !== null && this.hidden.has(rowKey(panel, row)));
    }

    // The hidden rows of a panel: "2 of 8 rows hidden", or "".
    told(panel) {
      const [all, left] = [this.list(panel).length, this.shown(panel).length];
      return left < all ? all - left + " of " + all + (all > 1 ? " rows" : " row") + " hidden" : "";
    }

    // Make a row visible.
    reveal(panel, row) {
      const group = groupsOf(panel).find(({ members }) => members.includes(row));
      const wasHidden = this.hidden.delete(panelKey(panel)) | this.hidden.delete(rowKey(panel, row));
      const apart = !this.list(panel).some((each) => each.row === row);
      if (apart) this.open.add(rowKey(panel, group.row));
      if (wasHidden || apart) this.changed();
    }

    flip(set, key) {
      if (!set.delete(key)) set.add(key);
      this.changed();
    }

    pin(panel, row) {
      this.flip(this.pinned, rowKey(panel, row));
    }

    // Hide a row, or a whole panel, or bring it back.
    hide(panel, row = null) {
      this.flip(this.hidden, row ? rowKey(panel, row) : panelKey(panel));
    }

    // All replicas of a row apart, or one for all.
    openUp(panel, { group }) {
      const keys = group.members.map((row) => rowKey(panel, row));
      const open = keys.filter((key) => this.open.delete(key));
      if (!open.length) this.open.add(rowKey(panel, group.row));
      this.changed();
    }

    showAll() {
      this.hidden.clear();
      this.changed();
    }

    changed() {
      app.layOut();
      section();
    }
  }

  // "rank 3", and how many replicas it represents.
  function nameOf({ row, members }, panel) {
    return row.name + (members.length < 2 ? "" : (panel.kind === "measured" ? ", slowest of " : ", ") + members.length + (panel.kind === "measured" ? "" : " replicas"));
  }

  // The replicas that a row represents, in words; null for only itself.
  function replicasOf(panel, row) {
    const found = app.rows.list(panel).find((each) => each.row === row);
    if (!found || found.members.length < 2) return null;
    const ranks = "ranks " + found.members.map((each) => each.rank).join(", ");
    return panel.kind === "measured" ? "the slowest of " + ranks + ", which do the same work" : ranks + " run alike";
  }

  // Buttons for a row.
  function buttons(panel, entry) {
    const { make } = app.panels;
    const name = entry.row.name;
    const one = (text, title, pressed, onclick) => make("button", { title, "aria-label": text + " " + name, "aria-pressed": String(pressed), onclick }, text);
    const { members } = entry.group;
    return [
      one("Pin", "Keep " + name + " above what scrolls (p)", app.rows.isPinned(panel, entry.row), () => app.rows.pin(panel, entry.row)),
      one("Hide", "Hide " + name + " (h); shift + h shows all", app.rows.hides(panel, entry.row), () => app.rows.hide(panel, entry.row)),
      members.length > 1 && !app.view.shows.replicas
        ? one("\u00d7" + members.length, "Show the " + members.length + " replicas apart, or one for all", entry.members.length < 2, () => app.rows.openUp(panel, entry)) : null,
    ];
  }

  function hidePanel(panel) {
    const name = app.panels.panelName(app.page, panel);
    return app.panels.make("button", {
      title: "Hide all rows of " + name, "aria-label": "Hide " + name, "aria-pressed": String(app.rows.hides(panel)), onclick: () => app.rows.hide(panel),
    }, "Hide");
  }

  // The section at the right: every row with its buttons.
  function section() {
    const { make, folded, panelName } = app.panels;
    const place = document.getElementById("rows");
    if (place.classList.contains("folded")) return;
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const wasOpen = [...place.querySelectorAll("details")].map((each) => each.open);
    const item = (panel) => (entry) => make("li", {}, make("span", {}, nameOf(entry, panel)), make("span", { class: "rowtools" }, ...buttons(panel, entry).filter(Boolean)));
    const hidden = app.page.panels.map((panel) => app.rows.told(panel)).filter(Boolean);
    const all = make("button", { title: "Show all rows again (shift + h)", onclick: () => app.rows.showAll() }, "Show all");
    all.disabled = !hidden.length;
    place.replaceChildren(place.firstChild, make("p", {}, hidden.length ? hidden.join("; ") + " " : "Nothing is hidden. ", all), ...app.page.panels.flatMap((panel) => [
      make("h3", { class: "rowhead" }, make("span", {}, panelName(app.page, panel)), hidePanel(panel)), ...folded(app.rows.list(panel).map(item(panel)), 8),
    ]));
    place.querySelectorAll("details").forEach((each, at) => (each.open = Boolean(wasOpen[at])));
    if (focused) for (const each of place.querySelectorAll("button")) if (each.getAttribute("aria-label") === focused) each.focus();
  }

  // A menu at a name that was clicked: of a row, or a panel's heading.
  function menu(panel, entry, x, y) {
    const place = document.getElementById("menu");
    const name = entry ? nameOf(entry, panel) : app.panels.panelName(app.page, panel);
    place.replaceChildren(app.panels.make("strong", {}, name), ...(entry ? buttons(panel, entry).filter(Boolean) : [hidePanel(panel)]));
    place.setAttribute("aria-label", name);
    place.style.left = x + 6 + "px";
    place.style.top = y + 6 + "px";
    place.hidden = false;
    place.querySelector("button").focus();
  }

  function startMenu() {
    const place = document.getElementById("menu");
    const close = () => {
      if (place.hidden) return;
      place.hidden = true;
      document.getElementById("base").focus();
    };
    place.addEventListener("click", close);
    place.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    place.addEventListener("focusout", (event) => {
      if (!place.contains(event.relatedTarget)) place.hidden = true;
    });
  }

  app.rows = new Rows();
  Object.assign(app.rows, { section, menu, startMenu, nameOf, replicasOf, panelKey, rowKey });
})(stagewright);
