"""`RoundedOptimizer` over every optimizer of pytorch_optimizer, of heavyball and of schedulefree.

Parameters in float32 must go exactly where the optimizer leads them without us. Those in bfloat16 go on bit for bit
after they were saved and loaded."""
import copy
import random
from functools import partial
import heavyball
import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn
import shok_nb as R

heavyball.utils.compile_mode = None

# They need a closure, a model, a process group or a graph of the gradient: arguments that no other one has
OTHERS = {'adahessian', 'adalomo', 'adammini', 'alig', 'bsam', 'demo', 'distributedmuon', 'lbfgs', 'lomo', 'ranger21',
    'sophiah'}
GROUPED = {'adago', 'adamuon', 'muon', 'muonclip', 'normuon'} # ask each group whether it is for Muon
HEAVY = 'AdamW', 'SOAP', 'PSGDPRO', 'Muon', 'SFAdamW', 'LaProp', 'ADOPT', 'KLShampoo'

def made(name):
    if '.' not in name: return pytorch_optimizer.load_optimizer(name)
    package,name = name.split('.')
    return getattr(dict(heavyball=heavyball, schedulefree=schedulefree)[package], name)

NAMES = [*sorted({*pytorch_optimizer.get_supported_optimizers()}-OTHERS), *(f'heavyball.{n}' for n in HEAVY),
    *(f'schedulefree.{n}ScheduleFree' for n in ('AdamW', 'SGD', 'RAdam'))]

def some(dtype):
    g = torch.Generator().manual_seed(0)                    # any: a law
    return [nn.Parameter((.5*torch.randn(s, generator=g)).to(dtype)) for s in ((16, 8), (16,), (8, 4, 3, 3), (8,))]

def groups(name, params):
    if name == 'spectralsphere': return params[:1]          # matrices alone
    if name not in GROUPED: return params
    return [dict(params=[p for p in params if (p.ndim > 1) == is_for], use_muon=is_for) for is_for in (True, False)]

def step(opt, params, i):
    g = torch.Generator().manual_seed(i+1)
    for p in params: p.grad = (.1*torch.randn(p.shape, generator=g)+.05*p.detach().float()).to(p.dtype)
    torch.manual_seed(i)                                    # some draw
    random.seed(i)
    opt.step()

def train(opt):
    if hasattr(opt, 'train'): opt.train()
    return opt

@pytest.mark.parametrize('name', NAMES)
def test_an_optimizer_of_others(name):
    make = partial(made(name), lr=1e-2)
    plain,ours = some(torch.float32),some(torch.float32)
    one,two = train(make(groups(name, plain))),train(R.RoundedOptimizer(groups(name, ours), make))
    for i in range(6):
        step(one, plain, i)
        step(two, ours, i)
    for p,q in zip(plain, ours): assert torch.equal(p, q) and p.isfinite().all()

    for states in (None, torch.bfloat16):
        first,second = some(torch.bfloat16),some(torch.bfloat16)
        one,two = (train(R.RoundedOptimizer(groups(name, p), make, states=states)) for p in (first, second))
        for i in range(6):
            if i == 3:
                for p,q in zip(first, second): q.data.copy_(p.data)
                two.load_state_dict(copy.deepcopy(one.state_dict()))
            step(one, first, i)
            if i >= 3: step(two, second, i)
        for p,q in zip(first, second): assert torch.equal(p, q)

@pytest.mark.parametrize('name', ['AdamW', 'SGD', 'RAdam'])
def test_weights_of_a_free_schedule(name):
    "Those to evaluate with are the optimizer's own; training goes on from those it left."
    make = partial(made(f'schedulefree.{name}ScheduleFree'), lr=1e-2)
    plain,ours,halves = some(torch.float32),some(torch.float32),some(torch.bfloat16)
    opts = [(plain, make(plain)), *((p, R.RoundedOptimizer(p, make)) for p in (ours, halves))]
    for i in range(4):
        for params,opt in opts:
            opt.train()
            step(opt, params, i)
            opt.eval()
        for p,q in zip(plain, ours): assert torch.equal(p, q)
    # each of 12 roundings is off by less than a step of bfloat16, 2**-7 of a value
    for p,q in zip(plain, halves): assert (p-q.float()).abs().max() < 12*2**-7*p.abs().max()
