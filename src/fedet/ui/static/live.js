// Follows the server's events: the page is fetched again and its parts marked data-live are replaced, charts are redrawn.
// If there are parts that the page does not have yet, such as those of the first round, all of it is replaced.
"use strict";

(() => {
  const address = document.body.dataset.events;
  if (address === undefined) return;
  const connection = document.getElementById("connection");
  let waiting = false, again = false;

  async function refresh() {
    if (waiting) { again = true; return; }
    waiting = true;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.ok) update(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch { /* the event source says that the connection is lost, and tries again */ }
    waiting = false;
    if (again) { again = false; refresh(); }
  }

  function update(fresh) {
    const parts = [...fresh.querySelectorAll("[data-live]")];
    // Charts move from the fresh page to this one, so they must not be taken out of what replaces all of it.
    if (parts.some((part) => !document.getElementById(part.id))) replaceContent(document.getElementById("main"), fresh.getElementById("main"));
    else {
      updateCharts(fresh);
      for (const part of parts) {
        const old = document.getElementById(part.id);
        if (old.innerHTML !== part.innerHTML) replaceContent(old, part);
      }
    }
    Charts.drawAll();
  }

  function replaceContent(old, part) {
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const ticked = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
    old.replaceChildren(...part.childNodes);
    for (const box of old.querySelectorAll("input[type=checkbox]")) box.checked = ticked.has(box.value);
    if (focused) document.getElementById(focused)?.focus();
  }

  function updateCharts(fresh) {
    const now = document.getElementById("charts"), next = fresh.getElementById("charts");
    if (!now || !next) return;
    const ids = (place) => [...place.querySelectorAll("figure")].map((figure) => figure.id).join();
    if (ids(now) !== ids(next)) now.replaceChildren(...next.childNodes);
    else for (const area of next.querySelectorAll("[data-plot]")) document.getElementById(area.id).dataset.plot = area.dataset.plot;
  }

  const source = new EventSource(address);
  source.onmessage = () => { connection.textContent = ""; refresh(); };
  source.onerror = () => { connection.textContent = "No connection to fedet ui: what is shown may be out of date."; };
  addEventListener("pagehide", () => source.close());
})();
