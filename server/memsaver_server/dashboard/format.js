// Formats figures and builds elements.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 1536 -> "1.50 KiB": three significant digits, so that columns stay narrow. */
export function size(bytes) {
  if (!bytes) return "0";
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 1023.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** As size, with a sign. */
export function difference(bytes) {
  return bytes > 0 ? `+${size(bytes)}` : size(bytes);
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(seconds < 0.00995 ? 2 : 1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function clock(epochSeconds) {
  return new Date(epochSeconds * 1e3).toLocaleTimeString([], { hour12: false });
}

export function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

const LONGEST = 48;

/** The tags' names, long ones cut; the panel "Tags" has each in full. */
export function tagList(tags) {
  return tags?.map((tag) => (tag.length > LONGEST ? `${tag.slice(0, LONGEST - 1)}…` : tag)).join(", ") ?? "all";
}

/** el("td", {class: "number"}, "12 MiB"): an element with attributes and children; text is never parsed as markup. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The buttons for what holds memory: both directions if only a part is released. `act(name, resume)` is their action. */
export function directions({ resident_bytes: resident, released_bytes: released }, name, focus, disabled, act) {
  const offered = [...(released > 0 ? [true] : []), ...(resident > 0 || !released ? [false] : [])];
  return offered.map((resume, number) =>
    el(
      "button",
      {
        type: "button",
        class: "small",
        "data-focus": number ? `${focus} ${number}` : focus,
        "aria-disabled": String(disabled),
        "aria-label": `${resume ? "Resume" : "Release"} ${name}`,
        onclick: (event) => {
          if (event.currentTarget.getAttribute("aria-disabled") !== "true") act(name, resume);
        },
      },
      resume ? "Resume" : "Release…",
    ),
  );
}
