// The panel "Operations": one row per operation; an open one shows its phases and their effect on memory.

import { clock, difference, duration, el, size, tagList } from "./format.js";

const COLUMNS = 6;
const PHASE_COLUMNS = { Phase: null, Time: "number", "In use before": "number wide", After: "number", Change: "number" };

/** Rows for `operations`, newest first; `open` has the ids of open rows, `toggle(id)` changes it, `cancel(id)` cancels. */
export function operationRows(operations, open, cancel, toggle) {
  return operations.flatMap((operation) => {
    const id = operation.operation_id;
    const isOpen = open.has(id);
    const row = el(
      "tr",
      { class: isOpen ? "open" : undefined },
      el(
        "th",
        { scope: "row" },
        el(
          "button",
          {
            type: "button",
            class: "fold",
            "aria-expanded": String(isOpen),
            "aria-controls": isOpen ? `phases-${id}` : undefined,
            "data-focus": `fold-${id}`,
            onclick: () => toggle(id),
          },
          operation.operation,
          el("span", { class: "unseen" }, ` ${id}, phases`),
        ),
      ),
      el("td", { class: "figures wide" }, clock(operation.started_at ?? operation.created_at)),
      el("td", { class: "tags wide" }, tagList(operation.tags)),
      el("td", {}, outcome(operation)),
      el("td", { class: "number" }, moved(operation)),
      el("td", { class: "number" }, operation.status === "queued" ? "" : duration(operation.seconds)),
    );
    return isOpen ? [row, details(operation, cancel)] : [row];
  });
}

function outcome({ status, phase, answer }) {
  if (status === "failed") return el("span", { class: "outcome bad" }, answer?.error?.type?.replaceAll("_", " ") ?? "failed");
  if (status === "running") return el("span", { class: "outcome busy" }, phase || "running");
  if (status === "cancelled") return el("span", { class: "outcome" }, "cancelled");
  if (status === "queued" || status === "prepared") return el("span", { class: "outcome busy" }, status);
  return el("span", { class: "outcome good" }, "done");
}

function moved({ answer, status }) {
  if (status !== "succeeded") return "";
  return difference(answer.resumed_bytes - answer.released_bytes);
}

function details(operation, cancel) {
  const devices = new Set(operation.phases.flatMap((phase) => phase.devices.map((device) => device.index)));
  const rows = operation.phases.flatMap((phase) =>
    phase.devices.map((device, number) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, number ? "" : phase.name, devices.size > 1 ? ` ${device.index}` : null),
        el("td", { class: "number" }, number ? "" : duration(phase.seconds)),
        el("td", { class: "number wide" }, size(device.used_before_bytes)),
        el("td", { class: "number" }, size(device.used_after_bytes)),
        el("td", { class: device.delta_bytes ? "number strong" : "number" }, difference(device.delta_bytes)),
        el("td", { class: "note" }, number ? "" : note(phase.details)),
      ),
    ),
  );
  const headings = Object.entries(PHASE_COLUMNS).map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
  headings.push(el("th", { scope: "col" }, el("span", { class: "unseen" }, "Copied")));
  return el(
    "tr",
    { class: "details", id: `phases-${operation.operation_id}` },
    el(
      "td",
      { colspan: COLUMNS },
      el("p", {}, operation.answer?.message ?? operation.status),
      operation.status === "queued" || operation.status === "prepared"
        ? el("button", { type: "button", class: "small", onclick: () => cancel(operation.operation_id) }, "Cancel")
        : null,
      rows.length
        ? el(
            "table",
            { class: "phases", "aria-label": `Phases of ${operation.operation} ${operation.operation_id}` },
            el("thead", {}, el("tr", {}, ...headings)),
            el("tbody", {}, ...rows),
          )
        : null,
      el(
        "p",
        { class: "quiet" },
        `${operation.operation_id} of ${tagList(operation.tags)}, requested by ${operation.client} at ${clock(operation.created_at)}`,
      ),
    ),
  );
}

function note(details) {
  const { copied_bytes: copied, gigabytes_per_second: rate, host_bytes: unpinned, kept_for_graphs: kept } = details;
  if (unpinned) return `unpinned ${size(unpinned)} of host memory`;
  if (kept) return "kept for captured graphs";
  if (!copied) return "";
  // The rate of a few kilobytes does not show the speed of the link.
  return rate && copied >= 1 << 20 ? `copied ${size(copied)}, ${rate.toFixed(1)} GB/s` : `copied ${size(copied)}`;
}
