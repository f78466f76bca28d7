// Orders of schedules with a flush, built in the page as `stagewright.schedules.build` builds them: tests compare them action
// by action. Symbols as everywhere: P ranks, V chunks a rank, S = P V stages, M microbatches.
//
//   programs   by rank, actions [stage, op, k]
//
// Nothing here draws or touches the document.
(function (app) {
  "use strict";

  const { pairUp, refills, best, waves, whole, bestOfLimited } = app.lists;
  const range = (count, from = 0) => Array.from({ length: Math.max(count, 0) }, (_, i) => from + i);

  // --- placements: stages by rank ---

  const cyclic = (P, V) => range(P).map((rank) => range(V).map((chunk) => chunk * P + rank));
  const snake = (P, V) => range(P).map((rank) => range(V).map((chunk) => chunk * P + (chunk % 2 ? P - 1 - rank : rank)));

  // --- the 1F1B rule (families/warmup.py) ---

  const oneByOne = (stage, M, warmup, op = "B") => pairUp(range(M).map((k) => [stage, "F", k]), range(M).map((k) => [stage, op, k]), warmup);

  // Sizes of the groups of microbatches that pass a chunk before the next chunk's turn.
  function groupsOf(least, M) {
    const count = Math.max(1, Math.floor(M / least));
    return range(count).map((i) => Math.floor(M / count) + (i < M % count ? 1 : 0));
  }

  // Group by group, in it chunk by chunk, in it by microbatch; backwards from the last chunk.
  // ahead: forwards that each rank is further ahead of its backwards than the next one.
  function inTurns({ P, M, V }, ahead) {
    const sizes = groupsOf(P, M);
    const turns = (chunks) => {
      let first = 0;
      return sizes.flatMap((size) => {
        first += size;
        return chunks.flatMap((chunk) => range(size, first - size).map((k) => [chunk, k]));
      });
    };
    return range(P).map((rank) => {
      const [forwards, backwards] = [["F", range(V)], ["B", range(V).reverse()]].map(([op, chunks]) => turns(chunks).map(([chunk, k]) => [chunk * P + rank, op, k]));
      return pairUp(forwards, backwards, (V - 1) * sizes[0] + ahead * (P - 1 - rank));
    });
  }

  // Each backward split: the gradient of the inputs at once, that of the weights `delay` backwards later.
  function putOff(program, delay) {
    const waiting = [];
    const split = program.flatMap(([stage, op, k]) => {
      if (op !== "B") return [[stage, op, k]];
      waiting.push([stage, "W", k]);
      return [[stage, "I", k], ...(waiting.length > delay ? [waiting.shift()] : [])];
    });
    return [...split, ...waiting];
  }

  // --- families ---

  function handcrafted({ P, M }, steps) {
    const most = Math.min(steps * (P - 1), M);
    return range(P).map((rank) => {
      const warmup = Math.min(steps * (P - 1 - rank), M);
      return putOff(oneByOne(rank, M, warmup), most - warmup);
    });
  }

  function loopedBfs({ P, M, V }) {
    const all = (stages, op) => stages.flatMap((stage) => range(M).map((k) => [stage, op, k]));
    return cyclic(P, V).map((stages) => [...all(stages, "F"), ...all([...stages].reverse(), "B")]);
  }

  const PERIOD = 6; // slots of a block of two chunks

  // A block of slots once a microbatch, squeezed (families/v_blocks.py).
  // block: of P and a rank, the slots of F0, F1, I1, I0.
  function repeated(block, most) {
    return ({ P, M, costs: given }) => {
      const costs = whole(given);
      const fits = range(P).every((rank) => new Set(block(P, rank).map((slot) => slot % PERIOD)).size === 4);
      const order = range(P).map((rank) => {
        const [down, up] = [rank, 2 * P - 1 - rank];
        const steps = [[down, "F"], [up, "F"], [up, "I"], [down, "I"]];
        return block(fits ? P : P + 1, rank).flatMap((slot, i) => range(M).map((k) => [slot + PERIOD * k, [...steps[i], k]]))
          .sort(([a, [s]], [b, [t]]) => a - b || s - t).map(([, action]) => action);
      });
      const work = 2 * M * (costs.F + costs.I + costs.W);
      return best(refills(order, snake(P, 2), costs, most(P)), snake(P, 2), costs, work);
    };
  }

  const hanayo = ({ P, M, V }) => waves(snake(P, V), M, 2 * P);

  // name -> how it is built; chunks: V where it is fixed; split: I and W for B; limited: keeps a memory limit, of so many P by
  // default; timed: its order depends on the costs.
  const FAMILIES = {
    gpipe: { chunks: 1, make: ({ P, M }) => range(P).map((rank) => oneByOne(rank, M, M)) },
    "1f1b": { chunks: 1, make: ({ P, M }) => range(P).map((rank) => oneByOne(rank, M, P - 1 - rank)) },
    "eager-1f1b": { chunks: 1, make: ({ P, M }) => range(P).map((rank) => oneByOne(rank, M, 2 * (P - 1 - rank))) },
    interleaved: { make: (sizes) => inTurns(sizes, 2) },
    "looped-bfs": { make: loopedBfs },
    "zb-h1": { chunks: 1, split: true, make: (sizes) => handcrafted(sizes, 1) },
    "zb-h2": { chunks: 1, split: true, make: (sizes) => handcrafted(sizes, 2) },
    "zb-1p": { chunks: 1, split: true, timed: true, limited: 1, make: bestOfLimited },
    "zb-2p": { chunks: 1, split: true, timed: true, limited: 2, make: bestOfLimited },
    "interleaved-zb": { split: true, make: (sizes) => inTurns(sizes, 1).map((program, rank) => putOff(program, rank)) },
    gis: { split: true, make: (sizes) => inTurns(sizes, 1).map((program) => putOff(program, 0)) },
    hanayo: { placed: snake, make: hanayo },
    "v-half": {
      chunks: 2, split: true, timed: true, placed: snake,
      make: repeated((P, rank) => [2 * rank, 3 * P - 2 - rank, 3 * P - 1 + 2 * rank, 6 * P - 2 - rank], (P) => 2 * Math.floor((P + 2) / 2)),
    },
    "v-min": {
      chunks: 2, split: true, timed: true, placed: snake,
      make: repeated((P, rank) => [rank, 2 * P - 1 - rank, 2 * P + rank, 4 * P - 1 - rank], (P) => 2 * Math.floor((P + 4) / 3)),
    },
  };
  const LOOPING = "interleaved, looped-bfs, interleaved-zb, gis, seq1f1b, slimpipe, hanayo"; // those of Python that take any V

  function check(name, { P, M, V, costs, limit }) {
    for (const [option, value] of [["num_ranks", P], ["num_microbatches", M], ["num_chunks", V]]) {
      if (!Number.isInteger(value) || value < 1) throw new Error(`${option}=${value === null ? "None" : value} for schedule '${name}': expected a whole number, at least 1`);
    }
    const { chunks, timed, limited } = FAMILIES[name];
    if (chunks && V !== chunks) {
      const has = chunks === 1 ? "one stage" : chunks + " stages";
      throw new Error(`num_chunks=${V} for schedule '${name}': it has ${has} per rank; expected ${chunks}, or a schedule that interleaves (${LOOPING})`);
    }
    for (const [op, word] of timed ? [["F", "forward"], ["I", "input_grad"], ["W", "weight_grad"]] : []) {
      if (!(costs[op] > 0)) throw new Error(`costs with ${word}=${costs[op]}: expected more than 0 seconds for each stage`);
    }
    if (limited && limit !== null && !(limit >= 1)) {
      throw new Error(`memory_limit=${limit}: no order can meet it, since one microbatch alone is 1 stage activation on a rank; expected at least 1`);
    }
  }

  // {name, placement, programs} of a family; an Error with Python's words where it has none of these sizes.
  // given: {P, M, V, costs: seconds of a stage's F, B, I, W and a message's latency, limit: stage activations or null}
  function build(name, given) {
    check(name, given);
    const { placed = cyclic, make, limited } = FAMILIES[name];
    const sizes = { ...given, limit: given.limit === null ? limited * given.P : given.limit };
    return { name, placement: placed(given.P, given.V), programs: make(sizes), microbatches: given.M };
  }

  // Most stage activations of each rank at once: from F until B, or W.
  function peaks({ programs }) {
    return programs.map((program) => {
      let held = 0, most = 0;
      for (const [, op] of program) {
        held += op === "F" ? 1 : op === "I" ? 0 : -1;
        most = Math.max(most, held);
      }
      return most;
    });
  }

  // What replay.js plays: messages of the latency between ranks, no links, no updates.
  function wiringOf({ placement, programs, microbatches }, costs) {
    const stages = placement.flat().length;
    const code = (op, stage) => app.replay.OPS.indexOf(op) * stages + stage;
    const rankOf = [];
    placement.forEach((own, rank) => own.forEach((stage) => (rankOf[stage] = rank)));
    const inputs = range(5 * stages).map(() => []), outputs = range(5 * stages).map(() => []);
    const wires = [], routes = [];
    const lay = (kind, src, dst, ops) => {
      if (rankOf[src] === rankOf[dst]) return; // program order suffices
      const base = wires.length * microbatches;
      for (const op of ops) {
        inputs[code(op, dst)].push(base);
        outputs[code(op, src)].push(wires.length);
      }
      wires.push({ kind, src, dst, base, routes: routes.length, last: null });
      routes.push({ sender: rankOf[src], receiver: rankOf[dst], stage: src, bytes: 0, seconds_per_byte: 0, latency: 0, channels: [] });
    };
    for (const stage of range(stages - 1)) {
      lay("act", stage, stage + 1, ["F"]);
      lay("grad", stage + 1, stage, ["B", "I"]);
    }
    const ranks = placement.length;
    return new app.replay.Wiring({
      ranks, stages, microbatches, slices: 1, batches: 1, groups: 1, epilogue: true, asynchronous: false, links: false, placement,
      costs: { ...Object.fromEntries(["F", "B", "I", "W", "U"].map((op) => [op, Array(stages).fill(costs[op] || 0)])), latency: Array(stages).fill(costs.latency) },
      norm: null, around: 0, programs: programs.map((program) => ({ codes: program.map(([stage, op]) => code(op, stage)), indices: program.map(([, , k]) => k) })),
      inputs, outputs, wires, routes, joint_steps: [], begins: range(ranks).map(() => []), returns: [], gather_after_update: [], filled: [], versions: [],
      slots: wires.length * microbatches, channels: 0,
    });
  }

  app.orders = { FAMILIES, build, peaks, wiringOf };
})(stagewright);
