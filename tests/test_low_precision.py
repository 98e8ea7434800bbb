"""Training in few bits: stored weights, and the operands of products, against a second way to write them."""
import copy
import math
import pickle
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
import pytest
import torch
from estimators import equal, generator, through_onnx
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
import shok_nb as R
from shok_nb.engine import pieces
from shok_nb.engine.random import fold_in, uniform_like
from shok_nb.low_precision import products, stored
from shok_nb.networks.layers import own_in_products, weight_readers

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=.1)

# What code of Inductor left undone: the last block, where the length is no multiple of it (pytorch/pytorch#195582)
def operand(**kw):
    "A function that rounds to it, with a gradient of 0."
    op = R.Operand('nvfp4', **kw)
    def f(x): return products._rounded(op, x.detach(), -1, torch.tensor(0)).joined() + 0*x
    return f

SHORT = dict(row=(partial(R.mx_quantize, format='e2m1', pad=True), (5, 72)),
    curve=(partial(R.mx_quantize, format='e4m3', rounding=R.soft_round, pad=True), (5, 72)),
    column=(partial(R.mx_quantize, format='e2m1', pad=True, dim=0), (72, 1)),
    batch=(torch.vmap(partial(R.mx_quantize, format='e2m1', pad=True)), (5, 72)),
    square=(operand(block=(16, 16)), (72, 1)), flat=(operand(block=(16, 16)), (1, 72)),
    turned=(operand(eden=128), (5, 72)))

@pytest.mark.slow
@pytest.mark.parametrize('f, shape', SHORT.values(), ids=SHORT)
def test_a_short_block_in_code(f, shape):
    "Value and gradient, to the last block, as eager ones. Any seed: a law."
    x = torch.randn(shape, generator=generator(), requires_grad=True)
    ys = [g(x) for g in (f, torch.compile(f, fullgraph=True))]
    grads = [torch.autograd.grad(y, x, torch.arange(1., 1+y.numel()).view(shape))[0] for y in ys]
    torch.testing.assert_close(*ys, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

@pytest.mark.slow
def test_a_convolution_in_code():
    "One channel, whose kernels are filled up to whole squares: it is no more wrong than its sums."
    x,ys = torch.randn(8, 1, 8, 8, generator=generator()),[]
    for compiled in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(1, 8, 3, padding=1)
        R.low_precision_(conv)
        ys.append((torch.compile(conv) if compiled else conv)(x))
    torch.testing.assert_close(*ys, rtol=1e-4, atol=1e-5)

# --- weights that are stored at random
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_is_one_of_two_neighbours(dtype):
    "At every size: what torch casts down or up, and itself where that is x; infinity and nan stay where they can."
    x = torch.randn(20_000, generator=generator())*2.**torch.arange(-8, 8).repeat(1250)     # any seed: a law
    y = R.stochastic_cast(x, dtype, seed=torch.tensor(1))
    assert y.dtype == dtype and y.shape == x.shape
    largest = torch.finfo(dtype).max
    near = x.clamp(-largest, largest)
    gap = (y.float()-near).abs()
    assert (gap < R.ulp(near, dtype)).all() and (y.float() != near.to(dtype).float()).sum() > 1000
    odd = R.stochastic_cast(torch.tensor([torch.inf, torch.nan]), dtype, seed=torch.tensor(1)).float()
    assert not odd.isfinite().any()

def test_a_cast_of_a_wider_range():
    "What float16 holds is cast in float32: bfloat16 numbers that float16 lacks are not lost on the way."
    x = torch.tensor([65504.]*64, dtype=torch.float16)
    y = R.stochastic_cast(x, torch.bfloat16, seed=torch.tensor(0)).float()
    assert set(y.tolist()) <= {65280., 65536.} and y.isfinite().all()

OPTIMIZERS = dict(adamw=ADAMW, sgd=partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.01),
    nesterov=partial(torch.optim.SGD, lr=.1, momentum=.9, nesterov=True), adam=torch.optim.Adam,
    rmsprop=torch.optim.RMSprop, adagrad=torch.optim.Adagrad, adadelta=torch.optim.Adadelta, adamax=torch.optim.Adamax,
    nadam=torch.optim.NAdam, radam=torch.optim.RAdam, rprop=torch.optim.Rprop, asgd=torch.optim.ASGD,
    adafactor=torch.optim.Adafactor, amsgrad=partial(torch.optim.AdamW, amsgrad=True))

def some(dtype=torch.bfloat16, sizes=((8, 4), (4,), (3, 2))):
    g = generator()
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in sizes]

def give_gradients(params, i):
    g = generator(i)
    for p in params: p.grad = torch.randn(p.shape, generator=g).to(torch.bfloat16).to(p.dtype)

@pytest.mark.parametrize('threads', [1, 3])                # by NumPy, and by torch
def test_bits_that_carry_are_the_toss(threads, monkeypatch):
    """Whole numbers give what `float_round` gives, bit for bit, for any pattern: the largest, infinities and nan
    among them, in pieces that have such and in those that have none, and in any layout."""
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    g = generator()
    # 2**17: beyond a piece, and odd
    patterns = torch.randint(-2**31, 2**31-1, (2**17+77,), generator=g).to(torch.int32)
    ends = torch.tensor([0, 1, 0x8000, 0xFFFF, 0x10000, 0x3F800000, 0x7F7EFFFF, 0x7F7F0000, 0x7F7F0001, 0x7F7F8000,
        0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]).to(torch.int32)
    patterns[:28] = torch.cat([ends, ends | -2**31])
    calm = torch.randn(300, 401, generator=g)*torch.logspace(-44, 38, 401)
    def written(y): return torch.where(y.isnan(), torch.nan, y).view(torch.int16)
    for x in (patterns.view(torch.float32), calm, calm.t(), calm[::2, 1:], torch.empty(0), torch.tensor(-1.003)):
        for n in (0, -7):
            want = R.float_round(x, 'bfloat16', R.stochastic_round, seed=torch.tensor(n), random_bits=16)
            want = torch.where(x.isfinite(), want, x).to(torch.bfloat16)
            got = R.stochastic_cast(x, torch.bfloat16, seed=torch.tensor(n))
            assert got.shape == x.shape and torch.equal(written(got), written(want))

@pytest.mark.slow
def test_bits_that_carry_leave_the_rest_to_floats():
    "Compiled, mapped, with a gradient and in float64 the numbers are those of the toss too."
    x,seed = torch.randn(1000, generator=generator()),torch.tensor(3)
    def cast(x): return R.stochastic_cast(x, torch.bfloat16, seed=seed)
    want = cast(x)
    assert torch.equal(torch.compile(cast, backend='aot_eager', fullgraph=True)(x), want)
    assert torch.equal(torch.vmap(cast)(x[None])[0], want)
    leaf = x.clone().requires_grad_()
    assert torch.equal(cast(leaf), want) and cast(leaf).requires_grad
    wide = torch.full((9000,), 1.003, dtype=torch.float64)
    assert cast(wide).unique().tolist() == [1., 1.0078125]

@pytest.mark.parametrize('name', OPTIMIZERS)
def test_each_step_is_that_of_float32(name):
    "Three steps of every optimizer: in float32 from what is stored, then cast with the seed of its place."
    make,params = OPTIMIZERS[name],some()
    wide = [nn.Parameter(p.detach().float()) for p in params]
    ours,plain = R.RoundedOptimizer(params, make, seed=7, at_once=10),make(wide)
    for t in range(1, 4):
        give_gradients(params, t)
        give_gradients(wide, t)
        grads = [p.grad for p in params]
        ours.step()
        plain.step()
        assert all(p.grad is g and p.dtype == g.dtype == torch.bfloat16 for p,g in zip(params, grads))
        for i,(p,w) in enumerate(zip(params, wide)):
            seed = fold_in(fold_in(torch.tensor(7), t), i << 8)
            assert torch.equal(p, R.stochastic_cast(w, torch.bfloat16, seed=seed)), (t, i)
            w.data = p.data.float()

@pytest.mark.parametrize('states', [None, torch.bfloat16])
@pytest.mark.parametrize('format', [None, 'e4m3'])
def test_a_resume_goes_on_bit_for_bit(states, format, tmp_path):
    "Through a file, in an optimizer that is new; with two groups, and with parameters of two dtypes."
    def made():
        params = some()+some(torch.float32, ((5,),))
        groups = [dict(params=params[:2], lr=.1), dict(params=params[2:])]
        return params,R.RoundedOptimizer(groups, ADAMW, states=states, format=format, seed=3, at_once=12)
    def run(params, opt, steps):
        for i in steps:
            give_gradients(params, i)
            opt.step()
    params,opt = made()
    run(params, opt, range(5))
    other,again = made()
    run(other, again, range(3))
    torch.save(again.state_dict(), tmp_path/'state.pt')
    held = [p.detach().clone() for p in other]
    other,again = made()
    again.load_state_dict(torch.load(tmp_path/'state.pt'))
    with torch.no_grad():
        for p,h in zip(other, held): p.copy_(h)
    run(other, again, range(3, 5))
    for p,q in zip(params, other):
        assert torch.equal(p, q)
        for k,v in opt.state[p].items(): assert v.dtype == again.state[q][k].dtype and torch.equal(v, again.state[q][k])
    kept = states or torch.float32
    assert opt.state[params[0]]['exp_avg'].dtype == kept and opt.state[params[0]]['step'].dtype == torch.float32
    assert again.param_groups is again.inner.param_groups and again.param_groups[0]['lr'] == .1

# most do not divide into words of four draws, one has no numbers, one is laid out in another order
SMALL = [(), (1,), (2,), (3,), (5, 7), (3, 4), (2, 3, 5, 7), (0,), (64,)]

@pytest.mark.parametrize('states', [None, torch.bfloat16])
def test_small_parameters_are_stored_in_one_go(states, monkeypatch):
    "Side by side they get the numbers that each gets alone; each keeps memory of its own."
    def trained(at_once):
        torch.manual_seed(0)                            # any: both make the same
        params = [nn.Parameter(torch.randn(s).bfloat16()) for s in SMALL]
        params[6].data = params[6].data.to(memory_format=torch.channels_last)
        make = partial(torch.optim.SGD, lr=1., momentum=.9)
        opt = R.RoundedOptimizer(params, make, states=states, seed=3, at_once=at_once)
        with torch.no_grad():
            params[1].fill_(torch.finfo(torch.bfloat16).max)
            params[3][1],params[4][0, 0] = math.inf,math.nan
        for _ in range(3):
            for p in params: p.grad = torch.randn_like(p)
            params[1].grad.fill_(-5e35)                 # its step leads beyond the largest
            with torch.device('meta'): opt.step()       # where new tensors are to be is not asked
        return params,opt
    alone,one = trained(1)
    def alone_if_empty(x, *args): assert not x.numel(), 'a draw for each'
    monkeypatch.setattr(stored, '_carried', alone_if_empty)
    params,opt = trained(None)
    for p,q in zip(params, alone): assert torch.equal(p.view(torch.int16), q.view(torch.int16))
    for p,q in zip(params, alone):
        for k,v in opt.state[p].items():
            assert torch.equal(v, one.state[q][k]) and v.dtype == one.state[q][k].dtype
            assert v.untyped_storage().nbytes() == v.nbytes

def test_few_are_wide_at_a_time():
    "While torch's optimizer steps, no more elements are in float32 than at_once says; memory is that of before."
    params = some(sizes=((10,),)*7)
    opt = R.RoundedOptimizer(params, ADAMW, at_once=25)
    at,seen,step = [p.data_ptr() for p in params],[],opt.inner.step
    def watched():
        seen.append(sum(p.numel() for g in opt.inner.param_groups for p in g['params'] if p.dtype == torch.float32))
        return step()
    opt.inner.step = watched
    give_gradients(params, 0)
    params[3].grad = None
    before = params[3].detach().clone()
    opt.step()
    assert seen == [20, 20, 20] and [p.data_ptr() for p in params] == at and torch.equal(params[3], before)

def test_what_fails_leaves_dtypes_and_gradients():
    params = some()
    opt = R.RoundedOptimizer(params, ADAMW)
    give_gradients(params, 0)
    grads,values = [p.grad for p in params],[p.detach().clone() for p in params]
    def broken(): raise RuntimeError('no')
    opt.inner.step = broken
    with pytest.raises(RuntimeError, match='no'): opt.step()
    for p,g,v in zip(params, grads, values): assert p.grad is g and p.dtype == g.dtype and torch.equal(p, v)

def resumed(make, shape, **kw):
    "A parameter that went on, and one that was loaded after four steps and went on."
    g = generator()
    def gradient(): return torch.randn(shape, generator=g).bfloat16()
    w = nn.Parameter(gradient())
    first = R.RoundedOptimizer([w], make, **kw)
    for _ in range(4):
        w.grad = gradient()
        first.step()
    v = nn.Parameter(w.detach().clone())
    second = R.RoundedOptimizer([v], make, **kw)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(5):
        w.grad = gradient()
        v.grad = w.grad.clone()
        first.step()
        second.step()
    return w,v

EVERY = OPTIMIZERS | dict(asgd=partial(torch.optim.ASGD, lr=.01, t0=0), nadam=partial(torch.optim.NAdam, lr=.05),
    fused=partial(ADAMW, fused=True), foreach=partial(ADAMW, foreach=True))
@pytest.mark.parametrize('shape', [(40, 6), (5,), ()], ids=str)
@pytest.mark.parametrize('name', EVERY)
def test_a_resume_of_every_optimizer(name, shape):
    "States of another shape than the parameter, and those of a single number, keep their dtype too."
    assert equal(*([t] for t in resumed(EVERY[name], shape)))

