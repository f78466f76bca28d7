// The canvas below: rows, boxes, lanes. Only what is in sight is drawn; where boxes are narrower than a pixel, each column of
// pixels shows the shares of its time instead. `context` is a canvas's, or that of a picture to be saved (save.js, svg.js).
(function (app) {
  "use strict";

  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const CROWDED = 0.4; // boxes a pixel, from which on columns are drawn instead

  // "#rrggbb" as the four bytes of a pixel.
  function rgba(hue, alpha) {
    const bytes = [1, 3, 5].map((at) => parseInt(hue.slice(at, at + 2), 16));
    return new Uint32Array(new Uint8Array([...bytes, Math.round(255 * alpha)]).buffer)[0];
  }

  class Painter {
    constructor(canvas, view) {
      this.canvas = canvas;
      this.context = canvas.getContext("2d");
      this.view = view;
      this.widths = new Map();
      this.hatches = new Map();
    }

    font(size, weight = 400) {
      this.context.font = weight + " " + size + "px " + FONT;
      this.fontKey = weight + "/" + size;
    }

    // Width of a short text in the font that is set.
    measure(text) {
      const key = this.fontKey + text;
      if (!this.widths.has(key)) {
        if (this.widths.size > 20000) this.widths.clear();
        this.widths.set(key, this.context.measureText(text).width);
      }
      return this.widths.get(key);
    }

    // The colours of the theme, and the hatches in them.
    retheme() {
      const probe = document.createElement("i"); // says what system colours are, where the user forces them
      probe.style.forcedColorAdjust = "none";
      document.body.append(probe);
      this.theme = Object.fromEntries(["ground", "surface", "ink", "muted", "faint", "rule", "row", "accent", "mark"].map((name) => {
        probe.style.color = "var(--" + name + ")";
        return [name, getComputedStyle(probe).color];
      }));
      probe.remove();
      this.hatches.clear();
    }

    hatch(colour, stripe) {
      if (this.context.hatch) return this.context.hatch(colour, stripe);
      const key = colour + stripe;
      if (!this.hatches.has(key)) {
        const size = 6, tile = document.createElement("canvas");
        tile.width = tile.height = size * 2;
        const context = tile.getContext("2d");
        context.scale(2, 2);
        context.fillStyle = colour;
        context.fillRect(0, 0, size, size);
        context.strokeStyle = stripe;
        context.lineWidth = 1.3;
        for (const shift of [-size, 0, size]) {
          context.beginPath();
          context.moveTo(shift - 1, size + 1);
          context.lineTo(shift + size + 1, -1);
          context.stroke();
        }
        const pattern = this.context.createPattern(tile, "repeat");
        pattern.setTransform(new DOMMatrix().scale(0.5));
        this.hatches.set(key, pattern);
      }
      return this.hatches.get(key);
    }

    fill(style) {
      return style.hatched ? this.hatch(style.colour, "rgba(255,255,255,.5)") : style.colour;
    }

    draw() {
      const { view, context, theme } = this;
      context.fillStyle = theme.ground;
      context.fillRect(0, 0, view.width, view.height);
      this.region(view.panels, view.top, view.height);
      this.region(view.pins, view.head, view.top);
      if (view.pins.length) {
        context.fillStyle = theme.faint;
        context.fillRect(0, view.top - 4, view.width, 1);
      }
      if (!view.panels.length && !view.pins.length) this.nothing();
      app.frame.head(this);
    }

    // Places of panels between two heights of the canvas.
    region(places, from, to) {
      const { view, context } = this;
      context.save();
      context.beginPath();
      context.rect(0, from, view.width, to - from);
      context.clip();
      context.translate(0, -view.scroll);
      const top = view.scroll + from, bottom = view.scroll + to;
      const limit = app.frame.sideLimit(this);
      for (const place of places) {
        if (place.bottom < top || place.top > bottom) continue;
        view.in(place.panel);
        if (view.shows.own) app.frame.axis(this, place.first - 2);
        app.frame.grid(this, place);
        app.frame.heading(this, place);
        for (const row of place.rows) {
          if (row.top + row.height < top || row.top > bottom) continue;
          this.row(place, row);
          if (view.hasSide && row.row.shares) app.frame.side(this, row, limit);
        }
        app.frame.ends(this, place);
        if (view.shows.path && place.panel.path) app.layers.pathLinks(this, place);
      }
      context.restore();
    }

    nothing() {
      const { view, context, theme } = this;
      this.font(13);
      context.fillStyle = theme.muted;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText("All rows are hidden: shift + h shows them.", view.gutter, view.head + 30);
    }

    // --- rows ---

    row(place, row) {
      const { context, view, theme } = this;
      context.fillStyle = theme.row;
      context.fillRect(view.gutter, row.box, view.plotWidth, row.boxHeight);
      this.name(row);
      context.save();
      context.beginPath();
      context.rect(view.gutter, row.top, view.plotWidth, row.height);
      context.clip();
      const panel = place.panel;
      for (const track of row.row.tracks) {
        if (track.kind === "lane") {
          if (row.lanesHeight) this.lane(panel, row, track);
        } else {
          this.boxes(panel, row, track);
        }
      }
      if (row.memoryHeight) app.layers.memory(this, panel, row);
      if (view.shows.path && panel.path) app.layers.path(this, panel, row);
      if (row.row.missing) this.missing(row);
      context.restore();
    }

    // A rank of which nothing was recorded.
    missing(row) {
      const { context, view, theme } = this;
      context.fillStyle = this.hatch(theme.row, theme.rule);
      context.fillRect(view.gutter, row.box, view.plotWidth, row.boxHeight);
      this.font(12);
      context.fillStyle = theme.muted;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText("nothing recorded", view.gutter + 10, row.box + row.boxHeight / 2);
    }

    name(row) {
      const { context, view, theme } = this;
      const crowded = row.height < 13;
      if (crowded && row.row.rank % 4) return;
      this.font(12);
      context.fillStyle = theme.ink;
      context.textBaseline = "middle";
      context.textAlign = "right";
      let text = row.name;
      while (text.length > 4 && this.measure(text) > view.gutter - 22) text = text.slice(0, -2).replace(/…?$/, "…");
      const middle = row.box + row.boxHeight / 2;
      context.fillText(text, view.gutter - 12, middle + 0.5);
      if (row.memoryHeight) {
        this.font(10);
        context.fillStyle = theme.muted;
        context.fillText(app.words.bytes(row.row.memory.peak), view.gutter - 12, row.memory + row.memoryHeight / 2);
      }
    }

    boxes(panel, row, track) {
      const { view } = this;
      const from = track.from(view.start);
      const to = app.model.firstAbove(track.start, view.end, from, track.count);
      const [top, height] = view.lineOf(row, track);
      const crowded = to - from > CROWDED * view.plotWidth && track.groups;
      const idle = track.kind === "compute" && view.shows.idle ? row.row.idle : null;
      if (crowded) {
        const hues = [...app.model.OPS].map((op) => (app.page.palette.ops[op] || [app.page.palette.other])[0]);
        const causes = app.page.palette.causes.map(([hue]) => hue);
        this.columns(idle ? [[track, hues, 1], [idle, causes, 0.45]] : [[track, hues, 1]], top, height);
        return;
      }
      if (idle) this.idle(idle, top, height);
      this.single(panel, row.row, track, from, to, top, height);
    }

    // Boxes one by one. Those of one style are filled together; edges show where boxes touch.
    single(panel, row, track, from, to, top, height) {
      const { view, context } = this;
      const scale = 1 / view.pixel;
      const left = view.gutter - view.start * scale;
      const byStyle = new Map();
      let edge = -Infinity;
      for (let i = from; i < to; i++) {
        let x = left + track.start[i] * scale;
        let width = (track.end[i] - track.start[i]) * scale;
        if (width < 1) {
          width = 1;
        } else if (width > 4) {
          width -= 1;
        }
        edge = x + width;
        if (x < view.gutter - 8) {
          width -= view.gutter - 8 - x;
          x = view.gutter - 8;
        }
        width = Math.min(width, view.plotWidth + 16);
        let list = byStyle.get(track.style[i]);
        if (!list) byStyle.set(track.style[i], (list = []));
        list.push(x, width);
      }
      for (const [number, list] of byStyle) {
        context.fillStyle = this.fill(panel.styles[number]);
        for (let at = 0; at < list.length; at += 2) context.fillRect(list[at], top, list[at + 1], height);
      }
      if (height >= 9) this.labels(panel, row, track, from, to, top, height);
    }

    labels(panel, row, track, from, to, top, height) {
      const { view, context } = this;
      const largest = Math.min(11, Math.max(8, height - 4));
      const sizes = largest > 9 ? [largest, 9] : [largest]; // [pixels]
      this.font(largest);
      context.textBaseline = "middle";
      const versions = row.program && row.program.versions.length ? row.program.versions : null;
      for (let i = from; i < to; i++) {
        const begin = Math.max(view.x(track.start[i]), view.gutter);
        const width = Math.min(view.x(track.end[i]), view.gutter + view.plotWidth) - begin;
        if (width < 7) continue;
        const style = panel.styles[track.style[i]];
        const op = row.program.ops[i];
        const text = op === "U" ? (panel.schedule.batches > 1 ? "U" + row.program.indices[i] : "U") : String(row.program.indices[i]);
        const size = sizes.find((each) => {
          this.font(each);
          return this.measure(text) + 2 <= width;
        });
        if (!size) continue;
        const wide = this.measure(text);
        const middle = top + height / 2;
        const badge = versions && versions[i] >= 0 && op === "F" ? this.badgeAt("v" + versions[i], begin, width, wide, top, height) : null;
        this.font(size);
        context.textAlign = "center";
        const x = badge ? badge.number[0] : begin + width / 2;
        if (style.hatched) this.plate(x, middle, wide, size, style);
        context.fillStyle = style.ink;
        context.fillText(text, x, (badge ? badge.number[1] : middle) + 0.5);
        if (badge) this.badge("v" + versions[i], badge, style);
      }
    }

    // Position of a box's version badge, and then of its number: next to it, else above it, or null.
    badgeAt(text, begin, width, wide, top, height) {
      this.font(8, 600);
      const own = this.measure(text) + 4;
      const both = wide + 3 + own;
      if (both + 2 <= width) {
        const left = begin + (width - both) / 2;
        return { left: left + wide + 3, top: top + height / 2 - 5.5, own, number: [left + wide / 2, top + height / 2] };
      }
      if (height < 25 || own + 2 > width) return null;
      return { left: begin + (width - own) / 2, top: top + 2, own, number: [begin + width / 2, top + height / 2 + 5] };
    }

    // The weight version of a forward.
    badge(text, { left, top, own }, style) {
      const { context } = this;
      this.font(8, 600);
      context.fillStyle = style.ink === "black" ? "rgba(0,0,0,.75)" : "rgba(255,255,255,.9)";
      context.fillRect(left, top, own, 11);
      context.fillStyle = style.ink === "black" ? "#fff" : "#000";
      context.fillText(text, left + own / 2, top + 6);
    }

    // A quiet ground under a number on a hatched box.
    plate(x, y, width, size, style) {
      this.context.fillStyle = style.colour;
      this.context.fillRect(x - width / 2 - 2, y - size / 2, width + 4, size);
    }

    inside(text, begin, width, middle, ink) {
      const { context } = this;
      if (width < 14) return;
      let shown = text;
      if (this.measure(shown) + 6 > width) {
        let keep = Math.floor((text.length * width) / this.measure(text));
        do shown = text.slice(0, --keep) + "…";
        while (keep > 1 && this.measure(shown) + 6 > width);
        if (keep < 2) return;
      }
      context.textAlign = "left";
      context.fillStyle = ink;
      context.fillText(shown, begin + 3, middle + 0.5);
    }

    // Shares of time in each column of pixels, from the bottom up. Written as pixels: neither thousands of rectangles nor
    // a ragged outline is quick to fill.
    // layers: [track, hues of its groups, alpha], one on top of the other.
    columns(layers, top, height) {
      const { view } = this;
      const width = Math.ceil(view.plotWidth), rows = Math.max(Math.round(height), 1);
      const { image, pixels } = this.scratch(width, rows);
      const level = new Float64Array(width);
      const limit = view.end + view.pixel;
      for (const [track, hues, alpha] of layers) {
        const colours = hues.map((hue) => rgba(hue, alpha));
        const sums = new Float64Array(hues.length);
        let i = track.from(view.start);
        for (let column = 0; column < width && i < track.count; column++) {
          const begin = view.start + column * view.pixel, end = begin + view.pixel;
          if (track.start[i] >= end) continue;
          sums.fill(0);
          track.sumBefore(begin, i, sums, -1);
          while (i < track.count && track.end[i] <= end && track.start[i] < limit) i++;
          track.sumBefore(end, i, sums, 1);
          for (let g = 0; g < sums.length; g++) {
            if (sums[g] <= 0) continue;
            const from = Math.round(level[column]);
            level[column] += (sums[g] / view.pixel) * rows;
            const to = Math.min(Math.round(level[column]), rows);
            for (let up = from; up < to; up++) pixels[(rows - 1 - up) * width + column] = colours[g];
          }
        }
      }
      this.sketch.getContext("2d").putImageData(image, 0, 0);
      this.context.imageSmoothingEnabled = false;
      this.context.drawImage(this.sketch, 0, 0, width, rows, view.gutter, top, width, height);
    }

    // A picture of its own to write pixels into, empty.
    scratch(width, rows) {
      if (!this.image || this.image.width !== width || this.image.height !== rows) {
        this.sketch = this.sketch || document.createElement("canvas");
        this.sketch.width = width;
        this.sketch.height = rows;
        this.image = new ImageData(width, rows);
        this.pixels = new Uint32Array(this.image.data.buffer);
      }
      this.pixels.fill(0);
      return { image: this.image, pixels: this.pixels };
    }

    // Idle time: a tint of its cause, and a firm line below.
    idle(track, top, height) {
      const { view, context } = this;
      const from = track.from(view.start);
      const to = app.model.firstAbove(track.start, view.end, from, track.count);
      for (let i = from; i < to; i++) {
        const x = Math.max(view.x(track.start[i]), view.gutter - 2);
        const width = Math.min(view.x(track.end[i]), view.gutter + view.plotWidth + 2) - x;
        if (width < 0.3) continue;
        context.fillStyle = app.page.palette.causes[track.style[i]][0];
        context.globalAlpha = 0.22;
        context.fillRect(x, top, width, height);
        context.globalAlpha = 1;
        context.fillRect(x, top + height - 3, width, 3);
      }
    }

    lane(panel, row, track) {
      const { view, context } = this;
      const [top, height] = view.laneOf(row, track);
      const from = track.from(view.start);
      const to = app.model.firstAbove(track.start, view.end, from, track.count);
      if (to - from > CROWDED * view.plotWidth) {
        this.columns([[track, track.hues, 1]], top, height);
        return;
      }
      let last = -1;
      for (let i = from; i < to; i++) {
        const x = Math.max(view.x(track.start[i]), view.gutter - 2);
        const width = Math.min(Math.max(view.x(track.end[i]) - x, 1), view.plotWidth + 4);
        if (track.style[i] !== last) context.fillStyle = panel.styles[(last = track.style[i])].colour;
        context.fillRect(x, top, width, height);
      }
    }
  }

  app.Painter = Painter;
})(stagewright);
