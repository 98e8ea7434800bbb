"""The site: `make docs`. The pages are the notebooks; _ext/literate.py writes them into the source folder, docs/nbs."""
import logging
import os
import sys
from configparser import ConfigParser
from pathlib import Path

sys.modules.setdefault('rfc3987_syntax', None)               # or its grammar takes a second, for a check of nobody's
from nbclient import NotebookClient  # noqa: E402

here = Path(__file__).parent.resolve()
ini = ConfigParser(delimiters=['='], interpolation=None)
ini.read(here.parent/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

project, author, copyright = cfg['lib_name'], cfg['author'], cfg['author']
version = release = cfg['version']
sys.path[:0] = paths = [str(here/'_ext'), str(here.parent)]
os.environ['PYTHONPATH'] = os.pathsep.join(paths)             # for the kernels that run the pages
os.environ['IN_TEST'] = '1'                                  # nbdev_export() in a page does nothing
logging.getLogger('traitlets').setLevel('WARNING')
NotebookClient._extra_arguments_default = lambda self: ['--log-level=ERROR']  # or each kernel warns that it uses TCP

extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.intersphinx', 'sphinx_copybutton']
extensions += ['reference', 'literate', 'finding', 'offline_math', 'shallow_rst', 'made_once']    # of _ext
literate_package = cfg['lib_path']
literate_git_url, literate_branch = cfg['git_url'], cfg['branch']
literate_folders = dict(                                     # the groups of the menu, in its order: folders of nbs
    start='Start',
    estimators='Estimators',
    grids='Grids',
    training='Training',
    quantization='Quantize tensors',
    networks='Quantize models',
    low_precision='Train in few bits',
    deployment='Deploy',
    post_training='Without training',
    studies='Studies',
    show='Pictures and sliders',
    reference='Reference',
    engine='How it is made',
)
# Pages that tell how something is made: they stand in the last group.
literate_inside = ('layers', 'flow', 'operations', 'attention', 'foreign_layers', 'report', 'channels',
    'integer_layers', 'integer_operations')
literate_titles = dict(                                      # in the menu: the words that people look for
    ewgs='Gradient scaling (EWGS)',
    surrogates='DSQ and clipped rounding',
    spikes='Spikes: surrogate gradients',
    dither='Noise and dither',
    neighbours='ReinMax and SGA (Gumbel)',
    fake_quantize='Fake quantization, fixed point',
    quantizer='Quantizer: bits, axis, block',
    operations='Between layers: additions',
    learned='Learned rounding (AdaRound)',
    fsq='Finite scalar quantization (FSQ)',
    try_it='Try it: two side by side',
    widgets='Sliders: tune',
)
literate_extras = dict(                                      # what needs them in the code of a page; the last has all
    widgets='matplotlib ipywidgets fastcore PIL shok_nb.show shok_nb.demo plots widgets try_it lab demo',
    onnx='onnx onnxscript onnxruntime onnx_session to_onnx',
    lessons='sklearn',
)
literate_more = dict(reference=['api'])                      # pages of a folder that no notebook makes

nb_execution_mode = 'cache'
nb_execution_cache_path = str(here/'_build'/'pages')          # where `make docs` has run them, a few at a time
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True
copybutton_selector = 'div.highlight pre:not(.cell_output pre)'    # code, not what it prints
nb_render_markdown_format = 'gfm'                           # tables in Markdown outputs
nb_mime_priority_overrides = [('html', 'text/html', 1)]     # a widget shows its still twin, a figure its inline SVG
nb_ipywidgets_js = {}                                       # nothing from a CDN
suppress_warnings = ['mystnb.unknown_mime_type']            # the widget twin of what is shown as HTML
myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'deflist', 'attrs_inline', 'attrs_block']
myst_heading_anchors = 3

autodoc_typehints = 'description'
autodoc_preserve_defaults = True                            # a default as it is written
add_module_names = False
intersphinx_mapping = {k: (url, str(here/'inv'/f'{k}.inv')) for k,url in dict(   # a few names kept here: no network
    python='https://docs.python.org/3', torch='https://docs.pytorch.org/docs/stable').items()}

html_theme = 'furo'
html_title = f'{project} {version}'                           # beside the logo, on every page
pygments_dark_style = 'github-dark'
html_logo = html_favicon = '_static/logo.svg'
html_math_renderer = 'katex'
html_static_path = ['_static']
html_css_files,html_js_files = ['site.css'],['site.js']
html_search_scorer = str(here/'_static'/'scorer.js')
html_copy_source = html_show_sourcelink = False
html_theme_options = dict(navigation_with_keys=False,
    light_css_variables={f'color-brand-{k}': '#2f6fb0' for k in ('primary', 'content', 'visited')},
    dark_css_variables={f'color-brand-{k}': '#7fb2e5' for k in ('primary', 'content', 'visited')})
