"""Spikes in the forms that the catalog does not go through: the curve, three values, thresholds that learn. Their
slopes against formulas in Python's floats, which know nothing of torch."""
import math
from dataclasses import replace
from functools import partial
import pytest
import torch
from estimators import back, compiled, kept, side_by_side, slope, slopes
import shok_nb as R
from shok_nb.catalog import row
from shok_nb.checks import check_estimator


def sigma(z): return 1/(1+math.exp(-z)) if z > 0 else math.exp(z)/(1+math.exp(z))

# The slope at a distance from the threshold, and the curve, which is 1/2 there.
PAIRS = {
    R.arctan_spike: (lambda u, a: a/2/(1+(math.pi/2*a*u)**2), lambda u, a: .5+math.atan(math.pi/2*a*u)/math.pi),
    R.fast_sigmoid_spike: (lambda u, a: 1/(1+a*abs(u))**2, lambda u, a: .5+u/(1+a*abs(u))),
    R.sigmoid_spike: (lambda u, a: a*sigma(a*u)*sigma(-a*u), lambda u, a: sigma(a*u)),
    R.triangular_spike: (lambda u, a: a*max(0, 1-a*abs(u)),
        lambda u, a: .5+math.copysign(min(a*abs(u), 1)*(1-min(a*abs(u), 1)/2), u)),
    R.gaussian_spike: (lambda u, a: a/math.pi**.5*math.exp(-(a*u)**2), lambda u, a: .5+math.erf(a*u)/2),
}
each = pytest.mark.parametrize('f', PAIRS, ids=lambda f: f.__name__)
FORMS = [dict(ternary=t, soft=s) for t in (False, True) for s in (False, True)]
XS = [-3.1, -.8, -.3, -.01, 0., .02, .25, .31, 1.4, 20.]

@each
@pytest.mark.parametrize('form', FORMS, ids=str)
def test_value_slope_and_threshold(f, form):
    "Of all four forms at a threshold; three values are a spike less a spike of -x."
    density,curve = PAIRS[f]
    a,th = 2.7,.3
    def step(u, a): return float(u >= 0)
    one = curve if form['soft'] else step
    for x in XS:
        up,down = (density(v-th, a) for v in (x, -x))
        want = one(x-th, a),up,-up
        if form['ternary']: want = one(x-th, a)-one(-x-th, a),up+down,down-up
        ts = [torch.tensor(v, dtype=torch.float64) for v in (x, th)]
        got = back(lambda x, th: f(x, a, threshold=th, **form), *ts)
        assert [t.item() for t in got] == pytest.approx(want, rel=1e-12, abs=1e-15), x

@each
@pytest.mark.parametrize('form', FORMS, ids=str)
def test_one_slope_of_all_forms(f, form):
    "Eager code, forward mode and the gradient of the gradient's graph have it; -0 is at the threshold, nan stays nan."
    x = torch.tensor([*XS, -0.])
    g = partial(f, threshold=.3, **form)
    want = slope(g, x)
    assert torch.allclose(torch.func.jvp(g, (x,), (torch.ones_like(x),))[1], want, rtol=1e-4, atol=1e-6)
    leaf = x.clone().requires_grad_()
    again, = torch.autograd.grad(g(leaf).sum(), leaf, create_graph=True)
    assert torch.allclose(again, want, rtol=1e-4, atol=1e-6)
    assert g(torch.tensor(torch.nan)).isnan() and slope(g, torch.tensor(torch.nan)) == 0
    assert f(torch.tensor(-0.), **form) == f(torch.tensor(0.), **form)

@pytest.mark.parametrize('f', [*PAIRS, R.spike_ste], ids=lambda f: f.__name__)
def test_a_threshold_for_each_neuron(f):
    "It broadcasts, learns by the sum over the batch, and takes what it is given in half precision."
    x = torch.linspace(-1, 2, 12, dtype=torch.bfloat16).view(3, 4)
    th = torch.tensor([-.5, 0., .5, 1.], dtype=torch.bfloat16)
    y,dx,dth = back(lambda x, th: f(x, threshold=th), x, th)
    assert torch.equal(y, (x >= th).to(x)) and dth.shape == (4,) and dth.dtype == torch.bfloat16
    assert torch.allclose(dth.float(), -dx.float().sum(0), rtol=1e-2)

def test_straight_through_with_three_values():
    "Slope 1, and a threshold that moves away lets both sides fall to 0."
    x,th = torch.tensor([-2., -.5, .5, 2.]),torch.tensor(1.)
    g = torch.tensor([1., 2., 4., 8.])
    y,dx,dth = back(lambda x, th: R.spike_ste(x, threshold=th, ternary=True), x, th, g=g)
    assert y.tolist() == [-1., 0., 0., 1.] and torch.equal(dx, g) and dth == 1+2-4-8

def test_what_is_kept_for_backward():
    "`x` once, and nothing where the slope is 1."
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for f in PAIRS:
        for form in FORMS: assert [t.shape for t in kept(lambda f=f, form=form: f(x, **form))] == [(100,)]
    for ternary in (False, True): assert not kept(lambda t=ternary: R.spike_ste(x, threshold=.5, ternary=t))

CURVE = dict(on_grid=False, continuous=True, exact_slope=True)

@pytest.mark.parametrize('f, kw, claims', [
    *((f, dict(soft=True), CURVE) for f in PAIRS),
    (R.arctan_spike, dict(threshold=.7, ternary=True), dict(odd=True)),
    (R.triangular_spike, dict(threshold=.7, ternary=True, soft=True), CURVE | dict(odd=True)),
    (R.spike_ste, dict(threshold=.7, ternary=True), dict(odd=True)),
], ids=lambda v: getattr(v, '__name__', None) or '-'.join(v))
def test_laws_of_the_forms(f, kw, claims):
    mine = partial(f, **kw)
    own = tuple(k for k in row(f).knobs if k.name not in kw)
    report = check_estimator(mine, replace(row(f), f=mine, knobs=own, **claims))
    assert report.ok and not report.details, report

@pytest.mark.slow
def test_compiled():
    "All forms of all functions in one graph."
    fs = [partial(f, threshold=.3, **form) for f in PAIRS for form in FORMS]
    fs += [partial(R.spike_ste, threshold=.3, ternary=t) for t in (False, True)]
    x = torch.tensor(XS)
    torch.compiler.reset()
    every = compiled(side_by_side(fs))
    for f,y,steep in zip(fs, every(*[x]*len(fs)), slopes(every, x, len(fs)), strict=True):
        assert torch.allclose(y, f(x), atol=1e-6) and torch.allclose(steep, slope(f, x), rtol=1e-4, atol=1e-6), f
