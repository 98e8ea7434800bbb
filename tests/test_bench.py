"The benchmark harness: that it measures what its tables say. How fast anything is, no test can know."
import json
import os
import re
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
import pytest
import torch
from rivals import peers, rivals
import bench
from shok_nb.catalog import catalog, row

ROOT = Path(__file__).resolve().parents[1]

OURS = {c.name: c for c in bench.ours()}
KINDS = {r.name: r for r in catalog}

# --- who is compared with whom
def test_everything_is_measured():
    "Each row, each smooth one hard too; nobody is compared with a function that is not there."
    assert {r.name for r in catalog} | {f'{r.name}(hard=True)' for r in catalog if r.smooth} <= OURS.keys()
    assert len(OURS) == len(bench.ours()) and not OURS.keys() & {c.name for c in rivals()}
    assert {c.group for c in [*OURS.values(), *rivals()]} <= OURS.keys()

@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
def test_plain_functions(dtype):
    "Written by hand from the formulas of ours: the same bits. Noise and EWGS, which sees the gradient, have none."
    made = {c.group: c.f for c in bench.plain_functions()}
    smooth = {f'{r.name}(hard=True)' for r in catalog if r.smooth}
    few = {'round_ste', 'round_ste(step=.1)', 'soft_round', 'spike_ste', 'decimal_ste', 'fake_quantize'}
    assert smooth | few <= made.keys() and 'ewgs_round' not in made
    x = torch.linspace(-3, 3, 1001).to(dtype).requires_grad_()
    for k,f in made.items():
        (y,(d,)),(want,(slope,)) = (bench.both(f, x, x.detach()) for f in (f, OURS[k].f))
        assert torch.equal(y, want) and torch.equal(d, slope), k

def test_where_ours_takes_longer(monkeypatch):
    """Each way beside ours in its own table: values alone by forward, a Function by both; what may take longer has a
    reason, and up to 1.3."""
    def name(name, group, by, same='both'): return dict(part='small', name=name, group=group, by=by, same=same)
    names = [name('f', 'f', 'ours'), name('line', 'f', 'formula'), name('value', 'f', 'torch', 'value'),
        name('Function: f', 'f', 'Function'), name('far', 'g', 'formula')]
    def row(forward, back): return [[0, forward, 9], [0, back, 9]]
    rows = dict(f=row(6., 6.), line=row(1., 5.), value=row(5.8, 1.)) | {'Function: f': row(5., 5.6), 'far': row(1., 1.)}
    def table(part, rows): return dict(part=part, memory='default', dtype='float32', threads=1, size=1024, rows=rows)
    fast = rows | {'f, compiled': row(1., 2.), 'line, compiled': row(1., 1.)}
    started = dict(part='small', rows=dict(f=[6, 2], line=[3, 1]))
    data = dict(names=names, tables=[table('small', rows), table('compile', fast)], operations=[started])
    total,lost = bench.behind(data)
    found = {(r[1], r[2]): (*r[3:5], r[-1]) for r in lost}
    assert [r[4] for r in lost] == ['2.00', '1.20', '1.20']             # the worst first
    assert total == 5 and lost[1][5] == '2^10, float32, 1 thread, default allocator, f+b'
    assert found == {('`line`', 'eager'): (1, '1.20', 'missed'), ('Function: f', 'eager'): (1, '1.20', 'missed'),
        ('`line`', 'compiled'): (1, '2.00', 'missed')}
    monkeypatch.setitem(bench.WHY, 'f', 'infinity')
    assert [r[-1] for r in bench.behind(data)[1]] == ['missed', 'kept', 'missed']
    assert {r[1]: r[6] for r in lost if r[2] == 'eager'} == {'`line`': '6 + 2 for 3 + 1', 'Function: f': ''}
    assert not [r[6] for r in lost if r[2] != 'eager' and r[6]]
    text = '\n'.join(bench.behind_table(data))
    assert 'In 3 of 5 comparisons' in text and '| `f` | `line` | eager | 1 | 1.20 | ' in text

def test_operations_that_move_numbers():
    "A view and a detach are none; a product with a number, its gradient, a copy and its rounding are one each."
    line = bench.Candidate('line', lambda x: (3*x).view(-1).detach() + x*2, 'line', 'formula')
    assert bench.operations([line, OURS['round_ste']], bench.Cpu()) == {'line': [3, 1], 'round_ste': [2, 0]}

def test_reasons_are_of_rows(): assert bench.WHY.keys() <= OURS.keys() | {c.name for c in rivals()}

