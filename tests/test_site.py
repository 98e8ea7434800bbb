"""A walk through the built site: every link and every anchor leads somewhere; and in a browser each page fits its
screen, can be read in light and in dark, has nothing to complain of, and answers to the mouse and to the keys.

The links are read from the files, the rest needs chromium. Contrast is what axe-core says, which npm brings once;
without a registry that test says so and skips."""
import json
import re
import time
from base64 import b64decode
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import unquote
from zlib import decompress
import pytest
from browser import (
    ask,
    axe,
    drag,
    errors,
    every,
    find,
    hosts,
    moved,
    needs_browser,
    phone,
    picture,
    screen,
    visit,
    wait,
)
from bs4 import BeautifulSoup
from pages import DOCS, FOLDERS, NBS, by_group, slug
from selenium.webdriver import Keys
from selenium.webdriver.support.ui import Select

PLAYER = '[data-shok], [data-shok-explore], [data-shok-watch]'
pytestmark = pytest.mark.slow
reading = pytest.mark.xdist_group('site')      # where the site is built, at first; then every process walks through it

PAGES = sorted({*map(slug, NBS), *by_group(), 'api', 'genindex', 'search'})
ESTIMATORS = [n for n in map(slug, FOLDERS['estimators']) if n != 'checks']

# --- links
class Marks(HTMLParser):
    "The anchors of a page, where its links go, and its other forms: in a fifth of the time that a tree of it takes."
    def __init__(self, page):
        super().__init__()
        self.ids,self.links,self.others = [],[],[]
        self.feed(page.read_text('utf-8'))

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if 'id' in a: self.ids.append(a['id'])
        if tag in ('a', 'area') and 'href' in a: self.links.append(a['href'])
        if tag == 'link' and a.get('rel') == 'alternate': self.others.append(a['href'])

@reading
def test_every_link_leads_somewhere(site):
    "To a file that is there, to an anchor that is on it; and no page has an anchor twice."
    pages = {p.name: Marks(p) for p in site.glob('*.html')}
    assert {*pages} == {f'{p}.html' for p in PAGES}
    lost = []
    for name,page in pages.items():
        lost += [f'{name} has #{i} twice' for i,n in Counter(page.ids).items() if n > 1]
        for link in page.links:
            if re.match(r'\w+:|//', link): continue
            path,_,anchor = unquote(link).partition('#')
            to = path.partition('?')[0] or name
            there = (site/to).is_file() if to not in pages else anchor in ('', *pages[to].ids)
            if not there: lost.append(f'{name}: {link}')
    assert not lost, '\n'.join(lost)
    assert sum(len(p.links) for p in pages.values()) > 50*len(pages)

@reading
def test_pages_as_markdown(site):
    "Each notebook's page is there as Markdown with its code, says so in its head, and stands once in llms.txt."
    listed = re.findall(r'(?m)^- \[[^\]]+\]\((\w+)\.md\): .{20}', (site/'llms.txt').read_text('utf-8'))
    assert sorted(listed) == sorted(map(slug, NBS)) == sorted(p.stem for p in site.glob('*.md'))
    for name in listed:
        text = (site/f'{name}.md').read_text('utf-8')
        prose = re.sub(r'(?s)```.*?```|`[^`]*`', '', text)
        links = re.findall(r'\]\(([\w./-]+)\.(\w+)(?:#[^)]*)?\)', prose)
        lost = [to for to,kind in links if kind == 'ipynb' or kind == 'md' and not (site/f'{to}.md').is_file()]
        assert text.startswith('# ') and lost == [] and '#| ' not in text and '<!--' not in prose, name
        assert name == 'glossary' or '```python\n' in text, name
        assert f'{name}.md' in Marks(site/f'{name}.html').others, name

@reading
def test_formulas_need_no_script(site):
    "They stand on the page as KaTeX has drawn them, with MathML for screen readers, and no KaTeX is loaded."
    drawn = [e for p in site.glob('*.html') for e in p.read_text('utf-8').split('class="math notranslate')[1:]]
    assert len(drawn) > 400 and all('<math ' in e and 'class="katex-html"' in e for e in drawn)
    assert not [*site.rglob('katex*.js')] and 'katex.min.js' not in (site/'soft.html').read_text('utf-8')

# --- sentences and players
def place(tag): return tag.sourceline,tag.sourcepos

