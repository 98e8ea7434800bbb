"""A forward is rewritten only if that loses nothing: what it does, writes and asks is its own, as before."""
import copy
import math
import os
import random
import time
import types
from collections import Counter, deque
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from shok_nb import equalize_, quantize_model_, rotate_, smooth_
from shok_nb.networks.forwards import Unread
from shok_nb.networks.operations import _read, _rewrite, place_operations
from shok_nb.nn import remove_rounding_

FLAG = False
TABLE = {'calls': 0}
SETTINGS = types.SimpleNamespace(flag=False, calls=0)
HELD = nn.Linear(2, 2)

class Block(nn.Module):
    "An addition of a kind of its own."
    flag = False
    def __init__(self):
        super().__init__()
        self.c,self.d = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.register_buffer('steps', torch.zeros(()))
        self.log,self.table,self.nested,self.plain = [],Counter(n=0),{'a': [0]},[self.d]
        self.recent = deque([self.plain], maxlen=2)
        self.settings,self.total,self.drop_rate = types.SimpleNamespace(flag=False, n=0),torch.zeros(()),0.
    def forward(self, x): return self.c(x)+x

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem,self.b,self.head = nn.Conv2d(3, 4, 3),kind(),nn.Conv2d(4, 2, 1)
    def forward(self, x): return self.head(self.b(self.stem(x).relu()))

def of(way, decorate=lambda f: f):
    "The class of a block with this forward."
    return type('Odd', (Block,), dict(forward=decorate(lambda self, x: way(self, x))))

def batch(seed=0): return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

def net(kind):
    torch.manual_seed(0)
    return Net(kind).eval()

def quantized(kind):
    model = net(kind)
    return model,quantize_model_(model, calibrate=[batch()])

def is_left(model, report):
    "Its forward is that of its class, and the report says so."
    told = [line for line in report.note.split('\n') if line.startswith('b: its forward is left')]
    return 'forward' not in vars(model.b) and len(told) == 1

def refused(kind, why=r'^(?!.* of the function around it)'):
    "Reading this forward ends with a reason, and nothing of the module is another then."
    block = kind().eval()
    before,was = state(block),random.getstate()
    with pytest.raises(Unread, match=why): _read(block, {'x': 0})
    assert state(block) == before and random.getstate() == was and not block.training

# --- contexts: torch's own, as a `with`, as a decorator, inside a function that the forward calls
def inside(context):
    def way(m, x):
        with context(): y = m.c(x)
        return y+x
    return way

@torch.no_grad()
def frozen(m, x): return m.c(x)*x

def switched(m, x):
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = m.c(x)+x
    torch.set_grad_enabled(was)
    return y+m.d(x)

def cast_on(): return torch.autocast('cpu', torch.bfloat16)
def cast_off(): return torch.autocast('cpu', torch.bfloat16, enabled=False)

def recomputed(m, x): return checkpoint(lambda t: F.silu(m.c(t))+t, x, use_reentrant=False)
def reentrant(m, x): return checkpoint(lambda t: F.silu(m.c(t))+t, x, use_reentrant=True)

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x+x
    @staticmethod
    def backward(ctx, g): return 3*g

CONTEXTS = dict(no_grad=inside(torch.no_grad), enable_grad=inside(torch.enable_grad),
    inference=inside(torch.inference_mode),
    set_grad=switched, helper=lambda m, x: frozen(m, x)+x, cast_off=inside(cast_off), cast_on=inside(cast_on),
    checkpoint=recomputed, reentrant=reentrant, own_function=lambda m, x: Own.apply(m.c(x))+x,
    saved=inside(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)))

@pytest.mark.parametrize('name', CONTEXTS)
def test_a_context_stays(name): refused(of(CONTEXTS[name]), 'of torch$')

@pytest.mark.parametrize('context', [torch.no_grad, torch.inference_mode, torch.enable_grad, cast_off, cast_on])
def test_a_context_stays_as_a_decorator(context):
    refused(of(lambda m, x: m.c(x)+x, context()), 'is one of torch$')

def test_what_is_frozen_stays_frozen():
    def way(m, x):
        with torch.no_grad(): y = F.silu(m.c(x))
        return m.d(x)+y
    model,_ = quantized(of(way))
    model.train()(batch()).sum().backward()
    weights = [m.parametrizations.weight.original for m in (model.b.c, model.b.d)]
    assert [w.grad is not None for w in weights] == [False, True]

