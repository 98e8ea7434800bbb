"""What torch has not promised is named on one page, and where it is missing nothing but speed is lost.

The package is imported once more beside the usual one, while a name of torch is away; then torch gets it
back, for it needs it too. Bounds: 1e-5 of the largest slope, as in `test_probes.py`, since plain
operations round differently from a Function."""
import importlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
import pytest
import torch
from estimators import X, back, batched, compiled, exported, near, older, side_by_side, slope, slopes
import shok_nb
from shok_nb.catalog import catalog
from shok_nb.engine import compat

ROOT = Path(__file__).parent.parent
is_tracing = torch._C._is_tracing
# Names of torch, and whether the package then knows nothing of what they tell.
AWAY = {
    '_C._are_functorch_transforms_active': lambda compat: compat.mode() == 'transform',
    'autograd.forward_ad._current_level': lambda compat: compat.mode() == 'transform',
    '_C._len_torch_dispatch_stack': lambda compat: compat.dispatch_modes is compat.unknown,
    '_C._current_graph_task_id': lambda compat: not compat.in_backward(),
    '_C._functorch.is_legacy_batchedtensor': lambda compat: compat.batched is compat.unknown,
    '_C._len_torch_function_stack': lambda compat: compat.function_modes is compat.unknown,
    '_C._is_tracing': lambda compat: compat._tracing is compat.is_tracing,
    'Tensor._make_wrapper_subclass': lambda compat: not compat.can_stand_in,
    '_C._autograd._top_saved_tensors_default_hooks': lambda compat: compat.saved_tensor_hooks(),
    'Tensor._is_zerotensor': lambda compat: compat.empty is compat.unknown,
    'utils._python_dispatch._disable_current_modes': lambda compat: compat._without_modes is None,
    'autograd.Function.apply': lambda compat: True}

def parent(name):
    "What holds that name of torch, and its last part."
    thing,*path,last = torch,*name.split('.')
    for part in path: thing = getattr(thing, part)
    return thing,last

@pytest.fixture
def without(again, monkeypatch):
    "`without(name)`: the package as it is where torch has no such name."
    def load(name):
        with monkeypatch.context() as m:
            if name == 'autograd.Function.apply':              # in C, as from torch 2.15 on; it cannot go altogether
                m.setattr(torch.autograd.Function, 'apply', vars(torch._C._FunctionBase)['apply'])
            elif name.startswith('Tensor.'): m.setattr(*parent(name), None)          # its parent, in C, keeps it
            else:
                if name == '_C._is_tracing': m.setattr(torch.jit, 'is_tracing', lambda: is_tracing())   # it asks this
                m.delattr(*parent(name), raising=False)
            return again(),importlib.import_module('shok_nb.engine.compat')
    return load

WAYS = {
    'eager': slope,
    'grad': lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    'vmap of grad': lambda f, x: torch.vmap(torch.func.grad(f))(x),
    'jvp': lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    'jit.trace': lambda f, x: slope(torch.jit.trace(lambda x: f(x), (x,)), x),
    'batched grads': batched}

@pytest.mark.slow
@pytest.mark.parametrize('name', AWAY)
def test_only_speed_is_lost(name, without):
    "Every row, with and without a grid: values to 8 ulp, slopes in eager mode and under transforms."
    rows = [(r.name, r.f, slope(r.f, X), r.linear, r.grid) for r in catalog if not r.random]
    R,compat = without(name)
    assert AWAY[name](compat)
    assert R.round_ste is not shok_nb.round_ste
    for fn,usual,want,linear,grid in rows:
        f = getattr(R, fn)
        assert near(f(X), usual(X)), fn
        if grid: assert near(f(X, step=.3, offset=.1), usual(X, step=.3, offset=.1)), fn
        assert near(torch.vmap(f)(X), usual(X)), fn
        for way,derive in WAYS.items():
            if way == 'jvp' and not linear:
                with pytest.raises(Exception): derive(f, X)
                continue
            got = derive(f, X)
            assert torch.allclose(got, want, atol=1e-5*want.abs().max(), rtol=0), (fn, way)