class Others(torch.optim.Optimizer):
    """What optimizers of others do that torch's do not: state beside `state` by tensor and by `id`, in dicts, lists and
    tuples with text, in a dtype of its own, or kept as the gradient itself; state of its own in what it saves."""
    def __init__(self, params, lr=.05):
        super().__init__(params, dict(lr=lr))
        self.by_tensor,self.by_id,self.steps,self.hooked = {},{},0,0
        self.known = {id(p) for g in self.param_groups for p in g['params'] if p.ndim > 1}
        for p in self.known_parameters(): self.state[p]['first'] = torch.full_like(p, .1)
        self.register_state_dict_post_hook(lambda me, d: d | dict(hooked=me.hooked))
    def known_parameters(self): return [p for g in self.param_groups for p in g['params']]
    @torch.no_grad()
    def step(self):
        self.steps += 1
        for p in self.known_parameters():
            state,g = self.state[p],p.grad
            state['first'].addcmul_(g, g)
            state.setdefault('nested', dict(mean=torch.zeros_like(g), name='a,b->c'))
            state.setdefault('several', [torch.zeros_like(g), (torch.ones(3, dtype=torch.float64), 'text')])
            state.setdefault('small', torch.zeros_like(g, dtype=torch.bfloat16))
            state['nested']['mean'].lerp_(g, .1)
            state['several'][0].add_(g)
            state['several'][1][0].mul_(1.0001)
            state['small'].lerp_(g.bfloat16(), .25)
            last = state.get('last', g)
            state['last'] = g
            for kept,key in ((self.by_tensor, p), (self.by_id, id(p))):
                kept[key] = kept.get(key, 0)*.9+g.norm()
            assert state['nested']['name'] == 'a,b->c' and state['several'][1][1] == 'text'
            sign = -1 if id(p) in self.known else 1
            move = state['nested']['mean']+.1*state['several'][0]+state['small'].float()+.01*(g-last)
            move = move/(state['first'].sqrt()*state['several'][1][0].mean())
            move = move+sign*.001*(self.by_tensor[p]+self.by_id[id(p)])+.001*self.steps
            p.add_(move, alpha=-self.param_groups[0]['lr'])
        self.hooked = self.steps
    def state_dict(self):
        each = enumerate(self.known_parameters())
        apart = [(i, self.by_tensor[p], self.by_id[id(p)]) for i,p in each]
        return super().state_dict() | dict(apart=apart, steps=self.steps)
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        known = self.known_parameters()
        for i,a,b in state_dict['apart']: self.by_tensor[known[i]],self.by_id[id(known[i])] = a.clone(),b.clone()
        self.steps = self.hooked = state_dict['hooked']

@pytest.mark.parametrize('states', [None, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_optimizers_of_others(states):
    "A parameter is the same object for them at each step, in float32: they go as without us, and resume bit for bit."
    plain = [nn.Parameter(p.detach().float()) for p in some()]
    ours = [nn.Parameter(p.detach().clone()) for p in plain]
    one,two = Others(plain),R.RoundedOptimizer(ours, Others)
    for i in range(4):
        for params,opt in ((plain, one), (ours, two)):
            give_gradients(params, i)
            opt.step()
    assert equal(plain, ours) and len(two.inner.by_tensor) == len(ours)
    first,second = some(),some()
    opt,again = (R.RoundedOptimizer(params, Others, states=states) for params in (first, second))
    for i in range(6):
        if i == 3:
            saved = copy.deepcopy(opt.state_dict())
            assert saved['hooked'] == saved['steps'] == 3
            for p,q in zip(first, second): q.data.copy_(p.data)
            again.load_state_dict(saved)
            kept = copy.deepcopy(saved)
        give_gradients(first, i)
        opt.step()
        if i < 3: continue
        give_gradients(second, i)
        again.step()
    assert equal(first, second)
    # a file in memory stays what it was
    for a,b in zip(saved['state'].values(), kept['state'].values()):
        assert torch.equal(a['first'], b['first']) and torch.equal(a['nested']['mean'], b['nested']['mean'])
    for p in first:
        state = opt.state[p]
        assert state['first'].dtype == state['nested']['mean'].dtype == (states or torch.float32)
        assert state['small'].dtype == torch.bfloat16 and state['several'][1][0].dtype == torch.float64

def test_a_step_of_the_file_is_its_own():
    "The count of a checkpoint that stays in memory does not go on with the optimizer that loaded it."
    params = some()
    opt = R.RoundedOptimizer(params, ADAMW)
    give_gradients(params, 0)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    opt.step()
    assert saved['state'][0]['step'] == 1 and opt.state[params[0]]['step'] == 2

def test_a_state_made_before_the_first_step_is_wide():
    "Adagrad makes its sum with the optimizer: squares of .02 and less are added to it, also for a single number."
    for shape in ((8,), ()):
        w = nn.Parameter(torch.ones(shape).bfloat16())
        opt = R.RoundedOptimizer([w], partial(torch.optim.Adagrad, initial_accumulator_value=1))
        for _ in range(100):
            w.grad = torch.full_like(w, 2**-5)
            opt.step()
        total = opt.state[w]['sum']
        assert total.dtype == torch.float32 and torch.equal(total, torch.full(shape, 1+100*2.**-10))

def test_parameters_that_are_exchanged():
    "Trainers that shard a model after the optimizer was made put other tensors into its groups, and drop the first."
    params,others = some(),some()
    opt,same = R.RoundedOptimizer(params, ADAMW),R.RoundedOptimizer(others, ADAMW)
    new = [nn.Parameter(p.detach().clone()) for p in params]
    opt.param_groups[0]['params'] = new
    for i in range(2):
        give_gradients(new, i)
        give_gradients(others, i)
        opt.step()
        same.step()
    assert equal(new, others) and [*map(id, opt.wide)] == [*map(id, new)]

def test_a_step_that_is_compiled():
    "`torch.compile` of a step runs it as it is, with the same draws."
    params,others = some(),some()
    opt,same = R.RoundedOptimizer(params, ADAMW),R.RoundedOptimizer(others, ADAMW)
    step = torch.compile(opt.step, backend='eager')
    for i in range(3):
        give_gradients(params, i)
        give_gradients(others, i)
        step()
        same.step()
    assert equal(params, others)

class Averages(torch.optim.SGD):
    "Weights to evaluate with that are not those that train, as schedule-free optimizers have."
    def step(self):
        assert self.trains
        super().step()
        for p in self.param_groups[0]['params']: self.state[p].setdefault('mean', p.clone()).lerp_(p, .5)
    trains = False
    def swap(self, trains):
        if self.trains == trains: return
        self.trains = trains
        for p in self.param_groups[0]['params']:
            if 'mean' in self.state[p]:
                kept = p.clone()
                p.copy_(self.state[p]['mean'])
                self.state[p]['mean'] = kept
    @torch.no_grad()
    def train(self): self.swap(True)
    @torch.no_grad()
    def eval(self): self.swap(False)

def test_weights_to_evaluate_with():
    "`train` and `eval` reach the optimizer, with its parameters in float32; one that has none is left alone."
    plain = [nn.Parameter(p.detach().float()) for p in some()]
    ours,halves = [nn.Parameter(p.detach().clone()) for p in plain],some()
    make = partial(Averages, lr=.1)
    opts = [(plain, make(plain)), *((params, R.RoundedOptimizer(params, make)) for params in (ours, halves))]
    for i in range(5):
        for params,opt in opts:
            opt.train()
            give_gradients(params, i)
            opt.step()
            opt.eval()
            if i == 3: params[0].grad = None
        assert equal(plain, ours)
    # each of 5 swaps rounds by less than a step of bfloat16
    for p,q in zip(plain, halves):
        assert q.dtype == torch.bfloat16 and torch.allclose(p, q.float(), rtol=5*2**-7, atol=.01)
    adamw = R.RoundedOptimizer(some(), ADAMW)
    assert adamw.eval() is None and adamw.train() is None

def test_an_interrupted_step_loses_nothing():
    "Who stops a cell while the optimizer steps goes on with its states."
    params,others = some(),some()
    opt,same = R.RoundedOptimizer(params, ADAMW),R.RoundedOptimizer(others, ADAMW)
    def stop(): raise KeyboardInterrupt
    for i in range(3):
        give_gradients(params, i)
        if i == 2:
            step,opt.inner.step = opt.inner.step,stop
            with pytest.raises(KeyboardInterrupt): opt.step()
            opt.inner.step = step
        opt.step()
        give_gradients(others, i)
        same.step()
    assert equal(params, others) and all(opt.state[p]['step'] == 3 for p in params)

@pytest.mark.parametrize('dtype', [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_states_of_eight_bits(dtype):
    """A scale for each row and no second moment of 0: weights go where float32 states lead them, not a hundred times as
    far; a resume goes on bit for bit."""
    def moved(states):
        g = generator()
        w = nn.Parameter(torch.zeros(16, 256).bfloat16())
        opt = R.RoundedOptimizer([w], partial(torch.optim.AdamW, lr=1e-3), states=states)
        for _ in range(20):
            w.grad = (torch.logspace(-6, 0, 16)[:, None]*torch.randn(16, 256, generator=g)).bfloat16()
            opt.step()
        return w.detach().float(),opt.state[w]
    (want,_),(got,state) = moved(None),moved(dtype)
    # Adam's step is at most about the rate: 20 of them are .02; a cosine is a direction
    assert got.abs().max() < .04 and torch.cosine_similarity(got.flatten(), want.flatten(), 0) > .9
    assert state['exp_avg'].dtype == dtype and state['exp_avg_scale'].shape == (16,)
    for shape in ((40, 6), (7, 1), (5,)): assert equal(*([t] for t in resumed(ADAMW, shape, states=dtype)))

def test_copied_and_pickled():
    "A copy goes on as the optimizer does, and so does one that was written down."
    params = some()
    opt = R.RoundedOptimizer(params, ADAMW, seed=3)
    give_gradients(params, 0)
    opt.step()
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        others = again.param_groups[0]['params']
        assert repr(again) == repr(opt) and equal(params, others) and again.iteration == 1
        now = [p.detach().clone() for p in params]
        give_gradients(params, 1)
        give_gradients(others, 1)
        before = copy.deepcopy(opt)
        give_gradients(before.param_groups[0]['params'], 1)
        before.step()
        again.step()
        assert equal(before.param_groups[0]['params'], others) and not equal(now, others) and equal(now, params)

def test_a_step_that_fails_moves_nothing():
    "A layout that the optimizer refuses is found before the first chunk, and the states stay small."
    for make,layout in ((ADAMW, 'sparse_coo'), (torch.optim.SparseAdam, 'strided')):
        params = some(sizes=((4, 4), (4, 4)))
        opt = R.RoundedOptimizer(params, make, at_once=1)
        give_gradients(params, 0)
        for i,p in enumerate(params):
            if (i == 1) == (layout == 'sparse_coo'): p.grad = p.grad.to_sparse()
        before = [p.detach().clone() for p in params]
        with pytest.raises(TypeError, match=f'params must have (dense|sparse) gradients for .*{layout}'): opt.step()
        assert equal(before, params) and opt.iteration == 0
    params = some()
    opt = R.RoundedOptimizer(params, ADAMW, states=torch.bfloat16)
    give_gradients(params, 0)
    opt.step()
    before,states = [p.detach().clone() for p in params],[{**opt.state[p]} for p in params]
    opt.param_groups[0]['betas'] = None
    with pytest.raises(TypeError): opt.step()
    assert equal(before, params) and opt.iteration == 1
    assert all(opt.state[p][k] is v for p,was in zip(params, states) for k,v in was.items())

def test_a_step_stays_in_its_memory():
    "Parameters and states of bfloat16 are written where they are, with the values of a cast; autograd notices."
    w = nn.Parameter(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).bfloat16())
    columns = nn.Parameter(torch.zeros(200, 300, dtype=torch.bfloat16).T)        # not one run of memory
    params = [w, columns]
    opt = R.RoundedOptimizer(params, ADAMW, states=torch.bfloat16, seed=5)
    give_gradients(params, 0)
    opt.step()
    kept = {id(t): t.data_ptr() for p in params for t in (p, *opt.state[p].values())}
    again = copy.deepcopy(opt)
    others = again.param_groups[0]['params']
    for p in others: again.state[p] = {k: v.t().contiguous().t() if v.ndim else v for k,v in again.state[p].items()}
    others[0].data = others[0].data.t().contiguous().t()                        # so that it takes the other way
    saved = (w*w).sum(),(columns*columns).sum()
    for both in (params, others): give_gradients(both, 1)
    opt.step()
    again.step()
    assert equal(params, others) and equal(opt.state[w].values(), again.state[others[0]].values())
    assert all(t.data_ptr() == kept[id(t)] for t in (w, columns, opt.state[w]['exp_avg'], opt.state[w]['exp_avg_sq']))
    for y in saved:
        with pytest.raises(RuntimeError, match='modified by an inplace operation'): y.backward()

def test_an_update_asks_for_no_new_memory():
    "What it widens is where the step before has widened, and nowhere that anybody still sees."
    from bench import Cpu
    from shok_nb.engine import pieces
    w = nn.Parameter(torch.ones(2**18, dtype=torch.bfloat16))
    opt = R.RoundedOptimizer([w], partial(torch.optim.AdamW, lr=1e-3, fused=True), states=torch.bfloat16)
    seen = []
    opt.inner.register_step_post_hook(lambda inner, *_: seen.append(inner.param_groups[0]['params'][0].detach()))
    for i in range(3):
        w.grad = torch.full_like(w, i-1.)
        opt.step()
    first,second,third = seen
    assert len({t.data_ptr() for t in seen}) == 3 and first.ne(second).any() and second.ne(third).any()
    seen.clear()
    del first,second,third
    opt.step()
    seen.clear()
    assert Cpu().peak(opt.step) < w.numel()/2
    pieces.give_all_back()

def test_a_copy_takes_its_own_steps():
    "A scheduler of torch puts a step of the original in its place, which a copy must not take along."
    params = some()
    opt = R.RoundedOptimizer(params, ADAMW)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    give_gradients(params, 0)
    opt.step()
    now = [p.detach().clone() for p in params]
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        others = again.param_groups[0]['params']
        give_gradients(others, 1)
        again.step()
        assert (opt.iteration, again.iteration) == (1, 2) and equal(now, params) and not equal(now, others)

class Shared(torch.optim.Optimizer):
    "Its step depends on the gradients of all parameters, and counts itself in its groups."
    def __init__(self, params): super().__init__(params, dict(steps=0))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            g['steps'] += 1
            size = torch.stack([p.grad.norm() for p in g['params']]).norm()
            for p in g['params']: p -= p.grad/(size*g['steps'])

def test_a_step_that_looks_at_all_parameters(monkeypatch):
    "Those of torch's optimizers look at one at a time; of others nothing is known, so they get all at once."
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    params,plain = ([torch.nn.Parameter(torch.ones(400, 500)) for _ in range(3)] for _ in range(2))
    optimizers = R.RoundedOptimizer(params, Shared),Shared(plain)
    for t in range(2):
        for opt,ps in zip(optimizers, (params, plain)):
            give_gradients(ps, t)
            opt.step()
    assert optimizers[0].param_groups[0]['steps'] == 2 and equal(params, plain)

def test_an_optimizer_of_others_takes_what_it_takes():
    "Only of torch's own it is known which layouts they refuse."
    class Own(torch.optim.SGD): "A class of somebody."
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    p.grad = torch.eye(4).to_sparse().bfloat16()
    R.RoundedOptimizer([p], partial(Own, lr=.5)).step()
    assert torch.equal(p.detach().float(), 1-.5*torch.eye(4))

def test_hooks_on_the_state():
    params,seen = some(),[]
    opt = R.RoundedOptimizer(params, ADAMW)
    opt.register_state_dict_pre_hook(lambda o: seen.append('saves'))
    opt.register_state_dict_post_hook(lambda o, state: seen.append('saved'))
    state = opt.state_dict()
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append('loads'))
    opt.register_load_state_dict_post_hook(lambda o: seen.append('loaded'))
    opt.load_state_dict(state)
    assert seen == ['saves', 'saved', 'loads', 'loaded']

def test_an_optimizer_that_could_not_be_made():
    "It may live on in the traceback of its error, and quantize_model_ looks at all optimizers."
    with pytest.raises(TypeError) as kept: R.RoundedOptimizer([nn.Parameter(torch.ones(2))], make=3)
    R.quantize_model_(nn.Sequential(nn.Linear(4, 4)), 4, None)
    assert kept.tb

def test_a_closure_and_a_new_group():
    params = some()
    opt = R.RoundedOptimizer(params[:2], ADAMW)
    opt.add_param_group(dict(params=params[2:], lr=.5))
    def closure():
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss
    before = [p.detach().clone() for p in params]
    assert opt.step(closure).requires_grad and len(opt.inner.param_groups) == 2
    assert all(not torch.equal(p, b) for p,b in zip(params, before))

def test_ranks_agree():
    "The same parameters, gradients and seed: the same numbers, whatever torch's generator says."
    def run(noise):
        torch.manual_seed(noise)
        params = some()
        opt = R.RoundedOptimizer(params, ADAMW, states=torch.bfloat16)
        for i in range(3):
            give_gradients(params, i)
            opt.step()
        return torch.cat([p.detach().flatten() for p in params])
    assert torch.equal(run(1), run(2))

@pytest.mark.parametrize('call, kind, told', [
    (lambda p: R.RoundedOptimizer(p, 3), TypeError, 'RoundedOptimizer: make must be callable, got int'),
    (lambda p: R.RoundedOptimizer(p, lambda groups: groups), TypeError,
        'RoundedOptimizer: make must make a torch.optim.Optimizer, got list'),
    (lambda p: R.RoundedOptimizer(p, lambda groups: torch.optim.SGD(some())), ValueError,
        'RoundedOptimizer: make must give its optimizer the groups'),
    (lambda p: R.RoundedOptimizer(p, torch.optim.LBFGS), TypeError, 'RoundedOptimizer: make must make an optimizer of'),
    (lambda p: R.RoundedOptimizer(p, ADAMW, format='e9m9'), ValueError, 'RoundedOptimizer: format must be one of'),
    (lambda p: R.RoundedOptimizer(p, ADAMW, states=torch.int8), TypeError, 'RoundedOptimizer: states must be a dtype'),
    (lambda p: R.RoundedOptimizer(p, ADAMW, at_once=0), ValueError, 'RoundedOptimizer: at_once must be >= 1, got 0'),
    (lambda p: R.RoundedOptimizer(p, ADAMW, seed=.5), TypeError, 'RoundedOptimizer: seed must be an int, got float'),
    (lambda p: R.RoundedOptimizer(p, ADAMW, states=torch.bfloat16).load_state_dict(
        R.RoundedOptimizer(some(), ADAMW).state_dict()), ValueError,
        'RoundedOptimizer: state_dict has states=None'),
    (lambda p: R.stochastic_cast(p[0], 'bfloat16'), TypeError, 'stochastic_cast: dtype must be one of torch.float16'),
    (lambda p: R.stochastic_cast(p[0], torch.int8), TypeError, 'stochastic_cast: dtype must be one of torch.float16'),
    (lambda p: R.stochastic_cast(p[0].long(), torch.bfloat16), TypeError, 'stochastic_cast: x must be'),
])
def test_stored_refuses(call, kind, told):
    with pytest.raises(kind) as e: call(some())
    assert str(e.value).startswith(told), e.value

# --- few random bits
def few(bits):
    "The uniform numbers of `bits` bits for seed 4, as the middles of as many parts of [0, 1): the upper ones of more."
    most = 16 if bits <= 16 else None
    return lambda x: ((uniform_like(x, seed=torch.tensor(4), random_bits=most)*2**bits).floor()+.5)/2**bits

@pytest.mark.parametrize('bits', (1, 4, 8, 10, 23))
@pytest.mark.parametrize('format', ['bfloat16', 'e4m3', 'e2m1'])
def test_few_random_bits_by_hand(bits, format):
    "In float64: up where the fraction of the step around the value is above the middle of the part that was drawn."
    x = torch.randn(4000, generator=generator())*2
    step = R.ulp(x, format).double()
    u,wide = few(bits)(x).double(),x.double()
    low = torch.floor(wide/step)*step
    want = torch.where((wide-low)/step > u, low+step, low)
    knobs = dict(seed=torch.tensor(4), random_bits=bits)
    y = R.float_round(x, format, R.stochastic_round, **knobs)
    inside = wide.abs() < 6                                 # the largest of e2m1
    assert torch.equal(y.double()[inside], want[inside])
    if format == 'bfloat16': assert torch.equal(R.stochastic_cast(x, torch.bfloat16, **knobs).float(), y)

@pytest.mark.parametrize('bits', (2, 4, 8))
def test_the_bias_of_few_random_bits(bits):
    """The mean over all 2**bits equally likely draws is the closed form; a fraction below half a part never goes up.
    Exact, but for the tosses: of them, any seed would do."""
    p = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    u = (torch.arange(2**bits).double()+.5)/2**bits
    chance = (p > u[:, None]).double().mean(0)
    bias = torch.ceil(2**bits*p-.5)/2**bits - p
    assert torch.allclose(chance-p, bias, atol=1e-15) and bias.abs().max() <= 2**-(bits+1)
    x = p.float().expand(4000, 1000)
    y = R.stochastic_round(x, seed=torch.tensor(0), random_bits=bits)
    # of a mean of 4000 tosses, five deviations: one of 1000 points is farther off in one seed of 1700
    assert ((y.double().mean(0)-chance).abs() <= 5*(chance*(1-chance)/4000).sqrt()).all()
    assert y[:, p < 2**-(bits+1)].abs().max() == 0

def test_a_recipe_is_printed_in_lines_that_fit():
    "Two operands in a line if they are short, else each in its own."
    assert max(len(line) for r in R.RECIPES.values() for line in repr(r).splitlines()) <= 95
    lines = repr(R.RECIPES['tetrajet_v2']).splitlines()
    assert [line[13:15] for line in lines[1:7]] == ['x:', 'w:', 'g:', 'w:', 'g:', 'x:']

def test_few_random_bits_everywhere():
    "In blocks, in an operand and in an optimizer; a partial draws by the seed too."
    few = partial(R.stochastic_round, random_bits=4)
    x,knobs = torch.randn(8, 64, generator=generator()),dict(seed=torch.tensor(1))
    y = R.mx_quantize(x, 'e2m1', R.stochastic_round, scale='up', random_bits=4, **knobs)
    assert torch.equal(y, R.mx_quantize(x, 'e2m1', few, scale='up', **knobs))
    assert not torch.equal(y, R.mx_quantize(x, 'e2m1', R.stochastic_round, scale='up', **knobs))
    op = R.Operand('e2m1', 32, 'up', few)
    assert repr(op) == 'e2m1, 1 x 32, scale up, stochastic random_bits=4' and op.draws
    layer = identity(of_inputs(op), 64)
    seed = layer.drawn_by('cpu')[0]
    layer.eval()
    assert torch.equal(layer(x), R.mx_quantize(x, 'e2m1', few, scale='up', seed=seed))
    def run(noise):
        torch.manual_seed(noise)
        params = some()
        opt = R.RoundedOptimizer(params, ADAMW, rounding=few)
        give_gradients(params, 0)
        opt.step()
        return params
    assert equal(run(1), run(2)) and repr(R.nn.StochasticRound()) == 'StochasticRound()'

@pytest.mark.slow
def test_few_random_bits_compiled():
    x = torch.randn(8, 64, generator=generator())
    def f(x): return R.float_round(x, 'e4m3', R.stochastic_round, random_bits=4, seed=torch.tensor(1))
    for backend in ('aot_eager', 'inductor'):
        assert torch.equal(torch.compile(f, backend=backend, fullgraph=True)(x), f(x))

@pytest.mark.parametrize('bits, kind, told', [(0, ValueError, 'in [1, 23], got 0'),
    (24, ValueError, 'in [1, 23], got 24'), (4., TypeError, 'an int, got float'), (True, TypeError, 'an int, got bool'),
    ('4', TypeError, 'an int, got str')])
def test_random_bits_refused(bits, kind, told):
    calls = dict(stochastic_round=lambda: R.stochastic_round(X, random_bits=bits),
        stochastic_cast=lambda: R.stochastic_cast(X, torch.bfloat16, random_bits=bits))
    for name,call in calls.items():
        with pytest.raises(kind) as e: call()
        assert str(e.value) == f'{name}: random_bits must be {told}'

# --- products
def small(): return nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 16))

