"""The slider moves the picture: in a page opened from a file, under a
strict content policy, and in JupyterLab. For the pages of the site see test_site.py.

Needs chromium and chromedriver; without them the tests say so and skip. Nothing leaves this machine: the pages come
from files or from a server on 127.0.0.1 that lives as long as the test, and every request is checked."""
import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
import numpy as np
import pytest
import torch
from browser import (
    alive,
    ask,
    drag,
    errors,
    every,
    find,
    hosts,
    moved,
    needs_browser,
    phone,
    picture,
    shot,
    still,
    visit,
    wait,
)
from pages import ROOT  # and the way to literate
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import Select
from shok_nb import widgets
from shok_nb.estimators.soft import soft_round
from shok_nb.estimators.ste import round_ste
from shok_nb.show import try_it
from shok_nb.show.widgets import player

pytestmark = [pytest.mark.xdist_group('browser'), needs_browser]

def path(where, name='y'): return ask(where, f'e.querySelector("[data-{name}]").getAttribute("d")')
def text(where, name='text'): return ask(where, f'e.querySelector("[data-{name}]").textContent')

def both(where):
    "The pixels of all drawings of one player or column."
    seen = [picture(svg) for svg in every(where, 'svg[role=img]')]
    return np.concatenate([p.ravel() for p in seen])

def test_a_page_that_dies_ends_one_test(browser):
    with pytest.raises(WebDriverException): browser.get('chrome://crash')
    assert not alive(browser)

def test_the_next_test_has_a_browser(browser): assert alive(browser)

# --- a page of one or more players
def page_of(folder, *html):
    "A file of these, as wide as the screen."
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page = folder/'page.html'
    page.write_text(head + ''.join(html), 'utf-8')
    return page

def strict_page(folder, many, *html):
    "The same, with everything forbidden but their scripts, of which there are so `many`, by their hashes."
    scripts = {*re.findall('<script>(.*?)</script>', ''.join(html), re.S)}
    assert len(scripts) == many
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = ' '.join(f"'sha256-{h}'" for h in hashes)
    policy = f"default-src 'none'; script-src {allowed}"
    return page_of(folder, f'<meta http-equiv="Content-Security-Policy" content="{policy}">', *html)

