"""The studies: their harness, each study in miniature, its oracle against brute force, and the file of results."""
import json
import pytest
import torch
from shok_nb import round_ste, soft_round, stochastic_round
from shok_nb.catalog import catalog, row
from shok_nb.studies import harness
from shok_nb.studies.harness import Study, Way, interval, read_heads, read_results, run_study, scores, search, ways

def the_same(records): return [{k: v for k,v in r.items() if k != 'seconds'} for r in records]

# --- the harness
def descent(f, rate, seeds, steps):
    "Adam on (f(x) - target)², one number for each seed: the loss of where it ends, rounded."
    target = torch.tensor([(37*s % 101)/101 for s in seeds], dtype=torch.float64)
    x = (target + .3).requires_grad_()
    adam = torch.optim.Adam([x], rate)
    for i in range(steps):
        adam.zero_grad()
        (f(x, i/steps) - target).square().sum().backward()
        adam.step()
    return (x.detach().round() - target).square()

def descent_ends(seeds):
    target = torch.tensor([(37*s % 101)/101 for s in seeds], dtype=torch.float64)
    return ((target+.3).round()-target).square(),(target.round()-target).square()

LINE = Study('line', 'To the nearest integer', descent, descent_ends, ways, {}, (.01, .03, .1), 40,
    range(200, 220), range(20), 'mean')

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_every_way_of_every_row_runs(r):
    x,found = torch.linspace(-2.4, 2.4, 30),ways(r)
    for way in found:
        for value in way.values:
            for t in (0., .5, .999):
                y = way.rounding(value)(x.clone().requires_grad_(), t)
                assert y.shape == x.shape and y.isfinite().all(), (way.name, value, t)
    assert ('hard' in [w.name for w in found]) == r.smooth and len({w.name for w in found}) == len(found)
    assert all(1 <= len(w.values) <= 5 and len({*w.values}) == len(w.values) for w in found)

def test_annealed_ends_where_it_says():
    "From the soft end of the slider to the value, for a knob that grows and for one that falls."
    for name,values in dict(soft_round=(30., 12.2, 5.), sigmoid_sum_round=(.01, .0316, .1)).items():
        r, = (r for r in catalog if r.name == name)
        way, = (w for w in ways(r) if w.name == 'annealed')
        x = torch.linspace(-1.2, 1.2, 9)
        assert way.values == values
        k,value = r.knobs[0],values[1]
        start = k.lo if k.hard > k.default else k.hi
        assert torch.equal(way.rounding(value)(x, 0.), r.f(x, **{k.name: start}))
        torch.testing.assert_close(way.rounding(value)(x, 1.), r.f(x, **{k.name: value}))

def test_scores():
    zero,one = descent_ends(LINE.reported)
    span = zero > one
    assert span.sum() > 5 and not span.all()
    for losses,score in ((zero, 0.), (one, 1.), ((zero+one)/2, .5)):
        torch.testing.assert_close(scores(LINE, losses, LINE.reported)[span], torch.full_like(one[span], score))
    assert scores(LINE, one, LINE.reported)[~span].isnan().all()
    assert (scores(LINE, one*torch.nan, LINE.reported)[span] == -torch.inf).all()

def test_interval_covers():
    """In 200 draws of 30 normal scores the mean is inside 95 % of the intervals, or nearly: a bootstrap of 30 is some
    points short. 95 % of 200 is 190 with a standard deviation of 3: seed 0, and any other that stays above 176."""
    g = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        centre,low,high = interval(.3*torch.randn(30, generator=g, dtype=torch.float64) + .2, 'mean')
        assert low <= centre <= high
        hits += low <= .2 <= high
    assert 176 <= hits <= 199
    assert interval(torch.tensor([.5, float('nan'), -9.]), 'median') == (-.25, -1., .5)

