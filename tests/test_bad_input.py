"""Nonsense for every argument of functions, of methods that people call and of constructors, from the estimators on.

From a valid call one argument at a time is replaced by each value that is nonsense for it. The error is a TypeError,
ValueError or IndexError that begins with what was called, names the argument and says what came; nothing hangs,
nothing is taken; models and torch's random numbers are as before. A new public name belongs into the table of its
module."""
import atexit
import inspect
import re
import signal
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import NamedTuple
import numpy as np
import pytest
import torch
from estimators import look
from torch import nn
import shok_nb as R
from shok_nb import catalog, jpeg, plots
from shok_nb import nn as layers
from shok_nb.deployment import integer_layers

PLACES = {p.stem: '.'.join(p.relative_to(Path(R.__file__).parents[1]).with_suffix('').parts)
    for p in Path(R.__file__).parent.rglob('*.py')}
def module_of(name): return import_module(PLACES[name])

MOST = 5            # seconds

# --- the values, and for which kind of argument each is none of nonsense
def nonsense():
    "Name and value of each."
    ones = torch.ones(2, 3)
    return dict(none=None, word='abc', empty='', bytes=b'x', minus=-1, zero=0, half=1.5, nan=float('nan'),
        inf=float('inf'), huge=10**400, true=True, numpy_true=np.bool_(True), list=[], dict={}, tuple=(), set=set(),
        iterator=iter(()), object=object(), ints=torch.tensor([1, 2]), bools=ones > 0, complex=ones*1j,
        sparse=ones.to_sparse(), void=torch.empty(0), meta=ones.to('meta'), lazy=nn.UninitializedParameter(),
        array=np.ones(2), numpy_nan=np.float32('nan'), imaginary=1j, cls=int, arity=lambda: None, module=inspect,
        byte=ones.byte(), float8=ones.to(torch.float8_e4m3fn), csr=ones.to_sparse_csr(), two=torch.ones(2),
        qint=torch.quantize_per_tensor(ones, .1, 0, torch.qint8), lazy_buffer=nn.UninitializedBuffer(),
        nested=torch.nested.nested_tensor([ones, torch.ones(4, 3)]))

def kind(legal='', *more): return frozenset(legal.split()).union(*more)
NOTHING = kind()
NONE = kind('none')
TENSOR = kind('void meta two')               # empty in, empty out, and shapes alone
NUMBER = kind('minus zero half')
POSITIVE = kind('half')
SHARP = kind('zero half inf huge')           # the knob of a curve: infinity is its hard end
COUNT = kind('zero')
FLAG = kind('true numpy_true')
AXIS = kind('none minus zero list tuple')
SEED = kind('minus zero')
ELSEWHERE = kind('byte float8 qint nested')  # what any estimator refuses

class Call(NamedTuple):
    module:str      # of the package
    name:str        # what the error must begin with
    f:object        # called with keywords
    make:object     # makes the arguments of a valid call
    kinds:dict      # argument -> names of the values that are none of nonsense there; None: no value is
    member:str=''   # its method, if it is one

X = torch.tensor([[.2, -.7, 1.4], [2.2, .3, -1.1]])
W = X/2
GREY = torch.full((1, 1, 8, 8), 100.)
PICTURE = torch.full((1, 3, 8, 8), 100.)
PATTERN = jpeg.mark_pattern((1, 1, 8, 8), torch.Generator().manual_seed(0))

def network(): return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
def quantized():
    model = network()
    R.quantize_model_(model, R.Quantizer(4, axis=0, init='minmax'), R.Quantizer(8, signed=None, init='minmax'),
        calibrate=[X])
    return model.eval()
def rounded():
    model = network()
    R.nn.round_weights_(model, R.nn.RoundSTE(step=.25))
    return model
def soft(): return nn.Sequential(nn.Linear(3, 3), R.nn.SoftRound(5.))
def ready(): return R.Quantizer(4, init='minmax').calibrate_(X)
def integer():
    codes = torch.ones(2, 3, dtype=torch.int8)
    grid = torch.tensor(.5), torch.tensor(0).byte()
    return integer_layers.IntegerLayer(nn.Linear(3, 2), codes, torch.ones(2), None, *grid)
def scheduler(): return R.KnobScheduler(torch.tensor(0.), R.linear_schedule(transition_steps=9))

def method(name):
    def call(self, **kw): return getattr(self, name)(**kw)
    return call

def grid(**more): return dict(step=POSITIVE, offset=NUMBER) | more
def noisy(**more): return dict(generator=NONE, seed=NONE) | more
def groups(): return dict(axis=AXIS, block=NONE)

def of_learned():
    def v(): return R.adaround_init(W)
    yield 'rectified_sigmoid', dict(v=X, zeta=1.1, gamma=-.1), dict(v=TENSOR, zeta=POSITIVE, gamma=kind('minus'))
    yield 'adaround_init', dict(w=W, step=.5, offset=0.), grid(w=TENSOR)
    yield 'adaround', dict(w=W, v=v(), step=1., offset=0., hard=False), grid(w=TENSOR, v=NOTHING, hard=FLAG)
    yield 'adaround_penalty', dict(v=v(), beta=2.), dict(v=TENSOR, beta=kind('half inf huge'))
    yield 'adaround_beta', dict(count=1, steps=10, start=20., end=2., warmup=.2), dict(count=COUNT, steps=NOTHING,
        start=POSITIVE, end=POSITIVE, warmup=COUNT)
    yield 'flexround', dict(w=W, divisor=1., step=1., offset=0.), grid(w=TENSOR, divisor=POSITIVE)
    yield 'signround', dict(w=W, v=0., step=1., offset=0.), grid(w=TENSOR, v=NUMBER)
    yield 'signround_range', dict(w=W, alpha=1., beta=1., bits=4, axis=None, block=3), dict(w=kind('meta'),
        alpha=POSITIVE, beta=POSITIVE, bits=NOTHING, axis=NONE, block=NONE)
    yield 'signround_range', dict(w=W, axis=1), dict(axis=AXIS)

