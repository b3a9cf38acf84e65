// The page of GET /: reads the control API, changes nothing. No library, nothing from elsewhere.
"use strict";

const STATES = ["owned", "shared", "pinned", "cached", "exact", "draining", "reserved", "free"];
const MEANING = {
  owned: "one sequence has it", shared: "several have it", pinned: "a pinned sequence has it: stays", cached: "published, nobody has it: goes first when room is short",
  exact: "newest rows, uncompressed", draining: "given back, a batch still uses it", reserved: "promised to a session, empty",
  free: "empty",
};
const KEPT_MS = 600000; // of samples
const CELLS_MAX = 512;  // of a block map
const $ = (id) => document.getElementById(id);

let token = sessionStorage.getItem("tqkv_token") || "";
let samples = []; // {at_ms, states, requests, rows_in, rows_out, p50, p99}
let before = null; // {at_ms, metrics} of the last round
let info = null;
let isPaused = false, timer = 0, sort = { key: "n_tokens", down: true };

// ---- text ----

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return (i === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + units[i];
}
function count(n) {
  if (n < 10 && n !== Math.round(n)) return n.toFixed(1);
  if (n < 1e4) return String(Math.round(n));
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (n >= size) return (n / size >= 100 ? Math.round(n / size) : (n / size).toFixed(1)) + " " + unit;
  return String(n);
}
function seconds(s) {
  if (s === null) return "–";
  if (s < 1e-3) return Math.round(s * 1e6) + " µs";
  if (s < 1) return Number((s * 1e3).toPrecision(3)) + " ms";
  if (s < 120) return Number(s.toPrecision(3)) + " s";
  if (s < 7200) return Math.round(s / 60) + " min";
  return s < 172800 ? (s / 3600).toFixed(1) + " h" : Math.round(s / 86400) + " days";
}
const share = (part, whole) => (whole > 0 ? (100 * part) / whole : 0);
const several = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
function percent(part, whole) {
  const p = share(part, whole);
  return (p > 0 && p < 1 ? p.toFixed(1) : Math.round(p)) + " %";
}

// ---- making elements: text goes in as text, never as markup ----

function el(name, attributes = {}, ...children) {
  const svg = ["path", "line", "text"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- asking ----

class Denied extends Error {}

async function get(path) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
  if ([401, 403, 429].includes(answer.status)) throw new Denied((await answer.json()).detail);
  return answer;
}
async function getJson(path) {
  const answer = await get(path);
  if (!answer.ok) throw new Error(`${path}: HTTP ${answer.status}`);
  return answer.json();
}

// Prometheus text to a map from the whole name, labels included, to a number.
function readMetrics(text) {
  const map = new Map();
  for (const line of text.split("\n")) {
    const gap = line.lastIndexOf(" ");
    if (gap > 0 && line[0] !== "#") map.set(line.slice(0, gap), Number(line.slice(gap + 1)));
  }
  return map;
}
const grown = (now, old, name) => Math.max(0, (now.get(name) || 0) - (old.get(name) || 0));

// The upper edge of the bucket that holds the share p of what came since the last round; null: nothing came.
function quantile(now, old, name, p) {
  const edges = [];
  for (const key of now.keys())
    if (key.startsWith(name + "_bucket{")) {
      const le = key.match(/le="([^"]+)"/)[1];
      edges.push([le === "+Inf" ? Infinity : Number(le), grown(now, old, key)]);
    }
  edges.sort((a, b) => a[0] - b[0]);
  const total = edges.length ? edges[edges.length - 1][1] : 0;
  if (total === 0) return null;
  const found = edges.findIndex(([, n]) => n >= p * total);
  return edges[found][0] === Infinity ? edges[Math.max(0, found - 1)][0] : edges[found][0];
}

// ---- drawing ----

function drawHealth(state, text) {
  $("health").dataset.state = state;
  const shown = $("health").querySelector(".text");
  if (shown.textContent !== text) shown.textContent = text;
}

