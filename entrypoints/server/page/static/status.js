// The status view: figures and charts from /status, tables from /server_info.

import { getJson } from "./api.js";
import { Chart } from "./chart.js";
import { $, bytes, el, number, seconds, setText } from "./dom.js";

const WINDOW = 3; // seconds over which rates are taken
const share = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;

/** Return the change of a counter per second; null without two samples of one engine. */
export function rate(older, newer, name) {
  if (!older || newer.time <= older.time) return null;
  const change = newer.counters[name] - older.counters[name];
  return change < 0 ? null : change / (newer.time - older.time);
}

/** Return the mean of the times that a histogram received between two samples; null for none. */
export function mean(older, newer, name) {
  if (!older) return null;
  const count = newer.latency[name].count - older.latency[name].count;
  return count > 0 ? (newer.latency[name].seconds - older.latency[name].seconds) / count : null;
}

export class StatusView {
  constructor() {
    this.samples = [];
    this.tiles = new Map();
    this.charts = {
      output: new Chart("Output tokens per second", ["output"], number),
      prompt: new Chart("Prompt tokens per second", ["prompt"], number),
      requests: new Chart("Sequences", ["running", "waiting"], number),
      kv: new Chart("KV cache in use", ["used"], share, 1),
      first: new Chart("Time to first token", ["mean"], seconds),
      between: new Chart("Time between tokens", ["mean"], seconds),
      accept: new Chart("Accept length of drafts", ["last minute"], number),
    };
    $("charts").append(...Object.values(this.charts).map((chart) => chart.element));
    $("plan-filter").addEventListener("input", () => this.filter());
  }

  /** Show a sample of /status. A sample of another start of the server begins anew. */
  show(sample) {
    if (this.samples.length && this.samples.at(-1).started !== sample.started) this.samples = [];
    this.samples.push(sample);
    while (this.samples.length > 2 && this.samples[1].time <= sample.time - WINDOW) {
      this.samples.shift();
    }
    const older = this.samples.length > 1 ? this.samples[0] : null;
    const figures = {
      output: rate(older, sample, "output_tokens"),
      prompt: rate(older, sample, "prompt_tokens"),
      first: mean(older, sample, "first_token"),
      between: mean(older, sample, "between_tokens"),
    };
    this.draw(sample, figures);
    this.figures(sample, figures);
    this.requests(sample);
    if (sample.status === "starting") this.starting(sample.progress);
  }

  /** Break the lines of the charts at a time without an answer. */
  gap() {
    for (const chart of Object.values(this.charts)) {
      chart.add(Date.now() / 1000, chart.series.map(() => null));
    }
    this.samples = [];
  }

  draw(sample, figures) {
    const now = Date.now() / 1000;
    this.charts.output.add(now, [figures.output]);
    this.charts.prompt.add(now, [figures.prompt]);
    for (const name of ["first", "between"]) {
      if (figures[name] === null) this.charts[name].draw(now);
      else this.charts[name].add(now, [figures[name]]);
    }
    this.charts.requests.add(now, [sample.running, sample.waiting]);
    this.charts.kv.add(now, [sample.kv.usage]);
    const drafts = sample.accept_length;
    this.charts.accept.element.hidden = drafts === null;
    if (drafts !== null) this.charts.accept.add(now, [drafts.last_minute]);
  }

  figures(sample, figures) {
    const { kv, counters } = sample;
    const latency = sample.latency.first_token;
    this.tile("running", number(sample.running));
    this.tile("waiting", number(sample.waiting));
    this.tile("output tokens/s", number(figures.output));
    this.tile("KV cache", share(kv.usage),
      `of ${number(kv.total_tokens)} tokens`);
    this.tile("prefix hits",
      sample.cache_hit_rate === null ? "–" : share(sample.cache_hit_rate), "of prompt tokens");
    this.tile("first token", latency.count ? seconds(latency.seconds / latency.count) : "–",
      "mean since start");
    if (sample.accept_length) {
      this.tile("accept length", number(sample.accept_length.last_minute
        ?? sample.accept_length.since_start), "tokens per verify step");
    }
    this.tile("finished", number(counters.finished), `${number(counters.aborted)} aborted`);
    this.tile("up for", seconds(Date.now() / 1000 - sample.started), `version ${sample.version}`);
  }