def test_player(browser, tmp_path):
    "Mouse, keyboard and toggle move the picture of one player, and of that one alone."
    visit(browser, page_of(tmp_path, player(soft_round), player(round_ste)))
    one,two,*_ = every(browser, '[data-shok]')
    slider,toggle = find(one, 'input[type=range]'),find(one, 'input[type=checkbox]')
    at_start,other,before = path(one),path(two),shot(one)
    assert slider.get_attribute('aria-label') == 'alpha' and slider.get_attribute('aria-valuetext') == '5'
    drag(browser, slider, slider.size['width']//4)
    assert float(slider.get_attribute('aria-valuetext')) > 10
    assert path(one) != at_start and moved(before, shot(one)) > 300
    slider.send_keys(Keys.HOME)
    assert slider.get_attribute('aria-valuetext') == find(one, 'output').text == '0'
    low,readout = path(one, 'g'),text(one)
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert path(one, 'g') != low and text(one) != readout
    said,soft,before = text(one),path(one),shot(one)
    toggle.click()
    assert path(one).count('M') == 5 and path(one, 'ghost') == soft and text(one) == said
    assert moved(before, shot(one)) > 300
    assert path(two) == other
    steps = every(browser, '[data-shok] [aria-label=step]')
    steps[0].send_keys(Keys.ARROW_RIGHT)
    assert path(two) != other
    assert hosts(browser) == {('file', None)}
    assert not errors(browser)

def test_player_on_a_phone(browser, tmp_path):
    "390 pixels are enough, and what is written has the colour of the page."
    with phone(browser, page_of(tmp_path, player(soft_round))):
        one = find(browser, '[data-shok]')
        for ink in ('rgb(0, 0, 0)', 'rgb(240, 240, 240)'):
            browser.execute_script('document.body.style.color = arguments[0]', ink)
            wait(browser, lambda: ask(one, 'getComputedStyle(e.querySelector("text")).fill') == ink, ink)
            assert browser.execute_script('return document.documentElement.scrollWidth') <= 390
            panels = every(one, 'svg[role=img]')
            assert all(300 < svg.size['width'] <= 390 for svg in panels)
            assert panels[0].location['y'] + panels[0].size['height'] + 8 < panels[1].location['y']

def test_a_finger_hits_a_number_of_a_sentence(browser, tmp_path):
    "One digit is 13 pixels wide, and what is 5 beside it still presses it."
    sentence = '<p>At <button type="button" class="shok-set" data-set="alpha=1">1</button> it is soft.</p>'
    hit = """const r = e.getBoundingClientRect(), y = (r.top+r.bottom)/2;
        return [r.width, ...[r.left-5, r.right+5].map(x => document.elementFromPoint(x, y) === e)]"""
    with phone(browser, page_of(tmp_path, player(soft_round), sentence)):
        width,*hits = browser.execute_script(f'const e = arguments[0]; {hit}', find(browser, '.shok-set'))
        assert width < 24 and hits == [True, True]

def test_names_in_tables_on_a_phone(browser, tmp_path):
    "A name in the first column stands in one line, however full the others are."
    style = f"<style>{(ROOT/'docs'/'_static'/'site.css').read_text('utf-8')}</style>"
    cells = '<td><code>stochastic_round</code></td>' + f"<td>{'to the nearest '*9}</td>"*4
    table = f'<div class="table-wrapper"><table class="docutils"><tr>{cells}</tr></table></div>'
    with phone(browser, page_of(tmp_path, style, table)):
        assert len(browser.execute_script('return [...document.querySelector("code").getClientRects()]')) == 1

def test_a_long_name_stays_in_its_column(browser, tmp_path):
    "A link too: it breaks where it is wider than the column, and covers nothing of the next one."
    style = f"<style>{(ROOT/'docs'/'_static'/'site.css').read_text('utf-8')}</style>"
    cells = '<td><a href="#"><code>soft_round_conditional_mean_of_many</code></a></td>' + '<td>1</td>'*9
    table = f'<div class="table-wrapper"><table class="docutils"><tr>{cells}</tr></table></div>'
    right = 'return [...document.querySelectorAll("code, td")].slice(0, 2).map(e => e.getBoundingClientRect().right)'
    with phone(browser, page_of(tmp_path, style, table)):
        cell,name = browser.execute_script(right)
        assert name <= cell

@pytest.mark.slow
def test_strict_policy(browser, tmp_path):
    "With everything forbidden but the one script, a player works and looks the same."
    visit(browser, strict_page(tmp_path, 1, *2*[player(soft_round)]))
    one,two = every(browser, '[data-shok]')
    before = path(one)
    drag(browser, find(one, 'input[type=range]'), 120)
    assert path(one) != before and path(two) == before
    left,right = every(one, 'svg[role=img]')
    assert one.size['width'] > 1000 and left.location['y'] == right.location['y']      # as wide as the page
    assert right.location['x']+right.size['width'] == pytest.approx(one.location['x']+one.size['width'], abs=2)
    assert hosts(browser) == {('file', None)}

def test_menu(browser, tmp_path):
    "A choice moves the dots that say which level a tie is on."
    visit(browser, page_of(tmp_path, player(round_ste)))
    one = find(browser, '[data-shok]')
    menu,before = Select(find(one, 'select')),path(one, 'dots')
    assert [o.text for o in menu.options] == ['even', 'away', 'zero', 'up', 'down']
    menu.select_by_visible_text('up')
    assert path(one, 'dots') != before
    menu.select_by_visible_text('even')
    assert path(one, 'dots') == before

@pytest.mark.slow
def test_a_sentence_follows_its_player(browser, tmp_path):
    "The numbers of a sentence are those of the slider and of the readout; one before all players follows the first."
    from literate import prose
    def said(mark):
        return prose(', '.join(f'<span title="now={k}">?</span>' for k in (mark, 'largest_slope', 'mean_distance')), {})
    visit(browser, page_of(tmp_path, f'<p>{said("alpha")}</p>', player(soft_round), player(soft_round, alpha=8.),
        f'<p>{said("alpha")}</p>', player(round_ste), f'<p>{said("step")}</p>'))
    def read(): return [e.text.split(', ') for e in every(browser, 'p')]
    first,second,third = read()
    assert first == ['5', '2.53', '0.132'] and second[0] == '8' and third == ['1', '1', '0']
    find(browser, '[data-shok] input').send_keys(Keys.ARROW_RIGHT)
    now = find(browser, '[data-shok]')
    assert read() == [[find(now, 'output').text, text(now).split()[2].strip(','), read()[0][2]], second, third]
    assert float(read()[0][0]) > 5 and float(read()[0][1]) > 2.53 and float(read()[0][2]) < .132
    every(browser, '[aria-label=alpha]')[1].send_keys(Keys.END)
    find(browser, '[aria-label=step]').send_keys(Keys.HOME)
    assert read()[1:] == [['inf', '0', '0'], ['0.25', '1', '0']]
    assert not errors(browser)

# --- two at a time
@pytest.fixture(scope='module')
def tools():
    "The pictures side by side, and the points that learn."
    return [tool.data for tool in (try_it.explore(soft_round, round_ste), try_it.watch(torch.round, round_ste))]

@pytest.fixture(scope='module')
def two(tmp_path_factory, tools): return page_of(tmp_path_factory.mktemp('two'), *tools)

TWO = """const tool = name => document.querySelector(`[data-shok-${name}]`), say = (e, type) =>
        e.dispatchEvent(new Event(type, {bubbles: true})),
    name = (c, f) => { const m = c.querySelector('[data-name]');
        m.value = [...m.options].find(o => o.text == f).value; say(m, 'change') },
    put = (c, label, i) => { const e = c.querySelector(`[aria-label="${label}"]`);
        if (e) { e.value = i; say(e, 'input') } },
    d = (c, mark) => c.querySelector(`[data-${mark}]`).getAttribute('d');
"""

def points(d):
    "Of a path: an array for each run."
    return [np.array(re.findall(r'-?[\d.]+', r.replace('h0', '')), float).reshape(-1, 2) for r in d.split('M')[1:]]

@pytest.mark.slow
def test_explore_draws_what_torch_returns(browser, two):
    "Each estimator, at a grid of its own: the script moves pictures, and knows no formula of these."
    visit(browser, two)
    names = [n for n,r in try_it._ALL.items() if not r.random]
    got = browser.execute_script(TWO+"""const c = tool('explore').querySelector('[data-col]');
        return arguments[0].map(f => { name(c, f); put(c, 'step', 5); put(c, 'offset', 15);
            return [f, d(c, 'y'), [...c.querySelectorAll('[aria-label=step], [aria-label=offset]')].map(
                e => e.getAttribute('aria-valuetext')), c.querySelector('svg').getAttribute('aria-label')] })""", names)
    for name,d,grid,label in got:
        r = try_it._ALL[name]
        assert name in label and len(grid) == 2*r.grid
        (unit,bottom,top),(lo,hi) = widgets._scale(r.domain),r.domain
        knobs = dict(zip(('step', 'offset'), map(float, grid)))
        assert not knobs or knobs['step'] < .6 and knobs['offset'] > .2
        seen = []
        for run in points(d):
            x,y = run[:, 0]/widgets.WIDE*(hi-lo)+lo,(top-bottom)*unit*(1-run[:, 1]/widgets.TALL)+bottom*unit
            pixel = (top-bottom)*unit/(widgets.TALL/10)
            inside = (x > lo) & (x < hi)
            seen += x.tolist()
            def f(x): return r.f(torch.tensor(x[inside]), **knobs).numpy()
            tenth = (hi-lo)/4240                  # a steep place, or the other side of a jump, is as near
            near = np.stack([f(x+k*tenth) for k in (-1, 0, 1)])
            low,high = near.min(0)-pixel,near.max(0)+pixel
            assert ((low < y[inside]) & (y[inside] < high)).all(), name
        assert min(seen) < lo+.001 and max(seen) > hi-.001
    assert not errors(browser)

@pytest.mark.slow
def test_play_step_reset(browser, two):
    "By mouse and by key; the point moves, rests, goes back, and the slider says where it is."
    visit(browser, two)
    tool = find(browser, '[data-shok-watch]')
    left,right = every(tool, '[data-col]')
    play,step,reset = (find(tool, f'[data-do={n}]') for n in ('play', 'step', 'reset'))
    scrub = find(tool, '[aria-label=iteration]')
    def at(): return int(scrub.get_attribute('value'))
    here,there,picture = path(left, 'ball'),path(right, 'ball'),shot(right)
    play.click()
    assert play.text == 'Pause'
    wait(browser, lambda: at() > 4, 'the point to move')
    play.send_keys(Keys.SPACE)
    now = at()
    assert play.text == 'Play' and path(left, 'ball') == here != path(right, 'ball') != there
    assert moved(picture, shot(right)) > 100 and at() == now
    step.send_keys(Keys.ENTER)
    assert at() == now+1 and text(right, 'say-step') == f'iteration {now+1}'
    scrub.send_keys(Keys.END)
    said = scrub.get_attribute('aria-valuetext')
    assert at() == 50 and said.startswith('iteration 50. torch.round: x -0.90, value -1.00, loss 2.64, gradient 0.00.')
    reset.click()
    assert at() == 0 and path(right, 'ball') == there and abs(shot(right)-picture).max() < 60
    calm = dict(name='prefers-reduced-motion', value='reduce')
    browser.execute_cdp_cmd('Emulation.setEmulatedMedia', dict(features=[calm]))
    try:
        play.click()
        assert at() == 50 and play.text == 'Play'
    finally: browser.execute_cdp_cmd('Emulation.setEmulatedMedia', dict(features=[]))

@pytest.mark.slow
@pytest.mark.parametrize('tool, names', (
    ('explore', ('trust_round', 'noisy_soft_round')),
    ('watch', ('soft_round', 'sga_round'))))
def test_every_control_of_two(browser, two, tool, names):
    "Moves pixels of its column, and of that one alone."
    visit(browser, two)
    columns = every(browser, f'[data-shok-{tool}] [data-col]')
    if tool == 'watch': find(browser, '[data-shok-watch] [aria-label=iteration]').send_keys(*[Keys.ARROW_RIGHT]*9)
    for c,name,other in zip(columns, names, columns[::-1]):
        before = both(c)
        Select(find(c, '[data-name]')).select_by_visible_text(name)
        seen,rest = [before, both(c)],find(other, '[data-picture]').get_attribute('outerHTML')
        assert name in find(c, 'svg').get_attribute('aria-label')
        for e in every(find(c, '[data-controls]'), 'input, select'):
            kind = e.get_attribute('type')
            if kind == 'range': e.send_keys(Keys.HOME if int(e.get_attribute('value')) else Keys.END)
            elif kind == 'checkbox': e.click()
            else: Select(e).select_by_index(1)
            seen.append(both(c))
            assert moved(*seen[-2:]) > 20, (name, e.get_attribute('outerHTML'))
            if kind == 'range': e.send_keys(*[Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT])
            seen.append(both(c))
        assert find(other, '[data-picture]').get_attribute('outerHTML') == rest

@pytest.mark.slow
def test_two_under_a_strict_policy(browser, tools, tmp_path):
    "Both scripts by their hashes and nothing else; on a phone the columns stack and nothing is wider than the screen."
    with phone(browser, strict_page(tmp_path, 2, *tools)):
        hosts(browser)
        assert browser.execute_script('return document.documentElement.scrollWidth') <= 390
        left,right = every(browser, '[data-shok-explore] [data-col]')
        assert right.location['y'] > left.location['y']+left.size['height']-1 and 300 < find(left, 'svg').size['width']
        before = path(left)
        Select(find(left, '[data-name]')).select_by_visible_text('poisson_round')
        assert path(left) != before
        find(browser, '[data-do=step]').click()
        assert text(find(browser, '[data-shok-watch]'), 'say-step') == 'iteration 1'
        assert not hosts(browser)

# --- JupyterLab
@contextlib.contextmanager
def serving(tmp, options, cwd):
    "A JupyterLab on 127.0.0.1 whose files are in `tmp`: its address and token."
    folders = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_DATA_DIR='data', JUPYTER_RUNTIME_DIR='runtime',
        JUPYTERLAB_SETTINGS_DIR='settings', JUPYTERLAB_WORKSPACES_DIR='workspaces', IPYTHONDIR='ipython')
    dirs = {k: str(tmp/v) for k,v in folders.items()}
    env = os.environ | dirs | dict(PYTHONPATH=str(ROOT), JUPYTER_TOKEN=secrets.token_hex(16), OMP_NUM_THREADS='1')
    own = {'ServerApp.ip': '127.0.0.1', 'ServerApp.open_browser': False,
        'ServerApp.allow_root': True, 'LabApp.expose_app_in_browser': True, 'LabApp.extension_manager': 'readonly'}
    command = [sys.executable, '-m', 'jupyterlab', *options, *(f'--{k}={v}' for k,v in own.items())]
    with open(tmp/'log', 'wb') as log:
        server = subprocess.Popen(command, env=env, cwd=cwd, stdout=log, stderr=subprocess.STDOUT)
    token = env['JUPYTER_TOKEN']
    def address():
        "Where the server answers; it names its address in a file first, and listens there afterwards."
        for f in (tmp/'runtime').glob('jpserver-*.json'):
            with contextlib.suppress(OSError, ValueError):                   # half written, or nobody listens yet
                url = json.loads(f.read_text())['url']
                with urllib.request.urlopen(f'{url}api/status?token={token}', timeout=20): return url
    try:
        end = time.monotonic()+120
        while not (url := address()):
            assert server.poll() is None and time.monotonic() < end, (tmp/'log').read_text()
            time.sleep(.1)
        yield url,token
    finally:
        server.terminate()                    # takes its kernels along
        try: server.wait(20)
        except subprocess.TimeoutExpired: server.kill()