function drawTiles(occupancy, rates) {
  const { totals } = occupancy, { blocks, memory } = totals;
  const used = blocks.total - blocks.free - blocks.reserved;
  const tiles = [
    ["Blocks used", percent(used, blocks.total), `${count(used)} of ${count(blocks.total)}`],
    ["Tokens held", count(memory.n_tokens), `${several(occupancy.totals.n_sequences, "sequence")}, ${several(occupancy.totals.n_sessions, "session")}`],
    ["In blocks", bytes(totals.used_bytes), `shared rows once; as bf16 ${bytes(memory.dense_equivalent_bytes)}`],
    ["Compression", totals.effective_compression > 0 ? totals.effective_compression.toFixed(2) + "×" : "–",
      memory.compression > 0 ? `bf16 over blocks; of rows alone ${memory.compression.toFixed(2)}×` : "bf16 over blocks"],
    ["Requests", rates ? count(rates.requests) + "/s" : "–", rates ? `p50 ${seconds(rates.p50)}, p99 ${seconds(rates.p99)}` : ""],
    ["Rejected", rates ? count(rates.rejected) + "/s" : "–", rates ? `${count(rates.rejectedTotal)} since start` : ""],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), el("small", {}, note))));
}

// Shares of the states in whole cells: largest remainders, and a state that exists gets a cell where there is one to give.
function cells(blocks, n) {
  const parts = STATES.map((state) => ({ state, exact: (n * stateCount(blocks, state)) / blocks.total }));
  for (const part of parts) part.n = part.exact > 0 ? Math.max(1, Math.floor(part.exact)) : 0;
  let left = n - parts.reduce((sum, part) => sum + part.n, 0);
  const byRest = [...parts].filter((part) => part.exact > 0).sort((a, b) => (b.exact - b.n) - (a.exact - a.n));
  for (let i = 0; left > 0 && byRest.length; i = (i + 1) % byRest.length, left--) byRest[i].n++;
  for (; left < 0; left++) parts.reduce((a, b) => (b.n > a.n ? b : a)).n--;
  return parts;
}
// The states of the control API are disjoint and add up to total. A block that only a published prefix has is "owned" there.
const stateCount = (blocks, state) => (state === "owned" ? blocks.owned - (blocks.idle || 0) : state === "cached" ? blocks.idle || 0 :
  blocks[state] || 0);
// Ring blocks of an exact window: they are what they hold.
const asExact = (blocks) => ({ ...blocks, owned: 0, shared: 0, pinned: 0, draining: 0, idle: 0,
  exact: blocks.owned + blocks.shared + blocks.pinned + blocks.draining });
// Maps of a pool: [what it is called, blocks, bytes of one].
function mapsOf(pool) {
  const maps = pool.groups.map((group, idx) => [pool.groups.length > 1 ? `layer group ${idx}` : "", group.blocks, group.block_bytes]);
  if (pool.exact_window) maps.push(["exact window", asExact(pool.exact_window.blocks), pool.exact_window.block_bytes]);
  return maps;
}

function drawMap(blocks, label) {
  const n = Math.min(CELLS_MAX, blocks.total);
  const map = el("div", { class: "map", role: "img" });
  const told = [];
  for (const part of cells(blocks, n)) {
    const exact = stateCount(blocks, part.state);
    if (exact > 0) told.push(`${exact} ${part.state}`);
    for (let i = 0; i < part.n; i++)
      map.append(el("i", { class: part.state, title: `${part.state}: ${exact} blocks (${percent(exact, blocks.total)})` }));
  }
  map.setAttribute("aria-label", `${label}: ${told.join(", ")} of ${blocks.total} blocks`);
  return map;
}

