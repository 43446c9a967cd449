// Device memory over time: a line for all processes, over bands for operations and their phases.

import { clock, duration, size, svg } from "./format.js";

const HEIGHT = 190;
const EDGE = { top: 20, right: 14, bottom: 22, left: 62 };
/** Width of a letter, pixels; a band too narrow for its name is not labelled. */
const LETTER = 6.2;
const STEPS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000];

/**
 * One device's chart. `show` draws it anew.
 *
 * The pointer or the arrow keys pick a moment, and what was in use then is written at the top.
 */
export class Chart {
  constructor(container) {
    this.container = container;
    this.picked = null;
    this.frame = svg("svg", { role: "img", tabindex: "0", height: HEIGHT, class: "chart" });
    this.frame.addEventListener("pointermove", (event) => this.pick(event.offsetX));
    this.frame.addEventListener("pointerleave", () => this.pick(null));
    this.frame.addEventListener("blur", () => this.pick(null));
    this.frame.addEventListener("keydown", (event) => this.step(event));
    container.append(this.frame);
  }

  /**
   * @param view {from, to, origin, points: [{at, used}], operations: [{operation, from, to, phases: [{name, from, to}]}],
   *   label} with times in seconds; with an origin, they are shown relative to it.
   */
  show(view) {
    this.view = view;
    const { from, to, points, operations, origin } = view;
    const width = Math.max(240, this.container.clientWidth);
    const right = width - EDGE.right;
    const bottom = HEIGHT - EDGE.bottom;
    const shown = within(points, from, to);
    const top = ceiling(Math.max(1, ...shown.map((point) => point.used)));
    const x = (at) => EDGE.left + ((at - from) / (to - from)) * (right - EDGE.left);
    const y = (used) => bottom - (used / top.max) * (bottom - EDGE.top);
    this.x = x;
    this.shown = shown;
    this.frame.setAttribute("width", width);
    this.frame.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.frame.setAttribute("aria-label", view.label);

    const parts = [];
    for (const operation of operations) {
      parts.push(...band(operation, { x, left: EDGE.left, right, bottom }));
    }
    for (let used = 0; used <= top.max + 1; used += top.step) {
      parts.push(
        svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: y(used), y2: y(used) }),
        text(EDGE.left - 8, y(used) + 4, size(used), "end"),
      );
    }
    for (const at of times(from, to, origin, width)) {
      const since = at - (origin ?? 0);
      parts.push(text(x(at), HEIGHT - 5, origin === undefined ? clock(at) : since > 0 ? duration(since) : "0", "middle"));
    }
    if (shown.length > 1) {
      const line = shown.map((point) => `${x(point.at).toFixed(1)},${y(point.used).toFixed(1)}`).join("L");
      const ends = [x(shown[0].at), x(shown.at(-1).at)].map((at) => at.toFixed(1));
      parts.push(
        svg("path", { class: "area", d: `M${ends[0]},${bottom}L${line}L${ends[1]},${bottom}Z` }),
        svg("path", { class: "line", d: `M${line}` }),
      );
    }
    this.cursor = svg("g", { class: "cursor" });
    this.frame.replaceChildren(...parts, this.cursor);
    this.y = y;
    this.mark();
  }

  pick(offset) {
    if (offset === null || !this.shown?.length) {
      this.picked = null;
    } else {
      const distance = (point) => Math.abs(this.x(point.at) - offset);
      this.picked = this.shown.reduce((near, point) => (distance(point) < distance(near) ? point : near)).at;
    }
    this.mark();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.shown?.length) return;
    event.preventDefault();
    const now = this.shown.findIndex((point) => point.at >= (this.picked ?? Infinity));
    const next = now < 0 ? this.shown.length - 1 : now + by;
    this.picked = this.shown[Math.min(Math.max(next, 0), this.shown.length - 1)].at;
    this.mark();
  }

  mark() {
    const point = this.picked === null ? null : this.shown.find((each) => each.at >= this.picked);
    if (!point) {
      this.cursor.replaceChildren();
      return;
    }
    const at = this.x(point.at);
    const { origin } = this.view;
    const when = origin === undefined ? clock(point.at) : duration(Math.max(0, point.at - origin));
    const width = Number(this.frame.getAttribute("width"));
    const side = at > width / 2 ? "end" : "start";
    this.cursor.replaceChildren(
      svg("line", { x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      svg("circle", { cx: at, cy: this.y(point.used), r: 3.5 }),
      text(at + (side === "end" ? -7 : 7), EDGE.top + 12, `${size(point.used)} at ${when}`, side),
    );
  }
}

function text(x, y, content, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, content);
}

/** An operation, and in it each phase that is wide enough to be seen, every second one a little darker. */
function band({ operation, from, to, phases }, { x, left, right, bottom }) {
  const start = Math.max(left, x(from));
  const end = Math.min(right, Math.max(x(to), x(from) + 3));
  if (end <= left || start >= right) return [];
  const rectangle = (x1, x2, kind) =>
    svg("rect", { class: kind, x: x1, width: Math.max(0, x2 - x1), y: EDGE.top, height: bottom - EDGE.top });
  const parts = [rectangle(start, end, `band ${operation}`)];
  let named = false;
  phases.forEach((phase, number) => {
    const [a, b] = [Math.max(left, x(phase.from)), Math.min(right, x(phase.to))];
    if (b - a < 1) return;
    if (number % 2) parts.push(rectangle(a, b, `phase ${operation}`));
    if (b - a > phase.name.length * LETTER) {
      parts.push(text((a + b) / 2, EDGE.top - 6, phase.name, "middle"));
      named = true;
    }
  });
  if (!named && end - start > operation.length * LETTER) {
    parts.push(text((start + end) / 2, EDGE.top - 6, operation, "middle"));
  }
  return parts;
}

/** The points to draw, with one on each side so that the line reaches the edges it crosses. */
function within(points, from, to) {
  let first = points.findIndex((point) => point.at >= from);
  if (first < 0) return points.length ? [{ at: from, used: points.at(-1).used }, { at: to, used: points.at(-1).used }] : [];
  const shown = points.slice(first).filter((point) => point.at <= to);
  if (first > 0) {
    const [before, after] = [points[first - 1], points[first]];
    const part = (from - before.at) / (after.at - before.at);
    shown.unshift({ at: from, used: before.used + part * (after.used - before.used) });
  }
  return shown;
}

/** A round upper end of the axis, in the unit that its labels have. */
function ceiling(most) {
  let unit = 1;
  while (most / unit >= 1024) unit *= 1024;
  const step = STEPS.find((each) => each * 4 * unit >= most) * unit;
  return { step, max: Math.ceil(most / step) * step };
}

function times(from, to, origin, width) {
  const least = (to - from) / Math.max(2, Math.floor(width / 100));
  const steps = origin === undefined ? [5, 10, 15, 30, 60, 120, 180, 300] : decades();
  const step = steps.find((each) => each >= least) ?? steps.at(-1);
  const base = origin ?? 0;
  const found = [];
  for (let n = Math.ceil((from - base) / step); base + n * step <= to; n += 1) {
    if (origin === undefined || n >= 0) found.push(base + n * step);
  }
  const margin = ((to - from) * 26) / width;
  return found.filter((at) => at >= from + margin * (origin === undefined ? 1 : 0) && at <= to - margin);
}

function decades() {
  const found = [];
  for (let power = 1e-5; power < 1e4; power *= 10) found.push(power, 2 * power, 5 * power);
  return found;
}
