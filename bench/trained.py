"""Two networks of torchvision, trained on scikit-learn's digits: accuracy without training beside that of training
through the rounding.

    make .venv-zoo/ready && .venv-zoo/bin/python bench/trained.py

Each network is trained in floats from five seeds. Then it has weights of 3 bits (8 in its first and last layer) and
activations of 8: as calibrated, with the codes of `reconstruct_` from one batch without labels, and trained on through
the rounding, from what was calibrated and from those codes. What is done already is not done again: bench/trained.json
holds a row for each network and seed. A row takes a minute or two on an idle core."""
import copy
import json
import statistics
import time
from pathlib import Path
import torch
from jobs import run
from torch.nn import functional as F
from zoo import torchvision
import shok_nb as R

TABLE = Path(__file__).with_name('trained.json')
NETWORKS = {'shufflenet_v2_x0_5': {}, 'mobilenet_v2': dict(width_mult=.5)}
SEEDS,EPOCHS,FINE,BATCH = range(5),12,3,64      # epochs in floats, and through the rounding
WAYS = 'floats','nearest','reconstructed','trained','reconstructed, trained'

def digits():
    "Images of 32 x 32 in three channels, and labels: half to train, half to test."
    from sklearn.datasets import load_digits
    images,labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)/8-1
    x = F.interpolate(x, 32, mode='bilinear').expand(-1, 3, -1, -1).contiguous()
    y = torch.tensor(labels)
    return (x[::2], y[::2]),(x[1::2], y[1::2])

def train(model, data, epochs, lr, seed):
    "Adam with a rate that falls to nothing."
    x,y = data
    g = torch.Generator().manual_seed(seed)
    each = len(y)//BATCH*BATCH          # a last batch of three would spoil the statistics of the normalizations
    picks = [pick for _ in range(epochs) for pick in torch.randperm(len(y), generator=g)[:each].split(BATCH)]
    opt = torch.optim.Adam(model.parameters(), lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(picks))
    model.train()
    for pick in picks:
        loss = F.cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        slower.step()
    return model.eval()

def accuracy(model, data):
    x,y = data
    with torch.no_grad(): return round(100*(model(x).argmax(1) == y).float().mean().item(), 2)

def row_of(name, seed):
    "Accuracies of all ways for one network, and the seconds that two of them take."
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    learn,test = digits()
    made = torchvision().models.get_model(name, weights=None, num_classes=10, **NETWORKS[name])
    floats = train(made, learn, EPOCHS, 4e-3, seed)
    model,batch = copy.deepcopy(floats),learn[0][:128]
    R.quantize_model_(model, weights=3, activations=8, calibrate=[batch], ends=8)
    found = dict(floats=accuracy(floats, test), nearest=accuracy(model, test))
    fitted,seconds = copy.deepcopy(model),{}
    begun = time.process_time()
    R.reconstruct_(fitted, [batch], teacher=floats)
    seconds['reconstructed'] = time.process_time()-begun
    found['reconstructed'] = accuracy(fitted, test)
    begun = time.process_time()
    found['trained'] = accuracy(train(model, learn, FINE, 5e-4, seed), test)
    seconds['trained'] = time.process_time()-begun
    found['reconstructed, trained'] = accuracy(train(fitted, learn, FINE, 5e-4, seed), test)
    return dict(model=name, seed=seed, accuracy=found, seconds={k: round(v, 1) for k,v in seconds.items()})

def table(rows):
    "Markdown: means over the seeds, and the least and the largest."
    lines = ['| network | '+' | '.join(WAYS)+' |', '|'+'---|'*(1+len(WAYS))]
    for name in dict.fromkeys(r['model'] for r in rows):
        cells = []
        for way in WAYS:
            v = [r['accuracy'][way] for r in rows if r['model'] == name]
            cells.append(f'{statistics.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})')
        lines.append(f'| {name} | '+' | '.join(cells)+' |')
    return '\n'.join(lines)

def main():
    "All rows that are not there yet, and the table."
    versions = {m.__name__: m.__version__.partition('+')[0] for m in (torch, torchvision())}
    jobs = [(name, seed) for name in NETWORKS for seed in SEEDS]
    run(__doc__, TABLE, row_of, jobs, ('model', 'seed'), workers=1, **versions)
    print(table(json.loads(TABLE.read_text('utf-8'))['rows']))

if __name__ == '__main__': main()
