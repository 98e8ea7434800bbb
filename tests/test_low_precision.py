"""Training in few bits: stored weights, and the operands of products, against a second way to write them."""
from functools import partial
import pytest
import torch
from estimators import generator
from torch import nn
import shok_nb as R
from shok_nb.engine.random import fold_in

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=.1)

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

def test_few_are_wide_at_a_time():
    "While torch's optimizer steps, no more elements are in float32 than at_once says; memory is that of before."
    params = some(sizes=((10,),)*7)
    opt = R.RoundedOptimizer(params, ADAMW, at_once=25)
    at,seen,step = [p.data_ptr() for p in params],[],opt.inner.step
    def watched():
        seen.append(sum(p.numel() for p in params if p.dtype == torch.float32))
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
        'RoundedOptimizer.load_state_dict: state_dict has states=None'),
    (lambda p: R.stochastic_cast(p[0], 'bfloat16'), TypeError, 'stochastic_cast: dtype must be one of torch.float16'),
    (lambda p: R.stochastic_cast(p[0].long(), torch.bfloat16), TypeError, 'stochastic_cast: x must be'),
])
def test_stored_refuses(call, kind, told):
    with pytest.raises(kind) as e: call(some())
    assert str(e.value).startswith(told), e.value
