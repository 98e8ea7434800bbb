"""API entries in time: MyST pads an `eval-rst` block with one empty line for each line above it, and MyST-NB
counts ten thousand to a cell, so docutils would step through millions of them."""
from types import SimpleNamespace
from myst_parser.mdit_to_docutils.base import DocutilsRenderer


def setup(app):
    render = DocutilsRenderer.render_restructuredtext
    def shallow(self, token): render(self, SimpleNamespace(content=token.content, map=(0, 1)))
    DocutilsRenderer.render_restructuredtext = shallow
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
