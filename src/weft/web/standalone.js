// On a standalone page: every mount point is drawn from the data inside it.
export {};
for (const place of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-module]"))) {
	const before = [...place.childNodes], data = JSON.parse(place.querySelector("script")?.textContent ?? "null");
	try {
		const { mount } = await import(`weft/${place.dataset.module}`);
		place.replaceChildren();
		mount(place, data);
	} catch (error) {
		place.replaceChildren(...before); // the fallback
		console.error(error);
	}
}
