// The visible part of the timelines, and its position on the canvas: rows one below the other, on one time scale for
// all panels, or one an exhibit: `start`, `end`, `length` are seconds of the panel that `view.in(panel)` named last.
//
//   | gutter: names | plot: view.start ... view.end | side: idle time by cause |
//
// Pinned rows are between `head` and `top`, and all others scroll below them. Places are pixels of what scrolls: those of
// pinned rows move along, so that they seem to stay.
(function (app) {
  "use strict";

  const HEAD = 48; // overview and axis, which stay when rows scroll [pixels]
  const OVERVIEW = 20; // alone, where each panel has its own axis
  const PANEL_HEAD = 30, PANEL_GAP = 8, AXIS = 28;
  const PAD = 3, LANES = 8, MEMORY = 26;
  const GAP = 6; // around memory
  const SMALLEST_BOX = 14, READABLE_BOX = 20, LARGEST_BOX = 34; // rows scroll rather than few of them being small
  const SIDE = 190, EDGE = 14;
  const MOST_PINNED = 0.6; // of the height

  class View {
    constructor(page) {
      this.page = page;
      this.unit = 1; // seconds of the longest exhibit a second of the panel
      this.whole = page.longest;
      this.from = 0;
      this.to = this.whole;
      this.width = this.height = 0;
      this.scrolled = 0;
      this.shows = { idle: true, messages: true, memory: true, replicas: false, path: false, own: false };
      this.pins = []; // places of panels, of their pinned rows alone
      this.panels = []; // of the others
      this.spots = new Map(); // panel -> rank -> {place, row}
      this.top = 0; // where what scrolls begins
      this.gutter = 76;
    }

    // From here on seconds are those of a panel; of the scale of all without one.
    in(panel) {
      this.unit = panel && this.shows.own ? this.whole / (panel.exhibit.longest || 1) : 1;
      return this;
    }

    get start() { return this.from / this.unit; }
    set start(seconds) { this.from = seconds * this.unit; }
    get end() { return this.to / this.unit; }
    set end(seconds) { this.to = seconds * this.unit; }
    get length() { return this.whole / this.unit; }

    // Places of all panels and rows, in pixels from the top of the content (below HEAD).
    layOut(measureText) {
      const { rows } = app;
      const entries = this.page.panels.map((panel) => ({ panel, list: rows.shown(panel) })).filter(({ list }) => list.length);
      const all = entries.flatMap(({ panel, list }) => list.map((entry) => ({ ...entry, name: rows.nameOf(entry, panel) })));
      this.gutter = Math.ceil(Math.min(220, Math.max(58, ...all.map(({ name }) => measureText(name))))) + 24; // whole, so that columns of pixels are sharp
      this.hasSide = this.width > 700 && this.page.panels.some((panel) => panel.rows.some((row) => row.shares));
      const head = PANEL_HEAD + (this.shows.own ? AXIS : 0);
      const fixed = all.reduce((sum, { row }) => sum + this.extra(row), this.head + entries.length * (head + PANEL_GAP));
      const box = Math.floor(Math.min(LARGEST_BOX, Math.max(all.length > 24 ? SMALLEST_BOX : READABLE_BOX, (this.height - fixed) / Math.max(all.length, 1))));
      this.scroll = 0;
      this.spots = new Map(entries.map(({ panel }) => [panel, new Map()]));
      const pinned = new Set(); // as many as leave room for what scrolls
      let room = (this.height - this.head) * MOST_PINNED;
      for (const { panel, list } of entries) {
        let above = head + PANEL_GAP;
        for (const entry of list.filter(({ row }) => rows.isPinned(panel, row))) {
          room -= above + box + this.extra(entry.row);
          if (room > 0) pinned.add(entry);
          above = 0;
        }
      }
      const split = (keep) => entries.map(({ panel, list }) => ({ panel, list: list.filter((each) => pinned.has(each) === keep) })).filter(({ list }) => list.length);
      let y = this.head;
      const places = (some) => some.map(({ panel, list }) => {
        const place = { panel, top: y, first: y + head, rows: [] };
        y = place.first;
        for (const { row, members } of list) {
          const placed = this.rowPlace(row, members, y, box);
          placed.name = rows.nameOf({ row, members }, panel);
          place.rows.push(placed);
          for (const member of members) this.spots.get(panel).set(member.rank, { place, row: placed });
          y += placed.height;
        }
        place.bottom = y;
        y += PANEL_GAP;
        return place;
      });
      this.pins = places(split(true));
      for (const place of this.pins) place.pinned = true;
      this.top = this.pins.length ? y : this.head;
      this.panels = places(split(false));
      this.contentHeight = y + 4;
    }

    rowPlace(row, members, y, box) {
      const lanes = this.lanes(row) ? LANES : 0;
      const memory = this.shows.memory && row.memory ? MEMORY : 0;
      const height = box + this.extra(row);
      return {
        row, members, top: y, height, box: y + PAD, boxHeight: box, lanes: y + PAD + box + 2, lanesHeight: lanes,
        memory: y + height - PAD - memory - GAP + 2, memoryHeight: memory,
      };
    }

    get scroll() { return this.scrolled; }
    set scroll(pixels) {
      const by = pixels - this.scrolled;
      this.scrolled = pixels;
      for (const place of this.pins) {
        for (const name of ["top", "first", "bottom"]) place[name] += by;
        for (const row of place.rows) for (const name of ["top", "box", "lanes", "memory"]) row[name] += by;
      }
    }

    lanes(row) {
      return this.shows.messages && row.lanes.length > 0;
    }

    extra(row) {
      return 2 * PAD + (this.lanes(row) ? LANES + 2 : 0) + (this.shows.memory && row.memory ? MEMORY + GAP : 0);
    }

    get head() {
      return this.shows.own ? OVERVIEW : HEAD;
    }

    get plotWidth() {
      return Math.max(50, this.width - this.gutter - (this.hasSide ? SIDE : EDGE));
    }

    get sideLeft() {
      return this.gutter + this.plotWidth + 22;
    }

    get sideWidth() {
      return SIDE - 22 - EDGE - 40;
    }

    // Seconds a pixel.
    get pixel() {
      return (this.end - this.start) / this.plotWidth;
    }

    x(seconds) {
      return this.gutter + (seconds - this.start) / this.pixel;
    }

    seconds(x) {
      return this.start + (x - this.gutter) * this.pixel;
    }

    // The line of a lane of a row: [top, height].
    laneOf(place, track) {
      const height = place.lanesHeight / Math.max(place.row.lines, 1);
      return [place.lanes + track.depth * height, Math.max(height - (height > 2.5 ? 1 : 0), 1)];
    }

    // Top and height of any track of a row.
    lineOf(place, track) {
      if (track.kind === "lane") return this.laneOf(place, track);
      return [place.box, place.boxHeight];
    }

    // The item at a pixel of the canvas: {place, row, track, i}, without track and i between boxes, without row on
    // a heading; null elsewhere.
    hit(x, y) {
      if (y < this.head) return null;
      const at = y + this.scroll;
      for (const place of y < this.top ? this.pins : this.panels) {
        if (at < place.top || at >= place.bottom) continue;
        const row = place.rows.find((each) => at >= each.top && at < each.top + each.height);
        if (!row) return { place, row: null };
        this.in(place.panel);
        const found = { place, row, memory: row.memoryHeight > 0 && at >= row.memory - 2 };
        if (x < this.gutter || x > this.gutter + this.plotWidth) return found;
        for (const track of row.row.tracks) {
          if (track.kind === "lane" && !row.lanesHeight) continue;
          const [top, height] = this.lineOf(row, track);
          if (at < top - 1 || at >= top + height + 1) continue;
          const i = track.at(this.seconds(x), 1.5 * this.pixel);
          if (i >= 0) return { ...found, track, i };
        }
        if (this.shows.idle && at >= row.box && at < row.box + row.boxHeight) {
          const i = row.row.idle.at(this.seconds(x), 0);
          if (i >= 0) return { ...found, track: row.row.idle, i };
        }
        return found;
      }
      return null;
    }

    // Keep the window inside the whole, and not below the precision of numbers.
    set(start, end) {
      const least = Math.max(this.length * 1e-7, 20 * this.page.tick);
      const size = Math.min(Math.max(end - start, least), this.length);
      const room = this.length - size;
      const middle = (start + end) / 2;
      this.start = Math.min(Math.max(middle - size / 2, 0), room);
      this.end = this.start + size;
    }

    // Zoom by a factor (above 1: closer) about a time that stays where it is.
    zoom(factor, about = (this.start + this.end) / 2) {
      const size = (this.end - this.start) / factor;
      const share = (about - this.start) / (this.end - this.start);
      this.set(about - share * size, about + (1 - share) * size);
    }

    pan(seconds) {
      const size = this.end - this.start;
      this.start = Math.min(Math.max(this.start + seconds, 0), this.length - size);
      this.end = this.start + size;
    }

    // Bring a box into sight, closer where it is too small to be seen.
    reveal(start, end) {
      const size = this.end - this.start;
      if (end - start < 6 * this.pixel) {
        const wide = Math.max((end - start) * 12, this.length * 1e-6);
        this.set((start + end) / 2 - wide / 2, (start + end) / 2 + wide / 2);
      } else if (start < this.start || end > this.end) {
        const half = Math.max(size, 2 * (end - start)) / 2;
        this.set((start + end) / 2 - half, (start + end) / 2 + half);
      }
    }
  }

  app.View = View;
})(stagewright);
