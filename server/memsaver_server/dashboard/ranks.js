// The panel "Ranks".

import { el } from "./format.js";

/** One row per process of the engine. */
export function rankRows(ranks) {
  return ranks.map(({ rank, pid, alive, state }) => {
    const now = alive === false ? "dead" : state;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, rank),
      el("td", {}, pid ?? "elsewhere"),
      el("td", {}, el("span", { class: "state small", "data-state": now }, now)),
    );
  });
}
