"use strict";
// Replaces the drawings of curves by ones that can be switched, filtered, smoothed and zoomed.
// Colours are classes of the style sheet, so a change of theme needs no drawing.
(() => {
  const root = document.documentElement;
  const { charts, arms, reload } = JSON.parse(document.getElementById("charts").textContent);
  const groups = {};
  for (const chart of charts) groups[chart.group] ??= { against: "epochs", hidden: [], seeds: false, smooth: 0 };
  const store = { get: () => JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}"), set: (value) => sessionStorage.setItem(location.pathname, JSON.stringify(value)) };

  function element(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== "") made.setAttribute(key, value);
    made.append(...children); // Strings become text: nothing of a record is ever parsed as HTML.
    return made;
  }

  const number = (value, digits = 4) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(digits)));
  };
  const bytes = (value, digits = 3) => {
    const unit = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => value >= size) ?? [1, "B"];
    return `${number(value / unit[0], digits)} ${unit[1]}`;
  };

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

  function ticks(low, high, log, whole, count) {
    if (log) {
      const powers = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) powers.push(p);
      const marks = powers.length < 5 ? [1, 2, 5] : [1];
      const all = powers.flatMap((p) => marks.map((m) => Number(`${m}e${p}`)));
      const inside = all.filter((v) => v >= low && v <= high);
      if (inside.length > 1) return inside;
    }
    const rough = (high - low) / count || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough * 0.999);
    if (whole) step = Math.max(1, step);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(Number((n * step).toPrecision(12)));
    return found;
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

  function scale(low, high, start, end, log) {
    const of = log ? Math.log10 : (v) => v;
    const [a, b] = [of(low), of(high)];
    const at = (v) => start + (b > a ? (of(v) - a) / (b - a) : 0.5) * (end - start);
    return { at, low, high, start, end, log, back: (p) => a + ((p - start) / (end - start)) * (b - a) };
  }

  const axisOf = (chart) => (groups[chart.group].against in chart.x ? groups[chart.group].against : Object.keys(chart.x)[0]);

  // The lines to draw: those of visible arms, within the zoomed part, on an axis that has a place for them.
  function visible(chart) {
    const { hidden, seeds, smooth } = groups[chart.group], axis = axisOf(chart), [from, to] = chart.zoom ?? [-Infinity, Infinity];
    const place = (v) => v !== null && v !== undefined && (v > 0 || !chart.log);
    return chart.lines.filter((line) => !hidden.includes(line.arm)).map((line) => {
      const xs = line.xs[axis], [mean, low, high] = [line.mean, line.low, line.high].map((v) => smoothed(v, smooth));
      const inside = xs.map((x, i) => i).filter((i) => xs[i] >= from && xs[i] <= to);
      const points = (ys) => inside.filter((i) => place(ys[i])).map((i) => [xs[i], ys[i], i]);
      return {
        arm: line.arm, points: points(mean),
        band: seeds ? [] : inside.filter((i) => place(high[i])).map((i) => [xs[i], place(low[i]) ? low[i] : high[i] / 100, high[i]]),
        runs: seeds ? line.runs.map((run) => points(smoothed(run.y, smooth))) : [],
        spread: (i) => (line.low[i] === null || line.low[i] === undefined ? null : (line.high[i] - line.low[i]) / 2),
      };
    });
  }

  function draw(chart) {
    const place = document.getElementById(chart.id), width = Math.max(240, place.clientWidth), axis = axisOf(chart);
    const height = chart.kind === "loss" && width > 600 ? 380 : 290, lines = visible(chart);
    const levels = chart.levels.filter((l) => (l.text || lines.some((line) => line.arm === l.arm)) && (l.y > 0 || !chart.log));
    const all = lines.flatMap((l) => [...l.points, ...l.runs.flat()]);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", "font-size": 12, "aria-hidden": "true" });
    chart.drawn = null;
    if (all.length) {
      const ys = [...all.map((p) => p[1]), ...lines.flatMap((l) => l.band.flatMap((b) => [b[1], b[2]])), ...(chart.zoom ? [] : levels.map((l) => l.y))];
      const [low, high] = span(ys, chart.log, chart.zoom), xs = all.map((p) => p[0]);
      const toZero = (axis === "seconds" || axis === "bytes") && !chart.zoom;
      const y = scale(low, high, height - 44, 10, chart.log);
      const marks = ticks(low, high, chart.log, false, 6);
      let labels = [];
      for (let digits = 3; digits < 12 && new Set(labels).size < marks.length; digits += 1) labels = marks.map((m) => number(m, digits));
      const left = 30 + 6.6 * Math.max(...labels.map((l) => l.length));
      const x = scale(toZero ? 0 : Math.min(...xs), Math.max(...xs), left, width - 14, false);
      marks.forEach((mark, i) => {
        svg.append(element("path", { d: `M${left} ${y.at(mark)}H${width - 14}`, class: "rule", "stroke-opacity": 0.25 }));
        svg.append(element("text", { x: left - 6, y: y.at(mark) + 4, "text-anchor": "end" }, labels[i]));
      });
      const whole = axis !== "seconds" && axis !== "bytes";
      for (const mark of ticks(x.low, x.high, false, whole, width < 500 ? 4 : 9)) {
        const words = axis === "bytes" ? bytes(mark) : number(mark, 6);
        svg.append(element("text", { x: x.at(mark), y: height - 26, "text-anchor": "middle", class: "xtick" }, words));
      }
      svg.append(element("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "xtitle" }, chart.x[axis]));
      svg.append(element("text", { transform: `translate(12 ${(height - 44) / 2 + 5}) rotate(-90)`, "text-anchor": "middle" }, chart.y.slice(0, 44)));
      const path = (points) => `M${points.map((p) => `${x.at(p[0]).toFixed(1)} ${y.at(p[1]).toFixed(1)}`).join("L")}`;
      for (const line of lines.toReversed()) {
        const { style, dash } = arms[chart.group][line.arm], stroke = { class: `s${style}`, fill: "none", "stroke-dasharray": dash };
        const group = element("g", { class: `a${line.arm}` });
        if (line.band.length > 1) group.append(element("path", { d: `${path([...line.band.map((b) => [b[0], b[2]]), ...line.band.toReversed()])}Z`, class: `f${style} band`, "fill-opacity": 0.14 }));
        for (const run of line.runs) if (run.length) group.append(element("path", { ...stroke, d: path(run), class: `s${style} run`, "stroke-opacity": 0.5 }));
        if (line.points.length) group.append(element("path", { ...stroke, d: path(line.points), class: `s${style} line`, "stroke-width": 2 }));
        if (line.points.length <= 30) for (const p of line.points) group.append(element("circle", { cx: x.at(p[0]), cy: y.at(p[1]), r: 2.6, class: `f${style}` }));
        svg.append(group);
      }
      for (const level of levels) {
        if (y.at(level.y) > y.start || y.at(level.y) < y.end) continue; // outside of what is zoomed
        svg.append(element("path", { d: `M${left} ${y.at(level.y)}H${width - 14}`, class: "rule level", "stroke-dasharray": "4 4" }));
        svg.append(element("text", { x: left + 6, y: y.at(level.y) - 4, class: "level" }, level.text));
      }
      chart.drawn = { x, y, lines, width, height, axis };
    } else svg.append(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no arm is shown"));
    place.replaceChildren(svg);
  }

  // The figures at the pointer: of each arm the point that is nearest across.
  function tell(chart, place, px) {
    place.querySelectorAll(".tip, .cross").forEach((old) => old.remove());
    if (!chart.drawn || px === null) return;
    const { x, lines, height, axis, width } = chart.drawn;
    const near = lines.filter((l) => l.points.length).map((l) => [l, l.points.reduce((a, b) => (Math.abs(x.at(b[0]) - px) < Math.abs(x.at(a[0]) - px) ? b : a))]);
    if (!near.length) return;
    const best = near.reduce((a, b) => (Math.abs(x.at(b[1][0]) - px) < Math.abs(x.at(a[1][0]) - px) ? b : a))[1];
    place.firstChild.append(element("path", { d: `M${x.at(best[0])} 10V${height - 44}`, class: "rule cross", "stroke-opacity": 0.6 }));
    const tip = document.createElement("div"), title = document.createElement("strong");
    title.textContent = axis === "bytes" ? bytes(best[0]) : `${axis.replace(/s$/, "")} ${number(best[0], 6)}`;
    if (axis === "seconds") title.textContent = `${number(best[0], 4)} s`;
    tip.append(title);
    for (const [line, point] of near) {
      const row = document.createElement("div"), spread = line.spread(point[2]);
      const other = axis === "seconds" || axis === "bytes" ? ` after epoch ${point[2] + 1}` : "";
      row.textContent = `${arms[chart.group][line.arm].label}: ${number(point[1])}${spread === null ? "" : ` ± ${number(spread, 2)}`}${other}`;
      row.className = `tip-${arms[chart.group][line.arm].style}`;
      tip.append(row);
    }
    tip.className = "tip";
    tip.style[px > width / 2 ? "right" : "left"] = `${px > width / 2 ? width - px + 14 : px + 14}px`;
    place.append(tip);
  }

  function listen(chart) {
    const place = document.getElementById(chart.id);
    let from = null;
    const at = (event) => event.clientX - place.getBoundingClientRect().left;
    place.addEventListener("pointermove", (event) => tell(chart, place, at(event)));
    place.addEventListener("pointerleave", () => { from = null; tell(chart, place, null); });
    place.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = at(event); });
    place.addEventListener("pointerup", (event) => {
      if (from !== null && chart.drawn && Math.abs(at(event) - from) > 12) {
        chart.zoom = [from, at(event)].sort((a, b) => a - b).map(chart.drawn.x.back);
        draw(chart);
      }
      from = null;
    });
    place.addEventListener("dblclick", () => { chart.zoom = undefined; draw(chart); });
    let before = place.clientWidth;
    new ResizeObserver(() => { if (place.clientWidth !== before) { before = place.clientWidth; draw(chart); } }).observe(place);
  }

  const save = () => { try { store.set({ groups, logs: Object.fromEntries(charts.map((c) => [c.id, c.log])), theme: root.dataset.theme }); } catch { /* no storage: settings last until the next load */ } };
  function change(group) { charts.filter((c) => c.group === group).forEach(draw); save(); }

  // What was chosen before a page that follows a training loads itself again.
  try {
    const kept = store.get();
    for (const [name, known] of Object.entries(kept.groups ?? {})) if (name in groups) Object.assign(groups[name], known);
    for (const chart of charts) if (chart.log !== null && typeof kept.logs?.[chart.id] === "boolean") chart.log = kept.logs[chart.id];
    if (kept.theme) root.dataset.theme = kept.theme;
  } catch { /* damaged or forbidden: start afresh */ }

  for (const panel of document.querySelectorAll(".controls")) {
    const state = groups[panel.dataset.group], group = panel.dataset.group;
    if (!state) continue; // only bars
    const press = () => panel.querySelectorAll("[data-against]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.against === state.against)));
    panel.querySelectorAll("[data-against]").forEach((one) => one.addEventListener("click", () => {
      state.against = one.dataset.against;
      charts.filter((c) => c.group === group).forEach((c) => { c.zoom = undefined; });
      press();
      change(group);
    }));
    for (const one of panel.querySelectorAll("[data-arm]")) {
      const arm = Number(one.dataset.arm);
      one.checked = !state.hidden.includes(arm);
      one.addEventListener("change", () => {
        state.hidden = [...panel.querySelectorAll("[data-arm]:not(:checked)")].map((other) => Number(other.dataset.arm));
        change(group);
      });
    }
    const seeds = panel.querySelector("[data-seeds]"), smooth = panel.querySelector("[data-smooth]");
    seeds.checked = state.seeds;
    smooth.value = state.smooth;
    seeds.addEventListener("change", () => { state.seeds = seeds.checked; change(group); });
    smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); change(group); });
    press();
  }
  for (const one of document.querySelectorAll("[data-log]")) {
    const chart = charts.find((known) => known.id === one.dataset.log);
    one.setAttribute("aria-pressed", String(chart.log));
    one.addEventListener("click", () => {
      chart.log = !chart.log;
      one.setAttribute("aria-pressed", String(chart.log));
      draw(chart);
      save();
    });
  }

  const system = window.matchMedia("(prefers-color-scheme: dark)"), theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = isDark() ? "light theme" : "dark theme"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); save(); });
  system.addEventListener("change", name);

  name();
  root.dataset.drawn = "true"; // Shows what needs a script; before drawing, since it decides the width.
  charts.forEach((chart) => { draw(chart); listen(chart); });
  if (reload) setInterval(() => { if (!document.hidden) location.reload(); }, 1000 * reload);
})();
