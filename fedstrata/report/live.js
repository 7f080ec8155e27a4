"use strict";

/* The live part of a served page: it asks for news, shows them in place, and keeps what the reader has set.

   It runs before the page's own scripts. After news these run once more, as they do when a page is loaded: what they
   had listened to is let go before, sections that are still the same stay, and charts take new rows without being drawn
   anew where nothing else has changed. */

(function () {
  const $all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const SECONDS = 2;
  const SECONDS_IN_THE_BACKGROUND = 15;

  /* The token comes in the address once; it does not stay there, where others might read it. */
  const address = new URL(window.location.href);
  const token = address.searchParams.get("token");
  if (token !== null) {
    address.searchParams.delete("token");
    window.history.replaceState(null, "", address);
  }
  let tag = document.getElementById("tag").dataset.tag;
  document.getElementById("tag").remove();

  /* What the page's scripts listen to, to be let go when they run again. */
  let listening = new AbortController();
  const listen = EventTarget.prototype.addEventListener;
  function listenForNow(type, listener, options) {
    const given = typeof options === "object" && options !== null ? options : { capture: Boolean(options) };
    return listen.call(this, type, listener, { signal: listening.signal, ...given });
  }
  EventTarget.prototype.addEventListener = listenForNow;
  const scriptsHaveRun = new Promise((resolve) => {
    listen.call(document, "DOMContentLoaded", () => {
      EventTarget.prototype.addEventListener = listen;
      resolve();
    });
  });

  /* Charts that are drawn: new rows go into them, and only another shape or theme draws them anew. */
  const drawn = new Map();
  if (window.vegaEmbed) {
    const embed = window.vegaEmbed;
    window.vegaEmbed = async (place, specification, options) => {
      await scriptsHaveRun;
      const { datasets = {}, params = [], ...rest } = specification;
      const shape = JSON.stringify([rest, params.map(({ value, ...parameter }) => parameter), options]);
      const rows = Object.fromEntries(Object.entries(datasets).map(([name, all]) => [name, JSON.stringify(all)]));
      const before = drawn.get(place.id);
      if (before && before.place === place && before.shape === shape) {
        const { view } = before.result;
        try {
          for (const [name, text] of Object.entries(rows)) {
            if (text !== before.rows[name]) view.data(name, datasets[name]);
          }
          for (const { name, value } of params) {
            if (value !== undefined) view.signal(name, value);
          }
          await view.runAsync();
          before.rows = rows;
          return before.result;
        } catch {
          before.result.finalize();
        }
      }
      const result = await embed(place, specification, options);
      const finalize = result.finalize.bind(result);
      result.finalize = () => {
        drawn.delete(place.id);
        finalize();
      };
      drawn.set(place.id, { place, shape, rows, result });
      return result;
    };
  }

  /* What the reader has set, by names that mean the same in the next page. */

  function nameOf(element) {
    const home = element.closest("section[id], aside, header, #live");
    const given = [element.id, element.name, ...Object.values(element.dataset)].filter(Boolean);
    const text = element.matches("summary, th") ? element.textContent : "";
    const label = element.getAttribute("aria-label") || (element.closest("label") || { textContent: "" }).textContent;
    const own = [element.tagName, text, ...(given.length ? given : [label])];
    return [home ? home.id || home.tagName : "", ...own].join("|");
  }

  function settings() {
    const kept = { values: new Map(), open: new Map(), pressed: new Map(), sorted: [], scrolled: [] };
    $all("select, input").forEach((control) => {
      const touched = control.matches("select")
        ? Array.from(control.options).some((option) => option.selected !== option.defaultSelected)
        : control.value !== control.defaultValue || control.checked !== control.defaultChecked;
      const chosen = control.matches("select") ? control.selectedOptions[0].textContent : control.value;
      if (touched) kept.values.set(nameOf(control), [chosen, control.checked]);
    });
    $all("details > summary").forEach((summary) => kept.open.set(nameOfDetails(summary), summary.parentElement.open));
    $all("[aria-pressed]").forEach((b) => kept.pressed.set(nameOf(b), b.getAttribute("aria-pressed")));
    $all("section[id] *").filter((one) => one.scrollLeft).forEach((one) => {
      kept.scrolled.push([one.closest("section").id, one.className, one.scrollLeft]);
    });
    $all("table.sortable").forEach((table) => {
      const heading = table.querySelector('th[aria-sort="ascending"], th[aria-sort="descending"]');
      if (heading) kept.sorted.push([nameOfTable(table), heading.textContent, heading.getAttribute("aria-sort")]);
    });
    return kept;
  }

  function nameOfDetails(summary) {
    return summary.closest("#live") ? "live" : nameOf(summary);
  }

  function nameOfTable(table) {
    const caption = table.querySelector("caption");
    return nameOf(table) + (caption ? caption.textContent : "");
  }

  /* Before the page's scripts run, which read these as they find them. */
  function restoreMarks(kept) {
    $all("details > summary").forEach((summary) => {
      const open = kept.open.get(nameOfDetails(summary));
      if (open !== undefined) summary.parentElement.open = open;
    });
    $all("[aria-pressed]").forEach((button) => {
      const pressed = kept.pressed.get(nameOf(button));
      if (pressed !== undefined) button.setAttribute("aria-pressed", pressed);
    });
  }

  /* After they have run: they hear of what was set as if it were set again. */
  function restoreControls(kept) {
    $all("select, input").forEach((control) => {
      const set = kept.values.get(nameOf(control));
      if (!set) return;
      if (control.matches("select")) {
        // By its words: the same choice may have another value in the next page.
        const same = Array.from(control.options).find((option) => option.textContent === set[0]);
        if (!same) return;
        same.selected = true;
      } else {
        [control.value, control.checked] = set;
      }
      for (const type of ["input", "change"]) control.dispatchEvent(new Event(type, { bubbles: true }));
    });
  }

  function restoreSorting(kept) {
    for (const [name, text, order] of kept.sorted) {
      const table = $all("table.sortable").find((one) => nameOfTable(one) === name);
      const heading = table && $all("th[aria-sort]", table).find((one) => one.textContent === text);
      const button = heading && heading.querySelector("button");
      for (let press = 0; button && press < 2 && heading.getAttribute("aria-sort") !== order; press += 1) button.click();
    }
    for (const [home, className, left] of kept.scrolled) {
      const section = document.getElementById(home);
      const box = section && $all("*", section).find((one) => one.className === className);
      if (box) box.scrollLeft = left;
    }
  }

  /* Parts of the page: a part that is still the same stays. */

  const PARTS = "#live, body > header, aside, main > section[id], body > footer";
  const keyOf = (part) => part.id || part.tagName;
  let served = htmlOfParts(document);

  function htmlOfParts(root) {
    return new Map($all(PARTS, root).map((part) => [keyOf(part), part.outerHTML]));
  }

  function keepCharts(part, before) {
    $all(".chart[id]", part).forEach((place) => {
      const old = before.querySelector("#" + CSS.escape(place.id));
      if (!old || !old.classList.contains("vega-embed")) return;
      old.setAttribute("aria-label", place.getAttribute("aria-label"));
      place.replaceWith(old);
    });
  }

  function swap(fresh) {
    const next = htmlOfParts(fresh);
    const old = new Map($all(PARTS).map((part) => [keyOf(part), part]));
    $all(PARTS, fresh).forEach((part) => {
      const before = old.get(keyOf(part));
      if (before && served.get(keyOf(part)) === next.get(keyOf(part))) part.replaceWith(before);
      else if (before) keepCharts(part, before);
    });
    served = next;
    const stays = $all("body > script");
    Array.from(document.body.childNodes).filter((node) => !stays.includes(node)).forEach((node) => node.remove());
    document.body.prepend(...fresh.body.childNodes);
  }

  function runAgain() {
    const own = $all("body > script:not([type])");
    own.slice(own.indexOf(thisScript) + 1).forEach((script) => {
      const again = document.createElement("script");
      again.textContent = script.textContent;
      script.replaceWith(again);
    });
  }

  function show(news) {
    const kept = settings();
    const focused = document.activeElement === document.body ? null : nameOf(document.activeElement);
    const [left, top] = [window.scrollX, window.scrollY];
    document.title = news.title;
    listening.abort();
    listening = new AbortController();
    $all("script#charts").forEach((data) => data.remove());
    swap(new DOMParser().parseFromString(news.body, "text/html"));
    const data = new DOMParser().parseFromString(news.data, "text/html").querySelector("script");
    if (data) thisScript.before(document.adoptNode(data));
    restoreMarks(kept);
    EventTarget.prototype.addEventListener = listenForNow;
    runAgain();
    EventTarget.prototype.addEventListener = listen;
    restoreControls(kept);
    restoreSorting(kept);
    const focus = focused && $all("button, select, input, a, summary").find((one) => nameOf(one) === focused);
    if (focus) focus.focus({ preventScroll: true });
    window.scrollTo({ left, top, behavior: "instant" });
    const root = document.documentElement;
    root.dataset.news = Number(root.dataset.news || 0) + 1;
    tellAges();
  }

  /* Ages, by the clock of the machine that serves the page. */

  const thisScript = document.currentScript;
  let ahead = 0;
  let heard = Date.now();

  function ago(seconds) {
    if (seconds < 1.5) return "just now";
    if (seconds < 100) return `${Math.round(seconds)} s ago`;
    if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  }

  function tellAges() {
    const now = Date.now() / 1000 + ahead;
    $all("time[data-at]").forEach((time) => { time.textContent = ago(now - Number(time.dataset.at)); });
    const lost = document.documentElement.dataset.live === "off";
    const words = lost ? `no answer any more; the page is as it was ${ago((Date.now() - heard) / 1000)}` : "";
    $all(".live-link").forEach((link) => { if (link.textContent !== words) link.textContent = words; });
  }

  async function ask() {
    const headers = { "If-None-Match": tag };
    if (token !== null) headers.Authorization = `Bearer ${token}`;
    const reply = await window.fetch("data.json", { cache: "no-store", headers });
    if (!reply.ok && reply.status !== 304) throw new Error(String(reply.status));
    heard = Date.now();
    ahead = Date.parse(reply.headers.get("Date")) / 1000 - heard / 1000;
    if (Math.abs(ahead) < 2) ahead = 0; // The header has whole seconds only.
    if (reply.status === 304) return;
    const news = await reply.json();
    show(news);
    tag = reply.headers.get("ETag");
  }

  async function follow() {
    try {
      await ask();
      document.documentElement.dataset.live = "on";
    } catch {
      document.documentElement.dataset.live = "off";
    }
    tellAges();
    setTimeout(follow, 1000 * (document.hidden ? SECONDS_IN_THE_BACKGROUND : SECONDS));
  }

  listen.call(document, "DOMContentLoaded", () => {
    tellAges();
    setInterval(tellAges, 1000);
    setTimeout(follow, 1000 * SECONDS);
  });
})();
