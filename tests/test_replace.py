"`through_round`: every form of a call, code as libraries have it, transforms, compilation, export and checkpoints."
import math
import threading
import warnings
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint
import shok_nb as R
from shok_nb.training.replace import ThroughRound

X = torch.tensor([-2.5, -1.26, .4, 1.5, 3.74], dtype=torch.float64)
def leaf(x=X): return x.detach().clone().requires_grad_()
def slope(y, x): return torch.autograd.grad(y.sum(), x)[0]

# --- code that others have published, as they have it
LUMINANCE = torch.tensor([[16., 11, 10, 16, 24, 40, 51, 61], [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56], [14, 17, 22, 29, 51, 87, 80, 62], [18, 22, 37, 56, 68, 109, 103, 77],
    [24, 35, 55, 64, 81, 104, 113, 92], [49, 64, 78, 87, 103, 121, 120, 101], [72, 92, 95, 98, 112, 100, 103, 99]])

def dct_matrix():
    n,k = torch.arange(8.),torch.arange(8.)[:, None]
    return torch.cos(math.pi/8*(n+.5)*k)*torch.where(k == 0, math.sqrt(1/8), .5)

class Jpeg(nn.Module):
    "The blocks of a grey picture: transformed, divided by a table, rounded, and back."
    def __init__(self, quality=50):
        super().__init__()
        self.register_buffer('dct', dct_matrix())
        scale = 5000/quality if quality < 50 else 200-2*quality
        self.register_buffer('table', torch.floor((LUMINANCE*scale+50)/100).clamp(1, 255))

    def forward(self, image):
        b,_,h,w = image.shape
        blocks = F.unfold(image*255-128, 8, stride=8).mT.reshape(b, -1, 8, 8)
        codes = torch.round(self.dct@blocks@self.dct.mT/self.table)
        back = self.dct.mT@(codes*self.table)@self.dct
        image = F.fold(back.reshape(b, -1, 64).mT, (h, w), 8, stride=8)
        return ((image+128)/255).clamp(0, 1)

def posterize(image, bits):
    "As libraries of pictures have it: to integers, and back to [0, 1]."
    levels = 2**bits - 1
    return image.mul(levels).round().div(levels)

class Quantized(nn.Module):
    "A fake quantizer of somebody's: rounds and clamps in place."
    def __init__(self): super().__init__(); self.linear = nn.Linear(5, 3, dtype=torch.float64)
    def forward(self, x):
        w = self.linear.weight/.1
        w.round_().clamp_(-8, 7)
        return F.linear(x, w*.1, self.linear.bias)

def test_a_jpeg_of_others():
    "Straight through every coefficient has its gradient: what does not reach a clamp is passed as it is."
    image = torch.rand(1, 1, 16, 24, generator=torch.Generator().manual_seed(0))*.4+.3
    model,x = Jpeg(),leaf(image)
    assert not slope(model(x), x).any()
    with R.through_round() as seen: y = model(x)
    assert torch.equal(y, model(x)) and seen.replaced == {'round': 1} and not seen.missed
    weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad((y*weights).sum(), x)[0], weights)      # the transform is orthogonal

def test_a_quantizer_of_others_learns():
    model = Quantized()
    model(X).sum().backward()
    assert not model.linear.weight.grad.any()
    for rounding,knobs in ((R.round_ste, {}), (R.soft_round, dict(alpha=3.)), (R.soft_round, dict(hard=True))):
        model.zero_grad()
        with R.through_round(rounding, **knobs) as seen: model(X).sum().backward()
        w = leaf(model.linear.weight)
        wanted = torch.autograd.grad(F.linear(X, rounding(w/.1, **knobs).clamp(-8, 7)*.1).sum(), w)[0]
        torch.testing.assert_close(model.linear.weight.grad, wanted)
        assert seen.replaced == {'round': 1} and wanted.any()

def test_posterize():
    x = leaf(torch.tensor([.1, .5, .9]))
    with R.through_round(): assert slope(posterize(x, 2), x).tolist() == [1., 1., 1.]

