"""Tokenizers against the formulas of their papers, written plainly in float64, and what torch asks of any function."""
import copy
import itertools
import math
import pickle
import numpy as np
import pytest
import torch
from estimators import FLOATS, compiled, generator
from torch.autograd import grad
import shok_nb as R
from shok_nb import (
    FSQ,
    LFQ,
    VQ,
    code_usage,
    fsq,
    fsq_codes,
    fsq_index,
    lfq,
    lfq_entropy,
    vq,
    vq_index,
    vq_loss,
)

METHODS = 'ste', 'rotation', 'diveq'
each_method = pytest.mark.parametrize('method', METHODS)

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=generator(seed), dtype=dtype)

def leaves(count=40, codes=9, channels=3):
    "Latents and a codebook that want gradients, and the gradient of the code. Seeds 0 to 2: no two distances are near."
    z,codebook = normal(count, channels).requires_grad_(),normal(codes, channels, seed=1).requires_grad_()
    return z,codebook,normal(count, channels, seed=2)

# --- FSQ in stages, and its hard clamp
@pytest.mark.parametrize('levels', ([5, 5], [4, 4], [8, 3], [2, 7]), ids=str)
@pytest.mark.parametrize('stages', (1, 2, 3))
def test_stages_are_residuals(levels, stages):
    """As published: each stage rounds what the last has left, scaled by levels**-stage, with a hard clamp. The same
    numbers in float64, for latents 1e-9 from ties; codes are a constant apart."""
    n = torch.tensor(levels).double()
    wide = n/(n-1)
    z = normal(4000, len(levels))*1.5
    t = wide*torch.tanh(z/wide)
    left,total,index = t,0.,[]
    for k in range(stages):
        v = (n-1)*((left*n**k).clamp(-1, 1)+1)/2
        code = 2/(n-1)*v.round()-1
        index.append(fsq_index(code, levels, symmetric=True))
        total,left = total+code*n**-k,left-code*n**-k
    keep = ((t+wide)/(2*wide)*n**stages % 1 - .5).abs().lt(.5-1e-9).all(-1)
    more = dict(stages=stages, symmetric=True)
    codes = fsq(z, levels, **more, gain=1/wide, margin=1/(n**stages-1))
    found = fsq_index(codes, levels, **more)
    want = torch.stack(index, -1) if stages > 1 else index[0]
    assert keep.float().mean() > .99 and torch.equal(found[keep], want[keep])
    assert torch.allclose(codes[keep], (total/(wide*(1-n**-stages)))[keep], atol=1e-12)
    assert torch.equal(fsq_codes(found, levels, **more, dtype=torch.float64), codes)

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('symmetric', (False, True))
def test_all_tokens_of_stages(symmetric, dtype):
    "Every pair of tokens is a code of its own and comes back; the first token alone is the middle of its codes."
    levels,more = [4, 3],dict(stages=2, symmetric=symmetric)
    index = torch.tensor([*itertools.product(range(12), range(12))])
    codes = fsq_codes(index, levels, **more, dtype=dtype)
    assert codes.dtype == dtype and torch.equal(fsq_index(codes, levels, **more), index)
    assert len(codes.unique(dim=0)) == 144 and codes.abs().max() == 1
    exact = fsq_codes(index, levels, **more, dtype=torch.float64)
    coarse = fsq_codes(index[:, :1], levels, **more, dtype=torch.float64)
    assert torch.allclose(coarse.view(12, 12, 2), exact.view(12, 12, 2).mean(1, keepdim=True).expand(-1, 12, -1))

