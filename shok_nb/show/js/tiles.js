// Small pictures that play while they are pointed at, and lead to their pages.

const PAUSE = 90;       // milliseconds between two settings

// The settings from the start up to the last, down to the first and back, again and again.
function swing(count, start, k) {
    const around = 2 * (count - 1);
    const at = around ? (start + k) % around : 0;
    return at < count ? at : around - at;
}

function tile(data, row, link) {
    const knob = row.knob;
    const labels = row.stops[0] || row.grid[knob] || [];
    const strings = setting => row.frames[0][row.stops.length ? setting : 0].map(i => data.strings[i]);
    const view = data.views[row.view][0];
    let timer = 0;
    let moved = 0;
    const draw = setting => {
        const grid = {step: 1, offset: 0};
        if (knob in row.grid) grid[knob] = Number(labels[setting]);
        const place = (text, flat) => lay(unpack(text), {...grid, tile: row.tile, view, box: data.box, flat});
        const [value, , slope, axis] = strings(setting);
        put(link, "y", "d", path(place(value, false)));
        put(link, "g", "d", path(place(slope, true)));
        put(link, "zero", "d", `M0 ${axis.split("|")[1]}H${data.box[0]}`);
        put(link, "now", "", timer ? `${knob} ${labels[setting]}` : "");
    };
    const rest = () => {
        if (!timer) return;
        clearInterval(timer);
        timer = 0;
        moved = 0;
        draw(row.start);
    };
    const play = () => {
        if (timer || labels.length < 2 || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
        timer = setInterval(() => draw(swing(labels.length, row.start, ++moved)), PAUSE);
    };
    return {play, rest, playing: () => Boolean(timer)};
}

// A finger plays first, and follows the link when it comes again.
function touched(tiles) {
    let last = null;
    for (const {link, play, rest} of tiles) {
        let first = false;
        link.addEventListener("pointerdown", e => {
            first = e.pointerType === "touch" && last !== link;
            if (!first) return;
            if (last) tiles.find(t => t.link === last).rest();
            last = link;
            play();
        });
        link.addEventListener("click", e => {
            if (first) e.preventDefault();
            first = false;
        });
        link.addEventListener("pointerenter", e => e.pointerType === "mouse" && play());
        link.addEventListener("pointerleave", e => e.pointerType === "mouse" && rest());
        link.addEventListener("focus", () => link.matches(":focus-visible") && play());
        link.addEventListener("blur", rest);
    }
}

function wall(player, data) {
    const links = all(player, "[data-tile]");
    touched(links.map((link, i) => ({link, ...tile(data, data.rows[i], link)})));
}

if (typeof module === "object") module.exports = {swing};
else each("shok-tiles", wall);
