// A job: what may be done with it, why it waits, its history as a timeline, its curves, and the output of its ranks as it comes.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";
import { useEffect, useState } from "./vendor/preact-hooks.js";
import { effect, signal } from "./vendor/signals.js";
import { choices, drawCurve } from "./curves.js";
import { confirmed } from "./dialog.js";
import { ask, path } from "./head.js";
import { watchOutput } from "./output.js";
import { changedJobs, version } from "./stream.js";
import { duration, moment, refresh } from "./tables.js";

const html = htm.bind(h);
const WHY_MS = 5000; // at most one explanation in this time: each computes what would start the job
const BAD = /fail|lost|died|dead|down|timeout|timed|crash|hang|killed|refused|broken|unhealthy|evict/;
const GOOD = /^(running|succeeded|ready|resumed|placed|released|saved|checkpoint)/;
const WARN = /held|preempt|requeue|cancel|drain|shrunk|slow|wait|stop/;

const live = document.getElementById("live");
const id = live.dataset.job;
const route = `/v1${path("jobs", id)}`;
const mayChange = "mayChange" in live.dataset;
const job = signal(null);
const problem = signal("");

export function start() {
  const above = document.createElement("div");
  live.before(above);
  render(html`<${Tools} />`, above);
  timeline();
  watchOutput(document.getElementById("output"), route);
  const curves = document.createElement("div");
  live.after(curves);
  showCurves(curves).catch(() => {});
  const spent = document.createElement("div");
  live.after(spent);
  showTime(spent).catch(() => {}); // a head that is busy, or a job that held nothing
  read();
  let waiting = false;
  effect(() => {
    if (version.value <= 1 || waiting) return;
    if (changedJobs.value && !changedJobs.value.includes(id)) return;
    waiting = true;
    setTimeout(async () => {
      waiting = false;
      await Promise.allSettled([read(), refresh()]);
      timeline();
    }, 500);
  });
}

async function read() {
  try {
    job.value = (await ask(route)).job;
  } catch (error) {
    problem.value = error.message;
  }
}

function Tools() {
  const [shown, setShown] = useState(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => effect(() => setShown(job.value)), []);
  useEffect(() => effect(() => setTrouble(problem.value)), []);
  if (!shown) return trouble ? html`<p class="problem" role="alert">${trouble}</p>` : null;
  return html`${trouble && html`<p class="problem" role="alert">${trouble}</p>`}
    ${mayChange && html`<${Actions} shown=${shown} />`} ${shown.state === "pending" && html`<${Why} />`}
    ${shown.progress && html`<${Progress} progress=${shown.progress} />`}`;
}

/** The commands that the state of the job allows, each with what it does. */
function Actions({ shown }) {
  const [busy, setBusy] = useState(false);
  const act = async (name, title, text, asksWhy, danger) => {
    const why = await confirmed({ title, text, asksWhy, danger, button: title });
    if (why === null) return;
    setBusy(true);
    problem.value = "";
    try {
      job.value = (await ask(`${route}/${name}`, { method: "POST", body: asksWhy ? { why } : undefined })).job;
    } catch (error) {
      problem.value = error.message;
    }
    setBusy(false);
  };
  const ended = ["succeeded", "failed", "cancelled", "timeout"].includes(shown.state);
  if (ended) return null;
  const button = (name, title, text, asksWhy = false, danger = false) =>
    html`<button type="button" class=${danger ? "danger" : ""} disabled=${busy} onClick=${() => act(name, title, text, asksWhy, danger)}>${title}</button>`;
  return html`<div class="actions">
    ${shown.state === "pending" && !shown.held && button("hold", "Hold", "The job stays in the queue and does not start until it is released.")}
    ${shown.parked_s && button("resume", "Resume", "The job waits in its queue again.")}
    ${shown.state === "pending" && shown.held && !shown.parked_s && button("release", "Release", "The job may start again.")}
    ${shown.state === "running" && button("requeue", "Requeue", "The job stops after a checkpoint and waits in its queue again.")}
    ${!shown.parked_s && !shown.service && button("park", "Park", "The job stops after a checkpoint and gives its GPUs back. It waits until it is resumed.")}
    ${button("cancel", "Cancel job", "The job ends and never runs again.", true, true)}
  </div>`;
}

/** Whether the text of a change already says all that its hint says. */
function said({ text, hint_args: values }) {
  const details = Object.entries(values).filter(([key]) => key !== "job" && key !== "key");
  return details.length > 0 && details.every(([, value]) => text.includes(value));
}

function Why() {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let [open, timer, last] = [true, 0, 0];
    const load = async () => {
      last = performance.now();
      const reply = await ask(`${route}/why`).catch(() => null);
      if (open && reply) setFound(reply);
    };
    load();
    const stop = effect(() => {
      version.value;
      clearTimeout(timer);
      timer = setTimeout(load, Math.max(500, WHY_MS - (performance.now() - last)));
    });
    return () => ((open = false), clearTimeout(timer), stop());
  }, []);
  if (!found) return html`<div class="why"><p class="note">Computing why it waits ...</p></div>`;
  const starts = found.start?.latest_s
    ? `Expected start: ${found.start.earliest_s ? `${moment(found.start.earliest_s)} to ` : "by "}${moment(found.start.latest_s)}.`
    : found.start?.unknown
      ? `Start time unknown: ${found.start.unknown}.`
      : "";
  return html`<div class="why">
    <p><strong>${found.headline}</strong></p>
    ${found.detail && !found.headline.includes(found.detail) && html`<p>${found.detail}</p>`} ${starts && html`<p>${starts}</p>`}
    ${found.blockers.length > 0 &&
    html`<p>In its way:</p>
      <ul>${found.blockers.map((one) => html`<li><a href=${path("jobs", one.id)}>job ${one.id}</a> ${one.name} of ${one.user}, ${one.gpus} GPUs, ${one.state}</li>`)}
      ${found.blockers_more > 0 && html`<li>and ${found.blockers_more} more</li>`}</ul>`}
    ${found.changes.length > 0 &&
    html`<p>It would start now with one of:</p><ul>${found.changes.map((one) => html`<li>${one.text}${one.hint && !said(one) && `: ${one.hint}`}${one.operator && " (an operator)"}</li>`)}</ul>`}
  </div>`;
}

