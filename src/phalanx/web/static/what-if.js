// What if: how many GPUs jobs hold and how many jobs wait, as things are and with the changes, in one chart each.
import { drawCurve } from "./curves.js";

const DASH = [6, 4]; // of the world with the changes: also without colours it is another line

export async function start() {
  const place = document.getElementById("what-if-curves");
  if (!place) return;
  const found = JSON.parse(place.dataset.curves);
  const xs = found.gpus_now.map((_, at) => found.begin_s + at * found.step_s);
  const number = (value) => `${+value.toFixed(2)}`;
  /** @type {[string, (number | null)[], (number | null)[], number?][]} */
  const charts = [
    ["GPUs held", found.gpus_now, found.gpus_then, Math.max(found.fleet_now, found.fleet_then)],
    ["Jobs waiting", found.waiting_now, found.waiting_then, Math.max(1, ...found.waiting_now, ...found.waiting_then)],
  ];
  for (const [title, now, then, top] of charts) {
    /** @type {[string, (number | null)[], number[]?][]} */
    const lines = [["as things are", now]];
    if (then.length) lines.push(["with the changes", then, DASH]);
    await drawCurve(place, { title, xs, lines, show: number, time: true, top, stepped: true, apart: then.length > 0 });
  }
}
