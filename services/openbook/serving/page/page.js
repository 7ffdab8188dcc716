// The page: what is asked, what has come, what is pointed at.

import { ask, Problem } from "./ask.js";
import { $, all, drawResult, el, light, Passages, redrawThreads, viewOf } from "./draw.js";
import { bodyOf, changes, FIELDS, fromLink, keyOf, moved, percent, pOf, settingsOf, textOf, toLink } from "./model.js";

const HEADLINE = $("headline").textContent;
const form = $("ask");
const field = (name) => form.elements[name];
const on = (id, name, listener) => $(id).addEventListener(name, listener);

const NOTHING = { hovered: null, focused: null, pinned: null }; // that is pointed at: else {word} or {key}
const state = {
  wanted: null, // the request that was asked last
  now: null, // its result, as far as it has come: {asked, evidence, tokens, answer, ...}
  before: null, // the result to compare with, of the same question
  chosen: 0, // which of several answers is shown
  passages: new Passages(),
  ...NOTHING,
  seen: new Map(), // results by link
};
let running; // the AbortController of the question on its way
let view;
let due; // the frame in which tokens are drawn

const KEY = "openbook key";
let store = {}; // if nothing is kept
try {
  store = sessionStorage;
} catch {}
const keep = (key) => {
  key ? (store[KEY] = key) : delete store[KEY];
  $("forget").hidden = !key;
};

// --- asking

const texts = () => Object.fromEntries(new FormData(form));

/** What the form says, and the passages on and off of the same question. */
function read() {
  const found = fromLink(toLink(texts()));
  if (!found) throw new Problem("invalid", { message: "question: there is none yet" });
  const wrong = FIELDS.find((name) => field(name).validity.badInput);
  if (wrong) throw new Problem("invalid", { message: `${wrong} must be a number` });
  const { question, without, snapshot, passages } = state.wanted ?? {};
  const again = question === found.question;
  if (again && without) Object.assign(found, { without, snapshot });
  if (again || state.now) found.passages = passages; // unseen they stay with their question
  return found;
}

function fill(request) {
  for (const name of ["question", ...FIELDS]) field(name).value = textOf(request[name]);
  tellSettings();
}

async function askFor(request, push = true) {
  running?.abort();
  const mine = (running = new AbortController());
  const link = toLink(request);
  if (push && location.hash !== link) history.pushState(null, "", link);
  begin(request);
  busy("Searching …");
  const begun = performance.now();
  let result;
  try {
    for await (const [name, data] of ask(bodyOf(request), store[KEY], mine.signal)) {
      if (name === "retrieved") {
        if (request.without && moved(data.snapshot_id, request.snapshot)) return askWithAll(request);
        show((result = { ...data, asked: request, tokens: [], answer: null, elapsed: 0 }));
        say(`Reading ${data.evidence.length} passages …`);
      } else if (name === "token") {
        result.tokens.push(data);
        due ||= requestAnimationFrame(redraw);
      } else {
        Object.assign(result, data, { answer: data, elapsed: (performance.now() - begun) / 1000 });
        redraw();
      }
    }
    state.seen.set(link, result);
    say(summary());
  } catch (error) {
    if (mine.signal.aborted) return;
    say("");
    problem(error instanceof Problem ? error : new Problem("failed", error), request);
    settle();
  } finally {
    if (running === mine) busy();
  }
}

function askWithAll({ without, ...request }) {
  history.replaceState(null, "", toLink(request));
  return askFor(request, false);
}

/** What was asked is what is shown, until something else is. */
function settle() {
  const { now } = state;
  if (!now) return;
  now.ended = true;
  state.wanted = now.asked;
  redraw();
}

function begin(request) {
  state.wanted = request;
  problem(null);
  fill(request);
}

function show(result) {
  const { now } = state;
  Object.assign(state, { now: result, chosen: 0, ...NOTHING });
  if (now?.asked.question !== result.asked.question || moved(now.snapshot_id, result.snapshot_id)) Object.assign(state, { before: null, passages: new Passages() });
  else if (now.answer) state.before = now;
  redraw();
}

/** A link, or going back: what was seen is shown, all else is asked. */
function follow() {
  const request = fromLink(location.hash);
  running?.abort();
  busy();
  if (!request) return start();
  const seen = state.seen.get(toLink(request));
  if (!seen) return askFor(request, false);
  begin(request);
  show(seen);
  return say(summary());
}

function start() {
  Object.assign(state, { wanted: null, now: null });
  problem(null);
  fill({});
  document.title = "openbook";
  $("headline").textContent = HEADLINE;
  $("hero").classList.remove("asked");
  $("start").hidden = false;
  $("result").hidden = true;
  $("question").focus();
}

// --- showing

