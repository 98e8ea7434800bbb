"""The colours of an error in a line, as figures.py shows it: what was raised stands out, and its message is text,
whatever it says. The lexer of tracebacks would find kinds of errors in addresses, and none beside a bracket."""
from pygments.lexer import RegexLexer
from pygments.token import Name, Text


class Raised(RegexLexer):
    tokens = dict(root=[(r'\A[\w.]+(?=:)', Name.Exception), (r'.+|\n', Text)])

def setup(app):
    app.add_lexer('raised', Raised)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
