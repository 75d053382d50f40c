"""lm-evaluation-harness with weft's models: `weft-lm-eval --model weft --model_args run=RUN --tasks hellaswag`.

The harness does not look for models of other packages, so this command registers weft's before it calls the harness's
own command. `python -m weft.cli.lm_eval` works as well.
"""

import sys

from weft.errors import WeftError
from weft.progress import log_to_stderr


def main() -> None:
    """Run the harness's command, with all of its options."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError:
        log_to_stderr("weft-lm-eval: the package lm-eval is missing; pip install 'weft[lm-eval]'")
        sys.exit(2)
    model_registry.register("weft", target="weft.api.lm_eval:WeftLM")
    try:
        cli_evaluate()
    except WeftError as error:
        log_to_stderr(f"weft-lm-eval: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
