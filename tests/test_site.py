"""A walk through the built site: every link and every anchor leads somewhere; and in a browser each page fits its
screen, can be read in light and in dark, has nothing to complain of, and answers to the mouse and to the keys.

The links are read from the files, in `make test`; the rest needs chromium and is slow. Contrast is what axe-core says,
which npm brings once; without a registry that test says so and skips."""
import re
from html.parser import HTMLParser
from urllib.parse import unquote
import pytest
from browser import axe, drag, errors, every, find, hosts, moved, needs_browser, phone, picture, screen, visit, wait
from pages import DOCS, FOLDERS, HTML, NBS, is_built, slug
from selenium.webdriver import Keys
from selenium.webdriver.support.ui import Select

PLAYER = '[data-shok], [data-shok-explore], [data-shok-watch]'
pytestmark = pytest.mark.xdist_group('site')

PAGES = sorted({*map(slug, NBS), *FOLDERS, 'api', 'genindex', 'search'})
ESTIMATORS = [n for n in map(slug, FOLDERS['estimators']) if n != 'checks']

# --- links
class Page(HTMLParser):
    "The ids of a page, and where its links lead."
    def __init__(self, page):
        super().__init__()
        self.ids,self.links = [],[]
        self.feed(page.read_text('utf-8'))
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if 'id' in a: self.ids.append(a['id'])
        if tag in ('a', 'area') and a.get('href') is not None: self.links.append(a['href'])

def test_every_link_leads_somewhere(site):
    "To a file that is there, to an anchor that is on it; and no page has an anchor twice."
    pages = {p.name: Page(p) for p in site.glob('*.html')}
    assert {*pages} == {f'{p}.html' for p in PAGES}
    lost = []
    for name,page in pages.items():
        lost += [f'{name} has #{i} twice' for i in {*page.ids} if page.ids.count(i) > 1]
        for link in page.links:
            if re.match(r'\w+:|//', link): continue
            path,_,anchor = unquote(link).partition('#')
            to = path.partition('?')[0] or name
            there = (site/to).is_file() if to not in pages else anchor in ('', *pages[to].ids)
            if not there: lost.append(f'{name}: {link}')
    assert not lost, '\n'.join(lost)
    assert sum(len(p.links) for p in pages.values()) > 50*len(pages)

# --- in a browser
def walk(test): return pytest.mark.slow(needs_browser(test))
each_page = pytest.mark.parametrize('page', PAGES)

@pytest.fixture(scope='module')
def built(request):
    "The site as `make test` has just left it, or else built anew."
    return HTML if is_built() else request.getfixturevalue('site')

OPEN = """const calm = document.createElement('style');
    calm.textContent = '* { transition: none !important; animation: none !important }';
    document.head.append(calm);
    document.querySelectorAll('details').forEach(e => e.open = true)"""
SPILLS = """const inner = document.querySelectorAll('.main, .content'),
        frame = [document.documentElement, document.body, ...inner],
        wide = frame.filter(e => e.scrollWidth > e.clientWidth);             // each of them may be what scrolls
    if (!wide.length) return [];
    const out = [...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > innerWidth+1);
    return [wide.map(e => `${e.tagName} ${e.scrollWidth} px in ${e.clientWidth}`).join(), ...out.slice(0, 3).map(
        e => e.outerHTML.slice(0, 90))]"""
CUT = """const longest = e => e.textContent.split('\\n').reduce((a, b) => a.length < b.length ? b : a),
        code = [...document.querySelectorAll('article div.highlight pre')];
    return code.filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth).map(e =>
        `${e.scrollWidth} px of code in ${e.clientWidth}: ${longest(e).slice(0, 120)}`)"""

@walk
@each_page
def test_page_fits(browser, built, page):
    "None scrolls sideways, wide or on a phone, its folds shut or open; no line of code is cut; the console is empty."
    ask = browser.execute_script
    for wide in (True, False):
        with screen(browser, 1280, 900) if wide else phone(browser):
            visit(browser, built/f'{page}.html')
            assert not (wide and ask(CUT))
            assert not ask(SPILLS)
            ask(OPEN)
            assert not ask(SPILLS)
            assert not errors(browser) and hosts(browser) <= {('file', None)}

@walk
@pytest.mark.parametrize('page', ESTIMATORS)
def test_first_picture_is_near_the_top(browser, built, page):
    "Within a screen and a half, from its top to its last line."
    with screen(browser, 1280, 900):
        visit(browser, built/f'{page}.html')
        seen = every(browser, f'article :is({PLAYER}, svg.figure, .cell_output img)')
        assert seen, 'no picture'
        end = seen[0].location['y']+seen[0].size['height']
        assert end <= 1.5*900, f'the first picture ends at {end/900:.2f} screens'

# of the words of the code one of each kind stands for all: the others become part of the text around them
KINDS = """const seen = new Set();
    document.querySelectorAll('article div.highlight span').forEach(e => {
        const kind = [e.className, !!e.closest('.cell_output'), !!e.closest('details')].join();
        if (seen.has(kind)) e.replaceWith(...e.childNodes);
        seen.add(kind) })"""
CONTRAST = """const [theme, done] = arguments; document.body.dataset.theme = theme;
    const said = n => `${theme}: ${n.any[0].message} ${n.html.slice(0, 120)}`;
    axe.run(document, {runOnly: ['color-contrast'], resultTypes: ['violations']}).then(
        r => done(r.violations.flatMap(v => v.nodes.map(said))), e => done([`${e}`]))"""

