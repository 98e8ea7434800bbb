"""How many bad calls are answered by an error that names the function and the argument: at least 98 of 100, and nothing
is taken that is nonsense.

The calls are those of test_bad_input.py and those of whatever else is public, its methods too; the values are those
there and as many others: layers where functions are meant, functions that give nonsense, arrays, generators of others.
There each call is asked for all values that it refuses by name; here they are counted, whatever they are."""
import inspect
import io
import random
from collections import Counter
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from zlib import crc32
import numpy as np
import pytest
import torch
from test_bad_input import (
    BY_DEFAULT,
    COUNT,
    FLAG,
    MOST,
    NONE,
    NOTHING,
    NUMBER,
    PLACES,
    POSITIVE,
    TENSOR,
    TooLong,
    X,
    at_most,
    calls,
    kind,
    nonsense,
    of,
    says,
    title,
)
from torch import nn
import shok_nb as R
from shok_nb import catalog, demo, functions
from shok_nb.deployment import integer_operations


def values():
    "Name and value of each, beside those of `nonsense`."
    ones = torch.ones(2, 3)
    return nonsense() | dict(layer=nn.ReLU(), linear=nn.Linear(3, 4), bare=nn.Module(), layer_class=nn.Linear,
        several=nn.MultiheadAttention(4, 2), parameters=nn.ParameterDict(), unready=R.Quantizer(4),
        generator=torch.Generator(), rng=np.random.default_rng(0), python_rng=random.Random(0),
        picture=np.ones((2, 3), 'float32'), objects=np.array([None, 'a'], object), range=range(3), five='5',
        strings=['a'], nones=[None], ragged=[[1., 2.], [3.]], keyed={'a': 1}, texts=('a', 'b'), tensors=[ones, ones],
        many=lambda a, b, c, d, e, f, g: a, keywords=lambda *, q: q, gives_none=lambda *a, **k: None,
        gives_word=lambda *a, **k: 'abc', gives_wide=lambda *a, **k: torch.ones(5, 7), partial=partial(print, 1, foo=2),
        low=float('-inf'), minus_huge=-10**400, decimal=Decimal('nan'), wide=torch.ones(5, 7),
        deep=torch.ones(*[1]*9, 5), complex_0d=torch.tensor(1j), bool_0d=torch.tensor(True), dtype=torch.float16,
        device=torch.device('cpu'), slice=slice(None), dots=..., exception=ValueError('x'), path=Path('none/at/all'),
        bytearray=bytearray(b'a'), tensor_class=torch.Tensor)

# --- what is none of nonsense
MODULES = kind('layer linear bare several parameters unready')
GIVES = kind('layer linear unready gives_none gives_word gives_wide')
TENSORS = kind('wide deep')
BY_NAME = dict(model=MODULES, teacher=MODULES, target=MODULES, layer=MODULES, generator=kind('generator'),
    format=kind('dtype'), dtype=kind('dtype'), scale_format=kind('dtype'), lower=kind('low minus_huge'),
    results=kind('path'), path=kind('path'), folder=kind('path'), file=kind('path'), example=kind('wide deep'))