def of_fsq():
    more = dict(stages=2, symmetric=False, squash='tanh', gain=1., margin=1e-3, noise=.5, generator=None, seed=None,
        rounding=R.round_ste)
    yield 'fsq', dict(z=X, levels=[3, 4, 5], **more), noisy(z=kind('meta'), levels=NOTHING, stages=NOTHING,
        symmetric=FLAG, squash=NOTHING, gain=POSITIVE, margin=COUNT, noise=COUNT, rounding=NOTHING)
    yield 'fsq_index', dict(codes=X, levels=[3, 4, 5], stages=2, symmetric=False), dict(codes=kind('meta'),
        levels=NOTHING, stages=NOTHING, symmetric=FLAG)
    yield 'fsq_codes', dict(index=torch.tensor([1]), levels=[3, 4, 5], stages=2, symmetric=False,
        dtype=torch.float32), dict(index=kind('ints'), levels=NOTHING, stages=NOTHING, symmetric=FLAG, dtype=NOTHING)

CODEBOOK = torch.linspace(-1, 1, 12).view(4, 3)

def of_tokenizers():
    yield 'lfq', dict(z=X, spherical=False), dict(z=kind('meta'), spherical=FLAG)
    yield 'lfq_entropy', dict(z=X, spherical=False, temperature=1., group_size=2), dict(z=kind('meta'), spherical=FLAG,
        temperature=POSITIVE | kind('inf huge'), group_size=NOTHING)
    yield 'vq', dict(z=X, codebook=CODEBOOK, method='diveq', noise=.1, generator=None, seed=None), noisy(z=NOTHING,
        codebook=NOTHING, method=NOTHING, noise=COUNT | POSITIVE)
    yield 'vq_index', dict(z=X, codebook=CODEBOOK), dict(z=NOTHING, codebook=NOTHING)
    yield 'vq_loss', dict(z=X, codebook=CODEBOOK, commitment=.25), dict(z=NOTHING, codebook=NOTHING,
        commitment=COUNT | POSITIVE | kind('inf huge'))
    yield 'code_usage', dict(index=torch.tensor([1, 0]), size=4), dict(index=kind('ints byte'), size=NOTHING)

def of_floats():
    yield 'FloatFormat', dict(exponent=4, mantissa=3, bias=7, largest=240., infinities=True, nans=True,
        signed_zero=True), dict(exponent=NOTHING, mantissa=COUNT, bias=NONE | kind('minus zero'),
        largest=NONE | POSITIVE, infinities=FLAG, nans=FLAG, signed_zero=FLAG)
    yield 'ulp', dict(x=X, format='e4m3'), dict(x=TENSOR, format=NOTHING)
    yield 'float_round', dict(x=X, format='e4m3', rounding=R.round_ste, saturate=True, gradient='clipped'), dict(
        x=TENSOR, format=NOTHING, rounding=NOTHING, saturate=FLAG, gradient=NOTHING)

def of_fixed_point():
    given = dict(width=8, integer=3, signed=True, rounding='RND', overflow='SAT')
    kinds = dict(width=NOTHING, integer=kind('zero minus'), signed=FLAG, rounding=NOTHING, overflow=NOTHING)
    yield 'FixedFormat', given, kinds
    yield 'fixed_point', dict(x=X, gradient='clipped', **given), dict(x=TENSOR, gradient=NOTHING, **kinds)

MIXED = [partial(R.mx_quantize, format='e2m1', block=3, scale='up'),partial(R.int_quantize, bits=4, block=3)]

def of_blocks():
    rest = dict(rounding=R.round_ste, dim=-1, pad=False, gradient='clipped')
    kinds = dict(rounding=NOTHING, dim=kind('minus zero'), pad=FLAG, gradient=NOTHING)
    yield 'mx_quantize', dict(x=X, format='e2m1', block=3, scale='floor', **rest), dict(x=TENSOR, format=NOTHING,
        block=NOTHING, scale=NOTHING, **kinds)
    yield 'nvfp4_quantize', dict(x=X, tensor_scale=1., scale='up', top=4., square=False, **rest | dict(pad=True)), dict(
        x=TENSOR, tensor_scale=NONE | POSITIVE, scale=NOTHING, top=POSITIVE, square=FLAG, **kinds)

    del rest['gradient']
    yield 'int_quantize', dict(x=X, bits=4, block=3, scale_format=None, **rest), dict(x=TENSOR, bits=NOTHING,
        block=NOTHING, scale_format=NONE, **kinds)
    yield 'gguf_quantize', dict(x=torch.ones(2, 32), format='Q4_0', rounding=None, gradient='clipped'), dict(x=TENSOR,
        format=NOTHING, rounding=NONE, gradient=NOTHING)

def of_best():
    yield 'best_quantize', dict(x=X, grids=MIXED, rounding=R.round_ste, error='sizes'), dict(x=TENSOR, grids=NOTHING,
        rounding=NOTHING, error=NOTHING)

def of_codebooks():
    yield 'levels_round', dict(x=X, levels=[-1., 0., 1.], rounding=R.round_ste, axis=None, gradient='clipped'), dict(
        x=TENSOR, levels=kind('ints'), rounding=NOTHING, axis=NONE, gradient=NOTHING)
    yield 'levels_softmax', dict(x=X, levels=[-1., 0., 1.], temperature=.5, sharpness=1., hard=False, noise=True,
        generator=None, seed=None, axis=None), noisy(x=TENSOR, levels=kind('ints'),
        temperature=POSITIVE | COUNT | kind('inf huge'), sharpness=POSITIVE | COUNT | kind('huge'), hard=FLAG,
        noise=FLAG, axis=NONE)
    yield 'log2_round', dict(x=X, rounding=R.round_ste, exponents=(-4, 4), gradient='clipped'), dict(x=TENSOR,
        rounding=NOTHING, exponents=NOTHING, gradient=NOTHING)
    yield 'apot_levels', dict(bits=4, terms=1), dict(bits=NOTHING, terms=NOTHING)
    yield 'levels_round', dict(x=X, levels=[[-1., 0., 1.]]*3, axis=1), dict(axis=AXIS)

def of_gradient():
    yield 'scale_grad', dict(x=X, factor=.5), dict(x=TENSOR, factor=NUMBER)
    yield 'normalize_grad', dict(x=X, dim=1, eps=0., group=None), dict(x=kind('meta'), dim=AXIS, eps=POSITIVE | COUNT,
        group=NONE)
    yield 'quantize_grad', dict(x=X, bits=8, dim=1, generator=None, seed=None), noisy(x=kind('meta'),
        bits=NOTHING, dim=AXIS)