def gradients(model, x, way=None):
    loss = (model if way is None else way)(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

X = torch.randn(24, 40, generator=generator())

def made(recipe, seed=0, model=None):
    torch.manual_seed(0)
    model = small() if model is None else model
    R.low_precision_(model, recipe, seed=seed)
    return model

FREE = None, None
def of_inputs(op): return R.Recipe('inputs alone', (op, None), FREE, FREE)

def identity(recipe, n):
    "A layer that gives its inputs as they are rounded."
    layer = made(recipe, model=nn.Linear(n, n, bias=False))
    with torch.no_grad(): layer.weight.copy_(torch.eye(n))
    return layer

def by_tile(t, rows, columns):
    "In e4m3, each tile beside its largest magnitude."
    out = torch.empty_like(t)
    for i in range(0, t.shape[0], rows):
        for j in range(0, t.shape[1], columns):
            part = t[i:i+rows, j:j+columns]
            s = part.abs().max()/448
            out[i:i+rows, j:j+columns] = R.float_round(part/s, 'e4m3')*s
    return out

@pytest.mark.parametrize('recipe', R.RECIPES)
def test_each_recipe(recipe):
    """Sizes that no block divides: near the float gradients, other than they, and the same for a copy. Evaluation
    draws nothing new; what is called to be trained does, if anything is drawn."""
    torch.manual_seed(0)
    plain,model = small(),made(recipe)
    wanted,found = gradients(plain, X),gradients(model, X)
    for a,b in zip(wanted, found):
        assert a.shape == b.shape and not torch.equal(a, b) and (a-b).norm() < .4*a.norm(), recipe
    assert equal(found, gradients(made(recipe), X))
    assert equal(found, gradients(model, X)) != R.RECIPES[recipe].draws()
    model.eval()
    assert equal(gradients(model, X), gradients(model, X))
    assert equal(gradients(copy.deepcopy(model), X), gradients(model, X))

def test_another_seed_draws_other_numbers():
    one,other = (gradients(made('nvfp4', seed=s), X) for s in (0, 1))
    assert not equal(one, other) and torch.equal(one[0], other[0])          # forward is to the nearest

def blocks(t, fmt, dim): return R.mx_quantize(t, fmt, dim=dim, scale='up', pad=True)

@pytest.mark.parametrize('recipe, value, slope', [('mxfp8', 'e4m3', 'e5m2'), ('mxfp4', 'e2m1', 'e2m1')])
def test_products_of_mx_by_hand(recipe, value, slope):
    "Each operand in blocks along the axis that its product sums over; e4m3 has so many exponents that none is told."
    layer = made(recipe, model=nn.Linear(40, 24))
    g,w = torch.randn(24, 24, generator=generator()),layer.weight.detach()
    x = X.clone().requires_grad_()
    y = layer(x)
    dx,dw,db = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    assert torch.equal(y, blocks(X, value, 1) @ blocks(w, value, 1).T + layer.bias)
    assert torch.equal(dx, blocks(g, slope, 1) @ blocks(w, value, 0))
    assert torch.equal(dw, blocks(g, slope, 0).T @ blocks(X, value, 0)) and torch.equal(db, g.sum(0))

@pytest.mark.parametrize('block', ['tensor', 'row', 8, (8, 4), (24, 40)])
def test_scales_that_are_floats(block):
    "Of every kind of block: the largest magnitude becomes the largest number, the rest is rounded beside it."
    size = dict(tensor=(24, 40), row=(1, 40)).get(block) or (block if isinstance(block, tuple) else (1, block))
    assert torch.equal(identity(of_inputs(R.Operand('e4m3', block=block)), 40)(X), by_tile(X, *size))

class Products(TorchDispatchMode):
    "Keeps what torch multiplies."
    def __init__(self):
        super().__init__()
        self.operands = []
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default: self.operands += args           # a turn is a bmm
        return op(*args, **kwargs or {})

@pytest.mark.parametrize('recipe', sorted({*R.RECIPES} - {'fp8_block', 'tetrajet_v2'}))
def test_bfloat16_holds_what_is_multiplied(recipe):
    "A scale that the sum has in common comes after it, so bfloat16 or TensorFloat32 multiplies exactly."
    layer = made(recipe, model=nn.Linear(40, 24, bias=False))
    with Products() as seen: torch.autograd.grad(layer(X.clone().requires_grad_()).sum(), layer.weight)
    assert len(seen.operands) == 6
    for t in seen.operands: assert t.abs().max() > 0 and torch.equal(t.bfloat16().float(), t)

@pytest.mark.parametrize('recipe', ['fp8', 'fp8_row', 'nvfp4_nearest', 'nvfp4', 'quartet_ii'])
def test_powers_of_two_pass_through(recipe):
    "Inputs, weights and gradients of 1e-17, whose scales multiplied would be no normal number, and of 1e11."
    def found(*powers):
        layer,x,g = made(recipe, model=nn.Linear(128, 128, bias=False)),*torch.randn(2, 128, 128, generator=generator())
        of_x,of_w,of_g = (2.**p for p in powers)
        x = (x*of_x).requires_grad_()
        with torch.no_grad(): layer.weight *= of_w
        y = layer(x)
        dx,dw = torch.autograd.grad(y, (x, layer.weight), g*of_g)
        return y/of_x/of_w,dx/of_g/of_w,dw/of_g/of_x
    plain = found(0, 0, 0)
    for powers in ((-55, -55, 0), (-55, 0, -55), (0, -55, -55), (37, 37, 37)): assert equal(plain, found(*powers))

def test_a_turn_changes_no_product():
    "With operands as they are, turned or not: the same gradient of the weight, to float32."
    one,*others = (gradients(made(R.Recipe('free', FREE, FREE, FREE, hadamard=h)), X) for h in (0, 32, (64, 16)))
    for other in others:
        for a,b in zip(one, other): assert torch.allclose(a, b, rtol=1e-5, atol=1e-4)
    assert equal(one, gradients(made(R.Recipe('free', FREE, FREE, FREE)), X))

@pytest.mark.parametrize('recipe', ['nvfp4', 'nvfp4_4/6', 'mxfp4_stochastic'])
def test_gradients_have_no_bias(recipe):
    """The mean over 64 draws, along the gradient: four deviations of it are less than what a slope of .9965 lacks.
    Any seeds: one run in 16,000 is farther off by chance."""
    torch.manual_seed(0)
    plain = nn.Linear(96, 96, bias=False)
    g = torch.randn(192, 96, generator=generator())
    x = torch.randn(192, 96, generator=generator(1)).requires_grad_()
    r = R.RECIPES[recipe]
    r = R.Recipe('gradients alone', FREE, (r.input_gradient[0], None), (r.weight_gradient[0], None), r.hadamard)
    layer = made(r, model=copy.deepcopy(plain))
    exact = torch.autograd.grad(plain(x), (x, plain.weight), g)
    draws = [torch.autograd.grad(layer(x), (x, layer.weight), g) for _ in range(64)]
    for want,found in zip(exact, zip(*draws)):
        slopes = torch.stack([(t*want).sum()/want.square().sum() for t in found])
        assert abs(slopes.mean()-1) < 4*slopes.std()/8 < .0035

UP = dict(scale='up', rounding=R.stochastic_round)
UNBIASED = dict(hadamard=(R.Operand('nvfp4', **UP), 128), tetrajet=(R.RECIPES['tetrajet_v2'].weight_gradient[0], 16),
    eden=(R.RECIPES['quartet_ii'].weight_gradient[0], 128), luq=(R.RECIPES['luq'].weight_gradient[0], 0))

def draws_of(op, g, turn, draws, copies=1):
    "A gradient as it is rounded, turned back: that of the input of a layer whose weight is the identity."
    layer = identity(R.Recipe('one', FREE, (op, None), FREE, (turn, 0)), 128)
    g = g.repeat(copies, 1)
    x = g.clone().requires_grad_()
    found = torch.stack([torch.autograd.grad(layer(x), x, g)[0] for _ in range(draws)])
    return found.view(draws, copies, -1, 128).mean(1)

@pytest.mark.parametrize('name', UNBIASED)
def test_operands_have_no_bias(name):
    """The mean of 50 turns of 8 copies: along the gradient, where four deviations are less than what .9965 lacks, and
    in all 8192 directions, where what is left is the noise of the mean; its share varies by .016. Any seed would do."""
    op,turn = UNBIASED[name]
    g = torch.randn(64, 128, generator=generator())
    found = draws_of(op, g, turn, 50, 8)
    slopes = (found*g).sum((1, 2))/g.square().sum()
    assert abs(slopes.mean()-1) < 4*slopes.std()/50**.5 < .003
    noise = found.var(0).sum()/50
    assert (found.mean(0)-g).square().sum() < 1.1*noise

def test_blocks_of_zeros_with_eden():
    "They stay zeros, and spoil nothing beside them."
    op = R.Operand('nvfp4', eden=32)
    x = torch.randn(4, 128, generator=generator())
    x[1],x[2, :16] = 0.,0.
    y, = draws_of(op, x, 0, 1)
    assert y.isfinite().all() and not y[1].any() and not y[2, :16].any()
    assert (y-x).norm() < .2*x.norm() and repr(op).endswith(', eden 32')

def test_integers_into_a_convolution():
    layer = made(R.RECIPES['mxfp8'], model=nn.Conv2d(1, 2, 3))
    with pytest.raises(TypeError, match='^RoundedConv2d: input must be float16'):
        layer(torch.ones(1, 1, 4, 4, dtype=torch.int64))

def test_eden_errs_less_than_half():
    "Of the squared error of the random Hadamard transform with stochastic rounding, on normal values: 0.44."
    g = torch.randn(64, 128, generator=generator())
    def error(name):
        op,turn = UNBIASED[name]
        return (draws_of(op, g, turn, 20)-g).square().mean()
    eden,drawn = error('eden'),error('hadamard')
    assert .42 < eden/drawn < .46 and .0093 < eden < .0102

def test_no_group_gets_shorter():
    """Also where nothing is turned: each 128 values, projected on themselves, have their length in the mean of 800
    copies. Their elements stay where they are, and a scale is one of two neighbours."""
    g = torch.randn(16, 128, generator=generator())*torch.logspace(-1, 1, 16).unsqueeze(1)
    found = draws_of(R.Operand('nvfp4', eden=128), g.repeat(800, 1), 0, 1)[0].view(800, 16, 128)
    along = (found*g).sum(2)/g.square().sum(1)
    assert ((along.mean(0)-1).abs() < 4.5*along.std(0)/800**.5).all() and along.std() < .02
    codes = found.view(800, 16, 8, 16)
    top = codes.abs().amax(3)
    for i,j in ((3, 2), (10, 5)): assert len(top[:, i, j].unique()) == 2
    share = codes/top.unsqueeze(3)
    assert torch.allclose(share, share[:1].expand_as(share), atol=1e-6)

def test_luq_by_hand():
    "Gradients on powers of two, the largest as it is, small ones at random on 0 or the least; the rest on -7 to 7."
    layer = made('luq', model=nn.Linear(128, 128, bias=False))
    x,w = torch.randn(64, 128, generator=generator()),layer.weight.detach()
    def ints(t):
        step = (12.1*t.square().mean().sqrt()-12.2*t.abs().mean())/7
        return (t/step).round().clamp(-7, 7)*step
    assert torch.allclose(layer(x), ints(x) @ ints(w).T, atol=1e-4)
    g = torch.randn(64, 128, generator=generator(1))
    found = draws_of(UNBIASED['luq'][0], g.repeat(200, 1), 0, 1).view(200, 64, 128)
    least = g.abs().max()/64
    sizes = (found/least).abs()
    assert torch.allclose(sizes.unique(), torch.tensor([0., 1, 2, 4, 8, 16, 32, 64]))
    for i,j in ((g.abs() < least).nonzero()[0], (g.abs() > 9*least).nonzero()[0]):
        size = (g[i, j]/least).abs()
        low = 0 if size < 1 else 2.**size.log2().floor().item()
        up = 1. if size < 1 else 2*low
        share = (sizes[:, i, j] == up).float().mean()
        want = (size-low)/(up-low)                      # four deviations of a share of 200 draws
        assert abs(share-want) < 4*(want*(1-want)/200).sqrt() and set(sizes[:, i, j].tolist()) == {low, up}

def test_no_clip_from_strange_statistics():
    "All magnitudes equal, or none: what the two means say is no clip, so the largest counts."
    op = R.RECIPES['luq'].forward[0]
    for x in (torch.ones(1, 128), torch.zeros(1, 128)):
        assert torch.equal(identity(of_inputs(op), 128)(x), x)

def test_double_blocks_by_hand():
    "128 values share a float32, 16 of them an e4m3: each 128 as a tensor of its own."
    layer = identity(of_inputs(R.Operand('nvfp4', outer=128)), 200)
    x = torch.randn(3, 200, generator=generator())*torch.logspace(-3, 3, 200)
    padded = torch.nn.functional.pad(x, (0, 56)).view(-1, 128)
    want = torch.cat([R.nvfp4_quantize(t, tensor_scale=t.abs().max()/2688) for t in padded]).view(3, 256)[:, :200]
    assert torch.allclose(layer(x), want, rtol=1e-5, atol=0)

def test_backward_starts_from_what_forward_rounded():
    "With requantize: of operands that backward leaves as they are, the gradient is that of the rounded forward."
    op,x = R.Operand('e2m1', 8, 'up'),X.clone().requires_grad_()
    for again in (False, True):
        layer = made(R.Recipe('one', (op, op), FREE, FREE, requantize=again), model=nn.Linear(40, 24, bias=False))
        w,g = layer.weight.detach(),torch.randn(24, 24, generator=generator())
        dx,dw = torch.autograd.grad(layer(x), (x, layer.weight), g)
        def round_(t): return R.mx_quantize(t, 'e2m1', block=8, scale='up') if again else t
        assert torch.equal(dx, g @ round_(w)) and torch.equal(dw, g.T @ round_(X))
    assert repr(layer.recipe).endswith('dx and dw take w and x as y has rounded them')

def test_recomputed_resumed_and_called_twice(tmp_path):
    "Checkpointed inside the model and as a whole; from a file; and after two calls for one step."
    for seed in (0, 5):
        model = made('nvfp4', seed)
        gradients(model, X)
        state = copy.deepcopy(model.state_dict())
        torch.save(state, tmp_path/'state.pt')
        want = gradients(model, X)
        for way in (lambda m: m, lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
                lambda m: lambda x: checkpoint(m, x.clone().requires_grad_(), use_reentrant=True)):
            again = made('nvfp4', 77)
            again.load_state_dict(torch.load(tmp_path/'state.pt', weights_only=True))
            again = again.train()
            loss = way(again)(X).square().sum()
            loss.backward()
            assert equal(want[1:], [p.grad for p in again.parameters()]) and again[0].rounding_count == 2

def test_parts_count_their_own_calls():
    "A loop that calls no model but a method or a part of it draws anew each time; the model counts for all its layers."
    model = R.nn.remove_rounding_(made('nvfp4'), leave_rounded=False)
    parts = nn.ModuleDict(dict(first=model[0], rest=model[1:]))
    R.low_precision_(parts, 'nvfp4')
    parts.forward = lambda x: parts.rest(parts.first(x))
    def call(x): return parts.rest(parts.first(x))
    def counts(): return [int(m.rounding_count) for m in parts.modules() if hasattr(m, 'rounding_count')]
    one,other = gradients(parts, X, call),gradients(parts, X, call)
    assert not equal(one, other) and counts() == [2, 2]
    with pytest.raises(ValueError, match='RoundedLinear: input'): parts(torch.tensor(1.))
    before = counts()
    gradients(parts, X)
    assert counts() == [n+1 for n in before]
    def recomputed(x): return checkpoint(call, x, use_reentrant=False)
    state = copy.deepcopy(parts.state_dict())
    want = gradients(parts, X, call)
    parts.load_state_dict(state)
    assert equal(want, gradients(parts, X, recomputed))
    parts.eval()
    call(X)
    torch.func.grad(lambda x: parts.train().first(x).sum())(X)
    assert counts() == [n+2 for n in before]

@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['nvfp4', 'fp8_block', 'nvfp4_4/6', 'quartet_ii'])
def test_compiled_with_the_count(recipe):
    "Two steps compiled: the count goes on in the graph."
    model,other = (made(recipe, model=nn.Linear(40, 16)) for _ in range(2))
    compiled = torch.compile(other, backend='aot_eager', fullgraph=True)
    other.load_state_dict(model.state_dict())
    for _ in range(2): assert equal(gradients(model, X), gradients(other, X, compiled))
    assert torch.equal(model.rounding_count, other.rounding_count)

