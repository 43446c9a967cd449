// What the chart "Over time" shows: a range of time up to now, or one operation.

import { clock, size, tagList } from "./format.js";

const LEAST_S = 30;

/** One operation's view of a device's memory, by phase; null if it has not started. */
export function operationView(operation, index) {
  if (!operation?.started_at) return null;
  const band = bandOf(operation);
  const margin = Math.max(1e-4, 0.08 * (band.to - band.from));
  const before = operation.phases[0]?.devices.find((each) => each.index === index)?.used_before_bytes;
  const points = pointsOf(index, [operation], []);
  if (points.length) {
    points.unshift({ at: band.from - margin, used: before });
    points.push({ at: band.to + margin, used: points.at(-1).used });
  }
  return {
    from: band.from - margin,
    to: band.to + margin,
    origin: band.from,
    points,
    operations: [band],
    caption: `${operation.operation} of ${tagList(operation.tags)} at ${clock(band.from)}, by phase`,
  };
}

/** The view of the last `seconds` before `now`, by the server's clock. */
export function rangeView(device, operations, readings, now, seconds) {
  const points = pointsOf(device.index, operations, readings);
  const to = Math.max(now, readings.at(-1)?.at ?? 0);
  // A server that has just started has no earlier readings.
  const from = Math.max(to - seconds, Math.min(readings[0]?.at ?? to, to - LEAST_S));
  const used = points.filter((point) => point.at >= from).map((point) => point.used);
  const extremes = used.length ? `, least ${size(Math.min(...used))}, most ${size(Math.max(...used))}` : "";
  const bands = operations.filter((each) => each.started_at).map(bandOf);
  return { from, to, points, operations: bands, caption: `in use now ${size(device.used_bytes)}${extremes}` };
}

function bandOf(operation) {
  const to = operation.finished_at ?? operation.started_at + operation.seconds;
  const phases = operation.phases.map((phase, number) => {
    const from = operation.phase_starts[number];
    return { name: phase.name, from, to: from + phase.seconds };
  });
  if (operation.phase) phases.push({ name: operation.phase, from: operation.phase_starts.at(-1), to });
  return { operation: operation.operation, from: operation.started_at, to, phases };
}

/** Memory in use over time: readings, and the start and end of each phase. */
function pointsOf(index, operations, readings) {
  const points = readings.map(({ at, used }) => ({ at, used: used[index] }));
  for (const operation of operations) {
    operation.phases.forEach((phase, number) => {
      const seen = phase.devices.find((each) => each.index === index);
      const from = operation.phase_starts[number];
      if (!seen || from === undefined) return;
      points.push({ at: from, used: seen.used_before_bytes }, { at: from + phase.seconds, used: seen.used_after_bytes });
    });
  }
  return points.filter((point) => point.used !== undefined).sort((a, b) => a.at - b.at);
}