def test_search_finds_and_counts():
    "The best rate inside, at an end and beyond; equal trials with a knob and without."
    def at(best, knob):
        def run(f, rate, seeds, steps):
            off = abs(torch.tensor(rate/best).log()) + f(torch.zeros(()), 0.)
            return off.expand(len(seeds)).double()
        def ends(seeds): return torch.full((len(seeds),), 9.).double(),torch.zeros(len(seeds)).double()
        return Study('s', 's', run, ends, ways, {}, (.01, .03, .1, .3), 3, range(9), range(10, 20))
    flat = Way('as it is', lambda v: lambda x, t: x)
    knobbed = Way('as it is', lambda v: lambda x, t: x + abs(v-2.), (1., 2., 3.), 'k')
    for best,found in ((.017, .017), (.001, .0011), (3., 2.7)):
        value,rate,trials,_ = search(at(best, None), flat)
        assert (value, trials) == (None, 8) and rate == pytest.approx(found, rel=.05), best
    value,rate,trials,_ = search(at(.05, None), knobbed)
    assert (value, trials) == (2., 8) and rate == pytest.approx(.055, rel=.05)

def test_a_seed_reruns_to_the_same_score():
    for f in (soft_round, stochastic_round):
        state = torch.get_rng_state()
        one,two = (the_same(run_study(LINE, f)) for _ in range(2))
        assert one == two and torch.equal(state, torch.get_rng_state())

def test_a_function_of_your_own():
    def my_round(x, hard=False): return soft_round(x, 5., hard=hard)
    mine,ours = run_study(LINE, my_round),{r['way']: r for r in run_study(LINE, soft_round)}
    assert [(r['estimator'], r['way']) for r in mine] == [('my_round', 'as it is'), ('my_round', 'hard')]
    assert all(r['trials'] == ours[r['way']]['trials'] == len(LINE.rates)+4 for r in mine)

def test_resumes(tmp_path):
    "What is there is not run again, unless the study has another version; other studies stay."
    file,lines = tmp_path/'results.json',[]
    first = run_study(LINE, [round_ste], results=file, progress=lines.append)
    both = run_study(LINE, [round_ste, soft_round], results=file, progress=lines.append)
    assert both[0] == first[0] and len(lines) == len(both) == 5
    assert [r['way'] for r in read_results('line', file)] == [
        'as it is', 'annealed', 'annealed, hard', 'as it is', 'hard']
    other = LINE._replace(name='other')
    run_study(other, [round_ste], results=str(file))
    run_study(LINE._replace(version=2), [round_ste], results=file, progress=lines.append)
    assert [r['version'] for r in read_results('line', file)] == [2] and len(lines) == 6
    assert [r['study'] for r in read_results(results=file)] == ['line', 'other']
    assert read_heads(file)['line']['version'] == 2 and [p.name for p in tmp_path.iterdir()] == ['results.json']
    run_study(LINE, quick=True, results=file)
    assert len(read_results(results=file)) == 2

def test_one_record_is_one_line(tmp_path):
    file = tmp_path/'results.json'
    run_study(LINE, [soft_round, round_ste], results=file)
    lines = [line for line in file.read_text().splitlines() if '"estimator"' in line]
    assert len(lines) == len(read_results('line', file)) == 5
    assert [json.loads(line.rstrip(','))['estimator'] for line in lines] == ['round_ste'] + ['soft_round']*4

def test_who_cannot_take_part_says_why():
    def some(row): raise ValueError('it is none')
    record, = run_study(LINE._replace(ways=some), row(round_ste))
    assert record == dict(study='line', estimator='round_ste', way='as it is', failed='it is none', version=1)

def test_an_error_of_a_study_is_seen():
    def run(*args): raise ValueError('broken')
    with pytest.raises(ValueError, match='broken'): run_study(LINE._replace(run=run), round_ste)

def test_baselines_run_with_all_and_alone():
    task = LINE._replace(baselines=dict(start=lambda seeds, steps: descent_ends(seeds)[0]))
    record, = run_study(task, [])
    assert (record['estimator'], record['way'], record['score'], record['trials']) == ('', 'start', 0., 0)
    assert not any(r['way'] == 'start' for r in run_study(task, round_ste))

def test_the_file_of_the_package_is_read():
    assert harness._RESULTS.exists() and read_heads()