def two_layers(kind):
    "Two of a kind, one after the other, and what makes an input of a size for them."
    torch.manual_seed(0)
    if kind == 'linear': return nn.Sequential(nn.Linear(40, 56), nn.Linear(56, 24)), lambda n: torch.randn(n, 40)
    if kind == 'image': return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)), lambda n: torch.randn(2, 4, n, n)
    blocks = [nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, dropout=0.) for _ in range(2)]
    return nn.Sequential(*blocks), lambda n: torch.randn(2, n, 32)

def some_of_any_size():
    """Each recipe on one kind of layer, each kind with one recipe, and roundings with knobs whose values are those of
    `torch.round`: two of them quickly."""
    def mine(name, rounding):
        op = R.Operand('e4m3', 32, 'ceil', rounding=rounding)
        return R.Recipe(name, (op, op), (op, op), (op, op))
    soft = mine('soft', partial(R.soft_round, alpha=5., hard=True))
    own = mine('sine', R.sine_round),soft,mine('ewgs', partial(R.ewgs_round, delta=.1))
    for kind,recipe in [*[('linear', n) for n in (*R.RECIPES, *own)], ('image', 'mxfp8'), ('attention', 'mxfp8')]:
        quick = recipe in ('mxfp4_stochastic', soft)
        yield pytest.param(kind, recipe, marks=[] if quick else pytest.mark.slow)

