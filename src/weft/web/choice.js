// From logits to a token, computed from the candidates' logits; the server, which knows the whole vocabulary, confirms
// what other settings give.
import { Distribution } from "./distribution.js";
import { sum } from "./words.js";

export const NEUTRAL = { temperature: 1, top_k: null, top_p: null };

// The number of tokens that are not candidates, and the logit that gives them their total probability.
function restLogit(choice) {
	const count = choice.vocab_size - choice.candidates.length, [first] = choice.candidates;
	const rest = 1 - sum(choice.candidates.map(each => each.probability));
	if (count <= 0 || rest <= 1e-9 || !first?.probability) return null;
	const each = choice.temperature ? Math.log(rest / count / first.probability) * choice.temperature : -Infinity;
	return { count, logit: first.logit + each };
}

const isSame = (settings, choice) =>
	Object.keys(NEUTRAL).every(name => (settings[name] ?? null) === (choice[name] ?? null));

// Probabilities of the candidates under some settings; all other tokens are assumed to have equal logits unless the
// server has computed them.
export function sharesOf(choice, settings) {
	if (isSame(settings, choice)) return choice.candidates.map(each => each.final);
	const rest = restLogit(choice);
	const full = new Distribution(Float64Array.from([...choice.candidates.map(each => each.logit),
		...Array(rest?.count ?? 0).fill(rest?.logit)]));
	const { probabilities } = full.filter({ ...NEUTRAL, ...settings });
	return choice.candidates.map((_, place) => probabilities[place] ?? 0);
}

// The token that a random number between 0 and 1 falls on, and its rank; a rank beyond the candidates is that of the
// rest of the vocabulary, whose tokens `tail` samples at equal steps of probability.
export function drawn({ candidates, tail }, shares, number) {
	let left = number;
	for (const [rank, share] of shares.entries()) {
		if (left < share) return { ...candidates[rank], rank };
		left -= share;
	}
	const rest = 1 - sum(shares), rank = Math.min(tail.length - 1,
		Math.floor((left / Math.max(rest, 1e-12)) * tail.length));
	return tail.length ? { ...tail[Math.max(0, rank)], rank: candidates.length } : { ...candidates[0], rank: 0 };
}
