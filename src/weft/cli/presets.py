"""`weft presets`: the models that have a name."""

from typing import Annotated

import typer


def presets(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for scripts.")] = False,
) -> None:
    """List the models that come with weft, with their sizes and where they come from."""
    from weft.cli import columns
    from weft.explain.presets import rows
    from weft.explain.quantity import short

    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(row) for row in rows()], ensure_ascii=False, indent=2))
        return
    columns.show(
        ("preset", "kind", "params", "layers × d (heads)", "context", "FLOPs/tok", "from"),
        [
            (
                row.name,
                row.kind,
                short(row.parameters) if row.parameters else "counts",
                row.shape,
                f"{row.context:,}" if row.context else "",
                short(row.flops_per_token) if row.flops_per_token else "",
                row.origin,
            )
            for row in rows()
        ],
        text=(0, 1, 6),
    )