# A function that is kept and called later, or one for which any other does; and what is documented of single arguments.
BY_CALL = {
    'bounds.lower_bound bound': kind('low minus_huge'), 'bounds.upper_bound bound': kind('low minus_huge'),
    'stored.RoundedOptimizer rounding': GIVES, 'stored.RoundedOptimizer states': kind('dtype'),
    'stored.RoundedOptimizer.step closure': GIVES | kind('print keywords unready partial several arity'),
    'stored.RoundedOptimizer params': kind('tensors'), 'products.low_precision_ skip': kind('set'),
    'quantizer.Quantizer init': GIVES, 'quantizer.Quantizer rounding': GIVES, 'nn.Rounding f': GIVES,
    'nn.Rounding deployed': GIVES, 'checks.Law test': GIVES | {'several'}, 'checks.Law applies': GIVES,
    'checks.check_estimator f': GIVES, 'rotate.rotate_ rotation': GIVES, 'harness.run_study estimators': GIVES,
    'harness.run_study progress': GIVES, 'reconstruct.reconstruct_ progress': GIVES | {'print'},
    'models.quantize_model_ skip': GIVES, 'models.quantize_model_ weights': MODULES,
    'models.quantize_model_ activations': MODULES, 'models.quantize_model_ calibrate': kind('tensors'),
    'reconstruct.reconstruct_ calibrate': kind('tensors'), 'equalize.smooth_ calibrate': kind('tensors'),
    'reconstruct.reconstruct_ blocks': kind('layer_class'), 'nn.swap_rounding_ old': MODULES | GIVES
    | {'layer_class', 'tensor_class', 'many', 'keywords', 'partial'}, 'nn.swap_rounding_ new': MODULES,
    'rounded_weights.round_weights_ layers': kind('layer_class'), 'jpeg.embed bits': kind('bool_0d'),
    'jpeg.embed steps': kind('picture strings nones ragged keyed texts objects bytearray range tensors'),
    'lab.bias_variance x': kind('range bytearray'), 'harness.plot_scores diamonds': kind('strings nones texts tensors'),
    'harness.scores seeds': kind('range'), 'gradient_quality.quality seeds': kind('range'),
    'harness.interval values': TENSORS, 'checks.same a': kind('complex_0d bool_0d'),
    'checks.same b': kind('complex_0d bool_0d'), 'quantizer.Quantizer.calibrate_ x': TENSORS,
    'core.estimator name': kind('five'), 'staircases.staircase name': kind('five'),
    'attention.Attention attention': kind('several'), 'report.LayerReport note': kind('five'),
    'integer_layers.IntegerLayer layer': MODULES, 'design.integer_search start': kind('range'),
    'design.integer_search progress': MODULES | kind('gives_none gives_wide gives_word'),
    'demo.load path': kind('word empty five path'),
    'entropy.code_entropy codes': kind('picture range parameters'), 'sizes.learn_bits_ calibrate': kind('tensors'),
    'few_levels.xnor_weight sign': kind('layer'),
    **{f'replace.through_round {arg}': GIVES for arg in ('rounding', 'floor', 'ceil', 'trunc', 'sign')}}
FUNCTIONS = ('f', 'rounding', 'loss', 'deployed', 'channel', 'integers', 'method')      # elementwise: a ReLU is one

def legal(call, arg):
    "Names of the values that are none of nonsense there."
    known = call.kinds[arg]
    more = BY_NAME.get(arg, kind()) | BY_CALL.get(f'{title(call)} {arg}', kind())
    if known & {'void', 'two'} or 'meta' in known: more |= TENSORS
    if 'word' in known: more |= {'five'}
    if 'dict' in known: more |= {'keyed', 'parameters'}
    if arg in FUNCTIONS: more |= {'layer'}
    return known | more

# --- the calls that the other table does not have
LETTERS = kind('word empty five')
STEPS = kind('minus zero half inf low huge minus_huge')

def of_demo():
    photo = torch.full((1, 3, 128, 128), 100.)
    mark = torch.ones(1, 1, 128, 128)
    result = demo.Result('soft', (.1, .05), ('', ''), (3, 0), (40., 41.), 2., mark, photo, photo)
    yield of('demo', 'main', dict(argv=['--help']), dict(argv=kind('none list tuple strings texts')))
    yield of('demo', 'load', dict())
    yield of('demo', 'to_bits', dict(text=demo.message))
    yield of('demo', 'to_text', dict(bits=demo.to_bits(demo.message)))
    yield of('demo', 'trial', dict(photo=photo, name='soft', rounding=R.round_ste, steps=1), dict(name=LETTERS))
    yield of('demo', 'table', dict(results=[result]), dict(results=kind('list tuple')))
    yield of('demo', 'bar', dict(trainings=1, file=io.StringIO()), dict(trainings=COUNT))
    yield of('demo', 'page', dict(photo=photo, results=[result]))

def of_catalog():
    yield of('catalog', 'row', dict(f=R.soft_round))
    yield of('catalog', 'table', dict(rows=catalog.catalog[:1]), dict(rows=kind('list tuple')))

