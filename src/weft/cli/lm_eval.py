"""lm-evaluation-harness with weft's models: `weft-lm-eval --model weft --model_args run=RUN --tasks hellaswag`.

The harness looks for no models of other packages, so this command tells it of weft's before it hands over to the
harness's own. `python -m weft.cli.lm_eval` is the same.
"""

import sys

from weft.errors import WeftError
from weft.progress import log_to_stderr


def main() -> None:
    """The command of the harness, with all of its options."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError:
        log_to_stderr("weft-lm-eval: it needs the package lm-eval; pip install 'weft[lm-eval]'")
        sys.exit(2)
    model_registry.register("weft", target="weft.api.lm_eval:WeftLM")
    try:
        cli_evaluate()
    except WeftError as error:
        log_to_stderr(f"weft-lm-eval: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
