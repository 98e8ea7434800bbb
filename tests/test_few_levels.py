"""Ternary, binary and stretched weights against the words of their papers, for groups, types, roundings and transforms.
Random tensors come from seed 0."""
from functools import partial
import numpy as np
import pytest
import torch
from estimators import FLOATS, back, check_every_mode, generator
import shok_nb as R
from shok_nb.catalog import catalog


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(), dtype=torch.float64).to(dtype)

def twn(w):
    "TWN's equations 6 and 7, for the values of one group, in numpy."
    w = w.double().numpy()
    delta = .7*np.abs(w).mean()
    kept = np.abs(w) > delta
    return np.where(kept, np.sign(w)*np.abs(w[kept]).mean(), 0.)

def b158(w):
    "Of BitNet b1.58: RoundClip(w/mean|w|, -1, 1) times that mean."
    w = w.double().numpy()
    scale = np.abs(w).mean()
    return np.clip(np.rint(w/scale), -1, 1)*scale

def xnor(w):
    w = w.double().numpy()
    return np.where(w >= 0, 1., -1.)*np.abs(w).mean()

RULES = dict(twn=(R.ternary_weight, twn), absmean=(partial(R.ternary_weight, rule='absmean'), b158),
    xnor=(R.xnor_weight, xnor))

@pytest.mark.parametrize('name', RULES)
def test_as_published(name):
    "For a tensor, for rows, columns and blocks: each group as if it were alone."
    ours,theirs = RULES[name]
    w = normal(6, 32)
    def near(y, want): np.testing.assert_allclose(y.numpy(), want, rtol=1e-12, atol=0)
    near(ours(w), theirs(w))
    near(ours(torch.linspace(-1, 1.2, 20_000).double()), theirs(torch.linspace(-1, 1.2, 20_000)))
    y,g = back(lambda w: ours(w, axis=0), torch.zeros(2, 3))
    assert not y.any() and g.isfinite().all() and (name == 'xnor' or g.eq(1).all())
    for i in range(6): near(ours(w, axis=0)[i], theirs(w[i]))
    for i in range(32): near(ours(w, axis=1)[:, i], theirs(w[:, i]))
    for i in range(4): near(ours(w, block=8)[2, 8*i:8*i+8], theirs(w[2, 8*i:8*i+8]))
    near(ours(w.view(6, 2, 4, 4), axis=(0, 1))[3, 1], theirs(w[3, 16:].view(4, 4)))

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('name', RULES)
def test_dtypes(name, dtype):
    "Three or two values in every type, those of float64 to its precision; 0-d and empty too."
    ours,theirs = RULES[name]
    w = normal(300, dtype=dtype)
    y = ours(w)
    assert y.dtype == dtype and len(y.abs().unique()) == (1 if name == 'xnor' else 2)
    np.testing.assert_allclose(y.double().numpy(), theirs(w), rtol=2*torch.finfo(dtype).eps)
    assert ours(w[0]).shape == () and torch.equal(ours(w[0]), w[0])             # alone it is its own scale
    for shape in ((0,), (0, 3), (3, 0)): assert ours(torch.empty(shape, dtype=dtype), axis=0).shape == shape

@pytest.mark.parametrize('rule', ['twn', 'absmean'])
def test_ternary_slopes(rule):
    "That of the rounding, at w over twice the threshold, wherever the weight lies."
    w = normal(200)
    y,g = back(lambda w: R.ternary_weight(w, rule), w)
    assert torch.equal(g, torch.ones_like(g)) and len(y.unique()) == 3
    step = w.abs().mean()*(1.4 if rule == 'twn' else 1)
    soft = partial(R.soft_round, alpha=4.)
    y,g = back(lambda w: R.ternary_weight(w, rule, rounding=soft), w)
    n,slope = back(soft, w/step)
    size = torch.from_numpy(twn(w) if rule == 'twn' else b158(w)).abs().max()
    assert torch.allclose(g, slope) and torch.allclose(y, n.clamp(-1, 1)*size)

@pytest.mark.parametrize('row', [pytest.param(r, id=r.name) for r in catalog])
def test_every_estimator_rounds_there(row):
    "The value and the slope of each, at w over twice the threshold."
    w = normal(64, dtype=torch.float32)
    kw = dict(seed=torch.tensor(0)) if row.random else {}
    f = partial(row.f, **kw)
    y,g = back(lambda w: R.ternary_weight(w, rounding=f), w)
    n,slope = back(f, w/(1.4*w.abs().mean()))
    assert torch.allclose(g, slope, rtol=1e-4, atol=1e-5)
    assert torch.allclose(y, n.clamp(-1, 1)*torch.from_numpy(twn(w)).abs().max().float(), rtol=1e-5, atol=1e-6)