@pytest.mark.parametrize('kind, recipe', [*some_of_any_size()])
def test_two_layers_of_any_size(kind, recipe):
    """With `dynamic=True` Dynamo makes an input of each float of an object that it meets, and may not meet it again in
    a second Function. At most two graphs: of sizes that a block divides, and of others. 20 and 28: twice the latter."""
    import torch._dynamo.testing
    torch._dynamo.reset()
    model,make = two_layers(kind)
    R.low_precision_(model, recipe)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    for n in (20, 28):
        torch.manual_seed(n)
        x = make(n)
        other = copy.deepcopy(model)                    # it draws for the same call
        assert equal(gradients(other, x), gradients(model, x, compiled))
    assert counter.frame_count <= 2

@pytest.mark.parametrize('recipe', R.RECIPES)
def test_traced(recipe):
    "For a reader of TorchScript, which has no bits of numbers."
    model,x = made(recipe).eval(),torch.randn(5, 40)
    other = copy.deepcopy(model)                        # it draws for the same call
    assert torch.equal(torch.jit.trace(model, torch.randn(5, 40), check_trace=False)(x), other(x))

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')                      # of the exporter
def test_read_by_onnx_runtime():
    "What a network in low precision answers, its operands rounded: all recipes side by side."
    models = nn.ModuleList([made(recipe) for recipe in R.RECIPES]).eval()
    class Side(nn.Module):
        def forward(self, x): return tuple(m(x) for m in models)
    x,other = torch.randn(5, 40),copy.deepcopy(models)     # they draw for the same call
    ys = through_onnx(Side(), (torch.randn(5, 40),), (x,))
    for name,m,y in zip(R.RECIPES, other, ys, strict=True): assert torch.allclose(y, m(x), atol=1e-5), name

class ByRow:
    "A rounding that is an object."
    def __init__(self, alpha): self.alpha = alpha
    def __call__(self, v, *, step=1., offset=0.):
        return R.soft_round(v, self.alpha, step=step, offset=offset, hard=True)

class Layer(nn.Module):
    "And one that is a layer."
    def __init__(self, alpha):
        super().__init__()
        self.register_buffer('alpha', alpha)
    forward = ByRow.__call__

@pytest.mark.parametrize('made_of', [lambda alpha: partial(R.soft_round, alpha=alpha, hard=True), ByRow, Layer])
def test_a_rounding_with_a_knob_of_each_row_compiled(made_of):
    "It takes values of its own rows alone."
    torch.manual_seed(0)
    by_row = R.Operand('e4m3', rounding=made_of(torch.linspace(1., 9., 24)[:, None]))
    model = nn.Linear(40, 24)
    R.low_precision_(model, R.Recipe('rows', (None, by_row), (None, None), (None, None)))
    x = torch.randn(12, 40)
    want,compiled = model(x),torch.compile(model, dynamic=True, fullgraph=True, backend='eager')
    assert torch.equal(compiled(x), want)

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_halves(dtype):
    "Under autocast, and in parameters of the dtype: the output is of that dtype, the operands are those of float32."
    torch.manual_seed(0)
    plain = nn.Linear(40, 24)
    with torch.no_grad(): plain.weight.copy_(plain.weight.to(dtype))
    x = X.to(dtype)
    want = made('mxfp8', model=copy.deepcopy(plain))(x.float())
    with torch.autocast('cpu', dtype):
        layer = made('mxfp8', model=copy.deepcopy(plain))
        y = layer(X)
        y.sum().backward()
    half = made('mxfp8', model=copy.deepcopy(plain).to(dtype))(x)
    assert y.dtype == half.dtype == dtype and layer.weight.grad.dtype == torch.float32
    for t in (y, half): assert torch.allclose(t.float(), want, atol=.02)

STRIDED = (6, 4, 3),dict(stride=2, padding=1)
CONVOLUTIONS = dict(of_1=(nn.Conv1d, *STRIDED), of_2=(nn.Conv2d, *STRIDED), of_3=(nn.Conv3d, *STRIDED),
    grouped=(nn.Conv2d, (8, 12, 3), dict(groups=4, stride=2, padding=1)),
    depthwise=(nn.Conv1d, (6, 12, 3), dict(groups=6, padding=1, dilation=2)), same=(nn.Conv2d, (4, 6, (3, 2)),
    dict(padding='same')), circular=(nn.Conv3d, (4, 6, 3), dict(padding=1, padding_mode='circular')),
    transposed=(nn.ConvTranspose2d, (6, 4, 3), dict(stride=2, padding=1, output_padding=1)),
    transposed_groups=(nn.ConvTranspose1d, (8, 12, 4), dict(groups=2, stride=3, dilation=2, bias=False)),
    transposed_3d=(nn.ConvTranspose3d, (3, 2, 2), dict(stride=2)))

def convolution(name):
    kind,sizes,how = CONVOLUTIONS[name]
    torch.manual_seed(0)
    plain = kind(*sizes, **how)
    size = (4, 5, 6)[:plain.weight.ndim-2]
    return plain,torch.randn(2, sizes[0], *size, generator=generator())

def by_hand(plain, x, g):
    """The product and both gradients in blocks of 8, of one group at a time by torch's own layer: channels of the group
    where they are summed, and all places of a channel for the weight."""
    def along(t, fmt): return R.mx_quantize(t.movedim(1, -1), fmt, block=8, scale='up', pad=True).movedim(-1, 1)
    def first(t, fmt): return along(t.transpose(0, 1), fmt).transpose(0, 1)
    def places(t, fmt):
        v = t.transpose(0, 1)
        return R.mx_quantize(v.flatten(1), fmt, block=8, scale='up', pad=True).view(v.shape).transpose(0, 1)
    turned = isinstance(plain, nn.modules.conv._ConvTransposeNd)
    own = plain.padding == 'same' or plain.padding_mode != 'zeros'
    one = copy.deepcopy(plain)
    one.groups,one.bias = 1,None
    if own: one.padding,mode = (0,)*(plain.weight.ndim-2),'constant' if plain.padding == 'same' else one.padding_mode
    one.padding_mode = 'zeros'
    def wide(x): return torch.nn.functional.pad(x, plain._reversed_padding_repeated_twice, mode) if own else x
    def call(x, w): return torch.func.functional_call(one, dict(weight=w), (x,))
    forward,backward = (first, along) if turned else (along, first)
    parts,n = [],plain.groups
    for x,w,g in zip(x.chunk(n, 1), plain.weight.detach().chunk(n, 0), g.chunk(n, 1), strict=True):
        y = call(along(wide(x), 'e2m1'), forward(w, 'e2m1'))
        leaf = x.clone().requires_grad_()
        dx, = torch.autograd.grad(call(wide(leaf), backward(w, 'e2m1')), leaf, along(g, 'e2m3'))
        leaf = w.clone().requires_grad_()
        dw, = torch.autograd.grad(call(places(wide(x), 'e2m1'), leaf), leaf, places(g, 'e2m3'))
        parts.append((y, dx, dw))
    y,dx,dw = zip(*parts)
    y = torch.cat(y, 1)
    if plain.bias is not None: y = y + plain.bias.detach().view(-1, *[1]*(y.ndim-2))
    return y,torch.cat(dx, 1),torch.cat(dw)

# Numbers of few exponents: those of e4m3 have more than an axis can move a scale
VALUE,SLOPE = R.Operand('e2m1', 8, 'up'),R.Operand('e2m3', 8, 'up')
EIGHTS = R.Recipe('eights', (VALUE, VALUE), (SLOPE, VALUE), (SLOPE, VALUE))

@pytest.mark.filterwarnings('ignore:Using padding')          # torch's own, of kernels of even length
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolutions(name, dtype):
    "Of 1 to 3 dims, grouped, depthwise, padded in their own way, transposed: the three products are those by hand."
    plain,x = convolution(name)
    plain,x = plain.to(dtype),x.to(dtype)
    layer = made(EIGHTS, model=copy.deepcopy(plain))
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    g = torch.randn(y.shape, generator=generator(1)).to(dtype)
    found = y,*torch.autograd.grad(y, (leaf, layer.weight), g)
    tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=.01, atol=.03)
    assert torch.allclose(layer(x[0]), layer(x[:1])[0]) and y.shape == plain(x).shape
    for a,b in zip(found, by_hand(plain.float(), x.float(), g.float()), strict=True):
        assert a.dtype == dtype and torch.allclose(a.float(), b, **tolerance)

@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolutions_computed_again(name):
    "Checkpointed: the same draws, forward and backward; other ones in the next call."
    plain,x = convolution(name)
    recipe = R.Recipe('drawn', *[(R.Operand('e2m1', 8, **UP),)*2]*3)
    def steps(way):
        layer = made(recipe, model=copy.deepcopy(plain))
        out = []
        for _ in range(2):
            layer.zero_grad()
            way(layer)(x).square().sum().backward()
            out.append(layer.weight.grad.clone())
        return out
    one,two = steps(lambda m: m)
    assert not torch.equal(one, two)
    again = steps(lambda m: lambda x: checkpoint(m, x, use_reentrant=False))
    assert torch.equal(one, again[0]) and torch.equal(two, again[1])

def test_a_transposed_convolution_takes_an_output_size():
    plain,x = convolution('transposed')
    layer = made('mxfp8', model=copy.deepcopy(plain))
    for size in ((8, 10), (7, 9)):
        y = layer(x, output_size=size)
        assert y.shape[2:] == size and (y-plain(x, output_size=size)).abs().max() < .2

@pytest.mark.slow
@pytest.mark.parametrize('name', ['depthwise', 'transposed_groups', 'circular'])
def test_compiled_convolutions(name):
    "The same numbers from compiled code."
    plain,x = convolution(name)
    one,other = (made(EIGHTS, model=copy.deepcopy(plain)) for _ in range(2))
    compiled = torch.compile(other, backend='aot_eager', fullgraph=True)
    assert equal(gradients(one, x), gradients(other, x, compiled))

@pytest.mark.parametrize('how', ('whole', 'each layer', 'layers alone'))
def test_a_compiled_network_draws_in_backward_for_the_same_call(how):
    """Three calls. Torch computes in backward what forward does not need, such as the signs of a turn; from a count
    that has moved on by then they were others than those of the input, which forward had turned: an error of 1.9."""
    def net():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        R.low_precision_(model, 'mxfp4_stochastic')
        return model
    eager,compiled = net(),net()
    x = torch.randn(64, 32, generator=generator())
    def alone(model, x):
        for m in model: x = m(x)
        return x
    run = alone if how == 'layers alone' else nn.Module.__call__
    ways = dict(backend='aot_eager', fullgraph=True)
    call = torch.compile(compiled, **ways) if how == 'whole' else partial(run, compiled)
    if how != 'whole':
        for m in (compiled[0], compiled[2]): m.compile(**ways)
    for _ in range(3):
        want = torch.autograd.grad(run(eager, x).square().sum(), [*eager.parameters()])
        found = torch.autograd.grad(call(x).square().sum(), [*compiled.parameters()])
        assert equal(found, want)

@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['mxfp8', 'nvfp4', 'quartet_ii'])
def test_blocks_that_are_alike_are_compiled_once(recipe):
    "Six, each with a seed of its own: a graph that knew it would be made six times, and for each count again."
    from torch._dynamo.testing import CompileCounterWithBackend
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up,self.down = nn.Linear(32, 64),nn.Linear(64, 32)
        def forward(self, x): return x + self.down(self.up(x).relu())
    def net():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        R.low_precision_(model, recipe)
        return model
    eager,compiled = net(),net()
    counter = CompileCounterWithBackend('aot_eager')
    for block in compiled: block.compile(backend=counter, fullgraph=True)
    x = torch.randn(32, 32, generator=generator(), requires_grad=True)
    for _ in range(2):
        want,found = (torch.autograd.grad(m(x).square().sum(), [*m.parameters()]) for m in (eager, compiled))
        assert equal(found, want)
    assert counter.frame_count == 1, counter.frame_count

class Reads(nn.Module):
    "Its forward and a method multiply by weights of layers that are not called, as Mamba, BEiT and tied heads do."
    def __init__(self):
        super().__init__()
        for n in ('called', 'asked', 'fused', 'mixed'): setattr(self, n, nn.Linear(16, 16))
        self.tokens,self.places,self.norm = nn.Embedding(32, 16),nn.Embedding(8, 16),nn.LayerNorm(16)
    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        x = self.called(x.to(self.asked.weight.dtype))
        if isinstance(self.asked.weight, nn.Parameter): x = self.asked(x)
        return self.head(self.mix(x))
    def mix(self, x): return sum(f(x) for f in [lambda y: F.linear(y, self.fused.weight[:, :16]), self.mixed])
    def head(self, x): return x @ self.tokens.weight.T*self.norm.weight.mean()

def test_weights_that_a_forward_reads_itself():
    """The report said that `fused` was rounded, and nothing of the table of tokens."""
    model = Reads()
    rows = R.low_precision_(model, 'bfloat16').rows
    assert {r.name: (r.recipe, r.note) for r in rows} == {
        'called': ('bfloat16', ''), 'asked': ('bfloat16', ''), 'mixed': ('bfloat16', ''),
        'fused': ('bfloat16', 'Reads.mix reads its weight, unrounded'),
        'tokens': ('', 'Reads.head reads its weight')}
    assert model(torch.arange(8)).shape == (8, 32)
    rows = R.low_precision_(Reads(), 'bfloat16', skip=['fused']).rows
    assert [r.note for r in rows if r.name == 'fused'] == ['skipped']