def test_stages_of_nothing():
    levels,more = [3, 3],dict(stages=2)
    lost = fsq_index(torch.tensor([[math.nan, 0.]]), levels, **more)
    assert lost.tolist() == [[-1, -1]] and fsq_codes(torch.tensor([[0, 9]]), levels, **more).isnan().all()
    assert fsq_index(torch.empty(0, 2), levels, **more).shape == (0, 2)
    assert fsq_codes(torch.empty(0, 2).long(), levels, **more).shape == (0, 2)
    with pytest.raises(ValueError, match=r'^fsq_codes: index must have 1 to 2 stages last, got shape \(3,\)'):
        fsq_codes(torch.zeros(3).long(), levels, **more)
    with pytest.raises(ValueError, match='^fsq: torch.bfloat16 tells 256 levels apart, got levels 17 in stages 2'):
        fsq(torch.zeros(2).bfloat16(), [17, 2], **more)

@pytest.mark.parametrize('levels', ([8, 5], [3, 7]), ids=str)
@pytest.mark.parametrize('symmetric', (False, True))
def test_hard_clamp(levels, symmetric):
    "The formula with a clamp in the place of tanh, and identity in that of its inverse; slope 0 beyond the ends."
    z,n = normal(3000, 2).requires_grad_(),torch.tensor(levels).double()
    margin = .05
    half = (n-1)*(1+margin)/2
    off = torch.zeros(2).double() if symmetric else (n % 2 == 0)/2
    low = (n-1)/2 if symmetric else (n/2).floor()
    b = half*(z+off/half).clamp(-1, 1)-off
    between = low-low.floor()
    want = ((b-between).round()+between).clamp(-low, n-1-low)/low
    y = fsq(z, levels, squash='clamp', symmetric=symmetric, margin=margin)
    assert torch.allclose(y, want, atol=1e-12)
    inside = (z+off/half).abs() < 1
    d = grad(y.sum(), z)[0]
    assert not d[~inside].any() and torch.allclose(d[inside], (half/low).expand_as(z)[inside])
    ends = torch.tensor([[math.inf, -math.inf]], dtype=torch.float64)
    assert torch.equal(fsq(ends, levels, squash='clamp', symmetric=symmetric), fsq(100*ends.clamp(-1, 1), levels,
        symmetric=symmetric))

# --- vector codebooks
def brute(z, codebook):
    "The nearest row by squared distances in numpy's float64."
    z,codebook = (t.detach().double().numpy() for t in (z, codebook))
    return torch.tensor(((z[:, None]-codebook)**2).sum(-1).argmin(-1))

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_nearest(dtype):
    "Exact for latents of any dtype, far from the origin too, where |z|² - 2zc + |c|² loses the digits."
    for far in (0., 1000.):
        z,codebook = (normal(500, 4)+far).to(dtype),(normal(64, 4, seed=1)+far).to(dtype)
        assert torch.equal(vq_index(z, codebook), brute(z, codebook))
        for m in METHODS: assert torch.equal(vq(z, codebook, method=m), codebook[vq_index(z, codebook)])
    mixed = normal(500, 4).to(dtype)
    y = vq(mixed, codebook.double())
    assert y.dtype == dtype and torch.equal(y, codebook.double()[brute(mixed, codebook)].to(dtype))

def test_own_codes_are_nearest():
    codebook = normal(300, 5).float()*1e-3+100
    assert torch.equal(vq_index(codebook, codebook), torch.arange(300))

def test_autocast_changes_no_token():
    z,codebook = normal(500, 8).float(),normal(256, 8, seed=1).float()
    want = vq_index(z, codebook)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(vq_index(z, codebook), want) and torch.equal(vq(z, codebook), codebook[want])

def rotation(z, e):
    "The matrix of section 4.2 for one latent, and the stretch."
    u,q = z/np.linalg.norm(z),e/np.linalg.norm(e)
    r = (u+q)/np.linalg.norm(u+q)
    return (np.eye(len(z)) - 2*np.outer(r, r) + 2*np.outer(q, u))*np.linalg.norm(e)/np.linalg.norm(z)

