"SpikingJelly 2.0.0: its surrogates and curves have the values and slopes of our spikes, its ties too."
import math
import pytest
import torch
from estimators import slope
from spikingjelly.activation_based import surrogate
import shok_nb as R

X = torch.linspace(-3, 3, 49)

# Theirs, ours, and what theirs is over ours at this alpha.
PAIRS = [
    (surrogate.ATan, R.arctan_spike, lambda a: 1.),
    (surrogate.Sigmoid, R.sigmoid_spike, lambda a: 1.),
    (surrogate.PiecewiseQuadratic, R.triangular_spike, lambda a: 1.),
    (surrogate.Erf, R.gaussian_spike, lambda a: 1.),
    (surrogate.SoftSign, R.fast_sigmoid_spike, lambda a: a/2),
]
each = pytest.mark.parametrize('theirs, ours, factor', PAIRS, ids=lambda f: getattr(f, '__name__', ''))
alphas = pytest.mark.parametrize('alpha', [.5, 2., 4.])

@each
@alphas
def test_spikes_and_slopes(theirs, ours, factor, alpha):
    "Zero among them: the tie fires in both."
    f = theirs(alpha=alpha)
    assert torch.equal(f(X), ours(X, alpha)) and f(torch.zeros(1)) == 1
    assert torch.allclose(slope(f, X), factor(alpha)*slope(ours, X, alpha=alpha), rtol=1e-4, atol=1e-6)

@each
@alphas
def test_curves(theirs, ours, factor, alpha):
    "Without spikes; a fast sigmoid from 0 to 1 is SoftSign's, ours keeps the slope that is published."
    curve = theirs(alpha=alpha, spiking=False)
    assert torch.allclose(curve(X), .5+factor(alpha)*(ours(X, alpha, soft=True)-.5), rtol=1e-4, atol=1e-6)

def test_sigmoid_differs_far_above_the_threshold():
    "Theirs is s*(1-s), whose digits are lost where s is nearly 1, and 0 from alpha*x = 17 on; ours is even."
    x = torch.tensor([-5., 5.])
    theirs,ours = slope(surrogate.Sigmoid(alpha=4.), x),slope(R.sigmoid_spike, x, alpha=4.)
    assert theirs[0] == pytest.approx(4*math.exp(-20)) and theirs[1] == 0
    assert ours.tolist() == pytest.approx([4*math.exp(-20)]*2)

@pytest.mark.parametrize('k', [1., 3.])
def test_superspike_is_a_multiple(k):
    "Its alpha is a factor of the slope, not the sharpness, which is 1."
    f = surrogate.SuperSpike(alpha=k)
    assert torch.allclose(slope(f, X), k*slope(R.fast_sigmoid_spike, X, alpha=1.), rtol=1e-5)

def test_dtypes_agree():
    for dtype in (torch.bfloat16, torch.float64):
        x = X.to(dtype)
        assert surrogate.ATan()(x).dtype == R.arctan_spike(x).dtype == dtype

def test_nan_differs():
    "Theirs is no spike; ours stays nan, which is seen."
    x = torch.tensor([torch.nan])
    assert surrogate.ATan()(x) == 0 and R.arctan_spike(x).isnan()

def test_infinity_agrees():
    x = torch.tensor([math.inf, -math.inf])
    assert torch.equal(surrogate.ATan()(x), R.arctan_spike(x))
    assert torch.equal(slope(surrogate.ATan(), x), slope(R.arctan_spike, x))