def test_weights_of_no_layer_are_named():
    "A kernel, one with a dim more as StyleGAN's, and a column, of which the report said nothing; a place is no factor."
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = dict(kernel=(8, 3, 3, 3), modulated=(1, 8, 8, 1, 1), column=(8, 1), depthwise=(8, 1, 3),
                scale=(8, 1, 1), place=(1, 8, 4, 4))
            for n,size in sizes.items(): setattr(self, n, nn.Parameter(torch.ones(size)))
            self.last = nn.Linear(2, 2)
        def forward(self, x): return self.mix(by_hand(x, self.kernel)*self.scale + self.place)
        def mix(self, x):
            x = F.conv2d(x, self.modulated[0]).flatten(2)
            x = F.conv1d(x, self.depthwise*self.scale, groups=8, stride=7)
            return self.last(x), x.mT @ self.column
    def by_hand(x, w): return F.conv2d(x, w)
    model = Own()
    rows = {r.name: r.note for r in R.low_precision_(nn.Sequential(model), 'bfloat16').rows}
    assert rows == {'0': 'not known: kernel, modulated, column and 1 more', '0.last': ''}
    assert own_in_products(model) == {'modulated', 'depthwise', 'column', 'scale'}
    assert model(torch.ones(2, 3, 6, 6))[1].shape == (2, 2, 1)

@pytest.mark.parametrize('how', ['wrapped', 'of an instance', 'partial', 'super', 'property', 'long', 'traced'])
def test_readers_that_are_found(how):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer,self.last = nn.Linear(4, 4),nn.Linear(4, 4)
        def forward(self, x): return self.last(F.linear(x, self.layer.weight))
    class Above(Plain):
        def forward(self, x): return super().forward(x.relu())
    class Property(Plain):
        turned = property(lambda self: self.layer.weight.T)
        def forward(self, x): return self.last(x @ self.turned)
    class Called(Plain):
        def forward(self, x): return self.last(self.layer(x))
    def own(self, x): return self.last(x @ self.layer.weight)
    # more names than an instruction has room for
    lines = [f'if x is None: self.name_{i}' for i in range(300)] + ['return self.last(x @ self.layer.weight)']
    names:dict = {}
    exec('def forward(self, x):\n    ' + '\n    '.join(lines), names)
    Long = type('Long', (Plain,), dict(forward=names['forward']))
    model = dict(super=Above, property=Property, long=Long).get(how, Called)()
    assert how in ('super', 'property', 'long') or not weight_readers(model)
    if how == 'wrapped':
        def forward(*args): return own(*args)
        type(model).forward = wraps(own)(forward)
    if how == 'of an instance': model.forward = types.MethodType(own, model)
    if how == 'partial': model.forward = partial(own, model)
    if how == 'traced': model = torch.fx.symbolic_trace(Plain())
    assert [*weight_readers(model)] == [model.layer]

def test_a_scripted_model_has_no_layers():
    "Its Parameters are in no dict of Python, and no class of its modules is torch's; the error names one."
    model = torch.jit.script(Reads().called)
    with pytest.raises(ValueError, match='low_precision_: no layer with products.* it: not known: weight'):
        R.low_precision_(model, 'bfloat16')

# --- products of stacked matrices
class Experts(nn.Module):
    "Three experts of sizes that no block divides."
    def __init__(self, *size):
        super().__init__()
        self.weight,self.product = nn.Parameter(torch.randn(*size, generator=generator())*.2),R.BatchedProduct()
    def forward(self, x): return self.product(x, self.weight)

@pytest.mark.parametrize('recipe', R.RECIPES)
def test_one_expert_is_a_linear(recipe):
    "Bit for bit, whatever the recipe: with the same weight, inputs and seed."
    torch.manual_seed(0)
    plain = nn.Linear(40, 24, bias=False)
    experts = Experts(1, 40, 24)
    with torch.no_grad(): experts.weight.copy_(plain.weight.T)
    one,other = made(recipe, model=plain),made(recipe, model=experts)
    x = X.clone().requires_grad_()
    g = torch.randn(24, 24, generator=generator(1))
    y,z = one(x),other(x[None])
    a,b = torch.autograd.grad(y, (x, one.weight), g),torch.autograd.grad(z, (x, experts.weight), g[None])
    assert torch.equal(y, z[0]) and torch.equal(a[0], b[0]) and torch.equal(a[1].T, b[1][0])

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_experts_by_hand(dtype):
    "Each expert as a product of its own: along inputs, outputs, and rows; blocks of squares do not cross."
    square = R.Operand('e4m3', (8, 8))
    r = R.Recipe('one', (VALUE, square), (SLOPE, square), (SLOPE, VALUE))
    experts = Experts(3, 20, 12).to(dtype)
    made(r, model=experts)
    x = torch.randn(3, 7, 20, generator=generator()).to(dtype).requires_grad_()
    y = experts(x)
    g = torch.randn(y.shape, generator=generator(1)).to(dtype)
    dx,dw = torch.autograd.grad(y, (x, experts.weight), g)
    def rows(t, fmt): return R.mx_quantize(t, fmt, block=8, scale='up', pad=True)
    def tiles(w): return by_tile(w, 8, 8)
    near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=.01, atol=.03)
    for e in range(3):
        a,w,d = x[e].detach().float(),experts.weight[e].detach().float(),g[e].float()
        assert torch.allclose(y[e].float(), rows(a, 'e2m1') @ tiles(w), **near)
        assert torch.allclose(dx[e].float(), rows(d, 'e2m3') @ tiles(w).T, **near)
        assert torch.allclose(dw[e].float(), rows(a.T, 'e2m1') @ rows(d.T, 'e2m3').T, **near)
    assert y.dtype == dx.dtype == dw.dtype == dtype

def test_experts_in_every_way():
    "Checkpointed, in a mixture, broadcast, removed again: as torch's own product."
    x = torch.randn(3, 7, 20, generator=generator())
    def run(way, recipe='quartet_ii'):
        model = made(recipe, model=nn.Sequential(Experts(3, 20, 12), nn.GELU(), Experts(3, 12, 20)))
        return gradients(model, x, way(model))
    assert equal(run(lambda m: m), run(lambda m: lambda x: checkpoint(m, x, use_reentrant=False)))
    experts = Experts(3, 20, 12)
    plain = experts(x)
    assert torch.equal(plain, torch.bmm(x, experts.weight)) and torch.equal(experts(x[0]), x[0] @ experts.weight)
    made('fp8', model=experts)
    leaf = x[0].clone().requires_grad_()
    y = experts(leaf)
    assert y.shape == (3, 7, 12) and not torch.equal(y, x[0] @ experts.weight)
    y.sum().backward()
    assert leaf.grad.shape == leaf.shape
    R.nn.remove_rounding_(experts)
    assert torch.equal(experts(x), plain) and type(experts.product) is R.BatchedProduct

@pytest.mark.slow
def test_compiled_experts():
    one,other = (made('fp8_block', model=Experts(3, 20, 12)) for _ in range(2))
    compiled = torch.compile(other, backend='aot_eager', fullgraph=True)
    x = torch.randn(3, 7, 20, generator=generator())
    assert equal(gradients(one, x), gradients(other, x, compiled))

@pytest.mark.parametrize('x, w, kind, told', [
    (X, [1], TypeError, 'BatchedProduct: w must be a torch.Tensor, got list'),
    (X.long(), X, TypeError, 'BatchedProduct: x must be'),
    (X[0], X, ValueError, 'BatchedProduct: x must be a matrix or a batch of them, got shape (40,)'),
    (X, X, ValueError, 'BatchedProduct: w must have 40 rows, as x has columns, got 24'),
    (X.expand(2, 24, 40), X.T.expand(3, 40, 24), ValueError, 'BatchedProduct: w must have a batch that goes with (2,)'),
])
def test_a_product_refuses(x, w, kind, told):
    "Rounded or not."
    product = R.BatchedProduct()
    for _ in range(2):
        with pytest.raises(kind) as e: product(x, w)
        assert str(e.value).startswith(told), e.value
        if type(product) is R.BatchedProduct: R.low_precision_(product, 'fp8')

def test_an_attention_is_four_layers_and_one_again():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0., batch_first=True)
    names,x = [n for n,_ in layer.named_parameters()],torch.randn(2, 5, 32, generator=generator())
    before = layer(x)
    report = R.low_precision_(layer, 'mxfp4')
    assert len([r for r in report.rows if r.recipe]) == 6 and not torch.equal(layer(x), before)
    R.nn.remove_rounding_(layer)
    assert sorted(n for n,_ in layer.named_parameters()) == sorted(names) and torch.equal(layer(x), before)
    assert not layer._forward_pre_hooks

ONE = 'multiplies in one operation of torch'

def test_what_is_left_alone_is_named():
    class Own(nn.Linear):
        def forward(self, x): return super().forward(x)*2
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight,self.token = nn.Parameter(torch.ones(2, 3, 4)),nn.Parameter(torch.ones(1, 3, 4))
    class Given(Stack):
        def __init__(self):
            super().__init__()
            self.product = R.BatchedProduct()
    class Attending(nn.MultiheadAttention): pass
    class Mixing(nn.Module):
        "Products that are no layers. What has one row, or no shape yet, is none."
        def __init__(self):
            super().__init__()
            self.u,self.v = nn.Parameter(torch.ones(2, 3)),nn.Parameter(torch.ones(3, 2))
            self.one,self.bias = nn.Parameter(torch.ones(1, 3)),nn.Parameter(torch.ones(3))
            self.later = nn.UninitializedParameter()
    others = dict(n=Mixing(), o=nn.Embedding(3, 4), p=nn.LayerNorm((3, 4)))
    model = nn.ModuleDict(others | dict(a=nn.Linear(4, 4), b=Own(4, 4), c=nn.Conv2d(4, 8, 3, groups=2), d=nn.LSTM(4, 4),
        e=nn.Bilinear(4, 4, 4), f=nn.Sequential(nn.Linear(4, 4)), g=nn.Linear(32, 16), h=Stack(), i=Given(),
        j=nn.MultiheadAttention(4, 2, add_bias_kv=True), k=Attending(4, 2), l=nn.MultiheadAttention(4, 2),
        m=nn.MultiheadAttention(4, 2)))
    model.m.in_proj_weight = model.l.in_proj_weight
    report = R.low_precision_(model, 'mxfp4', skip=['f'])
    assert {r.name: r.note for r in report.rows} == dict(
        a='4 inputs filled up to 32s, 4 outputs filled up to 32s',
        b='has a class of its own', c='2 inputs filled up to 32s, 4 outputs filled up to 32s', d=ONE,
        e=ONE, j='adds keys of its own', k='has a class of its own', l='shares its weights', m='shares its weights',
        g='16 outputs filled up to 32s', h='holds stacked weights: see BatchedProduct', n='not known: u, v') | {
        'f.0': 'skipped', 'i.product': ''}
    assert type(model.b) is Own and type(model.f[0]) is nn.Linear

class Conv1D(nn.Module):
    "A Linear whose weight is turned, as GPT-2 of transformers has it."
    def __init__(self, nf, nx):
        super().__init__()
        self.nf,self.nx = nf,nx
        self.weight,self.bias = nn.Parameter(torch.randn(nx, nf)/8),nn.Parameter(torch.randn(nf))
    def __repr__(self): return 'Conv1D(nf={nf}, nx={nx})'.format(**vars(self))
    def forward(self, x): return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)

@pytest.mark.parametrize('recipe', ['mxfp4', 'nvfp4'])
def test_a_turned_layer_is_a_linear(recipe, monkeypatch):
    "Values and gradients bit for bit, in a copy and a file too; where transformers is not loaded the report names it."
    torch.manual_seed(0)
    turned,plain = Conv1D(48, 40),nn.Linear(40, 48)
    with torch.no_grad(): plain.weight.copy_(turned.weight.mT), plain.bias.copy_(turned.bias)
    model,other = nn.Sequential(turned),nn.Sequential(plain)
    before = model(X[None])
    with pytest.raises(ValueError, match='Sequential; 0: not known: weight'): R.low_precision_(model, recipe)
    monkeypatch.setitem(sys.modules, 'transformers.pytorch_utils', types.SimpleNamespace(Conv1D=Conv1D))
    row, = R.low_precision_(model, recipe).rows
    own, = R.low_precision_(other, recipe).rows
    assert row == own._replace(kind='Conv1D') and repr(model[0]) == f'RoundedConv1D(recipe={recipe})'
    copies = copy.deepcopy(model),pickle.loads(pickle.dumps(model))
    want,x = gradients(other, X),X.clone().requires_grad_()
    of_x, = torch.autograd.grad(copy.deepcopy(other)(x).sum(), x)
    assert torch.equal(torch.autograd.grad(copy.deepcopy(model)(x).sum(), x)[0], of_x)
    for m in (model, *copies):
        loss,dw,db = gradients(m, X)
        assert equal([loss, dw.mT, db], want)
    R.nn.remove_rounding_(model)
    assert type(model[0]) is Conv1D and torch.equal(model(X[None]), before)

class Stacked(nn.Module):
    "Experts as transformers has them: slices of stacked weights, one after the other, where its own way is another."
    __module__ = 'transformers.models.stub'
    def __init__(self, experts=3, n=40, wide=48, turned=False):
        super().__init__()
        self.turned = turned
        up,down = (experts, 2*wide, n),(experts, n, wide)
        if turned: up,down = ((e, b, a) for e,a,b in (up, down))
        self.gate_up_proj,self.down_proj = (nn.Parameter(torch.randn(shape)/8) for shape in (up, down))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2*wide)/8)
    def each(self, x, chosen):
        y = torch.zeros_like(x)
        for i in chosen.unique():
            rows = (chosen == i).nonzero()[:, 0]
            if self.turned: both = x[rows] @ self.gate_up_proj[i] + self.gate_up_proj_bias[i]
            else: both = nn.functional.linear(x[rows], self.gate_up_proj[i], self.gate_up_proj_bias[i])
            gate,up = both.chunk(2, -1)
            inner = torch.relu(gate)*up
            out = inner @ self.down_proj[i] if self.turned else nn.functional.linear(inner, self.down_proj[i])
            y = y.index_add(0, rows, out.to(y.dtype))
        return y
    def forward(self, x, chosen): raise AssertionError('this way has no products to see')
    forward.__wrapped__ = each

