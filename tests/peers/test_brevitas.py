"""Brevitas 0.13.4: the same straight-through roundings; its stochastic one knows
neither nan nor small fractions of a half."""
import copy
import brevitas.function.ops_ste as brevitas
import pytest
import torch
from brevitas.core.function_wrapper.learned_round import LearnedRoundHardSigmoid, LearnedRoundIdentity, LearnedRoundSte
from brevitas.core.function_wrapper.stochastic_round import StochasticRoundSte
from brevitas_examples.common.learned_round.learned_round_method import LinearTempDecay
from estimators import FLOATS, generator, same, slope
from shok_nb import (
    adaround,
    adaround_beta,
    ceil_ste,
    floor_ste,
    rectified_sigmoid,
    round_ste,
    sign_ste,
    signround,
    stochastic_round,
    trunc_ste,
)

PAIRS = [(round_ste, brevitas.round_ste), (floor_ste, brevitas.floor_ste), (ceil_ste, brevitas.ceil_ste),
    (trunc_ste, brevitas.round_to_zero_ste), (sign_ste, brevitas.binary_sign_ste)]
pairs = pytest.mark.parametrize('ours, theirs', PAIRS, ids=lambda f: f.__name__)
QUARTERS = torch.cat([torch.arange(-12, 13)/4, torch.tensor([-1e-7, 2.**22+.5, torch.inf, -torch.inf])])

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pairs
def test_ste_agrees(ours, theirs, dtype):
    x = QUARTERS.to(dtype)
    assert same(ours(x), theirs(x)) and same(slope(ours, x), slope(theirs, x))

def test_trunc_differs_at_minus_zero_and_sign_at_nan():
    x = torch.tensor([-0., torch.nan])
    assert trunc_ste(x).signbit()[0] and not brevitas.round_to_zero_ste(x).signbit()[0]
    assert sign_ste(x)[1].isnan() and brevitas.binary_sign_ste(x)[1] == -1

@pairs
def test_ste_differs_under_transforms(ours, theirs):
    assert torch.equal(torch.func.vmap(torch.func.grad(ours))(torch.ones(3)), torch.ones(3))
    with pytest.raises(RuntimeError, match='setup_context'): torch.func.vmap(theirs)(torch.ones(3))

def test_dpu_rounding_is_even_above_zero_and_up_below():
    "None of our five tie rules, but two of them."
    x = QUARTERS
    theirs = brevitas.dpu_round_ste(x)
    assert torch.equal(theirs, torch.where(x < 0, round_ste(x, ties='up'), round_ste(x)))
    assert not any(torch.equal(theirs, round_ste(x, ties=t)) for t in ('even', 'away', 'zero', 'up', 'down'))

@pytest.mark.parametrize('x', [-1.75, -.1, 0., .5, 2.9])
def test_stochastic_agrees_in_distribution(x):
    """40000 draws, seed 0: the same two integers, shares within 5 standard errors of
    the fraction, at most .0125; slope 1."""
    v = torch.full((40_000,), x)
    p = x-torch.tensor(x).floor()
    for f in (StochasticRoundSte(seed=0).train(), lambda v: stochastic_round(v, generator=generator())):
        y = f(v)
        assert set(y.tolist()) <= {float(v[0].floor()), float(v[0].ceil())} and (slope(f, v) == 1).all()
        assert abs((y-v.floor()).mean()-p) <= 5*(p*(1-p)/len(v))**.5 + 1e-6

def test_stochastic_differs_where_a_half_has_no_digits_for_the_fraction():
    """x = -2**-9 in bfloat16 is 1-2**-9 above its floor, and that rounds to 1: theirs always gives 0. Ours has the
    right mean: 1e6 draws, seed 0, 5 standard errors are .11 of it."""
    x = torch.full((1_000_000,), -2.**-9, dtype=torch.bfloat16)
    assert (StochasticRoundSte(seed=0).train()(x) == 0).all()
    assert abs(stochastic_round(x, generator=generator()).float().mean()/-2.**-9 - 1) < .12

@pytest.mark.parametrize('x', [torch.nan, torch.inf])
def test_stochastic_differs_at_nan_and_infinity(x):
    x = torch.tensor([x])
    assert same(stochastic_round(x), x)
    with pytest.raises(RuntimeError, match='p_in'): StochasticRoundSte().train()(x)

def test_a_copy_of_their_module_draws_from_the_original():
    "Ours keeps no generator: it is an argument."
    f = StochasticRoundSte(seed=0).train()
    before = f.generator.get_state()
    copy.deepcopy(f)(torch.rand(9))
    assert not torch.equal(before, f.generator.get_state())

def test_hard_sigmoid_agrees():
    v = torch.linspace(-5, 5, 1001)
    theirs = LearnedRoundHardSigmoid().train()
    assert torch.equal(rectified_sigmoid(v), theirs(v))
    assert torch.allclose(slope(rectified_sigmoid, v), slope(theirs, v))

def learned(impl, v): return LearnedRoundSte(impl, v, torch.nn.Identity())

def test_adaround_agrees():
    "Values, and the gradients of weights and of what is learned."
    x = torch.randn(100, generator=generator(), requires_grad=True)
    v = torch.randn(100, generator=generator(1))*2
    theirs = learned(LearnedRoundHardSigmoid(), v).train()
    v.requires_grad_()
    w = torch.randn(100, generator=generator(2))
    a = torch.autograd.grad((w*theirs(x)).sum(), (x, theirs.value))
    b = torch.autograd.grad((w*adaround(x, v)).sum(), (x, v))
    assert torch.equal(theirs(x), adaround(x, v)) and all(map(torch.allclose, a, b))

def test_adaround_deployed_differs_at_the_half():
    "An undecided weight, v = 0: theirs goes down, ours up."
    x,v = torch.full((3,), .3),torch.tensor([-1., 0., 1.])
    assert learned(LearnedRoundHardSigmoid(), v).eval()(x).tolist() == [0, 0, 1]
    assert adaround(x, v, hard=True).tolist() == [0, 1, 1]

def test_annealing_of_adaround_differs_between_the_ends():
    """Theirs falls in a line, ours as the cosine of the authors' code; both wait for
    the first fifth and meet in the middle."""
    theirs = LinearTempDecay(100, start_b=20)
    for i in (0, 20, 60, 100): assert theirs(i) == pytest.approx(adaround_beta(i, 100))
    assert theirs(40) == 15.5 and adaround_beta(40, 100) == pytest.approx(11+9*.5**.5)

def test_signround_agrees_inside_its_range_and_differs_beyond():
    "Theirs clips what is learned to half a step, ours leaves that to the optimizer."
    x,v = torch.randn(100, generator=generator()),torch.rand(100, generator=generator(1))-.5
    theirs = learned(LearnedRoundIdentity(), v).train()
    assert torch.equal(theirs(x), signround(x, v))
    assert torch.equal(slope(theirs, x), slope(signround, x, v=v))
    x,v = torch.tensor([.3]),torch.tensor([1.4])
    assert learned(LearnedRoundIdentity(), v)(x) == 1 and signround(x, v) == 2