@pytest.mark.parametrize('c', rivals() + peers()[0], ids=lambda c: c.name)
def test_rivals_do_the_same(c):
    """Values and gradients of a rival are those of ours in float32, at points .01 from ties and integers,
    where formulas that count from the floor lose digits. Seed 0; the mean of 4e5 coins or noises is within 5
    of its deviations, at most ½/√4e5 each."""
    x = torch.rand(400_000)*4 - 2
    if c.group in ('sigmoid_round', 'ramp_round'): x = torch.cat([x.abs()/2, .498 + torch.rand(1000)*.004])
    for s in (2, 20): x = x[(s*x - (s*x).round()).abs() > .01]
    x = x.requires_grad_()
    g = torch.randn_like(x)
    y,want = c.f(x),OURS[c.group].f(x)
    d = torch.autograd.grad(y, x, g)[0] if y.requires_grad else torch.zeros_like(x)
    slope = torch.autograd.grad(want, x, g)[0]
    if c.same == 'mean':
        assert abs((y-x).mean()) < 5*.5/len(x)**.5 and torch.equal(d, slope)
        assert torch.equal(y == y.round(), want == want.round())
        return
    ok = y.isfinite()                                       # e/(e+1) is inf/inf in two fifths of [0, 1]
    assert ok.float().mean() > .5
    def alike(a, b): return torch.allclose(a[ok], b[ok], rtol=1e-3, atol=1e-4*b[ok].abs().max().item())
    near = [alike(y, want), alike(d, slope)]
    assert near == [c.same in ('both', 'value'), c.same in ('both', 'slope')]

# --- how it is measured
class Ticks:
    "A clock on which every call takes its own number of seconds, and that remembers the order."
    device,least,large = 'cpu',1,2**18
    def __init__(self): self.seen = []
    def sets(self, nbytes): return 1
    def __call__(self, f, calls=1):
        self.seen.append((f, calls))
        return f()

def test_race_takes_turns():
    clock = Ticks()
    fs = {'a': lambda: .25, 'b': lambda: 2.}
    t = bench.race(fs, clock, 0, 3)
    assert t == {'a': [.25]*3, 'b': [2.]*3}
    assert clock.seen[6:] == [(fs['a'], 4), (fs['b'], 1)]*3     # three looks each, then rounds: samples of a second

def test_quarters(): assert bench.quarters([4., 1., 2., 3., 5.]) == [2., 3., 4.] and bench.quarters([7.]) == [7.]*3

def test_ratios(monkeypatch):
    "Forward over clone, both over clone and multiplication, each of the same round."
    def race(thunks, clock, seconds, least, calls):
        return {(k, w): [v, 2*v] for k,w in thunks for v in [dict(copy=2., times=3., forward=5., both=20.)[w]]}
    monkeypatch.setattr(bench, 'race', race)
    a = types.SimpleNamespace(seconds=0, least=2)
    assert bench.ratios({'f': torch.round}, Ticks(), 8, torch.float32, a) == (3., {'f': [[2.5]*3, [4.]*3]})

def test_sweep(monkeypatch):
    """Every fourth size, the five and a copy into old memory; long calls, which are
    warmed up on a small tensor, among them."""
    monkeypatch.setattr(bench.Cpu, 'large', 2**12)
    a = types.SimpleNamespace(sizes=[2**14], seconds=0, least=2)
    got = list(bench.sweep(bench.ours(), bench.Cpu(), a, 'large', 'default'))
    assert [t['size'] for t in got] == [2**10, 2**12, 2**14]
    assert all(t['rows'].keys() == {*bench.FIVE, bench.OLD} for t in got)

def test_saved():
    "x alone, its sine too, the same storage twice, a mask, and what a graph that is gone kept."
    x = torch.randn(1000)
    table = {
        lambda x: x.neg(): 0,
        lambda x: x.square(): 1,
        lambda x: x*x: 1,
        lambda x: x*x.sin(): 2,
        lambda x: x.view(10, 100).t()*x.view(100, 10): 1,
        lambda x: torch.where(x > 0, x, 0.): .25,
        lambda x: (x*x.sin()).detach() + x: 0,
    }
    for f,n in table.items(): assert bench.saved(f, x) == n

