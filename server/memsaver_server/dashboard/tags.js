// The panel "Tags".

import { colourOf } from "./devices.js";
import { directions, el, size } from "./format.js";

/** What the backups of a tag take, and its ratio to their content. */
function kept({ backed_up_bytes: content, kept_bytes: bytes }) {
  return content ? `${size(bytes)}, ${Math.round((100 * bytes) / content)} %` : "0";
}

/** One row per tag; `busy` disables its button, `act(tag, resume)` is its action. */
export function tagRows(tags, busy, act) {
  return tags.map((tag) => {
    const buttons = directions(tag, tag.tag, `tag-${tag.tag}`, busy || !tag.bytes, act);
    const swatch = el("i", { class: `swatch ${colourOf({ kind: "tag", name: tag.tag }, tags)}`, "aria-hidden": "true" });
    return el(
      "tr",
      {},
      el("th", { scope: "row", class: "one-line", title: tag.tag }, swatch, tag.tag),
      el(
        "td",
        {},
        el("span", { class: "state small", "data-state": tag.state }, tag.state),
        tag.content === "lost" ? el("span", { class: "state small", "data-state": "failed" }, "content lost") : null,
      ),
      el("td", { class: "wide" }, tag.restore),
      el("td", { class: "number wide" }, size(tag.bytes)),
      el("td", { class: "number" }, size(tag.resident_bytes + tag.retained_bytes)),
      el("td", { class: "number wide" }, size(tag.released_bytes)),
      el("td", { class: "number wide" }, size(tag.backed_up_bytes)),
      el("td", { class: "number wider" }, kept(tag)),
      el("td", { class: "act" }, el("div", { class: "acts" }, ...buttons)),
    );
  });
}