CHOSEN = torch.tensor([0, 2, 2, 0]*6)

def of_experts(m, x=X):
    x = x.clone().requires_grad_()
    y = m(x, CHOSEN)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])]

@pytest.mark.parametrize('turned', (False, True))
def test_experts_of_transformers_are_linears(turned):
    "Expert by expert the bits of a rounded Linear; in a copy too. One that has no token learns nothing."
    torch.manual_seed(0)
    m = Stacked(turned=turned)
    row, = R.low_precision_(m, 'mxfp4').rows
    assert (row.kind, row.recipe, row.note) == ('Stacked', 'mxfp4', 'expert by expert')
    assert type(m).__name__ == 'RoundedStacked'
    found,x = of_experts(m),X.clone().requires_grad_()
    assert equal(found, of_experts(copy.deepcopy(m)))
    want,layers = torch.zeros_like(x),{}
    for i in (0, 2):
        for name in ('gate_up_proj', 'down_proj'):
            w = getattr(m, name)[i].detach()
            w = w.mT if turned else w
            layers[i, name] = nn.Linear(w.shape[1], w.shape[0], bias=False)
            with torch.no_grad(): layers[i, name].weight.copy_(w)
            R.low_precision_(layers[i, name], 'mxfp4')
        rows = (CHOSEN == i).nonzero()[:, 0]
        gate,up = (layers[i, 'gate_up_proj'](x[rows]) + m.gate_up_proj_bias[i].detach()).chunk(2, -1)
        want = want.index_add(0, rows, layers[i, 'down_proj'](torch.relu(gate)*up))
    assert torch.equal(found[0], want)
    of_x,*of_layers = torch.autograd.grad(want.square().sum(), [x, *[k.weight for k in layers.values()]])
    assert torch.equal(found[1], of_x)
    for (i, name),g in zip(layers, of_layers):
        mine = found[2+[n for n,_ in m.named_parameters()].index(name)]
        assert torch.equal(mine[i].mT if turned else mine[i], g) and not mine[1].any()

def test_experts_draw_for_each():
    """Two experts with the same weights and tokens draw differently, the next call anew, recomputation the same."""
    torch.manual_seed(0)
    m = Stacked()
    with torch.no_grad():
        for p in m.parameters(): p.copy_(p[:1].expand_as(p))
    R.low_precision_(m, 'mxfp4_stochastic')
    state,x = copy.deepcopy(m.state_dict()),X[:1].expand_as(X)
    first = of_experts(m, x)
    assert torch.equal(first[0], first[0][:1].expand_as(x))         # forward rounds to the nearest
    assert not torch.equal(first[2][0], first[2][2])
    assert not equal(first, of_experts(m, x))
    m.load_state_dict(state)
    def again(x, chosen): return checkpoint(m, x, chosen, use_reentrant=False)
    again.parameters = m.parameters
    assert equal(first, of_experts(again, x))

@pytest.mark.slow
def test_experts_in_compiled_code():
    "The graph breaks there; what is around them is compiled."
    import torch._dynamo.testing
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first,self.experts = nn.Linear(40, 40),Stacked()
        def forward(self, x): return self.experts(self.first(x).relu(), CHOSEN)
    torch.manual_seed(0)
    model = Net()
    R.low_precision_(model, 'mxfp4_stochastic')
    other = copy.deepcopy(model)
    counter = torch._dynamo.testing.CompileCounter()
    assert equal(gradients(model, X), gradients(other, X, torch.compile(other, backend=counter)))
    assert counter.frame_count > 0

@pytest.mark.parametrize('each, told', [
    (lambda m, x: torch.einsum('tk,enk->etn', x, m.gate_up_proj), 'uses its experts in einsum'),
    (lambda m, x: m.down_proj[:2].sum() + x, 'takes some of its experts at once'),
    (lambda m, x: m.gate_up_proj[0, :, :8].sum() + x, 'takes some of its experts at once'),
    (lambda m, x: x @ torch.cat([m.down_proj[0], m.down_proj[1]]), 'uses its experts in cat'),
    (lambda m, x: m.gate_up_proj[0]*2, 'uses its experts in mul')])
def test_a_product_that_is_not_seen_raises(each, told, monkeypatch):
    "What else a forward does with its experts has a name; a product of all of them at once is rounded."
    m = Stacked()
    monkeypatch.setattr(Stacked.forward, '__wrapped__', lambda m, x, chosen: each(m, x))
    R.low_precision_(m, 'mxfp4')
    with pytest.raises(RuntimeError, match=f'low_precision_: Stacked {told}'): m(X, CHOSEN)

@pytest.mark.parametrize('turned', [lambda w: w.T, lambda w: w.mT, lambda w: w.t(),
    lambda w: w.transpose(0, 1).contiguous(), lambda w: w.to(torch.float64).to(torch.float32).mT])
def test_a_weight_seen_another_way(turned, monkeypatch):
    "A turned or cast slice is the same operand."
    torch.manual_seed(0)
    m = Stacked()
    def by_linear(m, x, chosen): return nn.functional.linear(x, m.gate_up_proj[1])
    def by_product(m, x, chosen): return x @ turned(m.gate_up_proj[1])
    floats = by_linear(m, X, CHOSEN)
    R.low_precision_(m, 'mxfp4')
    found = []
    for way in (by_linear, by_product):
        monkeypatch.setattr(Stacked.forward, '__wrapped__', way)
        found.append(m(X, CHOSEN))
    assert torch.equal(*found) and not torch.equal(found[0], floats)

def test_all_experts_at_once(monkeypatch):
    "As a `BatchedProduct`, expert by expert."
    torch.manual_seed(0)
    m,product = Stacked(turned=True),R.BatchedProduct()
    x = X.expand(3, *X.shape)
    monkeypatch.setattr(Stacked.forward, '__wrapped__', lambda m, x, chosen: torch.bmm(x, m.gate_up_proj))
    for layer in (m, product): R.low_precision_(layer, 'mxfp4')
    assert torch.equal(m(x, CHOSEN), product(x, m.gate_up_proj.detach()))

def test_removed_and_begun_again():
    "The same weights, no more in the state; another recipe may follow; other weights may be rounded in between."
    model = made('nvfp4')
    torch.manual_seed(0)
    state = small().state_dict()
    R.nn.round_weights_(model, R.nn.RoundSTE(step=.25))
    assert (model[0].weight*4 % 1 == 0).all()
    gradients(model, X)
    R.nn.remove_rounding_(model, leave_rounded=False)
    assert all(torch.equal(state[k], t) for k,t in model.state_dict().items()) and len(state) == 4
    assert type(model[0]) is nn.Linear and not model._forward_pre_hooks
    assert torch.equal(gradients(made('mxfp8', model=model), X)[0], gradients(made('mxfp8'), X)[0])

def test_any_estimator_rounds():
    "Its value forward and backward; what it takes beside a step is given by partial."
    op = R.Operand('e2m1', 8, rounding=partial(R.soft_round, alpha=5.))
    assert gradients(made(R.Recipe('soft', (op, op), (op, op), (op, op))), X)[0].isfinite()

def test_each_rank_draws_for_its_part():
    "With `rank`, inputs and gradients draw anew, weights do not; number 0 is as without. A resume keeps its own."
    drawn = R.Operand('e2m1', 8, **UP)
    def found(pairs, rank):
        layer = nn.Linear(40, 24, bias=False)
        torch.manual_seed(0)
        nn.init.normal_(layer.weight)
        R.low_precision_(layer, R.Recipe('one', *pairs), rank=rank)
        x = X.clone().requires_grad_()
        y = layer(x)
        return y,*torch.autograd.grad(y, (x, layer.weight), X[:, :24])
    weights = ((None, drawn), (None, drawn), FREE)
    assert equal(found(weights, 0), found(weights, 3))
    for i,pairs in enumerate([((drawn, None), FREE, FREE), (FREE, (drawn, None), FREE), (FREE, FREE, (drawn, None)),
            (FREE, FREE, (None, drawn))]):
        one,other = found(pairs, 0),found(pairs, 3)
        for k,(a,b) in enumerate(zip(one, other)): assert torch.equal(a, b) == (k != min(i, 2)), (i, k)
    model,other = small(),small()
    R.low_precision_(model, 'nvfp4', rank=1)
    R.low_precision_(other, 'nvfp4', rank=2)
    other.load_state_dict(model.state_dict())
    assert other[0].rounding_rank == 2

def test_what_forward_rounded_is_kept_once():
    "With requantize each operand of forward is rounded once in a step, and twice only where it is computed again."
    calls = []
    def counted(x, *, step=1.):
        calls.append(x.shape)
        return R.round_ste(x, step=step)
    op = R.Operand('e2m1', 8, 'up', counted)
    layer = made(R.Recipe('one', (op, op), FREE, FREE, requantize=True), model=nn.Linear(40, 24))
    gradients(layer, X)
    assert len(calls) == 2

def test_ranks_draw_the_same():
    "What torch's generators hold changes nothing."
    model,other = made('nvfp4'),made('nvfp4')
    one = gradients(model, X)
    torch.manual_seed(99)
    assert equal(one, gradients(other, X))

OP = R.Operand('e4m3')

@pytest.mark.parametrize('call, kind, told', [
    (lambda: R.low_precision_(small(), 'int4'), ValueError, 'low_precision_: recipe must be one of bfloat16, fp8,'),
    (lambda: R.low_precision_(small(), skip='0'), TypeError, 'low_precision_: skip must be a list of names, got str'),
    (lambda: R.low_precision_(small(), skip=['7']), ValueError, "low_precision_: skip must name modules, got '7'"),
    (lambda: R.low_precision_(small(), skip=['0', '2']), ValueError,
        'low_precision_: no layer with products to round in Sequential; known are'),
    (lambda: R.low_precision_(small(), seed=.5), TypeError, 'low_precision_: seed must be an int'),
    (lambda: R.low_precision_(small(), rank=-1), ValueError, 'low_precision_: rank must be in [0, 922337'),
    (lambda: R.low_precision_(nn.Linear), TypeError, 'low_precision_: model must be a torch.nn.Module'),
    (lambda: R.low_precision_(made('fp8'), 'fp8'), ValueError, 'low_precision_: model is in low precision already'),
    (lambda: R.nn.remove_rounding_(small()), ValueError, 'remove_rounding_: nothing rounds'),
    (lambda: R.Operand('e9m9'), ValueError, 'Operand: format must be one of'),
    (lambda: R.Operand('e4m3', block='column'), ValueError, 'Operand: block must be one of tensor, row'),
    (lambda: R.Operand('e4m3', block=0), ValueError, 'Operand: block must be >= 1'),
    (lambda: R.Operand('e4m3', block=1.5), TypeError, 'Operand: block must be an int'),
    (lambda: R.Operand('e4m3', block='row', scale='up'), ValueError, "Operand: block must be a number of values where"),
    (lambda: R.Operand('nvfp4', 32), ValueError, 'Operand: block of nvfp4 must be 16'),
    (lambda: R.Operand('nvfp4', scale='floor'), ValueError, 'Operand: scale must be one of nearest, up'),
    (lambda: R.Operand('e4m3', 32, scale='most'), ValueError, 'Operand: scale must be one of floor'),
    (lambda: R.Operand('e4m3', rounding=torch.nn.ReLU), TypeError, 'Operand: rounding must be a function'),
    (lambda: R.Recipe(3, (OP, OP), (OP, OP), (OP, OP)), TypeError, 'Recipe: name must be a str'),
    (lambda: R.Recipe('a', OP, (OP, OP), (OP, OP)), TypeError, 'Recipe: forward must be a tuple of two Operands'),
    (lambda: R.Recipe('a', (OP, OP), (OP, OP), (OP, OP), 12), ValueError, 'Recipe: hadamard must be 0 or a power'),
    (lambda: R.Recipe('a', (OP, OP), (OP, OP), (OP, OP), (16, 12)), ValueError, 'Recipe: hadamard must be 0 or'),
    (lambda: R.Recipe('a', (OP, OP), (OP, OP), (OP, OP), (1, 2, 4)), ValueError, 'Recipe: hadamard must be an int, or'),
    (lambda: R.Recipe('a', (OP, OP), (OP, OP), (OP, OP), requantize=1), TypeError, 'Recipe: requantize must be'),
    (lambda: R.Operand('nvfp4', outer=24), ValueError, 'Operand: outer must be 0 or, where format is one of nvfp4, 4'),
    (lambda: R.Operand('nvfp4', (16, 16), outer=32), ValueError, 'Operand: outer must be 0 or'),
    (lambda: R.Operand('4/6', eden=128), ValueError, 'Operand: eden must be 0 or, where format is one of nvfp4'),
    (lambda: R.Operand('nvfp4', eden=-16), ValueError, 'Operand: eden must be >= 0'),
    (lambda: R.Operand('nvfp4', eden=16, **UP), ValueError, 'Operand: eden goes with no scale, no outer and'),
    (lambda: R.Operand('e4m3', scale='sawb'), ValueError, "Operand: block must be given where scale='sawb', got None"),
])
def test_low_precision_refuses(call, kind, told):
    with pytest.raises(kind) as e: call()
    assert str(e.value).startswith(told), e.value

