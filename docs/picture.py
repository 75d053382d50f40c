"""Take the README's picture, docs/explorer.png: one step of a GPT on the Explorer's stage.

    python docs/picture.py runs/gpt-tiny "First Citizen: Our business is not unknown to"

Needs Chromium and playwright, which `make install` installs.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 800  # pixels


def main(run: str, text: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", run, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = next(match[1] for line in server.stderr if (match := re.search(r" at (http://\S+),", line)))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
            page.goto(f"{url}/#/step?text={quote(text)}&stage=probabilities&layer=1")
            page.wait_for_selector(".stage-picture svg text")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=Path(__file__).with_name("explorer.png"))
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
