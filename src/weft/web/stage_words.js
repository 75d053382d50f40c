// The last columns of the stage: logits, probabilities under the reader's settings, and the draw of one token.
import { h, s, set } from "./dom.js";
import { at, bars, largest, line, minus, part, rect, signedBar, text, tokenName } from "./stage_marks.js";
import { percent, round, sum, withCommas } from "./words.js";

const MAX_ROWS = 8;

// What the rows show: the likeliest tokens or labels with their shares, and all others as the last row.
export function wordRows({ choice, shares }) {
	const order = choice.candidates.map((_, rank) => rank).slice(0, MAX_ROWS), others = choice.vocab_size - order.length;
	const parts = order.map(rank => shares[rank]), rest = Math.max(0, 1 - sum(parts));
	return { order, others, parts: others > 0 ? [...parts, rest] : parts };
}

// Columns of a model that predicts tokens or labels; of another, its output as a vector.
export function wordsPart(stage, { logits = "Logits", next = "Next token" } = {}) {
	const { step, fs, indexOf } = stage, { choice } = step;
	const wide = stage.narrow ? 0 : Math.max(fs * 15.5, stage.width * 0.16);
	if (!choice) {
		const output = step.memory ?? step.stages.at(-1).tensors[0].values;
		return { id: "words", at: "logits", title: step.memory ? "For the decoder" : "Output", width: wide, heightNarrow: 110,
			draw(box) {
				const h = Math.min(box.h, fs * 12), y = box.narrow ? box.y : box.y + (box.h - h) / 2, { x, y: low } = box.from ?? {};
				return [at(indexOf("logits"), box.narrow ? null : line(`M${x} ${low}C${x + fs * 2.2} ${low} ${x} ${y + h / 2} `
					+ `${box.x - 6} ${y + h / 2}`, "thread", { style: { "stroke-width": fs, opacity: 0.7 } }),
				bars(output, { x: box.x, y, w: box.w, h }))];
			} };
	}
	const { order, others } = wordRows(stage), rows = order.length + (others > 0 ? 1 : 0);
	const isDrawn = indexOf("choice") >= 0;
	return { id: "words", at: "logits", title: logits, second: { at: "probabilities", title: next }, width: wide,
		heightNarrow: rows * 38 + (isDrawn ? 64 : 8), draw(box) {
			const rh = box.narrow ? 38 : Math.min(box.h / Math.max(rows, 4), fs * 4.4), wideLogits = box.w * 0.26,
				left = box.x + wideLogits + fs * 0.9;
			const room = box.x + box.w - left, top = box.narrow ? box.y + (isDrawn ? 64 : 8) : box.y,
				bar = Math.min(fs * 1.05, rh * 0.32);
			const values = order.map(rank => choice.candidates[rank].logit), most = largest(values);
			// log-probabilities are never positive: their zero line is at the right
			const signed = values.some(value => value > 0), zero = box.x + wideLogits * (signed ? 0.28 : 1);
			const scale = signed ? wideLogits * 0.72 : wideLogits, y = n => top + n * rh + rh * 0.5;
			const logitRows = order.map((rank, n) => {
				const value = values[n], shortest = value < 0 && signed ? wideLogits * 0.26 : scale * 0.94;
				const shown = [rect(box.x, y(n) - rh * 0.5, wideLogits, rh - 2, "hit"),
					signedBar(value, zero, y(n), Math.min(1, Math.abs(value) / most) * shortest, bar),
					text(signed ? zero + 5 : zero, y(n) - 5, minus(value, 1), signed ? "soft" : "soft end")];
				return part(choice.factors && `logit/${rank}`,
					`${minus(value, 1)}, the logit of ${choice.candidates[rank].piece}`, ...shown);
			});
			const names = [...order.map(rank => tokenName(choice.candidates[rank].piece, 12)),
				...others > 0 ? [`${withCommas(others)} others`] : []];
			const probabilityRows = names.map((name, n) => s("g.word", { "data-word": n },
				text(left, y(n) - 5, name, n < order.length ? "mono" : "soft",
					{ style: { "font-size": `${fs * (n < order.length ? 1.15 : 1)}px` } }),
				text(box.x + box.w, y(n) - 5, "", "end percent"), rect(left, y(n), room, bar, "track", 1),
				rect(left, y(n), room, bar, "pos share", 0), stage.beside?.shares && rect(left, y(n), 0, bar, "gap", 0,
					{ "data-x": round(left), "data-w": round(room) })));
			const fan = box.from ? order.map((rank, n) => line(`M${box.from.x} ${box.from.y}`
				+ `C${box.from.x + fs * 2.2} ${box.from.y} ${box.from.x} ${y(n)} ${box.x - 4} ${y(n)}`,
			"thread", { style: { "stroke-width": round(0.8 + 9 * stage.shares[rank]),
				opacity: (0.3 + 0.6 * stage.shares[rank]).toFixed(2) } })) : [];
			const drawing = at(indexOf("choice"), s("g.draw", { "data-x": round(left), "data-w": round(room) },
				names.map(() => rect(left, top - fs * 2.2, 0, fs * 0.7, "segment", 0)),
				line(`M${left} ${top - fs * 2.3}l${-fs * 0.4} ${-fs * 0.65}h${fs * 0.8}z`, "pointer"),
				text(box.x + box.w, top - fs * 3.4, "", "end soft number")));
			if (isDrawn) stage.temperatureBox = { x: left, y: box.narrow ? box.y - 4 : box.under ?? top + rows * rh + 4,
				w: room };
			return [at(indexOf("logits"), ...fan,
				line(`M${zero} ${top + rh * 0.3}V${top + order.length * rh - 2}`, "axis"),
				...logitRows), at(indexOf("probabilities"), ...probabilityRows), isDrawn && drawing];
		} };
}