function drawPools(occupancy, pools) {
  const byName = new Map(pools.pools.map((pool) => [pool.name, pool]));
  const nodes = occupancy.pools.map((pool) => {
    const made = byName.get(pool.name);
    const shape = made ? `${several(made.layers, "layer")}, ${several(made.kv_heads, "KV head")} × ${made.k_head_dim}` +
      (made.v_head_dim === made.k_head_dim ? "" : `/${made.v_head_dim}`) + `, K ${made.k}, V ${made.v}, ` : "";
    const node = el("div", { class: "pool" }, el("h3", {}, pool.name),
      el("p", { class: "facts" }, `${shape}${several(pool.memory.n_tokens, "token")}, ` +
        `${bytes(pool.used_bytes)} of blocks in use, which sequences see as ${bytes(pool.memory.stored_bytes)} of rows, ` +
        (pool.spilled.n_sequences > 0 ? `${several(pool.spilled.n_sequences, "sequence")} of ${several(pool.spilled.n_tokens, "token")} ` +
          `spilled to ${bytes(pool.spilled.tier_bytes)} of a tier, ` : "") +
        `${several(pool.n_sessions, "session")}, at most ${percent(pool.blocks.used_max, pool.blocks.total)} used so far`));
    for (const [name, blocks, blockBytes] of mapsOf(pool)) {
      const n = Math.min(CELLS_MAX, blocks.total);
      if (name) node.append(el("p", { class: "quiet" }, name));
      node.append(drawMap(blocks, name ? `${pool.name}, ${name}` : pool.name));
      node.append(el("p", { class: "quiet" }, (blocks.total > n
        ? `A square is ${count(blocks.total / n)} blocks` : "A square is a block") +
        ` of ${bytes(blockBytes)}, ordered by state.`));
    }
    return node;
  });
  if (nodes.length === 0)
    nodes.push(el("p", { class: "quiet" }, "There is no pool yet. Make one with POST /v1/pools or the daemon's --pool."));
  $("pools").replaceChildren(...nodes);
  const shown = STATES.filter((state) => state === "free" || state === "owned" ||
    occupancy.pools.some((pool) => mapsOf(pool).some(([, blocks]) => stateCount(blocks, state) > 0)));
  $("legend").replaceChildren(...shown.map((state) =>
    el("span", {}, el("i", { class: state }), `${state}: ${MEANING[state]}`)));
  drawTiers(occupancy.tiers);
}

// Where idle sequences went. Nothing where the daemon has no tier.
function drawTiers(tiers) {
  const known = [["host memory", "host"], ["the file", "file"]].filter(([, key]) => tiers[`${key}_total_bytes`] > 0);
  $("tiers").hidden = known.length === 0;
  $("tiers").textContent = `Spilled: ${several(tiers.n_spilled_sequences, "sequence")}, ` + known.map(([name, key]) =>
    `${bytes(tiers[`${key}_used_bytes`])} of ${bytes(tiers[`${key}_total_bytes`])} in ${name}`).join(", ") + ".";
}

const COLUMNS = [
  ["label", "Session", false, (s) => s.label],
  ["pool", "Pool", false, (s) => s.pool],
  ["tenant", "Tenant", false, (s) => (s.tenant === null || s.tenant === undefined ? "–" : String(s.tenant))],
  ["n_sequences", "Sequences", true, (s) => count(s.n_sequences)],
  ["n_tokens", "Tokens", true, (s) => count(s.n_tokens)],
  ["stored_bytes", "Rows", true, (s) => bytes(s.stored_bytes)],
  ["n_queries", "Queries", true, (s) => count(s.n_queries)],
  ["lease_left_ms", "Lease left", true, (s) => seconds(s.lease_left_ms / 1000)],
];
let sessionRows = [];

function cellValue(session, key) {
  const value = session[key] !== undefined ? session[key] : session.memory && session.memory[key];
  return value === undefined || value === null ? "" : value;
}

// On a narrow screen the column's title stands beside the value.
const cell = (title, text, isNumber) => el("td", { "data-title": title, ...(isNumber ? { class: "number" } : {}) }, text);

function drawSessions() {
  const known = COLUMNS.filter(([key]) => sessionRows.length === 0 || sessionRows.some((s) => cellValue(s, key) !== ""));
  const head = el("tr");
  for (const [key, title, isNumber] of known) {
    const button = el("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      sort = { key, down: sort.key === key ? !sort.down : isNumber };
      drawSessions();
      $("sessions").querySelector(`th[data-key="${key}"] button`).focus();
    });
    const attributes = { scope: "col", "data-key": key };
    if (isNumber) attributes.class = "number";
    if (sort.key === key) attributes["aria-sort"] = sort.down ? "descending" : "ascending";
    head.append(el("th", attributes, button));
  }
  const hadFocus = document.activeElement && document.activeElement.closest("#sessions th");
  const focusKey = hadFocus ? hadFocus.dataset.key : null;
  $("sessions").tHead.replaceChildren(head);
  if (focusKey) $("sessions").querySelector(`th[data-key="${focusKey}"] button`)?.focus();
  const rows = [...sessionRows].sort((a, b) => {
    const x = cellValue(a, sort.key), y = cellValue(b, sort.key);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return sort.down ? -order : order;
  });
  $("sessions").tBodies[0].replaceChildren(...rows.map((session) => el("tr", { title: `session ${session.id}` },
    ...known.map(([key, title, isNumber, show]) =>
      cell(title, show({ ...session.memory, ...session, [key]: cellValue(session, key) }), isNumber)))));
}

