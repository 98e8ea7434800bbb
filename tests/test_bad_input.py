"""Nonsense for every argument of functions, of methods that people call and of constructors, from the estimators on.

From a valid call one argument at a time is replaced by each value that is nonsense for it. The error is a TypeError,
ValueError or IndexError that begins with what was called, names the argument and says what came; nothing hangs,
nothing is taken; models and torch's random numbers are as before. A new public name belongs into the table of its
module: test_bad_calls.py asks for it."""
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

# What is none of nonsense by an argument's name, where a row does not say it
BY_DEFAULT = dict(x=TENSOR, step=POSITIVE, offset=NUMBER)

def of(module, name, given, kinds={}, f=None, member=''):
    """A row: what a valid call is given beside its defaults, and the kinds of some arguments. Of the others nothing is
    legal, but a flag for a flag, None where that is the default, and what `BY_DEFAULT` says. Where `f` is given no
    other argument is asked."""
    make = given if callable(given) else lambda: dict(given)
    if f is not None: return Call(module, name, f, make, kinds, member)
    f = getattr(module_of(module), name)
    asked = {n: p for n,p in inspect.signature(getattr(f, member) if member else f).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n != 'self'}
    defaults = {n: p.default for n,p in asked.items() if p.default is not p.empty}
    def legal(n, p):
        return BY_DEFAULT.get(n, FLAG if p.annotation is bool else NOTHING) | (NONE if p.default is None else NOTHING)
    kinds = {n: legal(n, p) for n,p in asked.items()} | kinds
    return Call(module, name, method(member) if member else f, lambda: defaults | make(), kinds, member)

def of_learned():
    def v(): return R.adaround_init(W)
    yield 'rectified_sigmoid', dict(v=X), dict(v=TENSOR, zeta=POSITIVE, gamma=kind('minus'))
    yield 'adaround_init', dict(w=W, step=.5), dict(w=TENSOR)
    yield 'adaround', dict(w=W, v=v()), dict(w=TENSOR)
    yield 'adaround_penalty', dict(v=v()), dict(v=TENSOR, beta=kind('half inf huge'))
    yield 'adaround_beta', dict(count=1, steps=10), dict(count=COUNT, start=POSITIVE, end=POSITIVE, warmup=COUNT)
    yield 'flexround', dict(w=W, divisor=1.), dict(w=TENSOR, divisor=POSITIVE)
    yield 'signround', dict(w=W), dict(w=TENSOR, v=NUMBER)
    yield 'signround_range', dict(w=W, block=3), dict(w=kind('meta'), alpha=POSITIVE, beta=POSITIVE)
    yield 'signround_range', dict(w=W, axis=1), dict(axis=AXIS), R.signround_range

def of_fsq():
    yield 'fsq', dict(z=X, levels=[3, 4, 5], stages=2, noise=.5), dict(z=kind('meta'), gain=POSITIVE, margin=COUNT,
        noise=COUNT)
    yield 'fsq_index', dict(codes=X, levels=[3, 4, 5], stages=2), dict(codes=kind('meta'))
    yield 'fsq_codes', dict(index=torch.tensor([1]), levels=[3, 4, 5], stages=2), dict(index=kind('ints'))

CODEBOOK = torch.linspace(-1, 1, 12).view(4, 3)

def of_tokenizers():
    yield 'lfq', dict(z=X), dict(z=kind('meta'))
    yield 'lfq_entropy', dict(z=X, group_size=2), dict(z=kind('meta'), temperature=POSITIVE | kind('inf huge'))
    yield 'vq', dict(z=X, codebook=CODEBOOK, method='diveq', noise=.1), dict(noise=COUNT | POSITIVE)
    yield 'vq_index', dict(z=X, codebook=CODEBOOK)
    yield 'vq_loss', dict(z=X, codebook=CODEBOOK), dict(commitment=COUNT | POSITIVE | kind('inf huge'))
    yield 'code_usage', dict(index=torch.tensor([1, 0]), size=4), dict(index=kind('ints byte'))

def of_floats():
    yield 'FloatFormat', dict(exponent=4, mantissa=3, bias=7, largest=240.), dict(mantissa=COUNT,
        bias=NONE | kind('minus zero'), largest=NONE | POSITIVE)
    for n in ('ulp', 'float_round'): yield n, dict(x=X, format='e4m3')

