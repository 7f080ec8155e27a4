"use strict";

(function () {
  const $all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

  /* Tables: a press on a heading sorts by it, another one turns the order round. */

  function sortKey(cell) {
    return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
  }

  function compareCells(first, second, direction) {
    const a = sortKey(first);
    const b = sortKey(second);
    if (a !== null || b !== null) {
      // Rows without a number stay at the end, whichever the direction.
      if (a === null || Number.isNaN(a)) return b === null || Number.isNaN(b) ? 0 : 1;
      if (b === null || Number.isNaN(b)) return -1;
      return direction * (a - b);
    }
    return direction * first.textContent.localeCompare(second.textContent, undefined, { numeric: true });
  }

  function sortTable(heading) {
    const table = heading.closest("table");
    const headings = $all("th[aria-sort]", table);
    const column = headings.indexOf(heading);
    const body = table.tBodies[0];
    const numeric = heading.classList.contains("number");
    const next = { none: numeric ? "descending" : "ascending", ascending: "descending", descending: "ascending" };
    const order = next[heading.getAttribute("aria-sort")];
    headings.forEach((other) => other.setAttribute("aria-sort", other === heading ? order : "none"));
    const direction = order === "ascending" ? 1 : -1;
    const rows = Array.from(body.rows);
    rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], direction));
    body.append(...rows);
  }

  $all("table.sortable th button").forEach((button) => {
    button.addEventListener("click", () => sortTable(button.closest("th")));
  });

  /* Texts to copy. */

  function copyWithSelection(element) {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }

  $all(".copy").forEach((button) => {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      let done = true;
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        // A page opened from a file may have no clipboard; the selection then still can be copied.
        done = copyWithSelection(code);
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  });

  /* Two methods side by side: the menus fill the tables anew. */

  const ABSENT = "\u2013";
  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

  function dataSize(count) {
    const step = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log10(Number(count.toPrecision(3))) / 3)));
    return Number((count / 1000 ** step).toPrecision(3)) + " " + UNITS[step];
  }

  function difference(first, second, kind) {
    if (first === null || second === null) return ABSENT;
    const size = Math.abs(second - first);
    if (size === 0) return "0";
    const written = {
      percent: () => (100 * size).toFixed(2),
      bytes: () => dataSize(size),
      seconds: () => Number(size.toPrecision(3)) + " s",
      number: () => String(Number(size.toPrecision(4))),
    };
    return (second > first ? "+" : "\u2212") + written[kind]();
  }

  function fill(table, heads, lines) {
    Array.from(table.tHead.rows[0].cells).slice(1, 3).forEach((cell, place) => { cell.textContent = heads[place]; });
    const classes = Array.from(table.tHead.rows[0].cells).map((cell) => cell.className);
    table.tBodies[0].replaceChildren(...lines.map((line) => {
      const row = document.createElement("tr");
      row.append(...line.map((text, place) => {
        const cell = document.createElement(place === 0 ? "th" : "td");
        if (place === 0) cell.scope = "row";
        cell.className = classes[place];
        cell.textContent = text;
        return cell;
      }));
      return row;
    }));
  }

  const compared = document.getElementById("side-by-side-data");
  if (compared) {
    const known = JSON.parse(compared.textContent);
    const box = compared.closest(".side-by-side");
    const sides = $all("select[data-side]", box);
    const [ofSettings, ofNumbers] = $all("table", box);
    const show = () => {
      const [a, b] = sides.map((side) => known.methods[Number(side.value)]);
      const keys = Object.keys(a.settings).filter((key) => a.settings[key] !== b.settings[key]);
      fill(ofSettings, [a.label, b.label], keys.map((key) => [key, a.settings[key], b.settings[key]]));
      const lines = known.numbers.map(([title, kind], place) => {
        return [title, a.texts[place], b.texts[place], difference(a.means[place], b.means[place], kind)];
      });
      fill(ofNumbers, [a.label, b.label], lines.filter((line) => line[1] !== ABSENT || line[2] !== ABSENT));
    };
    sides.forEach((side) => side.addEventListener("change", show));
  }

  /* Charts. */

  const payload = document.getElementById("charts");
  if (!payload) return;
  const { charts, themes, methods, dashes, colours, legend } = JSON.parse(payload.textContent);
  const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
  const chips = $all(".chip");
  const views = new Map();
  const settings = new Map();

  function expandColumn(column) {
    return Array.isArray(column) ? column : column.codes.map((code) => column.texts[code]);
  }

  /* Columns become rows again; see compact() in document.py. */
  function expandRows(table) {
    const names = Object.keys(table);
    if (!names.length) return [];
    const columns = names.map((name) => expandColumn(table[name]));
    return columns[0].map((_, row) => Object.fromEntries(names.map((name, i) => [name, columns[i][row]])));
  }

  function specification(name) {
    const { datasets, params = [], ...rest } = structuredClone(charts[name]);
    const rows = Object.entries(datasets).map(([dataset, table]) => [dataset, expandRows(table)]);
    const current = (parameter) => {
      if (parameter.name === "chosen") return { ...parameter, value: chosenMethods() };
      const key = name + "/" + parameter.name;
      return settings.has(key) ? { ...parameter, value: settings.get(key) } : parameter;
    };
    return { ...rest, params: params.map(current), datasets: Object.fromEntries(rows) };
  }

  function theme() {
    return darkScheme.matches ? themes.dark : themes.light;
  }

  /* A page with one method has no chips, and its method is in colour. */
  function chosenMethods() {
    if (!chips.length) return methods;
    return chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.method);
  }

  function paintChips() {
    chips.forEach((chip, position) => {
      const pressed = chip.getAttribute("aria-pressed") === "true";
      const colour = pressed ? theme().range.category[position % colours] : theme().style.muted.color;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      line.setAttribute("viewBox", "0 0 24 12");
      line.setAttribute("width", "24");
      line.setAttribute("height", "12");
      line.innerHTML = '<line x1="0" x2="24" y1="6" y2="6" stroke-width="3"/>';
      line.firstChild.setAttribute("stroke", colour);
      line.firstChild.setAttribute("stroke-dasharray", dashes[position].join(" "));
      chip.querySelector(".swatch").replaceChildren(line);
    });
  }

  async function draw(name) {
    const place = document.getElementById("chart-" + name);
    try {
      if (views.has(name)) views.get(name).finalize();
      const result = await window.vegaEmbed(place, specification(name), {
        config: theme(),
        renderer: "svg",
        logLevel: 1, // Errors only: an empty grey layer is nothing to warn of.
        ast: true,
        actions: false,
      });
      views.set(name, result);
    } catch (error) {
      place.classList.add("failed");
      place.textContent = "This chart could not be drawn: " + error.message;
    }
  }

  async function drawAll() {
    paintChips();
    document.documentElement.classList.toggle("dark-charts", darkScheme.matches);
    delete document.documentElement.dataset.charts;
    for (const name of Object.keys(charts)) await draw(name);
    document.documentElement.dataset.charts = "drawn";
  }

  /* Charts as files: always light on white, with a title, and with a legend where the page has its list of methods. */

  const FILE_WIDTH = 760;

  function encodings(part) {
    const inner = ["layer", "hconcat", "vconcat", "concat"].flatMap((name) => part[name] || []);
    const parts = part.spec ? [...inner, part.spec] : inner;
    return [...(part.encoding ? [part.encoding] : []), ...parts.flatMap(encodings)];
  }

  /* The same as with_legend() in charts.py, for the methods that are in colour now. */
  function standalone(name) {
    const spec = specification(name);
    const all = encodings(spec);
    const isMethod = (encoding, channel) => encoding[channel] && encoding[channel].field === "method";
    const named = all.some((encoding) => isMethod(encoding, "x") || isMethod(encoding, "y"));
    if (methods.length > 1 && !named) {
      const longest = Math.max(0, ...chosenMethods().map((method) => method.length));
      const room = 50 + Math.min(7 * longest, legend.labelLimit);
      const columns = Math.max(1, Math.floor((FILE_WIDTH - 60) / room));
      all.forEach((encoding) => {
        ["color", "strokeDash"].filter((channel) => isMethod(encoding, channel)).forEach((channel) => {
          encoding[channel].legend = { ...legend, columns };
        });
      });
    }
    const figure = document.getElementById("chart-" + name).closest("figure");
    const heading = figure.querySelector("h3:not([hidden])") || document.querySelector("h1");
    const chosen = $all("select", figure).map((menu) => {
      return menu.closest("label").textContent.replace(menu.textContent, "").trim() + ": " + menu.selectedOptions[0].text;
    });
    return {
      ...spec,
      ...(spec.width === "container" ? { width: FILE_WIDTH } : {}),
      background: "white",
      padding: 12,
      title: { text: inLines(heading.textContent, 78), subtitle: chosen, anchor: "start", offset: 12 },
    };
  }

  /* A title that is wider than the chart would take room away from it. */
  function inLines(text, most) {
    return text.match(new RegExp(`\\S.{0,${most - 1}}(?=\\s|$)|\\S+`, "g")) || [text];
  }

  async function save(name, format) {
    const place = document.createElement("div");
    place.className = "offstage";
    document.body.append(place);
    try {
      const options = { config: themes.light, renderer: "svg", logLevel: 1, ast: true, actions: false };
      const result = await window.vegaEmbed(place, standalone(name), options);
      const link = document.createElement("a");
      if (format === "svg") {
        link.href = URL.createObjectURL(new Blob([await result.view.toSVG()], { type: "image/svg+xml" }));
      } else {
        link.href = await result.view.toImageURL("png", 2);
      }
      link.download = name + "." + format;
      link.click();
      if (format === "svg") setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      result.finalize();
    } finally {
      place.remove();
    }
  }

  Object.keys(charts).forEach((name) => {
    const place = document.getElementById("chart-" + name);
    const buttons = ["png", "svg"].map((format) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = format.toUpperCase();
      button.title = "Save this chart as " + format.toUpperCase() + ", light on white, with a legend";
      button.setAttribute("aria-label", "Save as " + format.toUpperCase() + ": " + place.getAttribute("aria-label"));
      button.addEventListener("click", () => save(name, format));
      return button;
    });
    const box = document.createElement("div");
    box.className = "save";
    box.append(...buttons);
    $all(".save", place.parentElement).forEach((earlier) => earlier.remove());
    place.before(box);
  });

  function setSignal(name, signal, value) {
    if (!views.has(name)) return;
    const view = views.get(name).view;
    try {
      view.signal(signal, value).runAsync();
    } catch {
      // This chart has no such signal.
    }
  }

  function showChosen() {
    paintChips();
    Object.keys(charts).forEach((name) => setSignal(name, "chosen", chosenMethods()));
  }

  chips.forEach((chip) => {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      showChosen();
    });
  });

  $all("[data-choose]").forEach((button) => {
    button.addEventListener("click", () => {
      chips.forEach((chip, position) => {
        const which = { first: position < colours, all: true, none: false };
        chip.setAttribute("aria-pressed", String(which[button.dataset.choose]));
      });
      showChosen();
    });
  });

  const search = document.getElementById("find-method");
  if (search) {
    search.addEventListener("input", () => {
      const wanted = search.value.trim().toLowerCase();
      chips.forEach((chip) => { chip.hidden = !chip.dataset.method.toLowerCase().includes(wanted); });
    });
  }

  $all("select[data-chart]").forEach((menu) => {
    menu.addEventListener("change", () => {
      settings.set(menu.dataset.chart + "/" + menu.dataset.signal, menu.value);
      setSignal(menu.dataset.chart, menu.dataset.signal, menu.value);
      const spoken = `[data-of="${menu.dataset.chart}/${menu.dataset.signal}"]`;
      $all(spoken).forEach((words) => { words.hidden = words.dataset.value !== menu.value; });
    });
  });

  darkScheme.addEventListener("change", drawAll);
  drawAll();
})();
