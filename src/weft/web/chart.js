// The values of a chart's lines where the pointer is, or where the arrow keys went.
for (const chart of document.querySelectorAll(".chart[data-values]")) {
  const lines = JSON.parse(chart.dataset.values), height = chart.viewBox.baseVal.height;
  const places = [...new Set(lines.flatMap(([, points]) => points.map(point => point[0])))].sort((a, b) => a - b);
  const add = (tag, kind) => {
    const element = document.createElementNS(chart.namespaceURI, tag);
    element.setAttribute("class", kind);
    return chart.appendChild(element);
  };
  const mark = add("path", "pointer"), told = add("text", "told");
  told.setAttribute("x", 14);
  told.setAttribute("y", height - 9);
  const nearest = (some, x) => some.reduce((best, each) => Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best);
  let at = null;
  const show = place => {
    at = place;
    const here = place === null ? [] : lines.map(([name, points]) => [name, nearest(points, place)]);
    const found = here.filter(([, point]) => Math.abs(point[0] - place) < 3);
    mark.setAttribute("d", found.map(([, [x, y]]) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0-8 0`).join(""));
    const values = found.map(([name, point]) => `${lines.length > 1 ? `${name.split(":")[0]} ` : ""}${point[3]}`);
    told.textContent = found.length ? `${nearest(found.map(each => each[1]), place)[2]}: ${values.join(", ")}` : "";
  };
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    show(nearest(places.map(place => [place]), x)[0]);
  });
  chart.addEventListener("pointerleave", () => show(null));
  chart.addEventListener("blur", () => show(null));
  chart.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = at === null ? (step > 0 ? 0 : places.length - 1) : places.indexOf(at) + step;
    show(places[Math.min(Math.max(next, 0), places.length - 1)]);
  });
}