def of_fixed_point():
    given = dict(width=8, integer=3, rounding='RND', overflow='SAT')
    yield 'FixedFormat', given, dict(integer=kind('zero minus'))
    yield 'fixed_point', dict(x=X, **given), dict(integer=kind('zero minus'))

MIXED = [partial(R.mx_quantize, format='e2m1', block=3, scale='up'),partial(R.int_quantize, bits=4, block=3)]

def of_blocks():
    dim = kind('minus zero')
    yield 'mx_quantize', dict(x=X, format='e2m1', block=3), dict(dim=dim)
    yield 'nvfp4_quantize', dict(x=X, tensor_scale=1., scale='up', top=4., pad=True), dict(dim=dim,
        tensor_scale=NONE | POSITIVE, top=POSITIVE)
    yield 'int_quantize', dict(x=X, block=3), dict(dim=dim)
    yield 'gguf_quantize', dict(x=torch.ones(2, 32))

def of_best(): yield 'best_quantize', dict(x=X, grids=MIXED, error='sizes')

def of_codebooks():
    yield 'levels_round', dict(x=X, levels=[-1., 0., 1.]), dict(levels=kind('ints'))
    yield 'levels_softmax', dict(x=X, levels=[-1., 0., 1.], temperature=.5, noise=True), dict(levels=kind('ints'),
        temperature=POSITIVE | COUNT | kind('inf huge'), sharpness=POSITIVE | COUNT | kind('huge'))
    yield 'log2_round', dict(x=X, exponents=(-4, 4))
    yield 'apot_levels', {}
    yield 'levels_round', dict(x=X, levels=[[-1., 0., 1.]]*3, axis=1), dict(axis=AXIS), R.levels_round

def of_gradient():
    yield 'scale_grad', dict(x=X, factor=.5), dict(factor=NUMBER)
    yield 'normalize_grad', dict(x=X, dim=1), dict(x=kind('meta'), dim=AXIS, eps=POSITIVE | COUNT)
    yield 'quantize_grad', dict(x=X, dim=1), dict(x=kind('meta'), dim=AXIS)

def of_bounds():
    ends = NUMBER | kind('inf huge')
    yield 'clip', dict(x=X, lower=-1., upper=torch.tensor(1.), gradient='identity'), dict(lower=ends | NONE,
        upper=ends | NONE)
    for n in ('lower_bound', 'upper_bound'): yield n, dict(x=X, bound=.5, gradient='identity'), dict(bound=ends)

def of_neighbours():
    yield 'local_expectation', dict(f=torch.square, x=X)
    yield 'reinmax_round', dict(x=X)
    yield 'sga_round', dict(x=X, scale=1.), dict(temperature=POSITIVE, scale=POSITIVE)

def of_dither():
    shape = kind('half inf huge')
    yield 'uniform_noise', dict(x=X)
    yield 'dither_round', dict(x=X, kind='kumaraswamy'), dict(shape=shape)
    yield 'noisy_soft_round', dict(x=X, kind='kumaraswamy'), dict(shape=shape, alpha=SHARP)
    yield 'expected_noise_grad', dict(f=torch.square, x=X)

def of_fake_quantize():
    yield 'fake_quantize', dict(x=X, scale=.1, zero_point=0), dict(scale=POSITIVE,
        zero_point=NUMBER | kind('ints byte'))
    yield 'lsq', dict(x=X, scale=torch.tensor(.1), bits=4), dict(scale=POSITIVE)
    yield 'lsq_init', dict(x=X, block=3), dict(x=NOTHING)
    yield 'pact', dict(x=X, alpha=2., bits=4), dict(alpha=POSITIVE)
    yield 'dorefa', dict(x=X, bits=4)
    yield 'dorefa_weight', dict(w=W, bits=4), dict(w=kind('meta void'))
    yield 'quantized_bits', dict(x=X), dict(bound=NONE | kind('half inf huge'), integer=kind('minus zero'))
    yield 'quantize_between', dict(x=X, low=-1., high=2., bits=4), dict(low=NUMBER, high=NUMBER)
    yield 'alpha_blend', dict(x=X, hard=X, alpha=.5), dict(x=NOTHING, alpha=COUNT)

def of_few_levels():
    yield 'ternary_weight', dict(w=W, block=3), dict(w=kind('meta void'))
    yield 'xnor_weight', dict(w=W, block=3, backward='chain'), dict(w=kind('meta void'))
    yield 'seq', dict(x=X, alpha=2.), dict(alpha=POSITIVE)