@pytest.mark.parametrize('name', AWAY)
def test_only_speed_is_lost_in_large_tensors(name, without):
    "Larger than a piece, with knobs and a step that learn, in half precision."
    def learn(f):
        x = torch.linspace(-4, 4, 3*70_000).view(3, -1).to(torch.bfloat16)
        return back(lambda x, a, s: f(x, a, step=s), x, torch.tensor(4.), torch.tensor([[.5], [1.], [2.]]))
    want = learn(shok_nb.soft_round)
    for got,w in zip(learn(without(name)[0].soft_round), want):
        assert got.dtype == w.dtype
        assert torch.allclose(got.double(), w.double(), rtol=2*torch.finfo(w.dtype).eps, atol=1e-2*w.abs().max())

ASKED = 'transforms', '_level', 'apply'                                         # by compiled code
COMPILED = [n for n in AWAY if any(part in n for part in ASKED)]

ARGS = dict(round_ste=lambda x: (x,), soft_round=lambda x: (x,), straight_through=lambda x: (x.detach().round(), x),
    scale_grad=lambda x: (x, 3.), ewgs_round=lambda x: (x,), normalize_grad=lambda x: (x,))
FUNCTIONS = 'ewgs_round','normalize_grad'                                       # of a class of their own

def calls(R, names): return [lambda x, fn=fn: getattr(R, fn)(*ARGS[fn](x)) for fn in names]

@pytest.mark.slow
@pytest.mark.parametrize('name', COMPILED)
def test_only_speed_is_lost_in_compiled_code(name, without):
    "Compiled as it is, and with a gradient inside. What torch gives no answer about is refused, not guessed."
    if 'apply' in name and older('2.13'): pytest.skip('Dynamo before torch 2.13 traces Function.apply by its name')
    R,_ = without(name)
    unsure = '_transforms' in name or '_level' in name
    plain = [fn for fn in ARGS if fn not in FUNCTIONS]
    def right(got, want): return all(torch.allclose(a, b, atol=1e-5*b.abs().max(), rtol=0) for a,b in zip(got, want))
    def each(names): return [slope(f, X) for f in calls(shok_nb, names)]
    if unsure:
        for f in calls(R, FUNCTIONS):
            with pytest.raises(Exception, match='compile'): slope(compiled(f), X)
    names = plain if unsure else [*ARGS]
    assert right(slopes(compiled(side_by_side(calls(R, names))), X, len(names)), each(names))
    torch._dynamo.reset()
    def loss(*xs): return sum(y.sum() for y in side_by_side(calls(R, plain))(*xs))
    inner = compiled(torch.func.grad(loss, tuple(range(len(plain)))))
    assert right(inner(*[X]*len(plain)), each(plain))

@pytest.mark.parametrize('name', AWAY)
def test_only_speed_is_lost_for_gradients(name, without):
    "Factors, maxima and random bits, eager and under transforms."
    R,_ = without(name)
    seed,g = torch.tensor(3),torch.linspace(-1, 2, len(X))
    for usual,f in [(getattr(p, n) for p in (shok_nb, R)) for n in ('scale_grad', 'normalize_grad', 'quantize_grad')]:
        kw = dict(scale_grad=dict(factor=3.), quantize_grad=dict(seed=seed)).get(f.__name__, {})
        f,want = partial(f, **kw),back(partial(usual, **kw), X, g=g)[1]
        assert torch.equal(back(f, X, g=g)[1], want), f.func.__name__
        assert torch.allclose(torch.func.vjp(f, X)[1](g)[0], want), f.func.__name__
    y,to_soft = back(partial(R.straight_through, X.round()), X)
    assert torch.equal(y, X.round()) and torch.equal(to_soft, torch.ones_like(X))

@pytest.mark.slow
@pytest.mark.parametrize('strict', [False, True], ids=['', 'strict'])
def test_export_before_torch_2_12(strict, monkeypatch):
    "Where every compilation says that it is an export, a strict one is taken for a compilation: values stay."
    monkeypatch.setattr(compat, '_early', True)
    def f(x): return shok_nb.round_ste(x) + shok_nb.soft_round(x, 3.)
    assert near(exported(f, X, strict=strict).module()(X), f(X))

def test_triton_without_the_question(monkeypatch):
    import torch.utils._triton
    assert isinstance(compat.has_triton(), bool)
    monkeypatch.delattr(torch.utils._triton, 'has_triton')
    assert not compat.has_triton()