def test_rotation_trick():
    "A rotation that takes the latent to its code; the gradient comes back through it, latent by latent."
    z,codebook,g = leaves()
    d = grad(vq(z, codebook, method='rotation'), z, g)[0]
    for z1,g1,d1,e in zip(*(t.detach().numpy() for t in (z, g, d, codebook[vq_index(z, codebook)]))):
        M = rotation(z1, e)
        turn = M*np.linalg.norm(z1)/np.linalg.norm(e)
        assert np.allclose(M@z1, e, atol=1e-12) and np.allclose(turn@turn.T, np.eye(3)) and np.linalg.det(turn) > 0
        assert np.allclose(M.T@g1, d1, atol=1e-12)

def test_rotation_trick_keeps_the_angle():
    "What the paper is after: gradient and code are at the angle at which the latent gets it; straight through is not."
    z,codebook,g = leaves()
    e = codebook[vq_index(z, codebook)]
    cosine = torch.nn.functional.cosine_similarity
    for method in METHODS[:2]:
        d = grad(vq(z, codebook, method=method), z, g)[0]
        assert torch.allclose(cosine(d, z), cosine(g, e), atol=1e-9) == (method == 'rotation')

def test_diveq():
    "z + |e-z| of a direction that counts as constant: autograd of that, and the projections that it comes to."
    z,codebook,g = leaves()
    e = codebook[vq_index(z, codebook)]
    n = ((e-z)/(e-z).norm(dim=-1, keepdim=True)).detach()
    want = grad(z + (e-z).norm(dim=-1, keepdim=True)*n, (z, codebook), g)
    got = grad(vq(z, codebook, method='diveq'), (z, codebook), g)
    for a,b in zip(got, want): assert torch.allclose(a, b, atol=1e-12)
    along = (g*n).sum(-1, keepdim=True)*n
    assert torch.allclose(got[0], g-along) and torch.allclose(got[1].sum(0), along.sum(0))

def test_diveq_with_noise():
    """The length of the error stays, its direction moves; with so much noise it is that of the noise: mean 0, each
    coordinate of a unit vector of 3 with variance 1/3. Seed 0; five standard errors of 20,000."""
    z,codebook = torch.zeros(20_000, 3),torch.tensor([[2., 0., 0.]])
    for seed in (None, torch.tensor(0)):
        kw = dict(generator=generator()) if seed is None else dict(seed=seed)
        y = vq(z, codebook, method='diveq', noise=1e6, **kw)
        assert torch.allclose(y.norm(dim=-1), torch.tensor(2.)) and (y/2).mean(0).abs().max() < 5*(1/3/20_000)**.5
        assert ((y/2).square().mean(0)-1/3).abs().max() < .01
        some = vq(z, codebook, method='diveq', noise=.02, **kw)
        assert .0195 < some[:, 1].std() < .0205 and (some[:, 0] > 1.99).all()       # 2 * .02 / 2 across the error
        other = vq(z, codebook, method='ste', noise=.02)
        assert torch.equal(other, codebook.expand_as(z))
    again = [vq(z, codebook, method='diveq', noise=.02, seed=torch.tensor(3)) for _ in range(2)]
    assert torch.equal(*again)

@each_method
def test_where_no_code_is(method):
    "Nan where a latent is not finite, or too far; its neighbours, and its gradient, are as if it were not there."
    z,codebook,_ = leaves(4)
    bad = z.detach().float().clone()
    bad[1, 0],bad[2, 1],bad[3, 2] = math.nan,math.inf,1e30
    leaf,codes = bad.requires_grad_(),codebook.detach().float().requires_grad_()
    y = vq(leaf, codes, method=method)
    assert vq_index(bad, codes)[1:].tolist() == [-1]*3 and y[1:].isnan().all()
    assert torch.equal(y[:1], vq(bad[:1], codes, method=method))
    d = grad(y[:1].sum(), [leaf, codes], allow_unused=True)
    assert all(t.isfinite().all() for t in d if t is not None) and not d[0][1:].any()
    broken = codes.detach().clone()
    broken[0] = math.nan
    assert torch.equal(vq_index(bad[:1], broken), 1+vq_index(bad[:1], broken[1:]))

