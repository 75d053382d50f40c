// Save a story as one HTML file: the Explorer's page with the responses that its slides need.
import * as api from "./api.js";
import { download } from "./save.js";

const SETTLED_MS = 350, MAX_MS = 60_000; // a slide is complete after no request for this long; or given up

const pause = ms => new Promise(done => setTimeout(done, ms));

async function settled() {
	const end = performance.now() + MAX_MS;
	for (let quiet = 0; quiet < SETTLED_MS && performance.now() < end; quiet = api.isIdle() ? quiet + 50 : 0) await pause(50);
}

export async function saveStory({ name, title, count, show, says }) {
	const { page } = await api.get("v1/stories/page");
	let responses = null;
	api.record(true);
	try {
		await Promise.all(["v1/models", "v1/stories"].map(path => api.get(path)));
		for (let at = 0; at < count; at += 1) {
			await show(at);
			await settled();
			says(`Saving ${at + 1} / ${count}`);
		}
	} finally {
		responses = api.record(false);
	}
	const plain = text => text.replace(/[&<>"]/g, letter => `&#${letter.charCodeAt(0)};`);
	const data = JSON.stringify(Object.fromEntries(responses ?? [])).replaceAll("<", "\\u003c");
	const inside = `<script type="application/json" id="saved-responses" data-story="${plain(name)}">${data}</script>`;
	const text = page.replace("</header>", () => `</header>\n${inside}`)
		.replace("<title>weft</title>", () => `<title>${plain(title)} · weft</title>`);
	download(new Blob([text], { type: "text/html" }), `${name}.html`);
}
