// The editor: a schedule by name, sizes, memory limit and costs, built (orders.js) and simulated (replay.js) in the page, and
// shown as an exhibit of its own below the others.
(function (app) {
  "use strict";

  const { FAMILIES, build, peaks, wiringOf } = app.orders;
  const MOST = 200_000, MOST_SEARCHED = 40_000; // actions
  const MOST_CHUNKS = 8; // that there are shades for

  // Sizes, and seconds of one microbatch on one rank: {name, P, V, M, limit, F, I, W, latency}; a whole backward is I + W.
  let state = null;
  let exhibit = null;

  // As the first timeline of the page, as far as the editor can.
  function fromPage(page) {
    const { schedule, rows, messages } = page.panels.find((panel) => FAMILIES[panel.schedule.name]) || page.panels[0];
    const mean = (op) => {
      let sum = 0, count = 0;
      for (const { program, compute } of rows) {
        for (let i = 0; i < compute.count; i++) if (program.ops[i] === op) [sum, count] = [sum + compute.end[i] - compute.start[i], count + 1];
      }
      return count ? sum / count : 0;
    };
    const name = FAMILIES[schedule.name] ? schedule.name : "1f1b";
    const V = FAMILIES[name].chunks || schedule.chunks;
    const P = name === schedule.name ? new Set(rows.map((row) => row.stages.join())).size : schedule.ranks; // of one replica
    const whole = (schedule.stages / P) * schedule.slices; // actions of a rank and microbatch
    const [F, B, I, W] = ["F", "B", "I", "W"].map((op) => mean(op) * whole);
    const under = messages.end.map((end, m) => (end - messages.start[m]) * page.tick);
    const latency = under.length ? under.reduce((a, b) => a + b, 0) / under.length : 0;
    const split = I || W ? { I, W } : { I: B / 2, W: B / 2 };
    return { name, P, V, M: Math.max(1, Math.round((schedule.microbatches * P) / schedule.ranks)), limit: null, F, ...split, latency };
  }

  // Costs of one stage's action.
  const costsOf = ({ V, F, I, W, latency }) => ({ F: F / V, B: (I + W) / V, I: I / V, W: W / V, latency });

  function simulated() {
    const { name, P, V, M } = state;
    for (const word of ["F", "I", "W", "latency"]) {
      if (!(state[word] >= 0)) throw new Error(`${word}=${state[word]}: expected a finite number of seconds, at least 0`);
    }
    const actions = P * V * M * (FAMILIES[name].split ? 3 : 2), most = FAMILIES[name].timed ? MOST_SEARCHED : MOST;
    if (actions > most) throw new Error(`${actions.toLocaleString("en")} actions: ${name} is built in the page up to ${most.toLocaleString("en")}.`);
    if (V > MOST_CHUNKS) throw new Error(`V=${V}: expected at most ${MOST_CHUNKS} in the page`);
    const costs = costsOf(state);
    const schedule = build(name, { P, V, M, costs, limit: state.limit });
    const wiring = wiringOf(schedule, costs);
    return { schedule, wiring, run: new app.replay.Replay(wiring, {}) };
  }

  // An exhibit of what was simulated.
  function shown({ schedule, wiring, run }) {
    const { page } = app;
    const { P, V, M } = state;
    const ops = new Set(schedule.programs.flatMap((program) => program.map(([, op]) => op)));
    const shades = Object.fromEntries([...ops].map((op) => [op, page.palette.shades[op][V - 1].map((shade) => [shade, shade])]));
    const sizes = { name: schedule.name, ranks: P, stages: P * V, chunks: V, microbatches: M, slices: 1, batches: 1, groups: 1, asynchronous: false };
    const panel = app.replay.panelOf(page, wiring, run, { schedule: sizes, shades, messages: { bytes: [] } });
    const caption = `${schedule.name} P=${P} V=${V} M=${M}, simulated in the page`;
    return new app.model.Exhibit(page, {
      name: "edited", notes: [], measured: [], simulated: { ...panel, caption }, figures: [["simulated", run.makespan, run.bubble, "simulated in the page"]],
    });
  }

  // What is said of it, the limit included.
  function told({ schedule, run }) {
    const { time, percent, digits } = app.words;
    const held = peaks(schedule), most = Math.max(...held), { limit } = state;
    const ranks = held.flatMap((each, rank) => (each > limit ? [rank] : []));
    const over = limit !== null && ranks.length ? ` That is over the limit of ${digits(limit, 4)} on rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}: zb-1p and zb-2p keep a limit.` : "";
    return [`Simulated in the page: makespan ${time(run.makespan)}, bubble ${percent(run.bubble)}, at most ${digits(most, 4)} stage activation${most === 1 ? "" : "s"} on a rank.${over}`, Boolean(over)];
  }

  function remove() {
    if (!exhibit) return;
    app.page.exhibits = app.page.exhibits.filter((each) => each !== exhibit);
    exhibit = null;
    app.refresh();
  }

  function draw() {
    const line = document.getElementById("edit-told");
    let wrong = true;
    try {
      const made = simulated();
      const next = shown(made);
      [line.textContent, wrong] = told(made);
      app.page.exhibits = [...app.page.exhibits.filter((each) => each !== exhibit), next];
      exhibit = next;
      app.refresh();
    } catch (error) {
      line.textContent = error.message;
    }
    line.classList.toggle("wrong", wrong);
  }

  // --- the form ---

  function form() {
    const { make } = app.panels;
    const [unit, scale] = app.words.unitOf(state.F || 1);
    const fields = [];
    let asked = 0;
    const changed = () => {
      clearTimeout(asked);
      asked = setTimeout(draw, 120);
    };
    const field = (label, title, get, set, { seconds = false, there = () => true, ...options } = {}) => {
      const box = make("input", { type: "number", step: seconds ? "any" : 1, min: seconds ? 0 : 1, title, "aria-label": label + (seconds ? " [" + unit + "]" : ""), ...options });
      const element = make("label", { class: "field", title }, make("span", {}, label), box, make("span", { class: "unit" }, seconds ? unit : ""));
      box.addEventListener("input", () => {
        set(box.value === "" ? null : Number(box.value) * (seconds ? scale : 1));
        changed();
      });
      fields.push({ box, show() {
        element.hidden = !there();
        const value = get();
        if (document.activeElement !== box) box.value = value === null ? "" : seconds ? Number((value / scale).toPrecision(6)) : value;
      } });
      return element;
    };
    const part = (key) => [() => state[key], (value) => (state[key] = value)];
    const split = () => Boolean(FAMILIES[state.name].split);
    const choice = make("select", { "aria-label": "Schedule", title: "Schedules that the page can build" }, ...Object.keys(FAMILIES).map((name) => make("option", { value: name }, name)));
    choice.addEventListener("change", () => {
      const { chunks } = FAMILIES[(state.name = choice.value)];
      state.V = chunks || Math.max(state.V, 2);
      show();
      changed();
    });
    const show = () => {
      choice.value = state.name;
      for (const each of fields) each.show();
    };
    const whole = [() => state.I + state.W, (value) => {
      const share = state.I + state.W > 0 ? state.I / (state.I + state.W) : 0.5;
      Object.assign(state, { I: value * share, W: value * (1 - share) });
    }];
    const work = "of one microbatch on one rank, all its chunks together, so that schedules compare at equal work";
    const elements = [
      make("label", { class: "field" }, make("span", {}, "Schedule"), choice, make("span", {})),
      field("Ranks P", "Pipeline ranks", ...part("P")),
      field("Chunks V", "Stages a rank", ...part("V")),
      field("Microbatches M", "Microbatches of a batch", ...part("M")),
      field("Memory limit", "Most stage activations of a rank at once: zb-1p and zb-2p keep it, of others it is said", ...part("limit"), { placeholder: "none", step: "any" }),
      field("Forward", "Forward " + work, ...part("F"), { seconds: true }),
      field("Backward", "Backward " + work, ...whole, { seconds: true, there: () => !split() }),
      field("Input grad.", "Gradient of the inputs " + work, ...part("I"), { seconds: true, there: split }),
      field("Weight grad.", "Gradient of the weights " + work, ...part("W"), { seconds: true, there: split }),
      field("Latency", "Of a message between ranks", ...part("latency"), { seconds: true }),
    ];
    return [elements, show];
  }

  function start(page) {
    const { make, section } = app.panels;
    state = fromPage(page);
    const place = section("edit", "Edit");
    const [elements, show] = form();
    const away = make("button", { title: "Take the edited schedule off the page", onclick: remove }, "Remove");
    place.append(make("p", { id: "edit-told", role: "status" }, "Change something: the schedule is built and simulated in the page."), ...elements, away);
    place.firstChild.click(); // folded
    show();
    app.editor = {
      // What is edited, as a link has it; "" where nothing is.
      get text() {
        const { name, P, V, M, limit, F, I, W, latency } = state;
        return exhibit ? [name, P, V, M, limit === null ? "" : limit, F, I, W, latency].join() : "";
      },
      // Whether the text could be read.
      set(text) {
        const [name, ...rest] = text.split(",");
        const [P, V, M, limit, F, I, W, latency] = rest.map((each) => (each === "" ? null : Number(each)));
        if (!FAMILIES[name] || rest.length !== 8 || rest.some((each) => Number.isNaN(Number(each)))) return false;
        state = { name, P, V, M, limit, F, I, W, latency };
        show();
        draw();
        return exhibit !== null;
      },
      remove,
      open() {
        if (place.classList.contains("folded")) place.firstChild.click();
        place.scrollIntoView({ block: "nearest" });
        place.querySelector("select").focus();
      },
    };
  }

  app.startEditor = start;
})(stagewright);
