// The menu opens at the reader's place, what goes on beyond the screen says so, printed columns stay columns, long tables
// can be sorted, and a search without a query asks for one.
// What is read from files cannot fetch the pages that it found.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

document.addEventListener("DOMContentLoaded", () => {
    const menu = document.querySelector(".sidebar-scroll");
    const here = menu && [...menu.querySelectorAll(".current-page > .reference")].pop();
    if (here) {
        const [box, line] = [menu, here].map(e => e.getBoundingClientRect());
        const top = line.top - box.top - box.height / 3;
        if (line.bottom > box.bottom - 40) menu.scrollBy({top, behavior: "instant"});      // Furo's is smooth: it moves while read
    }

    // made when all is loaded, and without a name
    addEventListener("load", () => document.querySelectorAll("button.copybtn").forEach(b => b.ariaLabel = "Copy the code"));

    // a name that is wider than its column breaks between its words
    for (const name of document.querySelectorAll("article td:first-child code .pre"))
        if (name.textContent.length > 22) name.innerHTML = name.innerHTML.replace(/[._]+(?=\w)/g, "$&<wbr>");

    // a report keeps its columns, in smaller letters if they are too wide; the lines below them wrap
    const isRow = (line, places) => places.every(p => line.slice(p-2, p) === "  " && line[p] !== " ");
    for (const pre of document.querySelectorAll(".cell_output pre")) {
        const lines = pre.textContent.trimEnd().split("\n");
        const places = [...lines[0].matchAll(/ {2,}(?=\S)/g)].map(m => m.index + m[0].length);
        const rows = lines.findLastIndex(line => isRow(line, places)) + 1;
        if (places.length < 3 || rows < 2) continue;
        const below = document.createElement("span");
        below.textContent = lines.slice(rows).join("\n");
        pre.replaceChildren(lines.slice(0, rows).join("\n") + "\n", below);
        pre.classList.add("columns");
        pre.classList.toggle("tight", pre.scrollWidth > pre.clientWidth);
    }

    const wide = [...document.querySelectorAll(".table-wrapper, .cell_output, article pre, div.math")];
    const hint = e => e.classList.toggle("goes-on", e.scrollWidth - e.clientWidth - e.scrollLeft > 4);
    const look = new ResizeObserver(entries => entries.forEach(({target}) => hint(target)));
    for (const e of wide) {
        if (!e.querySelector("table, svg.figure") && !e.matches("table, pre, .math")) continue;
        e.addEventListener("scroll", () => hint(e), {passive: true});
        look.observe(e);
    }

    // a long table is sorted by the column whose head is pressed: the largest number or the first word on top, and then the
    // other way; empty cells stay below
    const number = text => parseFloat(text.replaceAll(",", ""));
    const compare = (s, t) => isNaN(number(s) - number(t)) ? s.localeCompare(t) : number(s) - number(t);
    for (const table of document.querySelectorAll("article table.docutils")) {
        const [heads, body] = [[...table.tHead?.rows[0]?.cells ?? []], table.tBodies[0]];
        if (!heads.length || body.rows.length < 12 || table.tHead.querySelector("a")) continue;
        heads.forEach((head, column) => {
            const key = row => row.cells[column].textContent.trim();
            const button = document.createElement("button");
            button.className = "sort";
            button.append(...(head.querySelector("p") ?? head).childNodes);
            head.replaceChildren(button);
            button.addEventListener("click", () => {
                const rows = [...body.rows];
                const rises = head.ariaSort ? head.ariaSort === "descending" : rows.every(row => isNaN(number(key(row))));
                const order = (s, t) => !s || !t ? !s - !t : rises ? compare(s, t) : compare(t, s);
                body.append(...rows.sort((a, b) => order(key(a), key(b))));
                for (const other of heads) other.ariaSort = null;
                head.ariaSort = rises ? "ascending" : "descending";
            });
        });
    }

    const results = document.getElementById("search-results");
    if (results && !new URLSearchParams(location.search).get("q")) {
        results.innerHTML = `<h1>Search</h1><form role="search"><input class="search-field" type="search" name="q"
            aria-label="Search for" placeholder="onnx, group size, soft_round"></form>`;
        results.querySelector("input").focus();
    }
});
