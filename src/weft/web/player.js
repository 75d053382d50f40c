// Back, Play and Next. `move(by)` moves and returns false at the end; while playing it is called every `pace` milliseconds.
// `restart()` goes to the beginning, `onstop()` is called when it stops.
import { button } from "./dom.js";

export function player({ pace, move, restart, onstop = () => {} }) {
	let timer = 0;
	const stop = () => {
		clearTimeout(timer);
		timer = 0;
		play.textContent = "Play";
	};
	const pause = () => { stop(); onstop(); };
	const wait = () => { timer = setTimeout(() => (move(1) ? wait() : pause()), pace); };
	const start = () => {
		if (next.disabled) restart();
		play.textContent = "Pause";
		wait();
	};
	const go = by => { move(by); pause(); };
	const back = button("Back", () => go(-1)), play = button("Play", () => (timer ? pause() : start()));
	const next = button("Next", () => go(1)), setEnds = (first, last) => { [back.disabled, next.disabled] = [first, last]; };
	return { buttons: [back, play, next], start, pause, stop, go, setEnds };
}
