"""The softmax over a codebook against the plain formula in float64, at both ends of the temperature, for rows of
levels, types, transforms and noise. Random tensors come from seed 0."""
import math
from functools import partial
import pytest
import torch
from estimators import FLOATS, back, check_every_mode, generator
from shok_nb import NF4, apot_levels, levels_round, levels_softmax
from shok_nb.engine.random import uniform_like

BOOKS = dict(ternary=[-1., 0., 1.], NF4=NF4, apot=apot_levels(4).tolist(), uneven=[-1., -.9, .2, 5.], two=[0., 1.])
SEED = torch.tensor(0)
def normal(*shape): return torch.randn(*shape, generator=generator(), dtype=torch.float64)
def book(name): return torch.tensor(BOOKS[name], dtype=torch.float64)

def plain(x, levels, t, sharpness=1., noise=0.):
    score = -sharpness*(x[..., None]-levels).square() + noise
    return (torch.softmax(score/t, -1)*levels).sum(-1)

@pytest.mark.parametrize('t', [.003, .1, 1., 30.])
@pytest.mark.parametrize('name', BOOKS)
def test_plain_formula(name, t):
    "Value, and the gradients to values, levels, temperature and sharpness."
    x,g = 2*normal(50),normal(50).flip(0)
    knobs = x,book(name),torch.tensor(t, dtype=torch.float64),torch.tensor(1.7, dtype=torch.float64)
    for ours,theirs in zip(back(levels_softmax, *knobs, g=g), back(plain, *knobs, g=g), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)

