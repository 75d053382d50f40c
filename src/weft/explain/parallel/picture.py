"""`weft explain parallel`: is A to be split by columns or by rows? (lecture 1; Shoeybi et al. 2019)."""

from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from weft.costs.units import byte_size, short
from weft.explain.parallel.figure import BYTES, draw, listed
from weft.explain.parallel.parallel import Sizes, Splits, Way, measure
from weft.figures.page import Section, html_tables
from weft.figures.picture import Picture, svg
from weft.figures.tables import Table, text_tables

RING = (
    "Sent by each of n processes around a ring: 2(n − 1)/n · b bytes for an all-reduce of b; (n − 1)/n · b for a "
    "reduce-scatter of b, for an all-gather to b, and for an all-to-all of b in each process. Bytes are those of "
    "bf16. Compute: operations of matrix products, forward and backward. Activations: what the norm, the two matrices "
    "and the function between them read, and the backward pass reads again."
)
# a narrow page scrolls it
DRAWN = Markup('<div class="scroll splits" role="region" tabindex="0" aria-label="{}">{}</div>')


@dataclass(frozen=True)
class ParallelSplits(Picture):
    """Every way of splitting an MLP and an attention block over processes."""

    title: str
    about: str
    blocks: tuple[Splits, ...]

    def figure(self) -> Figure:
        """All blocks, one below another."""
        return draw(*self.blocks)

    def sections(self) -> list[Section]:
        """A section for each block: its figure and its tables."""
        sections = []
        for block in self.blocks:
            title = f"{block.block.name} on {block.ranks} processes"
            drawn = DRAWN.format(title, Markup(svg(draw(block), title)))
            sections.append(Section(title, _about(block), drawn + html_tables(_tables(block))))
        return sections

    def text(self) -> str:
        """The tables."""
        return text_tables([table for block in self.blocks for table in _tables(block)])


def parallel_splits(sizes: Sizes | None = None, ranks: int = 2) -> ParallelSplits:
    """An MLP and an attention block split over so many processes in every way, measured and compared with the whole."""
    blocks = measure(sizes or Sizes(), ranks)
    return ParallelSplits(
        title="Splitting a layer over processes",
        about=(
            "Matrices are cut by columns or by rows, in the colours of the processes that have the pieces. Every way "
            "was run in float64 on DTensors, its collectives counted by torch's CommDebugMode, and its result and "
            "gradients compared with those of the unsplit block. The best way stands first: the least compute for "
            "each process, then the fewest bytes sent, then the fewest collectives."
        ),
        blocks=tuple(blocks),
    )


def _about(splits: Splits) -> str:
    """The question and its answer, with this block's sizes and numbers."""
    sizes, (first, function, second) = splits.sizes, splits.block.names
    wide = (sizes.d_ff, sizes.d_ff) if splits.block.name == "MLP" else (3 * sizes.d_model, sizes.d_model)
    columns = "whole heads" if splits.block.name == "Attention" else "some of the columns"
    return (
        f"Y = {function}(X{first}) and Z = Y{second}, with {first} {sizes.d_model} × {wide[0]:,}, {second} "
        f"{wide[1]:,} × {sizes.d_model}, and {sizes.tokens} tokens. {first} by rows gives each process a part of a "
        f"sum, and {function} needs the sum: applied to each part by itself, it would be off by up to "
        f"{splits.wrong:.0%} of the largest value. So a collective stands before it. {first} by columns gives each "
        f"process {columns}, which is all that {function} needs, and {second} by rows reads them where they are: one "
        "all-reduce at the end, and one in the backward pass. With sequence parallelism each process has a slice of "
        "the tokens outside of the two matrices; an all-reduce becomes a reduce-scatter and an all-gather, which send "
        "as many bytes together."
    )


def _tables(splits: Splits) -> list[Table]:
    """Collectives; costs; differences."""
    name, ranks = splits.block.name, splits.ranks
    corner = " → ".join((splits.block.names[0], splits.block.names[2]))
    collectives, costs, differences = [], [], []
    for split in splits.splits:
        way = _short(split.way)
        forward = [each for place in split.forward for each in place]
        backward = [each for place in split.backward[::-1] for each in place]
        collectives.append((way, listed(forward), listed(backward)))
        sent = [byte_size(BYTES * numbers) for numbers in split.sent(ranks)]
        held = [byte_size(BYTES * numbers) for numbers in (split.weights, split.activations)]
        costs.append((way, *sent, short(split.flops), *held))
        differences.append((way, *(f"{each:.1e}" if each else "0" for each in split.differences)))
    late = next(split.late for split in splits.splits if split.late)
    remark = (
        "With sequence parallelism the gradients of the norm and of the last bias are sums over all processes: "
        f"{len(late)} all-reduces of {late[0].numbers} numbers, which can wait for the end of a step. They aren't "
        "counted here."
    )
    title = f"{name} on {ranks} processes"
    return [
        Table((corner, "forward", "backward"), collectives, f"{title}: collectives", [remark], (0, 1, 2)),
        Table(
            (corner, "sent forward", "backward", "compute", "weights", "activations"),
            costs,
            f"{title}: what each process sends, computes and holds",
            [RING],
        ),
        Table(
            (corner, "result", "gradient of X", "of the weights"),
            differences,
            f"{title}: largest difference from the unsplit block, in float64",
        ),
    ]


def _short(way: Way) -> str:
    if way.first is None:
        return "whole"
    return f"{way.first} → {way.second}" + ", sequence" * way.sequence