class Player:
    "The stops of each control of a player, and where it stands at first."
    def __init__(self, tag):
        self.place,self.packed,self.stops,self.start = place(tag),tag.get('data-shok'),{},{}
        for e in tag.select('[data-stops]'):
            name,stops = e['aria-label'],e['data-stops'].split(' ')
            self.stops[name],self.start[name] = stops,stops[int(e['value'])]
        for menu in tag.select('select'):
            name,options = menu['aria-label'],menu.select('option')
            self.stops[name] = [o.text for o in options]
            self.start |= {name: o.text for o in options if o.has_attr('selected')}
        if tag.select('input[data-hard]'): self.stops['hard'] = ['on', 'off']
    def knows(self, names): return sum(n in self.stops or n in MEASURED and self.packed is not None for n in names)

def meant(players, sentence, names):
    "The player that a sentence means: as `meant` of page.js finds it."
    most = max((p.knows(names) for p in players), default=0)
    best = [p for p in players if p.knows(names) == most > 0]
    return next((p for p in best[::-1] if p.place < place(sentence)), best[0] if best else None)

MEASURED = 'smallest slope', 'largest slope', 'mean slope', 'mean distance'

def shows(player):
    "What a player tells its sentences when it starts: its knobs, and what is measured of its curves."
    data = json.loads(decompress(b64decode(player.packed)))
    row, = data['rows']
    names = [n for n in player.stops if n not in ('hard', *row['grid'])]
    setting = 0
    for n,stops in zip(names, row['stops'], strict=True): setting = setting*len(stops)+stops.index(player.start[n])
    text,_,near,*_ = data['strings'][row['frames'][0][setting][3]].split('|')
    slopes = re.fullmatch(r'(\S+) to (\S+?)(?:, mean (\S+))?', text).groups()
    return player.start | dict(zip(MEASURED, (*slopes, near)))

@reading
@pytest.mark.parametrize('page', [n for n in map(slug, NBS) if n != 'try_it'])
def test_sentences_and_their_players(site, page):
    """A link that sets a player names knobs and stops that it has; a number that follows one is what it shows at first.
    A page of an estimator with a player has both."""
    text = (site/f'{page}.html').read_text('utf-8')
    if not re.search('data-(shok|set|follows)', text): return
    html = BeautifulSoup(text, 'html.parser')
    players,sets,follows = [*map(Player, html.select(PLAYER))],html.select('[data-set]'),html.select('[data-follows]')
    for e in sets:
        settings = [s.split('=') for s in e['data-set'].split('&')]
        player = meant(players, e, [n for n,_ in settings])
        assert player, settings
        for name,text in settings: assert text in player.stops.get(name, ()), (name, text, player.stops)
    for e in follows: assert e.text == shows(meant(players, e, [e['data-follows']]))[e['data-follows']], e
    if page in ESTIMATORS + ['checks'] and players: assert sets and follows

@reading
def test_a_number_stays_with_its_sign(site):
    "No line ends between a number and its ± or ×, in sentences and in tables; code is as it was typed."
    html = BeautifulSoup((site/'four_bits.html').read_text('utf-8'), 'html.parser')
    cells = [e.text.strip() for e in html.select('td.number')]
    assert '0.0278\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.0044' in cells and '1.00' in cells
    for e in html.select('article pre, article code'): assert '\N{NO-BREAK SPACE}' not in e.text
    for e in html.select('article p, article td'): assert not re.search(r'\d [±×]|[±×] \d', e.text), e

