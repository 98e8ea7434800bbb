"""Formulas without a script or a CDN: while the site is built, KaTeX draws them in V8 (mini-racer). A page has what it
made, in HTML for the eye and in MathML for screen readers; the fonts are those of _static/katex."""
import functools
import re
from pathlib import Path
from docutils import nodes
from sphinx.util.logging import getLogger


@functools.cache
def _engine():
    from py_mini_racer import MiniRacer
    js = MiniRacer()
    js.eval((Path(__file__).with_name('katex')/'katex.min.js').read_text('utf-8'))
    return js

@functools.cache
def drawn(tex, display=False):
    "A formula in HTML, on a line of its own if `display`. Raises what KaTeX says of a wrong one."
    made = _engine().call('katex.renderToString', tex.strip(), dict(displayMode=display, strict='error'))
    return re.sub('<annotation.*?</annotation>', '', made, flags=re.S)     # TeX, which a search would find once more

def draw(app, doctree):
    "Each formula when its page is read: Sphinx writes in forks of a process that may hold no threads of V8."
    for n in doctree.findall(lambda n: isinstance(n, (nodes.math, nodes.math_block))):
        try: n['drawn'] = drawn(n.astext(), isinstance(n, nodes.math_block))
        except Exception as e: getLogger(__name__).warning(f'{n.astext()}: {e}'.partition('\n')[0], location=n)

def _visit(self, node, tag):
    start = self.starttag(node, tag, '', CLASS='math notranslate nohighlight')
    self.body.append(start + node.get('drawn', self.encode(node.astext())) + f'</{tag}>')
    raise nodes.SkipNode

def _inline(self, node): _visit(self, node, 'span')
def _block(self, node): _visit(self, node, 'div')

def setup(app):
    app.add_html_math_renderer('katex', (_inline, None), (_block, None))
    app.add_css_file('katex/katex.min.css')
    app.connect('doctree-read', draw)
    return dict(version='2', parallel_read_safe=True, parallel_write_safe=True)
