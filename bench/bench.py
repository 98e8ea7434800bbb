"""How far from the memory limit: every estimator against a copy of the same tensor.

Forward is divided by the time of `x.clone()`, forward and backward together by a clone plus one multiplication, the
least any pair could move. Everything takes its turn in one process, round after round, so a noisy machine disturbs all
alike; figures are medians of ratios with the middle half. Steady memory means an allocator that keeps what is freed, as
a training loop on a caching allocator sees it; without it a large copy also pays for fresh pages.

Each part runs in a Python of its own and is merged into results.json, from which RESULTS.md is written."""
import argparse
import contextlib
import datetime
import functools
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
import torch
import torch.distributed.tensor  # torch imports it at the first trace, which a short process does not wait for
from torch.autograd import Function

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]                    # the peers have a Python without shok_nb
import layers  # noqa: E402 (found by the line above)
from rivals import ON_GRIDS, Candidate, Learns, fourier_loop, peers, rivals, why  # noqa: E402 (found by the line above)
import shok_nb as R  # noqa: E402 (found by the line above)
from shok_nb.catalog import catalog  # noqa: E402 (found by the line above)
from shok_nb.engine import replay  # noqa: E402 (found by the line above)
from shok_nb.engine.core import estimator  # noqa: E402 (found by the line above)
from shok_nb.engine.grid import in_steps, put_on_grid  # noqa: E402 (found by the line above)

PEERS = HERE.parent/'.venv-peers'/'bin'/'python'                 # made by `make peers`
STEADY = dict(MALLOC_TOP_PAD_='4000000000', MALLOC_MMAP_THRESHOLD_='4000000000', MALLOC_TRIM_THRESHOLD_='8000000000')
PARTS = dict(small=['small'], large=['large'], steady=['steady'], compile=['compile'], grids=['grids'],
    layers=['layers'], peers=['peers', 'peers-steady', 'peers-grids', 'peers-layers'])
SIZES = {'small': '16,1024,16384,65536', 'peers': '1024,65536,1048576,16777216', 'grids': '16777216',
    'peers-grids': '16777216', 'layers': '4096', 'peers-layers': '256'}
LARGE = '1048576,16777216'
FIVE = 'round_ste', 'cubic_round', 'soft_round', 'fourier_round', 'stochastic_round'
TERMS = 1, 2, 5, 10, 20, 30
OLD = 'copy_ into old memory'

# --- what is measured
def ours():
    "Every row of the catalog at its defaults, smooth ones also with a hard forward; and a few more."
    out = []
    for r in catalog:
        out.append(Candidate(r.name, r.f, r.name, 'ours'))
        hard = functools.partial(r.f, hard=True)
        if r.smooth: out.append(Candidate(f'{r.name}(hard=True)', hard, r.name, 'ours', 'slope'))
    more = {
        'stochastic_round(seed=s)': functools.partial(R.stochastic_round, seed=torch.tensor(1)),
        'fourier_round(terms=10)': functools.partial(R.fourier_round, terms=10),
        'soft_round(alpha learns)': Learns(R.soft_round, 5.),
        'scale_grad': functools.partial(R.scale_grad, factor=.5),
        'normalize_grad': R.normalize_grad,
        'fake_quantize': functools.partial(R.fake_quantize, scale=.1),
        'round_ste(step=.1)': functools.partial(R.round_ste, step=.1),
    }
    return out + [Candidate(n, f, n.removesuffix('(seed=s)'), 'ours') for n,f in more.items()]

def plain_functions():
    """For each of ours that is one estimator, a plain autograd.Function of the same formulas, as one would write it
    by hand: the rest of a call is checks, grids and transforms. Noise is left out, since it is drawn outside."""
    out = []
    for c in ours():
        seen = []
        def note(op, x, *knobs, seen=seen, **named):
            seen.append((op, knobs, named))
            return call(op, x, *knobs, **named)
        call,estimator.__call__ = estimator.__call__,note
        try: c.f(torch.ones(3))
        finally: estimator.__call__ = call
        if len(seen) != 1: continue
        op,knobs,named = seen[0]
        grid = named.pop('step', 1.),named.pop('offset', 0.)
        knobs = list((op.defaults | dict(zip(op.names, knobs)) | named).values())
        if any(isinstance(k, torch.Tensor) for k in knobs): continue
        f = by_hand(op, grid, knobs).apply
        x = torch.randn(64, requires_grad=True)
        g = torch.randn(64)
        if torch.equal(both(f, x, g)[1][0], both(c.f, x, g)[1][0]):       # EWGS looks at the gradient too
            out.append(Candidate(f'Function: {c.name}', f, c.name, 'Function'))
    return out

def by_hand(op, grid, knobs):
    "A Function of its formulas on this grid, in float32 where a half comes."
    def value(x): return put_on_grid(op.value, op.near, x, *grid, *knobs)
    def wide(f, x, *others):
        if x.dtype not in (torch.float16, torch.bfloat16): return f(x, *others)
        return f(x.float(), *[t.float() for t in others]).to(x.dtype)
    def down(x, g): return g*op.slope(in_steps(x, *grid), *knobs)
    class ByHand(Function):
        @staticmethod
        def forward(ctx, x):
            if op.slope is not None: ctx.save_for_backward(x)
            return wide(value, x)
        @staticmethod
        def backward(ctx, g): return g if op.slope is None else wide(down, *ctx.saved_tensors, g)
    return ByHand

CASTS = 'two casts of torch'
def grids():
    "On grids that are not even: ours, torch's own way, which has no choice of gradient, and packages that have none."
    scale = torch.tensor(.01)
    out = {
        CASTS: lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
        'float_round, e4m3': lambda x: R.float_round(x, 'e4m3'),
        'float_round, e4m3, soft_round': lambda x: R.float_round(x, 'e4m3', R.soft_round, alpha=5.),
        'mx_quantize, e2m1': lambda x: R.mx_quantize(x, 'e2m1'),
        'nvfp4_quantize': lambda x: R.nvfp4_quantize(x, tensor_scale=scale),
    }
    return out,values_alone()

