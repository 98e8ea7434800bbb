"Bad input: the type of the error and a message that names the function, the argument, what came and what to do."
import itertools
import math
import numpy as np
import pytest
import torch
from estimators import floats_of, older, slope, variants
import shok_nb as R
from shok_nb.catalog import catalog
from shok_nb.engine.random import fold_in, uniform_like
from shok_nb.functions import PassRound, ScaleGrad, SoftRound

X = torch.zeros(2, 3)
BAD = [
    ([1.5], r'must be a torch\.Tensor, got list; use torch\.as_tensor'),
    (1.5, 'got float'),
    (None, 'got NoneType'),
    (np.ones(2), 'got ndarray'),
    (torch.arange(3), r'got torch\.int64; it is on the grid already; use (x|y|z)?.*float\(\)'),
    (torch.ones(2, dtype=torch.bool), r'got torch\.bool'),
    (torch.ones(2, dtype=torch.int8), r'got torch\.int8'),
    (torch.ones(2)*1j, r'got torch\.complex64; round .*\.real and .*\.imag'),
    (torch.ones(2).to(torch.float8_e4m3fn), r'got torch\.float8_e4m3fn; use .*\.float\(\)'),
    (torch.quantize_per_tensor(torch.ones(2), .1, 0, torch.qint8), r'got torch\.qint8; use .*\.dequantize\(\)'),
    (torch.eye(2).to_sparse(), r'must be dense, got layout torch\.sparse_coo; use .*\.to_dense\(\)'),
    (torch.eye(2).to_sparse_csr(), r'torch\.sparse_csr'),
    (torch.nested.nested_tensor([torch.ones(2, 3)]), r'must be dense or jagged, got .*; use layout=torch\.jagged'),
    (torch.nn.UninitializedBuffer(), r'must have a shape, got UninitializedBuffer'),
]

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('r, f', variants())
def test_input(r, f):
    for bad,message in BAD:
        with pytest.raises(TypeError, match=f'^{r.name}: .*{message}'): f(bad)

KNOBS = [
    (True, TypeError, 'must be a number or a torch.Tensor, got bool'),
    ('5', TypeError, 'got str'),
    (None, TypeError, 'got NoneType'),
    (1j, TypeError, 'got complex'),
    (math.nan, ValueError, 'got nan'),
    (torch.ones(2, dtype=torch.int64), TypeError, r'got torch\.int64'),
    (torch.ones(2), ValueError, r'of shape \(2,\) does not broadcast with x of shape \(2, 3\)'),
    (torch.ones(3, device='meta'), ValueError, 'is on meta and x on cpu; use'),
]

@pytest.mark.parametrize('r', [r for r in catalog if floats_of(r)], ids=lambda r: r.name)
def test_knobs_and_grid(r):
    for arg,(bad,error,message) in itertools.product(floats_of(r), KNOBS):
        with pytest.raises(error, match=f'^{r.name}: {arg} .*{message}'): r.f(X, **{arg: bad})

def test_ends_too_far_apart():
    "Their distance has to be a number, of float32 for half precision too."
    for dtype in (torch.float16, torch.float32):
        x = torch.ones(2, dtype=dtype)
        with pytest.raises(ValueError, match='^dsq_round: upper - lower must be at most 3.4e[+]38, got -3e'):
            R.dsq_round(x, lower=-3e38, upper=3e38)
    assert R.dsq_round(torch.ones(2), lower=-1e38, upper=2e38, levels=4).tolist() == [0., 0.]
    assert R.dsq_round(torch.ones(2).double(), lower=-3e38, upper=3e38, levels=7).tolist() == [0., 0.]

@pytest.mark.parametrize('r', [r for r in catalog if any(isinstance(k.default, int) for k in r.knobs)],
    ids=lambda r: r.name)
def test_whole_knobs(r):
    k = next(k for k in r.knobs if isinstance(k.default, int))
    for bad,got in ((-1000, '-1000'), (10**5000, 'an int of')):
        with pytest.raises(ValueError, match=f'^{r.name}: {k.name} must be .*got {got}'): r.f(X, **{k.name: bad})

@pytest.mark.parametrize('r', [r for r in catalog if r.grid], ids=lambda r: r.name)
def test_grid_range(r):
    "Beyond float32 a number is infinite or 0, for halves too; and 10**5000, which Python does not print, is inf."
    for x,step in itertools.product((X, X.half()), (0, -1., math.inf, 1e300, 1e-60, 10**5000, -10**5000)):
        with pytest.raises(ValueError, match=rf'^{r.name}: step must be in \(0, inf\), got'): r.f(x, step=step)
    for offset in (math.inf, 1e300, 10**5000, -10**5000):
        with pytest.raises(ValueError, match=rf'^{r.name}: offset must be in \(-inf, inf\), got'):
            r.f(X, offset=offset)

