// Tables that the head rendered: times in the reader's time zone, sorting by column, a filter, and fresh rows when something changed.
import { effect } from "./vendor/signals.js";
import { changedNodes, version } from "./stream.js";

const REFRESH_MS = 2000; // at most one fresh page in this time
const time = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const sorted = { column: -1, down: false };

/** A moment in Unix seconds, as the reader's own time. */
export const moment = (seconds) => time.format(new Date(seconds * 1000));

/** A duration in seconds: "2h05m", "3m20s", "42s". */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60)];
  const two = (number) => String(number).padStart(2, "0");
  if (days) return `${days}d${two(hours)}h`;
  if (hours) return `${hours}h${two(minutes)}m`;
  return minutes ? `${minutes}m${two(whole % 60)}s` : `${whole}s`;
}

/** Make the tables of a document, or of a part of it, sortable, and show its times in the reader's time zone. */
export function enhance(root) {
  for (const one of root.querySelectorAll("time[datetime]")) {
    const at = new Date(one.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    one.title = one.textContent;
    one.textContent = time.format(at);
  }
  if (document.body.dataset.page === "queues") return; // a tree has its own order
  for (const link of root.querySelectorAll("th a.sort")) if (link.dataset.sorted) link.parentElement.setAttribute("aria-sort", link.dataset.sorted);
  for (const head of root.querySelectorAll("#live > .scroll thead tr")) {
    if (head.querySelector("a.sort")) continue; // the head sorts the whole list, not only this page
    [...head.cells].forEach((cell, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = cell.textContent;
      button.addEventListener("click", () => {
        sorted.down = sorted.column === column && !sorted.down;
        sorted.column = column;
        sort(head.closest("table"));
      });
      cell.replaceChildren(button);
    });
    sort(head.closest("table"));
  }
}

const value = (row, column) => {
  const cell = row.cells[column];
  return cell.querySelector("time")?.dateTime ?? cell.textContent.trim();
};
const collator = new Intl.Collator(undefined, { numeric: true });

function sort(table) {
  const { column, down } = sorted;
  if (column < 0 || column >= table.tHead.rows[0].cells.length) return;
  const rows = [...table.tBodies[0].rows].sort((a, b) => collator.compare(value(a, column), value(b, column)));
  if (down) rows.reverse();
  table.tBodies[0].append(...rows);
  [...table.tHead.rows[0].cells].forEach((cell, at) => {
    cell.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending");
    cell.firstChild.dataset.sorted = at !== column ? "" : down ? "\u25be" : "\u25b4";
  });
}

/** Load the page again and put its fresh content in the place of the shown one. The head escapes every text, and no script runs. */
export async function refresh() {
  const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (reply.status === 401) return location.reload();
  if (!reply.ok) return;
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  if (getSelection()?.toString()) return; // a reader who marks text keeps it
  for (const shown of document.querySelectorAll("#live, .live")) {
    const fresh = page.getElementById(shown.id);
    if (fresh) replace(shown, document.adoptNode(fresh));
  }
  document.dispatchEvent(new Event("refreshed"));
}

function replace(shown, fresh) {
  const scrolled = [...shown.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const focused = shown.contains(document.activeElement) ? focusKey(document.activeElement) : null;
  for (const name of Object.keys(shown.dataset)) delete shown.dataset[name];
  Object.assign(shown.dataset, fresh.dataset);
  shown.replaceChildren(...fresh.childNodes);
  [...shown.querySelectorAll(".scroll")].forEach((one, at) => (one.scrollLeft = scrolled[at] ?? 0));
  enhance(shown);
  if (focused) [...shown.querySelectorAll(FOCUSABLE)].find((one) => focusKey(one) === focused)?.focus({ preventScroll: true });
}

const FOCUSABLE = "a, button, .scroll";
const focusKey = (one) => `${one.tagName} ${one.getAttribute("href") ?? one.textContent.slice(0, 40)}`;

/** Keep the page fresh while the head reports changes of what it shows. */
export function refreshOnChanges() {
  const ofNodes = document.body.dataset.page.startsWith("node");
  let waiting = false;
  effect(() => {
    if (version.value <= 1 || waiting) return; // the first frame is what the page shows already
    if (ofNodes && changedNodes.value?.length === 0) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      if (!document.hidden) refresh().catch(() => {});
    }, REFRESH_MS);
  });
  document.addEventListener("visibilitychange", () => document.hidden || refresh().catch(() => {}));
}
