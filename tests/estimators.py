"Every estimator the tests know, made from the catalog: a new row brings its own tests."
import functools
import inspect
import io
from contextlib import contextmanager
from functools import partial
import pytest
import torch
from shok_nb import round_ste
from shok_nb.catalog import catalog, row
from shok_nb.checks import FLOATS, near, same, slope  # noqa: F401, for the tests
from shok_nb.networks.layers import HOOKS


def older(version):
    "Is this torch older?"
    return torch.__version__ < version

HALVES = FLOATS[:2]

# Ties, integers and numbers between them, both zeros
X = torch.tensor([-2.5, -1.3, -1., -.3, -1e-3, -0., 0., .2, .5, .77, 1.7, 2., 300.25])

def slow_after(cases, quick=1):
    "As parameters: the first ones in `make test`, the others in the slow rest."
    late = [pytest.mark.slow]
    def many(c): return c if isinstance(c, tuple) else (c,)
    return [pytest.param(*many(c), marks=late*(i >= quick)) for i,c in enumerate(cases)]

def variants(keep=lambda r: True, only=lambda r, f: True):
    "`(row, f)` where `keep(row)` and `only(row, f)`: each function, `hard=True` of a smooth one, and the tie rules."
    out = []
    for r in catalog:
        if r.random or not keep(r): continue
        out.append(pytest.param(r, r.f, id=r.name))
        if r.smooth: out.append(pytest.param(r, partial(r.f, hard=True), id=f'{r.name}-hard'))
    r = row(round_ste)
    rules = r.choices[0].options[1:] if keep(r) else ()
    out += [pytest.param(r, partial(round_ste, ties=t), id=f'round_ste-{t}') for t in rules]
    return [p for p in out if only(*p.values)]

LAID = [r for r in catalog if 'step' in inspect.signature(r.f).parameters]

SEED = torch.tensor(2**40+7)

def seeded():
    "`(row, f)` of each random row, its noise fixed."
    return [pytest.param(r, partial(r.f, seed=SEED), id=r.name) for r in catalog if r.random]

def floats_of(r):
    "The names of a row's knobs that take floats, with those of its grid."
    return [k.name for k in r.knobs if not isinstance(k.default, int)] + ['step', 'offset']*r.grid

def with_knobs(keep):
    "`(row, f, knob)` for each variant and each knob where `keep(row, f, knob)`."
    out = []
    for p in variants():
        for k in p.values[0].knobs:
            if keep(*p.values, k): out.append(pytest.param(*p.values, k, id=f'{p.id}-{k.name}'))
    return out

def some_quickly(params, *names):
    "`params`, those of other names for `make test-all`."
    def late(p): return pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
    return [p if p.id in names else late(p) for p in params]

# --- groups, for tests that compile: eight in a graph cost little more than one
class Group(list):
    "A list of the values of parameters, with their names in `ids`."
    def __init__(self, params):
        super().__init__(p.values for p in params)
        self.ids = [p.id for p in params]

KINDS = ('round_ste', 'ewgs_round', 'soft_round', 'soft_round-hard', 'fourier_round', 'sigmoid_sum_round',
    'clipped_round', 'decimal_ste')

def batches(params=None, n=8, quick=None):
    """`params`, by default all variants, in groups of `n`; the first is of many kinds: a straight line, a second
    function, closed forms, series, sums, ends and decimals. Groups after the first `quick` are for `make test-all`."""
    params = sorted(params or variants(), key=lambda p: p.id.removesuffix('-plain') not in KINDS)
    out = []
    for i in range(0, len(params), n):
        group = Group(params[i:i+n])
        late = quick is not None and i >= n*quick
        out.append(pytest.param(group, id=f'{group.ids[0]}-and-{len(group)-1}-more', marks=[pytest.mark.slow]*late))
    return out

def grouped(params=None, n=8, quick=None):
    "Parametrize a test by `group`. One that fails is run again, item by item, so that the failure names its item."
    def wrap(test):
        @functools.wraps(test)
        def run(group, **kw):
            try: return test(group=group, **kw)
            except Exception:
                for item,name in zip(group, group.ids):
                    torch._dynamo.reset()
                    try: test(group=Group([pytest.param(*item, id=name)]), **kw)
                    except Exception as e: raise AssertionError(f'{name}, by itself: {type(e).__name__}: {e}') from e
                raise
        return pytest.mark.parametrize('group', batches(params, n, quick))(run)
    return wrap

def lumped(params, key, quick=None):
    """Parametrize a test by `group`: all cases for which `key` of their values is the same are one test, as each test
    costs pytest some milliseconds. Every case is run, and those that fail are named. Where `quick` names groups, the
    others are for `make test-all`."""
    groups = {}
    for p in params: groups.setdefault(key(*p.values), []).append(p)
    def wrap(test):
        def run(group):
            failed = {}
            for case,name in zip(group, group.ids, strict=True):
                torch.manual_seed(0)
                try: test(*case)
                except (Exception, pytest.fail.Exception) as e: failed[name] = e
            told = '\n'.join(f'{name}: {type(e).__name__}: {e}' for name,e in failed.items())
            if failed: raise AssertionError(f'{len(failed)} of {len(group)}:\n{told}') from next(iter(failed.values()))
        run.__name__,run.__doc__ = test.__name__,test.__doc__
        made = [pytest.param(Group(g), id=k) for k,g in groups.items()]
        return pytest.mark.parametrize('group', made if quick is None else some_quickly(made, *quick))(run)
    return wrap