@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "A JupyterLab of its own on 127.0.0.1, over a copy of the widgets page: its address with the token."
    tmp = tmp_path_factory.mktemp('lab')
    nb = json.loads((ROOT/'nbs'/'show'/'20_widgets.ipynb').read_text('utf-8'))
    for c in nb['cells']:
        if c['cell_type'] == 'code': c['outputs'] = []
    two = 'from shok_nb.show.try_it import explore, watch\nfrom IPython.display import display\n'
    two += 'display(explore(), watch(R, R))'
    nb['cells'].append(dict(nb['cells'][-1], id='two', source=two.replace('R', 'round_ste')))
    (tmp/'work').mkdir()
    (tmp/'work'/'page.ipynb').write_text(json.dumps(nb), 'utf-8')
    for name,values in {'apputils-extension/notification': dict(fetchNews='false', checkForUpdates=False),
                        'notebook-extension/tracker': dict(windowingMode='none')}.items():
        f = tmp/'settings'/'@jupyterlab'/f'{name}.jupyterlab-settings'
        f.parent.mkdir(parents=True, exist_ok=True)
        f.write_text(json.dumps(values))
    with serving(tmp, [f'--ServerApp.root_dir={tmp/"work"}', '--port', '0'], tmp/'work') as (url, token):
        yield f'{url}lab/tree/page.ipynb?token={token}'

