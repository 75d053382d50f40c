// On a page that stands alone: each drawing is built from the data that stand inside of it.
for (const place of document.querySelectorAll("[data-module]")) {
  const before = [...place.childNodes], data = JSON.parse(place.querySelector("script").textContent);
  try {
    const { mount } = await import(`weft/${place.dataset.module}`);
    place.replaceChildren();
    mount(place, data);
  } catch (error) {
    place.replaceChildren(...before); // what can be read without the drawing
    console.error(error);
  }
}
