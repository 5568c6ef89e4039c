// Refreshes the page by server-sent events. Without it the page works, and does not change.
"use strict";

const live = document.getElementById("live");
const state = document.getElementById("state");

// Changes `old` into `next`. Nodes that stay keep the focus, and whether they are open.
function update(old, next) {
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName || old.id !== next.id) {
    old.replaceWith(next);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== next.nodeValue) old.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  updateChildren(old, next);
}

function updateChildren(old, next) {
  // Elements that have gone are removed first, as moving the others would take their focus.
  const wantedIds = new Set([...next.children].map((child) => child.id));
  const byId = new Map();
  for (const child of [...old.children]) {
    if (!wantedIds.has(child.id)) child.remove();
    else if (child.id) byId.set(child.id, child);
  }
  let place = old.firstChild;
  for (const wanted of [...next.childNodes]) {
    const known = wanted.id ? byId.get(wanted.id) : place && !place.id && place;
    byId.delete(wanted.id);
    if (!known) {
      old.insertBefore(wanted, place);
      continue;
    }
    if (known === place) place = place.nextSibling;
    else old.insertBefore(known, place);
    update(known, wanted);
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

// A connection can end without an event. While the page is live, there is one each few seconds.
const SILENCE = 20000;
// The gap between two streams of a service that is well, at most.
const GAP = 2000;
let events, timer, stale, latest;

function show(text) {
  if (state.textContent !== text) state.textContent = text;
}

function pause() {
  clearTimeout(timer);
  clearTimeout(stale);
  if (events) events.close();
}

function retry(reason) {
  pause();
  show("Not live since " + new Date().toLocaleTimeString() + ": " + reason);
  timer = setTimeout(listen, 4000 + Math.random() * 4000);
}

function listen() {
  pause();
  const silent = () => retry("the service does not answer");
  timer = setTimeout(silent, SILENCE);
  events = new EventSource(live.dataset.events);
  // The first event may take a while where the list is long.
  events.onopen = () => clearTimeout(stale);
  events.onmessage = ({ data }) => {
    clearTimeout(timer);
    clearTimeout(stale);
    timer = setTimeout(silent, SILENCE);
    latest = new Date();
    const next = document.createElement("div");
    next.innerHTML = data;
    updateChildren(live, next);
    show("Live");
  };
  events.onerror = () => {
    // The service ends each stream after some seconds, and the browser opens the next one.
    if (events.readyState === EventSource.CLOSED) {
      retry("the service does not answer, or too many pages are open");
    } else {
      clearTimeout(stale);
      stale = setTimeout(() => show("Reconnecting, as of " + (latest ?? new Date()).toLocaleTimeString()), GAP);
    }
  };
}

// Pages that are not looked at leave their place to others.
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : listen()));
if (!document.hidden) listen();

// A page to which the viewer is led back begins with its buttons closed, as any other.
addEventListener("pageshow", ({ persisted }) => {
  if (persisted) for (const open of document.querySelectorAll("details[open]")) open.open = false;
});
