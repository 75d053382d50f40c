// Requests to the server. A failure is an ApiError with the server's message; status 0 means no response.
class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const isAbort = error => error instanceof DOMException && error.name === "AbortError";

const KEY = "weft-key";
let pending = 0; // requests

// kept for this tab only, and only if the server requires one
export const setKey = key => sessionStorage.setItem(KEY, key);

function busy(change) {
  pending += change;
  document.dispatchEvent(new CustomEvent("weft-busy", { detail: pending }));
}

async function call(path, options) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), document.baseURI), { ...options, headers });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError(0, "The server is not responding.");
  }
  if (response.ok) return response;
  let message = `The server returned status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON: the status is all we know */ }
  throw new ApiError(response.status, message);
}

const json = body => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

async function read(path, options) {
  busy(1);
  try {
    const response = await call(path, options);
    return await response.json();
  } catch (error) {
    if (isAbort(error) || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection was lost during the response.");
  } finally {
    busy(-1);
  }
}

export const get = (path, signal) => read(path, { signal });
export const post = (path, body, signal) => read(path, { ...json(body), signal });

// The events of a stream, as objects; it ends with [DONE] or when the stream does.
export async function* stream(path, body, signal) {
  busy(1);
  try {
    const { body: content } = await call(path, { ...json({ ...body, stream: true }), signal });
    if (!content) return;
    const reader = content.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read().catch(error => {
        if (isAbort(error)) throw error;
        throw new ApiError(0, "The connection was lost during the response.");
      });
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop() ?? "";
      for (const event of events) {
        const data = event.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (!data || data === "[DONE]") continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(500, parsed.error.message);
        yield parsed;
      }
    }
  } finally {
    busy(-1);
  }
}
