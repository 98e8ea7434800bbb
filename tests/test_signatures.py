"""The public names are one family: what CONTRIBUTING says of their arguments, of what they return and of what they
change."""
import inspect
import types
from collections import defaultdict
from typing import Union, get_args, get_origin
import pytest
import torch
from estimators import generator
from torch import nn
import shok_nb as R
from shok_nb.engine.report import LayerReport

EVERY = {n: getattr(R, n) for n in R.__all__} | {f'nn.{n}': getattr(R.nn, n) for n in R.nn.__all__}
EVERY = {n: inspect.signature(f) for n,f in EVERY.items() if callable(f)}
FUNCTIONS = {n: s for n,s in EVERY.items() if n.rpartition('.')[2][0].islower()}
def having(name): return {n for n,s in EVERY.items() if name in s.parameters}

# --- arguments
ALIKE = 'hard', 'step', 'offset', 'generator', 'lower', 'upper', 'signed', 'axis', 'pad', 'damping', 'ties'

def test_a_name_has_one_default():
    """Those that mean the same wherever they are; `damping` of a Fourier series is another, the ends of `clip` are
    those of `torch.clip`, and decimals have torch's own rule until another is named."""
    others = ('fourier_round', 'damping'),('clip', 'lower'),('clip', 'upper'),('decimal_ste', 'ties')
    found = defaultdict(set)
    for n,s in EVERY.items():
        for k in ALIKE:
            if k not in s.parameters or (n, k) in others: continue
            p = s.parameters[k]
            if p.default is not p.empty: found[k].add((p.default, p.kind.name))
    assert found.keys() == {*ALIKE}
    assert {k: v for k,v in found.items() if len(v) > 1 or {kind for _,kind in v} != {'KEYWORD_ONLY'}} == {}

def test_flags_come_by_name():
    "All but those of `FloatFormat` and `Recipe`, records."
    flags = {n for n,s in EVERY.items() for p in s.parameters.values()
        if isinstance(p.default, bool) and p.kind is not p.KEYWORD_ONLY}
    assert flags == {'FloatFormat', 'Recipe'}

def test_completion_shows_what_to_pass():
    "No class has the signature of its base, which takes whatever comes."
    assert EVERY['BatchedProduct'].parameters == {}
    whatever = {n for n,s in EVERY.items() if [*s.parameters] == ['args', 'kwargs']}
    assert not whatever

def test_defaults_of_gradient():
    "One, but for names of other libraries, with the rule that each has there."
    theirs = dict(fake_quantize='saturated', quantized_bits='ste')
    theirs |= dict.fromkeys(('lower_bound', 'upper_bound', 'clip'), 'identity_if_towards')
    for n in having('gradient'): assert EVERY[n].parameters['gradient'].default == theirs.get(n, 'clipped'), n

def test_numbers_come_two_ways():
    "Where a function draws, from a generator or by position."
    assert having('generator') <= having('seed')
    for n in having('generator'):
        names = [*EVERY[n].parameters]
        assert names.index('seed') == names.index('generator')+1, n

# --- what is kept and what is gone along
X = torch.randn(6, 64, generator=generator())*torch.logspace(0, 1, 6)[:, None]
LEVELS = torch.linspace(-3, 3, 6*7).reshape(7, 6).mT.contiguous()
def learned(x, **kw): return R.Quantizer(4, **kw).calibrate_(x)(x)

KEPT = dict(lsq_init=R.lsq_init, signround_range=R.signround_range, minmax_init=R.minmax_init,
    percentile_init=R.percentile_init, mse_init=R.mse_init, sample_init=R.sample_init, absmean_init=R.absmean_init,
    ternary_weight=R.ternary_weight, xnor_weight=R.xnor_weight, Quantizer=learned,
    code_entropy=lambda x, axis: R.code_entropy(x.round(), axis=axis), soft_entropy=R.soft_entropy)
ALONG = dict(mx_quantize=R.mx_quantize, int_quantize=R.int_quantize,
    nvfp4_quantize=lambda x, dim: R.nvfp4_quantize(x, tensor_scale=1., dim=dim))

def assert_same(a, b):
    for s,t in zip(*((v if isinstance(v, tuple) else (v,)) for v in (a, b)), strict=True): assert torch.equal(s, t)

