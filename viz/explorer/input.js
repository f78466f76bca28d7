// Pointer and keyboard: what they do to the view and to what is hovered or chosen.
(function (app) {
  "use strict";

  const CLICK = 4; // pixels that a pointer may move in a click

  function pointer(canvas, view) {
    let drag = null;

    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };

    canvas.addEventListener("wheel", (event) => {
      const [x] = at(event);
      const pinches = event.ctrlKey || event.metaKey; // a pinch on a touchpad comes as ctrl and small steps
      if (x < view.gutter && !pinches) return; // over the names rows scroll
      event.preventDefault();
      const step = (event.deltaMode === 1 ? 30 : 1) * (pinches && Math.abs(event.deltaY) < 50 ? 6 : 1);
      const [across, along] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      if (Math.abs(across) > Math.abs(along) && !pinches) view.pan(across * step * view.pixel);
      else view.zoom(Math.exp(-along * step * 0.0016), view.in(null).seconds(Math.max(x, view.gutter)));
      app.changed();
    }, { passive: false });

    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = at(event);
      canvas.setPointerCapture(event.pointerId);
      const ranged = event.shiftKey || (y < view.head && y > 18);
      drag = { x, y, lastX: x, lastY: y, moved: false, kind: y <= 18 ? "overview" : ranged ? "range" : "pan" };
      if (drag.kind === "overview") overview(x);
    });

    const overview = (x) => {
      const middle = ((x - view.gutter) / view.plotWidth) * view.length;
      view.pan(middle - (view.start + view.end) / 2);
      app.changed();
    };

    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!drag) {
        app.hover(x, y);
        return;
      }
      if (Math.abs(x - drag.x) + Math.abs(y - drag.y) > CLICK) drag.moved = true;
      if (drag.kind === "overview") overview(x);
      else if (drag.moved && drag.kind === "range") app.select([drag.x, x].map((each) => view.in(null).seconds(each)).sort((a, b) => a - b));
      else if (drag.moved) {
        canvas.classList.add("dragging");
        view.pan((drag.lastX - x) * view.pixel);
        app.scroller.scrollTop += drag.lastY - y;
        app.hideTooltip();
        app.changed();
      }
      drag.lastX = x;
      drag.lastY = y;
    });

    const release = (event) => {
      if (!drag) return;
      const [x, y] = at(event);
      canvas.classList.remove("dragging");
      const hit = x < view.gutter ? view.hit(x, y) : null;
      if (!drag.moved && drag.kind === "pan") {
        if (hit) app.rows.menu(hit.place.panel, hit.row && app.rows.list(hit.place.panel).find(({ row }) => row === hit.row.row), x, y);
        else app.choose(app.find(x, y));
      }
      else if (!drag.moved && drag.kind === "range") app.measure(app.state.chosen, app.find(x, y));
      drag = null;
      app.changed();
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", () => {
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => drag || app.hover(null, null));
    canvas.addEventListener("dblclick", () => {
      view.set(0, view.length);
      app.changed();
    });
  }

  // [panel, place of a row] of all that are not hidden, from the top.
  const inSight = () => [...app.view.pins, ...app.view.panels].flatMap(({ panel, rows }) => rows.map((row) => [panel, row]));

  // The action next to the chosen one: `along` its program, or on the rank `across`.
  function next(mark, along, across) {
    const { panel, row, i } = mark;
    if (mark.track.kind !== "compute") return { panel, row, track: row.compute, i: Math.max(row.compute.from(mark.track.start[i]) - 1, 0) };
    if (along) {
      const to = i + along;
      return to >= 0 && to < mark.track.count ? { ...mark, i: to } : null;
    }
    const places = inSight().map(([each, { row: other }]) => ({ panel: each, row: other, track: other.compute })).filter(({ track }) => track.count);
    const here = places.findIndex((place) => place.track === mark.track);
    const there = places[here + across];
    if (!there) return null;
    const middle = app.view.in(panel).x((mark.track.start[i] + mark.track.end[i]) / 2);
    return { ...there, i: Math.max(there.track.at(app.view.in(there.panel).seconds(middle), Infinity), 0) };
  }

  // The first action in sight.
  function first(view) {
    for (const [panel, { row }] of inSight()) {
      const i = row.compute.from(view.in(panel).start);
      if (i < row.compute.count) return { panel, row, track: row.compute, i };
    }
    return null;
  }

  // The row that keys mean: that of the chosen action, or under the pointer.
  function meantRow(view) {
    const { chosen, pointer, pointerY } = app.state;
    if (chosen && app.placeOf(chosen)) return [chosen.panel, app.placeOf(chosen).row.row];
    const hit = pointer === null ? null : view.hit(pointer, pointerY);
    return hit && hit.row ? [hit.place.panel, hit.row.row] : null;
  }

  function keyboard(canvas, view) {
    const move = (event, along, across) => {
      const found = app.state.chosen ? next(app.state.chosen, along, across) : first(view);
      if (!found) return false;
      event.preventDefault();
      app.choose(found, { reveal: true, speak: true });
      return true;
    };

    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help-dialog").open) return;
      if (event.target !== canvas && event.target !== document.body) return;
      const chosen = app.state.chosen;
      const size = view.end - view.start;
      switch (event.key) {
        case "Tab": // leaves after the last action, and after Escape
          if (!app.state.left && event.target === canvas) move(event, event.shiftKey ? -1 : 1, 0);
          app.state.left = false;
          return;
        case "ArrowLeft": case "ArrowRight": {
          const side = event.key === "ArrowLeft" ? -1 : 1;
          if (chosen) move(event, side, 0);
          else view.pan(side * 0.15 * size);
          break;
        }
        case "ArrowUp": case "ArrowDown": {
          const side = event.key === "ArrowUp" ? -1 : 1;
          if (chosen) move(event, 0, side);
          else app.scroller.scrollTop += side * 60;
          break;
        }
        case "Home": view.pan(-view.length); break;
        case "End": view.pan(view.length); break;
        case "Enter": case " ": if (app.state.hover) app.choose(app.state.hover, { speak: true }); break;
        default: return;
      }
      event.preventDefault();
      app.changed();
    });

    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=range]), select, textarea")) return;
      if (document.getElementById("help-dialog").open) return;
      switch (event.key) {
        case "+": case "=": app.zoom(1.5); break;
        case "-": case "_": app.zoom(1 / 1.5); break;
        case "w": app.zoom(1.2); break;
        case "s": app.zoom(1 / 1.2); break;
        case "a": case "d": view.pan((event.key === "a" ? -0.1 : 0.1) * (view.in(null).end - view.start)); break;
        case "p": case "h": {
          const row = meantRow(view);
          if (!row) app.tell("Point at a row, or choose an action of it, and then press " + event.key + ".");
          else if (event.key === "p") app.rows.pin(...row);
          else app.rows.hide(...row);
          break;
        }
        case "e": app.editor.open(); break;
        case "H": app.rows.showAll(); break;
        case "0": view.set(0, view.length); break;
        case "f": app.focus(); break;
        case "x": app.mark(); break;
        case "/": app.search.focus(); break;
        case "Escape": app.choose(null); app.select(null); app.state.left = true; break;
        case "[": case "]": for (const exhibit of app.page.exhibits) app.chooseStep(exhibit, exhibit.chosen + (event.key === "[" ? -1 : 1)); break;
        case "t": app.otherTheme(); break;
        case "?": app.panels.help(); break;
        default: {
          const toggle = app.toggles.find((each) => each.key === event.key);
          if (!toggle || !toggle.there) return;
          toggle.flip();
        }
      }
      event.preventDefault();
      app.changed();
    });
  }

  app.input = { pointer, keyboard };
})(stagewright);
