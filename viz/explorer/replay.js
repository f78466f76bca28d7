// The simulator's rules (schedules/timing/simulate.py), played on a wiring that Python wrote (whatif_data.py), with costs
// that are changed: the same sums in the same order, so that the times are equal to the last bit.
//
//   events are the ends of actions, of equal times the lowest rank's first
//   an action starts when its rank is free and its slots are filled; when it ends, its messages leave, and fill slots
//   alongside a sum that keeps its rank busy it ends later: where such a sum began meanwhile, the event is postponed
//
// Nothing here draws or touches the document.
(function (app) {
  "use strict";

  const OPS = "FBIWU"; // code of an action = number of its op * stages + stage
  const STAYS = -1;

  // What is changed: factors of what is there, and seconds that come on top of it.
  const UNCHANGED = Object.freeze({ F: 1, B: 1, I: 1, W: 1, U: 1, latency: 1, bandwidth: 1, more_latency: 0, more_update: 0 });

  // A wiring with typed arrays and look-ups by position.
  class Wiring {
    constructor(data) {
      Object.assign(this, data);
      this.total = data.microbatches * data.slices * data.batches;
      this.programs = data.programs.map((each) => ({ codes: Int32Array.from(each.codes), indices: Int32Array.from(each.indices) }));
      this.first = [0]; // number of the first action of each rank
      for (const each of this.programs) this.first.push(this.first[this.first.length - 1] + each.codes.length);
      this.wires = data.wires.map((wire) => ({
        ...wire,
        routes: spread(wire.routes, this.total),
        last: wire.last === null ? null : spread(wire.last, this.total),
      }));
      this.begins = data.begins.map((several) => {
        const at = new Map();
        for (const [position, joint, group] of several) {
          if (!at.has(position)) at.set(position, []);
          at.get(position).push([joint, group]);
        }
        return at;
      });
      this.joint_steps = data.joint_steps.map((each) => ({ ...each, fills: new Map(each.fills) }));
      this.gather_after_update = new Map(data.gather_after_update);
    }

    op(code) {
      return OPS[Math.floor(code / this.stages)];
    }

    stage(code) {
      return code % this.stages;
    }
  }

  function spread(value, count) {
    return Array.isArray(value) ? Int32Array.from(value) : new Int32Array(count).fill(value);
  }

  // Ranks by the time at which their actions end (a binary heap).
  class Events {
    constructor(ranks) {
      this.heap = new Int32Array(ranks);
      this.time = new Float64Array(ranks);
      this.size = 0;
    }

    before(a, b) {
      return this.time[a] < this.time[b] || (this.time[a] === this.time[b] && a < b);
    }

    push(rank, time) {
      const { heap } = this;
      this.time[rank] = time;
      let at = this.size++;
      while (at > 0) {
        const parent = (at - 1) >> 1;
        if (!this.before(rank, heap[parent])) break;
        heap[at] = heap[parent];
        at = parent;
      }
      heap[at] = rank;
    }

    pop() {
      const { heap } = this;
      const first = heap[0];
      const rank = heap[--this.size];
      let at = 0;
      for (;;) {
        let child = 2 * at + 1;
        if (child >= this.size) break;
        if (child + 1 < this.size && this.before(heap[child + 1], heap[child])) child++;
        if (!this.before(heap[child], rank)) break;
        heap[at] = heap[child];
        at = child;
      }
      heap[at] = rank;
      return first;
    }
  }

  // What is taken of one rank's processor (schedules/timing/links.py).
  class Processor {
    constructor() {
      this.taken = []; // {start, end, share}
    }

    end(start, seconds) {
      let now = start;
      let left = seconds;
      this.taken = this.taken.filter((each) => each.end > start);
      for (;;) {
        let share = 0;
        let until = Infinity;
        for (const each of this.taken) {
          if (each.start > now) until = Math.min(until, each.start);
          else if (each.end > now) {
            share = Math.max(share, each.share);
            until = Math.min(until, each.end);
          }
        }
        const end = left <= 0 ? now : share === 1 ? Infinity : now + left / (1 - share);
        if (end <= until) return end;
        left -= (until - now) * (1 - share);
        now = until;
      }
    }
  }

  // One run of a wiring. Results, all in seconds:
  //   starts, ends   by rank and position in its program
  //   updates        by rank, of the epilogue: {stage, start, end}
  //   ready, arrived by slot: when the message left and arrived, or what ranks did together was through; NaN: never
  //   maker, user    by slot, number of the action that made it and of the first that looked at it; -1: none
  //   jointSteps     {begun: [[rank, start], ...] by group, through: by group}
  class Replay {
    constructor(wiring, changed) {
      this.wiring = wiring;
      const by = { ...UNCHANGED, ...changed };
      const { stages, costs } = wiring;
      this.rows = []; // by code, seconds by index: one number where they are all the same
      for (const name of OPS) {
        const more = name === "U" ? by.more_update : 0;
        for (let s = 0; s < stages; s++) this.rows.push(Float64Array.from([costs[name][s]].flat(), (seconds) => seconds * by[name] + more));
      }
      this.norm = wiring.norm === null ? null : wiring.norm * by.U;
      const latency = costs.latency.map((seconds) => seconds * by.latency + by.more_latency);
      this.hasMessages = wiring.links || latency.some((seconds) => seconds > 0);
      this.routes = wiring.routes.map((each) => ({
        seconds: each.bytes * (each.seconds_per_byte / by.bandwidth),
        latency: latency[each.stage] + each.latency * by.latency,
        channels: each.channels,
      }));
      this.freeAt = new Float64Array(wiring.channels);
      this.jointSteps = wiring.joint_steps.map((each) => ({ ...each, route: this.routeOf(each, by), begun: new Map(), through: new Map() }));
      this.processors = wiring.joint_steps.some((each) => each.share > 0) ? wiring.programs.map(() => new Processor()) : null;
      this.ready = new Float64Array(wiring.slots).fill(NaN);
      this.arrived = new Float64Array(wiring.slots).fill(NaN);
      this.maker = new Int32Array(wiring.slots).fill(-1);
      this.user = new Int32Array(wiring.slots).fill(-1);
      for (const slot of wiring.filled) this.ready[slot] = this.arrived[slot] = 0;
      this.starts = wiring.programs.map((each) => new Float64Array(each.codes.length));
      this.ends = wiring.programs.map((each) => new Float64Array(each.codes.length));
      this.updates = wiring.programs.map(() => []);
      this.play();
      if (wiring.epilogue) this.addEpilogue();
    }

    seconds(code, index) {
      const row = this.rows[code];
      return row[index % row.length];
    }

    // The route of a joint step; one with a rank's host is independent of changes of links.
    routeOf({ op, seconds, channels }, by) {
      return { seconds: op === "OFFLOAD" || op === "RELOAD" ? seconds : seconds / by.bandwidth, latency: 0, channels };
    }

    // The time at which all channels of a route are free, at or after `now`.
    freeFrom(route, now) {
      for (const channel of route.channels) if (this.freeAt[channel] > now) now = this.freeAt[channel];
      return now;
    }

    // Occupy the channels of a route from the time at which all are free, at or after `now`; the arrival.
    carry(route, now) {
      now = this.freeFrom(route, now) + route.seconds;
      for (const channel of route.channels) this.freeAt[channel] = now;
      return now + route.latency;
    }

    // A rank begins a joint step; the slots that it fills, if it was the last to begin.
    begin(number, group, rank, now) {
      const joint = this.jointSteps[number];
      if (!joint.begun.has(group)) joint.begun.set(group, new Map());
      const begun = joint.begun.get(group);
      begun.set(rank, now);
      if (begun.size < joint.ranks) return [];
      const from = joint.after === null ? now : Math.max(now, this.arrived[joint.after + group]);
      const start = this.freeFrom(joint.route, from);
      const through = this.carry(joint.route, from);
      joint.through.set(group, through);
      if (joint.share > 0) for (const each of begun.keys()) this.processors[each].taken.push({ start, end: through, share: joint.share });
      const slots = joint.fills.get(group) || [];
      for (const slot of slots) {
        this.ready[slot] = now;
        this.arrived[slot] = through;
      }
      return slots;
    }

    play() {
      const { wiring, arrived, user } = this;
      const { programs, inputs } = wiring;
      this.gathersFirst = false;
      const position = new Int32Array(wiring.ranks);
      const freeAt = new Float64Array(wiring.ranks);
      // Ranks that wait for a slot, as a linked list: the newest by slot, and the next one by rank (a rank waits for one).
      const standing = new Int32Array(wiring.slots).fill(-1);
      const next = new Int32Array(wiring.ranks).fill(-1);
      const events = new Events(wiring.ranks);

      const start = (rank) => {
        const at = position[rank];
        const { codes, indices } = programs[rank];
        if (at === codes.length) return;
        let begin = freeAt[rank];
        for (const base of inputs[codes[at]]) {
          const slot = base + indices[at];
          const arrival = arrived[slot];
          if (Number.isNaN(arrival)) {
            next[rank] = standing[slot];
            standing[slot] = rank;
            return;
          }
          if (user[slot] < 0) user[slot] = wiring.first[rank] + at;
          if (arrival > begin) begin = arrival;
        }
        this.starts[rank][at] = begin;
        events.push(rank, begin + this.seconds(codes[at], indices[at]));
      };
      const release = (slot) => {
        let rank = standing[slot];
        standing[slot] = -1;
        while (rank >= 0) {
          const following = next[rank];
          ready.push(rank);
          rank = following;
        }
      };

      const ready = [];
      wiring.begins.forEach((begins, rank) => {
        for (const [joint, group] of begins.get(0) || []) {
          this.begin(joint, group, rank, 0);
          this.gathersFirst = true;
        }
      });
      for (let rank = 0; rank < wiring.ranks; rank++) start(rank);
      while (events.size) {
        const rank = events.pop();
        const now = events.time[rank];
        const at = position[rank];
        const { codes, indices } = programs[rank];
        if (this.isPutOff(events, rank, this.starts[rank][at], this.seconds(codes[at], indices[at]))) continue;
        position[rank]++;
        freeAt[rank] = this.ends[rank][at] = now;
        ready.push(rank);
        for (const slot of this.finish(rank, at, now)) release(slot);
        const begins = wiring.begins[rank].get(at + 1);
        if (begins !== undefined) {
          for (const [joint, group] of begins) for (const slot of this.begin(joint, group, rank, now)) release(slot);
        }
        while (ready.length) start(ready.pop());
      }
    }

    // An action ends, and its messages leave; the slots that they fill.
    finish(rank, at, now) {
      const { wiring } = this;
      const code = wiring.programs[rank].codes[at];
      const k = wiring.programs[rank].indices[at];
      const filled = [];
      for (const number of wiring.outputs[code]) {
        const { base, routes, last } = wiring.wires[number];
        if (last !== null && last[k] !== code) continue; // others will add to it
        const slot = base + k;
        this.ready[slot] = now;
        this.maker[slot] = wiring.first[rank] + at;
        this.arrived[slot] = routes[k] === STAYS ? now : this.carry(this.routes[routes[k]], now);
        filled.push(slot);
      }
      return filled;
    }

    // The optimizer steps of a flush schedule, stage by stage, each after the sums of its gradients.
    addEpilogue() {
      const { wiring } = this;
      let ends = this.ends.map((own) => (own.length ? own[own.length - 1] : 0));
      const seconds = (stage) => this.seconds(OPS.indexOf("U") * wiring.stages + stage, 0);
      const summed = new Map();
      for (const joint of this.jointSteps) {
        if (joint.op !== "REDUCE_GRAD") continue;
        for (const stage of joint.stages) summed.set(stage, Math.max(joint.through.get(0), summed.get(stage) || 0));
      }
      if (this.norm !== null) {
        let last = 0;
        for (const each of ends) last = Math.max(last, each);
        for (const each of summed.values()) last = Math.max(last, each);
        ends = ends.map(() => last + this.norm);
      }
      const steps = wiring.placement.map((stages) => stages.filter((stage) => seconds(stage) > 0 || this.norm > 0 || summed.has(stage)));
      const starts = new Float64Array(wiring.ranks);
      const events = new Events(wiring.ranks);
      const start = (rank, end) => {
        const stage = steps[rank][this.updates[rank].length];
        if (stage === undefined) return;
        starts[rank] = Math.max(end, summed.get(stage) || 0);
        events.push(rank, starts[rank] + seconds(stage));
      };
      ends.forEach((end, rank) => start(rank, end));
      while (events.size) {
        const rank = events.pop();
        const now = events.time[rank];
        const stage = steps[rank][this.updates[rank].length];
        if (this.isPutOff(events, rank, starts[rank], seconds(stage))) continue;
        this.updates[rank].push({ stage, start: starts[rank], end: now });
        if (wiring.gather_after_update.has(stage)) this.begin(wiring.gather_after_update.get(stage), 0, rank, now);
        start(rank, now);
      }
    }

    // Whether the end of what runs on a rank lies later than was thought when it started: then that is the event.
    isPutOff(events, rank, start, seconds) {
      if (this.processors === null) return false;
      const end = this.processors[rank].end(start, seconds);
      if (end <= events.time[rank]) return false;
      events.push(rank, end);
      return true;
    }

    // --- figures, as Timeline has them ---

    get start() {
      if (this.gathersFirst) return 0; // weights that the first forwards wait for
      let first = Infinity;
      for (let rank = 0; rank < this.wiring.ranks; rank++) {
        if (this.starts[rank].length) first = Math.min(first, this.starts[rank][0]);
        else if (this.updates[rank].length) first = Math.min(first, this.updates[rank][0].start);
      }
      return first === Infinity ? 0 : first;
    }

    get end() {
      let last = 0;
      for (let rank = 0; rank < this.wiring.ranks; rank++) {
        const own = this.ends[rank];
        const updates = this.updates[rank];
        if (updates.length) last = Math.max(last, updates[updates.length - 1].end);
        else if (own.length) last = Math.max(last, own[own.length - 1]);
      }
      for (const joint of this.jointSteps) for (const through of joint.through.values()) last = Math.max(last, through);
      return last;
    }

    get makespan() {
      return this.end - this.start;
    }

    // Seconds of F, B, I and W of a rank, of the actions from one position to before another.
    busy(rank, from = 0, to = this.starts[rank].length) {
      const updates = OPS.indexOf("U") * this.wiring.stages;
      let busy = 0;
      for (let at = from; at < to; at++) {
        if (this.wiring.programs[rank].codes[at] < updates) busy += this.ends[rank][at] - this.starts[rank][at];
      }
      return busy;
    }

    // Of one batch of an asynchronous schedule, over the later half of its batches: {busy, period}, or null.
    get steadyState() {
      const { wiring } = this;
      if (!wiring.asynchronous) return null;
      const began = wiring.programs.map(({ codes, indices }) => {
        const first = new Map(); // batch -> position of its first forward
        for (let at = 0; at < codes.length; at++) {
          const batch = Math.floor(indices[at] / (wiring.microbatches * wiring.slices));
          if (codes[at] < wiring.stages && !first.has(batch)) first.set(batch, at);
        }
        return first;
      });
      const working = began.map((_, rank) => rank).filter((rank) => began[rank].size);
      if (!working.length) return null;
      let shared = [...began[working[0]].keys()].filter((batch) => working.every((rank) => began[rank].has(batch)));
      shared.sort((a, b) => a - b);
      shared = shared.slice(Math.floor(shared.length / 2));
      if (shared.length < 2) return null;
      const [low, high] = [shared[0], shared[shared.length - 1]];
      let busy = 0;
      let period = 0;
      for (const rank of working) {
        const [from, to] = [began[rank].get(low), began[rank].get(high)];
        busy += this.busy(rank, from, to);
        period = Math.max(period, this.starts[rank][to] - this.starts[rank][from]);
      }
      return { busy: busy / (high - low), period: period / (high - low) };
    }

    // Seconds from one batch to the next.
    get batchSeconds() {
      const steady = this.steadyState;
      return (steady === null ? this.makespan : steady.period) + this.wiring.around;
    }

    get bubble() {
      const steady = this.steadyState;
      let busy = 0;
      for (let rank = 0; rank < this.wiring.ranks; rank++) busy += this.busy(rank);
      const seconds = steady === null ? this.makespan : steady.period;
      if (steady !== null) busy = steady.busy;
      return seconds > 0 ? 1 - busy / (this.wiring.ranks * seconds) : 0;
    }
  }

  app.replay = { OPS, UNCHANGED, Wiring, Replay };
})(stagewright);
