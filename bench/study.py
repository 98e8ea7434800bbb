"""Runs the studies: every row of the catalog in every way, and writes the file of results. `make study` does this.

It resumes: records of the present version are not run again, so it may be stopped at any time. Two processes with one
thread each; `--only lattice weights` or `--only 1 3` chooses studies, `--quick` is a miniature that is printed and not
written."""
import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before torch is imported, here and in the workers
import torch  # noqa: E402
from shok_nb.catalog import catalog  # noqa: E402
from shok_nb.studies.harness import _RESULTS, _jobs, read_results, run_study, write_results  # noqa: E402
from shok_nb.studies.scores import studies  # noqa: E402


def chosen_by(words):
    "Studies by their names, or by their places in the list, from 1. No word is all of them."
    names = [s.name for s in studies()]
    places = {str(n): name for n,name in enumerate(names, 1)}
    return studies(*(places.get(w, w) for w in words))

def wanted(study, row):
    "The places that the records of one job have: estimator and way."
    return {(estimator, way) for estimator,way,_ in _jobs(study, [row] if row else [], False)}

def jobs(chosen, there):
    "`(study, row)` of which a record is missing; a row of None stands for the baselines."
    done = {(r['study'], r['estimator'], r['way']) for r in there
        if r['version'] == next((s.version for s in chosen if s.name == r['study']), None)}
    pairs = ((s, row) for s in chosen for row in (None, *catalog))
    return [(s, row) for s,row in pairs if any((s.name, *place) not in done for place in wanted(s, row))]

def start():
    "Of a worker."
    torch.set_num_threads(1)

def work(name, estimator, quick):
    "One job, by names: what a worker is sent has to be pickled."
    study, = studies(name)
    rows = [r for r in catalog if r.name == estimator]
    return run_study(study, rows, quick=quick)

def line(records, n, count, begin):
    "How far it is, what came last, and how long the rest may take."
    best = max((r for r in records if 'failed' not in r), key=lambda r: r['score'], default=None)
    said = records[0]['failed'] if best is None else '{way} {score:.2f} [{low:.2f}, {high:.2f}]'.format(**best)
    passed = time.time()-begin
    left = passed/n*(count-n)
    bar = '#'*(20*n//count)
    who = f"{records[0]['study']} {records[0]['estimator'] or 'baselines'}"
    return f'[{bar:20}] {n}/{count}, {passed/60:.1f} min, {left/60:.1f} to go: {who}: {said}'

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', default=[], metavar='STUDY', help='names of studies, or their places from 1')
    p.add_argument('--quick', action='store_true', help='a miniature, printed and not written')
    args = p.parse_args()
    chosen = chosen_by(args.only)
    by_name = {s.name: s for s in chosen}
    there = [] if args.quick else read_results()
    todo = [(s.name, row.name if row else '') for s,row in jobs(chosen, there)]
    print(f"{len(todo)} jobs of {', '.join(by_name)}", flush=True)
    begin = time.time()
    with ProcessPoolExecutor(2, get_context('spawn'), start) as pool:
        running = [pool.submit(work, *job, args.quick) for job in todo]
        for n,done in enumerate(as_completed(running), 1):
            records = done.result()
            if not records: continue                                    # a study without baselines
            if not args.quick: write_results(by_name[records[0]['study']], records, _RESULTS)
            print(line(records, n, len(todo), begin), flush=True)
    print(f'{(time.time()-begin)/60:.1f} min')

if __name__ == '__main__': main()
