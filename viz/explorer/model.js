// The data as typed arrays, and questions about it. Nothing here draws or touches the document.
//
//   page -> exhibits -> panels (simulated, the chosen measured step) -> rows -> tracks
//
// A track holds boxes in sequence: `start` and `end` in seconds, ascending, without overlap.
(function (app) {
  "use strict";

  const OPS = "FBIWU"; // the order of `Track.share`

  // The first i of `values[from..to)` with values[i] > at.
  function firstAbove(values, at, from, to) {
    while (from < to) {
      const middle = (from + to) >> 1;
      if (values[middle] > at) to = middle;
      else from = middle + 1;
    }
    return from;
  }

  class Track {
    constructor(kind, count) {
      this.kind = kind; // "compute", "idle" or "lane"
      this.count = count;
      this.start = new Float64Array(count);
      this.end = new Float64Array(count);
      this.style = new Uint16Array(count); // into panel.styles
      this.depth = 0; // line below the boxes (lanes)
    }

    // The first box that ends after `seconds`.
    from(seconds) {
      return firstAbove(this.end, seconds, 0, this.count);
    }

    // The box at `seconds`, or the nearest within `slack` seconds; -1 without one.
    at(seconds, slack) {
      const i = this.from(seconds);
      if (i < this.count && this.start[i] <= seconds) return i;
      const after = i < this.count ? this.start[i] - seconds : Infinity;
      const before = i > 0 ? seconds - this.end[i - 1] : Infinity;
      if (Math.min(after, before) > slack) return -1;
      return after < before ? i : i - 1;
    }

    // Sums of time by group up to the start of each box, so that any stretch of time can be added up at once.
    // group: of box i, below `groups`.
    addUp(groups, group) {
      this.groups = groups;
      this.sums = new Float64Array((this.count + 1) * groups);
      this.groupOf = new Uint8Array(this.count);
      for (let i = 0; i < this.count; i++) {
        const which = (this.groupOf[i] = group(i));
        for (let g = 0; g < groups; g++) this.sums[(i + 1) * groups + g] = this.sums[i * groups + g];
        this.sums[(i + 1) * groups + which] += this.end[i] - this.start[i];
      }
    }

    // Add the seconds of each group before `seconds` to `into`, times `sign`. `i`: the first box that ends after it.
    sumBefore(seconds, i, into, sign) {
      for (let g = 0; g < this.groups; g++) into[g] += sign * this.sums[i * this.groups + g];
      if (i < this.count && this.start[i] < seconds) into[this.groupOf[i]] += sign * (seconds - this.start[i]);
    }
  }

  class Panel {
    constructor(exhibit, kind, data) {
      this.exhibit = exhibit;
      this.kind = kind; // "simulated", "what if" or "measured"
      this.data = data;
      this.makespan = data.makespan;
      this.rows = [];
      this.styles = [];
      this.styleNumbers = new Map();
      this.path = null;
    }

    styleNumber(key, make) {
      if (!this.styleNumbers.has(key)) {
        this.styleNumbers.set(key, this.styles.length);
        this.styles.push(make());
      }
      return this.styleNumbers.get(key);
    }

    get caption() {
      return this.kind === "measured" ? "measured, step " + this.data.step : this.data.caption || "simulated";
    }
  }

  // A timeline: a compute track a rank, idle time by cause, lanes of messages and collectives.
  class TimelinePanel extends Panel {
    constructor(page, exhibit, kind, data) {
      super(exhibit, kind, data);
      this.schedule = data.schedule;
      this.first = [0]; // number of the first action of each rank
      data.rows.forEach((row, rank) => this.addRow(page, row, rank));
      this.addMessages(page, data.messages);
      this.addMemory(page, data.memory);
      this.addPath(page, data.path);
      this.arrowsOf = null;
      this.numbers = null;
    }

    addRow(page, row, rank) {
      const program = typeof row.program === "object" ? row.program : page.programs[row.program];
      const count = program.stages.length;
      const track = new Track("compute", count);
      const several = this.schedule.batches > 1;
      let at = 0;
      for (let i = 0; i < count; i++) {
        track.start[i] = (at += row.times[2 * i]) * page.tick;
        track.end[i] = (at += row.times[2 * i + 1]) * page.tick;
        const op = program.ops[i];
        const chunk = Math.max(row.stages.indexOf(program.stages[i]), 0);
        const odd = several ? this.batch(op, program.indices[i]) % 2 : 0;
        track.style[i] = this.styleNumber(op + chunk + odd, () => {
          const [colour, ink] = this.data.shades[op][chunk][odd];
          return { colour, ink, hatched: op === "W" };
        });
      }
      track.addUp(OPS.length, (i) => Math.max(OPS.indexOf(program.ops[i]), 0));
      const idle = new Track("idle", row.idle.length / 3);
      for (let i = 0; i < idle.count; i++) {
        idle.start[i] = row.idle[3 * i] * page.tick;
        idle.end[i] = (row.idle[3 * i] + row.idle[3 * i + 1]) * page.tick;
        idle.style[i] = row.idle[3 * i + 2];
      }
      idle.addUp(page.palette.causes.length, (i) => idle.style[i]);
      this.first.push(this.first[rank] + count);
      this.rows.push({
        name: "rank " + rank, rank, stages: row.stages, program, compute: track, idle, lines: row.lanes, lanes: [],
        together: row.together, experts: row.experts, shares: this.data.idle_shares && !(this.data.missing || []).includes(rank) ? this.data.idle_shares[rank] : null, tracks: [track],
        memory: null, missing: this.data.missing ? this.data.missing.includes(rank) : false,
      });
    }

    // Messages by the rank that receives them, and collectives, as boxes of thin lanes.
    addMessages(page, columns) {
      this.messages = columns;
      const lanes = this.rows.map(() => []);
      columns.lane.forEach((lane, m) => {
        if (lane >= 0) lanes[columns.receiver[m]].push([lane, columns.start[m], columns.end[m], "m" + columns.kind[m], { message: m }]);
      });
      this.rows.forEach((row, rank) => {
        row.together.forEach(([text, op, start, end, lane]) => lanes[rank].push([lane, start, end, "c" + op, { collective: text, op }]));
        const depths = new Map();
        for (const bar of lanes[rank]) {
          if (!depths.has(bar[0])) depths.set(bar[0], []);
          depths.get(bar[0]).push(bar);
        }
        for (const [depth, bars] of [...depths].sort((a, b) => a[0] - b[0])) {
          bars.sort((a, b) => a[1] - b[1] || a[2] - b[2]);
          const track = new Track("lane", bars.length);
          track.depth = depth;
          track.items = bars.map((bar) => bar[4]);
          bars.forEach(([, start, end, key], i) => {
            track.start[i] = start * page.tick;
            track.end[i] = end * page.tick;
            track.style[i] = this.styleNumber(key, () => ({ colour: page.laneHue(key) }));
          });
          const groups = [...new Set(track.style)];
          track.hues = groups.map((number) => this.styles[number].colour);
          track.addUp(groups.length, (i) => groups.indexOf(track.style[i]));
          row.lanes.push(track);
          row.tracks.push(track);
        }
      });
      this.bytes = new Map(columns.bytes.map(([kind, src, dst, size]) => [kind + "/" + src + "/" + dst, size]));
    }

    // Step curves of bytes by part, with the lines that belong to them.
    addMemory(page, columns) {
      if (!columns) return;
      columns.rows.forEach((curve, rank) => {
        if (!curve) return;
        let at = 0;
        const times = Float64Array.from(curve.steps, (step) => (at += step) * page.tick);
        const parts = curve.parts.map(([part, units]) => {
          const values = new Float64Array(times.length);
          for (let i = 0; i < times.length; i++) values[i] = (typeof units === "number" ? units : units[i]) * columns.unit;
          return { part, values };
        });
        const line = (name) => (columns[name] ? columns[name][rank] : null);
        this.rows[rank].memory = {
          times, parts, peak: curve.peak, limit: line("limit"), predicted: line("predicted_peak"), measured: line("measured_peak"),
        };
      });
    }

    // The critical path: its steps, and by row those that ran there.
    addPath(page, columns) {
      if (!columns || !columns.kind.length) return;
      this.path = { ...columns, rows: this.rows.map(() => []) };
      columns.kind.forEach((_, step) => {
        if (columns.sender[step] < 0) this.path.rows[columns.rank[step]].push(step);
      });
    }

    batch(op, index) {
      const { groups, microbatches, slices } = this.schedule;
      return Math.floor(index / (op === "U" ? groups : microbatches * slices));
    }

    // Rank and position of an action's number.
    place(number) {
      const rank = firstAbove(this.first, number, 0, this.first.length) - 1;
      return { row: rank, i: number - this.first[rank] };
    }

    number(row, i) {
      return this.first[row] + i;
    }

    // Messages that an action uses and makes: numbers into the columns of `messages`.
    arrows(number) {
      if (this.arrowsOf === null) {
        this.arrowsOf = new Map();
        const note = (action, side, m) => {
          if (action < 0) return;
          if (!this.arrowsOf.has(action)) this.arrowsOf.set(action, { uses: [], makes: [] });
          this.arrowsOf.get(action)[side].push(m);
        };
        this.messages.kind.forEach((_, m) => {
          note(this.messages.user[m], "uses", m);
          note(this.messages.maker[m], "makes", m);
        });
      }
      return this.arrowsOf.get(number) || { uses: [], makes: [] };
    }

    name(row, i) {
      const program = this.rows[row].program;
      return program.stages[i] + program.ops[i] + program.indices[i];
    }

    // Position of an action of this name: {row, i}, or null. Rank and name, since replicas update the same stage.
    find(row, name) {
      if (this.numbers === null) {
        this.numbers = new Map();
        this.rows.forEach((_, r) => {
          for (let i = 0; i < this.rows[r].compute.count; i++) this.numbers.set(r + ":" + this.name(r, i), i);
        });
      }
      const i = this.numbers.get(row + ":" + name);
      return i === undefined ? null : { row, i };
    }
  }

  class Exhibit {
    constructor(page, data) {
      this.page = page;
      this.data = data;
      this.name = data.name;
      this.notes = data.notes;
      this.extras = data.extras || {};
      this.simulated = data.simulated && new TimelinePanel(page, this, "simulated", data.simulated);
      this.steps = data.measured.map((step) => step.step);
      this.made = new Map();
      this.supposed = null;
      this.chosen = this.steps.length - 1;
    }

    // The panel of a measured step, made when it is first looked at.
    get measured() {
      if (this.chosen < 0) return null;
      if (!this.made.has(this.chosen)) {
        this.made.set(this.chosen, new TimelinePanel(this.page, this, "measured", this.data.measured[this.chosen]));
      }
      return this.made.get(this.chosen);
    }

    // Label and seconds of the step that measured ones are compared with: predicted, else simulated.
    get expected() {
      const by = (name) => this.data.figures.find(([label]) => label === name);
      return by("predicted") || by("simulated");
    }

    get panels() {
      return [this.simulated, this.supposed, this.measured].filter(Boolean);
    }

    // The longest panel, measured steps that are not shown included, so that the slider changes no scale [s].
    get longest() {
      return Math.max(...this.panels.map((panel) => panel.makespan), ...this.data.measured.map((step) => step.makespan));
    }

    // A panel between the simulated and the measured one, of data in the form of `TimelineColumns` (where a row's program
    // may be the columns themselves); null takes it away. What extensions compute.
    suppose(caption, data) {
      this.supposed = data && new TimelinePanel(this.page, this, "what if", { ...data, caption });
    }
  }

  class Page {
    constructor(data) {
      this.tick = data.tick;
      this.palette = data.palette;
      this.programs = data.programs;
      this.exhibits = data.exhibits.map((each) => new Exhibit(this, each));
    }

    get panels() {
      return this.exhibits.flatMap((exhibit) => exhibit.panels);
    }

    get longest() {
      return Math.max(...this.exhibits.map((each) => each.longest)) || 1;
    }

    laneHue(key) {
      if (key[0] === "m") return this.palette.messages[+key.slice(1)][1];
      const found = this.palette.collectives[key.slice(1)];
      return found ? found[0] : this.palette.other;
    }
  }

  app.model = { OPS, Page, Exhibit, Track, TimelinePanel, firstAbove };
})(stagewright);