def of_calibrate():
    for n,more in (('minmax', {}), ('percentile', dict(percentile=99.)), ('mse', dict(search='grid')), ('sample', {}),
            ('absmean', dict(bits=8))):
        yield f'{n}_init', dict(x=X, block=3, **more), dict(x=NOTHING, zero_point=NOTHING if n == 'absmean' else FLAG)
        yield f'{n}_init', dict(x=X, axis=1, **more), dict(axis=AXIS), getattr(R, f'{n}_init')

def of_closest():
    damping = NUMBER - kind('minus')
    both = dict(w=W, gram=torch.eye(3), scale=.5, bits=4)
    legal = dict(scale=POSITIVE, zero_point=NUMBER | kind('byte'), damping=damping)
    yield 'gptq', both | dict(beam=2), legal | dict(ordered=FLAG | NONE)
    yield 'coordinate_descent', both | dict(start=W, sweeps=2), legal | dict(sweeps=COUNT)
    yield 'column_scale', dict(gram=torch.eye(3), scale=.5), dict(scale=POSITIVE, damping=damping)
    yield 'watersic', dict(w=torch.cat([W]*4), gram=torch.eye(3), bits=1.5), dict(bits=POSITIVE, damping=damping)

def of_equalize():
    yield 'equalize_', lambda: dict(model=network(), example=X, relu6='relu'), dict(example=kind('sparse csr'))
    def valid(): return dict(model=nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), calibrate=[X])
    yield 'smooth_', valid, dict(alpha=POSITIVE | COUNT)

def of_rotate():
    yield 'rotate_', lambda: dict(model=network(), example=X), dict(example=kind('sparse csr'),
        rotation=kind('function'), seed=COUNT)

def of_relaxed():
    small = NUMBER - kind('minus')
    yield 'learn_codes', dict(w=W, gram=torch.eye(3), scale=.5, bits=4, method='ste', steps=2, lr=.1), dict(
        scale=POSITIVE, zero_point=NUMBER | kind('byte'), damping=small, lr=POSITIVE | NONE, penalty=small)

def of_reconstruct():
    def valid(): return dict(model=quantized(), calibrate=[X], method='gptq', teacher=network(), fits=1, blocks=['0'],
        steps=1, progress=print)
    yield 'reconstruct_', valid, dict(damping=POSITIVE, fits=COUNT, progress=NONE | kind('cls'))

def of_schedules():
    legal = dict(init_value=NUMBER, end_value=NUMBER, transition_steps=POSITIVE, transition_begin=NUMBER)
    for n,more in (('linear', {}), ('cosine', {}), ('exponential', dict(init_value=POSITIVE, end_value=POSITIVE)),
            ('sigmoid', dict(steepness=POSITIVE))):
        yield f'{n}_schedule', dict(transition_steps=10), legal | more
    yield 'dead_share', {}, dict(threshold=SHARP)
    for n in ('lightning', 'transformers', 'fastai'): yield f'{n}_callback', dict(scheduler=scheduler())

def of_design():
    yield 'integer_search', dict(cost=lambda x: x.square().sum(), start=torch.tensor([1., 2.]), lower=0., upper=3.,
        starts=2, steps=1, beam=2), dict(start=kind('two ints array list tuple'), steps=COUNT, seed=COUNT,
        lower=NUMBER | kind('two ints array true numpy_true'), upper=kind('zero half two ints array'),
        inequalities=NONE | kind('dict'), equalities=NONE | kind('dict'), tolerance=kind('zero half'))

def of_replace(): yield 'through_round', {}

def of_source_coding(): yield 'ideal_code', dict(source='gaussian', price=.1), dict(price=POSITIVE)

def of_jpeg():
    yield 'jpeg_tables', {}
    for n in ('pillow_jpeg', 'jpeg'): yield n, dict(images=PICTURE)
    yield 'psnr', dict(a=PICTURE, b=PICTURE+1)
    yield 'mark_pattern', dict(shape=(1, 1, 8, 8))
    yield 'correlate', dict(images=GREY, pattern=PATTERN)
    bits = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    yield 'embed', dict(images=GREY, bits=bits, pattern=PATTERN, channel=R.round_ste, steps=1), dict(limit=POSITIVE,
        lr=POSITIVE, steps=kind('zero list tuple dict set iterator array'))

def of_plots():
    yield 'line_style', dict(i=1), dict(i=COUNT)
    yield 'figure', {}
    for n in ('curves', 'sweep'): yield n, dict(f=R.soft_round, domain=(-1., 1.))
    yield 'gallery', dict(rows=[catalog.row(R.round_ste)])