# --- what it writes: to its buffers and fields, to containers, to others' state
def after(write):
    def way(m, x):
        write(m, x)
        return m.c(x)+x
    return way

def counted(m, x): m.steps += 1
def of_other_module(m, x): m.c.seen = 1
def of_dict(m, x): m.table['n'] = m.table['n']+1
def of_list(m, x): m.log.append(1)
def of_nested(m, x): m.nested['a'][0] += 1
def of_object(m, x): m.settings.n += 1
def of_tensor(m, x): m.total += 1
def of_deque(m, x): m.recent.append(x.shape[0])
def of_vars(m, x): vars(m)['calls'] = vars(m).get('calls', 0)+1

WRITES = dict(counted=counted, copied=lambda m, x: m.steps.copy_(x.mean()), added=lambda m, x: m.steps.add_(1),
    other=of_other_module, dict=of_dict, list=of_list, nested=of_nested, object=of_object, tensor=of_tensor,
    setattr=lambda m, x: setattr(m, 'last', 1), out=lambda m, x: torch.add(m.total, 1, out=m.total), vars=of_vars,
    deque=of_deque)

def state(m):
    "All that these blocks write to."
    tensors = [t.item() for t in (m.steps, m.total)]
    fields = getattr(m, 'last', 0),getattr(m.c, 'seen', 0),vars(m).get('calls'),len(m.recent),len(m.plain)
    return copy.deepcopy([tensors, m.log, m.table, m.nested, m.settings.n, fields])

@pytest.mark.parametrize('name', WRITES)
def test_what_it_writes_is_left_to_it(name): refused(of(after(WRITES[name])))

def below_versions(m, x):
    m.steps.data.add_(1)
    m.total.data = m.total.data.expand(2)+1

def test_what_it_writes_below_versions_is_taken_back():
    "Through `.data`, which counts no version; also where it writes over nan, or another shape."
    for start in (0., math.nan):
        model = net(of(after(below_versions)))
        model.b.steps.fill_(start)
        place_operations(model, batch(), {'stem': model.stem, 'head': model.head})
        assert model.b.total.shape == () and model.b.total == 0
        torch.testing.assert_close(model.b.steps, torch.tensor(start), equal_nan=True)

def everything(m, x):
    for write in (counted, of_dict, of_list, of_nested, of_object, of_tensor, of_deque): write(m, x)

def test_what_it_writes_is_written_once_a_batch():
    model,plain = net(of(after(everything))),net(of(after(everything)))
    report = quantize_model_(model, calibrate=[batch(), batch(1)])
    for seed in (0, 1): plain(batch(seed))
    assert is_left(model, report) and state(model.b) == state(plain.b) != state(net(Block).b)

def over_its_input(m, x):
    x += m.c(x)
    return m.d(x)
def over_a_view(m, x):
    y = m.c(x)
    z = y.view(-1, 4, 6, 6)
    z += x
    return m.d(y)+x

@pytest.mark.parametrize('way', [over_its_input, over_a_view])
def test_memory_that_others_read_is_written(way): refused(of(way), 'writes over a value that others may read')

# --- what it asks: that is asked again, or the forward is left
def by(ask):
    def way(m, x):
        y = m.c(x)+x
        return y*3. + x if ask(m) else y
    return way

