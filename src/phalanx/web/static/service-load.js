// How the load of a service was: requests, times to the first token, tokens and replicas, kept fresh while the page is seen.
import { choices, drawCurve } from "./curves.js";

const EVERY_MS = 10_000;
const HOUR = 3600;
/** @type {[string, number][]} */
const SPANS = [["1 hour", HOUR], ["24 hours", 24 * HOUR]];
const number = (value) => `${+value.toPrecision(3)}`;
const latency = (value) => (value < 1 ? `${+(1000 * value).toPrecision(3)} ms` : `${number(value)} s`);
/** @type {[string, [string, string][], (value: number) => string, boolean?][]} */
const CHARTS = [
  ["Requests each second", [["came", "requests_per_s"]], number],
  ["Time to the first token, 9 of 10 streams", [["first token", "ttft_s"]], latency],
  ["Requests under way", [["at replicas", "in_flight"], ["waiting", "waiting"]], number],
  ["Replicas", [["ready", "ready"], ["wanted", "wanted"]], number, true],
  ["Tokens each second", [["answered", "tokens_per_s"]], number],
];

/**
 * Show the curves after an element.
 * @param {(span: number) => Promise<any>} read
 * @param {Element} after
 * @param {() => Promise<unknown>} refresh of the rest of the page
 */
export function showLoad(read, after, refresh) {
  const title = document.createElement("h2");
  title.textContent = "Load";
  const box = document.createElement("div");
  const place = document.createElement("section");
  let span = HOUR;
  /** @type {Map<string, (xs: number[], lines: [string, (number | null)[]][]) => void>} */
  let drawn = new Map();
  let turn = 0;
  const load = async () => {
    const own = (turn += 1);
    try {
      const found = await read(span);
      if (own === turn) await show(found);
    } catch (error) {
      if (own === turn) box.replaceChildren(error.message);
      drawn = new Map();
    }
  };
  const show = async (found) => {
    const xs = found.wanted.map((_, at) => found.begin_s + (at + 0.5) * found.step_s);
    const known = CHARTS.filter(([, lines]) => lines.some(([, name]) => found[name].some((value) => value !== null)));
    if (known.length !== drawn.size) drawn = new Map();
    if (!drawn.size) {
      const fresh = document.createElement("div");
      fresh.className = "curves";
      box.replaceChildren(known.length ? fresh : "No gateway has reported requests in this span.");
      for (const [name, columns, show, stepped] of known) {
        const lines = columns.map(([label, column]) => [label, found[column]]);
        drawn.set(name, await drawCurve(fresh, { title: name, xs, lines, show, time: true, top: undefined, stepped, apart: columns.length > 1 }));
      }
    } else for (const [name, columns] of known) drawn.get(name)(xs, columns.map(([label, column]) => [label, found[column]]));
  };
  const pick = (wanted) => {
    span = wanted;
    drawn = new Map();
    load();
  };
  place.append(title, choices("Span of the curves", SPANS, HOUR, pick), box);
  after.after(place);
  setInterval(() => {
    if (document.visibilityState === "visible") Promise.allSettled([load(), refresh()]);
  }, EVERY_MS);
}