def values_alone():
    "To e4m3 by numpy, without a gradient."
    with contextlib.suppress(ImportError):
        import gfloat
        import ml_dtypes
        from gfloat.formats import format_info_ocp_e4m3 as e4m3
        def by_gfloat(x): return torch.tensor(gfloat.round_ndarray(e4m3, x.detach().numpy(), sat=True))
        def by_ml_dtypes(x):
            return torch.tensor(x.detach().numpy().astype(ml_dtypes.float8_e4m3fn).astype('float32'))
        return {'ml_dtypes, e4m3': by_ml_dtypes, 'gfloat, e4m3': by_gfloat}
    return {}

class Old(Function):
    "The least a custom gradient in the old style can do."
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x)
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g

class New(Function):
    "The same in the style that torch.func wants."
    @staticmethod
    def forward(x): return torch.round(x)
    @staticmethod
    def setup_context(ctx, inputs, output): ctx.save_for_backward(*inputs)
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g

# --- how it is measured
class Cpu:
    "Seconds per call by the clock on the wall."
    device,least,large = 'cpu',100e-6,2**18                    # shortest sample; from this size on one call is a sample
    def sets(self, nbytes): return 1
    def __call__(self, f, calls=1):
        t = time.perf_counter()
        for _ in range(calls): f()
        return (time.perf_counter()-t)/calls
    def peak(self, f):
        "The most bytes that `f()` held at once beyond those that were there."
        from torch.profiler import ProfilerActivity, profile
        with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p: f()
        kept = [e for e in p.profiler.kineto_results.events() if e.name() == '[memory]']
        events = sorted((e.start_ns(), e.nbytes()) for e in kept)
        return max(itertools.accumulate((n for _,n in events), initial=0))

class Cuda:
    "Seconds per call between two events on the device."
    device,least,large = 'cuda',500e-6,math.inf
    def __init__(self, cuda=torch.cuda): self.cuda = cuda
    def sets(self, nbytes):
        "How many inputs to rotate through so that none is still in the L2 cache when its turn comes; tiny ones may be."
        return min(1000, 1 + math.ceil(2*self.cuda.get_device_properties().L2_cache_size/nbytes))
    def __call__(self, f, calls=1):
        start,end = self.cuda.Event(enable_timing=True),self.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls): f()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)/1e3/calls
    def peak(self, f):
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        f()
        self.cuda.synchronize()
        return self.cuda.max_memory_allocated()-before

@contextlib.contextmanager
def quiet():
    "The profiler writes two lines to stderr, past sys.stderr."
    old,null = os.dup(2),os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try: yield
    finally:
        os.dup2(old, 2)
        os.close(old)
        os.close(null)

def inputs(clock, n, dtype):
    "`x`, a leaf that requires grad, and a gradient, from as many sets as the clock wants, for ever in turn."
    k = clock.sets(n*dtype.itemsize)
    x,g = (torch.randn(k, n, device=clock.device).mul_(s).to(dtype).unbind() for s in (5, 1))
    return itertools.cycle([(x, x.detach().requires_grad_(), g) for x,g in zip(x, g)])

def both(f, leaf, g):
    "Forward and, if there is a gradient, backward; what it returns is still held."
    y = f(leaf)
    leaves = [leaf, f.learns] if isinstance(f, Learns) else [leaf]
    return y,torch.autograd.grad(y, leaves, g)[:1] if y.requires_grad else None

def enough(f, clock):
    "How many calls make a sample; the first ones are slow."
    return math.ceil(clock.least/max(min(clock(f) for _ in range(3)), 1e-8))

def race(thunks, clock, seconds, least, calls=None):
    "Seconds per call of each, taking turns: `least` rounds, and more while the time lasts."
    rounds,start = [],time.perf_counter()
    calls = calls or {k: enough(f, clock) for k,f in thunks.items()}
    gc.disable()
    begun = time.perf_counter()
    while len(rounds) < least or (now := time.perf_counter()) + (now-begun)/len(rounds) < start+seconds:
        rounds.append({k: clock(f, calls[k]) for k,f in thunks.items()})
    gc.enable()
    return {k: [r[k] for r in rounds] for k in thunks}

def exact(v): return float(f'{v:.4g}')
def quarters(v):
    if len(v) == 1: return [exact(v[0])]*3
    return [exact(q) for q in statistics.quantiles(v, n=4, method='inclusive')]

