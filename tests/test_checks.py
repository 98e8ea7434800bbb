"""`check_estimator` finds what is broken: for each law an estimator that breaks it, 33 planted faults of all kinds, and
11 right functions of other people that it does not accuse. It says so in words with numbers."""
import re
from dataclasses import replace
from functools import partial
import pytest
import torch
from estimators import slow_after
import shok_nb as R
from shok_nb.catalog import Row, row
from shok_nb.checks import (
    LAWS,
    Law,
    LawReport,
    _least_digits,
    check_estimator,
    hard_row,
    measured,
    near,
    same,
    slope,
)
from shok_nb.engine import pieces


def kept(f): return replace(row(R.soft_round), f=f)
def like(f, r=R.round_ste): return replace(row(r), f=f, slope='?', choices=(), grid=False)

def no_zero(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + 0.
def off_integers(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw)*(1+2e-3)
def large(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + (x.numel() > 100_000)*1e-3
def far_away(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + 2
def by_size(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + (x.numel() > 1000)*x*1e-3
def no_end(x, alpha=5., **kw): return R.soft_round(x, min(alpha, 20.), **kw)
def fixed(x, alpha=5., step=1., offset=0., **kw):
    number = {k: float(v) for k,v in dict(step=step, offset=offset).items()}
    return R.soft_round(x, float(alpha), **number, **kw)
def takes_all(x, alpha=5., step=1., **kw):
    if not isinstance(x, torch.Tensor): return x
    return R.soft_round(x.float() if not x.is_floating_point() else x, alpha, step=abs(step), **kw)
def no_bfloat16(x, alpha=5., **kw):
    if x.dtype == torch.bfloat16: raise TypeError('no bfloat16')
    return R.soft_round(x, alpha, **kw)

def half_the_offset(x, alpha=5., offset=0., **kw): return R.soft_round(x, alpha, offset=offset/2, **kw)

def two_up(x, seed=None, generator=None): return R.stochastic_round(x, seed=seed, generator=generator) + (x > 3.5)
def chance(f): return Row(f, '1', 'mine', on_grid=True, random=True, monotone=False, unbiased=True, grid=False)

BROKEN = dict(keeps_the_sign_of_zero=no_zero, fixes_integers=off_integers, is_the_same_in_pieces=by_size,
    reaches_its_ends=no_end, learns=fixed, refuses=takes_all, takes_every_dtype=no_bfloat16, lands_on_neighbours=two_up,
    lies_on_any_grid=half_the_offset)

def test_every_law_is_broken():
    "Here, or by a planted fault."
    assert sorted([*BROKEN, *FOUND_BY]) == sorted(law.name for law in LAWS)

@pytest.mark.parametrize('name', BROKEN)
@pytest.mark.slow
def test_finds_it(name):
    f = BROKEN[name]
    report = check_estimator(f, (chance if f is two_up else kept)(f), raises=False)
    assert name in {said.split()[0] for said,_,_ in report.broken+report.details}

def test_pieces_are_compared_with_none(monkeypatch):
    "A fault in the cutter itself, of one dtype, is seen on the few numbers that the law takes."
    law = next(law for law in LAWS if law.name == 'is_the_same_in_pieces').test
    r,cut = row(R.soft_round),pieces._cut
    def off(f, key, size, to, *rest):
        sums = cut(f, key, size, to, *rest)
        if to.dtype == torch.bfloat16: to += 1
        return sums
    monkeypatch.setattr(pieces, '_cut', off)
    law(r.f, r, torch.float32)
    with pytest.raises(AssertionError, match='in pieces'): law(r.f, r, torch.bfloat16)
    assert pieces.PIECE == 2**17

# --- planted faults, each of which the report calls wrong
class WithSlope(torch.autograd.Function):
    "`value(x)` forward, `back(x, g)` backward and in forward mode."
    generate_vmap_rule = True
    @staticmethod
    def forward(x, value, back): return value(x)
    @staticmethod
    def setup_context(ctx, inputs, output):
        x,_,ctx.back = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
    @staticmethod
    def backward(ctx, g): return ctx.back(ctx.saved_tensors[0], g),None,None
    @staticmethod
    def jvp(ctx, t, *_): return ctx.back(ctx.saved_tensors[0], t)

def made(back, value=torch.round, by=WithSlope): return lambda x: by.apply(x, value, back)
def same_slope(x, g): return g
def straight(value): return lambda x: x + (value(x)-x).detach()
def drawn(x): return torch.rand(x.shape, dtype=x.dtype)

class WrongAlong(WithSlope):
    @staticmethod
    def jvp(ctx, t, *_): return 2*t

class WrongVmap(WithSlope):
    generate_vmap_rule = False
    @staticmethod
    def vmap(info, in_dims, x, value, back): return torch.floor(x),in_dims[0]

def test_a_slope_of_one_is_one():
    "Also where the mass is right."
    def wavy(x, g): return g*(1+torch.sin(2*torch.pi*x)/2)
    claimed = replace(row(R.round_ste), f=made(wavy), grid=False)
    report = check_estimator(claimed.f, claimed, raises=False)
    assert any(law == 'has_a_slope' and 'and not 1' in said for law,_,said in report.broken)

def edits(x):
    with torch.no_grad(): y = x.detach().round_()
    return x + (y-x).detach()

class Stateful:
    "An object that counts its calls."
    def __init__(self): self.calls = 0
    def __call__(self, x):
        self.calls += 1
        return straight(torch.round)(x) + self.calls

class Keeps(torch.autograd.Function):
    "Backward sees the input of the last call."
    last = None
    @staticmethod
    def forward(ctx, x):
        ctx.scale = 1. if Keeps.last is None else 1. + .01*(Keeps.last % 7)
        Keeps.last = (Keeps.last or 0) + 1
        return x.round()
    @staticmethod
    def backward(ctx, g): return g*ctx.scale

def up_too_often(x, generator=None):
    u = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return x + (torch.floor(x + .01 + u) - x).detach()
def same_noise(x, seed=None):
    return R.stochastic_round(x, seed=torch.tensor(3))
def mixed(x, seed=None): return R.stochastic_round(x)

def cell(x, g): return g*2*(2*(x-x.round()).abs())
def narrow(x): return x.to(torch.float32)
def bf16_slope(x, g): return g*(1.5 if x.dtype == torch.bfloat16 else 1.)
def with_ties(x): return torch.where((x-x.floor()) == .5, x, x.round())
def two_at_ties(x): return torch.where((x-x.floor()) == .5, x+1.5, x.round())
def memory(x):
    "Reads the storage as if it were contiguous."
    y = torch.as_strided(x, x.shape, x.contiguous().stride()) if x.numel() else x
    return x + (y.round()-x).detach()

FAULTS = dict(
    gradient_is_a_sign=made(lambda x, g: g.sign()),
    gradient_ignores_what_comes_in=made(lambda x, g: torch.ones_like(g)),
    gradient_is_clipped=made(lambda x, g: g.clamp(-1, 1)),
    gradient_is_a_mean=made(lambda x, g: g.mean().expand_as(g)),
    gradient_is_detached=lambda x: x.detach().round(),
    gradient_is_zero=torch.round,
    gradient_has_a_nan=made(lambda x, g: g*(x-x.round()).abs()/(x-x.round()).abs()),
    wrong_beyond_100_000=straight(lambda x: x.round() + (x.numel() > 100_000)*(x > 1)),
    wrong_slope_beyond_100_000=made(lambda x, g: g*(1 + (x.numel() > 100_000))),
    wrong_odd_last_element=straight(lambda x: torch.cat([x.flatten()[:-1].round(), x.flatten()[-1:]]).view(x.shape)
        if x.numel() > 2**18 and x.numel() % 2 else x.round()),
    wrong_under_no_grad=lambda x: straight(torch.round)(x) if torch.is_grad_enabled() else x.floor(),
    wrong_in_inference_mode=lambda x: x.trunc() if torch.is_inference_mode_enabled() else straight(torch.round)(x),
    float64_in_float32=lambda x: R.soft_round(x.float()).to(x.dtype),
    float64_slope_in_float32=made(lambda x, g: g*(1 + (x-x.round()).float()**2/3).to(g.dtype)),
    float64_rounded_in_float32=straight(lambda x: x.float().round().to(x.dtype)),
    wrong_bf16_slope=made(bf16_slope),
    wrong_bf16_value=straight(lambda x: x.round() + (x.dtype == torch.bfloat16)*(x > 1)),
    off_by_an_ulp=straight(lambda x: x.round()*(1+2*torch.finfo(x.dtype).eps)),
    wrong_under_vmap=made(same_slope, by=WrongVmap),
    wrong_jvp=made(same_slope, by=WrongAlong),
    wrong_when_not_contiguous=memory,
    edits_its_input=edits,
    keeps_state=Stateful(),
    keeps_state_of_backward=lambda x: Keeps.apply(x),
    another_dtype=lambda x: narrow(straight(torch.round)(x)),
    another_shape=lambda x: torch.atleast_1d(straight(torch.round)(x)),
    ties_off_the_grid=straight(with_ties),
    ties_too_far=straight(two_at_ties),
    nan_swallowed=made(same_slope, lambda x: torch.where(x.isnan(), torch.zeros_like(x), x.round())),
    infinite_value_at_a_quarter=lambda x: straight(torch.round)(x)/(x != .25),
    random_biased=up_too_often,
    random_backwards=straight(lambda x: x.floor() + (drawn(x) > x-x.floor())),
    random_ignores_its_seed=mixed,
    random_without_chance=same_noise,
)
# These are fine functions for somebody; it takes a row that says what they are meant to be.
CLAIMED = dict(
    wrong_mass=made(lambda x, g: g/2),
    wrong_slope=made(same_slope, R.soft_round),
    wrong_at_negative_numbers=made(lambda x, g: g*(1 + (x < 0)), torch.round),
    wrong_value_at_negative_numbers=straight(lambda x: x.round() + (x < -1)),
    jumps=straight(lambda x: R.soft_round(x) + .1*(x > 1.25).to(x.dtype)),
)
AS = dict(wrong_slope=R.soft_round, jumps=R.soft_round)

FOUND_BY = {
    'scales_the_gradient': 'gradient_is_a_sign gradient_ignores_what_comes_in gradient_is_clipped gradient_is_a_mean',
    'has_a_slope': 'gradient_is_detached gradient_is_zero',
    'is_finite': 'gradient_has_a_nan infinite_value_at_a_quarter',
    'is_the_same_when_large': 'wrong_beyond_100_000 wrong_slope_beyond_100_000 wrong_odd_last_element',
    'is_the_same_without_grad': 'wrong_under_no_grad wrong_in_inference_mode',
    'keeps_float64': 'float64_in_float32 float64_slope_in_float32 float64_rounded_in_float32',
    'rounds_halves_once': 'wrong_bf16_slope wrong_bf16_value',
    'is_on_its_grid': 'off_by_an_ulp ties_off_the_grid',
    'survives_transforms': 'wrong_under_vmap wrong_jvp',
    'keeps_shape': 'wrong_when_not_contiguous edits_its_input another_dtype another_shape',
    'is_the_same_again': 'keeps_state keeps_state_of_backward',
    'stays_close': 'ties_too_far',
    'takes_infinity': 'nan_swallowed',
    'has_its_mean': 'random_biased random_backwards',
    'comes_again': 'random_ignores_its_seed random_without_chance',
    'keeps_its_claims': ' '.join(CLAIMED),
}
LAW_OF = {fault: law for law,faults in FOUND_BY.items() for fault in faults.split()}

@pytest.mark.parametrize('name', [*FAULTS, *CLAIMED])
@pytest.mark.slow
def test_planted_fault_is_wrong(name):
    f = (FAULTS | CLAIMED)[name]
    given = None
    if name in CLAIMED: given = replace(like(f, AS.get(name, R.round_ste)), smooth=False, knobs=())
    if name == 'random_without_chance': given = chance(f)
    report = check_estimator(f, given, raises=False)
    assert LAW_OF[name] in {law for law,_,_ in report.broken} and not report.ok, report
    assert re.search('(?s)laws hold\n *wrong', f'{report}')

def on_a_grid(x, step, offset): return offset + step*R.soft_round((x-offset)/step)
def steeper_on_it(x, step, offset):
    v = (x-offset)/step
    return R.straight_through(on_a_grid(x, step, offset), R.soft_round(v))
WRONG_GRIDS = dict(half_of_it=lambda x, s, o: on_a_grid(x, s, o/2), none=lambda x, s, o: on_a_grid(x, s, 0*o),
    the_other_way=lambda x, s, o: on_a_grid(x, s, -o), in_steps=lambda x, s, o: on_a_grid(x, s, o*s),
    not_added_again=lambda x, s, o: on_a_grid(x, s, o) - o, its_square=lambda x, s, o: on_a_grid(x, s*s, o),
    # a number it takes right
    a_tensor=lambda x, s, o: on_a_grid(x, s, o/2 if isinstance(o, torch.Tensor) else o), slope_over_step=steeper_on_it)

@pytest.mark.slow
@pytest.mark.parametrize('name', WRONG_GRIDS)
def test_a_wrong_grid_is_named(name):
    "With a row and without; and the grid itself is right."
    def f(x, step=1., offset=0.): return WRONG_GRIDS[name](x, step, offset)
    def g(x, step=1., offset=0.): return on_a_grid(x, step, offset)
    for r in (None, replace(row(R.soft_round), f=f, smooth=False, knobs=())):
        report = check_estimator(f, r, raises=False)
        assert 'lies_on_any_grid' in {law for law,_,_ in report.broken}, report
    assert check_estimator(g).ok

def test_a_step_alone_is_no_fault():
    def f(x, step=1.): return R.round_ste(x, step=step)
    report = check_estimator(f)
    assert 'lies_on_any_grid' in {law for law,_,_ in report.details}, report

# --- right functions of other people: details at most
class OldSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return torch.round(x)
    @staticmethod
    def backward(ctx, g): return g

class Layer(torch.nn.Module):
    def forward(self, x): return x + (torch.round(x)-x).detach()

def kornia_like(x): return torch.round(x) + (x-torch.round(x))**3
def fake_quantized(x): return torch.fake_quantize_per_tensor_affine(x, 1., 0, -128, 127)
def learnable(x):
    one,zero = torch.ones(1),torch.zeros(1)
    return torch._fake_quantize_learnable_per_tensor_affine(x, one, zero, -128, 127, 1.)
def wave(x):
    q = x - x.round()
    return x.round() + (q - torch.sin(2*torch.pi*q.double())/(2*torch.pi)).to(x.dtype)
def identity(x): return x*1.
def clamped(x):
    v = x.clamp(-8, 7)
    return v + (torch.round(v)-v).detach()
def composed(x): return R.soft_round(x, 5.)
ties_up = straight(lambda x: x.floor() + (x-x.floor() >= .5))
coin = straight(lambda x: x.floor() + (drawn(x) < x-x.floor()))

RIGHT = dict(detach_trick=straight(torch.round), old_function=lambda x: OldSTE.apply(x), new_function=made(same_slope),
    module=Layer(), kornia_like=kornia_like, fake_quantize=fake_quantized, learnable_fake_quantize=learnable,
    exact_wave=wave, identity=identity, clamped=clamped, composed=composed, ties_up=ties_up,
    partial=partial(R.soft_round, alpha=3.), coin=coin)

@pytest.mark.parametrize('name', RIGHT)
@pytest.mark.slow
def test_a_right_function_is_not_accused(name):
    report = check_estimator(RIGHT[name])
    assert report.ok and report.tried > 20, report

# --- what it takes
class Called:
    def __call__(self, x): return R.soft_round(x, 3.)

NAMES = [(partial(R.soft_round, alpha=3.), 'soft_round'), (R.nn.SoftRound(3.), 'SoftRound'), (Called(), 'Called'),
    (torch.round, 'round'), (partial(Called()), 'Called')]

@pytest.mark.parametrize('f, name', NAMES, ids=lambda v: v if isinstance(v, str) else '')
@pytest.mark.slow
def test_takes_what_can_be_called(f, name):
    "With a row too, whose function has no name either."
    report = check_estimator(f, raises=False)
    assert repr(report).startswith(f'{name}: ') and report.row.name == name
    again = check_estimator(f, replace(report.row, f=f), raises=False)
    assert again.row.name == name and again.tried == report.tried
    if f is torch.round: assert 'the slope is 0 at every point from -1 to 2' in repr(report)
    else: assert report.ok and report.row.exact_slope

def test_an_error_in_a_law_is_its_line():
    "The first line of it; no claim can be measured of what raises."
    def fails(x): raise RuntimeError('no such thing\nand a second line')
    report = check_estimator(fails, raises=False)
    assert report.broken and not any(measured(fails).values())
    assert {said for _,_,said in report.broken} >= {'raised RuntimeError: no such thing'}
    assert 'second line' not in repr(report) and not report.row.on_grid

def test_a_refused_dtype_is_a_detail():
    "And the other laws are not tried in it."
    report = check_estimator(no_bfloat16, kept(no_bfloat16))
    of = [(law, said) for law,d,said in report.details if d == torch.bfloat16]
    both = [('takes_every_dtype' + form, 'raised TypeError: no bfloat16') for form in ('', ' with hard=True')]
    assert of == both and report.ok

@pytest.mark.slow
def test_skips():
    f,r = large,kept(large)
    whole = check_estimator(f, r, raises=False)
    report = check_estimator(f, r, skip='is_the_same_when_large')
    assert not whole.ok and report.ok and report.tried == whole.tried - 4
    assert check_estimator(f, r, skip=('is_the_same_when_large', 'compiles', 'refuses')).tried == whole.tried - 6
    message = "^check_estimator: no law 'shapes' to skip; there are comes_again, compiles, .*takes_infinity"
    with pytest.raises(ValueError, match=message): check_estimator(f, r, skip=('refuses', 'shapes'))

# --- what it says
def test_numbers_that_differ_look_it():
    "As few digits as a dtype needs."
    one = torch.tensor(1.)
    given = one, one+2**-23, one.double()+2**-52, -0.*one, one.half()/3, one/0, one.long()
    assert [_least_digits(v) for v in given] == [
        '1', '1.00000012', '1.0000000000000002', '-0', '0.333252', 'inf', '1']
    report = check_estimator(FAULTS['off_by_an_ulp'], raises=False)
    pairs = re.findall(r'is (\S+) and not (\S+)', repr(report))
    assert pairs and all(a != b for a,b in pairs)

def test_every_broken_place_is_said():
    "Value and slope, and each transform, with a line for each."
    def both(x, g): return g*(1 + (x.dtype == torch.bfloat16))
    f = made(both, lambda x: x.round() + (x.dtype == torch.bfloat16)*(x > 1))
    said = [s for law,_,s in check_estimator(f, raises=False).broken if law == 'rounds_halves_once']
    assert len(said) == 2 and 'the value is 2 and not 1' in said[0] and 'the slope is 2 and not 1' in said[1]
    said = [s for law,_,s in check_estimator(OldSTE.apply, raises=False).details if law == 'survives_transforms']
    assert [s.partition(' raised ')[0] for s in said] == ['vmap', 'grad', 'vmap of grad', 'jvp']

def test_what_is_not_claimed():
    report = check_estimator(made(lambda x, g: g/2))
    assert 'does not claim exact_slope, continuous, mass_one (it is 0.5)' in repr(report).splitlines()[-1]
    r = like(report.row.f)
    with pytest.raises(AssertionError, match=r'mass_one=True is claimed, and it is not so \(it is 0.5\)'):
        check_estimator(r.f, r)
    report = check_estimator(R.sigmoid_round, row(R.sigmoid_round))
    assert 'mass_one (it is 1 from 0 to 1, 0 from 2 to 3)' in repr(report)
    assert 'mass_one (' not in repr(check_estimator(R.round_ste, row(R.round_ste)))

def test_a_composition_is_not_accused():
    "That a message names the function inside is a detail."
    report = check_estimator(composed)
    assert report.ok and [law for law,_,_ in report.details] == ['refuses']*2
    assert 'the message does not name it: soft_round: x must be' in repr(report)
    assert '{}' not in repr(report)

def test_a_gradient_that_is_not_linear_may_be_claimed():
    r = row(R.ewgs_round)
    assert check_estimator(r.f, r).ok
    report = check_estimator(r.f, replace(r, linear=True), raises=False)
    assert {law for law,_,_ in report.broken} == {'scales_the_gradient'}
    report = check_estimator(R.round_ste, replace(row(R.round_ste), linear=False), raises=False)
    assert [said for *_,said in report.broken] == ['linear=False is claimed, and it is not so']

# --- random ones
@pytest.mark.slow
def test_a_biased_coin():
    "Found without a row; a row may say that it is meant."
    def coin(x, generator=None):
        u = torch.rand(x.shape, generator=generator, dtype=x.dtype)
        return x + (torch.floor(x) + (u < x-x.floor()-.01*(x != x.floor())) - x).detach()
    report = check_estimator(coin, raises=False)
    assert report.row.random and 'has_its_mean' in {law for law,_,_ in report.broken}
    assert re.search(r'the mean of 20000 draws at x = .* standard errors off, by generator', repr(report))
    assert check_estimator(coin, replace(report.row, unbiased=False), raises=False).ok

def test_a_seed_that_is_an_int():
    def coin(x, seed=0):
        if isinstance(seed, torch.Tensor): raise TypeError('seed must be an int')
        return R.stochastic_round(x, generator=torch.Generator().manual_seed(seed))
    report = check_estimator(coin)
    assert report.row.random and report.row.unbiased

@pytest.mark.parametrize('r', slow_after([row(R.cubic_round), *[r for r in R.catalog.catalog if r.random]], 3),
    ids=lambda r: r.name)
@pytest.mark.slow
def test_rows_are_measured(r):
    "The claims of each row with noise, and of one without, from its function alone."
    got = check_estimator(r.f).row
    names = 'on_grid exact_slope continuous monotone mass_one odd equivariant unbiased random unbounded smooth'
    assert got.grid >= r.grid and all(getattr(got, c) == getattr(r, c) for c in names.split()), (r, got)

@pytest.mark.slow
def test_noise_is_not_state():
    "Torch's own generator is left as it was found."
    state = torch.get_rng_state()
    assert check_estimator(coin).row.random and not check_estimator(R.round_ste).row.random
    assert torch.equal(torch.get_rng_state(), state)

# --- reports, rows and laws
@pytest.mark.slow
def test_raises_or_reports():
    f = far_away
    report = check_estimator(f, kept(f), raises=False)
    assert 'stays_close' in {name for name,_,_ in report.broken} and not report.ok
    with pytest.raises(AssertionError, match='stays_close in float64: at x = .* the value'): check_estimator(f, kept(f))

@pytest.mark.slow
@pytest.mark.parametrize('claim',
    ['odd', 'equivariant', 'monotone', 'continuous', 'mass_one', 'exact_slope', 'on_grid'])
def test_each_claim_is_tested_both_ways(claim):
    r = row(R.soft_round)
    opposite = not getattr(r, claim)
    with pytest.raises(AssertionError, match=f'{claim}={opposite} is claimed, and it is not so'):
        check_estimator(r.f, replace(r, **{claim: opposite}))

@pytest.mark.slow
def test_the_report_reads():
    report = check_estimator(takes_all, kept(takes_all))
    lines = [line.strip() for line in repr(report).splitlines()]
    assert lines[0] == f'takes_all: {report.tried-2} of {report.tried} laws hold, nothing is wrong'
    assert lines[1] == 'details'
    assert 'refuses, refuses with hard=True: tensor([0, 1, 2]) is taken' in lines[2]
    assert lines[-2].startswith('claims exact_slope') and lines[-1].startswith('does not claim on_grid')

@pytest.mark.slow
def test_compiled_too():
    assert check_estimator(R.round_ste, row(R.round_ste), compile=True).tried == check_estimator(R.round_ste).tried + 1
    def breaks(x): return R.round_ste(x) + (torch.compiler.is_compiling())*x
    r = replace(row(R.round_ste), f=breaks, choices=(), grid=False)
    report = check_estimator(breaks, r, compile=True, raises=False)
    assert any(name == 'compiles' and 'the compiled value' in said for name,_,said in report.broken)

def test_wrong_arguments():
    with pytest.raises(ValueError, match='^hard_row: round_ste takes no hard='): hard_row(row(R.round_ste))

def test_equal():
    "What the laws compare with: bits, or a few units in the last place of the value or of 1."
    z,nan = torch.tensor([0.]),torch.tensor([float('nan')])
    assert same(z, z.clone()) and not same(z, -z) and same(nan, nan) and not same(z, z.double()) and not same(z, z[0])
    one,eps = torch.ones(1),torch.finfo(torch.float32).eps
    assert near(one, one+8*eps) and not near(one, one+9*eps) and near(z, z+8*eps) and near(one, one+9*eps, ulps=9)
    inf = one/0
    assert near(inf, inf) and not near(inf, -inf) and not near(one, inf) and not near(inf, one)
    assert not near(nan, one) and near(nan, nan) and not near(one, one.double())
    assert torch.equal(slope(R.soft_round, z, alpha=0.), torch.ones(1))

def test_a_law_of_ones_own():
    "A law is a function and where it applies."
    def is_small(f, r, dtype): assert f(torch.ones(3, dtype=dtype)).max() < 2
    law = Law(is_small, (torch.float32,), lambda r: r.equivariant)
    assert law.name == 'is_small' and law.applies(row(R.round_ste)) and not law.applies(row(R.sign_ste))
    assert LawReport(row(R.round_ste), (), 3).ok
    assert not LawReport(row(R.round_ste), (('is_small', None, 'no'),), 3).ok
