"""Activation patching: which activations of a clean text, put into a corrupt one, bring the clean answer back.

Two texts differ in one respect, and so do their answers. The measure is the logit difference of the two answers: the
share recovered is 0 if a patched pass on the corrupt text is like the unpatched one, and 1 if it is like the clean one
(Vig et al. 2020; Meng et al. 2022). Paths are patched as by Wang et al. (2023): a sender gets its clean activation, all
other nodes keep their corrupt ones, and what a receiver then computes is put into an otherwise corrupt pass. A circuit
is what is left when every node that is not needed is replaced by its mean activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from weft.errors import DataError
from weft.explain.capture import capture, join_steps, taps
from weft.explain.interventions.picture import AnswerAccuracy, Array, Circuit, PatchEffect, Patching, SiteMap
from weft.explain.interventions.picture import InterventionsOverTime as InterventionsOverTime
from weft.explain.interventions.recording import require_activations
from weft.explain.interventions.sites import CircuitNode, Site, neuron_taps, nodes, sites
from weft.explain.interventions.swap import PairBatch, Swap, TextPair, batches, min_difference, replacements
from weft.explain.reading import pieces
from weft.models.base import evaluating
from weft.progress import bar

MAPPED_PAIRS = 8  # pairs that the maps are the mean of, at most
PATH_PAIRS = 32  # pairs that paths are measured on, at most
MAX_POSITIONS = 64  # last positions of a text in a map
PATH_NODES, NEURONS = 6, 12  # strongest nodes whose paths are measured, and neurons that are listed
TRACKED_NODES = 4  # strongest nodes that are measured at each checkpoint
MIN_PAIRS = 8  # from which on a circuit is looked for
MIN_GROUP = 16  # texts of a length whose means are taken by position
KEPT = 0.98  # share of the accuracy that a node's removal may not go below while a circuit is looked for

SIDES = ("clean", "corrupt")

Means = dict[tuple[int, int], dict[str, Tensor]]  # by length of text and source, then by tap: (1, time, d)


def patch(pairs: Sequence[TextPair]) -> Patching:
    """Patch every site, node and path of the pairs' model; with 8 pairs or more, find a circuit as well."""
    model = pairs[0].clean.model
    require_activations(model)
    grouped, found = batches(pairs), sites(model)
    (clean, smallest), (corrupt, _) = (_differences(grouped, side) for side in SIDES)
    if np.isnan(scale := float((clean - corrupt).mean())):
        raise DataError("the model's logits are NaN; its weights may have diverged")
    if abs(scale) < smallest:
        over = "" if len(pairs) == 1 else f", in the mean of {len(pairs)} pairs,"
        sides = f"{clean.mean():.4f} after the clean text and {corrupt.mean():.4f} after the corrupt one"
        near = f"too near each other to show what recovers the difference, which takes {smallest:.1g}"
        raise DataError(f"the logit difference of the answers{over} is {sides}: {near}; try other texts or answers")
    measured = Measured(grouped, scale)
    all_nodes = nodes(model)
    shown = {id(pair) for pair in pairs[:MAPPED_PAIRS]}
    first = [index for index, pair in enumerate(measured.pairs) if id(pair) in shown]
    share = float((clean - corrupt)[first].mean())  # of few pairs, whose signs may cancel out
    mapped = Measured(batches(pairs[:MAPPED_PAIRS]), scale if abs(share) < smallest else share)
    with bar("patching", len(found) + len(all_nodes)) as advance:
        maps = []
        for site in found:
            maps.append(mapped.map(site, pairs[0]))
            advance(1)
        effects = measured.effects([(node.name, _swaps(node)) for node in all_nodes])
        advance(len(all_nodes))
    neurons = measured.effects(_attributed_neurons(grouped[0], neuron_taps(model)))
    order = sorted(range(len(all_nodes)), key=lambda n: -abs(effects[n].recovered))
    strongest = [all_nodes[n] for n in order[:PATH_NODES]]
    paths = Measured(batches(pairs[:PATH_PAIRS]), scale).paths(all_nodes, strongest)
    circuit = find_circuit(pairs, [all_nodes[n] for n in reversed(order)]) if len(pairs) >= MIN_PAIRS else None
    answers = None
    if len(pairs) == 1:
        one, two = pieces(pairs[0].clean.tokenizer, (pairs[0].answer, pairs[0].other))
        answers = (one, two)
    difference = float(corrupt.mean()), float(clean.mean())
    ranked = [tuple(sorted(each, key=lambda effect: -abs(effect.recovered))) for each in (effects, neurons, paths)]
    return Patching(
        len(pairs),
        answers,
        difference,
        tuple(maps),
        nodes=ranked[0],
        neurons=ranked[1],
        paths=ranked[2],
        circuit=circuit,
    )


