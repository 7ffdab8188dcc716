// What the page knows, without a DOM: requests as links, answers as words with their passages, numbers as words.

const NAMES = {
  formulation: "formulation", decoding: "decoding", k: "passages", n_beams: "beams", n_answers: "answers",
  temperature: "temperature", seed: "seed", max_new_tokens: "tokens at most", min_probability: "held back below",
  min_coverage: "of the index at least", follow: "looked again after", labels: "one of",
};
/** What may be asked for beside the question, under its name in the API: by name, by number, or as lines. */
export const FIELDS = Object.keys(NAMES);
const SPELLED = { sequence: "RAG-Sequence", token: "RAG-Token", thorough: "thorough", fast: "fast" };

// --- requests

/** What a field's text asks for; undefined if nothing; too big a number as text, which is refused. */
function valueOf(name, text) {
  if (name !== "labels") return Object.hasOwn(SPELLED, text) ? text : text && isFinite(text) ? (text < 2 ** 53 ? +text : text) : undefined;
  const lines = (text ?? "").split("\n").map((line) => line.trim()).filter(Boolean);
  return lines.length ? lines : undefined;
}

export const textOf = (value) => [value ?? ""].flat().join("\n");

/** The request as the fragment of a link: it stays in the browser, out of servers' logs. */
export function toLink(asked) {
  const found = new URLSearchParams({ question: asked.question });
  for (const name of FIELDS) if (name in asked) found.set(name, textOf(asked[name]));
  if (asked.without?.length) for (const name of ["without", "snapshot"]) found.set(name, asked[name]);
  for (const { title, text } of asked.passages ?? []) found.append("passage", `${title}\n${text}`);
  return `#${found}`;
}

/** The request of a link, without whatever in it is none; null where it asks nothing. */
export function fromLink(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const asked = { question: (given.get("question") ?? "").trim() };
  if (!asked.question) return null;
  for (const name of FIELDS) {
    const value = valueOf(name, given.get(name));
    if (value !== undefined) asked[name] = value;
  }
  const without = (given.get("without") ?? "").split(",").filter((id) => /^\d+$/.test(id)).map(Number);
  if (without.length) Object.assign(asked, { without, snapshot: given.get("snapshot") ?? "" });
  // as the endpoint trims them
  const own = given.getAll("passage").map((each) => each.split(/\n([^]*)/).map((part) => part.trim())).filter(([, text]) => text);
  if (own.length) asked.passages = own.map(([title, text]) => ({ title, text }));
  return asked;
}

/** Ids are places in one snapshot; "" where none was searched. */
export const moved = (id, from) => id && from && !id.startsWith(from);

export const bodyOf = ({ snapshot, ...asked }) => ({ ...asked, tokens: true });

const spelled = (value) => SPELLED[value] ?? (textOf(value).replaceAll("\n", ", ") || "as the server is set");

/** In words, what a request asks for. */
export function settingsOf(asked) {
  return FIELDS.filter((name) => name in asked).map((name) => SPELLED[asked[name]] ?? `${NAMES[name]} ${spelled(asked[name])}`).join(", ") || spelled();
}

/** In words, how a request differs from the one before; `told` names a passage by its key. */
export function changes(before, now, told) {
  const found = FIELDS.filter((name) => textOf(before[name]) !== textOf(now[name])).map((name) => `${NAMES[name]}: ${spelled(before[name])} → ${spelled(now[name])}`);
  const out = [before, now].map((asked) => (asked.without ?? []).map(String));
  const own = [before, now].map((asked) => (asked.passages ?? []).map(keyOf));
  const tell = (how, these, those) => found.push(...these.filter((key) => !those.includes(key)).map((key) => `${how} ${told(key)}`));
  tell("without", out[1], out[0]);
  tell("again with", out[0], out[1]);
  tell("with", own[1], own[0]);
  tell("without", own[0], own[1]);
  return found;
}

/** What a passage is known by from answer to answer: own ones have no id that stays. */
export const keyOf = ({ id, title, text }) => (id >= 0 ? `${id}` : `own ${title}\n${text}`);

