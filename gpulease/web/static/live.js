// Keeps the page of the machine current: each event has the new HTML of one section.
"use strict";

const live = $("live");
const sections = all("#live > [id], #live .columns [id]").filter((each) => !each.id.includes("-"));
const AGAIN_MS = 5000;
let source = null;
let timer = 0;

function show(event) {
  const section = $(event.type);
  const fresh = document.createElement("template");
  fresh.innerHTML = event.data;
  localize(fresh.content);
  morphChildren(section, fresh.content);
  if (event.type !== "notice") return;
  const isOld = section.childElementCount > 0;
  live.classList.toggle("old", isOld);
  say(isOld ? "Not live: the daemon does not answer." : "Live.");
}

function listen() {
  clearTimeout(timer);
  if (source || paused || document.hidden) return;
  source = new EventSource(live.dataset.events);
  source.onopen = () => {
    live.classList.remove("old");
    say("Live.");
  };
  source.onerror = () => {
    if (!live.classList.contains("old")) say(`Connection lost at ${clock(new Date(), true)}; trying again.`);
    live.classList.add("old");
    // A browser tries again by itself, except after an answer such as 503.
    if (source.readyState === EventSource.CLOSED) {
      stop();
      timer = setTimeout(listen, AGAIN_MS);
    }
  };
  for (const section of sections) source.addEventListener(section.id, show);
}

function stop() {
  clearTimeout(timer);
  if (source) source.close();
  source = null;
}

offerPause(() => (paused || document.hidden ? stop() : listen()));
addEventListener("pagehide", stop);
addEventListener("pageshow", listen);
$("reload").hidden = true;
listen();
