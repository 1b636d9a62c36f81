// A service: how its load is and was; scale, sleep, wake, return to a revision and stop, for those who may change it.
import { actionBar } from "./actions.js";
import { ask, path } from "./head.js";
import { showLoad } from "./service-load.js";
import { refresh } from "./tables.js";

const live = document.getElementById("live");
const number = (label, value, min = 0) => ({ label, value, type: "number", min, max: 1000000, step: 1, required: true });

export function start() {
  actionBar(live, commands);
  showLoad((span) => ask(`/v1${path("services", live.dataset.service, "load")}?span_s=${span}`), live, refresh);
}

/** @returns {import("./actions.js").Command[]} */
function commands() {
  const { service, desired, range, revision, revisions, canSleep, mayChange } = live.dataset;
  if (!mayChange) return [];
  const route = `/v1${path("services", service)}`;
  /** @type {(key: string) => (typed: string) => [string, import("./actions.js").Options]} */
  const change = (key) => (typed) => [route, { method: "PATCH", body: { [key]: Number(typed) } }];
  const earlier = revisions.split(" ").find((one) => one !== revision);
  /** @type {(import("./actions.js").Command | false | "" | undefined)[]} */
  const all = [
    { title: "Scale", text: `The service gets this number of replicas, within its range ${range}.`, input: number("Replicas", desired), request: change("replicas") },
    canSleep && { title: "Sleep", text: "So many replicas free their GPUs and keep their processes and memory.", input: number("Replicas that sleep", desired), request: change("asleep") },
    canSleep && { title: "Wake", text: "So many replicas take their GPUs again and serve.", input: number("Replicas that are awake", desired), request: change("awake") },
    earlier && { title: "Roll out a revision", text: `Replicas are replaced one after the other by those of another revision: ${revisions.split(" ").join(", ")}.`, input: number("Revision", earlier, 1), request: change("revision") },
    { title: "Stop service", text: "All its replicas end, and none of them starts again.", danger: true, request: () => [`${route}/stop`, { method: "POST" }] },
  ];
  return /** @type {import("./actions.js").Command[]} */ (all.filter(Boolean));
}
