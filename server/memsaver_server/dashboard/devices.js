// The panel "Device memory now".

import { el, percent, size } from "./format.js";

const KNOWN_TAGS = ["weights", "kv_cache", "cuda_graph", "workspace"];
const COLOURS = 4;

/** The current memory of one device: a bar and a table of its consumers. */
export function deviceView(now, { tags, devices }) {
  const held = now.sources.map((source) => ({ ...source, colour: colourOf(source, tags) }));
  const bar = el("div", { class: "stack", role: "img", "aria-label": barLabel(now) });
  for (const source of held.filter((each) => each.bytes > 0)) {
    const part = el("i", { class: source.colour, title: `${source.name}: ${size(source.bytes)}` });
    part.style.flexGrow = String(source.bytes / now.total_bytes);
    bar.append(part);
  }
  const free = el("i", { class: "free", title: `free: ${size(now.free_bytes)}` });
  free.style.flexGrow = String(now.free_bytes / now.total_bytes);
  bar.append(free);
  const row = (colour, name, bytes) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "clamped", title: name }, el("i", { class: `swatch ${colour}`, "aria-hidden": "true" }), name),
      el("td", { class: "number" }, size(bytes)),
      el("td", { class: "number quiet" }, percent(bytes, now.total_bytes)),
    );
  return el(
    "article",
    { class: "device", "data-device": now.index, "data-used": now.used_bytes },
    el(
      "p",
      { class: "total" },
      el("strong", {}, size(now.used_bytes)),
      el("span", {}, ` of ${size(now.total_bytes)} in use`),
      el("span", { class: "quiet name" }, `${now.name}${devices.length > 1 ? `, ${now.index}` : ""}`),
    ),
    bar,
    el(
      "table",
      { class: "sources", "aria-label": `What holds the memory of ${now.name}` },
      el("tbody", {}, ...held.map((each) => row(each.colour, each.name, each.bytes)), row("free", "free", now.free_bytes)),
    ),
  );
}

function barLabel(now) {
  const parts = now.sources.filter((each) => each.bytes > 0).map((each) => `${each.name} ${size(each.bytes)}`);
  return `${size(now.used_bytes)} of ${size(now.total_bytes)} in use: ${parts.join(", ") || "nothing"}`;
}

/** The class of a consumer's colour. Tags that are not well known share four colours. */
export function colourOf({ kind, name }, tags) {
  if (kind !== "tag") return `of-${kind}`;
  const known = KNOWN_TAGS.indexOf(name);
  if (known >= 0) return `tag-${known}`;
  const others = tags.map((tag) => tag.tag).filter((tag) => !KNOWN_TAGS.includes(tag));
  return `tag-${KNOWN_TAGS.length + (Math.max(0, others.indexOf(name)) % COLOURS)}`;
}
