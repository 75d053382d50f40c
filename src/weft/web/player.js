// Back, Play and Next. `move(by)` moves and returns false at the end; while playing, `tick()` is called every `pace()`
// milliseconds until it returns false; `restart()` goes to the beginning, `onstop()` is called when it stops.
import { button } from "./dom.js";

export function player({ pace, move, tick = () => move(1), restart, onstop = () => {} }) {
  let timer = 0;
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
  };
  const wait = () => {
    timer = setTimeout(async () => {
      const running = await tick();
      if (timer && running) wait();
      else if (timer) pause();
    }, pace());
  };
  const pause = () => { stop(); onstop(); };
  const start = () => {
    if (next.disabled) restart();
    play.textContent = "Pause";
    wait();
  };
  const go = by => { move(by); pause(); }, toggle = () => (timer ? pause() : start());
  const back = button("Back", () => go(-1)), play = button("Play", toggle), next = button("Next", () => go(1));
  const setEnds = (first, last) => { [back.disabled, next.disabled] = [first, last]; };
  return { buttons: [back, play, next], start, pause, stop, toggle, go, setEnds };
}
