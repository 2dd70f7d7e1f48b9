"use strict";
// Numbers of the token view: how they travel, how they are written, which shade they have.
const tokenNumbers = (() => {
  const PREFIX = "tv-";
  const ZERO = "tv-zero";
  const NONE = "tv-none";
  // A range starts at zero unless that leaves more than this share of the shades unused.
  const UNUSED = 0.5;
  const LEAST = 1e-6; // float16 keeps a digit of what is larger

  // -- numbers -------------------------------------------------------------------------------------

  let halves = null; // every float16 as a number, by its bits
  const half = (bits) => {
    if (halves === null) {
      halves = new Float32Array(65536);
      for (let k = 0; k < 65536; k++) {
        const [sign, power, part] = [k >> 15 ? -1 : 1, (k >> 10) & 31, k & 1023];
        halves[k] =
          power === 31 ? (part ? NaN : sign * Infinity)
          : power ? sign * 2 ** (power - 15) * (1 + part / 1024)
          : sign * 2 ** -24 * part;
      }
    }
    return halves[bits];
  };

  const unpacked = (base64, width) => {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
    const view = new DataView(bytes.buffer);
    const numbers = new Float32Array(bytes.length / width);
    for (let k = 0; k < numbers.length; k++) {
      numbers[k] = width === 2 ? half(view.getUint16(2 * k, true)) : view.getFloat32(4 * k, true);
    }
    return numbers;
  };

  // Three decimals; what is smaller keeps its first digits, so that only zero reads as 0.
  // Below ``least`` the way that a number travelled leaves it no digits.
  const written = (value, least = 0) => {
    if (value === null || Number.isNaN(value)) return "\u2013";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < least) return "\u22480";
    const text =
      size === Infinity ? "\u221e"
      : size >= 1e5 || size < 0.0005 ? size.toExponential(1)
      : size.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
    return (value < 0 ? "\u2212" : "") + text.replace("e-", "e\u2212").replace("e+", "e");
  };

  // -- ranges and shades ---------------------------------------------------------------------------

  // What the shades stand for: {signed, low, high, capped}. Zeros have their own look.
  const rangeOf = (lists, tail = 1) => {
    const counts = (value) => value !== 0 && Number.isFinite(value);
    let [least, most] = [Infinity, -Infinity];
    for (const list of lists) {
      for (const value of list) {
        if (!counts(value)) continue;
        if (value < least) least = value;
        if (value > most) most = value;
      }
    }
    if (least > most) return { signed: false, low: 0, high: 0, capped: false };
    const signed = least < 0;
    const largest = Math.max(-least, most);
    let high = largest;
    if (tail < 1) {
      const sizes = lists.flatMap((list) => [...list].filter(counts).map(Math.abs)).sort((a, b) => a - b);
      high = sizes[Math.ceil(tail * sizes.length) - 1];
    }
    const low = signed ? -high : high - least >= UNUSED * high ? 0 : least;
    return { signed, low, high, capped: high < largest };
  };

  const shadeOf = (value, range, shades) => {
    if (Number.isNaN(value)) return NONE;
    if (value === 0) return ZERO;
    const count = range.signed ? shades.signed : shades.amounts;
    const wide = range.high - range.low;
    const share = wide > 0 ? (value - range.low) / wide : 1;
    const step = Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    return PREFIX + (range.signed ? "s" : "a") + step;
  };

  return { unpacked, written, rangeOf, shadeOf, LEAST, PREFIX, ZERO, NONE };
})();
