// Drawing. Passages, answers and messages are whatever somebody wrote: they become text nodes, never markup.

import { keyOf, meaning, moved, nats, percent, placesOf, pOf, ratio, seconds, wordsOf } from "./model.js";

export const $ = (id) => document.getElementById(id);
export const all = (selector) => [...document.querySelectorAll(selector)];

const put = (node, name, value) => node.style.setProperty(name, value);

/** `el("p.soft", {name: value}, ...children)`: a listener by `onname`, a property of style by `--name`. */
export function el(kind, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) put(node, name, value);
    else if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(Boolean));
  return node;
}

const hueOf = ({ number }) => `var(--c${((number - 1) % 8) + 1})`;
const track = (p, ...more) => el("span.track", el("i", { "--p": p }), ...more);
const share = (p = 0, ...more) => [track(p, ...more), el("span.value.number", percent(p))];

/** The passages of one question by key, each with a number that stays while the question does. */
export class Passages extends Map {
  add(passage) {
    const key = keyOf(passage);
    if (!this.has(key)) this.set(key, { key, number: this.size + 1 });
    return Object.assign(this.get(key), passage);
  }

  told(key) {
    const { number, title } = this.get(key) ?? { number: key };
    return `passage ${number}${title ? `, “${title}”` : ""}`;
  }
}

/** What is seen of a result: one of its answers, its words, and what each rests on. */
export function viewOf(result, chosen, known) {
  const { answer, tokens, evidence, asked } = result;
  const one = answer?.answers[chosen] ?? answer;
  const formulation = answer?.formulation ?? asked.formulation;
  const text = one ? one.answer : tokens.map((token) => token.text).join("");
  const logs = one?.log_posterior ?? (answer ? evidence.map((each) => each.log_posterior) : tokens.at(-1)?.log_posterior);
  return {
    result,
    text,
    formulation,
    log: one?.log_likelihood,
    cut: one?.cut,
    citations: one?.citations ?? [],
    words: wordsOf(text, one?.tokens ?? tokens, formulation),
    passages: evidence.map((each) => known.add(each.passage)),
    prior: evidence.map((each) => pOf(each.log_prior)),
    posterior: (logs ?? evidence.map((each) => each.log_prior)).map(pOf),
    rests: logs,
  };
}

/** `off`: passages that do not take part. `old`: the view to compare with, from which `changed` led here. */
export function drawResult(view, chosen, { off, old, changed, link, command, onchoose, onback, onswitch }) {
  const { result, text } = view;
  $("result").hidden = false;
  $("start").hidden = true;
  $("hero").classList.add("asked");
  $("headline").textContent = result.asked.question;
  document.title = `${result.asked.question} · openbook`;
  drawNotice(view);
  drawWords($("words"), view, true);
  $("words").classList.toggle("held", Boolean(result.answer?.abstained));
  $("words").classList.toggle("long", text.length > 70);
  drawRests(view);
  drawSure(view);
  drawSeveral(result, chosen, onchoose);
  drawBefore(old, view, changed, onback);
  drawPassages(view, off, old, onswitch);
  drawTime(result);
  drawMade(result.answer, link, command);
  drawTable(view);
}

// --- the answer

/** `live`: its words can be pointed at. */
function drawWords(box, { text, words, passages, citations, result }, live) {
  const points = [...text];
  const children = [];
  let at = 0;
  words.forEach((word, i) => {
    children.push(points.slice(at, word.start).join(""));
    at = word.end;
    const shares = (word.shares ?? []).map((p, z) => [p, passages[z]]).filter(([p]) => p >= 0.01);
    const strip = el("span.strip", shares.map(([p, passage]) => el("i", { "--hue": hueOf(passage), "--p": p })));
    const named = shares.toSorted(([p], [q]) => q - p).map(([p, { number }]) => `passage ${number} ${percent(p)}`);
    const role = { role: "button", tabindex: i ? -1 : 0, "data-word": i, "aria-label": `${word.text}: ${named.join(", ")}` };
    const node = word.shares ? el("span.word", live ? role : {}, word.text, strip) : word.text;
    const cited = citations.filter(({ end }) => end > word.start && end <= word.end).map(({ evidence }) => passages[evidence]);
    const numbers = cited.map((each) => el("sup", { "aria-hidden": true, "--hue": hueOf(each) }, each.number));
    children.push(cited.length ? el("span.number", node, numbers) : node); // on one line
  });
  if (live && !result.answer && !result.ended) children.push(el("span.caret"));
  box.replaceChildren(...children);
}

