"""Bits of `seed=` through Dieharder (Robert G. Brown, with Marsaglia's and NIST's tests), in RANDOM.md.

`python bench/random_bits.py` needs the program `dieharder`, which Debian has as a package, and an hour. `--only
seeds` is one way to read the bits, `--quick` four tests. Each way has other neighbours side by side, so that what they
share shows."""
import argparse
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from shok_nb.engine.random import _GOLDEN, _folded, _keys, _times, split_mix

# those that their author calls good, each with the sizes that he gives it; without 203, half of the time
SIZES = {200: range(1, 13), 201: range(2, 6), 202: range(2, 6)}
NUMBERS = 0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 17, 100, 101, 102, 200, 201, 202, 204, 205, 206, 207, 208, 209
TESTS = [(test, size) for test in NUMBERS for size in SIZES.get(test, [0])]
QUICK = [(test, 0) for test in (2, 15, 100, 205)]

def words(at, seed=7, draw=0):
    "Words of streams at these places; each of the three may be an array."
    first,second = _keys(seed, draw, _times)
    return split_mix(at*np.uint64(_GOLDEN) ^ first, second)

def blocks():
    "0, 1, 2 and so on."
    first = np.arange(2**13, dtype=np.uint64)
    return (first + np.uint64(i*len(first)) for i in itertools.count())

def place(i): return np.full(1, i, dtype=np.uint64)

def in_a_row():
    "One stream, in order."
    return (words(b) for b in blocks())

def by_columns():
    "One stream of a matrix with 4096 columns, column by column."
    for column in itertools.count():
        for rows in itertools.islice(blocks(), 64): yield words(rows*np.uint64(2048) + np.uint64(column))

def seeds():
    "Seeds 0, 1, 2 and so on, the first words of each."
    for b in blocks():
        for i in range(4): yield words(place(i), b)

def sparse_seeds():
    "Seeds with three bits set, a word of each, and then the next word."
    bits = [np.uint64(1) << np.uint64(i) for i in range(64)]
    some = np.array([a | b | c for a,b,c in itertools.combinations(bits, 3)])
    return (words(place(i), some) for i in itertools.count())

def draws():
    "A word of each draw of one seed, and then the next word."
    some = np.arange(4096, dtype=np.uint64)
    return (words(place(i), draw=some) for i in itertools.count())

def folded():
    "What `fold_in` makes of one seed and 0, 1, 2 and so on: its lower 32 bits, and those above."
    for b in blocks():
        made = _folded(7, b, _times)
        yield (made & np.uint64(2**32-1)).astype(np.uint32)
        yield (made >> np.uint64(31)).astype(np.uint32)

WAYS = {f.__name__: f for f in (in_a_row, by_columns, seeds, sparse_seeds, draws, folded)}

def feed(way):
    "Writes bits until nobody reads them."
    try:
        for w in WAYS[way](): sys.stdout.buffer.write(w.tobytes())
    except BrokenPipeError: pass

def results(way, test, size):
    "Lines of one test: its name, its parameter, the p-value and what Dieharder says."
    feeding = [sys.executable, __file__, '--feed', way]
    with subprocess.Popen(feeding, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as made:
        asked = ['dieharder', '-g', '200', '-d', str(test), '-n', str(size)]
        out = subprocess.run(asked, stdin=made.stdout, capture_output=True, text=True).stdout
        made.kill()
    lines = [[v.strip() for v in line.split('|')] for line in out.splitlines() if line.count('|') == 5]
    return [(name, n, float(p), said) for name,n,_,_,p,said in lines if name != 'test_name']

def table(found):
    head = ['# Dieharder on the bits of `seed=`', '', 'Written by `python bench/random_bits.py`. P-values of a good '
        'generator are uniform: one result in 100 is called weak, one in a million failed.', '',
        '| read | results | passed | weak | failed | smallest p | largest p |', '|---|---|---|---|---|---|---|']
    for way,rows in found.items():
        said = [r[3] for r in rows]
        n = [said.count(word) for word in ('PASSED', 'WEAK', 'FAILED')]
        ps = [r[2] for r in rows]
        ends = f'{min(ps):.1g} | 1 - {1-max(ps):.1g}'
        head.append(f"| {WAYS[way].__doc__} | {len(rows)} | {' | '.join(map(str, n))} | {ends} |")
    weak = [f'- {way}: {name} {n}, p = {p:.3g}, {said.lower()}' for way,rows in found.items()
        for name,n,p,said in rows if said != 'PASSED']
    return '\n'.join([*head, '', *(['Not passed:', '', *weak, ''] if weak else [])])

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='*', choices=WAYS, default=[*WAYS])
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--jobs', type=int, default=1)
    parser.add_argument('--feed', choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feed: return feed(args.feed)
    found = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for way in args.only:
            made = pool.map(lambda test, way=way: results(way, *test), QUICK if args.quick else TESTS)
            found[way] = [row for rows in made for row in rows]
            text = table(found)
            if not args.quick: Path(__file__).with_name('RANDOM.md').write_text(text)
    print(text)

if __name__ == '__main__': main()
