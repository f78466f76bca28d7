// The view as the fragment of an address, so that who opens it sees the same: also of a file on a disk.
//
//   #t=0.5,2.25&hide=0s1,1s&pin=0m3&open=0s0&at=0s3:1F5&on=idle,messages&step=2&edit=...
//
// It contains only differences from the initial view; names that are not on this page are reported.
(function (app) {
  "use strict";

  let start = null; // layers and steps as they are at first
  const layers = () => Object.keys(app.view.shows).filter((name) => app.view.shows[name]).join();
  const stepped = () => app.page.exhibits.filter((each) => each.steps.length);
  const steps = () => stepped().map((each) => each.chosen).join();

  function address() {
    const { view, rows, state } = app;
    view.in(null);
    const given = {
      t: view.start > 0 || view.end < view.length ? [view.start, view.end].map((each) => Number(each.toPrecision(9))).join() : "",
      hide: [...rows.hidden].join(), pin: [...rows.pinned].join(), open: [...rows.open].join(),
      at: state.chosen && state.chosen.track.kind === "compute" ? rows.rowKey(state.chosen.panel, state.chosen.row) + ":" + state.chosen.panel.name(state.chosen.row.rank, state.chosen.i) : "",
      on: layers() === start.layers ? "" : layers() || "none",
      step: steps() === start.steps ? "" : steps(),
      edit: app.editor.text,
    };
    return Object.entries(given).filter(([, text]) => text).map(([name, text]) => name + "=" + encodeURIComponent(text).replace(/%2C/g, ",").replace(/%3A/g, ":")).join("&");
  }

  function decoded(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  }

  // [panel, row] of a key, row undefined where it names a panel; null for what is not here.
  function named(key) {
    const [, exhibit, kind, rank] = key.match(/^(\d+)([swm])(\d*)$/) || [];
    const panel = app.page.panels.find((each) => app.rows.panelKey(each) === exhibit + kind);
    return panel && (rank === "" || panel.rows[rank]) ? [panel, panel.rows[rank]] : null;
  }

  function restore(fragment) {
    const given = new Map(fragment.replace(/^#/, "").split("&").filter(Boolean).map((each) => each.split("=").map(decoded)));
    const { view, rows } = app;
    const strange = [];
    const list = (name) => (given.get(name) || "").split(",").filter(Boolean);
    for (const name of given.keys()) if (!["t", "hide", "pin", "open", "at", "on", "step", "edit"].includes(name)) strange.push(name);
    if (!given.has("edit")) app.editor.remove();
    else if (!app.editor.set(given.get("edit"))) strange.push("edit=" + given.get("edit"));
    list("step").forEach((text, at) => {
      const exhibit = stepped()[at];
      if (!exhibit || !(Number(text) < exhibit.steps.length)) strange.push("step=" + text);
      else app.chooseStep(exhibit, Number(text));
    });
    for (const [set, name] of [[rows.hidden, "hide"], [rows.pinned, "pin"], [rows.open, "open"]]) {
      set.clear();
      for (const key of list(name)) named(key) ? set.add(key) : strange.push(name + "=" + key);
    }
    const on = given.has("on") ? list("on") : start.layers.split(",");
    strange.push(...on.filter((name) => !(name in view.shows || name === "none" || name === "")).map((name) => "on=" + name));
    for (const name of Object.keys(view.shows)) view.shows[name] = on.includes(name);
    for (const each of app.toggles) each.show();
    rows.changed();
    const [from, to] = list("t").map(Number);
    if (given.has("t") && !(to > from)) strange.push("t=" + given.get("t"));
    view.in(null).set(...(to > from ? [from, to] : [0, view.length]));
    app.choose(null);
    if (given.has("at")) {
      const [key, name] = given.get("at").split(":");
      const place = named(key);
      const found = place && place[1] && place[0].find(place[1].rank, name);
      if (found) app.choose({ panel: place[0], row: place[1], track: place[1].compute, i: found.i });
      else strange.push("at=" + given.get("at"));
    }
    if (strange.length) app.tell("Not on this page: " + strange.join(", ") + ". The rest of the link is shown.");
    app.changed();
  }

  async function copy() {
    const text = location.href.replace(/#.*/, "") + "#" + address();
    location.replace("#" + address()); // a reload shows the same, too
    try {
      await navigator.clipboard.writeText(text);
      app.tell("Copied a link of this view.");
    } catch {
      app.tell("Copy the address of this page: it is a link of this view.");
    }
  }

  function startLinks() {
    start = { layers: layers(), steps: steps() };
    const follow = () => {
      if (location.hash.slice(1) !== address()) restore(location.hash);
    };
    window.addEventListener("hashchange", follow);
    if (location.hash.length > 1) restore(location.hash);
  }

  app.link = { address, copy, start: startLinks };
})(stagewright);