# --- forms of a call
aten = torch.ops.aten
FORMS = dict(function=torch.round, method=torch.Tensor.round, special=torch.special.round, packet=aten.round,
    overload=aten.round.default, by_name=lambda x: torch.round(input=x), decimals=lambda x: torch.round(x, decimals=0),
    aten_decimals=lambda x: aten.round.decimals(x, decimals=0), no_out=lambda x: torch.round(x, out=None),
    out=lambda x: torch.round(x, out=torch.empty(0, dtype=x.dtype)), alias=lambda x: torch.round(y := 1*x, out=y),
    in_place=lambda x: (1*x).round_(), function_=lambda x: torch.round_(1*x),
    aten_=lambda x: aten.round_(1*x), view=lambda x: (1*x).view(5, 1).round_().view(5), half=lambda x: x.half().round())

@pytest.mark.parametrize('rounding', (R.round_ste, R.soft_round, R.cubic_round, R.nn.SoftRound(3.)))
@pytest.mark.parametrize('form', FORMS)
def test_forms(form, rounding):
    x,other = leaf(),leaf()
    with R.through_round(rounding) as seen: y = FORMS[form](x)
    wanted = rounding(other.half() if form == 'half' else other)
    assert torch.equal(y, wanted) and torch.equal(slope(y, x), slope(wanted, other)) and seen.replaced == {'round': 1}

@pytest.mark.parametrize('decimals', (-1, 1, 2, 3))
def test_decimals(decimals):
    "Straight through and hard they are torch's own values; a curve is scaled."
    x = leaf(torch.linspace(-30, 30, 997, dtype=torch.float64))
    for rounding,knobs in ((R.round_ste, {}), (R.soft_round, dict(hard=True))):
        with R.through_round(rounding, **knobs): y = x.round(decimals=decimals)
        assert torch.equal(y, torch.round(x.detach(), decimals=decimals)) and slope(y, x).any()
    with R.through_round(R.soft_round, alpha=4.): y = torch.round(x, decimals=decimals)
    torch.testing.assert_close(y, R.soft_round(x, 4., step=10.**-decimals))
    assert torch.equal(x.detach().float().round(decimals=decimals), decimals_of(x.detach().float(), decimals))

def decimals_of(x, decimals):
    with R.through_round(): return torch.round(x, decimals=decimals)

OTHERS = dict(floor=(torch.floor, torch.Tensor.floor_, aten.floor), ceil=(torch.ceil, torch.Tensor.ceil_, aten.ceil),
    trunc=(torch.trunc, torch.fix, torch.Tensor.fix_, aten.trunc), sign=(torch.sign, torch.sgn, torch.Tensor.sign_))

@pytest.mark.parametrize('name', OTHERS)
def test_others_are_replaced_if_asked(name):
    "And counted as missed if not."
    f = getattr(R, f'{name}_ste')
    for call in OTHERS[name]:
        x = leaf()
        with R.through_round(**{name: f}) as seen: y = call(1*x)
        assert torch.equal(y, f(x)) and torch.equal(slope(y, x), slope(f(x), x)) and seen.replaced == {name: 1}
        said = rf'^through_round: nothing was replaced; no gradient passes: {name} \(1\)$'
        with pytest.warns(UserWarning, match=said), R.through_round(): call(1*x)

def test_what_is_left_alone():
    "Integers, what is no tensor, and all that has a gradient; a call that is wrong is wrong as it was."
    whole = torch.arange(3)
    with warnings.catch_warnings(record=True) as said, R.through_round() as seen:
        warnings.simplefilter('always')
        assert torch.equal(torch.round(whole), whole) and whole.long().sum() == 3 and X.int().sum() and X.floor().any()
        (leaf()*2).exp().to(torch.float32).to(torch.complex64)
        with pytest.raises(TypeError): torch.round(3.)
        with pytest.raises(TypeError): torch.round()
    assert not seen.replaced and not seen.missed and len(said) == 1
    assert str(said[0].message) == 'through_round: nothing was replaced' and said[0].filename == __file__

def test_no_warning_after_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(ZeroDivisionError), R.through_round(): 1/0

