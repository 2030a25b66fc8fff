// Requests to the server that sent this page. Paths are relative, so a path prefix of a proxy works.

const KEY = "glowplug.key";

/** Error of a request: HTTP status (0: no answer), the server's code and its message. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Return a value of this tab's storage; null where storage is blocked. */
export function stored(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Keep a value in this tab's storage; null removes it. */
export function store(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    // a tab without storage keeps the value in `held`
  }
}

let held = stored(KEY) || "";

export function apiKey() {
  return held;
}

export function useKey(key) {
  held = key;
  store(KEY, key || null);
}

/** Send a request and return the response. Raise ApiError for any status but 2xx. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (held) headers.Authorization = `Bearer ${held}`;
  let response;
  try {
    response = await fetch(path, {
      ...options, headers, cache: "no-store", credentials: "same-origin", redirect: "error",
    });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new ApiError(0, "unreachable", "the server does not answer");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error || {};
  } catch {
    // a proxy's error page is no JSON
  }
  const message = detail.message || `the server answered ${response.status}`;
  return new ApiError(response.status, detail.code || "", message);
}

/** Return the JSON of a GET request. */
export async function getJson(path, milliseconds = 10000) {
  const response = await request(path, { signal: AbortSignal.timeout(milliseconds) });
  return response.json();
}

/**
 * Send a request for a stream of events and yield the JSON of each.
 *
 * An event with `error`, and a stream that ends without [DONE], raise ApiError.
 */
export async function* events(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(200, event.error.code || "", event.error.message);
    yield event;
  }
  throw new ApiError(0, "cut", "the connection broke off before the end of the answer");
}

async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
