"""Three studies in miniature: a scalar code, training for few bits, binary networks. Their oracles against others,
every way of every row, and the committed records."""
import math
import pytest
import torch
from shok_nb import fake_quantize
from shok_nb.catalog import catalog
from shok_nb.studies import aware as few_bits
from shok_nb.studies import binary as signs
from shok_nb.studies import source_coding as coding
from shok_nb.studies.aware import aware
from shok_nb.studies.binary import binary
from shok_nb.studies.harness import interval, read_results, scores
from shok_nb.studies.source_coding import ideal_code, source_coding

STUDIES = source_coding,aware,binary
named = pytest.mark.parametrize('study', STUDIES, ids=lambda s: s.name)

def ways_of(study, row):
    try: return study.ways(row)
    except ValueError as e: return str(e)

# --- what all three have
@named
def test_every_way_of_every_row_trains(study):
    "Two iterations of each: a loss for each seed, no better than the optimum where there is one."
    seeds,took_part = range(2),0
    _,one = study.ends(seeds)
    for row in catalog:
        found = ways_of(study, row)
        if isinstance(found, str):
            assert 'two values' in found
            continue
        took_part += 1
        assert len({w.name for w in found}) == len(found)
        for way in found:
            with torch.random.fork_rng(devices=[]):
                losses = study.run(way.rounding(way.values[0]), study.rates[1], seeds, 2)
            assert losses.shape == (2,) and losses.isfinite().all(), (row.name, way.name)
            if study is source_coding: assert (losses > one-1e-9).all(), (row.name, way.name)
    assert took_part >= 27

@named
def test_a_record_is_what_its_seeds_give(study):
    "Run again with its knob and rate. Another processor rounds differently, hence half an interval and more."
    name = 'clipped_sign' if study is binary else 'round_ste'
    record, = (r for r in read_results(study.name) if (r['estimator'], r['way']) == (name, 'as it is'))
    row, = (r for r in catalog if r.name == name)
    way = study.ways(row)[0]
    losses = study.run(way.rounding(record['value']), record['rate'], study.reported, study.steps)
    centre,low,high = interval(scores(study, losses, study.reported))
    assert centre == pytest.approx(record['score'], abs=.02 + (record['high']-record['low'])/2)

@named
def test_seeds_are_runs_of_their_own(study):
    "A seed in a batch of three ends as it does alone, up to the order of sums."
    row, = (r for r in catalog if r.name == 'stable_round')
    f = study.ways(row)[0].rounding(.2)
    three = study.run(f, study.rates[0], (3, 8, 4), 4)
    alone = torch.cat([study.run(f, study.rates[0], (s,), 4) for s in (3, 8, 4)])
    torch.testing.assert_close(three, alone, atol=.01, rtol=0)
    assert not torch.equal(three[0], three[1])
    one = study.ends((8,))[0]
    torch.testing.assert_close(study.ends((3, 8))[0][1:], one, atol=.01, rtol=0)

# --- a scalar code
@pytest.mark.parametrize('source, price', [('gaussian', .62), ('laplacian', .62), ('laplacian', .3)])
def test_ideal_code_against_another_optimizer(source, price):
    "Edges and levels of seven cells by Nelder and Mead, which needs no formula of the descent."
    scipy = pytest.importorskip('scipy.optimize')
    def cost(knobs):
        levels = torch.tensor(knobs[:3], dtype=torch.float64).sort()[0]
        edges = torch.tensor(knobs[3:], dtype=torch.float64).sort()[0]
        both = torch.cat([-levels.flip(0), torch.zeros(1).double(), levels])
        code = coding._code(source, torch.cat([-edges.flip(0), edges]), both)
        return code.rate + code.distortion/price
    start = [1.7, 3.4, 5.1, .9, 2.5, 4.2]
    found = scipy.minimize(cost, start, method='Nelder-Mead', options=dict(maxiter=3000, xatol=1e-5, fatol=1e-9))
    best = ideal_code(source, price)
    ours = best.rate + best.distortion/price
    assert ours <= found.fun+1e-7 and found.fun < ours+2e-3           # what lies beyond seven cells is worth so much

def test_a_quarter_of_a_bit():
    "At high rates: half the logarithm of 2πe/12, for any source."
    gap = .5*math.log2(2*math.pi*math.e/12)
    assert gap == pytest.approx(.2546, abs=1e-4)
    lower = dict(gaussian=0., laplacian=.5*math.log2(math.e/math.pi))
    for source,price in (('gaussian', .007), ('laplacian', .001)):
        code = ideal_code(source, price)
        assert code.rate - lower[source] + .5*math.log2(code.distortion) == pytest.approx(gap, abs=5e-4)