@pytest.mark.slow
def test_make_lab_opens_all_notebooks(tmp_path):
    "Its server has every notebook, so that the links between them lead somewhere, and opens one."
    said = subprocess.run(['make', '-n', 'lab', 'PORT=0', 'PY=python', 'ARGS='], cwd=ROOT, capture_output=True,
        text=True).stdout
    line, = [l.split() for l in said.splitlines() if l.startswith('python -m jupyter lab ')]
    options = [o for o in line[4:] if o != '--allow-root']
    with serving(tmp_path, options, ROOT) as (url, token):
        def get(path): return urllib.request.urlopen(f'{url}{path}?token={token}')
        def below(folder):
            for c in json.load(get(f'api/contents/{folder}'))['content']:
                if c['type'] == 'directory': yield from below(c['path'])
                elif c['path'].endswith('.ipynb'): yield c['path']
        assert {*below('')} == {str(p.relative_to(ROOT/'nbs')) for p in (ROOT/'nbs').rglob('[!.]*.ipynb')}
        assert '/lab/tree/show/20_widgets.ipynb' in get('').url

@pytest.mark.slow
def test_jupyterlab(browser, lab):
    "The same cell, live: the kernel redraws while the mouse drags, and the player stays away."
    browser.get(lab)
    js = browser.execute_script
    kernel = 'return !!window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel'
    wait(browser, lambda: js(kernel), 'the notebook and its kernel', 120)
    js('window.jupyterapp.commands.execute("notebook:run-all-cells").then(ok => window.ran = ok)')
    ran = 'return window.ran === undefined ? null : [window.ran]'
    assert wait(browser, lambda: js(ran), 'the cells to run', 120) == [True]
    def boxes(): return every(browser, '.jp-OutputArea .widget-vbox:has([data-y])')
    box = wait(browser, lambda: next(iter(boxes()), None), 'the widget')
    handle,before = find(box, '.noUi-handle'),path(box)
    before_drag = shot(box)
    drag(browser, handle, 60)
    wait(browser, lambda: path(box) != before, 'the curve to move')
    dragged = still(browser, lambda: path(box, 'g'), 'the drawing to settle')
    assert moved(before_drag, shot(box)) > 300
    ActionChains(browser).send_keys(Keys.ARROW_LEFT).perform()
    wait(browser, lambda: path(box, 'g') != dragged, 'the arrow key to move the curve')
    slope = still(browser, lambda: text(box), 'the drawing to settle')
    find(box, 'input[type=checkbox]').click()
    wait(browser, lambda: path(box).count('M') == 5, 'five treads')
    assert text(box) == slope
    assert not every(browser, '.jp-OutputArea [data-shok]')
    grid = next(b for b in boxes() if every(b, '.widget-dropdown'))
    says = [e.text for e in every(grid, '.widget-readout')]
    assert says == ['1', '0'] and path(grid, 'dots').count('M') == 4     # step, offset, the ties between the ends
    learns = find(browser, '.jp-OutputArea [data-shok-watch]')
    column = find(learns, '[data-col]')
    before = path(column, 'ball')
    find(learns, '[aria-label=iteration]').send_keys(Keys.END)
    wait(browser, lambda: path(column, 'ball') != before, 'the point to move')
    Select(find(column, 'select')).select_by_visible_text('torch.round')
    wait(browser, lambda: text(column, 'say-value') == 'x -0.90, value -1.00', 'torch.round to stay where it is')
    assert len(every(learns, 'svg[role=img]')) == 2
    other = find(browser, '.jp-OutputArea [data-shok-explore] [data-col]')
    before = path(other)
    Select(find(other, 'select')).select_by_visible_text('poisson_round')
    wait(browser, lambda: path(other) != before, 'another curve')
    met = {h for _,h in hosts(browser)}
    assert met - {None} == {'127.0.0.1'}           # what has no host, such as about:blank, goes nowhere