@pytest.mark.parametrize('n', (2**10, 2**16))
def test_peak(n):
    "Results included; what is freed before the next allocation counts once."
    x,clock = torch.randn(n),bench.Cpu()
    table = {
        x.clone: 1,
        x.neg_: 0,
        lambda: (x.clone(), x.clone()): 2,
        lambda: (x.clone().neg(), x.clone())[0]: 2,
        lambda: x.clone().neg().clone(): 2,
        lambda: bench.both(torch.neg, x.detach().requires_grad_(), x): 2,
        lambda: bench.both(torch.neg, x, x): 1,
    }
    for f,k in table.items(): assert clock.peak(f) == k*x.nbytes

def test_peak_is_quiet(capfd):
    bench.Cpu().peak(torch.randn(8).clone)
    assert not capfd.readouterr().err

def test_cuda_clock():
    """Milliseconds between two events, per call; as many inputs as fill the L2 cache
    twice; the peak above what was there."""
    log = []
    class Event:
        def __init__(self, enable_timing): assert enable_timing
        def record(self): log.append(self)
        def synchronize(self): log.append('wait')
        def elapsed_time(self, end):
            assert log == [self, 'f', 'f', 'f', end, 'wait']
            return 6.
    cache = types.SimpleNamespace(L2_cache_size=50<<20)
    cuda = types.SimpleNamespace(Event=Event, get_device_properties=lambda: cache, synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None, memory_allocated=lambda: 100, max_memory_allocated=lambda: 140)
    clock = bench.Cuda(cuda)
    assert clock(lambda: log.append('f'), 3) == .002
    assert clock.sets(4<<20) == 26 and clock.sets(4) == 1000 and clock.sets(1<<30) == 2
    assert clock.peak(lambda: None) == 40

