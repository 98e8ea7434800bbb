// Reads {data, cases} and writes the path [x, value, gradient] of each case, as the page of `watch` computes it.
const {descend, motion, share} = require("../../shok_nb/show/js/descent.js");

const {data, cases} = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const paths = cases.map(([name, pass, stop, seed, start, rate]) => {
    const row = data.rows.find(r => r.name === name);
    const at = k => stop === "anneal" ? row.anneal[share(k, row.anneal.length, data.last)] : stop;
    const numbers = motion(data, row, {pass, stop: at, seed});
    return descend(numbers, {start, rate, last: data.last, target: data.target});
});
process.stdout.write(JSON.stringify(paths, (key, v) => typeof v === "number" && !Number.isFinite(v) ? null : v));
