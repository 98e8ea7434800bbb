"use strict";
const assert = require("node:assert/strict");
const test = require("node:test");
const {height, curve, RANDOM, even, descend, share} = require("../../shok_nb/show/js/descent.js");

const near = (a, b, room = 1e-9) => assert.ok(Math.abs(a - b) < room, `${a} and ${b}`);

test("height: on the line, at a point, at the nearest end, at the first of two runs that meet", () => {
    const runs = [[[0, 0], [10, 10]], [[10, 30], [20, 50]]];
    assert.deepEqual([0, 5, 10, 15, 99, -9].map(x => height(runs, x)), [0, 5, 10, 40, 50, 0]);
    assert.equal(height([[[3, 7]]], 3), 7);
});

test("even: a half goes to the even neighbour", () => {
    assert.deepEqual([-2.5, -1.5, -.5, .5, 1.5, 2.5, .4, .6].map(even), [-2, -2, 0, 0, 2, 2, 0, 1].map(v => v));
});

test("curve: a cell is repeated, and a half step has the value it was given", () => {
    const f = curve({value: [[[-500, 0], [500, 0]]], slope: [[[-500, 100], [500, 100]]], other: [],
        known: [[[-2000, 0], [-1000, 100]]], tile: 1, unit: 1000, one: 100, from: -1.5});
    near(f(2.3)[0], 2);
    near(f(2.3)[1], 1);
    assert.equal(f(-1.5)[0], -2);
    near(f(-1.5)[1], 0);
    near(f(-1)[0], -1);
});

test("descend: a straight line is plain gradient descent, and the slope against it may be another", () => {
    const path = descend(() => x => [x, 1], {start: 0, rate: .5, last: 2, target: 1});
    assert.deepEqual(path, [[0, 0, -1], [.5, .5, -.5], [.75, .75, -.25]]);
    const [, second] = descend(() => x => [x, 1, 3], {start: 0, rate: .5, last: 1, target: 1});
    assert.equal(second[0], 1.5);
});

test("share: each setting for an equal part of the way", () => {
    assert.deepEqual([0, 1, 4, 5, 9, 10].map(k => share(k, 2, 10)), [0, 0, 0, 1, 1, 1]);
});

test("what is random is between or on the neighbours, and on average right", () => {
    const draws = [...Array(4000).keys()].map(i => (i + .5) / 4000);
    for (const name of ["stochastic_round", "uniform_noise", "dither_round", "reinmax_round"])
        near(draws.reduce((sum, u) => sum + RANDOM[name](1.3, u)[0], 0) / 4000, 1.3, 1e-3);
    for (const u of draws) assert.ok([1, 2].includes(RANDOM.stochastic_round(1.3, u)[0]));
});

test("the slopes of smooth random ones are the derivatives of their values", () => {
    for (const [name, knob] of [["noisy_soft_round", 5], ["sga_round", .5], ["uniform_noise", 0]])
        for (const [x, u] of [[.2, .3], [1.6, .8], [-.7, .55]]) {
            const [high, low] = [x + 1e-6, x - 1e-6].map(v => RANDOM[name](v, u, knob)[0]);
            near(RANDOM[name](x, u, knob)[1], (high - low) / 2e-6, 1e-4);
        }
});