def of_lab():
    valid = dict(f=R.soft_round, draws=10)
    yield 'bias_variance', valid | dict(x=[.2, .7]), dict(x=kind('array ints two nested'), seed=SEED)
    yield 'plot_bias', valid | dict(domain=(0., 1.)), dict(seed=SEED)
    yield 'report', valid, dict(left=kind('minus zero'), dead_below=SHARP, seed=SEED)
    yield 'plot_report', dict(f=R.soft_round, alpha=[1., 5.])

def a_study():
    def run(f, rate, seeds, steps): return torch.full((len(seeds),), .5)
    def ends(seeds): return torch.ones(len(seeds)),torch.zeros(len(seeds))
    return module_of('harness').Study('task', 'A task', run, ends, module_of('harness').ways, {}, (.1,), 2,
        range(9), range(10, 20))

SCORED = dict(study='lattice', estimator='round_ste', way='as it is', score=.5, low=.4, high=.6, knob=None, value=None)

def of_harness():
    study,harness = a_study(),module_of('harness')
    way, = harness.ways(catalog.row(R.round_ste))
    results = NONE | kind('word')                         # a file that is not there holds no records
    yield 'ways', dict(row=catalog.row(R.soft_round))
    yield 'scores', dict(study=study, losses=torch.ones(3), seeds=range(3))
    yield 'interval', dict(values=torch.ones(3), centre='mean', level=.9), dict(values=kind('ints'), level=POSITIVE)
    yield 'search', dict(study=study, way=way, quick=True)
    yield 'read_results', dict(study='lattice'), dict(study=NONE | kind('word empty'), results=results)
    yield 'read_heads', {}, dict(results=results)
    yield 'write_results', lambda: dict(study=study, records=[], results=place('results.json')), dict(
        records=kind('list'), results=kind('word'))
    yield 'run_study', dict(study=study, estimators=R.round_ste, quick=True), dict(estimators=NONE | kind('list tuple'),
        results=results)
    yield 'plot_scores', dict(records=[SCORED], diamonds=[]), dict(diamonds=kind('list tuple'))

def of_gradient_quality(): yield 'quality', dict(f=R.round_ste, seeds=range(3), draws=2)

def of_scores():
    for n in ('advice', 'advice_table', 'unneeded', 'results_table'):
        yield n, dict(records=[SCORED]), dict(records=NONE | kind('list'))
    yield 'heat_map', dict(records=[SCORED])

def of_ste():
    for n in ('floor_ste', 'ceil_ste', 'trunc_ste', 'sign_ste', 'round_ste'): yield n, dict(x=X)

def rows():
    "Rows of the catalog that no table has; of most knobs only types are asked: test_extremes.py goes to their ends."
    kinds = {torch.Tensor: TENSOR, int: kind('minus zero'), float | torch.Tensor: NUMBER | SHARP}
    for r in catalog.catalog:
        module,ps = r.f.__module__.rpartition('.')[2],inspect.signature(r.f).parameters
        if module in ('ste', 'neighbours', 'dither'): continue
        legal = {n: kinds[p.annotation] for n,p in ps.items() if p.annotation in kinds and n not in BY_DEFAULT}
        if r.f is R.fourier_round: legal['damping'] = None                            # a word, compared as it comes
        yield of(module, r.name, {next(iter(ps)): X}, legal)

def of_core(): yield 'straight_through', dict(hard=X, soft=X), dict(hard=kind('meta'), soft=kind('meta'))

def of_random():
    yield 'uniform_like', dict(x=X), dict(draw=COUNT, fn=None)
    yield 'noise_like', dict(x=X), dict(shape=kind('half inf huge'), fn=None)

def of_checks():
    def law(f, row, dtype): pass
    yield 'Law', dict(test=law)
    yield 'slope', dict(f=R.soft_round, x=X)
    yield 'same', dict(a=X, b=X), dict.fromkeys('ab', kind('ints bools complex void', ELSEWHERE))
    yield 'near', dict(a=X, b=X, ulps=8.), dict(a=kind('void'), b=kind('void'), ulps=SHARP)
    yield 'hard_row', dict(r=catalog.row(R.soft_round))
    yield 'check_estimator', dict(f=R.round_ste, skip='compiles'), dict(skip=kind('list tuple set dict iterator'))

