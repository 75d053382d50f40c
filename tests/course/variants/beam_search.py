"""Correct answers to the exercise beam_search in other manners."""

# mypy: ignore-errors
import heapq
import math


def heap(first, following, end, width, max_length, alpha):
    def penalised(log_p, length):
        return log_p / math.pow((5 + length) / 6, alpha)

    best, top, beam = None, -math.inf, [(0.0, ())]
    for step in range(max_length):
        alive = []
        for log_p, text in beam:
            for token, extra in enumerate((first if not text else following[text[-1]]).tolist()):
                new, total = (*text, token), log_p + extra
                if token == end or step + 1 == max_length:
                    if penalised(total, len(new)) > top:
                        best, top = new, penalised(total, len(new))
                else:
                    alive.append((total, new))
        beam = heapq.nlargest(width, alive)
    return list(best), top


def tensors(first, following, end, width, max_length, alpha):
    texts, log_p, done = [[token] for token in range(len(first))], first.tolist(), []
    for step in range(1, max_length + 1):
        pairs = sorted(zip(log_p, texts, strict=True), key=lambda pair: -pair[0])
        done += [(p / ((5 + step) / 6) ** alpha, text) for p, text in pairs if text[-1] == end or step == max_length]
        pairs = [pair for pair in pairs if pair[1][-1] != end][:width]
        texts = [[*text, token] for _, text in pairs for token in range(len(first))]
        log_p = [p + q for p, text in pairs for q in following[text[-1]].tolist()]
    score, text = max(done)
    return text, score


def with_numpy(first, following, end, width, max_length, alpha):
    start, table = first.numpy(), following.numpy()
    beam, finished = [((), 0.0)], {}
    for length in range(1, max_length + 1):
        grown = {}
        for text, p in beam:
            row = table[text[-1]] if text else start
            for token in range(len(row)):
                grown[(*text, token)] = p + row[token]
        for text, p in grown.items():
            if text[-1] == end or length == max_length:
                finished[text] = p / ((5 + length) / 6) ** alpha
        alive = [item for item in grown.items() if item[0][-1] != end]
        beam = sorted(alive, key=lambda item: item[1], reverse=True)[:width]
    winner = max(finished, key=finished.get)
    return {"best": list(winner), "score": finished[winner]}
