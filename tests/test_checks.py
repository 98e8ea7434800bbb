"`check_estimator` finds what is broken: for each law an estimator that breaks it, and says so in words with numbers."
from dataclasses import replace
import pytest
import torch
import shok_nb as R
from shok_nb.catalog import row
from shok_nb.checks import LAWS, Law, Report, _tried, check_estimator, hard_row, near, same, slope


def kept(f): return replace(row(R.soft_round), f=f)

class Half(torch.autograd.Function):
    "Half the slope that it has."
    @staticmethod
    def forward(ctx, x): return R.soft_round(x)
    @staticmethod
    def backward(ctx, g): return g/2

def named(name, f):
    f.__name__ = name
    return f

def flat(x, alpha=5., **kw): return R.soft_round(x.contiguous().view(-1), alpha, **kw).view(x.shape).contiguous()
def bursts(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw)/(x != .25)
def no_infinity(x, alpha=5., **kw): return x + (R.soft_round(x, alpha, **kw)-x)
def no_zero(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + 0.
def off_integers(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw)*(1+2e-3)
def in_halves(x, alpha=5., **kw): return R.soft_round(x*1., alpha, **kw)*1.5/1.5*1.1/1.1
def by_size(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw) + (x.numel() > 1000)*x*1e-3
def drops(x, alpha=5., **kw): return R.soft_round(x, alpha, **kw)*(x > 0)
def no_end(x, alpha=5., **kw): return R.soft_round(x, min(alpha, 20.), **kw)
def eager_only(x, alpha=5., **kw):
    return R.soft_round(x, alpha, **kw) if type(x) is torch.Tensor and x.ndim else x.item()*x
def fixed(x, alpha=5., step=1., offset=0., **kw):
    number = {k: float(v) for k,v in dict(step=step, offset=offset).items()}
    return R.soft_round(x, float(alpha), **number, **kw)
def takes_all(x, alpha=5., step=1., **kw):
    if not isinstance(x, torch.Tensor): return x
    return R.soft_round(x.float() if not x.is_floating_point() else x, alpha, step=abs(step), **kw)

BROKEN = dict(keeps_shape=flat, is_finite=bursts, takes_infinity=no_infinity, keeps_the_sign_of_zero=no_zero,
    fixes_integers=off_integers, rounds_halves_once=in_halves, is_the_same_in_pieces=by_size, keeps_its_claims=drops,
    reaches_its_ends=no_end, survives_transforms=eager_only, learns=fixed, refuses=takes_all)

def test_every_law_is_broken_once(): assert BROKEN.keys() == {law.name for law in LAWS}

@pytest.mark.parametrize('law', LAWS, ids=lambda law: law.name)
def test_finds_it(law):
    f = BROKEN[law.name]
    assert law.applies(kept(f)) and any(_tried(law, f, kept(f), d) for d in law.dtypes)

def test_raises_or_reports():
    f = BROKEN['refuses']
    report = check_estimator(f, kept(f), raises=False)
    assert 'refuses' in {name for name,_,_ in report.broken} and not report.ok
    with pytest.raises(AssertionError, match='refuses: .* is taken'): check_estimator(f, kept(f))

@pytest.mark.parametrize('claim',
    ['odd', 'equivariant', 'monotone', 'continuous', 'mass_one', 'exact_slope', 'on_grid'])
def test_each_claim_is_tested_both_ways(claim):
    r = row(R.soft_round)
    opposite = not getattr(r, claim)
    with pytest.raises(AssertionError, match=f'{claim}={opposite} is claimed, and it is not so'):
        check_estimator(r.f, replace(r, **{claim: opposite}))

def test_a_slope_that_is_not_the_slope():
    r = replace(row(R.soft_round), f=named('halved', lambda x: Half.apply(x)), knobs=(), smooth=False, grid=False)
    report = check_estimator(r.f, r, raises=False)
    assert any('exact_slope=True is claimed' in said for _,_,said in report.broken)

def test_without_a_row_claims_are_measured():
    report = check_estimator(R.cubic_round)
    r = row(R.cubic_round)
    assert report.ok and report.row.smooth and report.row.grid
    for claim in ('on_grid', 'exact_slope', 'continuous', 'monotone', 'mass_one', 'odd', 'equivariant', 'unbounded'):
        assert getattr(report.row, claim) == getattr(r, claim), claim

def test_the_report_reads():
    report = check_estimator(BROKEN['refuses'], kept(BROKEN['refuses']), raises=False)
    lines = repr(report).splitlines()
    assert lines[0] == f'takes_all: {report.tried-len(report.broken)} of {report.tried} laws hold'
    assert 'refuses: tensor([0, 1, 2]) is taken' in lines[1] and lines[-1].strip().startswith('claims exact_slope')

def test_compiled_too():
    assert check_estimator(R.round_ste, row(R.round_ste), compile=True).tried == check_estimator(R.round_ste).tried + 1
    def breaks(x): return R.round_ste(x) + (torch.compiler.is_compiling())*x
    r = replace(row(R.round_ste), f=breaks, choices=(), grid=False)
    report = check_estimator(breaks, r, compile=True, raises=False)
    assert any(name == 'compiles' and 'the compiled value' in said for name,_,said in report.broken)

def test_wrong_arguments():
    with pytest.raises(TypeError, match='^check_estimator: f must be callable, got int'): check_estimator(3)
    with pytest.raises(TypeError, match='^check_estimator: row must be a Row, got dict'):
        check_estimator(R.round_ste, {})
    with pytest.raises(ValueError, match='^check_estimator: stochastic_round is random'):
        check_estimator(R.stochastic_round, row(R.stochastic_round))
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
    assert Report(row(R.round_ste), (), 3).ok and not Report(row(R.round_ste), (('is_small', None, 'no'),), 3).ok
