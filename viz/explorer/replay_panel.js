// A replay as a panel: the columns of `TimelineColumns` (data.py), of times that this page computed. Idle time has the
// causes that `schedules/timing/waits.py` gives it, lanes are those of `viz/rows.py`.
(function (app) {
  "use strict";

  const COMPUTE_OPS = "FBIW";

  // Programs of all ranks as columns: those of the wiring, and the updates of the epilogue.
  function programsOf(wiring, run) {
    return wiring.programs.map(({ codes, indices }, rank) => {
      const updates = run.updates[rank];
      const ops = Array.from(codes, (code) => wiring.op(code)).join("") + "U".repeat(updates.length);
      const stages = [...Array.from(codes, (code) => wiring.stage(code)), ...updates.map((update) => update.stage)];
      const versions = wiring.versions.length ? wiring.versions[rank] : [];
      return { ops, stages, indices: [...indices, ...updates.map(() => 0)], versions };
    });
  }

  // Start and end of all actions of a rank, those of the epilogue last.
  function timesOf(run, rank) {
    const updates = run.updates[rank];
    return {
      starts: [...run.starts[rank], ...updates.map((update) => update.start)],
      ends: [...run.ends[rank], ...updates.map((update) => update.end)],
    };
  }

  // When the latest input of an action was made, and when it arrived; an input without a message arrives when it is made.
  function inputs(wiring, run, rank, at, previous) {
    const { codes, indices } = wiring.programs[rank];
    let made = previous;
    let arrived = previous;
    for (const base of wiring.inputs[codes[at]]) {
      const slot = base + indices[at];
      if (run.maker[slot] < 0 && !wiring.returns.includes(base)) continue;
      made = Math.max(made, run.ready[slot]);
      arrived = Math.max(arrived, run.arrived[slot]);
    }
    return { made, arrived };
  }

  // The gap before each action of a rank, in pieces: [from, seconds, cause].
  function gapsOf(wiring, run, rank, { starts, ends }, program, lastCompute) {
    const pieces = [];
    let previous = run.start;
    starts.forEach((start, i) => {
      if (start > previous) {
        if (i === 0) pieces.push([previous, start - previous, "warm up"]);
        else if (program.ops[i] === "U") {
          const drain = wiring.epilogue ? Math.max(0, Math.min(lastCompute, start) - previous) : 0;
          pieces.push([previous, drain, "drain"], [previous + drain, start - previous - drain, "update"]);
        } else {
          const found = inputs(wiring, run, rank, i, previous);
          const made = Math.min(found.made, start);
          const arrived = Math.min(Math.max(found.arrived, made), start);
          pieces.push([previous, made - previous, "late peer"], [made, arrived - made, "transfer"], [arrived, start - arrived, "unexplained"]);
        }
      }
      previous = ends[i];
    });
    return pieces;
  }

  // Lowest lanes in which spans, ascending in start and end, do not overlap.
  function lanesOf(spans) {
    const ends = [];
    return spans.map(([start, end]) => {
      let lane = ends.findIndex((each) => each <= start);
      if (lane < 0) lane = ends.length;
      ends[lane] = end;
      return lane;
    });
  }

  // Messages that each rank received, and what it did together with others, with their lanes.
  function spansOf(wiring, run) {
    const messages = wiring.programs.map(() => []);
    const together = wiring.programs.map(() => []);
    for (const { kind, src, dst, base, routes } of wiring.wires) {
      for (let index = 0; index < wiring.total; index++) {
        const slot = base + index;
        if (routes[index] < 0 || run.maker[slot] < 0) continue;
        const { sender, receiver } = wiring.routes[routes[index]];
        const [start, end, text] = [run.ready[slot], run.arrived[slot], [kind, src, dst, index].join(" ")];
        messages[receiver].push({ kind, src, dst, index, slot, sender, receiver, start, end, text, lane: -1 });
      }
    }
    for (const joint of run.jointSteps) {
      for (const [group, end] of joint.through) {
        for (const [rank, start] of joint.begun.get(group)) {
          const { op } = joint;
          together[rank].push({ text: joint.stages.join("+") + op + group, op, start, end, lane: 0 });
        }
      }
    }
    const counts = wiring.programs.map((_, rank) => {
      const spans = [...(run.hasMessages ? messages[rank] : []), ...together[rank]];
      spans.sort((a, b) => a.start - b.start || a.end - b.end || (a.text < b.text ? -1 : 1));
      const lanes = lanesOf(spans.map((span) => [span.start, span.end]));
      spans.forEach((span, i) => (span.lane = lanes[i]));
      return lanes.reduce((most, lane) => Math.max(most, lane + 1), 0);
    });
    return { messages, together, counts };
  }

  // Data of a panel.
  // like: data of the simulated panel, for what times do not change.
  function panelOf(page, wiring, run, like) {
    const causes = page.palette.causes.map(([, words]) => words);
    const kinds = page.palette.messages.map(([kind]) => kind);
    const [begin, end] = [run.start, run.end];
    const ticks = (seconds) => Math.round((seconds - begin) / page.tick);
    const programs = programsOf(wiring, run);
    const times = programs.map((_, rank) => timesOf(run, rank));
    const spans = spansOf(wiring, run);
    const first = [0]; // number of the first action of each rank
    for (const each of times) first.push(first[first.length - 1] + each.starts.length);
    const numberOf = (rank, number) => (number < 0 ? -1 : first[rank] + number - wiring.first[rank]);

    const updated = [page.palette.ops.U[0], "white"]; // where the simulation has no updates
    let lastCompute = 0;
    const busy = programs.map(({ ops }, rank) => {
      let sum = 0;
      times[rank].starts.forEach((start, i) => {
        if (!COMPUTE_OPS.includes(ops[i])) return;
        sum += times[rank].ends[i] - start;
        lastCompute = Math.max(lastCompute, times[rank].ends[i]);
      });
      return sum;
    });
    const largest = Math.max(0, ...busy);
    const shares = [];
    const rows = programs.map((program, rank) => {
      const own = times[rank];
      const pieces = gapsOf(wiring, run, rank, own, program, lastCompute);
      const last = own.ends.length ? own.ends[own.ends.length - 1] : begin;
      pieces.push([last, end - last, "drain"]);
      const sums = Object.fromEntries(causes.map((cause) => [cause, 0]));
      for (const [, seconds, cause] of pieces) sums[cause] += seconds;
      own.starts.forEach((start, i) => {
        if (program.ops[i] === "U") sums.update += own.ends[i] - start;
      });
      sums.imbalance = Math.min(sums["late peer"], Math.max(largest - busy[rank], 0));
      sums["late peer"] -= sums.imbalance;
      shares.push(causes.map((cause) => (run.makespan > 0 ? sums[cause] / run.makespan : 0)));
      let at = 0;
      return {
        stages: wiring.placement[rank],
        program,
        times: own.starts.flatMap((start, i) => {
          const [from, to] = [ticks(start), ticks(own.ends[i])];
          const moved = [from - at, to - from];
          at = to;
          return moved;
        }),
        idle: pieces.flatMap(([from, seconds, cause]) => {
          const [start, stop] = [ticks(from), ticks(from + seconds)];
          return stop > start ? [start, stop - start, causes.indexOf(cause)] : [];
        }),
        together: spans.together[rank].sort((a, b) => a.start - b.start).map((each) => [each.text, each.op, ticks(each.start), ticks(each.end), each.lane]),
        lanes: spans.counts[rank],
      };
    });
    const messages = spans.messages.flat();
    const column = (value) => messages.map(value);
    return {
      measured: false,
      schedule: { ...like.schedule, microbatches: wiring.microbatches, batches: wiring.batches, groups: wiring.groups },
      makespan: run.makespan,
      batch_seconds: run.batchSeconds,
      bubble: run.bubble,
      window: false,
      shades: { ...(run.updates.some((own) => own.length) ? { U: Array(like.schedule.chunks).fill([updated, updated]) } : {}), ...like.shades },
      rows,
      idle_shares: shares,
      missing: [],
      clock_error: 0,
      messages: {
        kind: column((each) => kinds.indexOf(each.kind)),
        src: column((each) => each.src),
        dst: column((each) => each.dst),
        index: column((each) => each.index),
        maker: column((each) => numberOf(each.sender, run.maker[each.slot])),
        user: column((each) => numberOf(each.receiver, run.user[each.slot])),
        receiver: column((each) => each.receiver),
        start: column((each) => ticks(each.start)),
        end: column((each) => ticks(each.end)),
        lane: column((each) => each.lane),
        bytes: like.messages.bytes,
      },
    };
  }

  Object.assign(app.replay, { panelOf });
})(stagewright);
