"""The studies: their harness, each study in miniature, its oracle against brute force, and the file of results."""
import json
import pytest
import torch
from shok_nb import reinmax_round, round_ste, soft_round, stochastic_round
from shok_nb.catalog import catalog, row
from shok_nb.studies import gradient_quality as gradients
from shok_nb.studies import harness, lattice, scores
from shok_nb.studies.harness import Study, Way, interval, read_heads, read_results, run_study, search, ways
from shok_nb.studies.jpeg import mark_pattern


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

def test_default_device_elsewhere():
    "What draws from a generator of the CPU does so whatever `torch.set_default_device` says."
    def made(): return interval(values), mark_pattern((1, 1, 8, 8), torch.Generator().manual_seed(0))
    values = torch.linspace(0, 1, 11)
    want = made()
    with torch.device('meta'): got = made()
    assert got[0] == want[0] and torch.equal(got[1], want[1])

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

def test_a_study_leaves_the_draws_of_others_alone():
    state = torch.get_rng_state()
    run_study(LINE, stochastic_round)
    assert torch.equal(state, torch.get_rng_state())

def test_what_estimators_draw_comes_again():
    def run(f, rate, seeds, steps): return f(torch.full((len(seeds),), .4), 0.)
    def found(seed):
        torch.manual_seed(seed)
        return run_study(LINE._replace(run=run), stochastic_round)[0]['score']
    assert found(1) == found(2)

def test_ends_that_draw_come_again():
    def found(seed):
        torch.manual_seed(seed)
        task = LINE._replace(ends=lambda seeds: (1+torch.rand(len(seeds)), torch.zeros(len(seeds))))
        return harness.scores(task, torch.ones(9), range(9))
    assert torch.equal(found(1), found(2))

def test_a_place_for_results_is_looked_at_first(tmp_path):
    def run(*args): raise AssertionError('it has begun')
    with pytest.raises(FileNotFoundError, match='^run_study: results is in .*no, which is no folder'):
        run_study(LINE._replace(run=run), round_ste, results=tmp_path/'no'/'results.json')
    with pytest.raises(FileNotFoundError, match='^write_results: results is in'):
        harness.write_results(LINE, [], tmp_path/'no'/'results.json')

def test_a_function_without_a_signature():
    record, = run_study(LINE, torch.round, quick=True)
    assert (record['estimator'], record['way']) == ('round', 'as it is')

@pytest.mark.slow
def test_a_function_of_your_own():
    def my_round(x, hard=False): return soft_round(x, 5., hard=hard)
    mine,ours = run_study(LINE, my_round),{r['way']: r for r in run_study(LINE, soft_round)}
    assert [(r['estimator'], r['way']) for r in mine] == [('my_round', 'as it is'), ('my_round', 'hard')]
    assert all(r['trials'] == ours[r['way']]['trials'] == len(LINE.rates)+4 for r in mine)

@pytest.mark.slow
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

# --- the file of the package
ALL = scores.studies()
def names(study, row):
    try: return [w.name for w in study.ways(row)]
    except ValueError: return ['as it is']

@pytest.mark.parametrize('study', ALL, ids=lambda s: s.name)
def test_the_file_is_whole(study):
    "Each row of the catalog in each of its ways, each baseline, of the present version and nothing else."
    head,records = read_heads()[study.name],read_results(study.name)
    wanted = [(r.name, way) for r in catalog for way in names(study, r)] + [('', b) for b in study.baselines]
    assert sorted(wanted) == [(r['estimator'], r['way']) for r in records], 'run make study'
    assert {r['version'] for r in records} == {study.version} == {head['version']}, 'run make study'
    assert head['steps'] == study.steps and head['rates'] == [*study.rates] and head['made']
    for k in ('tuning', 'reported'): assert head[k] == [getattr(study, k)[0], getattr(study, k)[-1]]
    fields = 'study estimator way knob value rate score low high solved seconds trials version'.split()
    for r in records:
        if 'failed' in r: continue
        assert [*r] == fields and -1 <= r['low'] <= r['score'] <= r['high'] and 0 <= r['solved'] <= 1, r
    trials = {r['trials'] for r in records if 'failed' not in r and r['estimator']}
    assert len(study.rates) == 1 or max(trials)-min(trials) <= 1, 'equal budgets'

