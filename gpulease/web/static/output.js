// Reads the page of a job's output again while the job runs.
"use strict";

const EVERY_MS = 2000;
const output = document.getElementById("output");
output.scrollTop = output.scrollHeight;

async function look() {
  if (!document.hidden) {
    const reply = await fetch(location.href).catch(() => null);
    if (reply && reply.ok) {
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
      output.textContent = page.getElementById("output").textContent;
      if (isAtEnd) output.scrollTop = output.scrollHeight;
      if (!page.getElementById("reload")) return; // it has ended
    }
  }
  setTimeout(look, EVERY_MS);
}

document.getElementById("reload").hidden = true;
setTimeout(look, EVERY_MS);
