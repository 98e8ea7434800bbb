"""Runs in the kernel of each page: a matplotlib figure becomes inline SVG that follows the page from light to dark, and
links of a Markdown output lead to pages. Where a cell must fail, one line says with what.

Black takes the colour of the text, a dark grey that of a quiet one, white that of the page. Photos and all other
colours stay as they are."""
import hashlib
import html
import io
import re
import weakref
from literate import relink, slug, to_page

INK = 'currentColor'
COLOURS = {
    '#000000': INK,
    '#ffffff': 'var(--color-background-primary, #fff)',
    '#cccccc': 'var(--color-background-border, #ccc)',
}
GREY = r'#([2-5].)\1{2}(?=[;"])'      # a dark one: on a dark page nothing would be seen of it
LIMIT = 400_000
_large = weakref.WeakSet()     # figures whose SVG is longer

_said = []     # what `#| fig-alt` says of the figures of the next cell; the end of a cell takes one off

def alt(text): _said[:] = ['', text]

_short = []    # set by the cell before one that must fail

def error():
    "The next cell fails: the page shows its error in a line."
    _short[:] = [False, True]

def _raised(shell, kind, error, traceback, tb_offset=None):
    "Show what a cell raised."
    if _short and _short[-1]: shell._showtraceback(kind, error, [f'{kind.__name__}: {error}'])
    else: shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

def _shared(labels):
    "`alpha = 0`, `alpha = 2` becomes `alpha = 0, 2`."
    heads = {l.partition(' = ')[0] for l in labels}
    if len(labels) < 2 or len(heads) > 1 or not all(' = ' in l for l in labels): return ', '.join(labels)
    return f"{heads.pop()} = {', '.join(l.partition(' = ')[2] for l in labels)}"

def _lines(legend): return _shared([t.get_text() for t in legend.get_texts()]) if legend else ''

def _panel(ax):
    "Title, axes and legend of one panel, in words."
    over = ' over '.join(t for t in (ax.get_ylabel(), ax.get_xlabel()) if t)
    return ': '.join(t for t in (ax.get_title(), over, _lines(ax.get_legend())) if t)

def label(fig):
    "What is seen, for those who do not see it: `#| fig-alt`, or else all that is written in the figure."
    if _said: return _said[-1]
    parts = [fig.get_suptitle(), *map(_lines, fig.legends), *map(_panel, fig.axes)]
    return '; '.join(dict.fromkeys(p for p in parts if p)) or f'{len(fig.axes)} panels without words'

def svg(fig):
    "`fig` as one `<svg>` element, or None (a PNG is shown instead) where that would be large."
    import matplotlib as mpl
    out,said = io.StringIO(),html.escape(label(fig))
    with mpl.rc_context({'svg.hashsalt': 'shok_nb', 'svg.fonttype': 'path'}):
        fig.savefig(out, format='svg', bbox_inches='tight', facecolor='none', metadata=dict(Date=None))
    s = out.getvalue()
    if len(s) > LIMIT: return _large.add(fig)
    s = re.sub(r'<metadata>.*?</metadata>', '', s[s.index('<svg'):], flags=re.S)
    for old,new in COLOURS.items(): s = s.replace(old, new)
    s = re.sub(GREY, r'var(--color-foreground-secondary, \g<0>)', s)
    s = re.sub(r'(<style[^>]*>)\s*\*\s*{', r'\1.figure *{', s)          # in a page, `*` would be all that is on it
    uid = hashlib.sha1(s.encode()).hexdigest()[:8]                     # ids must not meet those of another figure
    s = re.sub(r'(\bid="|href="#|url\(#)', rf'\g<1>f{uid}-', s)
    wide = re.search(r'\bwidth="([\d.]+pt)"', s)[1]                    # a phone scrolls it
    head = f'class="figure" role="img" aria-label="{said}" style="--wide: {wide}" fill="{INK}"'
    return s.replace('<svg ', f'<svg {head} ', 1)

def png(fig):
    "`fig` as a PNG, if its SVG is not shown. `svg` is asked first."
    from IPython.core.pylabtools import print_figure
    if fig in _large: return print_figure(fig, base64=True)

def relink_html(page):
    "Links to notebooks lead to pages."
    return re.sub(r'href="([\w./-]+)\.ipynb"', lambda m: f'href="{slug(m[1])}.html"', page)

def install():
    from IPython import get_ipython  # for the base class, as the inline backend takes back what is set for Figure
    from matplotlib_inline.config import InlineBackend
    InlineBackend.instance(parent=get_ipython()).figure_formats = set()     # or it draws PNGs that nobody sees
    def after(result):
        for l in (_said, _short): del l[:1]
    get_ipython().events.register('post_run_cell', after)
    get_ipython().set_custom_exc((Exception,), _raised)
    of = get_ipython().display_formatter.formatters
    of['text/html'].for_type_by_name('matplotlib.figure', 'FigureBase', svg)
    of['image/png'].for_type_by_name('matplotlib.figure', 'FigureBase', png)
    of['text/html'].for_type_by_name('IPython.core.display', 'HTML', lambda h: relink_html(h.data))
    of['text/markdown'].for_type_by_name('IPython.core.display', 'Markdown', lambda m: relink(m.data, to_page))
