// The head's stream of changes: one connection for each page, resumed by the browser with the id of the last event.
import { batch, signal } from "./vendor/signals.js";

/** The fleet as the head sent it, updated in place; `version` counts the updates. */
export const fleet = { nodes: [], places: [], states: [], cells: [], jobs: [], counts: {}, now_s: 0 };
export const version = signal(0);
/** Numbers of the nodes that the last update changed; null for all. */
export const changedNodes = signal(null);
/** Ids of the jobs that the last update changed; null for unknown. */
export const changedJobs = signal([]);

const label = document.querySelector(".connection");

function tell(text, lost) {
  if (label.textContent !== text) label.textContent = text;
  label.classList.toggle("lost", lost);
}

function publish(nodes, jobs) {
  batch(() => {
    changedNodes.value = nodes;
    changedJobs.value = jobs;
    version.value += 1;
  });
}

/** Follow the fleet until the page closes. */
export function followFleet() {
  const source = new EventSource("/v1/fleet/events");
  source.addEventListener("open", () => tell("live", false));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) {
      tell("connection lost: load the page again", true);
      setTimeout(() => location.reload(), 5000);
    } else tell("connection lost, trying again", true);
  });
  source.addEventListener("frame", (event) => {
    Object.assign(fleet, JSON.parse(event.data));
    publish(null, null);
  });
  source.addEventListener("delta", (event) => {
    const start = performance.now();
    const delta = JSON.parse(event.data);
    for (const [at, state, cells, jobs] of delta.nodes) {
      fleet.states[at] = state;
      fleet.cells[at] = cells;
      fleet.jobs[at] = jobs;
    }
    fleet.counts = delta.counts;
    fleet.now_s = delta.now_s;
    publish(delta.nodes.map((node) => node[0]), delta.changed_more ? null : delta.changed);
    performance.clearMeasures("tick");
    performance.measure("tick", { start, detail: { nodes: delta.nodes.length } }); // for benchmarks.dashboard
  });
}