function Progress({ progress }) {
  const of = progress.steps_total ? ` of ${progress.steps_total}` : "";
  const facts = [
    progress.loss != null && `loss ${progress.loss.toPrecision(4)}`,
    progress.step_s != null && `${progress.step_s.toPrecision(3)} s a step`,
    progress.tokens_per_s != null && `${Math.round(progress.tokens_per_s).toLocaleString()} tokens/s`,
    progress.checkpoint_step != null && `checkpoint of step ${progress.checkpoint_step}`,
    progress.steps_total && progress.step_s ? `${duration((progress.steps_total - progress.step) * progress.step_s)} left` : null,
  ].filter(Boolean);
  return html`<p>Step <strong>${progress.step}</strong>${of} ${progress.steps_total && html`<meter min="0" max=${progress.steps_total} value=${progress.step}></meter>`} ${facts.join(", ")}, newest step at ${moment(progress.at_s)}</p>`;
}

/** Show the history, which the head sends as a table, as a timeline. */
function timeline() {
  const table = [...live.querySelectorAll("table")].find((one) => one.caption?.textContent === "History");
  if (!table) return;
  const list = document.createElement("ol");
  list.className = "timeline";
  for (const row of table.tBodies[0].rows) {
    const [at, kind, text] = row.cells;
    const item = document.createElement("li");
    const word = kind.textContent;
    item.className = BAD.test(word) ? "bad" : GOOD.test(word) ? "good" : WARN.test(word) ? "warn" : "";
    const what = document.createElement("span");
    what.className = "what";
    what.textContent = `${word} `;
    item.append(...at.childNodes, what, ...text.childNodes);
    list.append(item);
  }
  table.closest(".scroll").replaceWith(list);
}

/** Show what the GPU-hours of the job were used for, in the order of the states of the usage report. */
async function showTime(place) {
  const { gpu_hours: whole, by_state: states } = await ask(`${route}/usage`);
  const parts = Object.entries(states).filter(([, hours]) => hours > 0).sort(([, a], [, b]) => b - a);
  if (!whole || !parts.length) return;
  let start = 0;
  const rows = parts.map(([state, hours]) => {
    const row = { state, hours, start, words: state.replaceAll("_", " ") };
    start += hours;
    return row;
  });
  const across = (hours) => ((1000 * hours) / whole).toFixed(2);
  const boxes = rows.map((row) => html`<rect class=${`u-${row.state}`} x=${across(row.start)} y="0" width=${across(row.hours)} height="20"><title>${row.words}</title></rect>`);
  const amount = (hours) => `${hours.toPrecision(3)} GPU-hours, ${Math.round((100 * hours) / whole)} %`;
  render(
    html`<h2>Time of its GPUs: ${whole.toPrecision(3)} GPU-hours</h2>
      <svg class="strip" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="GPU-hours by state">${boxes}</svg>
      <ul class="legend">${rows.map((row) => html`<li><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect class=${`u-${row.state}`} width="12" height="12" /></svg> ${row.words} <strong>${amount(row.hours)}</strong></li>`)}</ul>`,
    place,
  );
}

/** Draw loss, step time and goodput, if the job reports steps: of the whole job, or of its end. */
async function showCurves(place) {
  const found = await ask(`${route}/history`);
  if (found.step.length < 2) return;
  const title = document.createElement("h2");
  title.textContent = "Curves";
  const box = document.createElement("div");
  const draw = async (span) => {
    const fresh = document.createElement("div");
    fresh.className = "curves";
    box.replaceChildren(fresh);
    const from = found.end_s.at(-1) - span;
    const first = Math.min(found.step.length - 2, found.end_s.findIndex((at) => at >= from));
    const cut = (values) => values.slice(first);
    const number = (value) => `${+value.toPrecision(4)}`;
    /** @typedef {[string, (number | null)[]]} Line */
    /** @type {(...lines: Line[]) => Line[]} */
    const spread = (...lines) => (found.steps_per_point > 1 ? lines : []);
    /** @type {[string, Line[], (value: number) => string, number?][]} */
    const charts = [
      ["Loss", [["last", found.loss_last], ...spread(["least", found.loss_min], ["most", found.loss_max])], number],
      ["Seconds a step", [["mean", found.step_s], ...spread(["most", found.step_s_max])], number],
      ["Goodput", [["since the start", found.goodput]], (value) => `${+(100 * value).toFixed(1)} %`, 1],
    ];
    for (const [name, lines, show, top] of charts) {
      if (lines[0][1].some((value) => value !== null))
        await drawCurve(fresh, { title: name, xs: cut(found.step), lines: lines.map(([label, values]) => [label, cut(values)]), show, time: false, top });
    }
  };
  const length = found.end_s.at(-1) - found.end_s[0];
  /** @type {[string, number][]} */
  const all = [["Whole job", Infinity], ["Last day", 86400], ["Last hour", 3600], ["Last 10 minutes", 600]];
  const spans = all.filter(([, span]) => span === Infinity || span < length);
  place.append(title, ...(spans.length > 1 ? [choices("Span of the curves", spans, Infinity, draw)] : []), box);
  if (spans.length === 1) await draw(Infinity);
}
