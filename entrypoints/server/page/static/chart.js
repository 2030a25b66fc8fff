// A line chart over the last minutes as SVG.

import { el, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;
const SPAN = 300; // most seconds that a chart shows
const STEP = 60; // a younger chart shows a multiple of these seconds
const QUIET = 20; // seconds without a value after which a line breaks

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Return the next round number (1, 2 or 5 times a power of ten) that is not below `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((edge) => edge >= value * 0.999999);
}

export class Chart {
  /**
   * title: heading. series: names of the lines, one or two. format: value -> text.
   * most: fixed upper end of the axis; null: a round number above the values.
   */
  constructor(title, series, format, most = null) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.most = most;
    this.points = []; // [time, value of each series or null]
    this.value = el("span", { class: "value" }, "–");
    this.top = el("span", { class: "axis" });
    this.from = el("span");
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": title,
    });
    for (const y of [0.5, HEIGHT / 2, HEIGHT - 0.5]) {
      this.picture.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    }
    this.area = svg("path", { class: "area" });
    this.lines = series.map((_, at) => svg("path", { class: `line line-${at}` }));
    this.picture.append(this.area, ...this.lines);
    const names = series.length > 1
      ? [el("p", { class: "legend" }, ...series.map((name, at) =>
          el("span", { class: `key-${at}` }, name)))]
      : [];
    this.element = el("figure", { class: "card chart" },
      el("figcaption", {}, el("span", {}, title), this.value),
      el("div", { class: "plot" }, this.top, this.picture),
      el("div", { class: "ends" }, this.from, ...names, el("span", {}, "now")));
  }

  /** Add the values of one time in seconds; null breaks a line. Without a call it stays as it is. */
  add(time, values) {
    this.points.push([time, ...values]);
    this.draw(time);
  }

  /** Draw the lines as of a time in seconds. */
  draw(now) {
    while (this.points.length && this.points[0][0] < now - SPAN) this.points.shift();
    const shown = this.points.flatMap((point) => point.slice(1)).filter((one) => one !== null);
    const highest = shown.length ? Math.max(...shown) : 0;
    const most = this.most ?? roundUp(highest);
    const age = this.points.length ? now - this.points[0][0] : 0;
    const span = Math.min(SPAN, Math.max(1, Math.ceil(age / STEP)) * STEP);
    const x = (time) => (WIDTH * (1 - (now - time) / span)).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / most)).toFixed(1);
    this.lines.forEach((line, at) => line.setAttribute("d", this.path(at, x, y, false)));
    this.area.setAttribute("d", this.path(0, x, y, true));
    const [time, ...last] = this.points.at(-1) ?? [0, ...this.series.map(() => null)];
    const texts = this.series.map((name, index) => {
      const old = last[index] === null || now - time > QUIET;
      const text = old ? "–" : this.format(last[index]);
      return this.series.length > 1 ? `${text} ${name}` : text;
    });
    setText(this.value, texts.join(", "));
    setText(this.top, this.format(most));
    setText(this.from, `${span / 60} min ago`);
    this.picture.setAttribute("aria-label",
      `${this.title}: now ${texts.join(", ")}, highest ${this.format(highest)} in the last minutes`);
  }

  path(at, x, y, closed) {
    const pieces = [];
    let open = null;
    const close = () => {
      if (closed && open !== null) pieces.push(`L${open.last} ${HEIGHT}L${open.first} ${HEIGHT}Z`);
      open = null;
    };
    for (const point of this.points) {
      const value = point[at + 1];
      if (value === null || (open !== null && point[0] - open.time > QUIET)) close();
      if (value === null) continue;
      const left = x(point[0]);
      pieces.push(open === null ? `M${left} ${y(value)}h0` : `L${left} ${y(value)}`);
      open = { first: open === null ? left : open.first, last: left, time: point[0] };
    }
    close();
    return pieces.join("");
  }
}
