// The canvas above: what follows the pointer and the choice. Arrows of messages, outlines, the line of the pointer's time.
(function (app) {
  "use strict";

  class Marks {
    constructor(canvas, view, painter) {
      this.context = canvas.getContext("2d");
      this.view = view;
      this.painter = painter;
    }

    draw({ hover, chosen, marked, pointer, range, row, meant }) {
      const { context, view } = this;
      const theme = this.painter.theme;
      context.clearRect(0, 0, view.width, view.height);
      context.save();
      context.beginPath();
      context.rect(view.gutter - 1, view.head, view.plotWidth + 2, view.height - view.head);
      context.clip();
      if (range) {
        const [from, to] = range.map((seconds) => Math.min(Math.max(view.in(null).x(seconds), -9), view.width + 9));
        context.globalAlpha = 0.16;
        context.fillStyle = theme.accent;
        context.fillRect(from, view.head, to - from, view.height);
        context.globalAlpha = 1;
        context.fillRect(from, view.head, 1, view.height);
        context.fillRect(to - 1, view.head, 1, view.height);
      }
      if (pointer !== null && pointer >= view.gutter && pointer <= view.gutter + view.plotWidth) {
        context.strokeStyle = theme.faint;
        context.lineWidth = 1;
        context.setLineDash([2, 3]);
        context.beginPath();
        context.moveTo(Math.round(pointer) + 0.5, view.head);
        context.lineTo(Math.round(pointer) + 0.5, view.height);
        context.stroke();
        context.setLineDash([]);
      }
      context.translate(0, -view.scroll);
      for (const place of row || meant ? [...view.pins, ...view.panels] : []) {
        this.clipped(place, () => {
          for (const each of place.rows) if (each.members.includes(row)) this.framed(each);
          if (meant) this.found(place, meant);
        });
      }
      for (const [mark, colour] of [[marked, theme.accent], [hover, theme.ink], [chosen, theme.mark]]) {
        if (mark && mark.track) this.mark(mark, colour);
      }
      context.restore();
    }

    // Draw only where rows of a place show: what scrolls goes below pinned rows.
    clipped(place, draw) {
      const { context, view } = this;
      context.save();
      context.beginPath();
      context.rect(0, view.scroll + (place.pinned ? view.head : view.top), view.width, view.height);
      context.clip();
      draw();
      context.restore();
    }

    framed({ box, boxHeight }) {
      const { context, view, painter } = this;
      context.strokeStyle = painter.theme.mark;
      context.lineWidth = 2;
      context.strokeRect(view.gutter, box - 2, view.plotWidth, boxHeight + 4);
    }

    // Frames of what the search found: one a pixel where boxes are narrow.
    found(place, meant) {
      const { context } = this;
      const view = this.view.in(place.panel);
      context.strokeStyle = this.painter.theme.mark;
      context.lineWidth = 2;
      for (const { row, box, boxHeight } of place.rows) {
        const { compute } = row;
        let last = -9;
        for (let i = compute.from(view.start); i < compute.count && compute.start[i] < view.end; i++) {
          const x = view.x(compute.start[i]), width = view.x(compute.end[i]) - x;
          if (Math.max(x + width - last, width) < 1 || !meant(row, i, place.panel)) continue;
          context.strokeRect(x, box - 1, Math.max(width - 1, 1), boxHeight + 2);
          last = x + width;
        }
      }
    }

    mark(mark, colour) {
      const place = app.placeOf(mark);
      if (!place) return;
      const { panel } = mark;
      this.view.in(panel);
      if (mark.track.kind === "compute") {
        const { uses, makes } = panel.arrows(panel.number(mark.row.rank, mark.i));
        for (const m of [...uses, ...makes]) this.arrow(m, panel);
      } else if (mark.track.kind === "lane" && mark.track.items[mark.i].message !== undefined) {
        this.arrow(mark.track.items[mark.i].message, panel);
      }
      this.clipped(place.place, () => this.outline(place, mark, colour));
    }

    outline(place, { track, i }, colour) {
      const { context, view } = this;
      const [top, height] = view.lineOf(place.row, track);
      const x = view.x(track.start[i]);
      const width = Math.max(view.x(track.end[i]) - x - 1, 2);
      context.strokeStyle = this.painter.theme.ground;
      context.lineWidth = 4;
      context.strokeRect(x - 1, top - 1, width + 2, height + 2);
      context.strokeStyle = colour;
      context.lineWidth = 2;
      context.strokeRect(x - 1, top - 1, width + 2, height + 2);
    }

    // From the end of the action that makes a message to the start of the one that uses it, over the time under way.
    arrow(m, panel) {
      const { context, view } = this;
      const columns = panel.messages;
      if (columns.maker[m] < 0 || columns.user[m] < 0) return;
      const from = panel.place(columns.maker[m]), to = panel.place(columns.user[m]);
      const [source, target] = [from.row, to.row].map((rank) => (view.spots.get(panel).get(rank) || {}).row);
      if (!source || !target) return; // hidden
      const x0 = view.x(panel.rows[from.row].compute.end[from.i]), x1 = view.x(panel.rows[to.row].compute.start[to.i]);
      const y0 = source.box + source.boxHeight / 2, y1 = target.box + target.boxHeight / 2;
      const bend = Math.max(Math.abs(x1 - x0) / 2, 14);
      for (const [colour, width] of [[this.painter.theme.ground, 4.5], [this.painter.theme.ink, 1.7]]) {
        context.strokeStyle = context.fillStyle = colour;
        context.lineWidth = width;
        context.beginPath();
        context.moveTo(x0, y0);
        context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
        context.stroke();
        context.beginPath();
        context.arc(x0, y0, width * 1.4, 0, 7);
        context.fill();
        context.beginPath();
        context.moveTo(x1, y1);
        context.lineTo(x1 - 8, y1 - 4);
        context.lineTo(x1 - 8, y1 + 4);
        context.closePath();
        context.fill();
      }
    }
  }

  app.Marks = Marks;
})(stagewright);
