// "What if": sliders that play the schedule with other costs (replay.js), and show it below the simulated timeline.
(function (app) {
  "use strict";

  const { UNCHANGED, Wiring, Replay, panelOf } = app.replay;
  const WIDEST = 4; // factors go from 1/4 to 4

  // What can be varied: factors of what is there; seconds on top where nothing is.
  const KNOBS = [
    { key: "F", name: "Forward F", there: ({ ops }) => ops.has("F") },
    { key: "B", name: "Backward B", there: ({ ops }) => ops.has("B") },
    { key: "I", name: "Input grad. I", there: ({ ops }) => ops.has("I") },
    { key: "W", name: "Weight grad. W", there: ({ ops }) => ops.has("W") },
    { key: "latency", name: "Latency", there: ({ travels, latency }) => travels && latency },
    { key: "more_latency", name: "Latency", seconds: true, there: ({ travels, latency }) => travels && !latency },
    { key: "bandwidth", name: "Bandwidth", there: ({ bandwidth }) => bandwidth },
    { key: "U", name: "Update", there: ({ update }) => update },
    { key: "more_update", name: "Update", seconds: true, there: ({ update, ops, trains }) => !update && trains },
  ];

  // What a wiring has that can be varied.
  function findThere(wiring) {
    const ops = new Set(wiring.programs.flatMap(({ codes }) => Array.from(codes, (code) => wiring.op(code))));
    const { costs, norm } = wiring;
    const forwards = costs.F.flat();
    const some = (values) => values.some((value) => value > 0);
    return {
      ops,
      trains: wiring.epilogue || ops.has("U"),
      travels: wiring.routes.length > 0,
      latency: some(costs.latency) || wiring.routes.some((each) => each.latency > 0),
      bandwidth: wiring.routes.some((each) => each.bytes * each.seconds_per_byte > 0) || wiring.joint_steps.some((each) => each.seconds > 0),
      update: some(costs.U) || norm > 0,
      unit: forwards.reduce((sum, seconds) => sum + seconds, 0) / forwards.length || 1,
    };
  }

  // A slider with a number box and a button that puts it back. The slider of factors is logarithmic.
  class Knob {
    constructor(label, { seconds = false, unit = 1, changed }) {
      const { make } = app.panels;
      const [name, scale] = seconds ? app.words.unitOf(unit) : ["×", 1];
      this.seconds = seconds;
      this.scale = scale;
      this.unit = unit;
      this.rest = seconds ? 0 : 1;
      this.slider = make("input", { type: "range", min: seconds ? 0 : -2, max: 2, step: 0.05, "aria-label": label });
      this.box = make("input", { type: "number", step: "any", "aria-label": label + (seconds ? " in " + name : ", times as much") });
      this.box.min = seconds ? 0 : 1 / WIDEST;
      if (!seconds) this.box.max = WIDEST;
      this.back = make("button", { class: "back", title: "Back to what was simulated", "aria-label": "Reset " + label }, "↺");
      this.slider.addEventListener("input", () => this.set(seconds ? this.slider.value * unit : 2 ** this.slider.value, changed));
      this.box.addEventListener("change", () => this.set(this.box.value === "" ? this.rest : this.box.value * scale, changed));
      this.back.addEventListener("click", () => this.set(this.rest, changed));
      this.element = make("div", { class: "knob" }, make("span", {}, label), this.slider, this.box, make("span", { class: "unit" }, name), this.back);
      this.set(this.rest);
    }

    set(value, changed) {
      if (!Number.isFinite(value)) value = this.rest;
      this.value = this.seconds ? Math.max(value, 0) : Math.min(Math.max(value, 1 / WIDEST), WIDEST);
      this.slider.value = this.seconds ? this.value / this.unit : Math.log2(this.value);
      this.box.value = Number((this.value / this.scale).toPrecision(3));
      this.back.disabled = this.value === this.rest;
      if (changed) changed();
    }
  }

  // "makespan 12 s to 10 s (0.83 times), bubble 20.0% to 15.0%"
  function told(before, run) {
    const { time, percent, digits } = app.words;
    const [old, now] = [before.batchSeconds, run.batchSeconds];
    const times = old > 0 ? " (" + digits(now / old, 4) + " times)" : "";
    return (run.wiring.asynchronous ? "a batch every " : "makespan ") + time(old) + " → " + time(now) + times + ", bubble " + percent(before.bubble) + " → " + percent(run.bubble);
  }

  // What to know where the costs at hand do not give the simulation that is shown (a part of a stream, say).
  function warning(before, shown) {
    const apart = Math.abs(before.batchSeconds - shown.data.batch_seconds) > 1e-6 * Math.abs(shown.data.batch_seconds);
    return apart ? " From these costs alone, " + app.words.time(before.batchSeconds) + " would be simulated, not the " +
      app.words.time(shown.data.batch_seconds) + " above: compare with the former." : "";
  }

  function mount({ exhibit, data }) {
    const { make, section } = app.panels;
    const several = app.page.exhibits.length > 1;
    const place = section("whatif-" + app.page.exhibits.indexOf(exhibit), "What if" + (several ? ": " + exhibit.name : ""));
    place.classList.add("whatif");
    if (data.refused) {
      place.append(make("p", {}, data.refused));
      return;
    }
    const wiring = new Wiring(data.wiring);
    const there = findThere(wiring);
    const line = make("p", { class: "told", role: "status" }, "");
    const stay = "Move a slider: the schedule is simulated again.";
    let asked = false;
    let before = null; // nothing changed, played when it is first asked for

    // Once a frame, however quickly a slider moves.
    const changed = () => {
      if (!asked) requestAnimationFrame(() => {
        asked = false;
        play();
      });
      asked = true;
    };

    const knobs = KNOBS.filter((knob) => knob.there(there)).map((knob) => ({
      ...knob, control: new Knob(knob.name, { seconds: knob.seconds, unit: there.unit, changed }),
    }));
    const reset = make("button", {}, "Reset all");
    reset.addEventListener("click", () => {
      for (const { control } of knobs) control.set(control.rest);
      changed();
    });

    function play() {
      const by = { ...UNCHANGED };
      for (const { key, control } of knobs) by[key] = control.value;
      const same = knobs.every(({ control }) => control.value === control.rest);
      reset.disabled = same;
      if (same) {
        line.textContent = stay;
        exhibit.suppose("", null);
      } else {
        before = before || new Replay(wiring, UNCHANGED);
        const run = new Replay(wiring, by);
        line.textContent = told(before, run) + warning(before, exhibit.simulated);
        const more = knobs.filter(({ control }) => control.value !== control.rest).map(({ name, seconds, control }) =>
          name + (seconds ? " + " + app.words.time(control.value) : " × " + app.words.digits(control.value, 3)));
        exhibit.suppose("what if: " + more.join(", "), { ...panelOf(app.page, wiring, run, exhibit.simulated.data), before: before.batchSeconds });
      }
      app.refresh();
    }

    place.append(line, ...knobs.map(({ control }) => control.element), reset);
    line.textContent = stay;
    reset.disabled = true;
  }

  app.extend("whatif", mount);
})(stagewright);
