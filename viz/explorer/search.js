// Search of actions: by their names, "1F0", or in words, "stage 2 forward". What is found is framed; Enter goes along it.
(function (app) {
  "use strict";

  const HELP = "Find: 1F0, F3, 2B, stage 1, microbatch 3, rank 0, forward";

  // (row, i, panel) -> whether this action is meant; null for nothing to look for, undefined for what is not understood.
  function parse(text) {
    const wanted = {};
    let rest = text.toLowerCase().replace(/\b(stage|microbatch|mb|rank)\s*[:=]?\s*(\d+)/g, (_, name, number) => {
      wanted[name === "mb" ? "microbatch" : name] = +number;
      return " ";
    });
    rest = rest.replace(/\bgradients?\b/g, " ").trim();
    for (const word of rest ? rest.split(/\s+/) : []) {
      const [, stage, op, index] = word.match(/^(\d*)([fbiwu])(\d*)$/) || [];
      if (stage) wanted.stage = +stage;
      if (index) wanted.index = +index;
      wanted.op = op ? op.toUpperCase() : Object.keys(app.words.OP_WORDS).find((each) => app.words.OP_WORDS[each].toLowerCase().startsWith(word));
      if (!wanted.op) return undefined;
    }
    if (!Object.keys(wanted).length) return null;
    const fits = (name, value) => wanted[name] === undefined || wanted[name] === value;
    return ({ program, rank }, i, { schedule }) => {
      const op = program.ops[i], index = program.indices[i];
      return fits("op", op) && fits("stage", program.stages[i]) && fits("rank", rank) && fits("index", index) &&
        fits("microbatch", op === "U" ? -1 : Math.floor(index / schedule.slices));
    };
  }

  // Marks of all actions that are meant, panel by panel in the order of time.
  function all(page, meant) {
    return page.panels.flatMap((panel) => panel.rows.flatMap((row) => {
      const places = [];
      for (let i = 0; i < row.compute.count; i++) if (meant(row, i, panel)) places.push({ panel, row, track: row.compute, i });
      return places;
    }).sort((a, b) => a.track.start[a.i] - b.track.start[b.i]));
  }

  function start(page) {
    const { make } = app.panels;
    const told = make("output", { role: "status" });
    const box = make("input", { type: "search", placeholder: "Find 1F0\u2026 (/)", title: HELP, "aria-label": HELP });
    let marks = [], at = -1;

    const show = () => {
      const meant = parse(box.value);
      app.state.meant = meant || null;
      marks = meant ? all(page, meant) : [];
      at = -1;
      told.textContent = meant ? marks.length + " found" : meant === undefined ? "not understood" : "";
      app.changed();
    };
    box.addEventListener("input", show);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        box.value = "";
        show();
        document.getElementById("base").focus();
      } else if (event.key === "Enter" && marks.length) {
        at = (Math.max(at, event.shiftKey ? 0 : -1) + (event.shiftKey ? -1 : 1) + marks.length) % marks.length;
        told.textContent = at + 1 + " of " + marks.length;
        app.choose(marks[at], { reveal: true, speak: true });
      }
    });
    document.getElementById("search").append(box, told);
    app.search = {
      focus: () => box.select(), refresh: show, get text() { return box.value; },
      set(text) {
        box.value = text;
        show();
      },
    };
  }

  app.startSearch = start;
})(stagewright);