MISSED = {'//': (lambda x: x//2, lambda x: 2//x, lambda x: torch.div(x, 2, rounding_mode='floor'),
    lambda x: x.div(2, rounding_mode='trunc'), lambda x: torch.floor_divide(x, 2)), 'int': (torch.Tensor.int,),
    'long': (torch.Tensor.long,), 'to': (lambda x: x.to(torch.uint8),), 'type': (lambda x: x.type(torch.int16),),
    'type_as': (lambda x: x.type_as(torch.tensor(1)),), 'byte': (torch.Tensor.byte,)}

@pytest.mark.parametrize('name', MISSED)
def test_what_is_missed(name):
    for f in MISSED[name]:
        with R.through_round() as seen: (f(leaf()+9), torch.round(X))
        assert seen.missed == {name: 1}, f
        with R.through_round() as seen: (f(X+9), torch.round(X), leaf()/2)
        assert not seen.missed

def test_nested():
    "The inner one is asked, its estimator's own roundings are nobody's, and what it leaves is the outer one's."
    x,calls = leaf(),[]
    def inner(x):
        calls.append(torch.round(x.detach()))
        return R.soft_round(x, 5.) + torch.floor(x.detach())
    with R.through_round(floor=R.floor_ste) as out:
        with R.through_round(inner) as into: y = torch.round(x)+torch.floor(x)
        z = torch.round(x)
    assert torch.equal(calls[0], X.round()) and torch.equal(z, X.round())
    torch.testing.assert_close(slope(y, x), slope(R.soft_round(x, 5.), x)+1)
    assert (into.replaced, out.replaced) == ({'round': 1}, {'floor': 1, 'round': 1}) and 'floor' in into.missed
    assert not slope(torch.round(x), x).any()

def test_an_estimator_that_fails_leaves_no_mode_behind():
    def wrong(x): raise ZeroDivisionError
    with R.through_round() as out:
        with pytest.raises(ZeroDivisionError), R.through_round(wrong): torch.round(X)
        assert slope(torch.round(x := leaf()), x).all() and out.replaced == {'round': 1}

def test_decorator_and_recursion():
    @R.through_round(R.soft_round, alpha=4.)
    def down(x, n): return torch.round(x) + (down(x, n-1) if n else 0)
    x = leaf()
    torch.testing.assert_close(down(x, 2), 3*R.soft_round(x, 4.))
    assert not slope(torch.round(x), x).any()

def test_a_thread_has_its_own():
    found = []
    def work(f): found.append(slope(f(x := leaf()), x).any().item())
    with R.through_round():
        for f in (torch.round, R.through_round()(torch.round)):
            t = threading.Thread(target=work, args=(f,))
            t.start()
            t.join()
        torch.round(X)
    assert found == [False, True]

# --- transforms
def theirs(x): return (torch.round(2*x)*x.round() + x.round(decimals=1)).sum()

def ours(x): return (R.soft_round(2*x, 5.)*R.soft_round(x, 5.) + R.soft_round(10*x, 5.)/10).sum()

@pytest.mark.parametrize('how', (torch.func.grad, torch.func.hessian, torch.func.jacfwd,
    lambda f: lambda x: torch.vmap(torch.func.grad(f))(x.view(5, 1)),
    lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]))
def test_transforms(how):
    with R.through_round(R.soft_round, alpha=5.): y = how(theirs)(X)
    torch.testing.assert_close(y, how(ours)(X))

