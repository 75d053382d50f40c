// Search, the menu of narrow pages, light and dark, and buttons that copy commands.
const input = document.getElementById("search");
const results = document.getElementById("results");
const root = document.body.dataset.root;
const MAX_RESULTS = 20;

function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function marked(text, words) {
  const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
  const parts = text.split(new RegExp(`(${pattern})`, "i"));
  return parts.map((part, i) => (i % 2 ? `<mark>${escaped(part)}</mark>` : escaped(part))).join("");
}

// A section matches if it has every word; words in its headings weigh more than words in its text.
function score([, title, heading, text], words) {
  let total = 0;
  for (const word of words) {
    const found = [title, heading, text].map((part) => part.toLowerCase().split(word).length - 1);
    if (!found.some(Boolean)) return 0;
    total += 20 * Math.min(found[1], 1) + 10 * Math.min(found[0], 1) + Math.min(found[2], 5);
  }
  return total;
}

function search() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  results.hidden = !words.length;
  if (!words.length) return;
  const found = window.searchIndex
    .map((entry) => [score(entry, words), entry])
    .filter(([total]) => total)
    .sort((a, b) => b[0] - a[0])
    .slice(0, MAX_RESULTS);
  results.innerHTML = found.length ? "" : "<p>Nothing found.</p>";
  for (const [, [address, title, heading, text]] of found) {
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 40);
    const link = document.createElement("a");
    link.href = `${root}/${address}`;
    link.innerHTML = `${marked(heading ? `${title}: ${heading}` : title, words)}<small>${marked(text.slice(at, at + 140), words)}</small>`;
    results.append(link);
  }
}

input.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  const typing = /INPUT|TEXTAREA/.test(event.target.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    input.focus();
  } else if (event.key === "Escape") {
    results.hidden = true;
  } else if (event.key === "Enter" && event.target === input) {
    results.querySelector("a")?.click();
  }
});
document.addEventListener("click", (event) => {
  if (!results.contains(event.target) && event.target !== input) results.hidden = true;
});

const menu = document.getElementById("menu");
menu.addEventListener("click", () => {
  menu.ariaExpanded = document.getElementById("sidebar").classList.toggle("open");
});

document.getElementById("theme").addEventListener("click", () => {
  const html = document.documentElement;
  const dark = html.dataset.theme ? html.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  html.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", html.dataset.theme);
  } catch {
    // a browser that keeps nothing for local files
  }
});

for (const block of document.querySelectorAll(".highlight.commands")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("pre").textContent);
    button.textContent = "Copied";
  });
  block.append(button);
}
