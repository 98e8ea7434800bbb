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

// Which of the stops of a slider the text is, or else is nearest to.
function nearest(stops, text) {
    const same = stops.indexOf(text);
    if (same >= 0) return same;
    const number = s => s.endsWith("inf") ? Number(s.replace("inf", "Infinity")) : Number(s);
    const away = stops.map(s => Math.abs(number(s) - number(text)));
    return away.indexOf(Math.min(...away));
}

// The control `name` of a player: in its column `where`, if that has it. `left` and `right` are the menus.
function control(player, where, name) {
    const marked = {hard: "[data-hard]", anneal: "[data-anneal]"}[name];
    const what = marked || `[aria-label="${name}"], [aria-label="${name} estimator"]`;
    return where && where.querySelector(what) || player.querySelector(what);
}

function turn(input, text) {
    if (input.type === "range") input.value = nearest(input.dataset.stops.split(" "), text);
    else if (input.type === "checkbox") input.checked = text !== "off";
    else input.value = [...input.options].find(o => o.text === text).value;
    for (const type of ["input", "change"]) input.dispatchEvent(new Event(type, {bubbles: true}));
}

// A sentence sets the player before it, or the next one: `left=soft_round&alpha=20`.
function obey(player, settings) {
    let where = null;
    for (const setting of settings) {
        const [name, text] = setting;
        const input = control(player, where, name);
        turn(input, text);
        if (input.matches("[data-name]")) where = input.closest("[data-col]");
    }
}

function settings(text) {
    return text.split("&").map(s => s.split("=")).map(([name, value]) => [name.replaceAll("_", " "), value]);
}

// The player that a sentence means: of those that know most of what it names, the one before it, or else the first.
function meant(sentence, players, known) {
    const most = Math.max(1, ...players.map(known));
    const best = players.filter(p => known(p) === most);
    const before = best.filter(p => p.compareDocumentPosition(sentence) & Node.DOCUMENT_POSITION_FOLLOWING);
    return before.pop() || best[0];
}

// What a sentence may follow besides the knobs: the readout of the slope, and how far values are from integers.
function measured(text, near) {
    const [, least, most, mean] = text.match(/^(\S+) to (\S+?)(?:, mean (\S+))?$/) || [];
    return {"smallest slope": least, "largest slope": most, "mean slope": mean, "mean distance": near};
}

const MEASURED = Object.keys(measured("", ""));

function knows(player, name) {
    return MEASURED.includes(name) ? player.matches("[data-shok]") : Boolean(control(player, null, name));
}

// Sentences that follow this player say what it shows now.
function tell(player, facts) {
    const players = all(document, ".shok");
    for (const e of all(document, "[data-follows]")) {
        const name = e.dataset.follows;
        if (facts[name] !== undefined && meant(e, players, p => Number(knows(p, name))) === player)
            e.textContent = facts[name];
    }
}

function followLinks() {
    if (document.shokSets) return;
    document.shokSets = true;
    document.addEventListener("click", e => {
        const link = e.target.closest("[data-set]");
        if (!link) return;
        const wanted = settings(link.dataset.set);
        const player = meant(link, all(document, ".shok"),
            p => wanted.filter(([name]) => knows(p, name)).length);
        if (!player) return;
        obey(player, wanted);
        player.scrollIntoView({block: "nearest", behavior: "smooth"});
    });
}

if (typeof document === "object") followLinks();
if (typeof module === "object") module.exports = {inflated, nearest, settings, meant, measured};
