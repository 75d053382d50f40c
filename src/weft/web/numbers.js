// Number formats of axes and tables, the same as in figures/formats.py; tests/figures/test_axes.py compares the two.
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
/** @type {[number, string][]} */
export const SUFFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
/** @type {[number, string][]} */
const TIME_UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const MIN_SUFFIXED = 1e4; // smaller numbers are written out: 2500, but 25k

// Format with at most `digits` significant digits, as Python's %g does but with a short exponent: 0.05, 2500, 5e-5.
export function general(value, digits = 6) {
	if (!Number.isFinite(value)) return String(value);
	const [mantissa, power] = roundHalfEven(value, digits).split("e"), exponent = Number(power);
	if (exponent < -4 || exponent >= digits) return `${Number(mantissa)}e${exponent}`;
	const fixed = (Number(`${mantissa}e${power}`) || 0).toFixed(Math.max(0, digits - 1 - exponent));
	return fixed.includes(".") ? fixed.replace(/\.?0+$/, "") : fixed;
}

// JavaScript rounds an exact tie away from zero, Python to the even digit.
function roundHalfEven(value, digits) {
	const rounded = value.toExponential(digits - 1), exact = value.toExponential(60);
	const rest = exact.slice(exact.indexOf(".") + digits).replace(/e.*/, "");
	const last = Number(rounded.split("e")[0].at(-1));
	if (!/^50*$/.test(rest) || last % 2 === 0) return rounded;
	const towards = exact.slice(0, exact.indexOf(".") + digits).replace(/\.$/, "");
	return `${towards}e${exact.split("e")[1]}`;
}

// Format with a suffix from 10,000 on: 0.25, 2500, 25k, 1.5M, 2B; 5e-5.
export function number(value) {
	const found = Math.abs(value) >= MIN_SUFFIXED && SUFFIXES.find(([size]) => Math.abs(value) >= size);
	return found ? `${general(value / found[0])}${found[1]}` : general(value);
}

// Format as an integer with thousands separators: 32,000.
export const count = value => BigInt(Math.floor(value + 0.5)).toLocaleString("en");

// Format as a power of ten: 2e14 → "2·10¹⁴".
export function scientific(value) {
	if (!value) return "0";
	const [digits, power] = roundHalfEven(value, 3).split("e"), mantissa = general(Number(digits));
	const exponent = [...power.replace("+", "")].map(digit => digit === "-" ? "⁻" : SUPERSCRIPTS[Number(digit)]).join("");
	return mantissa === "1" ? `10${exponent}` : `${mantissa}·10${exponent}`;
}

// Format a factor: 2 → "2×".
const multiple = value => `${general(value)}×`;

// Format a change: 0.5 → "+0.5".
const signed = value => value > 0 ? `+${general(value)}` : general(value);

// Format seconds in the largest unit that gives at least 1: 90 → "1.5 min".
export function duration(seconds) {
	if (seconds === 0) return "0";
	const [unit, name] = TIME_UNITS.find(([size]) => Math.abs(seconds) >= size) ?? [1, "s"];
	return `${general(seconds / unit, 3)} ${name}`;
}

const FORMATS = { number, count, scientific, multiple, signed, duration }; // only the Explorer uses durations

export function formatOf({ format = "number" }) {
	if (!Object.hasOwn(FORMATS, format)) {
		throw new Error(`axis format "${format}": expected one of ${Object.keys(FORMATS).join(", ")}`);
	}
	return FORMATS[format];
}
