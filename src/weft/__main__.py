"""`python -m weft` runs the `weft` command."""

from weft.cli.main import main

main()
