"Bounds beside the rule as it is published, in every dtype, and under every transform."
import math
from functools import partial
import pytest
import torch
from estimators import FLOATS, Calls, back, compiled, exported, generator, same, slow_after
from shok_nb import clip, lower_bound, poisson_round, upper_bound


def published(x, g, lower=None, upper=None):
    "What TensorFlow Compression's `lower_bound` and `upper_bound` do, one after the other, in the dtype of `x`."
    y = x
    if lower is not None:
        b = torch.as_tensor(lower, dtype=x.dtype)
        y,g = torch.maximum(y, b),torch.where((x >= b) | (g < 0), g, 0.)
    if upper is not None:
        b = torch.as_tensor(upper, dtype=x.dtype)
        y,g = torch.minimum(y, b),torch.where((x <= b) | (g > 0), g, 0.)
    return y,g

ROWS = torch.tensor([[-.7], [.11], [.3]])
WAYS = [(lower_bound, (.11,)), (upper_bound, (.11,)), (clip, (-.3, .11)), (clip, (None, .11)), (clip, (ROWS, ROWS+1))]
EACH = pytest.mark.parametrize('f, ends', WAYS, ids=['lower', 'upper', 'both', 'one', 'tensors'])

def ends_of(f, ends): return (None, *ends) if f is upper_bound else ends
def numbers(seed, dtype=torch.float32):
    "Values with both zeros, the ends themselves and numbers far beyond them: each takes each branch."
    x = torch.randn(3, 40, generator=generator(seed))
    x[:, :6] = torch.tensor([.11, -.3, 0., -0., 3e4, -3e4])
    return x.to(dtype)

@EACH
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_as_published(f, ends, dtype):
    x,g = numbers(0, dtype),numbers(1, dtype)
    y,slope = back(lambda x: f(x, *ends), x, g=g)
    want,to_x = published(x, g, *ends_of(f, ends))
    assert same(y, want) and torch.equal(slope, to_x)
    y,slope = back(lambda x: f(x, *ends, gradient='identity'), x, g=g)
    assert same(y, want) and torch.equal(slope, g)
    inside = (x == want)
    y,slope = back(lambda x: f(x, *ends, gradient='disconnected'), x, g=g)
    assert same(y, want) and torch.equal(slope, torch.where(inside, g, 0.))

@EACH
def test_transforms(f, ends):
    "Reverse mode, by rows too, knows the gradient; forward mode has none and lets all pass."
    x,g = numbers(2),numbers(3)
    y,slope = back(lambda x: f(x, *ends), x, g=g)
    rows = [e if isinstance(e, torch.Tensor) else torch.tensor(math.nan if e is None else e).expand(3, 1) for e in ends]
    def row(x, g, *own):
        own = [None if given is None else e for e,given in zip(own, ends)]
        value,pull = torch.func.vjp(lambda x: f(x, *own), x)
        return value,*pull(g)
    by_row = torch.func.vmap(row)(x, g, *rows)
    assert same(by_row[0], y) and torch.equal(by_row[1], slope)
    value,tangent = torch.func.jvp(lambda x: f(x, *ends), (x,), (g,))
    assert same(value, y) and torch.equal(tangent, g)

@EACH
@pytest.mark.parametrize('backend', slow_after(['aot_eager', 'eager', 'inductor']))
@pytest.mark.slow
def test_compiled(f, ends, backend):
    x,g = numbers(4),numbers(5)
    for rule in ('identity_if_towards', 'identity', 'disconnected'):
        way = partial(f, **dict(zip(['lower', 'upper'] if f is clip else ['bound'], ends)), gradient=rule)
        for a,b in zip(back(compiled(way, backend), x, g=g), back(way, x, g=g)): assert torch.equal(a, b)
        with torch.no_grad(): assert same(compiled(way, backend)(x), way(x))

@EACH
def test_exported(f, ends):
    "A graph holds the value alone."
    x = numbers(6)
    assert same(exported(lambda x: f(x, *ends), x).module()(x), f(x, *ends))
    assert same(torch.jit.trace(Calls(lambda x: f(x, *ends)), x, check_trace=False)(x), f(x, *ends))

def test_second_derivative():
    "The rule is a choice between the gradient and 0, so a second backward chooses as the first one did."
    x,v = torch.tensor([-1., .5, 2.], requires_grad=True),torch.tensor([3., -3., 3.], requires_grad=True)
    g, = torch.autograd.grad((clip(x, 0., 1.)*v).sum(), x, create_graph=True)
    assert g.tolist() == [0., -3., 3.]
    assert torch.autograd.grad(g.sum(), v)[0].tolist() == [0., 1., 1.]

def test_gradcheck_inside():
    x = torch.linspace(.1, .9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: clip(x, 0., 1.)**2, x) and torch.autograd.gradgradcheck(
        lambda x: clip(x, 0., 1.)**3, x)

def test_ends_learn_nothing():
    end = torch.tensor(.5, requires_grad=True)
    for rule in ('identity_if_towards', 'identity', 'disconnected'):
        assert not lower_bound(torch.ones(2), end, gradient=rule).requires_grad

def test_knobs_are_bound_by_it(monkeypatch):
    "A knob that has left its range passes its gradient by the function that `gradient='identity'` passes it by."
    from shok_nb.engine import core
    from shok_nb.estimators import bounds
    assert bounds.stand_in is core.stand_in
    seen = []
    monkeypatch.setattr(core, 'stand_in', lambda *a: seen.append(a) or a[0])
    poisson_round(torch.tensor([.3]), torch.tensor(-1., requires_grad=True))
    assert len(seen) == 1
