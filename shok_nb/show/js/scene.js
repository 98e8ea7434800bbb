// The picture of a point that learns: the curve with the point on it, the loss, the value after each iteration.
// No page is needed here.

const WIDE = 4240;                       // of each panel, in tenths of a pixel, as are all lengths here
const SEEN = [-2, 4];                    // x, and values, from side to side
const UNIT = WIDE / (SEEN[1] - SEEN[0]); // of x
const TALL = {value: 1500, loss: 750, course: 900};
const MOST = 3;                          // of the loss axis

const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
const shown = v => Number.isFinite(v) ? clamp(v, -6, 8) : 8;
const left = x => Math.round((shown(x) - SEEN[0]) * UNIT);
const up = (y, tall) => Math.round((SEEN[1] - clamp(shown(y), -3, 5)) * tall / (SEEN[1] - SEEN[0]));
const deep = loss => Math.round((MOST - (loss < 99 ? loss : 99)) * TALL.loss / MOST);
const two = v => v.toFixed(2).replace(/^-(0\.00)$/, "$1");
const half = (value, target) => (value - target) ** 2 / 2;

const line = (mark, colour, width, more = "", d = "") =>
    `<path data-${mark}="" d="${d}" stroke="${colour}" stroke-width="${width}" ${more}/>`;
const words = (x, y, text, anchor = "middle", mark = "") =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}" ${mark ? `data-${mark}=""` : ""}>${text}</text>`;

function panel(y, tall, uprights, bands, lines) {
    const grid = uprights.map(x => `M${x} 0V${tall}`).join("") +
        [...Array(bands + 1).keys()].map(k => `M0 ${k * tall / bands}H${WIDE}`).join("");
    return `<svg x="41" y="${y - 3}" width="430" height="${tall / 10 + 6}"
        viewBox="-30 -30 ${WIDE + 60} ${tall + 60}" fill="none" stroke-linejoin="round" stroke-linecap="round">
        ${line("grid", "currentColor", 10, 'stroke-opacity=".14"', grid)}${lines.join("")}</svg>`;
}

// All that does not move, and a path or a text for each thing that does.
function scene(name, {blue, gold, target, last}) {
    const faint = opacity => `stroke-opacity="${opacity}"`;
    const goal = tall => line("goal", "currentColor", 12, `stroke-dasharray="50 40" ${faint(.7)}`,
        `M0 ${up(target, tall)}H${WIDE}`);
    const uprights = [1, 2, 3, 4, 5].map(k => k * UNIT);
    const times = [0, 1, 2, 3, 4, 5].map(k => k * WIDE / 5);
    const panels = [
        panel(28, TALL.value, uprights, 6, [goal(TALL.value), line("curve", blue, 22, faint(.75)),
            line("trail", blue, 50, faint(.35)), line("deployed", "currentColor", 130, faint(.3)),
            line("arrow", gold, 26), line("ball", blue, 120)]),
        panel(206, TALL.loss, uprights, 3, [line("loss", gold, 22), line("lossball", gold, 110)]),
        panel(340, TALL.course, times, 6, [goal(TALL.course),
            line("later", "currentColor", 16, `stroke-dasharray="8 32" ${faint(.45)}`), line("values", blue, 24)])];
    const labels = [
        ...[4, 2, 0, -2].map(v => words(36, 32.5 + (4 - v) * 25, v, "end")),
        ...[3, 2, 1, 0].map(v => words(36, 210.5 + (3 - v) * 25, v, "end")),
        ...[4, 2, 0, -2].map(v => words(36, 344.5 + (4 - v) * 15, v, "end")),
        ...[-1, 0, 1, 2, 3].map(v => words(44 + (v + 2) * UNIT / 10, 297, v)),
        ...times.map((x, i) => words(44 + x / 10, 446, i * last / 5)),
        words(50, 91, `target ${target}`, "start"), words(468, 297, "x", "end"), words(256, 463, "iteration"),
        words(468, 16, "", "end", "say-value"), words(468, 194, "", "end", "say-loss"),
        words(468, 328, "", "end", "say-step")];
    const heads = [words(46, 16, `${name}(x)`, "start"), words(46, 194, "loss", "start"),
        words(46, 328, "value", "start")];
    return `<svg viewBox="-8 0 488 470" font-family="system-ui,sans-serif" font-size="15" fill="currentColor" role="img"
        aria-label="${name}: a point on the curve, the loss below it, its path">${panels.join("")}
        <g fill-opacity=".75">${labels.join("")}</g>${heads.join("")}</svg>`;
}

// No step of the run is wider or higher than this.
function close(run, most = .05) {
    const points = run.slice(0, 1);
    for (let i = 1; i < run.length; i++) {
        const [[x0, y0], [x1, y1]] = [run[i - 1], run[i]];
        const parts = Math.ceil(Math.max(Math.abs(x1 - x0), Math.abs(y1 - y0)) / most) || 1;
        for (let k = 1; k <= parts; k++) points.push([x0 + (x1 - x0) * k / parts, y0 + (y1 - y0) * k / parts]);
    }
    return points;
}

// The runs of a table, in steps and as far as they are seen.
function ground(runs, tile, unit) {
    const cells = tile ? [...Array(SEEN[1] - SEEN[0] + 1).keys()].map(k => SEEN[0] + k) : [0];
    return cells.flatMap(cell => runs.map(run => close(run.map(([x, y]) => [x / unit + cell, y / unit + cell]))));
}

// What moves, after `k` iterations: the attribute d of each marked path. `points` are those of `descend`.
function marks(points, k, {target, last, deployed}) {
    const [x, y, gradient] = points[k];
    const move = Math.round(clamp(Number.isFinite(gradient) ? -gradient : 0, -3, 3) * UNIT);
    const head = Math.min(Math.abs(move), 70) * (move > 0 ? 1 : -1);
    const [here, there] = [left(x), up(y, TALL.value)];
    const past = points.slice(0, k + 1);
    const course = heights => "M" + past.map((p, i) =>
        `${Math.round(i * WIDE / last)} ${up(heights(p), TALL.course)}`).join("L");
    return {
        ball: `M${here} ${there}h0`,
        lossball: `M${here} ${deep(half(y, target))}h0`,
        arrow: move ? `M${here} ${there}h${move}m${-head} -50l${head} 50l${-head} 50` : "",
        trail: past.slice(0, k).map(p => `M${left(p[0])} ${up(p[1], TALL.value)}h0`).join(""),
        values: course(p => p[1]),
        deployed: deployed ? `M${here} ${up(even(x), TALL.value)}h0` : "",
        later: deployed ? course(p => even(p[0])) : "",
    };
}

// The curve and the loss seen through it.
function curves(runs, target) {
    const drawn = height => path(runs.map(run => run.map(([x, y]) => [(x - SEEN[0]) * UNIT, height(y)])));
    return {curve: drawn(y => (SEEN[1] - y) * TALL.value / 6), loss: drawn(y => deep(half(y, target)))};
}

// The three lines of text.
function said([x, y, gradient], k, {target, deployed}) {
    const later = deployed ? `, deployed ${two(even(x))}`.replace(".00", "") : "";
    const near = Math.abs(x - 1) < 7;
    return {
        "say-value": near ? `x ${two(x)}, value ${two(y)}${later}` : "x is far outside",
        "say-loss": near ? `loss ${two(half(y, target))}, gradient ${two(gradient)}` : "",
        "say-step": `iteration ${k}`,
    };
}

if (typeof module === "object") {
    Object.assign(globalThis, require("./descent.js"));
    module.exports = {scene, close, ground, marks, curves, said};
}
