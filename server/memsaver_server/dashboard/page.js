// Draws what the feed sends, and sends what the buttons request.

import { backupText } from "./backup.js";
import { Chart } from "./chart.js";
import { communicatorObstacles, communicatorRows } from "./communicators.js";
import { deviceView } from "./devices.js";
import { engineRows } from "./engines.js";
import { Refused, call, follow, key } from "./feed.js";
import { duration, el, size, tagList } from "./format.js";
import { cacheNow, cacheWould } from "./kv_cache.js";
import { operationRows } from "./operations.js";
import { rankRows } from "./ranks.js";
import { tagRows } from "./tags.js";
import { operationView, rangeView } from "./timeline.js";

const OPERATIONS = 30;
const KEPT_S = 900;

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

  past(data) {
    readings = data.readings.map((reading) => ({ at: reading.at, used: reading.used_bytes }));
  },

  operation(data) {
    const before = operations.get(data.operation_id);
    operations.set(data.operation_id, data);
    if (operations.size > OPERATIONS) {
      const oldest = [...operations.values()].reduce((a, b) => (a.created_at < b.created_at ? a : b));
      operations.delete(oldest.operation_id);
    }
    if (before?.status !== data.status && occupation) {
      // Show the running one in the chart; rows that the user has opened stay open.
      if (data.status === "running") chosen = data.operation_id;
      if (before && data.answer) $("said").textContent = data.answer.message;
    }
    drawProgress();
    drawOperations();
    drawCharts();
  },

  occupation(data) {
    occupation = data;
    skew = data.at - Date.now() / 1e3;
    if (data.devices.length && readings.at(-1)?.at !== data.at) {
      readings.push({ at: data.at, used: Object.fromEntries(data.devices.map((each) => [each.index, each.used_bytes])) });
      readings = readings.filter((reading) => reading.at > data.at - KEPT_S);
    }
    $("main").hidden = false;
    drawState();
    drawDevices();
    drawTags();
    drawCache();
    drawEngines();
    drawCommunicators();
    drawRanks();
    drawProgress();
    drawOperations();
    drawCharts();
  },
});

const drawn = new Map();

/** Replace the element's children by those of `build` if `data` has changed; keeps the focus. */
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

/** The process's state; `hibernated` and `prepared` count as states. */
function stateNow() {
  if (occupation?.prepared) return "prepared";
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
        ? "requests are accepted"
        : `requests are refused: ${reason}`;
    if (occupation.prepared) {
      const { operation, operation_id: id, client, lease_s: left } = occupation.prepared;
      $("admission").textContent += `; ${operation} ${id} of ${client} is prepared, ${Math.ceil(left)} s are left for its commit`;
    }
    $("admission").dataset.open = String(admits || !occupation.enabled);
  }
  const idle = connected && occupation?.enabled && !running();
  const any = (field) => Boolean(occupation?.tags.some((tag) => tag[field] > 0));
  allow($("release"), idle && any("resident_bytes"));
  allow($("hibernate"), idle && !occupation.hibernated && occupation.state !== "failed");
  allow($("resume"), idle && (any("released_bytes") || occupation.state === "released" || occupation.hibernated));
}

/** Allow or forbid a button's use. Unlike a disabled button, it keeps the focus. */
function allow(button, may) {
  button.disabled = false;
  button.setAttribute("aria-disabled", String(!may));
}

const may = (button) => button.getAttribute("aria-disabled") !== "true";

function drawDevices() {
  redraw($("devices"), occupation.devices, () => {
    if (!occupation.devices.length) return [el("p", { class: "quiet" }, "No device is in use.")];
    return occupation.devices.map((device) => deviceView(device, occupation));
  });
}

function drawTags() {
  const busy = !connected || Boolean(running());
  redraw($("tags"), [occupation.tags, busy], () =>
    tagRows(occupation.tags, busy, (tag, resume) => (resume ? send("resume", { tags: [tag] }) : confirmRelease([tag]))),
  );
  $("backup").textContent = backupText(occupation.host_backup);
}

/** The engines, if this is a fleet. */
function drawEngines() {
  const engines = occupation.engines ?? [];
  const busy = !connected || Boolean(running());
  $("engines-panel").hidden = !engines.length;
  $("by-operation").hidden = Boolean(engines.length); // the phases are those of each engine's own operation
  redraw($("engines"), [engines, busy], () =>
    engineRows(engines, busy, (engine, resume) =>
      resume ? send("resume", { selector: { names: [engine] } }) : confirmRelease(null, { engine }),
    ),
  );
}

/** The size that the slider asks for. */
const cacheWanted = () => Number($("kv-cache-size").value) * occupation.kv_cache.page_bytes;

/** The KV cache, if the engine can resize it. The slider stays where a person has put it. */
function drawCache() {
  const cache = occupation.kv_cache;
  $("kv-cache-panel").hidden = !cache;
  if (!cache) return;
  const slider = $("kv-cache-size");
  slider.max = cache.full_bytes / cache.page_bytes;
  if (!slider.dataset.moved) slider.value = cache.bytes / cache.page_bytes;
  const wanted = cacheWanted();
  slider.setAttribute("aria-valuetext", size(wanted));
  $("kv-cache-now").textContent = cacheNow(cache);
  $("kv-cache-would").textContent = cacheWould(cache, wanted);
  allow($("resize"), connected && occupation.state === "resident" && !running() && wanted !== cache.bytes);
}

