// Orders by lists and by rules for W (schedules/orders/listing.py, families/automatic.py), for stages of equal costs: no rank
// holds more than a limit. The same sums in the same order, so that of equal choices the same one is taken.
(function (app) {
  "use strict";

  const FILLS = [1, 0.5, 0]; // a W goes into a gap of at least this part of its seconds
  const range = (count) => Array.from({ length: count }, (_, i) => i);

  // The 1F1B rule: so many forwards, then one forward and one backward in turn, then the rest of the backwards.
  function pairUp(forwards, backwards, warmup) {
    const first = Math.min(warmup, forwards.length), steady = forwards.length - first;
    return [...forwards.slice(0, first), ...forwards.slice(first).flatMap((forward, i) => [forward, backwards[i]]), ...backwards.slice(steady)];
  }

  // Actions placed on a rank so far: when its last one ends, seconds idle since its first, activations, W that are due.
  class Placed {
    constructor() {
      this.program = [];
      this.free = this.idle = this.held = 0;
      this.owed = [];
    }

    run(action, start, seconds) {
      if (this.program.length) this.idle += start - this.free;
      this.program.push(action);
      this.free = start + seconds;
    }

    weight(costs) {
      this.run(this.owed.shift(), this.free, costs.W);
      this.held--;
    }
  }

  function programsOf(ranks, costs) {
    for (const rank of ranks) while (rank.owed.length) rank.weight(costs);
    return ranks.map((rank) => rank.program);
  }

  function rankOfStages(placement) {
    const rankOf = [];
    placement.forEach((own, rank) => own.forEach((stage) => (rankOf[stage] = rank)));
    return rankOf;
  }

  // The input of an action, and the rank that waits for its result: F of a stage, or I; null if none does.
  const needOf = (stage, op, last) => (op === "W" ? null : op === "F" ? (stage ? "F" + (stage - 1) : null) : stage < last ? "I" + (stage + 1) : "F" + stage);

  // Runs each rank's actions as far as their inputs are there; `run` places one, given its arrival, and returns when it ends.
  function play(order, placement, costs, run) {
    const rankOf = rankOfStages(placement), last = rankOf.length - 1;
    const at = order.map(() => 0), arrived = new Map(), blocked = new Map(), ready = range(order.length);
    while (ready.length) {
      const rank = ready.pop();
      for (; at[rank] < order[rank].length; at[rank]++) {
        const action = order[rank][at[rank]], [stage, op, k] = action;
        const need = needOf(stage, op, last), arrival = need === null ? 0 : arrived.get(need + "/" + k);
        if (arrival === undefined) {
          blocked.set(need + "/" + k, rank);
          break;
        }
        const end = run(rank, action, arrival), user = rankOf[op === "F" ? stage + 1 : stage - 1], key = op + stage + "/" + k;
        if (op === "W") continue;
        arrived.set(key, user === undefined || user === rank ? end : end + costs.latency);
        if (blocked.has(key)) ready.push(blocked.get(key));
      }
    }
  }

  // [longest span of a rank, last end]
  function seconds(programs, placement, costs) {
    const first = programs.map(() => null), free = programs.map(() => 0);
    play(programs, placement, costs, (rank, [, op], arrival) => {
      const start = Math.max(free[rank], arrival);
      first[rank] = first[rank] === null ? start : first[rank];
      return (free[rank] = start + costs[op]);
    });
    return [Math.max(...free.map((end, rank) => end - first[rank])), Math.max(...free)];
  }

  // The order with its W placed anew, F and I as they stand: in gaps of at least a part `fill` of their seconds, and where a
  // forward has no memory; null where memory does not suffice so.
  function refill(order, placement, costs, limit, fill) {
    const ranks = placement.map(() => new Placed());
    play(order, placement, costs, (number, [stage, op, k], arrival) => {
      const rank = ranks[number];
      while (rank.owed.length && ((op === "F" && rank.held + 1 > limit + 1e-9) || !(arrival - rank.free < fill * costs.W))) rank.weight(costs);
      rank.run([stage, op, k], Math.max(arrival, rank.free), costs[op]);
      if (op === "I") rank.owed.push([stage, "W", k]);
      else rank.held++;
      rank.isOver = rank.isOver || rank.held > limit + 1e-9;
      return rank.free;
    });
    return ranks.some((rank) => rank.isOver) ? null : programsOf(ranks, costs);
  }

  const refills = (order, placement, costs, limit) => FILLS.map((fill) => refill(order, placement, costs, limit, fill));

  // The order with the least span, of these the least makespan, of these the first.
  function best(orders, placement, costs, work) {
    let found = null, least = [Infinity, Infinity];
    for (const order of orders) {
      if (!order) continue;
      const value = seconds(order, placement, costs);
      if (value[0] < least[0] || (value[0] === least[0] && value[1] < least[1])) [found, least] = [order, value];
      if (least[0] <= work * (1 + 1e-12)) break; // no bubble
    }
    return found;
  }

  // Whole backwards (families/v_blocks.py, hanayo): what can start first comes first, of what starts at once a backward, and
  // what is nearest to the end of its way; at most so many microbatches of a stage under way.
  function waves(placement, M, most) {
    const rankOf = rankOfStages(placement), last = rankOf.length - 1, took = { F: 1, B: 2 };
    const arrived = { F: rankOf.map(() => []), B: rankOf.map(() => []) }, done = { F: rankOf.map(() => 0), B: rankOf.map(() => 0) };
    const free = placement.map(() => 0), programs = placement.map(() => []);
    arrived.F[0] = Array(M).fill(0);
    const choose = (rank) => {
      const own = [...placement[rank]].sort((a, b) => a - b);
      let best = [Infinity, "F", -1];
      for (const [op, stage] of [...own.map((s) => ["B", s]), ...own.reverse().map((s) => ["F", s])]) {
        const k = done[op][stage];
        if (k >= arrived[op][stage].length || (op === "F" && k - done.B[stage] >= most)) continue;
        const start = Math.max(free[rank], arrived[op][stage][k]);
        if (start < best[0]) best = [start, op, stage];
      }
      return best;
    };
    const choices = placement.map((_, rank) => choose(rank));
    for (let left = 2 * M * rankOf.length; left; left--) {
      let rank = 0;
      choices.forEach(([start], other) => (rank = start < choices[rank][0] ? other : rank));
      const [start, op, stage] = choices[rank];
      programs[rank].push([stage, op, done[op][stage]++]);
      free[rank] = start + took[op];
      const [then, user] = op === "B" ? ["B", stage - 1] : stage === last ? ["B", stage] : ["F", stage + 1];
      if (user >= 0) {
        arrived[then][user].push(free[rank]);
        choices[rankOf[user]] = choose(rankOf[user]);
      }
      choices[rank] = choose(rank);
    }
    return programs;
  }

  // --- zb-1p and zb-2p (families/zero_bubble.py): one stage a rank, tries of which the best is taken ---

  // Each rank takes what is there, a backward first or a forward first, forwards at most so many ahead.
  function list(P, M, costs, limit, { ahead, fill, forwardFirst }) {
    const there = { F: range(P).map((stage) => Array(M).fill(stage ? -1 : 0)), I: range(P).map(() => Array(M).fill(-1)) };
    const done = { F: Array(P).fill(0), I: Array(P).fill(0) }, ranks = range(P).map(() => new Placed()), wake = Array(P).fill(0);
    const choose = (stage, now) => {
      const rank = ranks[stage];
      let next = Infinity, starved = false;
      const may = { F: false, I: false };
      const look = (op, arrival) => {
        if (arrival >= 0 && arrival <= now) may[op] = true;
        else if (arrival > now && arrival < next) next = arrival;
      };
      if (done.I[stage] < done.F[stage]) look("I", there.I[stage][done.I[stage]]);
      if (done.F[stage] < M && done.F[stage] - done.I[stage] < ahead[stage] && there.F[stage][done.F[stage]] >= 0) {
        if (rank.held + 1 > limit + 1e-9) starved = true;
        else look("F", there.F[stage][done.F[stage]]);
      }
      if (starved && rank.owed.length && !may.I && !may.F) return "W";
      if (may.I && !(may.F && forwardFirst)) return "I";
      if (may.F) return "F";
      if (rank.owed.length && next - now >= fill * costs.W) return "W";
      wake[stage] = next;
      return null;
    };
    for (;;) {
      const now = Math.min(...wake), stage = wake.indexOf(now);
      if (now === Infinity) return programsOf(ranks, costs);
      const op = choose(stage, now), rank = ranks[stage];
      if (op === null) continue;
      if (op === "W") {
        rank.run(rank.owed.shift(), now, costs.W);
        rank.held--;
      } else {
        const k = done[op][stage]++;
        rank.run([stage, op, k], now, costs[op]);
        if (op === "I") rank.owed.push([stage, "W", k]);
        else rank.held++;
        const [then, user] = op === "I" ? ["I", stage - 1] : stage === P - 1 ? ["I", stage] : ["F", stage + 1];
        const arrival = user === stage ? rank.free : rank.free + costs.latency;
        if (user >= 0) there[then][user][k] = arrival;
        if (user >= 0 && user !== stage && arrival < wake[user] && ranks[user].free < wake[user]) wake[user] = Math.max(arrival, ranks[user].free);
      }
      wake[stage] = rank.program.length < 3 * M ? rank.free : Infinity;
    }
  }

  const lists = (P, M, costs, limit, ahead) => FILLS.flatMap((fill) => [false, true].map((forwardFirst) => list(P, M, costs, limit, { ahead, fill, forwardFirst })));

  // Rules of ZB's authors for W: programs that take F and I in a given order; null where memory does not suffice.
  // allowed: by rank, seconds that it may idle without a W in a short gap.
  function withWeights(order, P, costs, limit, allowed, beforeForward) {
    const ranks = range(P).map(() => new Placed()), arrived = new Map();
    const mostIdle = () => Math.max(...ranks.map((rank) => rank.idle));
    for (const [stage, op, k] of order) {
      const rank = ranks[stage], due = rank.owed, more = op === "F" ? 1 : 0;
      while (rank.held + more > limit + 1e-9) {
        if (!due.length) return null;
        rank.weight(costs);
      }
      const arrival = arrived.get(op + stage + "/" + k) || 0;
      while (due.length && arrival >= rank.free + costs.W) rank.weight(costs);
      const gap = arrival - rank.free;
      if (due.length && (op === "I" || beforeForward) && gap > 0 && rank.idle + gap >= Math.max(mostIdle(), allowed[stage])) rank.weight(costs);
      rank.held += more;
      rank.run([stage, op, k], Math.max(rank.free, arrival), costs[op]);
      if (op === "I") due.push([stage, "W", k]);
      const user = op === "F" && stage < P - 1 ? ["F", stage + 1] : ["I", op === "F" ? stage : stage - 1];
      arrived.set(user[0] + user[1] + "/" + k, user[1] === stage || user[1] < 0 ? rank.free : rank.free + costs.latency);
    }
    return { programs: programsOf(ranks, costs), idle: ranks.map((rank) => rank.idle), mostIdle: mostIdle() };
  }

  function* weightTries(order, P, costs, limit) {
    for (const beforeForward of [true, false]) {
      let allowed = Array(P).fill(0), least = Infinity;
      for (;;) {
        const found = withWeights(order, P, costs, limit, allowed, beforeForward);
        if (!found || found.mostIdle >= least) break;
        yield found.programs;
        least = found.mostIdle;
        allowed = found.idle.map((idle) => least - idle);
      }
    }
  }

  // Forwards of the warm-up, then an I of each rank from the last and an F of each from the first, in turn.
  function inRounds(warmup, M) {
    const done = warmup.map((first) => Math.min(first, M));
    const order = done.flatMap((first, stage) => Array.from({ length: first }, (_, k) => [stage, "F", k]));
    for (let number = 0; number < M; number++) {
      for (let stage = done.length - 1; stage >= 0; stage--) order.push([stage, "I", number]);
      done.forEach((k, stage) => {
        if (k < M) order.push([stage, "F", done[stage]++]);
      });
    }
    return order;
  }

  const distinct = (lists) => [...new Map(lists.map((each) => [each.join(), each])).values()];

  function* candidates(P, M, costs, limit) {
    const before = P - 1, room = Math.floor(limit + 1e-9);
    const full = 1 + (costs.I + 2 * costs.latency) / costs.F;
    const slopes = [...[0, 1, 2, 3, 4].map((step) => 1 + ((full - 1) * step) / 4), (limit - 1) / Math.max(1, before)];
    const warmupOf = (slope) => range(P).map((rank) => Math.max(1, Math.min(room, Math.floor(1 + slope * (before - rank) + 1e-9))));
    const placement = range(P).map((rank) => [rank]);
    const warmups = distinct(slopes.map(warmupOf));
    for (const warmup of warmups) {
      const order = warmup.map((first, rank) => {
        const forwards = range(M).map((k) => [rank, "F", k]);
        return pairUp(forwards, forwards.map(([stage, , k]) => [stage, "I", k]), first - 1);
      });
      yield* refills(order, placement, costs, limit);
      yield* lists(P, M, costs, limit, warmup);
    }
    for (const warmup of distinct(warmups.map((own) => own.map((first, rank) => Math.max(1, Math.min(first, own[0] - rank)))))) {
      yield* weightTries(inRounds(warmup, M), P, costs, limit);
    }
  }

  // Seconds in whole numbers of the ninth digit of the longest, so that no choice depends on rounding.
  function whole(costs) {
    const unit = 10 ** Math.max(-300, Math.floor(Math.log10(Math.max(costs.F, costs.I, costs.W, costs.B, costs.latency))) - 8);
    return Object.fromEntries(["F", "I", "W", "latency"].map((name) => [name, Math.round(costs[name] / unit)]));
  }

  function bestOfLimited({ P, M, costs: given, limit }) {
    const costs = whole(given);
    return best(candidates(P, M, costs, limit), range(P).map((rank) => [rank]), costs, M * (costs.F + costs.I + costs.W));
  }

  app.lists = { pairUp, refills, best, waves, whole, bestOfLimited };
})(stagewright);
