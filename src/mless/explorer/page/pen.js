// One set of strokes for a canvas and for SVG, so that a copied picture is the one on the screen.

import { svg } from "./dom.js";
import { visible } from "./formats.js";
import { ink } from "./scales.js";

const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
const MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "Noto Sans Mono", monospace';

// How wide a text is on the screen.
const ruler = document.createElement("canvas").getContext("2d");
export function textWidth(words, { size = 12, weight = 400, mono = false } = {}) {
  ruler.font = `${weight} ${size}px ${mono ? MONO : SANS}`;
  return ruler.measureText(visible(String(words))).width;
}

// A text in lines that are no wider than this.
export function linesOf(words, width, font) {
  const lines = [];
  for (const word of words.split(" ")) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && textWidth(longer, font) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

// A picture that is copied stands alone, so its title is in it, above the drawing, and its legend ({element, height}) where it is not part
// of the drawing. `inside` is where the drawing goes.
const HEADING = { size: 13, weight: 600 };
export function titled(width, height, title, background, legend = null) {
  const lines = linesOf(title, width - 16, HEADING);
  const high = lines.length * 18 + 12;
  const top = high + (legend?.height ?? 0);
  const inside = svg("g", { transform: `translate(0 ${top})` });
  const all = height + top;
  const element = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: all, viewBox: `0 0 ${width} ${all}`, role: "img" }, svg("title", null, title),
    svg("rect", { width, height: all, fill: background }),
    lines.map((line, at) => svg("text", { x: 8, y: 20 + at * 18, "font-family": SANS, "font-size": HEADING.size, "font-weight": HEADING.weight, fill: ink("ink") }, line)),
    legend && svg("g", { transform: `translate(8 ${high})` }, legend.element), inside);
  return { element, inside, height: all };
}

// `live`: on the screen, where the place that is pointed at is marked. A copy has no such mark.
export class CanvasPen {
  live = true;

  constructor(canvas, width, height) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    this.to = canvas.getContext("2d");
    this.to.scale(ratio, ratio);
    this.to.clearRect(0, 0, width, height);
  }

  rect(x, y, width, height, fill) {
    this.to.fillStyle = fill;
    this.to.fillRect(x, y, width, height);
  }

  frame(x, y, width, height, stroke, thick = 2) {
    this.to.strokeStyle = stroke;
    this.to.lineWidth = thick;
    this.to.strokeRect(x, y, width, height);
  }

  line(points, stroke, thick = 1.5, dash = []) {
    this.to.strokeStyle = stroke;
    this.to.lineWidth = thick;
    this.to.setLineDash(dash);
    this.to.beginPath();
    let drawn = false;
    for (const point of points) {
      if (point === null) drawn = false;
      else {
        if (drawn) this.to.lineTo(...point);
        else this.to.moveTo(...point);
        drawn = true;
      }
    }
    this.to.stroke();
    this.to.setLineDash([]);
  }

  area(points, fill, opacity) {
    this.to.globalAlpha = opacity;
    this.to.fillStyle = fill;
    this.to.beginPath();
    points.forEach((point, at) => (at ? this.to.lineTo(...point) : this.to.moveTo(...point)));
    this.to.closePath();
    this.to.fill();
    this.to.globalAlpha = 1;
  }

  dot(x, y, radius, fill) {
    this.to.fillStyle = fill;
    this.to.beginPath();
    this.to.arc(x, y, radius, 0, 2 * Math.PI);
    this.to.fill();
  }

  text(x, y, words, { anchor = "start", size = 12, fill = "#000", weight = 400, mono = false, turn = 0 } = {}) {
    this.to.save();
    this.to.translate(x, y);
    this.to.rotate((turn * Math.PI) / 180);
    this.to.font = `${weight} ${size}px ${mono ? MONO : SANS}`;
    this.to.textAlign = { start: "left", middle: "center", end: "right" }[anchor];
    this.to.textBaseline = "alphabetic";
    this.to.fillStyle = fill;
    this.to.fillText(visible(String(words)), 0, 0);
    this.to.restore();
  }
}

export class SvgPen {
  live = false;

  constructor(width, height, title, background) {
    Object.assign(this, titled(width, height, title, background));
  }

  rect(x, y, width, height, fill) {
    this.inside.append(svg("rect", { x: r(x), y: r(y), width: r(width), height: r(height), fill }));
  }

  frame(x, y, width, height, stroke, thick = 2) {
    this.inside.append(svg("rect", { x: r(x), y: r(y), width: r(width), height: r(height), fill: "none", stroke, "stroke-width": thick }));
  }

  line(points, stroke, thick = 1.5, dash = []) {
    let path = "";
    let drawn = false;
    for (const point of points) {
      if (point === null) drawn = false;
      else {
        path += `${drawn ? "L" : "M"}${r(point[0])} ${r(point[1])}`;
        drawn = true;
      }
    }
    if (path) this.inside.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": thick, "stroke-dasharray": dash.length ? dash.join(" ") : null }));
  }

  area(points, fill, opacity) {
    if (points.length) this.inside.append(svg("path", { d: points.map(([x, y], at) => `${at ? "L" : "M"}${r(x)} ${r(y)}`).join("") + "Z", fill, "fill-opacity": opacity }));
  }

  dot(x, y, radius, fill) {
    this.inside.append(svg("circle", { cx: r(x), cy: r(y), r: radius, fill }));
  }

  text(x, y, words, { anchor = "start", size = 12, fill = "#000", weight = 400, mono = false, turn = 0 } = {}) {
    this.inside.append(svg("text", {
      x: r(x), y: r(y), "text-anchor": anchor, "font-size": size, "font-weight": weight, "font-family": mono ? MONO : SANS, fill,
      "xml:space": "preserve", transform: turn ? `rotate(${turn} ${r(x)} ${r(y)})` : null,
    }, words));
  }
}

const r = (value) => Math.round(value * 100) / 100;