// --- answers

/** A probability from its logarithm: null in JSON is that of zero. */
export const pOf = (log) => (log === null ? 0 : Math.exp(log));

// Scripts without spaces between words.
const UNSPACED = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]/u;
const segmenter = new Intl.Segmenter(undefined, { granularity: "word" });

/** Where the words of a text begin and end, in code points; what stands between them is white space. */
function spansOf(text) {
  const found = [];
  let at = 0;
  for (const { segment } of segmenter.segment(text)) {
    const n = [...segment].length;
    const last = found.at(-1);
    if (segment.trim()) {
      if (last?.end === at && !(UNSPACED.test(last.text) && UNSPACED.test(segment))) {
        last.end += n;
        last.text += segment;
      } else found.push({ start: at, end: at + n, text: segment });
    }
    at += n;
  }
  return found;
}

/**
 * The words of an answer: [{start, end, text, tokens, log, shares}], `shares` being p(z|x,y_<=t) of each passage.
 *
 * RAG-Sequence: that of its last token. RAG-Token: the mean of its tokens' mixtures, the share of it that a passage is
 * expected to have given. Tokens without a place (the answer does not stand yet) follow each other. A word without tokens
 * has no shares.
 */
export function wordsOf(text, tokens, formulation) {
  let at = 0;
  const placed = tokens.map((token) => {
    const start = token.start ?? at;
    at = token.end ?? start + [...token.text].length;
    return { ...token, start, end: at };
  });
  return spansOf(text).map((word) => {
    const its = placed.filter((token) => token.start < word.end && token.end > word.start);
    const each = its.map((token) => token.log_posterior.map(pOf));
    const shares = formulation === "token" ? each[0]?.map((_, z) => mean(each.map((row) => row[z]))) : each.at(-1);
    return { ...word, tokens: its, log: sum(its.map((token) => token.log_likelihood ?? -Infinity)), shares };
  });
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;

/** Where a text stands in another, as words, in any case: [start, end] in UTF-16 units. */
export function placesOf(wanted, given) {
  const escaped = wanted.trim().replace(/[.*+?^${}()|[\]\\/]/g, "\\$&").replace(/\s+/g, "\\s+");
  if (!escaped) return [];
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}]\\p{M}*)${escaped}(?![\\p{L}\\p{N}\\p{M}])`, "giu");
  return [...given.matchAll(pattern)].map(({ 0: { length }, index }) => [index, index + length]);
}

// --- numbers

export function percent(p) {
  if (p === 0) return "0%";
  if (p < 0.001) return "<0.1%";
  if (p > 0.999 && p < 0.9999995) return ">99.9%";
  return `${(100 * p).toFixed(p < 0.0995 || (p > 0.99 && p < 0.9995) ? 1 : 0)}%`;
}

export const nats = (log) => (Number.isFinite(log) ? log.toFixed(3).replace("-", "−") : "−∞");

export const seconds = (s) => (s >= 9.95 ? `${s.toFixed(0)} s` : s >= 0.9995 ? `${s.toFixed(1)} s` : `${(1000 * s).toFixed(s < 0.00995 ? 1 : 0)} ms`);

const whole = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

/** What p(y|x) says, in words. */
export function meaning(p) {
  if (p >= 0.9) return "The model is all but sure of these words.";
  if (p > 0.5) return "Likelier than all other answers together.";
  if (p > 0) return `One chance in ${whole.format(1 / p)}: all other answers share the rest.`;
  return "The model gives these words no chance.";
}

/** How much likelier one answer is, in words. */
export function ratio(now, before) {
  const times = now / before;
  if (!(times > 0 && times < 1 / 0)) return "";
  if (times > 0.98 && times < 1.02) return "as likely as before";
  const told = (x) => (x < 10 ? x.toPrecision(2) : whole.format(x));
  return times > 1 ? `${told(times)} times as likely` : `${told(1 / times)} times less likely`;
}
