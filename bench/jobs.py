"""The jobs of a study: rows of a file of json, each made once, by two processes or as many as are wanted."""
import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context


def names_of(page, ids):
    "What these cells of a page define, its pictures unseen."
    os.environ['MPLBACKEND'] = 'agg'
    cells,found = {c['id']: ''.join(c['source']) for c in json.loads(page.read_text('utf-8'))['cells']},{}
    for i in ids: exec(cells[i], found)
    return found

def run(told, table, row_of, jobs, fields, *, workers=2, **versions):
    """Make the rows that `table` lacks: `row_of(*job)` returns a dict whose `fields` are the job. Rows stand in the
    order of the jobs, one on a line. `told` is the help."""
    argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = json.loads(table.read_text('utf-8'))['rows'] if table.exists() else []
    places = {job: i for i,job in enumerate(jobs)}
    def place(row): return places[tuple(row[k] for k in fields)]
    done = {place(row) for row in rows}
    todo = [job for job in jobs if places[job] not in done]
    with ProcessPoolExecutor(workers, get_context('spawn')) as pool:
        for n,found in enumerate(as_completed([pool.submit(row_of, *job) for job in todo]), 1):
            rows.append(found.result())
            print(f'{n}/{len(todo)}', *(rows[-1][k] for k in fields), flush=True)
            lines = ',\n'.join(json.dumps(row) for row in sorted(rows, key=place))
            table.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n', 'utf-8')
