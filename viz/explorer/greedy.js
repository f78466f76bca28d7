// Greedy list scheduling (schedules/families/greedy.py) for stages of equal costs: ranks take what can start first, W fill the
// gaps, and no rank holds more than a limit. The same sums in the same order, so that of equal choices the same one is taken.
(function (app) {
  "use strict";

  const NEVER = Infinity;

  // The 1F1B rule: so many forwards, then one forward and one backward in turn, then the rest of the backwards.
  function pairUp(forwards, backwards, warmup) {
    const first = Math.min(warmup, forwards.length), steady = forwards.length - first;
    return [...forwards.slice(0, first), ...forwards.slice(first).flatMap((forward, i) => [forward, backwards[i]]), ...backwards.slice(steady)];
  }

  // Actions placed on a rank so far: when its first one starts and its last one ends, seconds idle in between.
  class Placed {
    constructor() {
      this.program = [];
      this.first = this.free = this.idle = this.held = 0;
    }

    run(action, start, seconds) {
      if (this.program.length) this.idle += start - this.free;
      else this.first = start;
      this.program.push(action);
      this.free = start + seconds;
      return this.free;
    }
  }

  function listed(ranks) {
    return {
      programs: ranks.map((rank) => rank.program), span: Math.max(...ranks.map((rank) => rank.free - rank.first)), makespan: Math.max(...ranks.map((rank) => rank.free)),
    };
  }

  // A rank's past, and its next choices: [start, op, stage].
  class RankList extends Placed {
    constructor(number, own, costs, rules) {
      super();
      Object.assign(this, { number, costs, rules, stages: [...own].sort((a, b) => a - b), backward: rules.split ? "I" : "B" });
      this.arrived = {}; // when what the next forwards and backwards of a stage need is there
      this.done = {};
      for (const stage of own) {
        for (const op of ["F", this.backward]) this.arrived[op + stage] = [];
        for (const op of ["F", this.backward, "W"]) this.done[op + stage] = 0;
      }
      this.owed = []; // stages of the W that are due
      this.order = rules.order ? rules.order[number].filter(([, op]) => op !== "W") : null;
      this.at = 0; // in the order
    }

    choose(mostIdle) {
      const [best, withoutRoom] = this.next();
      if (this.owed.length) {
        const gap = best[0] - this.free, seconds = this.costs.W;
        const makesRoom = gap > 0 && withoutRoom <= this.free + seconds;
        const small = gap > 0 && (this.rules.fillsSmallGaps || this.idle + gap > mostIdle);
        if (gap >= seconds || makesRoom || small) return [this.free, "W", this.owed[0]];
      }
      return best;
    }

    next() {
      let best = [NEVER, "F", -1], withoutRoom = NEVER;
      const full = this.held + 1 > this.rules.limit + 1e-9;
      const candidates = this.order === null
        ? [...this.stages.map((stage) => [this.backward, stage]), ...[...this.stages].reverse().map((stage) => ["F", stage])]
        : this.order.slice(this.at, this.at + 1).map(([stage, op]) => [op, stage]);
      for (const [op, stage] of candidates) {
        const number = this.done[op + stage], arrivals = this.arrived[op + stage];
        if (number >= arrivals.length) continue;
        const start = Math.max(this.free, arrivals[number]);
        if (op === "F") {
          if (number - this.done[this.backward + stage] >= this.rules.caps[stage]) continue;
          if (full) {
            withoutRoom = Math.min(withoutRoom, start);
            continue;
          }
        }
        if (start < best[0]) best = [start, op, stage];
      }
      return [best, withoutRoom];
    }

    take(start, op, stage) {
      const end = this.run([stage, op, this.done[op + stage]], start, this.costs[op]);
      this.done[op + stage]++;
      if (op === "W") {
        this.held--;
        this.owed.shift();
        return end;
      }
      this.at++;
      if (op === "F") this.held++;
      else if (op === "B") this.held--;
      else this.owed.push(stage);
      return end;
    }
  }

  // {programs, span, makespan} by list scheduling; an Error where all ranks wait for each other.
  // rules: {caps: by stage, microbatches between F and I or B; limit: activations of a rank; order: programs whose F and I or B
  // keep their order, or none; split: I and W for B; fillsSmallGaps: a W goes into any gap}
  function listOrder(placement, M, costs, rules) {
    const ranks = placement.map((own, number) => new RankList(number, own, costs, rules));
    const rankOf = new Map(ranks.flatMap((rank) => rank.stages.map((stage) => [stage, rank])));
    const last = rankOf.size - 1, backward = rules.split ? "I" : "B";
    rankOf.get(0).arrived.F0 = Array(M).fill(0);
    const choices = ranks.map((rank) => rank.choose(0));
    let mostIdle = 0;
    for (let left = M * rankOf.size * (rules.split ? 3 : 2); left; left--) {
      let number = 0;
      choices.forEach(([start], at) => (number = start < choices[number][0] ? at : number));
      const [start, op, stage] = choices[number];
      if (start === NEVER) throw new Error("all ranks wait for each other");
      const rank = ranks[number];
      const end = rank.take(start, op, stage);
      const user = op === "F" ? Math.min(stage + 1, last) : op === backward ? stage - 1 : -1;
      const other = user < 0 ? rank : rankOf.get(user);
      if (user >= 0) other.arrived[(op === backward || stage === last ? backward : "F") + user].push(other === rank ? end : end + costs.latency);
      mostIdle = Math.max(mostIdle, rank.idle);
      for (const each of new Set([rank, other])) choices[each.number] = each.choose(mostIdle);
    }
    return listed(ranks);
  }

  // --- zb-1p and zb-2p (families/zero_bubble.py): one stage a rank, tries of which the best is taken ---

  // Rules of ZB's authors for W: programs that take F and I in a given order; null where memory does not suffice.
  // allowed: by rank, seconds that it may idle without a W in a short gap.
  function withWeights(order, P, costs, limit, allowed, beforeForward) {
    const ranks = Array.from({ length: P }, () => new Placed()), owed = ranks.map(() => []), arrived = new Map();
    const mostIdle = () => Math.max(...ranks.map((rank) => rank.idle));
    const weight = (number) => {
      ranks[number].run(owed[number].shift(), ranks[number].free, costs.W);
      ranks[number].held--;
    };
    for (const [stage, op, k] of order) {
      const rank = ranks[stage], due = owed[stage], more = op === "F" ? 1 : 0;
      while (rank.held + more > limit + 1e-9) {
        if (!due.length) return null;
        weight(stage);
      }
      const arrival = arrived.get(op + stage + "/" + k) || 0;
      while (due.length && arrival >= rank.free + costs.W) weight(stage);
      const gap = arrival - rank.free;
      if (due.length && (op === "I" || beforeForward) && gap > 0 && rank.idle + gap > Math.max(mostIdle(), allowed[stage])) weight(stage);
      rank.held += more;
      const end = rank.run([stage, op, k], Math.max(rank.free, arrival), costs[op]);
      if (op === "I") due.push([stage, "W", k]);
      const user = op === "F" && stage < P - 1 ? ["F", stage + 1] : ["I", op === "F" ? stage : stage - 1];
      arrived.set(user[0] + user[1] + "/" + k, user[1] === stage || user[1] < 0 ? end : end + costs.latency);
    }
    owed.forEach((due, number) => {
      while (due.length) weight(number);
    });
    return { ...listed(ranks), idle: ranks.map((rank) => rank.idle), mostIdle: mostIdle() };
  }

  function* weightTries(order, P, costs, limit) {
    for (const beforeForward of [true, false]) {
      let allowed = Array(P).fill(0), least = NEVER;
      for (;;) {
        const found = withWeights(order, P, costs, limit, allowed, beforeForward);
        if (!found || found.mostIdle >= least) break;
        yield found;
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
    const warmupOf = (slope) => Array.from({ length: P }, (_, rank) => Math.max(1, Math.min(room, Math.floor(1 + slope * (before - rank) + 1e-9))));
    const placement = Array.from({ length: P }, (_, rank) => [rank]);
    const list = (rules) => {
      try {
        return listOrder(placement, M, costs, rules);
      } catch {
        return null; // ranks wait for each other
      }
    };
    const warmups = distinct(slopes.map(warmupOf));
    for (const caps of warmups) {
      const order = caps.map((first, rank) => {
        const forwards = Array.from({ length: M }, (_, k) => [rank, "F", k]);
        return pairUp(forwards, forwards.map(([stage, , k]) => [stage, "I", k]), first - 1);
      });
      for (const fillsSmallGaps of [false, true]) yield list({ caps, limit, order, split: true, fillsSmallGaps });
    }
    for (const warmup of distinct(warmups.map((own) => own.map((first, rank) => Math.max(1, Math.min(first, own[0] - rank)))))) {
      yield* weightTries(inRounds(warmup, M), P, costs, limit);
    }
    for (const fillsSmallGaps of [false, true]) yield list({ caps: warmupOf(full), limit, order: null, split: true, fillsSmallGaps });
  }

  // The order with the least span, of these the least makespan, of these the first.
  function bestOfLimited({ P, M, costs, limit }) {
    let best = null;
    const work = M * costs.F + M * costs.I + M * costs.W;
    for (const found of candidates(P, M, costs, limit)) {
      if (!found) continue;
      if (!best || found.span < best.span || (found.span === best.span && found.makespan < best.makespan)) best = found;
      if (best.span <= work * (1 + 1e-12)) break; // no bubble
    }
    return best.programs;
  }

  app.greedy = { pairUp, listOrder, bestOfLimited };
})(stagewright);
