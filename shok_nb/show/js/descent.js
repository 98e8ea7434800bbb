// A point that learns: gradient descent through a curve, or through a random estimator whose numbers are given.
// No page is needed here.

// Both neighbours of x on the run, or nothing where x is beyond its ends.
function between(run, x) {
    if (x < run[0][0] || x > run[run.length - 1][0]) return null;
    let low = 0;
    let high = run.length - 1;
    while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (run[middle][0] <= x) low = middle;
        else high = middle;
    }
    return [run[low], run[high]];
}

// The height of the runs at x: on the line between two points, and at the nearest end where there is no line.
function height(runs, x) {
    let nearest = null;
    for (const run of runs) {
        const pair = between(run, x);
        if (pair) {
            const [[x0, y0], [x1, y1]] = pair;
            return x1 > x0 ? y0 + (y1 - y0) * (x - x0) / (x1 - x0) : y0;
        }
        for (const end of [run[0], run[run.length - 1]])
            if (!nearest || Math.abs(end[0] - x) < Math.abs(nearest[0] - x)) nearest = end;
    }
    return nearest[1];
}

// A slope from the number that stands for it: small ones are finer.
const slopeOf = (number, one) => Math.sinh(number / one * Math.asinh(100)) / 100;

// The function that a table tells: x to [value, slope, slope for a negative gradient]. `unit` numbers make one
// step, and `one` is the number of slope 1; `known` has value and slope at each half step from `from` on, where the
// function may jump.
function curve({value, slope, other, known, tile, unit, one, from}) {
    const at = known.length ? known[0] : [];
    return x => {
        const half = (x - from) * 2;
        const cell = tile ? Math.round(x) : 0;
        const inside = (x - cell) * unit;
        const against = other.length ? slopeOf(height(other, inside), one) : undefined;
        if (Number.isInteger(half) && at[half])
            return [at[half][0] / unit, slopeOf(at[half][1], one), against];
        return [height(value, inside) / unit + cell, slopeOf(height(slope, inside), one), against];
    };
}

const sigmoid = v => 1 / (1 + Math.exp(-v));
const soft = (x, alpha) => {
    const t = Math.tanh(alpha * (x - Math.floor(x) - .5));
    const half = Math.tanh(alpha / 2);
    return [Math.floor(x) + .5 + t / half / 2, alpha * (1 - t * t) / half / 2];
};
const hardened = (z, alpha) => {
    const [n, r, half] = [Math.floor(z), z - Math.floor(z) - .5, Math.tanh(alpha / 2)];
    return [n + .5 + Math.atanh(2 * r * half) / alpha, 2 * half / alpha / (1 - (2 * r * half) ** 2)];
};

// Value and slope of what rounds at random, where u is uniform in [0, 1) and `knob` the one that is turned.
const RANDOM = {
    stochastic_round: (x, u) => [Math.floor(x) + (u < x - Math.floor(x) ? 1 : 0), 1],
    uniform_noise: (x, u) => [x + u - .5, 1],
    dither_round: (x, u) => [even(x + u - .5) - (u - .5), 1],
    noisy_soft_round: (x, u, alpha) => {
        const [y, slope] = soft(x, alpha);
        const [value, back] = hardened(y + u - 1, alpha);
        return [value + .5, slope * back];
    },
    reinmax_round: (x, u) => {
        const p = x - Math.floor(x);
        const up = u < p ? 1 : 0;
        return [Math.floor(x) + up, p ? .5 / Math.max(Math.abs(p - (1 - up)), 2 ** -24) : 1];
    },
    sga_round: (x, u, temperature) => {
        const p = x - Math.floor(x);
        if (p < 1e-6 || p > 1 - 1e-6) return [Math.floor(x) + Math.round(p), 0];
        const odds = Math.atanh(p) - Math.atanh(1 - p);
        const noise = Math.max(u, 2 ** -26);
        const w = sigmoid((odds / temperature + Math.log(noise / (1 - noise))) / temperature);
        const both = 1 / (1 - (1 - p) ** 2) + 1 / (1 - p * p);
        return [Math.floor(x) + w, (w - w * w) * both / temperature ** 2];
    },
};

// Round half to even, as torch does.
function even(x) {
    const down = Math.floor(x);
    const rest = x - down;
    return rest < .5 || rest === .5 && down % 2 === 0 ? down : down + 1;
}

// The points [x, value, slope of the loss] of `last` iterations; the loss is (value - target) ** 2 / 2.
// `at(k)` is the function of iteration k.
function descend(at, {start, rate, last, target}) {
    const points = [];
    let x = start;
    for (let k = 0; k <= last; k++) {
        const [value, slope, against = slope] = at(k)(x);
        const gradient = (value - target) * (value < target ? against : slope);
        points.push([x, value, gradient]);
        x -= rate * gradient;
    }
    return points;
}

// Which of `count` settings iteration k of `last` has, each for an equal share.
const share = (k, count, last) => Math.min(Math.floor(k * count / last), count - 1);

// The table of a row at a stop of its knob, as `curve` and `ground` take it.
function table(data, row, pass, stop) {
    const [value, slope, known, other] = row.tables[pass][stop].map(i => unpack(data.strings[i]));
    return {value, slope, known, other, tile: row.tile, unit: data.unit, one: data.one, from: data.from};
}

// The functions of the iterations: `stop(k)` is where the knob is at the k-th, `seed` which numbers are drawn.
function motion(data, row, {pass, stop, seed}) {
    const random = RANDOM[row.random];
    const made = {};
    return k => {
        const here = stop(k);
        if (random) return x => random(x, data.uniform[seed][k], Number(row.stops[here]));
        return made[here] ||= curve(table(data, row, pass, here));
    };
}

if (typeof module === "object") {
    Object.assign(globalThis, require("./curves.js"));
    module.exports = {height, curve, RANDOM, even, descend, share, table, motion};
}
