// Puts what the feed tells on the page, and sends what the buttons ask for.

import { Chart } from "./chart.js";
import { Refused, follow, key, post } from "./feed.js";
import { clock, duration, el, percent, size, tagList } from "./format.js";
import { operationRows } from "./operations.js";

const KNOWN_TAGS = ["weights", "kv_cache", "cuda_graph", "workspace"];
const COLOURS = 4;
const OPERATIONS = 30;
const KEPT_S = 900;
const LEAST_S = 30;

const $ = (id) => document.getElementById(id);

let occupation = null;
let readings = []; // {at, used: {device index: bytes}}
let operations = new Map();
let open = new Set();
let chosen = null; // the operation that the chart shows alone
let range = "300";
let connected = false;
let skew = 0; // the server's clock minus ours, seconds
const charts = new Map();

// -- the feed ----------------------------------------------------------------------------------------------------------

follow("dashboard/feed", {
  connected(is, why) {
    connected = is;
    $("unlock").hidden = true;
    if (is) {
      operations = new Map();
      say("", "connection");
    } else {
      say(`Not connected: ${why}. Trying again.`, "connection");
    }
    drawState();
  },

  refused() {
    const wrong = Boolean(key.get());
    key.forget();
    connected = false;
    $("main").hidden = true;
    $("unlock").hidden = false;
    say(wrong ? "That is not the key of this server." : "", "key");
    drawState();
    $("key").focus();
    return new Promise((resolve) => {
      $("unlock").onsubmit = (event) => {
        event.preventDefault();
        key.set($("key").value.trim());
        $("key").value = "";
        say("", "key");
        resolve();
      };
    });
  },

  past(told) {
    readings = told.readings.map((reading) => ({ at: reading.at, used: reading.used_bytes }));
  },

  operation(told) {
    const before = operations.get(told.operation_id);
    operations.set(told.operation_id, told);
    if (operations.size > OPERATIONS) {
      const oldest = [...operations.values()].reduce((a, b) => (a.created_at < b.created_at ? a : b));
      operations.delete(oldest.operation_id);
    }
    if (before?.status !== told.status && occupation) {
      // The one at work is what an operator wants to see; what they opened themselves stays open.
      if (told.status === "running") chosen = told.operation_id;
      if (before && told.answer) announce(told.answer.message);
    }
    drawProgress();
    drawOperations();
    drawCharts();
  },

  occupation(told) {
    occupation = told;
    skew = told.at - Date.now() / 1e3;
    if (told.devices.length && readings.at(-1)?.at !== told.at) {
      readings.push({ at: told.at, used: Object.fromEntries(told.devices.map((each) => [each.index, each.used_bytes])) });
      readings = readings.filter((reading) => reading.at > told.at - KEPT_S);
    }
    $("main").hidden = false;
    drawState();
    drawDevices();
    drawTags();
    drawProgress();
    drawOperations();
    drawCharts();
  },
});

// -- drawing -----------------------------------------------------------------------------------------------------------

const drawn = new Map();