@pytest.mark.parametrize('dtype', (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_dtypes(dtype):
    for values in ([], .4, [math.inf, -math.inf, math.nan], [-0., 2.5]):
        x = torch.tensor(values, dtype=dtype, requires_grad=True)
        with R.through_round(): whole,tenths = torch.round(x),torch.round(x, decimals=1)
        assert torch.equal(whole.nan_to_num(7), torch.round(x).nan_to_num(7)) and whole.dtype == dtype == tenths.dtype
        with R.through_round(R.soft_round, alpha=5.): soft = torch.round(x, decimals=1)
        assert soft.dtype == dtype and soft.shape == x.shape

@pytest.mark.parametrize('strict', (False, True))
def test_export(strict):
    class Net(nn.Module):
        def forward(self, x): return torch.round(x)
    with R.through_round() as seen: program = torch.export.export(Net(), (X,), strict=strict)
    assert [n.target.__name__ for n in program.graph.nodes if n.op == 'call_function'] == ['round.default']
    assert seen.compiled and not seen.replaced
    with R.through_round(R.soft_round, alpha=5.): program = torch.export.export(Net(), (X,), strict=strict)
    torch.testing.assert_close(program.module()(X), R.soft_round(X, 5.))

def test_an_exported_program_and_a_traced_one():
    class Net(nn.Module):
        def forward(self, x): return torch.round(x)
    program,x = torch.export.export(Net(), (leaf(),)),leaf()
    with R.through_round() as seen: assert slope(program.module()(x), x).all() and seen.replaced == {'round': 1}
    with R.through_round(): traced = torch.jit.trace(Net(), X)
    assert slope(traced(x), x).all()

@pytest.mark.slow
def test_compile():
    """Compiled before or inside, the gradient is that of the mode, in one graph, with no compilation more than one for
    each estimator and none for a second `with`; outside it is torch's again. A smaller last batch compiles too."""
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    count = CompileCounterWithBackend('inductor')
    compiled = torch.compile(theirs, backend=count, fullgraph=True)
    x = leaf()
    assert not slope(compiled(x), x).any() and count.frame_count == 1
    for rounding,knobs in ((R.round_ste, {}), (R.soft_round, dict(alpha=5.))):
        for _ in '12':
            with R.through_round(rounding, **knobs) as seen: y = compiled(x)
            with R.through_round(rounding, **knobs): wanted = theirs(x)
            torch.testing.assert_close((y, slope(y, x)), (wanted, slope(wanted, x)))
            assert seen.compiled and not seen.replaced
    frames = count.frame_count
    assert frames == 3
    torch.testing.assert_close(slope(compiled(x), x), torch.zeros_like(x))
    assert count.frame_count == frames
    with R.through_round(R.soft_round, alpha=5.) as seen: compiled(leaf(X[:3]))
    inside = torch.compile(R.through_round(R.soft_round, alpha=5.)(theirs), fullgraph=True)
    torch.testing.assert_close(slope(inside(x), x), slope(ours(x), x))

# --- checkpoints
def test_checkpoints():
    """What a checkpoint computes again in backward is outside: zero, or an error of torch, or right where no values are
    kept. A decorator inside it is right, wherever backward runs."""
    def block(x): return (torch.round(2*x)*x.round()).sum()
    def grads(f, rounding, reentrant):
        x = leaf()
        with R.through_round(rounding): y = checkpoint(f, x, use_reentrant=reentrant)
        y.backward()
        return x.grad
    for rounding in (R.round_ste, R.soft_round):
        inside,x = R.through_round(rounding)(block),leaf()
        wanted = slope(inside(x), x)
        for reentrant in (False, True): assert torch.equal(grads(inside, rounding, reentrant), wanted)
        assert not grads(block, rounding, True).any()
    assert torch.equal(grads(block, R.round_ste, False), slope(R.through_round()(block)(x), x))
    with pytest.raises(CheckpointError): grads(block, R.soft_round, False)

def test_what_it_says():
    with R.through_round(floor=R.floor_ste) as seen: (torch.round(X), torch.round(X), leaf().int(), torch.floor(X))
    assert str(seen) == 'replaced: round (2), floor (1); no gradient passes: int (1)' and repr(seen) == f'<{seen}>'
    assert isinstance(seen, ThroughRound)

def test_what_is_refused():
    with pytest.raises(RuntimeError, match='leaf Variable that requires grad'), R.through_round(): leaf().round_()
    with pytest.raises(RuntimeError, match='^through_round: out must take torch.float64, got torch.int64'):
        with R.through_round(): torch.round(X, out=torch.empty(5, dtype=torch.int64))
    with pytest.raises(TypeError, match='^through_round: floor must be callable, got int'): R.through_round(floor=1)
    for f,got in ((lambda x: None, 'None'), (lambda x: 'abc', 'str'), (lambda x: x[:2], r'\(2,\)'), (sum, r'\(\)')):
        for name,call in (('rounding', torch.round), ('floor', torch.floor)):
            with pytest.raises(TypeError, match=rf'^through_round: {name} must return a Tensor .*, got {got}'):
                with R.through_round(**{name: f}): call(leaf())
    with pytest.raises(TypeError, match='^through_round: rounding cannot be called as'):
        R.through_round(R.round_ste, alpah=5.)