@each_method
def test_special_places(method):
    "On a code, at the origin, on the far side of the origin: gradients are finite, and that on a code is straight."
    codebook = torch.tensor([[1., 0.], [-1., 0.], [0., 0.]]).double().requires_grad_()
    z = torch.tensor([[1., 0.], [0., 0.], [-.6, 0.], [.6, 1e-300]]).double().requires_grad_()
    d,dc = grad(vq(z, codebook, method=method).sum(), (z, codebook), allow_unused=True)
    assert d.isfinite().all() and torch.equal(d[0], torch.ones(2).double())
    assert (dc is None) == (method != 'diveq') and (dc is None or dc.isfinite().all())
    only = torch.tensor([[-1., 0.]]).double()
    opposite = torch.tensor([[1., 0.]]).double().requires_grad_()
    y = vq(opposite, only, method=method)
    assert torch.equal(y, only) and grad(y.sum(), opposite)[0].isfinite().all()

@each_method
def test_transforms(method):
    "One gradient by backward, torch.func, vmap and forward mode."
    z,codebook,g = leaves()
    def total(z, codebook): return (vq(z, codebook, method=method)*g).sum()
    both = (0, 1) if method == 'diveq' else (0,)
    want = grad(total(z, codebook), [(z, codebook)[i] for i in both])
    got = torch.func.grad(total, argnums=both)(z.detach(), codebook.detach())
    for a,b in zip(got, want): assert torch.allclose(a, b)
    fixed = codebook.detach()
    def one(z): return vq(z, fixed, method=method)
    assert torch.equal(torch.vmap(one)(z.detach()), one(z).detach())
    assert torch.equal(torch.vmap(lambda z: vq_index(z, fixed))(z.detach()), vq_index(z, fixed))
    _,tangent = torch.func.jvp(one, (z.detach(),), (g,))
    slow = torch.stack([grad(one(z)[:, i].sum(), z)[0] for i in range(3)], 1)
    assert torch.allclose(tangent, (slow*g[:, None]).sum(-1))

def test_loss():
    "|sg z - e|² + b |z - sg e|²: each pulls one side, means over all numbers."
    z,codebook,_ = leaves()
    e = codebook[vq_index(z, codebook)]
    want = (z.detach()-e).square().mean() + .3*(z-e.detach()).square().mean()
    got = vq_loss(z, codebook, .3)
    assert torch.allclose(got, want)
    for a,b in zip(grad(got, (z, codebook)), grad(want, (z, codebook))): assert torch.allclose(a, b)
    assert vq_loss(z.detach().bfloat16(), codebook.bfloat16()).dtype == torch.float32
    assert vq_loss(torch.empty(0, 3), codebook.float()) == 0

# --- bits
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_signs(dtype):
    "LFQ is the sign with slope 1, BSQ that of the sphere; every token comes back from its index."
    z = normal(200, 6).to(dtype).requires_grad_()
    g = normal(200, 6, seed=1).to(dtype)
    y = lfq(z)
    assert y.dtype == dtype and torch.equal(y, torch.where(z >= 0, 1, -1).to(dtype))
    assert torch.equal(grad(y, z, g)[0], g)
    y,wide = lfq(z, spherical=True),z.detach().double().requires_grad_()
    assert torch.equal(y, (lfq(z).double()*6**-.5).to(dtype)) and y.dtype == dtype
    want = grad(wide/wide.norm(dim=-1, keepdim=True), wide, g.double())[0]
    tight = dict(rtol=8*torch.finfo(dtype).eps, atol=4*torch.finfo(dtype).eps)
    assert torch.allclose(grad(y, z, g)[0].double(), want, **tight)
    signs = dict(levels=[2]*6, symmetric=True)
    for codes in (lfq(z), y):
        index = fsq_index(codes, **signs)
        assert torch.equal(fsq_codes(index, **signs, dtype=dtype), lfq(z))
        assert torch.equal(index, ((z >= 0)*2**torch.arange(6)).sum(-1))