def of_functions():
    for n in functions.__all__:
        def forward(x, c=getattr(functions, n)): return c.forward(torch.autograd.function.FunctionCtx(), x)
        yield of('functions', n, dict(x=X), dict(x=TENSOR), getattr(functions, n).apply, 'apply')
        yield of('functions', n, dict(x=X), dict(x=TENSOR), forward, 'forward')

def of_schedules():
    for n in ('linear', 'cosine', 'exponential', 'sigmoid'):
        schedule = getattr(R, f'{n}_schedule')(transition_steps=9)
        yield of('schedules', f'{n}_schedule', dict(step=3), dict(step=STEPS), schedule, '__call__')

GRIDS = (dict(bits=4), dict(bits=4, zero_point=True), dict(bits=4, axis=0), dict(bits=4, learn=True, zero_point=True),
    dict(format='e4m3'), dict(format='nf4', axis=0), dict(format='nvfp4'))

def of_quantizer():
    for kw in GRIDS:
        moves,rows = 'zero_point' in kw,kind('ints array byte float8' if 'axis' in kw else '')
        yield of('quantizer', 'Quantizer', lambda kw=kw, moves=moves: dict(self=R.Quantizer(**kw), scale=.5,
            zero_point=1. if moves else None), dict(scale=POSITIVE | {'two'} | rows,
            zero_point=NONE | (NUMBER if moves else NOTHING)), member='set_grid_')
    def ready(): return R.Quantizer(format='e4m3', init='minmax').calibrate_(X)
    for m in ('calibrate_', 'forward', 'to_codes'):
        yield of('quantizer', 'Quantizer', lambda: dict(self=ready(), x=X), dict(
            x=NOTHING if m == 'calibrate_' else TENSOR), member=m)
    yield of('quantizer', 'Quantizer', dict(format='e4m3', signed=None, init='minmax'), dict(signed=NONE | FLAG,
        axis=kind('none minus zero')))

def of_engine():
    nearest = R.estimator('nearest', torch.round)
    power = R.staircase('power_round', lambda q: 4*q**3, lambda q: 12*q**2)
    on_grid = dict(x=X, step=1., offset=0.)
    yield of('core', 'nearest', on_grid, BY_DEFAULT, nearest)
    yield of('staircases', 'power_round', on_grid | dict(hard=False), BY_DEFAULT | dict(hard=FLAG), power)
    flags = dict(export_value=True, near=True, pure=False, single=False)
    def made(name, value, slope, plain, **rest): return R.estimator(name, value, slope, plain, **rest)
    yield of('core', 'estimator', dict(name='n', value=torch.round, slope=None, plain=None, compiled=None, **flags),
        dict(name=LETTERS, value=GIVES, slope=GIVES | NONE, plain=GIVES | NONE, compiled=GIVES | NONE)
        | dict.fromkeys(flags, FLAG), made)
    def stairs(name, rise, slope, **rest): return R.staircase(name, rise, slope, **rest)
    yield of('staircases', 'staircase', dict(name='n', rise=lambda q: 4*q**3, slope=lambda q: 12*q**2, odd=False,
        pure=False), dict(name=LETTERS, rise=NOTHING, slope=NOTHING, odd=FLAG, pure=FLAG), stairs)