// What each has, and behind it what it may have where that has a limit.
function drawTenants(answer) {
  const QUOTAS = [["bytes", "Bytes", bytes], ["tokens", "Tokens", count], ["sessions", "Sessions", count],
    ["requests", "Requests", count], ["tier_bytes", "Tier bytes", bytes]];
  $("tenants").tBodies[0].replaceChildren(...answer.tenants.map((tenant) => el("tr", {}, cell("Tenant", tenant.tenant),
    cell("Weight", count(tenant.weight), true),
    ...QUOTAS.map(([key, title, show]) => cell(title, show(tenant.used[key]) +
      (tenant.quotas[key] === null ? "" : ` of ${show(tenant.quotas[key])}`), true)),
    cell("Refused", count(QUOTAS.reduce((sum, [key]) => sum + tenant.n_refused[key], 0)), true))));
  $("tenants").hidden = answer.tenants.length === 0;
  $("tenants_note").textContent = answer.tenants.length === 0 ? "No tenant has anything here, or quotas of its own." :
    answer.cursor_next !== null ? `The first ${answer.tenants.length} tenants; tqkvctl tenants lists all.` : "";
}

// Sums of each pool since start, and the prefixes that were found most often.
function drawPrefixes(answer) {
  const pools = answer.pools.filter((pool) => pool.n_published > 0 || pool.n_hits + pool.n_misses > 0);
  $("prefix_pools").tBodies[0].replaceChildren(...pools.map((pool) => el("tr", {}, cell("Pool", pool.name),
    cell("Blocks", count(pool.n_blocks), true), cell("Unused", `${count(pool.n_idle_blocks)} (${bytes(pool.cached_bytes)})`, true),
    cell("Matches", count(pool.n_hits + pool.n_misses), true),
    cell("Hit rate", pool.n_hits + pool.n_misses > 0 ? percent(pool.n_hits, pool.n_hits + pool.n_misses) : "–", true),
    cell("Tokens found", count(pool.n_tokens_matched), true), cell("Evicted", count(pool.n_evicted), true))));
  $("prefixes").tBodies[0].replaceChildren(...answer.prefixes.map((prefix) => el("tr", {}, cell("Prefix", prefix.id),
    cell("Pool", prefix.pool), cell("Tenant", prefix.tenant), cell("Tokens", count(prefix.n_tokens), true),
    cell("Held by", count(prefix.n_holders), true), cell("Hits", count(prefix.n_hits), true),
    cell("Whole", count(prefix.n_whole_hits), true),
    cell("Time left", prefix.ttl_left_ms === null ? "–" : seconds(prefix.ttl_left_ms / 1000), true))));
  $("prefix_pools").hidden = pools.length === 0;
  $("prefixes").hidden = answer.prefixes.length === 0;
  $("prefixes_note").textContent = pools.length === 0 ? "Nothing has been published or asked for." :
    "A hit is a match that found a block which this prefix added; whole: it found all of it. One match may count for several." +
    (answer.cursor_next !== null ? ` The ${answer.prefixes.length} that were found most often; tqkvctl prefixes lists all.` : "");
}

function drawRejections(now, old) {
  const rows = [];
  for (const [key, total] of now) {
    const found = key.match(/^tqkv_rejected_total\{reason="([^"]+)"\}$/);
    if (found && total > 0) rows.push([found[1], total, old ? grown(now, old, key) : 0]);
  }
  rows.sort((a, b) => b[1] - a[1]);
  $("rejections").tBodies[0].replaceChildren(...rows.map(([reason, total, recent]) => el("tr", {}, el("td", {}, reason),
    el("td", { class: "number" }, count(total)), el("td", { class: "number" }, count(recent)))));
  $("rejections").hidden = rows.length === 0;
  $("rejections_note").textContent = rows.length ? "Refused items and refused frames, by the status that told the client why."
    : "No item and no frame has been refused since start.";
}

