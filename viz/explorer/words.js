// What is said of things: numbers with units, and the facts of an action, a message, a slice. No document here.
(function (app) {
  "use strict";

  const UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const OP_WORDS = { F: "Forward", B: "Backward", I: "Input gradient", W: "Weight gradient", U: "Update" };

  function unitOf(seconds) {
    const size = Math.abs(seconds);
    return UNITS.find(([, unit]) => size >= unit * 0.9999999) || (size > 0 ? UNITS[3] : UNITS[0]);
  }

  function digits(value, count) {
    if (value === 0) return "0";
    const text = Number(value.toPrecision(count));
    return Math.abs(text) >= 1e6 || Math.abs(text) < 1e-4 ? text.toExponential() : String(text);
  }

  // "12.3 ms"
  function time(seconds, count = 4) {
    const [name, unit] = unitOf(seconds);
    return digits(seconds / unit, count) + " " + name;
  }

  function bytes(count) {
    const names = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (count >= 1000 && at < names.length - 1) {
      count /= 1000;
      at++;
    }
    return digits(count, 3) + " " + names[at];
  }

  function percent(share, places = 1) {
    const text = (100 * share).toFixed(places);
    return (Number(text) === 0 ? text.replace("-", "") : text) + "%"; // rounding leaves a minus before 0
  }

  // Causes of the idle time right before box i: [[cause, seconds]].
  function idleBefore(page, row, i) {
    const from = i ? row.compute.end[i - 1] : -Infinity;
    const to = row.compute.start[i];
    const found = [];
    for (let g = row.idle.from(from === -Infinity ? -1 : from); g < row.idle.count && row.idle.start[g] < to; g++) {
      const seconds = Math.min(row.idle.end[g], to) - Math.max(row.idle.start[g], from);
      if (seconds > 0) found.push([page.palette.causes[row.idle.style[g]][1], seconds]);
    }
    return found;
  }

  // Facts of a message, from the side of the action that uses it (or makes it).
  function message(panel, m, tick) {
    const columns = panel.messages;
    const size = panel.bytes.get(columns.kind[m] + "/" + columns.src[m] + "/" + columns.dst[m]);
    const took = (columns.end[m] - columns.start[m]) * tick;
    const name = (number) => {
      const { row, i } = panel.place(number);
      return panel.name(row, i) + " on rank " + row;
    };
    const user = columns.user[m];
    let wait = null; // between its arrival and its use
    if (user >= 0) {
      const { row, i } = panel.place(user);
      wait = panel.rows[row].compute.start[i] - columns.end[m] * tick;
    }
    return {
      what: app.page.palette.messages[columns.kind[m]][2].replace(/ arriving$/, ""),
      maker: columns.maker[m] < 0 ? null : name(columns.maker[m]),
      user: user < 0 ? null : name(user),
      took, wait, size,
    };
  }

  function road({ took, wait, size }) {
    const parts = [];
    if (size) parts.push(bytes(size));
    if (took > 0) parts.push(time(took) + " under way");
    if (wait !== null && wait > 0) parts.push("there " + time(wait) + " ahead");
    return parts.length ? " (" + parts.join(", ") + ")" : "";
  }

  // {title, facts: [[label, text]]} of a box of a track.
  function describe(page, panel, row, track, i) {
    if (track.kind === "lane") return lane(page, panel, row, track, i);
    return track.kind === "idle" ? idle(page, panel, row, track, i) : action(page, panel, row, i);
  }

  const WAITED = {
    "warm up": "its first input", "late peer": "a peer that had not yet computed what it needs", imbalance: "a peer with more work",
    transfer: "a message under way", drain: "nothing more to do, while others still compute",
    update: "the optimizer's step, the norm and all-reduces before it", unexplained: "nothing that is known: the input was there",
  };

  function idle(page, panel, row, track, i) {
    const cause = page.palette.causes[track.style[i]][1];
    const facts = [["rank", String(row.rank)], ...span(track, i), ["waits for", WAITED[cause]]];
    const next = row.compute.from(track.end[i] - page.tick);
    if (cause !== "drain" && next < row.compute.count) {
      facts.push(["before", panel.name(row.rank, next)]);
      const uses = panel.arrows(panel.number(row.rank, next)).uses.sort((a, b) => panel.messages.end[b] - panel.messages.end[a]);
      const said = uses.length ? message(panel, uses[0], page.tick) : null;
      if (said) facts.push(["which needs", said.what + (said.maker ? " of " + said.maker : "") + road(said)]);
    }
    return { title: "Idle: " + cause, facts };
  }

  function span(track, i) {
    return [["time", time(track.end[i] - track.start[i])], ["from, to", time(track.start[i], 6) + ", " + time(track.end[i], 6)]];
  }

  function action(page, panel, row, i) {
    const { program, compute } = row;
    const op = program.ops[i], stage = program.stages[i], index = program.indices[i];
    const schedule = panel.schedule;
    const facts = [["action", panel.name(row.rank, i) + " on rank " + row.rank], ...span(compute, i)];
    const other = counterpart(panel, row.rank, i);
    if (other) {
      const ratio = (compute.end[i] - compute.start[i]) / other.seconds;
      facts.push([other.kind, time(other.seconds) + (Number.isFinite(ratio) ? " (this is " + digits(ratio, 3) + " times)" : "")]);
    }
    const replicas = app.rows.replicasOf(panel, row);
    if (replicas) facts.push(["replicas", replicas]);
    const chunk = row.stages.indexOf(stage);
    facts.push(["stage", stage + (row.stages.length > 1 && chunk >= 0 ? ", chunk " + chunk + " of the rank" : "")]);
    if (row.experts && row.experts[i]) facts.push(["experts", row.experts[i]]);
    if (schedule.batches > 1) facts.push(["batch", String(panel.batch(op, index))]);
    if (program.versions.length && program.versions[i] >= 0) {
      facts.push([op === "U" ? "makes weights" : "weights", "version " + program.versions[i]]);
    }
    const idle = idleBefore(page, row, i);
    if (idle.length) {
      facts.push(["idle before", idle.map(([cause, seconds]) => time(seconds) + " " + cause).join(", ")]);
    }
    const { uses, makes } = panel.arrows(panel.number(row.rank, i));
    for (const m of uses) {
      const said = message(panel, m, page.tick);
      facts.push(["needs", said.what + (said.maker ? " of " + said.maker : "") + road(said)]);
    }
    for (const m of makes) {
      const said = message(panel, m, page.tick);
      facts.push(["makes", said.what + (said.user ? " for " + said.user : "") + road(said)]);
    }
    const title = OP_WORDS[op] || op;
    const n = schedule.slices;
    const part = n > 1 ? " of slice " + (index % n) + " of microbatch " + Math.floor(index / n) : " of microbatch " + index;
    return { title: title + (op === "U" ? (schedule.batches > 1 ? " " + index : "") : part), facts };
  }

  // The same action in the other panel of its exhibit.
  function counterpart(panel, rank, i) {
    const exhibit = panel.exhibit;
    const other = panel === exhibit.simulated ? exhibit.measured : exhibit.simulated;
    if (!other || rank >= other.rows.length) return null;
    const found = other.find(rank, panel.name(rank, i));
    if (!found) return null;
    const { compute } = other.rows[rank];
    return { kind: other.kind, seconds: compute.end[found.i] - compute.start[found.i] };
  }

  function lane(page, panel, row, track, i) {
    const item = track.items[i];
    if (item.collective !== undefined) {
      const words = page.palette.collectives[item.op];
      return { title: words ? words[1] : item.op, facts: [["collective", item.collective], ["rank", String(row.rank)], ...span(track, i)] };
    }
    const said = message(panel, item.message, page.tick);
    const facts = [...span(track, i)];
    if (said.maker) facts.push(["made by", said.maker]);
    if (said.user) facts.push(["used by", said.user]);
    if (said.size) facts.push(["size", bytes(said.size)]);
    if (said.wait !== null) facts.push(["waits", said.wait > 0 ? time(said.wait) + " until it is used" : "used as it arrives"]);
    return { title: said.what[0].toUpperCase() + said.what.slice(1) + " to rank " + row.rank, facts };
  }

  app.words = { time, bytes, percent, digits, unitOf, OP_WORDS, describe, idleBefore };
})(stagewright);