function drawNotice({ text, cut, result: { answer, asked, complete, coverage, evidence, snapshot_id } }) {
  const [searched, total] = [coverage.n_searched, coverage.n_total].map((n) => n.toLocaleString("en"));
  const told = [
    moved(snapshot_id, asked.snapshot) && "The index has changed since: nothing is left out.",
    answer?.abstained && `Held back: it is less likely than the ${percent(asked.min_probability ?? 0)} that were asked for. This would have been said.`,
    cut && "Cut off.",
    !complete && `Partial: ${searched} of ${total} passages were searched; shard ${coverage.missing_shards.join(", ")} did not take part.`,
    evidence.length ? answer && !text.trim() && "The answer is empty: the model ended it before the first word." : "No passage was found.",
  ].filter(Boolean).join(" ");
  $("notice").hidden = !told;
  $("notice").textContent = told;
}

const MOST = 8;

/** A row for each passage; of many, for those that count most, for the answer or any of its words. */
function drawRests({ words, passages, posterior }) {
  const counts = posterior.map((p, z) => Math.max(p, ...words.map((word) => word.shares?.[z] ?? 0)));
  const most = [...counts.keys()].sort((a, b) => counts[b] - counts[a]).slice(0, MOST);
  const rows = most.sort((a, b) => passages[a].number - passages[b].number).map((z) => {
    const { key, number, title, text } = passages[z];
    return el("li", { "--hue": hueOf(passages[z]), "data-z": z },
      el("button", { "data-key": key }, el("span.chip", number), el("span.title", { dir: "auto" }, title || text || key), share()));
  });
  const more = passages.length - rows.length;
  $("rests").replaceChildren(...rows, more ? el("li.soft", `and ${more} more`) : "");
}

function drawSure({ log }) {
  const p = pOf(log);
  $("sure").hidden = log === undefined;
  $("sure").replaceChildren(
    el("p.number", el("b", `p(y|x) = ${percent(p)}`), " ", el("span.soft", `log ${nats(log)}`)),
    track(p),
    el("p.soft", `${meaning(p)} That is how sure the model is of the words, not whether they are true.`),
  );
}

/** Several answers, or the labels that one was chosen from. */
function drawSeveral({ answer }, chosen, onchoose) {
  const { answers = [], labels = [] } = answer ?? {};
  const row = (said, log) => [el("bdi.title", said || "(empty)"), ...share(pOf(log))];
  $("several").hidden = answers.length < 2 && !labels.length;
  $("several").firstElementChild.textContent = labels.length ? "Among these" : "Several answers";
  $("answers").replaceChildren(
    ...labels.map((each) => el("li", el("div", row(each.text, each.log_probability)))),
    ...answers.map((each, i) => el("li", el("button", { "aria-pressed": i === chosen, onclick: () => onchoose(i) }, row(each.answer, each.log_likelihood)))),
  );
}

function drawBefore(before, view, changed, onback) {
  $("before").hidden = !before;
  if (!before) return;
  const words = el("div.words.small", { dir: "auto" });
  drawWords(words, before);
  const [p, q] = [pOf(before.log), pOf(view.log)];
  const now = view.log !== undefined && [
    `, now ${percent(q)}: `,
    el("span.soft", [before.text === view.text ? "the same answer" : "another answer", ratio(q, p)].filter(Boolean).join(", ")),
  ];
  $("before").replaceChildren(
    el("h2", "Before"),
    words,
    el("p", `p(y|x) = ${percent(p)}`, now),
    el("ul", changed.map((each) => el("li", el("bdi", each)))),
    el("button", { onclick: onback }, "Back to it"),
  );
}

// --- passages

const cards = new Map();

function drawPassages(view, off, before, onswitch) {
  off = off.filter((each) => !view.passages.includes(each));
  const shown = [...view.passages, ...off].sort((a, b) => (a.id >= 0) - (b.id >= 0) || a.number - b.number);
  for (const passage of cards.keys()) if (!shown.includes(passage)) cards.delete(passage);
  const nodes = shown.map((passage) => {
    if (!cards.has(passage)) cards.set(passage, cardOf(passage, onswitch));
    const card = cards.get(passage);
    const z = view.passages.indexOf(passage);
    card.className = z < 0 ? "card off" : "card";
    put(card, "--lit", 0);
    card.querySelector("input").checked = z >= 0;
    const earlier = before?.passages.indexOf(passage) ?? -1;
    card.classList.toggle("compared", z >= 0 && earlier >= 0);
    put(card, "--before", before?.posterior[earlier]);
    fill(card, passage, view, z);
    return card;
  });
  $("passages").replaceChildren(...nodes);
  $("found").textContent = `${view.passages.length} read${off.length ? `, ${off.length} left out` : ""}`;
}