@pytest.mark.parametrize('study', ALL, ids=lambda s: s.name)
def test_the_search_sees_no_reported_seed(study):
    assert not {*study.tuning} & {*study.reported} and len(study.reported) >= 10
    assert [*study.rates] == sorted(study.rates) and study.centre in ('mean', 'median')

def test_results_file_is_sorted_with_a_record_on_a_line():
    text = harness._RESULTS.read_text('utf-8')
    found = [json.loads(line.rstrip(',')) for line in text.splitlines() if line.startswith('{"study"')]
    assert found == read_results() and text == harness._text(json.loads(text)['studies'])
    place = [(r['study'], r['estimator'], r['way']) for r in found]
    assert place == sorted(place) and len({*place}) == len(place)

def rerun(study, estimator, way):
    """A committed record is what comes of it again. Another processor adds in another order, which may move a search: a
    hundredth where torch and its kind of kernels are the same, and within each other's intervals anywhere."""
    old, = (r for r in read_results(study.name) if (r['estimator'], r['way']) == (estimator, way))
    rows = [r for r in catalog if r.name == estimator]
    new, = (r for r in run_study(study._replace(ways=lambda row: [w for w in study.ways(row) if w.name == way]), rows))
    if harness._environment() in read_heads()[study.name]['made']: assert abs(new['score']-old['score']) < .01
    assert new['low'] <= old['score'] <= new['high'] and old['low'] <= new['score'] <= old['high']

def test_a_committed_score_comes_again():
    rerun(gradients.gradient_quality, 'round_ste', 'as it is')

@pytest.mark.slow
def test_a_committed_score_of_the_lattice_comes_again(): rerun(lattice.lattice, 'round_ste', 'as it is')

def test_studies_are_chosen_by_name_or_place():
    "As `make study` takes them."
    from study import chosen_by
    def names(*words): return [s.name for s in chosen_by(words)]
    assert names() == [s.name for s in scores.studies()] and names('1', 'weights') == names('lattice', '3')
    with pytest.raises(ValueError, match="got '9'"): chosen_by(['9'])

def test_scores_in_a_picture():
    "From the best down, each at its score, a diamond where there is no estimator or where one is asked for."
    def record(name, way, score):
        return dict(study='s', estimator=name, way=way, score=score, low=score-.1, high=score+.2)
    records = [record('a', 'hard', .2), record('', 'plain', .9), record('b', 'as it is', .5)]
    ax = harness.plot_scores(records, diamonds=['b'])
    assert [t.get_text() for t in ax.get_yticklabels()] == ['plain', 'b', 'a, hard']
    points = [(*line.get_data(), line.get_marker()) for line in (c[0] for c in ax.containers)]
    assert [(x[0], y[0], m) for x,y,m in points] == [(.9, 0, 'D'), (.5, 1, 'D'), (.2, 2, 'o')]
    ends = [c[2][0].get_segments()[0][:, 0].tolist() for c in ax.containers]
    assert ends == [pytest.approx([s-.1, s+.2]) for s in (.9, .5, .2)]
    assert harness.plot_scores(records[:1], ax) is ax
    with pytest.raises(ValueError, match='records must not be empty'): harness.plot_scores([])
    with pytest.raises(TypeError, match='ax must be Axes of matplotlib'): harness.plot_scores(records, 3)

def test_the_best_way_of_each():
    records = [dict(study='s', estimator=e, way=w, **more) for e,w,more in (('a', 'hard', dict(score=.2)),
        ('a', 'soft', dict(score=.4)), ('', 'plain', dict(score=.9)), ('b', 'as it is', dict(failed='no')))]
    assert harness.best_records(records) == {('s', 'a'): records[1]}

# --- the lattice
def test_the_local_search_ends_where_no_move_gains():
    tasks = lattice.draw_tasks(range(6))
    z = lattice.descend(tasks, lattice.draw_starts(tasks, 3).round())
    cost = lattice._cost(tasks, z)
    for k in range(8):
        for by in (-1, 1):
            moved = z.clone()
            moved[..., k] += by
            assert (lattice._cost(tasks, moved) >= cost-1e-9).all()
    assert (cost <= lattice._cost(tasks, lattice.draw_starts(tasks, 3).round())+1e-9).all()

@pytest.mark.slow
def test_each_study_in_miniature():
    "The order that the pages tell holds with a tenth of the seeds and iterations."
    records = run_study(lattice.lattice, [round_ste], quick=True)
    assert [r['way'] for r in records] == ['as it is', 'as it is, then local search']
    assert .3 < records[0]['score'] <= records[1]['score'] < 1
    straight,reinmax = (run_study(gradients.gradient_quality, f, quick=True)[0] for f in (round_ste, reinmax_round))
    assert straight['score'] > reinmax['score'] > 0

