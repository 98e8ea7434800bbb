"""Sphinx extension: the search finds pages by what they say, and orders them by how much they say of it.

Code, what it prints, and players are no text. A word counts for more in a heading, and most in a title, in the menu,
in a comment `<!-- search: ... -->`, and where the glossary sends those who ask for it; two words side by side count as
a pair. The weight of a word on a page is that of BM25
(Robertson and Zaragoza 2009): rare words and short pages weigh more. _static/scorer.js adds the weights up."""
import functools
import math
from collections import Counter
from docutils import nodes
from sphinx.search import IndexBuilder, WordCollector, WordStore
from sphinx.search.en import SearchEnglish

TITLE,HEADING = 8,3           # what a word there counts
ONCE,LENGTH = 1.2,.6          # BM25's k and b
ENGLISH = SearchEnglish({})
FEW = 2                       # a pair that stands in no heading, and on no page more often than this, is left out

class Words(WordCollector):
    "The words of a page in order, in runs: of each text, heading and title."
    def __init__(self, document, lang):
        super().__init__(document, lang)
        self.runs = []

    def dispatch_visit(self, node):
        if isinstance(node, (nodes.literal_block, nodes.raw)): raise nodes.SkipNode
        before = len(self.found_words)
        super().dispatch_visit(node)
        said = [self.lang.split(w) for w in self.found_words[before:]]
        self.found_words[before:] = [w for run in said for w in run]
        if isinstance(node, nodes.meta): self.runs += [(run, TITLE) for run in said]
        elif isinstance(node, nodes.Text): self.runs.append((self.found_words[before:], weight(node)))

def weight(node):
    "What the words of a text count."
    head = node
    while head and not isinstance(head, nodes.title): head = head.parent
    if head is None: return 1
    return HEADING if head.parent.parent and isinstance(head.parent.parent, nodes.section) else TITLE

@functools.cache
def stem(lang, word): return lang.stem(word.lower())

def counted(doctree, lang):
    "How often a page says each word and each pair, and which of the pairs are in its headings."
    words = Words(doctree, lang)
    doctree.walk(words)
    counts,heads = Counter(),set()
    for said,n in words.runs:
        said = [stem(lang, w) for w in said]
        pairs = [f'{a} {b}' for a,b in zip(said, said[1:])]
        for w in said + pairs: counts[w] += n
        if n > 1: heads |= {*pairs}
    return counts,heads

def collect(app, doctree):
    app.env.finding[app.env.docname] = counted(doctree, ENGLISH)

def weights(pages):
    "Of each word: the weight on each page that has it, in hundredths. `pages` is what `counted` says of each."
    heads = set().union(*(h for _,h in pages.values()))
    length = {p: sum(n for w,n in c.items() if ' ' not in w) or 1 for p,(c,_) in pages.items()}
    mean = sum(length.values())/max(len(length), 1)
    found = {}
    for p,(counts,_) in pages.items():
        for w,n in counts.items(): found.setdefault(w, {})[p] = n
    def kept(w, on): return ' ' not in w or w in heads or max(on.values()) > FEW
    def one(p, n, rare):
        least = ONCE*(1-LENGTH+LENGTH*length[p]/mean)
        return round(100*rare*n*(ONCE+1)/(n+least))
    def rarity(on): return math.log(1+(len(pages)-len(on)+.5)/(len(on)+.5))
    return {w: {p: one(p, n, rarity(on)) for p,n in on.items()} for w,on in found.items() if kept(w, on)}

def setup(app):
    freeze = IndexBuilder.freeze
    def with_weights(self):
        frozen = freeze(self)
        place = {n: i for i,n in enumerate(frozen['docnames'])}
        pages = {p: c for p,c in app.env.finding.items() if p in place}
        heavy = {w: {place[p]: n for p,n in on.items()} for w,on in weights(pages).items()}
        return frozen | dict(weights=heavy)
    def texts(self, doctree):
        words = Words(doctree, self.lang)
        doctree.walk(words)
        return WordStore(words.found_words, words.found_titles, words.found_title_words)
    IndexBuilder.freeze,IndexBuilder._word_collector = with_weights,texts
    def start(app, env, docnames): env.finding = getattr(env, 'finding', {})
    def purge(app, env, docname): getattr(env, 'finding', {}).pop(docname, None)
    def merge(app, env, docnames, other): env.finding.update({d: other.finding[d] for d in docnames})
    app.connect('env-before-read-docs', start)
    app.connect('env-purge-doc', purge)
    app.connect('env-merge-info', merge)
    app.connect('doctree-read', collect, priority=900)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
