// The fleet: every GPU a cell with a colour and a letter, on canvases below each other; below them the node that was picked.
// A browser copies a whole canvas when a part of it changes, and no task may last so long that clicks wait: so there are several, and what a
// large fleet needs at first is done in several tasks.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";
import { effect, signal } from "./vendor/signals.js";
import { path } from "./head.js";
import { changedNodes, fleet, version } from "./stream.js";

const html = htm.bind(h);
const SIZES = [[800, 20], [3000, 15], [12000, 11], [40000, 8], [Infinity, 6]]; // largest number of GPUs, and the side of a cell in pixels
const LETTER_FROM = 13; // smaller cells have a pattern alone
const WIDE_FROM = 11; // smaller cells are closer together
const NAMES_UP_TO = 400; // nodes; with more, the pointer and the arrow keys tell the name
const TITLE = 20; // height of a place's title
const NAME = 15;
const ROW = 8; // GPUs beside each other
const EDGE = 3; // room for the frame of the picked node
const TILE = 512; // height of a canvas, in pixels: the first row below it begins another

/** The states of the legend: by letter, in its order. */
const states = new Map();
const heldLetters = new Set();
const picked = signal(-1);
const wanted = signal("");

/** @typedef {{canvas: HTMLCanvasElement, pen: CanvasRenderingContext2D, top: number, height: number, first: number, titles: [string, number][]}} Tile */
let area, sprites, boxes, cell, named, laidOut;
/** @type {Tile[]} */
let tiles = [];

export function start() {
  for (const one of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("#legend li"))) {
    if (one.dataset.held) heldLetters.add(one.dataset.letter);
    states.set(one.dataset.letter, { key: one.dataset.state, words: one.dataset.words, count: one.querySelector(".count"), item: one });
  }
  let shown = false;
  effect(() => {
    if (version.value === 0) return;
    if (!shown) {
      shown = true;
      build();
    }
    count();
    if (changedNodes.value === null) layOutSoon();
    else drawNodes(changedNodes.value);
  });
}

function build() {
  const live = document.getElementById("live");
  const find = document.createElement("div");
  find.className = "toolbar";
  render(html`<label>Find a node or job<input type="search" maxlength="100" autocomplete="off" onInput=${(event) => (wanted.value = event.target.value.trim())} /></label>`, find);
  const grid = document.createElement("div");
  grid.className = "grid";
  area = document.createElement("div");
  area.tabIndex = 0;
  area.setAttribute("role", "application");
  area.setAttribute("aria-label", "GPUs by node. Arrow keys pick a node, Enter opens it. The page Nodes has the same as a table.");
  const below = document.createElement("div");
  below.className = "picked";
  below.setAttribute("role", "status");
  grid.append(area);
  live.replaceChildren(find, grid, below);
  area.addEventListener("click", (event) => (picked.value = nodeUnder(event)));
  area.addEventListener("dblclick", open);
  area.addEventListener("mousemove", (event) => (area.title = hint(nodeUnder(event))));
  area.addEventListener("keydown", move);
  new ResizeObserver(() => grid.clientWidth === laidOut || layOutSoon()).observe(grid); // it also reports the first size
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layOutSoon);
  effect(() => {
    wanted.value;
    drawAll();
  });
  const none = html`No node has joined yet. <code>phalanx up</code> on the head's machine prints what to type next.`;
  let before = -1;
  effect(() => {
    version.value;
    const at = picked.value;
    grid.hidden = !fleet.nodes.length;
    if (before !== at) {
      if (before >= 0) drawNode(before);
      if (at >= 0) drawNode(at);
      before = at;
    }
    render(at >= 0 && at < fleet.nodes.length ? html`<${Picked} at=${at} />` : html`<p class="note">${fleet.nodes.length ? "Click a node, or pick one with the arrow keys, to see its GPUs." : none}</p>`, below);
  });
}

