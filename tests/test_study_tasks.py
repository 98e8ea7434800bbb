"""Three studies in miniature: rounding the weights of a layer, weights in bfloat16, and a mark through a JPEG. Their
oracles against what they bound, and their baselines against what they are said to be."""
import math
import pytest
import torch
from shok_nb import gptq, round_ste, sga_round, soft_round, stochastic_round
from shok_nb.catalog import row
from shok_nb.studies import updates as low
from shok_nb.studies import watermark as marks
from shok_nb.studies import weights as layer
from shok_nb.studies.harness import run_study, scores


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

def test_a_beam_of_one_is_gptq_and_a_wider_one_is_better(drawn):
    one = layer._each(drawn, gptq)
    assert torch.equal(layer._beam(drawn, 1), one)
    errors = [drawn.errors(layer._beam(drawn, k)).mean() for k in (1, 4, 16)]
    least = drawn.errors(layer._optimum(drawn)).mean()
    assert errors[0] > errors[1] > errors[2] >= least*(1-1e-9)

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
def test_ulp_is_the_distance_of_neighbours():
    x = torch.tensor([1., 1.5, 1.999, 2., 3., -5., .1, 1e-20, 1e20])
    b = x.bfloat16()
    up = (b.abs().view(torch.int16)+1).view(torch.bfloat16).float()
    assert torch.equal(low._ulp(b.float()), up-b.abs().float())

def test_updates_are_stored_in_bfloat16():
    g = torch.Generator().manual_seed(0)                                        # any seed: it holds for every number
    w,change = torch.randn(1000, generator=g).bfloat16().float(),.01*torch.randn(1000, generator=g)
    for f in (round_ste, stochastic_round, lambda x: soft_round(x, 5.), sga_round):
        new,_ = low._through(lambda x, t, f=f: f(x))(w, change, 0., None)
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
    return marks._scenes(range(2))

def exactly(scenes, mark):
    "The correlations behind a codec that does nothing but round coefficients."
    K,table = marks._cosine_waves(mark),scenes.tables[:, 0].flatten(1)[:, None]
    def coefficients(x): return marks._blocks(x).flatten(1, 3)@K.mT
    seen = (coefficients(scenes.images+mark-128)/table).round()*table
    return (seen*coefficients(scenes.pattern)).sum(-1)/64*scenes.signs.flatten(1)

def energies(mark): return marks._blocks(mark).flatten(1, 3).square().sum(-1)

def test_no_mark_is_cheaper_than_the_bound(scenes):
    "Random marks, and the pattern itself, at all strengths: whoever makes a bit right has paid for it."
    bound,g = marks._least_energy(scenes),torch.Generator().manual_seed(0)      # any seed: it is a law
    right = 0
    for strength in (1., 3., 10., 30., 100.):
        for mark in (torch.randn(scenes.images.shape, generator=g), marks._spread(scenes)/5):
            good = exactly(scenes, strength*mark) > 1e-3
            right += good.sum()
            assert (energies(strength*mark)[good] >= bound[good]*(1-1e-4)-1e-3).all()
    assert right > 100 and (bound > 0).any() and (bound == 0).any()

def test_the_written_mark_is_nearly_as_cheap(scenes):
    "Every bit that fits is right in the exact codec, and costs little more than the bound."
    mark = marks._written(scenes, .01)
    spent = energies(mark)
    paid = spent > 0
    assert (exactly(scenes, mark)[paid] > 0).double().mean() > .98
    bound = marks._least_energy(scenes)
    assert spent[paid].sum() < 1.5*bound[paid].sum()
    assert (spent.sum(1) <= marks._ENERGY*(1+1e-4)).all()

def test_a_move_costs_what_it_takes_to_the_tie(scenes):
    "A thousandth of a step less than the energy of a move leaves the coefficient, a thousandth more moves it."
    moves,K,table = marks._moves(scenes),marks._cosine_waves(scenes.images),scenes.tables[:, 0].flatten(1)[:, None]
    c = marks._blocks(scenes.images-128).flatten(1, 3)@K.mT/table
    for count in (1, 2):
        steps = moves.energy[..., :count].sum(-1).sqrt()/table
        short,far = ((c+moves.towards*(steps+e)).round() for e in (-1e-3, 1e-3))
        assert torch.equal(short, c.round()+moves.towards*(count-1))
        assert torch.equal(far, c.round()+moves.towards*count)

def test_all_marks_are_equally_loud(scenes):
    for mark in (marks._spread(scenes), marks._written(scenes), marks._within(50*torch.ones_like(scenes.images))):
        psnr = 20*math.log10(255) - 10*mark.square().mean((1, 2, 3)).log10()
        assert (psnr > marks._PSNR-1e-3).all()
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