def _differences(grouped: Sequence[PairBatch], side: str) -> tuple[Array, float]:
    """Return the logit differences of a side (pairs,), and the smallest difference that is worth a share."""
    logits = [(batch, batch.logits(side)) for batch in grouped]
    found = np.concatenate([batch.differences(each)[0] for batch, each in logits])
    return found, float(np.mean([min_difference(each) for _, each in logits]))


def checkpoint_measures(pairs: Sequence[TextPair], found: Patching) -> dict[str, float]:
    """Return what a checkpoint has of a trained model's findings: the effect of its strongest nodes, as shares of the
    trained model's logit difference, and the accuracy of the whole model and of the circuit."""
    by_name = {node.name: node for node in nodes(pairs[0].clean.model)}
    measured = Measured(batches(pairs), found.difference[1] - found.difference[0])
    effects = measured.effects([(each.name, _swaps(by_name[each.name])) for each in found.nodes[:TRACKED_NODES]])
    shares = {each.name: each.recovered for each in effects}
    means = mean_activations(measured.batches, list(by_name.values()))
    shares["accuracy"] = ablated_accuracy(measured.batches, (), means).likeliest
    if found.circuit is not None:
        removed = [node for name, node in by_name.items() if name not in found.circuit.kept]
        shares["circuit's accuracy"] = ablated_accuracy(measured.batches, removed, means).likeliest
    return shares


def _swaps(node: CircuitNode) -> list[Swap]:
    return [Swap(tap, node.units) for tap in node.taps]


@dataclass(frozen=True)
class Measured:
    """Batches of pairs, and the mean of clean − corrupt, the logit difference that can be recovered."""

    batches: Sequence[PairBatch]
    scale: float

    def recovered(self, batch: PairBatch, differences: Tensor) -> Array:
        """Return the share recovered by patched passes with logit differences (…, pairs)."""
        corrupt = batch.differences(batch.logits("corrupt"))
        return ((differences - corrupt) / self.scale).numpy()

    def effects(self, variants: Sequence[tuple[str, Sequence[Swap]]]) -> list[PatchEffect]:
        """Return the effect of each variant over all pairs."""
        if not variants:
            return []
        names = list(dict.fromkeys(swap.tap for _, swaps in variants for swap in swaps))
        columns = []
        for batch in self.batches:
            values = batch.activations("clean", names)
            found = torch.stack(list(batch.exchange([swaps for _, swaps in variants], values)))
            columns.append(self.recovered(batch, found))
        shares = np.concatenate(columns, axis=1)  # (variants, pairs)
        return [_effect(name, row) for (name, _), row in zip(variants, shares, strict=True)]

    def map(self, site: Site, first: TextPair) -> SiteMap:
        """Return the effect of each layer at each position; texts of different lengths are aligned at their ends."""
        lengths = [len((pair.clean.source if site.source else pair.clean.ids) or ()) for pair in self.pairs]
        shown = min(MAX_POSITIONS, *lengths) if len(lengths) > 1 else min(MAX_POSITIONS, lengths[0])
        total = np.zeros((len(site.taps), shown))
        for batch in self.batches:
            values = batch.activations("clean", site.taps)
            time = next(iter(values.values())).shape[1]
            places = range(time - shown, time)
            found = batch.exchange([[Swap(tap, position=n)] for tap in site.taps for n in places], values)
            total += self.recovered(batch, torch.stack(list(found))).sum(-1).reshape(total.shape)
        tokens = _labels(first, site.source, lengths)
        return SiteMap(site.kind, site.labels, tuple(tokens[-shown:]), total / len(lengths))

    @property
    def pairs(self) -> list[TextPair]:
        return [pair for batch in self.batches for pair in batch.pairs]

    def paths(self, all_nodes: Sequence[CircuitNode], ends: Sequence[CircuitNode]) -> list[PatchEffect]:
        """Return the effect of each direct path between two of the nodes `ends`, and from each to the output."""
        names = list(dict.fromkeys(tap for node in all_nodes for tap in node.taps))
        routes = list(permutations(range(len(ends)), 2))
        rows: list[list[Array]] = [[] for _ in range(len(ends) + len(routes))]
        for batch in self.batches:
            clean, corrupt = (batch.activations(side, names) for side in SIDES)
            for sender, node in enumerate(ends):
                frozen = {name: values.clone() for name, values in corrupt.items()}
                for tap in node.taps:
                    frozen[tap][..., node.units] = clean[tap][..., node.units]
                everything = torch.ones(1, 1, 1, dtype=torch.bool, device=next(iter(frozen.values())).device)
                seen: dict[str, list[Tensor]] = {}
                changes = replacements(
                    batch.model,
                    {name: (values, everything) for name, values in frozen.items()},
                    see=lambda name, x, seen=seen: seen.setdefault(name, []).append(x),  # type: ignore[misc]
                )
                rows[sender].append(self.recovered(batch, batch.differences(batch.logits("corrupt", changes)))[0])
                by_step = taps(batch.model)
                arrived = {n: join_steps(x) if by_step[n].by_step else x[-1] for n, x in seen.items()}
                received = [receiver for one, receiver in routes if one == sender]
                found = batch.exchange([_swaps(ends[receiver]) for receiver in received], arrived)
                for receiver, differences in zip(received, found, strict=True):
                    index = len(ends) + routes.index((sender, receiver))
                    rows[index].append(self.recovered(batch, differences[None])[0])
        labels = [f"{node.name} → output" for node in ends]
        labels += [f"{ends[one].name} → {ends[two].name}" for one, two in routes]
        found_paths = [_effect(label, np.concatenate(row)) for label, row in zip(labels, rows, strict=True)]
        return [path for path in found_paths if abs(path.recovered) > 1e-6]  # the others do not exist