def test_what_is_sent_is_what_is_sent():
    """Bits and error by sums over cells, against half a million numbers drawn: a mean is off by about 1/700, so .01
    is far away for any seed."""
    at = coding._train(lambda x, t: x + (x.round()-x).detach(), .01, (2,), 100)
    bits,error = coding._sent(at)
    g = torch.Generator().manual_seed(0)
    u = torch.rand(1, 500_000, generator=g)
    for i in (0, 3, 6, 9):
        one = coding._Learned(*(t[i:i+1] for t in at))
        x = coding._numbers(one, u)
        codes = coding._encode(one, x).round()
        share = codes.flatten().unique(return_counts=True)[1]/codes.numel()
        assert bits[0, i].item() == pytest.approx(-(share*share.log2()).sum().item(), abs=.01)
        d = (x-coding._decode(one, codes)).square().mean().item()
        assert error[0, i].item() == pytest.approx(d, rel=.02)

# --- few bits
def test_a_student_can_be_its_teacher():
    "With the codes of the teacher there is no error, and with one code changed there is."
    g = torch.Generator().manual_seed(3)
    torch.randint(899, (few_bits._LEARN,), generator=g)                # as for the digits of this seed
    for network,bits in enumerate((2, 3, 4), 3):
        teacher = few_bits._teacher(bits, g)
        z = teacher.logits()
        step = 2/z.std()/teacher.step
        inner,outer = torch.zeros(6, 16, 16),torch.zeros(6, 10, 16)
        inner[:, :8, :8],outer[:, :, :8] = teacher.inner,teacher.outer*step
        w = few_bits._Weights(inner, torch.zeros(6, 1, 16), outer, (-2*z.mean(0)/z.std()).expand(6, 1, 10))
        s = few_bits._start((3,))[1]._replace(inner=torch.zeros(6, 16, 1),
            between=teacher.step.log().view(1, 1, 1), outer=step.log().expand(6, 10, 1))
        assert few_bits._errors(w, s, 'learned', (3,))[0, network] == 0
        outer[:, 0, 0] += step*(1 if teacher.outer[0, 0] < 0 else -1)
        assert few_bits._errors(w, s, 'learned', (3,))[0, network] > 0

def test_baked_weights_are_plain_codes():
    w,s = few_bits._start((1,))
    for i,(_,bits) in enumerate(few_bits._NETWORKS):
        made = few_bits._of_weights(w.inner, s.inner, s, torch.round, 'learned')[i]
        torch.testing.assert_close(made, fake_quantize(w.inner[i], s.inner[i].exp(), bits=bits))
        codes = made/s.inner[i].exp()
        assert (codes-codes.round()).abs().max() < 1e-4 and len(codes.round().unique()) <= 2**bits
        h = few_bits._of_activations(torch.linspace(0, 50, 9999).expand(6, 1, -1), s, torch.round, 'learned')[i]
        assert len(h.unique()) == 2**bits

def test_floats_are_better_than_nearest_codes():
    nearest,best = aware.ends(range(3))
    assert (nearest > best+.05).all() and (best > 0).all()             # the digits are not without an error

# --- binary networks
def test_parity_has_a_binary_solution():
    "Six thresholds of the count of ones, each four times; without thresholds it is gone."
    thresholds,sides = torch.arange(-5., 6., 2).repeat(4),torch.tensor([1., -1.]).repeat(12)
    outer = torch.stack([-sides, sides, *8*[sides]])[None]
    out = torch.tensor([4., -4., *8*[-99.]]).view(1, 1, 10)
    w = signs._Weights(torch.ones(1, 24, 16), -thresholds.view(1, 1, 24), outer, out, torch.zeros(1, 1, 1))
    tasks = signs._tasks()
    def wrong(w):
        logits = signs._forward(w, tasks.x[:1], signs._ones, signs._ones)
        return (logits.argmax(-1) != tasks.labels[:1]).float().mean().item()
    assert wrong(w) == 0 and wrong(w._replace(hidden=w.hidden*0)) > .4
    assert wrong(w._replace(out=out + 999*(torch.arange(10) == 3))) == 1            # a class that is never right
    assert tasks.x[0].unique(dim=0).shape == (64, 16) and tasks.labels[0].float().mean() == .5

def test_binary_weights_are_kept_within_one():
    w = signs._train(lambda x, t: x + (signs._ones(x)-x).detach(), .3, (0, 1), 5)
    assert w.inner.abs().max() <= 1 and w.outer.abs().max() <= 1 and w.hidden.abs().max() > 1

def test_a_rounding_as_a_sign():
    row, = (r for r in catalog if r.name == 'soft_round')
    hard = next(w for w in binary.ways(row) if w.name == 'hard').rounding(5.)
    x = torch.tensor([-3., -.4, .4, 3.], requires_grad=True)
    y = hard(x, 0.)
    slope, = torch.autograd.grad(y.sum(), x)
    assert y.tolist() == [-1, -1, 1, 1] and slope[[0, 3]].tolist() == [0, 0] and (slope[1:3] > 0).all()
