"""`weft doctor`: what this machine offers, and what is missing for what."""

from weft.cli.console import options
from weft.cli.console.terminal import loading, print_json, print_tables
from weft.figures.tables import Table


def doctor(as_json: options.AsJson = False) -> None:
    """Show what weft runs on, what the machine does well (measured in a second or two), and what is missing.

    $ weft doctor --json
    """
    with loading():
        from weft.api.doctor import examine

    found = examine()
    if as_json:
        print_json({each.name: each.text if each.value is None else each.value for each in found})
    else:
        print_tables(Table(("", ""), [(each.name, each.text) for each in found], text=(0, 1)))
