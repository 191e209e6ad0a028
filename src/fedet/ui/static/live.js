// Follows the server's events: the page is fetched again, and what has changed in it is changed here. Elements stay the same
// ones, so that focus, scrolling, ticks, open details and a reader's place survive. A hidden page follows nothing.
"use strict";

(() => {
  const address = document.body.dataset.events;
  if (address === undefined) return;
  const connection = document.getElementById("connection");
  let source = null, waiting = false, again = false;

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
    const focused = document.activeElement;
    patchContent(document.getElementById("main"), fresh.getElementById("main"));
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // it was moved
    Charts.drawAll();
  }

  const nameOf = (node) => node.id || node.dataset?.key || "";

  // Named elements are found wherever they are now; others are taken in their order.
  function patchContent(old, fresh) {
    const named = new Map([...old.children].filter(nameOf).map((child) => [nameOf(child), child]));
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const name = nameOf(child), same = place && place.nodeName === child.nodeName && nameOf(place) === "";
      const known = name ? named.get(name) : same ? place : null;
      named.delete(name);
      if (!known) old.insertBefore(child, place);
      else {
        if (known === place) place = place.nextSibling;
        else old.insertBefore(known, place);
        patch(known, child);
      }
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  function patch(old, fresh) {
    if (!(old instanceof Element)) {
      if (old.data !== fresh.data) old.data = fresh.data;
    } else if (old.dataset.plot !== undefined) old.dataset.plot = fresh.dataset.plot; // its content is drawn by charts.js
    else if (old.dataset.own === undefined && !old.isEqualNode(fresh)) {
      patchAttributes(old, fresh);
      patchContent(old, fresh);
    }
  }

  function patchAttributes(old, fresh) {
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }

  // A browser has six connections to a server at most, over all its tabs.
  function follow() {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource(address);
    source.onmessage = () => { connection.textContent = ""; refresh(); };
    source.onerror = () => { connection.textContent = "No connection to fedet ui: what is shown may be out of date."; };
  }

  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", () => source?.close());
  follow();
})();
