"""The tasks of the studies in miniature: every way of every row, the committed records, and what each task rests on."""
import math
import pytest
import torch
from shok_nb import clipped_sign, round_ste, sga_round, soft_round, stable_round, stochastic_round
from shok_nb.catalog import catalog, row
from shok_nb.studies import binary as signs
from shok_nb.studies import source_coding as coding
from shok_nb.studies import updates as low
from shok_nb.studies import watermark as marks
from shok_nb.studies import weights as layer
from shok_nb.studies.aware import aware
from shok_nb.studies.binary import binary
from shok_nb.studies.harness import interval, read_results, run_study, scores
from shok_nb.studies.lattice import lattice
from shok_nb.studies.source_coding import ideal_code, source_coding

STUDIES = source_coding,aware,binary
def named(*studies): return pytest.mark.parametrize('study', studies, ids=lambda s: s.name)

# --- what they have in common
@pytest.mark.slow
@named(*STUDIES, lattice)
def test_every_way_of_every_row_trains(study):
    "Two iterations of each: a loss for each seed, no better than the optimum where there is one."
    seeds,took_part = range(6 if study is lattice else 2),0             # there are six kinds of lattices
    _,one = study.ends(seeds)
    for r in catalog:
        try: found = study.ways(r)
        except ValueError as e:
            assert 'two values' in str(e)
            continue
        took_part += 1
        assert len({w.name for w in found}) == len(found)
        for way in found:
            with torch.random.fork_rng(devices=[]):
                losses = study.run(way.rounding(way.values[0]), study.rates[1], seeds, 2)
            assert losses.shape == (len(seeds),) and losses.isfinite().all(), (r.name, way.name)
            if study in (source_coding, lattice): assert (losses > one-1e-9).all(), (r.name, way.name)
    assert took_part >= 27

@pytest.mark.slow
@named(*STUDIES)
def test_a_record_is_what_its_seeds_give(study):
    "Run again with its knob and rate. Another processor rounds differently, hence half an interval and more."
    f = clipped_sign if study is binary else round_ste
    record, = (r for r in read_results(study.name) if (r['estimator'], r['way']) == (f.__name__, 'as it is'))
    way = study.ways(row(f))[0]
    losses = study.run(way.rounding(record['value']), record['rate'], study.reported, study.steps)
    centre,low,high = interval(scores(study, losses, study.reported))
    assert centre == pytest.approx(record['score'], abs=.02 + (record['high']-record['low'])/2)

@pytest.mark.slow
@named(*STUDIES)
def test_seeds_are_runs_of_their_own(study):
    "A seed in a batch of three ends as it does alone, up to the order of sums."
    f = study.ways(row(stable_round))[0].rounding(.2)
    three = study.run(f, study.rates[0], (3, 8, 4), 4)
    alone = torch.cat([study.run(f, study.rates[0], (s,), 4) for s in (3, 8, 4)])
    torch.testing.assert_close(three, alone, atol=.01, rtol=0)
    assert not torch.equal(three[0], three[1])
    one = study.ends((8,))[0]
    torch.testing.assert_close(study.ends((3, 8))[0][1:], one, atol=.01, rtol=0)

# --- a scalar code
@pytest.mark.parametrize('source, price', [('gaussian', .62), ('laplacian', .62), ('laplacian', .3)])
@pytest.mark.slow
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

def test_what_is_sent_is_what_is_sent():
    """Bits and error by sums over cells, against half a million numbers drawn: a mean is off by about 1/700, so .01
    is far away for any seed."""
    at = coding.train_codes(lambda x, t: x + (x.round()-x).detach(), .01, (2,), 100)
    bits,error = coding.as_sent(at)
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

# --- binary networks
@pytest.mark.slow
def test_binary_weights_are_kept_within_one():
    w = signs.train_signs(lambda x, t: x + (signs.plus_minus_ones(x)-x).detach(), .3, (0, 1), 5)
    assert w.inner.abs().max() <= 1 and w.outer.abs().max() <= 1 and w.hidden.abs().max() > 1

def test_a_rounding_as_a_sign():
    hard = next(w for w in binary.ways(row(soft_round)) if w.name == 'hard').rounding(5.)
    x = torch.tensor([-3., -.4, .4, 3.], requires_grad=True)
    y = hard(x, 0.)
    slope, = torch.autograd.grad(y.sum(), x)
    assert y.tolist() == [-1, -1, 1, 1] and slope[[0, 3]].tolist() == [0, 0] and (slope[1:3] > 0).all()

# --- weights
@pytest.fixture(scope='module')
def drawn():
    "Two layers that are drawn, without the networks, which take longer."
    w,gram = (torch.stack(t) for t in zip(*map(layer._drawn, range(2))))
    return layer._on_grids(w, gram)

def test_error_is_that_of_the_output(drawn):
    g = torch.Generator().manual_seed(0)                                        # any seed: an identity
    x = torch.randn(2, 50, 16, generator=g, dtype=torch.float64)
    on = drawn._replace(gram=x.mT@x)
    codes = on.near(on.target)
    want = ((codes-on.target)@x.mT).square().sum(-1)
    torch.testing.assert_close(on.errors(codes), want)
    assert (codes >= on.low).all() and (codes <= on.high).all()