def _effect(name: str, shares: Array) -> PatchEffect:
    """Return the mean share over pairs (pairs,) with Student's interval; without one for a single pair."""
    mean, low, high = float(shares.mean()), float("nan"), float("nan")
    if len(shares) > 1:
        half = float(stats.t.ppf(0.975, len(shares) - 1) * shares.std(ddof=1) / np.sqrt(len(shares)))
        low, high = mean - half, mean + half
    return PatchEffect(name, mean, low, high)


def _labels(first: TextPair, source: bool, lengths: Sequence[int]) -> list[str]:
    """Return the tokens of one pair, "clean / corrupt" where they differ; of several pairs, the positions."""
    if len(lengths) > 1:
        equal = min(lengths) == max(lengths)
        return [str(n) if equal else f"−{max(lengths) - n}" for n in range(max(lengths))]
    sides = [reading.source_pieces if source else reading.pieces for reading in (first.clean, first.corrupt)]
    both = zip(*(side or [] for side in sides), strict=True)
    return [clean if clean == corrupt else f"{clean} / {corrupt}" for clean, corrupt in both]


def _attributed_neurons(batch: PairBatch, names: Sequence[str]) -> list[tuple[str, list[Swap]]]:
    """Return the neurons with the largest gradient × (clean − corrupt), an estimate of their effect (Nanda 2023)."""
    if not names:
        return []
    clean, (tokens, options) = batch.activations("clean", names), batch.inputs("corrupt", 1)
    with evaluating(batch.model), torch.enable_grad(), capture(batch.model, *names, grads=True) as captured:
        features = batch.model.features(tokens, **options)
        readout = batch.model.readout(features[:, [batch.pairs[0].position]])
        assert readout is not None
        chosen = readout.logits()[:, 0].gather(1, batch.answers)
        (chosen[:, 0] - chosen[:, 1]).sum().backward()
    scores = []
    for name in names:
        gradient = captured[name].grad
        assert gradient is not None
        scores.append(((clean[name] - captured[name]) * gradient).sum((0, 1)).abs().detach().cpu())
    batch.model.zero_grad(set_to_none=True)
    largest = torch.cat(scores).topk(min(NEURONS, sum(map(len, scores)))).indices.tolist()
    found = []
    for index in largest:
        layer = 0
        while index >= len(scores[layer]):
            index -= len(scores[layer])
            layer += 1
        stack, number = names[layer].split(".")[:2]
        prefix = f"{stack} " if len({name.split(".")[0] for name in names}) > 1 else ""
        found.append((f"{prefix}neuron {number}.{index}", [Swap(names[layer], slice(index, index + 1))]))
    return found


