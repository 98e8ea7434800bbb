"use strict";
const assert = require("node:assert/strict");
const test = require("node:test");
const {scene, close, ground, marks, curves, said} = require("../../shok_nb/show/js/scene.js");

const how = {target: 1, last: 2, deployed: true, blue: "#00f", gold: "#fa0"};
const points = [[0, 0, -1], [.5, .4, -.6], [1, 1, 0]];

test("close: no step is longer than was asked, and the ends stay", () => {
    const run = close([[0, 0], [1, .2]], .25);
    assert.equal(run.length, 5);
    assert.deepEqual(run.at(-1), [1, .2]);
    assert.deepEqual(close([[3, 3]]), [[3, 3]]);
});

test("ground: a cell fills what is seen", () => {
    const runs = ground([[[-500, 0], [500, 0]]], 1, 1000);
    assert.deepEqual(runs.map(run => run[0]), [-2, -1, 0, 1, 2, 3, 4].map(k => [k - .5, k]));
    assert.equal(ground([[[-6000, 0], [8000, 0]]], 0, 1000).length, 1);
});

test("marks: the point, its arrow towards less loss, its trail, and the rounded value", () => {
    const first = marks(points, 0, how);
    assert.equal(first.ball, "M1413 1000h0");
    assert.match(first.arrow, /^M1413 1000h707m-70 -50/);
    assert.equal(first.trail, "");
    const last = marks(points, 2, how);
    assert.equal(last.arrow, "");
    assert.equal(last.trail.split("M").length, 3);
    assert.equal(last.values, "M0 600L2120 540L4240 450");
    assert.equal(last.deployed, "M2120 750h0");
    assert.equal(marks(points, 2, {...how, deployed: false}).deployed, "");
});

test("marks: a point that is far away, or nowhere, is drawn at the edge", () => {
    for (const x of [1e9, Infinity, NaN]) assert.ok(!/NaN|Infinity|e\+/.test(Object.values(
        marks([[x, x, x]], 0, how)).join()));
});

test("curves: the loss is lowest where the value is the target", () => {
    const {loss} = curves([[[0, 0], [1, 1], [2, 2]]], 1);
    assert.equal(loss, "M1413 625L2120 750L2827 625");
});

test("said: two digits, no minus zero, and what is far outside", () => {
    assert.equal(said([.5, .4, -.001], 1, how)["say-value"], "x 0.50, value 0.40, deployed 0");
    assert.equal(said([.5, .4, -.001], 1, how)["say-loss"], "loss 0.18, gradient 0.00");
    assert.equal(said([9, 9, 0], 3, how)["say-value"], "x is far outside");
    assert.equal(said([9, 9, 0], 3, how)["say-step"], "iteration 3");
});

test("scene: every mark that moves has its place, and no id is given", () => {
    const svg = scene("round_ste", how);
    const moving = {...curves([], 1), ...marks(points, 1, how), ...said(points[1], 1, how)};
    for (const mark of Object.keys(moving)) assert.ok(svg.includes(`data-${mark}=""`), mark);
    assert.ok(!/\bid=/.test(svg));
});