def ratios(fs, clock, n, dtype, a):
    """`(clone, rows)`: the median seconds of a clone, and for each function the
    quartiles of its forward and both ratios."""
    turn,thunks = inputs(clock, n, dtype),{}
    for kept in (replay._programs, replay._seen): kept.clear()      # all tables together are more than are kept
    for k,f in fs.items():
        thunks[k, 'copy'] = lambda: next(turn)[0].clone()
        def times():
            x,_,g = next(turn)
            return x*g
        thunks[k, 'times'] = times
        thunks[k, 'forward'] = lambda f=f: f(next(turn)[0])
        thunks[k, 'both'] = lambda f=f: both(f, *next(turn)[1:])
    large = n >= clock.large
    # so often that eager code has recorded what it may
    for f,_ in itertools.product(fs.values(), range(min(120, max(1, 2**24//n)))):
        f(next(turn)[0])
        both(f, *next(turn)[1:])
    least = a.least if dtype == torch.float32 and torch.get_num_threads() == 1 else max(2, a.least//2)
    t = race(thunks, clock, a.seconds, least, dict.fromkeys(thunks, 1) if large else None)
    rows = {}
    for k in fs:
        forward = [f/c for f,c in zip(t[k, 'forward'], t[k, 'copy'])]
        back = [b/(c+m) for b,c,m in zip(t[k, 'both'], t[k, 'copy'], t[k, 'times'])]
        rows[k] = [quarters(forward), quarters(back)]
    return exact(statistics.median([c for k in fs for c in t[k, 'copy']])),rows

def saved(f, x):
    "Bytes that autograd keeps for backward, in units of those of `x`; a storage counts once."
    class Kept:
        def __init__(self, t): self.t = t
    alive,leaf = weakref.WeakSet(),x.detach().requires_grad_()
    def pack(t):
        kept = Kept(t)
        alive.add(kept)
        return kept
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: k.t): _graph = f(leaf)      # holds them
    stores = {s.data_ptr(): s.nbytes() for s in (k.t.untyped_storage() for k in alive)}
    return round(sum(stores.values())/x.nbytes, 2)

def memory(cs, clock, n):
    "For each function, in units of `x`: saved for backward, most held in forward, and in forward and backward."
    x,leaf,g = next(inputs(clock, n, torch.float32))
    for c in cs: both(c.f, leaf, g)                              # what is allocated once and kept counts for nobody
    def peak(f): return round(clock.peak(f)/x.nbytes, 2)
    return {c.name: [saved(c.f, x), peak(lambda: c.f(x)), peak(lambda: both(c.f, leaf, g))] for c in cs}

def overhead(cs, clock, a):
    "Microseconds per call at 2^10 elements: forward, and both."
    fs = {'torch.round': torch.round, 'torch.neg': torch.neg}
    fs |= {'Function, old style': Old.apply, 'Function, setup_context': New.apply}
    fs |= {c.name: c.f for c in cs if c.by == 'ours'}
    turn,thunks = inputs(clock, 1024, torch.float32),{}
    for k,f in fs.items():
        thunks[k, 'forward'] = lambda f=f: f(next(turn)[0])
        thunks[k, 'both'] = lambda f=f: both(f, *next(turn)[1:])
    t = race(thunks, clock, a.seconds, a.least)
    return {k: [exact(statistics.median(t[k, w])*1e6) for w in ('forward', 'both')] for k in fs}

# No number is read or written.
LAID = ('detach', 'view', 'view_as', 'as_strided', 'expand', 'empty', 'empty_like', 'empty_strided',
    'new_empty_strided', 'lift_fresh')

def operations(cs, clock):
    "How many operations of torch each of them starts that move numbers: forward, and backward."
    from torch.profiler import ProfilerActivity, profile
    def started(call):
        with quiet(), profile(activities=[ProfilerActivity.CPU]) as p: out = call()
        of_torch = [e for e in p.events() if e.name.startswith('aten::')]
        first = [e for e in of_torch if not (e.cpu_parent and e.cpu_parent.name.startswith('aten::'))]
        names = [e.name[6:] for e in first if e.name != 'aten::to' or e.cpu_children]
        return out,sum(n not in LAID for n in names)
    rows = {}
    for c in cs:
        _,leaf,g = next(inputs(clock, 1024, torch.float32))
        both(c.f, leaf, g)
        y,forward = started(lambda: c.f(leaf))
        _,backward = started(lambda: torch.autograd.grad(y, leaf, g)) if y.requires_grad else (None, 0)
        rows[c.name] = [forward, backward]
    return rows

class Buffered(torch.nn.Module):
    "A function whose knob is a buffer."
    def __init__(self, f, knob, value):
        super().__init__()
        self.f,self.knob = f,knob
        self.register_buffer('value', torch.tensor(value))
    def forward(self, x): return self.f(x, **{self.knob: self.value})

def recompiles(clock, rows=catalog, values=6):
    """How many graphs a compiled function needs while its knob takes six values, as a
    Python float, a 0-d tensor and a buffer."""
    from torch._dynamo.testing import CompileCounter
    out,x = {},torch.randn(64, device=clock.device)
    for r in rows:
        if not r.knobs or isinstance(r.knobs[0].default, int): continue
        k,row = r.knobs[0],[]
        steps = [k.lo+(k.hi-k.lo)*(i+1)/(values+1) for i in range(values)]
        for way in ('float', 'tensor', 'buffer'):
            torch._dynamo.reset()
            counter = CompileCounter()
            f = lambda x, v: r.f(x, **{k.name: v})
            if way == 'buffer': f = Buffered(r.f, k.name, steps[0]).to(clock.device)
            g = torch.compile(f, backend=counter)
            for v in steps:
                if way != 'buffer': g(x, v if way == 'float' else torch.tensor(v))
                else:
                    g.value.fill_(v)
                    g(x)
            row.append(counter.frame_count)
        out[r.name] = row
    torch._dynamo.reset()
    return out

# --- the parts
def works(c, clock, dtype):
    "Does it run in this dtype? Ours have to."
    if c.by == 'ours': return True
    try: both(c.f, *next(inputs(clock, 16, dtype))[1:])
    except Exception: return False
    return True

def tables(cs, clock, a, part, memory):
    "One table for each dtype, number of threads and size."
    for dtype,threads,n in itertools.product(a.dtypes, a.threads, a.sizes):
        torch.set_num_threads(threads)
        fs = {c.name: c.f for c in cs if works(c, clock, getattr(torch, dtype))}
        clone,rows = ratios(fs, clock, n, getattr(torch, dtype), a)
        say(f'{part}: {dtype}, {threads} thread(s), {n} elements')
        yield dict(part=part, memory=memory, dtype=dtype, threads=threads, size=n, clone=clone, rows=rows)

def sweep(cs, clock, a, part, memory):
    "Five estimators, and a copy into memory that is there already, at sizes in steps of four up to the largest."
    torch.set_num_threads(1)
    for e in range(10, int(math.log2(max(a.sizes)))+1, 2):
        to = torch.randn(1<<e, device=clock.device)
        fs = {c.name: c.f for c in cs if c.name in FIVE} | {OLD: lambda x: to[:len(x)].copy_(x.detach())}
        clone,rows = ratios(fs, clock, 1<<e, torch.float32, a)
        yield dict(part=part, memory=memory, size=1<<e, clone=clone, rows=rows)

def at_sizes(fs, clock, a, part, **more):
    "A table of these functions for each size, in float32."
    for n in a.sizes:
        clone,rows = ratios(fs, clock, n, torch.float32, a)
        say(f'{part}: {n} elements')
        yield dict(part=part, memory=a.memory, **more, size=n, clone=clone, rows=rows)

def compiled(cs, clock, a, part):
    "`(first, failed, table for each size)`: seconds until the first gradient, errors, and compiled beside eager."
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    first,failed,fs = {},{},{}
    x,leaf,g = next(inputs(clock, a.sizes[0], torch.float32))
    both(torch.compile(torch.sin), leaf, g)                      # what is done once per process
    for c in cs:
        f = torch.compile(c.f, fullgraph=True, dynamic=True)      # one graph for all sizes
        t = time.perf_counter()
        try: both(f, leaf, g)
        except Exception as e:
            failed[c.name] = why(e)
            continue
        first[c.name] = exact(time.perf_counter()-t)
        f(x)
        fs |= {c.name: c.f, f'{c.name}, compiled': f}
    say(f'{part}: {len(first)} compiled in {sum(first.values()):.0f} s, {len(failed)} failed')
    return first,failed,list(at_sizes(fs, clock, a, part, dtype='float32', threads=1))

def on_grids(clock, a, part):
    "Each eager and compiled, taking turns; packages eager alone."
    torch.set_num_threads(1)
    fs,others = grids()
    made = {f'{k}, compiled': torch.compile(f, fullgraph=True, dynamic=False) for k,f in fs.items()}
    return list(at_sizes(fs | made | others, clock, a, part))

def on_grids_of_others(clock, a, part):
    "`(tables, versions, missing)`: what packages do on the grids of ours, taking turns with ours."
    torch.set_num_threads(1)
    found,versions,missing = peers(ON_GRIDS)
    theirs = {c.name: c.f for c in found} | values_alone()
    groups = {c.name: c.group for c in found} | {k: 'float_round, e4m3' for k in values_alone()}
    if not groups: sys.exit(f'bench: this Python has none of the peers: {missing}')
    mine = {k: f for k,f in grids()[0].items() if k in groups.values()}
    leaf = torch.randn(1024).requires_grad_()
    learns = {k: f(leaf).requires_grad for k,f in theirs.items()}
    return list(at_sizes(mine | theirs, clock, a, part, groups=groups, learns=learns)),versions,missing

def layer(clock, n):
    "GPTQ on a square layer with half as many inputs, on one thread."
    torch.set_num_threads(1)
    return layers.limit(clock, race, n, n//2)

def layers_of_others(clock, a, part):
    "`(tables, versions, missing)`: codes that packages find for the same layers."
    torch.set_num_threads(1)
    seeds = 1 if a.quick else 3
    made = []
    for n in a.sizes[:1]:
        rows,versions,missing = layers.beside(clock, race, seeds=seeds, rows=n, columns=n, inputs=4*n)
        made.append(dict(part=part, size=n, inputs=4*n, rows=rows))
    return made,versions,missing

def run(job, a):
    "Measure one job; its share of results.json."
    clock = Cuda() if a.device == 'cuda' else Cpu()
    base,a.memory = job.partition('-')[0],'cuda' if a.device == 'cuda' else 'steady' if steady(job) else 'default'
    cs,versions,missing = [c for c in ours() + rivals() if a.only in c.name and base not in ('grids', 'layers')],{},{}
    if job in ('peers-grids', 'peers-layers'): cs = []
    elif base == 'peers':
        found,versions,missing = peers()
        mine = {c.group for c in found}
        cs = [c for c in ours() if c.name in mine] + found
        if not found: sys.exit(f'bench: this Python has none of the peers: {missing}')
    if base == 'small': cs += [c for c in plain_functions() if a.only in c.name]
    start,out = time.perf_counter(),{}
    out['names'] = [dict(part=job, name=c.name, group=c.group, by=c.by, same=c.same) for c in cs]
    if base == 'compile':
        if a.quick: cs = [c for c in cs if c.name in FIVE]
        first,failed,made = compiled(cs, clock, a, job)
        out |= dict(tables=made, compiled=[dict(part=job, first=first, failed=failed)])
    elif base == 'grids': out['grids'] = on_grids(clock, a, job)
    elif base == 'layers': out['layers'] = [dict(part=job) | layer(clock, n) for n in a.sizes if n <= 4096]
    elif job == 'peers-layers': out['layers_beside'],versions,missing = layers_of_others(clock, a, job)
    elif job == 'peers-grids': out['beside'],versions,missing = on_grids_of_others(clock, a, job)
    else: out['tables'] = list(tables(cs, clock, a, job, a.memory))
    torch.set_num_threads(1)
    quick = argparse.Namespace(**vars(a) | dict(seconds=a.seconds/4))
    if base in ('large', 'steady') and not a.only: out['sweep'] = list(sweep(cs, clock, quick, job, a.memory))
    if job in ('small', 'peers'):
        n = 2**16 if a.quick else 2**22
        others = [c for c in cs if c.by != 'Function']
        out['memory'] = [dict(part=job, size=n, rows=memory(others, clock, n))]
        out['operations'] = [dict(part=job, rows=operations(cs, clock))]
    if base == 'small' and not a.only:
        say(f'{job}: calls, terms, graphs')
        out['overhead'] = [dict(part=job, rows=overhead(cs, clock, a))]
        makers = ('ours', R.fourier_round),('loop', fourier_loop)
        fs = {f'{who} {n}': functools.partial(f, terms=n) for n in TERMS for who,f in makers}
        out['terms'] = [dict(part=job, size=2**16, rows=ratios(fs, clock, 2**16, torch.float32, a)[1])]
        annealed = [r for r in catalog if r.name in FIVE] if a.quick else catalog
        out['recompiles'] = [dict(part=job, rows=recompiles(clock, annealed))]
    out['parts'] = {job: header(a, time.perf_counter()-start, versions, missing)}
    return out

# --- results
def processor():
    try: return next(l.split(':')[1].strip() for l in open('/proc/cpuinfo') if l.startswith('model name'))
    except (OSError, StopIteration): return platform.processor() or platform.machine()

def header(a, took, versions, missing):
    date = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    h = dict(date=date, processor=processor(), cores=os.cpu_count(), torch=torch.__version__,
        python=platform.python_version(), memory=a.memory, threads=a.threads, seconds=round(took), quick=a.quick)
    if versions or missing: h |= dict(versions=versions, missing=missing)
    if a.device == 'cuda':
        src,dst = torch.empty(2, 2**28, device='cuda').unbind()                              # a GiB each way
        dst.copy_(src)
        t = Cuda()(lambda: dst.copy_(src), 20)
        h |= dict(device=torch.cuda.get_device_name(), cuda=torch.version.cuda, copy=exact(2*src.nbytes/t/1e9))
    return h

def merge(old, new):
    "`new` in the place of what the same jobs gave before."
    jobs = new['parts'].keys()
    out = {'parts': old.get('parts', {}) | new['parts']}
    for k in {**old, **new}:
        if k != 'parts': out[k] = [e for e in old.get(k, []) if e['part'] not in jobs] + new.get(k, [])
    return out

def dumps(data):
    "JSON with an entry to a line."
    def entry(v): return json.dumps(v, ensure_ascii=False)
    def body(v):
        if isinstance(v, dict): return '{\n' + ',\n'.join(f'{entry(k)}: {entry(w)}' for k,w in v.items()) + '\n}'
        return '[\n' + ',\n'.join(map(entry, v)) + '\n]'
    return '{\n' + ',\n'.join(f'{entry(k)}: {body(v)}' for k,v in data.items()) + '\n}\n'

def short(v): return f'{v:.0f}' if v >= 100 else f'{v:.1f}' if v >= 10 else f'{v:.2f}'
def show(q): return f'{short(q[1])} ({short(q[0])}–{short(q[2])})'
def power(n): return f'2^{int(math.log2(n))}' if n & (n-1) == 0 else str(n)
def grid(head, rows):
    lines = [head, ['---']*len(head), *rows]
    return '\n'.join('| ' + ' | '.join(map(str, l)) + ' |' for l in lines) + '\n'

def ordered(data):
    "Every candidate once: ours in the order of the catalog, each followed by those that do the same."
    names = {n['name']: n for n in data['names']}
    mine = [n for n in names.values() if n['by'] == 'ours']
    groups = {n['group']: i for i,n in reversed(list(enumerate(mine)))}
    return sorted(names.values(), key=lambda n: (groups.get(n['group'], math.inf), n['by'] != 'ours'))

def label(n):
    "Ours in bold, what is written here as code, and a package as it is called."
    code = f"`{n['name']}`"
    return f'**{code}**' if n['by'] == 'ours' else code if n['by'] in ('formula', 'torch') else n['name']

def find(data, **want):
    "The tables with these properties; a peer's own process is asked last, so ours come from the main one."
    found = [t for t in data.get('tables', []) if all(t[k] == v for k,v in want.items())]
    return sorted(found, key=lambda t: t['part'].startswith('peers'))

def cell(data, name, **want):
    return next((t['rows'][name] for t in find(data, **want) if name in t['rows'] and t['part'] != 'compile'), None)

def glance(data):
    "What the first table shows: steady memory if measured, the largest size."
    for m in ('cuda', 'steady', 'default'):
        want = dict(memory=m, dtype='float32', threads=1)
        sizes = [t['size'] for t in find(data, **want) if t['part'] in ('small', 'large', 'steady')]
        if sizes: return want | dict(size=max(sizes))

MEMORY = dict(default='default allocator', steady='steady memory', cuda='CUDA')
def title(t): return f"{t['dtype']}, {t['threads']} thread{'s'*(t['threads'] > 1)}, {MEMORY[t['memory']]}"

def two(r):
    "Forward / f+b, the medians; a ~ where the middle half is wider than a fifth of it."
    return ' / '.join(('~' if q[2]-q[0] > .2*q[1] else '') + short(q[1]) for q in r)

def machine(job, h):
    "When, where and for how long a part ran."
    processor = h.get('device', f"{h['processor']} ({h['cores']} cores)")
    version = h['torch'] + (f", CUDA {h['cuda']}" if 'cuda' in h else '')
    threads = ', '.join(map(str, h['threads']))
    return [job, h['date'], processor, version, h['python'], MEMORY[h['memory']], threads, f"{h['seconds']} s"]

def about(parts):
    "The machines, and the packages of the peers."
    out = []
    if any(h['quick'] for h in parts.values()):
        out.append('**A smoke run: it shows that the harness works, and nothing about speed.**\n')
    head = ['part', 'date', 'processor', 'torch', 'Python', 'memory', 'threads', 'took']
    out.append(grid(head, [machine(job, h) for job,h in parts.items()]))
    for h in [h for h in parts.values() if 'copy' in h][:1]:
        out.append(f"A copy of one GiB moves {short(h['copy'])} GB/s on {h['device']}, read and written.\n")
    for job,h in parts.items():
        versions,missing = h.get('versions'),h.get('missing')
        if job.endswith('steady'): continue
        if versions: out.append('Packages: ' + ', '.join(f'{k} {v}' for k,v in versions.items()) + '.\n')
        if missing: out.append('Not importable: ' + '; '.join(f'{k} ({v})' for k,v in missing.items()) + '.\n')
    return out

def first_table(data, names):
    "The largest size, with what compiling changes and what is kept in memory."
    at = glance(data)
    if not at: return []
    kept = {k: v for m in data.get('memory', []) for k,v in m['rows'].items()}
    fast = {k: r for t in find(data, part='compile', size=at['size']) for k,r in t['rows'].items()}
    rows = []
    for n in names:
        r,c,held = cell(data, n['name'], **at),fast.get(f"{n['name']}, compiled"),kept.get(n['name'])
        if not r: continue
        saved,_,peak = map(short, held) if held else ['']*3
        rows.append([label(n), n['by'], show(r[0]), show(r[1]), show(c[1]) if c else '', saved, peak])
    out = [f"## At {power(at['size'])} elements: {title(at)}\n"]
    if kept:
        sizes = ' and '.join(sorted({power(m['size']) for m in data['memory']}))
        out.append('Saved is what autograd keeps for backward; peak is the most that forward and backward hold at '
            f'once, results included. Both are in units of `x`, measured at {sizes}.\n')
    return [*out, grid(['estimator', 'by', 'forward', 'f+b', 'compiled, f+b', 'saved', 'peak'], rows)]

NOISE,RIGHT,HAND = 1.05,1.3,1.1     # medians differ by a twentieth from run to run; two goals
# More arithmetic than the line beside it, for numbers that the line gets wrong.
WHY = {
    'ratio_round': 'a slope at 0, at infinity and where `round(x)` is 0',
    'sign_ste': 'nan for nan',
    'clipped_sign': '1 for 0, and the sign of -0',
    'soft_round': '`alpha` from 0 to infinity, infinite values, and relative accuracy near integers',
    'logistic_round': '`beta` from 0 to infinity, infinite values, and relative accuracy near integers',
    'soft_round(alpha learns)': 'a gradient for `alpha` that does not cancel where `alpha` is large',
    'soft_round_inverse': 'the same digits for every `alpha`, infinite values',
    'soft_round_conditional_mean': 'the same digits for every `alpha`, infinite values',
    'sigmoid_round': 'the line overflows in two fifths of its cell',
    'sine_round': 'infinite and large values, and relative accuracy near integers, where the line cancels',
    'cosine_round': 'infinite and large values, and relative accuracy near integers, where the line cancels',
    'fourier_round': 'infinite and large values, whose sine has no digits left',
    'fourier_round(terms=10)': 'infinite and large values, whose sine has no digits left',
    'cubic_round': 'infinity, where the line is nan',
    'ramp_round': 'infinity, and each cell as the first',
    'round_ste(step=.1)': 'values that the division overflows, or that a division and a product move',
    'decimal_ste': "decimals exactly rounded, which torch's own are not",
    'diff_round': 'infinity, and decimals exactly rounded',
    'uniform_noise': 'noise whose mean is 0 in bfloat16, where that of the line is -.002',
    'torch.round': 'a gradient that is not 0',
    'stochastic_round': 'large values, whose sum with a number below 1 is rounded before the floor, and -0',
    'normalize_grad': 'gradients of nan, infinity and below the smallest normal number',
    'fake_quantize': "a choice of gradient, learned ends, blocks; torch's is one operation",
}

def comparisons(data):
    """Ours over each other way in the same table: with backward, forward if only values agree, both of a Function.
    Each as `(name, kind of code, place, ratio)`."""
    names = {n['name']: n for n in data['names']}
    for t in data.get('tables', []):
        for k,r in t['rows'].items():
            code = ', compiled' if k.endswith(', compiled') else ''
            n = names.get(k.removesuffix(code))
            mine = n and n['by'] != 'ours' and t['rows'].get(n['group'] + code)
            if not mine or t['part'] == 'compile' and not code: continue
            asked = (0, 1) if n['by'] == 'Function' else (0,) if n['same'] == 'value' else (1,)
            for i in asked:
                place = f"{power(t['size'])}, {title(t)}, {('forward', 'f+b')[i]}"
                yield n,code[2:] or 'eager',place,mine[i][1]/r[i][1]

def behind(data):
    "`(number of comparisons, rows)`: where ours takes longer, pair by pair, what for, and whether it may."
    found,total = {},0
    started = {k: v for o in data.get('operations', []) for k,v in o['rows'].items()}
    for n,code,place,ratio in comparisons(data):
        by_hand = n['by'] == 'Function'
        total += 1
        if ratio <= (HAND if by_hand else NOISE): continue
        lost = found.setdefault((n['name'], code), dict(n=n, ratios=[]))
        lost['ratios'].append((ratio, place))
    worst = sorted(found.items(), key=lambda pair: -max(pair[1]['ratios'])[0])
    return total,[_lost(v['n'], code, v['ratios'], started) for (_,code),v in worst]

def _lost(n, code, ratios, started):
    worst,place = max(ratios)
    pair = [started.get(k) for k in (n['group'], n['name'])]
    counts = ' for '.join('{} + {}'.format(*p) for p in pair) if all(pair) and code == 'eager' else ''
    why = '' if n['by'] == 'Function' else WHY.get(n['name']) or WHY.get(n['group'], '')
    goal = 'kept' if why and worst <= RIGHT else 'missed'
    return [f"`{n['group']}`", label(n), code, len(ratios), short(worst), place, counts, why, goal]

def behind_table(data):
    total,rows = behind(data)
    if not rows: return []
    lost = sum(r[3] for r in rows)
    head = 'ours', 'beside', 'code', 'times', 'worst', 'where', 'operations', 'what the difference does', 'goal'
    return ['## Where ours takes longer\n', f'In {lost} of {total} comparisons of one table ours takes more than '
        f'{NOISE} of the time, or than {HAND} of a plain `autograd.Function` of the same formulas. The goal is never '
        f'to, except {RIGHT} where more arithmetic gets numbers right that the other gets wrong. *Operations* are '
        'those of torch that move numbers, forward + backward, ours for theirs.\n',
        grid(head, rows)]

def all_sizes(data, names):
    "A table for each kind of memory, dtype and number of threads."
    out = ['## All sizes\n\nForward / f+b, medians. A ~ marks a middle half wider than a fifth of its median.\n']
    kinds = {(t['memory'], t['dtype'], t['threads']): t for t in data.get('tables', []) if t['part'] != 'compile'}
    for (m,d,th),t in kinds.items():
        want = dict(memory=m, dtype=d, threads=th)
        found = [u for u in find(data, **want) if u['part'] != 'compile']
        sizes = sorted({u['size'] for u in found})
        def entry(n, s):
            r = cell(data, n['name'], size=s, **want)
            return two(r) if r else ''
        rows = [[label(n), *(entry(n, s) for s in sizes)] for n in names]
        clones = [next(u['clone'] for u in found if u['size'] == s) for s in sizes]
        top = [['clone, µs', *(short(c*1e6) for c in clones)]]
        roof = data['parts'][t['part']].get('copy')
        if roof:
            moved = [2*s*getattr(torch, d).itemsize for s in sizes]
            top.append(['clone, share of the roofline', *(f'{b/c/roof/1e9:.0%}' for b,c in zip(moved, clones))])
        filled = [r for r in rows if any(r[1:])]
        out += [f'### {title(t)}\n', grid(['estimator', *map(power, sizes)], top + filled)]
    return out

def compile_table(data, names):
    made = find(data, part='compile')
    if not made: return []
    first,failed = (data['compiled'][0][k] for k in ('first', 'failed'))
    head = ['estimator', *(f'{power(t["size"])} {w}' for t in made for w in ('eager', 'compiled')), 'first call, s']
    def row(n):
        pairs = [two(t['rows'][n['name'] + w]) for t in made for w in ('', ', compiled')]
        return [label(n), *pairs, short(first[n['name']])]
    out = ['## torch.compile\n', 'Inductor, `fullgraph`, one graph for all sizes, float32, 1 thread. Forward / f+b, '
        'eager and compiled in one process; seconds until the first gradient, without a cache.\n']
    out.append(grid(head, [row(n) for n in names if n['name'] in first]))
    if failed: out.append('Does not compile: ' + '; '.join(f'{k} ({v})' for k,v in failed.items()) + '.\n')
    return out

def grid_rows(rows):
    "A line for each grid: eager, and compiled if it was."
    def line(k):
        compiled = rows.get(f'{k}, compiled')
        return [k, two(rows[k]), two(compiled) if compiled else '']
    return [line(k) for k in rows if not k.endswith(', compiled')]

def beside(t):
    "What other packages take on the grids of ours."
    def times(k, i): return short(t['rows'][k][i][1]/t['rows'][t['groups'][k]][i][1])
    rows = [[f'**`{k}`**', '', two(r), '', ''] for k,r in t['rows'].items() if k not in t['groups']]
    for k,g in t['groups'].items():
        learns = t['learns'][k]
        own = two(t['rows'][k] if learns else t['rows'][k][:1])
        rows.append([k, f'`{g}`', own, times(k, 0), times(k, 1) if learns else ''])
    return ['## Grids beside other packages\n', f'Forward / f+b at {power(t["size"])} elements, float32, 1 thread, '
        f'{MEMORY[t["memory"]]}, all eager in one process. The last columns are their time in units of ours, '
        'and of those without a gradient there is forward alone.\n',
        grid(['function', 'does as', 'forward / f+b', 'theirs/ours, forward', 'theirs/ours, f+b'], rows)]

def small_tables(data):
    "One call, terms, sizes, and graphs."
    out = []
    for o in data.get('overhead', []):
        def called(k): return k if k.startswith(('torch', 'Function')) else f'`{k}`'
        rows = [[called(k), short(f), short(b)] for k,(f,b) in o['rows'].items()]
        out += ['## One call\n', 'Microseconds at 2^10 elements, float32, 1 thread, arithmetic included.\n',
            grid(['call', 'forward', 'f+b'], rows)]
    for t in data.get('terms', []):
        rows = [[n, two(t['rows'][f'ours {n}']), two(t['rows'][f'loop {n}'])] for n in TERMS]
        out += ['## Terms of a Fourier series\n',
            f'Forward / f+b at {power(t["size"])} elements, float32, 1 thread.\n',
            grid(['terms', '`fourier_round`', 'loop of sines'], rows)]
    for m in sorted({s['memory'] for s in data.get('sweep', [])}):
        ss = [s for s in data['sweep'] if s['memory'] == m]
        rows = [['clone, µs', *(short(s['clone']*1e6) for s in ss)], [OLD, *(show(s['rows'][OLD][0]) for s in ss)]]
        rows += [[f'`{k}`', *(two(s['rows'][k]) for s in ss)] for k in FIVE]
        out += [f'## Size: {MEMORY[m]}\n', 'Forward / f+b, float32, 1 thread. The first row is a copy in microseconds; '
            f'`{OLD}` shows what new memory costs a clone.\n', grid(['', *(power(s['size']) for s in ss)], rows)]
    for t in data.get('grids', []):
        out += ['## Grids\n', f'Forward / f+b at {power(t["size"])} elements, float32, 1 thread, '
            f'{MEMORY[t["memory"]]}, eager and compiled in one process.\n',
            grid(['grid', 'eager', 'compiled'], grid_rows(t['rows']))]
    for t in data.get('beside', []): out += beside(t)
    for t in data.get('layers', []):
        out += ['## Codes of a layer\n', f"`gptq` on {t['size']} × {t['size']} weights with {t['inputs']} inputs "
            f"at 4 bits takes {t['seconds']:.1f} s on one thread. With the Gram matrix that is {t['ratio']:.2f} times "
            'as long as the same products, factorization and triangular solve in float64 without rounding; '
            f"without the Gram matrix {t['alone']:.2f} times.\n"]
    for t in data.get('layers_beside', []):
        rows = [[k, *map(short, v)] for k,v in t['rows'].items()]
        out += ['## Codes of a layer beside other packages\n', f"Layers of {t['size']} × {t['size']} with "
            f"{t['inputs']} inputs, the same weights, inputs and grid, 1 thread. "
            'Ours is `gptq` and `coordinate_descent` behind it.\n',
            grid(['package', 'error over ours', 'time over ours', 'time over `gptq` alone'], rows)]
    for r in data.get('recompiles', []):
        rows = [[f'`{k}`', *v] for k,v in r['rows'].items()]
        out += ['## Annealing a compiled function\n', 'Graphs compiled while the first knob takes six values.\n',
            grid(['estimator', 'as a Python float', 'as a 0-d tensor', 'as a buffer'], rows)]
    return out

def report(data):
    "results.json as Markdown."
    names = [n for n in ordered(data) if n['by'] != 'Function']
    out = ['# Benchmarks\n', 'Written by `bench/bench.py` from `results.json`. A ratio of 1 is the least time any pair '
        'of passes over memory could take: forward is divided by `x.clone()`, forward and backward (f+b) by a clone '
        'and a multiplication. Medians, with the middle half in brackets. Bold rows are ours at their defaults; those '
        'below each do the same maths.\n']
    out += about(data['parts']) + first_table(data, names) + behind_table(data)
    out += all_sizes(data, names) + compile_table(data, names) + small_tables(data)
    drift = twice(data)
    if drift:
        out += ['## Twice\n', f"Ours beside the peers were measured in the peers' Python too, {len(drift)} figures: "
            f'the two medians differ by {statistics.median(drift):.0%} in the middle and {max(drift):.0%} at most.\n']
    return '\n'.join(out)

def twice(data):
    "How far the medians of ours differ between the main process and that of the peers."
    out = []
    for t in data.get('tables', []):
        if not t['part'].startswith('peers'): continue
        for k,r in t['rows'].items():
            same = dict(memory=t['memory'], dtype=t['dtype'], threads=t['threads'], size=t['size'])
            main = [u for u in find(data, **same) if u['part'] not in (t['part'], 'compile')]
            here = [u['rows'][k] for u in main if k in u['rows']]
            out += [abs(math.log(a[1]/b[1])) for h in here[:1] for a,b in zip(h, r)]
    return out

# --- the command
def say(s): print(f'{time.strftime("%H:%M:%S")} {s}', flush=True)
def steady(job): return job in ('steady', 'compile', 'peers-steady')
def numbers(s): return [int(n) for n in s.split(',')]

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--part', choices=PARTS, nargs='+', default=list(PARTS), help='what to measure (default: all)')
    p.add_argument('--device', default='cpu', choices=('cpu', 'cuda'))
    p.add_argument('--sizes', type=numbers, help='elements, with commas; each part has its own')
    p.add_argument('--dtypes', type=lambda s: s.split(','), default=['float32', 'bfloat16'])
    p.add_argument('--threads', type=numbers, default=[1, 2])
    p.add_argument('--seconds', type=float, default=5., help='per table, where its rounds take less (default: 5)')
    p.add_argument('--least', type=int, default=4, help='rounds, half as many for bfloat16 and threads (default: 4)')
    p.add_argument('--only', default='', help='names that contain this: shown, not stored')
    p.add_argument('--quick', action='store_true', help='a smoke run on small tensors')
    p.add_argument('--out', type=Path, default=HERE,
        help='folder of results.json and RESULTS.md (default: that of this script)')
    p.add_argument('--job', help=argparse.SUPPRESS)              # one part, in this process
    a = p.parse_args(argv)
    if a.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('bench: torch finds no CUDA device here; run it where there is one, or without --device cuda')
    if a.device == 'cuda': a.threads = [1]                       # of the CPU that only launches
    if a.quick: a.seconds,a.least,a.sizes = .05,2,a.sizes or [1024, 2**14]
    if a.job:
        a.sizes = a.sizes or numbers(SIZES.get(a.job, LARGE))
        if a.job in ('compile', 'grids', 'peers-grids', 'layers', 'peers-layers'): a.dtypes,a.threads = ['float32'],[1]
        new,stem = run(a.job, a),'-cuda'*(a.device == 'cuda')
        if a.only: return print(report(new))
        file = a.out/f'results{stem}.json'
        data = merge(json.loads(file.read_text('utf-8')) if file.exists() else {}, new)
        file.write_text(dumps(data), 'utf-8')
        (a.out/f'RESULTS{stem}.md').write_text(report(data), 'utf-8')
        total,rows = behind(new)
        missed = sum(r[-1] == 'missed' for r in rows)
        say(f'{a.job}: ours takes longer in {sum(r[3] for r in rows)} of {total} comparisons; {missed} of {len(rows)} '
            'pairs miss their goal')
        return
    for job in [j for part in a.part for j in PARTS[part]]:
        if a.device == 'cuda' and job not in ('small', 'large', 'compile'): continue
        python = PEERS if job.startswith('peers') else sys.executable
        if not Path(python).exists():
            say(f'{job}: left out, as there is no {os.path.relpath(python)}; `make peers` makes it')
            continue
        with tempfile.TemporaryDirectory() as cold:
            allocator = STEADY if steady(job) and a.device == 'cpu' else {}
            env = os.environ | allocator | dict(TORCHINDUCTOR_CACHE_DIR=cold)
            arguments = sys.argv[1:] if argv is None else argv
            r = subprocess.run([python, __file__, *arguments, '--job', job], env=env)
        if r.returncode: sys.exit(r.returncode)

if __name__ == '__main__': main()