function cardOf(passage, onswitch) {
  const { key, number, id } = passage;
  const meterOf = (name, ...more) => el(`div.meter.${name}`, el("span.soft", name), share(undefined, ...more));
  const use = { type: "checkbox", role: "switch", "aria-label": `Use passage ${number}`, onchange: ({ target }) => onswitch(key, target.checked) };
  return el("li.card", { "data-key": key, "--hue": hueOf(passage) },
    el("div.top",
      el("button.chip", { "data-key": key, "aria-label": `${number}: its words` }, number),
      el("h3", { dir: "auto" }),
      id < 0 && el("span.own", "yours"),
      el("label.switch", el("input", use), el("span"))),
    el("div.meters", meterOf("prior"), meterOf("posterior", el("b"))),
    el("p.text", { dir: "auto" }),
    el("p.source.soft", el("bdi"), " ", el("span.score.number")));
}

/** Of a passage that a link leaves out, only its id is known before it takes part. */
function fill(card, { id, title, text = "", document_id: from = "" }, view, z) {
  const $$ = (selector) => card.querySelector(selector);
  $$("h3").textContent = title || (id < 0 ? "Without a title" : `Passage ${id}`);
  if ($$("bdi").textContent !== from) $$("bdi").replaceChildren(/^https?:/.test(from) ? el("a", { href: from, rel: "noreferrer" }, from) : from);
  $$(".text").textContent = text;
  if (z < 0) return;
  $$(".score").textContent = `score ${view.result.evidence[z].score.toFixed(3)}`;
  meter($$(".prior"), view.prior[z]);
  const parts = [];
  let at = 0;
  for (const [start, end] of view.result.answer ? placesOf(view.text, text) : []) {
    parts.push(text.slice(at, start), el("mark", text.slice(start, end)));
    at = end;
  }
  $$(".text").replaceChildren(...parts, text.slice(at));
}

function meter(node, p) {
  put(node.querySelector("i"), "--p", p);
  node.querySelector(".value").textContent = percent(p);
}

// --- pointing

/** Show what is pointed at: {word: i}, {key} of a passage, or nothing, which is the whole answer. */
export function light(view, target, pinned) {
  const word = view.words[target?.word];
  const z = view.passages.findIndex((each) => each.key === target?.key);
  const shares = word?.shares ?? view.posterior;
  $("rests-title").replaceChildren(...title(view, word));
  for (const node of all("#rests [data-z]")) {
    meter(node, shares[node.dataset.z]);
    node.classList.toggle("lit", +node.dataset.z === z);
  }
  view.passages.forEach((passage, i) => {
    const card = cards.get(passage);
    const posterior = card.querySelector(".posterior");
    meter(posterior, shares[i]);
    posterior.firstChild.textContent = word ? "this word" : "posterior";
    posterior.querySelector("b").hidden = Boolean(word);
    posterior.hidden = !view.rests;
    put(card, "--lit", word ? shares[i] : +(i === z));
    card.classList.toggle("lit", i === z || Boolean(word && shares[i] >= 0.5));
  });
  for (const node of all("#words .word")) {
    const i = +node.dataset.word;
    const p = view.words[i].shares[z] ?? 0;
    put(node, "--lit", p);
    put(node, "--hue", z < 0 ? "transparent" : hueOf(view.passages[z]));
    node.dataset.share = z < 0 ? "" : percent(p);
    node.classList.toggle("pointed", i === target?.word);
    node.setAttribute("aria-pressed", i === pinned?.word);
  }
  for (const node of all("button[data-key]")) node.setAttribute("aria-pressed", node.dataset.key === pinned?.key);
  $("words").classList.toggle("shares", z >= 0);
  threads = () => drawThreads(view, target, z);
  threads();
}