def test_inputs_rotate():
    "Each set in its turn, and the leaf is the x of its set."
    clock = types.SimpleNamespace(device='cpu', sets=lambda nbytes: 12//nbytes)
    turn = bench.inputs(clock, 2, torch.bfloat16)
    sets = [next(turn) for _ in range(4)]
    assert len({x.data_ptr() for x,_,_ in sets}) == 3 and sets[0] is sets[3]
    assert all(x.data_ptr() == l.data_ptr() and l.requires_grad and l.is_leaf and not x.requires_grad for x,l,_ in sets)

# --- what it writes
SMALL = '--sizes', '1024', '--dtypes', 'float32', '--threads', '1'

def stored(out): return json.loads((out/'results.json').read_text('utf-8')),(out/'RESULTS.md').read_text('utf-8')

def measured(out, job, *more):
    "The JSON and the Markdown of a quick run, which has the figures of the JSON."
    bench.main(['--job', job, '--quick', *more, '--out', str(out)])
    data,text = stored(out)
    assert text == bench.report(data)
    return data,text

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp('bench')
    measured(out, 'small', *SMALL)
    return out

@pytest.mark.slow
def test_small(small):
    "Every row of the catalog is in the JSON, and the Markdown has the figures of the JSON."
    data,text = stored(small)
    t, = data['tables']
    assert (t['size'], t['dtype'], t['threads'], t['memory']) == (1024, 'float32', 1, 'default')
    known = OURS.keys() | {c.name for c in rivals()}
    assert data['memory'][0]['rows'].keys() == known
    assert t['rows'].keys() == known | {c.name for c in bench.plain_functions()}
    assert data['parts']['small']['quick'] and 'smoke run' in text
    cells = [l.strip('| ').split(' | ') for l in text.splitlines() if l.startswith('| ')]
    for n in data['names']:
        if n['by'] == 'Function': continue
        f,b = t['rows'][n['name']]
        assert all(0 < q[0] <= q[1] <= q[2] for q in (f, b))
        glance, = (c for c in cells if c[0] == bench.label(n) and len(c) == 7)
        sizes, = (c for c in cells if c[0] == bench.label(n) and len(c) == 2)
        assert glance[2:4] == [bench.show(f), bench.show(b)]
        assert glance[5] == bench.short(data['memory'][0]['rows'][n['name']][0])
        assert sizes[1].replace('~', '') == f'{bench.short(f[1])} / {bench.short(b[1])}'

def test_saved_for_backward(small):
    "Nothing for a slope of 1, `x` and nothing else for any other; what is random may keep its noise."
    rows = stored(small)[0]['memory'][0]['rows']
    for name,c in OURS.items():
        r = KINDS.get(c.group)
        if r and not r.random: assert rows[name][0] <= 1 and (rows[name][0] == 0) == (r.slope == '1'), name

@pytest.mark.slow
def test_compile_and_merge(small, monkeypatch):
    "A part takes the place of what it measured before and leaves the others alone. No code is generated here."
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    before,_ = stored(small)
    for _ in range(2): data,_ = measured(small, 'compile', *SMALL)
    assert [t for t in data['tables'] if t['part'] == 'small'] == before['tables']
    assert data['memory'] == before['memory']
    made,first = (next(t for t in data[k] if t['part'] == 'compile') for k in ('tables', 'compiled'))
    assert len(data['tables']) == 2 and set(data['parts']) == {'small', 'compile'}
    good = {n for n in bench.FIVE if n not in first['failed']}
    assert set(first['first']) == good >= {'round_ste', 'soft_round'}
    assert set(made['rows']) == good | {f'{n}, compiled' for n in good}

@pytest.mark.slow
def test_grids(tmp_path, monkeypatch):
    "Each grid eager and compiled, torch's casts beside them with the same values, and a table of it. No code is made."
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    data,text = measured(tmp_path, 'grids', '--sizes', '1024')
    (t,),(ours,others) = data['grids'],bench.grids()
    assert t['rows'].keys() == ours.keys() | others.keys() | {f'{k}, compiled' for k in ours} and len(others) == 2
    assert all(0 < q[0] <= q[1] <= q[2] for r in t['rows'].values() for q in r)
    assert f"| {bench.CASTS} | {bench.two(t['rows'][bench.CASTS])} |" in text
    x = torch.linspace(-448, 448, 1000)                     # beyond, some versions of torch give nan
    for f in (ours[bench.CASTS], *others.values()): assert torch.equal(f(x), ours['float_round, e4m3'](x))

def test_layers(tmp_path):
    "The unit is arithmetic that `gptq` does too: the rest is more, and the Gram matrix is in both."
    data,text = measured(tmp_path, 'layers', '--sizes', '256')
    t, = data['layers']
    assert (t['size'], t['inputs']) == (256, 128) and min(t['seconds'], t['ratio'], t['alone']) > 0
    assert f"that is {t['ratio']:.2f} times as long" in text

def test_layers_of_others(tmp_path, monkeypatch):
    "Who rounds to nearest has more error than ours; one that fails is named; without blocks it has no such row."
    def nearest(layer):
        grid = dict(scale=layer.each(layer.scale), bits=layer.bits)
        return None if layer.block else (bench.R.fake_quantize(layer.w, **grid), grid)
    peers = {'nearest': (nearest, 'torch'), 'broken': (lambda layer: layer.nothing, 'a package')}
    monkeypatch.setattr(bench.layers, 'PEERS', peers)
    data,text = measured(tmp_path, 'peers-layers', '--sizes', '32')
    (t,),part = data['layers_beside'],data['parts']['peers-layers']
    assert t['rows'].keys() == {'nearest, 4 bits, rows', 'nearest, 3 bits, rows'}
    assert all(error > 1 for error,*_ in t['rows'].values())
    assert part['versions'].keys() == {'torch'} and 'no attribute' in part['missing']['a package']
    assert '| nearest, 4 bits, rows | ' in text

def test_grids_of_others(tmp_path, monkeypatch):
    "Ours beside a package with a gradient and one without, in one run, and the table says how many times theirs takes."
    slow = bench.Candidate('a package twice', lambda x: x*1., 'nvfp4_quantize', 'a package')
    monkeypatch.setattr(bench, 'peers', lambda packages: ([slow], {'a package': '1.0'}, {}))
    data,text = measured(tmp_path, 'peers-grids', '--sizes', '1024')
    t, = data['beside']
    assert t['rows'].keys() == {'nvfp4_quantize', 'float_round, e4m3', slow.name, *bench.values_alone()}
    assert t['learns'] == {slow.name: True} | dict.fromkeys(bench.values_alone(), False)
    forward,both = (t['rows'][slow.name][i][1]/t['rows']['nvfp4_quantize'][i][1] for i in (0, 1))
    assert f'| {slow.name} | `nvfp4_quantize` | {bench.two(t["rows"][slow.name])} | {bench.short(forward)} | ' in text
    assert f'{bench.short(both)} |' in text and data['parts']['peers-grids']['versions'] == {'a package': '1.0'}

def test_only_is_not_stored(small, capsys):
    before = stored(small)
    bench.main(['--job', 'small', '--quick', *SMALL, '--only', 'cubic_round', '--out', str(small)])
    assert 'cubic_round(hard=True)' in capsys.readouterr().out and stored(small) == before

# --- where there is no GPU
def test_no_gpu():
    if torch.cuda.is_available(): pytest.skip('there is one')
    with pytest.raises(SystemExit, match='^bench: torch finds no CUDA device here; .*$'):
        bench.main(['--device', 'cuda'])

HIDDEN = 'fastcore', 'ipywidgets', 'nbdev', 'gfloat', 'selenium', 'sphinx', 'xdist'
HIDE = f"""import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {HIDDEN}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Hide())
"""

@pytest.mark.slow
def test_gpu_table(tmp_path, monkeypatch):
    """A rehearsal of `python bench/gpu.py` on the CPU, where only torch and what runs tests is installed: each part
    finds its tests, what fails and what is cut off is told, and the table is there after each part."""
    import gpu
    out,lines = tmp_path/'GPU.md',(f'{w} t.py::{i}' for i,w in enumerate('passed passed failed skipped'.split()))
    (tmp_path/'found').write_text('\n'.join(lines))
    assert gpu.counted(tmp_path/'found') == (2, 1, 1) and gpu.counted(tmp_path/'none') == (0, 0, 0)
    command = [sys.executable, str(ROOT/'bench'/'gpu.py')]
    r = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(CUDA_VISIBLE_DEVICES=''))
    assert r.returncode == 1 and 'no CUDA device' in r.stderr
    (tmp_path/'sitecustomize.py').write_text(HIDE)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setenv('SHOK_DEVICE', 'cpu')
    monkeypatch.setattr(sys, 'argv', ['gpu.py', '--out', str(out), '-k', 'round_ste and not slow', '-m', 'not slow'])
    few = [p._replace(args=(*p.args, '--only', 'round_ste', '--sizes', '1024')) if p.script else p for p in gpu.PARTS]
    monkeypatch.setattr(gpu, 'PARTS', few)
    assert not gpu.main()
    lines = [[c.strip() for c in line.strip('|').split('|')] for line in out.read_text().splitlines()]
    counts = {w: [int(n) for n in numbers[:3] if n] for w,*numbers in lines if w in {p.what for p in few}}
    assert counts.keys() == {p.what for p in few}
    assert all(found[0] > 0 and found[1] == 0 for w,found in counts.items() if w not in (few[1].what, 'times'))
    assert '| `round_ste` | ours | ' in out.read_text() and '| nvfp4 | ' in out.read_text()
    broken = [gpu.Part('none', ('tests/no_such.py',)), gpu.Part('long', ('-c', 'import time; time.sleep(60)'), 1, True)]
    monkeypatch.setattr(gpu, 'PARTS', broken)
    assert gpu.main()
    told = out.read_text()
    assert '| none | 0 | 0 | 0 | ' in told and 'ended with 4' in told and 'cut off' in told
    assert not (ROOT/'bench'/'GPU.md').exists()

