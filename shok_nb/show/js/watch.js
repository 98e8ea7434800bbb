// Two points that learn, side by side, under one set of controls.

// What the controls of a column say: the forward pass, the stop of the knob at iteration k, and the seed.
function choice(data, row, controls) {
    const find = what => controls.querySelector(what);
    const [knob, seed, hard, anneal] =
        ["[data-knob] input", "[aria-label=seed]", "[data-hard]", "[data-anneal]"].map(find);
    const turning = Boolean(anneal && anneal.checked);
    const stop = k => row.anneal[share(k, row.anneal.length, data.last)];
    const fixed = knob ? Number(knob.value) : 0;
    return {
        knob, turning,
        seed: seed ? Number(seed.value) : 0,
        slider: seed,
        pass: hard && hard.checked ? 1 : 0,
        stop: turning ? stop : () => fixed,
    };
}

// Show where the sliders of a column are at iteration k: a knob that is being turned moves by itself.
function follow(row, {knob, turning, slider, seed, stop}, k) {
    if (slider) say(slider, String(seed));
    if (!knob) return;
    knob.disabled = turning;
    if (turning) knob.value = stop(k);
    say(knob, row.stops[knob.value]);
}

// Dots of a random function, one for each number there is.
function dotted(data, random, knob) {
    return data.uniform.flat().map((u, i, {length}) => {
        const x = SEEN[0] + (SEEN[1] - SEEN[0]) * (i + .5) / length;
        return [[x, random(x, u, knob)[0]]];
    });
}

function seen(data, row, {pass, stop}, k) {
    if (row.random) return dotted(data, RANDOM[row.random], Number(row.stops[stop(k)]));
    return ground(table(data, row, pass, stop(k)).value, row.tile, data.unit);
}

function learner(data, where, state) {
    const menu = where.querySelector("[data-name]");
    const controls = where.querySelector("[data-controls]");
    const picture = where.querySelector("[data-picture]");
    const row = () => data.rows[menu.value];
    const paint = () => {
        const {k, rate, start} = state();
        const chosen = choice(data, row(), controls);
        const how = {target: data.target, last: data.last, deployed: Boolean(row().deployed[chosen.pass])};
        const points = descend(motion(data, row(), chosen), {start, rate, ...how});
        const drawn = {...curves(seen(data, row(), chosen, k), data.target), ...marks(points, k, how)};
        follow(row(), chosen, k);
        const text = said(points[k], k, how);
        for (const mark in drawn) put(picture, mark, "d", drawn[mark]);
        for (const mark in text) put(picture, mark, "", text[mark]);
        return `${row().name}: ${text["say-value"]}, ${text["say-loss"]}`;
    };
    const furnish = () => {
        controls.innerHTML = row().controls;
        picture.innerHTML = scene(row().name, data);
    };
    furnish();
    menu.addEventListener("change", () => {
        furnish();
        paint();
    });
    listen(controls, paint);
    return paint;
}

function together(player, data) {
    const get = what => player.querySelector(what);
    const [scrub, rate, start] = ["iteration", "learning rate", "start"].map(name => get(`[aria-label='${name}']`));
    const play = get("[data-do=play]");
    const state = () => ({k: Number(scrub.value), rate: Number(data.rates[rate.value]),
        start: Number(data.starts[start.value])});
    const paints = all(player, "[data-col]").map(c => learner(data, c, state));
    const draw = () => {
        const told = paints.map(paint => paint());
        say(rate, data.rates[rate.value]);
        say(start, data.starts[start.value]);
        say(scrub, scrub.value);
        scrub.setAttribute("aria-valuetext", `iteration ${scrub.value}. ${told.join(". ")}`);
    };
    const go = k => {
        scrub.value = k;
        draw();
    };
    let timer = 0;
    const rest = () => {
        clearInterval(timer);
        timer = 0;
        play.textContent = "Play";
    };
    const onward = () => {
        go(Number(scrub.value) + 1);
        if (Number(scrub.value) === data.last) rest();
    };
    play.addEventListener("click", () => {
        if (timer) return rest();
        if (Number(scrub.value) === data.last) go(0);
        if (matchMedia("(prefers-reduced-motion: reduce)").matches) return go(data.last);
        play.textContent = "Pause";
        timer = setInterval(onward, 160);
    });
    get("[data-do=step]").addEventListener("click", () => {
        rest();
        go(Math.min(Number(scrub.value) + 1, data.last));
    });
    get("[data-do=reset]").addEventListener("click", () => {
        rest();
        go(0);
    });
    for (const slider of [scrub, rate, start]) listen(slider, draw);
    scrub.addEventListener("pointerdown", rest);
    draw();
}

each("shok-watch", together);