def of_bounds():
    ends = NUMBER | kind('inf huge none')
    yield 'clip', dict(x=X, lower=-1., upper=torch.tensor(1.), gradient='identity'), dict(x=TENSOR, lower=ends,
        upper=ends, gradient=NOTHING)
    for n in ('lower_bound', 'upper_bound'):
        yield n, dict(x=X, bound=.5, gradient='identity'), dict(x=TENSOR, bound=NUMBER | kind('inf huge'),
            gradient=NOTHING)

def of_neighbours():
    yield 'local_expectation', dict(f=torch.square, x=X, step=1., offset=0.), grid(f=NOTHING, x=TENSOR)
    yield 'reinmax_round', dict(x=X, generator=None, seed=None, step=1., offset=0.), noisy(**grid(x=TENSOR))
    yield 'sga_round', dict(x=X, temperature=.5, kind='atanh', neighbours=2, scale=1., generator=None, seed=None,
        step=1., offset=0.), noisy(**grid(x=TENSOR, temperature=POSITIVE, kind=NOTHING, neighbours=NOTHING,
            scale=POSITIVE))

def of_dither():
    plain = dict(x=X, generator=None, seed=None, step=1.)
    shaped = plain | dict(kind='kumaraswamy', shape=2., offset=0.)
    shapes = noisy(**grid(x=TENSOR, kind=NOTHING, shape=kind('half inf huge')))
    yield 'uniform_noise', plain | dict(dtype=None), noisy(x=TENSOR, step=POSITIVE, dtype=NONE)
    yield 'dither_round', shaped, shapes
    yield 'noisy_soft_round', shaped | dict(alpha=5.), shapes | dict(alpha=SHARP)
    yield 'expected_noise_grad', plain | dict(f=torch.square), noisy(f=NOTHING, x=TENSOR, step=POSITIVE)

def of_fake_quantize():
    yield 'fake_quantize', dict(x=X, scale=.1, zero_point=0, bits=8, signed=True, rounding=R.round_ste,
        gradient='saturated', reciprocal=False), dict(x=TENSOR, scale=POSITIVE, zero_point=NUMBER | kind('ints byte'),
        bits=NOTHING, signed=FLAG, rounding=NOTHING, gradient=NOTHING, reciprocal=FLAG)
    yield 'lsq', dict(x=X, scale=torch.tensor(.1), bits=4, signed=True, offset=0., rounding=R.round_ste), dict(x=TENSOR,
        scale=POSITIVE, bits=NOTHING, signed=FLAG, offset=NUMBER, rounding=NOTHING)
    yield 'lsq_init', dict(x=X, bits=8, signed=True, axis=None, block=3), dict(x=NOTHING, bits=NOTHING,
        signed=FLAG, axis=NONE, block=NONE)
    yield 'pact', dict(x=X, alpha=2., bits=4, rounding=R.round_ste), dict(x=TENSOR, alpha=POSITIVE, bits=NOTHING,
        rounding=NOTHING)
    yield 'dorefa', dict(x=X, bits=4), dict(x=TENSOR, bits=NOTHING)
    yield 'dorefa_weight', dict(w=W, bits=4), dict(w=kind('meta void'), bits=NOTHING)
    yield 'quantized_bits', dict(x=X, bits=8, integer=0, keep_negative=True, symmetric=False, rounding=R.round_ste,
        bound=None, gradient='ste'), dict(x=TENSOR, bound=NONE | kind('half inf huge'), bits=NOTHING,
        integer=kind('minus zero'), keep_negative=FLAG, symmetric=FLAG, rounding=NOTHING, gradient=NOTHING)
    yield 'quantize_between', dict(x=X, low=-1., high=2., bits=4, narrow=False, rounding=None), dict(x=TENSOR,
        low=NUMBER, high=NUMBER, bits=NOTHING, narrow=FLAG, rounding=NONE)
    yield 'alpha_blend', dict(x=X, hard=X, alpha=.5), dict(x=NOTHING, hard=NOTHING, alpha=COUNT)

def of_few_levels():
    kept = dict(axis=None, block=3),dict(axis=NONE, block=NONE)
    yield 'ternary_weight', dict(w=W, rule='twn', rounding=R.round_ste) | kept[0], dict(w=kind('meta void'),
        rule=NOTHING, rounding=NOTHING) | kept[1]
    yield 'xnor_weight', dict(w=W, sign=R.clipped_sign, backward='chain') | kept[0], dict(w=kind('meta void'),
        sign=NOTHING, backward=NOTHING) | kept[1]
    yield 'seq', dict(x=X, alpha=2., levels=4, rounding=R.round_ste), dict(x=TENSOR, alpha=POSITIVE, levels=NOTHING,
        rounding=NOTHING)

def of_calibrate():
    both = dict(x=X, bits=8, signed=True, zero_point=False, axis=None, block=3)
    legal = dict(x=NOTHING, bits=NOTHING, signed=FLAG, zero_point=FLAG, axis=NONE, block=NONE)
    yield 'minmax_init', both, legal
    yield 'percentile_init', both | dict(percentile=99.), legal | dict(percentile=NOTHING)
    yield 'mse_init', both | dict(search='grid'), legal | dict(search=NOTHING)
    yield 'sample_init', both, legal
    yield 'absmean_init', both, legal | dict(zero_point=NOTHING)
    yield 'minmax_init', both | dict(axis=1, block=None), dict(axis=AXIS)
    yield 'percentile_init', both | dict(axis=1, block=None), dict(axis=AXIS)
    yield 'mse_init', both | dict(axis=1, block=None), dict(axis=AXIS)
    yield 'sample_init', both | dict(axis=1, block=None), dict(axis=AXIS)
    yield 'absmean_init', both | dict(axis=1, block=None), dict(axis=AXIS)