function title(view, word) {
  if (!view.rests) return [view.result.ended ? "Found" : "Found, and being read"];
  if (!word) return ["The answer rests on"];
  const tokens = word.tokens.map((token) => `${token.text.trim()} ${percent(pOf(token.log_likelihood))}`);
  return [
    view.formulation === "token" ? "" : "The answer as far as ", el("bdi", `“${word.text}”`), " rests on",
    el("small.number", `p = ${percent(Math.exp(word.log))} given the words before`, tokens.length > 1 && el("bdi", `: ${tokens.join(" · ")}`)),
  ];
}

let threads = () => {};
let frame;
export function redrawThreads() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => threads());
}

/** Ribbons from words to passages, as broad as these count, where they stand side by side. */
function drawThreads(view, target, z) {
  const boxOf = (node) => node.getBoundingClientRect();
  const zero = boxOf($("result"));
  const edge = boxOf($("said")).right - zero.left;
  const paths = [];
  const join = (i, passage, p, dy) => {
    const [word, card] = [all(`#words [data-word="${i}"] .strip`)[0], cards.get(passage)].map(boxOf);
    const [x, y, to, end] = [(word.left + word.right) / 2 - zero.left, word.bottom - zero.top + 4 + dy, card.left - zero.left, card.top - zero.top + 28];
    if (to < edge) return;
    const middle = (edge + to) / 2;
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x} ${y - 4 - dy}C${x} ${y} ${x} ${y} ${Math.min(x + 24, edge)} ${y}L${edge - 24} ${y}C${middle} ${y} ${middle - 12} ${end} ${to} ${end}`);
    put(path, "--hue", hueOf(passage));
    put(path, "--p", p);
    paths.push(path);
  };
  let dy = 0;
  view.words.forEach(({ shares }, i) => {
    if (!shares || (z < 0 && i !== target?.word)) return;
    view.passages.forEach((passage, j) => {
      if (shares[j] < 0.01 || (z >= 0 && j !== z)) return;
      join(i, passage, shares[j], z < 0 ? dy : 0);
      dy += 1.5 + 12 * shares[j];
    });
  });
  $("threads").replaceChildren(...paths);
}

// --- what made it

function drawTime({ timings = {}, elapsed }) {
  const { total = 0, ...stages } = timings;
  const known = Object.entries(stages);
  const other = total - known.reduce((sum, [, s]) => sum + s, 0);
  for (const [name, s] of [["other", other], ["on the way", elapsed - total]]) if (s > 0.0005) known.push([name, s]);
  $("time").hidden = !elapsed;
  $("time-title").textContent = `Where the time went: ${seconds(elapsed)}`;
  $("time-bar").replaceChildren(...known.map(([, s], i) => el("i", { "--p": s, "--i": i })));
  $("time-legend").replaceChildren(...known.map(([name, s], i) => el("li.number", el("i", { "--i": i }), `${name} ${seconds(s)}`)));
}

function drawMade(answer, link, command) {
  $("made").hidden = !answer;
  if (!answer) return;
  $("link").href = link;
  $("command").textContent = command;
  const names = ["snapshot_id", "encoder_fingerprint", "generator_fingerprint", "request_id"];
  $("fingerprints").replaceChildren(...names.flatMap((name) => [el("dt", name.replace("_", " ")), el("dd", el("code", answer[name]))]));
}

function drawTable({ result, words, passages, prior, posterior, formulation, log }) {
  $("numbers").hidden = !result.answer;
  if (!result.answer) return;
  const cells = (shares) => shares.map((p, z) => el("td", { "--p": p, "--hue": hueOf(passages[z]) }, percent(p)));
  const line = (head, p, shares, kind) => el(kind, el("th", { scope: "row" }, head), el("td", p), cells(shares));
  const columns = passages.map((each) => el("th", { scope: "col", "--hue": hueOf(each) }, el("span.chip", each.number)));
  $("table").replaceChildren(
    el("caption", "p(z|x,y≤t): ", formulation === "token" ? "the share of each word that each passage gave" : "what the answer rests on, as far as each word"),
    el("thead", el("tr", el("th", { scope: "col" }, "word"), el("th", { scope: "col" }, "p"), columns)),
    el("tbody", line("prior", "", prior, "tr.soft"),
      words.filter((word) => word.shares).map((word) => line(el("bdi", word.text), percent(Math.exp(word.log)), word.shares, "tr")),
      line("whole answer", percent(pOf(log)), posterior, "tr.whole")),
  );
}
