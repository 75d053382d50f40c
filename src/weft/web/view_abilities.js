// Abilities: made-up sequences with one right continuation; a curve by distance for each ability.
import * as chart from "./chart.js";
import { h, soft } from "./dom.js";
import { lacksTokens } from "./reading.js";
import { saveTools, shellQuote } from "./save.js";
import { capitalised, percent } from "./words.js";

export const title = "Abilities";
export const about = "What the model can do without having seen it: copy, recall, count, agree, by distance.";
export const path = "abilities";
export const lacks = lacksTokens;

const QUESTIONS = 25; // at each distance

export async function mount(main, context) {
	const { api, info, signal } = context;
	const { data: tasks } = await api.get("v1/abilities", signal);
	const charts = [];
	const place = h("div.charts.small");
	main.append(h("p.soft.about", `Each point is the share of ${QUESTIONS} questions whose right answer is the `
		+ "likeliest of a few. The band is the 95% interval, the dashed line chance; a model that follows the rule is "
		+ "always right."), place);
	const tools = saveTools({ name: `abilities-${info.id}`, svg: () => charts.map(each => each.element),
		command: () => `weft evaluate ${shellQuote(`runs/${info.id}`)} --abilities --limit ${QUESTIONS}` });
	const figures = tasks.map(task => place.appendChild(h("figure.compare-figure",
		h("p.plot", h("b", task.name), " ", soft("asking …")), h("figcaption.soft", task.about))));
	const fill = async () => {
		for (const [n, task] of tasks.entries()) {
			if (signal.aborted) return;
			const found = await api.post("v1/abilities", { model: info.id, ability: task.name, questions: QUESTIONS }, signal);
			const [heading, caption] = figures[n].children;
			caption.append(...found.remarks.map(remark => ` ${capitalised(remark.replace(`${task.name}: `, ""))}`));
			if (found.skipped) heading.lastChild.textContent = `not asked: ${found.skipped}`;
			else {
				const drawn = h("div");
				heading.replaceWith(drawn);
				charts.push(chart.mount(drawn, { ...found.plots[0], title: `${task.name}: ${percent(found.accuracy)} right`,
					controls: false }));
				main.append(tools); // now there is something to save
			}
		}
		context.set({}); // the command is complete
	};
	fill().catch(problem => { if (!signal.aborted) place.append(h("p", { role: "alert" }, problem.message)); });
	return { close: () => charts.forEach(each => each.close()) };
}