def of_closest():
    both = dict(w=W, gram=torch.eye(3), scale=.5, zero_point=0, bits=4, signed=True, damping=.01)
    legal = dict(w=NOTHING, gram=NOTHING, scale=POSITIVE, zero_point=NUMBER | kind('byte'), bits=NOTHING, signed=FLAG,
        damping=NUMBER - kind('minus'))
    yield 'gptq', both | dict(ordered=True, beam=2), legal | dict(ordered=FLAG | NONE, beam=NOTHING)
    yield 'coordinate_descent', both | dict(start=W, sweeps=2), legal | dict(start=NONE, sweeps=COUNT)
    more = dict(damping=.01, ordered=True)
    yield 'column_scale', dict(gram=torch.eye(3), scale=.5, **more), dict(gram=NOTHING, scale=POSITIVE,
        damping=NUMBER - kind('minus'), ordered=FLAG)
    yield 'watersic', dict(w=torch.cat([W]*4), gram=torch.eye(3), bits=1.5, **more), dict(w=NOTHING, gram=NOTHING,
        bits=POSITIVE, damping=NUMBER - kind('minus'), ordered=FLAG)

def of_equalize():
    yield 'equalize_', lambda: dict(model=network(), example=X, relu6='relu'), dict(model=NOTHING,
        example=kind('sparse csr'), relu6=NOTHING)
    def valid(): return dict(model=nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), calibrate=[X], alpha=.5)
    yield 'smooth_', valid, dict(model=NOTHING, calibrate=NOTHING, alpha=POSITIVE | COUNT)

def of_rotate():
    yield 'rotate_', lambda: dict(model=network(), example=X, rotation='hadamard', seed=0), dict(model=NOTHING,
        example=kind('sparse csr'), rotation=kind('function'), seed=COUNT)

def of_relaxed():
    valid = dict(w=W, gram=torch.eye(3), scale=.5, zero_point=0, bits=4, signed=True, damping=.01, method='ste',
        steps=2, lr=.1, penalty=.1)
    yield 'learn_codes', valid, dict(w=NOTHING, gram=NOTHING, scale=POSITIVE, zero_point=NUMBER | kind('byte'),
        bits=NOTHING, signed=FLAG, damping=NUMBER - kind('minus'), method=NOTHING, steps=NOTHING, lr=POSITIVE | NONE,
        penalty=NUMBER - kind('minus'))

def of_reconstruct():
    def valid(): return dict(model=quantized(), calibrate=[X], method='gptq', teacher=network(), damping=.01, fits=1,
        blocks=['0'], steps=1, activations=False, resume=False, progress=print)
    yield 'reconstruct_', valid, dict(model=NOTHING, calibrate=NOTHING, method=NOTHING, teacher=NONE,
        damping=POSITIVE, fits=COUNT, blocks=NONE, steps=NOTHING, activations=FLAG, resume=FLAG,
        progress=NONE | kind('cls'))

def of_schedules():
    valid = dict(init_value=3., end_value=12., transition_steps=10, transition_begin=0)
    legal = dict(init_value=NUMBER, end_value=NUMBER, transition_steps=POSITIVE, transition_begin=NUMBER)
    for n in ('linear_schedule', 'cosine_schedule'): yield n, valid, legal
    yield 'exponential_schedule', valid, legal | dict(init_value=POSITIVE, end_value=POSITIVE)
    yield 'sigmoid_schedule', valid | dict(steepness=5.), legal | dict(steepness=POSITIVE)
    yield 'dead_share', dict(f=R.soft_round, threshold=1e-6), dict(f=NOTHING, threshold=SHARP)
    for n in ('lightning', 'transformers', 'fastai'): yield f'{n}_callback', dict(scheduler=scheduler()), dict(
        scheduler=NOTHING)

def of_design():
    yield 'integer_search', dict(cost=lambda x: x.square().sum(), start=torch.tensor([1., 2.]), lower=0., upper=3.,
        integers=None, inequalities=None, equalities=None, starts=2, steps=1, way='anneal', black_box=False, beam=2,
        tolerance=1e-6, seed=0, progress=None), dict(cost=NOTHING, start=kind('two ints array list tuple'),
        lower=NUMBER | kind('two ints array true numpy_true'), upper=kind('zero half two ints array'), integers=NONE,
        inequalities=NONE | kind('dict'), equalities=NONE | kind('dict'), starts=NOTHING, steps=COUNT, way=NOTHING,
        black_box=FLAG, beam=NOTHING, tolerance=kind('zero half'), seed=COUNT, progress=NONE)

def of_replace():
    valid = dict(rounding=R.round_ste, floor=None, ceil=None, trunc=None, sign=None)
    yield 'through_round', valid, dict(rounding=NOTHING, floor=NONE, ceil=NONE, trunc=NONE, sign=NONE)

def of_source_coding():
    yield 'ideal_code', dict(source='gaussian', price=.1), dict(source=NOTHING, price=POSITIVE)

def of_jpeg():
    yield 'jpeg_tables', dict(quality=75), dict(quality=NOTHING)
    yield 'pillow_jpeg', dict(images=PICTURE, quality=75, subsampling='4:2:0'), dict(images=NOTHING, quality=NOTHING,
        subsampling=NOTHING)
    yield 'jpeg', dict(images=PICTURE, quality=75, rounding=R.round_ste, subsampling='4:2:0', integers=None), dict(
        images=NOTHING, quality=NOTHING, rounding=NOTHING, subsampling=NOTHING, integers=NONE)
    yield 'psnr', dict(a=PICTURE, b=PICTURE+1), dict(a=NOTHING, b=NOTHING)
    yield 'mark_pattern', dict(shape=(1, 1, 8, 8), generator=None), dict(shape=NOTHING, generator=NONE)
    yield 'correlate', dict(images=GREY, pattern=PATTERN), dict(images=NOTHING, pattern=NOTHING)
    bits = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    yield 'embed', dict(images=GREY, bits=bits, pattern=PATTERN, channel=R.round_ste, limit=8., steps=1, lr=.5), dict(
        images=NOTHING, bits=NOTHING, pattern=NOTHING, channel=NOTHING, limit=POSITIVE, lr=POSITIVE,
        steps=kind('zero list tuple dict set iterator array'))