function drawChosen(now) {
  const lines = [
    ["Backend", `${info.backend}: ${info.device}` + (info.backend_reason ? ` (${info.backend_reason})` : "")],
    ["Instruction set", info.instruction_set],
    ["I/O", info.io + (info.io_reason ? ` (${info.io_reason})` : "")],
    ["Memory for pools", `${bytes(now.get("tqkv_arena_used_bytes") || 0)} of ${bytes(info.arena_bytes)} carved`],
    ["Data listeners", info.listeners.join(", ") || "none"],
    ["Largest frame", bytes(info.frame_bytes_max)],
    ["Self-test", `passed ${seconds(now.get("tqkv_self_test_age_seconds") || 0)} ago`],
    ["Process", `${info.pid}, resident ${bytes(now.get("tqkv_resident_bytes") || 0)}, up ${seconds(now.get("tqkv_uptime_seconds") || 0)}`],
    ["Start", `boot ${info.boot_id}`],
  ];
  $("chosen").replaceChildren(...lines.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

// ---- charts: x is time, newest right; the width follows the element ----

const HEIGHT = 150, LEFT = 52, BOTTOM = 18, TOP = 6;

function frame(svg, top, show) {
  const width = Math.max(160, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / (top || 1);
  for (const part of [0, 0.5, 1]) {
    svg.append(el("line", { class: "grid", x1: LEFT, x2: width, y1: y(top * part), y2: y(top * part) }));
    svg.append(el("text", { x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, show(top * part)));
  }
  const last = samples[samples.length - 1].at_ms, first = Math.min(samples[0].at_ms, last - 60000);
  svg.append(el("text", { x: LEFT, y: HEIGHT - 3 }, seconds((last - first) / 1000) + " ago"));
  svg.append(el("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  return { x: (at_ms) => LEFT + ((width - LEFT) * (at_ms - first)) / (last - first), y };
}
function niceTop(value) {
  if (!(value > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((n) => n * size >= value) * size;
}
function lines(svg, keys, show, label) {
  const values = samples.flatMap((sample) => keys.map((key) => sample[key])).filter((value) => value !== null);
  const { x, y } = frame(svg, niceTop(Math.max(0, ...values)), show);
  keys.forEach((key, i) => {
    let path = "", isDown = false;
    for (const sample of samples) {
      if (sample[key] === null) { isDown = false; continue; } // nothing came: no line, not zero
      path += `${isDown ? "L" : "M"}${x(sample.at_ms).toFixed(1)} ${y(sample[key]).toFixed(1)}`;
      isDown = true;
    }
    svg.append(el("path", { class: "l" + (i + 1), d: path }));
  });
  const newest = samples[samples.length - 1];
  svg.setAttribute("aria-label", `${label}; now ${keys.map((key) => newest[key] === null ? "none" : show(newest[key])).join(" and ")}`);
}
function areas(svg) {
  const total = samples[samples.length - 1].total;
  const { x, y } = frame(svg, Math.max(1, total), count);
  const base = samples.map(() => 0);
  for (const state of STATES.filter((name) => name !== "free")) {
    if (samples.every((sample) => !sample.states[state])) continue;
    const under = samples.map((sample, i) => `${x(sample.at_ms).toFixed(1)} ${y(base[i]).toFixed(1)}`).reverse();
    const over = samples.map((sample, i) => `${x(sample.at_ms).toFixed(1)} ${y(base[i] += sample.states[state] || 0).toFixed(1)}`);
    svg.append(el("path", { class: "a " + state, d: `M${over.join("L")}L${under.join("L")}Z` }));
  }
  const newest = samples[samples.length - 1].states;
  svg.setAttribute("aria-label", "Blocks by state over time; now " + STATES.filter((state) => newest[state] > 0)
    .map((state) => `${newest[state]} ${state}`).join(", "));
}
function drawCharts() {
  if (samples.length === 0) return;
  areas($("chart_blocks"));
  lines($("chart_requests"), ["requests"], count, "Requests per second");
  lines($("chart_rows"), ["rows_in", "rows_out", "queries"], count, "Rows per second in and out, and queries decoded");
  lines($("chart_latency"), ["p50", "p99"], seconds, "Request latency, p50 and p99");
}

// ---- a round ----

function take(now, at_ms, occupancy) {
  const states = {};
  for (const state of STATES)
    states[state] = occupancy.pools.reduce((sum, pool) => sum + mapsOf(pool).reduce((n, [, blocks]) =>
      n + stateCount(blocks, state), 0), 0);
  const sample = { at_ms, states, total: Object.values(states).reduce((a, b) => a + b, 0),
    requests: null, rows_in: null, rows_out: null, queries: null, p50: null, p99: null };
  let rates = null;
  if (before) {
    const dt = Math.max(0.001, (at_ms - before.at_ms) / 1000), old = before.metrics;
    let rejected = 0, rejectedTotal = 0;
    for (const [key, total] of now)
      if (key.startsWith("tqkv_rejected_total{")) { rejected += grown(now, old, key); rejectedTotal += total; }
    sample.requests = grown(now, old, "tqkv_request_seconds_count") / dt;
    sample.rows_in = grown(now, old, "tqkv_rows_in_total") / dt;
    sample.rows_out = grown(now, old, "tqkv_rows_out_total") / dt;
    sample.queries = grown(now, old, "tqkv_queries_total") / dt;
    sample.p50 = quantile(now, old, "tqkv_request_seconds", 0.5);
    sample.p99 = quantile(now, old, "tqkv_request_seconds", 0.99);
    rates = { requests: sample.requests, p50: sample.p50, p99: sample.p99, rejected: rejected / dt, rejectedTotal };
  }
  samples = [...samples.filter((old) => old.at_ms > at_ms - KEPT_MS), sample];
  return rates;
}

async function readHealth() {
  const answer = await get("/readyz");
  if (answer.ok) return ["ready", "ready"];
  const problem = await answer.json();
  return [problem.code === "DRAINING" ? "draining" : "bad", "not ready: " + problem.detail];
}

async function round() {
  try {
    const nextInfo = await getJson("/v1/info"); // alone: a wrong token is one failed login, not five
    const [health, occupancy, pools, sessions, tenants, prefixes, metricsText] = await Promise.all([
      readHealth(), getJson("/v1/occupancy"), getJson("/v1/pools"), getJson("/v1/sessions?limit=256"),
      getJson("/v1/tenants?limit=64"), getJson("/v1/prefixes?sort=hits&limit=10"),
      get("/metrics").then((answer) => answer.text())]);
    const at_ms = performance.now(), now = readMetrics(metricsText);
    if (info && info.boot_id !== nextInfo.boot_id) { samples = []; before = null; } // another start: other counters
    info = nextInfo;
    const isDraining = now.get("tqkv_draining") === 1;
    drawHealth(isDraining ? "draining" : health[0], isDraining ? "draining: no new sessions" : health[1]);
    const rates = take(now, at_ms, occupancy);
    $("version").textContent = `${info.version} (${info.commit}), ${info.backend}, up ${seconds(info.uptime_ms / 1000)}`;
    drawTiles(occupancy, rates);
    drawPools(occupancy, pools);
    sessionRows = sessions.sessions.map((session) => ({ ...session, label: session.name || session.id }));
    drawSessions();
    $("sessions_note").textContent = sessionRows.length === 0 ? "No session is open." :
      sessions.cursor_next !== null ? `The first ${sessionRows.length} sessions; tqkvctl sessions lists all.` : "";
    drawTenants(tenants);
    drawPrefixes(prefixes);
    drawRejections(now, before ? before.metrics : null);
    drawChosen(now);
    drawCharts();
    before = { at_ms, metrics: now };
    $("login").hidden = true;
    $("stale").hidden = true;
    $("content").hidden = false;
  } catch (error) {
    if (error instanceof Denied) {
      // Asking again with the same token would only use up the logins that may fail.
      $("login_error").textContent = token ? "No access with this token: " + error.message : "";
      token = "";
      sessionStorage.removeItem("tqkv_token");
      if ($("login").hidden) { $("login").hidden = false; $("token").focus(); }
      $("stale").hidden = true;
      $("content").hidden = samples.length === 0;
      drawHealth("bad", "no access");
      return;
    } else {
      $("stale").textContent = "The daemon does not answer (" + error.message + "). What is shown below is old.";
      $("stale").hidden = false;
      drawHealth("bad", "no answer");
    }
  }
  schedule();
}
function schedule() {
  clearTimeout(timer);
  if (!isPaused) timer = setTimeout(round, document.hidden ? 30000 : samples.length < 2 ? 500 : Number($("interval").value));
}

$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  $("pause").textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) clearTimeout(timer); else if ($("login").hidden) round();
});
$("interval").addEventListener("change", () => { if ($("login").hidden) schedule(); });
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value;
  sessionStorage.setItem("tqkv_token", token);
  $("token").value = "";
  round();
});
addEventListener("resize", drawCharts);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused && $("login").hidden) round(); });
round();
