// The search of the site, without a page: node search.js SITE reads queries, one a line, and writes for each the
// results in order, as [page, title, anchor, kind].
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");

const [site] = process.argv.slice(2);
const ready = [];
const nothing = {lastChild: null, addEventListener: (event, f) => event === "DOMContentLoaded" && ready.push(f)};
const page = {
    document: {...nothing, getElementById: () => nothing, readyState: "loading"},
    location: {search: ""},
    URLSearchParams, console,
    SPHINX_HIGHLIGHT_ENABLED: false,
    DOCUMENTATION_OPTIONS: {},
    _: text => text,
    _ready: () => {},
};
page.window = page;
const read = name => fs.readFileSync(`${site}/${name}`, "utf8");
const code = ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"].map(read).concat(
    "find = query => Search._performSearch(...Search._parseQuery(query))");
vm.runInNewContext(code.join("\n"), page);
ready.forEach(f => f());
const found = fs.readFileSync(0, "utf8").trim().split("\n").map(query => {
    page.location.search = new URLSearchParams({q: query}).toString();
    return page.find(query).reverse().map(([name, title, anchor, , score, , kind]) => [name, title, anchor, kind, score]);
});
console.log(JSON.stringify(found));