def of_try_it():
    several = NUMBER | kind('ints void two', ELSEWHERE)
    for n in ('explore', 'watch'): yield n, dict(left=R.round_ste, right=R.soft_round)
    yield 'tiles', dict(rows=catalog.catalog[:1])
    yield 'descend', dict(f=R.round_ste, start=.3, steps=5), dict(start=several, lr=several, target=NUMBER,
        steps=COUNT, seed=SEED)

def of_widgets():
    for n in ('player', 'tune'): yield n, dict(f=R.soft_round, domain=(-1., 1.)), dict(hard=NONE | FLAG, domain=NONE)

def of_models():
    def valid(): return dict(model=network(), weights=4, calibrate=[X], ends=8)
    yield 'quantize_model_', valid, dict(weights=NONE, activations=NONE, ends=kind('none zero'),
        skip=kind('list tuple set dict iterator'), kinds=kind('none dict'))
    yield 'parameter_groups', lambda: dict(model=network()), dict(weight_decay=POSITIVE | COUNT)

def of_report(): yield 'LayerReport', dict(rows=[]), dict(rows=kind('list'), note=kind('word empty'))

def of_integer_layers():
    codes = torch.tensor([1, -1, 7, -8], dtype=torch.int8)
    yield 'pack_int4', dict(codes=codes), dict(codes=kind('ints'))
    yield 'unpack_int4', dict(packed=integer_layers.pack_int4(codes), shape=(2, 2))

def of_deploy(): yield 'deploy_', lambda: dict(model=quantized(), example=X)

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
    yield 'narrow_accumulators_', given, dict(format=NONE)
    yield 'accumulator_bits', lambda: dict(model=powers())

def of_hardware():
    yield 'to_qonnx', lambda: dict(model=quantized(), example=X, file=place('x.onnx')), dict(file=kind('word'))
    yield 'to_c', lambda: dict(model=powers(), example=X, file=place('x.h'))

def of_runtime():
    yield 'to_onnx', lambda: dict(model=network(), example=X, file=place('x.onnx')), dict(file=kind('word'),
        dynamic=kind('none dict'))
    yield 'onnx_session', lambda: dict(file=written(), vnni=True), dict(file=kind('word'), vnni=FLAG | NONE,
        optimized=kind('none word'))

def four_bits():
    "A layer with weights in MXFP4."
    model = nn.Sequential(nn.Linear(32, 4))
    R.quantize_model_(model, 'mxfp4', None)
    return model

def of_files():
    yield 'save_gguf', lambda: dict(model=network(), file=place('x.gguf')), dict(model=kind('dict'), file=kind('word'),
        architecture=kind('word'), metadata=kind('none dict'))
    yield 'save_compressed', lambda: dict(model=four_bits(), folder=place('compressed')), dict(folder=kind('word'),
        config=kind('none dict'))

def saved():
    "A state and its file."
    state,file = dict(w=torch.ones(2, 32)),place('same.gguf')
    R.save_gguf(state, file)
    return dict(model=state, file=file)

def of_served(): yield 'same_grid', saved

def of_entropy():
    yield 'code_entropy', dict(codes=torch.tensor([[1, 0], [2, 2]]), axis=0), dict(
        codes=kind('zero minus two ints byte array list tuple void float8'), axis=AXIS)
    yield 'soft_entropy', dict(x=X, bits=4), dict(alpha=SHARP, axis=AXIS)

def of_sizes():
    yield 'coded_sizes', lambda: dict(model=quantized())
    yield 'weight_entropy', lambda: dict(model=quantized()), dict(alpha=SHARP)
    def loss(model, batch): return model(batch).square().sum()
    yield 'learn_bits_', lambda: dict(model=quantized(), calibrate=[X], loss=loss, bits=3., most=4, steps=1), dict(
        bits=POSITIVE)

