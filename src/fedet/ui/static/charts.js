// Draws each element with a data-plot with uPlot, in the colours of the style sheet. Tables have the same numbers.
"use strict";

const Charts = (() => {
  const plots = new Map(); // element -> {plot, spec, text, form, zoom}; zoom is null, "late", or [least, most]
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  function colour(name, alpha = 1) {
    probe.style.color = alpha === 1 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${100 * alpha}%, transparent)`;
    return getComputedStyle(probe).color;
  }

  function si(value) {
    const powers = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [unit, letter] = powers.find(([least]) => Math.abs(value) >= least) || [1, ""];
    return `${Number((value / unit).toPrecision(3))}${letter}`;
  }

  const FORMATS = {
    percent: (v) => `${Number((100 * v).toFixed(1))}%`,
    points: (v) => `${v > 0 ? "+" : ""}${Number((100 * v).toFixed(1))}`,
    seconds: (v) => `${Number(v.toPrecision(3))} s`,
    number: (v) => `${Number(v.toPrecision(3))}`,
  };
  const PRECISE = { ...FORMATS, percent: (v) => `${(100 * v).toFixed(2)}%`, points: (v) => `${v > 0 ? "+" : ""}${(100 * v).toFixed(2)}` };
  const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];

  function columns(spec) {
    const own = spec.series.map((series) => series.values);
    if (!spec.stacked) return [spec.x, ...own];
    const sums = own.map((_, i) => spec.x.map((_, k) => own.slice(0, i + 1).reduce((sum, values) => sum + (values[k] || 0), 0)));
    return [spec.x, ...sums.reverse()]; // the largest first, so that smaller ones are drawn over it
  }

  // What the legend says: the value under the cursor, or the last one.
  function known(values, k, format) {
    const value = k == null ? values.findLast((v) => v != null) : values[k];
    return value == null ? "–" : format(value);
  }

  const listed = (spec) => (spec.stacked ? [...spec.series].reverse() : spec.series);

  function seriesOf(entry) {
    const { spec } = entry, precise = PRECISE[spec.unit];
    return listed(spec).map((series, i) => {
      const stroke = colour(`--c${series.colour}`);
      const shown = {
        label: series.label, stroke, width: i === 0 && spec.emphasis ? 2.75 : 2, dash: DASHES[series.dash % 4], spanGaps: true,
        value: (_, __, ___, k) => known(listed(entry.spec)[i].values, k, precise),
        points: { size: 6, stroke, fill: stroke },
      };
      return spec.stacked ? { ...shown, fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.85, 40] }) } : shown;
    });
  }

  function axes(spec, narrow) {
    const common = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const whole = spec.x_label === "round";
    return [
      { ...common, label: spec.x_label, labelSize: 20, size: 32, space: narrow ? 45 : 60, values: (_, ticks) => ticks.map((v) => (whole ? (Number.isInteger(v) ? v : "") : si(v))) },
      { ...common, size: 56, values: (_, ticks) => ticks.map(FORMATS[spec.unit]) },
    ];
  }

  // Where the names of the lines go, top to bottom: at their lines, but not over each other.
  function labelPlaces(u, levels, gap) {
    const shown = levels.map((level) => ({ ...level, y: u.valToPos(level.value, "y", true) }))
      .filter(({ y }) => y >= u.bbox.top - 1 && y <= u.bbox.top + u.bbox.height + 1).sort((a, b) => a.y - b.y);
    const places = shown.map(({ y }) => y);
    for (let i = 1; i < places.length; i++) places[i] = Math.max(places[i], places[i - 1] + gap);
    return shown.map((level, i) => ({ ...level, place: places[i] }));
  }

  function drawLevels(entry, narrow) {
    return (u) => {
      const { ctx } = u, { left, width } = u.bbox, ratio = devicePixelRatio, right = left + width;
      const levels = entry.spec.unit === "points" ? [{ value: 0 }] : entry.spec.levels; // a difference has one level: none
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour("--soft");
      ctx.lineWidth = ratio;
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      for (const { label, value, y, place } of labelPlaces(u, levels, 14 * ratio)) {
        ctx.setLineDash([6 * ratio, 4 * ratio]);
        ctx.beginPath();
        ctx.moveTo(left, y);
        ctx.lineTo(right, y);
        ctx.stroke();
        if (narrow || !label) continue; // the caption names them
        ctx.setLineDash([]);
        ctx.beginPath();
        ctx.moveTo(right, y);
        ctx.lineTo(right + 7 * ratio, place);
        ctx.stroke();
        ctx.fillText(`${label} ${FORMATS.percent(value)}`, right + 10 * ratio, place);
      }
      ctx.restore();
    };
  }

  function gutter(spec, narrow) {
    if (narrow || !spec.levels.length) return 12;
    return 24 + 6.6 * Math.max(...spec.levels.map(({ label, value }) => `${label} ${FORMATS.percent(value)}`.length));
  }

  function range(entry) {
    return (u, low, high) => {
      if (low == null) return [0, 1];
      const { spec } = entry, known = entry.zoom ? [] : spec.levels.map((level) => level.value);
      const least = Math.min(low, ...known), most = Math.max(high, ...known);
      const span = most - least, smallest = ["percent", "points"].includes(spec.unit) ? 0.01 : 2e-4; // else several ticks have the same label
      const pad = Math.max(span * 0.06, (smallest - span) / 2);
      const floor = spec.stacked ? 0 : spec.unit === "percent" ? Math.max(0, least - pad) : least - pad;
      return [floor, spec.unit === "percent" ? Math.min(1.005, most + pad) : most + pad];
    };
  }

  const isNarrow = (area) => area.clientWidth < 480;
  const height = (area) => (isNarrow(area) ? 240 : 280);

  // What a plot is made for: while this stays the same, new numbers go into the plot that is there.
  function formOf(spec, narrow) {
    const series = spec.series.map(({ label, colour, dash }) => [label, colour, dash]);
    return JSON.stringify([spec.x_label, spec.unit, spec.stacked, spec.emphasis, series, gutter(spec, narrow), narrow]);
  }

  function make(area, spec, zoom) {
    const narrow = isNarrow(area);
    const entry = { spec, zoom, text: area.dataset.plot, form: formOf(spec, narrow) };
    entry.plot = new uPlot({
      width: area.clientWidth, height: height(area),
      padding: [10, gutter(spec, narrow), 0, 0],
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, bind: { dblclick: () => () => zoomTo(area, null) } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false }, y: { range: range(entry) } },
      axes: axes(spec, narrow),
      series: [{ label: spec.x_label, value: (_, __, ___, k) => known(entry.spec.x, k, spec.x_label === "round" ? String : si) }, ...seriesOf(entry)],
      hooks: {
        draw: [drawLevels(entry, narrow)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 0) zoomTo(area, [left, left + width].map((place) => u.posToVal(place, "x")));
        }],
      },
    }, columns(spec), area);
    area.setAttribute("aria-hidden", "true"); // the table below says the same
    plots.set(area, entry);
    observer.observe(area);
    const button = lateButton(area);
    if (button) button.onclick = () => zoomTo(area, plots.get(area).zoom === "late" ? null : "late");
  }

  function remove(area) {
    plots.get(area)?.plot.destroy();
    plots.delete(area);
  }

  function drawAll() {
    for (const area of [...plots.keys()]) if (!area.isConnected) remove(area);
    for (const area of document.querySelectorAll("[data-plot]")) if (plots.get(area)?.text !== area.dataset.plot) draw(area);
  }

  function draw(area) {
    const entry = plots.get(area), spec = JSON.parse(area.dataset.plot), zoom = entry?.zoom ?? null;
    if (entry?.form === formOf(spec, isNarrow(area))) {
      entry.spec = spec;
      entry.text = area.dataset.plot;
      entry.plot.setData(columns(spec), false);
    } else {
      remove(area);
      make(area, spec, zoom);
    }
    zoomTo(area, zoom);
  }

  function zoomTo(area, zoom) {
    const entry = plots.get(area), { x, stacked } = entry.spec, [first, last] = [x[0], x[x.length - 1]];
    const beside = x.length === 1 ? Math.max(1, first / 2) : stacked ? 0.5 : 0; // half a bar
    const [min, max] = Array.isArray(zoom) ? zoom : zoom ? [(first + last) / 2, last] : [first - beside, last + beside];
    const button = lateButton(area);
    entry.zoom = zoom;
    entry.plot.setScale("x", { min, max });
    if (!button) return;
    button.hidden = x.length < 8;
    button.setAttribute("aria-pressed", String(zoom === "late"));
  }

  const lateButton = (area) => document.querySelector(`.late[data-for="${area.id}"]`);

  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const found = plots.get(target);
      if (!found || target.clientWidth === 0 || Math.abs(found.plot.width - target.clientWidth) <= 1) continue;
      found.plot.setSize({ width: target.clientWidth, height: height(target) });
      if (found.form !== formOf(found.spec, isNarrow(target))) draw(target); // narrow plots have no room for names
    }
  });

  function redraw() {
    for (const entry of plots.values()) entry.text = entry.form = "";
    drawAll();
  }

  document.addEventListener("fedet-theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  drawAll();
  return { drawAll, plots };
})();