$("kv-cache-size").addEventListener("input", (event) => {
  event.target.dataset.moved = "yes";
  drawCache();
});

/** NCCL's communicators, if there are any. */
function drawCommunicators() {
  const communicators = occupation.communicators ?? [];
  const shared = occupation.shared_by_ranks ?? [];
  $("communicators-panel").hidden = !communicators.length && !shared.length;
  redraw($("communicators"), communicators, () => communicatorRows(communicators));
  redraw($("obstacles"), [communicators, shared], () => communicatorObstacles(communicators, shared));
}

/** The processes of an engine, if it has several. */
function drawRanks() {
  const ranks = occupation.ranks ?? [];
  $("ranks-panel").hidden = ranks.length < 2;
  redraw($("ranks"), ranks, () => rankRows(ranks));
}

/** The engines of a fleet's operation, for a title; empty for an engine's. */
function onEngines({ engines }) {
  const names = Object.keys(engines ?? {});
  return names.length ? ` on ${names.join(", ")}` : "";
}

function drawProgress() {
  const operation = running();
  $("progress").hidden = !operation;
  if (!operation) return;
  const doing = { release: "Releasing", resume: "Resuming", resize: "Resizing" }[operation.operation];
  $("progress-title").textContent = `${doing} ${operation.tags ? tagList(operation.tags) : "all tags"}${onEngines(operation)}`;
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
  const isOpen = new Set(open.size ? open : list.slice(0, 1).map((latest) => latest.operation_id));
  redraw($("operations"), [list, [...isOpen]], () =>
    operationRows(list, isOpen, cancel, (id) => {
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
    const one = range === "operation" ? operationView(operations.get(chosen) ?? newestFirst()[0], now.index) : null;
    const view = one ?? rangeView(now, [...operations.values()], readings, Date.now() / 1e3 + skew, Number(range) || 300);
    const several = occupation.devices.length > 1 ? `${now.name}, ${now.index}: ` : "";
    caption.textContent = `${several}${view.caption}`;
    chart.show({ ...view, label: `${several}memory in use, ${view.caption}` });
  }
}

new ResizeObserver(() => drawCharts()).observe($("charts"));

$("range").addEventListener("change", (event) => {
  range = event.target.value;
  drawCharts();
});

const actions = {
  release: () => confirmRelease(null),
  hibernate: () => confirmRelease(null, { hibernate: true }),
  resume: () => send("resume", {}),
  resize: () => {
    const bytes = cacheWanted();
    delete $("kv-cache-size").dataset.moved;
    attempt("resize", "POST", "kv_cache", { bytes });
  },
  cancel: () => running() && cancel(running().operation_id),
};
for (const [id, act] of Object.entries(actions)) $(id).addEventListener("click", () => may($(id)) && act());

function confirmRelease(tags, { hibernate = false, engine = null } = {}) {
  const dialog = $("confirm");
  const what = tags ? tagList(tags) : engine ? `all memory of ${engine}` : "all memory";
  $("confirm-title").textContent = hibernate ? "Release all memory and hibernate?" : `Release ${what}?`;
  const all = (occupation.engines ?? []).map(({ name }) => name).join(", ");
  const released = engine || all ? ` It releases ${tagList(tags ?? occupation.tags.map((tag) => tag.tag))} on ${engine ?? all}.` : "";
  $("confirm-text").textContent =
    `${engine ?? occupation.engine} accepts no requests until it is resumed. ` +
    "Content that its tags keep is backed up first; the process stays alive." +
    released +
    (hibernate ? " Its device context is released last; calls to the device then block until it is resumed." : "");
  $("confirmed").textContent = hibernate ? "Hibernate" : "Release";
  dialog.returnValue = "cancel";
  dialog.onclose = () => {
    if (dialog.returnValue === "release") {
      const selector = engine ? { selector: { names: [engine] } } : {};
      send("release", { mode: $("mode").value, ...(tags ? { tags } : {}), ...(hibernate ? { hibernate } : {}), ...selector });
    }
  };
  dialog.showModal();
}

function send(operation, body) {
  return attempt(operation, "POST", `${operation}_memory_occupation`, body);
}

function cancel(id) {
  return attempt("cancel", "DELETE", `operations/${id}`);
}

async function attempt(what, method, path, body) {
  say("", "operation");
  try {
    await call(method, path, body);
  } catch (error) {
    const hint = error instanceof Refused ? " Reload the page to enter it." : "";
    say(`Could not ${what}: ${error.message}.${hint}`, "operation");
  }
}

const notices = new Map();

/** Show `text` until the next notice about the same subject. */
function say(text, about) {
  if (text) notices.set(about, text);
  else notices.delete(about);
  $("notice").hidden = notices.size === 0;
  $("notice").textContent = [...notices.values()].join(" ");
}