// Set bars, percentages and the draw to the present settings, without drawing anything again.
export function updateWords(svg, stage) {
	const { parts, order } = wordRows(stage), draw = svg.querySelector(".draw"), chosen = stage.chosen;
	const row = chosen && Math.min(chosen.rank, parts.length - 1);
	svg.querySelectorAll(".word").forEach((word, n) => {
		word.querySelector(".share").style.setProperty("--p", Math.max(0.004, parts[n] ?? 0).toFixed(4));
		word.querySelector(".percent").textContent = percent(parts[n] ?? 0);
		word.classList.toggle("chosen", n === row);
		const gap = word.querySelector(".gap");
		if (gap) showGap(gap, parts[n] ?? 0, n < order.length ? stage.beside.shares.get(stage.choice.candidates[order[n]].piece) ?? 0 : null);
	});
	if (!draw) return;
	const left = Number(draw.dataset.x), room = Number(draw.dataset.w);
	let before = 0;
	draw.querySelectorAll(".segment").forEach((segment, n) => {
		set(segment, { x: round(left + before * room), width: round(Math.max(0.5, parts[n] * room - 1.5)) });
		segment.classList.toggle("chosen", n === row);
		before += parts[n];
	});
	draw.querySelector(".pointer").style.transform = `translateX(${(chosen?.number ?? 0) * room}px)`;
	draw.querySelector(".number").textContent = chosen ? `u = ${chosen.number.toFixed(2)}` : "";
}

// The part of a bar by which a probability exceeds that of the model beside this one, or falls short of it.
function showGap(gap, own, other) {
	const { x, w } = gap.dataset, from = Math.min(own, other ?? own), to = Math.max(own, other ?? own);
	set(gap, { x: round(Number(x) + from * w), width: round((to - from) * w) });
	gap.classList.toggle("short", own < to);
}

// A slider of the temperature, placed over the picture.
export function temperatureSlider(value, change) {
	const output = h("output", value.toFixed(2));
	const input = h("input", { type: "range", min: 0.1, max: 2, step: 0.05, value, "aria-label": "Temperature",
		oninput: () => { output.textContent = Number(input.value).toFixed(2); change(Number(input.value)); } });
	return h("label.stage-temperature", "T ", input, output);
}