def of_plots():
    yield 'line_style', dict(i=1), dict(i=COUNT)
    yield 'figure', dict(rows=1, cols=1, size=(5., 3.)), dict(rows=NOTHING, cols=NOTHING, size=NOTHING)
    yield 'curves', dict(f=R.soft_round, domain=(-1., 1.), ax=None), dict(f=NOTHING, domain=NOTHING, ax=NONE)
    yield 'sweep', dict(f=R.soft_round, domain=(-1., 1.)), dict(f=NOTHING, domain=NOTHING)
    yield 'gallery', dict(rows=[catalog.row(R.round_ste)]), dict(rows=NOTHING)

def of_lab():
    asked = dict(loss=NOTHING, mean=NOTHING, seed=SEED, draws=NOTHING)
    valid = dict(loss=torch.square, mean=R.local_expectation, draws=10, seed=0)
    yield 'bias_variance', dict(f=R.soft_round, x=[.2, .7], **valid), dict(f=NOTHING,
        x=kind('array ints two nested'), **asked)
    yield 'plot_bias', dict(f=R.soft_round, domain=(0., 1.), ax=None, **valid), dict(f=NOTHING, domain=NOTHING, ax=NONE,
        **asked)
    more = dict(left=0, deployed=torch.round, dead_below=1e-6)
    yield 'report', dict(f=R.soft_round, **more, **valid), dict(f=NOTHING, left=kind('minus zero'), deployed=NOTHING,
        dead_below=SHARP, **asked)
    yield 'plot_report', dict(f=R.soft_round, ax=None, alpha=[1., 5.]), dict(f=NOTHING, ax=NONE)

def a_study():
    def run(f, rate, seeds, steps): return torch.full((len(seeds),), .5)
    def ends(seeds): return torch.ones(len(seeds)),torch.zeros(len(seeds))
    return module_of('harness').Study('task', 'A task', run, ends, module_of('harness').ways, {}, (.1,), 2,
        range(9), range(10, 20))

SCORED = dict(study='lattice', estimator='round_ste', way='as it is', score=.5, low=.4, high=.6, knob=None, value=None)

def of_harness():
    study,harness = a_study(),module_of('harness')
    way, = harness.ways(catalog.row(R.round_ste))
    paths = kind('word')                                  # a file that is not there holds no records
    yield 'ways', dict(row=catalog.row(R.soft_round)), dict(row=NOTHING)
    yield 'scores', dict(study=study, losses=torch.ones(3), seeds=range(3)), dict(study=NOTHING, losses=NOTHING,
        seeds=NOTHING)
    yield 'interval', dict(values=torch.ones(3), centre='mean', level=.9), dict(values=kind('ints'), centre=NOTHING,
        level=POSITIVE)
    yield 'search', dict(study=study, way=way, quick=True), dict(study=NOTHING, way=NOTHING, quick=FLAG)
    yield 'read_results', dict(study='lattice', results=None), dict(study=NONE | kind('word empty'),
        results=NONE | paths)
    yield 'read_heads', dict(results=None), dict(results=NONE | paths)
    yield 'write_results', lambda: dict(study=study, records=[], results=place('results.json')), dict(study=NOTHING,
        records=kind('list'), results=paths)
    yield 'run_study', dict(study=study, estimators=R.round_ste, results=None, quick=True, progress=None), dict(
        study=NOTHING, estimators=NONE | kind('list tuple'), results=NONE | paths, quick=FLAG, progress=NONE)

    yield 'plot_scores', dict(records=[SCORED], ax=None, diamonds=[]), dict(records=NOTHING, ax=NONE,
        diamonds=kind('list tuple'))

def of_gradient_quality():
    yield 'quality', dict(f=R.round_ste, seeds=range(3), draws=2), dict(f=NOTHING, seeds=NOTHING, draws=NOTHING)

def of_scores():
    records = [SCORED]
    for n in ('advice', 'advice_table', 'unneeded', 'results_table'):
        yield n, dict(records=records), dict(records=NONE | kind('list'))
    yield 'heat_map', dict(records=records, ax=None), dict(records=NONE, ax=NONE)

def of_ste():
    for n in ('floor_ste', 'ceil_ste', 'trunc_ste'):
        yield n, dict(x=X, step=1., offset=0.), grid(x=TENSOR)
    yield 'sign_ste', dict(x=X), dict(x=TENSOR)
    yield 'round_ste', dict(x=X, ties='even', step=1., offset=0.), grid(x=TENSOR, ties=NOTHING)

def rows():
    "Rows of the catalog that no table has; of most knobs only types are asked: test_extremes.py goes to their ends."
    kinds = {torch.Tensor: TENSOR, bool: FLAG, int: kind('minus zero'), float | torch.Tensor: NUMBER | SHARP}
    for r in catalog.catalog:
        module,ps = r.f.__module__.rpartition('.')[2],inspect.signature(r.f).parameters
        if module in ('ste', 'neighbours', 'dither'): continue
        valid = {n: X if p.annotation is torch.Tensor else p.default for n,p in ps.items()}
        legal = {n: noisy(**grid()).get(n, kinds.get(p.annotation)) for n,p in ps.items()}
        yield Call(module, r.name, r.f, lambda valid=valid: dict(valid), legal)

def of_core():
    yield 'straight_through', dict(hard=X, soft=X), dict(hard=kind('meta'), soft=kind('meta'))

def of_random():
    yield 'uniform_like', dict(x=X, generator=None, seed=None, draw=0), noisy(x=TENSOR, draw=COUNT)
    yield 'noise_like', dict(x=X, kind='uniform', shape=2., generator=None, seed=None), noisy(x=TENSOR, kind=NOTHING,
        shape=kind('half inf huge'))

def of_checks():
    def law(f, row, dtype): pass
    yield 'Law', dict(test=law, dtypes=(None,), applies=bool, detail=False), dict(test=NOTHING, dtypes=NOTHING,
        applies=NOTHING, detail=FLAG)
    yield 'slope', dict(f=R.soft_round, x=X), dict(f=NOTHING, x=TENSOR)
    yield 'same', dict(a=X, b=X), dict.fromkeys('ab', kind('ints bools complex void',
        ELSEWHERE))
    yield 'near', dict(a=X, b=X, ulps=8.), dict(a=kind('void'), b=kind('void'), ulps=SHARP)
    yield 'hard_row', dict(r=catalog.row(R.soft_round)), dict(r=NOTHING)
    yield 'check_estimator', dict(f=R.round_ste, row=None, compile=False, raises=True, skip='compiles'), dict(
        f=NOTHING, row=NONE, compile=FLAG, raises=FLAG, skip=kind('list tuple set dict iterator'))

