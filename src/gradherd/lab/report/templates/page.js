"use strict";
// Replaces the drawings of curves by ones that can be switched, filtered, smoothed and zoomed.
// Colours are classes of the style sheet, so a change of theme needs no drawing.
(() => {
  const root = document.documentElement;
  // Arms are by comparison, as in the legend.
  const { charts, arms, reload } = JSON.parse(document.getElementById("charts").textContent);
  const RIGHT = 14, TOP = 10, BOTTOM = 44; // pixels around a plot
  const groups = {}; // what is chosen, by comparison
  for (const chart of charts) {
    groups[chart.group] ??= { against: "epochs", hidden: [], seeds: false, smooth: 0 };
  }

  // --- numbers ---------------------------------------------------------------------------------

  function number(value, digits = 4) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
      return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
    }
    return String(Number(value.toPrecision(digits)));
  }

  function bytes(value) {
    const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
    const [size, unit] = units.find(([least]) => value >= least) ?? [1, "B"];
    return `${number(value / size, 3)} ${unit}`;
  }

  // Bias-corrected exponential mean, as TensorBoard smooths.
  function smoothed(values, weight) {
    let mean = 0, known = 0;
    return values.map((value) => {
      if (value === null || !weight) return value;
      mean = weight * mean + (1 - weight) * value;
      known += 1;
      return mean / (1 - weight ** known);
    });
  }

  // --- axes ------------------------------------------------------------------------------------

  function logTicks(low, high) {
    const powers = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) powers.push(p);
    const marks = powers.length < 5 ? [1, 2, 5] : [1];
    const all = powers.flatMap((p) => marks.map((m) => Number(`${m}e${p}`)));
    return all.filter((v) => v >= low && v <= high);
  }

  function ticks(low, high, { log = false, whole = false, count = 6 } = {}) {
    const powers = log ? logTicks(low, high) : [];
    if (powers.length > 1) return powers;
    const rough = (high - low) / count || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough * 0.999);
    const by = whole ? Math.max(1, step) : step;
    const found = [];
    for (let n = Math.ceil(low / by - 1e-9); n * by <= high + by * 1e-9; n += 1) {
      found.push(Number((n * by).toPrecision(12)));
    }
    return found;
  }

  // As many digits as it takes to tell the marks apart.
  function labelled(marks) {
    let labels = [];
    for (let digits = 3; digits < 12 && new Set(labels).size < marks.length; digits += 1) {
      labels = marks.map((mark) => number(mark, digits));
    }
    return labels;
  }

  // As in svg_chart.py: an axis covers at least a tenth of its values, so that noise looks flat. Who
  // zooms in wants to see it.
  function span(values, log, zoomed) {
    const low = Math.min(...values), high = Math.max(...values);
    if (log) return [low / 1.1, high * 1.1];
    const least = (zoomed ? 1e-9 : 0.1) * Math.max(Math.abs(low), Math.abs(high)) || 1;
    const margin = 0.04 * (high - low) + Math.max(0, least - (high - low)) / 2;
    return [low - margin, high + margin];
  }

  function scale([low, high], start, end, log) {
    const of = log ? Math.log10 : (v) => v;
    const [a, b] = [of(low), of(high)];
    return {
      low, high, start, end,
      at: (v) => start + (b > a ? (of(v) - a) / (b - a) : 0.5) * (end - start),
      back: (pixel) => a + ((pixel - start) / (end - start)) * (b - a),
    };
  }

  const axisOf = ({ group, x }) => (groups[group].against in x ? groups[group].against : Object.keys(x)[0]);
  const summed = (axis) => axis === "seconds" || axis === "bytes";

  // --- drawing ---------------------------------------------------------------------------------

  function element(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== "") made.setAttribute(key, value);
    }
    made.append(...children); // Strings become text: nothing of a record is parsed as HTML.
    return made;
  }
  const text = (x, y, anchor, words, more = {}) =>
    element("text", { x, y, "text-anchor": anchor, ...more }, words);

  // What is to be drawn of a line: the zoomed part, without points that a log axis cannot show.
  function prepared(line, chart) {
    const { seeds, smooth } = groups[chart.group];
    const [from, to] = chart.zoom ?? [-Infinity, Infinity];
    const xs = line.xs[axisOf(chart)];
    const [mean, low, high] = [line.mean, line.low, line.high].map((ys) => smoothed(ys, smooth));
    const shown = (y) => typeof y === "number" && (y > 0 || !chart.log);
    const inside = [...xs.keys()].filter((i) => xs[i] >= from && xs[i] <= to);
    const points = (ys) => inside.filter((i) => shown(ys[i])).map((i) => [xs[i], ys[i], i]);
    const band = inside.filter((i) => !seeds && shown(high[i]));
    return {
      arm: line.arm,
      points: points(mean),
      upper: band.map((i) => [xs[i], high[i]]),
      lower: band.map((i) => [xs[i], shown(low[i]) ? low[i] : high[i] / 100]),
      runs: seeds ? line.runs.map((run) => points(smoothed(run.y, smooth))) : [],
      spread: (i) => (typeof line.low[i] === "number" ? (line.high[i] - line.low[i]) / 2 : null),
    };
  }

  function drawAxes(svg, chart, x, y, width, height) {
    const axis = axisOf(chart);
    const marks = ticks(y.low, y.high, { log: chart.log });
    const labels = labelled(marks);
    marks.forEach((mark, i) => {
      const path = `M${x.start} ${y.at(mark)}H${x.end}`;
      svg.append(element("path", { d: path, class: "rule", "stroke-opacity": 0.25 }));
      svg.append(text(x.start - 6, y.at(mark) + 4, "end", labels[i]));
    });
    const few = { whole: !summed(axis), count: width < 500 ? 4 : 9 };
    for (const mark of ticks(x.low, x.high, few)) {
      const words = axis === "bytes" ? bytes(mark) : number(mark, 6);
      svg.append(text(x.at(mark), height - 26, "middle", words, { class: "xtick" }));
    }
    const middle = (x.start + x.end) / 2;
    svg.append(text(middle, height - 6, "middle", chart.x[axis], { class: "xtitle" }));
    const turned = { transform: `translate(12 ${(y.start + y.end) / 2}) rotate(-90)` };
    svg.append(text(0, 0, "middle", chart.y.slice(0, 44), turned));
  }

  function drawLine(line, chart, x, y) {
    const { style, dash } = arms[chart.group][line.arm];
    const place = ([px, py]) => `${x.at(px).toFixed(1)} ${y.at(py).toFixed(1)}`;
    const path = (points) => `M${points.map(place).join("L")}`;
    const stroke = (points, kind, more) =>
      element("path", {
        d: path(points), class: `s${style} ${kind}`, fill: "none", "stroke-dasharray": dash, ...more,
      });
    const group = element("g", { class: `a${line.arm}` });
    if (line.upper.length > 1) {
      const outline = `${path([...line.upper, ...line.lower.toReversed()])}Z`;
      group.append(element("path", { d: outline, class: `f${style} band`, "fill-opacity": 0.14 }));
    }
    for (const run of line.runs.filter((points) => points.length)) {
      group.append(stroke(run, "run", { "stroke-opacity": 0.5 }));
    }
    if (line.points.length) group.append(stroke(line.points, "line", { "stroke-width": 2 }));
    if (line.points.length <= 30) {
      for (const [px, py] of line.points) {
        group.append(element("circle", { cx: x.at(px), cy: y.at(py), r: 2.6, class: `f${style}` }));
      }
    }
    return group;
  }

  function drawLevel(svg, level, x, y) {
    const at = y.at(level.y);
    if (at > y.start || at < y.end) return; // outside of what is zoomed
    const path = `M${x.start} ${at}H${x.end}`;
    svg.append(element("path", { d: path, class: "rule level", "stroke-dasharray": "4 4" }));
    svg.append(text(x.start + 6, at - 4, "start", level.text, { class: "level" }));
  }

  function draw(chart) {
    const place = document.getElementById(chart.id), width = Math.max(240, place.clientWidth);
    const height = chart.kind === "loss" && width > 600 ? 380 : 290;
    const { hidden } = groups[chart.group];
    const wanted = chart.lines.filter((line) => !hidden.includes(line.arm));
    const lines = wanted.map((line) => prepared(line, chart));
    const levels = chart.levels.filter(
      (level) => (level.text || !hidden.includes(level.arm)) && (level.y > 0 || !chart.log),
    );
    const size = { viewBox: `0 0 ${width} ${height}`, class: "chart", "font-size": 12 };
    const svg = element("svg", { ...size, "aria-hidden": "true" });
    const points = lines.flatMap((line) => [...line.points, ...line.runs.flat()]);
    chart.drawn = null;
    if (points.length) {
      const inside = chart.zoom ? [] : levels.map((level) => [0, level.y]);
      const all = [...points, ...lines.flatMap((l) => [...l.upper, ...l.lower]), ...inside];
      const ends = span(all.map(([, py]) => py), chart.log, chart.zoom);
      const y = scale(ends, height - BOTTOM, TOP, chart.log);
      const widest = Math.max(...labelled(ticks(...ends, { log: chart.log })).map((l) => l.length));
      const xs = points.map(([px]) => px);
      const first = summed(axisOf(chart)) && !chart.zoom ? 0 : Math.min(...xs);
      const x = scale([first, Math.max(...xs)], 30 + 6.6 * widest, width - RIGHT);
      drawAxes(svg, chart, x, y, width, height);
      svg.append(...lines.toReversed().map((line) => drawLine(line, chart, x, y)));
      levels.forEach((level) => drawLevel(svg, level, x, y));
      chart.drawn = { x, lines, width, height };
    } else {
      svg.append(text(width / 2, height / 2, "middle", "no arm is shown"));
    }
    place.replaceChildren(svg);
  }

  // --- the pointer -----------------------------------------------------------------------------

  // Shows the figures at the pointer: of each arm the point that is nearest across.
  function tell(chart, place, pixel) {
    place.querySelectorAll(".tip, .cross").forEach((old) => old.remove());
    if (!chart.drawn || pixel === null) return;
    const { x, lines, width, height } = chart.drawn, axis = axisOf(chart);
    const away = (point) => Math.abs(x.at(point[0]) - pixel);
    const nearest = (points) => points.reduce((a, b) => (away(b) < away(a) ? b : a));
    const near = lines.filter((l) => l.points.length).map((l) => [l, nearest(l.points)]);
    if (!near.length) return;
    const [at] = nearest(near.map(([, point]) => point));
    const path = { d: `M${x.at(at)} ${TOP}V${height - BOTTOM}`, "stroke-opacity": 0.6 };
    place.firstChild.append(element("path", { ...path, class: "rule cross" }));
    const tip = document.createElement("div");
    tip.className = "tip";
    const say = (tag, words, name) => {
      const row = document.createElement(tag);
      row.textContent = words;
      row.className = name;
      tip.append(row);
    };
    const sums = { seconds: `${number(at)} s`, bytes: bytes(at) };
    say("strong", sums[axis] ?? `${axis.replace(/s$/, "")} ${number(at, 6)}`, "");
    for (const [line, [, value, index]] of near) {
      const { label, style } = arms[chart.group][line.arm], spread = line.spread(index);
      const about = spread === null ? "" : ` ± ${number(spread, 2)}`;
      const epoch = summed(axis) ? ` after epoch ${index + 1}` : "";
      say("div", `${label}: ${number(value)}${about}${epoch}`, `tip-${style}`);
    }
    const left = pixel <= width / 2;
    tip.style[left ? "left" : "right"] = `${(left ? pixel : width - pixel) + 14}px`;
    place.append(tip);
  }

  function listen(chart) {
    const place = document.getElementById(chart.id);
    const at = (event) => event.clientX - place.getBoundingClientRect().left;
    let from = null, before = place.clientWidth;
    const on = (name, act) => place.addEventListener(name, act);
    on("pointermove", (event) => tell(chart, place, at(event)));
    on("pointerleave", () => { from = null; tell(chart, place, null); });
    on("pointerdown", (event) => { from = event.pointerType === "mouse" ? at(event) : null; });
    on("pointerup", (event) => {
      if (from !== null && chart.drawn && Math.abs(at(event) - from) > 12) {
        chart.zoom = [from, at(event)].sort((a, b) => a - b).map(chart.drawn.x.back);
        draw(chart);
      }
      from = null;
    });
    on("dblclick", () => { chart.zoom = undefined; draw(chart); });
    new ResizeObserver(() => {
      if (place.clientWidth !== before) draw(chart);
      before = place.clientWidth;
    }).observe(place);
  }

  // --- what was chosen survives a reload -------------------------------------------------------

  function save() {
    const logs = Object.fromEntries(charts.map((chart) => [chart.id, chart.log]));
    const all = JSON.stringify({ groups, logs, theme: root.dataset.theme });
    try { sessionStorage.setItem(location.pathname, all); } catch { /* forbidden: until reload */ }
  }

  function restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}");
      for (const name of Object.keys(groups)) Object.assign(groups[name], kept.groups?.[name]);
      for (const chart of charts) {
        const log = kept.logs?.[chart.id];
        if (chart.log !== null && typeof log === "boolean") chart.log = log;
      }
      if (kept.theme) root.dataset.theme = kept.theme;
    } catch { /* damaged or forbidden: as if nothing had been chosen */ }
  }

  // --- controls --------------------------------------------------------------------------------

  function control(panel) {
    const name = panel.dataset.group, state = groups[name];
    if (!state) return; // only bars
    const own = charts.filter((chart) => chart.group === name);
    const redraw = () => { own.forEach(draw); save(); };
    const all = (what) => [...panel.querySelectorAll(`[data-${what}]`)];
    const press = () => all("against").forEach((one) => {
      one.setAttribute("aria-pressed", String(one.dataset.against === state.against));
    });
    for (const one of all("against")) {
      one.addEventListener("click", () => {
        state.against = one.dataset.against;
        own.forEach((chart) => { chart.zoom = undefined; }); // of another unit
        press();
        redraw();
      });
    }
    for (const one of all("arm")) {
      one.checked = !state.hidden.includes(Number(one.dataset.arm));
      one.addEventListener("change", () => {
        const off = all("arm").filter((other) => !other.checked);
        state.hidden = off.map((other) => Number(other.dataset.arm));
        redraw();
      });
    }
    const [seeds] = all("seeds"), [smooth] = all("smooth");
    seeds.checked = state.seeds;
    smooth.value = state.smooth;
    seeds.addEventListener("change", () => { state.seeds = seeds.checked; redraw(); });
    smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); redraw(); });
    press();
  }

  function logSwitch(one) {
    const chart = charts.find((known) => known.id === one.dataset.log);
    const press = () => one.setAttribute("aria-pressed", String(chart.log));
    press();
    one.addEventListener("click", () => { chart.log = !chart.log; press(); draw(chart); save(); });
  }

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const named = () => { theme.textContent = isDark() ? "light theme" : "dark theme"; };
  const turn = () => { root.dataset.theme = isDark() ? "light" : "dark"; named(); save(); };
  theme.addEventListener("click", turn);
  system.addEventListener("change", named);

  restore();
  named();
  document.querySelectorAll(".controls").forEach(control);
  document.querySelectorAll("[data-log]").forEach(logSwitch);
  root.dataset.drawn = "true"; // Shows what needs a script; first, since it decides widths.
  charts.forEach((chart) => { draw(chart); listen(chart); });
  if (reload) setInterval(() => { if (!document.hidden) location.reload(); }, 1000 * reload);
})();
