"""Sphinx extension: what Sphinx makes again for each page or block is made once; the pages are the same."""
import functools
from pygments.lexers.python import PythonLexer
from sphinx import addnodes
from sphinx.environment.adapters import toctree
from sphinx.highlighting import PygmentsBridge
from sphinx.search.en import SearchEnglish


@functools.cache
def without_headings(toc):
    "The contents of a page as the menu shows them: its title and the pages below it."
    short = toc.deepcopy()
    for top in short.children:
        if len(top) < 2: continue
        if below := [*top.findall(addnodes.toctree)]: top[1][:] = below
        else: top.pop(1)
    return short

def lean_menu():
    "The menu copies the headings of all pages for each page, and then drops them: they are dropped first."
    entry = toctree._toctree_standard_entry
    def lean(title, ref, maxdepth, toc, *rest): return entry(title, ref, maxdepth, without_headings(toc), *rest)
    toctree._toctree_standard_entry = lean

def one_formatter():
    "A formatter for all blocks of code that ask for the same one."
    new,made = PygmentsBridge.get_formatter,{}
    def formatter(self, **kwargs):
        key = self.formatter,repr((kwargs, self.formatter_args))
        if key not in made: made[key] = new(self, **kwargs)
        return made[key]
    PygmentsBridge.get_formatter = formatter

def setup(app):
    lean_menu()
    one_formatter()
    SearchEnglish.stem = functools.cache(SearchEnglish.stem)
    app.add_lexer('ipython3', PythonLexer)                  # no cell that readers see has a magic command
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