def of_try_it():
    which,several = NOTHING,kind('ints void two', ELSEWHERE)
    yield 'explore', dict(left=R.round_ste, right=R.soft_round), dict(left=which, right=which)
    yield 'watch', dict(left=R.round_ste, right=R.soft_round), dict(left=which, right=which)
    yield 'tiles', dict(rows=catalog.catalog[:1]), dict(rows=NOTHING)
    yield 'descend', dict(f=R.round_ste, start=.3, lr=.1, target=1.3, steps=5, seed=0), dict(f=NOTHING,
        start=NUMBER | several, lr=NUMBER | several, target=NUMBER, steps=COUNT, seed=SEED)

def of_widgets():
    for n in ('player', 'tune'): yield n, dict(f=R.soft_round, hard=None, domain=(-1., 1.)), dict(f=NOTHING,
        hard=NONE | FLAG, domain=NONE)

def of_models():
    def valid(): return dict(model=network(), weights=4, activations=8, calibrate=[X], ends=8, skip=(), batches=None,
        kinds=None)
    yield 'quantize_model_', valid, dict(model=NOTHING, weights=NONE, activations=NONE, calibrate=NONE,
        ends=kind('none zero'), skip=kind('list tuple set dict iterator'), batches=NONE, kinds=kind('none dict'))
    yield 'parameter_groups', lambda: dict(model=network(), weight_decay=.01), dict(model=NOTHING,
        weight_decay=POSITIVE | COUNT)

def of_report(): yield 'LayerReport', dict(rows=[], note=''), dict(rows=kind('list'), note=kind('word empty'))

def of_integer_layers():
    codes = torch.tensor([1, -1, 7, -8], dtype=torch.int8)
    yield 'pack_int4', dict(codes=codes), dict(codes=kind('ints'))
    yield 'unpack_int4', dict(packed=integer_layers.pack_int4(codes), shape=(2, 2)), dict(packed=NOTHING, shape=NOTHING)

def of_deploy():
    yield 'deploy_', lambda: dict(model=quantized(), example=X, pack=True), dict(model=NOTHING,
        example=NOTHING, pack=FLAG)

@cache
def place(name):
    "A path in a folder that goes when Python ends."
    folder = mkdtemp()
    atexit.register(rmtree, folder)
    return Path(folder)/name

@cache
def written():
    "A file for the runtime, if it can be made."
    try: return R.to_onnx(network(), X, place('written.onnx'))
    except ImportError: return place('none.onnx')

def powers():
    "A deployed network whose scales are powers of two."
    model,q = nn.Sequential(nn.Linear(3, 2)),R.Quantizer(8, scale='po2')
    R.quantize_model_(model, q, q, calibrate=[X])
    R.deploy_(model.eval(), X)
    return model

def of_accumulators():
    def given(): return dict(model=powers(), format=R.FixedFormat(12, 4), after='sum')
    yield 'narrow_accumulators_', given, dict(model=NOTHING, format=NONE, after=NOTHING)
    yield 'accumulator_bits', lambda: dict(model=powers()), dict(model=NOTHING)

def of_hardware():
    yield 'to_qonnx', lambda: dict(model=quantized(), example=X, file=place('x.onnx')), dict(model=NOTHING,
        example=NOTHING, file=kind('word'))
    yield 'to_c', lambda: dict(model=powers(), example=X, file=place('x.h')), dict(model=NOTHING, example=NOTHING,
        file=NOTHING)

def of_runtime():
    yield 'to_onnx', lambda: dict(model=network(), example=X, file=place('x.onnx'), any_batch=True, dynamic=None), dict(
        model=NOTHING, example=NOTHING, file=kind('word'), any_batch=FLAG, dynamic=kind('none dict'))
    yield 'onnx_session', lambda: dict(file=written(), vnni=True, optimized=None), dict(file=kind('word'),
        vnni=FLAG | {'none'}, optimized=kind('none word'))

def four_bits():
    "A layer with weights in MXFP4."
    model = nn.Sequential(nn.Linear(32, 4))
    R.quantize_model_(model, 'mxfp4', None)
    return model

def of_files():
    yield 'save_gguf', lambda: dict(model=network(), file=place('x.gguf'), types='Q8_0', architecture='shok_nb',
        metadata=None), dict(model=kind('dict'), file=kind('word'), types=NOTHING, architecture=kind('word'),
        metadata=kind('none dict'))
    yield 'save_compressed', lambda: dict(model=four_bits(), folder=place('compressed'), config=None), dict(
        model=NOTHING, folder=kind('word'), config=kind('none dict'))

def saved():
    "A state and its file."
    state,file = dict(w=torch.ones(2, 32)),place('same.gguf')
    R.save_gguf(state, file)
    return dict(model=state, file=file)

def of_served(): yield 'same_grid', saved, dict(model=NOTHING, file=NOTHING)

def of_entropy():
    yield 'code_entropy', dict(codes=torch.tensor([[1, 0], [2, 2]]), axis=0), dict(
        codes=kind('zero minus two ints byte array list tuple void float8'), axis=AXIS)
    yield 'soft_entropy', dict(x=X, alpha=5., bits=4, signed=True, axis=None, step=1., offset=0.), grid(x=TENSOR,
        alpha=SHARP, bits=NOTHING, signed=FLAG, axis=AXIS)

def of_sizes():
    yield 'coded_sizes', lambda: dict(model=quantized()), dict(model=NOTHING)
    yield 'weight_entropy', lambda: dict(model=quantized(), alpha=5.), dict(model=NOTHING, alpha=SHARP)
    def loss(model, batch): return model(batch).square().sum()
    yield 'learn_bits_', lambda: dict(model=quantized(), calibrate=[X], loss=loss, bits=3., least=2, most=4,
        steps=1), dict(model=NOTHING, calibrate=NOTHING, loss=NOTHING, bits=POSITIVE, least=NOTHING, most=NOTHING,
        steps=NOTHING)

