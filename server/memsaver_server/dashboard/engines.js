// The panel "Engines" of a fleet.

import { directions, el, size } from "./format.js";

/** One row per engine; `busy` disables its button, `act(name, resume)` is its action. */
export function engineRows(engines, busy, act) {
  return engines.map((engine) => {
    const buttons = directions(engine, engine.name, `engine-${engine.name}`, busy || !engine.alive, act);
    const state = engine.alive ? engine.state : "dead";
    const isOff = engine.wanted && engine.wanted !== "mixed" && engine.wanted !== engine.state;
    return el(
      "tr",
      {},
      el("th", { scope: "row", class: "one-line", title: `${engine.name} ${engine.url}` }, engine.name),
      el(
        "td",
        { title: engine.error },
        el("span", { class: "state small", "data-state": state }, state),
        isOff ? el("span", { class: "state small" }, `wanted ${engine.wanted}`) : null,
      ),
      el("td", { class: "wide" }, engine.model),
      el("td", { class: "wide" }, engine.host),
      el("td", { class: "number wide" }, engine.requests),
      el("td", { class: "number" }, size(engine.resident_bytes)),
      el("td", { class: "number wide" }, size(engine.released_bytes)),
      el("td", { class: "act" }, el("div", { class: "acts" }, ...buttons)),
    );
  });
}
