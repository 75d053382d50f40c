"""One level of a layered layout: ranks, an order with few crossings, and places from left to right."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

PAD = 12.0  # between a frame and what is inside
APART = 18.0  # between neighbours in a layer
NARROW = 12.0  # between a line and its neighbour
ASIDE = 0.03  # how much a parameter pulls at what it feeds
ORDERINGS = 8
SWEEPS = 40  # the last quarter of them make lines exactly straight where that is possible
INFINITY = float("inf")


@dataclass
class Box:
    """A rectangle to place; lines meet it at `port` from its left.

    With something `inside` it is an open frame: its size is found, and `port` is the width of its name.
    """

    key: int
    width: float
    height: float
    port: float
    inside: "list[Box] | None" = None
    x: float = 0.0  # its left and top, once placed
    y: float = 0.0
    title_x: float = PAD  # where a frame's name begins
    entries: dict[int, float] = field(default_factory=dict)  # by the key a line comes from, or goes out from
    exits: dict[int, float] = field(default_factory=dict)


@dataclass
class Spot:
    """Something with a place in a layer: a box, a port of the frame around, or a line that passes."""

    rank: int
    width: float
    box: Box | None = None
    entry: int | None = None
    exit: int | None = None
    x: float = 0.0
    order: float = 0.0

    @property
    def room(self) -> float:
        return APART if self.box is not None else NARROW


@dataclass
class Piece:
    """A line from one layer to the next."""

    start: Spot
    end: Spot
    source: int
    targets: set[int]

    def start_x(self) -> float:
        """From the left of its spot."""
        box = self.start.box
        return 0.0 if box is None else box.exits.get(self.source, box.port)

    def end_x(self) -> float:
        """From the left of its spot."""
        box = self.end.box
        return 0.0 if box is None else box.entries.get(self.source, box.port)


def ranked(
    boxes: Sequence[Box], links: Sequence[tuple[int, Box | None, Box | None, int]]
) -> tuple[list[list[Spot]], list[Piece]]:
    """Ranks by longest path, sources right above the first that uses them; spots for lines that pass layers."""
    after: dict[int, set[int]] = {box.key: set() for box in boxes}
    for _, a, b, _ in links:
        if a is not None and b is not None:
            after[a.key].add(b.key)
    enter = any(a is None for _, a, _, _ in links)
    first = 1 if enter else 0
    fed = {b.key for _, a, b, _ in links if b is not None}
    rank = dict.fromkeys(after, first)
    order = _topological(after)
    for key in order:
        for target in after[key]:
            rank[target] = max(rank[target], rank[key] + 1)
    for key in reversed(order):
        if key not in fed and after[key]:
            rank[key] = min(rank[target] for target in after[key]) - 1
    last = max(rank.values(), default=0) + 1
    spots = {box.key: Spot(rank[box.key], box.width, box) for box in boxes}
    found = list(spots.values())
    entries: dict[int, Spot] = {}
    exits: dict[int, Spot] = {}
    uses: dict[tuple[int, int], list[tuple[Spot, int]]] = {}
    starts: dict[tuple[int, int], Spot] = {}
    for source, a, b, target in links:
        start = entries.setdefault(source, Spot(0, 0.0, entry=source)) if a is None else spots[a.key]
        end = exits.setdefault(source, Spot(last, 0.0, exit=source)) if b is None else spots[b.key]
        starts[(id(start), source)] = start
        uses.setdefault((id(start), source), []).append((end, target))
    found += [*entries.values(), *exits.values()]
    pieces: list[Piece] = []
    for use, ends in uses.items():
        # one line goes down from its source, and others branch off where they are used
        at, source = starts[use], use[1]
        for level in range(at.rank + 1, max(end.rank for end, _ in ends) + 1):
            here: dict[int, Piece] = {}
            for end, target in ends:
                if end.rank == level:
                    here.setdefault(id(end), Piece(at, end, source, set())).targets.add(target)
            pieces += here.values()
            further = {target for end, target in ends if end.rank > level}
            if further:
                spot = Spot(level, 0.0)
                found.append(spot)
                pieces.append(Piece(at, spot, source, further))
                at = spot
    layers: list[list[Spot]] = [[] for _ in range(max((spot.rank for spot in found), default=0) + 1)]
    for spot in found:
        layers[spot.rank].append(spot)
    return layers, pieces


def _topological(after: dict[int, set[int]]) -> list[int]:
    waiting = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            waiting[target] += 1
    order = [key for key in after if not waiting[key]]
    for key in order:
        for target in sorted(after[key]):
            waiting[target] -= 1
            if not waiting[target]:
                order.append(target)
    return order


def uncross(layers: list[list[Spot]], pieces: list[Piece]) -> None:
    """Fewer crossings: each layer in the order of the medians of its neighbours, down and up; the best is kept."""
    up: dict[int, list[Piece]] = {}
    down: dict[int, list[Piece]] = {}
    for piece in pieces:
        down.setdefault(id(piece.start), []).append(piece)
        up.setdefault(id(piece.end), []).append(piece)
    for layer in layers:
        _number(layer)
    best, least = [list(layer) for layer in layers], _crossings(layers, down)
    for turn in range(ORDERINGS):
        if not least:
            break
        for layer in layers[1:] if turn % 2 == 0 else layers[-2::-1]:
            near: dict[int, float] = {}
            for spot in layer:
                if turn % 2 == 0:
                    places = [p.start.order + _share(p.start, p.start_x()) for p in up.get(id(spot), ())]
                else:
                    places = [p.end.order + _share(p.end, p.end_x()) for p in down.get(id(spot), ())]
                near[id(spot)] = median(places) if places else spot.order
            layer.sort(key=lambda spot: near[id(spot)])
            _number(layer)
        crossings = _crossings(layers, down)
        if crossings < least:
            best, least = [list(layer) for layer in layers], crossings
    for layer, kept in zip(layers, best, strict=True):
        layer[:] = kept
        _number(layer)


def _share(spot: Spot, x: float) -> float:
    """How far to the right of a wide box a line meets it: less than one place."""
    return 0.9 * (x / spot.width - 0.5) if spot.width else 0.0


def _number(layer: list[Spot]) -> None:
    for place, spot in enumerate(layer):
        spot.order = float(place)


def _crossings(layers: list[list[Spot]], down: dict[int, list[Piece]]) -> int:
    total = 0
    for layer in layers[:-1]:
        ends: list[float] = []
        for spot in layer:
            mine = sorted((p.start_x(), p.end.order + _share(p.end, p.end_x())) for p in down.get(id(spot), ()))
            for _, end in mine:
                total += sum(1 for other in ends if other > end)
            ends += [end for _, end in mine]
    return total


def spread(layers: list[list[Spot]], pieces: list[Piece]) -> None:
    """Places from left to right: each layer as near to what it is joined to as its order and widths allow."""
    near: dict[int, list[tuple[Spot, float, float]]] = {}
    fed = {id(piece.end) for piece in pieces}
    for piece in pieces:
        # lines that pass several layers want to be straight most of all; what nothing feeds stands aside
        weight = (1.0, 2.0, 8.0)[(piece.start.box is None) + (piece.end.box is None)]
        weight *= ASIDE if piece.start.box is not None and id(piece.start) not in fed else 1.0
        shift = piece.start_x() - piece.end_x()
        near.setdefault(id(piece.end), []).append((piece.start, shift, weight))
        near.setdefault(id(piece.start), []).append((piece.end, -shift, weight))
    for layer in layers:
        x = 0.0
        for spot in layer:
            spot.x = x
            x += spot.width + spot.room
    for sweep in range(SWEEPS):
        falling = sweep % 2 == 0
        for layer in layers if falling else layers[::-1]:
            wanted, weights = [], []
            for spot in layer:
                pulls = near.get(id(spot), [])
                if sweep < 2:  # at first only from the side that is already placed
                    side = spot.rank + (-1 if falling else 1)
                    pulls = [pull for pull in pulls if pull[0].rank == side] or pulls
                weight = sum(pull[2] for pull in pulls)
                places = [(other.x + shift, w) for other, shift, w in pulls]
                if not places:
                    wanted.append(spot.x)
                elif sweep < SWEEPS * 3 // 4:
                    wanted.append(sum(x * w for x, w in places) / weight)
                else:
                    wanted.append(_middle(places, spot.x))
                weights.append(weight or 0.1)
            _fit(layer, wanted, weights)
    _straighten(layers, pieces)


def _straighten(layers: list[list[Spot]], pieces: list[Piece]) -> None:
    """Chains, and lines that pass several layers, in few straight stretches: as far as their place is free."""
    after = _chains(pieces)
    later = {id(spot) for spot, _ in after.values()}
    for spot in [spot for layer in layers for spot in layer if id(spot) in after and id(spot) not in later]:
        run: list[tuple[Spot, float]] = []
        low, high, shift = -INFINITY, INFINITY, 0.0
        at: Spot | None = spot
        while at is not None:
            left, right = _free(layers[at.rank], at)
            left, right = min(left, at.x), max(right, at.x)  # rounding may leave no room at all
            if max(low, left - shift) > min(high, right - shift):
                _align(run, low, high)
                run, low, high, shift = [], -INFINITY, INFINITY, 0.0
            run.append((at, shift))
            low, high = max(low, left - shift), min(high, right - shift)
            at, further = after.get(id(at), (None, 0.0))
            shift += further
        _align(run, low, high)


def _chains(pieces: list[Piece]) -> dict[int, tuple[Spot | None, float]]:
    """What follows a spot straight below, and how much further right it is: the rest of a line, or what alone is
    computed from it alone, parameters aside."""
    fed = {id(piece.end) for piece in pieces}
    main = [p for p in pieces if p.start.box is None or id(p.start) in fed]
    outs, ins = Counter(id(p.start) for p in main), Counter(id(p.end) for p in main)
    after: dict[int, tuple[Spot | None, float]] = {}
    for piece in main:
        line = piece.start.box is None and piece.end.box is None
        if line or (outs[id(piece.start)] == 1 and ins[id(piece.end)] == 1):
            after[id(piece.start)] = piece.end, piece.start_x() - piece.end_x()
    return after


def _free(layer: list[Spot], spot: Spot) -> tuple[float, float]:
    """Between which places a spot can be moved."""
    n = int(spot.order)
    left = layer[n - 1] if n else None
    right = layer[n + 1] if n + 1 < len(layer) else None
    return (
        -INFINITY if left is None else left.x + left.width + max(left.room, spot.room),
        INFINITY if right is None else right.x - spot.width - max(right.room, spot.room),
    )


def _align(run: list[tuple[Spot, float]], low: float, high: float) -> None:
    x = min(max(median(spot.x - shift for spot, shift in run), low), high)
    for spot, shift in run:
        spot.x = x + shift


def _middle(places: list[tuple[float, float]], now: float) -> float:
    """The weighted median; of all places between two that are as good, the nearest to the one now."""
    places = sorted(places)
    half, passed = sum(w for _, w in places) / 2, 0.0
    for n, (x, weight) in enumerate(places):
        passed += weight
        if passed > half:
            return x
        if passed == half:
            return min(max(now, x), places[n + 1][0])
    return now


def _fit(layer: list[Spot], wanted: list[float], weights: list[float]) -> None:
    """The places nearest to the wanted ones, by least squares, that keep the order and the room between neighbours:
    an isotonic regression, by pooling adjacent violators."""
    offsets, offset = [], 0.0
    for here, after in zip(layer, [*layer[1:], None], strict=True):
        offsets.append(offset)
        offset += here.width + (max(here.room, after.room) if after is not None else 0.0)
    pools: list[list[float]] = []  # sum of weighted places, weight, how many
    for x, weight, shift in zip(wanted, weights, offsets, strict=True):
        pools.append([(x - shift) * weight, weight, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            top = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], top, strict=True)]
    place = 0
    for total, weight, count in pools:
        for _ in range(int(count)):
            layer[place].x = total / weight + offsets[place]
            place += 1
