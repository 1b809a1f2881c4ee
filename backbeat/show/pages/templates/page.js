"use strict";
// Themes, drawing, tables and downloads. Names are only ever set as text; what is drawn is computed in Python.
(() => {
  const drawn = new Map();
  const element = (id) => document.getElementById(id);
  const narrow = () => window.innerWidth < 640;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(drawing) {
    const layout = structuredClone(drawing.layout);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: style("--ink"), size: narrow() ? 11 : 13, family: "system-ui, sans-serif" };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: style("--raised"), bordercolor: style("--quiet"), font: { color: style("--ink") } };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--ink") };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      Object.assign(layout[key], { gridcolor: style("--rule"), zerolinecolor: style("--rule"), automargin: true });
      if (narrow() && layout[key].tickvals && layout[key].tickvals.length > 5) {
        const keep = (_, place) => place % 2 === 0;
        layout[key].tickvals = layout[key].tickvals.filter(keep);
        layout[key].ticktext = layout[key].ticktext.filter(keep);
      }
    }
    if (narrow()) {
      layout.margin = { l: 40, r: 8, t: 16, b: 48 };
      layout.legend = { ...layout.legend, font: { size: 10 } };
    }
    const data = drawing.data.map((trace) => {
      if (!narrow() || !trace.marker || !trace.marker.showscale) return trace;
      return { ...trace, marker: { ...trace.marker, showscale: false } };
    });
    return { data, layout };
  }

  async function draw(element, drawing) {
    drawn.set(element, drawing);
    const { data, layout } = themed(drawing);
    // Plotly would offer to send the chart to its own servers: a report stays where it is.
    const config = {
      responsive: true, displaylogo: false, displayModeBar: !narrow() && "hover", showSendToCloud: false, plotlyServerURL: "",
      modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"],
    };
    element.style.minHeight = `${layout.height}px`;
    await Plotly.react(element, data, layout, config);
    element.dataset.drawn = String(Number(element.dataset.drawn || 0) + 1);
  }

  const redraw = () => drawn.forEach((drawing, element) => draw(element, drawing));

  function download(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  // A spreadsheet would run a cell that starts like a formula.
  const harmless = (text) => (/^[=@+\-\t\r]/.test(text) && !/^[+-]?[\d.]+( ?%| [a-zµA-Z]+)?$/.test(text) ? `'${text}` : text);

  function csv(table) {
    return [...table.rows].map((row) => [...row.cells].map((cell) => quoted(harmless(cell.dataset.raw || cell.textContent.trim()))).join(",")).join("\n") + "\n";
  }

  function sort(button) {
    const heading = button.closest("th");
    const table = heading.closest("table");
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => row.cells[heading.cellIndex].dataset.key;
    const rows = [...table.tBodies[0].rows].sort((one, two) => {
      const [a, b] = [Number(key(one)), Number(key(two))];
      const order = Number.isNaN(a) || Number.isNaN(b) ? key(one).localeCompare(key(two)) : a - b;
      return rising ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }

  async function act(event) {
    const button = event.target.closest("[data-do]");
    if (!button) return;
    const kind = button.dataset.do;
    if (kind === "sort") sort(button);
    if (kind === "csv") download(`${button.dataset.name}.csv`, csv(element(button.dataset.table)), "text/csv");
    if (kind === "png") {
      const plot = element(button.dataset.plot);
      await Plotly.downloadImage(plot, { format: "png", filename: button.dataset.name, width: 1200, height: plot.layout.height || 500, scale: 2 });
    }
    if (kind === "copy") {
      const code = button.parentElement.querySelector("code, pre").textContent;
      try { await navigator.clipboard.writeText(code); button.textContent = "copied"; } catch { button.textContent = "select and copy"; }
    }
    if (kind === "theme") theme();
    if (kind === "trace") download("trace.json", element("trace").textContent, "application/json");
  }

  function theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraw();
  }

  document.addEventListener("click", act);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let was = narrow();
  window.addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); redraw(); } });
  const figures = JSON.parse(element("data").textContent);
  for (const [anchor, views] of Object.entries(figures)) draw(element(`plot-${anchor}`), views[0]);
  document.addEventListener("change", (event) => {
    const list = event.target.closest("[data-figure]");
    if (list) draw(element(`plot-${list.dataset.figure}`), figures[list.dataset.figure][Number(list.value)]);
  });
})();
