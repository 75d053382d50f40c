// Back, Play and Next. `move(by)` goes on or back and is false at the end, `tick()` goes on by itself, after `pace()`
// milliseconds, until that is false; `restart()` goes to the beginning, `rested()` hears that it stands still.
import { button } from "./dom.js";

export function player({ pace, move, tick = () => move(1), restart, rested = () => {} }) {
  let timer = 0;
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
  };
  const wait = () => {
    timer = setTimeout(async () => {
      const more = await tick();
      if (timer && more) wait();
      else if (timer) pause();
    }, pace());
  };
  const pause = () => { stop(); rested(); };
  const start = () => {
    if (next.disabled) restart();
    play.textContent = "Pause";
    wait();
  };
  const go = by => { move(by); pause(); };
  const toggle = () => (timer ? pause() : start());
  const back = button("Back", () => go(-1)), play = button("Play", toggle), next = button("Next", () => go(1));
  const ends = (first, last) => { [back.disabled, next.disabled] = [first, last]; };
  return { buttons: [back, play, next], start, pause, stop, toggle, go, ends };
}
