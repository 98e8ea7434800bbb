"snnTorch 1.0.0: spikes are 0 and 1 where our signs are -1 and 1, so a surrogate that both have is half of ours."
import pytest
import torch
from estimators import slope
from snntorch import surrogate
from shok_nb import approx_sign, ede_sign, estimator, sign_ste

X = torch.linspace(-3, 3, 49)

def test_spikes_are_signs_but_at_zero():
    theirs = surrogate.straight_through_estimator()(X)
    off = X != 0
    assert torch.equal(sign_ste(X)[off], 2*theirs[off]-1)
    assert theirs[~off] == 0 and sign_ste(X)[~off] == 1

def test_straight_through_agrees():
    assert torch.equal(slope(sign_ste, X), slope(surrogate.straight_through_estimator(), X))

@pytest.mark.parametrize('k', [2., 5., 25.])
def test_sigmoid_is_half_of_ede_sign(k):
    "k*s(kx)*s(-kx) is half of (k/2)*sech(kx/2)**2. Below zero theirs is gone from k*x = -45 on, and nan from -89."
    theirs,x = surrogate.sigmoid(k),torch.linspace(-40, 40, 81)/k
    assert torch.allclose(slope(theirs, x), slope(ede_sign, x, t=k/2)/2, rtol=1e-4, atol=0)
    x = torch.tensor([-45., -89., -1e3])/k
    assert slope(theirs, x)[0] == 0 < slope(ede_sign, x, t=k/2)[0]
    assert slope(theirs, x)[1:].isnan().all() and slope(ede_sign, x, t=k/2).isfinite().all()

def test_triangular_differs_it_is_no_triangle():
    "Theirs is minus the threshold from 0 on, so a spike learns backwards; ours is a triangle."
    assert torch.equal(slope(surrogate.triangular(), X), torch.where(X < 0, 1., -1.))
    assert torch.equal(slope(approx_sign, X), (2-2*X.abs()).clamp(min=0))

@pytest.mark.parametrize('name, f', [
    ('fast_sigmoid', lambda q: 1/(1+25*q)**2),
    ('atan', lambda q: 1/(1+(torch.pi*q)**2)),
])
def test_tails_that_no_sign_of_ours_has(name, f):
    "They fall as a power of x and not exponentially; from our parts an `estimator` is one line."
    made = estimator(name, lambda v: (v > 0).to(v.dtype), lambda v: f(v.abs()))
    theirs = getattr(surrogate, name)()
    assert torch.equal(made(X), theirs(X)) and torch.allclose(slope(made, X), slope(theirs, X))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype_differs(dtype):
    x = X.to(dtype)
    assert surrogate.sigmoid()(x).dtype == torch.float32 and ede_sign(x).dtype == dtype

def test_integers_differ():
    "Theirs takes them, ours says what to do."
    assert surrogate.sigmoid()(torch.tensor([-1, 2])).tolist() == [0, 1]
    with pytest.raises(TypeError, match=r'use x.float\(\)'): ede_sign(torch.tensor([-1, 2]))

def test_nan_differs():
    x = torch.tensor([torch.nan])
    assert surrogate.sigmoid()(x) == 0 and ede_sign(x).isnan()

def test_transforms_differ():
    assert torch.equal(torch.func.vmap(ede_sign)(X), ede_sign(X))
    with pytest.raises(RuntimeError, match='setup_context'): torch.func.vmap(surrogate.sigmoid())(X)

def test_their_leaky_operator_cannot_be_called():
    with pytest.raises(TypeError): surrogate.LSO()(X)
