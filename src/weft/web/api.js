// The server's routes. A failure is an ApiError with the server's own sentence; status 0: the server is away.
export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const KEY = "weft-key";
let waiting = 0;

// for this tab alone, and only where the server asks for one
export const setKey = key => sessionStorage.setItem(KEY, key);

function busy(change) {
  waiting += change;
  document.dispatchEvent(new CustomEvent("weft-busy", { detail: waiting }));
}

async function call(path, options) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server is not responding.");
  }
  if (response.ok) return response;
  let message = `The server returned status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  throw new ApiError(response.status, message);
}

const json = body => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

async function read(path, options) {
  busy(1);
  try {
    const response = await call(path, options);
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection was lost during the response.");
  } finally {
    busy(-1);
  }
}

export const get = (path, signal) => read(path, { signal });
export const post = (path, body, signal) => read(path, { ...json(body), signal });

// The events of a stream, as objects; ends with [DONE] or with the stream.
export async function* stream(path, body, signal) {
  busy(1);
  try {
    const response = await call(path, { ...json({ ...body, stream: true }), signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let left = "";
    for (;;) {
      const { done, value } = await reader.read().catch(error => {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection was lost during the response.");
      });
      if (done) return;
      const events = (left + value).split("\n\n");
      left = events.pop();
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
