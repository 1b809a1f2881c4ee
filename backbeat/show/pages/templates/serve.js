"use strict";
// Controls to address, address to answer, answer to page. One question is under way at a time; the latest one wins.
(() => {
  const { element, filled } = backbeat;
  const form = element("controls");
  const defaults = JSON.parse(element("data").textContent);
  const buckets = [0, 1, 2, 5, 10, 25, 50, 100, 200, 400, 800];
  let own = null, asking = false, again = false, timer = 0, latest = null, patient = null;

  const readers = {
    power: (value) => 2 ** value,
    times: (value) => Number((10 ** (value / 20)).toPrecision(3)),
    batch: (value) => (value === 0 ? "" : Math.max(1, Math.round((own || 64) * 2 ** (value / 2)))),
    bucket: (value) => buckets[value],
  };
  const writers = {
    power: (value) => Math.round(Math.log2(value)),
    times: (value) => Math.round(20 * Math.log10(value)),
    batch: (value) => (value ? Math.round(2 * Math.log2(value / (own || 64))) : 0),
    bucket: (value) => Math.max(0, buckets.indexOf(Number(value))),
  };
  const labels = {
    workers: (value) => value, bandwidth: (value) => `× ${value}`, latency: (value) => `× ${value}`,
    batch: (value) => value || own || "as profiled", bucket: (value) => (value ? `${value} MiB` : "as PyTorch's"),
    communicators: (value) => value, budget: (value) => (value ? `${value} GB` : "none"),
  };

  function read() {
    const state = {};
    for (const control of form.elements) {
      if (!control.name) continue;
      const scale = readers[control.dataset.scale];
      state[control.name] = control.type === "range" ? (scale ? scale(Number(control.value)) : Number(control.value)) : control.value;
    }
    // What the address says and no slider position can is kept until that slider is moved.
    return { ...state, ...exact };
  }
  let exact = {};

  function write(state) {
    for (const [name, value] of Object.entries({ ...defaults, ...state })) {
      const control = form.elements[name];
      if (!control || value === null) continue;
      if (control.type === "range") {
        const scale = writers[control.dataset.scale];
        control.value = scale ? scale(value) : value;
        if (String(read()[name]) !== String(value) && name in state) exact[name] = Number(value);
      } else {
        backbeat.choose(control, value);
      }
    }
  }

  const query = (state) => {
    const fields = new URLSearchParams();
    for (const [name, value] of Object.entries(state)) {
      const plain = defaults[name] === null ? "" : defaults[name];
      if (String(value) !== String(plain)) fields.set(name, value);
    }
    return fields;
  };

  function outputs(state) {
    for (const output of form.querySelectorAll("output")) output.textContent = labels[output.htmlFor.value](state[output.htmlFor.value]);
  }

  async function ask(thorough) {
    if (asking) { again = true; if (patient) patient.abort(); return; }
    asking = true;
    patient = thorough ? new AbortController() : null;
    const state = read();
    outputs(state);
    const fields = query(state);
    history.replaceState(null, "", `${location.pathname}${fields.size ? `?${fields}` : ""}${location.hash}`);
    element("perfetto").href = `/api/trace?${fields}`;
    if (thorough) fields.set("thorough", "1");
    await backbeat.ask(`/api/answer?${fields}`, show, patient ? { signal: patient.signal } : {});
    asking = false;
    clearTimeout(timer);
    if (again) { again = false; ask(false); } else if (!thorough) timer = setTimeout(() => ask(true), 350);
  }

  async function show(data) {
    latest = data;
    const { answer } = data;
    if (!read().batch) own = Number(data.readings.batch);
    outputs(read());
    element("headline").textContent = answer.headline;
    element("verdict").textContent = { yes: "scales well", partly: "scales with losses", no: "past the knee", alone: "one GPU", memory: "does not fit" }[answer.verdict];
    element("verdict").className = `verdict ${answer.verdict}`;
    element("scales").textContent = `${answer.scales} ${answer.memory}`;
    element("limit").textContent = answer.limit;
    element("notes").textContent = data.notes.length ? `What is not measured here: ${data.notes.join("; ")}.` : "";
    element("reading-bandwidth").textContent = data.readings.bandwidth;
    element("reading-latency").textContent = data.readings.latency;
    backbeat.showTiles(data.tiles);
    element("actions").replaceChildren(...answer.actions.flatMap((action) => {
      const parts = [filled("h3", action.title), filled("p", action.text)];
      return /^model|fully_shard/.test(action.code) ? [...parts, filled("pre", action.code)] : parts;
    }));
    element("sharding-text").textContent = data.sharding_text;
    choices(data);
    // What follows the sliders first; the rest once the browser has shown that, unless another answer is due.
    await backbeat.draw(element("plot-scaling"), data.figures.scaling);
    await compare();
    backbeat.answered();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    if (again) return;
    for (const anchor of ["exposed", "memory", "sharding"]) {
      element(anchor).hidden = !data.figures[anchor];
      if (data.figures[anchor]) await backbeat.draw(element(`plot-${anchor}`), data.figures[anchor]);
    }
    element("step-memory").hidden = !data.memory_of;
    if (data.memory_of) await remember();
    document.body.dataset.thorough = String(data.thorough);
  }

  function choices(data) {
    const names = Object.keys(data.timelines);
    for (const [id, fallback] of [["first", data.pair[0]], ["second", data.pair[1]]]) {
      const list = element(id);
      const kept = list.dataset.chosen && names.includes(list.dataset.chosen) ? list.dataset.chosen : fallback;
      list.replaceChildren(...names.map((name) => new Option(name, name)));
      if (id === "second") list.add(new Option("nothing", ""), 0);
      list.value = kept;
    }
    const labels = Object.keys(data.memories), list = element("memory-of");
    const kept = labels.includes(list.dataset.chosen) ? list.dataset.chosen : data.memory_of;
    list.replaceChildren(...labels.map((name) => new Option(name, name)));
    list.value = kept;
  }

  const compare = () => backbeat.draw(element("plot-timeline"), backbeat.pair(latest.timelines, element("first").value, element("second").value, element("overlay").checked));

  const remember = () => backbeat.draw(element("plot-step-memory"), latest.memories[element("memory-of").value]);
  element("memory-of").addEventListener("change", (event) => { event.target.dataset.chosen = event.target.value; remember(); });

  for (const id of ["first", "second", "overlay"]) {
    element(id).addEventListener("change", (event) => { event.target.dataset.chosen = event.target.value; if (latest) compare(); });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    const name = event.target.name;
    if (!name) return;
    delete exact[name];
    if (name === "profile") { own = null; form.elements.batch.value = 0; delete exact.batch; }
    ask(false);
  });
  element("share").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(location.href); element("share").textContent = "Copied"; } catch { element("share").textContent = "Copy the address"; }
  });
  element("upload").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    let data;
    try {
      const response = await fetch("/api/upload", { method: "POST", headers: { "X-Backbeat": "1" }, body: file });
      data = await response.json();
    } catch {
      data = { error: "the file could not be sent: is the server still running?" };
    }
    element("uploaded").classList.toggle("failed", Boolean(data.error));
    element("uploaded").textContent = data.error || "";
    if (data.error) return;
    const list = form.elements[data.kind];
    backbeat.choose(list, data.id, `${data.name} (uploaded)`);
    element("uploaded").textContent = `${data.name}: kept until the server stops`;
    if (data.kind === "profile") { own = null; form.elements.batch.value = 0; delete exact.batch; }
    ask(false);
  });

  write(Object.fromEntries(new URLSearchParams(location.search)));
  ask(false);
})();
