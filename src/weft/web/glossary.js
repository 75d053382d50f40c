// The glossary: one entry per term, with its lecture and paper. A term shows its entry when pointed at or focused.
import { button, h, soft } from "./dom.js";

const LECTURES = ["Sequence models and attention", "Transformers", "Learning and decoding", "BERT and GPT",
  "Transformer language models"];

// term: [definition, number of the lecture that introduces it or 0, paper]
/** @type {Record<string, [string, number, string?]>} */
export const TERMS = {
  "attention head": ["One of several attentions that run side by side in a layer, each with its own queries, keys and values.",
    2, "Vaswani et al. 2017, §3.2.2"],
  "attention sink": ["A token, usually the first, that receives much attention without being relevant: where a head attends when it has nothing to do.",
    0, "Xiao et al. 2024"],
  "beam search": ["Keeps the few most probable partial texts at every step instead of only one.", 3, "Sutskever et al. 2014"],
  "bits per byte": ["Loss in bits, divided by the bytes of the text. Unlike perplexity, it can be compared between tokenizers.",
    3, "Gao et al. 2020"],
  "byte-pair encoding": ["Builds a vocabulary by merging the most frequent pair of neighbouring tokens, again and again.",
    3, "Sennrich et al. 2016"],
  "causal mask": ["Hides later tokens, so that each position is predicted from the text before it.", 5, "Vaswani et al. 2017, §3.2.3"],
  "cosine similarity": ["The cosine of the angle between two vectors: 1 if they point the same way, 0 if they are unrelated.", 4],
  "cross-attention": ["Attention from the text being written to the text being read.", 2, "Bahdanau et al. 2015"],
  "d_model": ["The number of values in the vector of each token.", 5, "Vaswani et al. 2017, §3.1"],
  "embedding": ["The learned vector of a token, with which the model's computation begins.", 2, "Bengio et al. 2003"],
  "entropy": ["How spread out a distribution is: 0 if one outcome is certain, largest if all are equally probable.", 3, "Shannon 1948"],
  "feed-forward layer": ["Two matrices with a nonlinear function between them, applied to each token on its own.",
    2, "Vaswani et al. 2017, §3.3"],
  "FLOPs": ["Floating-point operations: additions and multiplications, the unit of compute.", 5, "Kaplan et al. 2020"],
  "gradient norm": ["The length of the gradient: how strongly a small change can affect the result.", 2, "Pascanu et al. 2013"],
  "gradient × input": ["The gradient multiplied by the embedding: how much a token contributes to log p, to first order.",
    0, "Denil et al. 2014"],
  "greedy search": ["Takes the most probable token at every step.", 3],
  "held-out data": ["Data that the model was not trained on, used to measure how well it generalises.", 5],
  "induction head": ["A head that finds an earlier copy of the current token and attends to what followed it.", 0, "Olsson et al. 2022"],
  "KV cache": ["Keys and values of earlier tokens, kept so that each new token is computed only once.", 3, "Shazeer 2019"],
  "layer normalisation": ["Rescales the vector of each token to mean 0 and variance 1, then applies a learned gain and bias.",
    2, "Ba et al. 2016"],
  "learning rate": ["How far each update moves the parameters.", 2, "Kingma and Ba 2015"],
  "logit lens": ["Reads the residual stream after each layer through the model's output layer, as if the model ended there.",
    0, "nostalgebraist 2020"],
  "logits": ["Scores of all tokens before softmax turns them into probabilities.", 5],
  "loss": ["What training minimises: for a language model, the mean of −log p over the tokens.", 3],
  "masked language model": ["Predicts hidden tokens from the text on both sides.", 4, "Devlin et al. 2019"],
  "min-p": ["Keeps tokens whose probability is at least this share of the most probable token's.", 0, "Nguyen et al. 2024"],
  "n-gram": ["A sequence of n tokens. An n-gram model predicts the next token from how often it followed the last n − 1.",
    3, "Shannon 1948"],
  "nat": ["Unit of information with the natural logarithm; 1 nat is 1.44 bits.", 3],
  "parameters": ["The numbers that a model learns.", 5],
  "perplexity": ["e to the mean loss: the number of equally probable tokens that would be as hard to predict.", 5, "Jelinek et al. 1977"],
  "queries, keys and values": ["Each token asks with a query, is found by its key, and hands over its value.",
    5, "Vaswani et al. 2017, §3.2.1"],
  "residual stream": ["The vector of a token on its way through the layers; each layer adds to it.", 2, "Elhage et al. 2021"],
  "sampling": ["Draws each token at random by its probability.", 3],
  "saliency": ["How much a prediction depends on each token, measured by the gradient.", 0, "Simonyan et al. 2014"],
  "scaling law": ["A power law that predicts the loss from the size of the model, the data or the compute.", 0, "Kaplan et al. 2020"],
  "softmax": ["Turns scores into probabilities that sum to 1: each is e to its score, divided by the sum of all.", 5, "Bridle 1990"],
  "surprisal": ["−log p of a token: 0 if it was certain, large if it was unexpected.", 5, "Shannon 1948"],
  "temperature": ["Divides the logits before softmax: below 1 favours probable tokens, above 1 evens them out.", 0, "Ackley et al. 1985"],
  "token": ["A unit of text that the model reads: a word, a part of one, or a character.", 2],
  "top-k": ["Keeps only the k most probable tokens.", 0, "Fan et al. 2018"],
  "top-p": ["Keeps the most probable tokens whose probabilities add up to p (nucleus sampling).", 0, "Holtzman et al. 2020"],
  "vocabulary": ["All tokens that a model knows.", 3],
};