/** Put what `build` returns into the element, if `data` has changed; the focus stays where it was. */
function redraw(element, data, build) {
  const text = JSON.stringify(data);
  if (drawn.get(element) === text) return;
  drawn.set(element, text);
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  element.replaceChildren(...build());
  if (focused) element.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

function running() {
  return [...operations.values()].find((operation) => operation.status === "running");
}

function newestFirst() {
  return [...operations.values()].sort((a, b) => b.created_at - a.created_at);
}

/** The process's state; one that is hibernated has everything else away, too. */
function stateNow() {
  return occupation?.hibernated && occupation.state === "released" ? "hibernated" : occupation?.state;
}

function drawState() {
  const state = connected ? (stateNow() ?? "connecting") : "not connected";
  $("state").textContent = state;
  $("state").dataset.state = connected ? state : "unknown";
  if (occupation) {
    $("engine").textContent = occupation.engine;
    document.title = `${state} · ${occupation.engine} · memsaver`;
    const { open: admits, reason } = occupation.admission;
    $("admission").textContent = !occupation.enabled
      ? "the saver is disabled in this process"
      : admits
        ? "requests are taken"
        : `requests are refused: ${reason}`;
    $("admission").title = reason;
  }
  const idle = connected && occupation?.enabled && !running();
  const any = (field) => Boolean(occupation?.tags.some((tag) => tag[field] > 0));
  allow($("release"), idle && any("resident_bytes"));
  allow($("hibernate"), idle && !occupation.hibernated && occupation.state !== "failed");
  allow($("resume"), idle && (any("released_bytes") || occupation.state === "released" || occupation.hibernated));
}

/** A button that may not be used keeps the focus, unlike a disabled one. */
function allow(button, may) {
  button.disabled = false;
  button.setAttribute("aria-disabled", String(!may));
}

const may = (button) => button.getAttribute("aria-disabled") !== "true";

function drawDevices() {
  redraw($("devices"), occupation.devices, () => {
    if (!occupation.devices.length) return [el("p", { class: "quiet" }, "No device is in use.")];
    return occupation.devices.map(device);
  });
}

function device(now) {
  const held = now.sources.map((source) => ({ ...source, colour: colourOf(source) }));
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
      el("th", { scope: "row" }, el("i", { class: `swatch ${colour}`, "aria-hidden": "true" }), name),
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
      el("span", { class: "quiet name" }, `${now.name}${occupation.devices.length > 1 ? `, ${now.index}` : ""}`),
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

function colourOf({ kind, name }) {
  if (kind !== "tag") return `of-${kind}`;
  const known = KNOWN_TAGS.indexOf(name);
  if (known >= 0) return `tag-${known}`;
  const others = occupation.tags.map((tag) => tag.tag).filter((tag) => !KNOWN_TAGS.includes(tag));
  return `tag-${KNOWN_TAGS.length + (Math.max(0, others.indexOf(name)) % COLOURS)}`;
}

function drawTags() {
  const busy = !connected || Boolean(running());
  redraw($("tags"), [occupation.tags, busy], () =>
    occupation.tags.map((tag) => {
      const away = tag.released_bytes > 0;
      const act = el(
        "button",
        {
          type: "button",
          class: "small",
          "data-focus": `tag-${tag.tag}`,
          "aria-disabled": String(busy || !tag.bytes),
          "aria-label": `${away ? "Resume" : "Release"} ${tag.tag}`,
          onclick: (event) => {
            if (!may(event.currentTarget)) return;
            if (away) send("resume", { tags: [tag.tag] });
            else confirmRelease([tag.tag]);
          },
        },
        away ? "Resume" : "Release…",
      );
      return el(
        "tr",
        {},
        el(
          "th",
          { scope: "row" },
          el("i", { class: `swatch ${colourOf({ kind: "tag", name: tag.tag })}`, "aria-hidden": "true" }),
          tag.tag,
        ),
        el("td", {}, el("span", { class: "state small", "data-state": tag.state }, tag.state)),
        el("td", { class: "wide" }, tag.restore),
        el("td", { class: "number wide" }, size(tag.bytes)),
        el("td", { class: "number" }, size(tag.resident_bytes + tag.retained_bytes)),
        el("td", { class: "number wide" }, size(tag.released_bytes)),
        el("td", { class: "number wide" }, size(tag.backed_up_bytes)),
        el("td", { class: "act" }, act),
      );
    }),
  );
  const { bytes, file_bytes: inFiles, capacity_bytes: ready, limit_bytes: limit } = occupation.host_backup;
  $("backup").textContent =
    `Backups: ${size(bytes - inFiles)} in host memory (${size(ready)} pinned, at most ${size(limit)})` +
    (inFiles ? `, ${size(inFiles)} in files.` : ".");
}

function drawProgress() {
  const operation = running();
  $("progress").hidden = !operation;
  if (!operation) return;
  const doing = operation.operation === "release" ? "Releasing" : "Resuming";
  $("progress-title").textContent = `${doing} ${operation.tags ? tagList(operation.tags) : "all tags"}`;
  const now = operation.progress;
  const parts = [operation.phase || "starting", duration(operation.seconds)];
  if (now?.total_bytes) {
    $("bar").max = now.total_bytes;
    $("bar").value = now.done_bytes;
    parts.push(`${size(now.done_bytes)} of ${size(now.total_bytes)}`, `${now.gb_per_s.toFixed(1)} GB/s`);
    if (now.seconds_left !== null) parts.push(`${duration(now.seconds_left)} left`);
  } else {
    $("bar").removeAttribute("value");
  }
  $("progress-text").textContent = parts.join("  ·  ");
}

function drawOperations() {
  const list = newestFirst();
  $("no-operations").hidden = list.length > 0;
  const shownOpen = new Set(open);
  if (!shownOpen.size && list.length) shownOpen.add(`latest-${list[0].operation_id}`);
  const isOpen = new Set([...shownOpen].map((id) => id.replace(/^latest-/, "")));
  redraw($("operations"), [list, [...isOpen]], () =>
    operationRows(list, isOpen, (id) => {
      open = new Set(isOpen);
      if (open.delete(id)) {
        open.add("none");
      } else {
        open.delete("none");
        open.add(id);
        chosen = id;
      }
      drawOperations();
      drawCharts();
    }),
  );
}

// -- the charts --------------------------------------------------------------------------------------------------------

function drawCharts() {
  if (!occupation) return;
  for (const [index, { box }] of charts) {
    if (!occupation.devices.some((each) => each.index === index)) {
      box.remove();
      charts.delete(index);
    }
  }
  for (const now of occupation.devices) {
    if (!charts.has(now.index)) {
      const box = el("figure", {});
      $("charts").append(box);
      charts.set(now.index, { box, chart: new Chart(box), caption: box.appendChild(el("figcaption", { class: "quiet" })) });
    }
    const { chart, caption } = charts.get(now.index);
    const view = viewOf(now);
    const several = occupation.devices.length > 1 ? `${now.name}, ${now.index}: ` : "";
    caption.textContent = `${several}${view.caption}`;
    chart.show({ ...view, label: `${several}memory in use, ${view.caption}` });
  }
}

function viewOf(now) {
  const points = pointsOf(now.index);
  const bands = [...operations.values()].filter((each) => each.started_at).map(bandOf);
  const one = range === "operation" ? (operations.get(chosen) ?? newestFirst()[0]) : null;
  if (one?.started_at) {
    const alone = bandOf(one);
    const margin = Math.max(1e-4, 0.08 * (alone.to - alone.from));
    const before = one.phases[0]?.devices.find((each) => each.index === now.index)?.used_before_bytes;
    const own = pointsOf(now.index, [one], false);
    if (own.length) {
      own.unshift({ at: alone.from - margin, used: before });
      own.push({ at: alone.to + margin, used: own.at(-1).used });
    }
    return {
      from: alone.from - margin,
      to: alone.to + margin,
      origin: alone.from,
      points: own,
      operations: [alone],
      caption: `${one.operation} of ${tagList(one.tags)} at ${clock(alone.from)}, by phase`,
    };
  }
  const to = Math.max(Date.now() / 1e3 + skew, readings.at(-1)?.at ?? 0);
  // A server that started a moment ago has no more past than this.
  const from = Math.max(to - (Number(range) || 300), Math.min(readings[0]?.at ?? to, to - LEAST_S));
  const used = points.filter((point) => point.at >= from).map((point) => point.used);
  const caption = used.length
    ? `in use now ${size(now.used_bytes)}, least ${size(Math.min(...used))}, most ${size(Math.max(...used))}`
    : `in use now ${size(now.used_bytes)}`;
  return { from, to, points, operations: bands, caption };
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

/** What was in use when: readings, and around each phase what it found and left. */
function pointsOf(index, of = operations.values(), withReadings = true) {
  const points = withReadings ? readings.map(({ at, used }) => ({ at, used: used[index] })) : [];
  for (const operation of of) {
    operation.phases.forEach((phase, number) => {
      const seen = phase.devices.find((each) => each.index === index);
      const from = operation.phase_starts[number];
      if (!seen || from === undefined) return;
      points.push({ at: from, used: seen.used_before_bytes }, { at: from + phase.seconds, used: seen.used_after_bytes });
    });
  }
  return points.filter((point) => point.used !== undefined).sort((a, b) => a.at - b.at);
}

new ResizeObserver(() => drawCharts()).observe($("charts"));

$("range").addEventListener("change", (event) => {
  range = event.target.value;
  drawCharts();
});

// -- what is asked for -------------------------------------------------------------------------------------------------

$("release").addEventListener("click", () => {
  if (may($("release"))) confirmRelease(null);
});
$("hibernate").addEventListener("click", () => {
  if (may($("hibernate"))) confirmRelease(null, { hibernate: true });
});
$("resume").addEventListener("click", () => {
  if (may($("resume"))) send("resume", {});
});

function confirmRelease(tags, { hibernate = false } = {}) {
  const dialog = $("confirm");
  const what = tags ? tagList(tags) : "all memory";
  $("confirm-title").textContent = hibernate ? "Release all memory and hibernate?" : `Release ${what}?`;
  $("confirm-text").textContent =
    `${occupation.engine} takes no requests until it is resumed. ` +
    "What its tags keep is backed up first; the process stays alive." +
    (hibernate ? " Last of all its device context goes, too; whatever it asks of the device then waits." : "");
  $("confirmed").textContent = hibernate ? "Hibernate" : "Release";
  dialog.returnValue = "cancel";
  dialog.onclose = () => {
    if (dialog.returnValue === "release") {
      send("release", { mode: $("mode").value, ...(tags ? { tags } : {}), ...(hibernate ? { hibernate } : {}) });
    }
  };
  dialog.showModal();
}

async function send(operation, body) {
  say("", "operation");
  try {
    await post(`${operation}_memory_occupation`, body);
  } catch (error) {
    const hint = error instanceof Refused ? " Reload the page to enter it." : "";
    say(`Could not ${operation}: ${error.message}.${hint}`, "operation");
  }
}

const notices = new Map();

/** Show `text` until the same `about` has other news. */
function say(text, about) {
  if (text) notices.set(about, text);
  else notices.delete(about);
  $("notice").hidden = notices.size === 0;
  $("notice").textContent = [...notices.values()].join(" ");
}

function announce(text) {
  $("said").textContent = text;
}