function count() {
  const [found, nodes] = [new Map(), new Map()]; // most nodes are alike: each kind is looked at once
  for (const letters of fleet.cells) nodes.set(letters, (nodes.get(letters) ?? 0) + 1);
  for (const [letters, many] of nodes) for (const letter of letters) found.set(letter, (found.get(letter) ?? 0) + many);
  for (const [letter, state] of states) {
    state.count.textContent = amount(found.get(letter) ?? 0);
    state.item.classList.toggle("none", !found.get(letter));
  }
  const sum = (letters) => [...letters].reduce((all, letter) => all + (found.get(letter) ?? 0), 0);
  const shown = { held: sum(heldLetters), gpus: sum(states.keys()), nodes: fleet.nodes.length, running: fleet.counts.running ?? 0, pending: fleet.counts.pending ?? 0 };
  for (const [key, value] of Object.entries(shown)) document.querySelector(`[data-count="${key}"]`).textContent = amount(value);
}

const amount = (value) => value.toLocaleString("en");

let awaited = 0;

/** Lay out and draw everything, each in a task of its own. */
function layOutSoon() {
  if (awaited) return;
  awaited = setTimeout(() => {
    layOut();
    setTimeout(() => {
      awaited = 0;
      makeSprites(devicePixelRatio || 1);
      drawAll();
    });
  });
}