def plain_entropy(z, temperature, spherical):
    "Both terms by a softmax over all codes of minus the squared distances, in numpy."
    z = z.detach().numpy().reshape(-1, z.shape[-1])
    bits = z.shape[1]
    codes = np.array([*itertools.product((-1., 1.), repeat=bits)])
    if spherical: z,codes = z/np.linalg.norm(z, axis=-1, keepdims=True),codes/bits**.5
    a = -((z[:, None]-codes)**2).sum(-1)/temperature
    p = np.exp(a-a.max(-1, keepdims=True))
    p = p/p.sum(-1, keepdims=True)
    def entropy(p): return -(p*np.log(np.where(p > 0, p, 1))).sum(-1)
    return entropy(p).mean(),entropy(p.mean(0))

@pytest.mark.parametrize('spherical', (False, True))
@pytest.mark.parametrize('temperature', (.02, 1., 30.))
def test_entropy(temperature, spherical):
    "With all bits in a group the published terms. In smaller ones the second is a bound from above."
    z = normal(5, 8, 6)*.3+.1
    kw = dict(temperature=temperature, spherical=spherical)
    one,together = lfq_entropy(z, **kw)
    want = plain_entropy(z, temperature, spherical)
    assert torch.allclose(torch.stack([one, together]), torch.tensor(want), atol=1e-12)
    for size in (1, 2, 4, 5):
        again,more = lfq_entropy(z, **kw, group_size=size)
        assert torch.equal(again, one) and more >= together-1e-12
    marginal = lfq_entropy(z, **kw, group_size=1)[1]
    each = sum(plain_entropy(z[..., i:i+1], temperature, False)[1] for i in range(6))
    if not spherical: assert torch.allclose(marginal, torch.tensor(each), atol=1e-12)

def test_gradient_of_entropy():
    z = (normal(7, 3)*.5).requires_grad_()
    for i in (0, 1): assert torch.autograd.gradcheck(lambda z, i=i: lfq_entropy(z, spherical=bool(i))[i], z)
    for far in (0., 1e30, 3e38):
        leaf = torch.full((4, 9), far).requires_grad_()
        one,together = lfq_entropy(leaf, temperature=.01, spherical=False)
        d = grad(one-together, leaf)[0]
        assert one.isfinite() and together.isfinite() and d.isfinite().all()
    assert lfq_entropy(torch.full((2, 30), 9.))[1] < 1e-6                     # more bits than anyone could list
    wide = lfq_entropy(z.detach().bfloat16())
    assert all(t.dtype == torch.float32 for t in wide) and lfq_entropy(torch.empty(0, 3)) == (0, 0)

def test_transforms_of_bits():
    z,g = normal(9, 5).requires_grad_(),normal(9, 5, seed=1)
    def total(z): return (lfq(z, spherical=True)*g).sum() + sum(lfq_entropy(z))
    want = grad(total(z), z)[0]
    assert torch.allclose(torch.func.grad(total)(z.detach()), want)
    assert torch.equal(torch.vmap(lfq)(z.detach()), lfq(z).detach())

# --- usage
def test_usage():
    "Perplexity is the exponential of numpy's entropy; tokens of no code are counted beside it."
    index = torch.randint(0, 50, (30, 40), generator=generator()).square() % 64
    p = np.bincount(index.flatten().numpy(), minlength=64)/index.numel()
    u = code_usage(index.int(), 64)
    assert math.isclose(u.perplexity, math.exp(-(p[p > 0]*np.log(p[p > 0])).sum()))
    assert (u.used, u.dead, u.lost) == ((p > 0).sum(), (p == 0).sum(), 0)
    assert code_usage(torch.arange(64), 64) == (64, 0, pytest.approx(64.), 0)
    assert code_usage(torch.tensor(5), 2**63) == (1, 2**63-1, 1., 0)
    assert code_usage(torch.tensor([-1, -1]), 3) == (0, 3, 0., 2) and code_usage(torch.tensor([]).long(), 3).lost == 0
    with pytest.raises(ValueError, match='^code_usage: index must be from 0 to 7, or -1, got 9'):
        code_usage(torch.tensor([1, 9]), 8)