def test_failed_compilation_without_the_name(monkeypatch):
    def broken(gm, inputs): raise ValueError('no code for this')
    for known in (True, False):
        if not known: monkeypatch.delattr(torch._dynamo.exc, 'TorchDynamoException')
        torch._dynamo.reset()
        with pytest.raises(compat.compile_error()): torch.compile(lambda x: x+1, backend=broken)(X)
    assert compat.compile_error() is RuntimeError

def test_stand_in():
    "The class that replay needs: shape, strides and dtype of another tensor, no data, and functions of torch pass by."
    assert compat.can_stand_in and compat.no_torch_function is torch._C._disabled_torch_function_impl
    seen = []
    class Blank(torch.Tensor):
        __torch_function__ = compat.no_torch_function
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return args[0]
    like = torch.ones(3, 4, dtype=torch.bfloat16).T
    t = compat.stand_in(Blank, like)
    assert (type(t), t.shape, t.stride(), t.dtype) == (Blank, like.shape, like.stride(), like.dtype)
    assert type(t+1) is Blank and seen == ['aten::add.Tensor']

def test_private_names_are_on_one_page():
    "No underscore of torch's in any other module; and what the page names is what is taken away above."
    names = r'\btorch(?:\.\w+)*\._[a-z]|\btorch(?:\.\w+)*\._C\b|_current_level|_make_wrapper_subclass|super\(Function'
    private = re.compile(names)
    for f in sorted((ROOT/'shok_nb').rglob('*.py')):
        if f.name in ('compat.py', '_modidx.py'): continue
        for i,line in enumerate(f.read_text('utf-8').splitlines(), 1):
            if 'TorchDispatchMode' in line: continue                                # of the recorder
            found = private.search(line.replace('torch.__version__', ''))
            assert not found, f'{f.name}:{i}: {found[0]} belongs on the page compat'
    page = (ROOT/'shok_nb'/'engine'/'compat.py').read_text('utf-8')
    named = set(re.findall(r"_private\('([\w.]+)'\)", page))
    elsewhere = {'_dynamo.exc.TorchDynamoException', '_inductor.inductor_prims.force_stride_order',
        'cpu.get_capabilities', 'cpu._is_vnni_supported'}
    assert named - set(AWAY) == elsewhere

def test_one_question():
    "How the code is run is asked on the floor; a page hands over its forms."
    for f in sorted((ROOT/'shok_nb').rglob('*.py')):
        if f.parent.name == 'engine' or f.name == '_modidx.py': continue
        found = re.search(r'\b(is_compiling|is_exporting|is_dynamo_compiling|exporting|mode)\(\)', f.read_text('utf-8'))
        assert not found, f'{f.name}: {found[0]}; use by_mode or either of parts'

def test_exporting():
    "True while torch.export writes a graph, and nowhere else."
    def f(x): return x + 1 if compat.exporting() else x - 1
    for elsewhere in (f, torch.vmap(f), compiled(f, 'eager')): assert torch.equal(elsewhere(X), X-1)
    for strict in (False, True): assert torch.equal(exported(f, X, strict=strict).module()(X), X+1)

def test_mode():
    "The first level of forward mode too, whose number is 0."
    seen,forward_ad = [],torch.autograd.forward_ad
    def f(x):
        seen.append(compat.mode())
        return x*1
    f(X)
    torch.vmap(f)(X)
    torch.func.jvp(f, (X,), (X,))
    torch.func.grad(lambda x: f(x).sum())(X)
    with forward_ad.dual_level(): f(forward_ad.make_dual(X, X))
    torch.jit.trace(f, X, check_trace=False)
    assert seen == ['eager', *['transform']*5]
    def g(x): return x+1 if compat.mode() == 'compile' else x-1
    assert torch.equal(compiled(g, 'eager')(X), X+1)

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.utils.backend_registration, '_setup_privateuseone_for_python_backend'),
    reason='this torch has no devices made of Python')
def test_a_device_without_float64():
    "In a process of its own, which would keep it: what `tests/far` has."
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', ROOT/'tests'/'far']
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0 and ' passed' in r.stdout, r.stdout[-4000:]+r.stderr[-1000:]
