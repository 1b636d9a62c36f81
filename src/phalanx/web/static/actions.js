// A bar of buttons for changes: each asks first, then sends its request, and the page is loaded again.
import { confirmed } from "./dialog.js";
import { ask } from "./head.js";
import { refresh } from "./tables.js";

/**
 * Show buttons before an element. `commands()` returns what the page allows now: each has the fields of `confirmed`, and
 * `request(typed)`, which returns [route, options]. A request that the head refuses is shown in its own words.
 * @typedef {{method: string, body?: unknown}} Options
 * @typedef {Omit<import("./dialog.js").Question, "button"> & {request: (typed: string) => [string, Options]}} Command
 * @param {Element} before
 * @param {() => Command[]} commands
 */
export function actionBar(before, commands) {
  const bar = document.createElement("div");
  bar.className = "actions";
  const problem = document.createElement("p");
  problem.className = "problem";
  problem.setAttribute("role", "alert");
  problem.hidden = true;
  /** @param {HTMLButtonElement} button @param {Command} command */
  const act = async (button, { request, ...question }) => {
    const typed = await confirmed({ button: question.title, ...question });
    if (typed === null) return;
    problem.hidden = true;
    button.disabled = true;
    try {
      await ask(...request(typed));
      await refresh();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    button.disabled = false;
  };
  const show = () => {
    const now = commands();
    bar.hidden = !now.length;
    const titles = now.map((command) => command.title);
    if (titles.join() === [...bar.children].map((one) => one.textContent).join()) return; // the pressed button keeps the focus
    bar.replaceChildren(
      ...now.map(({ title, danger }) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = title;
        if (danger) button.className = "danger";
        button.addEventListener("click", () => act(button, commands().find((one) => one.title === title)));
        return button;
      }),
    );
  };
  document.addEventListener("refreshed", show);
  show();
  before.before(bar, problem);
}
