"""`weft presets`: list the presets and recipes."""

from weft.cli.console.options import flag
from weft.cli.console.terminal import print_json, print_tables
from weft.figures.tables import Table


def presets(as_json: bool = flag("--json", "Print the presets as a JSON list.")) -> None:
    """List the models that come with weft, with their sizes and origins, and the recipes.

    weft train takes the name of either.

    $ weft presets --json
    """
    from weft.api import presets as api
    from weft.costs.units import short

    models = api.presets()
    if as_json:
        print_json([row._asdict() for row in models])
        return
    header = ("preset", "kind", "params", "layers × d (heads)", "context", "FLOPs/tok", "from")
    cells = [
        (
            row.name,
            row.kind,
            short(row.parameters) if row.parameters else "counts",
            row.shape,
            f"{row.context:,}" if row.context else "",
            short(row.flops_per_token) if row.flops_per_token else "",
            row.origin,
        )
        for row in models
    ]
    recipes = Table(("recipe", "what it trains", "data"), api.recipes(), text=(0, 1, 2))
    print_tables(Table(header, cells, text=(0, 1, 6), spare=(5, 6, 4)), recipes)