# --- in a browser
each_page = pytest.mark.parametrize('page', PAGES)

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
        code = [...document.querySelectorAll('article div.highlight pre:not(.columns)')];
    return code.filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth).map(e =>
        `${e.scrollWidth} px of code in ${e.clientWidth}: ${longest(e).slice(0, 120)}`)"""

# on a screen of a laptop: where the menu shows the reader, and what it shows of other folders
HERE = """const seen = e => e.checkVisibility(), all = what => [...document.querySelectorAll(`.sidebar-tree ${what}`)];
    return [all('.current-page > .reference').pop().getBoundingClientRect().top,
        all('.toctree-l2').filter(seen).length]"""

@needs_browser
@each_page
def test_page_on_a_screen(browser, site, page):
    """It does not scroll sideways, its folds shut or open; no line of code is cut; the menu shows where the reader is,
    without scrolling, and no page of other folders; the console is empty."""
    ask = browser.execute_script
    with screen(browser, site/f'{page}.html', height=800):
        assert not ask(CUT)
        assert not ask(SPILLS)
        if page not in ('genindex', 'search'):
            top,shown = ask(HERE)
            assert 0 <= top <= 780 and shown <= max(map(len, FOLDERS.values())) + 2
        ask(OPEN)
        assert not ask(SPILLS)
        assert not errors(browser) and hosts(browser) <= {('file', None)}

SMALL = """const alone = 'button, select, input:not([type=hidden]), summary, .page-links a, header label',
        seen = e => e.checkVisibility({visibilityProperty: true, opacityProperty: true}) &&
            !e.closest('p:not(.page-links), li, td, dd, dt, h1, h2, h3'),        // in a sentence it may be small
        box = e => e.getBoundingClientRect(), hit = e => box(e.closest('label') || e),
        small = e => box(e).width && (hit(e).width < 23.5 || hit(e).height < 23.5);
    return [...document.querySelectorAll(alone)].filter(e => seen(e) && small(e)).map(e =>
        `${e.outerHTML.slice(0, 80)} ${hit(e).width} by ${hit(e).height}`)"""
APART = """const icons = [...document.querySelectorAll('.mobile-header .header-right > *')].filter(
        e => e.checkVisibility()).map(e => e.getBoundingClientRect());
    return [innerWidth-icons[icons.length-1].right, ...icons.slice(1).map((r, i) => r.left-icons[i].right)]"""

@needs_browser
@each_page
def test_page_on_a_phone(browser, site, page):
    """It does not scroll sideways; what stands alone is at least 24 pixels wide and high, so that a finger hits it, and
    the icons of the header stand apart; the console is empty."""
    ask = browser.execute_script
    with phone(browser, site/f'{page}.html'):
        assert not ask(SPILLS)
        assert not ask(SMALL)
        assert min(ask(APART)) >= 4
        ask(OPEN)
        assert not ask(SPILLS)
        assert not errors(browser) and hosts(browser) <= {('file', None)}

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

class Kinds(HTMLParser):
    """The kinds of text on a page: what it stands in, as a style sheet tells things apart, and a colour of its own. The
    parts of a formula are of one kind."""
    def __init__(self, page):
        super().__init__()
        self.found,self.open = set(),[]
        self.feed(page.read_text('utf-8'))

    def handle_starttag(self, tag, attrs):
        if tag in VOID: return
        a = dict(attrs)
        classes,(_,_,folded,given,_) = (a.get('class') or '').split(),(self.open or [(None,)*5])[-1]
        what = tag,*sorted(classes)
        folded,given = folded or tag == 'details',given or 'cell_output' in classes
        self.open.append((tag, what, folded, given, (*re.findall(r'color:[^;]*', a.get('style') or ''),)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag: pass

    def handle_data(self, text):
        if not text.strip() or len(self.open) < 2: return
        (_,around,*_),(_,what,folded,given,colours) = self.open[-2:]
        formula = any('katex' in what for _,what,*_ in self.open)
        self.found.add('a formula' if formula else (what, around, bool(folded), bool(given), colours))

VOID = set('area base br col embed hr img input link meta param source track wbr'.split())

def covering(kinds):
    "Pages that have all kinds between them: each time the one with most of those that are left."
    left = set().union(*kinds.values())
    while left:
        page = max(kinds, key=lambda p: len(kinds[p] & left))
        left -= kinds[page]
        yield page

def test_few_pages_have_every_kind(): assert [*covering(dict(a={1, 2}, b={2}, c={2, 3, 4}))] == ['c', 'a']

@needs_browser
def test_text_can_be_read(browser, site):
    """It stands out from its ground as WCAG's AA asks, in both themes, folds open: every kind of text, on the pages
    that have them all, and the sliders, whose text is drawn by a script."""
    source,faint = axe(DOCS/'_build'),[]
    pages = {*covering({p: Kinds(site/f'{p}.html').found for p in PAGES}), 'try_it', 'lab'}
    assert len(pages) < len(PAGES)/2
    for page in sorted(pages):
        with screen(browser, site/f'{page}.html'):
            for script in (OPEN, KINDS, source): browser.execute_script(script)
            for theme in ('light', 'dark'):
                faint += [f'{page}, {f}' for f in browser.execute_async_script(CONTRAST, theme)]
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

def plays(nb, what='tune|explore|watch'):
    return re.search(rf'"((R|widgets|try_it)\.)?({what})\(', nb.read_text('utf-8'))
PLAYERS = [slug(nb) for nb in NBS if plays(nb)]

@reading
def test_pages_with_players(site):
    "Those whose notebooks call for one, which the walk tries."
    want = sorted(slug(nb) for nb in NBS if plays(nb, 'tune|explore|watch|tiles'))
    assert sorted(p.stem for p in site.glob('*.html') if '<div data-shok' in p.read_text('utf-8')) == want

@needs_browser
@pytest.mark.parametrize('page', PLAYERS)
def test_every_control_answers(browser, site, page):
    "To the mouse and to a key: each of each player, those too that another control brings."
    with screen(browser, site/f'{page}.html', height=1400):
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

@needs_browser
def test_the_frame_answers(browser, site):
    "What is around the pages: the theme by mouse and by key, the menu of a phone, the search."
    def theme(): return browser.find_element('tag name', 'body').get_attribute('data-theme')
    def paper(): return browser.execute_script('return getComputedStyle(document.body).backgroundColor')
    with screen(browser, site/'soft.html'):
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
    with phone(browser, site/'soft.html'):
        links = find(browser, '.sidebar-tree')
        assert not browser.execute_script(VISIBLE, links)
        find(browser, '.mobile-header [for=__navigation]').click()
        wait(browser, lambda: browser.execute_script(VISIBLE, links), 'the menu to open')
    assert not errors(browser)

@needs_browser
def test_menus_open_by_keyboard(browser, site):
    "The arrows of the menu, and on a phone the menu and the contents: each has a name, and shows its focus."
    def press(box):
        assert box.accessible_name and box.aria_role in ('checkbox', 'switch')
        browser.execute_script('arguments[0].focus()', box)
        assert browser.switch_to.active_element == box
        browser.switch_to.active_element.send_keys(Keys.SPACE)
    with screen(browser, site/'soft.html'):
        box = next(b for b in every(browser, '.toctree-checkbox') if not b.is_selected())
        pages = box.find_element('xpath', '../ul')
        assert not pages.is_displayed()
        press(box)
        wait(browser, pages.is_displayed, 'the pages of a group')
        assert ask(box, 'getComputedStyle(e.nextElementSibling).outlineStyle') == 'solid'
        assert {b.get_attribute('aria-label') for b in every(browser, 'button.copybtn')} == {'Copy the code'}
    with phone(browser, site/'soft.html'):
        for box,opens in (('#__navigation', '.sidebar-tree'), ('#__toc', '.toc-tree')):
            assert not browser.execute_script(VISIBLE, find(browser, opens))
            press(find(browser, box))
            wait(browser, lambda: browser.execute_script(VISIBLE, find(browser, opens)), f'{opens} to open')    # noqa: B023
            browser.switch_to.active_element.send_keys(Keys.SPACE)

@needs_browser
def test_a_wide_table_keeps_the_name_of_a_row(browser, site):
    "It scrolls under its first column, on a phone and beside the menu. A title does not end in an empty line."
    for opened in (phone(browser, site/'catalog.html'), screen(browser, site/'scores.html')):
        with opened:
            table = next(t for t in every(browser, '.table-wrapper') if ask(t, 'e.scrollWidth > e.clientWidth+100'))
            browser.execute_script('arguments[0].scrollLeft = 200', table)
            first = find(table, 'tbody td')
            assert ask(first, 'e.getBoundingClientRect().left') >= ask(table, 'e.getBoundingClientRect().left')
    with screen(browser, site/'equalize.html'):
        title = find(browser, 'article h1')
        assert title.size['height'] < 2.4*float(title.value_of_css_property('font-size')[:-2])

@needs_browser
def test_a_long_table_is_sorted(browser, site):
    "By the head that is pressed, with mouse or key: the largest number or the first word on top, empty cells below."
    def texts(column): return [e.text for e in every(table, f'tbody tr td:nth-child({column})')]
    def size(text): return -float(text.split()[0]) if text else 99.
    visit(browser, site/'scores.html')
    table = next(t for t in every(browser, 'table.docutils') if len(every(t, 'tbody tr')) > 30)
    heads = every(table, 'th button.sort')
    assert len(heads) == len(every(table, 'th')) > 8
    first = texts(2)
    def press(head):
        ask(head, 'e.scrollIntoView({block: "center", behavior: "instant"})')
        head.click()
    press(heads[1])
    assert first != texts(2) == sorted(first, key=size) and every(table, 'th')[1].aria_role == 'columnheader'
    heads[1].send_keys(Keys.ENTER)
    assert texts(2) == sorted(first, key=lambda t: -size(t) if t else 99.)
    press(heads[0])
    assert texts(1) == sorted(texts(1)) and len(every(table, 'th[aria-sort]')) == 1
    visit(browser, site/'soft.html')
    assert not every(browser, 'button.sort')
    assert not errors(browser)

@needs_browser
def test_many_columns_fit_a_page(browser, site):
    "The widest tables of the model zoo, with what sorts them, beside the menu of a laptop."
    with screen(browser, site/'zoo.html'):
        wide = browser.execute_script("""return [...document.querySelectorAll('article table.docutils')].map(
            e => e.scrollWidth - e.parentElement.clientWidth)""")
        assert len(wide) > 5 and max(wide) <= 0

@needs_browser
def test_a_fold_below_a_source_is_small(browser, site):
    "BibTeX stands in smaller letters than what it cites."
    with screen(browser, site/'references.html'):
        size = 'parseFloat(getComputedStyle(e).fontSize)'
        fold,text = (find(browser, f'article .cell_output > {e}') for e in ('details > summary', 'p'))
        assert ask(fold, size) < .9*ask(text, size)

COVERS = """const box = e => e.getBoundingClientRect(), range = document.createRange(), covers = (b, r) =>
        r.width && r.right > b.left+1 && r.left < b.right-1 && r.bottom > b.top+1 && r.top < b.bottom-1,
        buttons = [...document.querySelectorAll('article .copybtn')].filter(b => b.checkVisibility());
    const found = buttons.filter(b => { const pre = b.parentElement.querySelector('pre'); pre.scrollLeft = 1e4;
        range.selectNodeContents(pre); return [...range.getClientRects()].some(r => covers(box(b), r)) });
    return [buttons.length, found.map(b => b.parentElement.textContent.slice(0, 90))]"""

@needs_browser
def test_the_copy_button_leaves_code_to_read(browser, site):
    "On a phone, where it is always seen: at the end of a line that is scrolled there it covers nothing."
    with phone(browser, site/'lab.html'):
        buttons,covered = browser.execute_script(COVERS)
        assert buttons > 10 and not covered

VISIBLE = 'const r = arguments[0].getBoundingClientRect(); return r.right > 0 && r.left < innerWidth && r.width > 0'

@needs_browser
@pytest.mark.parametrize('fits, seen, page, kind', (('gallery', '.cell_output table', 'catalog', ':has(table)'),
    ('soft', '.cell_input pre', 'soft', '.cell_input pre'), ('soft', 'div.math', 'ramp', 'div.math')),
    ids=['table', 'code', 'equation'])
def test_what_is_too_wide_says_so(browser, site, fits, seen, page, kind):
    "A table, code or equation fades where it goes on, until one has scrolled to its end; what fits does not."
    with screen(browser, site/f'{fits}.html'):
        time.sleep(.3)                                                  # for an observer that would find one
        assert every(browser, seen) and not every(browser, '.goes-on')
    with phone(browser, site/f'{page}.html'):
        wide = wait(browser, lambda: every(browser, f'{kind}.goes-on'), f'{kind} to be too wide')[0]
        browser.execute_script('arguments[0].scrollLeft = 9999', wide)
        wait(browser, lambda: 'goes-on' not in wide.get_attribute('class'), 'its end')

@needs_browser
@pytest.mark.parametrize('screen', (screen, phone))
def test_a_signature_ends_its_box(browser, site, screen):
    "The link behind it, which is seen when it is pointed at, stands in its last line."
    below = """return [...document.querySelectorAll('dl.py > dt .headerlink')].filter(e => e.checkVisibility()
        && e.getBoundingClientRect().top > e.previousElementSibling.getBoundingClientRect().bottom - 4).length"""
    for page in ('soft', 'closest', 'fake_quantize'):
        with screen(browser, site/f'{page}.html'): assert browser.execute_script(below) == 0, page

@needs_browser
def test_a_report_keeps_its_columns(browser, site):
    "One printed line is one line on the page, and it fits the page beside the contents."
    lines = """return [...document.querySelectorAll('pre.columns')].map(e => {
        const style = getComputedStyle(e), px = k => parseFloat(style[k]);
        const high = e.clientHeight-px('paddingTop')-px('paddingBottom');
        return [high/px('lineHeight'), e.textContent.trimEnd().split('\\n').length, e.scrollWidth-e.clientWidth] })"""
    with screen(browser, site/'residual.html'):
        found = browser.execute_script(lines)
        assert len(found) > 1
        for shown,printed,over in found: assert abs(shown-printed) < 1 and over <= 0, found

COPY = """const theme = arguments[0]; document.body.dataset.theme = theme;
    const channel = v => (v /= 255) <= .04045 ? v/12.92 : ((v+.055)/1.055)**2.4,
        light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(channel).reduce(
            (sum, c, i) => sum + c*[.2126, .7152, .0722][i], 0),
        both = style => [style.color, style.backgroundColor].map(light).sort((a, b) => b - a),
        ratio = ([a, b]) => (a+.05)/(b+.05);
    return [...document.querySelectorAll('button.copybtn')].filter(b => b.checkVisibility()).map(b => {
        const style = getComputedStyle(b);
        return style.opacity*ratio(both(style)) })"""

@needs_browser
@pytest.mark.parametrize('theme', ('light', 'dark'))
def test_a_copy_button_on_a_phone(browser, site, theme):
    "It stands out in both themes, as nothing points at it there."
    with phone(browser, site/'soft.html'):
        browser.execute_script(OPEN)
        found = browser.execute_script(COPY, theme)
        assert len(found) > 10 and min(found) >= 3

@needs_browser
def test_a_long_name_breaks_between_its_words(browser, site):
    "On a phone a name that is wider than its column breaks behind a dot or a stroke, not within a word."
    breaks = """return [...document.querySelectorAll('td:first-child code .pre')].flatMap(name => {
        const range = document.createRange(), tops = [];
        const walk = document.createTreeWalker(name, NodeFilter.SHOW_TEXT);
        for (let n; n = walk.nextNode();) for (let i = 0; i < n.length; i++) {
            range.setStart(n, i); range.setEnd(n, i+1);
            tops.push([range.getBoundingClientRect().top, n.data[i]]) }
        return tops.slice(1).flatMap(([top], i) => top > tops[i][0] + 4 ? [tops[i][1]] : []) })"""
    with phone(browser, site/'compat.html'):
        found = browser.execute_script(breaks)
        assert len(found) > 4 and {*found} <= set('._')

SETTERS = sorted(slug(nb) for nb in NBS if re.search(r'<span title=\\"(?!now=)[\w.-]+=', nb.read_text('utf-8')))

@needs_browser
@pytest.mark.parametrize('page', SETTERS)
def test_sentences_set_players(browser, site, page):
    "Each that says a number sets it, in the player that stands before it or in the next one."
    with screen(browser, site/f'{page}.html', height=1400):
        links = every(browser, '[data-set]')
        assert links
        for link in links:
            browser.execute_script('arguments[0].click()', link)
            for setting in link.get_attribute('data-set').split('&'):
                name,want = setting.replace('_', ' ', setting.partition('=')[0].count('_')).split('=')
                said = browser.execute_script(SAID, name)
                assert want in said, (setting, said)

SAID = """const [name] = arguments, find = what => [...document.querySelectorAll(what)];
    const box = {hard: '[data-hard]', anneal: '[data-anneal]'}[name];
    return box ? find(box).map(e => e.checked ? 'on' : 'off') :
        find(`[aria-label="${name}"], [aria-label="${name} estimator"]`).map(
            e => e.options ? e.options[e.selectedIndex].text : e.nextElementSibling.textContent)"""

@needs_browser
def test_small_pictures_play(browser, site):
    "Six a row; each leads to its page, moves while the mouse is on it, and goes back."
    from shok_nb.catalog import catalog
    with screen(browser, site/'gallery.html'):
        tiles = every(browser, '[data-tile]')
        first = tiles[0].location['y']
        assert len(tiles) == len(catalog) and sum(t.location['y'] == first for t in tiles) == 6
        soft = next(t for t in tiles if t.text.startswith('soft_round\n') or t.text == 'soft_round')
        assert soft.get_attribute('href').endswith('/soft.html')
        def drawn(): return find(soft, '[data-y]').get_attribute('d')
        rest = drawn()
        browser.execute_script(POINT, soft, 'pointerenter')
        wait(browser, lambda: drawn() != rest, 'the picture to move')
        assert find(soft, '[data-now]').text.startswith('alpha ')
        browser.execute_script(POINT, soft, 'pointerleave')
        wait(browser, lambda: not find(soft, '[data-now]').text, 'the picture to rest')
    assert not errors(browser)

POINT = 'arguments[0].dispatchEvent(new PointerEvent(arguments[1], {pointerType: "mouse"}))'
