"""How Sphinx builds the documentation: `make docs`. Nothing that is built loads anything from a network."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "src")]

from weft import __version__  # noqa: E402 — of this checkout

project = "weft"
release = version = __version__
copyright = "the authors of weft; Apache License 2.0"

extensions = ["myst_parser", "ext.site", "ext.notebooks"]
exclude_patterns = ["ext"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
highlight_language = "text"
smartquotes = False  # --data is an option

html_theme = "furo"
html_title = "weft"
html_static_path = ["static"]
html_css_files = ["weft.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
