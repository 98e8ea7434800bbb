// Curves: from packed text to points, and from points to SVG paths. No page is needed here.

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

// The whole numbers in `text`. A number is one or more characters of six bits, the low ones first: bit 5 says
// that another follows, and bit 0 of the first is the sign.
function numbers(text) {
    const found = [];
    let value = 0;
    let weight = 1;
    for (const c of text) {
        const digit = DIGITS.indexOf(c);
        value += (digit & 31) * weight;
        weight *= 32;
        if (digit & 32) continue;
        const size = Math.floor(value / 2);
        found.push(value % 2 ? -size : size);
        value = 0;
        weight = 1;
    }
    return found;
}

// A curve: runs of points [x, y]. Each run is its length and the way from point to point.
function unpack(text) {
    const from = numbers(text);
    const runs = [];
    let x = 0;
    let y = 0;
    for (let i = 0; i < from.length;) {
        const run = [];
        for (let left = from[i++]; left > 0; left--) {
            x += from[i++];
            y += from[i++];
            run.push([x, y]);
        }
        runs.push(run);
    }
    return runs;
}

// The runs on a grid of this step and offset, where the drawing's box shows x from `lo` to `hi` and values from
// `low` to `high`. With a `tile` they are one period, that many steps wide, and are repeated over the box.
// A slope is `flat`: it keeps its height.
function lay(runs, {tile = 0, step = 1, offset = 0, view, box, flat = false}) {
    const [lo, hi, low, high] = view;
    const [wide, tall] = box;
    const unitX = wide / (hi - lo);
    const unitY = tall / (high - low);
    const moveX = ((step - 1) * lo + offset) * unitX;
    const moveY = ((1 - step) * high - offset) * unitY;
    const first = tile ? Math.floor((lo - offset) / step / tile - .5) + 1 : 0;
    const last = tile ? Math.ceil((hi - offset) / step / tile + .5) - 1 : 0;
    const laid = [];
    for (let k = first; k <= last; k++) {
        const put = ([x, y]) => [
            step * (x + k * tile * unitX) + moveX,
            flat ? y : step * (y - k * tile * unitY) + moveY];
        for (const run of runs) laid.push(run.map(put));
    }
    return laid;
}

const word = ([x, y]) => `${Math.round(x)} ${Math.round(y)}`;

// A stroke for each run, and a dot for a run of one.
function path(runs) {
    return runs.map(run => "M" + run.map(word).join("L") + (run.length > 1 ? "" : "h0")).join("");
}

// The area between the runs and the height `zero`.
function area(runs, zero) {
    const closed = run => `M${Math.round(run[0][0])} ${zero}L${run.map(word).join("L")}V${zero}`;
    return runs.map(closed).join("");
}

if (typeof module === "object") module.exports = {numbers, unpack, lay, path, area};
