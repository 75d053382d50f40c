// Requests to the server. A failure is an ApiError with the server's message; status 0 means no response.
const LOST = "The connection was lost during the response.";

class ApiError extends Error {
	constructor(status, message) { super(message); this.status = status; }
}

export const isAbort = error => error instanceof DOMException && error.name === "AbortError";

const KEY = "weft-key";
let pending = 0; // requests
let recording = null; // responses, while a story is saved
// responses of a saved story, which needs no server
const inside = document.getElementById("saved-responses"), saved = JSON.parse(inside?.textContent ?? "null");
export const savedStory = inside?.dataset.story; // its name
export const isRecording = () => Boolean(recording);
export const isIdle = () => pending === 0;
export function record(on) {
	const before = recording;
	recording = on ? new Map() : null;
	return before;
}

const keyOf = (path, { body }) => `${path.replace(/^\//, "")} ${body ?? ""}`;
function savedResponse(path, options) {
	const response = saved[keyOf(path, options)];
	if (response === undefined) throw new ApiError(404, "This page was saved without a server: it shows the story’s own texts only.");
	return structuredClone(response);
}

// kept for this tab only, and only if the server requires one
export const setKey = key => sessionStorage.setItem(KEY, key);

function busy(change) {
	pending += change;
	document.dispatchEvent(new CustomEvent("weft-busy", { detail: pending }));
}

async function call(path, options) {
	const headers = { ...options.headers }, key = sessionStorage.getItem(KEY);
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
	if (saved) return savedResponse(path, options);
	busy(1);
	try {
		const response = await call(path, options), content = await response.json();
		recording?.set(keyOf(path, options), content);
		return content;
	} catch (error) {
		if (isAbort(error) || error instanceof ApiError) throw error;
		throw new ApiError(0, LOST);
	} finally {
		busy(-1);
	}
}

export const get = (path, signal) => read(path, { signal });
export const post = (path, body, signal) => read(path, { ...json(body), signal });
// A text of a model's own: { text, origin }.
export const sampleText = (model, signal) => post("v1/explain/text", { model }, signal);

// The events of a stream, as objects; it ends with [DONE] or when the stream does.
export async function* stream(path, body, signal) {
	const options = { ...json({ ...body, stream: true }), signal }, events = [];
	if (saved) return yield* savedResponse(path, options);
	recording?.set(keyOf(path, options), events);
	busy(1);
	try {
		const { body: content } = await call(path, options);
		if (!content) return;
		const reader = content.pipeThrough(new TextDecoderStream()).getReader();
		let rest = "";
		for (;;) {
			const { done, value } = await reader.read().catch(error => {
				if (isAbort(error)) throw error;
				throw new ApiError(0, LOST);
			});
			if (done) return;
			const parts = (rest + value).split("\n\n");
			rest = parts.pop() ?? "";
			for (const event of parts) {
				const data = event.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
				if (!data || data === "[DONE]") continue;
				const parsed = JSON.parse(data);
				if (parsed.error) throw new ApiError(500, parsed.error.message);
				events.push(parsed);
				yield parsed;
			}
		}
	} finally {
		busy(-1);
	}
}
