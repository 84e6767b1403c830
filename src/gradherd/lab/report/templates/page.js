"use strict";
// Draws the charts and handles the buttons. Colours are read from the style sheet, the one place
// that defines them.
(() => {
  const root = document.documentElement;
  const charts = Object.values(JSON.parse(document.getElementById("charts").textContent));
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 560px)");
  const touch = window.matchMedia("(pointer: coarse)");
  const groups = {};
  for (const chart of charts) {
    groups[chart.group] ??= { against: "epochs", hidden: new Set() };
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const faded = (hex, share) =>
    `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${share})`;
  // As in page.py: colour 0 belongs to the baseline.
  const armColour = (arm) => colour(`arm-${arm === 0 ? 0 : 1 + ((arm - 1) % 7)}`);

  function axisOf(chart) {
    const wanted = groups[chart.group].against;
    return wanted in chart.x ? wanted : Object.keys(chart.x)[0];
  }

  function painted(piece, chart, axis) {
    const trace = structuredClone(piece.trace);
    if (piece.xs) trace.x = piece.xs[axis];
    if (chart.log && piece.log_y) trace.y = piece.log_y;
    if (piece.role === "part") {
      const edge = { color: colour("panel"), width: 1 };
      trace.marker = { color: colour(`part-${piece.part}`), line: edge };
      return trace;
    }
    const paint = armColour(piece.arm);
    trace.visible = !groups[chart.group].hidden.has(piece.arm);
    trace.showlegend = false;
    if (piece.role === "band") trace.fillcolor = faded(paint, 0.17);
    if (piece.role === "bar") trace.marker = { color: paint };
    if (piece.role === "line" || piece.role === "thin") {
      const many = trace.y.length > 60;
      trace.line = { ...trace.line, color: paint, width: piece.role === "thin" ? 1.5 : 2.2 };
      trace.marker = { ...trace.marker, color: paint, size: 6 };
      if (many && piece.role === "line") trace.mode = "lines";
    }
    return trace;
  }

  function level(line, chart) {
    const paint = armColour(line.arm);
    return {
      type: "line", xref: "paper", x0: 0, x1: 1, y0: line.y, y1: line.y, layer: "below",
      visible: line.text !== "" || !groups[chart.group].hidden.has(line.arm),
      line: { color: paint, width: 1.3, dash: "dash" },
      label: {
        text: line.text, textposition: "start", yanchor: "bottom", padding: 3,
        font: { size: 11, color: paint },
      },
    };
  }

  // Powers of ten alone are too few ticks for a small range, all digits too many.
  function logTicks(traces) {
    const known = traces.flatMap((trace) => trace.y).filter((y) => y > 0);
    const decades = Math.log10(Math.max(...known) / Math.min(...known));
    if (decades < 0.8) return {};
    return { dtick: decades < 3 ? "D2" : 1, tickformat: ".3~g" };
  }

  function layoutOf(chart, axis, traces) {
    const small = narrow.matches;
    const text = colour("text");
    const rule = colour("rule");
    const side = { gridcolor: rule, linecolor: rule, zeroline: false, automargin: true };
    const title = (words) => ({ text: words, standoff: 8, font: { size: 12 } });
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 12, color: text },
      margin: { l: 46, r: 12, t: 14, b: 42, pad: 3 },
      showlegend: false,
      dragmode: touch.matches ? false : "zoom",
      hovermode: axis === "epochs" && !small ? "x unified" : "closest",
      hoverdistance: -1, // Show the nearest point, however far the pointer is.
      hoverlabel: {
        bgcolor: colour("panel"), bordercolor: rule, font: { color: text, size: 12 }, namelength: -1,
      },
      xaxis: { ...side, title: title(chart.x[axis]), showgrid: false, showline: true, ticks: "outside", tickcolor: rule },
      yaxis: { ...side, title: small || !chart.y ? undefined : title(chart.y), type: chart.log ? "log" : "linear" },
      shapes: chart.lines.map((line) => level(line, chart)),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: text },
    };
    const last = Math.max(1, ...traces.map((trace) => trace.x.at(-1) ?? 1));
    if (axis === "epochs") Object.assign(layout.xaxis, { tickformat: "d", hoverformat: "d" });
    if (axis === "epochs" || axis === "workers") {
      if (last <= (small ? 8 : 12)) layout.xaxis.dtick = 1;
    }
    if (axis === "seconds" || axis === "bytes") layout.xaxis.rangemode = "tozero";
    if (axis === "bytes") Object.assign(layout.xaxis, { tickformat: "~s", ticksuffix: "B" });
    if (chart.log) Object.assign(layout.yaxis, logTicks(traces));
    if (chart.kind === "load") Object.assign(layout, { barmode: "group", bargap: 0.25 });
    if (chart.kind === "time") {
      layout.barmode = "stack";
      layout.bargap = 0.35;
      layout.yaxis = {
        ...side, autorange: "reversed", showgrid: false,
        tickvals: chart.ticks.map((_, i) => i), ticktext: chart.ticks,
      };
      layout.xaxis.showgrid = true;
      layout.hovermode = "closest";
    }
    return layout;
  }

  const drawn = {
    responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover",
    // Named one by one: later versions of plotly may add buttons that lead elsewhere.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  function draw(chart) {
    const place = document.getElementById(chart.id);
    const axis = axisOf(chart);
    const traces = chart.pieces.map((piece) => painted(piece, chart, axis));
    if (chart.kind === "time") place.style.height = `${80 + 40 * chart.ticks.length}px`;
    return Plotly.react(place, traces, layoutOf(chart, axis, traces), drawn);
  }

  const drawAll = (wanted = () => true) => charts.filter(wanted).forEach(draw);

  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const button = document.getElementById("theme");
  function updateButton() {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "light theme" : "dark theme";
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    updateButton();
    drawAll();
  });
  for (const query of [system, narrow]) {
    query.addEventListener("change", () => { updateButton(); drawAll(); });
  }

  for (const panel of document.querySelectorAll(".controls")) {
    const group = panel.dataset.group;
    const own = (chart) => chart.group === group;
    for (const one of panel.querySelectorAll("[data-against]")) {
      one.addEventListener("click", () => {
        groups[group].against = one.dataset.against;
        for (const other of panel.querySelectorAll("[data-against]")) {
          other.setAttribute("aria-pressed", String(other === one));
        }
        drawAll((chart) => own(chart) && one.dataset.against in chart.x);
      });
    }
    for (const one of panel.querySelectorAll("[data-arm]")) {
      one.addEventListener("click", () => {
        const arm = Number(one.dataset.arm);
        const { hidden } = groups[group];
        if (!hidden.delete(arm)) hidden.add(arm);
        one.setAttribute("aria-pressed", String(!hidden.has(arm)));
        drawAll(own);
      });
    }
  }
  for (const one of document.querySelectorAll("[data-log]")) {
    one.addEventListener("click", () => {
      const chart = charts.find((known) => known.id === one.dataset.log);
      chart.log = !chart.log;
      one.setAttribute("aria-pressed", String(chart.log));
      draw(chart);
    });
  }

  // Paper is white.
  let before;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    if (before === undefined) delete root.dataset.theme;
    else root.dataset.theme = before;
    drawAll();
  });

  updateButton();
  drawAll();
  root.dataset.drawn = "true";
})();
