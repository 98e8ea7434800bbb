// The search of the site, without a page: node search.js SITE reads queries, one a line, and writes for each the
// results in order, as [page, title, anchor, kind].
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");

const [site] = process.argv.slice(2);
const nothing = {lastChild: null, addEventListener: () => {}};
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
// In the order of the page, and before any listener is called.
const scripts = read("search.html").matchAll(/src="(_static\/searchtools\.js|_static\/language_data\.js|searchindex\.js)/g);
const code = [...scripts].map(([, name]) => read(name)).concat(
    "find = query => Search._performSearch(...Search._parseQuery(query))");
vm.createContext(page);
code.forEach(text => vm.runInContext(text, page));
const found = fs.readFileSync(0, "utf8").trim().split("\n").map(query => {
    page.location.search = new URLSearchParams({q: query}).toString();
    return page.find(query).reverse().map(([name, title, anchor, , score, , kind]) => [name, title, anchor, kind, score]);
});
console.log(JSON.stringify(found));