def of_low_precision():
    sgd = partial(torch.optim.SGD, lr=.1)
    def held(): return [nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    def optimizer(): return R.RoundedOptimizer(held(), sgd)
    stored = partial(of, 'stored', 'RoundedOptimizer')
    yield of('stored', 'stochastic_cast', dict(x=X, dtype=torch.bfloat16))
    yield stored(lambda: dict(params=held(), make=sgd, at_once=8), dict(seed=COUNT | kind('minus'), at_once=NONE))
    yield stored(lambda: dict(self=optimizer(), param_group=dict(params=held())), member='add_param_group')
    yield stored(lambda: dict(self=optimizer()), member='step')
    yield stored(lambda: dict(self=optimizer(), state_dict=optimizer().state_dict()), member='load_state_dict')
    yield of('products', 'low_precision_', lambda: dict(model=nn.Sequential(nn.Linear(32, 32)), recipe='mxfp8'),
        dict(skip=kind('list tuple'), seed=COUNT | kind('minus'), rank=COUNT))
    yield of('products', 'BatchedProduct', dict(self=R.BatchedProduct(), x=torch.ones(4, 4), w=torch.ones(4, 4)),
        dict(w=TENSOR), member='forward')

GRID = torch.tensor(.25),torch.tensor(128, dtype=torch.uint8)
PICTURE = torch.ones(1, 2, 4, 4)

def fed(name, *args):
    layer = getattr(integer_operations, name)(*args)
    layer.feeds(*GRID)
    return layer

def of_layers():
    yield of('nn', 'Rounding', lambda: dict(self=R.nn.Rounding(R.soft_round), x=X), member='forward')
    yield of('attention', 'Attention', lambda: dict(attention=nn.MultiheadAttention(8, 2)))
    yield of('operations', 'Concatenate', dict(count=2), dict(dim=kind('minus zero')))
    yield of('operations', 'Mean', dict())
    operation = partial(of, 'integer_operations')
    for n in ('IntegerAdd', 'IntegerMultiply'):
        yield operation(n, dict(first=GRID, second=GRID))
        yield operation(n, lambda n=n: dict(self=fed(n, GRID, GRID), x=X, y=X), dict(y=TENSOR), member='forward')
        yield operation(n, lambda n=n: dict(self=fed(n, GRID, GRID), scale=GRID[0], zero_point=GRID[1]), member='feeds')
    yield operation('IntegerCurve', lambda: dict(grid=GRID, function=nn.Sigmoid()), dict(function=MODULES))
    yield operation('IntegerMean', dict(grid=GRID))
    yield operation('IntegerAveragePool', lambda: dict(grid=GRID, pool=nn.AvgPool2d(2)))
    yield operation('IntegerConcatenate', dict(grids=[GRID, GRID], dim=0), dict(dim=kind('minus zero')))
    for n,x,args in (('IntegerCurve', X, [nn.Sigmoid()]), ('IntegerMean', PICTURE, []),
            ('IntegerAveragePool', PICTURE, [nn.AvgPool2d(2)])):
        yield operation(n, lambda n=n, x=x, args=args: dict(self=fed(n, GRID, *args), input=x), dict(
            input=TENSOR if x is X else NOTHING), member='forward')

def everything():
    "All calls of both tables."
    ours = of_demo, of_catalog, of_functions, of_schedules, of_quantizer, of_engine, of_layers, of_low_precision
    return [*calls(), *(c for table in ours for c in table())]

# --- one call
def answer(call, arg, value, kw):
    "What a call does: 'named', 'taken', or the error in words."
    try:
        with at_most(MOST): call.f(**kw | {arg: value})
    except TooLong: return 'does not end'
    except (Exception, SystemExit) as e:
        return 'named' if says(e, call, arg) else f'{type(e).__name__}: {e}'
    return 'taken'

def answers(share=1):
    "Of one bad call in `share`, the same each time: the call, the argument, the name of the value and the answer."
    for c in everything():
        kw,given = None,values()
        for arg,known in c.kinds.items():
            if known is None: continue
            bad = [n for n in given.keys() - legal(c, arg) if crc32(f'{title(c)} {arg} {n}'.encode()) % share == 0]
            for n in sorted(bad):
                kw = kw or c.make()
                if n == 'two' and getattr(kw.get(arg), 'shape', ()): continue      # a tensor of another shape
                said = answer(c, arg, given[n], kw)
                if said != 'named': kw = None                                      # it may be another now
                yield f'{title(c)} {arg}={n}',said

def counted(share):
    "How many answers there are, how many are named, what is taken, and the other answers in words."
    found = [*answers(share)]
    taken = [what for what,said in found if said == 'taken']
    rest = {what: said for what,said in found if said not in ('named', 'taken')}
    return len(found),Counter(said == 'named' for _,said in found)[True],taken,rest

# --- the tests
pytestmark = [pytest.mark.xdist_group('players'), pytest.mark.filterwarnings('ignore')]

def check_counted(share, at_least):
    "Named are 98 of 100; what is taken is legal, and then belongs into the tables."
    count,named,taken,rest = counted(share)
    assert count >= at_least and not taken, taken
    assert named >= .98*count, f'{named} of {count}: {rest}'

def test_calls_are_valid():
    "What the values are put into."
    for c in everything()[len(calls()):]:
        if (c.module, c.name) == ('demo', 'main'): continue                # it ends Python, with its help
        c.f(**c.make())

def test_bad_calls_are_named():
    "One of 50."
    check_counted(50, 1_000)

@pytest.mark.slow
def test_all_bad_calls_are_named():
    check_counted(1, 50_000)

# What makes the functions and checks what they are given; what torch calls; and layers that take what torch's own take.
BUILDS = 'arguments', 'parts', 'random'
TAKES_ALL = {'core.estimator.composite', 'core.estimator.forward', 'core.estimator.backward',
    'nn.Rounding.right_inverse', 'quantizer.Quantizer.right_inverse', 'attention.Attention.forward',
    'operations.Mean.forward',
    *(f'functions.{c}.{m}' for c in functions.__all__ for m in ('forward', 'backward'))}

def arguments(f, *without):
    "The names of what is asked for."
    rest = inspect.Parameter.VAR_POSITIONAL,inspect.Parameter.VAR_KEYWORD
    return {p.name for p in inspect.signature(f).parameters.values() if p.kind not in rest and p.name not in without}

def public():
    "Module, class or function, method or '', and the arguments, of all that is public and takes some."
    for path in sorted({p for p in PLACES.values() if not p.rpartition('.')[2].startswith('_')}):
        module = import_module(path)
        for n in getattr(module, '__all__', ()):
            f = getattr(module, n)
            record = hasattr(f, '__dataclass_fields__') or hasattr(f, '_fields')       # of results
            if not callable(f) or record: continue
            yield module,n,'',arguments(f)
            for m,own in vars(f).items() if inspect.isclass(f) else ():
                own = getattr(own, '__func__', own)
                if inspect.isfunction(own) and m[0] != '_': yield module,n,m,arguments(own, 'self', 'cls')

def test_the_tables_are_complete():
    """Every argument of whatever is public is in one of them, methods too; of the functions of a module that the other
    table has, in that."""
    def found(table):
        known = {}
        for c in table: known.setdefault((c.module, c.name, c.member), set()).update(c.kinds)
        return known
    first,both = found(calls()),found(everything())
    theirs = {module for module,*_ in first if '.engine.' not in PLACES[module]}
    for module,n,m,wanted in public():
        place = module.__name__.rpartition('.')[2]
        known = first if place in theirs and not m else both
        missing = wanted - known.get((place, n, m), set())
        assert not missing or place in BUILDS or f'{place}.{n}.{m}' in TAKES_ALL, f'{place}.{n}.{m}: {missing}'

@pytest.mark.slow
def test_a_function_is_asked_what_it_takes():
    "Of a layer its forward says it; one without a forward, and a partial that cannot be called, say that."
    from shok_nb.engine.arguments import check_callable
    def told(f, *args):
        with pytest.raises(TypeError, match='^mine: f cannot be called as f') as e:
            check_callable(f, 'mine', 'f', *args)
        return f'{e.value}'.partition(': ')[2].partition(': ')[2]
    assert 'has no forward' in told(nn.Module()) and 'has no forward' in told(nn.ModuleList())
    assert "missing a required argument: 'key'" in told(nn.MultiheadAttention(4, 2))
    assert 'too many positional' in told(nn.Linear(3, 4), 2) and 'too many' in told(torch.jit.script(nn.ReLU()), 2)
    assert "'alpha'" in told(R.nn.RoundSTE(), 1, ['alpha'])
    assert 'the partial' in told(partial(R.soft_round, alpa=3.))
    class Own(nn.Module):
        def __call__(self, x): return x
    fine = nn.ReLU(),torch.jit.script(nn.ReLU()),torch.compile(nn.ReLU()),R.nn.SoftRound(),Own(),partial(torch.round)
    for f in fine: assert check_callable(f, 'mine', 'f') is f

def test_what_a_rounding_gives():
    "A tensor of the shape of x, or one to which x broadcasts, as where a knob is a tensor."
    x = X.clone()
    levels = partial(R.levels_round, levels=[-1., 0., 1.])
    for f in (partial(R.float_round, format='e4m3'), R.log2_round, levels, partial(R.mx_quantize, block=3),
            R.fake_quantize, partial(R.fsq, levels=[3, 3, 3])):
        name = getattr(f, 'func', f).__name__
        scale = (.1,) if f is R.fake_quantize else ()
        for bad,got in ((lambda v, **kw: None, 'NoneType'), (lambda v, **kw: v.sum(), r'\(\)'),
                (lambda v, **kw: [v], 'list')):
            told = rf'^{name}: rounding must return a Tensor of the shape of x, .*, got {got}'
            with pytest.raises(TypeError, match=told):
                f(x, *scale, rounding=bad)
    wide = R.float_round(x, 'e4m3', R.soft_round, alpha=torch.tensor([2., 5.]).view(2, 1, 1))
    assert wide.shape == (2, 2, 3)

def test_a_grid_by_hand():
    "Lists and arrays of numbers are a scale as they were; what is none says so, and leaves the grid as it was."
    q = R.Quantizer(4, axis=0).set_grid_([.5, .25])
    assert torch.equal(q.scale, torch.tensor([.5, .25]))
    assert torch.equal(q.set_grid_(np.array([.125, 1.])).scale, torch.tensor([.125, 1.]))
    for bad in (True, 'a', None, [1., 'b'], torch.ones(2)*1j, torch.tensor([True, False]), torch.ones(2).to('meta')):
        with pytest.raises(TypeError, match='^Quantizer: set_grid_ scale must be a number or a Tensor of real numbers'):
            q.set_grid_(bad)
    for bad,got in ((-1., '-1'), ([1., float('nan')], 'nan'), ([0., 1.], '0')):
        with pytest.raises(ValueError, match=f'set_grid_ gives a scale that is not positive and finite, got {got}'):
            q.set_grid_(bad)
    assert torch.equal(q.scale, torch.tensor([.125, 1.]))
    with pytest.raises(ValueError, match=r'wants a scale of shape \(3,\), got \(2, 3\)'):
        R.Quantizer(4, axis=0).set_grid_(torch.ones(2, 3))
    moving = R.Quantizer(4, zero_point=True)
    with pytest.raises(ValueError, match='zero_point that is no code from -8 to 7, got 1.5'): moving.set_grid_(.1, 1.5)
    with pytest.raises(TypeError, match='set_grid_ zero_point must be a number'): moving.set_grid_(.1, 'a')

def test_a_schedule_is_called_with_a_number():
    "Of any kind that counts; one that was pickled before it knew its name says so too."
    f = R.linear_schedule(0., 10., transition_steps=10)
    assert [f(t) for t in (3, 3., np.int64(3), torch.tensor(3), torch.tensor([3.]))] == [3.]*5
    assert f(float('inf')) == 10. and f(-10**400) == 0.
    for bad in ('3', None, [3], True, torch.ones(2), float('nan')):
        with pytest.raises((TypeError, ValueError), match='^linear_schedule: step must be'): f(bad)
    old = partial(f.func, **{k: v for k,v in f.keywords.items() if k != 'fn'})
    assert old(3) == 3.
    with pytest.raises(TypeError, match='^schedule: step must be a number, got str'): old('3')

def test_a_teacher_of_another_kind():
    "Of another dtype or device it is refused before anything is done."
    for other,told in ((torch.float64, 'torch.float64 on cpu'), ('meta', 'torch.float32 on meta')):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        teacher = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(other)
        R.quantize_model_(net, 4, 8, calibrate=[X])
        with pytest.raises(ValueError, match=f'^reconstruct_: teacher is {told} and model torch.float32 on cpu'):
            R.reconstruct_(net, [X], teacher=teacher)