def side_by_side(fs):
    "A function of a tensor for each of `fs`: outputs that share an input would hand each other 0*nan on the way back."
    return lambda *xs: tuple(f(x) for f,x in zip(fs, xs))

def leaves(x, n): return [x.detach().clone().requires_grad_() for _ in range(n)]

def back(f, *ts, g=None, **kw):
    "The value of `f(*ts)`, and what backward makes of `g`, by default of ones, for each of `ts`."
    given = [t.detach().requires_grad_() for t in ts]
    y = f(*given)
    return y.detach(),*torch.autograd.grad(y, given, torch.ones_like(y) if g is None else g, **kw)

def through_onnx(model, examples, xs):
    "What ONNX Runtime makes of `xs` by the graph that torch writes of `model`, from examples that decide nothing."
    pytest.importorskip('onnxscript')
    ort = pytest.importorskip('onnxruntime')
    program = torch.onnx.export(model, examples, dynamo=True, verbose=False)
    names = [i.name for i in program.model.graph.inputs]
    session = ort.InferenceSession(program.model_proto.SerializeToString())
    given = {n: x.numpy() for n,x in zip(names, xs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]

def kept(f):
    "The tensors that autograd keeps for backward while `f` runs."
    found = []
    def keep(t):
        found.append(t)
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t): f()
    return found

def slopes(g, x, n):
    "What backward multiplies by, for each of the `n` functions that stand side by side in `g`."
    xs = leaves(x, n)
    return torch.autograd.grad([y.sum() for y in g(*xs)], xs)

def on_grid(r, f): return r.on_grid or getattr(f, 'keywords', {}).get('hard', False)

def check_every_mode(f, *ts, rtol=1e-5, atol=1e-5):
    """Eager mode's gradients of `f(*ts)` come from `func.grad`, the compiled gradient, the gradient of compiled code
    and forward mode too; its value from a program that was exported."""
    close = partial(torch.allclose, rtol=rtol, atol=atol)
    def loss(*ts):
        y = f(*ts)
        return (y*torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum()
    def slopes(loss): return back(loss, *ts, materialize_grads=True)[1:]       # a knob may learn nothing
    want,g = slopes(loss),torch.func.grad(loss, tuple(range(len(ts))))
    for got in (g(*ts), torch.compile(g, backend='eager', fullgraph=True)(*ts),
            slopes(torch.compile(loss, backend='aot_eager', fullgraph=True))): assert all(map(close, got, want))
    for i in range(len(ts)):
        tangents = tuple(torch.ones_like(t) if i == j else torch.zeros_like(t) for j,t in enumerate(ts))
        assert close(torch.func.jvp(loss, ts, tangents)[1], want[i].sum())
    assert close(torch.export.export(Calls(f), ts).module()(*ts), f(*ts))

class Calls(torch.nn.Module):
    "A function as a module, which is what an exporter takes."
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, *xs): return self.f(*xs)

def exported(f, *xs, **kw):
    "The program that `torch.export` makes of a function."
    return torch.export.export(Calls(f), xs, **kw)

def compiled(f, backend='aot_eager', **kw): return torch.compile(f, fullgraph=True, backend=backend, **kw)

def batched(f, x):
    "The slope from a backward pass for all unit vectors at once."
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, torch.eye(len(x)), is_grads_batched=True)[0].diagonal()

INDUCTOR = pytest.param('inductor', marks=pytest.mark.slow)       # it takes a compiler of C++ seconds for each graph

def saved(thing, weights_only=True):
    "From a file."
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)

def equal(a, b): return all(torch.equal(s, t) for s,t in zip(a, b, strict=True))

def generator(seed=0): return torch.Generator().manual_seed(seed)

def block_rows(n, spread=3):
    "Rows of every size, with ties, zeros, and one of float16's subnormal scales."
    g = generator()
    x = torch.randn(200, n, generator=g)
    x[:60] *= torch.exp(spread*torch.randn(60, 1, generator=g))
    x[60:120] = (x[60:120]*8).round()/8
    x[120:140],x[140:142],x[142] = torch.randint(-3, 4, (20, n), generator=g)*.5,0.,1e-5*x[142]
    return x

def look(model):
    "Everything about a model that a call may change; values as words, in which nan is nan."
    modules = [(n, id(m), type(m), m.training, sorted(vars(m)), [*m._modules], [*m._parameters], [*m._buffers])
        for n,m in model.named_modules()]
    hooks = [[*getattr(m, k)] for m in model.modules() for k in (*HOOKS, '_forward_pre_hooks_with_kwargs')]
    tensors = [(n, id(t), t.requires_grad, t.dtype, t.is_meta or f'{t.tolist()}')
        for n,t in (*model.named_parameters(), *model.named_buffers())]
    return modules,hooks,tensors

@contextmanager
def refused(model, words, error=(TypeError, ValueError)):
    "What stands in it raises with these words, and leaves the model as it was."
    before = look(model)
    with pytest.raises(error, match=words): yield
    assert look(model) == before
