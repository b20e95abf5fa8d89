// Keeps the page of the machine current: each event has the new HTML of one section.
"use strict";

const live = document.getElementById("live");
const state = document.getElementById("state");
const pause = document.getElementById("pause");
const AGAIN_MS = 5000;
let source = null;
let paused = false;
let timer = 0;

function say(text) {
  if (state.textContent !== text) state.textContent = text;
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

function show(event) {
  const section = document.getElementById(event.type);
  const fresh = document.createElement("template");
  fresh.innerHTML = event.data;
  morphChildren(section, fresh.content);
  if (event.type !== "notice") return;
  const isOld = document.getElementById("notice").childElementCount > 0;
  live.classList.toggle("old", isOld);
  say(isOld ? "Not live: the daemon does not answer." : "Live.");
}

function listen() {
  clearTimeout(timer);
  if (source || paused || document.hidden) return;
  source = new EventSource(live.dataset.events);
  source.onopen = () => say("Live.");
  source.onerror = () => {
    say("Connection lost; trying again.");
    live.classList.add("old");
    // A browser tries again by itself, except after an answer such as 503.
    if (source.readyState === EventSource.CLOSED) {
      stop();
      timer = setTimeout(listen, AGAIN_MS);
    }
  };
  for (const section of live.children) source.addEventListener(section.id, show);
}

function stop() {
  clearTimeout(timer);
  if (source) source.close();
  source = null;
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.textContent = paused ? "Resume updates" : "Pause updates";
  if (paused) {
    stop();
    say("Paused.");
  } else {
    listen();
  }
});

// A hidden page costs the server nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
addEventListener("pagehide", stop);
addEventListener("pageshow", listen);
document.getElementById("reload").hidden = true;
pause.hidden = false;
listen();