def test_own_messages():
    with pytest.raises(ValueError, match="^round_ste: ties must be one of even, away, zero, up, down, got 'half'"):
        R.round_ste(X, ties='half')
    unlike = r'^straight_through: hard is torch.float32 of shape \(2, 3\), soft is torch.float64'
    with pytest.raises(ValueError, match=unlike):
        R.straight_through(X, X.double())

@pytest.mark.parametrize('shape, n, view', [
    ((2, 3, 5, 5), 3, '1, -1, 1, 1'),
    ((2, 3, 5), 3, '1, -1, 1'),
    ((7, 4, 3, 3), 7, '-1, 1, 1, 1'),
    ((7, 4), 7, '-1, 1'),
])
def test_one_per_channel(shape, n, view):
    "Of an image, a sequence, the weights of a convolution and of a linear layer: the error says how, and that works."
    x,step = torch.zeros(shape),torch.full((n,), .5)
    for f,arg in ((R.round_ste, 'step'), (R.soft_round, 'alpha')):
        words = rf'^{f.__name__}: {arg} of shape \({n},\) does not .*; for one per channel use {arg}\.view\({view}\)$'
        with pytest.raises(ValueError, match=words): f(x, **{arg: step})
        assert f(x, **{arg: step.view([int(d) for d in view.split(',')])}).shape == shape
    with pytest.raises(ValueError, match=r'with x of shape \(.*\)$'): R.round_ste(x, step=torch.ones(11))

@pytest.mark.slow
def test_errors_inside_compile():
    "The same message, wherever it is raised."
    with pytest.raises(Exception, match='alpha must be in'):
        torch.compile(lambda x: R.soft_round(x, -1.), backend='eager')(X)

def test_numbers_of_any_kind():
    "Whatever Python or numpy calls a number is one."
    from fractions import Fraction
    for a in (5, np.float32(5), np.float64(5), np.int64(5), Fraction(5)):
        assert torch.equal(R.soft_round(X+.3, a), R.soft_round(X+.3, 5.))

SEED = torch.tensor(0)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('c', (PassRound, ScaleGrad, SoftRound), ids=lambda c: c.__name__)
def test_classes_of_shok_name_themselves(c):
    for bad,message in BAD:
        with pytest.raises(TypeError, match=f'^{c.__name__}: x .*{message}'): c.apply(bad)

@pytest.mark.parametrize('r, f', variants())
def test_symbolic_trace(r, f):
    with pytest.raises(TypeError, match=rf"^{r.name}: .* got Proxy; use torch.export, or torch.fx.wrap\('{r.name}'\)"):
        torch.fx.symbolic_trace(lambda x: f(x))

@pytest.mark.parametrize('r, f', variants() + [pytest.param(r, r.f, id=r.name) for r in catalog if r.random])
def test_jagged(r, f):
    """A jagged tensor is rounded as its values are. Seed 0: the bounds are a few units
    in the last place of numbers below 16."""
    for more in ((3,), ()):
        parts = [torch.randn(n, *more, generator=torch.Generator().manual_seed(n))*3 for n in (2, 4)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        for kw in ({}, dict(step=.5), dict(step=torch.tensor(.5, requires_grad=True))) if r.grid else ({},):
            y = f(x, **kw)
            g, = torch.autograd.grad(y.values().sum(), x)
            assert y.is_nested and g.is_nested
            if r.random: continue
            v = torch.cat(parts)
            assert torch.allclose(y.values(), f(v, **kw), atol=1e-5)
            assert torch.allclose(g.values(), slope(f, v, **kw), rtol=1e-4, atol=1e-4)

def test_jagged_in_a_quantizer():
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (2, 4)]
    x,q = torch.nested.nested_tensor(parts, layout=torch.jagged),R.Quantizer(4).calibrate_(torch.cat(parts))
    assert torch.equal(q(x).values(), q(torch.cat(parts)))

@pytest.mark.parametrize('f,arg', ((R.normalize_grad, 'dim'), (R.quantize_grad, 'dim'), (R.signround_range, 'axis')),
    ids=('normalize_grad', 'quantize_grad', 'signround_range'))
def test_dim(f, arg):
    name = f.__name__
    for bad in (True, '0', 1.5, torch.tensor(0), (0, 'a'), (1.,)):
        wanted = f'^{name}: {arg} must be an int or a tuple of them, got'
        with pytest.raises(TypeError, match=wanted): f(X, **{arg: bad})
    for bad in (2, -3, 10**400):
        wanted = f'^{name}: {arg} .* is out of range for x of shape'
        with pytest.raises(IndexError, match=wanted): f(X, **{arg: bad})
    def drawn(dim):
        torch.manual_seed(0)
        return f(X, **{arg: dim})
    torch.testing.assert_close(drawn(np.int32(1)), drawn(1), rtol=0, atol=0)