def of(module, name, valid, kinds, f=None, member=''):
    if f is None: f = method(member) if member else getattr(module_of(module), name)
    return Call(module, name, f, valid if callable(valid) else lambda: dict(valid), kinds, member)

def methods():
    "Constructors and methods, called as functions of `self`."
    yield of('quantizer', 'Quantizer', lambda: dict(bits=4, signed=True, zero_point=False, axis=0, block=None,
        learn=False, rounding=R.round_ste, init='mse', format=None, scale='po2'), dict(bits=NOTHING,
        signed=FLAG | NONE, zero_point=FLAG, axis=kind('none minus zero'), block=NONE, learn=FLAG, rounding=NOTHING,
        init=kind(), format=NONE, scale=NOTHING))
    for m in ('calibrate_', 'forward', 'to_codes'):
        yield of('quantizer', 'Quantizer', lambda: dict(self=ready(), x=X), dict(
            x=NOTHING if m == 'calibrate_' else TENSOR), member=m)
    yield of('schedules', 'KnobScheduler', lambda: dict(target=soft(), schedule=R.linear_schedule(transition_steps=9),
        knob='alpha'), dict(target=TENSOR, schedule=NOTHING, knob=NOTHING))
    yield of('schedules', 'KnobScheduler', lambda: dict(self=scheduler(), at=None), dict(at=kind('none zero')),
        member='step')
    yield of('schedules', 'KnobScheduler', lambda: dict(self=scheduler(), state=dict(last_epoch=3)), dict(
        state=NOTHING), member='load_state_dict')
    scale = torch.ones(2)
    yield of('integer_layers', 'Dequantize', lambda: dict(scale=scale, zero_point=None, axis=0, block=None, packed=None,
        dtype=torch.float32, levels=None, tensor_scale=None), dict(scale=TENSOR | ELSEWHERE,
        zero_point=kind('none ints'), axis=kind('none zero minus'), block=NONE, packed=kind('none list tuple'),
        dtype=NOTHING, levels=NONE, tensor_scale=NONE))
    yield of('integer_layers', 'Dequantize', lambda: dict(self=integer_layers.Dequantize(scale, axis=0),
        codes=torch.ones(2, 3).char()), dict(codes=kind('ints', ELSEWHERE)), member='forward')
    yield of('integer_layers', 'IntegerLayer', lambda: dict(layer=nn.Linear(3, 2), codes=torch.ones(2, 3).char(),
        scale=torch.ones(2), bias=None, input_scale=torch.tensor(.5), input_zero_point=torch.tensor(0).byte(),
        input_top=15), dict(layer=NOTHING, codes=NOTHING, scale=NOTHING, bias=NONE, input_scale=NOTHING,
        input_zero_point=NOTHING, input_top=NOTHING))
    yield of('integer_layers', 'IntegerLayer', lambda: dict(self=integer(), scale=torch.tensor(.5),
        zero_point=torch.tensor(0).byte(), top=15), dict(scale=NOTHING, zero_point=NOTHING, top=NOTHING),
        member='feeds')
    yield of('integer_layers', 'IntegerLayer', lambda: dict(self=integer(), input=X), dict(input=NOTHING),
        member='forward')
    token = dict(symmetric=FLAG, spherical=FLAG, features=NONE, stages=NOTHING, squash=NOTHING, method=NOTHING,
        group_size=NOTHING, gain=POSITIVE, margin=COUNT, noise=COUNT, temperature=SHARP - COUNT)
    def tokens(name, valid, **more):
        yield of('tokenizers', name, lambda: dict(valid), more | {k: token[k] for k in valid if k not in more})
        def made(): return getattr(R, name)(**{k: v for k,v in valid.items() if k != 'features'})
        for m in ('forward', 'encode', 'loss') + ('restart_',)*(name == 'VQ'):
            yield of('tokenizers', name, lambda: dict(self=made(), x=X), dict(
                x=kind('' if name == 'VQ' else 'meta')), member=m)
        yield of('tokenizers', name, lambda: dict(self=made(), index=torch.tensor([1])), dict(
            index=kind('ints byte')), member='decode')
    yield from tokens('FSQ', dict(levels=[3, 4, 5], features=6, stages=1, symmetric=False, squash='clamp', gain=1.,
        margin=.1, noise=.5), levels=NOTHING)
    yield from tokens('LFQ', dict(bits=3, features=6, spherical=True, temperature=1., group_size=2, diversity=1.,
        commitment=1.), bits=NOTHING, diversity=COUNT | POSITIVE, commitment=COUNT | POSITIVE)
    yield from tokens('VQ', dict(size=4, channels=3, features=6, method='ste', noise=.1, commitment=.2), size=NOTHING,
        channels=NOTHING, noise=COUNT | POSITIVE, commitment=COUNT | POSITIVE)
    yield of('nn', 'Rounding', lambda: dict(f=R.soft_round, deployed=R.round_ste, learnable=True, alpha=5., step=1.,
        offset=0.), dict(f=NOTHING, deployed=NONE, learnable=FLAG, **{n: legal
        | TENSOR | kind('nested') for n,legal in grid(alpha=SHARP).items()}))
    for n in layers.__all__:
        c = getattr(layers, n)
        if not inspect.isclass(c) or n == 'Rounding': continue
        yield of('nn', n, *layer_table(c))
        if not inspect.signature(c).parameters: continue
        yield of('nn', n, lambda c=c: dict(self=c(), x=X), dict(x=TENSOR), member='forward')
    yield of('nn', 'swap_rounding_', lambda: dict(model=soft(), old=R.nn.SoftRound, new=R.nn.RoundSTE()), dict(
        model=NOTHING, old=kind('cls arity'), new=NOTHING))
    yield of('rounded_weights', 'round_weights_', lambda: dict(model=network(), rounding=R.nn.RoundSTE(),
        layers=nn.Linear, name='weight'), dict(model=NOTHING, rounding=NOTHING, layers=NOTHING, name=NOTHING))
    for make in (rounded, quantized): yield of('rounded_weights', 'remove_rounding_',
        lambda make=make: dict(model=make(), leave_rounded=True), dict(model=NOTHING, leave_rounded=FLAG))