def part(found, i): return tuple(t[i:i+1] for t in found) if isinstance(found, tuple) else found[i:i+1]

def test_all_with_an_axis_are_asked():
    assert having('axis') == {*KEPT, 'levels_round', 'levels_softmax'}
    assert having('dim') == {*ALONG, 'normalize_grad', 'quantize_grad'}
    assert not having('axis') & having('dim')

@pytest.mark.parametrize('name', KEPT)
def test_an_axis_is_kept(name):
    "Each index as if it were alone."
    f = KEPT[name]
    found = f(X, axis=0)
    for i in range(6): assert_same(part(found, i), f(X[i:i+1], axis=0))

def test_an_axis_of_levels_is_kept():
    y = R.levels_round(X, LEVELS, axis=0)
    for i in range(6): assert torch.equal(y[i], R.levels_round(X[i], LEVELS[i]))
    y = R.levels_softmax(X, LEVELS, .3, axis=0)
    for i in range(6): assert torch.equal(y[i], R.levels_softmax(X[i], LEVELS[i], .3))

@pytest.mark.parametrize('name', ALONG)
def test_a_dim_is_gone_along(name):
    "What lies beside it is as if alone, and one dim is as good as another."
    f = ALONG[name]
    y = f(X, dim=1)
    assert torch.equal(f(X.mT, dim=0), y.mT)
    for i in range(6): assert torch.equal(y[i:i+1], f(X[i:i+1], dim=1))

@pytest.mark.parametrize('f', [R.normalize_grad, R.quantize_grad], ids=lambda f: f.__name__)
def test_a_maximum_of_gradients_runs_along_dim(f):
    "A row of a gradient that is ten times larger leaves the other as it is, with any seed; along both dims not."
    kw = dict(bits=16, seed=torch.tensor(0)) if f is R.quantize_grad else {}
    def of(row, dim):
        x = torch.zeros(2, 64, requires_grad=True)
        return torch.autograd.grad(f(x, dim=dim, **kw), x, torch.stack([X[0], row]))[0][0]
    assert torch.equal(of(X[1], 1), of(10*X[1], 1)) and not torch.equal(of(X[1], (0, 1)), of(10*X[1], (0, 1)))

# --- what comes back
def kinds(annotation):
    "The members of a union, or itself."
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)

def test_one_kind_of_thing_comes_back():
    "No tensor that a flag makes a pair."
    for n,s in FUNCTIONS.items():
        pair = [k for k in kinds(s.return_annotation) if k is tuple or get_origin(k) is tuple]
        assert not pair or len(kinds(s.return_annotation)) == 1, n
    for f in (R.minmax_init, R.percentile_init, R.mse_init, R.sample_init):
        for zero_point in (False, True):
            scale,code = f(X, 4, zero_point=zero_point, axis=0)
            assert scale.shape == code.shape == (6, 1) and code.dtype == torch.int32
            error = R.fake_quantize(X, scale, code, 4)-X
            assert error.abs().amax() <= X.abs().amax()/4 and (zero_point or not code.any())

# --- what is changed
def test_a_model_comes_before_its_file():
    writers = {n: [*s.parameters] for n,s in FUNCTIONS.items() if n.startswith(('to_', 'save_'))}
    assert len(writers) == 5
    for n,names in (writers | dict(same_grid=[*FUNCTIONS['same_grid'].parameters])).items():
        place = next(k for k in names if k in ('file', 'folder'))
        assert names[0] == 'model' and names.index(place) == 1 + ('example' in names), n

def test_an_underscore_changes_its_argument():
    "Over a network it reports, in `nn` it returns what it changed."
    changing = {n: s.return_annotation for n,s in FUNCTIONS.items() if n.endswith('_')}
    for n,r in changing.items(): assert r is (nn.Module if n.startswith('nn.') else LayerReport), n
    takes = {n for n,s in FUNCTIONS.items() if next(iter(s.parameters.values())).annotation is nn.Module}
    asks = {'parameter_groups', 'to_c', 'to_onnx', 'to_qonnx', 'coded_sizes', 'weight_entropy',     # these only look
        'accumulator_bits', 'save_compressed'}
    assert takes == {*changing} | asks