def test_dim_of_gradients():
    with pytest.raises(ValueError, match='^normalize_grad: dim names an axis twice, got'):
        R.normalize_grad(X, dim=(0, -2))
    assert torch.equal(*(R.quantize_grad(X, dim=d, seed=SEED) for d in (np.int64(1), 1)))

def test_fold_in():
    "Numbers of any integer dtype make the seeds that int64 makes; nothing else is a number."
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        made = fold_in(SEED, torch.arange(100).to(dtype))
        assert made.dtype == torch.int64 and torch.equal(made, fold_in(SEED, torch.arange(100)))
    assert fold_in(SEED, np.int32(5)) == fold_in(SEED, np.uint8(5)) == fold_in(SEED, 5) != fold_in(SEED, -5)
    for bad in (torch.tensor(1.), torch.tensor(1j), torch.tensor(True), torch.ones(2).long().to_sparse()):
        with pytest.raises(TypeError, match='^fold_in: n must be an int or a dense Tensor of integers, got torch'):
            fold_in(SEED, bad)
    for bad in (1.5, True, '1', None):
        with pytest.raises(TypeError, match='^fold_in: n must be an int, got'): fold_in(SEED, bad)
    for bad in (2**63, -2**63-1, 10**400):
        with pytest.raises(ValueError, match=r'^fold_in: n must be in \['): fold_in(SEED, bad)
    for bad in (None, 3, torch.tensor(3.)):
        with pytest.raises(TypeError, match='^fold_in: seed must be an int64 torch.Tensor, got'): fold_in(bad, 1)
    with pytest.raises(ValueError, match='^fold_in: seed must'): fold_in(torch.arange(2), 1)

def test_draw():
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=r'^uniform_like: draw must be in \[0, 4294967295\], got'):
            uniform_like(X, seed=SEED, draw=bad)
    assert torch.equal(uniform_like(X, seed=SEED, draw=np.int64(3)), uniform_like(X, seed=SEED, draw=3))

def test_codes():
    "Any integer dtype numbers codes; a number that is none of theirs is nan, whatever its dtype."
    i = torch.tensor([0, 5, 26, 27, 200])
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(R.fsq_codes(i.to(dtype), [3, 3, 3]).nan_to_num(9), R.fsq_codes(i, [3, 3, 3]).nan_to_num(9))
    assert torch.equal(R.fsq_codes(i, [3, 3, 3]).isnan().all(-1), i > 26)

def test_a_class_is_called_a_class():
    "Whoever forgets the parentheses reads so."
    with pytest.raises(TypeError, match='^quantize_model_: model must be .*, got the class Linear$'):
        R.quantize_model_(torch.nn.Linear)

def test_counts_of_numpy():
    assert torch.equal(R.sine_round(X+.3, np.int32(2)), R.sine_round(X+.3, 2))
    assert torch.equal(R.fake_quantize(X+.3, .1, 0, (np.int8(-8), np.int8(7))), R.fake_quantize(X+.3, .1, bits=4))

def test_star_import():
    """It brings functions and classes, and leaves the caller's `random` and `nn`
    alone; no module is hidden by a function."""
    from importlib import import_module
    from pathlib import Path
    from types import ModuleType
    given = {'random': 1, 'nn': 2}
    exec('from shok_nb import *', given)
    assert (given['random'], given['nn']) == (1, 2) and not [k for k,v in given.items() if isinstance(v, ModuleType)]
    assert len(set(R.__all__)) == len(R.__all__)
    assert {'round_ste', 'fsq', 'scale_grad', 'estimator'} <= set(given)
    for p in Path(R.__file__).parent.glob('[!_]*.py'):
        made = {}
        exec(f'import shok_nb.{p.stem} as m', made)
        module = import_module(f'shok_nb.{p.stem}')
        assert made['m'] is module and getattr(R, p.stem) is module and p.stem in dir(R), p.stem

def test_compiled_transforms_refuse():
    "What would be lost there without a word. Torch before 2.11 names the error and keeps the words."
    g = torch.compile(torch.func.grad(lambda x: R.normalize_grad(x).sum()), backend='eager', fullgraph=True)
    words = 'normalize_grad: cannot be compiled inside a torch.func transform'
    with pytest.raises(Exception, match='RuntimeError' if older('2.11') else words): g(X)

def test_a_model_that_is_checked_comes_back():
    m = torch.nn.ReLU()
    assert R.engine.arguments.check_model(m, 'f') is m