# --- layers
LAYERS = dict(
    fsq=lambda **kw: FSQ([8, 5, 5, 5], **kw), stages=lambda **kw: FSQ([4, 4, 3, 3], stages=2, **kw),
    clamp=lambda **kw: FSQ([4]*4, squash='clamp', symmetric=True, noise=.5, **kw), lfq=lambda **kw: LFQ(4, **kw),
    bsq=lambda **kw: LFQ(4, spherical=True, **kw), vq=lambda **kw: VQ(32, 4, **kw),
    rotation=lambda **kw: VQ(32, 4, method='rotation', **kw),
    diveq=lambda **kw: VQ(32, 4, method='diveq', noise=.1, **kw))
layers = pytest.mark.parametrize('make', LAYERS.values(), ids=LAYERS)

def made(make, features=None):
    torch.manual_seed(0)
    return make(features=features)

@layers
@pytest.mark.parametrize('features', (None, 6))
def test_layer(make, features):
    "In evaluation a layer is what its tokens decode to, for any batch; gradients reach the input and every weight."
    layer = made(make, features)
    x = normal(2, 5, features or 4, dtype=torch.float32).requires_grad_()
    y = layer(x)
    (y.square().sum() + layer.loss(x)).backward()
    assert y.shape == x.shape and x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    layer.eval()
    index = layer.encode(x)
    assert index.dtype == torch.int64 and not index.requires_grad and torch.equal(layer(x), layer.decode(index))
    assert 0 <= index.min() and index.max() < layer.size
    for some in (x[0, 0], x[:0]): assert torch.equal(layer(some), layer.decode(layer.encode(some)))
    assert layer.loss(x[:0]) == 0

@layers
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_tokens_in_any_dtype(make, dtype):
    "Those of the same latents in float64: none moves for the dtype of a layer without projections."
    layer = made(make).eval()
    x = (2*normal(4000, 4)).to(dtype)
    want = layer.encode(x.double())
    assert torch.equal(layer.encode(x), want)
    assert torch.equal(layer.to(dtype).encode(x), want) or isinstance(layer, VQ)      # whose codes are rounded too
    y = layer(x)
    assert y.dtype == dtype and torch.equal(layer.decode(layer.encode(x)), y)

@layers
def test_layer_is_kept(make, tmp_path):
    "By state_dict, torch.save with weights_only, deepcopy and pickle."
    layer,other = made(make, 6).eval(),make(features=6).eval()
    x = normal(50, 6, dtype=torch.float32)
    torch.save(layer.state_dict(), tmp_path/'state')
    other.load_state_dict(torch.load(tmp_path/'state', weights_only=True))
    for again in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x), layer(x)) and torch.equal(again.encode(x), layer.encode(x))
    assert f'{layer.size} codes' in repr(layer)

@pytest.mark.slow
@layers
def test_compiled(make):
    layer = made(make, 6).eval()
    x = normal(50, 6, dtype=torch.float32).requires_grad_()
    fast,loss = compiled(layer),compiled(layer.loss)
    y = fast(x)
    assert torch.allclose(y, layer(x), atol=1e-5) and torch.allclose(loss(x), layer.loss(x), atol=1e-5)
    g = normal(50, 6, seed=1, dtype=torch.float32)
    assert torch.allclose(grad(y, x, g)[0], grad(layer(x), x, g)[0], atol=1e-5)

