// How much a result is worth: the weights of the words that were looked for, as _ext/finding.py has counted them on
// each page, twice on the page of that name, and more for a heading or a name that is just that.

const finding = {query: null, words: []};

// The words of the query and its pairs, as the index has them.
function sought(query) {
    if (finding.query === query) return finding.words;
    const stemmer = new Stemmer();
    const words = splitQuery(query.toLowerCase()).map(w => stemmer.stemWord(w));
    const pairs = words.slice(1).map((w, i) => `${words[i]} ${w}`);
    finding.query = query;
    finding.words = [...words.filter(w => !stopwords.has(w)), ...pairs];
    return finding.words;
}

function worth(query, page) {
    const of = w => Object.hasOwn(Search._index.weights, w) ? Search._index.weights[w][page] || 0 : 0;
    return sought(query).reduce((sum, w) => sum + of(w), 0);
}

var Scorer = {
    objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,

    // [page, title, anchor, what, score, file, kind]; `score` is how much of a heading or a name was given.
    score: ([page, title, , , score, , kind]) => {
        const query = new URLSearchParams(window.location.search).get("q").trim();
        const named = page === query.toLowerCase().replace(/[ -]/g, "_") ? 2 : 1;
        const here = named * worth(query, Search._index.docnames.indexOf(page));
        const said = ["api", "references"].includes(page) ? here / 3 : here;   // they have the words of all pages
        if (kind === "text") return said;
        if (kind === "title") return said + 40 * score;
        if (kind === "index") return here / 2;
        if (page === "glossary") return 500;
        const [name, owner] = title.split(".").reverse();
        const own = /[A-Z]/.test(owner) ? 0 : 1;                           // a method is its class's
        const dropIn = owner === "functions" ? 1 : 0;                      // after the layer of the same name
        return own && name.toLowerCase() === query.toLowerCase() ? 3000 - dropIn : here / 3;
    },
};

// Where no page has all the words, those that have some are found, which Sphinx leaves out.
function someOf(all) {
    return (terms, excluded) => {
        const found = all(terms, excluded);
        if (found.length) return found;
        const some = [...terms].flatMap(term => all(new Set([term]), excluded));
        return [...new Map(some.map(result => [result[0], result])).values()];
    };
}

// A word that no page has is looked for in the other spelling: "quantise" as "quantize".
function spelled(Plain) {
    return function () {
        const stemmer = new Plain();
        const has = stem => [Search._index?.terms, Search._index?.titleterms].some(t => t && Object.hasOwn(t, stem));
        this.stemWord = word => {
            const stem = stemmer.stemWord(word);
            const other = stemmer.stemWord(word.replace(/is(e|ed|er|ers|es|ing|ation|ations)$/, "iz$1"));
            return !has(stem) && has(other) ? other : stem;
        };
    };
}
stopwords.add("pytorch");      // all pages are about it, and few say it
// At once: the page searches before a listener that is added here would be called.
Search.performTermsSearch = someOf(Search.performTermsSearch);
window.Stemmer = spelled(window.Stemmer);
