// A node: its curves; cordon, drain and undrain, for operators.
import { actionBar } from "./actions.js";
import { actions, path } from "./head.js";
import { showHistory } from "./history.js";

/** @type {[string, string, string, {cordon_only?: boolean} | null][]} */
const COMMANDS = [
  ["Cordon", "drain", "No new jobs start on this node; those that run stay.", { cordon_only: true }],
  ["Drain", "drain", "No new jobs start on this node, and its jobs move to others or end.", {}],
  ["Undrain", "undrain", "The node takes jobs again.", null],
];

export function start() {
  const live = document.getElementById("live");
  showHistory(live.dataset.node, live);
  if (!actions.has("operate")) return;
  /** @param {typeof COMMANDS[number]} command @returns {import("./actions.js").Command} */
  const command = ([title, verb, text, body]) => ({
    title,
    text,
    asksWhy: body !== null,
    danger: title === "Drain",
    request: (why) => [`/v1${path("nodes", live.dataset.node, verb)}`, { method: "POST", body: body === null ? undefined : { ...body, why } }],
  });
  actionBar(live, () => COMMANDS.map(command));
}
