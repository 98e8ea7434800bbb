"""Runs in the kernel of each page: a matplotlib figure becomes inline SVG that follows the page from light to dark.

Black takes the colour of the text and white that of the page; photos and all other colours stay as they are."""
import hashlib
import io
import re

INK = 'currentColor'
COLOURS = {
    '#000000': INK,
    '#ffffff': 'var(--color-background-primary, #fff)',
    '#cccccc': 'var(--color-background-border, #ccc)',
}
LIMIT = 400_000

def svg(fig):
    "`fig` as one `<svg>` element, or None (a PNG is shown instead) where that would be large."
    import matplotlib as mpl
    out = io.StringIO()
    with mpl.rc_context({'svg.hashsalt': 'shok_nb', 'svg.fonttype': 'path'}):
        fig.savefig(out, format='svg', bbox_inches='tight', facecolor='none', metadata=dict(Date=None))
    s = out.getvalue()
    if len(s) > LIMIT: return
    s = re.sub(r'<metadata>.*?</metadata>', '', s[s.index('<svg'):], flags=re.S)
    for old,new in COLOURS.items(): s = s.replace(old, new)
    s = s.replace('*{stroke-', 'svg.figure *{stroke-')                 # or it styles every other drawing of the page
    uid = hashlib.sha1(s.encode()).hexdigest()[:8]                     # ids must not meet those of another figure
    s = re.sub(r'(\bid="|href="#|url\(#)', rf'\g<1>f{uid}-', s)
    titles = [t for t in (fig.get_suptitle(), *(a.get_title() for a in fig.axes)) if t]
    label = re.sub('[<>&"]', ' ', '; '.join(titles)) or 'figure'
    return s.replace('<svg ', f'<svg class="figure" role="img" aria-label="{label}" fill="{INK}" ', 1)

def install():
    from IPython import get_ipython  # for the base class, as the inline backend takes back what is set for Figure
    get_ipython().display_formatter.formatters['text/html'].for_type_by_name('matplotlib.figure', 'FigureBase', svg)
