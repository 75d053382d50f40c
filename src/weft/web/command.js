// A command that repeats what a page tells: copied, or selected where a page may not copy.
for (const box of document.querySelectorAll(".command")) {
  const code = box.querySelector("code"), button = box.querySelector("button");
  button.hidden = false;
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  });
}
