// A node: cordon, drain and undrain, for operators.
import { confirmed } from "./dialog.js";
import { actions, ask, path } from "./head.js";
import { refresh } from "./tables.js";

const COMMANDS = [
  ["Cordon", "drain", "No new jobs start on this node; those that run stay.", { cordon_only: true }],
  ["Drain", "drain", "No new jobs start on this node, and its jobs move to others or end.", {}],
  ["Undrain", "undrain", "The node takes jobs again.", null],
];

export function start() {
  if (!actions.has("operate")) return;
  const live = document.getElementById("live");
  const bar = document.createElement("div");
  bar.className = "actions";
  const problem = document.createElement("p");
  problem.className = "problem";
  problem.setAttribute("role", "alert");
  problem.hidden = true;
  for (const [title, verb, text, body] of COMMANDS) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", async () => {
      const why = await confirmed({ title, text, button: title, asksWhy: body !== null, danger: title === "Drain" });
      if (why === null) return;
      problem.hidden = true;
      try {
        await ask(`/v1${path("nodes", live.dataset.node, verb)}`, { method: "POST", body: body === null ? undefined : { ...body, why } });
        await refresh();
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
      }
    });
    bar.append(button);
  }
  live.before(bar, problem);
}