def test_finite_differences():
    x = normal(12).requires_grad_()
    levels = torch.tensor([-1.1, -.2, .4, 1.3], dtype=torch.float64, requires_grad=True)
    t = torch.tensor(.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(levels_softmax, (x, levels, t))
    assert torch.autograd.gradgradcheck(levels_softmax, (x, levels, t))

@pytest.mark.parametrize('name', BOOKS)
def test_limits(name):
    "The nearest level with the slope of `levels_round` at 0, as a number or a tensor; the mean of levels at infinity."
    x,levels = 2*normal(200),book(name)
    want = back(levels_round, x, levels)
    for t in (0., 1e-30, torch.tensor(0., dtype=torch.float64)):
        for ours,theirs in zip(back(lambda x, l, t=t: levels_softmax(x, l, t), x, levels), want, strict=True):
            assert torch.equal(ours, theirs)
    gap = (x[:, None]-levels).abs().sort(1).values
    clear = gap[:, 1]-gap[:, 0] > 1e-3
    assert clear.sum() > 180 and torch.allclose(levels_softmax(x, levels, 1e-7)[clear], want[0][clear])
    assert torch.allclose(levels_softmax(x, levels, math.inf), levels.mean().expand(200))
    both = levels_softmax(x, levels, torch.tensor([[0.], [math.inf]], dtype=torch.float64))
    assert torch.equal(both[0], want[0]) and torch.allclose(both[1], levels.mean().expand(200))

def test_temperature_of_a_channel():
    x,t = normal(3, 8),torch.tensor([[.1], [0.], [2.]], dtype=torch.float64)
    y = levels_softmax(x, NF4, t)
    for i in range(3): assert torch.equal(y[i], levels_softmax(x[i], NF4, t[i].item()))

def test_rows_of_levels():
    levels = (normal(4, 5)+torch.arange(5)*4).requires_grad_()
    x = 8*normal(4, 6).requires_grad_()
    y = levels_softmax(x, levels, .7, axis=0)
    want = torch.stack([plain(x[i], levels[i], .7) for i in range(4)])
    assert torch.allclose(y, want) and torch.equal(levels_softmax(x.mT, levels, .7, axis=1), y.mT)
    for a,b in zip(*(torch.autograd.grad(v.square().sum(), (x, levels)) for v in (y, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-9)

@pytest.mark.parametrize('t', [0., .01, 1., math.inf])
def test_hard(t):
    "The level of the largest weight, which is the nearest; the slope is the mixture's."
    x = normal(100)
    y,g = back(lambda x: levels_softmax(x, NF4, t, hard=True), x)
    assert torch.equal(y, levels_round(x, NF4)) or t == math.inf
    assert torch.equal(g, back(lambda x: levels_softmax(x, NF4, t), x)[1])

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('t', [0., 1e-30, 1e-6, .1, 1e30, math.inf])
def test_edges(dtype, t):
    "Infinity is the end, nan stays, and no gradient is nan, to values, levels and the temperature; 0-d and empty."
    huge = torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, huge, -huge, 0., .4, -1.], dtype=dtype)
    levels,t = torch.tensor([-1., 0., 1.], dtype=dtype),torch.tensor(t)
    y,*grads = back(lambda *a: levels_softmax(*a), x, levels, t)
    assert y.dtype == dtype and y[:2].tolist() == [1., -1.] and y.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    if t < 1e20: assert y[2:4].tolist() == [1., -1.]
    assert levels_softmax(torch.tensor(math.nan, dtype=dtype), levels, t).isnan()
    assert levels_softmax(x[5], levels, t).shape == () and levels_softmax(x[:0], levels, t).shape == (0,)

# --- noise
def gumbel(x, count, seed=SEED):
    u = torch.stack([uniform_like(x, seed=seed, draw=k) for k in range(count)], -1)
    return -torch.log(-torch.log(u.clamp(min=2**-26)))

def test_noise_is_in_the_formula():
    x,levels = normal(40),book('apot')
    y = levels_softmax(x, levels, .5, 3., noise=True, seed=SEED)
    assert torch.allclose(y, plain(x, levels, .5, 3., gumbel(x, len(levels))))

@pytest.mark.parametrize('sharpness', [0., 2., 50.])
def test_picked_by_chance(sharpness):
    """At temperature 0 and with `hard`, each level as often as the softmax says, within four standard deviations: one
    seed in a thousand would be farther, for one of the five."""
    levels = torch.tensor([-1., -.3, 0., .3, 1.])
    x = torch.full((100_000,), .2)
    chance = torch.softmax(-sharpness*(.2-levels).square(), 0)
    for kw in (dict(temperature=0.), dict(temperature=.7, hard=True)):
        y = levels_softmax(x, levels, sharpness=sharpness, noise=True, seed=SEED, **kw)
        share = (y[:, None] == levels).float().mean(0)
        assert (share-chance).abs().max() < 4*(.25/100_000)**.5 and torch.isin(y, levels).all()

def test_seeds_and_generators():
    "A seed gives one result, a generator goes on, and both at once are refused, as is a seed of floats."
    x = normal(30)
    def of(**kw): return levels_softmax(x, NF4, .1, noise=True, **kw)
    assert torch.equal(of(seed=SEED), of(seed=SEED)) and not torch.equal(of(seed=SEED), of(seed=SEED+1))
    g = generator()
    assert not torch.equal(of(generator=g), of(generator=g)) and torch.equal(of(generator=generator()),
        of(generator=generator()))
    with pytest.raises(ValueError, match='^levels_softmax: '): of(generator=g, seed=SEED)
    assert torch.equal(levels_softmax(x, NF4, .1, seed=SEED), levels_softmax(x, NF4, .1))     # no noise was asked for

# --- transforms
FS = dict(soft=levels_softmax, hard=partial(levels_softmax, hard=True), rows=lambda x, l, t: levels_softmax(
    x, torch.stack([l]*4), t, axis=0), noise=lambda x, l, t: levels_softmax(x, l, t, 5., noise=True, seed=SEED))

@pytest.mark.slow
@pytest.mark.parametrize('name', FS)
def test_transforms(name):
    f = FS[name]
    x,levels,t = normal(4, 6).float(),torch.tensor([-1., -.2, .3, 1.]),torch.tensor(.2)
    check_every_mode(f, x, levels, t, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(f, backend='inductor', fullgraph=True)(x, levels, t)
    assert torch.allclose(compiled, f(x, levels, t), rtol=1e-4, atol=1e-4)
    if name == 'noise': return
    many = torch.vmap(lambda x: f(x, levels, t))(torch.stack([x, 2*x]))
    assert torch.allclose(many[1], f(2*x, levels, t), rtol=1e-4, atol=1e-4)
