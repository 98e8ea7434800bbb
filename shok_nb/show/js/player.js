// A column of a player: controls, and the drawing that follows them. `data.rows` are the estimators to choose from,
// one where there is no menu.

// Draws, and returns what sentences may follow: the knobs and what the slope reads.
function drawing(data, row, controls, picture) {
    const inputs = all(controls, "input[type=range], select");
    const hard = controls.querySelector("[data-hard]");
    const grid = {step: 1, offset: 0};
    const facts = {};
    let setting = 0;
    inputs.forEach((input, i) => {
        const name = input.getAttribute("aria-label");
        const labels = i < row.stops.length ? row.stops[i] : row.grid[name];
        const stop = Number(input.value);
        if (i < row.stops.length) setting = setting * labels.length + stop;
        else grid[name] = Number(labels[stop]);
        facts[name] = labels[stop];
        if (input.type === "range") say(input, labels[stop]);
    });
    const pass = hard && hard.checked ? 1 : 0;
    const frame = p => row.frames[p][setting].map(i => data.strings[i]);
    const view = data.views[row.view][0];
    const place = (text, more) => lay(unpack(text), {...grid, tile: row.tile, view, box: data.box, ...more});
    const [value, dots, slope, axis] = frame(pass);
    const [text, zero, near, ...ticks] = axis.split("|");
    const slopes = place(slope, {flat: true});
    put(picture, "y", "d", path(place(value)));
    put(picture, "dots", "d", path(place(dots, {tile: 0})));
    put(picture, "g", "d", path(slopes));
    put(picture, "area", "d", area(slopes, zero));
    put(picture, "zero", "d", `M0 ${zero}H${data.box[0]}`);
    put(picture, "text", "", text);
    ticks.forEach((t, i) => put(picture, `tick="${i}"`, "", t));
    put(picture, "ghost", "d", hard ? path(place(frame(1 - pass)[0])) : "");
    put(picture, "other", "", hard ? data.other[pass] : "");
    return {...facts, ...measured(text, near)};
}

function column(player, data, where) {
    const menu = where.querySelector("[data-name]");
    const controls = where.querySelector("[data-controls]");
    const picture = where.querySelector("[data-picture]");
    const row = () => data.rows[menu ? menu.value : 0];
    const draw = () => tell(player, drawing(data, row(), controls, picture));
    if (menu) menu.addEventListener("change", () => {
        controls.innerHTML = row().controls;
        picture.innerHTML = data.views[row().view][1].replaceAll("NAME", row().name);
        restyle(where);
        draw();
    });
    listen(controls, draw);
    draw();
}

for (const mark of ["shok", "shok-explore"])
    each(mark, (player, data) => all(player, "[data-col]").forEach(c => column(player, data, c)));
