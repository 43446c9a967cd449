// The panel "Communicators".

import { el, size } from "./format.js";

/** One row per NCCL communicator, with what all of its ranks here hold. */
export function communicatorRows(communicators) {
  return [...new Set(communicators.map(({ name }) => name))].map((name) => {
    const ranks = communicators.filter((each) => each.name === name);
    const sum = (field) => size(ranks.reduce((bytes, each) => bytes + each[field], 0));
    return el(
      "tr",
      {},
      el("th", { scope: "row", class: "one-line", title: name }, name),
      el("td", { class: "number wide" }, ranks[0].ranks),
      el("td", { class: "number" }, sum("suspendable_bytes")),
      el("td", { class: "number wide" }, sum("suspended_bytes")),
      el("td", { class: "number" }, sum("persistent_bytes")),
    );
  });
}

/** Why some cannot be suspended, what else ranks share, and what to do. */
export function communicatorObstacles(communicators, shared) {
  const reasons = communicators.filter(({ obstacle }) => obstacle).map(({ name, obstacle }) => `${name} stays: ${obstacle}`);
  return [...new Set(reasons), ...shared.map((each) => `stays: ${each}`)].map((reason) => el("p", { class: "quiet" }, reason));
}