def flag_of(m): return m.flag
def set_flag(m): m.flag = True
def set_global(m): globals().update(FLAG=True)
def set_table(m): TABLE.update(calls=1)
def set_settings(m): SETTINGS.flag = True
def set_environ(m): os.environ['SHOK_FLAG'] = '1'
def exchange(m): m.plain[0] = nn.Identity()
ASKS = dict(flag=(flag_of, set_flag), absent=(lambda m: hasattr(m, 'extra'), lambda m: setattr(m, 'extra', 1)),
    none=(lambda m: getattr(m, 'extra', None) is not None, lambda m: setattr(m, 'extra', nn.Identity())),
    child=(lambda m: getattr(m.c, 'flag', False), lambda m: setattr(m.c, 'flag', True)),
    settings=(lambda m: m.settings.flag, lambda m: setattr(m.settings, 'flag', True)),
    settings_later=(lambda m: (lambda s: s.flag)(m.settings), lambda m: setattr(m.settings, 'flag', True)),
    named=(lambda m: getattr(m.settings, 'flag'), lambda m: setattr(m.settings, 'flag', True)),
    rate=(lambda m: m.drop_rate > 0, lambda m: setattr(m, 'drop_rate', .5)),
    of_global=(lambda m: FLAG, set_global), table=(lambda m: TABLE['calls'], set_table),
    of_object=(lambda m: SETTINGS.flag, set_settings), length=(lambda m: len(m.log), lambda m: m.log.append(1)),
    nested=(lambda m: m.nested['a'][0], lambda m: m.nested.update(a=[1])),
    exchanged=(lambda m: m.plain[0] is not m.d, exchange),
    module=(lambda m: HELD.training is False, lambda m: HELD.eval()),
    mode=(lambda m: not m.c.training and m.d.training, lambda m: m.d.train()),
    environ=(lambda m: os.environ.get('SHOK_FLAG') == '1', set_environ),
    raw=(lambda m: m.__dict__.get('flag'), set_flag), gone=(lambda m: m.d is None, lambda m: setattr(m, 'd', None)),
    grad=(lambda m: torch.is_grad_enabled(), lambda m: torch.set_grad_enabled(True)),
    precision=(lambda m: torch.get_default_dtype() == torch.float64, lambda m: torch.set_default_dtype(torch.float64)))

@pytest.fixture
def as_before():
    "What these tests change outside is what it was, afterwards."
    yield
    globals().update(FLAG=False)
    TABLE.update(calls=0)
    SETTINGS.flag = False
    HELD.train()
    os.environ.pop('SHOK_FLAG', None)
    torch.set_default_dtype(torch.float32)

@pytest.mark.parametrize('name', ASKS)
def test_what_it_asks_is_asked_again(name, as_before):
    "Another answer is obeyed, or an error by name; in a copy too."
    ask,change = ASKS[name]
    block = of(by(ask))().eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        wanted = block(x)
        try: _rewrite(block, {'x': 0})
        except Unread: assert 'forward' not in vars(block)
        assert torch.allclose(block(x), wanted, atol=1e-6)
        other = copy.deepcopy(block)
        assert torch.allclose(other(x), wanted, atol=1e-6)
        change(block)
        if 'forward' not in vars(block): return
        with pytest.raises(RuntimeError, match='forward of Odd was quantized when .* was'): block(x)
        change(other)
        with pytest.raises(RuntimeError, match='forward of Odd was quantized when .* was'): other(x)

def by_default(m, x, on=[]):
    y = m.c(x)+x
    return y*3. + x if on else y

def test_a_default_that_can_change(): refused(of(by_default, lambda f: by_default), 'defaults that can change')

# --- chance and time
def of_chance(draw):
    def way(m, x):
        y = m.c(x)+x
        return y*2. + x if draw() < .5 else y
    return way

DRAWS = dict(random=random.random, uniform=lambda: random.uniform(0, 1), numpy=lambda: np.random.rand(),
    torch=lambda: torch.rand(1).item(), time=lambda: time.time() % 1, perf=lambda: time.perf_counter() % 1)

@pytest.mark.parametrize('name', DRAWS)
def test_chance_stays_chance(name): refused(of(of_chance(DRAWS[name])))

def test_reading_uses_up_no_random_numbers():
    def dropped(m, x):
        if m.training and random.random() < .5: return x
        return m.c(x)+x
    draws = random.random,np.random.rand,lambda: torch.rand(1).item()
    def seeded(): random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = net(of(dropped))
    seeded()
    quantize_model_(model, calibrate=[batch()])
    found = [draw() for draw in draws]
    seeded()
    assert found == [draw() for draw in draws]

# --- and what is none of this is rewritten as before, and survives copies
def helped(m, x): return twice(m.c(x), x)
def twice(x, y): return F.relu(x+y)
def listed(m, x):
    found = [x]
    for layer in (m.c, m.d): found.append(layer(found[-1]))
    return torch.cat(found, 1)[:, :4]+x
def constants(m, x): return m.c(x)+x if math.pi > 3 else x
def nothing(m, x): pass