/** Place every node: places below each other, nodes of a place in rows. A canvas begins with a row. */
function layOut() {
  const gpus = fleet.cells.reduce((sum, letters) => sum + letters.length, 0);
  cell = SIZES.find(([most]) => gpus <= most)[1];
  named = fleet.nodes.length <= NAMES_UP_TO;
  laidOut = area.parentElement.clientWidth;
  const width = laidOut - 24;
  const gap = cell >= WIDE_FROM ? 10 : 4;
  const names = document.createElement("canvas").getContext("2d");
  names.font = font(12);
  boxes = [];
  /** @type {Tile[]} */
  const fresh = [];
  let [x, y, tallest, place] = [EDGE, EDGE, 0, null];
  const begin = (at) => {
    const last = fresh.at(-1);
    if (last && y - EDGE - last.top < TILE) return;
    if (last) last.height = y - EDGE - last.top;
    const canvas = document.createElement("canvas");
    fresh.push({ canvas, pen: canvas.getContext("2d"), top: y - EDGE, height: 0, first: at, titles: [] });
  };
  begin(0);
  fleet.nodes.forEach((name, at) => {
    if (fleet.places[at] !== place) {
      place = fleet.places[at];
      if (at) y += tallest + gap;
      [x, tallest] = [EDGE, 0];
      begin(at);
      if (place) {
        fresh.at(-1).titles.push([place, y]);
        y += TITLE;
      }
    }
    const number = Math.max(1, fleet.cells[at].length);
    const wide = Math.min(number, ROW) * cell;
    const box = { x, y, w: named ? Math.max(wide, Math.min(150, names.measureText(name).width)) : wide, h: Math.ceil(number / ROW) * cell + (named ? NAME : 0), tile: null };
    if (x > EDGE && x + box.w > width) {
      y += tallest + gap;
      [x, tallest] = [EDGE, 0];
      begin(at);
      Object.assign(box, { x, y });
    }
    box.tile = fresh.at(-1);
    x += box.w + gap;
    tallest = Math.max(tallest, box.h);
    boxes.push(box);
  });
  fresh.at(-1).height = y + tallest + 4 - fresh.at(-1).top;
  for (const { canvas, height } of fresh) {
    canvas.width = canvas.height = 0; // until it is drawn
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  tiles = fresh;
  area.replaceChildren(...tiles.map((tile) => tile.canvas));
}

const font = (size) => `${size}px system-ui, "DejaVu Sans", sans-serif`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Two pictures for each state, so that a cell costs one copy, and a row of equal cells too. */
function makeSprites(ratio) {
  const inset = cell >= WIDE_FROM ? 2 : 1;
  const side = cell - inset;
  sprites = new Map();
  for (const [letter, state] of states) {
    const picture = document.createElement("canvas");
    picture.width = picture.height = Math.max(1, Math.round(side * ratio));
    const brush = picture.getContext("2d");
    brush.scale(ratio, ratio);
    brush.fillStyle = colour(`--c-${state.key}`);
    brush.fillRect(0, 0, side, side);
    const light = ["broken", "down", "hung", "lost"].includes(state.key);
    brush.fillStyle = brush.strokeStyle = light ? "#ffffff" : state.key === "free" ? colour("--soft") : colour("--c-ink");
    if (cell >= LETTER_FROM) {
      brush.font = `${Math.round(side * 0.68)}px ui-monospace, "DejaVu Sans Mono", monospace`;
      brush.textAlign = "center";
      brush.textBaseline = "middle";
      brush.fillText(letter, side / 2, side / 2 + 0.5);
    } else pattern(brush, state.key, side);
    const row = document.createElement("canvas");
    row.width = Math.round((ROW * cell - inset) * ratio);
    row.height = picture.height;
    const copier = row.getContext("2d");
    copier.scale(ratio, ratio);
    for (let index = 0; index < ROW; index += 1) copier.drawImage(picture, index * cell, 0, side, side);
    sprites.set(letter, picture).set(letter.repeat(ROW), row);
  }
}

/** A mark for cells that are too small for a letter, so that colour is never the only sign of a state. */
function pattern(brush, key, side) {
  const line = (...points) => {
    brush.beginPath();
    points.forEach(([x, y], at) => (at ? brush.lineTo(x * side, y * side) : brush.moveTo(x * side, y * side)));
    brush.stroke();
  };
  brush.lineWidth = 1;
  if (key === "idle") line([0, 1], [1, 0]);
  else if (key === "held" || key === "starting") line([0, 0.5], [1, 0.5]);
  else if (key === "low") line([0, 1], [0.5, 0.5]);
  else if (key === "waiting") (line([0, 0.35], [1, 0.35]), line([0, 0.7], [1, 0.7]));
  else if (key === "checkpointing") line([0.5, 0], [0.5, 1]);
  else if (key === "unoccupied" || key === "preempted") (line([0, 1], [1, 0]), brush.strokeRect(0.5, 0.5, side - 1, side - 1));
  else if (key === "hung" || key === "lost") (line([0, 0], [0.5, 1]), line([0.5, 1], [1, 0]));
  else if (key === "broken") (line([0, 0], [1, 1]), line([0, 1], [1, 0]));
  else if (key === "down") (line([0, 0.5], [1, 0.5]), line([0.5, 0], [0.5, 1]));
  else if (key === "draining") line([0, 0], [1, 1]);
  else if (key === "cordoned") brush.strokeRect(0.5, 0.5, side - 1, side - 1);
  else if (key === "reserved") brush.fillRect(side * 0.35, side * 0.35, side * 0.3, side * 0.3);
  else if (key === "outside") line([0.5, 0], [0.5, 1]);
}

const SLICE_MS = 8; // of drawing between two chances for clicks and keys
const SLICE = 100; // nodes between two looks at the clock
let drawing = 0;

/** Draw everything, first what the reader sees. */
function drawAll() {
  if (!boxes || !sprites) return;
  const above = area.getBoundingClientRect().top;
  const seen = ({ top, height }) => above + top + height > 0 && above + top < innerHeight;
  const queue = [...tiles.filter(seen), ...tiles.filter((tile) => !seen(tile))];
  cancelAnimationFrame(drawing);
  drawFrom(queue, -1, inks());
}

/** Draw the nodes of the first canvas in the queue from one on (-1: all of it), then the others: a slice in each frame, so that the page answers meanwhile. */
function drawFrom(queue, from, colours) {
  const end = performance.now() + SLICE_MS;
  let at = from;
  while (queue.length) {
    const [tile] = queue;
    if (at < 0) at = clear(tile, colours);
    const last = tiles[tiles.indexOf(tile) + 1]?.first ?? boxes.length;
    for (let count = 1; at < last && (count % SLICE || performance.now() < end); count += 1) drawNode(at++, colours);
    if (at >= last) [at] = [-1, queue.shift()];
    if (performance.now() >= end) break;
  }
  if (queue.length) drawing = requestAnimationFrame(() => drawFrom(queue, at, colours));
  else performance.mark("usable"); // for benchmarks.dashboard
}

/** Make a canvas empty but for its titles, and return the number of its first node. */
function clear({ canvas, pen, top, height, first, titles }, { soft }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(parseFloat(canvas.style.width) * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, -top * ratio);
  pen.textBaseline = "top";
  pen.font = `600 ${font(13)}`;
  pen.fillStyle = soft;
  for (const [text, y] of titles) pen.fillText(text, 0, y + 2);
  return first;
}

function drawNodes(numbers) {
  const colours = inks();
  for (const at of numbers) drawNode(at, colours);
}

/** Read once for many nodes: each reading makes the browser settle its styles. */
const inks = () => ({ ink: colour("--ink"), accent: colour("--accent"), soft: colour("--soft") });

function drawNode(at, { ink, accent } = inks()) {
  const box = boxes?.[at];
  if (!box?.tile.canvas.width) return; // it will be drawn with its canvas
  const pen = box.tile.pen;
  pen.clearRect(box.x - 2, box.y - 2, box.w + 4, box.h + 4);
  pen.globalAlpha = matches(at) ? 1 : 0.2;
  let top = box.y;
  if (named) {
    pen.font = font(12);
    pen.textBaseline = "top";
    pen.fillStyle = ink;
    pen.fillText(shortened(pen, fleet.nodes[at], box.w), box.x, top);
    top += NAME;
  }
  const letters = fleet.cells[at];
  const side = cell - (cell >= WIDE_FROM ? 2 : 1);
  for (let first = 0; first < letters.length; first += ROW, top += cell) {
    const row = letters.slice(first, first + ROW);
    const whole = sprites.get(row);
    if (whole && row.length > 1) pen.drawImage(whole, box.x, top, ROW * cell - cell + side, side);
    else for (let index = 0; index < row.length; index += 1) {
      const picture = sprites.get(row[index]);
      if (picture) pen.drawImage(picture, box.x + index * cell, top, side, side);
    }
  }
  pen.globalAlpha = 1;
  if (at === picked.peek()) {
    pen.strokeStyle = accent;
    pen.lineWidth = 2;
    pen.strokeRect(box.x - 1, box.y - 1, box.w + 1, box.h + 1);
  }
}

function shortened(pen, name, width) {
  if (pen.measureText(name).width <= width) return name;
  let text = name;
  while (text && pen.measureText(`${text}\u2026`).width > width) text = text.slice(0, -1);
  return `${text}\u2026`;
}

/** Whether a node is what the reader looks for: a part of its name, or the number of a job on it. */
function matches(at) {
  const text = wanted.peek();
  return !text || fleet.nodes[at].includes(text) || fleet.jobs[at].includes(text);
}

function nodeUnder(event) {
  const { left, top } = area.getBoundingClientRect();
  const [x, y] = [event.clientX - left, event.clientY - top];
  return boxes.findIndex((box) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h);
}

const jobOf = (at, index) => (fleet.jobs[at].length === 1 ? fleet.jobs[at][0] : (fleet.jobs[at][index] ?? ""));
const hint = (at) => (at < 0 ? "" : `${fleet.nodes[at]}: ${fleet.states[at]}, ${fleet.cells[at]}`);

function open() {
  if (picked.value >= 0) location.assign(path("nodes", fleet.nodes[picked.value]));
}

function move(event) {
  const at = picked.value;
  if (event.key === "Enter") return open();
  if (event.key === "Escape") return void (picked.value = -1);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  let next = at;
  if (step) next = at < 0 ? 0 : at + step;
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = at < 0 ? 0 : beside(at, event.key === "ArrowDown");
  else return;
  event.preventDefault();
  picked.value = Math.min(Math.max(next, 0), fleet.nodes.length - 1);
}

/** The nearest node in the row below or above. */
function beside(at, down) {
  const from = boxes[at];
  let [best, least] = [at, Infinity];
  boxes.forEach((box, number) => {
    if (down ? box.y <= from.y : box.y >= from.y) return;
    const far = Math.abs(box.y - from.y) * 10 + Math.abs(box.x - from.x);
    if (far < least) [best, least] = [number, far];
  });
  return best;
}

function Picked({ at }) {
  const rows = [...fleet.cells[at]].map((letter, index) => {
    const [state, job] = [states.get(letter), heldLetters.has(letter) ? jobOf(at, index) : ""];
    return html`<tr>
      <td>${index}</td>
      <td><span class=${`cell ${state.key}`} aria-hidden="true">${letter}</span> ${state.words}</td>
      <td>${job && html`<a href=${path("jobs", job)}>job ${job}</a>`}</td>
    </tr>`;
  });
  return html`<h2><a href=${path("nodes", fleet.nodes[at])}>${fleet.nodes[at]}</a> <span class=${`state ${fleet.states[at]}`}>${fleet.states[at]}</span></h2>
    <div class="scroll"><table><caption class="unseen">GPUs of the node</caption>
      <thead><tr><th scope="col">GPU</th><th scope="col">State</th><th scope="col">Job</th></tr></thead><tbody>${rows}</tbody></table></div>`;
}