function redraw() {
  const { now, passages, chosen } = state;
  due = 0;
  if (!now) return;
  const link = toLink(now.asked);
  const before = state.before && toLink(state.before.asked) !== link ? state.before : null;
  const without = (now.asked.without ?? []).map((id) => passages.add({ id }));
  view = viewOf(now, chosen, passages);
  const focused = document.activeElement;
  const target = targetOf(focused);
  drawResult(view, chosen, {
    off: [...without, ...[...passages.values()].filter((each) => each.off)],
    old: before && viewOf(before, 0, passages),
    changed: before && changes(before.asked, now.asked, (key) => passages.told(key)),
    link,
    command: command(now.asked),
    onchoose(i) {
      Object.assign(state, { chosen: i, pinned: null });
      redraw();
      all("#answers button")[i].focus();
    },
    onback: () => askFor(before.asked),
    onswitch,
  });
  point();
  const kept = focused.isConnected ? focused : all("[data-word], [data-key]").find((each) => same(targetOf(each), target));
  kept?.focus({ preventScroll: true });
}

/** One sentence for those who do not see the page. */
function summary() {
  const best = view.posterior.indexOf(Math.max(...view.posterior));
  const rests = best < 0 ? "" : ` It rests on ${state.passages.told(view.passages[best].key)}, to ${percent(view.posterior[best])}.`;
  const said = state.now.answer.abstained ? "The answer is held back. It would have been" : "Answer";
  return `${said}: ${view.text || "(empty)"}. Probability ${percent(pOf(view.log))}.${rests}`;
}

const say = (text) => ($("status").textContent = text);

function busy(text) {
  document.body.classList.toggle("busy", Boolean(text));
  $("result").setAttribute("aria-busy", Boolean(text));
  $("stop").hidden = !text;
  if (text) say(text);
  else running = null;
}

function tellSettings() {
  $("how-now").textContent = settingsOf(fromLink(toLink({ ...texts(), question: "?" })));
  field("decoding").disabled = field("formulation").value === "token";
  fit();
}

/** The box is as high as its question: WebKit 2.50 knows no field-sizing. */
function fit() {
  const box = $("question");
  box.style.height = 0;
  box.style.height = `${box.scrollHeight + 3}px`; // two borders, and what was rounded
}

/** For a shell, without the API key. */
function command(request) {
  const body = JSON.stringify(bodyOf(request)).replaceAll("'", "'\\''");
  return `curl -s ${new URL("v1/answer", location)} -H 'Content-Type: application/json' -d '${body}'`;
}

// --- what goes wrong

const TOLD = {
  invalid: ["This cannot be asked as it stands"],
  key: ["An API key is needed", "It stays in this tab and goes to this server alone."],
  forbidden: ["This API key may not ask"],
  late: ["It took too long", "Fewer passages, beams or tokens take less time."],
  busy: ["Too many questions at the moment"],
  unavailable: ["It cannot answer at the moment"],
  unreachable: ["The server cannot be reached"],
  broken: ["The connection broke off", "The answer is not whole: what had come until then is shown."],
  failed: ["Something went wrong"],
};
let waiting;

function problem(found, request) {
  clearInterval(waiting);
  for (const each of all("[aria-invalid]")) for (const name of ["invalid", "describedby"]) each.removeAttribute(`aria-${name}`);
  $("alert").replaceChildren();
  if (!found) return;
  const { kind, message, requestId } = found;
  const [title, hint] = kind === "key" && store[KEY] ? ["This API key is not accepted"] : TOLD[kind];
  const again = el("button.strong", { onclick: () => askFor(request, false) }, "Try again");
  $("alert").append(
    el("div.problem",
      el("div", { role: "alert" }, // read out anew with each change: no button in it
        el("h2", title),
        message && el("p", { id: "why", dir: "auto" }, message),
        hint && el("p.soft", hint)),
      kind === "key" ? keyForm(request) : kind !== "invalid" && again,
      requestId && el("p.soft", "request id ", el("code", requestId))),
  );
  $("alert").scrollIntoView({ block: "nearest" });
  if (kind === "key") $("key").focus();
  if (kind === "invalid") blame(message);
  if (kind === "busy") countDown(again, found.retryAfter);
}

function keyForm(request) {
  const box = el("input", { id: "key", type: "password", autocomplete: "off" });
  const onsubmit = (event) => {
    event.preventDefault();
    if (!box.value.trim()) return;
    keep(box.value.trim());
    askFor(request, false);
  };
  return el("form.row", { onsubmit }, el("label", "API key ", box), el("button.strong", "Use it"));
}

function blame(message) {
  const [name] = message.match(`\\b(question|${FIELDS.join("|")})\\b`) ?? [];
  if (!name) return;
  const box = field(name);
  if (name !== "question") $("how").open = true;
  box.setAttribute("aria-invalid", true);
  box.setAttribute("aria-describedby", "why");
  box.focus();
}

