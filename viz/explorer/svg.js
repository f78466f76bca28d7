// Vectors: what the painter and the marks ask of a canvas, written as SVG. Everything that draws takes a context, and this is one:
// the part of CanvasRenderingContext2D that is in use, and `hatch`.
(function (app) {
  "use strict";

  const STYLES = ["fillStyle", "strokeStyle", "lineWidth", "globalAlpha", "font", "textAlign", "textBaseline", "dash", "dx", "dy"];
  const ANCHORS = { left: "start", center: "middle", right: "end" };

  const round = (number) => String(Math.round(number * 100) / 100);
  const escaped = (text) => String(text).replace(/[&<>"]/g, (each) => "&#" + each.charCodeAt(0) + ";");
  const attributes = (given) => Object.entries(given).map(([name, value]) => ` ${name}="${typeof value === "number" ? round(value) : escaped(value)}"`).join("");

  class SvgContext {
    constructor(width, height) {
      this.width = width;
      this.height = height;
      this.parts = [];
      this.defined = new Map(); // key -> id of a pattern or clip
      this.definitions = [];
      this.saved = [];
      this.groups = 0; // open
      this.path = "";
      this.ruler = document.createElement("canvas").getContext("2d"); // measures texts
      Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "12px sans-serif", textAlign: "left", textBaseline: "middle", dash: [], dx: 0, dy: 0 });
    }

    // The picture as text.
    toString() {
      return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}">` +
        `<defs>${this.definitions.join("")}</defs>${this.parts.join("")}</svg>`;
    }

    element(name, given, inner = null) {
      this.parts.push(`<${name}${attributes(given)}${inner === null ? "/>" : `>${escaped(inner)}</${name}>`}`);
    }

    define(key, make) {
      if (!this.defined.has(key)) {
        const id = "d" + this.defined.size;
        this.defined.set(key, id);
        this.definitions.push(make(id));
      }
      return `url(#${this.defined.get(key)})`;
    }

    hatch(colour, stripe) {
      return this.define(colour + stripe, (id) => `<pattern id="${id}" width="6" height="6" patternUnits="userSpaceOnUse">` +
        `<rect width="6" height="6"${attributes(this.painted("fill", colour))}/><path d="M-1 1L1 -1M-1 7L7 -1M5 7L7 5" stroke-width="1.3"${attributes(this.painted("stroke", stripe))}/></pattern>`);
    }

    // A colour as attributes; rgba() is not known to all that read SVG.
    painted(name, colour) {
      const [, r, g, b, alpha] = colour.match(/^rgba\(([^,]+),([^,]+),([^,]+),([^)]+)\)$/) || [];
      const opacity = (alpha === undefined ? 1 : Number(alpha)) * this.globalAlpha;
      return { [name]: alpha === undefined ? colour : `rgb(${r},${g},${b})`, ...(opacity < 1 ? { [name + "-opacity"]: opacity } : {}) };
    }

    get stroked() {
      return { fill: "none", ...this.painted("stroke", this.strokeStyle), "stroke-width": this.lineWidth, ...(this.dash.length ? { "stroke-dasharray": this.dash.join(" ") } : {}) };
    }

    setLineDash(dash) { this.dash = dash; }
    clearRect() {}

    save() { this.saved.push([this.groups, ...STYLES.map((name) => this[name])]); }
    restore() {
      const [groups, ...values] = this.saved.pop();
      for (; this.groups > groups; this.groups--) this.parts.push("</g>");
      STYLES.forEach((name, at) => (this[name] = values[at]));
    }

    translate(x, y) {
      this.dx += x;
      this.dy += y;
    }

    clip() {
      const d = this.path;
      this.parts.push(`<g clip-path="${this.define("clip" + d, (id) => `<clipPath id="${id}"><path d="${d}"/></clipPath>`)}">`);
      this.groups++;
    }

    // --- paths ---

    point(x, y) { return round(x + this.dx) + " " + round(y + this.dy); }
    beginPath() { this.path = ""; }
    moveTo(x, y) { this.path += "M" + this.point(x, y); }
    lineTo(x, y) { this.path += (this.path ? "L" : "M") + this.point(x, y); }
    closePath() { this.path += "Z"; }
    bezierCurveTo(a, b, c, d, x, y) { this.path += "C" + this.point(a, b) + " " + this.point(c, d) + " " + this.point(x, y); }
    rect(x, y, width, height) { this.path += "M" + this.point(x, y) + "h" + round(width) + "v" + round(height) + "h" + round(-width) + "Z"; }

    // A whole circle.
    arc(x, y, radius) {
      const half = `a${round(radius)} ${round(radius)} 0 1 0 `;
      this.path += "M" + this.point(x - radius, y) + half + round(2 * radius) + " 0" + half + round(-2 * radius) + " 0";
    }

    fill() { if (this.path) this.element("path", { d: this.path, ...this.painted("fill", this.fillStyle) }); }
    stroke() { if (this.path) this.element("path", { d: this.path, ...this.stroked }); }

    // --- boxes, texts, pictures ---

    fillRect(x, y, width, height) {
      if (width > 0 && height > 0) this.element("rect", { x: x + this.dx, y: y + this.dy, width, height, ...this.painted("fill", this.fillStyle) });
    }

    strokeRect(x, y, width, height) {
      this.element("rect", { x: x + this.dx, y: y + this.dy, width, height, ...this.stroked });
    }

    measureText(text) {
      this.ruler.font = this.font;
      return this.ruler.measureText(text);
    }

    fillText(text, x, y, room = Infinity) {
      const [, weight, size, family] = this.font.match(/^(?:(\d+) )?([\d.]+)px (.+)$/);
      const tight = this.measureText(text).width > room ? { textLength: room, lengthAdjust: "spacingAndGlyphs" } : {};
      this.element("text", {
        x: x + this.dx, y: y + this.dy + (this.textBaseline === "middle" ? 0.35 * size : 0), "font-family": family, "font-size": size + "px", "font-weight": weight || 400,
        "text-anchor": ANCHORS[this.textAlign], ...this.painted("fill", this.fillStyle), ...tight,
      }, text);
    }

    // Of columns of pixels alone, where boxes are too many to be boxes.
    drawImage(canvas, sx, sy, sw, sh, x, y, width, height) {
      this.element("image", { x: x + this.dx, y: y + this.dy, width, height, preserveAspectRatio: "none", style: "image-rendering:pixelated", href: canvas.toDataURL() });
    }
  }

  app.SvgContext = SvgContext;
})(stagewright);
