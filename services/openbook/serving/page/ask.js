// Asking the endpoint: its server-sent events one by one, and whatever goes wrong as a Problem.

const KINDS = {
  400: "invalid", 413: "invalid", 422: "invalid", 401: "key", 403: "forbidden", 408: "late", 429: "busy", 503: "unavailable", 504: "late",
};

/** Why there is no answer. `kind`: one of those above, "unreachable", "broken" off, or "failed". */
export class Problem extends Error {
  constructor(kind, { message = "", requestId = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { kind, requestId, retryAfter });
  }
}

/** [name, data] of every event until the answer. Throws a Problem, or what `signal` was aborted with. */
export async function* ask(body, key, signal) {
  if (!/^[ -~]*$/.test(key)) throw new Problem("key", { message: "It has printable ASCII characters." });
  let response;
  try {
    response = await fetch("v1/answer/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw problem({ ...body, status: response.status }, +response.headers.get("Retry-After") || 0);
    }
    for await (const [name, data] of events(response.body)) {
      if (name === "error") throw problem(data);
      yield [name, data];
      if (name === "answer") return;
    }
  } catch (error) {
    signal.throwIfAborted();
    throw error instanceof Problem ? error : new Problem(response ? "broken" : "unreachable", error);
  }
  throw new Problem("broken");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const of = (field) => part.match(new RegExp(`^${field}: ?([^\n]*)`, "m"))?.[1];
        if (of("data")) yield [of("event"), JSON.parse(of("data"))];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Of problem details, RFC 9457. */
function problem({ status, title = `HTTP ${status}`, detail = title, request_id }, retryAfter) {
  return new Problem(KINDS[status] ?? "failed", { message: `${detail}`, requestId: request_id, retryAfter });
}
