// The panel "Ranks".

import { el } from "./format.js";

/** One row per process of the engine. */
export function rankRows(ranks) {
  return ranks.map(({ rank, pid, alive, state, stopped }) => {
    const now = alive === false ? "dead" : stopped ? "stopped" : state;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, rank),
      el("td", {}, pid ?? "elsewhere"),
      el("td", {}, el("span", { class: "state small", "data-state": now }, now)),
    );
  });
}