@walk
@each_page
def test_page_can_be_read(browser, built, page):
    "Text stands out from its ground as WCAG's AA asks, in both themes, folds open."
    source = axe(DOCS/'_build')
    with screen(browser, 1280, 900):
        visit(browser, built/f'{page}.html')
        browser.execute_script(OPEN)
        browser.execute_script(KINDS)
        browser.execute_script(source)
        faint = [f for theme in ('light', 'dark') for f in browser.execute_async_script(CONTRAST, theme)]
    assert not faint, '\n'.join(faint)

CONTROLS = ':is(input:not([type=hidden]), select, button):not(:disabled)'

def by_mouse(browser, control):
    if control.tag_name == 'select':
        menu = Select(control)
        now = menu.options.index(menu.first_selected_option)
        menu.select_by_index((now+1) % len(menu.options))
    elif control.get_attribute('type') == 'range':
        now,most = (int(control.get_attribute(k)) for k in ('value', 'max'))
        drag(browser, control, control.size['width']*(-1 if 2*now >= most else 1)//3, .05)
    else: control.click()

def by_key(browser, control):
    assert control.get_property('tabIndex') >= 0
    if control.tag_name == 'select':
        last = len(Select(control).options)-1
        control.send_keys(Keys.ARROW_UP if int(control.get_property('selectedIndex')) == last else Keys.ARROW_DOWN)
    elif control.get_attribute('type') == 'range':
        now,most = (int(control.get_attribute(k)) for k in ('value', 'max'))
        control.send_keys(Keys.HOME if 2*now >= most else Keys.END)
    else: control.send_keys(Keys.SPACE)

# what learns is shown in the middle of its way, where all that it does can be seen
MIDWAY = """const [player] = arguments, scrub = player.querySelector('[aria-label=iteration]');
    if (scrub) { scrub.value = 9; scrub.dispatchEvent(new Event('input', {bubbles: true})) }"""

BACK = """const [e] = arguments; if (e.type != 'range') return;
    e.value = e.defaultValue; e.dispatchEvent(new Event('input', {bubbles: true}))"""

def shots(player): return [picture(svg) for svg in every(player, 'svg[role=img]')]

def differ(before, after):
    "In any of the pictures; one that is a pixel taller is compared as far as both go."
    def cut(a, b): return (p[:min(a.shape[0], b.shape[0]), :min(a.shape[1], b.shape[1])] for p in (a, b))
    return any(moved(*cut(a, b)) > 20 for a,b in zip(before, after, strict=True))

def plays(nb): return re.search(r'"((R|widgets|try_it)\.)?(tune|explore|watch)\(', nb.read_text('utf-8'))
PLAYERS = [slug(nb) for nb in NBS if plays(nb)]

def test_pages_with_players(site):
    "Those whose notebooks call for one, which the walk tries."
    assert sorted(p.stem for p in site.glob('*.html') if '<div data-shok' in p.read_text('utf-8')) == sorted(PLAYERS)

@walk
@pytest.mark.parametrize('page', PLAYERS)
def test_every_control_answers(browser, built, page):
    "To the mouse and to a key: each of each player, those too that another control brings."
    with screen(browser, 1280, 1400):
        visit(browser, built/f'{page}.html')
        players = every(browser, PLAYER)
        assert players
        for n,player in enumerate(players):
            before = shots(player)
            assert before and not differ(before, shots(player)), 'a player rests until it is touched'
            i = 0
            while i < len(every(player, CONTROLS)):
                for act in (by_mouse, by_key):
                    control = every(player, CONTROLS)[i]
                    browser.execute_script(MIDWAY, player)
                    before,said = shots(player),control.accessible_name
                    act(browser, control)
                    if control.text == 'Pause':
                        wait(browser, lambda: differ(before, shots(player)), 'the point to move')
                        act(browser, control)
                    assert differ(before, shots(player)), f'player {n}: {said}: {act.__name__}'
                    browser.execute_script(BACK, every(player, CONTROLS)[i])     # at its end it may silence the next
                i += 1
    assert not errors(browser)

@walk
def test_the_frame_answers(browser, built):
    "What is around the pages: the theme by mouse and by key, the menu of a phone, the search."
    def theme(): return browser.find_element('tag name', 'body').get_attribute('data-theme')
    def paper(): return browser.execute_script('return getComputedStyle(document.body).backgroundColor')
    with screen(browser, 1280, 900):
        visit(browser, built/'soft.html')
        toggle = next(b for b in every(browser, '.theme-toggle') if b.is_displayed())
        seen = {theme(): paper()}
        toggle.click()
        seen[theme()] = paper()
        toggle.send_keys(Keys.ENTER)
        seen[theme()] = paper()
        assert {*seen} == {'auto', 'light', 'dark'} and seen['light'] != seen['dark']
        browser.execute_script('localStorage.clear()')
        box = find(browser, '.sidebar-search')
        box.send_keys('anneal', Keys.ENTER)
        wait(browser, lambda: every(browser, '#search-results [href^="schedules.html"]'), 'the search to find the page')
    with phone(browser):
        visit(browser, built/'soft.html')
        links = find(browser, '.sidebar-tree')
        assert not browser.execute_script(VISIBLE, links)
        find(browser, '.mobile-header [for=__navigation]').click()
        wait(browser, lambda: browser.execute_script(VISIBLE, links), 'the menu to open')
    assert not errors(browser)

VISIBLE = 'const r = arguments[0].getBoundingClientRect(); return r.right > 0 && r.left < innerWidth && r.width > 0'