def methods():
    "Constructors and methods, called as functions of `self`."
    axis = kind('none minus zero')
    yield of('quantizer', 'Quantizer', dict(bits=4, axis=0, scale='po2'), dict(signed=FLAG | NONE, axis=axis))
    for m in ('calibrate_', 'forward', 'to_codes'):
        yield of('quantizer', 'Quantizer', lambda: dict(self=ready(), x=X), dict(
            x=NOTHING if m == 'calibrate_' else TENSOR), member=m)
    yield of('schedules', 'KnobScheduler', lambda: dict(target=soft(), schedule=R.linear_schedule(transition_steps=9)),
        dict(target=TENSOR))
    yield of('schedules', 'KnobScheduler', lambda: dict(self=scheduler()), dict(at=kind('none zero')), member='step')
    yield of('schedules', 'KnobScheduler', lambda: dict(self=scheduler(), state=dict(last_epoch=3)),
        member='load_state_dict')
    scale = torch.ones(2)
    yield of('integer_layers', 'Dequantize', dict(scale=scale, axis=0), dict(scale=TENSOR | ELSEWHERE,
        zero_point=kind('none ints'), axis=axis, packed=kind('none list tuple')))
    yield of('integer_layers', 'Dequantize', lambda: dict(self=integer_layers.Dequantize(scale, axis=0),
        codes=torch.ones(2, 3).char()), dict(codes=kind('ints', ELSEWHERE)), member='forward')
    yield of('integer_layers', 'IntegerLayer', lambda: dict(layer=nn.Linear(3, 2), codes=torch.ones(2, 3).char(),
        scale=torch.ones(2), bias=None, input_scale=torch.tensor(.5), input_zero_point=torch.tensor(0).byte(),
        input_top=15), dict(bias=NONE))
    yield of('integer_layers', 'IntegerLayer', lambda: dict(self=integer(), scale=torch.tensor(.5),
        zero_point=torch.tensor(0).byte(), top=15), member='feeds')
    yield of('integer_layers', 'IntegerLayer', lambda: dict(self=integer(), input=X), member='forward')
    def tokens(name, valid, **kinds):
        yield of('tokenizers', name, valid, kinds)
        def made(): return getattr(R, name)(**{k: v for k,v in valid.items() if k != 'features'})
        for m in ('forward', 'encode', 'loss') + ('restart_',)*(name == 'VQ'):
            yield of('tokenizers', name, lambda: dict(self=made(), x=X), dict(
                x=kind('' if name == 'VQ' else 'meta')), member=m)
        yield of('tokenizers', name, lambda: dict(self=made(), index=torch.tensor([1])), dict(
            index=kind('ints byte')), member='decode')
    some = COUNT | POSITIVE
    yield from tokens('FSQ', dict(levels=[3, 4, 5], features=6, squash='clamp', margin=.1, noise=.5), gain=POSITIVE,
        margin=COUNT, noise=COUNT)
    yield from tokens('LFQ', dict(bits=3, features=6, spherical=True, temperature=1., group_size=2, diversity=1.,
        commitment=1.), temperature=SHARP - COUNT, diversity=some, commitment=some)
    yield from tokens('VQ', dict(size=4, channels=3, features=6, method='ste', noise=.1, commitment=.2), noise=some,
        commitment=some)
    late = TENSOR | kind('nested')                                                    # refused when it is called
    knobs = dict(alpha=SHARP | late, beta=SHARP | late, step=POSITIVE | late, offset=NUMBER | late,
        seed=NONE | kind('nested'), random_bits=NONE | kind('nested'))
    yield of('nn', 'Rounding', dict(f=R.soft_round, deployed=R.round_ste, learnable=True, alpha=5., step=1., offset=0.),
        {k: knobs[k] for k in ('alpha', 'step', 'offset')})
    for n in layers.__all__:
        c = getattr(layers, n)
        if not inspect.isclass(c) or n == 'Rounding': continue
        ps = inspect.signature(c).parameters
        yield of('nn', n, {}, {k: v for k,v in knobs.items() if k in ps})
        if ps: yield of('nn', n, lambda c=c: dict(self=c(), x=X), member='forward')
    yield of('nn', 'swap_rounding_', lambda: dict(model=soft(), old=R.nn.SoftRound, new=R.nn.RoundSTE()), dict(
        old=kind('cls arity')))
    yield of('rounded_weights', 'round_weights_', lambda: dict(model=network(), rounding=R.nn.RoundSTE(),
        layers=nn.Linear))
    for make in (rounded, quantized): yield of('rounded_weights', 'remove_rounding_',
        lambda make=make: dict(model=make(), leave_rounded=True))

@cache
def calls():
    "The whole table."
    tables = {k.removeprefix('of_'): v for k,v in globals().items() if k.startswith('of_')}
    return (*methods(), *rows(), *(of(module, *row) for module,table in tables.items() for row in table()))

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

def test_infinity_of_a_layer():
    "A number beyond all floats is infinite for a layer, as for its function."
    assert R.nn.SoftRound(10**400).alpha == float('inf')
    assert torch.equal(R.nn.SoftRound(10**400)(X), R.soft_round(X, 10**400))
