// Curves over time or steps, drawn by uPlot, which loads when the first curve does; and the choice of their span.
const HUES = [212, 32, 152, 2, 268, 188, 322, 66];
let loading;

const uplot = () =>
  (loading ??= (async () => {
    const sheet = document.createElement("link");
    sheet.rel = "stylesheet";
    sheet.href = new URL("./vendor/uplot.css", import.meta.url).href;
    document.head.append(sheet);
    return (await import("./vendor/uplot.js")).default;
  })());

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * Draw one chart into `box`. `lines`: [label, values, dash?]; `show` formats a value; `time`: xs are Unix seconds; `stepped`: a value lasts; `apart`: each line has its own summary.
 * Returns `update(xs, lines)`, which shows other values in it.
 */
export async function drawCurve(box, { title, xs, lines, show, time, top, stepped = false, apart = false }) {
  const Plot = await uplot();
  const words = (lines) => (apart ? lines.map((line) => `${line[0]}: ${summary([line], show)}`).join("; ") : summary(lines, show));
  const place = document.createElement("div");
  place.setAttribute("role", "img");
  box.append(place);
  const line = { stroke: () => ink("--line") }; // asked at each drawing: paper has other colours
  const axis = { stroke: () => ink("--soft"), grid: line, ticks: line };
  const series = lines.map(([label, , dash], number) => ({
    label,
    stroke: lines.length === 1 ? () => ink("--accent") : `hsl(${HUES[number % HUES.length]} 65% 50%)`,
    dash: dash ?? (number >= HUES.length ? [6, 4] : undefined),
    paths: stepped ? Plot.paths.stepped({ align: 1 }) : undefined,
    width: 1.5,
    points: { show: false },
    value: (_, value, __, at) => (at == null ? "" : value == null ? "unknown" : show(value)), // no `at`: the pointer is elsewhere
  }));
  const options = {
    title,
    width: Math.min(560, Math.max(260, box.clientWidth - 20)),
    height: 220,
    scales: { x: { time }, y: top === undefined ? {} : { range: [0, top] } },
    series: [{ label: time ? "Time" : "Step" }, ...series],
    axes: [axis, { ...axis, size: (_, words) => 22 + 7 * Math.max(4, ...(words ?? []).map((word) => word.length)), values: (_, ticks) => ticks.map(show) }],
    legend: { show: lines.length <= HUES.length },
  };
  const plot = new Plot(options, [xs, ...lines.map(([, values]) => values)], place);
  for (const query of ["print", "(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", () => plot.redraw());
  const note = document.createElement("p");
  note.className = "note";
  place.append(note);
  const describe = (lines) => {
    note.textContent = words(lines);
    place.setAttribute("aria-label", `${title}: ${note.textContent}`);
  };
  describe(lines);
  return (xs, lines) => {
    plot.setData([xs, ...lines.map(([, values]) => values)]);
    describe(lines);
  };
}

/** A row of buttons, of which one is pressed; `choose` is called with its value, now and at each press. */
export function choices(label, options, chosen, choose) {
  const bar = document.createElement("div");
  bar.className = "buttons spans";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", label);
  const buttons = options.map(([text, value]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => pick(value));
    bar.append(button);
    return [button, value];
  });
  const pick = (value) => {
    for (const [button, own] of buttons) button.setAttribute("aria-pressed", String(own === value));
    choose(value);
  };
  pick(chosen);
  return bar;
}

function summary(lines, show) {
  let [least, most, sum, count] = [Infinity, -Infinity, 0, 0];
  for (const [, values] of lines)
    for (const value of values) {
      if (value == null) continue;
      [least, most, sum, count] = [Math.min(least, value), Math.max(most, value), sum + value, count + 1];
    }
  return count ? `mean ${show(sum / count)}, from ${show(least)} to ${show(most)}` : "nothing is known";
}