function countDown(button, left) {
  const tick = () => {
    button.textContent = left > 0 ? `Try again (in ${left} s)` : "Try again";
    if (left-- <= 0) clearInterval(waiting);
  };
  tick();
  waiting = setInterval(tick, 1000);
}

// --- passages on and off, and one's own

/** What a switch changes: the question that is shown. */
const asked = () => (state.wanted.question === state.now.asked.question ? state.wanted : state.now.asked);
const askWith = (lists) => askFor(fromLink(toLink({ ...asked(), snapshot: state.now.snapshot_id.slice(0, 12) || asked().snapshot, ...lists }))); // without empty ones

function onswitch(key, used) {
  const own = state.passages.get(key);
  const { id, title, text } = own;
  const { without = [], passages = [] } = asked();
  if (id >= 0) return askWith({ without: used ? without.filter((each) => each !== id) : [...without, id] });
  own.off = true;
  return askWith({ passages: used ? [...passages, { title, text }] : passages.filter((each) => keyOf(each) !== key) });
}

on("own", "submit", async (event) => {
  event.preventDefault();
  const { title, text } = event.target.elements;
  const own = { title: title.value.trim(), text: text.value.trim() };
  if (!own.text) return text.focus();
  event.target.reset();
  $("add").open = false;
  $("add").firstElementChild.focus();
  const isOwn = (each) => keyOf(each) === keyOf(own);
  await askWith({ passages: [...(asked().passages ?? []).filter((each) => !isOwn(each)), own] });
  if (title.value || text.value || state.wanted?.passages?.some(isOwn)) return;
  [title.value, text.value] = [own.title, own.text]; // not lost
  $("add").open = true;
});

// --- pointing: by mouse, by the keyboard's focus, or held by a click

const point = () => light(view, state.hovered ?? state.focused ?? state.pinned, state.pinned);
const same = (a, b) => a?.word === b?.word && a?.key === b?.key;

function targetOf(node) {
  const word = node.closest("#words [data-word]");
  const passage = node.closest(".card:not(.off), #rests [data-key]");
  return word ? { word: +word.dataset.word } : passage && { key: passage.dataset.key };
}

function set(change) {
  if (!view || Object.entries(change).every(([name, target]) => same(state[name], target))) return;
  Object.assign(state, change);
  point();
}

const hold = (target) => set({ hovered: null, focused: null, pinned: same(state.pinned, target) ? null : target });

on("result", "pointerover", (event) => event.pointerType === "mouse" && set({ hovered: targetOf(event.target) }));
on("result", "pointerleave", () => set({ hovered: null }));
on("result", "focusin", ({ target }) => {
  if (target.dataset.word) for (const each of all("#words [data-word]")) each.tabIndex = each === target ? 0 : -1;
  set({ focused: target.matches(":focus-visible") ? targetOf(target) : null });
});
on("result", "focusout", () => set({ focused: null }));
on("result", "click", ({ target }) => target.closest("[data-word], button[data-key]") && hold(targetOf(target)));

addEventListener("keydown", (event) => {
  const { target, key, altKey, ctrlKey, metaKey } = event;
  if (key === "Escape") set(NOTHING);
  if (!target.dataset?.word || altKey || ctrlKey || metaKey) return;
  const words = all("#words [data-word]");
  const right = getComputedStyle($("words")).direction === "rtl" ? -1 : 1;
  const step = { ArrowRight: right, ArrowLeft: -right, ArrowDown: 1, ArrowUp: -1, Home: -words.length, End: words.length }[key];
  if (key === "Enter" || key === " ") hold(targetOf(target));
  else if (step) words[Math.max(0, Math.min(words.length - 1, words.indexOf(target) + step))].focus();
  else return;
  event.preventDefault();
});

// --- buttons

function submit(event) {
  event?.preventDefault();
  try {
    askFor(read());
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    problem(error);
  }
}

on("ask", "submit", submit);
on("ask", "input", tellSettings);
on("question", "keydown", (event) => event.keyCode === 13 && !event.shiftKey && submit(event)); // 229: an input method's
on("stop", "click", () => {
  running?.abort();
  busy();
  say("Stopped.");
  settle();
  $("submit").focus();
});
on("examples", "click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  $("question").value = target.textContent;
  submit();
});
on("forget", "click", () => {
  keep("");
  $("question").focus();
});
addEventListener("popstate", follow);
addEventListener("resize", fit);
new ResizeObserver(redrawThreads).observe(document.body);
addEventListener("scroll", redrawThreads, { passive: true, capture: true });

keep(store[KEY]);
follow();