@pytest.mark.parametrize('spherical', (False, True))
def test_loss_of_bits(spherical):
    "Both entropies, and the mean squared distance from the codes, which do not move; the inputs do."
    layer = LFQ(4, spherical=spherical, temperature=.5, diversity=.7, commitment=.3)
    x = normal(30, 4).requires_grad_()
    v = x/x.norm(dim=-1, keepdim=True) if spherical else x
    code = torch.where(x < 0, -1., 1.)*(.5 if spherical else 1.)
    one,together = lfq_entropy(x, spherical=spherical, temperature=.5)
    want = one-.7*together+.3*(v-code).square().mean()
    assert torch.allclose(layer.loss(x), want) and torch.allclose(grad(layer.loss(x), x)[0], grad(want, x)[0])

def test_noise_is_for_training():
    x = normal(400, 4, dtype=torch.float32)
    for make in (LAYERS['clamp'], LAYERS['diveq']):
        layer = made(make)
        assert not torch.equal(layer(x), layer.decode(layer.encode(x)))
        assert torch.equal(layer.eval()(x), layer.decode(layer.encode(x)))

def test_numbers_of_no_code():
    for layer in (FSQ([3, 3]), LFQ(2), VQ(9, 2)):
        y = layer.decode(torch.tensor([-1, layer.size, 0]))
        assert y[:2].isnan().all() and y[2].isfinite().all()

def test_restart():
    "Dead codes move onto latents, those in use stay; without enough latents some stay dead."
    torch.manual_seed(0)
    x = normal(100, 2, dtype=torch.float32)+50
    layer = VQ(16, 2)
    assert code_usage(layer.encode(x), 16).used < 5
    before,used = layer.codebook.detach().clone(),layer.encode(x).unique()
    assert layer.restart_(x) is layer and torch.equal(layer.codebook[used], before[used])
    moved = (layer.codebook != before).any(-1)
    assert moved.sum() == 16-len(used) and (layer.codebook[moved][:, None] == x).all(-1).any(-1).all()
    few = VQ(16, 2).restart_(x[:3])
    assert ((few.codebook[:, None] == x[:3]).all(-1).any(-1)).sum() == 3
    with pytest.raises(ValueError, match='^VQ: restart_ x must hold finite latents, got none'):
        layer.restart_(x[:0])

@pytest.mark.parametrize('f, message', [
    (lambda: R.FSQ([8, 1]), '^FSQ: levels must be >= 2, got 1'),
    (lambda: R.FSQ([2**24, 2**24, 2**24]), r'^FSQ: levels must make at most 2\*\*63 codes'),
    (lambda: R.FSQ([8], features=0), '^FSQ: features must be >= 1, got 0'),
    (lambda: R.FSQ([8], squash='sine'), "^FSQ: squash must be one of tanh, clamp, got 'sine'"),
    (lambda: R.FSQ([2], margin=0.), '^FSQ: 2 levels need margin > 0 or symmetric=True'),
    (lambda: R.LFQ(64), r'^LFQ: bits must be in \[1, 63\], got 64'),
    (lambda: R.VQ(0, 3), r'^VQ: size must be in \[1, 1099511627776\], got 0'),
    (lambda: R.VQ(8, 3, method='ema'), "^VQ: method must be one of ste, rotation, diveq, got 'ema'"),
    (lambda: R.FSQ([8, 5], features=6)(torch.zeros(2, 5)), r'^FSQ: x must have 6 channels last, got shape \(2, 5\)'),
    (lambda: vq(torch.zeros(2), torch.zeros(4, 3)), r'^vq: z has shape \(2,\), codebook has codes of 3 channels'),
    (lambda: vq(torch.zeros(3), torch.zeros(3)), r'^vq: codebook must have a row for each code, got shape \(3,\)'),
    (lambda: vq(torch.zeros(3), torch.zeros(0, 3)), r'^vq: codebook must have a row for each code, got shape \(0, 3\)'),
    (lambda: lfq(torch.zeros(2, 0)), r'^lfq: z must have a channel for each bit, got shape \(2, 0\)')])
def test_errors(f, message):
    with pytest.raises(ValueError, match=message): f()
