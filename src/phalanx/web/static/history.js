// How a node was: curves of its devices, of its CPUs and of its network, for a span that the reader chooses.
import { choices, drawCurve } from "./curves.js";
import { ask } from "./head.js";

const HOUR = 3600;
const SPANS = [["1 hour", HOUR], ["24 hours", 24 * HOUR], ["7 days", 168 * HOUR], ["60 days", 1440 * HOUR], ["1 year", 8760 * HOUR]];
const percent = (value) => `${+(100 * value).toFixed(1)} %`;
const bytes = (value) => {
  const power = value < 1 ? 0 : Math.min(5, Math.floor(Math.log2(value) / 10));
  return `${(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
};
/** @type {[string, "devices" | "nodes", string[], (value: number) => string, number?][]} */
const CHARTS = [
  ["Utilization", "devices", ["utilization"], percent, 1],
  ["Time with lowered clocks", "devices", ["throttled"], percent, 1],
  ["Memory of the devices", "devices", ["memory_used_bytes"], bytes],
  ["Power", "devices", ["power_w"], (value) => `${Math.round(value)} W`],
  ["Temperature", "devices", ["temperature_c"], (value) => `${Math.round(value)} °C`],
  ["CPU", "nodes", ["cpu_utilization"], percent, 1],
  ["Memory of the node", "nodes", ["memory_used_bytes"], bytes],
  ["Network", "nodes", ["network_received_bytes_per_s", "network_sent_bytes_per_s"], (value) => `${bytes(value)}/s`],
];
const NAMES = { network_received_bytes_per_s: "received", network_sent_bytes_per_s: "sent" };

export function showHistory(node, live) {
  const title = document.createElement("h2");
  title.textContent = "How it was";
  const box = document.createElement("div");
  const place = document.createElement("section");
  let wanted = 0;
  const load = async (span) => {
    const own = (wanted += 1);
    try {
      const query = `node=${encodeURIComponent(node)}&since_s=${Math.max(0, Date.now() / 1000 - span)}`;
      const [devices, nodes] = await Promise.all(["devices", "nodes"].map((kind) => ask(`/v1/history/${kind}?${query}`)));
      if (own === wanted) await draw(box, { devices, nodes });
    } catch (error) {
      if (own === wanted) box.textContent = error.message;
    }
  };
  place.append(title, choices("Span of the curves", SPANS, 24 * HOUR, load), box);
  live.after(place);
}

async function draw(box, found) {
  const fresh = document.createElement("div");
  fresh.className = "curves";
  box.replaceChildren(fresh);
  for (const [title, kind, metrics, show, top] of CHARTS) {
    const answer = found[kind];
    const columns = answer.columns.filter((one) => metrics.includes(one.metric));
    // Clocks that were never lowered are no curve.
    if (!columns.length || (metrics[0] === "throttled" && columns.every((one) => !Object.keys(one.reasons).length))) continue;
    const xs = Array.from({ length: answer.points }, (_, at) => answer.begin_s + (at + 0.5) * answer.step_s);
    const lines = columns.map((one) => [one.device === null ? (NAMES[one.metric] ?? title) : `GPU ${one.device}`, one.mean]);
    await drawCurve(fresh, { title, xs, lines, show, time: true, top });
    const reasons = new Set(columns.flatMap((one) => Object.keys(one.reasons)));
    if (reasons.size) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `reasons: ${[...reasons].sort().join(", ").replaceAll("_", " ")}`;
      fresh.lastElementChild.append(note);
    }
  }
  if (!fresh.children.length) box.textContent = "Nothing is known of this span.";
}