def layer_table(c):
    "A valid call of a layer, and the kinds of its knobs."
    numbers = grid(alpha=SHARP, beta=SHARP)
    kinds = dict(hard=FLAG, learnable=FLAG, ties=NOTHING, seed=NONE | kind('nested'), random_bits=NONE | kind('nested'))
    kinds |= {n: legal | TENSOR | kind('nested') for n,legal in numbers.items()}      # refused when it is called
    ps = inspect.signature(c).parameters
    return lambda: {n: p.default for n,p in ps.items()}, {n: kinds[n] for n in ps}

@cache
def calls():
    "The whole table."
    found = [*methods(), *rows()]
    for module in ('ste', 'floats', 'fixed_point', 'blocks', 'best', 'codebooks', 'files', 'served', 'entropy',
            'sizes', 'learned', 'few_levels', 'fsq', 'tokenizers', 'gradient', 'bounds', 'neighbours', 'dither',
            'fake_quantize', 'calibrate', 'schedules', 'replace', 'design', 'jpeg', 'plots', 'lab', 'checks',
            'try_it', 'widgets', 'models', 'report', 'integer_layers', 'deploy', 'accumulators', 'hardware',
            'runtime', 'closest', 'equalize', 'rotate', 'relaxed', 'reconstruct', 'harness', 'gradient_quality',
            'scores', 'source_coding', 'core', 'random'):
        for name,valid,kinds in globals()[f'of_{module}']():
            f = getattr(module_of(module), name)
            make = valid if callable(valid) else lambda valid=valid: dict(valid)
            found.append(Call(module, name, f, make, kinds))
    return tuple(found)

# --- one call
def look_of(v):
    "What must be as it was: of a model all that there is, of a tensor its values."
    if isinstance(v, torch.Tensor): return id(v),v.is_meta or f'{v.tolist()}'
    return look(v) if isinstance(v, nn.Module) else None

class TooLong(BaseException): pass

@contextmanager
def at_most(seconds):
    "Raises TooLong in a call that does not end."
    def stop(*_): raise TooLong
    was = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)

# Words before what came, or for it.
CAME = re.compile(r'\b(got|gave|shape|is on|has|names|empty|cannot be called|does not take|is not in the catalog'
    r'|no (law|quantized weight|layer|buffer))\b')
# Arguments and values for which torch's own error, or one without the name of the argument, is told.
OTHERWISE = {('axis', 'lazy'), ('axis', 'lazy_buffer'), ('axis', 'minus'), ('axis', 'zero'), ('levels', 'nested'),
    ('x', 'void'), ('values', 'meta'), ('codes', 'qint'), ('ax', 'nested'), ('new', 'cls'), ('example', 'nested'),
    ('target', 'qint')}

def says(error, call, arg):
    "Does an error begin with the function, name the argument and say what came?"
    name,_,rest = f'{error}'.partition(': ')
    named = re.search(rf'^\W*{arg}\b' if len(arg) == 1 else rf'\b{arg}\b', rest)
    return isinstance(error, (TypeError, ValueError, IndexError)) and name == call.name and named and CAME.search(rest)

def tried(call, arg, value, kw):
    "What is wrong with one call, or None."
    before,state = [look_of(v) for v in kw.values()],torch.get_rng_state()
    try:
        with at_most(MOST): call.f(**kw | {arg: value})
    except TooLong: return 'does not end'
    except Exception as e: error = e
    else: return 'is accepted'
    if before != [look_of(v) for v in kw.values()]: return 'changes what it was given'
    if not torch.equal(state, torch.get_rng_state()): return 'draws'
    if not says(error, call, arg): return f'{type(error).__name__}: {error}'

def fuzzed(call):
    "Every argument, every value that is nonsense there: argument, name of the value, what is wrong."
    kw = call.make()
    for arg,legal in call.kinds.items():
        for name,value in nonsense().items() if legal is not None else ():
            another = name == 'two' and getattr(kw.get(arg), 'shape', ())                 # a tensor of another shape
            if name in legal or another: continue
            wrong = tried(call, arg, value, kw)
            if wrong: yield arg,name,wrong
            if wrong: kw = call.make()                                                    # it may be another now

def title(call): return f'{call.module}.{call.name}' + f'.{call.member}'*bool(call.member)

# --- the tests
pytestmark = pytest.mark.xdist_group('players')     # in the process that computes all curves
each = pytest.mark.parametrize('c', calls(), ids=title)

@pytest.fixture(autouse=True)
def closed():
    yield
    plots.plt.close('all')

@each
def test_valid_calls(c):
    "What the nonsense is put into is a call that works; a package that is not installed may be missing."
    try: c.f(**c.make())
    except ImportError as e: assert str(e).startswith(f'{c.name} needs')

@pytest.mark.filterwarnings('ignore')
@each
def test_nonsense_is_refused(c):
    "In seconds, by its own name, and nothing has changed."
    bad = [(arg, v, wrong) for arg,v,wrong in fuzzed(c) if (arg, v) not in OTHERWISE or 'Error: ' not in wrong]
    assert not bad, bad

def public():
    "Module and name of every function and class that takes arguments, and what they are called."
    for m in sorted({c.module for c in calls() if '.engine.' not in PLACES[c.module]}):
        module = module_of(m)
        for n in module.__all__:
            f = getattr(module, n)
            record = hasattr(f, '__dataclass_fields__') or hasattr(f, '_fields')      # of results
            if inspect.isfunction(f) or inspect.isclass(f) and not record: yield m,n,f

def test_the_table_is_complete():
    kinds = {}
    for c in calls():
        if not c.member: kinds.setdefault((c.module, c.name), set()).update(c.kinds)
    for m,n,f in public():
        ps = inspect.signature(f).parameters.values()
        wanted = {p.name for p in ps if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        assert (m, n) in kinds or not wanted, f'{m}.{n} is missing in the table'
        assert wanted <= kinds.get((m, n), set()), f'{m}.{n}: {wanted-kinds[m, n]} missing'

def test_infinity_of_a_layer():
    "A number beyond all floats is infinite for a layer, as for its function."
    assert R.nn.SoftRound(10**400).alpha == float('inf')
    assert torch.equal(R.nn.SoftRound(10**400)(X), R.soft_round(X, 10**400))
