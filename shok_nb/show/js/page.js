// What every player does with the page it is on.

const all = (where, what) => [...where.querySelectorAll(what)];

// Say the stop of a slider, beside it and to a screen reader.
function say(slider, text) {
    slider.setAttribute("aria-valuetext", text);
    slider.nextElementSibling.textContent = text;
}

// Set an attribute, or the text, of all that is marked with `data-…`.
function put(where, mark, attribute, value) {
    for (const e of all(where, `[data-${mark}]`)) {
        if (attribute) e.setAttribute(attribute, value);
        else e.textContent = value;
    }
}

// A page may forbid style sheets and style attributes that are written in it; a script may still set them.
function restyle(where) {
    for (const e of all(where, "[style]")) e.style.cssText = e.getAttribute("style");
}

function dress(player, sheet) {
    if (sheet && getComputedStyle(player).getPropertyValue("--shok").trim() !== "1") {
        const own = new CSSStyleSheet();
        own.replaceSync(sheet.textContent);
        document.adoptedStyleSheets = [...document.adoptedStyleSheets, own];
    }
    restyle(player);
}

// What Python has packed: JSON, deflated, in base 64.
async function inflated(text) {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
}

// Call `start(player, data)` for each player of this kind that is new on the page.
function each(mark, start) {
    for (const player of all(document, `[data-${mark}]`)) {
        if (player.shok) continue;
        player.shok = true;
        dress(player, player.querySelector("style"));
        inflated(player.getAttribute(`data-${mark}`)).then(data => start(player, data));
    }
}

function listen(where, react) {
    for (const type of ["input", "change"]) where.addEventListener(type, react);
}

if (typeof module === "object") module.exports = {inflated};