def test_xnor_gradients():
    "The paper's equation; the derivative of the formula, by finite differences; and none."
    w = normal(7).mul(1.2).requires_grad_()
    g,n = normal(7).flip(0),7
    def of(**kw): return torch.autograd.grad(R.xnor_weight(w, **kw), w, g)[0]
    inside = (w.detach().abs() <= 1).double()
    assert 0 < inside.sum() < 7 and torch.allclose(of(), g*(1/n + w.detach().abs().mean()*inside))
    assert torch.equal(of(backward='ste'), g)
    assert torch.equal(R.xnor_weight(w), R.xnor_weight(w, backward='chain'))
    smooth = torch.tanh
    assert torch.autograd.gradcheck(lambda w: R.xnor_weight(w, smooth, backward='chain'), (w,))
    rows = normal(3, 4).requires_grad_()
    slope, = torch.autograd.grad(R.xnor_weight(rows, R.sign_ste, axis=0).sum(), rows)
    assert torch.allclose(slope, 1/4 + rows.detach().abs().mean(1, keepdim=True).expand(3, 4))

@pytest.mark.parametrize('sign', [R.sign_ste, R.clipped_sign, R.approx_sign, R.ede_sign, R.swish_sign, R.reste_sign],
    ids=lambda f: f.__name__)
def test_signs_of_every_kind(sign):
    w = normal(50)
    y,g = back(lambda w: R.xnor_weight(w, sign), w)
    slope = back(sign, w)[1]
    assert torch.equal(y, R.xnor_weight(w)) and torch.allclose(g, 1/50 + w.abs().mean()*slope)

# --- SEQ
class Published(torch.autograd.Function):
    "ParetoQ's StretchedElasticQuant as its paper states it, for 3, 4, 8 and 16 levels of one tensor."
    @staticmethod
    def forward(ctx, w, alpha, n, shift, top):
        ctx.save_for_backward(w, alpha)
        ctx.kept = n,shift,(w.numel()*top)**-.5
        return ((torch.clamp(w/alpha, -.99, .99)*n-shift).round()+shift)/n*alpha
    @staticmethod
    def backward(ctx, g):
        w,alpha = ctx.saved_tensors
        n,shift,share = ctx.kept
        v,end = w/alpha,(n-shift)/n if shift else 1/n
        level = ((v*n-shift).round()+shift)/n
        of_alpha = torch.where(v > .99, end, torch.where(v < -.99, -end, level-v))
        return g*(v.abs() <= .99),(g*of_alpha).sum()*share,None,None,None

@pytest.mark.parametrize('levels,n,shift,top', [(3, 1.5, 0, 1), (4, 2, .5, 1), (8, 4, .5, 3), (16, 8, .5, 7)])
def test_seq_as_published(levels, n, shift, top):
    """Values, slopes and the gradient of alpha. Between .99 and 1 of alpha the published slope is 0, and here the cell
    goes on to its end: no weight of this seed lies there."""
    w,alpha = normal(500),torch.tensor(1.4, dtype=torch.float64)
    ratio = (w/alpha).abs()
    w = w[(ratio < .985) | (ratio > 1.005)]
    g = normal(len(w)).flip(0)
    ours,theirs = (back(f, w, alpha, g=g) for f in (lambda w, a: R.seq(w, a, levels),
        lambda w, a: Published.apply(w, a, n, shift, top)))
    for a,b in zip(ours, theirs, strict=True): assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert len(ours[0].unique()) == levels and (ours[0] == 0).any() == (levels % 2)
    assert 0 < (ours[1] == 0).sum() < len(w)

@pytest.mark.parametrize('levels', range(2, 12))
def test_seq_levels(levels):
    "The middles of equal cells, for a number and a tensor, one for all or one for each row."
    x = torch.linspace(-3, 3, 4001)
    middles = (torch.arange(levels)+.5)*2/levels*1.3-1.3
    assert torch.allclose(R.seq(x, 1.3, levels).unique(), middles, atol=1e-6)
    assert torch.allclose(R.seq(x, 1.3, levels), R.seq(x, torch.tensor(1.3), levels))
    rows,alpha = torch.stack([x, 2*x]),torch.tensor([[1.3], [2.6]])
    y = R.seq(rows, alpha, levels)
    assert torch.allclose(y[1], 2*y[0])

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_seq_dtypes(dtype):
    x = normal(200, dtype=dtype)
    y,g,a = back(lambda x, a: R.seq(x, a, 4), x, torch.tensor(1., dtype=dtype))
    assert (y.dtype, g.dtype, a.dtype) == (dtype,)*3 and len(y.unique()) == 4
    assert R.seq(torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype), 1.)[1:].tolist() == [.75, -.75]

