"""Evaluate a script in a page in Chromium, without a network."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>")


def evaluate(page: Path, script: str, width: int = 1280, dark: bool = False) -> Any:
    """Return the JSON result of `script`, the body of an async function, once the page has loaded.

    It can use `requests` (resources that the page loaded), `errors` of its scripts, and `clicked(element)`, the
    milliseconds from a click until the page is laid out again.
    """
    assert CHROMIUM is not None
    copy = page.with_suffix(".tested.html")
    text = page.read_text("utf-8").replace("<head>", f"<head>{ERRORS}", 1)
    copy.write_text(text + HARNESS.replace("BODY", script), encoding="utf-8")
    outer = page.with_suffix(".outer.html")  # a window has a minimum width; a frame has none
    outer.write_text(
        f'<body style="margin:0"><iframe id="f" src="{copy.name}" style="width:{width}px;height:2000px;border:0">'
        "</iframe><script>addEventListener('message', e => { document.title = e.data; });</script>",
        encoding="utf-8",
    )
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", scheme, *OFFLINE]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    title = done.stdout.split("<title>")[1].split("</title>")[0]
    found = json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert "error" not in found, found["error"]
    return found["value"]


ERRORS = "<script>var errors = []; addEventListener('error', e => errors.push(String(e.message)));</script>"
HARNESS = """
<script>
addEventListener("load", async () => {
  const clicked = element => new Promise(done => {
    const begun = performance.now();
    element.click();
    void document.body.offsetHeight;
    done(performance.now() - begun);
  });
  while (document.querySelector("[data-module] > script")) await new Promise(done => setTimeout(done, 5)); // drawn?
  const requests = performance.getEntriesByType("resource").map(entry => entry.name);
  let found;
  try {
    found = { value: await (async () => { BODY })() };
  } catch (error) {
    found = { error: String(error && error.stack || error) };
  }
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""