def find_circuit(pairs: Sequence[TextPair], ordered: Sequence[CircuitNode]) -> Circuit:
    """Find nodes that suffice, and measure them on the other half of the pairs.

    `ordered` has the weakest nodes first. Blocks of nodes are replaced by their mean as long as the accuracy on the
    first half stays at 98 % of the whole model's; a block that is needed is divided and tried again.
    """
    search, means = batches(pairs[::2]), mean_activations(batches(pairs), ordered)
    whole, removed = ablated_accuracy(search, (), means), list[CircuitNode]()
    with bar("finding a circuit", len(ordered)) as advance:

        def prune(block: Sequence[CircuitNode]) -> None:
            after = ablated_accuracy(search, [*removed, *block], means)
            if all(now >= KEPT * before for now, before in zip(after, whole, strict=True)):
                removed.extend(block)
            elif len(block) > 1:
                prune(block[: len(block) // 2])
                prune(block[len(block) // 2 :])
                return
            advance(len(block))

        prune(ordered)
    kept = [node for node in reversed(ordered) if node not in removed]
    gone = {"whole model": (), "circuit alone": removed, "without the circuit": kept, "without all nodes": ordered}
    accuracies = {name: ablated_accuracy(batches(pairs[1::2]), each, means) for name, each in gone.items()}
    return Circuit(tuple(node.name for node in kept), len(ordered), len(pairs[1::2]), accuracies)


def ablated_accuracy(parts: Sequence[PairBatch], removed: Sequence[CircuitNode], means: Means) -> AnswerAccuracy:
    """Return the accuracy on the clean texts with these nodes replaced by their means."""
    hits = np.zeros(2)
    for batch in parts:
        replaced = {}
        for tap in dict.fromkeys(tap for node in removed for tap in node.taps):
            mean = means[_size(batch)][tap]
            mask = torch.zeros(1, 1, mean.shape[-1], dtype=torch.bool, device=mean.device)
            for node in (node for node in removed if tap in node.taps):
                mask[..., node.units] = True
            replaced[tap] = (mean, mask)
        logits = batch.logits("clean", replacements(batch.model, replaced))
        preferred = (batch.differences(logits)[0] > 0).sum()
        hits += (float(preferred), float((logits.argmax(-1) == batch.answers[:, 0]).sum()))
    return AnswerAccuracy(*(hits / sum(len(batch.pairs) for batch in parts)).tolist())


def _size(batch: PairBatch) -> tuple[int, int]:
    reading = batch.pairs[0].clean
    return len(reading.ids), len(reading.source or ())


def mean_activations(parts: Sequence[PairBatch], all_nodes: Sequence[CircuitNode]) -> Means:
    """Return the mean activations (1, time, d) of clean and corrupt texts, by length of text and source.

    They are means at each position, or over all positions for lengths of which there are only a few texts.
    """
    sums: dict[tuple[int, int], dict[str, Tensor]] = {}
    names = list(dict.fromkeys(tap for node in all_nodes for tap in node.taps))
    texts: dict[tuple[int, int], int] = {}
    for batch in parts:
        texts[_size(batch)] = texts.get(_size(batch), 0) + 2 * len(batch.pairs)
        for side in SIDES:
            into = sums.setdefault(_size(batch), {})
            for name, values in batch.activations(side, names).items():
                into[name] = into.get(name, torch.zeros_like(values[:1])) + values.sum(0, keepdim=True)
    overall = {}
    for name in names:
        summed = torch.stack([each[name].sum(1, keepdim=True) for each in sums.values()]).sum(0)
        overall[name] = summed / sum(count * sums[size][name].shape[1] for size, count in texts.items())

    def mean(size: tuple[int, int], name: str) -> Tensor:
        total = sums[size][name]
        return total / texts[size] if texts[size] >= MIN_GROUP else overall[name].expand_as(total)

    return {size: {name: mean(size, name) for name in names} for size in sums}
