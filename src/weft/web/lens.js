// The logit lens: a cell that is clicked or reached with the arrow keys tells what its layer would predict.
(() => {
  const strong = (text) => {
    const element = document.createElement("b");
    element.textContent = text;
    return element;
  };

  for (const box of document.querySelectorAll(".lens")) {
    const { guesses, ranks, shares } = JSON.parse(box.querySelector(".lens-data").textContent);
    const rows = [...box.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td")]);
    const names = [...box.querySelectorAll("tbody th")].map((name) => name.textContent);
    const panel = box.querySelector(".shaded-told");
    const last = rows[0].length - 1;
    let row = 0, column = last;
    rows[0][last].tabIndex = 0;

    const choose = (toRow, toColumn) => {
      rows[row][column].tabIndex = -1;
      rows[row][column].classList.remove("lens-chosen");
      [row, column] = [toRow, toColumn];
      const cell = rows[row][column], layer = Number(cell.dataset.row);
      cell.tabIndex = 0;
      cell.classList.add("lens-chosen");
      const line = document.createElement("p");
      const [piece, percent] = guesses[layer][column], final = guesses[guesses.length - 1][column][0];
      line.append(names[row] + ": ", strong(piece), ` ${percent}. The output's `, strong(final), ` has ${shares[layer][column]} here, rank ${ranks[layer][column].toLocaleString("en")}.`);
      panel.replaceChildren(line);
    };

    const table = box.querySelector("tbody");
    const find = (event) => {
      const cell = event.target.closest("td");
      const at = rows.findIndex((cells) => cells.includes(cell));
      return at < 0 ? null : [at, rows[at].indexOf(cell)];
    };
    table.addEventListener("focusin", (event) => { const at = find(event); if (at) choose(...at); });
    table.addEventListener("click", (event) => { const at = find(event); if (at) rows[at[0]][at[1]].focus({ preventScroll: true }); });
    table.addEventListener("keydown", (event) => {
      const to = {
        ArrowRight: [row, Math.min(last, column + 1)], ArrowLeft: [row, Math.max(0, column - 1)],
        ArrowDown: [Math.min(rows.length - 1, row + 1), column], ArrowUp: [Math.max(0, row - 1), column],
        Home: [row, 0], End: [row, last],
      }[event.key];
      if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      rows[to[0]][to[1]].focus();
    });
    const scroll = box.querySelector(".scroll");
    scroll.scrollLeft = scroll.scrollWidth;
  }
})();
