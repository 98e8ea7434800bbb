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
extensions += ['reference', 'literate', 'finding', 'offline_math', 'shallow_rst', 'made_once',
    'as_markdown', 'raised']    # of _ext
literate_package = cfg['lib_path']
literate_git_url, literate_branch = cfg['git_url'], cfg['branch']
literate_folders = dict(                                     # the groups of the menu, in its order: folders of nbs
    start='Start',
    estimators='Estimators',
    grids='Number formats',
    training='Training',
    quantization='Quantize tensors',
    networks='Quantize models',
    low_precision='Train in few bits',
    deployment='Deploy',
    chips='For chips',                                       # its page stands in Deploy
    post_training='Without training',
    studies='Benchmarks',
    show='Sliders and pictures',
    reference='Reference',
    engine='How it is made',
)
literate_places = dict(                                      # pages of other folders; `...` is the rest of its own
    start=['first_network', 'which', 'straight_through_fails', 'try_it', ...],
    deployment=[..., 'hardware', 'everywhere'],
    engine=[..., 'layers', 'flow', 'forwards', 'operations', 'attention', 'foreign_layers', 'channels',
        'integer_layers', 'integer_operations'],
    studies=[..., 'harness'],
)
literate_guidance = dict(                                    # at the head of a group
    start=(
        'New here? Begin with the [first network](first_network.ipynb): it takes five minutes. If you have a '
        'task, see [Which one?](which.ipynb) for the estimator and [Recipes](recipes.ipynb) for the code. If '
        'something does not train, look under [When straight-through fails](straight_through_fails.ipynb).'),
    estimators=(
        'Each page has one idea, a player for its parameters, and what can go wrong. Most people need two of '
        'them: [straight-through](ste.ipynb), which needs no parameter, and [soft rounding](soft.ipynb), whose '
        'slope you choose. To compare any two, use [Try it](try_it.ipynb).'),
    grids=(
        'Estimators round to integers; here they round to other numbers. Take [floats](floats.ipynb) for FP8 and '
        'FP4, [blocks](blocks.ipynb) for MX, NVFP4 and int4 in groups, [codebooks](codebooks.ipynb) for '
        'levels of your own, and [fixed point](fixed_point.ipynb) for chips '
        'without floats. [Files](files.ipynb) writes them for other programs.'),
    training=(
        '[Schedules](schedules.ipynb) sharpen a soft curve while you train. [Layers](nn.ipynb) put rounding into a '
        'model, [rounded weights](rounded_weights.ipynb) are put on and taken off again, and '
        '[`through_round`](replace.ipynb) goes into code that is not yours. [Integers '
        'in a design](design.ipynb) finds integer parameters of anything that has a cost.'),
    quantization=(
        'A quantizer for one tensor: [`fake_quantize`](fake_quantize.ipynb) is the operation, a '
        '[`Quantizer`](quantizer.ipynb) the layer that calibrates and learns its scale. For a whole network, use '
        '[`quantize_model_`](models.ipynb) instead. For images or sounds as whole numbers, see '
        '[Tokenizers](tokenizers.ipynb).'),
    networks=(
        '[`quantize_model_`](models.ipynb) quantizes a network in one call; you then train it with your own loop, '
        'or not at all. A network that you did not write has [a page of its own](foreign.ipynb). Next comes '
        '[deployment](deploy.ipynb).'),
    low_precision=(
        'To run the training itself in FP8, MX or NVFP4, on any machine: [the lesson](four_bits.ipynb) trains a '
        'language model, [products](products.ipynb) has the recipes, and [stored weights](stored.ipynb) the optimizer '
        'for weights kept in bfloat16. [`same_grid`](served.ipynb) tells whether a file for another program holds what '
        'was trained, and [`coded_sizes`](sizes.ipynb) how many bytes it takes when compressed.'),
    deployment=(
        '[`deploy_`](deploy.ipynb) turns a trained network into one of integers, and '
        '[`to_onnx`](runtime.ipynb) writes it to a file. ONNX Runtime then computes the same integers as torch. For a '
        'chip, [`to_c`](hardware.ipynb) writes them as C, `to_qonnx` a model for FPGA tools, and '
        '[`accumulator_bits`](accumulators.ipynb) says how wide a sum is.'),
    post_training=(
        'No training loop, only a few hundred inputs. Begin with [the overview](without_training.ipynb), which '
        'compares the methods. [`reconstruct_`](reconstruct.ipynb) fits each layer to the float network; '
        '[equalizing](equalize.ipynb) and [rotating](rotate.ipynb) remove outliers first.'),
    studies=(
        'Every estimator on tasks whose best possible result is known: 0 is plain rounding, 1 the best possible. '
        '[Which one?](which.ipynb) has the advice that follows, [All scores](scores.ipynb) the table. `make '
        'study` repeats each of them.'),
    show=(
        '[`tune`](widgets.ipynb) gives any function sliders, in a notebook and on a page. [Measure an '
        'estimator](lab.ipynb) tells how good its gradient is.'),
    reference=(
        '[The glossary](glossary.ipynb) explains the words, [the catalog](catalog.ipynb) lists what each '
        'estimator claims, and [API](api.md) has every function. [Speed](speed.ipynb) is measured against a copy.'),
    engine=(
        'For those who change the package. [What an estimator is](core.ipynb) comes first; the rest can be read '
        'in any order.'),
)
literate_titles = dict(                                      # in the menu: the words that people look for
    ewgs='Gradient scaling (EWGS)',
    fixed_point='Fixed point: ap_fixed',
    surrogates='DSQ and clipped rounding',
    spikes='Spikes: surrogate gradients',
    dither='Noise and dither',
    neighbours='ReinMax and SGA (Gumbel)',
    fake_quantize='Fake quantization, fixed point',
    quantizer='Quantizer: bits, axis, block',
    operations='Between layers: additions',
    learned='Learned rounding (AdaRound)',
    fsq='Finite scalar quantization (FSQ)',
    tokenizers='Tokenizers: FSQ, LFQ, BSQ, VQ',
    accumulators='Accumulators: width, overflow',
    hardware='For hardware',
    everywhere='Codec that decodes everywhere',
    measurements='Speed: the table',
    few_levels='Ternary, binary, no zero',
    try_it='Try it: two side by side',
    widgets='Sliders: tune',
)
literate_extras = dict(                                      # what needs them in the code of a page; the last has all
    widgets='matplotlib ipywidgets fastcore PIL shok_nb.show shok_nb.studies shok_nb.demo '
        'plots widgets try_it lab demo',
    onnx='onnx onnxscript onnxruntime onnx_session to_onnx',
    lessons='sklearn',
)
literate_more = dict(reference=['api'])                      # pages of a folder that no notebook makes

nb_execution_mode = 'cache'
nb_execution_cache_path = str(here/'_build'/'pages')          # where `make docs` has run them, a few at a time
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_render_error_lexer = 'raised'
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
