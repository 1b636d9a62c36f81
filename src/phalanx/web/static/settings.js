// Settings: sends the forms of tokens, users and projects, and tries and applies the file of queues.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";
import { confirmed } from "./dialog.js";
import { ask, path } from "./head.js";
import { refresh } from "./tables.js";

const html = htm.bind(h);
const words = (text) => text.split(/[\s,]+/).filter(Boolean);
/** @returns {HTMLFormElement | null} */
const form = (name) => document.querySelector(`form[data-form="${name}"]`);

export function start() {
  document.querySelector("main").addEventListener("click", ({ target }) => {
    if (!(target instanceof HTMLElement)) return;
    if (target.dataset.revoke) revoke(target);
    else if (target.dataset.edit) edit(target.dataset);
  });
  on("token", makeToken);
  on("user", (fields) => ask(`/v1${path("users", fields.get("id").trim())}`, { method: "PUT", body: { role: fields.get("role"), disabled: fields.get("disabled") === "disabled" } }));
  on("project", (fields) => {
    /** @type {{members: string[], admins?: string[]}} */
    const body = { members: words(fields.get("members")) };
    if (fields.has("admins")) body.admins = words(fields.get("admins"));
    return ask(`/v1${path("projects", fields.get("id").trim())}`, { method: "PUT", body });
  });
  watchQueues();
  document.body.classList.add("scripted"); // from now on forms can be sent
}

/** Send a form, then show the fresh tables. What the head refuses is shown below the form. */
function on(name, send) {
  const shown = form(name);
  shown?.addEventListener("submit", async (event) => {
    event.preventDefault();
    /** @type {HTMLElement} */
    const problem = shown.querySelector(".problem");
    /** @type {HTMLButtonElement} */
    const button = shown.querySelector("button[type=submit]");
    problem.hidden = true;
    button.disabled = true;
    try {
      await send(new FormData(shown));
      shown.reset();
      await refresh();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    button.disabled = false;
  });
}

async function makeToken(fields) {
  /** @type {{[key: string]: string | string[]}} */
  const body = { note: fields.get("note"), expires: fields.get("expires"), scope: fields.getAll("scope") };
  if (fields.get("user")) body.user = fields.get("user").trim();
  const { secret, token } = await ask("/v1/tokens", { method: "POST", body });
  const copy = ({ target }) => navigator.clipboard?.writeText(secret).then(() => (target.textContent = "Copied"));
  const place = document.getElementById("made-token");
  const shown = html`<div class="why"><p><strong>Token ${token.id} of ${token.user}.</strong> Copy it now: it is not shown again.</p>
    <p><code class="secret">${secret}</code></p>
    <div class="buttons"><button type="button" class="primary" onClick=${copy}>Copy</button><button type="button" onClick=${() => render(null, place)}>Hide</button></div></div>`;
  render(shown, place);
  place.scrollIntoView({ block: "nearest" });
}

async function revoke({ dataset }) {
  const text = `Token ${dataset.revoke} of ${dataset.user} stops working at once. Browsers and commands that use it are signed out.`;
  if ((await confirmed({ title: "Revoke token", text, button: "Revoke", danger: true })) === null) return;
  await ask(`/v1${path("tokens", dataset.revoke)}`, { method: "DELETE" }).catch((error) => confirmed({ title: "Not revoked", text: error.message, button: "Close" }));
  await refresh();
}

/** Fill the form below a table with what a row holds.
 * @param {DOMStringMap} row
 */
function edit({ edit: name, id, ...fields }) {
  const shown = form(name);
  for (const [key, value] of Object.entries({ ...fields, id })) {
    const one = shown.elements.namedItem(key);
    if (one instanceof HTMLInputElement || one instanceof HTMLSelectElement) one.value = value;
  }
  /** @type {HTMLInputElement | HTMLSelectElement} */ (shown.querySelectorAll("input, select")[1]).focus();
  shown.scrollIntoView({ block: "center" });
}

// ---- queues ------------------------------------------------------------------------------------------------------------

function watchQueues() {
  const shown = form("queues");
  if (!shown) return;
  const apply = /** @type {HTMLButtonElement} */ (document.getElementById("apply-queues"));
  const file = /** @type {HTMLTextAreaElement} */ (shown.elements.namedItem("file"));
  const prune = /** @type {HTMLInputElement} */ (shown.elements.namedItem("prune"));
  const run = async (dryRun) => {
    apply.disabled = true;
    try {
      const text = file.value;
      const parsed = await ask("/v1/queues/parse", { method: "POST", text });
      const changes = await ask("/v1/queues", { method: "PUT", body: { ...parsed, prune: prune.checked, dry_run: dryRun } });
      showOutcome(html`<${Changes} changes=${changes} dryRun=${dryRun} />`);
      apply.disabled = !dryRun || file.value !== text || !(changes.added.length + changes.changed.length + changes.removed.length);
    } catch (error) {
      showOutcome(html`<p class="problem" role="alert">${error.message}</p>`);
    }
  };
  shown.addEventListener("submit", (event) => (event.preventDefault(), run(true)));
  shown.addEventListener("input", () => (apply.disabled = true));
  apply.addEventListener("click", async () => {
    const text = "The changes of the dry run take effect at once.";
    if ((await confirmed({ title: "Apply the queue file", text, button: "Apply" })) !== null) run(false);
  });
}

const showOutcome = (content) => render(content, document.getElementById("queue-changes"));
const text = (value) => (value === null || value === undefined ? "none" : typeof value === "object" ? Object.entries(value).map(([key, one]) => `${key}: ${one}`).join(", ") || "none" : String(value));

function Changes({ changes, dryRun }) {
  const { added, changed, removed, unchanged, impossible, impossible_more: more } = changes;
  const rows = [
    ...added.map((id) => html`<tr><td>${id}</td><td>added</td><td></td><td></td><td></td></tr>`),
    ...changed.flatMap(({ id, before, after }) => Object.keys(after).map((key) => html`<tr><td>${id}</td><td>changed</td><td>${key.replaceAll("_", " ")}</td><td>${text(before[key])}</td><td>${text(after[key])}</td></tr>`)),
    ...removed.map((id) => html`<tr><td>${id}</td><td>removed</td><td></td><td></td><td></td></tr>`),
  ];
  const would = dryRun ? "Dry run: " : "Applied: ";
  return html`<p><strong>${would}</strong>${added.length} added, ${changed.length} changed, ${removed.length} removed, ${unchanged} unchanged.</p>
    ${rows.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Changes of queues"><table><caption class="unseen">Changes of queues</caption>
      <thead><tr>${["Queue", "Change", "Setting", "Before", "After"].map((title) => html`<th scope="col">${title}</th>`)}</tr></thead><tbody>${rows}</tbody></table></div>`}
    ${impossible.length > 0 && html`<p>Jobs that ${dryRun ? "could" : "can"} never start with them:</p><ul>${impossible.map((one) => html`<li><a href=${path("jobs", one.id)}>job ${one.id}</a>: ${one.why}</li>`)}${more > 0 && html`<li>and ${more} more</li>`}</ul>`}`;
}
