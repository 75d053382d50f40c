"""`weft doctor`: report on this machine, and on missing packages."""

from weft.cli.console import options
from weft.cli.console.terminal import loading, print_json, print_tables
from weft.figures.tables import Table


def doctor(as_json: options.AsJson = False) -> None:
    """Show versions, hardware with measured speeds (a second or two), and missing packages.

    $ weft doctor --json
    """
    with loading():
        from weft.api.doctor import examine

    findings = examine()
    if as_json:
        print_json({each.name: each.text if each.value is None else each.value for each in findings})
    else:
        print_tables(Table(("", ""), [(each.name, each.text) for each in findings], text=(0, 1)))