def test_up_or_down_stays_there():
    way, = (w for w in layer.weights.ways(row(soft_round)) if w.name == 'up or down')
    f,x = way.rounding(5.),torch.tensor([.3, 1.7])
    f(x, 0.)
    moved = f(torch.tensor([-3., 9.]), .5)
    assert torch.equal(moved, torch.tensor([0., 2.]))
    assert not any(w.name == 'up or down' for w in layer.weights.ways(row(round_ste)))

def test_learning_keeps_the_best(drawn):
    "No worse than the first integers that were looked at, and no better than the best there are; nan is left out."
    near,least = drawn.errors(drawn.near(drawn.target)),drawn.errors(layer._optimum(drawn))
    for f in (round_ste, lambda x: soft_round(x, 5., hard=True)):
        errors = drawn.errors(layer._learned(drawn, layer._plain(lambda x, t, f=f: f(x)), .03, 40))
        assert (errors >= least*(1-1e-9)).all() and errors.mean() < .8*near.mean()
    broken = layer._learned(drawn, layer._plain(lambda x, t: x*math.nan), .03, 3)
    assert broken.isfinite().all()

@pytest.mark.slow
def test_weights_in_miniature():
    few = layer.weights._replace(tuning=range(100, 102), reported=range(3))
    records = run_study(few, [round_ste, soft_round], quick=True) + run_study(few, [], quick=True)
    by = {(r['estimator'] or r['way']): r['score'] for r in records}
    assert all(-1e-9 <= r['score'] <= 1+1e-9 for r in records)
    assert by['GPTQ'] < by['beam of 16'] and by['draws, the best kept'] > .5

# --- updates
def test_updates_are_stored_in_bfloat16():
    g = torch.Generator().manual_seed(0)                                        # any seed: it holds for every number
    w,change = torch.randn(1000, generator=g).bfloat16().float(),.01*torch.randn(1000, generator=g)
    for f in (round_ste, stochastic_round, lambda x: soft_round(x, 5.), sga_round):
        new,_ = low.through(lambda x, t, f=f: f(x))(w, change, 0., None)
        assert torch.equal(new, new.bfloat16().float())
        assert ((new-w-change).abs() <= low._ulp(w+change)*1.01).all()
    nearest,_ = low._METHODS['nearest'].update(w, change, 0., None)
    assert torch.equal(nearest, (w+change).bfloat16().float())

def test_kahan_keeps_what_nearest_loses():
    w,lost,near = torch.ones(1),torch.zeros(1),torch.ones(1)
    for _ in range(1000):
        w,lost = low._compensated(w, torch.full((1,), 1e-4), 0., lost)
        near,_ = low._METHODS['nearest'].update(near, torch.full((1,), 1e-4), 0., None)
    assert near == 1 and abs(w-1.1) < .01

@pytest.mark.slow
def test_updates_in_miniature():
    "The scale is 1 for float32 itself; a few iterations show that draws follow it and nearest does not."
    exact = low._run(low._METHODS['float32'], .01, range(4), 300)
    assert (exact.abs() < 1e-6).all()
    torch.manual_seed(0)                                                        # any seed: a gap of 20 in the medians
    both = (lambda x, t: round_ste(x)),(lambda x, t: stochastic_round(x))
    near,drawn = (low._run(f, .01, range(4), 300) for f in both)
    assert (near > 0).all() and drawn.median() < .5*near.median()

# --- watermark
@pytest.fixture(scope='module')
def scenes():
    pytest.importorskip('sklearn')
    pytest.importorskip('matplotlib')
    return marks.draw_scenes(range(2))

@pytest.mark.slow
def test_a_move_costs_what_it_takes_to_the_tie(scenes):
    "A thousandth of a step less than the energy of a move leaves the coefficient, a thousandth more moves it."
    moves,K,table = marks._moves(scenes),marks.cosine_waves(scenes.images),scenes.tables[:, 0].flatten(1)[:, None]
    c = marks.into_blocks(scenes.images-128).flatten(1, 3)@K.mT/table
    for count in (1, 2):
        steps = moves.energy[..., :count].sum(-1).sqrt()/table
        short,far = ((c+moves.towards*(steps+e)).round() for e in (-1e-3, 1e-3))
        assert torch.equal(short, c.round()+moves.towards*(count-1))
        assert torch.equal(far, c.round()+moves.towards*count)

def test_a_quiet_mark_stays_as_it_is():
    quiet = torch.ones(1, 1, 48, 48)
    torch.testing.assert_close(marks._within(quiet), quiet)

def test_watermark_in_miniature(scenes):
    zero,one = marks.watermark.ends(range(2))
    assert (zero > one).all() and (one >= 0).all()
    mark = marks._learned(scenes, lambda x, t: soft_round(x, 5.), 3., 20)
    better,ste = (marks._wrong(scenes, m) for m in
        (mark, marks._learned(scenes, lambda x, t: round_ste(x), 1., 20)))
    assert better.mean() < ste.mean()-.05
    assert scores(marks.watermark, better, range(2)).mean() > .1
