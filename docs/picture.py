"""Take the pictures of the Explorer: docs/explorer.png, and docs/stage/NAME.webp for each family of models.

    python docs/picture.py RUNS

RUNS is a folder with small runs named gpt (`weft quickstart --run RUNS/gpt checkpoint.keep=14 checkpoint.every=100`),
lstm, bahdanau, transformer, bert, ngram, classifier and elmo. Needs Chromium, playwright and Pillow, which
`make install` installs.
"""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 800  # pixels
QUALITY = 70  # of WebP
# of other models a sample of their data
TEXTS = {"gpt": "There was once a potter, Mira by name. People said that", "transformer": "the european economic area"}
FAMILIES = ("gpt", "lstm", "bahdanau", "transformer", "bert", "ngram", "classifier", "elmo")


def main(runs: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", runs, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = next(match[1] for line in server.stderr if (match := re.search(r" at (http://\S+),", line)))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")

            def take(view: str, **state: str) -> Image.Image:
                page.goto("about:blank")
                page.goto(f"{url}/#/{view}?{urlencode(state)}")
                page.wait_for_selector(".stage-picture svg text, .side")
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(500)
                return Image.open(io.BytesIO(page.screenshot())).convert("RGB")

            (HERE / "stage").mkdir(exist_ok=True)
            for name in FAMILIES:
                if not (Path(runs) / name).is_dir():
                    continue
                picture = take("step", model=name, **({"text": TEXTS[name]} if name in TEXTS else {}))
                picture.save(HERE / "stage" / f"{name}.webp", quality=QUALITY, method=6)
                if name == "transformer":
                    inside = take("step", model=name, text=TEXTS[name], zoom="encoder")
                    inside.save(HERE / "stage" / "encoder.webp", quality=QUALITY, method=6)
                if name == "gpt":
                    picture.quantize(128).save(HERE / "explorer.png", optimize=True)
            both = take("step", model="gpt", text=TEXTS["gpt"], stage="values", **{"with": "gpt@200"})
            both.save(HERE / "stage" / "sides.webp", quality=QUALITY, method=6)
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