# --- the gradient
def test_quality_of_what_is_known():
    "The exact gradient itself, its opposite, none, and noise of a known size around it."
    seeds = range(6)
    exact = gradients._exact(seeds)
    def measured(make, draws=2000):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(gradients, '_gradients', lambda f, p, draws: make(draws))
            return gradients.quality(round_ste, seeds, draws)
    right,against,none = (measured(lambda n, k=k: k*exact[None]) for k in (3., -1., 0.))
    assert torch.allclose(right.cosine, torch.ones(6).double(), atol=1e-6) and right.bias.abs().max() < 1e-6
    assert (against.cosine == 0).all() and (none.cosine == 0).all() and (none.bias == 1).all()
    g = torch.Generator().manual_seed(0)                  # 2000 draws: the shares are known to some hundredths
    size = exact.square().mean((1, 2), keepdim=True).sqrt()
    noisy = measured(lambda n: exact + size*torch.randn(n, *exact.shape, generator=g))
    assert (noisy.bias < .01).all() and (noisy.variance - .5).abs().max() < .02
    few = measured(lambda n: exact + size*torch.randn(n, *exact.shape, generator=g), 8)
    assert few.bias.mean() < .05                          # the mean of 8 draws is noisy: its noise is no bias, or .11

# --- which one
def made(study, estimator, score, half=.02, way='as it is'):
    return dict(study=study, estimator=estimator, way=way, knob=None, value=None, score=score, low=score-half,
        high=score+half)

def test_advice_is_within_the_interval_of_the_best():
    records = [made('a', 'round_ste', .895), made('a', 'soft_round', .9), made('a', 'cubic_round', .5),
        made('a', '', .95, way='a search'), made('a', 'sine_round', .99, way='as it is, then local search')]
    a, = scores.advice(records)
    assert (a.take['estimator'], a.best['estimator']) == ('round_ste', 'soft_round') == tuple(a.tied[::-1])
    assert a.baseline['way'] == 'a search' and '| a search: 0.95 (better) |' in scores.advice_table(records)
    a, = scores.advice([made('a', 'round_ste', .87), *records[1:3], made('a', '', .89, way='a search')])
    assert a.take['estimator'] == 'soft_round'
    assert '| a search: 0.89 (as good) |' in scores.advice_table(records[:3]+[a.baseline])
    assert scores.unneeded(records[:3]) == ['cubic_round']
    assert '| [`soft_round`](../estimators/20_soft.ipynb) |' in scores.advice_table([a.take])
    assert '| `mine` |' in scores.advice_table([made('a', 'mine', .9)])

def test_matrix_in_words_and_in_colour():
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb
    records = read_results()
    there = {r['estimator'] for r in records if 'score' in r} - {''}
    table = scores.results_table()
    for n in there: assert table.count(f'| `{n}` |') == 1
    ax = scores.heat_map()
    assert [t.get_text() for t in ax.get_yticklabels()] == [l.split('`')[1] for l in table.splitlines()[2:]]
    assert len(ax.get_xticklabels()) == len({r['study'] for r in records})
    image, = ax.get_images()
    def light(rgb): return sum(k*(c/12.92 if c <= .04045 else ((c+.055)/1.055)**2.4) for k,c in
        zip((.2126, .7152, .0722), rgb))
    for t in ax.texts:                                    # each stands out from its cell, as WCAG's AA asks
        x,y = map(round, t.get_position())
        dark,bright = sorted((light(image.to_rgba(image.get_array())[y, x]), light(to_rgb(t.get_color()))))
        assert (bright+.05)/(dark+.05) > 4.5, t.get_text()
    plt.close('all')

def test_the_front_page_says_what_the_results_say():
    "What it recommends for a task is within the interval of the best there, used in the way it says."
    records = scores._records(None, 'test')
    tied = {a.study: {(r['estimator'], r['way']) for r in scores._tied(records, a.study)} for a in scores.advice()}
    assert ('soft_round', 'annealed') in tied['watermark']
    assert {('dither_round', 'as it is'), ('noisy_soft_round', 'annealed')} <= tied['source_coding']
    assert ('stochastic_round', 'as it is') in tied['updates']