  tile(name, value, note = "") {
    if (!this.tiles.has(name)) {
      const held = { value: el("dd"), note: el("dd", { class: "muted" }) };
      $("tiles").append(el("div", {}, el("dt", {}, name), held.value, held.note));
      this.tiles.set(name, held);
    }
    setText(this.tiles.get(name).value, value);
    setText(this.tiles.get(name).note, note);
  }

  requests(sample) {
    const rows = sample.requests.map((one) => el("tr", {},
      el("th", { scope: "row" }, one.sequences > 1 ? `${one.id} (${one.sequences} sequences)` : one.id),
      el("td", {}, number(one.prompt_tokens)), el("td", {}, number(one.output_tokens)),
      el("td", {}, one.first_token_seconds === null ? "waiting" : seconds(one.first_token_seconds)),
      el("td", {}, seconds(one.seconds))));
    $("requests").tBodies[0].replaceChildren(...rows);
    $("requests-box").hidden = !rows.length;
    const more = sample.requests_in_flight - rows.length;
    setText($("requests-none"), !rows.length ? "No request is in flight."
      : more > 0 ? `and ${more} more` : "");
  }

  starting(progress) {
    const phases = Object.entries(progress);
    $("phases").replaceChildren(...phases.map(([rank, phase]) =>
      el("p", {}, `rank ${rank}: ${phase}`)));
    setText($("phases-note"), phases.length ? "in progress" : "");
  }

  /** Read /server_info, and show the plan, the memory and the start-up phases. */
  async load() {
    const info = await getJson("server_info");
    const ranks = info.engine.ranks ?? [info.engine];
    this.plan(info);
    this.memory(info.budget, ranks);
    if (info.engine.startup_seconds || ranks[0]?.startup_seconds) this.phases(ranks);
    return info;
  }

  plan(info) {
    setText($("plan-note"), `fingerprint ${info.fingerprint}`);
    const shown = (value) => value === true ? "on" : value === false ? "off"
      : value === null ? "" : String(value);
    $("plan").tBodies[0].replaceChildren(...info.decisions.map((one) => el("tr", {},
      el("th", { scope: "row" }, one.field), el("td", {}, shown(one.value)),
      el("td", {}, one.by.split(".").at(-1)), el("td", {}, one.why))));
    this.filter();
  }

  filter() {
    const wanted = $("plan-filter").value.trim().toLowerCase();
    for (const row of $("plan").tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  }

  memory(budget, ranks) {
    const measured = ranks[0]?.memory ?? {};
    const names = [...new Set([...budget.map((line) => line.name), ...Object.keys(measured)])];
    const lines = names.map((name) => {
      const line = budget.find((one) => one.name === name);
      const found = measured[name]?.measured ?? null;
      return { name, planned: line?.bytes ?? null, found, how: line?.how ?? "" };
    }).filter((line) => line.planned || line.found);
    const total = budget.reduce((sum, line) => sum + line.bytes, 0);
    setText($("memory-note"), `${bytes(total)} planned on each rank`);
    $("memory").replaceChildren(bars(lines.map((line) => [line.name, line.planned ?? line.found,
      line.planned === null ? `${bytes(line.found)} measured`
        : bytes(line.planned) + (line.found ? `, ${bytes(line.found)} measured` : ""), line.how])));
  }

  phases(ranks) {
    const names = [...new Set(ranks.flatMap((rank) => Object.keys(rank.startup_seconds ?? {})))];
    const slowest = names.map((name) =>
      [name, Math.max(...ranks.map((rank) => rank.startup_seconds?.[name] ?? 0))]);
    const total = slowest.reduce((sum, [, took]) => sum + took, 0);
    setText($("phases-note"),
      `${seconds(total)}${ranks.length > 1 ? `, the slowest of ${ranks.length} ranks` : ""}`);
    $("phases").replaceChildren(bars(slowest.map(([name, took]) => [name, took, seconds(took), ""])));
  }
}

/** Return a table of bars: [name, size, text, remark] of each. */
function bars(lines) {
  const most = Math.max(...lines.map((line) => line[1] ?? 0), 1e-9);
  return el("table", { class: "bars" }, el("tbody", {}, ...lines.map(([name, size, text, how]) => {
    const bar = el("div", { class: "bar" });
    bar.style.width = `${Math.max(0.5, 100 * (size ?? 0) / most)}%`;
    return el("tr", {}, el("th", { scope: "row" }, name),
      el("td", { class: "track" }, bar, el("span", { class: "muted" }, how)),
      el("td", { class: "amount" }, text));
  })));
}