def test_seq_alpha_comes_back():
    "An alpha that an optimizer has taken below 0 has a gradient that leads back."
    alpha = torch.tensor(-.1, requires_grad=True)
    sgd = torch.optim.SGD([alpha], lr=.5)
    x = normal(100, dtype=torch.float32)
    for _ in range(60):
        sgd.zero_grad()
        (R.seq(x, alpha)-x).square().sum().backward()
        sgd.step()
    assert alpha > 1

# --- every transform
FS = dict(twn=R.ternary_weight, absmean=partial(R.ternary_weight, rule='absmean', axis=0),
    xnor=partial(R.xnor_weight, axis=0),
    soft=partial(R.ternary_weight, rounding=R.soft_round), chain=partial(R.xnor_weight, backward='chain'),
    seq=lambda w: R.seq(w, w.detach().abs().amax()))

@pytest.mark.slow
@pytest.mark.parametrize('name', FS)
def test_transforms(name):
    f,w = FS[name],normal(6, 5, dtype=torch.float32)
    check_every_mode(f, w)
    assert torch.allclose(torch.vmap(f)(torch.stack([w, 3*w]))[1], f(3*w), rtol=1e-5, atol=1e-5)

# --- the rule as a calibration
def test_absmean_quantizer():
    "The codes of the paper's rule, by name and as a function, in a whole network that trains and deploys."
    w = normal(8, 16, dtype=torch.float32)
    for init in ('absmean', R.absmean_init):
        q = R.Quantizer((-1, 1), axis=0, init=init).calibrate_(w)
        assert torch.equal(q(w), R.ternary_weight(w, 'absmean', axis=0))
    with pytest.raises(ValueError, match="^Quantizer: init='absmean' has no zero point"):
        R.Quantizer((-1, 1), zero_point=True, init='absmean')
    with pytest.raises(ValueError, match='^absmean_init: zero_point must be False'): R.absmean_init(w, zero_point=True)
    x = normal(64, 16, dtype=torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    ternary = R.Quantizer((-1, 1), axis=0, init='absmean')
    R.quantize_model_(model, calibrate=[x], weights=ternary)
    model(x).sum().backward()
    model.eval()
    want = model(x)
    R.deploy_(model, x)
    assert torch.allclose(model(x), want, atol=.01)           # a bias is rounded to the step of the sums

FAKE = dict(lsq_init=R.lsq_init, softmax=lambda x: R.levels_softmax(x, R.NF4),
    listed=lambda x: R.levels_round(x, [-1., 0., 2.]), levels=lambda x: R.levels_round(x, torch.tensor([-1., 0., 2.])),
    quantizer=lambda x: R.Quantizer(4, axis=0), initial=lambda x: R.lsq_init(x, axis=0))

@pytest.mark.parametrize('name', FAKE)
def test_what_is_fake_is_not_looked_at(name):
    "Shapes alone, as when a network's memory is counted before it is made."
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(): FAKE[name](torch.randn(4, 8, requires_grad=True))

def test_the_scale_of_a_group_of_zeros():
    "That of the middle one of the others, or 1."
    rows = torch.tensor([[0., 0.], [1., 1.], [2., 2.], [4., 4.]])
    scale = R.lsq_init(rows, 4, axis=0).flatten()
    assert scale[0] == scale[2] and (scale[1:] == scale[1]*torch.tensor([1., 2., 4.])).all()
    assert torch.equal(R.lsq_init(rows[:1], 4, axis=0).flatten(), torch.ones(1))

def test_the_slope_of_an_entropy_at_the_ends():
    "That just inside, where torch's clamp has 1, 0 or a half by its version."
    def slopes(x): return back(lambda x: R.soft_entropy(x, bits=4), x)[1]
    ends,inside = torch.tensor([-8., -7.7, 7., 6.8]),torch.tensor([-7.999, -7.7, 6.999, 6.8])
    assert torch.allclose(slopes(ends), slopes(inside), rtol=.05) and (slopes(inside).abs() > .01).all()

def test_the_first_scale_under_vmap():
    x = torch.randn(3, 4, 8, generator=generator())
    assert torch.equal(torch.vmap(R.lsq_init)(x), torch.stack([R.lsq_init(v) for v in x]))
