"snnTorch 1.0.0: its surrogates are the slopes of our spikes, and half of those of signs, which are -1 and 1."
import math
import pytest
import torch
from estimators import slope
from snntorch import surrogate
import shok_nb as R
from shok_nb import approx_sign, ede_sign, sign_ste

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
    assert torch.equal(slope(R.triangular_spike, X), (1-X.abs()).clamp(min=0))

@pytest.mark.parametrize('name, f, knob', [
    ('fast_sigmoid', R.fast_sigmoid_spike, 'slope'),
    ('atan', R.arctan_spike, 'alpha'),
    ('sigmoid', R.sigmoid_spike, 'slope'),
])
@pytest.mark.parametrize('k', [2., 25.])
def test_slopes_are_those_of_spikes(name, f, knob, k):
    "Theirs of a sigmoid ends at 1e-19; and the values but at 0, where theirs do not fire, though their pages say so."
    theirs,off = getattr(surrogate, name)(**{knob: k}),X != 0
    assert torch.equal(f(X, k)[off], theirs(X)[off]) and theirs(X)[~off] == 0 and f(X, k)[~off] == 1
    assert torch.allclose(slope(f, X, alpha=k), slope(theirs, X), rtol=1e-4, atol=1e-18)

def test_straight_through_is_spike_ste():
    theirs = surrogate.straight_through_estimator()
    off = X != 0
    assert torch.equal(R.spike_ste(X)[off], theirs(X)[off]) and torch.equal(slope(R.spike_ste, X), slope(theirs, X))

def test_their_sigmoid_is_nan_where_ours_is_0():
    "snntorch#427: a potential of -5 at the default slope of 25."
    x = torch.tensor([-5.])
    assert slope(surrogate.sigmoid(), x).isnan() and slope(R.sigmoid_spike, x, alpha=25.) == 0
    assert slope(R.sigmoid_spike, x.double(), alpha=25.) == pytest.approx(25*math.exp(-125))

def test_float64_differs():
    "snntorch#421: their spikes of float64 are float32, ours float64."
    for name,f in dict(fast_sigmoid=R.fast_sigmoid_spike, atan=R.arctan_spike, sigmoid=R.sigmoid_spike).items():
        assert getattr(surrogate, name)()(X.double()).dtype == torch.float32 and f(X.double()).dtype == torch.float64

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
