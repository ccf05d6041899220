"use strict";
(() => {
  const root = document.documentElement;
  const NARROW = 480; // pixels: a plot below is on a phone
  const described = JSON.parse(document.getElementById("plots").textContent);
  const resolve = (value, style) => {
    if (typeof value === "string") {
      const found = value.match(/^var\((--[a-z0-9-]+)\)$/);
      return found ? style.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((inner) => resolve(inner, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner, style)]));
    return value;
  };
  const axis = (given, width) => ({
    gridcolor: "var(--rule)", linecolor: "var(--rule)", zerolinecolor: "var(--rule)", dividercolor: "var(--rule)", automargin: true,
    ...given, title: { text: given.title || "", standoff: 8 },
    ...(given.categoryarray ? { categoryarray: width < NARROW ? broken(given.categoryarray) : given.categoryarray } : {}),
  });
  // Room above the axes for the legend, which wraps: two entries a line on a phone, or one where names are long.
  const legendRoom = (data, width, budget) => {
    const names = data.filter((trace) => trace.name && trace.type !== "heatmap" && trace.showlegend !== false).map((trace) => trace.name);
    const longest = Math.max(0, ...names.map((name) => name.length));
    const columns = Math.max(1, Math.floor(width / (7.2 * longest + 58)));
    return 24 + 20 * Math.max(1, Math.ceil(names.length / columns)) + (budget ? 18 : 0);
  };
  const layout = (given, data, width) => {
    const axes = { xaxis: {}, yaxis: {} };
    for (const key of Object.keys(given)) if (/^[xy]axis\d*$/.test(key)) axes[key] = given[key];
    for (const key of Object.keys(axes)) axes[key] = axis(axes[key], width);
    const above = (given.annotations || []).some((note) => note.yref === "paper" && note.y === 1);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: width < NARROW ? 12 : 13, color: "var(--ink)" },
      margin: { l: 8, r: 12, t: legendRoom(data, width, above), b: 8 },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "top", yref: "container", traceorder: "normal" },
      hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--rule)", font: { color: "var(--ink)" } },
      width, ...given, ...axes,
    };
  };
  // Names beside bars break once on a phone, near their middle: they would take half of the width.
  const broken = (value) => {
    if (Array.isArray(value)) return value.map(broken);
    const text = String(value), places = [...text.matchAll(/[-,] ?(?=\S{3})| (?=\S)/g)].map((found) => found.index + found[0].length);
    if (text.length < 12 || !places.length) return text;
    const at = places.reduce((best, place) => (Math.abs(place - text.length / 2) < Math.abs(best - text.length / 2) ? place : best));
    return `${text.slice(0, at)}<br>${text.slice(at)}`;
  };
  const fitted = (data, width) => (width >= NARROW ? data
    : data.map((trace) => (trace.orientation === "h" ? { ...trace, y: broken(trace.y) } : trace)));
  const PAPER = 680; // pixels that fit a page of paper
  let paper = false;
  const drawn = (id) => {
    const plot = described[id], style = getComputedStyle(root), shown = document.getElementById(id);
    if (shown.closest("details:not([open])")) return null; // drawn once it is open
    const width = paper ? Math.min(PAPER, shown.clientWidth) : shown.clientWidth;
    const given = layout(plot.layout, plot.data, width);
    shown.style.height = `${Number(shown.dataset.height) + Math.max(0, given.margin.t - 64)}px`;
    return Plotly.react(shown, resolve(fitted(plot.data, width), style), resolve(given, style),
      { responsive: false, displaylogo: false, displayModeBar: false });
  };
  const draw = () => Promise.all(Object.keys(described).map(drawn));

  // One step of one layer, as heat.py computes it for the first view.
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
  const over = (values, whole) => { const m = mean(whole); return values.map((value) => (m ? value / m : 0)); };
  const largest = (values) => values.reduce((best, value) => Math.max(best, value), 0);
  const squares = (layer, at, kept) => kept
    ? layer.c[at].map((count, e) => (count ? layer.q[at][e] / count : null)) : over(layer.c[at], layer.c[at]);
  const show = (form) => {
    const id = form.dataset.plot, { data, frames } = described[id];
    const chosen = (name, otherwise) => (form.elements[name] ? Number(form.elements[name].value) : otherwise);
    const system = frames.systems[chosen("system", frames.start[0])];
    const layers = form.elements.layer;
    if (layers && layers.options.length !== system.layers.length)
      layers.replaceChildren(...system.layers.map((one, i) => new Option(one.layer, i)));
    const layer = system.layers[chosen("layer", 0)];
    const slider = form.elements.step;
    if (slider) slider.max = layer.step.length - 1;
    const at = slider ? Number(slider.value) : frames.start[2];
    const kept = form.elements.show && form.elements.show.value === "kept";
    [layer.f, layer.b].forEach((side, i) => { data[i].y = over(side[at], layer.f[at]); data[i].customdata = side[at]; });
    const [ahead, back] = [largest(data[0].y), largest(data[1].y)];
    let said = `layer ${layer.layer}, step ${layer.step[at]}: fullest rank ${ahead.toFixed(2)} mean loads forward, ${back.toFixed(2)} backward`;
    if (data[2]) {
      const values = squares(layer, at, kept);
      data[2].z = frames.grid.map((ids) => ids.map((e) => (e < 0 ? null : values[e])));
      data[2].zmax = kept ? 1 : largest(layer.c.map((counts) => largest(over(counts, counts))));
      const counts = layer.c[at], hottest = counts.indexOf(largest(counts));
      said += `; hottest expert ${hottest} with ${over(counts, counts)[hottest].toFixed(2)} times the mean`;
    }
    if (slider) slider.setAttribute("aria-valuetext", `step ${layer.step[at]}`);
    form.querySelector("output").textContent = said;
    document.getElementById(id).setAttribute("aria-label", `Loads of ${system.name}, ${said}`);
  };
  for (const form of document.querySelectorAll("form.controls")) {
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => { show(form); drawn(form.dataset.plot); });
    form.reset();
    show(form);
  }

  for (const part of document.querySelectorAll("details.run"))
    part.addEventListener("toggle", () => { if (part.open) part.querySelectorAll(".plot").forEach((plot) => drawn(plot.id)); });

  // Legends wrap and names break by width: a new width is a new drawing, once the window stands still.
  let width = root.clientWidth, waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (width !== root.clientWidth && !paper) { width = root.clientWidth; draw(); } }, 120);
  });
  const onPaper = (yes) => { if (paper !== yes) { paper = yes; draw(); } };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", (query) => onPaper(query.matches));
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  paper = matchMedia("print").matches;
  draw().then(() => {
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // where Plotly measures text
    root.dataset.drawn = "yes";
  });
})();