// terms of each view, in the order in which a reader meets them
const OF_VIEW = {
  write: ["token", "surprisal", "sampling", "temperature", "top-k", "top-p", "min-p", "beam search", "entropy"],
  predict: ["logits", "softmax", "saliency", "gradient norm", "cosine similarity"],
  step: ["token", "embedding", "residual stream", "queries, keys and values", "attention head", "causal mask", "softmax",
    "feed-forward layer", "layer normalisation", "logits", "temperature"],
  attention: ["attention head", "queries, keys and values", "causal mask", "cross-attention", "induction head", "attention sink", "loss"],
  surprise: ["surprisal", "nat", "perplexity", "bits per byte"],
  lens: ["logit lens", "residual stream", "logits"],
  saliency: ["saliency", "gradient norm", "gradient × input"],
  search: ["greedy search", "beam search", "sampling", "temperature", "top-k"],
  tokens: ["token", "vocabulary", "byte-pair encoding", "n-gram"],
  runs: ["loss", "held-out data", "learning rate", "gradient norm", "bits per byte", "perplexity"],
  compare: ["loss", "held-out data", "FLOPs", "scaling law", "parameters"],
  anatomy: ["parameters", "d_model", "attention head", "feed-forward layer", "KV cache", "FLOPs"],
};

const source = term => {
  const [, lecture, paper] = TERMS[term];
  return [lecture && `Lecture ${lecture}: ${LECTURES[lecture - 1]}`, paper].filter(Boolean).join(" · ");
};

const card = h("div", { class: "term-card", role: "tooltip", id: "term-card", hidden: true });
let hiding = 0;

function show(target, term) {
  clearTimeout(hiding);
  card.replaceChildren(h("b", {}, term), h("p", {}, TERMS[term][0]), h("p", { class: "soft" }, source(term)));
  document.body.append(card);
  card.hidden = false;
  const box = target.getBoundingClientRect(), { offsetWidth: wide, offsetHeight: high } = card;
  const below = box.bottom + 6 + high < innerHeight;
  card.style.setProperty("left", `${Math.max(8, Math.min(box.left, innerWidth - wide - 8))}px`);
  card.style.setProperty("top", `${below ? box.bottom + 6 : Math.max(8, box.top - high - 6)}px`);
  target.setAttribute("aria-describedby", card.id);
}

function hide(target) {
  clearTimeout(hiding);
  hiding = setTimeout(() => { card.hidden = true; target?.removeAttribute("aria-describedby"); }, 120);
}
card.addEventListener("pointerenter", () => clearTimeout(hiding)); // it can be read and copied
card.addEventListener("pointerleave", () => hide(null));
document.addEventListener("keydown", event => { if (event.key === "Escape") card.hidden = true; });
document.addEventListener("scroll", () => { card.hidden = true; }, { capture: true, passive: true });

// A term as a word that shows its entry.
const term = name => {
  const word = button(name, () => show(word, name), { class: "term" });
  for (const event of ["pointerenter", "focus"]) word.addEventListener(event, () => show(word, name));
  for (const event of ["pointerleave", "blur"]) word.addEventListener(event, () => hide(word));
  return word;
};

// The terms of a view, as a line.
export const termsOf = path => OF_VIEW[path] && h("p", { class: "terms" }, soft("Terms: "), OF_VIEW[path].map(term));

// All entries, folded.
export const glossary = () => h("details", { class: "fold glossary" }, h("summary", {}, `Glossary: ${Object.keys(TERMS).length} terms`),
  h("dl", {}, Object.keys(TERMS).map(name => h("div", {}, h("dt", {}, name), h("dd", {}, TERMS[name][0], " ", soft(source(name)))))));