def test_another_device_beside_the_cpu(monkeypatch):
    "What `python bench/gpu.py` asks of every estimator finds a value and a slope that differ."
    import as_on_cpu
    monkeypatch.setattr(as_on_cpu, 'DEVICE', 'cpu')
    soft,drift = row(bench.R.soft_round),iter((0., 1e-5))
    as_on_cpu.check(soft, soft.f, torch.float32)
    with pytest.raises(AssertionError): as_on_cpu.check(soft, lambda x: soft.f(x) + next(drift), torch.float32)
    straight,scales = row(bench.R.round_ste),iter((1., 1.001))
    with pytest.raises(AssertionError):
        as_on_cpu.check(straight, lambda x: straight.f(bench.R.scale_grad(x, next(scales))), torch.float32)

@pytest.mark.slow
def test_plugin_for_a_gpu():
    "The plugin that `make gpu` loads, with the CPU in the place of the GPU."
    few = '(test_second or test_onnx) and round_ste and not ste-'
    env = os.environ | dict(PYTHONPATH='bench', SHOK_DEVICE='cpu', PYTEST_ADDOPTS='-p no:xdist')
    command = [sys.executable, '-m', 'pytest', '-p', 'on_cuda', 'tests/test_probes.py', '-k', few]
    r = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert 'tensors are made on cpu' in r.stdout and re.search(r'\b1 passed', r.stdout), r.stdout + r.stderr

# --- the page
@pytest.mark.slow
def test_page_without_results(tmp_path, monkeypatch):
    "Outside a checkout the page runs too, and says how to make results."
    monkeypatch.chdir(tmp_path)
    page = json.loads((ROOT/'nbs'/'reference'/'30_speed.ipynb').read_text('utf-8'))
    cells = [''.join(c['source']) for c in page['cells'] if c['cell_type'] == 'code']
    names = {}
    for c in cells: exec(compile(c, 'page', 'exec'), names)
    assert names['data'] is None and 'make bench' in names['about'].data
