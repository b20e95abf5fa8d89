// What all pages share: times in the viewer's zone, pages that follow what they show, charts that
// answer. Without it every page is complete, as of the time when it was asked for.
"use strict";

const $ = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const main = $("main");
const state = $("state");
const pause = $("pause");
let paused = false;

function say(text) {
  if (state && state.textContent !== text) state.textContent = text;
}

// Has the page follow what it shows until it is paused, or hidden, which costs the server nothing.
// `follow` is called at each change.
function offerPause(follow) {
  document.addEventListener("visibilitychange", follow);
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume updates" : "Pause updates";
    if (paused) say(`Paused at ${clock(new Date(), true)}.`);
    follow();
  });
}

// Changes the old nodes where they differ, so that focus, selection and scrolling stay.
function morph(old, fresh) {
  const same = old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && old.id === fresh.id;
  if (!same) {
    old.replaceWith(fresh.cloneNode(true));
  } else if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
  } else {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    morphChildren(old, fresh);
  }
}

// Rows have ids: one that has moved is found again, and one that is gone does not shift the others.
function morphChildren(old, fresh) {
  let place = old.firstChild;
  for (const wanted of fresh.childNodes) {
    const moved = wanted.id && [...old.children].find((each) => each.id === wanted.id);
    if (moved && moved !== place) {
      old.insertBefore(moved, place);
      place = moved;
    }
    if (!place || (place.id && place.id !== wanted.id)) {
      place = old.insertBefore(wanted.cloneNode(true), place);
    } else {
      const next = place.nextSibling;
      morph(place, wanted);
      place = next ? next.previousSibling : old.lastChild;
    }
    place = place.nextSibling;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function clock(at, seconds) {
  const text = at.toTimeString().slice(0, seconds ? 8 : 5);
  if (at.toDateString() === new Date().toDateString()) return text;
  if (Math.abs(at - Date.now()) < 6 * 864e5) return `${at.toDateString().slice(0, 3)} ${text}`;
  return `${at.toLocaleDateString("sv")} ${text}`;
}

function away(at) {
  const minutes = Math.floor(Math.abs(at - Date.now()) / 6e4);
  const hours = Math.floor(minutes / 60);
  let text = minutes ? `${minutes} min` : "under a minute";
  if (hours) text = hours < 24 ? `${hours}h ${minutes % 60}m` : `${Math.floor(hours / 24)}d ${hours % 24}h`;
  return at > Date.now() ? `, in ${text}` : `, ${text} ago`;
}

function localize(within) {
  for (const each of all("time", within)) {
    const at = new Date(each.dateTime);
    const text = clock(at, "seconds" in each.dataset) + ("ago" in each.dataset ? away(at) : "");
    if (each.textContent !== text) each.textContent = text;
  }
  for (const each of all("text[data-at]", within)) {
    const at = new Date(1000 * each.dataset.at);
    // A day is written at the server's midnight, rounded: half a day later it is the same for most viewers.
    const noon = new Date(1000 * each.dataset.at + 12 * 3600e3);
    const text = each.textContent; // with seconds, in a chart of minutes
    each.textContent = text.includes(":") ? at.toTimeString().slice(0, text.length) : noon.toDateString().slice(4, 10);
  }
}

// The upper and the lower edge of an area or a line at a place from 0 to 1; null in a gap.
function edgesAt(path, place) {
  const x = 1000 * place;
  let [at, height, top, bottom] = [0, 0, null, 160];
  for (const [, step, numbers] of path.getAttribute("d").matchAll(/([MLVH])([^MLVHZ]*)/g)) {
    const [first, second] = numbers.split(" ").map(Number);
    if (step === "V") height = first;
    if (step === "M" || step === "L") [at, height] = [first, second];
    if (step !== "H") continue;
    if (at <= x && x < first) top = height;
    if (first <= x && x < at) bottom = height;
    at = first;
  }
  return top === null ? null : [top, bottom];
}

function written(value, unit) {
  if (unit) return `${Math.round(10 * value) / 10}${unit}`;
  const [name, size] = value >= 2 ** 30 ? ["G", 2 ** 30] : ["M", 2 ** 20];
  return value < size ? "0" : `${+(value / size).toPrecision(3)}${name}`;
}

const cursors = {};
const fresh = { place: 0.9999, mark: null, used: false };
const cursorOf = (chart) => (cursors[chart.querySelector("[id]").id] ??= { ...fresh });

function set(node, values) {
  for (const name in values) node.setAttribute(name, values[name]);
  return node;
}

function draw(parent, name, kind, values) {
  const found = parent.querySelector(`:scope > .${kind}`);
  const made = found || parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  set(made, { class: kind, height: 160, ...values });
}

// Shows what the curves of a chart say at a place, to the eye and to a screen reader.
function point(chart, place) {
  const { from, to, top, unit } = chart.dataset;
  const said = all(".shapes path", chart).map((path) => {
    const edges = edgesAt(path, place);
    return edges && `${path.textContent} ${written(((edges[1] - edges[0]) / 160) * top, unit)}`;
  });
  const at = clock(new Date(1000 * (+from + place * (to - from))));
  const isGap = all(".area .unknown", chart).some(({ x, width }) => {
    const after = 100 * place - x.baseVal.valueInSpecifiedUnits;
    return after >= 0 && after < width.baseVal.valueInSpecifiedUnits;
  });
  const text = `${at}: ${isGap ? "not recorded" : said.filter(Boolean).join(", ")}`;
  const caption = chart.querySelector("figcaption");
  const output = caption.querySelector("output") || caption.appendChild(document.createElement("output"));
  output.textContent = text;
  set(chart.querySelector(".plot"), { "aria-valuetext": text, "aria-valuenow": Math.round(100 * place) });
  const cursor = Object.assign(cursorOf(chart), { place, used: true });
  const area = chart.querySelector(".area > svg");
  const begin = cursor.mark ?? place;
  draw(area, "line", "cursor", { x1: `${100 * place}%`, x2: `${100 * place}%`, y2: 160 });
  draw(area, "rect", "chosen", { x: `${100 * Math.min(begin, place)}%`, width: `${100 * Math.abs(begin - place)}%` });
}

function zoom(chart, place) {
  const { from, to } = chart.dataset;
  const cursor = cursorOf(chart);
  const [begin, end] = [cursor.mark, place].sort().map((each) => Math.round(+from + each * (to - from)));
  if (cursor.mark !== null && Math.abs(cursor.mark - place) > 0.01) location.search = `from=${begin}&to=${end}`;
  cursor.mark = null;
}

function placeOf(event, chart) {
  const area = chart.querySelector(".area").getBoundingClientRect();
  return Math.min(0.9999, Math.max(0, (event.clientX - area.left) / area.width));
}

const MOVES = { ArrowLeft: -0.01, ArrowRight: 0.01, PageDown: -0.1, PageUp: 0.1, Home: -1, End: 1 };
const ON_CHARTS = {
  focusin: (chart) => point(chart, cursorOf(chart).place),
  pointermove: (chart, event) => point(chart, placeOf(event, chart)),
  pointerdown: (chart, event) => {
    if (event.pointerType === "mouse") cursorOf(chart).mark = placeOf(event, chart);
  },
  pointerup: (chart, event) => zoom(chart, placeOf(event, chart)),
  keydown: (chart, event) => {
    const cursor = cursorOf(chart);
    if (event.key in MOVES) {
      point(chart, Math.min(0.9999, Math.max(0, cursor.place + MOVES[event.key])));
    } else if (event.key === "Enter") {
      if (cursor.mark === null) cursor.mark = cursor.place;
      else zoom(chart, cursor.place);
    } else {
      return;
    }
    event.preventDefault();
  },
};

// Adds to what the server sent what only scripts can do.
function dress(within) {
  localize(within);
  for (const each of all(".scripted", within)) each.hidden = false;
  for (const chart of all(".chart", within)) {
    const values = { tabindex: 0, role: "slider", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 100 };
    set(chart.querySelector(".plot"), { ...values, "aria-labelledby": chart.querySelector("[id]").id });
    if (cursorOf(chart).used) point(chart, cursorOf(chart).place);
  }
  if (!navigator.clipboard) return;
  for (const code of all(".todo code", within)) {
    const button = set(document.createElement("button"), { type: "button", "aria-label": `Copy ${code.textContent}` });
    button.textContent = "Copy";
    code.after(button);
  }
}

async function refresh() {
  if (paused || document.hidden || main.contains(document.activeElement?.closest("form"))) return;
  try {
    const reply = await fetch(location.href);
    if (!reply.ok) throw reply;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html").getElementById("main");
    const status = page.querySelector(".live");
    if (status) status.replaceWith(state.parentNode.cloneNode(true));
    else paused = true; // such as a job that has ended
    dress(page);
    morphChildren(main, page);
    main.classList.remove("old");
    say("Live.");
  } catch {
    if (!main.classList.contains("old")) say(`Not live: the values are those of ${clock(new Date(), true)}.`);
    main.classList.add("old");
  }
}

for (const name in ON_CHARTS) {
  document.addEventListener(name, (event) => {
    const plot = event.target.closest?.(".plot");
    if (plot) ON_CHARTS[name](plot.parentNode, event);
  });
}
document.addEventListener("click", async ({ target }) => {
  if (!target.matches(".todo button")) return;
  await navigator.clipboard.writeText(target.previousElementSibling.textContent);
  target.textContent = "Copied";
});
const zone = $("zone");
const isElsewhere = -60 * new Date().getTimezoneOffset() !== +zone.dataset.offset;
const within = isElsewhere ? `; expected starts and reasons are in ${zone.textContent}` : "";
zone.textContent = `your time zone, ${Intl.DateTimeFormat().resolvedOptions().timeZone}${within}`;
dress(document);
setInterval(() => localize(document), 15000);
if (main.dataset.refresh) {
  setInterval(refresh, 1000 * main.dataset.refresh);
  offerPause(refresh);
  say("Live.");
}
