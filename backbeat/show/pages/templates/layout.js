"use strict";
// One answer on the page: of the numbers of GPUs that a file holds, or from the server. Names are only ever set as text.
(() => {
  const { element, filled } = backbeat;
  const data = JSON.parse(element("data").textContent);
  const form = element("controls");
  const served = Boolean(form.elements.model);
  let latest = null, asking = false, again = false;

  // A layout breaks behind its commas where it has to.
  const breaking = (text) => text.split(/(?<=,)(?=[a-z])/).flatMap((part) => [part, document.createElement("wbr")]);

  async function show(answer) {
    latest = answer;
    element("headline").replaceChildren(...breaking(answer.headline));
    element("verdict").textContent = answer.verdict;
    element("verdict").className = `verdict ${answer.verdict === "fits" ? "yes" : "no"}`;
    element("limit").textContent = answer.limit;
    element("notes").textContent = answer.notes.length ? `What this is computed from: ${answer.notes.join("; ")}.` : "";
    backbeat.showTiles(answer.tiles);
    element("chosen").replaceChildren(...answer.labels.map((label, place) => new Option(`${place + 1}: ${label}`, place)));
    element("table-layouts").tBodies[0].replaceChildren(...answer.rows.map((row, place) => {
      const line = filled("tr", ...row.map((cell) => {
        const [text, key] = Array.isArray(cell) ? cell : [cell, cell];
        const made = filled("td", ...breaking(text));
        made.dataset.key = key;
        if (Array.isArray(cell)) made.dataset.raw = key; else made.className = "text";
        return made;
      }));
      const button = filled("button", line.cells[0].textContent);
      button.type = "button";
      button.title = "Show its step";
      button.dataset.layout = place;
      line.cells[0].replaceChildren(button);
      return line;
    }));
    for (const anchor of ["timeline", "step", "memory"]) element(anchor).hidden = !answer.rows.length;
    if (answer.rows.length) {
      await choose(0);
      for (const [anchor, drawing] of Object.entries(answer.figures)) await backbeat.draw(element(`plot-${anchor}`), drawing);
    }
    backbeat.answered();
  }

  async function choose(place) {
    element("chosen").value = place;
    element("shown").textContent = latest.steps[place];
    for (const button of document.querySelectorAll("[data-layout]")) button.setAttribute("aria-pressed", String(Number(button.dataset.layout) === place));
    await backbeat.draw(element("plot-timeline"), latest.timelines[place]);
  }

  async function ask() {
    if (asking) { again = true; return; }
    if (!form.reportValidity()) return;
    asking = true;
    const fields = new URLSearchParams();
    for (const control of form.elements) if (control.value !== String(data[control.name])) fields.set(control.name, control.value);
    history.replaceState(null, "", `${location.pathname}${fields.size ? `?${fields}` : ""}`);
    await backbeat.ask(`/api/layout?${fields}`, show);
    asking = false;
    if (again) { again = false; ask(); }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-layout]");
    if (button) choose(Number(button.dataset.layout));
  });
  element("chosen").addEventListener("change", (event) => choose(Number(event.target.value)));
  form.addEventListener("submit", (event) => event.preventDefault());
  if (served) {
    for (const [name, value] of new URLSearchParams(location.search)) {
      const control = form.elements[name];
      if (control && control.options) backbeat.choose(control, value);
      else if (control) control.value = value;
    }
    form.addEventListener("change", ask);
    ask();
  } else {
    const counts = Object.keys(data);
    form.elements.gpus.replaceChildren(...counts.map((count) => new Option(count, count)));
    form.hidden = counts.length < 2;
    form.addEventListener("change", () => show(data[form.elements.gpus.value]));
    show(data[counts[0]]);
  }
})();
