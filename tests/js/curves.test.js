"use strict";
const assert = require("node:assert/strict");
const test = require("node:test");
const {numbers, unpack, lay, path, area} = require("../../shok_nb/show/js/curves.js");
const {inflated, nearest, settings, meant, measured} = require("../../shok_nb/show/js/page.js");
const {swing} = require("../../shok_nb/show/js/tiles.js");

test("numbers: one character for a small one, a sign, and more characters for a large one", () => {
    assert.deepEqual(numbers("ACDgB"), [0, 1, -1, 16]);
    assert.deepEqual(numbers(""), []);
});

test("unpack: the length of each run, then the way from point to point, from run to run too", () => {
    assert.deepEqual(unpack("ECCCC" + "CDD"), [[[1, 1], [2, 2]], [[1, 1]]]);
});

test("path: a stroke for a run, a dot for a lone point, whole numbers", () => {
    assert.equal(path([[[0, 0], [1.4, 2.6]], [[5, 5]]]), "M0 0L1 3M5 5h0");
    assert.equal(path([]), "");
});

test("area: each run is closed down to zero", () => {
    assert.equal(area([[[0, 3], [4, 5]]], 9), "M0 9L0 3L4 5V9");
});

const place = {view: [-2, 2, -2, 2], box: [400, 400]};

test("lay: step 1 and offset 0 move nothing", () => {
    const runs = [[[0, 400], [400, 0]]];
    assert.deepEqual(lay(runs, place), runs);
});

test("lay: a grid scales about zero and moves along the diagonal", () => {
    const origin = [[[200, 200], [300, 100]]];
    assert.deepEqual(lay(origin, {...place, step: .5}), [[[200, 200], [250, 150]]]);
    assert.deepEqual(lay(origin, {...place, offset: .5}), [[[250, 150], [350, 50]]]);
    assert.deepEqual(lay(origin, {...place, step: .5, offset: .5, flat: true}), [[[250, 200], [300, 100]]]);
});

test("lay: a cell is repeated as often as the box asks for, one higher each time", () => {
    const cell = [[[150, 200], [250, 200]]];
    const laid = lay(cell, {...place, tile: 1});
    assert.deepEqual(laid.map(run => run[0]), [[-50, 400], [50, 300], [150, 200], [250, 100], [350, 0]]);
    const halves = lay(cell, {...place, tile: 1, step: .5, offset: .25});
    assert.ok(halves[0][0][0] <= 0 && halves.at(-1).at(-1)[0] >= 400);
    assert.deepEqual(halves[1][0].map((v, i) => v - halves[0][0][i]), [50, -50]);
});

test("inflated: what Python deflates", async () => {
    const {deflateSync} = require("node:zlib");
    const data = {rows: [1, 2], text: "ä"};
    assert.deepEqual(await inflated(deflateSync(JSON.stringify(data)).toString("base64")), data);
});

test("nearest: the stop that is called so, or else the one that is next to it", () => {
    assert.equal(nearest(["0", "5", "20", "inf"], "20"), 2);
    assert.equal(nearest(["0", "5", "20", "inf"], "inf"), 3);
    assert.equal(nearest(["0", "5", "20", "inf"], "6"), 1);
});

test("settings: what a sentence asks for, in its order", () => {
    assert.deepEqual(settings("left=soft_round&learning_rate=0.2"), [["left", "soft_round"], ["learning rate", "0.2"]]);
});

test("swing: up from the start, down, and up again", () => {
    assert.deepEqual([0, 1, 2, 3, 4, 5, 6].map(k => swing(4, 2, k)), [2, 3, 2, 1, 0, 1, 2]);
    assert.equal(swing(1, 0, 7), 0);
});

test("measured: what the readout says, with and without a mean", () => {
    const all = {"smallest slope": "0.0674", "largest slope": "2.53", "mean slope": "1", "mean distance": "0.132"};
    assert.deepEqual(measured("0.0674 to 2.53, mean 1", "0.132"), all);
    assert.equal(measured("-8.2e-5 to 1e-7", "0")["largest slope"], "1e-7");
    assert.equal(measured("1 to 1", "0")["mean slope"], undefined);
});

test("meant: the player before a sentence that knows most of it, or else the first", () => {
    globalThis.Node = {DOCUMENT_POSITION_FOLLOWING: 4};
    const player = (at, ...names) => ({at, names, compareDocumentPosition: e => e.at > at ? 4 : 2});
    const players = [player(1, "alpha"), player(3, "alpha", "kind"), player(5, "alpha")];
    const find = (at, ...names) => {
        const known = p => names.filter(n => p.names.includes(n)).length;
        return players.indexOf(meant({at}, players, known));
    };
    assert.deepEqual([0, 2, 4, 6].map(at => find(at, "alpha")), [0, 0, 1, 2]);
    assert.deepEqual([0, 6].map(at => find(at, "alpha", "kind")), [1, 1]);
    assert.equal(find(4, "rho"), -1);
});
