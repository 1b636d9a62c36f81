// The output of a job's ranks as it comes: chosen rank, search, and following the end.
const LINES_MAX = 5000; // kept in the page; older ones leave
const TAIL_BYTES = 65536; // of each rank, at first
const EMPTY = "No output yet. It appears here as the ranks write it.";
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f]/g;

/** Show the output in `place`. `route`: of the job. */
export function watchOutput(place, route) {
  const title = document.createElement("h2");
  title.textContent = "Output";
  const bar = document.createElement("div");
  bar.className = "toolbar";
  const rank = field("Rank", "input");
  rank.input.value = "all";
  rank.input.size = 8;
  rank.input.maxLength = 20;
  rank.input.setAttribute("list", "ranks");
  const choices = document.createElement("datalist");
  choices.id = "ranks";
  choices.append(...["all", "0", "supervisor", "stacks"].map((word) => new Option(word, word)));
  const search = field("Search", "input");
  search.input.type = "search";
  search.input.maxLength = 200;
  const follow = document.createElement("button");
  follow.type = "button";
  const note = document.createElement("span");
  note.className = "note";
  note.setAttribute("role", "status");
  bar.append(rank.label, choices, search.label, follow, note);
  const box = document.createElement("pre");
  box.className = "log";
  box.tabIndex = 0;
  box.setAttribute("role", "log");
  box.setAttribute("aria-live", "off");
  box.setAttribute("aria-label", "Output");
  place.replaceChildren(title, bar, box);

  let [lines, open, source, following, drawn] = [[], new Map(), null, true, false];

  const followEnd = (on) => {
    following = on;
    follow.textContent = on ? "Following the end" : "Follow the end";
    follow.setAttribute("aria-pressed", String(on));
    if (on) box.scrollTop = box.scrollHeight;
  };

  const draw = () => {
    drawn = false;
    const wanted = search.input.value.toLowerCase();
    const shown = wanted ? lines.filter((line) => line.text.toLowerCase().includes(wanted)) : lines;
    if (lines.length) box.replaceChildren(...shown.flatMap((line) => parts(line, wanted)));
    else box.textContent = EMPTY;
    if (wanted) note.textContent = `${shown.length} of ${lines.length} lines`;
    if (following) box.scrollTop = box.scrollHeight;
  };
  const drawSoon = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(draw);
  };

  const take = (chunk) => {
    const key = `${chunk.epoch}:${chunk.stream}`;
    const text = chunk.text.replace(ESCAPES, "").replace(/\r\n/g, "\n");
    for (const piece of text.split(/(?<=\n)/)) {
      let line = open.get(key);
      if (!line) {
        line = { rank: chunk.rank, text: "" };
        open.set(key, line);
        lines.push(line);
      }
      const whole = line.text + piece.replace(/\n$/, "");
      line.text = whole.slice(whole.lastIndexOf("\r") + 1).replace(CONTROL, "\ufffd"); // a progress bar returns to its start
      if (piece.endsWith("\n")) open.delete(key);
    }
    if (lines.length > LINES_MAX) lines = lines.slice(-LINES_MAX);
    drawSoon();
  };

  const connect = () => {
    source?.close();
    [lines, open] = [[], new Map()];
    draw();
    note.textContent = "";
    source = new EventSource(`${route}/logs?follow=1&tail_bytes=${TAIL_BYTES}&rank=${encodeURIComponent(rank.input.value.trim() || "all")}`);
    source.addEventListener("log", (event) => take(JSON.parse(event.data)));
    source.addEventListener("end", () => {
      source.close();
      note.textContent = lines.length ? "The job has ended." : "The job has ended without output.";
      if (!lines.length) box.textContent = "";
    });
    source.addEventListener("error", (event) => {
      if (event.data) note.textContent = JSON.parse(event.data).error.message;
      else if (source.readyState === EventSource.CLOSED) note.textContent = "The output cannot be read: no right to it, or no such rank.";
    });
  };

  follow.addEventListener("click", () => followEnd(!following));
  box.addEventListener("scroll", () => {
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    if (following !== atEnd) followEnd(atEnd);
  });
  search.input.addEventListener("input", () => (search.input.value || (note.textContent = ""), drawSoon()));
  rank.input.addEventListener("change", connect);
  followEnd(true);
  connect();
}

function field(title, tag) {
  const label = document.createElement("label");
  const input = document.createElement(tag);
  input.autocomplete = "off";
  label.append(title, input);
  return { label, input };
}

/** The nodes of one line: its rank, its text with what was found marked, and its end. */
function parts(line, wanted) {
  const rank = document.createElement("span");
  rank.className = "rank";
  rank.textContent = line.rank === null || line.rank === undefined ? "" : `${line.rank}: `;
  const found = [rank];
  let rest = line.text;
  for (let at; wanted && (at = rest.toLowerCase().indexOf(wanted)) >= 0; rest = rest.slice(at + wanted.length)) {
    const mark = document.createElement("mark");
    mark.textContent = rest.slice(at, at + wanted.length);
    found.push(rest.slice(0, at), mark);
  }
  return [...found, `${rest}\n`];
}