# A code of more than 255 names: some instructions have their argument in two parts
vars(SETTINGS).update({f'n{i}': False for i in range(300)})
lines = *(f'    if SETTINGS.n{i}: x = -x' for i in range(300)),'    return torch.add(m.c(x), x)'
exec('\n'.join(['def of_many_names(m, x):', *lines]))

@pytest.mark.parametrize('way', [Block.forward, helped, listed, constants, by(flag_of), after(nothing),
    vars()['of_many_names']])
def test_others_are_rewritten(way):
    "They give what they gave, and so do their copies."
    block,x = of(way)().eval(),torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        wanted = block(x)
        assert _rewrite(block, {'x': 0}) and 'add' in block.operations
        for m in (block, copy.deepcopy(block)): assert torch.equal(m(x), wanted)

@pytest.mark.slow
def test_one_that_asks_is_exported_compiled_and_restored():
    model,_ = quantized(of(by(flag_of)))
    with torch.no_grad():
        y = model(batch(1))
        assert torch.equal(torch.export.export(model, (batch(1),)).module()(batch(1)), y)
        assert torch.allclose(torch.compile(model, backend='eager', fullgraph=True)(batch(1)), y, atol=1e-6)
        remove_rounding_(model, leave_rounded=False)
        assert torch.equal(model(batch(1)), net(of(by(flag_of)))(batch(1)))

WRITTEN = {'infinity': lambda self, x: (self.c(x)+x).clamp(-math.inf, 1e9),
    'nan': lambda self, x: self.d(self.c(x)+x).nan_to_num(math.nan),
    'a device': lambda self, x: self.c(x).to(torch.device('cpu'))+x}

@pytest.mark.parametrize('name', WRITTEN)
def test_constants_that_are_written_by_name(name):
    model,report = quantized(of(WRITTEN[name]))
    assert 'forward' in vars(model.b) and 'b: its forward is left' not in report.note
    floats = net(of(WRITTEN[name]))
    assert (model(batch())-floats(batch())).norm() < .05*floats(batch()).norm()
    assert torch.equal(copy.deepcopy(model)(batch()), model(batch()))

class Watched(Net):
    "The first call registers a hook and takes another away, as libraries do that keep what layers give."
    def __init__(self):
        super().__init__(Block)
        self.seen,self.watched = [],False
        self.start = self.b.d.register_forward_pre_hook(lambda *args: None)
    def forward(self, x):
        if not self.watched:
            self.b.c.register_forward_hook(lambda m, args, out: self.seen.append(1))
            self.start.remove()
            self.watched = True
        self.seen.clear()
        y = super().forward(x)
        return y*len(self.seen)

PASSES = {'quantize_model_': lambda m: quantize_model_(m, calibrate=[batch()]),
    'equalize_': lambda m: equalize_(m, batch()), 'smooth_': lambda m: smooth_(m, [batch()]),
    'rotate_': lambda m: rotate_(m, batch())}

@pytest.mark.parametrize('name', PASSES)
def test_hooks_that_the_first_call_registers_are_there_once(name):
    torch.manual_seed(0)
    model = Watched().eval()
    floats = copy.deepcopy(model)
    PASSES[name](model)
    found = model(batch())
    assert len(model.b.c._forward_hooks) == 1 and not model.b.d._forward_pre_hooks
    assert (found-floats(batch())).norm() < .05*found.norm()

@pytest.mark.parametrize('name', PASSES)
def test_layers_without_a_shape_are_refused(name):
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(ValueError, match=f'{name}: 0.weight has no shape; call the model once'): PASSES[name](model)
    assert type(model[0]) is nn.LazyConv2d and model(batch()).shape == (4, 2, 6, 6) and model[0].in_channels == 3

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return F.gelu(x)

@pytest.mark.filterwarnings('ignore:.torch.jit')
@pytest.mark.parametrize('name', PASSES)
def test_a_scripted_module_inside(name):
    torch.manual_seed(0)
    model = Net(of(lambda self, x: self.act(self.c(x))+x)).eval()
    model.b.act = torch.jit.script(Counting())
    before = model(batch())
    if name == 'quantize_model_': PASSES[name](model)
    else:
        with pytest.raises(ValueError, match=f'^{name}: the model has no graph'): PASSES[name](model)
        assert model.b.act.calls == 1           # what refused runs wrote is taken back
    assert (model(batch())-before).norm() < .05*before.norm()