# --- what strangers do
@pytest.mark.parametrize('recipe', R.RECIPES)
@pytest.mark.filterwarnings('ignore:Initializing zero-element')
def test_nothing_and_one_row(recipe):
    "No rows, no inputs, and one row without a batch, as an nn.Linear takes them; the gradient of nothing is 0."
    m = made(recipe, model=nn.Linear(32, 16))
    y = m(torch.zeros(0, 32))
    y.sum().backward()
    assert y.shape == (0, 16) and not m.weight.grad.any()
    assert m(torch.zeros(2, 0, 32)).shape == (2, 0, 16) and m(torch.randn(32)).shape == (16,)
    m,x = made(recipe, model=nn.Linear(0, 4)),torch.zeros(3, 0, requires_grad=True)
    y = m(x)
    y.sum().backward()
    assert torch.equal(y, m.bias.expand(3, 4)) and x.grad.shape == (3, 0)

@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['mxfp8', 'quartet_ii'])
def test_one_graph_without_gradients(recipe):
    "A frozen layer, as beside LoRA, and evaluation compile as one graph and give the same."
    m,x = made(recipe, model=nn.Linear(32, 16)).eval(),torch.randn(4, 32, generator=generator())
    m.requires_grad_(False)
    want = m(x)
    for learns in (False, True):
        torch._dynamo.reset()
        m.requires_grad_(learns)
        with torch.set_grad_enabled(not learns):
            assert torch.equal(torch.compile(m, backend='eager', fullgraph=True)(x), want)

def test_a_convolution_keeps_the_layout():
    "Rows that lie in memory as before, so that view goes on; channels_last stays that."
    m,x = made('mxfp8', model=nn.Conv2d(3, 8, 3, padding=1)),torch.randn(2, 3, 8, 8, generator=generator())
    assert m(x).view(2, -1).shape == (2, 512)
    last = m(x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last) and torch.allclose(last, m(x), atol=1e-5)

def test_the_seed_survives_the_meta_device():
    "Whether the device was left before the call or not."
    def meta():
        with torch.device('meta'): return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    one,other = meta(),meta()
    R.low_precision_(one, 'nvfp4', seed=7)
    with torch.device('meta'): R.low_precision_(other, 'nvfp4', seed=7)
    want = made('nvfp4', seed=7, model=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1)))
    for model in (one, other):
        model.to_empty(device='cpu')
        for a,b in zip(model, want): assert a.rounding_seed == b.rounding_seed and a.rounding_count == 0

def encoder():
    torch.manual_seed(0)                        # an example: any weights
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.), 2).eval()

ATTENTIONS = [f'layers.{i}.self_attn' for i in (0, 1)]
CHANGES = dict(low=lambda m, x: R.low_precision_(m, 'mxfp4'),
    some=lambda m, x: R.low_precision_(m, 'mxfp4', skip=ATTENTIONS),
    weights=lambda m, x: R.quantize_model_(m, 4, None), both=lambda m, x: R.quantize_model_(m, 4, 8, calibrate=[x]),
    linear=lambda m, x: R.quantize_model_(m, 4, 8, calibrate=[x], skip=ATTENTIONS))
@pytest.mark.parametrize('mask', [True, False])
@pytest.mark.parametrize('change', CHANGES)
def test_encoders_call_their_layers(change, mask):
    """In evaluation without gradients torch's encoders take the weights of their layers, and nested tensors where there
    is a mask: the layers that were changed are called all the same, and afterwards it is as before."""
    m,x = encoder(),torch.randn(2, 5, 32, generator=generator())
    pad = torch.tensor([[0, 0, 0, 1, 1], [0]*5]).bool()
    kw = dict(src_key_padding_mask=pad) if mask else {}
    with torch.no_grad(): plain = m(x, **kw)
    CHANGES[change](m, x)
    m.eval()
    want = m(x, **kw)
    with torch.no_grad(): got = m(x, **kw)
    seen = ~pad if mask else slice(None)
    assert torch.allclose(got[seen], want[seen], atol=1e-5) and (got-plain)[seen].abs().max() > .01
    R.nn.remove_rounding_(m)
    assert m.use_nested_tensor and all(layer.activation_relu_or_gelu == 1 for layer in m.layers)
    with torch.no_grad(): assert m(x, **kw).shape == x.shape or not mask

def test_a_state_holds_tensors_alone_and_the_recipe_in_words():
    "As safetensors and averages over a state ask for."
    model = made('nvfp4')
    state = model.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    told = [bytes(v.tolist()).decode() for k,v in state.items() if k.endswith('_extra_state')]
    assert told and {*told} == {repr(R.RECIPES['nvfp4'])}
    model.load_state_dict({k: v.clone() for k,v in state.items()})

def test_a_parametrized_layer_is_named():
    one = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3))
    model = nn.Sequential(one, nn.ReLU(), nn.Linear(8, 4))
    rows = R.low_precision_(copy.deepcopy(model), 'mxfp8').rows
    assert [(r.name, r.note) for r in rows if not r.recipe] == [('0', 'its weight is parametrized')]
    with pytest.raises(ValueError, match='in Sequential; 0: its weight is parametrized'):
        R.low_precision_(model, 'mxfp8', skip=['2'])

def test_a_whole_model_under_torch_func_draws_what_its_last_call_drew():
    model,x = made('nvfp4').train(),X
    def loss(p): return torch.func.functional_call(model, p, (x,)).square().sum()
    params = dict(model.named_parameters())
    want = torch.autograd.grad(loss(params), [*params.values()])
    counts = [m.rounding_count.item() for m in model.modules() if hasattr(m, 'rounding_count')]
    got = torch.func.grad(loss)({k: p.detach() for k,p in params.items()})
    assert all(torch.equal(got[k], g) for k,g in zip(params, want))
    assert counts == [m.rounding_count.item() for m in model.modules() if hasattr(m, 'rounding_count')]

@pytest.mark.parametrize('layer, shape', [(nn.Linear(32, 8), (2, 1, 32)), (nn.Conv2d(4, 8, 3), (2, 1, 4, 8, 8))])
def test_vmap_is_refused_by_name(layer, shape):
    model = made('mxfp8', model=nn.Sequential(layer)).eval()
    x = torch.ones(shape)
    with pytest.raises(RuntimeError, match='low_precision_: torch.vmap has no rule'): torch.vmap(model)(x)

def test_another_recipe_loads_nothing():
    def two(recipe):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        R.low_precision_(model, recipe, skip=['0'])
        return model
    model,was = two('mxfp4'),two('mxfp8').state_dict()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match='trained with the recipe\nmxfp8'): model.load_state_dict(was)
    assert all(torch.equal(v, before[k]) for k,v in model.state_dict().items() if isinstance(v, torch.Tensor))
    model.load_state_dict(before)
    R.nn.remove_rounding_(model)
    model.load_state_dict({k: v for k,v in was.items() if k.endswith(('weight', 'bias'))})

def test_files_leave_out_the_seeds(tmp_path):
    "What layers in low precision keep for themselves is no tensor of the model."
    model = made('mxfp4', model=nn.Sequential(nn.Linear(64, 32)))
    R.save_gguf(model, tmp_path/'low.gguf', 'Q4_0')
    assert {r.weight for r in R.same_grid(model, tmp_path/'low.gguf').rows} == {'0.weight', '0.bias'}

def test_beyond_the_largest_of_nvfp4(tmp_path):
    R.save_gguf(dict(w=torch.full((1, 64), 2688.)), tmp_path/'some.gguf', 'NVFP4')
    with pytest.raises(ValueError, match='w is too large for NVFP4'):
        R.save_gguf(dict(w=torch.full((1, 64), 2689.)), tmp_path/'more.gguf', 'NVFP4')

@pytest.mark.parametrize('x, kind, told', [(torch.tensor(1.), ValueError, 'input must have a dim, got 0-d'),
    (torch.ones(2, 32, dtype=torch.int64), TypeError, 'input must be float16'),
    (torch.ones(2, 32)+0j, TypeError, 'input must be float16')])
def test_an_input_is_refused_by_the_layer(x, kind, told):
    m = made('mxfp8', model=nn.Linear(32, 16))
    with pytest.raises(kind, match=f'RoundedLinear: {told}'): m(x)

def test_second_derivatives_are_refused():
    model,x = made('fp8'),X.clone().requires_grad_()
    g, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): g.sum().backward()

# --- memory that is used again
def steps(layer, n, *shape, dtype=torch.float32):
    "Results and gradients of a few steps."
    g,found = generator(),[]
    for _ in range(n):
        x = torch.randn(*shape, generator=g).to(dtype).requires_grad_()
        y = layer(x)
        found += [y.detach(), *torch.autograd.grad(y, (x, layer.weight), torch.randn(y.shape, generator=g).to(dtype))]
    return found

@pytest.mark.parametrize('recipe', R.RECIPES)
def test_memory_that_is_used_again_changes_no_bit(recipe, monkeypatch):
    "With and without, in rows and turned, in half precision; and what comes back is ordinary memory."
    layer = nn.Linear(640, 512, bias=False)
    R.low_precision_(layer, recipe, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        low,results = copy.deepcopy(layer).to(dtype),[]
        for least in (pieces.LEAST, 1<<62):
            monkeypatch.setattr(pieces, 'LEAST', least)
            results.append(steps(copy.deepcopy(low), 3, 576, 640, dtype=dtype))
            for t in results[-1]: t.untyped_storage().resize_(t.nbytes)
        assert all(equal(a, b) for a,b in zip(*results))

@pytest.mark.parametrize('recipe', R.RECIPES)
def test_a_step_asks_for_no_new_memory(recipe):
    "The third step and all that follow: each of its blocks was there before, and waits again."
    layer = nn.Linear(512, 512, bias=False)
    R.low_precision_(layer, recipe)
    pieces.give_all_back()
    steps(layer, 2, 512, 512)
    places = waiting()
    assert len(places) > 1
    steps(layer, 2, 512, 512)
    assert waiting() == places
    pieces.give_all_back()

def waiting(): return {b.data_ptr() for blocks in pieces._waiting for b in blocks}

def held(k, n=1<<18): return pieces.reusing(lambda: pieces.room_like(torch.empty(n)).fill_(k))()

@pytest.mark.parametrize('keep', [lambda t: t[:3], lambda t: t.numpy()[:3], lambda t: t.untyped_storage(),
    lambda t: torch.from_dlpack(t), lambda t: (t.view(512, 512)*nn.Parameter(torch.ones(512))).grad_fn, nn.Parameter])
def test_memory_is_kept_while_something_shows_it(keep):
    "A view, an array, a storage, a graph: none of them sees another value, and then the block is free."
    t = held(1.)
    place,kept = t.data_ptr(),keep(t)
    del t
    others = [held(2.) for _ in range(3)]
    assert place not in [o.data_ptr() for o in others]
    if isinstance(kept, torch.Tensor): assert (kept == 1).all()
    del kept, others
    assert place in [o.data_ptr() for o in [held(3.) for _ in range(4)]]

def test_memory_waits_up_to_a_bound():
    "128 MB; with more the system gets all of it. Small results and those outside are not held."
    pieces.give_all_back()
    def waits(): return sum(b.numel() for blocks in pieces._waiting for b in blocks)
    some = [held(0., 1<<22) for _ in range(8)]              # 16 MB each
    del some
    assert waits() == pieces.MOST == 1<<27
    more = [held(0., 1<<22) for _ in range(9)]
    del more
    assert waits() == 0
    held(0., (1<<18)-1)
    pieces.room_like(torch.empty(1<<18))
    assert waits() == 0
    held(0., (1<<18)+1)
    assert waits() == 1<<21
    pieces.give_all_back()

def test_threads_never_share_memory():
    "Each fills its tensors with a number of its own, and finds it there."
    def work(k):
        for i in range(100):
            a,b = held(k+.25),held(k+i)
            assert (a == k+.25).all() and (b == k+i).all()
            yield
    def through(k): return len([*work(k)])
    with ThreadPoolExecutor(4) as pool: assert [*pool.map(through, range(0, 4000, 1000))] == [100]*4
    pieces.give_all_back()

# --- what is rounded once
@pytest.mark.parametrize('recipe', R.RECIPES)
def test_what_is_rounded_once_has_the_same_bits(recipe, monkeypatch):
    "As where each product rounds for itself: results and gradients, also where an input learns nothing."
    layer = nn.Linear(96, 48, bias=False)
    R.low_precision_(layer, recipe, seed=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        low,results = copy.deepcopy(layer).to(dtype),[]
        for once in (vars(R.RECIPES[recipe])['once'], False):
            monkeypatch.setitem(vars(low.recipe), 'once', once)
            results.append(steps(copy.deepcopy(low), 2, 64, 96, dtype=dtype))
            x = torch.randn(32, 96, generator=generator()).to(dtype)
            one = copy.deepcopy(low)
            results[-1] += torch.autograd.grad(one(x).square().sum(), one.weight)
        assert all(equal(a, b) for a,b in zip(*results))

@pytest.mark.parametrize('recipe, n', [('bfloat16', 5), ('fp8', 5), ('fp8_row', 6), ('fp8_block', 6), ('mxfp8', 6),
    ('nvfp4', 6), ('luq', 6), ('quartet_ii', 6)])
def test_how_often_a_step_rounds(recipe, n, monkeypatch):
    """The gradient once if its numbers do not depend on the axis that is summed, nor a draw or a turn. x and w twice:
    what is rounded would have to be kept till backward."""
    seen = []
    def counted(op, t, *args, rounded=products._rounded):
        seen.append(op)
        return rounded(op, t, *args)
    monkeypatch.setattr(products, '_rounded', counted)
    layer = nn.Linear(64, 64, bias=False)
    R.low_precision_(layer, recipe)
    steps(layer, 1, 64, 64)
    assert len(seen) == n

def test_a_rounding_of_your_own_is_called_for_each_product():
    "It may draw: nothing of it is taken twice."
    def mine(x, *, step): return R.round_ste(x, step=step)
    op = R.Operand('bfloat16', rounding=mine)
    assert vars(R.Recipe('mine', (op, op), (op, op), (op, op)))['once'] is False
    op = R.Operand('bfloat16')
    assert vars(R.Recipe('mine', (op, op), (op, op), (op, op), hadamard=16))['once'] is False
    assert vars(R.Recipe('mine', (op, op), (op, op), (op, op), requantize=True))['once'] is True
