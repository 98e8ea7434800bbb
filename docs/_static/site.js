// The menu opens at the reader's place, a table that goes on beyond the screen says so, and a search without a query
// asks for one.
// What is read from files cannot fetch the pages that it found.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

document.addEventListener("DOMContentLoaded", () => {
    const menu = document.querySelector(".sidebar-scroll");
    const here = menu && [...menu.querySelectorAll(".current-page > .reference")].pop();
    if (here) {
        const [box, line] = [menu, here].map(e => e.getBoundingClientRect());
        if (line.bottom > box.bottom - 40) menu.scrollTop += line.top - box.top - box.height / 3;
    }

    const wide = [...document.querySelectorAll(".table-wrapper, .cell_output")];
    const hint = e => e.classList.toggle("goes-on", e.scrollWidth - e.clientWidth - e.scrollLeft > 4);
    const look = new ResizeObserver(entries => entries.forEach(({target}) => hint(target)));
    for (const e of wide) {
        if (!e.querySelector("table") && e.tagName !== "TABLE") continue;
        e.addEventListener("scroll", () => hint(e), {passive: true});
        look.observe(e);
    }

    const results = document.getElementById("search-results");
    if (results && !new URLSearchParams(location.search).get("q")) {
        results.innerHTML = `<h1>Search</h1><form role="search"><input class="search-field" type="search" name="q"
            aria-label="Search for" placeholder="onnx, group size, soft_round"></form>`;
        results.querySelector("input").focus();
    }
});
