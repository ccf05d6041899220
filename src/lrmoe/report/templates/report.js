"use strict";
(() => {
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
  const axis = (given) => ({
    gridcolor: "var(--rule)", linecolor: "var(--rule)", zerolinecolor: "var(--rule)", dividercolor: "var(--rule)", automargin: true,
    ...given, title: { text: given.title || "", standoff: 8 },
  });
  // Room above the axes for the legend, which wraps on a phone: one entry a line where names are long, else two.
  const legendRoom = (data) => {
    const names = data.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name);
    if (window.innerWidth >= 640 || names.length < 3) return names.length > 8 ? 64 : 44;
    return 24 + 20 * (names.some((name) => name.length > 22) ? names.length : Math.ceil(names.length / 2));
  };
  const layout = (given, data) => {
    const axes = { xaxis: {}, yaxis: {} };
    for (const key of Object.keys(given)) if (/^[xy]axis\d*$/.test(key)) axes[key] = given[key];
    for (const key of Object.keys(axes)) axes[key] = axis(axes[key]);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: "var(--ink)" },
      margin: { l: 8, r: 12, t: legendRoom(data), b: 8 },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "top", yref: "container", traceorder: "normal" },
      hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--rule)", font: { color: "var(--ink)" } },
      ...given, ...axes,
    };
  };
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    for (const [id, plot] of Object.entries(described)) {
      Plotly.react(id, resolve(plot.data, style), resolve(layout(plot.layout, plot.data), style),
        { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
  draw();
})();
